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
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sbkit.data import exclusions, leaks
from sbkit.data.audio import length_tolerance
from sbkit.data.columns import Declared, TextColumn
from sbkit.data.copies import Copies
from sbkit.data.exclusions import CODES, EXCLUDED, IN_OTHER_SPLIT, MALFORMED, MISSING, REFUSED, UNDECODABLE
from sbkit.data.manifest import SECONDS, Column, Manifest, join
from sbkit.data.measure import WORTH_A_BAR, Cause, measure
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
REASONS = tuple(CODES)


class _Limit(NamedTuple):
    """The corpus's option that is the limit, on which side of it rows are left out, and what to do to keep them."""

    option: str
    side: str
    remedy: str


#: The reasons that are limits.
_LIMITS = {
    "too long": _Limit("max_duration", "above", "cut them at pauses, together with their texts, or raise "
                                                "corpus.max_duration and max_batch_seconds"),
    "too short": _Limit("min_duration", "below", "lower corpus.min_duration to keep them"),
}
_NUMBER = {reason: i for i, reason in enumerate(REASONS, 1)}  # 0: the row is kept

#: Rows that a report shows for each reason.
_EXAMPLES = 10
#: If a reason leaves out more than this share of the rows, the summary shows one of them.
_MANY = 0.1
#: Characters outside the alphabet that a report counts: the most frequent ones.
_MOST_CHARACTERS = 100
#: Listed durations that are compared with the audio.
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


class _Decisions:
    """Which of N rows are left out, each for the first reason that applies.

    reasons : [N], by ``_NUMBER``, the number of each row's reason; 0: it is kept
    details : by row that is left out, what exactly is wrong with it; written by ``leave_out`` alone, so that a detail
        is always one of the row's reason
    codes : by row that is left out, the code of what is wrong with its recording, if that differs from the reason's
    bad_beside : by row, the recording of a further column that is missing or damaged, though the row's own is not
    """

    def __init__(self, count: int):
        self.reasons = np.zeros(count, np.int8)
        self.details: dict[int, str] = {}
        self.codes: dict[int, str] = {}
        self.bad_beside: dict[int, str] = {}

    @property
    def kept(self) -> np.ndarray:
        """The numbers of the rows that no reason has applied to so far."""
        return np.flatnonzero(self.reasons == 0)

    def leave_out(self, reason: str, mask: np.ndarray, detail: Callable[[int], str | Cause] | None = None) -> list[int]:
        """Leave out the rows of ``mask`` [N] that are still kept, and return their numbers.

        detail : returns what is wrong with a row
        """
        rows = np.flatnonzero((self.reasons == 0) & mask)
        self.reasons[rows] = _NUMBER[reason]
        if detail is not None:
            for row in rows.tolist():
                what = detail(row)
                if isinstance(what, Cause):
                    self.codes[row] = what.code
                    what = what.words
                self.details[row] = what
        return rows.tolist()


