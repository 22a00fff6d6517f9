"""A step, an epoch and a validation against stock SpeechBrain, by the programs under ``tools``."""

from __future__ import annotations

import json
import os
import runpy
import statistics
import sys
from collections.abc import Mapping, Sequence
from importlib import util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sbkit.doctor.gpu.catalogue import FINETUNE_RATIO, LEAST_MFU, STEP_RATIO
from sbkit.doctor.gpu.corpus import corpus

if TYPE_CHECKING:
    from sbkit.doctor.gpu.bench import Bench

#: Speed targets, as multiples of stock's best precision.
TARGETS = {"step": STEP_RATIO, "epoch": 1.0, "validation": 1.0}


def flagship(bench: Bench) -> None:
    """Compare the flagship in fp32 and bf16."""
    _judge(bench, measured(bench, "flagship", "fp32,bf16"))


def large(bench: Bench) -> None:
    """Compare large.yaml in bf16 only, as in the recipe: four such models in two precisions would not fit on a card."""
    found = measured(bench, "large", "bf16")
    _judge(bench, found)
    best = max(statistics.median(values) for side, values in found["audio_s_per_s"]["step"].items() if "sbkit" in side)
    operations, peak, source = bench.call(_operations, bench)
    share = best * operations / peak if peak else None
    seen = f"{100 * share:.1f} % by {source}" if share is not None else f"the peak of {source} is not known"
    bench.measured("mfu", seen, share is not None and share >= LEAST_MFU, operations_per_audio_second=operations,
                   peak=peak, audio_s_per_s=best)


def finetuning(bench: Bench) -> None:
    """Compare fine-tuning of a pretrained encoder, whose weights are random: none can be downloaded everywhere."""
    if util.find_spec("transformers") is None:
        bench.not_shown("step", "needs transformers: pip install 'sbkit[ssl]'")
        return
    at_once = 80 if bench.gib is None or bench.gib >= 38 else 40  # both sides in both precisions are on it together
    seconds = str(bench.size(at_once, 8))
    words = ["--data", str(corpus(bench)), "--language", "en", "--max_batch_seconds", seconds,
             "--step_seconds", seconds]
    bench.stand_in("an encoder of two narrow layers")
    found = _run(bench, "bench_finetune.py", "fp32,bf16", [*words, "--num_workers", "0", *bench.size([], ["--tiny"])])
    _judge(bench, found, {"step": FINETUNE_RATIO})


def measured(bench: Bench, recipe: str, precisions: str) -> dict[str, Any]:
    """Run bench_train.py and return its measurements of each side."""
    path, _, _, *rest = bench.words(recipe, ctc_weight=1.0)
    return _run(bench, "bench_train.py", precisions, ["--recipe", path, *rest])


def _run(bench: Bench, tool: str, precisions: str, words: Sequence[str]) -> dict[str, Any]:
    out = bench.folder / "bench.json"
    command = [str(bench.checkout / "tools" / tool), "--device", bench.device,
               "--rounds", str(bench.size(2, 1)), "--precisions", bench.size(precisions, "fp32"), "--json", str(out),
               *words]
    print(" ".join(command), flush=True)
    bench.call(_referee, command)
    return json.loads(out.read_text(encoding="utf-8"))


def _referee(command: list[str]) -> None:
    """Be a program under ``tools``, with all imports done; each side that it starts imports its own."""
    tools = Path(command[0]).parent
    os.chdir(tools.parent)
    sys.path.insert(0, str(tools))
    sys.argv = command
    runpy.run_path(command[0], run_name="__main__")


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
    hparams = load.load(request.path, {**request.overrides, "output_folder": str(bench.folder / "counted")})
    brain = load.opened(hparams, request.path).brain(output_folder=None, checkpointer=None)
    durations = Manifest.read(corpus(bench) / "train.csv").durations
    operations = flops.operations_per_second(brain, flops.typical_seconds(durations))
    return operations, *speed.peak_of(torch.device(bench.device), "bf16")
