"""Turns the rows of a source into a manifest, and records why rows were left out."""

from __future__ import annotations

import copy
import functools
import itertools
import logging
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sbkit.data import exclusions, leaks
from sbkit.data.audio import length_tolerance
from sbkit.data.columns import Declared, LabelColumn
from sbkit.data.copies import Copies
from sbkit.data.exclusions import MISSING, UNDECODABLE
from sbkit.data.manifest import SECONDS, Column, Manifest, join
from sbkit.data.measure import WORTH_A_BAR, measure
from sbkit.data.presence import existing, refused
from sbkit.data.provenance import hours_by_synthesiser, synthesised
from sbkit.data.remote import NO_REMOTE, Remote
from sbkit.data.sources.base import Rows, unique_ids
from sbkit.data.suspects import Exclusions
from sbkit.data.text import TextRules, count_words
from sbkit.errors import printable
from sbkit.system.console import counted, progress, table

logger = logging.getLogger(__name__)

#: Reasons for which a row is left out; only the first that applies is counted.
MALFORMED = "malformed row"
REFUSED = "refused URL"
IN_OTHER_SPLIT = "also in dev or test"
EXCLUDED = "excluded"
REASONS = (MALFORMED, REFUSED, "repeated id", IN_OTHER_SPLIT, MISSING, "no text", EXCLUDED, UNDECODABLE,
           "too short", "too long", "alphabet", "few words", "empty column", "signals of different length")
#: Of a reason that is a limit: the corpus's option, how a row lies to it, and what to do to keep such rows.
_LIMITS = {
    "too long": ("max_duration", "above", "cut them at pauses, with their texts, or raise corpus.max_duration, and "
                                          "max_batch_seconds so that a batch holds them"),
    "too short": ("min_duration", "below", "lower corpus.min_duration to keep them"),
}
_CODE = {reason: i for i, reason in enumerate(REASONS, 1)}  # 0: the row is kept

_EXAMPLES = 10
_MANY = 0.1  # of the rows: one that was left out is shown
SAMPLE = 200
#: If more of the sample than this has a wrong duration in the list, all recordings are measured.
_DISAGREE_SHARE = 0.05
#: The same if more of it than this can't be read: that many damaged recordings would end a training.
_DAMAGED_SHARE = 0.01
#: What a speaker doesn't say as it is written: digits, and brackets around notes.
_UNSPOKEN = r"[\pN<>\[\](){}]"
#: Neighbouring letters of two scripts that look alike: mostly one of them was typed on the wrong keyboard.
_ALIKE = ("Latin", "Cyrillic", "Greek")
_PAIRS = [{one.upper(), two.upper()} for one, two in itertools.combinations(_ALIKE, 2)]
#: Scripts of which one may be that of a corpus; Japanese has three at once.
_SCRIPTS = [*(rf"\p{{{name}}}" for name in (
    "Latin", "Cyrillic", "Arabic", "Devanagari", "Hangul", "Greek", "Hebrew", "Bengali", "Tamil", "Telugu", "Kannada",
    "Malayalam", "Gujarati", "Gurmukhi", "Sinhala", "Thai", "Lao", "Khmer", "Myanmar", "Tibetan", "Georgian",
    "Armenian", "Ethiopic")), r"\p{Han}\p{Hiragana}\p{Katakana}"]
_SCRIPT_SAMPLE = 10_000  # texts that say which script is the corpus's
_MAIN_SCRIPT = 0.9  # of the texts have letters of it
_MIXED = "|".join(rf"\p{{{one}}}\pM*\p{{{two}}}" for one, two in itertools.permutations(_ALIKE, 2))


@dataclass(frozen=True)
class RowLimits:
    """Limits beyond which usable rows of a split are left out."""

    min_duration: float | None = None
    max_duration: float | None = None
    alphabet: bool = False
    text: bool = True
    """Whether a row needs a text."""
    silence: bool = False
    """Whether one whose text is empty as it was read is kept nevertheless: nobody speaks in it."""
    min_words: int = 0


