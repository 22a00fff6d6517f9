"""A folder of broken recipes: each gets the messages in its first lines, and no others."""

import inspect
import re
import shlex
import sys
from pathlib import Path

import pytest
from refusals import refused
from written import changed

from sbkit.recipe import files
from sbkit.recipe.arguments import parse_overrides
from sbkit.recipe.check import check
from sbkit.recipe.load import load
from sbkit.recipe.source import Findings

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("without_cost")]

FOLDER = Path(__file__).parent / "broken"
FILES = sorted(path.name for path in FOLDER.glob("*.yaml"))


def head(name: str, what: str) -> list[str]:
    """The lines ``# what: ...`` of a recipe."""
    return re.findall(rf"^# {what}: (.*)$", (FOLDER / name).read_text(encoding="utf-8"), re.M)


@pytest.mark.parametrize("name", FILES)
def test_a_broken_recipe_gets_its_messages(name, monkeypatch):
    monkeypatch.chdir(FOLDER)
    given = parse_overrides(shlex.split(" ".join(head(name, "given"))))
    report = check(name, given)
    found = [str(finding).replace(name, "here") for finding in [*report.errors, *report.warnings]]
    assert found and found == head(name, "expect")


def test_a_recipe_that_is_not_there_is_an_error():
    (error,) = check("nowhere.yaml").errors
    assert str(error) == "nowhere.yaml: error: cannot be read: No such file or directory [no-file]"


@pytest.mark.parametrize("text, expected", [
    ("sizes:\n  " + 600 * "[" + 600 * "]", "nested too deeply"),
    ("sizes: 3\0", "special characters are not allowed"),
    ("%YAML 1.2\n---\nsizes: 3", "takes no directives"),
    ("language: français\n", "not UTF-8 text"),
])
def test_text_that_breaks_the_reader_is_one_error(tmp_path, text, expected):
    path = tmp_path / "recipe.yaml"
    path.write_bytes(text.encode("latin-1"))
    (error,) = check(path).errors
    assert expected in error.message and "\n" not in str(error)
    with refused("syntax"):
        load(path, {})


@pytest.mark.parametrize("recursion", [400, 30_000])
def test_how_deep_a_recipe_may_be_is_counted_whatever_python_allows(tmp_path, recursion):
    path = tmp_path / "recipe.yaml"
    for levels, expected in ((files.MAX_DEPTH - 1, []), (files.MAX_DEPTH, [2])):
        path.write_text(f"first: 1\nsizes: {levels * '['}{levels * ']'}")
        before = sys.getrecursionlimit()
        sys.setrecursionlimit(recursion + len(inspect.stack(0)))
        try:
            findings = Findings()
            files.read_file(path, findings)
        finally:
            sys.setrecursionlimit(before)
        assert [finding.line for finding in findings] == expected


@pytest.mark.parametrize(("written", "instead", "expected"), [
    (", !ref <ctc_lin>]", "]", [("not-owned", "ctc_lin")]),
    ("model: !new:torch.nn.ModuleList\n    - [", "model:\n    - [", [("no-module", "modules.model")]),
    ("!name:torch.optim.AdamW\n    lr: 0.001", "!new:functools.partial\n    - !name:torch.optim.AdamW", []),
], ids=["a layer that is left out", "a list under modules", "a partial that makes an optimizer later"])
def test_one_mistake_is_reported_once(tmp_path, written, instead, expected):
    report = check(changed(tmp_path, {written: instead}))
    assert [(f.code, f.key) for f in [*report.errors, *report.warnings]] == expected


def test_what_no_run_on_several_devices_can_do_stops_one_before_it_prepares(monkeypatch):
    monkeypatch.chdir(FOLDER)
    monkeypatch.setenv("WORLD_SIZE", "2")
    (found,) = check("optimizer_of_whole_parameters.yaml", {}).errors
    assert "Muon needs unsharded parameters" in str(found)
