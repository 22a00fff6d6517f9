"""Mean and standard deviation of the features of a training split, for ``sbkit.nn.global_norm.GlobalNorm``, and for
SpeechBrain's ``InputNormalization`` with ``norm_type: global``, whose own running estimate would depend on how many
micro-batches and ranks a step has.

Each utterance is summed separately in float64, and the sums are added in the manifest's order, so the result doesn't
depend on the number of processes.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeGuard

import numpy as np
import torch
from speechbrain.processing.features import InputNormalization
from torch import nn
from torch.utils.data import Dataset

from sbkit.data.audio import AudioError
from sbkit.data.loader import QuietDataLoader, plain_worker_errors, unchanged
from sbkit.data.manifest import Manifest
from sbkit.data.reader import Reader, init_worker, starting_workers
from sbkit.errors import SbkitError
from sbkit.export.features import is_input_normalization
from sbkit.nn.fast import front_end
from sbkit.nn.global_norm import GlobalNorm
from sbkit.nn.lengths import feature_frames, takes_lengths
from sbkit.runs import initial
from sbkit.system.console import atomic_write, progress
from sbkit.system.cores import usable_cores
from sbkit.tasks.corpus_part import CorpusPart, OwnKeys

logger = logging.getLogger(__name__)

FILE = "feature_statistics.json"
_MAX_LOGGED = 5  # unreadable recordings
#: Utterances from which starting processes pays off.
WORTH_PROCESSES = 500
_MAX_WORKERS = 32
#: Utterances that are read at most: some 30 hours, so that a corpus of thousands doesn't wait for them.
ENOUGH = 20_000
_PREFETCHED = 16  # results per process
_MIN_DEVIATION = 1e-5  # relative to the mean or to 1; below, a feature is constant, and only its mean is subtracted

Norm: TypeAlias = "GlobalNorm | InputNormalization"


class FeatureSettings(NamedTuple):
    """A recipe's feature extraction."""

    features: nn.Module
    hop: int
    """Samples between two frames."""
    sample_rate: int


def is_global(norm: object) -> TypeGuard[Norm]:
    """Return whether a normalisation uses statistics of the training split."""
    return isinstance(norm, GlobalNorm) or (isinstance(norm, InputNormalization) and norm.norm_type == "global")


def path_of(norm: Norm, folder: str | None = None) -> Path:
    """Return the path of a normalisation's statistics: in its own folder if it has one, otherwise in the run's."""
    return Path(norm.folder if isinstance(norm, GlobalNorm) else folder or ".") / FILE


def prepare(norm: Norm, settings: FeatureSettings, manifest: Manifest, folder: str | None = None) -> None:
    """Compute the statistics of a training split, unless the file already has them; ``folder``: of the run."""
    path = path_of(norm, folder)
    fingerprint = _fingerprint(settings, manifest)
    if _stored(path).get("fingerprint") == fingerprint:
        logger.info("%s: the feature statistics of this corpus are up to date", path)
        return
    statistics = compute(settings, manifest)
    facts = {
        "fingerprint": fingerprint,
        "utterances": min(len(manifest), ENOUGH) - statistics.left_out,
        "left_out": statistics.left_out,
        "frames": statistics.frames,
        "mean": statistics.mean.tolist(),
        "deviation": statistics.deviation.tolist(),
    }
    with atomic_write(path) as file:
        json.dump(facts, file, indent=1)


def _fingerprint(settings: FeatureSettings, manifest: Manifest) -> str:
    """Return a hash of what the statistics depend on. Paths of recordings aren't in it: a corpus may be moved."""
    layers = []
    for path, module in settings.features.named_modules():
        attributes = {name: value for name, value in sorted(vars(module).items())
                      if not name.startswith("_") and _plain(value) and name != "training"}
        layers.append([path, type(module).__qualname__, attributes])
    digest = hashlib.sha256(json.dumps([settings.hop, settings.sample_rate, layers]).encode())
    for name, tensor in settings.features.state_dict().items():
        digest.update(name.encode() + tensor.detach().cpu().numpy().tobytes())
    digest.update(manifest.durations.tobytes() + manifest.starts.tobytes())
    for name in manifest.ids:
        digest.update(name.encode("utf-8", "surrogatepass") + b"\n")
    return digest.hexdigest()