@dataclass
class SplitReport:
    """How many rows of a split were read, kept and left out, and why; always ``rows == kept + missing``."""

    split: str
    origin: str
    rows: int
    kept: int = 0
    hours: float = 0.0
    left_out: dict[str, dict[str, Any]] = field(default_factory=dict)
    outside_alphabet: dict[str, int] = field(default_factory=dict)
    unspoken: dict[str, Any] = field(default_factory=dict)
    """How many texts that are kept have digits or brackets, and one of them before and after the rules."""
    durations: dict[str, Any] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)
    """What is odd about rows that are kept: how many, and one of them."""
    copies: dict[str, str] = field(default_factory=dict)
    """Ids of rows that are kept although they are copies of another split's, and their originals."""
    speakers: int = 0
    """How many speakers the rows that are kept name; 0: unknown."""
    synthesised: dict[str, float] = field(default_factory=dict)
    """Hours of them that a synthesiser spoke, by its name."""
    tables: list[pa.Table] = field(default_factory=list, repr=False)
    """All rows that were left out, for ``left_out.csv``."""

    def facts(self) -> dict[str, Any]:
        """The entry of this split in ``prepare_report.json``."""
        return {name: value for name, value in vars(self).items() if name not in ("tables", "copies")}

    @property
    def missing(self) -> int:
        return sum(entry["count"] for entry in self.left_out.values())


