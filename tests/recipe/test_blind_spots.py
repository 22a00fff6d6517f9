"""``check --no-run`` imports, builds and calls nothing of a recipe's own, and says what it didn't see."""

import json
import sys

import pytest
from written import SMALL, changed, write

from sbkit import cli
from sbkit.recipe.check import check
from sbkit.recipe.reading import PACKAGES, without_imports_from
from sbkit.recipe.signatures import ForbiddenImport, locate

HOSTILE = """
ran: {ran}
a: !new:traps.Model
    size: !new:torch.nn.Linear {{in_features: 3, out_feature: 4}}
b: !name:traps.Brain
c: !module:traps
d: !apply:os.system ["touch {ran}"]
e: !apply:torch.os.system ["touch {ran}"]
f: !new:speechbrain.utils.logger.os.system
g: !name:sbkit.cli.sys.modules
h: !applyref:traps.make
i: !apply:torch.hub.load ["{folder}", "model"]
j: !!python/object/apply:os.system ["touch {ran}"]
k: !new:torch.utils.data.DataLoader
    dataset: !apply:traps.make []
l: !name:sbkit.__main__.main
m: !ref <a.weight>
brain: !name:traps.Brain
modules: {{model: !ref <a>}}
"""


@pytest.fixture
def hostile(tmp_path, monkeypatch):
    """A recipe that does its worst, with a module beside it that leaves a file where it is imported."""
    ran = tmp_path / "ran"
    (tmp_path / "traps.py").write_text(f"open({str(ran)!r}, 'w').close()\n"
                                       "class Model: pass\nclass Brain: pass\ndef make(): return 1\n")
    (tmp_path / "hubconf.py").write_text((tmp_path / "traps.py").read_text())
    path = write(tmp_path, HOSTILE.format(ran=ran, folder=tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), "", *sys.path])
    yield path
    assert not ran.exists()
    assert "traps" not in sys.modules


def test_nothing_of_a_hostile_recipe_runs_and_each_line_of_it_is_named(hostile):
    report = check(hostile, run=False)
    seen = {int(note.split(":")[1]): note for note in report.notes if note.startswith("recipe.yaml:")}
    lines = HOSTILE.splitlines()
    wanted = {i for i, line in enumerate(lines, 1) if line.startswith(tuple(f"{key}:" for key in "abcdefghijm"))
              or "!apply" in line or "sbkit.__main__" in line or line.startswith("brain")}
    assert set(seen) == wanted
    assert seen[3] == ("recipe.yaml:3: a: !new:traps.Model: it is not in speechbrain, torch or sbkit, so it is not "
                       "imported")
    assert seen[12].endswith("i: !apply:torch.hub.load is called when the recipe is loaded")
    assert seen[17].endswith("m: an attribute of an object that is not built")
    assert "nothing is built with --no-run" in report.notes[-1]
    found = [(error.line, error.code) for error in report.errors]
    assert set(found) == {(0, "missing-key"), (4, "unknown-argument")}


def test_what_can_be_seen_decides_the_exit_code(hostile, capsys):
    assert cli.main(["check", str(hostile), "--no-run"]) == 1
    assert "out_feature" in capsys.readouterr().err
    hostile.write_text(hostile.read_text().replace("out_feature:", "out_features:"))
    assert cli.main(["check", str(hostile), "--no-run"]) == 1, "keys that a run needs are lacking"
    text = SMALL.read_text().replace("brain: !name:sbkit.tasks.ctc.CTC", "brain: !name:traps.Brain")
    hostile.write_text(text.replace("!new:torch.nn.ModuleList", "!new:traps.Model"))
    capsys.readouterr()
    assert cli.main(["check", str(hostile), "--no-run", "--json"]) == 0
    assert "recipe.yaml:" in json.loads(capsys.readouterr().out)["not_checked"][0]
    assert cli.main(["check", str(hostile), "--no-run"]) == 0
    assert "nothing wrong in what can be seen without running it" in capsys.readouterr().out


def test_a_tag_on_a_whole_file_is_left_alone_and_its_keys_are_looked_at(hostile):
    hostile.write_text("!new:traps.Model\na: !new:torch.nn.Linear {in_features: 3, out_feature: 4}\n")
    report = check(hostile, run=False)
    assert [error.line for error in report.errors] == [2] and "!new:traps.Model" in report.notes[0]


def test_mistakes_in_a_recipe_are_found_as_ever(tmp_path):
    assert (clean := check(SMALL, run=False)).errors == [] and clean.built is False
    path = changed(tmp_path, {"torch.optim.AdamW": "torch.optim.AdamWW"})
    (error,) = check(path, run=False).errors
    assert "did you mean torch.optim.AdamW" in str(error)
    assert {str(e) for e in check(path).errors} >= {str(error)}


@pytest.mark.parametrize("name", [
    "os.system", "torch.os.system", "torch.nn.functional.math.sqrt", "speechbrain.core.sys.exit", "sbkit.cli.os.system",
    "sbkit.__main__", "torch.Tensor.__class__", "torch.utils.data.dataloader.os", "sbkit.cli.main.__globals__",
])
def test_no_way_leads_through_a_package_to_what_is_not_its_own(name):
    with pytest.raises(ForbiddenImport):
        locate(name, PACKAGES)


@pytest.mark.parametrize("name", [
    "torch.optim.AdamW", "torch.nn.functional.conv2d", "torch.float32", "sbkit.tasks.ctc.CTC",
    "speechbrain.nnet.linear.Linear", "torch.nn", "torch.tanh",
])
def test_what_is_its_own_is_found(name):
    assert locate(name, PACKAGES) is locate(name)


def test_a_missing_package_is_not_taken_from_the_folder(tmp_path, monkeypatch):
    (tmp_path / "lacking_package.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    with without_imports_from(tmp_path), pytest.raises(ModuleNotFoundError):
        __import__("lacking_package")
    assert sys.path[0] == ""
