"""Contents of a run's folder: curves, test results, prepared data, command and recipe."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import yaml

from sbkit.data.audio import split_member
from sbkit.data.delimited import read_delimited
from sbkit.data.manifest import Utterance, replace_data_root
from sbkit.errors import SbkitError
from sbkit.score import utterances
from sbkit.score.estimate import MetricEstimate
from sbkit.score.old_set import OLD, OldSet
from sbkit.score.rates import ErrorRates
from sbkit.score.results import Player, SoundSample
from sbkit.score.run_files import (
    CORPORA,
    EVALUATIONS,
    MANIFESTS,
    METRICS,
    PREPARED,
    RECIPE,
    RESULT,
    TEST_RESULTS,
    TEST_UTTERANCES,
    UTTERANCES,
)
from sbkit.score.utterances import ScoredUtterance
from sbkit.score.weights import AVERAGE_VALUES, BEST_CHECKPOINT, ChosenWeights, average_of
from sbkit.system import untrusted

_MAX_BYTES = 1 << 30  # of a file of a run


@dataclass(eq=False)
class ScoredRun:
    """Scored utterances and their error rates in the same order; utterances without a reference are left out."""

    utterances: list[ScoredUtterance]
    words: ErrorRates = field(init=False)
    characters: ErrorRates = field(init=False)

    def __post_init__(self) -> None:
        self.utterances = [one for one in self.utterances if one.reference.split()]
        self.words = ErrorRates("word")
        self.characters = ErrorRates("character")
        for rates in (self.words, self.characters):
            rates.add([one.id for one in self.utterances], [one.reference for one in self.utterances],
                      [one.hypothesis for one in self.utterances])

    def __len__(self) -> int:
        return len(self.utterances)

    @property
    def hours(self) -> float:
        return sum(one.duration for one in self.utterances) / 3600

    @cached_property
    def edits(self) -> np.ndarray:
        """Wrong words of each utterance, [N] int64."""
        return self.words.edits

    @cached_property
    def lengths(self) -> np.ndarray:
        """Words of each reference, [N] int64."""
        return self.words.lengths

    @cached_property
    def totals(self) -> tuple[int, int]:
        """The total of wrong words and of words."""
        return int(self.edits.sum()), int(self.lengths.sum())

    @cached_property
    def alignments(self) -> list[str]:
        """Each utterance's alignment (see ``edits.align``)."""
        return self.words.alignments()