def prepare_split(split: str, rows: Rows, rules: TextRules, limits: RowLimits, *, taken: Sequence[Column] = (),
                  listings: dict[str, pa.Array | None] | None = None, check_audio: str = "sample",
                  copies: Copies | None = None, journal: Path | None = None, workers: int | None = None,
                  remote: Remote = NO_REMOTE, columns: Declared = MappingProxyType({}),
                  exclude: Exclusions | None = None, show_progress: bool = True) -> tuple[Manifest, SplitReport]:
    """Make the manifest of a split: normalise texts, measure recordings, leave out unusable and unwanted rows.

    rows : N rows of a source
    taken : recordings of other splits (:func:`recording_keys`), to leave out of this one
    listings : contents of large folders, kept between calls for splits in the same folder
    check_audio : "sample" compares some listed durations with the audio, "all" and "decode" open every recording
    copies : the recordings of splits that were prepared before this one
    journal : where measured durations are stored, see :func:`sbkit.data.measure.measure`
    remote : which URLs may be opened
    columns : those that the task declares; a row that lacks one is left out
    exclude : a list of rows to leave out
    """
    # A row is left out for the first reason that applies. What costs nothing to find comes first, so that only the
    # recordings of rows that are still wanted are opened, and decoding (for copies) comes last.
    report = SplitReport(split, rows.origin, len(rows) + len(rows.malformed))
    codes = np.zeros(len(rows), np.int8)  # of reasons
    details: dict[int, str] = {}
    read_headers = functools.partial(measure, workers=workers, journal=journal, remote=remote,
                                     show_progress=show_progress)

    def leave_out(reason: str, mask: np.ndarray, detail: Callable[[int], str] | None = None) -> None:
        left = np.flatnonzero((codes == 0) & mask)
        codes[left] = _CODE[reason]
        if detail is not None:
            details.update((i, detail(i)) for i in left.tolist())

    # By the list alone.
    leave_out(MALFORMED, ~(rows.starts >= 0), lambda i: "its start is not a number of 0 or more")
    leave_out(REFUSED, refused(rows.wavs, remote), lambda i: remote.refusal(rows.wavs[i]))
    if not _first_of_each(rows.ids).all():
        # The same recording is kept once; different recordings with the same id (of a sentence, say) get numbered ids.
        same = join(rows.ids.arrow, recording_keys(rows.wavs, rows.starts).arrow, separator="@")
        leave_out("repeated id", ~_first_of_each(Column(same)))
        ids = np.array(list(rows.ids), object)
        ids[codes == 0] = unique_ids(ids[codes == 0])
        rows = copy.copy(rows)
        rows.ids = Column(ids.tolist())
    # By other splits and the disk.
    for keys in taken:
        leave_out(IN_OTHER_SPLIT, recording_keys(rows.wavs, rows.starts).is_in(keys))
    leave_out(MISSING, ~existing(rows.wavs, listings))
    # By the text; a row without one can be a recording of silence, which is then trained on as such.
    texts = [rules(text) for text in progress(
        rows.texts, what=f"{split}: text", total=len(rows), unit="row",
        show=show_progress and len(rows) >= WORTH_A_BAR)]
    silent = np.full(len(rows), limits.silence) & ~np.asarray(pc.match_substring_regex(rows.texts.arrow, r"\S"))
    if limits.text:
        leave_out("no text", np.array([not text for text in texts], bool) & ~silent)
    if exclude is not None:
        leave_out(EXCLUDED, exclude.mask(rows.ids, texts, rows.origin))

    # By the duration. A recording that is longer than its header says is used as far as that goes, and reported.
    durations = _durations(rows, np.flatnonzero(codes == 0), details, report, check_audio, read_headers)
    longer = [i for i, detail in details.items() if codes[i] == 0 and np.isfinite(durations[i])]
    leave_out(UNDECODABLE, np.isnan(durations))
    leave_out(UNDECODABLE, durations <= 0, lambda i: f"it ends before its start at {rows.starts[i]:.2f} s")

    def seconds_of(row: int) -> str:
        return f"{durations[row]:.2f} s"

    if limits.min_duration is not None:
        leave_out("too short", durations < limits.min_duration, seconds_of)
    if limits.max_duration is not None:
        leave_out("too long", durations > limits.max_duration, seconds_of)
    outside: Counter[str] = Counter()
    if rules.alphabet is not None:
        mask = np.zeros(len(rows), bool)
        for i in np.flatnonzero(codes == 0):
            if characters := rules.outside(texts[i]):
                outside.update(characters)
                mask[i] = True
                details[int(i)] = " ".join(sorted(characters))
        if limits.alphabet:
            leave_out("alphabet", mask)
    if limits.min_words:
        leave_out("few words", np.array([count_words(text) < limits.min_words for text in texts], bool) & ~silent)

    # By further columns that the task declares: labels, and recordings beside the first one.
    meta = dict(rows.meta)

    def check_recordings(name: str, aligned: bool) -> None:
        wavs = rows.column(name)
        leave_out(MISSING, refused(wavs, remote) | ~existing(wavs, listings), lambda i: f"{name}: {wavs[i]}")
        left = np.flatnonzero(codes == 0)
        seconds = np.full(len(rows), np.nan)
        seconds[left], causes = read_headers(list(wavs.take(left)), what=f"{split}: {name}")
        details.update((int(left[i]), f"{name}: {cause}") for i, cause in causes.items())
        leave_out(UNDECODABLE, ~(seconds > 0))
        if aligned:
            leave_out("signals of different length", _disagree(rows, durations, seconds - rows.starts), lambda i: (
                f"{name}: {seconds[i]:.2f} s, but {durations[i]:.2f} s from {rows.starts[i]:.2f} s on are needed"))
        else:
            meta[name + SECONDS] = Column([f"{each:.3f}" for each in seconds.tolist()])

    for name, column in columns.items():
        if isinstance(column, LabelColumn):
            empty = pc.equal(pc.utf8_trim_whitespace(rows.column(name).arrow), "").to_numpy(zero_copy_only=False)
            leave_out("empty column", empty, lambda i, name=name: name)  # type: ignore[misc]  # called at once
        else:
            check_recordings(name, column.aligned)

    # By the sound: training leaves out copies of what dev and test have; those only report theirs.
    if copies is not None:
        left = np.flatnonzero(codes == 0)
        every = np.arange(len(rows))
        found = copies.search(split, rows.ids.take(left), rows.wavs.take(left), rows.starts[left], durations[left],
                              keep=split != "train")
        originals, broken = ({int(left[i]): text for i, text in each.items()} for each in found)
        leave_out(UNDECODABLE, np.isin(every, list(broken)), broken.__getitem__)
        if split == "train":
            leave_out(IN_OTHER_SPLIT, np.isin(every, list(originals)), lambda i: f"is {originals[i]}")
        else:
            report.copies = {rows.ids[i]: name for i, name in originals.items()}

    # What is kept, and what is odd about it.
    kept = np.flatnonzero(codes == 0)
    everything = Manifest(
        ids=rows.ids, durations=np.nan_to_num(durations), wavs=rows.wavs, texts=texts, speakers=rows.speakers,
        starts=rows.starts, meta=meta, remote=remote)
    manifest = everything.select(kept)
    report.kept = len(manifest)
    report.hours = manifest.hours
    report.speakers = speakers_in(manifest)
    report.synthesised = hours_by_synthesiser(manifest)
    report.outside_alphabet = dict(outside.most_common(100))
    unspoken = np.flatnonzero((codes == 0) & np.asarray(pc.match_substring_regex(rows.texts.arrow, _UNSPOKEN)))
    if limits.text and len(unspoken):
        first = int(unspoken[0])
        report.unspoken = {"count": len(unspoken), "example": [rows.texts[first][:100], texts[first][:100]]}
    if len(kept_silent := np.flatnonzero((codes == 0) & silent)):
        report.notices.append(f"{counted(len(kept_silent), 'row')} without a text, trained on as silence (nonspeech), "
                              f"such as {rows.ids[int(kept_silent[0])]}")
    if longer := [i for i in longer if codes[i] == 0]:
        report.notices.append(f"{counted(len(longer), 'recording')} longer than the header says, such as "
                              f"{rows.ids[longer[0]]}: {details[longer[0]]}")
    if limits.text:
        report.notices += _odd_texts(everything, np.flatnonzero((codes == 0) | (codes == _CODE["repeated id"])))
    _explain(report, rows, codes, durations, details)
    if report.rows != report.kept + report.missing:
        raise AssertionError(f"{split}: {report.rows} rows, {report.kept} kept, {report.missing} left out")
    return manifest, report


