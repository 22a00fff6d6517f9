"""sbkit check on the command line: exit codes, streams, JSON."""

import json
from pathlib import Path

import pytest

from sbkit import cli
from sbkit.recipe.report import JSON_FORMAT, Finding, Report

SMALL = Path(__file__).parents[1] / "recipe" / "small.yaml"
BROKEN = Path(__file__).parents[1] / "recipe" / "broken"


@pytest.mark.slow
def test_a_good_recipe_is_told_on_stdout(capsys):
    assert cli.main(["check", str(SMALL)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert [line for line in out.splitlines() if line and line[0] != " "][:3] == ["Modules", "Shapes", "Cost"]
    assert out.splitlines()[-1].startswith(f"{SMALL}: nothing wrong (")


def test_mistakes_go_to_stderr_with_exit_code_1(capsys):
    words = ["--d_modl", "8", "--ctc_lin.input_size=3", "--prise", "2.5", "--at", "8xH100"]
    assert cli.main(["check", str(SMALL), *words]) == 1
    out, err = capsys.readouterr()
    lines = err.strip().splitlines()
    assert out == "", "tables would be those of another recipe"
    known = f"{SMALL} has no key"
    assert lines[:3] == [
        f"command line: error: --d_modl: {known} d_modl; did you mean --d_model? [unknown-override]",
        f"command line: error: --prise: {known} prise; did you mean --price? [unknown-override]",
        f"command line: error: --at: {known} at; did you mean --as? [unknown-override]"]
    assert lines[3].startswith("command line: error: ctc_lin.input_size: ") and lines[3].endswith(" [shape-mismatch]")
    assert lines[-1].startswith(f"{SMALL}: 4 errors (")


@pytest.mark.slow
def test_run_options_that_cannot_be_are_told(capsys):
    words = ["--max_grad_norm", "-1", "--grad_accumulation_factor", "0", "--nonfinite_patience", "0", "--d_model", "8",
             "--precision", "bf17", "--eval_precision", "8"]
    assert cli.main(["check", str(SMALL), *words]) == 1
    lines = capsys.readouterr().err.strip().splitlines()
    assert [line.rpartition(" [")[0] for line in lines[:4]] == [
        "command line: error: --eval_precision: there is no precision '8'; use auto, fp32, fp16, bf16",
        "command line: error: --grad_accumulation_factor: it is 0, and must be 1 or more",
        "command line: error: --precision: there is no precision 'bf17'; did you mean bf16?",
        "command line: warning: --max_grad_norm: it is -1.0, so no gradient would be clipped; write 0 if that is meant"]
    assert len(lines) == 6 and lines[-1].startswith(f"{SMALL}: 3 errors and 1 warning (")


@pytest.mark.parametrize("words, said", [
    ("", "no recipe given"), (f"{SMALL} --no-run --measure", "[conflicting-options]"),
    (f"{SMALL} --price cheap", "'cheap' is not the price"), (f"{SMALL} --price -1", "'-1' is not the price"),
    (f"{SMALL} --price nan", "'nan' is not the price"), (f"{SMALL} --price 1 --no-run", "[conflicting-options]"),
    (f"{SMALL} --as 8xABC", "known are"), (f"{SMALL} --html page.html", "[missing-option]"),
    (f"{SMALL} --as H100 --json --no-run", "[conflicting-options]"),
    (f"{SMALL} --as H100 --html /dev/null/page.html", "cannot write /dev/null/page.html: "),
    (f"{SMALL} --as H100 --html /", "/ is a folder; name a file with --html")])
def test_a_mistake_in_the_words_is_exit_code_2_at_once(words, said, capsys):
    assert cli.main(["check", *words.split()]) == 2
    assert said in capsys.readouterr().err


def test_json_is_for_programs(capsys):
    assert cli.main(["check", str(BROKEN / "unknown_argument.yaml"), "--json"]) == 1
    out, err = capsys.readouterr()
    assert err == ""
    report = json.loads(out)
    assert sorted(report) == ["errors", "format", "ignored", "not_checked", "ok", "recipe", "seconds", "sections",
                              "warnings"]
    assert report["format"] == JSON_FORMAT and report["ok"] is False and report["warnings"] == []
    assert report["errors"] == [{
        "severity": "error", "code": "unknown-argument", "file": str(BROKEN / "unknown_argument.yaml"), "line": 4,
        "key": "CNN.num_bloks", "message": "ConvolutionFrontEnd has no argument num_bloks",
        "suggestion": "did you mean num_blocks?", "column": 5}]


def test_findings_are_sorted_and_told_once():
    one, two = (Finding("error", "x", "a.yaml", line, "k", "m") for line in (9, 2))
    report = Report("a.yaml")
    report.add([one, two, one])
    report.add([two])
    assert report.errors == [two, one] and report.warnings == []
    assert str(one) == "a.yaml:9: error: k: m [x]"
