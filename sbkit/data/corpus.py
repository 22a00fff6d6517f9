"""The corpus of a recipe: prepares a source of any kind into manifests and a report, once."""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

import sbkit
from sbkit.data import exclusions, leaks
from sbkit.data.columns import Declared, SignalColumn, defaults_to_recording
from sbkit.data.copies import Copies
from sbkit.data.lock import locked
from sbkit.data.manifest import Column, Manifest, mapped_file
from sbkit.data.prepare import (
    RowLimits,
    SplitReport,
    prepare_split,
    reason_in_words,
    recording_keys,
    remedy,
    summarize,
)
from sbkit.data.presence import check_opened, refused
from sbkit.data.remote import NO_REMOTE, SCHEMES, Remote, check_schemes, scheme_of
from sbkit.data.sources import Named, Rows, Source, check_exists, is_hub_address, join_rows, open_source
from sbkit.data.sources.archive import SUFFIXES as ARCHIVES
from sbkit.data.sources.base import ALIASES
from sbkit.data.splits import SPLITS, check_splits, choose_splits, hold_out
from sbkit.data.suspects import Exclusions
from sbkit.data.text import NormalizedBefore, TextRules
from sbkit.errors import SbkitError
from sbkit.system import disk
from sbkit.system.console import atomic_write
from sbkit.system.disk import cache_folder
from sbkit.system.schema import COUNT, NOT_NEGATIVE, POSITIVE, SIZE, Nullable, require, texts

logger = logging.getLogger(__name__)

#: Increase when the same input gives other manifests than before.
_FORMAT = 4
#: Beginnings of the names of files with measured durations and with fingerprints of recordings, from which a
#: preparation that was stopped continues.
_DURATIONS = ".durations-"
_COPIES = ".copies-"
_TEMPORARY = ".new"


