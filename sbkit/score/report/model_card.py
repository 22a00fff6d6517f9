"""Model cards: the README.md of a run, and the training part of a bundle's README.md, as the Hugging Face Hub reads it.

They contain no paths of the training machine, because they are meant to be published.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from sbkit.data.provenance import describe
from sbkit.data.splits import SPLITS
from sbkit.errors import SbkitError
from sbkit.score.old_set import OLD, OldSet
from sbkit.score.report import data
from sbkit.score.report.data import RunData
from sbkit.score.run_files import EVALUATIONS, MANIFESTS, REPORT, RESULT
from sbkit.score.significance import interval_in_text
from sbkit.score.weights import BEST_CHECKPOINT, ChosenWeights
from sbkit.system import untrusted
from sbkit.system.console import atomic_write, time_span

logger = logging.getLogger(__name__)

README = "README.md"
_MAX_BYTES = 1 << 20  # of another model's card
_SOURCES = {"encoder_source": "a pretrained encoder", "init_from": "weights of an earlier model"}
_OURS = 'library_name: "sbkit"'  # the first line of a card by sbkit
_FRONT_MATTER = re.compile(r"---\n(.*?\n)---\n", re.DOTALL)


def write(run: RunData) -> None:
    """Write the README.md of a run's folder, unless there is one that sbkit didn't write."""
    path = run.folder / README
    if not path.exists() or path.read_bytes().startswith(f"---\n{_OURS}".encode()):
        with atomic_write(path) as file:
            file.write(of_run(run))


def of_run(run: RunData) -> str:
    """Make the README.md of a run's folder."""
    shown = [f"# {run.key('experiment') or run.folder.resolve().name}",
             "A model trained by sbkit. `hyperparams.yaml` is its recipe, `report.html` has everything on one page, "
             "and `sbkit export` makes a bundle for use elsewhere."]
    old_test = ""
    if run.old_test is not None:
        old_set, value = run.old_test
        old_test = f"{old_set.describe(value)}."
    return "\n\n".join([_front(run), *shown, *_sections(run, _figures(run), old_test)]) + "\n"


def of_bundle(readme: str, folder: str | Path, pipeline_tag: str | None,
              weights: ChosenWeights = BEST_CHECKPOINT, facts: Mapping[str, Any] = MappingProxyType({})) -> str:
    """Complete a bundle's README with facts from its run's folder, and with figures of the bundle's own weights only.

    pipeline_tag : the Hub's name of its task, if it has one
    weights : those that are exported
    facts : the name of that checkpoint, the number of checkpoints there were, and the result on the old test
    """
    try:
        run = data.read(folder)
    except SbkitError as error:  # in its log or test results: the bundle itself is complete
        logger.warning("The bundle's model card has no section on training: %s [%s]", error.message, error.code)
        return readme
    for line in run.warnings:
        logger.warning("The training of %s ended with a warning: %s; %s says more", folder, line["headline"], REPORT)
    figures = _figures(run)
    remark = ""
    if figures and weights != run.tested_weights:
        figures, origin = _figures_of_other_weights(run, weights, facts)
        remark = f"The run tested {run.tested_weights.describe()}, and this bundle has {weights.describe()}{origin}."
    sections = _sections(run, figures, remark, facts.get("old_test", ""))
    return "\n\n".join([_front(run, pipeline_tag), readme.rstrip(), *sections]) + "\n"