def speakers_in(manifest: Manifest) -> int:
    """How many different speakers the rows name; 0 if they name none."""
    names, _ = manifest.speakers.numbered()
    return sum(1 for name in names if name)


def _odd_texts(rows: Manifest, at: np.ndarray) -> list[str]:
    """Notices about those of the rows ``at`` whose recording has another text too, whose words have two scripts, or
    whose text is in another script than the rest."""
    notices = []
    keys = recording_keys(rows.wavs, rows.starts)
    if rows.starts.any():  # segments that begin together and end apart are no copies
        keys = Column(join(keys.arrow, pc.cast(pa.array(rows.durations.round(1)), pa.large_string()), separator="@"))
    recordings = keys.take(at).numbered()[1].astype(np.int64)
    spoken = rows.texts.take(at).numbered()[1]
    different = np.unique(recordings * (len(at) + 1) + spoken, return_index=True)[1]
    several = np.flatnonzero(np.bincount(recordings[different]) > 1)
    if len(several):
        one, two = np.sort(at[different[recordings[different] == several[0]]])[:2]
        notices.append(f"{counted(len(several), 'recording')} with more than one text, such as {rows.wavs[one]}: "
                       f"{rows.texts[one]!r} ({rows.ids[one]}) and {rows.texts[two]!r} ({rows.ids[two]})")
    texts = rows.texts.take(at).arrow
    mixed = at[np.flatnonzero(pc.match_substring_regex(texts, _MIXED))]
    if len(mixed):
        text = rows.texts[mixed[0]]
        names = [unicodedata.name(letter, "") for letter in text if unicodedata.category(letter)[0] != "M"]
        beside = next((pair for pair in itertools.pairwise(names) if {name.split(" ")[0] for name in pair} in _PAIRS),
                      ("such letters",))  # named otherwise, as the ordinal indicator is
        notices.append(f"{counted(len(mixed), 'text')} with letters of two scripts in a word, such as "
                       f"{rows.ids[mixed[0]]}: {text[:100]!r} has {' beside '.join(beside)}")
    sample = texts[:_SCRIPT_SAMPLE]
    lettered = np.asarray(pc.match_substring_regex(sample, r"\pL")).sum()
    for script in _SCRIPTS:
        if np.asarray(pc.match_substring_regex(sample, f"[{script}]")).sum() > _MAIN_SCRIPT * lettered:
            # Latin letters, such as those of a product's name, are usual amid any other script.
            others = rf"[^{script}\p{{Latin}}\p{{Common}}\p{{Inherited}}\PL]"
            alone = pc.and_(pc.match_substring_regex(texts, r"\pL"),
                            pc.invert(pc.match_substring_regex(texts, f"[{script}]")))
            odd = np.flatnonzero(pc.or_(alone, pc.match_substring_regex(texts, others)))
            count = [pc.count_substring_regex(texts.take(pa.array(odd)), each).to_numpy() for each in (
                others, f"[{script}]")]
            foreign = at[odd[2 * count[0] >= count[1]]]
            if len(foreign):
                notices.append(f"{counted(len(foreign), 'text')} wholly or in part in another script than the rest, "
                               f"such as {rows.ids[foreign[0]]}: {rows.texts[foreign[0]][:100]!r}")
            break
    return notices


