"""Whether hparams/ctc.yaml always learns: pairs of corpus, length, tokens, seed, learning rate and processes.

    python -m tools.bench.convergence --out results/convergence --plan     # which runs, and about how long they take
    python -m tools.bench.convergence --out results/convergence
    python -m tools.bench.convergence --out results/convergence --workers 2 --recordings FOLDER

Each result is a file in the folder of --out, so the same command continues where it was stopped; short runs come first.
A run has learnt if the character error rate of its validation fell below 75 %: a model with empty transcripts stays
near 100 %, and one that has only learnt which letters are frequent near 90 %.
``--recordings``: a folder with a ``train.csv`` of a few real clips, on which runs are validated too. Other keys of the
recipe, such as ``--spec_augment.ramp null``, go to every run.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import itertools
import json
import random
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

from sbkit.errors import SbkitError
from sbkit.recipe import load
from sbkit.system.console import table
from tools.bench.harness import RECIPE, ROOT, Results, as_words, call, discard, parse_checked, read_lines

LEARNT = 75.0
RECORDINGS = "recordings"
#: What is varied. Each pair of values of two factors occurs in some run, if ``possible`` allows it.
FACTORS: dict[str, tuple[Any, ...]] = {
    "corpus": (RECORDINGS, 0.1, 0.3, 1.0), "epochs": (3, 6, 12, 60), "tokens": ("char", "unigram"),
    "seed": (1, 2, 3, 4, 5), "rate": (1 / 3, 1.0, 3.0), "processes": (1, 2), "model": ("small", "flagship"),
}
SMALL = {"d_model": 96, "nhead": 2, "num_encoder_layers": 4, "d_ffn": 384, "cnn_first_channels": 16, "cnn_channels": 16}
PIECES = {RECORDINGS: 20, 0.1: 80, 0.3: 80, 1.0: 100}
OWN = ("number_of_epochs", "seed", "lr", "token_type", "output_neurons", "data_folder", "output_folder")
#: For estimates before any run: seconds of audio a second on one core, seconds of start and end, audio of all updates.
GUESSED_SPEED, GUESSED_REST, MIN_AUDIO = {"small": 200.0, "flagship": 90.0}, 20.0, 15_000.0


def possible(run: dict[str, Any]) -> bool:
    """Whether a run is short enough: at most six hours of audio, twelve with the small model."""
    audio = run["epochs"] * (run["corpus"] if run["corpus"] != RECORDINGS else 0.01)
    return audio <= (12 if run["model"] == "small" else 6)


def design(factors: dict[str, tuple[Any, ...]], seed: int = 0) -> list[dict[str, Any]]:
    """Find few runs that contain every possible pair, greedily: each adds the most pairs among many candidates."""
    names, rng, runs = list(factors), random.Random(seed), []
    everything = [run for values in itertools.product(*factors.values())
                  if possible(run := dict(zip(names, values, strict=True)))]
    left = {pair for run in everything for pair in pairs(run)}
    while left:
        tried = rng.sample(everything, min(len(everything), 400))
        best = max(tried, key=lambda run: len(pairs(run) & left))
        if not pairs(best) & left:
            best = next(run for run in everything if pairs(run) & left)
        left -= pairs(best)
        runs.append(best)
    return runs


def pairs(run: dict[str, Any]) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    """List the pairs of factors with their values in a run."""
    return set(itertools.combinations(run.items(), 2))


def name_of(run: dict[str, Any]) -> str:
    return (f"{run['corpus']}-{run['epochs']}ep-{run['tokens']}-seed{run['seed']}-x{run['rate']:.2g}"
            f"-{run['processes']}p-{run['model']}")


def words_of(run: dict[str, Any], recordings: Path | None, peak: float) -> list[str]:
    """Return the run's overrides for the command line."""
    given: dict[str, Any] = {"number_of_epochs": run["epochs"], "seed": run["seed"], "lr": round(peak * run["rate"], 6),
                             "token_type": run["tokens"]}
    if run["corpus"] == RECORDINGS:
        given["data_folder"] = recordings
    else:
        given["corpus.demo_hours"] = run["corpus"]
    if run["tokens"] != "char":
        given["output_neurons"] = PIECES[run["corpus"]]
    if run["model"] == "small":
        given |= SMALL
    return as_words(given)


def train(run: dict[str, Any], out: Path, recordings: Path | None, peak: float,
          more: list[str]) -> dict[str, Any]:
    """Train one run, and keep its result, which a second call reads."""
    results, name = results_of(out, peak, more), name_of(run)
    if (known := results.get(name)) is not None:
        return known
    folder, log, began = out / name, out / f"{name}.log", time.monotonic()
    shutil.rmtree(folder, ignore_errors=True)
    log.unlink(missing_ok=True)
    call(name, [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={run['processes']}",
                ROOT / "train.py", RECIPE, "--output_folder", folder.resolve(), "--noprogressbar",
                "--ckpt_interval_minutes", "0", "--num_workers", "1", *words_of(run, recordings, peak), *more], log, 1)
    lines = read_lines(folder / "metrics.jsonl")
    rates = [line["valid_CER"] for line in lines if "valid_CER" in line]
    discard(folder)
    return results.put(name, {
        **run, "steps": max(line.get("step", 0) for line in lines), "first": rates[0], "cer": rates[-1],
        "wer": [line["valid_WER"] for line in lines if "valid_WER" in line][-1],
        "warnings": sum(line.get("kind") == "warning" for line in lines), "seconds": round(time.monotonic() - began)})


