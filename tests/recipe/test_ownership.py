"""Tensors are found wherever a recipe holds them, and each is reported with the key that built it."""

import functools

import pytest
import torch
from torch import nn
from written import write

from sbkit.recipe.build import build
from sbkit.recipe.check import check
from sbkit.recipe.ownership import Owned, check_modules, check_ownership, check_saved, left_behind, tensors
from sbkit.recipe.resolve import resolve
from sbkit.recipe.source import Findings


class Holder:
    """Something of a user's that isn't a module."""

    def __init__(self, held):
        self.inner = {"list": [held]}


class Slotted:
    __slots__ = ("held",)

    def __init__(self, held):
        self.held = held


def closure(held):
    return lambda x: held(x)


class Method:
    def __init__(self, held):
        self.held = held

    def call(self, x):
        return self.held(x)


def method(held):
    return Method(held).call


class Stays(nn.Module):
    """Its table is an attribute, no buffer."""

    def __init__(self):
        super().__init__()
        self.table = torch.zeros(3)
        self.number = torch.zeros(())


class Moves(Stays):
    """Moves its table itself."""

    def _apply(self, fn, recurse=True):
        self.table = fn(self.table)
        return super()._apply(fn, recurse)


class Tied(nn.Module):
    """Holds another layer's weight under a name of its own."""

    def __init__(self, other):
        super().__init__()
        self.weight = other.weight


class Within(nn.Module):
    """Holds another layer as torch does, or, so that it isn't trained, in a list beside one like it."""

    def __init__(self, inner, hidden=None):
        super().__init__()
        self.inner, self.hidden = inner, [hidden]


HERE = "test_ownership"
OWNED = "owned: !new:torch.nn.Linear [3, 5]\n"
HEAD = f"layer: !new:torch.nn.Linear [8, 20]\n{OWNED}"
TAIL = "modules:\n    owned: !ref <owned>\n"


def look(tmp_path, text, what=check_ownership):
    path = write(tmp_path, text)
    findings = Findings()
    root = resolve(path, {}, findings).root
    with build(root, findings) as built:
        owned = Owned(check_modules(built, findings))
        what(built, owned, findings)
        left = []
        if what is check_ownership:
            nn.ModuleDict(owned.roots).to("meta")
            left = [t.path for t in left_behind(built, owned)]
    return findings, left


@pytest.mark.parametrize("holder", [
    f"!new:{HERE}.Holder\n    held: !ref <layer>", f"!new:{HERE}.Slotted [!ref <layer>]",
    f"!apply:{HERE}.closure [!ref <layer>]", f"!apply:{HERE}.method [!ref <layer>]",
    "!name:builtins.max\n    key: !ref <layer>", "!new:functools.partial\n    - !name:builtins.max\n    - !ref <layer>",
    "{a: [!ref <layer>]}", "!new:collections.OrderedDict {a: !ref <layer>}"])
def test_a_layer_is_found_however_it_is_held(tmp_path, holder):
    """No object has a key that begins with two underscores, so only the holder leads to this one."""
    findings, _ = look(tmp_path, f"{HEAD}search: {holder}\n".replace("layer", "__layer") + TAIL)
    assert [(f.key, f.line, f.severity) for f in findings] == [("__layer", 1, "error")]
    assert "Linear with 180 parameters" in findings[0].message
    assert findings[0].suggestion == "write `__layer: !ref <__layer>` under modules"


def test_a_layer_beside_one_like_it_is_no_pattern_that_was_copied(tmp_path):
    text = f"layer: !new:torch.nn.Linear [3, 5]\nwithin: !new:{HERE}.Within [!ref <owned>, !ref <layer>]\n"
    findings, _ = look(tmp_path, f"{OWNED}{text}modules:\n    within: !ref <within>\n")
    assert [(f.key, f.severity) for f in findings] == [("layer", "error")]
    inner = f"inner: !new:{HERE}.Stays\nwithin: !new:{HERE}.Within [!ref <inner>]\n"
    assert look(tmp_path, f"{inner}modules:\n    within: !ref <within>\n") == ([], ["inner.table"])


def test_a_layer_without_a_key_of_its_own_is_told_where_it_is_built(tmp_path):
    text = f"search: !new:{HERE}.Holder\n    held: !new:torch.nn.Linear [8, 20]\n"
    findings, _ = look(tmp_path, text + OWNED + TAIL)
    assert [(f.key, f.line) for f in findings] == [("search.held", 2)]


def test_both_mends_are_named_where_there_is_a_module_list(tmp_path):
    text = HEAD + "model: !new:torch.nn.ModuleList\n    - - !ref <owned>\nmodules:\n    model: !ref <model>\n"
    findings, _ = look(tmp_path, text)
    assert findings[0].suggestion.endswith("under modules, or put `!ref <layer>` into the ModuleList model")


