"""A golden run is the same twice, and what differs from it is named."""

import json
import os
import runpy
import sys

import processes
import pytest

from tools import golden

pytestmark = pytest.mark.long


def program(folder, *words):
    """``python WORDS`` in a folder, with its imports done."""
    os.chdir(folder)
    sys.argv[:] = words
    runpy.run_path(words[0], run_name="__main__")


def test_a_run_equals_itself_and_another_step_and_weight_are_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(golden.Place, "run", lambda place, *words: processes.program(
        program, str(place.folder), *words, **golden.ENVIRONMENT))
    recorded = tmp_path / "golden.json"
    assert golden.main(["record", str(recorded), "script"]) == 0
    assert golden.main(["compare", str(recorded)]) == 0
    assert capsys.readouterr().out == "script: equal\n"
    found = json.loads(recorded.read_text())
    figures = found["scenarios"]["script"]
    steps = [label for label in figures if label.startswith("step: ") and label.endswith(" loss")]
    weights = [label for label in figures if label.startswith("weights: model.ckpt: ")]
    assert len(steps) == 6 and len(weights) == 4
    before = figures[steps[2]]
    monkeypatch.setitem(golden.SCENARIOS, "script", lambda place, figures=dict(figures): figures)
    figures.update({steps[2]: before + 1e-15, steps[4]: 0.0})
    del figures[weights[1]]
    recorded.write_text(json.dumps(found))
    assert golden.main(["compare", str(recorded), "script"]) == 1
    step, weight = capsys.readouterr().out.splitlines()
    assert step.startswith(f"script: {steps[2]} is {before}, and was ") and "(so 2 of " in step
    assert weight.startswith(f"script: {weights[1]} is float32 [") and weight.endswith(", and was nothing")


def test_a_command_that_fails_is_a_difference(tmp_path, capsys):
    (tmp_path / "sbkit").mkdir()
    (tmp_path / "sbkit" / "__init__.py").write_text("raise ImportError('not today')")
    assert golden.main(["record", str(tmp_path / "golden.json"), "fp32", "--tree", str(tmp_path)]) == 1
    assert "not today" in capsys.readouterr().err
