"""What one process of a rehearsal does: commands of sbkit, each in a process of its own."""

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
from torch.optim.optimizer import register_optimizer_step_pre_hook

from sbkit.errors import SbkitError, first_line
from sbkit.infer.bundles import BundleLoader
from sbkit.recipe import arguments, flops, load, price
from sbkit.recipe.check import check
from sbkit.recipe.reading import read
from sbkit.recipe.source import Findings
from sbkit.recipe.speed import peak_of
from sbkit.rehearsal import corpus, nullcard
from sbkit.rehearsal.cards import runs_on
from sbkit.rehearsal.watch import Diary, Watch, call_around, dump_collectives, keep_collectives, memory_timeline
from sbkit.runs import start
from sbkit.tasks.task import Task
from sbkit.train import device as devices
from sbkit.train.batches import MicroBatch, length
from sbkit.train.brain import Brain
from sbkit.train.distributed import ranks
from sbkit.train.distributed.parallel import communicates_in_forward

#: Epochs of a run, and steps of the second before it is killed.
EPOCHS, KILLED_AT = 2, 2
#: The memory for a step as a share of what it needs, so that a batch doesn't fit.
TOO_LITTLE = 0.6
#: Trial steps, of which the fastest counts.
TRIES = 4
#: The signal at which a process writes down where it stands; a run uses others.
STANDS = signal.SIGWINCH
#: The most memory of this machine that the signals of a batch take.
HOST_BYTES = 2**31


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
        threading.Thread(target=keep_collectives, args=(diary,), daemon=True).start()
    code = 1
    try:
        code = LAUNCHES[launch](job, diary)
    except ranks.PeerFailed:
        pass
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        if (lacking := nullcard.lacks()) and _names_lack(error, lacking[-1]):
            diary.write("skip", f"the null card has no {lacking[-1]}")
        else:
            diary.failed(error)
    for function in dict.fromkeys(nullcard.lacks()):
        diary.write("lacks", function)
    for refused in dict.fromkeys(nullcard.errors()):
        diary.find("invalid-launch", ("", 0), f"a real GPU would refuse {refused}", "check the sizes of this operation")
    dump_collectives(diary)
    diary.write("end", code)
    os._exit(code)


def _names_lack(error: BaseException | None, function: str) -> bool:
    """Return whether an error, or one that it came from, says that a function isn't there."""
    said = ""
    while error is not None:
        said, error = f"{said} {error}", error.__cause__ or error.__context__
    return function in said or "not supported" in said.lower().replace("_", " ")


# ------------------------------------------------------------------------------------------- before anything runs


