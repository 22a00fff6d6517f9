"""A key that the task declares may be given on the command line, though no file of the recipe writes it."""


import pytest
from refusals import refused
from written import BASED, SMALL, changed, write

from sbkit.recipe import load
from sbkit.recipe.arguments import parse_overrides
from sbkit.recipe.check import check

pytestmark = pytest.mark.usefixtures("without_trials")

MINE = """
import dataclasses
from sbkit.recipe.keys import key
from sbkit.tasks.ctc import CTC
from sbkit.tasks.ctc.keys import CTCKeys


@dataclasses.dataclass(kw_only=True)
class Keys(CTCKeys):
    colour: int = key("of the task itself", 1)


class Mine(CTC):
    Keys = Keys
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A module with a task of one's own, which declares one key more."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mine_declares.py").write_text(MINE)
    return "!name:mine_declares.Mine"


def chained(folder, text=""):
    """A recipe that rests on one that rests on the small one."""
    (folder / "middle.yaml").write_text(f"{BASED}    seed: 2\n")
    path = folder / "recipe.yaml"
    path.write_text(f"recipe: !include:middle.yaml\n    n_mels: 40\n{text}")
    return path


def keys(path, folder, *words):
    given = {"output_folder": str(folder), **parse_overrides([*words])}
    return load.open_recipe(path, given).keys


@pytest.mark.parametrize("alone", [True, False])
def test_it_is_read_and_written_down_for_all_that_comes_after(alone, tmp_path):
    path, resolved = SMALL if alone else chained(tmp_path), tmp_path / "hyperparams.yaml"
    words = "--log_interval 3 --experiment loud --intermediate_layers [1]".split()
    resolved.write_text(load.merged(path, {"output_folder": str(tmp_path), **parse_overrides(words)}))
    for found in (keys(path, tmp_path, *words), keys(resolved, tmp_path)):
        assert (found.log_interval, found.experiment, list(found.intermediate_layers)) == (3, "loud", [1])


def test_a_whole_object_may_be_given_too(tmp_path):
    own = keys(SMALL, tmp_path, "--schedule", "!new:sbkit.train.schedule.Schedule {peak: 0.5, warmup: 3}")
    assert own.schedule.peak == 0.5


def test_the_check_says_what_the_run_would(tmp_path):
    path = chained(tmp_path)
    assert check(path, {"log_interval": 3}, run=False).errors == []
    assert [str(error) for error in check(path, {"log_interval": -3, "layer_decay": 2}, run=False).errors] == [
        "command line: error: log_interval: it is -3, and must be a number, 0 or more [setting]",
        "command line: error: layer_decay: it is 2, and must be a number above 0, up to 1 [setting]"]


def test_it_is_no_typo_of_one_that_is_written(tmp_path):
    """keep_everi is; of a recipe that writes one of the two ids the other is not."""
    base = changed(tmp_path, {"ctc_weight: 0.3": "ctc_weight: 1.0", "bos_index: 1\n": ""})
    base = base.rename(tmp_path / "base.yaml")
    path = write(tmp_path, "recipe: !include:base.yaml\n    bos_index: 1\n")
    assert check(path, run=False).errors == [] and check(base, {"bos_index": 1}, run=False).errors == []


def test_what_only_a_script_may_say_is_reported_in_a_recipe_of_a_task(tmp_path):
    """A task evaluates in shares whatever share_validation is."""
    found = check(chained(tmp_path, "share_validation: true\n"), run=False)
    assert [(warning.key, warning.message) for warning in found.warnings] == [
        ("share_validation", "this key has no effect: nothing reads it, and no reference names it")]


@pytest.mark.parametrize("words, expected", [
    ("--log_intervall 3", "has no key log_intervall; did you mean --log_interval?"),
    ("--schedule.peak 3", "has no key schedule; sbkit show prints its keys"),
    ("--share_validation true", "has no key share_validation; sbkit show prints its keys"),
    ("--colour 3", "has no key colour; sbkit show prints its keys"),
    ("--accum_gard 3", "has no key accum_gard; did you mean --batching.step_seconds? It is the audio of an "
                       "update, over all devices and micro-batches"),  # accum_grad elsewhere
    ("--skip_prep true", "has no key skip_prep; leave it out: what is prepared is found again"),
    ("--nproc_per_node 8", "has no key nproc_per_node; it is an option of torchrun: torchrun "
                             "--nproc_per_node=8 train.py RECIPE ..."),
])
def test_parts_of_it_and_what_nobody_declares_are_refused(words, expected, tmp_path):
    path, given = chained(tmp_path), parse_overrides(words.split())
    option = words.split()[0].partition(".")[0]
    with refused("unknown-override", key=option.removeprefix("--")):
        load.load(path, given)
    (found,) = check(path, given, run=False).errors
    assert (found.code, found.key) == ("unknown-override", option)
    assert f"{found.message}; {found.suggestion}" == f"{path} {expected}"


@pytest.mark.parametrize("brain", [None, "!name:sbkit.tasks.ctc.CTK", "!name:no_such_module.CTC", "CTC"])
def test_where_the_task_is_not_found_it_is_refused(brain, tmp_path):
    line = "" if brain is None else f"brain: {brain}\n"
    with refused("unknown-override"):
        load.load(changed(tmp_path, {"brain: !name:sbkit.tasks.ctc.CTC\n": line}), {"log_interval": 3})


@pytest.mark.slow
@pytest.mark.parametrize("where", ["file", "include", "command line"])
def test_the_task_is_the_one_that_wins(where, mine, tmp_path):
    path = chained(tmp_path, {"file": f"brain: {mine}\n", "include": f"    brain: {mine}\n"}.get(where, ""))
    words = ["--colour", "3", *(["--brain", mine] if where == "command line" else [])]
    assert keys(path, tmp_path, *words).colour == 3
    assert check(path, parse_overrides(words)).errors == []


def test_without_a_run_a_task_of_ones_own_is_not_imported(tmp_path, mine):
    (tmp_path / "mine_declares.py").write_text("raise SystemExit('it was imported')")
    path = chained(tmp_path, f"brain: {mine}\n")
    assert check(path, {"log_interval": 3}, run=False).errors == []
    assert [error.key for error in check(path, {"colour": 3}, run=False).errors] == ["--colour"]


@pytest.mark.parametrize("words, expected", [
    ("--spec_augment none", "spec_augment: it is the text 'none', and must be an object or null; write null [setting]"),
    ("--normalize false", "normalize: it is False, and must be an object or null; write null [setting]"),
    ("--CNN None", "CNN: 'None' is a text, not null; write null [null-as-text]"),
    ("--tokenizer none", "tokenizer: it is the text 'none', and must be an object; write !new: and its class "
                         "[setting]"),
    ("--spec_augment null", ""), ("--fsdp true", ""), ("--spec_augment !new:torch.nn.Identity", "")])
def test_a_text_for_an_object_is_reported_without_building_anything(words, expected):
    report = check(SMALL, parse_overrides(words.split()), run=False)
    found = [str(each) for each in report.findings if each.key == words.split()[0][2:]]
    severity = "warning" if "a text, not null" in expected else "error"
    assert found == ([f"command line: {severity}: {expected}"] if expected else [])
