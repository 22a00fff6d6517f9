"""What each process of a rehearsal runs: preparing, measuring, training, resuming, failing or exporting."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from sbkit.errors import SbkitError, first_line
from sbkit.infer.bundles import BundleLoader
from sbkit.recipe import arguments, flops, load
from sbkit.recipe.check import check
from sbkit.recipe.cost import update_bytes
from sbkit.recipe.reading import read
from sbkit.recipe.source import Findings
from sbkit.recipe.speed import limits_of
from sbkit.rehearsal import corpus, fake_gpu
from sbkit.rehearsal.cards import runs_on
from sbkit.rehearsal.watch import Diary, Watch, dump_collectives, keep_collectives, memory_timeline
from sbkit.runs import start
from sbkit.tasks.task import Task
from sbkit.train import device as devices
from sbkit.train.batches import MicroBatch
from sbkit.train.distributed import ranks
from sbkit.train.distributed.parallel import communicates_in_forward
from sbkit.train.trainer import Trainer

#: Epochs of a run, and the step of the second epoch after which it is killed.
EPOCHS, KILLED_AT = 2, 2
#: The share of the memory it needs that a step gets, so that its batch doesn't fit.
TOO_LITTLE = 0.6
#: Timed steps, of which the fastest counts.
TRIES = 10
#: The signal at which a process writes its traceback to a file; runs don't use it.
TRACEBACK_SIGNAL = signal.SIGWINCH
#: The most memory of this machine for the audio of a batch.
HOST_BYTES = 2**31


def run_rank(launch: str, rank: int, job: Mapping[str, Any]) -> None:
    """Run one rank of a launch, and end this process."""
    folder = Path(job["folder"])
    diary = Diary(folder, launch, rank)
    stack = open(folder / f"{launch}.{rank}.stack", "w")  # noqa: SIM115 (stays open)
    faulthandler.register(TRACEBACK_SIGNAL, stack, all_threads=False)
    # A library's handler of crashes, which a forked process inherits, and Python's may restore each other forever.
    faulthandler.disable()
    for crash in (signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV):
        signal.signal(crash, signal.SIG_DFL)
    faulthandler.enable(stack, all_threads=False)
    out = os.open(folder / f"{launch}.{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    if "RANK" in os.environ:
        threading.Thread(target=keep_collectives, args=(diary,), daemon=True).start()
    code = 1
    try:
        code = LAUNCHES[launch](job, diary)
    except ranks.PeerFailed:
        pass
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        missing = _missing_function(error)
        if missing is not None:
            diary.write("skip", f"the fake GPU has no {missing}")
        else:
            diary.add_error(error)
    for function in dict.fromkeys(fake_gpu.lacks()):
        diary.write("lacks", function)
    for refused in dict.fromkeys(fake_gpu.errors()):
        diary.report("invalid-launch", ("", 0), f"a real GPU would refuse {refused}",
                     "check the sizes of this operation")
    dump_collectives(diary)
    diary.write("end", code)
    os._exit(code)


def _missing_function(error: BaseException) -> str | None:
    """Return the function that only a real card has, if an error is due to it."""
    lacks = fake_gpu.lacks()
    if not lacks:
        return None
    messages = ""
    cause: BaseException | None = error
    while cause is not None:
        messages += f" {cause}"
        cause = cause.__cause__ or cause.__context__
    is_cause = lacks[-1] in messages or "not supported" in messages.lower().replace("_", " ")
    return lacks[-1] if is_cause else None


# ------------------------------------------------------------------------------------------- before anything runs


def prepare(job: dict[str, Any], diary: Diary) -> int:
    """Write the corpus and check the recipe on the fake GPU; a recipe that can't be loaded is only checked."""
    diary.begin_stage("start")
    capability = torch.cuda.get_device_capability()
    kernels = torch.cuda.get_arch_list()
    if not runs_on(kernels, capability):
        diary.report("no-kernels", ("", 0), f"torch {torch.__version__} has no kernels for this GPU, whose compute "
                     f"capability is {'.'.join(map(str, capability))}: it was built for {', '.join(kernels)}",
                     "install another build of torch", ends=True)
        return 1
    diary.begin_stage("corpus")
    args, findings = _with_placeholders(job)
    request = arguments.parse(args)
    failed: Exception | None = None
    try:
        first = {**request.overrides, "output_folder": str(Path(job["folder"], "first"))}
        recipe = load.open_recipe(request.path, first)
        written_corpus = corpus.write(recipe, Path(job["folder"], "data"), job["world"])
        args += written_corpus["args"]
        max_batch_seconds = recipe.keys.batching.max_batch_seconds
        if recipe.keys.batching.auto:
            max_batch_seconds = _search_batch_size(arguments.parse(args))
            args += ["--batching.max_batch_seconds", f"{max_batch_seconds:g}"]
        diary.write("figures", {"data": written_corpus["what"], "reads": written_corpus["reads"],
                                "num_workers": recipe.keys.num_workers,
                                "exports": recipe.task.exported is not Task.exported,
                                "max_batch_seconds": max_batch_seconds})
        diary.write("args", args)
    except Exception as error:
        failed = error
    diary.begin_stage("check")
    request = arguments.parse(args)
    report = check(request.path, request.overrides, run_opts=request.run_opts)
    written = json.loads(report.json())
    unread = {finding.key for finding in findings}  # before the corpus was replaced, whose keys are no longer read
    written["warnings"] = [warning for warning in written["warnings"]
                           if warning["code"] != "unread-key" or warning["key"] in unread]
    diary.write("report", written)
    if report.errors:
        return 1
    if failed is not None:
        raise failed
    diary.begin_stage("corpus")
    corpus.refuse_words(recipe, written_corpus["text"])
    return 0


