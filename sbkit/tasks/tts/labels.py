"""The labels that a voice is trained on: the codes of each recording, and the duration of each character."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from torch import Tensor

from sbkit.codes import Books, Codes, writing
from sbkit.data.audio import read_utterance
from sbkit.data.loader import eval_batches
from sbkit.data.manifest import Manifest, Utterance
from sbkit.data.symbols import Symbols
from sbkit.decode.durations import durations, symbol_durations
from sbkit.errors import SbkitError, first_line
from sbkit.nn.codec import Quantiser
from sbkit.runs import initial
from sbkit.runs.keys import AlignerBundle, Bundles, CodecBundle
from sbkit.system import disk
from sbkit.system.console import atomic_write, progress
from sbkit.tasks.tts.keys import TTSKeys

logger = logging.getLogger(__name__)

#: What the labels were made from; written last, next to the folders of the splits.
FACTS = "labels.json"
CODES, DURATIONS = "codes", "durations.safetensors"
#: Seconds of audio that are labelled at once.
BATCH = 60.0
#: The largest share of a split that may be left out, if more than one utterance is, and how many of them are named.
LEFT_OUT, NAMED = 0.1, 5
_AGAIN = "remove the folder of labels, and start again"


class Targets(NamedTuple):
    """The targets of a batch."""

    chosen: Tensor  # [B, T, slots] int64, 0 for padding
    frames: Tensor  # [B, U + 2] int64, of the silence before, of each symbol, and of the silence after
    known: Tensor  # [B] bool, False for an utterance without labels


@dataclass(frozen=True)
class Label:
    """The labels of one utterance."""

    codes: np.ndarray  # [T, Q]
    frames: np.ndarray  # [U + 2]
    speaker: str


class VoiceLabels:
    """The labels of a run's splits; those of an utterance are read when they are needed."""

    def __init__(self, folders: Sequence[Path], symbols: Symbols, books: Books | None = None):
        self._places: dict[str, dict[tuple[str, str], tuple[Codes, int, np.ndarray]]] = {}
        for folder in folders:
            codes = Codes(folder / CODES, books)
            path = folder / DURATIONS
            try:
                tensors = load_file(path)
                durations = tensors["frames"].astype(np.int64)
                ends = tensors["ends"].astype(np.int64)
            except (OSError, SafetensorError, KeyError) as error:
                raise SbkitError("damaged-labels", f"{path} cannot be read: {first_line(error)}", hint=_AGAIN,
                                 file=path) from None
            if durations.ndim != 1 or ends.ndim != 1 or list(ends[-1:]) != [len(durations)] \
                    or np.diff(ends, prepend=0).min() < 1:
                raise SbkitError("damaged-labels",
                                 f"{path} is damaged: it doesn't say where each utterance's durations "
                                 "end", hint=_AGAIN, file=path)
            frames = np.split(durations, ends[:-1])
            places = self._places[folder.name] = {}
            if len(frames) != len(codes):
                raise SbkitError("damaged-labels", f"{folder} has codes of {len(codes)} utterances, but durations of "
                                 f"{len(frames)}", hint=_AGAIN, file=folder)
            symbols.look_up(utterance.text or "" for utterance in codes)
            for number, (utterance, row) in enumerate(zip(codes, frames, strict=True)):
                text = utterance.text or ""
                if len(row) != len(symbols.encode(text)) + 2 or row.min() < 0 or row.sum() != len(utterance.codes):
                    raise SbkitError("damaged-labels",
                                     f"{folder}: the durations of {utterance.id} don't match its text "
                                     "and codes", hint=_AGAIN, file=folder)
                places[utterance.id, text] = codes, number, row

    def __len__(self) -> int:
        return sum(map(len, self._places.values()))

    def get(self, split: str, name: str, text: str) -> Label | None:
        """Return the labels of an utterance of a split, if it has any.

        All three are needed: an utterance of another split or corpus may have the same id, or even the same text.
        """
        place = self._places.get(split, {}).get((name, text))
        if place is None:
            return None
        codes, number, frames = place
        utterance = codes[number]
        return Label(utterance.codes, frames, utterance.speaker or "")


