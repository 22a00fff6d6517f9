"""Exports a run and transcribes with its bundle on the card: with each model, compiled, and from many threads."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from importlib import util
from pathlib import Path
from typing import TYPE_CHECKING

from sbkit.doctor.gpu.training import run_of

if TYPE_CHECKING:
    from sbkit.doctor.gpu.bench import Bench

THREADS = 32


def check(bench: Bench) -> None:
    """Check the export, then each way of running the bundle."""
    bundle, with_onnx = bench.folder / "bundle", all(map(util.find_spec, ("onnx", "onnxscript", "onnxruntime")))
    formats = "onnx,torch" if with_onnx else "torch"
    run = run_of(bench)
    done = bench.program(["export", str(run), "--to", str(bundle), "--formats", formats, "--clips",
                          str(bench.size(12, 2))])
    bench.found("export", f"{formats} in {done.seconds:.0f} s" if not done.code else done.last_line(), not done.code)
    if done.code:
        return
    clips = sorted((bench.home / "corpus" / "clips").glob("test*.wav"))[:bench.size(24, 2)]
    expected = _transcribed(bench, bundle, "onnx" if with_onnx else "torch", "cpu", clips)
    if isinstance(expected, str):
        raise RuntimeError(expected)
    characters = sum(map(len, expected))
    bench.note(f"{len(clips)} clips, {characters} characters from the model on the CPU, such as "
               f"{expected[0][:60]!r}")
    if not characters and not bench.rehearse:
        raise RuntimeError("the model on the CPU hears nothing in any clip: there is nothing to compare with")
    _by(bench, "torch", bundle, clips, expected)
    if with_onnx:
        _by(bench, "onnx", bundle, clips, expected)
    else:
        bench.not_shown("onnx", "needs onnx, onnxscript and onnxruntime: pip install 'sbkit[export]'")
    bench.stand_in("torch.compile returns its input unchanged")
    wrong, seconds = bench.call(_together, bundle, bench.device, clips, expected)
    bench.found("threads", f"{wrong} of {THREADS * len(clips)} answers differ, {seconds:.1f} s", not wrong,
                seconds=seconds)


def _by(bench: Bench, model: str, bundle: Path, clips: list[Path], expected: list[str]) -> None:
    heard = _transcribed(bench, bundle, model, bench.device, clips)
    if isinstance(heard, str):
        if "has no CUDA" in heard:
            bench.not_shown(model, f"needs onnxruntime-gpu: {heard}")
        else:
            bench.found(model, heard, False)
        return
    differ = sum(a != b for a, b in zip(heard, expected, strict=True))
    bench.found(model, f"{differ} of {len(clips)} clips differ", not differ)


def _transcribed(bench: Bench, bundle: Path, model: str, device: str, clips: list[Path]) -> list[str] | str:
    """Transcribe each clip by the command line; returns the error as a string if that failed."""
    out = bench.folder / f"{model}-{device.replace(':', '')}-{time.monotonic_ns()}"
    done = bench.program(["transcribe", str(bundle), *map(str, clips), "--model", model, "--device", device,
                          "--output", str(out)])
    if done.code:
        return done.last_line()
    return [(out / f"{clip.stem}.txt").read_text(encoding="utf-8").strip() for clip in clips]


def _together(bundle: Path, device: str, clips: list[Path], expected: list[str]) -> tuple[int, float]:
    """Transcribe from many threads; returns how many answers differ from the expected ones, and the seconds."""
    import sbkit.infer
    from sbkit.infer.model import Model

    longest = max(clip.stat().st_size for clip in clips) / 32_000 + 1  # 16 bits at 16 kHz
    with sbkit.infer.load(bundle, device=device, model="torch", compile="reduce-overhead",
                          buckets=[(8, longest)]) as model:
        assert isinstance(model, Model), "the corpus's bundle is a recogniser"
        started = time.perf_counter()
        with ThreadPoolExecutor(THREADS) as pool:
            heard = list(pool.map(lambda i: model.transcribe(clips[i % len(clips)]).text, range(THREADS * len(clips))))
        seconds = time.perf_counter() - started
    return sum(text.strip() != expected[i % len(clips)] for i, text in enumerate(heard)), seconds
