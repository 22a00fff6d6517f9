"""The command ``sbkit tokenize``: encodes a corpus to shards of codes."""

from __future__ import annotations

import itertools
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from sbkit.codes import Codes, check_place, writing
from sbkit.codes.shards import MANIFEST, UnstorableUtterance
from sbkit.data import exclusions
from sbkit.data.audio import AudioError, read_utterance
from sbkit.data.corpus import Corpus
from sbkit.data.exclusions import UNDECODABLE
from sbkit.data.manifest import Manifest
from sbkit.data.sources import ONE_SPLIT
from sbkit.data.splits import ALIASES, SPLITS
from sbkit.data.text import AsWritten
from sbkit.errors import SbkitError
from sbkit.export import layout
from sbkit.infer.codec import CodecModel
from sbkit.infer.formats import ModelRequest
from sbkit.infer.resynthesis import file_name
from sbkit.system import disk
from sbkit.system.console import progress, time_span

#: Folder of the corpus's manifests and unpacked audio, which later runs reuse.
PREPARED = "manifests"
#: Seconds of audio that are read while as many are encoded.
AT_ONCE_SECONDS = 600.0
#: Why a readable recording is left out: its codes are invalid, or don't fit in a shard.
UNCODABLE = "uncodable"
_LISTED = 5  # recordings that were left out that are printed
_SHOWN = 100  # characters of their ids


@dataclass(frozen=True)
class TokenizeRequest(ModelRequest):
    """The corpus to encode, and the output folder.

    corpus : anything that a recipe's ``data_folder`` may be, or a list
    to : the output folder, with a folder for each split
    splits : the corpus's names of them; none: its train, dev and test split, or all if it has none of these
    schemes : URL schemes allowed for recordings
    """

    bundle: Path
    corpus: str
    to: Path
    splits: Sequence[str] = ()
    language: str | None = None
    schemes: Sequence[str] = ()
    readers: int = 2
    force: bool = False


#: Rows of a manifest, and the samples of each, which may still be read.
Window = list[tuple[int, Future[np.ndarray]]]


def tokenize(request: TokenizeRequest) -> int:
    """Encode a corpus and return the exit code. Each split is written as a whole, once."""
    config = layout.CodecConfig.read(request.bundle)
    names = _corpus(request, "").names()
    unknown = [name for name in request.splits if name not in names]
    if unknown:
        raise SbkitError("missing-split", f"{request.corpus} has no split {unknown[0]!r}",
                         hint=f"it has {', '.join(names) or 'none'}", file=request.corpus, key="--split",
                         value=unknown[0])
    if not names:
        raise SbkitError("missing-split", f"{request.corpus} has no splits",
                         hint="docs/how-to/data.md says what a corpus may be", file=request.corpus)
    usual = [name for split in SPLITS for name in names if _kind(name) == split]
    chosen = list(dict.fromkeys(request.splits)) or usual or names
    folders = {}
    for name, folder in _folders(request.to, chosen).items():
        if not request.force and _is_encoded(request, name, folder, config.codec):
            print(f"{folder}: already encoded from this list by this codec; --force encodes it again")
        else:
            check_place(folder, request.force)
            folders[name] = folder
    if not folders:
        return 0
    with CodecModel.open(request.bundle, request.model, request.device, request.threads) as codec:
        print(codec.running, file=sys.stderr)
        for name, folder in folders.items():
            _tokenize(codec, name, folder, request)
    return 0


def _folders(to: Path, names: Sequence[str]) -> dict[str, Path]:
    """The output folder of each split; raises if two are the same."""
    folders = {}
    taken: dict[str, str] = {}
    for name in names:
        folder_name = file_name(name)
        if folder_name.casefold() == PREPARED:
            raise SbkitError("same-output", f"the split {name!r} can't be encoded: {to / PREPARED} is where the "
                             "corpus's manifests are kept", hint="rename its list or folder")
        other = taken.setdefault(folder_name.casefold(), name)
        if other != name:
            raise SbkitError("same-output", f"the splits {other!r} and {name!r} would both be {to / folder_name}",
                             hint="choose one with --split, and another folder for the other", key="--split")
        folders[name] = to / folder_name
    return folders


def _is_encoded(request: TokenizeRequest, name: str, folder: Path, codec: str) -> bool:
    """Whether a folder has the codes of a split as the corpus has it now, by this codec."""
    if not (folder / MANIFEST).is_file():
        return False
    codes = Codes(folder)
    if codes.made_from is None or codes.books.codec != codec:
        return False
    [manifest] = _corpus(request, name).prepare(needs_text=False).values()
    return codes.made_from == manifest.digest()


# ---------------------------------------------------------------------- the corpus


def _kind(name: str) -> str | None:
    """Which of train, dev and test a corpus's split is, by its name."""
    return next((split for split in SPLITS if name.lower() in ALIASES[split]), None)


