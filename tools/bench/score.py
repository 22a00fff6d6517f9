"""Speed of error rates: sbkit and SpeechBrain's ErrorRateStats, alternating in the same run.

    python -m tools.bench.score
    python -m tools.bench.score --utterances 2000 --rounds 3

Both score the same utterances, of 3 to 12 and of 5 to 35 words, with about 10 % and about 14 % of the words wrong: by
word, and a fifth of them, once, by character. Given as `texts`, SpeechBrain's side splits them first, as recipes do;
given as `lists`, both get lists of words. Measured are `append` and `summarize` and sbkit's `add` and `summary`, whose
results must be equal. Each round makes new texts, so that neither side can reuse earlier results.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

from speechbrain.utils.metric_stats import ErrorRateStats

from sbkit.score.rates import ErrorRates
from sbkit.system.console import table

LENGTHS = ((3, 12), (5, 35))  # words
#: Shares of wrong words; each utterance has one of these.
DIFFICULTIES = ((0, 0, 0.05, 0.15, 0.3), (0, 0.1, 0.15, 0.2, 0.25))


def utterances(count: int, words: tuple[int, int], difficulties: Sequence[float], rng: random.Random,
               ) -> list[tuple[list[str], list[str]]]:
    """Draw pairs of reference and transcript, with a few frequent words and many rare ones."""
    sizes = rng.choices([2, 3, 3, 4, 4, 5, 6, 7, 8, 10], k=5000)
    vocabulary = ["".join(rng.choices("etaoinshrdlu", k=size)) for size in sizes]
    weights = list(itertools.accumulate(1 / (rank + 2) for rank in range(len(vocabulary))))
    pairs = []
    for _ in range(count):
        reference = rng.choices(vocabulary, cum_weights=weights, k=rng.randint(*words))
        difficulty = rng.choice(difficulties)
        transcript = []
        for word in reference:
            fate = rng.random()
            if fate >= difficulty:
                transcript.append(word)
            elif fate < 0.7 * difficulty:
                transcript += rng.choices(vocabulary, cum_weights=weights)
            elif fate < 0.85 * difficulty:
                transcript += [word, *rng.choices(vocabulary, cum_weights=weights)]
        pairs.append((reference, transcript))
    return pairs


def timed(make: Callable[[], Any], work: Callable[[Any], dict[str, Any]]) -> tuple[float, dict[str, Any]]:
    """Measure ``work`` in seconds of the processor, without making and freeing its data; returns its summary too."""
    data = make()
    gc.collect()
    gc.disable()  # what else lives in the process isn't looked through within the time
    try:
        began = time.process_time()  # other processes change it little
        summary = work(data)
        return time.process_time() - began, summary
    finally:
        gc.enable()


def race(pairs: list[tuple[list[str], list[str]]], unit: str, form: str, rounds: int) -> dict[str, Any]:
    names = [f"utterance {i}" for i in range(len(pairs))]

    def made() -> list[list[Any]]:
        texts = [[" ".join(words) for words in side] for side in zip(*pairs, strict=True)]
        return texts if form == "texts" else [[text.split(" ") for text in side] for side in texts]

    kept = []  # so that nothing is freed while the other side is timed

    def speechbrain(sides: list[list[Any]]) -> dict[str, Any]:
        if form == "texts":
            sides = [[text.split(" ") if text else [] for text in side] for side in sides]
        rates = ErrorRateStats(split_tokens=unit == "character")
        kept.append(rates)
        rates.append(names, sides[1], sides[0])
        return rates.summarize()

    def sbkit(sides: list[list[Any]]) -> dict[str, Any]:
        rates = ErrorRates(unit)
        kept.append(rates)
        rates.add(names, *sides)
        return rates.summary()

    times: dict[str, list[float]] = {"SpeechBrain": [], "sbkit": []}
    for _ in range(rounds):
        theirs, expected = timed(made, speechbrain)
        ours, summary = timed(made, sbkit)
        if summary != expected:
            raise SystemExit(f"the results differ: sbkit's are {summary}, SpeechBrain's {expected}")
        times["SpeechBrain"].append(theirs)
        times["sbkit"].append(ours)
        kept.clear()
    theirs, ours = map(min, times.values())  # what disturbs a round only makes it longer
    wrong = summary["num_erroneous_sents"] / len(pairs)
    return {"error rate %": summary["WER"], "utterances with errors %": 100 * wrong, "SpeechBrain ms": 1000 * theirs,
            "sbkit ms": 1000 * ours, "ratio": f"{theirs / ours:.0f}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--utterances", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--units", nargs="+", choices=("word", "character"), default=("word", "character"))
    args = parser.parse_args()
    race(utterances(50, LENGTHS[0], DIFFICULTIES[0], random.Random(0)), "word", "texts", 1)  # warms up
    rows = []
    for unit in args.units:
        for words in LENGTHS:
            for difficulties in DIFFICULTIES:
                pairs = utterances(args.utterances, words, difficulties, random.Random(1))
                for form in ("texts", "lists"):
                    # SpeechBrain takes some thirty times as long by character: a fifth of them, once, is enough.
                    found = race(pairs if unit == "word" else pairs[:len(pairs) // 5], unit, form,
                                 args.rounds if unit == "word" else 1)
                    rows.append({"unit": unit, "words": f"{words[0]} to {words[1]}", "given as": form, **found})
    print(table(list(rows[0]), [list(row.values()) for row in rows]))


if __name__ == "__main__":
    main()