def prepare_split(split: str, rows: Rows, rules: TextRules, limits: RowLimits, *, held_out: Sequence[Column] = (),
                  listings: dict[str, pa.Array | None] | None = None, check_audio: str = "sample",
                  copies: Copies | None = None, journal: Path | None = None, workers: int | None = None,
                  remote: Remote = NO_REMOTE, columns: Declared = MappingProxyType({}),
                  exclude: Exclusions | None = None, show_progress: bool = True) -> tuple[Manifest, SplitReport]:
    """Make the manifest of a split: normalise texts, measure recordings, leave out unusable and unwanted rows.

    rows : N rows of a source
    held_out : recordings of other splits (:func:`recording_keys`), to leave out of this one
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
    decisions = _Decisions(len(rows))
    read_headers = functools.partial(measure, workers=workers, journal=journal, remote=remote,
                                     show_progress=show_progress)

    rows = _check_list(rows, decisions, remote)
    for keys in held_out:
        decisions.leave_out(IN_OTHER_SPLIT, recording_keys(rows.wavs, rows.starts).is_in(keys))
    decisions.leave_out(MISSING, ~existing(rows.wavs, listings))

    texts = [rules(text) for text in progress(
        rows.texts, what=f"{split}: text", total=len(rows), unit="row",
        show=show_progress and len(rows) >= WORTH_A_BAR)]
    # A row without a text can be a recording of silence, which is then trained on as such.
    is_silence = np.full(len(rows), limits.silence) & ~np.asarray(pc.match_substring_regex(rows.texts.arrow, r"\S"))
    if limits.text:
        decisions.leave_out("no text", np.array([not text for text in texts], bool) & ~is_silence)
    if exclude is not None:
        decisions.leave_out(EXCLUDED, exclude.mask(rows.ids, texts, rows.origin))

    durations, causes = _durations(rows, decisions, report, check_audio, read_headers)
    # A recording that is longer than its header says is used as far as that goes, and reported.
    causes_of_longer = {row: cause for row, cause in causes.items() if np.isfinite(durations[row])}
    _check_durations(rows, durations, causes, limits, decisions)
    report.outside_alphabet = _check_alphabet(texts, rules, limits, decisions)
    if limits.min_words:
        too_few = np.array([count_words(text) < limits.min_words for text in texts], bool)
        decisions.leave_out("few words", too_few & ~is_silence)

    # Further columns that the task declares: texts such as labels, and recordings beside the first one.
    meta = dict(rows.meta)
    for name, column in columns.items():
        if isinstance(column, TextColumn):
            is_empty = pc.equal(pc.utf8_trim_whitespace(rows.column(name).arrow), "").to_numpy(zero_copy_only=False)
            decisions.leave_out("empty column", is_empty, lambda row, name=name: name)  # type: ignore[misc]
            continue
        seconds, causes = _check_recordings(name, rows, decisions, split, listings, remote, read_headers)
        for row, cause in causes.items():
            if np.isfinite(seconds[row]):
                causes_of_longer.setdefault(row, Cause(cause.code, f"{name}: {cause.words}"))
        if column.aligned:
            _check_lengths(name, rows, durations, seconds, decisions)
        else:
            meta[name + SECONDS] = Column([f"{length:.3f}" for length in seconds.tolist()])

    if copies is not None:
        _check_copies(copies, rows, durations, decisions, report)

    everything = Manifest(
        ids=rows.ids, durations=np.nan_to_num(durations), wavs=rows.wavs, texts=texts, speakers=rows.speakers,
        starts=rows.starts, meta=meta, remote=remote)
    manifest = everything.select(decisions.kept)
    report.kept = len(manifest)
    report.hours = manifest.hours
    report.speakers = speakers_in(manifest)
    report.synthesised = hours_by_synthesiser(manifest)
    if limits.text:
        report.unspoken = _unspoken(rows, texts, decisions.kept)
    report.notices += _odd_rows(rows, decisions, is_silence, causes_of_longer)
    if limits.text:
        # Also among rows that repeat an id: mostly the same recording is listed twice, with two texts.
        repeats = decisions.reasons == _NUMBER["repeated id"]
        report.notices += _odd_texts(everything, np.flatnonzero((decisions.reasons == 0) | repeats))
    _report_left_out(report, rows, decisions, durations)
    assert report.rows == report.kept + report.missing, f"{split}: {report.rows} rows, {report.kept} kept, " \
                                                        f"{report.missing} left out"
    return manifest, report


def _check_list(rows: Rows, decisions: _Decisions, remote: Remote) -> Rows:
    """Leave out what the list alone shows to be unusable; return the rows with unique ids."""
    decisions.leave_out(MALFORMED, ~(rows.starts >= 0), lambda row: "its start is not a number of 0 or more")
    decisions.leave_out(REFUSED, refused(rows.wavs, remote), lambda row: remote.refusal(rows.wavs[row]))
    if _first_of_each(rows.ids).all():
        return rows
    # The same recording is kept once; different recordings with the same id (of a sentence, say) get numbered ids.
    ids_of_recordings = join(rows.ids.arrow, recording_keys(rows.wavs, rows.starts).arrow, separator="@")
    decisions.leave_out("repeated id", ~_first_of_each(Column(ids_of_recordings)))
    ids = np.array(list(rows.ids), object)
    ids[decisions.kept] = unique_ids(ids[decisions.kept])
    renamed = copy.copy(rows)
    renamed.ids = Column(ids.tolist())
    return renamed


def _check_durations(rows: Rows, durations: np.ndarray, causes: Mapping[int, Cause], limits: RowLimits,
                     decisions: _Decisions) -> None:
    """Leave out rows that can't be read, with the causes by row, and those beyond the limits of durations."""
    def seconds_of(row: int) -> str:
        return f"{durations[row]:.2f} s"

    def starts_too_late(row: int) -> Cause:
        return Cause("segment-outside-audio", f"it ends before its start at {rows.starts[row]:.2f} s")

    decisions.leave_out(UNDECODABLE, np.isnan(durations), lambda row: causes.get(row, ""))
    decisions.leave_out(UNDECODABLE, durations <= 0, starts_too_late)
    if limits.min_duration is not None:
        decisions.leave_out("too short", durations < limits.min_duration, seconds_of)
    if limits.max_duration is not None:
        decisions.leave_out("too long", durations > limits.max_duration, seconds_of)


