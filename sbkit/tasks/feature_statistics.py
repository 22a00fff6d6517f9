"""Mean and deviation of the features of a training split, for ``sbkit.nn.global_norm.GlobalNorm``.

Each utterance is summed by itself in float64, and the sums are added in the manifest's order: the result doesn't depend
on the number of processes.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

from sbkit.data.audio import AudioError
from sbkit.data.loader import Workers, plain_errors
from sbkit.data.manifest import Manifest
from sbkit.data.reader import Reader, quiet_worker, starting_workers
from sbkit.errors import SbkitError
from sbkit.nn.global_norm import GlobalNorm
from sbkit.nn.lengths import feature_frames, takes_lengths
from sbkit.system.console import atomic_write, progress
from sbkit.system.cores import usable_cores

logger = logging.getLogger(__name__)

FILE = "feature_statistics.json"
_NAMED = 5  # recordings that could not be read, each logged
_LEAST = 1e-5  # deviation, relative to the mean or to 1, below which a feature is constant and only its mean is taken


class Front(NamedTuple):
    """A recipe's features."""

    features: nn.Module
    hop: int
    """Samples between two frames."""
    sample_rate: int


class Statistics(NamedTuple):
    """Mean and standard deviation of each feature, [F] float64."""

    mean: np.ndarray
    deviation: np.ndarray
    frames: int
    left_out: int
    """Utterances that could not be read."""


def path_of(norm: GlobalNorm) -> Path:
    """Return the file that holds a normalisation's statistics."""
    return norm.folder / FILE


def prepare(norm: GlobalNorm, front: Front, manifest: Manifest, show: bool = True) -> None:
    """Compute the statistics of a training split, unless the file holds those of the same one already."""
    fingerprint = _fingerprint(front, manifest)
    if _stored(norm).get("fingerprint") == fingerprint:
        logger.info("%s: computed from this corpus already", path_of(norm))
        return
    found = compute(front, manifest, show=show)
    facts = {"fingerprint": fingerprint, "utterances": len(manifest) - found.left_out, "left_out": found.left_out,
             "frames": found.frames, "mean": found.mean.tolist(), "deviation": found.deviation.tolist()}
    with atomic_write(path_of(norm)) as file:
        json.dump(facts, file, indent=1)


def load(norm: GlobalNorm) -> None:
    """Give a normalisation the statistics in its folder, if they are there."""
    facts = _stored(norm)
    if not facts:
        return
    mean, deviation = (torch.tensor(facts[name], dtype=torch.float64) for name in ("mean", "deviation"))
    if len(mean) != len(norm.mean):
        raise SbkitError(f"{path_of(norm)} has statistics of {len(mean)} features, and the recipe's normalize has "
                         f"{len(norm.mean)}", hint="give it as many as compute_features makes: `!ref <n_mels>`")
    norm.take(mean, deviation)


def compute(front: Front, manifest: Manifest, workers: int | None = None, show: bool = True) -> Statistics:
    """Compute the statistics of all utterances of a manifest that can be read.

    workers : as ``over_utterances`` takes it
    """
    sums, frames, unread = np.zeros(1), 0, 0
    results = over_utterances(_Sums(front), manifest, front.sample_rate, workers)
    for result in progress(results, what="statistics of features", total=len(manifest), unit="utterance", show=show):
        if isinstance(result, Unread):
            unread += 1
            if unread <= _NAMED:
                logger.warning("left out of the statistics: %s: %s", result.id, result.why)
            continue
        frames += result[0]
        sums = sums + result[1]
    if frames == 0:
        raise SbkitError("no frame of the training split could be read for its statistics",
                         hint="is its audio still where the manifest says?")
    if unread > _NAMED:
        logger.warning("%d of %d utterances could not be read, and are left out of the statistics", unread,
                       len(manifest))
    mean = sums[0] / frames
    deviation = np.sqrt(np.maximum(sums[1] / frames - np.square(mean), 0.0))
    constant = deviation < _LEAST * np.maximum(np.abs(mean), 1.0)
    return Statistics(mean, np.where(constant, 1.0, deviation), frames, unread)


