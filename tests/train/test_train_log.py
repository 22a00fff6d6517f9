"""The lines of train_log.txt, which people read and compare."""

import pytest

from sbkit.train.train_log import TrainLog


@pytest.mark.parametrize("rate, shown", [
    (102.5974, "102.60"), (100.0, "100.00"), (96.1039, "96.10"), (1.0, "1.00"), (1234.5, "1234.50"),
    (1.5e6, "1.50e+06"), (0.00131, "1.31e-03"), (103, "103"), (float("inf"), "inf")])
def test_a_rate_above_100_is_written_as_one_below(tmp_path, rate, shown):
    log = TrainLog(tmp_path / "train_log.txt")
    log.log_stats({"epoch": 1}, valid_stats={"WER": rate})
    assert (tmp_path / "train_log.txt").read_text() == f"epoch: 1 - valid WER: {shown}\n"