def _check_alphabet(texts: Sequence[str], rules: TextRules, limits: RowLimits,
                    decisions: _Decisions) -> dict[str, int]:
    """Return the most frequent characters outside the alphabet, with counts; leave out their rows if it is a limit."""
    if rules.alphabet is None:
        return {}
    counts: Counter[str] = Counter()
    characters_outside: dict[int, str] = {}  # by row
    for row in decisions.kept.tolist():
        characters = rules.outside(texts[row])
        if characters:
            counts.update(characters)
            characters_outside[row] = " ".join(sorted(characters))
    if limits.alphabet:
        is_outside = np.zeros(len(texts), bool)
        is_outside[list(characters_outside)] = True
        decisions.leave_out("alphabet", is_outside, characters_outside.__getitem__)
    return dict(counts.most_common(_MOST_CHARACTERS))


def _check_recordings(
        name: str, rows: Rows, decisions: _Decisions, split: str, listings: dict[str, pa.Array | None] | None,
        remote: Remote,
        read_headers: Callable[..., tuple[np.ndarray, dict[int, Cause]]]) -> tuple[np.ndarray, dict[int, Cause]]:
    """Leave out rows whose recording in a further column is missing or unreadable.

    Returns the seconds [N], NaN for those that aren't read, and by row why a recording can't be read, or what isn't
    read of it.
    """
    wavs = rows.column(name)
    is_missing = refused(wavs, remote) | ~existing(wavs, listings)
    missing_rows = decisions.leave_out(MISSING, is_missing, lambda row: f"{name}: {wavs[row]}")

    to_read = decisions.kept
    seconds = np.full(len(rows), np.nan)
    seconds[to_read], causes_by_index = read_headers(list(wavs.take(to_read)), what=f"{split}: {name}")
    causes = {int(to_read[i]): cause for i, cause in causes_by_index.items()}

    def cause_of(row: int) -> Cause:
        cause = causes.get(row, Cause("empty-audio", f"{wavs[row]} is empty"))  # one of no length has no cause
        return Cause(cause.code, f"{name}: {cause.words}")

    damaged_rows = decisions.leave_out(UNDECODABLE, ~(seconds > 0), cause_of)

    decisions.bad_beside.update((row, wavs[row]) for row in (*missing_rows, *damaged_rows))
    return seconds, causes


def _check_lengths(name: str, rows: Rows, durations: np.ndarray, seconds: np.ndarray, decisions: _Decisions) -> None:
    """Leave out rows whose recordings in an aligned column aren't as long as the rows' own."""
    decisions.leave_out(
        "signals of different length", _disagree(rows, durations, seconds - rows.starts), lambda row: (
            f"{name}: {seconds[row]:.2f} s, but {durations[row]:.2f} s from {rows.starts[row]:.2f} s on are needed"))