@dataclass
class RunData:
    """The data in a run's files; what does not exist yet is empty."""

    folder: Path
    run: Path  # the folder of the run, if ``folder`` is that of its evaluation
    steps: list[dict[str, Any]]  # lines within epochs
    epochs: list[dict[str, Any]]  # one per epoch, training and validation together
    starts: list[dict[str, Any]]  # one per start of the run
    results: ScoredRun | None
    prepared: dict[str, Any] | None
    recipe: str
    scored: dict[str, Any] = field(default_factory=dict)  # how an evaluation was made
    tested: dict[str, Any] = field(default_factory=dict)  # the last line about the test set
    stats: dict[str, float] = field(default_factory=dict)  # test results of a task without words
    tables: list[dict[str, Any]] = field(default_factory=list)  # title, columns, rows, remark
    players: list[Player] = field(default_factory=list)
    estimate: MetricEstimate | None = None
    recordings: list[Utterance] = field(default_factory=list)  # those of the estimate
    warnings: list[dict[str, Any]] = field(default_factory=list)  # warnings of training that still hold

    def why_foreign(self, wav: str) -> str | None:
        """Why a recording may not be shown to others; None if it lies in the folder of the run or its evaluation, or is
        in a manifest there and lies in the corpus' folders."""
        if outside(wav, [str(self.folder), str(self.run)]) is None:
            return None
        wavs_of_manifests, folders = self._corpora
        if all(pc.index(wavs, wav).as_py() < 0 for wavs in wavs_of_manifests):
            return "it is neither in the run's folder nor in its manifests"
        return None if "://" in wav else outside(wav, folders)

    @cached_property
    def _corpora(self) -> tuple[list[pa.ChunkedArray], list[str]]:
        """The recordings in each manifest of the run and of its evaluations, and the folders of their corpora."""
        evaluations = self.run / EVALUATIONS if self.folder == self.run else self.folder.parent
        wavs_of_manifests = []
        for path in (*self.run.glob(f"{MANIFESTS}/*.csv"), *evaluations.glob(f"{CORPORA}/*/*.csv")):
            wavs = read_delimited(path, only={"wav"}).find("wav")
            if wavs is not None:
                wavs_of_manifests.append(replace_data_root(wavs, path.parent))

        name = Path(PREPARED).name  # each part of a mixture has one, too
        folders: list[str] = []
        for path in (*self.run.glob(f"{MANIFESTS}/**/{name}"), *evaluations.glob(f"{CORPORA}/*/**/{name}")):
            source = (_json(path) or {}).get("source", {})
            folders += source.get("folders", [source.get("where", "")])  # earlier versions recorded "where" alone
        # Whoever made the run wrote them. All private files lie in the home folder, so it and what is above it,
        # such as /, is no corpus.
        home = Path(os.path.expanduser("~")).resolve()
        return wavs_of_manifests, [folder for folder in folders if not home.is_relative_to(Path(folder).resolve())]

    @cached_property
    def parts(self) -> dict[str, ScoredRun]:
        """The results of each part of a mixture by name; of another corpus, all by the name ""."""
        if self.results is None or self.prepared is None or self.prepared["source"]["kind"] != "mixture":
            return {} if self.results is None else {"": self.results}
        rows_by_part: dict[str, list[ScoredUtterance]] = {}
        for one in self.results.utterances:
            rows_by_part.setdefault(one.meta.get("corpus", ""), []).append(one)
        return {part: ScoredRun(rows) for part, rows in rows_by_part.items()}

    @cached_property
    def prepared_parts(self) -> dict[str, dict[str, Any]]:
        """The preparation report of each part of a mixture by name; empty for another corpus, or if they are gone."""
        names = ((self.prepared or {}).get("options") or {}).get("parts") or {}
        reports = {name: _json(self.run / MANIFESTS / name / Path(PREPARED).name) for name in names}
        return {name: report for name, report in reports.items() if report is not None}

    @cached_property
    def training_audio(self) -> dict[str, tuple[float, float]]:
        """The hours of audio of each part of a mixture in training so far, and how many passes through the part."""
        return {key.removeprefix("hours "): (hours, epoch[key.replace("hours", "epochs", 1)])
                for epoch in self.epochs for key, hours in epoch.items() if key.startswith("hours ")}

    @property
    def replay_note(self) -> str:
        """What the parts of a run with replay are; empty for other runs."""
        return "" if OldSet.read(self.run) is None else (
            "Part new is the data of this run. Part old is data that its initial model was trained on, replayed so "
            "that the model doesn't forget it.")

    def key(self, name: str) -> str:
        """The value of a recipe's key as text; empty if it has none."""
        return plain_values(self.recipe).get(name, "")

    @property
    def last_epoch(self) -> int:
        """The last epoch that was trained; 0 if none was."""
        return self.epochs[-1].get("epoch", len(self.epochs)) if self.epochs else 0

    @property
    def planned_epochs(self) -> int | None:
        """The epochs that the recipe asks for; None if it doesn't say so with a plain number."""
        value = self.key("number_of_epochs")
        return int(value) if value.isdecimal() else None

    @property
    def tested_weights(self) -> ChosenWeights:
        """The weights that the run's own test scored."""
        value = self.key("average_checkpoints")
        return ChosenWeights(average=average_of(value)) if value in AVERAGE_VALUES else BEST_CHECKPOINT

    @cached_property
    def old_test(self) -> tuple[OldSet, float] | None:
        """The score on the old test before a run with replay, and the metric after it; None for other runs."""
        old_set = OldSet.read(self.run)
        if old_set is None:
            return None
        value = self.tested.get(f"test_{old_set.metric} {OLD}")
        return None if value is None else (old_set, value)

    @cached_property
    def training_words(self) -> frozenset[str]:
        """All words of the training transcripts; none if the manifest is gone."""
        path = self.run / MANIFESTS / "train.csv"
        texts = read_delimited(path, only={"wrd"}).find("wrd") if path.is_file() else None
        if texts is None or not len(texts):
            return frozenset()
        return frozenset(pc.unique(pc.list_flatten(pc.utf8_split_whitespace(texts))).to_pylist())

    def shown_interval(self, name: str) -> tuple[float, float] | None:
        """The 95 % interval of one of ``stats``; None if it is unknown, or of too few recordings to be shown."""
        if self.estimate is None or self.estimate.name != name:
            return None
        return self.estimate.shown_interval

    @property
    def unread(self) -> int:
        """The number of test utterances that could not be read and are missing from the results."""
        return len(self.scored["damaged"]) if "damaged" in self.scored else self.tested.get("test_unread", 0)

    @property
    def name(self) -> str:
        """The last parts of the folder's path, which distinguish runs."""
        whole = self.folder.resolve()
        return "/".join(whole.parts[-3:]) if len(whole.parts) > 4 else str(whole)