def _corpus(request: TokenizeRequest, name: str) -> Corpus:
    """The corpus with one of its splits."""
    source: str | dict[str, str] = request.corpus
    if request.corpus.endswith(ONE_SPLIT) and "://" not in request.corpus:
        source = {Path(request.corpus).stem: request.corpus}
    lists = request.to / PREPARED
    kind = _kind(name) or "test"
    return Corpus(source, request.language, lists / file_name(name), splits={kind: name}, only=(kind,),
                  text=AsWritten(), schemes=request.schemes or None, cache_folder=lists / "audio")


# ---------------------------------------------------------------------- a split


def _tokenize(codec: CodecModel, name: str, folder: Path, request: TokenizeRequest) -> None:
    """Encode a split and print a summary."""
    corpus = _corpus(request, name)
    [manifest] = corpus.prepare(needs_text=False).values()
    left_out = exclusions.read(corpus.folder)
    began = time.perf_counter()
    utterances = 0
    seconds = 0.0
    frames = 0
    unusable: dict[str, list[tuple[int, str, str]]] = {UNDECODABLE: [], UNCODABLE: []}  # rows, and a code and its words
    with writing(folder, codec.books, request.force, made_from=manifest.digest()) as out:
        with progress(what=f"tokenizing {name}", total=len(manifest), unit="clip") as bar:
            for window in _read(manifest, codec.sample_rate, request.readers):
                signals: list[tuple[int, np.ndarray]] = []
                for row, future in window:
                    try:
                        signals.append((row, future.result()))
                    except AudioError as error:
                        unusable[UNDECODABLE].append((row, error.code, error.cause))
                encoded = codec.encode_each([signal for _, signal in signals])
                for (row, signal), codes in zip(signals, encoded, strict=True):
                    if isinstance(codes, SbkitError):
                        unusable[UNCODABLE].append((row, codes.code, codes.message))
                        continue
                    try:
                        out.add(manifest.ids[row], codes, manifest.texts[row] or None, manifest.speakers[row] or None)
                    except UnstorableUtterance as unstorable:
                        unusable[UNCODABLE].append((row, unstorable.code, unstorable.cause))
                        continue
                    utterances += 1
                    frames += len(codes)
                    seconds += len(signal) / codec.sample_rate
                bar.update(len(window))
        for reason, rows in unusable.items():
            if rows:
                ids = [manifest.ids[row] for row, _, _ in rows]
                wavs = [manifest.wavs[row] for row, _, _ in rows]
                error_codes = [code for _, code, _ in rows]
                causes = [cause for _, _, cause in rows]
                left_out = pa.concat_tables([left_out, exclusions.rows(name, reason, ids, wavs, causes,
                                                                       codes=error_codes, versions=True)])
        exclusions.write(out.folder, [left_out])
        _report_left_out(name, utterances, left_out, folder)
    elapsed = time.perf_counter() - began
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{folder}: {utterances:,} utterances, {time_span(seconds)}, {frames:,} frames at {codec.books.bit_rate:.0f} "
          f"bit/s, {disk.size(size)} instead of {disk.size(2 * codec.sample_rate * seconds)} as 16-bit samples; it "
          f"took {time_span(elapsed)} (real-time factor {elapsed / seconds:.4f})")


def _report_left_out(name: str, utterances: int, left_out: pa.Table, folder: Path) -> None:
    """Print how many rows of a split were left out and why; raises if no utterance is left."""
    count = utterances + left_out.num_rows
    reasons = Counter(left_out["reason"].to_pylist())
    summary = ", ".join(f"{number:,} {reason}" for reason, number in reasons.most_common())
    first = left_out[:_LISTED].to_pylist()
    examples = [f"{row['ID'][:_SHOWN]}: {row['detail'] or row['reason']}" for row in first]
    if not utterances:
        raise SbkitError("all-rows-left-out", f"all {count:,} rows of the split {name} were left out: {summary}",
                         hint=f"for example {examples[0]}")
    if left_out.num_rows:
        print(f"{name}: {count:,} rows read, {utterances:,} kept, {left_out.num_rows:,} left out: {summary}\n  "
              + "\n  ".join(examples) + f"\n  all are in {folder / exclusions.NAME}", file=sys.stderr)


# ---------------------------------------------------------------------- reading


def _read(manifest: Manifest, sample_rate: int, readers: int) -> Iterator[Window]:
    """Yield rows in order, some minutes at a time, while the next are being read."""
    ahead: deque[Window] = deque()
    pool = ThreadPoolExecutor(readers, "sbkit-reader")
    try:
        # Windows of a few minutes, or of one row that is longer.
        ends = np.cumsum(manifest.durations, dtype=np.float64) // AT_ONCE_SECONDS
        cuts = [0, *(np.flatnonzero(np.diff(ends)) + 1).tolist(), len(manifest.durations)]
        for begin, end in itertools.pairwise(cuts):
            if begin == end:
                continue
            window: Window = []
            for row in range(begin, end):
                future = pool.submit(read_utterance, manifest.wavs[row], float(manifest.starts[row]),
                                     float(manifest.durations[row]), sample_rate=sample_rate, remote=manifest.remote)
                window.append((row, future))
            ahead.append(window)
            if len(ahead) > 1:
                yield ahead.popleft()
        yield from ahead
    finally:
        pool.shutdown(cancel_futures=True)