def _check_copies(copies: Copies, rows: Rows, durations: np.ndarray, decisions: _Decisions,
                  report: SplitReport) -> None:
    """Compare the recordings with those of other splits: training leaves out copies, dev and test only report them."""
    is_train = report.split == "train"
    to_compare = decisions.kept
    originals, causes = copies.search(
        report.split, ids=rows.ids.take(to_compare), wavs=rows.wavs.take(to_compare), starts=rows.starts[to_compare],
        durations=durations[to_compare], keep=not is_train)
    original_of = {int(to_compare[i]): name for i, name in originals.items()}
    cause_of = {int(to_compare[i]): cause for i, cause in causes.items()}
    numbers = np.arange(len(rows))
    decisions.leave_out(UNDECODABLE, np.isin(numbers, list(cause_of)), cause_of.__getitem__)
    if is_train:
        is_copy = np.isin(numbers, list(original_of))
        decisions.leave_out(IN_OTHER_SPLIT, is_copy, lambda row: f"is {original_of[row]}")
    else:
        report.copies = {rows.ids[row]: name for row, name in original_of.items()}


def speakers_in(manifest: Manifest) -> int:
    """How many different speakers the rows name; 0 if they name none."""
    names, _ = manifest.speakers.numbered()
    return sum(1 for name in names if name)


def _unspoken(rows: Rows, texts: Sequence[str], kept_rows: np.ndarray) -> dict[str, Any]:
    """How many of the rows have texts with digits or brackets, and the first of them before and after the rules."""
    unspoken = np.intersect1d(kept_rows, np.flatnonzero(pc.match_substring_regex(rows.texts.arrow, _UNSPOKEN)))
    if not len(unspoken):
        return {}
    first = int(unspoken[0])
    return {"count": len(unspoken), "example": [rows.texts[first][:100], texts[first][:100]]}


def _odd_rows(rows: Rows, decisions: _Decisions, is_silence: np.ndarray,
              causes_of_longer: Mapping[int, Cause]) -> list[str]:
    """Notices about rows that are kept without a text, or although their recordings are longer than they say.

    causes_of_longer : by row, what was seen in a recording that is longer than its header says
    """
    notices = []
    kept_silence = np.flatnonzero((decisions.reasons == 0) & is_silence)
    if len(kept_silence):
        notices.append(f"{counted(len(kept_silence), 'row')} without a text, trained on as silence (nonspeech), "
                       f"such as {rows.ids[int(kept_silence[0])]}")
    kept_longer = [row for row in causes_of_longer if decisions.reasons[row] == 0]
    if kept_longer:
        first = kept_longer[0]
        notices.append(f"{counted(len(kept_longer), 'recording')} longer than the header says, such as "
                       f"{rows.ids[first]}: {causes_of_longer[first].words}")
    return notices


def _odd_texts(rows: Manifest, indices: np.ndarray) -> list[str]:
    """Notices about those of the rows whose recording has another text too, whose words have two scripts, or whose text
    is in another script than the rest."""
    notices = (_several_texts(rows, indices), _mixed_scripts(rows, indices), _foreign_texts(rows, indices))
    return [notice for notice in notices if notice is not None]


def _several_texts(rows: Manifest, indices: np.ndarray) -> str | None:
    keys = recording_keys(rows.wavs, rows.starts)
    if rows.starts.any():  # segments that begin together and end apart are no copies
        keys = Column(join(keys.arrow, pc.cast(pa.array(rows.durations.round(1)), pa.large_string()), separator="@"))
    recordings = keys.take(indices).numbered()[1].astype(np.int64)
    texts = rows.texts.take(indices).numbered()[1]
    # The first row of each pair of a recording and a text.
    first_of_pair = np.unique(recordings * (len(indices) + 1) + texts, return_index=True)[1]
    several = np.flatnonzero(np.bincount(recordings[first_of_pair]) > 1)
    if not len(several):
        return None
    of_first = indices[first_of_pair[recordings[first_of_pair] == several[0]]]
    one, two = np.sort(of_first)[:2]
    return (f"{counted(len(several), 'recording')} with more than one text, such as {rows.wavs[one]}: "
            f"{rows.texts[one]!r} ({rows.ids[one]}) and {rows.texts[two]!r} ({rows.ids[two]})")