def recording_keys(wavs: Column, starts: np.ndarray) -> Column:
    """Return texts [N] that are equal for rows of the same recording: file and start."""
    return Column(join(wavs.arrow, pc.cast(pa.array(starts), pa.large_string()), separator="@"))


def _durations(rows: Rows, usable: np.ndarray, details: dict[int, str], report: SplitReport, check_audio: str,
               read_headers: Callable[..., tuple[np.ndarray, dict[int, str]]]) -> np.ndarray:
    """Seconds of each usable row, NaN if its recording can't be read; listed durations are checked."""
    durations = rows.durations.copy()
    durations[(durations == 0) & (rows.starts == 0)] = np.nan  # 0 means not measured
    listed = usable[np.isfinite(durations[usable])]
    unlisted = usable[~np.isfinite(durations[usable])]
    sample = listed
    if check_audio == "sample":
        sample = listed[np.unique(np.linspace(0, len(listed) - 1, min(SAMPLE, len(listed)), dtype=int))]

    def measured(at: np.ndarray, what: str) -> np.ndarray:
        seconds, causes = read_headers([rows.wavs[i] for i in at], whole=not rows.segments,
                                       what=f"{report.split}: {what}")
        details.update((int(at[j]), cause) for j, cause in causes.items())
        return seconds

    found = measured(sample, "checking durations")
    wrong = _correct(durations, rows, sample, found)
    damaged = np.isnan(found)
    report.durations = {"listed": len(listed), "measured": len(unlisted), "checked": len(sample),
                        "disagree": int(wrong.sum())}
    if len(sample) < len(listed) and (wrong.mean() > _DISAGREE_SHARE or damaged.mean() > _DAMAGED_SHARE):
        logger.warning("%s: of %d sampled recordings %d have a wrong duration in the list and %d are damaged: "
                       "measuring them all", report.split, len(sample), wrong.sum(), damaged.sum())
        rest = np.setdiff1d(listed, sample)
        wrong_too = _correct(durations, rows, rest, measured(rest, "measuring"))
        report.durations.update(checked=len(listed), disagree=int(wrong.sum() + wrong_too.sum()))
    durations[unlisted] = measured(unlisted, "measuring") - rows.starts[unlisted]
    return durations


def _correct(durations: np.ndarray, rows: Rows, at: np.ndarray, found: np.ndarray) -> np.ndarray:
    """Replace durations of the rows ``at`` that disagree with the audio; return which ones did, as booleans."""
    listed = durations[at]
    left = found - rows.starts[at]
    wrong = _disagree(rows, listed, left)
    durations[at] = np.where(wrong | np.isnan(found), left, listed)
    return wrong


def _disagree(rows: Rows, durations: np.ndarray, left: np.ndarray) -> np.ndarray:
    """Which durations aren't those of what is ``left`` of the recordings from the rows' starts on.

    A recording may continue after a segment ends, so the duration of a segment is wrong only if it is too long.
    """
    excess = durations - left
    return (excess if rows.segments else np.abs(excess)) > length_tolerance(durations)