def results_of(out: Path, peak: float, more: list[str]) -> Results:
    """Return the results of this recipe, with these keys."""
    return Results(out / "results", {"peak": peak, "keys": more, "recipe": recipe_hash()})


def recipe_hash() -> str:
    """Return a hash of the recipe's values, apart from those that each run sets."""
    texts = load.resolved(RECIPE, {}).texts()
    values = {key: value for key, value in texts.items() if key.partition(".")[0] not in OWN}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def guess(run: dict[str, Any]) -> float:
    """Guess the seconds of a run on one core, of which its processes share the audio."""
    audio = max(MIN_AUDIO, 3600 * run["epochs"] * (run["corpus"] if run["corpus"] != RECORDINGS else 0.01))
    return GUESSED_REST + audio / GUESSED_SPEED[run["model"]]


def estimates(runs: list[dict[str, Any]], results: Results) -> tuple[list[tuple[dict[str, Any], float]], int]:
    """Return the missing runs with their minutes, by the speed of those that are done, and how many those are."""
    known = [(run, results.get(name_of(run))) for run in runs]
    done = [found for _, found in known if found]
    slower = median(found["seconds"] / guess(found) for found in done) if done else 1.0
    return [(run, slower * guess(run) / 60) for run, found in known if found is None], len(done)


def announced(missing: list[tuple[dict[str, Any], float]], done: int, workers: int) -> str:
    """Format how many runs there are to do, and how long they take."""
    minutes = sum(each for _, each in missing) / workers
    return (f"{len(missing)} of {len(missing) + done} runs are missing: about {minutes:.0f} min "
            f"with --workers {workers}{'' if done else ', guessed for idle cores'}")


def to_hear(given: Path, out: Path) -> Path:
    """Make a corpus of the recordings of a ``train.csv``, with a copy of all of them in each split."""
    with open(given / "train.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for split in ("train", "dev", "test"):
        clips = out / split
        clips.mkdir(parents=True, exist_ok=True)
        with open(out / f"{split}.csv", "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            for row in rows:
                recording = Path(row["wav"].replace("$data_root", str(given.resolve())))
                copy = shutil.copyfile(recording, clips / recording.name)
                writer.writerow({**row, "ID": f"{row['ID']}-{split}", "wav": copy.resolve()})
    return out


def shown(results: list[dict[str, Any]]) -> str:
    """Format the table, the worst run first."""
    rows = [[each["corpus"], each["epochs"], each["tokens"], each["seed"], f"{each['rate']:.2g}", each["processes"],
             each["model"], each["steps"], f"{each['cer']:.1f}", f"{each['wer']:.1f}",
             "yes" if each["cer"] < LEARNT else "NO", each["warnings"]]
            for each in sorted(results, key=lambda each: -each["cer"])]
    head = ["corpus", "epochs", "tokens", "seed", "lr x", "processes", "model", "steps", "CER %", "WER %", "learnt"]
    return table([*head, "warnings"], rows)


def parse() -> tuple[argparse.Namespace, list[str]]:
    """Parse the command line into the program's options and the keys for every run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--out", type=Path, required=True, help="folder of results and logs")
    parser.add_argument("--recordings", type=Path, help="a folder with a train.csv of a few real clips (default: none)")
    parser.add_argument("--workers", type=int, default=1, help="runs at the same time (1)")
    peak = load.tree(RECIPE).at("lr")
    parser.add_argument("--peak", type=float, default=peak, help=f"the rate to vary (the recipe's: {peak:g})")
    parser.add_argument("--plan", action="store_true", help="print which runs are missing, and how long they take")
    args, more = parse_checked(parser, RECIPE, OWN)
    if args.workers < 1:
        parser.error("--workers is 1 or more")
    if args.recordings and not (args.recordings / "train.csv").is_file():
        parser.error(f"--recordings: there is no {args.recordings / 'train.csv'}")
    return args, more


def main() -> None:
    args, more = parse()
    corpora = tuple(each for each in FACTORS["corpus"] if each != RECORDINGS or args.recordings)
    runs = sorted(design({**FACTORS, "corpus": corpora}), key=guess)
    try:
        missing, done = estimates(runs, results_of(args.out, args.peak, more))
    except SbkitError as error:
        raise SystemExit(f"error: {error}") from None
    if args.plan:
        print(table(["run", "minutes"], [[name_of(run), round(minutes, 1)] for run, minutes in missing]))
        print(announced(missing, done, args.workers))
        return
    print(announced(missing, done, args.workers), file=sys.stderr, flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    recordings = to_hear(args.recordings, args.out.resolve() / "clips") if args.recordings else None
    with ThreadPoolExecutor(args.workers) as pool:
        results = []
        for each in [pool.submit(train, run, args.out, recordings, args.peak, more) for run in runs]:
            try:
                results.append(found := each.result())
            except SbkitError as error:
                print(f"error: {error}", file=sys.stderr, flush=True)
                continue
            print(f"{name_of(found)}: CER {found['cer']:.1f} % after {found['steps']} steps, {found['seconds']} s",
                  file=sys.stderr, flush=True)
    print(shown(results))
    if len(results) < len(runs):
        raise SystemExit(f"{len(runs) - len(results)} of {len(runs)} runs failed")
    if wrong := [name_of(each) for each in results if each["cer"] >= LEARNT or each["warnings"]]:
        raise SystemExit(f"not learnt, or with warnings: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