def prepare(job: dict[str, Any], diary: Diary) -> int:
    """Write the corpus, and check the recipe on the card; a recipe that can't be loaded is only checked."""
    diary.enter("start")
    capability, kernels = torch.cuda.get_device_capability(), torch.cuda.get_arch_list()
    if not runs_on(kernels, capability):
        diary.find("no-kernels", ("", 0), f"torch {torch.__version__} has no kernels for this GPU, whose compute "
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
        recipe = load.open_recipe(load.load(request.path, first), request.path)
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
    if report.errors:
        return 1
    if failed is not None:
        raise failed
    diary.enter("corpus")
    corpus.refuse_words(recipe, made["text"])
    return 0


# ------------------------------------------------------------------------------------------- one step, measured


def measure(job: Mapping[str, Any], diary: Diary) -> int:
    """Take steps on stand-in batches: what they cost the host, what memory they need, and what fits."""
    from sbkit.train.memory.trials import open_trial

    diary.enter("count of FLOPs")
    request = arguments.parse(job["words"])
    device = torch.device("cuda:0")
    with open_trial(request, device) as trial:
        diary.brain = brain = trial.brain
        seconds = trial.edges[-1]
        count = max(1, int(trial.batching.max_batch_seconds / seconds))
        operations = None
        try:
            operations = flops.run(brain, count, seconds, flops.Arithmetic).operations
        except NotImplementedError as error:
            if not str(error).startswith("Could not run "):  # as torch says of an operation without a kernel for them
                raise
            diary.write("skip", f"an operation doesn't support stand-ins: {first_line(error)}")
        diary.enter("a step of the planned batch")
        batch = trial.batch(count, seconds)
        for _ in range(2):  # the first makes the optimizer's states
            if not brain.try_batch(batch):
                raise SbkitError(f"the planned micro-batch of {batch.padded_seconds:.0f} s doesn't fit into the GPU",
                                 hint="lower max_batch_seconds")
        steps = [_timed(brain, batch) for _ in range(TRIES)]
        host, counted = min(steps, key=lambda step: step[0])
        held, peak, timeline = memory_timeline(brain, batch)
        peak_flops, source = peak_of(device, brain.precision)
        estimate = job["estimate"]
        figures = {
            "batch": f"{count} x {seconds:g} s", "batch_seconds": count * seconds, "precision": brain.precision,
            "compiled": brain.compiled, "cuda_graphs": brain.trainer.graphs.on, "operations": operations,
            "host_ms": 1e3 * host, **asdict(counted), "held_bytes": held, "peak_bytes": peak,
            "card_ms": operations and peak_flops and 1e3 * operations / (peak_flops * price.EFFICIENCY),
            "card_source": source, "estimated_bytes": estimate.get("step_bytes"), "timeline": timeline}
        diary.write("figures", figures)
        diary.enter("the largest batch of the estimate")
        if not (estimated := estimate.get("largest_here")):
            diary.write("skip", "the check has no estimate")
            return 0
        del batch
        host = HOST_BYTES / torch.float32.itemsize / brain.keys.sample_rate
        capped = f" (estimated: {estimated:.0f} s; limited by this machine's memory)" if estimated > host else ""
        count = max(1, int(min(estimated, host) / seconds))
        torch.cuda.reset_peak_memory_stats()
        try:
            fits = brain.try_batch(brain.stand_in(count, seconds).to(device))
        except RuntimeError as error:
            if "32-bit index math" not in str(error):
                raise
            diary.write("skip", f"{count} utterances of {seconds:g} s are too many for a convolution without cuDNN")
            return 0
        if not fits:
            diary.find("estimate", (str(request.path), 0), f"the check estimates that {estimated:.0f} s fit into this "
                       f"GPU, but {count} utterances of {seconds:g} s don't", "sbkit tune finds what fits; please "
                       "report this recipe, because its estimate is wrong")
        diary.write("figures", {"largest_batch": f"{count} x {seconds:g} s{capped}",
                                "largest_peak_bytes": torch.cuda.max_memory_allocated()})
    return 0


def _timed(brain: Brain, batch: MicroBatch) -> tuple[float, nullcard.Counters]:
    """Seconds of this process, of all its threads, for a step, and what it asked of the card."""
    before, started = nullcard.counters(), time.process_time()
    brain.try_batch(batch)
    return time.process_time() - started, nullcard.counters() - before


# ------------------------------------------------------------------------------------------- the run itself


def _run(job: Mapping[str, Any], diary: Diary, *words: str, folder: str = "run",
         on_step: Callable[[int, int], None] | None = None) -> Watch:
    """Run ``sbkit train`` as this rank."""
    diary.enter("start")
    watch = Watch(diary)
    watch.on_step = on_step or watch.on_step
    start.run([*job["words"], "--output_folder", str(Path(job["folder"], folder)), "--epoch_counter.limit",
               str(EPOCHS), "--no-check", "--noprogressbar", *words], BundleLoader)
    return watch


def train(job: Mapping[str, Any], diary: Diary) -> int:
    """Train, validate and save, until the process is killed in the second epoch."""
    def ready(epoch: int, step: int) -> None:
        if epoch == 2 and step == KILLED_AT:
            diary.brain.checkpointer.wait()
            dump_collectives(diary)
            diary.enter("kill")
            diary.write("ready", "to be killed")
            time.sleep(600)

    def check_start() -> None:
        check(request.path, request.overrides, run_opts=request.run_opts, starting=True)

    # As a run does, in the process that trains, to which it must leave nothing; its overrides would be told as wrong.
    request = arguments.parse(job["words"])
    ranks.init(devices.resolve(request.run_opts.device))
    ranks.run_on_main(check_start)
    _run(job, diary, on_step=ready)
    raise SbkitError("the run ended before it could be killed in its second epoch")


def resume(job: Mapping[str, Any], diary: Diary) -> int:
    """Start the killed run again, train to its end and test."""
    def resumed(epoch: int, step: int) -> None:
        if epoch != 2:
            diary.find("resume", ("", 0), f"the killed run resumes in epoch {epoch} instead of 2",
                       "add the epoch_counter to the checkpointer's recoverables")

    _run(job, diary, on_step=resumed)
    return 0


def fail(job: Mapping[str, Any], diary: Diary) -> int:
    """Begin with a batch that doesn't fit; then the last rank fails, and the others must end, too."""
    diary.enter("start")
    device, figures, world = torch.device("cuda", ranks.rank()), job["figures"], ranks.world_size()
    steps, limited = 0, False

    def limit(brain: Brain, batch: MicroBatch, *args: object, **kwargs: object) -> None:
        nonlocal limited
        if diary.stage == "a batch that doesn't fit" and torch.cuda.memory_stats(device)["num_ooms"]:
            lift()  # its parts fit
        elif diary.stage == "steps" and not steps and length(batch) > 1:
            diary.enter("a batch that doesn't fit")
            if world > 1 and (brain.keys.fsdp or any(map(communicates_in_forward, brain.modules.modules()))):
                return
            share = min(1.0, getattr(batch, "padded_seconds", figures["batch_seconds"]) / figures["batch_seconds"])
            limited = True
            torch.cuda.empty_cache()
            allowed = torch.cuda.memory_reserved(device) \
                + TOO_LITTLE * share * (figures["peak_bytes"] - figures["held_bytes"])
            torch.cuda.set_per_process_memory_fraction(
                min(1.0, allowed / torch.cuda.get_device_properties(device).total_memory), device)

    def lift(*given: object) -> None:
        torch.cuda.set_per_process_memory_fraction(1.0, device)

    def failing(epoch: int, step: int) -> None:
        nonlocal steps
        steps += 1
        if steps == 1:
            if not torch.cuda.memory_stats(device)["num_ooms"]:
                why = f"it fits into {TOO_LITTLE:.0%} of its memory" if limited else "no rank can repeat a step alone"
                diary.write("skip", why)
        elif world > 1:
            diary.enter("a rank that fails")
            diary.write("ready", "to fail")
            if ranks.rank() == world - 1:
                raise _Planted("the rehearsal ends this rank")

    call_around(Brain, "__init__",
                after=lambda brain, *args, **kwargs: call_around(type(brain), "compute_forward", limit))
    register_optimizer_step_pre_hook(lift)  # the first step makes states, and can't be taken in parts
    step_seconds = str(world * figures["max_batch_seconds"])
    try:
        _run(job, diary, "--batching.step_seconds", step_seconds, folder="fails", on_step=failing)
    except _Planted:
        return 1
    return 0


class _Planted(Exception):
    """The failure that the rehearsal plants."""


def export(job: Mapping[str, Any], diary: Diary) -> int:
    """Export the run, and open the exported program on the card."""
    from sbkit.export import bundle, clips, parity

    diary.enter("export")
    parity.POINTS = float("inf")  # words of weights that learnt nothing change with 8 bits as they like
    clips.BEYOND = 0.0  # the graphs run on this machine's CPU, for minutes if they are large
    run, to = Path(job["folder"], "run"), Path(job["folder"], "bundle")
    bundle.export(bundle.ExportRequest(run, to, clips=2), BundleLoader())
    if (to / "model.pt2").is_file():
        from sbkit.infer import load as open_bundle

        diary.enter("model.pt2 on the card")
        try:
            open_bundle(to, device="cuda", model="torch").close()
        except SbkitError as error:
            if "Runtime assertion failed" not in str(error):
                raise
            diary.write("skip", "the program asserts something about a computed value")
    else:
        diary.enter("model.pt2 on the card")
        diary.write("skip", "the bundle has none")
    return 0


#: What a process of a rehearsal may be launched for, by name.
LAUNCHES: dict[str, Callable[[Any, Diary], int]] = {
    "prepare": prepare, "measure": measure, "train": train, "resume": resume, "fail": fail, "export": export}
