"""Warnings of a check can be ignored by their codes, errors can't."""

import json

import pytest
from refusals import refused
from written import BASED, SMALL, write

from sbkit import cli
from sbkit.recipe import arguments, ignoring
from sbkit.recipe.check import check
from sbkit.runs import training

#: Two warnings: a key that nothing reads, and an utterance that may be longer than a batch.
WARNED = f"""{BASED}    batching:
        max_batch_seconds: 40
    corpus:
        max_duration: 60
keep_checkpoint: 5
"""
CODES = ["batch", "unread-key"]


@pytest.fixture
def warned(tmp_path):
    return write(tmp_path, WARNED)


def codes(findings):
    return sorted(finding.code for finding in findings)


def test_warnings_with_an_ignored_code_are_counted_instead_of_listed(warned):
    plain = check(warned, run=False)
    assert codes(plain.warnings) == ["unread-key"] and " ignored (" not in plain.verdict()
    report = check(warned, run=False, ignore=["unread-key", "padding"])
    assert not report.warnings and not report.errors
    assert report.problems() == "" and ", 1 warning ignored (unread-key) (" in report.verdict()
    assert json.loads(report.json())["ignored"] == 1 and json.loads(plain.json())["ignored"] == 0


@pytest.mark.slow
@pytest.mark.usefixtures("without_trials")
def test_the_recipe_and_the_command_line_can_ignore_different_codes(tmp_path):
    path = write(tmp_path, f"{WARNED}ignore_findings: [batch]\n")
    assert codes(check(path).warnings) == ["unread-key"]
    report = check(path, ignore=["unread-key"])
    assert codes(report.ignored) == CODES and not report.warnings
    assert "2 warnings ignored (batch, unread-key)" in report.verdict()


@pytest.mark.slow
@pytest.mark.usefixtures("without_trials")
def test_the_check_of_a_run_that_starts_ignores_what_the_recipe_ignores(tmp_path, capsys):
    path = write(tmp_path, f"{WARNED}ignore_findings: [unread-key]\n")
    training.before_run(arguments.parse([str(path), "--output_folder", str(tmp_path / "run")]))
    said = capsys.readouterr().err
    assert "[batch]" in said and "[unread-key]" not in said and "1 warning ignored (unread-key)" in said


def test_the_key_is_read_though_no_other_key_names_it(tmp_path):
    path = write(tmp_path, f"{BASED}ignore_findings: [padding]\n")
    assert not check(path, run=False).findings


def test_an_error_stays_and_says_that_it_cannot_be_ignored(tmp_path):
    path = write(tmp_path, f"{BASED}    ctc_weight: 5\nignore_findings: [setting]\n")
    report = check(path, run=False)
    assert [(error.code, error.line, error.key) for error in report.errors] == [
        ("setting", 2, "ctc_weight"), ("cannot-ignore-error", 3, "ignore_findings")]
    from_command_line = check(path, {"ignore_findings": []}, run=False, ignore=["setting", "setting"])
    assert [(error.code, error.key) for error in from_command_line.errors] == [
        ("setting", "ctc_weight"), ("cannot-ignore-error", "--ignore")]


@pytest.mark.parametrize(("value", "line", "code"), [
    ("[unread-kye]", 2, "unknown-code"), ("[unread-key, 3]", 2, "setting"), ("unread-key", 2, "setting")])
def test_a_key_that_names_no_code_is_an_error(tmp_path, value, line, code):
    path = write(tmp_path, f"{BASED}ignore_findings: {value}\n")
    (error,) = check(path, run=False).errors
    assert (error.code, error.line) == (code, line) and error.key.startswith("ignore_findings")


def test_a_misspelt_code_in_the_recipe_gets_the_nearest(tmp_path):
    path = write(tmp_path, f"{BASED}ignore_findings: [unread-kye]\n")
    (error,) = check(path, run=False).errors
    assert "unread-key" in error.suggestion


def test_codes_are_repeated_or_separated_by_commas():
    assert ignoring.on_command_line(["batch, [padding]", "unread-key"]) == ["batch", "padding", "unread-key"]
    with refused("unknown-code", key="ignore", value="unread-kye"):
        ignoring.on_command_line(["batch,unread-kye"])


def test_the_command_takes_codes(warned, capsys):
    words = ["check", str(warned), "--no-run", "--ignore", "batch,padding", "--ignore", "unread-key"]
    assert cli.main(words) == 0
    out, err = capsys.readouterr()
    assert "1 warning ignored (unread-key)" in out and not err
    assert cli.main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ignored"] == 1


def test_the_command_refuses_a_code_that_does_not_exist(capsys):
    assert cli.main(["check", str(SMALL), "--no-run", "--ignore", "unread-kye"]) == 2
    said = capsys.readouterr().err
    assert "did you mean unread-key?" in said and "[unknown-code]" in said


def test_the_command_ends_with_1_for_an_error_that_should_be_ignored(warned, capsys):
    assert cli.main(["check", str(warned), "--no-run", "--ctc_weight", "5", "--ignore", "setting"]) == 1
    assert "[cannot-ignore-error]" in capsys.readouterr().err