def _mixed_scripts(rows: Manifest, indices: np.ndarray) -> str | None:
    mixed = indices[np.flatnonzero(pc.match_substring_regex(rows.texts.take(indices).arrow, _MIXED))]
    if not len(mixed):
        return None
    text = rows.texts[mixed[0]]
    letters = [unicodedata.name(letter, "") for letter in text if unicodedata.category(letter)[0] != "M"]
    beside: Sequence[str] = ("such letters",)  # named otherwise, as the ordinal indicator is
    for pair in itertools.pairwise(letters):
        if {name.split(" ")[0] for name in pair} in _PAIRS:
            beside = pair
            break
    return (f"{counted(len(mixed), 'text')} with letters of two scripts in a word, such as "
            f"{rows.ids[mixed[0]]}: {text[:100]!r} has {' beside '.join(beside)}")


def _foreign_texts(rows: Manifest, indices: np.ndarray) -> str | None:
    texts = rows.texts.take(indices).arrow
    script = _main_script(texts[:_SCRIPT_SAMPLE])
    if script is None:
        return None
    # Latin letters, such as those of a product's name, are usual amid any other script.
    other_letter = rf"[^{script}\p{{Latin}}\p{{Common}}\p{{Inherited}}\PL]"
    lacks_script = pc.and_(pc.match_substring_regex(texts, r"\pL"),
                           pc.invert(pc.match_substring_regex(texts, f"[{script}]")))
    suspicious = np.flatnonzero(pc.or_(lacks_script, pc.match_substring_regex(texts, other_letter)))
    suspicious_texts = texts.take(pa.array(suspicious))
    others = pc.count_substring_regex(suspicious_texts, other_letter).to_numpy()
    usual = pc.count_substring_regex(suspicious_texts, f"[{script}]").to_numpy()
    foreign = indices[suspicious[2 * others >= usual]]  # a quoted word of another script is no mistake
    if not len(foreign):
        return None
    return (f"{counted(len(foreign), 'text')} wholly or in part in another script than the rest, "
            f"such as {rows.ids[foreign[0]]}: {rows.texts[foreign[0]][:100]!r}")


def _main_script(texts: pa.Array) -> str | None:
    """Return the script that nearly all of the texts have letters of; None: there is none."""
    with_letters = np.asarray(pc.match_substring_regex(texts, r"\pL")).sum()
    for script in _SCRIPTS:
        if np.asarray(pc.match_substring_regex(texts, f"[{script}]")).sum() > _MAIN_SCRIPT * with_letters:
            return script
    return None


def recording_keys(wavs: Column, starts: np.ndarray) -> Column:
    """Return texts [N] that are equal for rows of the same recording: file and start."""
    return Column(join(wavs.arrow, pc.cast(pa.array(starts), pa.large_string()), separator="@"))


