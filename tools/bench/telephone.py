"""What augmentation gains on telephones and in rooms: WER of one test unchanged, and through telephones and rooms.

    sbkit train hparams/ctc.yaml --number_of_epochs 3 --output_folder RUN
    python -m tools.bench.telephone --out FOLDER --init_from RUN --number_of_epochs 2 --min_steps 0 --lr 0.001

Each way is hparams/ctc.yaml with stages of sbkit.data.augment with their defaults, on the demo corpus unless
--data_folder names another, at 16 kHz; other keys go to the recipe of every run. The rooms are synthesised: noise that
decays by 60 dB in 0.2 to 0.8 s after the direct sound. The test has other rooms than training.

Each result is a file in FOLDER/results, so the same command continues where it was stopped. FOLDER/telephone.md is the
table: the WER with its interval on each test.
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
from sbkit.data.augment import AddReverb, ApplyCodec, Augment, BandPass, Overdrive
from sbkit.data.manifest import Manifest
from sbkit.runs.evaluation_request import EvaluateRequest
from sbkit.score.run_files import EVALUATIONS, RESULT
from sbkit.system.console import atomic_write
from tools.bench.harness import RECIPE, Results, as_words, markdown, parse_checked, program, sbkit

RATE, ROOMS, OWN = 16_000, {"train": 40, "test": 20}, ("augment", "output_folder", "sample_rate")
#: The stages of each way, in their order.
WAYS = {"none": [], "codecs": ["ApplyCodec"], "band": ["BandPass"], "clipping": ["Overdrive"], "rooms": ["AddReverb"],
        "all": ["AddReverb", "Overdrive", "BandPass", "ApplyCodec"]}

Stage = Callable[[np.ndarray, np.random.Generator], np.ndarray]


@program
def main() -> int:
    """Measure the ways that have no result yet, and print the table of all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--out", type=Path, required=True, help="folder of runs, tests, results and the table")
    parser.add_argument("--ways", default=",".join(WAYS), help="those to measure (%(default)s)")
    args, keys = parse_checked(parser, RECIPE, OWN)
    ways, out = args.ways.split(","), args.out.absolute()
    if unknown := [way for way in ways if way not in WAYS]:
        parser.error(f"there is no way {unknown[0]}: choose of {', '.join(WAYS)}")
    results = Results(out / "results", {"keys": keys})
    for way in ways:
        if results.get(way) is None:
            results.put(way, measure(out, way, keys))
    found = {way: result["rates"] for way in WAYS if (result := results.get(way)) is not None}
    with atomic_write(out / "telephone.md") as file:
        file.write(as_markdown(found))
    print(as_markdown(found))
    return 0


def measure(out: Path, way: str, keys: Sequence[str]) -> dict[str, Any]:
    """Train in one way, and return the WER on each test with the ends of its interval."""
    run, recipe = out / "runs" / way, out / f"{way}.yaml"
    rooms = {split: make_rooms(out / "rooms" / split, count) for split, count in ROOMS.items()}
    recipe.write_text(recipe_of(WAYS[way], rooms["train"]), encoding="utf-8")
    sbkit(way, ["train", recipe, "--noprogressbar", *as_words({"output_folder": run}), *keys],
          out / "logs" / f"{way}.log")
    test, rates = Manifest.read(run / "manifests" / "test.csv"), {}
    for name, stages in conditions(rooms["test"]).items():
        corpus = make_test(out / "tests" / name.replace(" ", "-"), test, stages)
        evaluate(EvaluateRequest(run, on=str(corpus), device="cpu", name=corpus.name))
        result = run / EVALUATIONS / f"{corpus.name}-best" / RESULT
        said = json.loads(result.read_text(encoding="utf-8"))
        rates[name] = [said["WER"], *said["WER_interval"]]
    shutil.rmtree(run)
    return {"rates": rates}


def recipe_of(stages: Sequence[str], rooms: Path) -> str:
    """Write the flagship's recipe with stages of augmentation."""
    lines = [f"recipe: !include:{RECIPE}"]
    if stages:
        lines += ["    augment: !new:sbkit.data.augment.Augment", "        stages:"]
    for stage in stages:
        lines.append(f"            - !new:sbkit.data.augment.{stage}")
        lines += [f"                folder: {rooms}"] if stage == "AddReverb" else []
    return "\n".join(lines) + "\n"


def conditions(rooms: Path) -> dict[str, list[Stage]]:
    """Return what makes each test of the clean one."""
    def codec(name: str) -> Stage:
        return ApplyCodec([name], prob=1)

    far = AddReverb(str(rooms), prob=1)
    return {"unchanged": [], "telephone": [codec("ulaw")], "mobile": [codec("gsm")],
            "mobile to telephone": [codec("gsm"), codec("ulaw")],
            "300 to 3400 Hz": [BandPass((300, 300), (3400, 3400), prob=1)], "Opus at 8 kHz": [codec("opus_narrow")],
            "MP3 at 14 kbit": [codec("mp3")], "clipped by 15 dB": [Overdrive(15, 15, prob=1)], "from afar": [far],
            "from afar to mobile": [far, codec("gsm")]}


def make_rooms(folder: Path, count: int) -> Path:
    """Write impulse responses of rooms, whose seed is the folder's name."""
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
    """Write a test's recordings as the stages change them, each seeded by its name; returns the corpus."""
    table = folder / "test.csv"
    if table.is_file():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for row in test:
        signal = read_audio(row.wav, start=row.start, duration=row.duration, sample_rate=RATE)
        drawn = Augment.rng(1, 0, row.id)
        for stage in stages:
            signal = stage(signal, drawn)
        path = folder / f"{row.id}.wav"
        soundfile.write(path, signal, RATE, subtype="FLOAT")
        rows.append([row.id, len(signal) / RATE, path, row.text])
    with atomic_write(table) as file:
        csv.writer(file).writerows([["ID", "duration", "wav", "wrd"], *rows])
    return folder


def as_markdown(found: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    """Format the table: a row for each test, WER and interval of each way."""
    return markdown(("test", *found), (
        (name, *("{:.1f} % ({:.1f} to {:.1f})".format(*rates[name]) for rates in found.values()))
        for name in next(iter(found.values()), {})))


if __name__ == "__main__":
    sys.exit(main())