def _figures_of_other_weights(run: RunData, weights: ChosenWeights, facts: Mapping[str, Any]) -> tuple[str, str]:
    """The table of figures of weights that the run's own test didn't score, empty if unknown, and where it is from."""
    if weights.share is not None:
        old_set = OldSet.read(run.folder)
        if old_set is None:
            return "", ", whose figures are not recorded"
        if weights != run.tested_weights.with_share(old_set.share):
            return "", ", whose figures on the new test are not recorded"
        rows = [(f"{old_set.metric} {OLD}", f"{old_set.old:.2f}"), (f"{old_set.metric} new", f"{old_set.new:.2f}")]
        return _table(("test", "figure"), rows), ", which it tested too: these are its figures"
    label = weights.label_from(facts)
    for path in sorted(run.folder.glob(f"{EVALUATIONS}/*/{RESULT}")):
        try:
            result = untrusted.read_json(path, _MAX_BYTES)
            same_weights = result["checkpoint"] == label and result["checkpoints"][0] == facts.get("checkpoint")
            if (same_weights and result["corpus"] is None
                    and result["manifest"].endswith(f"/{MANIFESTS}/test.csv")):  # the run's own test
                return _figures(data.read(path.parent)), ", which `sbkit evaluate` tested: these are its figures"
        except (SbkitError, OSError, ValueError, LookupError, TypeError, AttributeError):  # damaged, or old
            logger.warning("The bundle's model card leaves out %s, which can't be read", path)
    command = f"sbkit evaluate RUN{weights.options()}"
    return "", f", whose figures are not recorded: `{command}` measures them, and the next export shows them"


def _front(run: RunData, pipeline_tag: str | None = None) -> str:
    """The front matter, as the Hub reads it: JSON's texts and lists are YAML's."""
    language = run.key("language")
    sources = _started_from(run)
    licences = {source.licence for source in sources}
    on_hub = [source.name for source in sources if _on_hub(source.name)]
    values: dict[str, object] = {"tags": ["sbkit", "speechbrain"]}
    if re.fullmatch(r"[a-z]{2,3}", language):
        values["language"] = language
    if len(licences) == 1 and "" not in licences:  # the licence of one may not hold for both
        values["license"] = licences.pop()
    if on_hub:
        values["base_model"] = on_hub
    if pipeline_tag:
        values["pipeline_tag"] = pipeline_tag
    return "\n".join(["---", _OURS, *(f"{name}: {json.dumps(value)}" for name, value in values.items()), "---"])


def _sections(run: RunData, figures: str, *remarks: str) -> list[str]:
    parts = []
    known_figures = [text for text in (figures, *remarks) if text]
    if known_figures:
        parts += ["## Figures", *known_figures]
    if run.prepared:
        parts += ["## Trained and tested on", *_corpora(run, run.prepared)]
    sources = _started_from(run)
    if sources:
        parts += ["## Started from", "\n".join(source.line() for source in sources)]
    rows = _training_rows(run)
    if rows:
        parts += ["## Training", _table(("what", "value"), rows)]
    return parts


def _training_rows(run: RunData) -> list[tuple[str, ...]]:
    """The rows of the table about training: what, and its value."""
    start = run.starts[-1] if run.starts else {}
    rows: list[tuple[str, ...]] = [
        (name, f"{start[name]:,}" if isinstance(start[name], int) else str(start[name]))
        for name in ("parameters", "devices", "device", "precision", "max_batch_seconds")
        if start.get(name) is not None]
    seconds = sum(epoch.get("train_seconds") or 0 for epoch in run.epochs)
    if run.epochs:
        epochs = str(run.last_epoch)
        if run.planned_epochs is not None and run.last_epoch < run.planned_epochs:
            epochs += f" of {run.planned_epochs}: the run has not finished"
        rows += [("epochs", epochs), ("steps", f"{run.epochs[-1].get('step', 0):,}"),
                 ("training time", time_span(seconds))]
    versions = start.get("environment") or {}
    rows += [(name, str(versions[name])) for name in ("sbkit", "torch", "speechbrain") if name in versions]
    return rows


