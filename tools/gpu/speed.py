"""A step, an epoch and a validation compared with stock SpeechBrain by ``tools.bench``, and the memory of a step."""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .bench import CHECKOUT, RECIPES
from .check import FINETUNE_RATIO, MIN_MFU, STEP_RATIO

if TYPE_CHECKING:
    from .bench import Bench

#: Speed targets, as multiples of stock's best precision.
TARGETS = {"step": STEP_RATIO, "epoch": 1.0, "validation": 1.0}
#: How far the measured memory may be from the estimate.
NEAR = 0.15
GIB = 2**30


def flagship(bench: Bench) -> None:
    """Compare the flagship in fp32 and bf16; an epoch has 20 steps of 15 s."""
    _judge(bench, _train(bench, "flagship", "fp32,bf16", hours=0.08))


def large(bench: Bench) -> None:
    """Compare large.yaml in bf16 only, as in the recipe: four such models in two precisions would not fit on a card."""
    found = _train(bench, "large", "bf16", hours=3.0)  # enough for steps of the size that it names
    best = max(statistics.median(values) for side, values in found["audio_s_per_s"]["step"].items() if "sbkit" in side)
    operations, peak, source = bench.call(_operations, bench)
    share = best * operations / peak if peak else None
    seen = f"{100 * share:.1f} % by {source}" if share is not None else f"the peak of {source} is not known"
    bench.measured("mfu", seen, share is not None and share >= MIN_MFU, operations_per_audio_second=operations,
                   peak=peak, audio_s_per_s=best)
    _judge(bench, found)


def finetuning(bench: Bench) -> None:
    """Compare fine-tuning of a pretrained encoder, whose weights are random: none can be downloaded everywhere."""
    if importlib.util.find_spec("transformers") is None:
        bench.not_shown("step", "needs transformers: pip install 'sbkit[ssl]'")
        return
    at_once = 80 if bench.gib is None or bench.gib >= 38 else 40  # both sides in both precisions are on it together
    seconds = str(bench.size(at_once, 8))
    words = ["--data", str(bench.corpus()), "--language", "en", "--max_batch_seconds", seconds,
             "--step_seconds", seconds]
    found = _run(bench, "finetune", "fp32,bf16", [*words, "--num_workers", "0", *bench.size([], ["--tiny"])])
    _judge(bench, found, {"step": FINETUNE_RATIO})


def _train(bench: Bench, recipe: str, precisions: str, **options: Any) -> dict[str, Any]:
    path, _, _, *rest = bench.words(recipe, ctc_weight=1.0, **options)
    return _run(bench, "train", precisions, ["--recipe", path, *rest])


def _run(bench: Bench, name: str, precisions: str, words: Sequence[str]) -> dict[str, Any]:
    out = bench.folder / "bench.json"
    command = [f"tools.bench.{name}", "--device", bench.device,
               "--rounds", str(bench.size(2, 1)), "--precisions", bench.size(precisions, "fp32"), "--json", str(out),
               *words]
    print(" ".join(command), flush=True)
    bench.call(_be, command)
    return json.loads(out.read_text(encoding="utf-8"))


def _be(command: list[str]) -> None:
    """Be a program of ``tools.bench``, with all imports done; each side that it starts imports its own."""
    os.chdir(CHECKOUT)
    sys.argv = command
    importlib.import_module(command[0]).main()


def ratio(sides: dict[str, list[float]]) -> float:
    """Compute the ratio of sbkit's best precision to stock's best, by medians."""
    medians = {name: statistics.median(values) for name, values in sides.items()}
    best = {side: max(value for name, value in medians.items() if name.startswith(side)) for side in ("sbkit", "stock")}
    return best["sbkit"] / best["stock"]


def _judge(bench: Bench, found: dict[str, Any], targets: Mapping[str, float] = TARGETS) -> None:
    for piece, target in targets.items():
        sides = found["audio_s_per_s"][piece]
        figures = {f"{name}, audio s/s": statistics.median(values) for name, values in sides.items()}
        if piece == "step":
            figures |= {f"{name}, peak MiB": mib for name, mib in found["peak_mib"].items()}
        bench.measured(piece, f"{ratio(sides):.2f} times", ratio(sides) >= target, **figures)


def _operations(bench: Bench) -> tuple[float, float | None, str]:
    """Compute the FLOPs per second of audio, the device's peak, and the source of the peak."""
    import torch

    from sbkit.data.manifest import Manifest
    from sbkit.recipe import arguments, flops, load, speed

    request = arguments.parse(bench.words("large", ctc_weight=1.0))
    recipe = load.open_recipe(request.path, {**request.overrides, "output_folder": str(bench.folder / "counted")})
    brain = recipe.brain(output_folder=None, checkpointer=None)
    durations = Manifest.read(bench.corpus() / "train.csv").durations
    operations = flops.operations_per_second(brain, flops.typical_seconds(durations))
    return operations, *speed.peak_of(torch.device(bench.device), "bf16")


def memory(bench: Bench) -> None:
    """Compare the estimate of ``sbkit check`` with the measured peak of a few steps."""
    for name in RECIPES:
        cost = cost_in(bench.needed(["check", *bench.words(name), "--measure", "--json"]).output)
        planned, peak = cost["weights_bytes"] + cost["batch_bytes"], cost["measured_bytes"]
        seen = f"{planned / GIB:.2f} GiB by the estimate"
        if peak is None:
            bench.measured(name, seen, False)
            continue
        apart = planned / peak - 1
        bench.measured(name, f"{seen}, {peak / GIB:.2f} GiB measured: {100 * apart:+.0f} %", abs(apart) <= NEAR,
                       weights_bytes=cost["weights_bytes"], batch_bytes=cost["batch_bytes"], measured_bytes=peak)


def cost_in(output: str) -> dict[str, Any]:
    """Parse the values of the cost estimate from the command's output."""
    lines = output.splitlines()
    report = json.loads("\n".join(lines[lines.index("{"):len(lines) - lines[::-1].index("}")]))
    return next(section["values"] for section in report["sections"].values() if "weights_bytes" in section["values"])