def load(norm: Norm, folder: str | None = None) -> None:
    """Give a normalisation its statistics, if they are there; they don't change in training."""
    path = path_of(norm, folder)
    facts = _stored(path)
    if not facts:
        return
    mean, deviation = (torch.tensor(facts[name], dtype=torch.float64) for name in ("mean", "deviation"))
    if isinstance(norm, InputNormalization):
        _set_fixed(norm, mean.float(), deviation.float())
        norm.count = int(facts["frames"])
        return
    if len(mean) != len(norm.mean):
        raise SbkitError("shape-mismatch", f"{path} has statistics of {len(mean)} features, but the recipe's normalize "
                         f"has {len(norm.mean)}", file=path, key="normalize",
                         hint="write n_features: !ref <n_mels>, as many as compute_features makes")
    norm.set_statistics(mean, deviation)


def allow_missing(norm: Norm) -> None:
    """Leave the features of dummy batches unchanged until there are statistics."""
    if isinstance(norm, GlobalNorm):
        norm.allow_missing()
    elif not norm.glob_mean.numel():
        _set_fixed(norm, torch.zeros(1), torch.ones(1))


def _set_fixed(norm: InputNormalization, mean: torch.Tensor, deviation: torch.Tensor) -> None:
    """Set statistics that no forward changes."""
    norm.glob_mean, norm.glob_std = mean, deviation
    if is_input_normalization(norm):
        norm.__class__ = front_end.FixedNormalization
    else:  # a class of the user's
        vars(norm)["_should_update"] = _never


def _never(epoch: int | None) -> bool:
    """Replaces a method of ``InputNormalization``, which updates its estimate in training."""
    return False


class Statistics(NamedTuple):
    """Statistics of features."""

    mean: np.ndarray
    """[F] float64."""
    deviation: np.ndarray
    """[F] float64, the standard deviation; 1 for a feature that is constant."""
    frames: int
    left_out: int
    """Utterances that can't be read, or whose features are not finite."""


def compute(settings: FeatureSettings, manifest: Manifest, workers: int | None = None) -> Statistics:
    """Compute the statistics of a manifest's readable utterances: of ``ENOUGH``, spread evenly, if it has more.

    workers : number of processes; None: one for each core if that pays off; 0: the current process
    """
    if len(manifest) > ENOUGH:
        manifest = manifest.select(np.linspace(0, len(manifest) - 1, ENOUGH).astype(np.int64))
    if workers is None:
        cores = min(_MAX_WORKERS, usable_cores())
        workers = cores if cores > 1 and len(manifest) >= WORTH_PROCESSES else 0
    sums = np.zeros(1)  # [2, F] of the features and of their squares, once there is an utterance
    frames = 0
    unread = 0
    for result in progress(_sums(settings, manifest, workers), what="statistics of features", total=len(manifest),
                           unit="utterance"):
        if isinstance(result, str):
            unread += 1
            if unread <= _MAX_LOGGED:
                logger.warning("a recording is left out of the feature statistics: %s", result)
            continue
        frames_of_utterance, sums_of_utterance = result
        frames += frames_of_utterance
        sums = sums + sums_of_utterance
    if frames == 0:
        raise SbkitError("too-much-damaged-audio",
                         "no recording of the training split could be used for the statistics of its "
                         "features", hint="is its audio still where the manifest says? the warnings above name some")
    if unread > _MAX_LOGGED:
        logger.warning("%d of %d utterances could not be read, and are left out of the feature statistics", unread,
                       len(manifest))
    mean = sums[0] / frames
    deviation = np.sqrt(np.maximum(sums[1] / frames - np.square(mean), 0.0))
    is_constant = deviation < _MIN_DEVIATION * np.maximum(np.abs(mean), 1.0)
    return Statistics(mean, np.where(is_constant, 1.0, deviation), frames, unread)