def _durations(
        rows: Rows, decisions: _Decisions, report: SplitReport, check_audio: str,
        read_headers: Callable[..., tuple[np.ndarray, dict[int, Cause]]]) -> tuple[np.ndarray, dict[int, Cause]]:
    """Measure recordings, and check listed durations.

    Returns the seconds of each kept row, NaN if its recording can't be read, and by row why it can't, or what isn't
    read of it.
    """
    causes: dict[int, Cause] = {}
    durations = rows.durations.copy()
    durations[(durations == 0) & (rows.starts == 0)] = np.nan  # 0 means not measured
    is_listed = np.isfinite(durations[decisions.kept])
    listed = decisions.kept[is_listed]
    unlisted = decisions.kept[~is_listed]
    sample = listed
    if check_audio == "sample":
        sample = listed[np.unique(np.linspace(0, len(listed) - 1, min(SAMPLE, len(listed)), dtype=int))]

    def measured(indices: np.ndarray, what: str) -> np.ndarray:
        seconds, causes_by_index = read_headers([rows.wavs[row] for row in indices], whole=not rows.segments,
                                                what=f"{report.split}: {what}")
        causes.update((int(indices[i]), cause) for i, cause in causes_by_index.items())
        return seconds

    seconds_of_sample = measured(sample, "checking durations")
    is_wrong = _correct(durations, rows, sample, seconds_of_sample)
    is_damaged = np.isnan(seconds_of_sample)
    report.durations = {"listed": len(listed), "measured": len(unlisted), "checked": len(sample),
                        "disagree": int(is_wrong.sum())}
    if len(sample) < len(listed) and (is_wrong.mean() > _DISAGREE_SHARE or is_damaged.mean() > _DAMAGED_SHARE):
        logger.warning("%s: of %d sampled recordings %d have a wrong duration in the list and %d are damaged: "
                       "measuring them all", report.split, len(sample), is_wrong.sum(), is_damaged.sum())
        rest = np.setdiff1d(listed, sample)
        is_wrong_too = _correct(durations, rows, rest, measured(rest, "measuring"))
        report.durations.update(checked=len(listed), disagree=int(is_wrong.sum() + is_wrong_too.sum()))
    durations[unlisted] = measured(unlisted, "measuring") - rows.starts[unlisted]
    return durations, causes


