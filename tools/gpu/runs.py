"""Runs of ``sbkit train`` that must learn, resume and export on the card, and the tests that need one."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import util
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from sbkit.score.run_files import METRICS, TESTED

from . import brains
from .bench import CHECKOUT, ProgramFailed
from .check import MAX_DATA_WAIT

if TYPE_CHECKING:
    from .bench import Bench

#: Hours of an epoch: enough steps that its start doesn't count.
FLAGSHIP_HOURS, LARGE_HOURS = 0.75, 3.0
#: The steps that fp16 may skip until it has found its scale.
MAX_SKIPPED = 3
#: How far the last epoch's loss of a compiled run may be from that of the uncompiled run.
LOSS_APART = 0.1
THREADS = 32
SIGTERM_CODE = 143
#: How far weights of a resumed run may be apart, as a multiple of the difference between two runs never stopped.
TIMES_APART = 5.0


# ------------------------------------------------------------------ training


def flagship(bench: Bench) -> None:
    """Check the flagship recipe, unmodified."""
    _judge(bench, epochs(flagship_run(bench)))


def large(bench: Bench) -> None:
    """Check joint training with the attention decoder."""
    folder = bench.folder / "run"
    bench.needed(bench.run("large", folder, epochs=2, hours=LARGE_HOURS))
    _judge(bench, epochs(folder))


def flagship_run(bench: Bench) -> Path:
    """Return the flagship's run, which the first check trains and others reuse."""
    folder = bench.home / "run"
    if not (folder / TESTED).exists():
        bench.needed(bench.run("flagship", folder, epochs=2, hours=FLAGSHIP_HOURS))
    return folder


def epochs(folder: Path) -> list[dict[str, Any]]:
    """Read what the run recorded at the end of each epoch's training."""
    lines = map(json.loads, (folder / METRICS).read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line["kind"] == "epoch" and "train_loss" in line]


def learns(found: list[dict[str, Any]]) -> tuple[bool, str]:
    """Tell whether the loss fell and no step was skipped, and describe it."""
    first, last = found[0]["train_loss"], found[-1]["train_loss"]
    skipped = sum(line["skipped_steps"] for line in found)
    if None in (first, last):
        return False, f"loss is not finite, {skipped} steps skipped"
    return last < first and not skipped, f"{first:.3g} to {last:.3g} in {len(found)} epochs, {skipped} steps skipped"


def _judge(bench: Bench, found: list[dict[str, Any]]) -> None:
    last = found[-1]
    good, words = learns(found)
    bench.found("learns", words, good)
    share = last["time_shares"]["data"]
    figures = {name: last[name] for name in ("audio_s_per_s", "padding_share", "mfu") if last.get(name) is not None}
    bench.measured("data", f"{100 * share:.1f} %", share < MAX_DATA_WAIT, **last["time_shares"], **figures)


def precisions(bench: Bench) -> None:
    """Check bf16 and fp16; a dry run has bf16 instead of fp16, in which a CPU can't train."""
    plain = _plain(bench)
    good, seen = learns(plain)
    bench.found("bf16", seen, good, audio_s_per_s=plain[-1]["audio_s_per_s"])
    long = dict.fromkeys(("max_batch_seconds", "step_seconds"), bench.size(2000, 8))
    lines = _short(bench, bench.folder / "fp16", bench.size("fp16", "bf16"), count=5, **long)
    losses, skipped = ([line[name] for line in lines] for name in ("train_loss", "skipped_steps"))
    falls = None not in losses and losses[-1] < losses[0]
    bench.found("fp16", learns(lines)[1], falls and sum(skipped) <= MAX_SKIPPED and not skipped[-1],
                audio_s_per_s=lines[-1]["audio_s_per_s"])


