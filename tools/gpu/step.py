"""Where a step's time goes, first of all: launches, busy time and kernels, and steps replayed as graphs."""

from __future__ import annotations

import collections
import time
from typing import TYPE_CHECKING, Any

from sbkit.rehearsal import fake_gpu

from .check import MIN_MFU

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from .bench import Bench

#: Utterances of 5.52 s in a micro-batch: 120 s for the flagship, as its recipe has, and 497 s for large.yaml.
UTTERANCES, SECONDS = {"flagship": 22, "large": 90}, 5.52
#: Steps that are compared, of which the first three make states and graphs; and steps that are timed.
STEPS, TIMED = 8, 10
#: Milliseconds of host that a captured step may take, and the difference of its losses, which reductions may round.
MAX_HOST, NEAR = 3.0, 1e-3


def check(bench: Bench) -> None:
    """Print a launch's time, then for each recipe the same steps as they are and as graphs, in processes of their own.
    """
    for name, utterances in UTTERANCES.items():
        plain, graphs = (bench.call(steps, bench, name, bench.size(utterances, 2), wanted) for wanted in (False, True))
        if name == "flagship":
            bench.measured("launch", f"{plain['launch_us']:.1f} µs", plain["launch_us"] < 20)
        apart = max(abs(a - b) / abs(b) for a, b in zip(graphs["losses"], plain["losses"], strict=True))
        captured = graphs["nodes"] != {}
        bench.measured(f"{name}_equal", f"{apart:.1e} apart in {STEPS} steps" if captured else "not captured",
                       captured and apart < NEAR, graphs=graphs["losses"], steps=plain["losses"])
        bench.measured(
            f"{name}_time", f"{graphs['total_ms']:.2f} ms ({graphs['host_ms']:.2f} of the host), "
            f"{plain['total_ms']:.2f} ({plain['host_ms']:.2f}) without: {plain['total_ms'] / graphs['total_ms']:.2f} "
            f"times as fast",
            captured and graphs["host_ms"] <= MAX_HOST and graphs["total_ms"] < plain["total_ms"],
            **{f"{key}, {side['how']}": value for side in (plain, graphs) for key, value in side.items()
               if key in ("host_ms", "total_ms", "busy_ms", "mfu", "peak_mib")}, nodes=graphs["nodes"])
        for side in (plain, graphs):
            if side["kernels"]:
                bench.note(f"{name}, {side['how']}: {side['busy_ms']:.2f} ms busy in {side['launches']} kernels; ms by "
                           f"kernel: " + "; ".join(f"{ms:.2f} {kernel}" for kernel, ms in side["kernels"]))
        if name == "large":
            share = graphs["mfu"]
            bench.measured("mfu", "the card's peak isn't known" if share is None else f"{100 * share:.1f} %",
                           share is not None and share >= MIN_MFU)


def steps(bench: Bench, name: str, utterances: int, graphs: bool) -> dict[str, Any]:
    """Take steps on noise, which are the same in each process, and time and profile some more."""
    import torch

    from sbkit.recipe import arguments, flops, speed
    from sbkit.train.memory.trials import open_trial

    device = torch.device(bench.device)
    on_card = device.type == "cuda"
    request = arguments.parse(bench.words(name, ctc_weight=1.0, graphs=graphs))
    with open_trial(request, device) as trial:
        torch.manual_seed(1)
        brain, trainer, batch = trial.brain, trial.brain.trainer, trial.batch(utterances, SECONDS)

        def step() -> None:
            trainer.train_step(iter([(batch, True)]))
            brain.open_step(brain.optimizer_step + 1)

        losses = []
        for _ in range(STEPS):
            step()
            losses.append(trainer.mean_loss())
            trainer.receive_results(wait=True)
        found: dict[str, Any] = {"how": "as graphs" if graphs else "as they are", "losses": losses,
                                 "nodes": trainer.runner.nodes, "kernels": [], "busy_ms": None, "launches": None,
                                 "peak_mib": torch.cuda.max_memory_allocated() / 2**20 if on_card else None}
        found["host_ms"], found["total_ms"] = timed(step, device)
        trainer.receive_results(wait=True)
        tiny = torch.zeros(8, device=device)
        found["launch_us"] = 1e3 * timed(lambda: add_often(tiny), device)[0] / 1000
        peak = speed.peak_of(device, brain.precision)[0]
        work = flops.operations_per_second(brain, SECONDS) * utterances * SECONDS
        found["mfu"] = work / (found["total_ms"] / 1e3) / peak if peak else None
        if on_card and not fake_gpu.active():
            from torch.profiler import ProfilerActivity, profile

            with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as trace:
                step()
                torch.cuda.synchronize()
            kernels: collections.Counter[str] = collections.Counter()
            run = [event for event in trace.events() if event.device_type.name == "CUDA"]
            for event in run:
                kernels[event.name[:60]] += event.device_time / 1e3
            found |= {"kernels": kernels.most_common(12), "busy_ms": sum(kernels.values()), "launches": len(run)}
    return found


def add_often(tiny: Tensor) -> None:
    """Launch a thousand kernels that do nearly nothing."""
    for _ in range(1000):
        tiny.add_(1)


def timed(work: Callable[[], None], device: Any) -> tuple[float, float]:
    """Return the host's and the whole time of ``work`` in milliseconds, means of some turns."""
    import torch

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    work()
    wait()
    began = time.perf_counter()
    for _ in range(TIMED):
        work()
    host = time.perf_counter() - began
    wait()
    return 1e3 * host / TIMED, 1e3 * (time.perf_counter() - began) / TIMED
