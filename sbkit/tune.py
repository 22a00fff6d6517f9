"""How large a batch may be: ``sbkit tune`` tries, bucket by bucket, and remembers per model, device and precision."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sbkit.console import atomic_write, progress, table
from sbkit.data.batch import Batch
from sbkit.data.manifest import Manifest
from sbkit.data.plan import Batching, Plan
from sbkit.errors import SbkitError
from sbkit.recipe.bill import TOKENS_PER_SECOND, Measured, longest_utterance

#: Share of what was found to fit that is recommended: memory fragments, and some texts are longer than others.
MARGIN = 0.9
#: Buckets that are tried: the others lie between them.
MOST_BUCKETS = 6
#: How near to the largest number of utterances the search goes.
PRECISION = 0.04
#: Steps that ``sbkit check --measure`` times, after one that isn't, and seconds after which it stops early.
STEPS, PATIENCE = 4, 60.0
_LETTERS_PER_SECOND = 16
FLAGS = ("--fresh",)


def tune(argv: list[str]) -> int:
    """``sbkit tune RECIPE.yaml [--key value ...] [--fresh]``; returns the exit code."""
    from sbkit.recipe import arguments
    from sbkit.train import device as devices

    request = arguments.parse([word for word in argv if word not in FLAGS])
    device = devices.resolve(request.run_opts.device)
    if device.type != "cuda":
        raise SbkitError(f"there is nothing to tune on {device}: running out of memory there ends the process",
                         hint="sbkit check counts what a batch needs")
    with _trial(request, device) as trial:
        path = cache_path(trial.brain, device)
        found = None if "--fresh" in argv else _remembered(path, trial.edges)
        if found is None:
            found = search(trial.edges, trial.fits, trial.most_seconds)
            with atomic_write(path) as file:
                json.dump({"edges": trial.edges, "fits": found}, file)
        else:
            print(f"found before, in {path} (--fresh tries again)", file=sys.stderr)
    print(_told(trial, found))
    return 0


def search(edges: Sequence[float], fits: Callable[[int, float], bool], most_seconds: float,
           show: bool = True) -> list[int]:
    """The largest number of utterances for each bucket, found by trying.

    edges: seconds of the longest utterance of each bucket, ascending
    fits: (utterances, seconds of each) -> whether a step has room
    most_seconds: no batch needs to be larger
    """
    found: list[int] = []
    bar = progress(list(reversed(edges)), what="buckets tried", unit="bucket", show=show)
    for edge in bar:  # the longest first: what fits there is a start for shorter ones
        most = max(1, int(most_seconds / edge))
        start = min(most, max(1, int(found[-1] * edges[-len(found)] / edge)) if found and found[-1] else 1)
        found.append(_largest(lambda n, edge=edge: fits(n, edge), start, most))
    return found[::-1]


def _largest(fits: Callable[[int], bool], start: int, most: int) -> int:
    """The largest n up to ``most`` that fits, to within ``PRECISION``; 0 where not even 1 does."""
    good, bad = 0, most + 1
    n = start
    while good < n < bad:
        if fits(n):
            good = n
            n = min(2 * n, most)
        else:
            bad = n
            n = max(n // 2, 1)
    while bad - good > max(1, PRECISION * good):
        middle = (good + bad) // 2
        if fits(middle):
            good = middle
        else:
            bad = middle
    return good


def _remembered(path: Path, edges: list[float]) -> list[int] | None:
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        return stored["fits"] if stored["edges"] == edges else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def cache_path(brain: Any, device: torch.device) -> Path:
    """Where the result for this model, device and precision is kept."""
    modules = brain.modules
    facts = [
        repr(modules), [[name, list(t.shape), str(t.dtype)] for name, t in modules.state_dict().items()],
        torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0,
        brain.precision, torch.__version__, str(getattr(brain.hparams, "activation_checkpointing", None)),
        getattr(brain.hparams, "ctc_weight", None), str(brain.opt_class),
    ]
    key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
    home = os.environ.get("SBKIT_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sbkit"
    return Path(home) / "tune" / f"{key}.json"


def _told(trial: Trial, found: list[int]) -> str:
    rows = [[f"up to {edge:.1f} s", n, f"{n * edge:.0f}"] for edge, n in zip(trial.edges, found, strict=True)]
    shown = table(["utterances", "fit at once", "seconds"], rows)
    best = min(n * edge for edge, n in zip(trial.edges, found, strict=True))
    if not best:
        return f"{shown}\nnot even one of the longest utterances fits: try activation_checkpointing, or a smaller model"
    return (f"{shown}\n{trial.device_name}, {trial.brain.precision}: --max_batch_seconds {int(MARGIN * best)} "
            f"({MARGIN:.0%} of what fitted; the recipe has {trial.batching.max_batch_seconds:g})")


# ---------------------------------------------------------------------------------------------- trials


class Trial:
    """A Brain that takes steps on noise, to see what they need."""

    def __init__(self, brain: Any, batching: Batching, durations: np.ndarray, tokens_per_second: float,
                 device: torch.device):
        self.brain, self.batching, self.device = brain, batching, device
        self.tokens_per_second = tokens_per_second
        edges = Plan(durations, Batching(batching.max_batch_seconds, batching.step_seconds)).edges.tolist() \
            if float(durations.max()) <= batching.max_batch_seconds else [float(durations.max())]
        chosen = np.unique(np.linspace(0, len(edges) - 1, MOST_BUCKETS).round().astype(int))
        self.edges = [round(edges[i], 2) for i in chosen]
        self.most_seconds = max(batching.step_seconds, batching.max_batch_seconds)

    @property
    def device_name(self) -> str:
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else str(self.device)

    def batch(self, utterances: int, seconds: float) -> Batch:
        """Noise of this size, with as many labels as such an utterance has."""
        rate = getattr(self.brain.hparams, "sample_rate", 16000)
        samples, labels = round(seconds * rate), max(1, round(seconds * self.tokens_per_second))
        highest = self.brain.hparams.output_neurons
        return Batch(
            ids=[f"noise {i}" for i in range(utterances)], texts=[""] * utterances, samples=utterances * samples,
            signals=0.1 * torch.randn(utterances, samples), signal_lengths=torch.full((utterances,), samples),
            tokens=torch.randint(1, highest, (utterances, labels)), token_lengths=torch.full((utterances,), labels),
        ).to(self.device)

    def fits(self, utterances: int, seconds: float) -> bool:
        """Whether a step on such a batch has room."""
        return self.brain.try_batch(self.batch(utterances, seconds))


@contextlib.contextmanager
def _trial(request: Any, device: torch.device) -> Iterator[Trial]:
    """The recipe's Brain, in a folder of its own that goes afterwards."""
    from sbkit.recipe import load

    with tempfile.TemporaryDirectory(prefix="sbkit-tune-") as folder:
        own = load.load(request.path, {**request.overrides, "output_folder": folder})
        load.require(own, request.path, "brain", "modules", "output_neurons", "batching")
        hparams = {key: value for key, value in own.items() if key not in ("output_folder", "schedule", "ema")}
        brain = own["brain"](modules=own["modules"], opt_class=own.get("opt_class"), hparams=hparams,
                             run_opts=request.run_opts, checkpointer=None)
        brain.on_fit_start()
        brain.modules.train()
        logging.getLogger("sbkit.train.parallel").setLevel(logging.ERROR)  # the run itself names idle layers
        durations = _durations(request, own, Path(folder))
        letters = getattr(own.get("tokenizer"), "model_type", "") == "char"
        yield Trial(brain, own["batching"], durations, _LETTERS_PER_SECOND if letters else TOKENS_PER_SECOND, device)