def compiled(bench: Bench) -> None:
    """Check compiled layers, and steps as CUDA graphs, against bf16 without either; a dry run compiles nothing."""
    plain = _plain(bench)
    without = plain[-1]["train_loss"]
    for name, words in (("compile", ["--compile", "--graphs", "false"]), ("graphs", ["--graphs", "true"])):
        try:
            lines = _short(bench, bench.folder / name, "bf16", *words)
        except ProgramFailed as failed:  # the other may work
            bench.found(name, str(failed), False)
            continue
        good, seen = learns(lines)
        late = sum(line.get("graphs_compiled", 0) for line in lines[1:])
        near = good and without and abs(lines[-1]["train_loss"] / without - 1) < LOSS_APART
        bench.found(name, f"{late} graphs after the first epoch; {seen}; without: {learns(plain)[1]}",
                    bool(near) and not late, **{f"{which}, audio s/s": each[-1]["audio_s_per_s"]
                                          for which, each in (("compiled", lines), ("without", plain))})


def _plain(bench: Bench) -> list[dict[str, Any]]:
    """The run in bf16, which the first check trains and the other reuses."""
    return _short(bench, bench.home / "bf16", "bf16", "--graphs", "false")


def _short(bench: Bench, folder: Path, precision: str, *words: str, count: int = 3, **keys: Any
           ) -> list[dict[str, Any]]:
    """Train a few epochs, of steps of 120 s unless keys say otherwise; returns what each recorded."""
    if (folder / TESTED).exists():
        return epochs(folder)
    bench.needed(bench.run("flagship", folder, "--precision", precision, *words, epochs=bench.size(count, 2),
                           **{"step_seconds": bench.size(120, 8), **keys}))
    return epochs(folder)


# ------------------------------------------------------------------ stopping and resuming


def resume(bench: Bench) -> None:
    """Check that SIGTERM leaves a checkpoint, from which a run becomes one that was never stopped, on each card."""
    whole = bench.folder / "whole"
    bench.needed(_words(bench, whole, bench.device))
    code, far = _stopped(bench, "first", bench.device, whole)
    bench.found("stops", f"exit code {code}", code == SIGTERM_CODE)
    usual = 0.0
    if far:  # sums of a card may be of another order each time
        bench.needed(_words(bench, bench.folder / "again", bench.device))
        usual = bench.call(apart, bench.folder / "again", whole)
        bench.note(f"two runs that were never stopped: {_differ(usual)}")
    bench.found("exact", _differ(far), far <= TIMES_APART * usual, apart=far, usual=usual)
    if bench.cards > 1:
        code, far = _stopped(bench, "second", bench.size("cuda:1", "cpu"), whole)
        bench.found("second", f"exit code {code}, {_differ(far)}", code == SIGTERM_CODE and far <= TIMES_APART * usual)


def _words(bench: Bench, folder: Path, device: str) -> list[str]:
    return bench.run("flagship", folder, epochs=2, device=device, hours=0.05, brain=f"!name:{brains.__name__}.Watched")


def _stopped(bench: Bench, name: str, device: str, whole: Path) -> tuple[int, float]:
    """Stop and resume a run; returns its exit code, and how far its weights are from the unstopped run's."""
    folder = bench.folder / name
    code = bench.program(_words(bench, folder, device), **{brains.STOP_AT: "3"}).code
    bench.needed(_words(bench, folder, device))
    return code, bench.call(apart, folder, whole)


def apart(one: Path, other: Path) -> float:
    """Compute the largest difference between weights of two runs; 0 means equal to the bit."""
    import torch

    first, second = (torch.load(max((run / "save").glob("CKPT+*"), key=lambda path: path.stat().st_mtime_ns)
                                / "model.ckpt", map_location="cpu", weights_only=True) for run in (one, other))
    return max((first[name].double() - second[name].double()).abs().max().item() for name in first)


def _differ(apart: float) -> str:
    return f"a weight differs by {apart:.1e}" if apart else "equal"


# ------------------------------------------------------------------ shipping