class _Sums:
    """A waveform [S] to its number of frames, and the sums of features and of their squares, [2, F] float64."""

    def __init__(self, front: Front):
        self.front = front._replace(features=copy.deepcopy(front.features).cpu().eval())
        self.takes_lengths = takes_lengths(front.features)

    @torch.no_grad()
    def __call__(self, signal: np.ndarray) -> tuple[int, np.ndarray]:
        features, hop, _ = self.front
        count = feature_frames(features, len(signal), hop)
        if count <= 0:
            return 0, np.zeros(1)
        given = torch.from_numpy(signal)[None], torch.tensor([len(signal)])
        feats = features(*given) if self.takes_lengths else features(given[0])
        wide = feats[0, :count].double()
        return len(wide), torch.stack([wide.sum(0), wide.square().sum(0)]).numpy()


def _stored(norm: GlobalNorm) -> dict[str, Any]:
    """Return what the file holds; nothing if it isn't there or isn't whole."""
    try:
        facts = json.loads(path_of(norm).read_text(encoding="utf-8"))
        return facts if {"fingerprint", "mean", "deviation"} <= set(facts) else {}
    except (OSError, ValueError, TypeError):
        return {}


def _fingerprint(front: Front, manifest: Manifest) -> str:
    """Identify the features and the utterances; not where the recordings lie, since a corpus may be moved."""
    digest = hashlib.sha256(json.dumps([front.hop, front.sample_rate, _described(front.features)]).encode())
    for name, tensor in front.features.state_dict().items():
        digest.update(name.encode() + tensor.detach().cpu().numpy().tobytes())
    digest.update(manifest.durations.tobytes() + manifest.starts.tobytes())
    for name in manifest.ids:
        digest.update(name.encode("utf-8", "surrogatepass") + b"\n")
    return digest.hexdigest()


def _described(features: nn.Module) -> list[Any]:
    """List the class and the plain settings of a layer and all within it."""
    return [[path, type(module).__qualname__, {name: value for name, value in sorted(vars(module).items())
                                               if not name.startswith("_") and _plain(value) and name != "training"}]
            for path, module in features.named_modules()]


def _plain(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_plain, value))
    if isinstance(value, dict):
        return all(map(_plain, (*value, *value.values())))
    return value is None or isinstance(value, (bool, int, float, str))


#: For fewer utterances, starting processes takes longer than what they compute.
WORTH_PROCESSES = 500
_MAX_WORKERS = 32
_AHEAD = 16  # results that each process computes ahead

T = TypeVar("T")


class Unread(NamedTuple):
    """Takes the place of a result where a recording can't be read."""

    id: str
    why: str


class _Results(Dataset[Any], Generic[T]):
    """The results by number of the utterance, in a worker process."""

    def __init__(self, function: Callable[[np.ndarray], T], manifest: Manifest, sample_rate: int):
        self.function, self.reader = function, Reader(manifest, None, sample_rate=sample_rate)

    def __len__(self) -> int:
        return len(self.reader)

    def __getitem__(self, row: int) -> T | Unread:
        name = self.reader.manifest.ids[row]
        try:
            signal = self.reader.signals(row, name, visit=0)[0]
        except AudioError as error:
            return Unread(name, str(error))
        return self.function(signal)


def over_utterances(function: Callable[[np.ndarray], T], manifest: Manifest, sample_rate: int,
                    workers: int | None = None) -> Iterator[T | Unread]:
    """Yield ``function(signal)`` for each utterance's waveform [S], always computed by one thread.

    workers : number of processes; None: one for each core if they are worth starting; 0: this one computes
    """
    if workers is None:
        cores = min(_MAX_WORKERS, usable_cores())
        workers = cores if cores > 1 and len(manifest) >= WORTH_PROCESSES else 0
    parallel: dict[str, Any] = {"worker_init_fn": quiet_worker, "prefetch_factor": _AHEAD} if workers else {}
    loader = Workers(_Results(function, manifest, sample_rate), batch_size=None, collate_fn=_unchanged,
                     num_workers=workers, generator=torch.Generator(), **parallel)
    with _one_thread(), starting_workers() if workers else contextlib.nullcontext(), plain_errors():
        results: Any = iter(loader)  # of a class that torch keeps to itself
    try:
        while True:
            with _one_thread(), plain_errors():
                result = next(results, _END)
            if result is _END:
                return
            yield result
    finally:
        if workers:
            results._shutdown_workers()


_END: Any = object()  # so that what is told from it keeps its type


def _unchanged(result: T) -> T:
    return result


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Sums in several threads depend on their number, and workers have one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
