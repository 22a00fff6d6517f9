"""Records stages, host waits, memory, collectives and errors of a rehearsed process as they happen.

Each process appends lines of JSON to its diary, so they are known even if it hangs or is killed.
"""

from __future__ import annotations

import functools
import inspect
import json
import linecache
import pickle
import sysconfig
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import speechbrain
import torch
from speechbrain.core import Stage
from torch.optim import Optimizer

from sbkit.compat.brain import Brain
from sbkit.errors import SbkitError, first_line
from sbkit.recipe import flops
from sbkit.recipe.report import ERROR, WARNING, Finding
from sbkit.train import graphs, update
from sbkit.train.batches import MicroBatch
from sbkit.train.checkpoint import Checkpointer
from sbkit.train.distributed import ranks
from sbkit.train.trainer import Trainer

#: The report's names of stages.
NAMES = {Stage.TRAIN: "steps", Stage.VALID: "validation", Stage.TEST: "test"}
#: Steps of an epoch before allocations and waits count.
WARMUP_STEPS = 2
_LIBRARIES = tuple(map(str, {sysconfig.get_paths()["stdlib"], sysconfig.get_paths()["purelib"],
                             Path(torch.__file__).parent, Path(speechbrain.__file__).parent, Path(__file__).parent}))


class Diary:
    """A log of JSON lines, written by one process.

    folder : the folder of all diaries
    launch : the name of the launch
    rank : the rank of this process
    """

    def __init__(self, folder: Path, launch: str, rank: int):
        self.path = folder / f"{launch}.{rank}.jsonl"
        self.launch = launch
        self.stage = ""
        self._lock = threading.Lock()
        self.brain: Any = None  # a recipe's
        """The Brain, once it is built; its hparams name the key of an object."""

    def write(self, kind: str, value: object) -> None:
        with self._lock, open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps({kind: value, "at": time.monotonic()}, default=str) + "\n")

    def begin_stage(self, stage: str) -> None:
        """Begin a stage, and end the one before."""
        if stage != self.stage:
            self.stage = stage
            self.write("stage", stage)

    def report(self, code: str, location: tuple[str, int], message: str, suggestion: str, *, key: str = "",
             ends: bool = False, severity: str = ERROR) -> None:
        """Write a finding; ``ends``: whether it ends the launch."""
        finding = Finding(severity, code, *location, key, message, suggestion)
        self.write("finding", asdict(finding) | {"stage": self.stage, "ends": ends})

    def add_error(self, error: BaseException) -> None:
        """Write the error that ended the stage, with the innermost line of sbkit or the recipe."""
        cause = error
        while isinstance(cause, SbkitError) and cause.__cause__ is not None:
            cause = cause.__cause__
        frames = list(traceback.walk_tb(cause.__traceback__))
        location = own_location((frame.f_code.co_filename, line) for frame, line in reversed(frames))
        if isinstance(cause, SbkitError):
            code = cause.code
        else:  # torch's errors of mismatches have no code
            code = next((code for words, code in _MISMATCHES.items() if words in str(cause)),
                        error.code if isinstance(error, SbkitError) else "exception")
        if isinstance(error, SbkitError):
            message, hint = error.message, error.hint or ""
        else:
            message, hint = f"{type(error).__name__}: {first_line(error)}", _ADVICE.get(code, "")
        line = linecache.getline(*location).strip()
        objects = [frame.f_locals.get("self") for frame, _ in reversed(frames)]
        self.report(code, location, message, hint or f"the line is: {line}", ends=True, key=self._key_of(objects))

    def _key_of(self, objects: Iterable[object]) -> str:
        """Return the recipe's key of the first of these objects that has one; empty if none has."""
        if self.brain is None:
            return ""
        keys = {id(value): key for key, value in vars(self.brain.hparams).items() if hasattr(value, "__dict__")}
        return next((keys[id(instance)] for instance in objects if keys.get(id(instance))), "")


#: Parts of torch's messages about tensors that don't match.
_MISMATCHES = {"same device": "device-mismatch", "same dtype": "dtype-mismatch"}
_ADVICE = {"device-mismatch": "hold the tensor as a buffer, or move it with .to(x.device)",
           "dtype-mismatch": "cast one of them, or compute both under the same autocast"}


def _is_own(file: str) -> bool:
    """Return whether a file belongs to sbkit or the recipe, and not to a library."""
    return not file.startswith((*_LIBRARIES, "<"))


def own_location(frames: Iterable[tuple[str, int]]) -> tuple[str, int]:
    """Return the innermost location in sbkit or the recipe; ``frames`` begin with the innermost."""
    frames = list(frames)
    innermost = frames[0] if frames else ("", 0)
    return next((location for location in frames if _is_own(location[0])), innermost)