class Corpus:
    """Utterances for training, validation and testing, prepared from a source into manifests.

    source : a Common Voice folder or ``.tar.gz``, a Hugging Face dataset (``hf://owner/name?config=fr``, a
        ``save_to_disk`` folder, parquet files), LJSpeech's folder, LibriSpeech's, a folder of SpeechBrain CSVs or of
        JSON lines, or a mapping ``{train: FILE, dev: FILE, test: FILE}`` where FILE may be a list; null: the demo
        corpus
    language : code as the source writes it (``en``, ``zh-CN``); chooses a release's language and the text rules
    folder : where manifests, ``prepare_report.json`` and ``left_out.csv`` are written
    splits : the source's names for our splits, ``{train: [train, other], dev: validation}``
    text : text normalisation, a ``TextRules`` or a mapping of options that differ from the language's rules
    min_duration, max_duration : seconds; utterances outside this range are left out of the ``limit_splits``
    limit_splits : splits to which the duration limits and the alphabet apply; others keep such utterances
    only : the splits to prepare; the source need not have the others
    skip_short_texts : splits that leave out texts of fewer than ``short_text`` words (SpeechBrain: all three)
    check_audio : "sample" compares some listed durations with the audio; "all" opens every recording, and leaves out of
        training those with the same bytes as one in dev or test; "decode" decodes every recording, and leaves out what
        can't be decoded, and of training also copies that were re-encoded, resampled, made louder or cut
    exclude : a list of training rows to leave out, as ``sbkit clean`` writes it
    columns : the source's column names by role, ``{audio: speech, text: raw_transcription}``, or their numbers if it
        has no header: ``{text: 2, speaker: 3}``
    data_root : replaces ``$data_root`` in paths, and relative paths start from it; by default their file's folder
    schemes : kinds of URL that rows may name, such as ``[https]``; by default the scheme of ``data_root``, ``hf`` for a
        dataset on the hub, and none otherwise
    url_megabytes, url_seconds : limits of size and download time for one recording behind a URL
    cache_folder : where audio that must be unpacked is stored, by default beside the manifests
    workers : processes that measure recordings, by default chosen for the machine
    demo_hours, demo_seed : size and seed of the demo corpus
    demo_voices : voices of espeak-ng for the whole demo corpus, for training a TTS voice; by default many
    """

    def __init__(self, source: Named | Source | None = None, language: str | None = None,
                 folder: str | Path = "manifests", *, splits: Mapping[str, str | Sequence[str]] | None = None,
                 text: TextRules | Mapping[str, Any] | None = None, min_duration: float | None = None,
                 max_duration: float | None = None, limit_splits: Sequence[str] = ("train",),
                 only: Sequence[str] = SPLITS,
                 skip_short_texts: Sequence[str] = (), short_text: int = 3, check_audio: str = "sample",
                 exclude: str | Path | None = None,
                 columns: Mapping[str, str] | None = None, data_root: str | Path | None = None,
                 schemes: Sequence[str] | None = None, url_megabytes: float = NO_REMOTE.megabytes,
                 url_seconds: float = NO_REMOTE.seconds,
                 cache_folder: str | Path | None = None, workers: int | None = None,
                 demo_hours: float = 1.0, demo_seed: int = 1234, demo_voices: Sequence[str] = ()):
        if not isinstance(source, (str, Path, Mapping, Source, type(None))):
            raise SbkitError("bad-value", f"corpus: source is {source!r}",
                             hint="expected a path, a hub address, {train: FILE, dev: FILE, test: FILE}, or a Source",
                             key="corpus.source", value=source)
        for name, value in (("splits", splits), ("columns", columns), ("text", text)):
            if not isinstance(value, (Mapping, TextRules, type(None))):
                raise SbkitError("bad-value", f"corpus: {name} is {value!r}", hint="expected {name: value, ...}",
                                 key=f"corpus.{name}", value=value)
        self.source = source or None
        self.language = language or None
        self.folder = Path(folder)
        self.splits = {split: texts(f"corpus: splits: {split}", names) for split, names in (splits or {}).items()}
        self.text = text if isinstance(text, TextRules) else TextRules.for_language(language, **(text or {}))
        self.min_duration = min_duration
        self.max_duration = max_duration
        self.limit_splits = tuple(texts("corpus: limit_splits", limit_splits))
        self.skip_short_texts = tuple(texts("corpus: skip_short_texts", skip_short_texts))
        self.only = tuple(texts("corpus: only", only))
        self.short_text = short_text
        self.check_audio = check_audio
        self.exclude = Path(exclude) if exclude else None
        self.columns = dict(columns or {})
        self.data_root = data_root
        self.schemes = None if schemes is None else check_schemes("corpus: schemes", texts("corpus: schemes", schemes))
        self.url_megabytes = url_megabytes
        self.url_seconds = url_seconds
        self.cache_folder = Path(cache_folder) if cache_folder else self.folder / "audio"
        self.workers = workers
        self.demo_hours = demo_hours
        self.demo_seed = demo_seed
        self.demo_voices = texts("corpus: demo_voices", demo_voices) if demo_voices else []
        self.report: dict[str, Any] | None = None
        self._reused = False  # whether the last call of `prepare` found everything prepared
        self._trained_run: Path | None = None
        self._needs_text = True
        self._keeps_silence = False
        self._declared: Declared = {}
        self._recording_columns: set[str] = set()  # which the source lacks: they are the rows' own recordings
        self._check()

    def _check(self) -> None:
        for voice in self.demo_voices:
            if not re.fullmatch(r"[\w+-]+", voice):
                raise SbkitError("unknown-voice", f"corpus: demo_voices: {voice!r} is not a voice of espeak-ng",
                                 hint="write a name such as en-us+f2", key="corpus.demo_voices", value=voice)
        for name in ("min_duration", "max_duration"):
            require(f"corpus: {name}", getattr(self, name), Nullable(NOT_NEGATIVE))
        require("corpus: short_text", self.short_text, COUNT)
        require("corpus: workers", self.workers, Nullable(SIZE))
        for name in ("demo_hours", "url_megabytes", "url_seconds"):
            require(f"corpus: {name}", getattr(self, name), POSITIVE)
        for option in ("splits", "limit_splits", "skip_short_texts", "only"):
            check_splits(option, getattr(self, option))
        if not self.only:
            raise SbkitError("bad-value", "corpus: only is empty", hint=f"name one or more of {', '.join(SPLITS)}",
                             key="corpus.only")
        if self.check_audio not in ("sample", "all", "decode"):
            raise SbkitError("bad-value", f"corpus: check_audio is {self.check_audio!r}",
                             hint="use sample, all or decode", key="corpus.check_audio", value=self.check_audio)

    def __repr__(self) -> str:
        return f"Corpus({self.source or 'demo'!r}, language={self.language!r}, folder={str(self.folder)!r})"

    def manifest_path(self, split: str) -> Path:
        return self.folder / f"{split}.csv"

    @property
    def remote(self) -> Remote:
        """Which URLs may be opened: the ``schemes`` that the recipe allows, by default that of the corpus's address."""
        schemes = self.schemes
        if schemes is None:
            on_hub = isinstance(self.source, (str, Path)) and is_hub_address(self.source)
            address_scheme = "hf" if on_hub else scheme_of(str(self.data_root))
            schemes = (address_scheme,) if address_scheme in SCHEMES else ()
        return Remote(schemes, self.url_megabytes, self.url_seconds)

    def manifest(self, split: str) -> Manifest:
        """Read the prepared manifest of a split; refuse one with URLs that may not be opened."""
        path = self.manifest_path(split)
        manifest = Manifest.open_prepared(path, self.remote)
        if manifest.has_urls:
            check_opened(manifest.wavs, manifest.remote, path)
        return manifest

    @property
    def report_path(self) -> Path:
        return self.folder / "prepare_report.json"

    # ---------------------------------------------------------------- prepare

    def keep_silence(self) -> None:
        """Keep training rows whose text is empty as rows in which nobody speaks."""
        self._keeps_silence = True

    def prepare(self, show_progress: bool = True, needed: Sequence[str] = (),
                needs_text: bool = True, columns: Declared | None = None) -> dict[str, Manifest]:
        """Prepare the corpus and return manifests by split; those on disk are reused if nothing has changed.

        A change is one of the options, of the size or date of lists, tables and archives, or of recordings that were
        missing or undecodable the last time. Other recordings are not checked again.

        In a run of several processes one of them prepares, and the others call :meth:`load` afterwards.

        needed : splits that the source must have; a missing one is an error before any audio is read
        needs_text : whether rows without a text are left out
        columns : those that the task declares; rows that lack one are left out
        """
        self._declare(needs_text, columns or {})
        excluded = None if self.exclude is None else Exclusions.read(self.exclude)
        with locked(self.folder / ".lock"):
            source = self._open(show_progress)
            fingerprint = self._fingerprint(source)
            ready = self._read_ready(source, fingerprint)
            self._reused = ready is not None and set(needed) <= set(ready)
            if ready is not None and self._reused:
                logger.info("the corpus is already prepared in %s", self.folder)  # its table names the source
                return ready
            self._check_unprotected()
            try:
                with disk.disk_errors_as_user_error(self.folder):
                    return self._prepare(source, fingerprint, show_progress, needed, excluded)
            except OSError as error:  # such as a folder without write permission
                raise SbkitError("not-writable", f"{error.filename or self.folder}: {error.strerror or error}",
                                 file=error.filename or self.folder) from error

    def protect(self, run: str | Path) -> None:
        """Let :meth:`prepare` refuse to replace manifests by others, because the run in this folder was trained on
        them."""
        self._trained_run = Path(run)

    def _check_unprotected(self) -> None:
        if self._trained_run is not None and self.report_path.is_file():
            raise SbkitError("corpus-changed", f"{self.folder} has the manifests that the run in {self._trained_run} "
                             "was trained on, but the corpus or its options have changed since",
                             hint="choose another --output_folder", file=self.folder)

    def load(self) -> dict[str, Manifest]:
        """Read the manifests that :meth:`prepare` wrote, by split."""
        try:
            self.report = json.loads(self.report_path.read_text(encoding="utf-8"))
            names = list(self.report["splits"])
        except FileNotFoundError:
            raise SbkitError("not-prepared", f"{self.folder} does not contain a prepared corpus",
                             hint="prepare it first (sbkit prepare)", file=self.folder) from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SbkitError("damaged-preparation", f"{self.report_path} is damaged ({error})",
                             hint="remove it and prepare the corpus again", file=self.report_path) from None
        return {split: self.manifest(split) for split in names}

    def only_split(self, name: str, folder: str | Path) -> Corpus:
        """A corpus in ``folder`` with the same options, whose test split is the source's split ``name``."""
        corpus = self.in_folder(folder)
        corpus.splits = {"test": [name]}
        corpus.only = ("test",)
        return corpus

    def in_folder(self, folder: str | Path) -> Corpus:
        """A corpus with the same options, to be prepared in another folder. Audio that must be unpacked goes
        there too, unless a ``cache_folder`` was chosen."""
        corpus = copy.copy(self)
        corpus.folder = Path(folder)
        corpus.report = None
        if self.cache_folder == self.folder / "audio":
            corpus.cache_folder = corpus.folder / "audio"
        return corpus

    def names(self) -> list[str]:
        """The source's own names for its splits."""
        return self._open(show_progress=False).names()

    def summary(self) -> str:
        """A table of the rows that were read, kept and left out, with notes on what looks wrong; of what texts hold and
        splits share only if the manifests weren't made by an earlier call."""
        return summarize(self.prepared, fresh=not self._reused)

    @property
    def prepared(self) -> dict[str, Any]:
        """The content of ``prepare_report.json``."""
        if self.report is None:
            self.load()
        assert self.report is not None, "load makes it"
        return self.report

    def prepared_elsewhere(self) -> Path | None:
        """The source that the folder's manifests were prepared from, if it is not this corpus's source."""
        if not isinstance(self.source, (str, Path)) or not Path(self.source).exists():
            return None
        try:
            where = Path(self.prepared["source"]["where"])
        except (SbkitError, KeyError, TypeError):
            return None
        if not where.is_absolute():  # a hub address, or several files
            return None
        source = Path(self.source).resolve()
        prepared_from = where.resolve()
        # One may be within the other: a release's folder of one language, or the folder of a list.
        related = prepared_from.is_relative_to(source) or source.is_relative_to(prepared_from)
        return None if related else prepared_from

    def rules_of(self, file: str | Path) -> TextRules:
        """The rules for the texts of a file; a manifest that the same rules have written is not normalised again."""
        if type(self.text) is not TextRules:  # a subclass may do more than its options say
            return self.text
        path = Path(file)
        try:
            report = json.loads((path.parent / self.report_path.name).read_text(encoding="utf-8"))
            same_rules = report["options"]["text"] == self.text.options()
            normalized = same_rules and report["splits"][path.stem]["sha256"] == disk.sha256(path)
        except (OSError, ValueError, KeyError, TypeError):  # no manifest
            return self.text
        return NormalizedBefore(**self.text.options()) if normalized else self.text

    def left_out(self, split: str) -> str | None:
        """Describe how many rows of a split were left out and why, to report with error rates; None if none were."""
        entry = self.prepared["splits"][split]
        count = entry["rows"] - entry["kept"]
        if not count:
            return None
        reasons = ", ".join(f"{left_out['count']:,} {reason}" for reason, left_out in entry["left_out"].items())
        return f"{count:,} of {entry['rows']:,} {split} rows were left out in preparation: {reasons}"

    def check_exists(self) -> None:
        """Refuse a local source or list that doesn't exist, and a demo corpus that can't be synthesised."""
        if self.exclude is not None:
            Exclusions.read(self.exclude)
        if self.source is None:
            from sbkit.data.demo import espeak_name  # needs the optional speech synthesiser

            if not self._demo_folder().exists():
                espeak_name(self.language or "en")
        elif not isinstance(self.source, Source):
            check_exists(self.source)

    def _open(self, show_progress: bool) -> Source:
        source = self.source
        if source is None:
            from sbkit.data.demo import make_demo_corpus  # needs the optional speech synthesiser

            source = make_demo_corpus(self._demo_folder(), hours=self.demo_hours, language=self.language or "en",
                                      seed=self.demo_seed, workers=self.workers, show_progress=show_progress,
                                      voices=self.demo_voices)
        if isinstance(source, Source):
            opened = source
        else:
            opened = open_source(source, language=self.language, columns=self.columns, cache=self.cache_folder,
                                 data_root=self.data_root, show_progress=show_progress)
        opened.needs_text = self._needs_text
        opened.wanted = {name: isinstance(column, SignalColumn) for name, column in self._declared.items()}
        return opened

    def _declare(self, needs_text: bool, columns: Declared) -> None:
        """Store what the task needs: whether texts, and which of its columns the source must have."""
        for role in self.columns:
            if role not in ALIASES and role not in columns:
                raise SbkitError("unknown-key", f"corpus: columns has the unknown role {role!r}",
                                 hint=f"roles are {', '.join([*ALIASES, *columns])}", key="corpus.columns", value=role)
        self._needs_text = needs_text
        self._declared = {name: column for name, column in columns.items()
                          if name in self.columns or not defaults_to_recording(column)}
        self._recording_columns = set(columns) - set(self._declared)

    def _open_if_local(self) -> Source | None:
        """The source; None if its splits aren't known without a server, unpacking, or code of the user's."""
        source = self.source
        if isinstance(source, (str, Path)):
            is_local = not (is_hub_address(source) or str(source).endswith(ARCHIVES))
        else:
            is_local = isinstance(source, Mapping)
        return self._open(show_progress=False) if is_local else None

    def known_splits(self) -> dict[str, list[str]] | None:
        """Return the source's names for each split; None if they aren't known without reading or unpacking it."""
        source = self._open_if_local()
        return None if source is None else choose_splits(source, self.only, self.splits)

    def check_source(self, needs_text: bool, columns: Declared, needed: Sequence[str] = ()) -> None:
        """Refuse a local source without transcripts if the task needs them, without a needed split, or without a column
        that is needed; of a short list also one that can't be read, or that has no recordings.

        Nothing is unpacked, and of long lists only the first lines are read.
        """
        self._declare(needs_text, columns)
        source = self._open_if_local()
        if source is None:
            return
        source.check_texts()
        names_by_split, _ = self._choose(source, needed)
        for names in names_by_split.values():
            for name in names:
                source.check_list(name)

    def _demo_folder(self) -> Path:
        """Return the folder of the demo corpus; its name contains everything it depends on."""
        from sbkit.data.demo import FORMAT

        voices = "".join(f"{voice}-" for voice in self.demo_voices)
        name = f"demo-{self.language or 'en'}-{voices}{self.demo_hours:g}h-seed{self.demo_seed}-v{FORMAT}"
        return cache_folder() / name

    def _fingerprint(self, source: Source) -> str:
        facts = [_FORMAT, source.fingerprint(), self._options()]
        return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()

    def _options(self) -> dict[str, Any]:
        """All that decides, besides the source, what is in the manifests."""
        options: dict[str, Any] = {
            "language": self.language,
            "splits": self.splits,
            "text": self.text.options(),
            "min_duration": self.min_duration,
            "max_duration": self.max_duration,
            "limit_splits": self.limit_splits,
            "skip_short_texts": self.skip_short_texts,
            "short_text": self.short_text,
            "check_audio": self.check_audio,
            "columns": self.columns,
            "data_root": None if self.data_root is None else str(self.data_root),
        }
        # The others came later. They are left out at their defaults, so that the fingerprint of a corpus that was
        # prepared before is the same, and it isn't prepared again.
        if self.only != SPLITS:
            options["only"] = self.only
        if not self._needs_text:
            options["needs_text"] = False
        if self._keeps_silence:
            options["silence"] = True
        if self.exclude is not None:
            options["exclude"] = [str(self.exclude), disk.sha256(self.exclude)]
        if self._declared:
            options["declared"] = {name: repr(column) for name, column in self._declared.items()}
        if self.schemes is not None:
            options["schemes"] = self.schemes
        if self.url_megabytes != NO_REMOTE.megabytes:
            options["url_megabytes"] = self.url_megabytes
        if self.url_seconds != NO_REMOTE.seconds:
            options["url_seconds"] = self.url_seconds
        return options

    def _read_ready(self, source: Source, fingerprint: str) -> dict[str, Manifest] | None:
        """The manifests on disk if they are complete and made from the same source and options, else None."""
        try:
            report = json.loads(self.report_path.read_text(encoding="utf-8"))
            if report["fingerprint"] != fingerprint:
                logger.info("corpus: the source or an option changed, preparing %s again", self.folder)
                return None
            if not source.intact():
                logger.warning("corpus: the audio unpacked from %s is gone, unpacking it again", source.where)
                return None
            ready = {split: Manifest.open_prepared(self.manifest_path(split), self.remote)
                     for split in report["splits"]}
            for split, entry in report["splits"].items():
                path = self.manifest_path(split)
                # A mapped file has been compared with the CSV's size and date, and is large.
                if not ready[split].mapped and disk.sha256(path) != entry["sha256"]:
                    logger.warning("%s has changed since it was prepared: preparing it again", path)
                    return None
            changed = exclusions.find_repaired(self.folder)
            if changed is not None:
                logger.info("corpus: %s was left out and has appeared or changed since: preparing %s again",
                            changed, self.folder)
                return None
            if any(manifest.has_urls and refused(manifest.wavs, self.remote).any() for manifest in ready.values()):
                logger.info("corpus: rows have URLs that are not allowed: preparing %s again", self.folder)
                return None
        except (SbkitError, OSError, ValueError, KeyError, TypeError):
            return None
        self.report = report
        return ready

    def _choose(self, source: Source, needed: Sequence[str]) -> tuple[dict[str, list[str]], bool]:
        """Return the source's names for each split, and whether dev and test are to be taken from its only one."""
        chosen = choose_splits(source, self.only, self.splits)
        missing = [split for split in needed if split not in chosen]
        if not missing:
            return chosen, False
        not_in_only = [split for split in missing if split not in self.only]
        if not_in_only:
            raise SbkitError("missing-split", f"corpus: only leaves out {' and '.join(not_in_only)}, which this "
                             "command needs", hint=f"add {not_in_only[0]}, or delete only", key="corpus.only",
                             value=not_in_only[0])
        is_one_list = len(source.names()) == 1 and list(chosen) == ["train"]
        divides = is_one_list and set(self.only) == set(SPLITS)
        if not divides:
            raise SbkitError("missing-split", f"{source.where} ({source.kind}) has no {' and no '.join(missing)} split "
                             f"(its splits: {', '.join(source.names())})",
                             hint=f"choose one: --corpus.splits '{{{missing[0]}: NAME}}', or move some rows of train "
                                  "into one", key="corpus.splits", value=missing[0])
        return chosen, divides

    def _prepare(self, source: Source, fingerprint: str, show_progress: bool, needed: Sequence[str],
                 excluded: Exclusions | None) -> dict[str, Manifest]:
        started = time.monotonic()
        names_by_split, divides = self._choose(source, needed)
        if divides:
            rows = hold_out(self._read(source, "train", names_by_split["train"], show_progress))
            names_by_split = dict.fromkeys(SPLITS, names_by_split["train"])
        else:
            rows = {split: self._read(source, split, names, show_progress) for split, names in names_by_split.items()}
        for rows_of_split in rows.values():
            rows_of_split.meta = {name: column for name, column in rows_of_split.meta.items()
                                  if name not in self._recording_columns}

        manifests, reports = self._prepare_splits(rows, source, fingerprint, excluded, show_progress)

        folders = {os.path.abspath(folder) for folder in (*source.folders, self.cache_folder, self.data_root)
                   if folder is not None and "://" not in str(folder)}
        copies = {split: report_of_split.copies for split, report_of_split in reports.items()}
        report = {
            "format": _FORMAT, "fingerprint": fingerprint, "sbkit": sbkit.__version__,
            "source": {"kind": source.kind, "where": source.where, "splits": names_by_split, "divided": divides,
                       "recorded": source.recorded, "folders": sorted(folders)},
            "options": self._options(), "seconds": round(time.monotonic() - started, 1), "splits": {},
            "leaks": leaks.shared(manifests, copies),
        }
        self._write(manifests, reports, report)
        for name in (_DURATIONS, _COPIES):  # also of preparations with other options that were stopped
            for path in self.folder.glob(f"{name}*"):
                path.unlink(missing_ok=True)
        self.report = report
        return manifests

    def _prepare_splits(self, rows: dict[str, Rows], source: Source, fingerprint: str, excluded: Exclusions | None,
                        show_progress: bool) -> tuple[dict[str, Manifest], dict[str, SplitReport]]:
        """Make the manifest of each split, with a report on it. Rows are taken out of ``rows``, to free their memory.
        """
        durations_file = self.folder / f"{_DURATIONS}{fingerprint[:16]}"
        copies_file = self.folder / f"{_COPIES}{fingerprint[:16]}"
        copies = None
        if self.check_audio != "sample":
            copies = Copies(self.check_audio == "decode", workers=self.workers, remote=self.remote,
                            journal=copies_file, show_progress=show_progress)

        manifests: dict[str, Manifest] = {}
        reports: dict[str, SplitReport] = {}
        held_out: list[Column] = []  # the recordings of test and dev
        listings: dict[str, pa.Array | None] = {}
        # Train comes last, because it leaves out what test and dev have.
        for split in reversed([split for split in SPLITS if split in rows]):
            rows_of_split = rows.pop(split)
            is_train = split == "train"
            # A manifest's other columns have texts that were not normalised.
            reads_normalized = self.columns.get("text", "wrd") == "wrd"
            rules = self.rules_of(rows_of_split.origin) if reads_normalized else self.text
            manifests[split], reports[split] = prepare_split(
                split, rows_of_split, rules, self._limits(split), held_out=held_out if is_train else (),
                listings=listings, check_audio=self.check_audio, copies=copies, journal=durations_file,
                workers=self.workers, remote=self.remote, columns=self._declared,
                exclude=excluded if is_train else None, show_progress=show_progress)
            if not reports[split].kept:
                raise self._nothing_left(source, reports, split)
            held_out.append(recording_keys(manifests[split].wavs, manifests[split].starts))

        ordered = [split for split in SPLITS if split in manifests]
        return {split: manifests[split] for split in ordered}, {split: reports[split] for split in ordered}

    def _limits(self, split: str) -> RowLimits:
        """Which usable rows of a split are left out all the same."""
        is_limited = split in self.limit_splits
        return RowLimits(
            min_duration=self.min_duration if is_limited else None,
            max_duration=self.max_duration if is_limited else None,
            alphabet=is_limited and self._needs_text,
            text=self._needs_text,
            silence=self._keeps_silence and split == "train",
            min_words=self.short_text if split in self.skip_short_texts else 0)

    def _nothing_left(self, source: Source, reports: Mapping[str, SplitReport], split: str) -> SbkitError:
        """Return the error about a split whose rows were all left out, with what to do for each of the reasons."""
        report = reports[split]
        left_out = report.left_out
        reasons = ", ".join(f"{entry['count']} {reason_in_words(reason, self._options())}"
                            for reason, entry in left_out.items())
        example = next(iter(left_out.values()))["examples"][0]
        advice = [f"for example {example}"]
        advice += [remedy(reason) for reason in left_out if remedy(reason)]
        if exclusions.MISSING in left_out:
            folders = [os.path.abspath(folder) for folder in (self.data_root, *source.folders) if folder is not None]
            missing_clip = left_out[exclusions.MISSING]["examples"][0]
            if any(folder in missing_clip for folder in folders):
                advice.append("set --corpus.data_root to the folder where relative paths start; it replaces "
                              "$data_root, too")
            else:
                advice.append("the list has absolute paths: write $data_root for their beginning, and set "
                              "--corpus.data_root to the folder where the recordings are now")
        if exclusions.IN_OTHER_SPLIT in left_out:
            advice.append("to overfit on purpose, give train copies of these recordings")
        # A corpus that is prepared already keeps its own list.
        if not self.report_path.exists():
            exclusions.write(self.folder, _left_out_tables(reports))
            advice.append(f"{self.folder / exclusions.NAME} lists all")
        return SbkitError("all-rows-left-out", f"{report.origin}: all {report.rows} rows of the {split} split were "
                          f"left out: {reasons}", hint="; ".join(advice), file=report.origin)

    def _write(self, manifests: Mapping[str, Manifest], reports: Mapping[str, SplitReport],
               report: dict[str, Any]) -> None:
        """Write all files into a separate folder, then move them into place: a full disk leaves the old ones."""
        temporary = self.folder / _TEMPORARY
        shutil.rmtree(temporary, ignore_errors=True)  # left by a preparation that was killed
        try:
            for split, report_of_split in reports.items():
                path = temporary / self.manifest_path(split).name
                manifests[split].write_prepared(path)
                report["splits"][split] = {"sha256": disk.sha256(path), **report_of_split.facts()}
            exclusions.write(temporary, _left_out_tables(reports))
            written = list(temporary.iterdir())
            with atomic_write(temporary / self.report_path.name) as file:
                json.dump(report, file, indent=1, ensure_ascii=False)

            self.report_path.unlink(missing_ok=True)  # until it is written again, the folder counts as unprepared
            for path in written:
                os.replace(path, self.folder / path.name)
            self._remove_unwritten({path.name for path in written})
            os.replace(temporary / self.report_path.name, self.report_path)
            disk.sync_folder(self.folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def _remove_unwritten(self, written: set[str]) -> None:
        """Remove the manifests of an earlier source, unless files of these names were just written."""
        for split in SPLITS:
            manifest_path = self.manifest_path(split)
            for path in (manifest_path, mapped_file(manifest_path)):
                if path.name not in written:
                    path.unlink(missing_ok=True)

    @staticmethod
    def _read(source: Source, split: str, names: Sequence[str], show: bool) -> Rows:
        rows = join_rows([source.read(name, show) for name in names])
        if not len(rows) and not rows.malformed:
            raise SbkitError("no-utterances", f"{rows.origin}: the {split} split is empty",
                             hint="expected at least one row", file=rows.origin)
        return rows


def _left_out_tables(reports: Mapping[str, SplitReport]) -> list[pa.Table]:
    return [table for report in reports.values() for table in report.tables]