def read(keys: TTSKeys) -> VoiceLabels:
    """Read the labels of a run; empty if it has none yet."""
    if (facts := label_facts(keys)) is None:
        return VoiceLabels([], keys.symbols)
    keys.symbols.load()
    books = Books.from_dict(facts.get("books"), str(Path(keys.labels, FACTS)))
    return VoiceLabels([Path(keys.labels, split) for split in facts.get("splits", ())], keys.symbols, books)


def label_facts(keys: TTSKeys) -> dict[str, Any] | None:
    """Return what the labels were made from; None if there are none."""
    return _read(Path(keys.labels, FACTS))


def pinned_facts(keys: TTSKeys) -> dict[str, Any] | None:
    """Return what the labels of the run's checkpoints were made from; None if there are none."""
    return _read(keys.symbols.file.with_name(FACTS))


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError):
        return None


def _write(path: Path, facts: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as out:
        json.dump(facts, out, indent=1, ensure_ascii=False)


def make(keys: TTSKeys, manifests: Mapping[str, Manifest], bundles: Bundles) -> None:
    """Label a corpus, unless it was already labelled with the same codec and recogniser."""
    for problem in keys.wrong_bundles():
        raise SbkitError(problem.code, problem.text, hint=problem.hint, key=problem.key)
    assert keys.codec is not None and keys.recogniser is not None, "they would be absent"
    codec, aligner = bundles.codec(keys.codec), bundles.aligner(keys.recogniser)
    try:
        facts = {"codec": codec.books.codec, "books": codec.books.to_dict(), "recogniser": aligner.fingerprint,
                 "manifests": {split: _digest(manifest, keys.symbols) for split, manifest in manifests.items()}}
        _refuse_others(keys, facts)
        if _match(label_facts(keys), facts):
            logger.info("labels: those in %s are up to date", keys.labels)
        else:
            with disk.disk_errors_as_user_error(keys.labels):
                Path(keys.labels, FACTS).unlink(missing_ok=True)
                counts = {split: _label(Path(keys.labels, split), manifest, keys, codec, aligner)
                          for split, manifest in manifests.items()}
                _write(Path(keys.labels, FACTS), {**facts, "splits": counts})
        # A copy next to the checkpoints, since the labels may be removed and made again.
        _write(keys.symbols.file.with_name(FACTS), facts)
    finally:
        codec.close()
        aligner.close()


def _digest(manifest: Manifest, symbols: Symbols) -> str:
    """Return a hash of what is labelled: a manifest, and how its texts are spelled in symbols."""
    if symbols.spelling is None:
        return manifest.digest()
    symbols.look_up(manifest.texts)  # another release of espeak-ng may pronounce a word otherwise
    spelled = hashlib.sha256(manifest.digest().encode())
    for text in manifest.texts:
        spelled.update(str(symbols.encode(text)).encode())
    return spelled.hexdigest()


def _match(stored: Mapping[str, Any] | None, facts: Mapping[str, Any]) -> bool:
    """Whether stored labels were made from what these facts say."""
    return stored is not None and {name: stored.get(name) for name in facts} == facts


def _refuse_others(keys: TTSKeys, facts: Mapping[str, Any]) -> None:
    """Refuse to label anew what the checkpoints of this run depend on."""
    trained_on = pinned_facts(keys) or label_facts(keys)
    if initial.fresh(keys) or trained_on is None or _match(trained_on, facts):
        return
    raise SbkitError("changed-source", f"the labels in {keys.labels}, on which the checkpoints depend, are of another "
                     "codec, recogniser or corpus", file=keys.labels, key="labels",
                     hint="start in a new output_folder, or restore codec, recogniser and corpus")


def _label(folder: Path, manifest: Manifest, keys: TTSKeys, codec: CodecBundle, aligner: AlignerBundle,
           ) -> dict[str, int]:
    """Write the labels of a split; returns how many rows were read, kept and left out."""
    frames: list[np.ndarray] = []
    left_out: dict[str, str] = {}
    batches = eval_batches(manifest.durations, BATCH)
    folder.mkdir(parents=True, exist_ok=True)
    with writing(folder / CODES, codec.books, force=True) as out:
        for rows in progress(batches, what=f"Labelling {folder.name}", total=len(batches), unit="batch"):
            for row, label in _batch([manifest.row(i) for i in rows], keys, codec, aligner):
                if isinstance(label, str):
                    left_out[row.id] = label
                    continue
                out.add(row.id, label.codes, text=row.text, speaker=row.speaker or None)
                frames.append(label.frames)
        split, count = folder.name, len(manifest)
        for name, why in list(left_out.items())[:10 * NAMED]:
            logger.warning("labels: %s of %s is left out: %s", name, split, why)
        if left_out:
            logger.warning("labels: %d of %d rows of %s are left out", len(left_out), count, split)
        if len(left_out) > max(1, LEFT_OUT * count) or len(left_out) == count:
            first = "; ".join(f"{name}: {why}" for name, why in list(left_out.items())[:NAMED])
            raise SbkitError("not-labelled", f"{len(left_out)} of {count} rows of {split} can't be labelled: {first}",
                             hint="is the recogniser one of this language and alphabet?")
    save_file({"frames": np.concatenate(frames).astype(np.int32),
               "ends": np.cumsum([len(row) for row in frames])}, folder / DURATIONS)
    return {"rows": len(manifest), "kept": len(frames), "left_out": len(left_out)}


def _batch(rows: Sequence[Utterance], keys: TTSKeys, codec: CodecBundle, aligner: AlignerBundle,
           ) -> Iterator[tuple[Utterance, Label | str]]:
    """Yield the rows of a batch with their labels, or the reason why there are none."""
    read: list[tuple[Utterance, np.ndarray]] = []
    for row in rows:
        if unknown := sorted(keys.symbols.unknown([row.text])):
            yield row, f"no training text has {', '.join(map(repr, unknown[:NAMED]))}"
            continue
        try:
            read.append((row, read_utterance(row.wav, row.start, row.duration, sample_rate=keys.sample_rate)))
        except SbkitError as error:
            yield row, str(error)
    if not read:
        return
    signals = [signal for _, signal in read]
    alignments = aligner.align(signals, keys.sample_rate, [row.text for row, _ in read])
    for (row, signal), codes, alignment in zip(read, codec.encode_each(signals), alignments, strict=True):
        if isinstance(codes, SbkitError):
            yield row, codes.message
        elif isinstance(alignment, str):
            yield row, alignment
        elif ends := keys.symbols.write(row.text)[1]:
            frames = durations(row.text, alignment, signal, keys.sample_rate, len(codes))
            yield row, Label(codes, symbol_durations(frames, ends), row.speaker)
        else:
            yield row, "its text has no symbol of the voice"


def targets(labels: Sequence[Label | None], symbols: int, frames: int, quantiser: Quantiser, device: torch.device,
            ) -> Targets:
    """Collate the labels of a batch; an utterance without any gets an even share of ``frames`` for each symbol.

    symbols : the width of the batch's padded texts
    quantiser : maps codes to choices; it is on the device
    """
    even = np.diff(np.linspace(0, frames, symbols + 3).round().astype(np.int64))
    rows = [even if label is None else label.frames for label in labels]
    spread = np.zeros((len(rows), symbols + 2), np.int64)
    codes = torch.zeros(len(rows), max(int(row.sum()) for row in rows), len(quantiser.sizes), dtype=torch.int64)
    for i, (label, row) in enumerate(zip(labels, rows, strict=True)):
        spread[i, :len(row)] = row
        if label is not None:
            codes[i, :len(label.codes)] = torch.from_numpy(label.codes)
    known = torch.tensor([label is not None for label in labels])
    codes_there = codes.to(device, non_blocking=True)
    return Targets(quantiser.chosen(codes_there), torch.from_numpy(spread).to(device, non_blocking=True),
                   known.to(device, non_blocking=True))
