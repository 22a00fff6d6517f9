"""EER of hparams/speaker.yaml, and of SpeechBrain's VoxCeleb recipe after the same seconds of training, alternating.

    python -m tools.bench.speaker --out FOLDER [--seeds 1,2] [--channels 160,1024] [--key value ...]

sbkit trains its unchanged recipe, on the demo corpus unless --data_folder names another. Then SpeechBrain's recipe
(peers/stock_speaker.py) trains on the same recordings for the seconds that sbkit's epochs took, with its own 1,024
channels and with sbkit's 160, which makes more updates in that time. Both have one thread, and are tested on all pairs
of the same recordings, of speakers that are not in training. Other keys go to sbkit's recipe.

Each result is a file in FOLDER/results, so the same command continues where it was stopped.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from sbkit.system.console import table
from tools.bench.harness import ROOT, Results, as_words, call, parse_checked, read_lines

RECIPE = ROOT / "hparams" / "speaker.yaml"
THREADS = 1
OWN = ("seed", "output_folder")


def sbkit(out: Path, seed: int, keys: list[str]) -> dict[str, Any]:
    """Train sbkit's recipe; returns what it reached, and in which time."""
    name = f"sbkit-seed{seed}"
    run = out / name
    call(name, [sys.executable, "-m", "sbkit", "train", RECIPE, "--noprogressbar", "--no-check",
                *as_words({"seed": seed, "output_folder": run}), *keys], out / f"{name}.log", THREADS)
    stats = json.loads((run / "test_results.json").read_text(encoding="utf-8"))["stats"]
    lines = read_lines(run / "metrics.jsonl")
    epochs = [line for line in lines if line["kind"] == "epoch" and "train_seconds" in line]
    return {"EER": stats["EER"], "minDCF": stats["minDCF"], "seconds": sum(each["train_seconds"] for each in epochs),
            "steps": epochs[-1]["step"], "parameters": next(line for line in lines if line["kind"] == "run")[
                "parameters"]}


def stock(out: Path, seed: int, channels: int, seconds: float) -> dict[str, Any]:
    """Train SpeechBrain's recipe on sbkit's manifests for this many seconds."""
    name = f"stock{channels}-seed{seed}"
    answer, manifests = out / f"{name}.answer.json", out / f"sbkit-seed{seed}" / "manifests"
    call(name, [sys.executable, "-m", "tools.bench.peers.stock_speaker", answer, manifests, *as_words(
        {"seconds": seconds, "channels": channels, "seed": seed})], out / f"{name}.log", THREADS)
    found: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
    return found


def shown(found: dict[str, dict[str, Any]]) -> str:
    """Make the table of all results."""
    return table(["run", "EER %", "minDCF", "seconds", "updates", "parameters"], [
        [name, f"{each['EER']:.2f}", f"{each['minDCF']:.3f}", f"{each['seconds']:.0f}", each["steps"],
         f"{each['parameters'] / 1e6:.1f} M"] for name, each in found.items()])


def parse() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None, allow_abbrev=False)
    parser.add_argument("--out", type=Path, required=True, help="folder of runs and results")
    parser.add_argument("--seeds", default="1,2")
    parser.add_argument("--channels", default="160,1024", help="of SpeechBrain's model, a run for each")
    return parse_checked(parser, RECIPE, OWN)


def main() -> None:
    args, keys = parse()
    results = Results(args.out.absolute() / "results", {"keys": keys, "threads": THREADS})
    results.folder.mkdir(parents=True, exist_ok=True)
    out, found = args.out.absolute(), {}
    for seed in map(int, args.seeds.split(",")):
        name = f"sbkit-seed{seed}"
        mine = found[name] = results.get(name) or results.put(name, sbkit(out, seed, keys))
        for channels in map(int, args.channels.split(",")):
            name = f"stock{channels}-seed{seed}"
            found[name] = results.get(name) or results.put(name, stock(out, seed, channels, mine["seconds"]))
    print(shown(found))


if __name__ == "__main__":
    main()
