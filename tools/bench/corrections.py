"""Whether the recordings that the page of ``sbkit serve --corrections`` puts first are worth correcting first.

    sbkit train hparams/ctc.yaml --output_folder RUN [--key value ...]
    sbkit export RUN --to BUNDLE
    python -m tools.bench.corrections --out FOLDER --run RUN --bundle BUNDLE [--minutes 3] [--seeds 1,2,3] [--key value]

People record sentences of the demo corpus with other voices, every second one by telephone with noise, which the run
never heard. They come in days of 30 recordings, of which a quarter is corrected: those of the greatest worth, or random
ones, until there are so many minutes. The run is trained on with each choice, as ``sbkit improve`` does; keys are those
of RUN's model, and of the new runs. The table has the WER on other sentences, by telephone and not, with intervals.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

from sbkit.data.audio import read_audio
from sbkit.data.corpus import Corpus
from sbkit.infer.model import load
from sbkit.score.run_files import RESULT
from sbkit.serve.corrections import worth
from sbkit.system.console import atomic_write
from tools.bench.harness import RECIPE, Results, as_words, markdown, parse_checked, program, sbkit, whole_numbers

RATE, DAY, SHARE, SNR = 16_000, 30, 4, 10.0  # of the recordings a quarter is corrected; decibels
SOURCES = {"pool": (2, 300), "test": (3, 160)}  # the seed of its sentences and voices, and recordings
WAYS = ("random", "worth")
OWN = ("data_folder", "init_from", "init_tokenizer", "replay", "seed", "output_folder")


@program
def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--out", type=Path, required=True, help="folder of recordings, runs, results and the table")
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=3.0, help="minutes that are corrected (%(default)g)")
    parser.add_argument("--seeds", type=whole_numbers, default=[1, 2, 3], help="of the days and of training (1,2,3)")
    args, keys = parse_checked(parser, RECIPE, OWN)
    out = args.out.absolute()
    results = Results(out / "results", {"minutes": args.minutes, "keys": keys})
    pool, test = (recordings(out, name) for name in SOURCES)
    for name in ("usual", "telephone"):
        with atomic_write(out / f"{name}.csv") as file:
            file.write("ID,duration,wav,spk_id,wrd\n")
            file.writelines(f"{row['id']},{row['duration']},{row['audio_filepath']},,{row['text']}\n"
                            for row in test if row["kind"] == name)
    with load(args.bundle, device="cpu") as model:
        for row in pool:
            row["words"] = model.transcribe(row["audio_filepath"]).words
    chosen = {(way, seed): choose(pool, way, seed, 60 * args.minutes) for seed in args.seeds for way in WAYS}
    table = [scored("before", results, args.run, out, [])]
    for (way, seed), rows in chosen.items():
        name, run = f"{way}-{seed}", out / "runs" / f"{way}-{seed}"
        if results.get(name) is None:
            with atomic_write(out / f"{name}.jsonl") as file:
                file.writelines(json.dumps({"audio_filepath": row["audio_filepath"], "text": row["text"]}) + "\n"
                                for row in rows)
            sbkit(name, ["train", RECIPE, "--noprogressbar", "--no-check", *as_words({
                "data_folder": out / f"{name}.jsonl", "init_from": args.run.absolute(), "init_tokenizer": "keep",
                "replay": 0.5, "seed": seed, "output_folder": run}), *keys], out / "logs" / f"{name}.log")
        table.append(scored(name, results, run, out, rows))
    text = markdown(("corrected", "recordings", "by telephone", "WER, telephone", "WER, usual"), table)
    with atomic_write(out / "corrections.md") as file:
        file.write(text)
    print(text)
    return 0


def recordings(out: Path, name: str) -> list[dict[str, Any]]:
    """Sentences of a demo corpus, each with its recording: every second one is from 300 to 3400 Hz, in noise."""
    seed, count = SOURCES[name]
    folder = out / name
    if not (folder / "demo").exists():
        sbkit(name, ["demo-data", folder / "demo", "--hours", 0.7, "--seed", seed], out / "logs" / f"{name}.log")
    train = Corpus(str(folder / "demo" / "en"), "en", folder / "manifests").prepare(show_progress=False)["train"]
    found = []
    for number, row in enumerate(list(train)[:count]):
        signal, kind = read_audio(row.wav, sample_rate=RATE), "telephone" if number % 2 else "usual"
        if kind == "telephone":
            spectrum, hertz = np.fft.rfft(signal), np.fft.rfftfreq(len(signal), 1 / RATE)
            signal = np.fft.irfft(np.where((hertz > 300) & (hertz < 3400), spectrum, 0), len(signal))
            noise = np.random.default_rng(number).standard_normal(len(signal))
            signal += noise * np.sqrt(np.mean(signal ** 2)) * 10 ** (-SNR / 20)
        path = folder / f"{number}.wav"
        soundfile.write(path, 0.5 * signal / np.abs(signal).max(), RATE, subtype="PCM_16")
        found.append({"id": f"{name}{number}", "audio_filepath": str(path), "duration": len(signal) / RATE,
                      "text": row.text, "kind": kind})
    return found


def choose(pool: list[dict[str, Any]], way: str, seed: int, seconds: float) -> list[dict[str, Any]]:
    """The recordings that are corrected, day by day."""
    left, taken, corrected = random.Random(seed).sample(pool, len(pool)), list[dict[str, Any]](), Counter[str]()
    while left and sum(row["duration"] for row in taken) < seconds:
        day, left = left[:DAY], left[DAY:]
        if way == "worth":
            day.sort(key=lambda row: worth(row["words"], corrected), reverse=True)
        until = sum(row["duration"] for row in taken) + sum(row["duration"] for row in day) / SHARE
        for row in day:
            if sum(each["duration"] for each in taken) < min(until, seconds):
                taken.append(row)
                corrected.update(row["text"].casefold().split())
    return taken


def scored(name: str, results: Results, run: Path, out: Path, rows: list[dict[str, Any]]) -> tuple[str, ...]:
    """A line of the table."""
    if (found := results.get(name)) is None:
        rates = {}
        for kind in ("telephone", "usual"):
            folder = out / "scores" / name
            sbkit(name, ["evaluate", run, "--data_folder", out / f"{kind}.csv", "--name", kind, "--to", folder],
                  out / "logs" / f"{name}.log")
            said = json.loads((folder / f"{kind}-best" / RESULT).read_text(encoding="utf-8"))
            rates[kind] = [said["WER"], *said["WER_interval"]]
        found = results.put(name, {"rates": rates})
    wer = ["{:.1f} % ({:.1f} to {:.1f})".format(*found["rates"][kind]) for kind in ("telephone", "usual")]
    return name, str(len(rows)), str(sum(row["kind"] == "telephone" for row in rows)), *wer


if __name__ == "__main__":
    sys.exit(main())
