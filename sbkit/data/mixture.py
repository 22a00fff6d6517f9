"""Several corpora as one: each prepared by its own rules, drawn by weights or a temperature, and scored separately."""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import re
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

import sbkit
from sbkit.data import exclusions, leaks
from sbkit.data.columns import Declared, LabelColumn, defaults_to_recording
from sbkit.data.corpus import Corpus
from sbkit.data.language_code import LANGUAGE_CODE
from sbkit.data.lock import locked
from sbkit.data.manifest import Column, Manifest, join
from sbkit.data.prepare import SplitReport, recording_keys, speakers_in
from sbkit.data.provenance import hours_by_synthesiser
from sbkit.data.remote import Remote
from sbkit.data.splits import SPLITS
from sbkit.data.text import TextRules
from sbkit.errors import SbkitError
from sbkit.system import disk
from sbkit.system.console import stored_json, table
from sbkit.system.schema import NOT_NEGATIVE, POSITIVE, Nullable, require

logger = logging.getLogger(__name__)

MEAN = "mean"
_NAME = re.compile(r"[\w.-]+")
#: Between a part's name and a row's id.
_SEPARATOR = ":"
COLUMNS = ["part", "language", "utterances", "hours", "% of steps", "times seen in a pass"]


class Mixture(Corpus):
    """Several corpora, of which each step has a fixed share; used like a ``Corpus``.

    corpus: !new:sbkit.data.mixture.Mixture
        folder: !ref <output_folder>/manifests
        weights: {read: 1, calls: 3}
        parts:
            read: !new:sbkit.data.corpus.Corpus {source: /data/cv/cs, language: cs}
            calls: !new:sbkit.data.corpus.Corpus {source: /data/calls, language: cs, only: [train]}

    Each part is prepared in a subfolder of the mixture's, unless it has its own ``folder``. Manifests have the columns
    ``corpus``, a part's name, and ``language``, which batches have too; ids and speakers begin with the name. A
    recording in any part's dev or test is left out of all training.

    parts : a ``Corpus`` each, by name; one may have a split that others lack
    folder : where the joint manifests and ``prepare_report.json`` are written
    weights : the share of the training audio that each part has in every step, ``{read: 1, calls: 3}``; 0: the part is
        only scored
    temperature : instead of weights: a part's share is proportional to its hours to the power of 1 / temperature. With
        1 shares are proportional to hours; larger values make them more equal
    best_by : the part whose validation selects the best checkpoint; ``mean``: the mean over all parts
    once : the part that a pass goes through once; by default a pass has as much audio as all parts together
    """

    #: The columns of batches in addition to those that the task declares.
    tags: ClassVar[Declared] = {"corpus": LabelColumn(), "language": LabelColumn()}
    #: The part whose train split is divided where it has no other, as a corpus by itself is.
    divided: ClassVar[str | None] = None

    def __init__(self, parts: Mapping[str, Corpus], folder: str | Path = "manifests", *,
                 weights: Mapping[str, float] | None = None, temperature: float | None = None, best_by: str = MEAN,
                 once: str | None = None):
        if not isinstance(parts, Mapping) or not parts or not all(isinstance(part, Corpus) for part in parts.values()):
            raise SbkitError("bad-value", "mixture: parts must be corpora",
                             hint="write a Corpus for each: {read: !new:sbkit.data.corpus.Corpus {source: ...}, ...}",
                             key="parts")
        wrong = [name for name in parts if not _NAME.fullmatch(str(name))]
        if wrong:
            raise SbkitError("bad-value", f"mixture: parts: {wrong[0]!r} can't be a part's name",
                             hint="use letters, digits, - and _", key="parts", value=wrong[0])
        if best_by not in (MEAN, *parts):
            raise SbkitError("unknown-part", f"mixture: best_by is {best_by!r}",
                             hint=f"use {MEAN} or one of {', '.join(parts)}", key="best_by", value=best_by)
        languages = {part.language for part in parts.values()}
        rules = [part.text for part in parts.values()]
        alike = all(part_rules.options() == rules[0].options() for part_rules in rules)
        super().__init__(None, languages.pop() if len(languages) == 1 else None, folder,
                         text=rules[0] if alike else TextRules())
        limits = [part.max_duration for part in parts.values()]
        self.max_duration = None if None in limits else max(limit for limit in limits if limit is not None)
        self.parts: dict[str, Corpus] = {}
        for name, part in parts.items():
            has_default_folder = part.folder == Path("manifests")
            self.parts[str(name)] = part.in_folder(self.folder / str(name)) if has_default_folder else copy.copy(part)
        self.weights = None if weights is None else self._checked_weights(weights)
        self.temperature = temperature
        self.best_by = best_by
        self.once = once
        if once is not None and once not in list(self.parts):
            raise SbkitError("unknown-part", f"mixture: once names {once!r}, which is not a part",
                             hint=f"parts are {', '.join(parts)}", key="once", value=once)
        if once is not None and self.weights is not None and not self.weights[once]:
            raise SbkitError("conflicting-options", f"mixture: once names {once!r}, whose weight is 0",
                             hint="raise its weight, or name another part", key="once", value=once)
        require("mixture: temperature", temperature, Nullable(POSITIVE))
        if weights is not None and temperature is not None:
            raise SbkitError("conflicting-options", "mixture: weights and temperature both set the share of each part",
                             hint="leave one of them out")
        self._check_text_rules()

    def _checked_weights(self, weights: Mapping[str, float]) -> dict[str, float]:
        if not isinstance(weights, Mapping):
            raise SbkitError("bad-value", f"mixture: weights is {weights!r}",
                             hint=f"write a number for each part: {{{', '.join(f'{name}: 1' for name in self.parts)}}}",
                             key="weights", value=weights)
        for name in weights:
            if name not in self.parts:
                raise SbkitError("unknown-part", f"mixture: weights names {name!r}, which is not a part",
                                 hint=f"parts are {', '.join(self.parts)}", key="weights", value=name)
            require(f"mixture: weights: {name}", weights[name], NOT_NEGATIVE)
        missing = [name for name in self.parts if name not in weights]
        if missing:
            raise SbkitError("bad-value", f"mixture: weights has no entry for {missing[0]}",
                             hint="give it 0 to use it for scoring only", key="weights")
        if not sum(weights.values()):
            raise SbkitError("bad-value", "mixture: weights are all 0, so there is nothing to train on",
                             hint="raise one of them", key="weights")
        return {str(name): float(weight) for name, weight in weights.items()}

    def _check_text_rules(self) -> None:
        """Refuse parts whose texts can't share a tokenizer: all rules of a language must be the same, and two of them
        in all languages."""
        first_part = next(iter(self.parts))
        first_of_language: dict[str | None, str] = {}
        for name, part in self.parts.items():
            if part.language not in Nullable(LANGUAGE_CODE):
                raise SbkitError("bad-value", f"mixture: parts: {name}: language {part.language!r} is not a language "
                                 "code", hint="write a code such as en or zh-CN", key=f"parts.{name}.language",
                                 value=part.language)
            same_language = first_of_language.setdefault(part.language, name)
            self._require_same_rules(same_language, name, [rule for rule in part.text.options() if rule != "alphabet"])
            self._require_same_rules(first_part, name, ["unicode", "case"])

    def _require_same_rules(self, one: str, other: str, rules: Sequence[str]) -> None:
        rules_of_one = self.parts[one].text.options()
        rules_of_other = self.parts[other].text.options()
        for rule in rules:
            if rules_of_one[rule] != rules_of_other[rule]:
                raise SbkitError("different-text-rules", f"mixture: parts: {one} and {other} have different text "
                                 f"rules: text.{rule} is {rules_of_one[rule]!r} and {rules_of_other[rule]!r}, but they "
                                 "share a tokenizer", hint="use the same value in both", key=f"text.{rule}")

    def __repr__(self) -> str:
        return f"Mixture({', '.join(self.parts)}, folder={str(self.folder)!r})"

    @property
    def remote(self) -> Remote:
        """Which URLs may be opened: those that any part allows."""
        allowed = [part.remote for part in self.parts.values()]
        return Remote(tuple(dict.fromkeys(scheme for remote in allowed for scheme in remote.schemes)),
                      max(remote.megabytes for remote in allowed), max(remote.seconds for remote in allowed))

    @staticmethod
    def part_of(id_: str) -> str:
        """Return the part that an utterance belongs to, from its id."""
        return id_.partition(_SEPARATOR)[0]

    def shares(self, hours: Mapping[str, float]) -> dict[str, float]:
        """Return the share of each part with training audio in every step; they add up to 1."""
        power = 1 / (self.temperature or 1)
        weights = self.weights or {name: part_hours ** power for name, part_hours in hours.items()}
        total = sum(weights.get(name, 0) for name in hours)
        if not total:
            raise SbkitError("part-without-rows", "mixture: weights: no part with training audio has a weight above 0",
                             hint=f"parts with training audio are {', '.join(hours)}", key="weights")
        return {name: weights.get(name, 0) / total for name in hours}

    # ---------------------------------------------------------------- prepare

    def keep_silence(self) -> None:
        for part in self.parts.values():
            part.keep_silence()

    def protect(self, run: str | Path) -> None:
        super().protect(run)
        for part in self.parts.values():
            part.protect(run)

    def prepare(self, show_progress: bool = True, needed: Sequence[str] = (), needs_text: bool = True,
                columns: Declared | None = None) -> dict[str, Manifest]:
        """Prepare all parts, join their manifests, and return these by split; see :meth:`Corpus.prepare`."""
        declared = columns or {}
        manifests = {}
        for name, part in self.parts.items():
            try:
                needs = needed if name == self.divided else ()
                manifests[name] = part.prepare(show_progress, needs, needs_text, declared)
            except SbkitError as error:
                raise SbkitError(error.code, f"part {name} of the mixture: {error.message}", hint=error.hint,
                                 file=error.file, line=error.line, key=error.key, value=error.value) from error
        self.check_splits(manifests, needed)
        with locked(self.folder / ".lock"):
            facts = [[name, part.language, {split: entry["sha256"] for split, entry in part.prepared["splits"].items()}]
                     for name, part in self.parts.items()]
            fingerprint = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
            try:
                with disk.disk_errors_as_user_error(self.folder):
                    report = stored_json(self.report_path)
                    paths = {self.manifest_path(split): entry["sha256"]
                             for split, entry in report.get("splits", {}).items()}
                    if report.get("fingerprint") != fingerprint or not all(
                            path.is_file() and disk.sha256(path) == sha256 for path, sha256 in paths.items()):
                        self._check_unprotected()
                        self._join(manifests, declared, fingerprint)
            except OSError as error:  # a folder that may not be written
                raise SbkitError("not-writable", f"{error.filename or self.folder}: {error.strerror or error}",
                                 file=error.filename or self.folder) from error
        return self.load()

    def check_splits(self, splits_of_parts: Mapping[str, Collection[str]], needed: Sequence[str]) -> None:
        """Refuse parts that together lack a split which a run needs, or a split that an option takes for granted."""
        for split in needed:
            if not any(split in splits for splits in splits_of_parts.values()):
                raise SbkitError("missing-split", f"no part of the mixture has a {split} split",
                                 hint=f"name one in the splits of a part, such as {{{split}: NAME}}", value=split)
        untrained = [name for name, weight in (self.weights or {}).items()
                     if weight and "train" not in splits_of_parts[name]]
        if untrained:
            raise SbkitError("part-without-rows", f"mixture: the part {untrained[0]} has a weight, but no training "
                             "rows", hint="give it a train split, or set its weight to 0", key="weights",
                             value=untrained[0])
        if self.once is not None and "train" not in splits_of_parts[self.once]:
            raise SbkitError("part-without-rows", f"mixture: once names the part {self.once}, which has no training "
                             "rows", hint="name another part", key="once", value=self.once)
        if self.best_by in splits_of_parts and "dev" not in splits_of_parts[self.best_by] and "dev" in needed:
            raise SbkitError("missing-split", f"mixture: best_by names the part {self.best_by}, which has no dev split",
                             hint=f"name another part, or {MEAN}", key="best_by", value="dev")

    def _join(self, manifests: Mapping[str, Mapping[str, Manifest]], declared: Declared, fingerprint: str) -> None:
        """Join the parts' manifests, by split, and write them with a report."""
        started = time.monotonic()
        parts_of_splits = {}
        for split in SPLITS:
            parts = {name: by_split[split] for name, by_split in manifests.items() if split in by_split}
            if parts:
                parts_of_splits[split] = parts
        or_recording = {name for name, column in declared.items() if defaults_to_recording(column)}
        joint = {split: self._joined(parts, or_recording) for split, parts in parts_of_splits.items()}
        reports = {split: self._summed_report(split, manifest) for split, manifest in joint.items()}
        if "train" in joint:
            self._leave_out_held_out(joint, reports["train"])

        options = {name: part.prepared["options"] for name, part in self.parts.items()}
        common = {name: value for name, value in next(iter(options.values())).items()
                  if all(of_part.get(name) == value for of_part in options.values())}
        report = {
            "format": 1, "fingerprint": fingerprint, "sbkit": sbkit.__version__,
            "source": {"kind": "mixture", "where": ", ".join(self.parts),
                       "recorded": all(part.prepared["source"].get("recorded", False) for part in self.parts.values()),
                       "splits": {split: list(parts) for split, parts in parts_of_splits.items()}},
            "options": {**common, "parts": options},
            "seconds": round(time.monotonic() - started, 1), "splits": {}, "leaks": leaks.shared(joint)}
        self._write(joint, reports, report)

    def _summed_report(self, split: str, manifest: Manifest) -> SplitReport:
        """The sum of the parts' reports on a split."""
        reported = [part.prepared["splits"] for part in self.parts.values()]
        entries = [splits[split] for splits in reported if split in splits]
        left_out: dict[str, dict[str, Any]] = {}
        for entry in entries:
            for reason, of_part in entry["left_out"].items():
                total = left_out.setdefault(reason, _none_left_out())
                total["count"] += of_part["count"]
                total["hours"] += of_part["hours"]
                total["examples"] = [*total["examples"], *of_part["examples"]]
                # A part that was prepared by an earlier version has no codes.
                codes = of_part.get("codes") or {exclusions.CODES[reason]: of_part["count"]}
                total["codes"] = dict(Counter(total["codes"]) + Counter(codes))
        outside = sum((Counter(entry["outside_alphabet"]) for entry in entries), Counter[str]())
        return SplitReport(split, "mixture", sum(entry["rows"] for entry in entries), len(manifest), manifest.hours,
                           left_out, dict(outside), speakers=speakers_in(manifest),
                           synthesised=hours_by_synthesiser(manifest))

    @staticmethod
    def _leave_out_held_out(joint: dict[str, Manifest], report: SplitReport) -> None:
        """Remove the training rows whose recordings are in any part's dev or test, and say so in the report."""
        train = joint["train"]
        training_keys = recording_keys(train.wavs, train.starts)
        held_out = np.zeros(len(train), bool)
        for split, manifest in joint.items():
            if split != "train":
                held_out |= training_keys.is_in(recording_keys(manifest.wavs, manifest.starts))
        if not held_out.any():
            return
        removed = train.select(held_out)
        logger.warning("%d training rows of the mixture are in the dev or test of another part, and are left "
                       "out: %s", len(removed), ", ".join(removed.ids[:3]))
        reason = exclusions.IN_OTHER_SPLIT
        entry = report.left_out.setdefault(reason, _none_left_out())
        count = entry["count"] + len(removed)
        entry.update(count=count, hours=round(entry["hours"] + removed.hours, 3),
                     examples=[*entry["examples"], *removed.ids[:3]], codes={exclusions.CODES[reason]: count})
        train = train.select(~held_out)
        joint["train"] = train
        report.kept = len(train)
        report.hours = train.hours
        report.speakers = speakers_in(train)
        report.synthesised = hours_by_synthesiser(train)

    def _joined(self, parts: Mapping[str, Manifest], or_recording: set[str]) -> Manifest:
        """Join the rows of all parts. ``or_recording`` are columns that default to a row's recording."""
        def column(name: str, manifest: Manifest) -> pa.Array:
            default = manifest.wavs if name in or_recording else Column(pa.repeat("", len(manifest)))
            return manifest.meta.get(name, default).arrow

        def prefixed(part: str, values: pa.Array) -> pa.Array:
            """Make ids or speakers distinct between parts."""
            return join(f"{part}{_SEPARATOR}", values)

        def speakers(part: str, manifest: Manifest) -> pa.Array:
            values = manifest.speakers.arrow
            return pc.if_else(pc.equal(values, ""), values, prefixed(part, values))

        def language(part: str, manifest: Manifest) -> pa.Array:
            of_part = self.parts[part].language
            return Column(pa.repeat(of_part, len(manifest))).arrow if of_part else column("language", manifest)

        manifests = parts.values()
        names = dict.fromkeys(name for manifest in manifests for name in manifest.meta)
        meta = {name: [column(name, manifest) for manifest in manifests] for name in names}
        meta["corpus"] = [Column(pa.repeat(part, len(manifest))).arrow for part, manifest in parts.items()]
        meta["language"] = [language(part, manifest) for part, manifest in parts.items()]
        return Manifest(
            ids=pa.concat_arrays([prefixed(part, manifest.ids.arrow) for part, manifest in parts.items()]),
            durations=np.concatenate([manifest.durations for manifest in manifests]),
            wavs=pa.concat_arrays([manifest.wavs.arrow for manifest in manifests]),
            texts=pa.concat_arrays([manifest.texts.arrow for manifest in manifests]),
            speakers=pa.concat_arrays([speakers(part, manifest) for part, manifest in parts.items()]),
            starts=np.concatenate([manifest.starts for manifest in manifests]),
            remote=self.remote,
            meta={name: pa.concat_arrays(columns) for name, columns in meta.items()},
        )

    # ---------------------------------------------------------------- what is prepared

    def manifest(self, split: str) -> Manifest:
        """Read the joint manifest of a split; the training manifest has the parts' shares."""
        manifest = super().manifest(split)
        if split == "train":
            manifest.shares = self.shares(hours_of(manifest))
            manifest.once = self.once
        return manifest

    def summary(self) -> str:
        """Return the tables of all parts, and one of their shares in training."""
        parts = [f"{name}: {part.summary()}" for name, part in self.parts.items()]
        return "\n".join([*parts, table(COLUMNS, self.rows(self.manifest("train")))])

    def rows(self, train: Manifest) -> list[list[Any]]:
        """Return a row for each part in training, with ``COLUMNS``."""
        counts = Counter(train.column("corpus"))
        pass_hours = hours_of_pass(train)
        return [[name, self.parts[name].language or "", counts[name], round(part_hours, 2),
                 round(100 * train.shares[name], 1), round(train.shares[name] * pass_hours / part_hours, 2)]
                for name, part_hours in hours_of(train).items()]

    def only_split(self, name: str, folder: str | Path) -> Corpus:
        raise SbkitError("missing-split", f"a mixture has no split {name}",
                         hint=f"name a corpus that has it (--data_folder), or one of {', '.join(SPLITS)}", value=name)

    def check_exists(self) -> None:
        """Refuse a part whose source doesn't exist."""
        for part in self.parts.values():
            part.check_exists()


def hours_of(manifest: Manifest, rows: np.ndarray | None = None) -> dict[str, float]:
    """Return the hours of each part in a mixture's manifest, or in some of its rows."""
    names, numbers = manifest.column("corpus").numbered()
    durations = manifest.durations
    if rows is not None:
        numbers = numbers[rows]
        durations = durations[rows]
    seconds = np.bincount(numbers, weights=durations, minlength=len(names))
    return dict(zip(names, (seconds / 3600).tolist(), strict=True))


def hours_of_pass(train: Manifest) -> float:
    """Return the hours of a pass through a training set, of a mixture or of one corpus."""
    if not train.shares:
        return train.hours
    hours = hours_of(train)
    return hours[train.once] / train.shares[train.once] if train.once else \
        sum(part_hours for name, part_hours in hours.items() if train.shares[name])


def _none_left_out() -> dict[str, Any]:
    """The entry of a report for a reason that no row was left out for yet."""
    return {"count": 0, "hours": 0.0, "examples": [], "codes": {}}