def _sums(settings: FeatureSettings, manifest: Manifest, workers: int) -> Iterator[tuple[int, np.ndarray] | str]:
    """Yield what ``_Sums`` has of each utterance, in the order of the manifest."""
    parallel: dict[str, Any] = {}  # torch's arguments
    if workers:
        parallel = {"worker_init_fn": init_worker, "prefetch_factor": _PREFETCHED}
    loader = QuietDataLoader(_Sums(settings, manifest), batch_size=None, collate_fn=unchanged, num_workers=workers,
                             generator=torch.Generator(), **parallel)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in workers: sums depend on the number of threads
    try:
        with plain_worker_errors():
            with starting_workers() if workers else contextlib.nullcontext():
                results = iter(loader)
            yield from results
    finally:
        torch.set_num_threads(threads)


class FeatureStatistics(CorpusPart):
    """The statistics of the recipe's ``normalize``, if it uses those of the training split."""

    def prepare(self, keys: OwnKeys, manifests: Mapping[str, Manifest], given: Mapping[str, Any]) -> dict[str, Any]:
        """Compute them, unless checkpoints hold them."""
        norm, features = keys.normalize, keys.compute_features
        if is_global(norm) and features is not None and initial.fresh(keys):
            settings = FeatureSettings(features, keys.hop_samples, keys.sample_rate)
            prepare(norm, settings, manifests["train"], keys.output_folder)
        return {}

    def is_prepared(self, keys: OwnKeys) -> bool:
        norm = keys.normalize
        return not is_global(norm) or path_of(norm, keys.output_folder).exists()

    def load(self, keys: OwnKeys) -> Iterable[tuple[str, object]]:
        norm = keys.normalize
        if not is_global(norm):
            return []
        load(norm, keys.output_folder)
        return [("normalize", norm)]

    def allow_missing(self, keys: OwnKeys) -> None:
        if is_global(keys.normalize):
            allow_missing(keys.normalize)


class _Sums(Dataset[Any]):
    """Each utterance's number of frames, and the sums of its features and of their squares, [2, F] float64; a message
    if it can't be read, or if they are not finite."""

    def __init__(self, settings: FeatureSettings, manifest: Manifest):
        self.features = copy.deepcopy(settings.features).cpu().eval()
        self.hop = settings.hop
        self.takes_lengths = takes_lengths(settings.features)
        self.reader = Reader(manifest, None, sample_rate=settings.sample_rate)

    def __len__(self) -> int:
        return len(self.reader)

    @torch.no_grad()
    def __getitem__(self, row: int) -> tuple[int, np.ndarray] | str:
        name = self.reader.manifest.ids[row]
        try:
            signal = self.reader.signals(row, name, pass_number=0)[0]
        except AudioError as error:
            return f"{name}: {error}"
        count = feature_frames(self.features, len(signal), self.hop)
        if count <= 0:
            return 0, np.zeros(1)
        signals = torch.from_numpy(signal)[None]
        lengths = torch.tensor([len(signal)])
        feats = self.features(signals, lengths) if self.takes_lengths else self.features(signals)
        inside = feats[0, :count].double()
        sums = torch.stack([inside.sum(0), inside.square().sum(0)]).numpy()
        if not np.isfinite(sums).all():
            return f"{name}: its features are not finite"
        return len(inside), sums


def _stored(path: Path) -> dict[str, Any]:
    """Return the contents of the file; empty if it is missing or damaged."""
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        return facts if {"fingerprint", "mean", "deviation"} <= set(facts) else {}
    except (OSError, ValueError, TypeError):
        return {}


def _plain(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_plain, value))
    if isinstance(value, dict):
        return all(map(_plain, (*value, *value.values())))
    return value is None or isinstance(value, (bool, int, float, str))
