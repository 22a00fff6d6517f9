"""What corrections teach, and whether those that the page of ``sbkit serve --corrections`` puts first teach most.

    sbkit train hparams/ctc.yaml --output_folder RUN [--key value ...]
    sbkit export RUN --to BUNDLE
    python -m tools.bench.corrections --out FOLDER --run RUN --bundle BUNDLE [--minutes 3] [--seeds 1,2,3]
        [--ways random,worth] [--share 4] [--recordings 300] [--key value]

People record sentences of the demo corpus with other voices, every second one by telephone with noise, which the run
never heard. They come in days of 30 recordings, of which one of ``--share`` is corrected: those of the greatest worth,
or random ones, until there are so many minutes. The run is trained on with each choice, as ``sbkit improve`` does; keys
are those of RUN's model, and of the new runs. The table has the WER on other sentences, by telephone and not, and on
the run's own test, with intervals. ``--minutes 10,20,40 --ways random --share 1 --recordings 900`` gives a curve.
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
from sbkit.infer.kinds import load
from sbkit.infer.model import Model
from sbkit.score.report import data
from sbkit.score.run_files import RESULT
from sbkit.serve.corrections import worth
from sbkit.system.console import atomic_write
from tools.bench.harness import RECIPE, Results, as_words, markdown, parse_checked, program, sbkit, whole_numbers

RATE, DAY, SHARE, SNR = 16_000, 30, 4, 10.0  # of the recordings a quarter is corrected; decibels
SEEDS, TESTED, HOURS = {"pool": 2, "test": 3}, 160, 0.7 / 300  # of sentences and voices; recordings; of a recording
WAYS = ("random", "worth")
OWN = ("data_folder", "init_from", "init_tokenizer", "replay", "seed", "output_folder")


@program
def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--out", type=Path, required=True, help="folder of recordings, runs, results and the table")
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--minutes", type=whole_numbers, default=[3], help="minutes that are corrected (3)")
    parser.add_argument("--seeds", type=whole_numbers, default=[1, 2, 3], help="of the days and of training (1,2,3)")
    parser.add_argument("--ways", type=lambda text: text.split(","), default=[*WAYS], help="what is corrected (both)")
    parser.add_argument("--share", type=int, default=SHARE, help="one of so many recordings is corrected (%(default)s)")
    parser.add_argument("--recordings", type=int, default=300, help="how many there are to correct (%(default)s)")
    args, keys = parse_checked(parser, RECIPE, OWN)
    out = args.out.absolute()
    results = Results(out / "results", {"share": args.share, "recordings": args.recordings, "keys": keys})
    pool, test = recordings(out, "pool", args.recordings), recordings(out, "test", TESTED)
    for name in ("usual", "telephone"):
        with atomic_write(out / f"{name}.csv") as file:
            file.write("ID,duration,wav,spk_id,wrd\n")
            file.writelines(f"{row['id']},{row['duration']},{row['audio_filepath']},,{row['text']}\n"
                            for row in test if row["kind"] == name)
    with load(args.bundle, device="cpu", expect=Model) as model:
        for row in pool:
            row["words"] = model.transcribe(row["audio_filepath"]).words
    chosen = {(way, minutes, seed): choose(pool, way, seed, 60 * minutes, args.share)
              for minutes in args.minutes for seed in args.seeds for way in args.ways}
    table = [scored("before", results, args.run, out, [])]
    for (way, minutes, seed), rows in chosen.items():
        name = f"{way}-{minutes}-{seed}"
        run = out / "runs" / name
        if results.get(name) is None:
            with atomic_write(out / f"{name}.jsonl") as file:
                file.writelines(json.dumps({"audio_filepath": row["audio_filepath"], "text": row["text"]}) + "\n"
                                for row in rows)
            sbkit(name, ["train", RECIPE, "--noprogressbar", "--no-check", *as_words({
                "data_folder": out / f"{name}.jsonl", "init_from": args.run.absolute(), "init_tokenizer": "keep",
                "replay": 0.5, "seed": seed, "output_folder": run}), *keys], out / "logs" / f"{name}.log")
        table.append(scored(name, results, run, out, rows))
    text = markdown(("corrected", "recordings", "by telephone", "WER, telephone", "WER, usual", "WER, old test"), table)
    with atomic_write(out / "corrections.md") as file:
        file.write(text)
    print(text)
    return 0


def recordings(out: Path, name: str, count: int) -> list[dict[str, Any]]:
    """Sentences of a demo corpus, each with its recording: every second one is from 300 to 3400 Hz, in noise."""
    folder = out / name
    if not (folder / "demo").exists():
        sbkit(name, ["demo-data", folder / "demo", "--hours", HOURS * max(count, 300), "--seed", SEEDS[name]],
              out / "logs" / f"{name}.log")
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


def choose(pool: list[dict[str, Any]], way: str, seed: int, seconds: float,
           share: int = SHARE) -> list[dict[str, Any]]:
    """The recordings that are corrected, day by day."""
    left, taken, corrected = random.Random(seed).sample(pool, len(pool)), list[dict[str, Any]](), Counter[str]()
    while left and sum(row["duration"] for row in taken) < seconds:
        day, left = left[:DAY], left[DAY:]
        if way == "worth":
            day.sort(key=lambda row: worth(row["words"], corrected), reverse=True)
        until = sum(row["duration"] for row in taken) + sum(row["duration"] for row in day) / share
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
        if (old := data.read(run).old_test) is not None:
            rates["old"] = [old[1], old[0].before, *old[0].interval]
        found = results.put(name, {"rates": rates})
    wer = ["{:.1f} % ({:.1f} to {:.1f})".format(*found["rates"][kind]) for kind in ("telephone", "usual")]
    wer.append("{:.1f} %, before {:.1f} ({:.1f} to {:.1f})".format(*found["rates"]["old"]) if rows else "")
    return name, str(len(rows)), str(sum(row["kind"] == "telephone" for row in rows)), *wer


if __name__ == "__main__":
    sys.exit(main())