def ship(bench: Bench) -> None:
    """Export the flagship's run and transcribe on the card: with each model, compiled, and from many threads."""
    bundle, with_onnx = bench.folder / "bundle", all(map(util.find_spec, ("onnx", "onnxscript", "onnxruntime")))
    formats = "onnx,torch" if with_onnx else "torch"
    done = bench.program(["export", str(flagship_run(bench)), "--to", str(bundle), "--formats", formats, "--clips",
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
    if not characters and not bench.dry_run:
        raise RuntimeError("the model on the CPU transcribes every clip as empty: there is nothing to compare with")
    _compare(bench, "torch", bundle, clips, expected)
    if with_onnx:
        _compare(bench, "onnx", bundle, clips, expected)
    else:
        bench.not_shown("onnx", "needs onnx, onnxscript and onnxruntime: pip install 'sbkit[export]'")
    wrong, seconds = bench.call(_together, bundle, bench.device, clips, expected)
    bench.found("threads", f"{wrong} of {THREADS * len(clips)} answers differ, {seconds:.1f} s", not wrong,
                seconds=seconds)


def _compare(bench: Bench, model: str, bundle: Path, clips: list[Path], expected: list[str]) -> None:
    transcripts = _transcribed(bench, bundle, model, bench.device, clips)
    if isinstance(transcripts, str):
        if "has no CUDA" in transcripts:
            bench.not_shown(model, f"needs onnxruntime-gpu: {transcripts}")
        else:
            bench.found(model, transcripts, False)
        return
    differ = sum(a != b for a, b in zip(transcripts, expected, strict=True))
    bench.found(model, f"{differ} of {len(clips)} clips differ", not differ)


def _transcribed(bench: Bench, bundle: Path, model: str, device: str, clips: list[Path]) -> list[str] | str:
    """Transcribe each clip by the command line; returns the error as a string if that failed."""
    out = bench.folder / f"{model}-{device.replace(':', '')}-{time.monotonic_ns()}"
    done = bench.program(["transcribe", str(bundle), *map(str, clips), "--model", model, "--device", device,
                          "--to", str(out)])
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
            transcripts = list(pool.map(lambda i: model.transcribe(clips[i % len(clips)]).text,
                                        range(THREADS * len(clips))))
        seconds = time.perf_counter() - started
    return sum(text.strip() != expected[i % len(clips)] for i, text in enumerate(transcripts)), seconds


# ------------------------------------------------------------------ tests


def tests(bench: Bench) -> None:
    """Run the tests that need a card in one pytest process; a dry run runs a few, which skip."""
    if util.find_spec("pytest") is None:
        bench.not_shown("tests", "needs pytest: pip install -e '.[dev]'")
        return
    # Collecting all other files would take longer than running these.
    files = sorted(path for path in (CHECKOUT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text("utf-8"))
    out = bench.folder / "junit.xml"
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", f"--junitxml={out}",
               *map(str, files[:bench.size(len(files), 4)])]
    print(" ".join(command), flush=True)
    done = subprocess.run(command, cwd=CHECKOUT, stdin=subprocess.DEVNULL, check=False)
    if not out.exists():
        bench.found("tests", f"pytest ended with code {done.returncode}", False)
        return
    counts, bad = outcomes(out)
    words = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    good = not bad and done.returncode == 0 and bool(counts["skipped"] if bench.dry_run else counts["passed"])
    bench.found("tests", words + (f": {', '.join(bad[:5])}" if bad else ""), good, **counts)


def outcomes(junit: Path) -> tuple[dict[str, int], list[str]]:
    """Count tests by outcome, and list those that didn't pass."""
    counts, bad = {"passed": 0, "failed": 0, "skipped": 0}, []
    for case in ElementTree.parse(junit).iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            counts["failed"] += 1
            bad.append(case.get("name", "?"))
        else:
            counts["skipped" if case.find("skipped") is not None else "passed"] += 1
    return counts, bad