def _with_placeholders(job: Mapping[str, Any]) -> tuple[list[str], Findings]:
    """Return the arguments with values for the placeholders that have a default here, and what reading them found."""
    args = list(job["args"])
    findings = Findings()
    request = arguments.parse(args)
    read(request.path, request.overrides, findings)
    placeholders = {finding.key for finding in findings if finding.code == "placeholder"}
    defaults = {"data_folder": str(Path(job["folder"], "data")), "language": "en"}
    for key, value in defaults.items():
        if key in placeholders:
            args += [f"--{key}", value]
    return args, findings


def _search_batch_size(request: arguments.CommandLine) -> float:
    """Return the ``max_batch_seconds`` that a run with ``auto`` would find."""
    from sbkit.train.memory import batch_size_search
    from sbkit.train.memory.trials import open_trial

    device = torch.device("cuda:0")
    with open_trial(request, device) as trial:
        budget = batch_size_search.memory_budget(None, device)
        sizes = batch_size_search.measure(trial, request, budget, fresh=True)
        seconds, how = batch_size_search.recommended(trial, sizes)
    if not seconds:
        raise SbkitError("no-batch-fits", f"max_batch_seconds: auto: {how}", hint=batch_size_search.SMALLER,
                         key="max_batch_seconds")
    return seconds


# ------------------------------------------------------------------------------------------- one step, measured


def measure(job: Mapping[str, Any], diary: Diary) -> int:
    """Run steps on dummy batches to measure host time and memory, and whether the estimated batch fits."""
    from sbkit.train.memory.trials import open_trial

    diary.begin_stage("count of FLOPs")
    request = arguments.parse(job["args"])
    device = torch.device("cuda:0")
    with open_trial(request, device) as trial:
        diary.brain = brain = trial.brain
        seconds = trial.edges[-1]
        count = max(1, int(trial.batching.max_batch_seconds / seconds))
        kernels: list[flops.Kernel] = []
        try:
            kernels = flops.run(brain, count, seconds, flops.FlopCounter).kernels
        except NotImplementedError as error:
            if not str(error).startswith("Could not run "):  # torch's message for an operation without a meta kernel
                raise
            diary.write("skip", f"an operation doesn't support fake tensors: {first_line(error)}")

        diary.begin_stage("a step of the planned batch")
        batch = trial.batch(count, seconds)
        host_seconds, calls = _time_steps(brain, batch)
        nodes = brain.trainer.runner.nodes
        pools = [pool for pool in torch.cuda.memory_snapshot() if pool["segment_pool_id"] != (0, 0)]
        graph_bytes = sum(pool["total_size"] for pool in pools)
        torch.cuda.empty_cache()  # what is left is in use, or of graphs
        reserved = torch.cuda.memory_reserved() if nodes else 0
        brain.trainer.runner.reset()  # the next step is without, so that its lines are known
        held, peak, timeline = memory_timeline(brain, batch)
        work = [*kernels, flops.Kernel(0, update_bytes(brain))]
        limits = limits_of(device, brain.precision)
        figures = {
            "batch": f"{count} x {seconds:g} s", "batch_seconds": count * seconds,
            "step_seconds": trial.batching.update_seconds, "precision": brain.precision,
            "operations": sum(operations for operations, _ in work), "bytes": sum(size for _, size in work),
            "host_ms": 1e3 * host_seconds, "graph_nodes": nodes, "graph_bytes": graph_bytes,
            "reserved_bytes": reserved, **asdict(calls), "held_bytes": held, "peak_bytes": peak,
            "card_ms": 1e3 * flops.least_seconds(work, limits) if kernels and limits is not None else None,
            "estimated_bytes": job["estimate"].get("step_bytes"), "timeline": timeline}
        diary.write("figures", figures)

        diary.begin_stage("the largest batch of the estimate")
        estimated = job["estimate"].get("largest_here")
        if not estimated:
            diary.write("skip", "the check has no estimate")
            return 0
        del batch
        brain.trainer.runner.reset()  # the estimate is of a step that isn't captured
        _try_largest(brain, estimated, seconds, str(request.path), device, diary)
    return 0