def outside(wav: str, folders: Iterable[str]) -> str | None:
    """Why a recording in a corpus' list isn't one of the corpus; None if it lies in one of these folders.

    A list that others have written may name any file of this machine, such as another user's dictation, and would
    bring it into a page that is made to be shown. Links are followed first.
    """
    path = Path(split_member(wav)[0]).resolve()
    allowed = [folder for folder in folders if os.path.isabs(folder)]
    if any(path.is_relative_to(Path(folder).resolve()) for folder in allowed):
        return None
    # As paths, so that they are shown without a slash at their end.
    names = ", ".join(str(Path(folder)) for folder in allowed) or "unknown"
    return (f"it lies outside of the corpus' folder ({names}); if it belongs to the corpus, name the folder of its "
            "audio as corpus.data_root")


@functools.lru_cache(maxsize=4)
def plain_values(recipe: str) -> dict[str, str]:
    """The plain values of a recipe, which may stand under ``recipe``, where another is included."""
    try:
        root = yaml.compose(recipe, yaml.SafeLoader)
    except yaml.YAMLError:
        return {}
    if not isinstance(root, yaml.MappingNode):
        return {}
    pairs = []
    for key, node in root.value:
        if key.value == "recipe" and isinstance(node, yaml.MappingNode):
            pairs += node.value
        else:
            pairs.append((key, node))
    # Values with a tag of their own, such as !new:, are objects, and an empty value is none.
    return {key.value: node.value for key, node in pairs if isinstance(node, yaml.ScalarNode)
            and node.tag.startswith("tag:yaml.org,2002:") and not node.tag.endswith(":null")}


def percent(share: float, digits: int = 0) -> str:
    """Format a share as per cent, with a non-breaking space.

    >>> percent(0.1234, 1)
    '12.3\\xa0%'
    """
    return rate(100 * share, digits)


def rate(value: float, digits: int = 2) -> str:
    """Format a value that is already in per cent."""
    return f"{value:.{digits}f}\N{NO-BREAK SPACE}%"


def read(run: str | Path, utterances_file: str | Path | None = None) -> RunData:
    """Read a run's folder; ``utterances_file`` has its test utterances, if they are not in the usual place.

    An evaluation's folder works too: it gives the evaluated run, with the evaluation's scores.
    """
    folder = Path(run)
    if (folder / RESULT).is_file():
        return _read_evaluation(folder)
    if not (folder / METRICS).is_file() and not (folder / RECIPE).is_file():
        problem = "does not exist"
        if folder.is_dir():
            problem = f"is not a run: it has no {METRICS} and no {RECIPE}"
        elif folder.exists():
            problem = "is a file"
        raise SbkitError("not-a-run", f"{folder} {problem}", hint="name the output_folder of a run", file=folder)
    lines = _read_metrics(folder / METRICS)
    utterances_file = Path(utterances_file) if utterances_file is not None else folder / TEST_UTTERANCES
    rows = utterances.read(utterances_file) if utterances_file.is_file() else []
    return RunData(
        folder=folder, run=folder,
        steps=[line for line in lines if line["kind"] == "step"],
        epochs=_whole_epochs(lines),
        starts=[line for line in lines if line["kind"] == "run"],
        results=ScoredRun(rows) if any(row.reference.split() for row in rows) else None,
        prepared=_json(folder / PREPARED), recipe=_text(folder / RECIPE),
        tested=next((line for line in reversed(lines) if line["kind"] == "test"), {}),
        warnings=_warnings_that_hold(lines),
        **_test_results(_json(folder / TEST_RESULTS) or {}, folder),
    )