def _corpora(run: RunData, prepared: Mapping[str, Any]) -> list[str]:
    """Describe the corpus; for a mixture, each part and how much of it training used."""
    def audio(part: Mapping[str, Any], split: str) -> str:
        entry = part["splits"].get(split)
        return f"{entry['kept']:,} ({time_span(3600 * entry['hours'])})" if entry else ""

    def speakers(part: Mapping[str, Any], split: str) -> str:
        count = part["splits"].get(split, {}).get("speakers")
        if count is None:
            return ""
        return f"{count:,}" if count else "unknown"

    rows: list[tuple[str, ...]] = []
    if not run.prepared_parts:
        rows += [(split, audio(prepared, split), speakers(prepared, split)) for split in prepared["splits"]]
        return [_source(prepared), _table(("split", "recordings", "speakers"), rows)]
    whole = sum(hours for hours, _ in run.training_audio.values())
    for name, part in run.prepared_parts.items():
        hours, times = run.training_audio.get(name, (0.0, 0.0))
        rows.append((name, _source(part), part["options"].get("language") or "",
                     *(audio(part, split) for split in SPLITS),
                     speakers(part, "train"),
                     f"{time_span(3600 * hours)}, {times:.1f} times, {100 * hours / whole:.0f} % of the audio"
                     if whole else ""))
    note = [f"{run.replay_note} Its share of every step (replay) is {run.key('replay')}."] if run.replay_note else []
    return [*note, _table(("part", "corpus", "language", *SPLITS, "speakers of train", "audio in training"), rows)]


def _source(prepared: Mapping[str, Any]) -> str:
    """What was read: the corpus's own source, by its name on the hub, and who spoke."""
    where = prepared["source"]["where"]
    described = describe(prepared)
    described = described[0].upper() + described[1:]
    # Other places are folders of the training machine.
    on_hub = where.startswith("hf://") or _on_hub(where)
    return f"{described} ({where.removeprefix('hf://')})" if on_hub else described


def _figures(run: RunData) -> str:
    """Make the table of test results with their 95 % intervals."""
    rows: list[tuple[str, ...]] = []
    for part, results in run.parts.items():
        for name, rates in (("WER", results.words), ("CER", results.characters)):
            rows.append((f"{name} {part}".rstrip(), f"{rates.rate:.2f} %", interval_in_text(rates, " %")))
    for name, value in run.stats.items():
        bounds = run.shown_interval(name)
        rows.append((name, f"{value:.4g}", "" if bounds is None else "{:.4g} to {:.4g}".format(*bounds)))
    return _table(("test", "figure", "95 % interval"), rows) if rows else ""


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ("---",) * len(head), *rows))


class _InitialModel(NamedTuple):
    """What a run started from; the licence is empty if its card isn't on this machine or names none."""

    what: str
    name: str
    licence: str

    def line(self) -> str:
        """Its line in a list."""
        name = self.name if _on_hub(self.name) else Path(self.name).name  # no folder of the training machine
        licence = f"licence: {self.licence}" if self.licence else "licence unknown: see its source"
        return f"- {self.what}: {name}, {licence}"


def _started_from(run: RunData) -> list[_InitialModel]:
    """The models that the run started from."""
    models = []
    for key, what in _SOURCES.items():
        name = run.key(key)
        if name:
            models.append(_InitialModel(what, name, _licence_in(_card_of(name))))
    return models


def _card_of(name: str) -> Path:
    """The path of a model's card, which may not exist: in its folder, or in the cache of the Hub."""
    if _on_hub(name):
        from huggingface_hub import try_to_load_from_cache  # its import reads environment variables

        repository, _, revision = name.partition("@")
        cached = try_to_load_from_cache(repository, README, revision=revision or None)
        if isinstance(cached, str):  # otherwise unknown, or known not to exist
            return Path(cached)
    return Path(name).expanduser() / README


def _licence_in(card: Path) -> str:
    """The licence that a card's front matter names; empty if there is none."""
    try:
        text = untrusted.read_text(card, _MAX_BYTES)
    except (OSError, ValueError):  # no card, or not a text
        return ""
    front = _FRONT_MATTER.match(text)
    licence = re.search(r"^license: *\"?([\w.-]+)\"?", front[1], re.MULTILINE) if front else None
    return licence[1] if licence else ""


def _on_hub(name: str) -> bool:
    return re.fullmatch(r"[\w.-]+/[\w.-]+(@[\w./-]+)?", name) is not None and not Path(name).parent.is_dir()