@pytest.mark.parametrize(("text", "left"), [
    (f"search: !new:{HERE}.Holder [!ref <owned>]\ntied: !new:{HERE}.Tied [!ref <owned>]\n{TAIL}", []),
    (f"act: !new:torch.nn.GELU\n{TAIL}", []),
    (f"stays: !new:{HERE}.Stays\nmoves: !new:{HERE}.Moves\nnorm: !new:torch.nn.BatchNorm1d [4]\n{TAIL}"
     "    stays: !ref <stays>\n    moves: !ref <moves>\n    norm: !ref <norm>\n", ["stays.table"]),
    (f"norm: !new:torch.nn.BatchNorm1d\n    num_features: 4\n    affine: false\n{TAIL}",
     ["norm.running_mean", "norm.running_var"]),
], ids=["owned, and held elsewhere", "no tensors", "attributes that are no buffers", "buffers outside modules"])
def test_what_stays_behind_is_no_parameter_of_anybody(tmp_path, text, left):
    assert look(tmp_path, OWNED + text) == ([], left)


def test_a_tensor_of_a_layer_that_is_no_buffer_is_to_become_one_unless_it_is_speechbrains(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(f"stays: !new:{HERE}.Stays\nfeatures: !new:speechbrain.lobes.features.Fbank\n{OWNED}{TAIL}"
                    "    stays: !ref <stays>\n    features: !ref <features>\n")
    assert [str(each).partition(": ")[2] for each in check(path).findings] == [
        "warning: stays: stays.table would stay on the CPU when the modules move to a device; make it a buffer of "
        "Stays (register_buffer), or move it in forward [left-behind]"]


def test_each_parameter_is_in_one_checkpoint_file(tmp_path):
    saved = ("checkpointer: !new:speechbrain.utils.checkpoints.Checkpointer\n    checkpoints_dir: never\n"
             "    recoverables:\n")
    one = "        owned: !ref <owned>\n"
    head = OWNED + TAIL + "counter: !new:speechbrain.utils.epoch_loop.EpochCounter [3]\n"
    codes = {
        saved + one + "        counter: !ref <counter>\n": [],
        saved + one: [("not-saved", "counter", "warning")],
        saved + "        counter: !ref <counter>\n": [("not-saved", "checkpointer.recoverables", "error")],
        saved + one + "        again: !ref <owned>\n        counter: !ref <counter>\n": [
            ("saved-twice", "checkpointer.recoverables", "warning")],
    }
    for text, expected in codes.items():
        findings, _ = look(tmp_path, head + text, check_saved)
        assert [(f.code, f.key, f.severity) for f in findings] == expected
    assert not (tmp_path / "never").exists()


@pytest.mark.parametrize("frozen", [True, False])
def test_what_the_pretrainer_brings_needs_no_checkpoint_unless_it_trains(tmp_path, frozen):
    text = (f"{OWNED}brought: !new:torch.nn.Linear [8, 3]\n{TAIL}    brought: !ref <brought>\n"
            "pretrainer: !new:speechbrain.utils.parameter_transfer.Pretrainer\n    loadables: {it: !ref <brought>}\n"
            "checkpointer: !new:speechbrain.utils.checkpoints.Checkpointer\n    checkpoints_dir: never\n"
            "    recoverables: {owned: !ref <owned>}\n")

    def saved(built, owned, findings):
        built.hparams["brain"] = None  # a script may not train what it doesn't save
        built.hparams["brought"].weight.requires_grad_(not frozen)
        built.hparams["brought"].bias.requires_grad_(False)
        check_saved(built, owned, findings)

    findings, _ = look(tmp_path, text, saved)
    assert [(f.code, f.severity) for f in findings] == ([] if frozen else [("not-saved", "error")])
    assert all("1 parameters of brought" in f.message and "freeze: {brought: true}" in f.suggestion for f in findings)


def test_what_is_no_module_is_told(tmp_path):
    text = "a: !name:torch.nn.Linear\nb: !new:torch.nn.Linear [3, 5]\nmodules: {a: !ref <a>, b: !ref <b>, c: 5}\n"
    findings, _ = look(tmp_path, text)
    assert [f.key for f in findings if f.code == "no-module"] == ["modules.a", "modules.c"]


def test_a_walk_ends_in_circles_and_long_lists(tmp_path):
    (tmp_path / "recipe.yaml").write_text("x: !new:builtins.dict\n")
    findings = Findings()
    with build(resolve(tmp_path / "recipe.yaml", {}, findings).root, findings) as built:
        loop: dict = {"numbers": list(range(200_000)), "part": functools.partial(print, end=torch.ones(2))}
        loop["self"] = loop
        built.hparams["x"] = loop
        assert [t.path for t in tensors(built)] == ["x[part].end"]


def test_a_build_draws_no_numbers_and_fills_no_weights(tmp_path):
    path = write(tmp_path, "__seed: !apply:torch.manual_seed [7]\nlayer: !new:torch.nn.Linear [500, 500]\n")
    functions = nn.init.orthogonal_, nn.init.uniform_
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    findings = Findings()
    with build(resolve(path, {}, findings).root, findings) as built:
        assert "__seed" not in built.hparams
    assert (nn.init.orthogonal_, nn.init.uniform_) == functions
    assert torch.equal(torch.rand(3), expected)
