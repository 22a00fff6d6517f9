"""What one process of a rehearsal does: commands of sbkit, watched from outside and written down as they go.

Each process appends lines of JSON to a diary, so that what it did is known even if it hangs or is killed.
"""

from __future__ import annotations

import faulthandler
import functools
import gc
import json
import linecache
import os
import pickle
import signal
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
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from sbkit.errors import SbkitError, first_line
from sbkit.infer.bundles import Opened
from sbkit.recipe import arguments, bill, flops, load
from sbkit.recipe.check import check
from sbkit.recipe.reading import read
from sbkit.recipe.report import ERROR, Finding
from sbkit.recipe.source import Findings
from sbkit.recipe.speed import peak_of
from sbkit.rehearsal import corpus, nullcard
from sbkit.rehearsal.cards import runs_on
from sbkit.runs import start
from sbkit.tasks.task import Task
from sbkit.train.brain import Brain
from sbkit.train.checkpoint import Checkpointer
from sbkit.train.distributed import ranks
from sbkit.train.given import MicroBatch
from sbkit.train.memory.oom import length

#: Stages by the names that the report has.
NAMES = {Stage.TRAIN: "steps", Stage.VALID: "validation", Stage.TEST: "test"}
#: Epochs of a run; steps of one before allocations and waits count, and of the second before the run is killed.
EPOCHS, SETTLED, KILLED_AT = 2, 2, 2
#: The memory for a step as a share of what it needs, so that a batch doesn't fit.
TOO_LITTLE = 0.6
#: Trial steps, of which the fastest counts.
TRIES = 4
#: The signal at which a process writes down where it stands; a run uses others.
STANDS = signal.SIGWINCH
#: The most memory of this machine that the signals of a batch take.
HOST_BYTES = 2**31
_ELSEWHERE = tuple(map(str, {sysconfig.get_paths()["stdlib"], sysconfig.get_paths()["purelib"],
                             Path(torch.__file__).parent, Path(speechbrain.__file__).parent, Path(__file__).parent}))


