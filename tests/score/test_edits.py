"""Counts and alignments equal SpeechBrain's for any two sequences, also where shortest alignments differ."""

from __future__ import annotations

import itertools
import random

from speechbrain.utils.edit_distance import alignment, count_ops, op_table

from sbkit.score import edits
from sbkit.score.edits import align, count


def speechbrain(reference, hypothesis):
    table = op_table(reference, hypothesis)
    ops = count_ops(table)
    way = "".join(step for step, _, _ in alignment(table))
    return way, (ops["insertions"], ops["deletions"], ops["substitutions"])


def check(references, hypotheses):
    counts = zip(*(column.tolist() for column in count(references, hypotheses)), strict=True)
    ours = list(zip(align(references, hypotheses), counts, strict=True))
    assert ours == [speechbrain(*pair) for pair in zip(references, hypotheses, strict=True)]


def test_equal_speechbrain_on_every_short_pair():
    short = ["".join(letters) for size in range(5) for letters in itertools.product("ab", repeat=size)]
    pairs = list(itertools.product(short, short))
    check([reference for reference, _ in pairs], [hypothesis for _, hypothesis in pairs])
    for pair in (([], []), (["a"], []), ([], ["a", "b"])):
        check([pair[0]], [pair[1]])


def test_equal_speechbrain_on_long_sequences_in_several_groups(monkeypatch):
    monkeypatch.setattr(edits, "CELLS", 5000)
    rng = random.Random(3)
    pairs = [[[rng.choice("abcd") for _ in range(rng.randrange(40))] for _ in "rh"] for _ in range(60)]
    check([reference for reference, _ in pairs], [hypothesis for _, hypothesis in pairs])