def _explain(report: SplitReport, rows: Rows, codes: np.ndarray, durations: np.ndarray,
             details: dict[int, str]) -> None:
    for reason in REASONS:
        at = np.flatnonzero(codes == _CODE[reason])
        unread = rows.malformed if reason == MALFORMED else []
        ids = [*(where for where, _ in unread), *rows.ids.take(at)]
        if not ids:
            continue
        wavs = [*([""] * len(unread)), *rows.wavs.take(at)]
        notes = [*(what for _, what in unread), *(details.get(i, "") for i in at.tolist())]
        shown = [note or (wav if reason == MISSING else "")
                 for note, wav in zip(notes[:_EXAMPLES], wavs[:_EXAMPLES], strict=True)]
        report.left_out[reason] = {
            "count": len(ids), "hours": round(float(np.nansum(durations[at])) / 3600, 3),
            "examples": [f"{id_}: {note}" if note else id_ for id_, note in zip(ids[:_EXAMPLES], shown, strict=True)]}
        report.tables.append(exclusions.rows(report.split, reason, ids, wavs, notes, versions=reason == UNDECODABLE))


def reason_in_words(reason: str, options: Mapping[str, Any]) -> str:
    """A reason for which rows are left out, with the limit that they exceed; ``options`` are the corpus's."""
    if reason not in _LIMITS:
        return reason
    name, lies, _ = _LIMITS[reason]
    limit = options.get(name)
    return reason if limit is None else f"{reason}: {lies} corpus.{name}, {limit:g} s"


def remedy(reason: str) -> str:
    """What to do to keep rows that are left out for a reason; empty if it isn't a limit."""
    return _LIMITS[reason][2] if reason in _LIMITS else ""


def summarize(report: Mapping[str, Any], fresh: bool = True) -> str:
    """A table and notes from the content of a ``prepare_report.json``, for the terminal.

    fresh : prepared just now, so what its texts hold and its splits share is news
    """
    splits = report["splits"]
    reasons = [reason for reason in REASONS if any(reason in entry["left_out"] for entry in splits.values())]
    named = {split: split if names == [split] else f"{split} ({', '.join(names)})"
             for split, names in report["source"]["splits"].items()}
    rows = [[named[split], entry["rows"], entry["kept"], float(entry["hours"]),
             *(entry["left_out"].get(reason, {"count": 0})["count"] for reason in reasons)]
            for split, entry in splits.items()]
    lines = [f"{synthesised(report) or report['source']['kind']}: {report['source']['where']}",
             table(["split", "rows", "kept", "hours", *reasons], rows)]
    if report["source"].get("divided"):
        lines.append("dev and test: sentences of the only list, by their hashes; --corpus.splits names other lists")
    for split, entry in splits.items():
        outside = entry["outside_alphabet"]
        if outside:
            characters = " ".join(f"{char!r} x{count}" for char, count in list(outside.items())[:10])
            lines.append(f"{split}: characters outside the alphabet: {characters}")
        if fresh and (found := entry.get("unspoken")):  # missing in reports of earlier versions
            before, after = found["example"]
            now = "" if after == before else f", now {after!r}"
            lines.append(f"{split}: {counted(found['count'], 'text')} with digits or brackets, such as {before!r}{now}"
                         ": write what is spoken, or leave such texts out by an alphabet")
        for reason, one in entry["left_out"].items():
            if one["count"] > _MANY * entry["rows"]:
                words = reason_in_words(reason, report.get("options", {}))
                advice = f"; {remedy(reason)}" if remedy(reason) else ""
                lines.append(f"{split}: {one['count']} of {entry['rows']} rows are left out ({words}), such as "
                             f"{one['examples'][0]}; left_out.csv lists all{advice}")
        lines += [f"{split}: {notice}" for notice in entry.get("notices", [])]
        durations = entry["durations"]
        if (listed := durations.get("listed")) and (missing := durations.get("measured")):
            lines.append(f"{split}: the list has no duration above 0 for {missing} of {listed + missing} rows, so "
                         "these were measured")
        if durations.get("disagree"):
            lines.append(f"{split}: {durations['disagree']} of {durations['checked']} listed durations that "
                         "were checked differ from the audio, and are replaced by its own")
    entries = report.get("leaks") if fresh else None  # missing in reports of earlier versions
    if entries:
        lines.append(table(leaks.COLUMNS, leaks.rows(entries)))
    if entries is not None and len(splits) > 1:
        lines += leaks.remarks(entries)
    return printable("\n".join(lines))


def _first_of_each(column: Column) -> np.ndarray:
    """Whether each value occurs for the first time, [N] booleans."""
    first = np.zeros(len(column), bool)
    first[np.unique(column.numbered()[1], return_index=True)[1]] = True
    return first
