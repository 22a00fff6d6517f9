"""The bench of replay: its lines."""

from __future__ import annotations

from tools.bench.replay import row

BEFORE = {"metric": "WER", "lower_is_better": True, "before": 8.1, "interval": [6.09, 10.22]}


def test_a_line_has_what_the_old_test_was_and_became_and_the_mean_that_saves_it():
    replayed = {"new": 20.0, "old": 9.0, "old_interval": [7.0, 11.0], "before": {**BEFORE, "share": None}}
    assert row("es", "`--replay 0.2`", replayed, replayed) == (
        "es", "`--replay 0.2`", "20.0 %", "8.1 % (6.1 to 10.2)", "9.0 % (7.0 to 11.0)", "")
    saved = {**replayed, "old": 40.0, "before": {**BEFORE, "share": 0.5, "old": 9.96, "new": 31.0}}
    assert row("es", "way", saved, replayed)[-1] == "0.5 of the new: new WER 31.0, old 10.0 %"