class Diary:
    """Appends what happens to a file, one object of JSON a line.

    Arguments
    ---------
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


def live(launch: str, rank: int, job: Mapping[str, Any]) -> None:
    """Do one launch's work as one of its ranks, and leave this process."""
    folder = Path(job["folder"])
    diary = Diary(folder, launch, rank)
    stack = open(folder / f"{launch}.{rank}.stack", "w")  # noqa: SIM115 (stays open)
    faulthandler.register(STANDS, stack, all_threads=False)
    faulthandler.enable(stack, all_threads=False)
    out = os.open(folder / f"{launch}.{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    if "RANK" in os.environ:
        threading.Thread(target=_keep_collectives, args=(diary,), daemon=True).start()
    code = 1
    try:
        code = LAUNCHES[launch](job, diary)
    except ranks.PeerFailed:
        pass
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        if (lacking := nullcard.lacks()) and "not supported" in str(error).lower().replace("_", " "):
            diary.write("skip", f"the null card has no {lacking[-1]}")
        else:
            diary.failed(error)
    for function in dict.fromkeys(nullcard.lacks()):
        diary.write("lacks", function)
    for refused in dict.fromkeys(nullcard.errors()):
        diary.find("invalid-launch", ("", 0), f"a real card refuses {refused}", "look at the sizes of this operation")
    _dump_collectives(diary)
    diary.write("end", code)
    os._exit(code)


# ------------------------------------------------------------------------------------------- before anything runs


def prepare(job: dict[str, Any], diary: Diary) -> int:
    """Write the corpus, and check the recipe on the card; a recipe that can't be loaded is only checked."""
    diary.enter("start")
    capability, kernels = torch.cuda.get_device_capability(), torch.cuda.get_arch_list()
    if not runs_on(kernels, capability):
        diary.find("no-kernels", ("", 0), f"torch {torch.__version__} has no kernels for this card, whose compute "
                   f"capability is {'.'.join(map(str, capability))}: it was built for {', '.join(kernels)}",
                   "install another build of torch", ends=True)
        return 1
    diary.enter("corpus")
    words, request, findings = list(job["words"]), arguments.parse(job["words"]), Findings()
    read(request.path, request.overrides, findings)
    given = {"data_folder": str(Path(job["folder"], "data")), "language": "en"}
    left = {finding.key for finding in findings if finding.code == "placeholder"}
    words += [word for key in given if key in left for word in (f"--{key}", given[key])]
    request, failed = arguments.parse(words), None
    try:
        first = {**request.overrides, "output_folder": str(Path(job["folder"], "first"))}
        recipe = load.opened(load.load(request.path, first), request.path)
        made = corpus.write(recipe, Path(job["folder"], "data"), job["world"])
        words += made["words"]
        diary.write("figures", {"data": made["what"], "exports": recipe.task.exported is not Task.exported,
                                "max_batch_seconds": recipe.keys.batching.max_batch_seconds})
        diary.write("words", words)
    except Exception as error:
        failed = error
    diary.enter("check")
    request = arguments.parse(words)
    report = check(request.path, request.overrides, run_opts=request.run_opts)
    written = json.loads(report.json())
    unread = {finding.key for finding in findings}  # before the corpus was replaced, whose keys nothing reads now
    written["warnings"] = [each for each in written["warnings"]
                           if each["code"] != "unread-key" or each["key"] in unread]
    diary.write("report", written)
    if failed is not None and not report.errors:
        raise failed
    return 1 if report.errors else 0


# ------------------------------------------------------------------------------------------- one step, measured


def measure(job: Mapping[str, Any], diary: Diary) -> int:
    """Take steps on stand-in batches: what they cost the host, what memory they need, and what fits."""
    from sbkit.train.memory.trials import trial

    diary.enter("count of FLOPs")
    request = arguments.parse(job["words"])
    device = torch.device("cuda:0")
    with trial(request, device) as made:
        diary.brain = brain = made.brain
        seconds = made.edges[-1]
        count = max(1, int(made.batching.max_batch_seconds / seconds))
        operations = flops.run(brain, count, seconds, flops.Arithmetic).operations
        _find_stand_ins(diary)
        diary.enter("a step of the planned batch")
        batch = made.batch(count, seconds)
        for _ in range(2):  # the first makes the optimizer's states
            if not brain.try_batch(batch):
                raise SbkitError(f"the planned micro-batch of {batch.padded_seconds:.0f} s doesn't fit into the card",
                                 hint="lower max_batch_seconds")
        steps = [_timed(brain, batch) for _ in range(TRIES)]
        host, counted = min(step[0] for step in steps), steps[-1][1]
        held, peak, timeline = _timeline(brain, batch)
        peak_flops, source = peak_of(device, brain.precision)
        estimate = job["estimate"]
        figures = {
            "batch": f"{count} x {seconds:g} s", "batch_seconds": count * seconds, "precision": brain.precision,
            "operations": operations,
            "host_ms": 1e3 * host, **asdict(counted), "held_bytes": held, "peak_bytes": peak,
            "card_ms": None if peak_flops is None else 1e3 * operations / (peak_flops * bill.EFFICIENCY),
            "card_source": source, "estimated_bytes": estimate.get("bytes"), "timeline": timeline}
        diary.write("figures", figures)
        diary.enter("the largest batch of the estimate")
        if not (most := estimate.get("largest")):
            diary.write("skip", "the check has no estimate")
            return 0
        del batch
        host = HOST_BYTES / torch.float32.itemsize / brain.keys.sample_rate
        capped = f", all that this machine's memory allows of {most:.0f} s" if most > host else ""
        count = max(1, int(min(most, host) / seconds))
        torch.cuda.reset_peak_memory_stats()
        if not brain.try_batch(brain.stand_in(count, seconds).to(device)):
            diary.find("estimate", (str(request.path), 0), f"the check says that {most:.0f} s fit into this card, and "
                       f"{count} utterances of {seconds:g} s don't", "sbkit tune finds what fits; tell us about this "
                       "recipe, since its cost is counted wrong")
        diary.write("figures", {"largest_batch": f"{count} x {seconds:g} s{capped}",
                                "largest_peak_bytes": torch.cuda.max_memory_allocated()})
    return 0


def _timed(brain: Brain, batch: MicroBatch) -> tuple[float, nullcard.Counters]:
    """Seconds of this process, of all its threads, for a step, and what it asked of the card."""
    before, started = nullcard.counters(), time.process_time()
    brain.try_batch(batch)
    return time.process_time() - started, nullcard.counters() - before


def _timeline(brain: Brain, batch: MicroBatch) -> tuple[int, int, dict[str, Any]]:
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


def _find_stand_ins(diary: Diary) -> None:
    """Look for tensors without memory, which would make all that follows such tensors, too."""
    gc.collect()
    left = [each for each in gc.get_objects() if type(each) is FakeTensor]  # isinstance calls properties
    for tensor in left[:3]:
        owners = [key for holder in gc.get_referrers(tensor) if isinstance(holder, dict)
                  for key, value in holder.items() if value is tensor and isinstance(key, str)]
        diary.find("stand-in", ("", 0), f"a stand-in of shape {tuple(tensor.shape)} on {tensor.device} is left"
                   f"{f', held as {owners[0]}' if owners else ''}: all computed with it is a stand-in as well",
                   "make it anew outside of stand_ins(), or don't keep it")


# ------------------------------------------------------------------------------------------- the run itself


class Watch:
    """Follows a run through the public methods that it calls, and the steps of its optimizer."""

    def __init__(self, diary: Diary):
        self.diary, self.epoch, self.steps = diary, 0, 0
        self.on_step: Callable[[int, int], None] = lambda epoch, step: None
        self._first: torch.optim.Optimizer | None = None
        self._waits: Counter[tuple[str, int]] = Counter()
        self._counted = 0
        _after(Brain, "__init__", self._built)
        _before(flops, "operations_per_second", lambda *a, **k: diary.enter("count of FLOPs"))
        _after(flops, "operations_per_second", lambda *a, **k: diary.enter("start"))
        _before(Brain, "open_stage", self._open)
        for name in ("save_checkpoint", "save_and_keep_only"):
            _before(Checkpointer, name, lambda *a, **k: diary.enter("checkpoint"))
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
                _find_stand_ins(self.diary)
                self._look()
            elif self.steps > SETTLED:
                self._counted += 1
                self._starts.append(time.time_ns() // 1000)
        self.on_step(self.epoch, self.steps)

    def _look(self) -> None:
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
        stack = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_stack(None)]
        place = own_place(stack)
        self._waits[place if _is_own(place[0]) else ("", 0)] += 1  # no line of Python has called autograd's threads

    def end_of_steps(self) -> None:
        """Report where the host waited, and what memory grew."""
        if not self._counted or torch.cuda.get_sync_debug_mode() == 0:
            return
        torch.cuda.set_sync_debug_mode("default")
        warnings.showwarning = self._shown
        events = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
        torch.cuda.memory._record_memory_history(enabled=None)
        counted = self._counted
        waits = [[*place, count / counted] for place, count in self._waits.most_common()]
        self.diary.write("figures", {"waits": waits})
        for place, count in self._waits.most_common():
            if count >= counted:
                self.diary.find("wait", place, f"the host waits for the card {count / counted:.3g} times a step: "
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
                self.diary.find("growth", place, f"memory grows by {size / 2**20:.3g} MiB a step: what is made here is "
                                f"never freed: {linecache.getline(*place).strip()}",
                                "don't keep tensors of a step; .detach() what must stay, and keep one")


def _before(owner: object, name: str, call: Callable[..., object]) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> object:
        call(*args, **kwargs)
        return original(*args, **kwargs)

    setattr(owner, name, wrapped)


def _after(owner: object, name: str, call: Callable[..., object]) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> object:
        try:
            return original(*args, **kwargs)
        finally:
            call(*args, **kwargs)

    setattr(owner, name, wrapped)


def _run(job: Mapping[str, Any], diary: Diary, *words: str, folder: str = "run",
         on_step: Callable[[int, int], None] | None = None) -> Watch:
    """Run ``sbkit train`` as this rank."""
    diary.enter("start")
    watch = Watch(diary)
    watch.on_step = on_step or watch.on_step
    start.run([*job["words"], "--output_folder", str(Path(job["folder"], folder)), "--epoch_counter.limit",
               str(EPOCHS), "--no-check", "--noprogressbar", *words], Opened)
    return watch


def train(job: Mapping[str, Any], diary: Diary) -> int:
    """Train, validate and save, until the process is killed in the second epoch."""
    def ready(epoch: int, step: int) -> None:
        if epoch == 2 and step == KILLED_AT:
            diary.brain.checkpointer.wait()
            _dump_collectives(diary)
            diary.enter("kill")
            diary.write("ready", "to be killed")
            time.sleep(600)

    _run(job, diary, on_step=ready)
    raise SbkitError("the run ended before it could be killed in its second epoch")


def resume(job: Mapping[str, Any], diary: Diary) -> int:
    """Start the killed run again, train to its end and test."""
    def resumed(epoch: int, step: int) -> None:
        if epoch != 2:
            diary.find("resume", ("", 0), f"the killed run begins again with epoch {epoch} instead of 2",
                       "add the epoch_counter to the checkpointer's recoverables")

    _run(job, diary, on_step=resumed)
    return 0


def fail(job: Mapping[str, Any], diary: Diary) -> int:
    """Begin with a batch that doesn't fit; then the last rank fails, and the others must end, too."""
    diary.enter("start")
    device, figures, last = torch.device("cuda", ranks.rank()), job["figures"], ranks.world_size() - 1
    steps = 0

    def limit(brain: Brain, batch: MicroBatch, *args: object, **kwargs: object) -> None:
        if diary.stage == "a batch that doesn't fit" and torch.cuda.memory_stats(device)["num_ooms"]:
            torch.cuda.set_per_process_memory_fraction(1.0, device)  # its parts fit
        elif diary.stage == "steps" and not steps and length(batch) > 1:
            diary.enter("a batch that doesn't fit")
            share = min(1.0, getattr(batch, "padded_seconds", figures["batch_seconds"]) / figures["batch_seconds"])
            trained = sum(p.numel() * p.element_size() for p in brain.modules.parameters() if p.requires_grad)
            torch.cuda.empty_cache()
            allowed = torch.cuda.memory_reserved(device) + 3 * trained \
                + TOO_LITTLE * share * (figures["peak_bytes"] - figures["held_bytes"])  # and the first step's states
            torch.cuda.set_per_process_memory_fraction(
                min(1.0, allowed / torch.cuda.get_device_properties(device).total_memory), device)

    def failing(epoch: int, step: int) -> None:
        nonlocal steps
        steps += 1
        if steps == 1:
            if not torch.cuda.memory_stats(device)["num_ooms"]:
                diary.write("skip", f"it fits into {TOO_LITTLE:.0%} of its memory")
            torch.cuda.set_per_process_memory_fraction(1.0, device)
        elif last:
            diary.enter("a rank that fails")
            diary.write("ready", "to fail")
            if ranks.rank() == last:
                raise _Planted("the rehearsal ends this rank")

    _after(Brain, "__init__", lambda brain, *args, **kwargs: _before(type(brain), "compute_forward", limit))
    world, most = ranks.world_size(), figures["max_batch_seconds"]
    try:
        _run(job, diary, "--batching.step_seconds", str(world * most), folder="fails", on_step=failing)
    except _Planted:
        return 1
    return 0


class _Planted(Exception):
    """The failure that the rehearsal plants."""


def export(job: Mapping[str, Any], diary: Diary) -> int:
    """Export the run, and open the exported program on the card."""
    from sbkit.export import bundle

    diary.enter("export")
    run, to = Path(job["folder"], "run"), Path(job["folder"], "bundle")
    bundle.export(bundle.ExportRequest(run, to, clips=2), Opened())
    if (to / "model.pt2").is_file():
        from sbkit.infer import load as open_bundle

        diary.enter("model.pt2 on the card")
        open_bundle(to, device="cuda", model="torch").close()
    else:
        diary.enter("model.pt2 on the card")
        diary.write("skip", "the bundle has none")
    return 0


def _dump_collectives(diary: Diary) -> None:
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


def _keep_collectives(diary: Diary) -> None:
    """Write them down each second, for a rank that will hang in one."""
    while True:
        time.sleep(1)
        if ranks.connected():
            _dump_collectives(diary)


#: What a process of a rehearsal may be launched for, by name.
LAUNCHES: dict[str, Callable[[Any, Diary], int]] = {
    "prepare": prepare, "measure": measure, "train": train, "resume": resume, "fail": fail, "export": export}
