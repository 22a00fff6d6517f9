"""What is seen of a rehearsed process: its stages, waits, memory, collectives and errors, written down as they happen.

Each process appends lines of JSON to a diary, so that what it did is known even if it hangs or is killed.
"""

from __future__ import annotations

import functools
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
from torch.optim.optimizer import register_optimizer_step_post_hook

from sbkit.errors import SbkitError, first_line
from sbkit.recipe import flops
from sbkit.recipe.report import ERROR, Finding
from sbkit.train.batches import MicroBatch
from sbkit.train.brain import Brain
from sbkit.train.checkpoint import Checkpointer
from sbkit.train.distributed import ranks
from sbkit.train.monitor.waits import is_compiling

#: Stages by the names that the report has.
NAMES = {Stage.TRAIN: "steps", Stage.VALID: "validation", Stage.TEST: "test"}
#: Steps of an epoch before allocations and waits count.
SETTLED = 2
_ELSEWHERE = tuple(map(str, {sysconfig.get_paths()["stdlib"], sysconfig.get_paths()["purelib"],
                             Path(torch.__file__).parent, Path(speechbrain.__file__).parent, Path(__file__).parent}))


class Diary:
    """Appends what happens to a file, one object of JSON a line.

    folder : where the diaries of all processes are
    launch : what this process does, by its name
    rank : its number among those that do it
    """

    def __init__(self, folder: Path, launch: str, rank: int):
        self.path, self.launch, self.stage = folder / f"{launch}.{rank}.jsonl", launch, ""
        self._lock = threading.Lock()
        self.brain: Any = None  # a recipe's
        """The Brain, once it is built; it knows which key an object belongs to."""

    def write(self, kind: str, value: object) -> None:
        with self._lock, open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps({kind: value, "at": time.monotonic()}, default=str) + "\n")

    def enter(self, stage: str) -> None:
        """Begin a stage, and end the one before."""
        if stage != self.stage:
            self.stage = stage
            self.write("stage", stage)

    def find(self, code: str, place: tuple[str, int], message: str, suggestion: str, *, key: str = "",
             ends: bool = False) -> None:
        """Write down something wrong; ``ends``: whether the launch ends with it."""
        finding = Finding(ERROR, code, *place, key, message, suggestion)
        self.write("finding", asdict(finding) | {"stage": self.stage, "ends": ends})

    def failed(self, error: BaseException) -> None:
        """Write down the error that ended the stage, with the innermost line that is ours or the recipe's."""
        frames = _frames(error)
        place = own_place((frame.f_code.co_filename, line) for frame, line in reversed(frames))
        code = next((code for words, code in _MISMATCHES.items() if words in str(error)), "error")
        if isinstance(error, SbkitError):
            message, hint = error.message, error.hint or ""
        else:
            message, hint = f"{type(error).__name__}: {first_line(error)}", _ADVICE.get(code, "")
        line = linecache.getline(*place).strip()
        self.find(code, place, message, hint or f"the line is: {line}", key=self._key(frames), ends=True)

    def _key(self, frames: Iterable[tuple[Any, int]]) -> str:
        """The key of the recipe whose object's code was running."""
        known = {id(value): key for key, value in vars(self.brain.hparams).items()
                 if hasattr(value, "__dict__")} if self.brain is not None else {}
        running = [known.get(id(frame.f_locals.get("self"))) for frame, _ in frames]
        return next((key for key in reversed(running) if key), "")


#: What torch says of tensors that don't fit together.
_MISMATCHES = {"same device": "device-mismatch", "same dtype": "dtype-mismatch"}
_ADVICE = {"device-mismatch": "hold the tensor as a buffer, or move it with .to(x.device)",
           "dtype-mismatch": "cast one of them, or compute both under the same autocast"}


def _frames(error: BaseException) -> list[tuple[Any, int]]:
    while isinstance(error, SbkitError) and error.__cause__ is not None:
        error = error.__cause__
    return list(traceback.walk_tb(error.__traceback__))


