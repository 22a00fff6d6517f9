"""Packs the recordings of a manifest into tar shards (WebDataset's layout), with a manifest to train with.

    OUT/shard-000000.tar    000000000.flac, 000000000.json, 000000001.flac, ...  (uncompressed)
    OUT/shard-000000.json   offsets of the recordings; a shard is complete when this file exists
    OUT/shard.csv           the manifest, used like any other
    OUT/shard-index.json    the list of shards for WebDataset's `wids`
    OUT/shard-report.json   rows read, kept and left out

Network file systems and object stores are slow at opening millions of small files and fast at reading parts of large
ones. The loader reads a recording by its offset, so the plan shuffles the whole corpus and not just a buffer.
The rows are shuffled before they are written, so that other tools can read the shards in order.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import multiprocessing
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import soundfile

from sbkit.data import tar
from sbkit.data.audio import (
    AudioError,
    audio_info,
    check_whole,
    length_tolerance,
    read_bytes,
    read_utterance,
    split_member,
)
from sbkit.data.batch import SAMPLE_RATE
from sbkit.data.lock import locked
from sbkit.data.manifest import Manifest, Utterance
from sbkit.data.measure import map_unordered
from sbkit.data.presence import file_version
from sbkit.data.remote import Remote
from sbkit.errors import SbkitError
from sbkit.system import disk
from sbkit.system.console import atomic_write, progress, stored_json
from sbkit.system.schema import POSITIVE, SIZE, require

#: Files from which the size of a second of copied audio is estimated.
_SAMPLE = 64
_SHUFFLE_SEED = 0
#: The highest sample rate of a FLAC file.
_FLAC_MAX_RATE = 655_350


class Encoding(NamedTuple):
    """A file format for mono recordings that are encoded again, and about how many bytes it needs per sample."""

    suffix: str
    format: str
    subtype: str
    bytes_per_sample: float


ENCODINGS = {
    "wav": Encoding("wav", "WAV", "PCM_16", 2.0),
    "wav16k": Encoding("wav", "WAV", "PCM_16", 2.0),
    "flac": Encoding("flac", "FLAC", "PCM_16", 1.1),
}


@dataclass(frozen=True)
class _Job:
    """One shard to write: its rows and how they are encoded."""

    path: Path
    first: int
    rows: list[Utterance]
    encode: str | None
    sample_rate: int
    remote: Remote

    @property
    def index(self) -> Path:
        return self.path.with_suffix(".json")

    @property
    def fingerprint(self) -> str:
        rows = [asdict(row) for row in self.rows]
        text = json.dumps([self.first, self.encode, self.sample_rate, rows], ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()


def write_shards(
    manifest: Manifest, out: str | os.PathLike[str], *, name: str = "shard", shard_size_mb: float = 512,
    encode: str | None = None, sample_rate: int = SAMPLE_RATE, workers: int = 2, show_progress: bool = True,
) -> Manifest:
    """Write the recordings of ``manifest`` into shards below ``out`` and return the manifest that reads them.

    name: beginning of the file names, such as ``train``.
    shard_size_mb: approximate size of a shard.
    encode: ``None`` copies files unchanged (segments of longer files become FLAC with their own sample rate);
        ``wav`` (16-bit PCM, by far the fastest to read) and ``flac`` (half the size) store decoded audio as mono;
        ``wav16k`` is ``wav`` at 16 kHz, whatever the model's sample rate.
    sample_rate: sample rate with ``encode``: the model's, or higher.
    workers: number of processes.

    A shard is written completely or not at all; after an interruption, another call continues with the first shard
    that is missing. Recordings that can't be read are left out and named in ``<name>-report.json``; when they have
    been repaired, another call writes their shards again. Other recordings are not checked again.
    """
    require("shard_size_mb", shard_size_mb, POSITIVE)
    require("workers", workers, SIZE)
    require("sample_rate", sample_rate, SIZE)
    if encode is not None and encode not in ENCODINGS:
        raise SbkitError("bad-value", f"cannot encode shards as {encode!r}",
                         hint=f"it is one of {', '.join(ENCODINGS)}", value=encode)
    if encode == "wav16k" and sample_rate != SAMPLE_RATE:
        raise SbkitError("conflicting-options", f"wav16k has a sample rate of 16000, not {sample_rate}",
                         hint="encode as wav", value=sample_rate)
    if not len(manifest):
        raise SbkitError("no-utterances", "the manifest is empty: there is nothing to write into shards")
    out = Path(out)
    try:
        with locked(out / f".{name}.lock"):
            # The same order whenever it is called, so that another call continues this one.
            order = np.random.Generator(np.random.PCG64(_SHUFFLE_SEED)).permutation(len(manifest))
            per_second = ENCODINGS[encode].bytes_per_sample * sample_rate if encode else _bytes_per_second(manifest)
            written = sum(file.stat().st_size for file in out.glob(f"{name}-*.tar"))
            disk.check_room(out, manifest.hours * 3600 * per_second - written,
                            "choose another folder, or copy the files unchanged (no encode)")
            bounds = shard_bounds(manifest.durations[order], shard_size_mb * 1e6 / per_second)
            jobs = (_Job(out / f"{name}-{i:06d}.tar", first, [manifest.row(row) for row in order[first:stop]], encode,
                         sample_rate, manifest.remote)
                    for i, (first, stop) in enumerate(itertools.pairwise(bounds.tolist())))
            shards = []
            with progress(what="writing shards", total=len(manifest), unit="utt", show=show_progress) as bar:
                for index in _run(jobs, workers):
                    shards.append(index)
                    bar.update(len(index["kept"]) + len(index["left_out"]))
            shards.sort(key=lambda index: index["first"])
            sharded = _sharded(manifest, order, shards, out)
            _remove_beyond(out, name, len(shards))
            sharded.write(out / f"{name}.csv", data_root=out.absolute())
            _write_lists(manifest, sharded, order, shards, out, name)
            return sharded
    except OSError as error:  # such as a full disk, or a folder without write permission
        raise SbkitError("not-writable", f"{error.filename or out}: {error.strerror or error}",
                         file=error.filename or out) from error


def _sharded(manifest: Manifest, order: np.ndarray, shards: Sequence[Mapping[str, Any]], out: Path) -> Manifest:
    """The manifest of the recordings in shards, by their indices."""
    rows = []
    wavs = []
    durations = []
    for shard in shards:
        path = out.absolute() / shard["shard"]
        for i, offset, size, seconds in shard["kept"]:
            rows.append(order[shard["first"] + i])
            wavs.append(f"{path}?offset={offset}&size={size}")
            durations.append(seconds)
    if not rows:
        raise SbkitError("too-much-damaged-audio", f"{out}: not one of {len(manifest)} recordings could be read",
                         hint=f"the first: {shards[0]['left_out'][0][1]}", file=out)
    return manifest.select(np.array(rows)).replace(wavs=wavs, durations=durations, starts=None)


def _remove_beyond(out: Path, name: str, count: int) -> None:
    """Remove the shards beyond this number, which an earlier call with other options has left."""
    shard_file = re.compile(re.escape(name) + r"-(\d{6,})\.(tar|json)")
    for path in list(out.iterdir()):
        match = shard_file.fullmatch(path.name)
        if match is not None and int(match[1]) >= count:
            path.unlink()


def _write_lists(manifest: Manifest, sharded: Manifest, order: np.ndarray, shards: Sequence[Mapping[str, Any]],
                 out: Path, name: str) -> None:
    """Write the list of shards for WebDataset, and the report on the rows that were read and left out."""
    shard_list = [{"url": shard["shard"], "nsamples": len(shard["kept"])} for shard in shards]
    with atomic_write(out / f"{name}-index.json") as file:
        json.dump({"__kind__": "wids-shard-index-v1", "wids_version": 1, "name": name, "shardlist": shard_list}, file,
                  indent=1)
    left_out = [{"id": manifest.ids[order[shard["first"] + i]], "code": code, "reason": reason}
                for shard in shards for i, reason, _, _, code in map(_with_code, shard["left_out"])]
    with atomic_write(out / f"{name}-report.json") as file:
        json.dump({"rows": len(manifest), "kept": len(sharded), "left_out": left_out, "hours": sharded.hours,
                   "shards": len(shards)}, file, indent=1, ensure_ascii=False)


def _run(jobs: Iterable[_Job], workers: int) -> Iterator[dict[str, Any]]:
    if workers <= 1:
        yield from map(_write, jobs)
        return
    try:
        # Forked processes already have the rows, and don't run the user's script again.
        with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("fork")) as pool:
            yield from (index for _, index in map_unordered(pool, _write, jobs, 2 * workers))
    except BrokenProcessPool as error:
        raise SbkitError("worker-died", "a process that wrote shards died",
                         hint="out of memory? Try fewer workers; finished shards are kept") from error


def _write(job: _Job) -> dict[str, Any]:
    """Write one shard and its index, unless it is complete already; return the index."""
    fingerprint = job.fingerprint
    index = stored_json(job.index)
    complete = (index.get("fingerprint") == fingerprint and job.path.is_file()
                and job.path.stat().st_size == index["size"])
    # A recording that was left out and has changed since may be readable now.
    left_out_before = map(_with_code, index["left_out"]) if complete else ()
    if complete and all((size, date) == file_version(job.rows[i].wav) for i, _, size, date, _ in left_out_before):
        return index
    written = []
    left_out = []
    offset = 0
    with atomic_write(job.path, "wb") as file:
        for i, row in enumerate(job.rows):
            try:
                data, suffix, seconds = encode_row(row, job.encode, job.sample_rate, job.remote)
            except AudioError as error:
                left_out.append((i, error.cause, *file_version(row.wav), error.code))
                continue
            key = f"{job.first + i:09d}"
            described = {**row.meta, "id": row.id, "text": row.text, "speaker": row.speaker,
                         "duration": seconds}
            written.append((i, offset + tar.BLOCK, len(data), seconds))
            offset += tar.append(file, f"{key}.{suffix}", data)
            offset += tar.append(file, f"{key}.json", json.dumps(described, ensure_ascii=False).encode())
        file.write(tar.END)
    index = {"fingerprint": fingerprint, "shard": job.path.name, "size": offset + len(tar.END),
             "first": job.first, "kept": written, "left_out": left_out}
    with atomic_write(job.index) as file:
        json.dump(index, file, ensure_ascii=False)
    return index


def _with_code(entry: Sequence[Any]) -> Sequence[Any]:
    """A recording that was left out, by an index: its number, why, its file's size and date, and a code, which indices
    by earlier versions lack."""
    return entry if len(entry) == 5 else [*entry, "damaged-audio"]


def encode_row(row: Utterance, encode: str | None, sample_rate: int, remote: Remote) -> tuple[bytes, str, float]:
    """The bytes of a recording's file, its suffix, and its duration in seconds."""
    whole = row.start == 0 and encode is None
    if whole:
        data = read_bytes(row.wav, remote)
        seconds = audio_info(data)[0]
        # A segment at the beginning of its file is copied only if it is the whole file.
        whole = seconds <= row.duration + length_tolerance(row.duration)
    if whole:
        check_whole(row.wav, row.duration, seconds)
        path = split_member(row.wav)[0]
        return data, tar.suffix(data, path), round(seconds, 4)
    kind = ENCODINGS[encode or "flac"]
    rate = sample_rate if encode else min(audio_info(row.wav, remote)[1], _FLAC_MAX_RATE)
    signal = read_utterance(row.wav, row.start, row.duration, sample_rate=rate, remote=remote)
    file = io.BytesIO()
    soundfile.write(file, signal, rate, format=kind.format, subtype=kind.subtype)
    return file.getvalue(), kind.suffix, round(len(signal) / rate, 4)


def shard_bounds(durations: np.ndarray, seconds_per_shard: float) -> np.ndarray:
    """Row numbers at which shards begin, and the end: ``[shards + 1]``; all shards have about the same duration."""
    ends = np.cumsum(durations, dtype=np.float64)
    shards = max(1, min(len(durations), round(ends[-1] / seconds_per_shard)))
    inner = np.searchsorted(ends, ends[-1] * np.arange(1, shards) / shards) + 1
    return np.unique(np.concatenate([[0], inner, [len(durations)]]))


def _bytes_per_second(manifest: Manifest) -> float:
    """Average bytes per second of the recordings, estimated from some of them."""
    size = seconds = 0.0
    for i in np.unique(np.linspace(0, len(manifest) - 1, _SAMPLE).astype(int)).tolist():
        wav = manifest.wavs[i]
        path, _, part = split_member(wav)
        if part is None and (manifest.starts[i] or not os.path.isfile(path)):
            continue
        size += os.path.getsize(path) if part is None else part
        seconds += float(manifest.durations[i])
    return size / seconds if size and seconds else ENCODINGS["flac"].bytes_per_sample * SAMPLE_RATE
