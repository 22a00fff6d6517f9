"""What a run will take and cost: the seconds of its steps with an interval, for all devices."""

import json
from pathlib import Path

import pytest
import run_folders
from trained_runs import here

from sbkit import cli
from sbkit.recipe import price
from sbkit.recipe.price import PriceRequest
from sbkit.recipe.speed import flops

ROOT = Path(__file__).parents[2]


def test_cost_and_energy_are_of_all_devices():
    """9,000 steps of 4 s are 10 hours; evaluations of a tenth of the audio take one more."""
    request = PriceRequest(2.5, 8, "Card", watts={"Card": 700})
    table = price.section(request, "Card", 9000, 4.0, 12.0, 10800.0, False)
    assert table.rows == [
        ["time of training, 9,000 steps of 4 s", "10 h", "3.3 h", "30 h"],
        ["time of validations and the test", "60 min", "20 min", "3 h"],
        ["time of the run", "11 h", "3.7 h", "33 h"],
        ["cost of 8 devices at 2.5 an hour each", "220.0", "73.3", "660.0"],
        ["kWh at most, at 700 W per device", "61.6", "20.5", "184.8"]]
    assert table.values["cost"] == 220.0 and table.values["kwh_at_most"] == pytest.approx(61.6)
    assert table.remarks[0].startswith("an estimate for Card:") and table.remarks[0].endswith("a factor of 3")


def test_measured_steps_are_closer_and_a_cpu_has_no_known_power():
    table = price.section(PriceRequest(2.5), "Some CPU", 26, 0.005, 2.74, 0.0, True)
    assert [row[1] for row in table.rows] == ["0.13 s", "0 s", "0.13 s", "under 0.01"]
    assert table.values["high"] == pytest.approx(1.5 * table.values["hours"]) and table.values["kwh_at_most"] is None
    assert "scaled to the 2.74 s of audio that a step of this run has" in table.remarks[0]
    assert price.section(PriceRequest(0.0), "Some CPU", 26, 1.0, 2.74, 1.0, True).rows[-1][1:] == ["0", "0", "0"]


@pytest.mark.long
@pytest.mark.slow
def test_a_check_predicts_the_very_run_that_follows(tmp_path, capsys, monkeypatch):
    run_folders.corpus(tmp_path / "data", 3.0, train=8, dev=2, test=2)
    words = [str(ROOT / "hparams" / "ctc.yaml"), "--d_model", "16", "--nhead", "2", "--num_encoder_layers", "1",
             "--d_ffn", "16", "--min_steps", "0", "--number_of_epochs", "2", "--num_workers", "0",
             "--max_batch_seconds", "40", "--step_seconds", "40", "--nonspeech", "null",
             "--data_folder", str(tmp_path / "data"), "--output_folder", str(tmp_path / "out"), "--device", "cpu"]
    assert cli.main(["prepare", *words]) == 0
    capsys.readouterr()
    assert cli.main(["check", *words, "--price", "2.5", "--json"]) == 0
    sections = json.loads(capsys.readouterr().out)["sections"]
    assert not [row for row in sections["cost"]["rows"] if row[0].startswith("hours")], "they are the price's"
    values = sections["price"]["values"]
    assert values["cost"] == 2.5 * values["hours"] and values["kwh_at_most"] is None and not values["measured"]
    monkeypatch.setenv("COUNT_FLOPS", "1")
    said = here("train", *words[:-2], "--no-check")
    per_second = flops(sections["cost"]["values"]["operations_per_second_of_audio"])
    assert f"training takes {per_second} per second of audio" in said
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [line for line in lines if line["kind"] == "epoch"][-1]["step"] == values["steps"]