def _time_steps(brain: Any, batch: MicroBatch) -> tuple[float, fake_gpu.Counters]:  # a task's
    """Return the CPU seconds of this process for the fastest of some steps, and its counts of launches and copies."""
    for _ in range(2):  # the first creates the optimizer states
        if not brain.try_batch(batch):
            raise SbkitError("out-of-memory",
                             f"the planned micro-batch of {batch.padded_seconds:.0f} s doesn't fit into the GPU",
                             hint="lower max_batch_seconds", key="max_batch_seconds")
    brain.train_state.first_step_checked = True  # in a run, only the first step looks for what is unreached
    steps = []
    for _ in range(TRIES):
        before = fake_gpu.counters()
        began = time.process_time()
        brain.try_batch(batch)
        steps.append((time.process_time() - began, fake_gpu.counters() - before))
    return min(steps, key=lambda step: step[0])


def _try_largest(brain: Any, estimated: float, seconds: float, path: str, device: torch.device,  # a task's
                 diary: Diary) -> None:
    """Try a batch of the seconds that the check estimates to fit, in utterances of ``seconds``."""
    possible = HOST_BYTES / torch.float32.itemsize / brain.keys.sample_rate
    capped = f" (estimated: {estimated:.0f} s; limited by this machine's memory)" if estimated > possible else ""
    count = max(1, int(min(estimated, possible) / seconds))
    torch.cuda.reset_peak_memory_stats()
    try:
        fits = brain.try_batch(brain.dummy_batch(count, seconds).to(device))
    except RuntimeError as error:
        if "32-bit index math" not in str(error):
            raise
        diary.write("skip", f"{count} utterances of {seconds:g} s are too many for a convolution without cuDNN")
        return
    if not fits:
        diary.report("estimate", (path, 0), f"the check estimates that {estimated:.0f} s fit into "
                     f"this GPU, but {count} utterances of {seconds:g} s don't", "sbkit tune finds what fits; "
                     "please report this recipe, because its estimate is wrong")
    diary.write("figures", {"largest_batch": f"{count} x {seconds:g} s{capped}",
                            "largest_peak_bytes": torch.cuda.max_memory_allocated()})


# ------------------------------------------------------------------------------------------- the run itself


def _run(job: Mapping[str, Any], diary: Diary, *args: str, folder: str = "run",
         on_step: Callable[[int, int], None] | None = None) -> Watch:
    """Run ``sbkit train`` as this rank."""
    diary.begin_stage("start")
    watch = Watch(diary)
    watch.on_step = on_step or watch.on_step
    start.run([*job["args"], "--output_folder", str(Path(job["folder"], folder)), "--epoch_counter.limit",
               str(EPOCHS), "--no-check", "--noprogressbar", *args], BundleLoader)
    return watch


def train(job: Mapping[str, Any], diary: Diary) -> int:
    """Train, validate and save, until the process is killed in the second epoch."""
    def ready(epoch: int, step: int) -> None:
        if epoch == 2 and step == KILLED_AT:
            diary.brain.checkpointer.wait()
            dump_collectives(diary)
            diary.begin_stage("kill")
            diary.write("ready", "to be killed")
            time.sleep(600)

    def check_start() -> None:
        check(request.path, request.overrides, run_opts=request.run_opts, starting=True)

    # As in a real run, the check runs in the process that trains, and must not change it. It is called here, because it
    # would refuse the overrides of `_run`.
    request = arguments.parse(job["args"])
    ranks.init(devices.resolve(request.run_opts.device))
    ranks.run_on_main(check_start)
    _run(job, diary, on_step=ready)
    raise SbkitError("run-too-short", "the run ended before the rehearsal could kill it in its second epoch",
                     hint=f"give its epochs {KILLED_AT} steps or more")