def _durations(request: Any, hparams: dict[str, Any], folder: Path) -> np.ndarray:
    """Of the prepared corpus where there is one; else all lengths up to the longest that are allowed."""
    from sbkit.recipe.reading import read
    from sbkit.recipe.source import Findings

    root = read(request.path, request.overrides, Findings())
    corpus = hparams.get("corpus")
    if hasattr(corpus, "manifest_path"):
        real = Path(str(root.value["output_folder"].value)) / corpus.manifest_path("train").relative_to(folder)
        if real.exists():
            return Manifest.read(real).durations
    return np.linspace(1.0, longest_utterance(hparams), 200, dtype=np.float32)


def measurement(request: Any) -> Callable[[], Measured]:
    """For ``sbkit check --measure``: a few real steps at the planned size."""
    from sbkit.train import device as devices

    def measure() -> Measured:
        device = devices.resolve(request.run_opts.device)
        with _trial(request, device) as trial:
            seconds = trial.edges[-1]
            batch = trial.batch(max(1, int(trial.batching.max_batch_seconds / seconds)), seconds)
            return time_steps(trial.brain.try_batch, batch, device)
    return measure


def time_steps(step: Callable[[Batch], bool], batch: Batch, device: torch.device) -> Measured:
    """Steps on one batch, the first left out; the median counts."""
    wait = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    times: list[float] = []
    for i in range(STEPS + 1):
        started = time.perf_counter()
        if not step(batch):
            raise SbkitError(f"a micro-batch of {batch.padded_seconds:.0f} s does not fit into the memory of {device}",
                             hint="sbkit tune finds the largest that does", exit_code=1)
        wait()
        if i or device.type == "cpu":  # the first step of a GPU loads kernels
            times.append(time.perf_counter() - started)
        if sum(times) > PATIENCE:
            break
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return Measured(str(device), batch.padded_seconds, float(np.median(times)), peak)
