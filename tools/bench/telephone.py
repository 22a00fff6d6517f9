"""What augmentation gives on telephones and from afar: error rates of one test, as it is and as lines and rooms make it.

    python -m tools.bench.telephone --out FOLDER [--ways none,codecs,all] [--key value]

Each way is hparams/ctc.yaml with some stages of sbkit.data.augment, on the demo corpus unless --data_folder says
otherwise: ``none``; ``codecs`` is ApplyCodec as it is; ``all`` has AddReverb and Overdrive before it. The rooms are
synthesised: noise that decays by 60 dB in 0.2 to 0.8 s behind the direct sound. Those of the test are others than
those of training, and its lines are also such as no stage of training makes: a band of 300 to 3,400 Hz, and a mobile
that calls a telephone. Other keys go to the recipe of every run.

Each result is a file in FOLDER/results, so the same command continues where it was stopped. FOLDER/telephone.md is the
table.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

from sbkit.commands.evaluate import evaluate
from sbkit.data.audio import read_audio
from sbkit.data.augment import AddReverb, ApplyCodec, Augment, Overdrive
from sbkit.data.manifest import Manifest
from sbkit.errors import SbkitError
from sbkit.runs.evaluation import EvaluateRequest
from sbkit.score.run_files import EVALUATIONS, RESULT
from sbkit.system.console import atomic_write
from tools.bench.harness import RECIPE, Results, as_words, call

RATE, ROOMS = 16_000, {"train": 40, "test": 20}
CLIPPING = "        - !new:sbkit.data.augment.Overdrive\n"
CODECS = "        - !new:sbkit.data.augment.ApplyCodec\n"
REVERB = "        - !new:sbkit.data.augment.AddReverb\n            folder: {rooms}\n"
WAYS = {"none": "", "codecs": CODECS, "all": REVERB + CLIPPING + CODECS}

Stage = Callable[[np.ndarray, np.random.Generator], np.ndarray]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--out", type=Path, required=True, help="folder of runs, tests, results and the table")
    parser.add_argument("--ways", default=",".join(WAYS))
    args, keys = parser.parse_known_args()
    ways = args.ways.split(",")
    if unknown := [way for way in ways if way not in WAYS]:
        parser.error(f"there is no way {unknown[0]}: choose of {', '.join(WAYS)}")
    out = args.out.absolute()
    results = Results(out / "results", {"keys": keys})
    try:
        for way in ways:
            if results.get(way) is None:
                results.put(way, measure(out, way, keys))
        found = {way: rates for way in WAYS if (rates := results.get(way)) is not None}
    except SbkitError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    with atomic_write(out / "telephone.md") as file:
        file.write(table(found))
    print(table(found))
    return 0


def measure(out: Path, way: str, keys: Sequence[str]) -> dict[str, Any]:
    """Train in one way; returns the (WER, CER) on each test."""
    run, recipe = out / "runs" / way, out / f"{way}.yaml"
    rooms = {split: make_rooms(out / "rooms" / split, count) for split, count in ROOMS.items()}
    recipe.write_text(recipe_of(WAYS[way], rooms["train"]), encoding="utf-8")
    call(way, [sys.executable, "-m", "sbkit", "train", recipe, "--noprogressbar", *as_words({"output_folder": run}),
               *keys], out / "logs" / f"{way}.log")
    test, found = Manifest.read(run / "manifests" / "test.csv"), {}
    for name, stages in tests(rooms["test"]).items():
        corpus = make_test(out / "tests" / name.replace(" ", "-"), test, stages)
        evaluate(EvaluateRequest(run, on=str(corpus), device="cpu", name=corpus.name))
        result = run / EVALUATIONS / f"{corpus.name}-best" / RESULT
        said = json.loads(result.read_text(encoding="utf-8"))
        found[name] = said["WER"], said["CER"]
    shutil.rmtree(run)
    return {"rates": found}


def recipe_of(stages: str, rooms: Path) -> str:
    """Write the flagship's recipe with stages of augmentation."""
    lines = f"recipe: !include:{RECIPE}\n"
    return lines + (f"    augment: !new:sbkit.data.augment.Augment\n        stages:\n{_indented(stages)}" if stages
                    else "").format(rooms=rooms)


def _indented(stages: str) -> str:
    return "".join(f"    {line}\n" for line in stages.splitlines())


def tests(rooms: Path) -> dict[str, list[Stage]]:
    """Return what makes each test of the clean one."""
    def codec(name: str) -> Stage:
        return ApplyCodec([name], prob=1)

    far = AddReverb(str(rooms), prob=1)
    return {"as it is": [], "telephone": [codec("ulaw")], "mobile": [codec("gsm")],
            "mobile to telephone": [codec("gsm"), codec("ulaw")], "300 to 3400 Hz": [band],
            "Opus at 8 kHz": [codec("opus_narrow")], "MP3 at 14 kbit": [codec("mp3")],
            "clipped by 15 dB": [Overdrive(15, 15, prob=1)], "from afar": [far],
            "from afar to mobile": [far, codec("gsm")]}


def band(signal: np.ndarray, _: np.random.Generator, low: float = 300.0, high: float = 3400.0) -> np.ndarray:
    """Keep a band of frequencies of a waveform [S]."""
    spectrum = np.fft.rfft(signal)
    pitch = np.fft.rfftfreq(len(signal), 1 / RATE)
    spectrum[(pitch < low) | (pitch > high)] = 0
    return np.fft.irfft(spectrum, len(signal)).astype(np.float32)


def make_rooms(folder: Path, count: int) -> Path:
    """Write impulse responses of rooms, which the folder's name is the seed of."""
    drawn = Augment.rng(0, 0, folder.name)
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(count):
        seconds, direct = drawn.uniform(0.2, 0.8), drawn.uniform(-3, 9)
        time = np.arange(round(seconds * RATE)) / RATE
        tail = drawn.standard_normal(len(time)) * 10 ** (-3 * time / seconds)
        tail[: RATE // 400] = 0  # nothing is reflected within 2.5 ms
        tail *= 10 ** (-direct / 20) / np.linalg.norm(tail)
        tail[0] = 1.0
        soundfile.write(folder / f"{i}.wav", tail / np.abs(tail).max(), RATE, subtype="FLOAT")
    return folder


def make_test(folder: Path, test: Manifest, stages: Sequence[Stage]) -> Path:
    """Write a test's recordings as the stages change them, each as its name seeds it; returns the corpus."""
    table = folder / "test.csv"
    if table.is_file():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for row in test:
        signal, drawn = read_audio(row.wav, start=row.start, duration=row.duration, sample_rate=RATE), \
            Augment.rng(1, 0, row.id)
        for stage in stages:
            signal = stage(signal, drawn)
        path = folder / f"{row.id}.wav"
        soundfile.write(path, signal, RATE, subtype="FLOAT")
        rows.append([row.id, len(signal) / RATE, path, row.text])
    with atomic_write(table) as file:
        csv.writer(file).writerows([["ID", "duration", "wav", "wrd"], *rows])
    return folder


def table(found: Mapping[str, Mapping[str, Any]]) -> str:
    """Format the table in Markdown: a row for each test, WER and CER of each way."""
    names = next(iter(found.values()))["rates"]
    lines = [("test", *found), ("---",) * (1 + len(found))]
    lines += [(name, *("{:.1f} % ({:.1f})".format(*each["rates"][name]) for each in found.values())) for name in names]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