def resume(job: Mapping[str, Any], diary: Diary) -> int:
    """Start the killed run again, finish training and test."""
    def resumed(epoch: int, step: int) -> None:
        if epoch != 2:
            diary.report("resume", ("", 0), f"the killed run resumes in epoch {epoch} instead of 2",
                         "add the epoch_counter to the checkpointer's recoverables")

    _run(job, diary, on_step=resumed)
    return 0


def fail(job: Mapping[str, Any], diary: Diary) -> int:
    """Try a batch that doesn't fit, which must leave nothing behind; then the last rank fails, and all must end."""
    diary.begin_stage("start")
    device = torch.device("cuda", ranks.rank())
    figures = job["figures"]
    world = ranks.world_size()
    fits = Trainer.fits
    tried = False
    steps = 0

    def in_little_memory(trainer: Trainer, batch: MicroBatch) -> bool:
        nonlocal tried
        if tried:
            return fits(trainer, batch)
        tried = True
        diary.begin_stage("a batch that doesn't fit")
        communicates = any(map(communicates_in_forward, trainer.modules.modules()))
        if world > 1 and (communicates or trainer.parallel.sharded is not None):
            diary.write("skip", "layers communicate between ranks, so none can end alone")
            return fits(trainer, batch)
        share = min(1.0, batch.padded_seconds / figures["batch_seconds"])
        torch.cuda.empty_cache()
        allowed = torch.cuda.memory_reserved(device) + TOO_LITTLE * share * (
            figures["peak_bytes"] - figures["held_bytes"])
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, allowed / total), device)
        if fits(trainer, batch):
            diary.write("skip", f"it fits into {TOO_LITTLE:.0%} of its memory")
        torch.cuda.set_per_process_memory_fraction(1.0, device)
        return fits(trainer, batch)

    def failing(epoch: int, step: int) -> None:
        nonlocal steps
        steps += 1
        if steps > 1 and world > 1:
            diary.begin_stage("a rank that fails")
            diary.write("ready", "to fail")
            if ranks.rank() == world - 1:
                raise _PlannedFailure("the rehearsal ends this rank")

    Trainer.fits = in_little_memory  # type: ignore[method-assign,assignment]  # in this process alone
    step_seconds = str(world * figures["max_batch_seconds"])
    try:
        _run(job, diary, "--batching.step_seconds", step_seconds, folder="fails", on_step=failing)
    except _PlannedFailure:
        return 1
    return 0


class _PlannedFailure(Exception):
    """Raised by the rehearsal in the rank that is to fail."""


def export(job: Mapping[str, Any], diary: Diary) -> int:
    """Export the run, and open the exported program on the card."""
    from sbkit.export import bundle, clips, gate, layout

    diary.begin_stage("export")
    gate.INT8_POINTS = float("inf")  # in int8, hypotheses of untrained weights differ at random
    clips.LONGER = 0.0  # large graphs would run for minutes on this machine's CPU
    run, to = Path(job["folder"], "run"), Path(job["folder"], "bundle")
    bundle.export(bundle.ExportRequest(run, to, clips=2), BundleLoader())
    for name, reason in layout.read(to).left_out.items():
        diary.write("skip", f"{name} is left out of the bundle: {reason}")
    if (to / "model.pt2").is_file():
        from sbkit.infer import load as open_bundle

        diary.begin_stage("model.pt2 on the card")
        try:
            open_bundle(to, device="cuda", model="torch").close()
        except SbkitError as error:
            if "Runtime assertion failed" not in str(error):
                raise
            diary.write("skip", "the program asserts something about a computed value")
    else:
        diary.begin_stage("model.pt2 on the card")
        diary.write("skip", "the bundle has none")
    return 0


#: The functions that launches run, by name.
LAUNCHES: dict[str, Callable[[Any, Diary], int]] = {
    "prepare": prepare, "measure": measure, "train": train, "resume": resume, "fail": fail, "export": export}