def _read_evaluation(folder: Path) -> RunData:
    """Read the evaluated run, with the scores of its evaluation in ``folder``."""
    results = _json(folder / TEST_RESULTS.removeprefix("test_")) or {}
    scored = _json(folder / RESULT) or {}
    results["tables"] = [*results.get("tables", []), *scored.get("tables", [])]
    around = folder.resolve().parents[1]  # the run, which may have been moved with its evaluation
    evaluated = around if (around / RECIPE).is_file() else Path(scored.get("run", around))
    run = read(evaluated, folder / UTTERANCES)
    return replace(run, folder=folder, scored=scored, **_test_results(results, folder))


def _read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics, in order."""
    texts = _text(path).split("\n")
    lines: list[dict[str, Any]] = []
    for number, text in enumerate(texts, 1):
        if not text.strip():
            continue
        try:
            value = untrusted.parse_json(text)
        except ValueError as error:
            if number == len(texts):  # the run was killed, or is writing it just now
                continue
            raise SbkitError("damaged-results", f"{path}, line {number}: {error}", hint="remove that line", file=path,
                             line=number) from None
        if isinstance(value, dict) and "kind" in value:
            lines.append(value)
    return lines


def _whole_epochs(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The epochs in order, each with its lines of training and of validation together."""
    epochs: dict[int, dict[str, Any]] = {}
    for line in lines:
        if line["kind"] == "epoch" and isinstance(line.get("epoch"), int):
            epochs.setdefault(line["epoch"], {}).update(line)
    return [epochs[number] for number in sorted(epochs)]


def _warnings_that_hold(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last warning of each kind, unless it says that what it warned of is over."""
    # Each start that trains watches anew and says again what still holds; one that only tests has no steps.
    last_trained = max((at for at, line in enumerate(lines) if line["kind"] in ("step", "epoch")), default=0)
    began = max((at for at, line in enumerate(lines[:last_trained]) if line["kind"] == "run"), default=0)
    # Runs of earlier versions have the code of a warning, by another name, under "what".
    last_by_kind = {line.get("code", line.get("what")): line for line in lines[began:] if line["kind"] == "warning"}
    return [line for line in last_by_kind.values() if line.get("holds")]


def _test_results(results: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The content of a file by ``Results.write``, as fields of ``RunData``."""
    estimate = results.get("estimate")
    players = []
    for player in results.get("players", []):
        # Recordings in the results' folder are found even if it was moved.
        wavs = [str(folder / sound["wav"]) if (folder / sound["wav"]).is_file() else sound["wav"]
                for sound in player["sounds"]]
        sounds = [SoundSample(**{**sound, "wav": wav}) for sound, wav in zip(player["sounds"], wavs, strict=True)]
        players.append(Player(player["title"], player["remark"], sounds, player.get("among_worst", False)))
    return {"stats": results.get("stats", {}), "tables": results.get("tables", []),
            "players": players, "estimate": estimate and MetricEstimate(**estimate),
            "recordings": [Utterance(**fields) for fields in results.get("recordings", [])]}


def _json(path: Path) -> dict[str, Any] | None:
    try:
        return untrusted.parse_json(_bytes(path)) if path.is_file() else None
    except ValueError as error:
        raise SbkitError("damaged-results", f"{path} is damaged: {error}", file=path) from None


def _text(path: Path) -> str:
    return _bytes(path).decode("utf-8", "replace") if path.is_file() else ""


def _bytes(path: Path) -> bytes:
    try:
        return untrusted.read_bytes(path, _MAX_BYTES)
    except OSError as error:
        raise SbkitError("not-readable", f"{path} can't be read: {error.strerror}", file=path) from None