def _is_own(file: str) -> bool:
    """Whether a file is sbkit's or the recipe's, and no library's."""
    return not file.startswith((*_ELSEWHERE, "<"))


def own_place(frames: Iterable[tuple[str, int]]) -> tuple[str, int]:
    """The innermost of these places, which come first, that is sbkit's or the recipe's."""
    frames = list(frames)
    return next((place for place in frames if _is_own(place[0])), frames[0] if frames else ("", 0))


class Watch:
    """Follows a run through the public methods that it calls, and the steps of its optimizer."""

    def __init__(self, diary: Diary):
        self.diary, self.epoch, self.steps = diary, 0, 0
        self.on_step: Callable[[int, int], None] = lambda epoch, step: None
        self._first: torch.optim.Optimizer | None = None
        self._waits: list[tuple[tuple[str, int], int]] = []  # places, each with the steps done by then
        self._counted = 0
        call_around(Brain, "__init__", after=self._built)
        call_around(flops, "operations_per_second", lambda *a, **k: diary.enter("count of FLOPs"),
                    lambda *a, **k: diary.enter("start"))
        call_around(Brain, "open_stage", self._open)
        for name in ("save_checkpoint", "save_and_keep_only"):
            call_around(Checkpointer, name, lambda *a, **k: diary.enter("checkpoint"))
        register_optimizer_step_post_hook(self._stepped)

    def _built(self, brain: Brain, *args: object, **kwargs: object) -> None:
        self.diary.brain = brain

    def _open(self, brain: Brain, stage: Stage, epoch: int | None = None) -> None:
        if self.diary.stage == NAMES[Stage.TRAIN]:
            self.end_of_steps()
        self.diary.enter(NAMES[stage])
        self.epoch, self.steps = epoch or self.epoch, 0

    def _stepped(self, optimizer: torch.optim.Optimizer, *args: object) -> None:
        if self._first not in (None, optimizer):
            return
        self._first = optimizer
        self.steps += 1
        self.diary.write("step", self.steps)
        if self.diary.launch == "train" and self.epoch == 1:
            if self.steps == SETTLED:
                self._find_changes()
            elif self.steps > SETTLED:
                self._counted += 1
                self._starts.append(time.time_ns() // 1000)
        self.on_step(self.epoch, self.steps)

    def _find_changes(self) -> None:
        """Begin to note waits, and allocations with their lines."""
        warnings.filterwarnings("always", "called a synchronizing")
        warnings.filterwarnings("ignore", "Synchronization debug mode")
        self._shown, warnings.showwarning = warnings.showwarning, self._show
        torch.cuda.set_sync_debug_mode("warn")
        torch.cuda.memory._record_memory_history(max_entries=400_000, stacks="python")
        self._starts = [time.time_ns() // 1000]

    def _show(self, message: Warning | str, *args: Any, **kwargs: Any) -> None:
        if "called a synchronizing" not in str(message):
            self._shown(message, *args, **kwargs)
            return
        if is_compiling():
            return
        stack = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_stack(None)]
        place = own_place(stack)
        own = place if _is_own(place[0]) else ("", 0)  # no line of Python has called autograd's threads
        self._waits.append((own, self.steps))

    def end_of_steps(self) -> None:
        """Report where the host waited, and what memory grew."""
        if not self._counted or torch.cuda.get_sync_debug_mode() == 0:
            return
        torch.cuda.set_sync_debug_mode("default")
        warnings.showwarning = self._shown
        events = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
        torch.cuda.memory._record_memory_history(enabled=None)
        counted = self._counted  # what follows the last step is of the epoch
        waits = Counter(place for place, steps in self._waits if steps < self.steps).most_common()
        self.diary.write("figures", {"waits": [[*place, count / counted] for place, count in waits]})
        for place, count in waits:
            if count >= counted:
                self.diary.find("wait", place, f"the host waits for the GPU {count / counted:.3g} times a step: "
                                f"{linecache.getline(*place).strip() or 'in torch, in a backward'}",
                                "keep the value on the device, or read it a step later")
        self._find_growth(events)

    def _find_growth(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Find lines whose tensors of several steps are still alive."""
        live: dict[int, Mapping[str, Any]] = {}
        for event in events:
            if event["action"] == "alloc":
                live[event["addr"]] = event
            elif event["action"] == "free_completed":
                live.pop(event["addr"], None)
        kept: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
        for event in live.values():
            kept.setdefault(_line(event), []).append(event)
        for place, held in kept.items():
            steps = {sum(event["time_us"] >= start for start in self._starts) for event in held}
            if len(steps) >= self._counted:  # of each step
                size = sum(event["size"] for event in held) / len(steps)
                self.diary.find("growth", place, f"memory grows by {size / 2**20:.3g} MiB a step, because tensors "
                                f"created here are never freed: {linecache.getline(*place).strip()}",
                                "don't keep the tensors of each step; .detach() a value that must outlive its step")


def call_around(owner: object, name: str, before: Callable[..., object] = lambda *args, **kwargs: None,
                after: Callable[..., object] = lambda *args, **kwargs: None) -> None:
    """Let a method or function call others with its arguments before it runs, and after it ran or failed."""
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
    """Bytes held before a step, its peak, and its memory over time with the lines whose tensors make the peak."""
    held = torch.cuda.memory_allocated()
    torch.cuda.memory._record_memory_history(max_entries=400_000, stacks="python")
    brain.try_batch(batch)
    events = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
    torch.cuda.memory._record_memory_history(enabled=None)
    now = peak = held
    live: dict[int, Any] = {}
    curve, at, at_peak = [held], 0, dict[int, Any]()
    for event in events:
        if event["action"] == "alloc":
            live[event["addr"]] = event
            now += event["size"]
        elif event["action"] == "free_completed":
            now -= event["size"]
            live.pop(event["addr"], None)
        curve.append(now)
        if now > peak:
            peak, at, at_peak = now, len(curve) - 1, dict(live)
    lines = Counter[tuple[str, int]]()
    for event in at_peak.values():
        lines[_line(event)] += event["size"]
    width = max(1, len(curve) // 600)
    return held, peak, {
        "bytes": [max(curve[i:i + width]) for i in range(0, len(curve), width)], "peak_at": at // width,
        "lines": [[*place, size, linecache.getline(*place).strip()] for place, size in lines.most_common(8)]}


def _line(event: Mapping[str, Any]) -> tuple[str, int]:
    return own_place((frame["filename"], frame["line"]) for frame in event.get("frames", ()))


def dump_collectives(diary: Diary) -> None:
    """Write down the collectives of this rank, as torch's flight recorder has them, with the lines that called them."""
    if ranks.world_size() > 1:
        trace: Any = torch._C._distributed_c10d  # its stub lacks the function
        found = pickle.loads(trace._dump_nccl_trace()).get("entries", [])
        calls = [[each["profiling_name"].removeprefix("nccl:"), _tensors(each["input_sizes"], each["input_dtypes"]),
                  *own_place((frame["filename"], frame["line"]) for frame in each["frames"])] for each in found]
        written = diary.path.with_suffix(f".{threading.get_ident()}")
        written.write_text(json.dumps(calls))
        written.rename(diary.path.with_suffix(".collectives"))


def _tensors(sizes: Iterable[Iterable[int]], dtypes: Iterable[str]) -> str:
    """Describe tensors, such as ``6 x 80 float32``."""
    named = [str(getattr(torch, dtype.lower(), dtype)).removeprefix("torch.") for dtype in dtypes]
    return ", ".join(f"{' x '.join(map(str, size)) or 1} {name}" for size, name in zip(sizes, named, strict=False))


def keep_collectives(diary: Diary) -> None:
    """Write them down each second, for a rank that will hang in one."""
    while True:
        time.sleep(1)
        if ranks.connected():
            dump_collectives(diary)