def _correct(durations: np.ndarray, rows: Rows, indices: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Replace durations of the rows ``indices`` that disagree with the ``seconds`` of their recordings; return which
    ones did, as booleans."""
    listed = durations[indices]
    available = seconds - rows.starts[indices]
    is_wrong = _disagree(rows, listed, available)
    durations[indices] = np.where(is_wrong | np.isnan(seconds), available, listed)
    return is_wrong


def _disagree(rows: Rows, durations: np.ndarray, available: np.ndarray) -> np.ndarray:
    """Which durations aren't those that are ``available`` in the recordings from the rows' starts on.

    A recording may continue after a segment ends, so the duration of a segment is wrong only if it is too long.
    """
    excess = durations - available
    return (excess if rows.segments else np.abs(excess)) > length_tolerance(durations)


def _report_left_out(report: SplitReport, rows: Rows, decisions: _Decisions, durations: np.ndarray) -> None:
    """Write into the report, for each reason, how many rows were left out, with examples and a table of all."""
    for reason in REASONS:
        indices = np.flatnonzero(decisions.reasons == _NUMBER[reason])
        unparsed = rows.malformed if reason == MALFORMED else []  # which have no columns, and so no numbers
        ids = [*(name for name, _ in unparsed), *rows.ids.take(indices)]
        if not ids:
            continue
        # The recording that is missing or damaged is the one that later preparations look for.
        wavs = [*([""] * len(unparsed)),
                *(decisions.bad_beside.get(row, wav)
                  for row, wav in zip(indices.tolist(), rows.wavs.take(indices), strict=True))]
        details = [*(wrong for _, wrong in unparsed), *(decisions.details.get(row, "") for row in indices.tolist())]
        codes = [*([CODES[reason]] * len(unparsed)),
                 *(decisions.codes.get(row, CODES[reason]) for row in indices.tolist())]
        examples = []
        for id_, wav, detail in itertools.islice(zip(ids, wavs, details, strict=True), _EXAMPLES):
            shown = wav if reason == MISSING and not detail else detail
            examples.append(f"{id_}: {shown}" if shown else id_)
        report.left_out[reason] = {
            "count": len(ids), "hours": round(float(np.nansum(durations[indices])) / 3600, 3), "examples": examples,
            "codes": dict(Counter(codes).most_common())}
        report.tables.append(exclusions.rows(report.split, reason, ids, wavs, details, codes=codes,
                                             versions=reason == UNDECODABLE))


def reason_in_words(reason: str, options: Mapping[str, Any]) -> str:
    """A reason for which rows are left out, with the limit that they exceed; ``options`` are the corpus's."""
    if reason not in _LIMITS:
        return reason
    limit = _LIMITS[reason]
    seconds = options.get(limit.option)
    return reason if seconds is None else f"{reason}: {limit.side} corpus.{limit.option}, {seconds:g} s"


def remedy(reason: str) -> str:
    """What to do to keep rows that are left out for a reason; empty if it isn't a limit."""
    return _LIMITS[reason].remedy if reason in _LIMITS else ""


def summarize(report: Mapping[str, Any], fresh: bool = True) -> str:
    """A table and notes from the content of a ``prepare_report.json``, for the terminal.

    fresh : prepared just now, so what its texts hold and its splits share is news
    """
    splits = report["splits"]
    reasons = [reason for reason in REASONS if any(reason in entry["left_out"] for entry in splits.values())]
    rows = []
    for split, entry in splits.items():
        source_names = report["source"]["splits"][split]
        title = split if source_names == [split] else f"{split} ({', '.join(source_names)})"
        counts = [entry["left_out"].get(reason, {"count": 0})["count"] for reason in reasons]
        rows.append([title, entry["rows"], entry["kept"], float(entry["hours"]), *counts])
    lines = [f"{synthesised(report) or report['source']['kind']}: {report['source']['where']}",
             table(["split", "rows", "kept", "hours", *reasons], rows)]
    if report["source"].get("divided"):
        lines.append("dev and test were split off the only list, by hashes of sentences; --corpus.splits chooses "
                     "other lists")
    for split, entry in splits.items():
        notes = _notes(entry, report.get("options", {}), fresh)
        lines += [f"{split}: {note}" for note in notes]
    entries = report.get("leaks") if fresh else None  # missing in reports of earlier versions
    if entries:
        lines.append(table(leaks.COLUMNS, leaks.rows(entries)))
    if entries is not None and len(splits) > 1:
        lines += leaks.remarks(entries)
    return printable("\n".join(lines))


def _notes(entry: Mapping[str, Any], options: Mapping[str, Any], fresh: bool) -> list[str]:
    """Say what looks wrong in a split, by its entry in ``prepare_report.json``."""
    notes = []
    outside = entry["outside_alphabet"]
    if outside:
        characters = " ".join(f"{char!r} x{count}" for char, count in list(outside.items())[:10])
        notes.append(f"characters outside the alphabet: {characters}")

    unspoken = entry.get("unspoken") if fresh else None  # missing in reports of earlier versions
    if unspoken:
        before, after = unspoken["example"]
        now = "" if after == before else f", now {after!r}"
        notes.append(f"{counted(unspoken['count'], 'text')} with digits or brackets, such as {before!r}{now}"
                     ": write what is spoken, or leave such texts out by an alphabet")

    for reason, left_out in entry["left_out"].items():
        if left_out["count"] > _MANY * entry["rows"]:
            advice = f"; {remedy(reason)}" if remedy(reason) else ""
            notes.append(f"{left_out['count']} of {entry['rows']} rows are left out "
                         f"({reason_in_words(reason, options)}), such as {left_out['examples'][0]}; left_out.csv lists "
                         f"all{advice}")
    notes += entry.get("notices", [])

    durations = entry["durations"]
    listed = durations.get("listed")
    unlisted = durations.get("measured")
    if listed and unlisted:
        notes.append(f"the list has no duration above 0 for {unlisted} of {listed + unlisted} rows, so these were "
                     "measured")
    if durations.get("disagree"):
        notes.append(f"{durations['disagree']} of {durations['checked']} listed durations that were checked differ "
                     "from those of the audio, which replace them")
    return notes


def _first_of_each(column: Column) -> np.ndarray:
    """Whether each value occurs for the first time, [N] booleans."""
    first = np.zeros(len(column), bool)
    first[np.unique(column.numbered()[1], return_index=True)[1]] = True
    return first