class Watch:
    """Watches a run through the public methods that it calls, and through its optimizer's steps."""

    def __init__(self, diary: Diary):
        self.diary = diary
        self.epoch = 0
        self.steps = 0
        self.on_step: Callable[[int, int], None] = lambda epoch, step: None
        self._waits: list[tuple[tuple[str, int], int]] = []  # locations, each with the steps done by then
        self._counted = 0
        self._optimizers: list[Optimizer] = []
        call_around(Brain, "__init__", after=lambda brain, *a, **k: setattr(diary, "brain", brain))
        call_around(flops, "operations_per_second", lambda *a, **k: diary.begin_stage("count of FLOPs"),
                    lambda *a, **k: diary.begin_stage("start"))
        call_around(Brain, "open_stage", self._open_stage)
        for name in ("save_checkpoint", "save_and_keep_only"):
            call_around(Checkpointer, name, lambda *a, **k: diary.begin_stage("checkpoint"))
        call_around(Trainer, "open_next_step", self._count_step)

    def _open_stage(self, brain: Brain, stage: Stage, epoch: int | None = None) -> None:
        if self.diary.stage == NAMES[Stage.TRAIN]:
            self.end_of_steps()
        self.diary.begin_stage(NAMES[stage])
        self.epoch = epoch or self.epoch
        self.steps = 0

    def _count_step(self, trainer: Trainer) -> None:
        self._optimizers = trainer.hooks.all_optimizers()
        self.steps += 1
        self.diary.write("step", self.steps)
        if self.diary.launch == "train" and self.epoch == 1:
            if self.steps == WARMUP_STEPS:
                # From here on, host waits and allocations are recorded, with their lines.
                warnings.filterwarnings("always", "called a synchronizing")
                warnings.filterwarnings("ignore", "Synchronization debug mode")
                self._show_others = warnings.showwarning
                warnings.showwarning = self._show
                torch.cuda.set_sync_debug_mode("warn")
                torch.cuda.memory._record_memory_history(max_entries=400_000, stacks="python")
                self._step_starts = [time.time_ns() // 1000]
            elif self.steps > WARMUP_STEPS:
                self._counted += 1
                self._step_starts.append(time.time_ns() // 1000)
        self.on_step(self.epoch, self.steps)

    def _show(self, message: Warning | str, *args: Any, **kwargs: Any) -> None:
        if "called a synchronizing" not in str(message):
            self._show_others(message, *args, **kwargs)
            return
        if torch._guards.CompileContext.current_compile_id() is not None:  # it reads values for itself, once a graph
            return
        stack = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_stack(None)]
        if any(graphs.is_capture(filename) for filename, _ in stack):  # of which a run has a few
            return
        location = own_location(stack)
        if not _is_own(location[0]):  # no line of Python has called autograd's threads
            location = ("", 0)
        self._waits.append((location, self.steps))

    def end_of_steps(self) -> None:
        """Report lines at which the host waited, and lines whose memory grew."""
        if not self._counted or torch.cuda.get_sync_debug_mode() == 0:
            return
        torch.cuda.set_sync_debug_mode("default")
        warnings.showwarning = self._show_others
        events = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
        torch.cuda.memory._record_memory_history(enabled=None)
        self._report_waits()
        self._report_growth(events)

    def _report_waits(self) -> None:
        counted = self._counted  # waits after the last step belong to the epoch
        waits = Counter(location for location, steps in self._waits if steps < self.steps).most_common()
        self.diary.write("figures", {"waits": [[*location, count / counted] for location, count in waits]})
        for location, count in waits:
            if count < counted:
                continue
            waiting = [] if location[0] != update.__file__ else [
                optimizer for optimizer in self._optimizers if not update.skips_itself(optimizer)]
            for optimizer in waiting:
                self._report_optimizer(optimizer)
            if not waiting:
                self.diary.report("wait", location, f"the host waits for the GPU {count / counted:.3g} times a step: "
                                  f"{linecache.getline(*location).strip() or 'in torch, in a backward'}",
                                  "keep the value on the device, or read it a step later")

    def _report_optimizer(self, optimizer: Optimizer) -> None:
        """Warn of an optimizer for which the host must read whether to step: a run says so, too, and goes on."""
        name = type(optimizer).__name__
        try:
            location = inspect.getsourcefile(type(optimizer)) or "", inspect.getsourcelines(type(optimizer))[1]
        except OSError:  # typed in a shell
            location = "", 0
        if not _is_own(location[0]):
            location = "", 0
        message = f"{name} can't skip a step by itself, so the host waits for the GPU in each step"
        remedy = ("AdamW, Adam and SGD of torch avoid this, and so can a class of your own: docs/how-to/extend.md, "
                  '"An optimizer that skips steps by itself"')
        self.diary.report("wait", location, message, remedy, key="opt_class", severity=WARNING)

    def _report_growth(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Report lines whose tensors of each step are still alive."""
        live: dict[int, Mapping[str, Any]] = {}  # by address
        for event in events:
            captured = any(graphs.is_capture(frame["filename"]) for frame in event.get("frames", ()))
            if event["action"] == "alloc" and not captured:  # tensors of graphs stay
                live[event["addr"]] = event
            elif event["action"] == "free_completed":
                live.pop(event["addr"], None)
        allocations_at: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
        for event in live.values():
            allocations_at.setdefault(_location(event), []).append(event)
        for location, allocations in allocations_at.items():
            steps = {sum(event["time_us"] >= start for start in self._step_starts) for event in allocations}
            if len(steps) >= self._counted:
                size = sum(event["size"] for event in allocations) / len(steps)
                self.diary.report("growth", location, f"memory grows by {size / 2**20:.3g} MiB a step, because tensors "
                                  f"created here are never freed: {linecache.getline(*location).strip()}",
                                  "don't keep the tensors of each step; .detach() a value that must outlive its step")


def call_around(owner: object, name: str, before: Callable[..., object] = lambda *args, **kwargs: None,
                after: Callable[..., object] = lambda *args, **kwargs: None) -> None:
    """Wrap a method or function to call ``before`` and ``after`` with its arguments, also if it fails."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> object:
        before(*args, **kwargs)
        try:
            return original(*args, **kwargs)
        finally:
            after(*args, **kwargs)

    setattr(owner, name, wrapped)


def memory_timeline(brain: Brain, batch: MicroBatch) -> tuple[int, int, dict[str, Any]]:
    """Return the bytes held before a step, its peak, and its memory over time with the lines that allocate the peak."""
    held = torch.cuda.memory_allocated()
    torch.cuda.memory._record_memory_history(max_entries=400_000, stacks="python")
    brain.try_batch(batch)
    events = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
    torch.cuda.memory._record_memory_history(enabled=None)
    allocated = peak = held
    curve = [held]
    peak_index = 0
    live: dict[int, Any] = {}  # by address
    live_at_peak: dict[int, Any] = {}
    for event in events:
        if event["action"] == "alloc":
            live[event["addr"]] = event
            allocated += event["size"]
        elif event["action"] == "free_completed":
            allocated -= event["size"]
            live.pop(event["addr"], None)
        curve.append(allocated)
        if allocated > peak:
            peak = allocated
            peak_index = len(curve) - 1
            live_at_peak = dict(live)
    bytes_at = Counter[tuple[str, int]]()
    for event in live_at_peak.values():
        bytes_at[_location(event)] += event["size"]
    width = max(1, len(curve) // 600)  # events in a point of the chart
    return held, peak, {
        "bytes": [max(curve[i:i + width]) for i in range(0, len(curve), width)], "peak_at": peak_index // width,
        "lines": [[*location, size, linecache.getline(*location).strip()]
                  for location, size in bytes_at.most_common(8)]}


def _location(event: Mapping[str, Any]) -> tuple[str, int]:
    return own_location((frame["filename"], frame["line"]) for frame in event.get("frames", ()))


def dump_collectives(diary: Diary) -> None:
    """Write the collectives of this rank from torch's flight recorder, with the lines that called them."""
    if ranks.world_size() == 1:
        return
    recorder: Any = torch._C._distributed_c10d  # its stub lacks the function
    entries = pickle.loads(recorder._dump_nccl_trace()).get("entries", [])
    calls = [[entry["profiling_name"].removeprefix("nccl:"), _tensors(entry["input_sizes"], entry["input_dtypes"]),
              *own_location((frame["filename"], frame["line"]) for frame in entry["frames"])] for entry in entries]
    written = diary.path.with_suffix(f".{threading.get_ident()}")
    written.write_text(json.dumps(calls))
    written.rename(diary.path.with_suffix(".collectives"))


def _tensors(sizes: Iterable[Iterable[int]], dtypes: Iterable[str]) -> str:
    """Describe tensors, such as ``6 x 80 float32``."""
    named = [str(getattr(torch, dtype.lower(), dtype)).removeprefix("torch.") for dtype in dtypes]
    return ", ".join(f"{' x '.join(map(str, size)) or 1} {name}" for size, name in zip(sizes, named, strict=False))


def keep_collectives(diary: Diary) -> None:
    """Write them each second, in case this rank hangs in one."""
    while True:
        time.sleep(1)
        if ranks.connected():
            dump_collectives(diary)
