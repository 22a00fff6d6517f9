"""Names are found and arguments compared as Python would, and nothing is called."""

from __future__ import annotations

import collections.abc
import typing
from dataclasses import replace
from pathlib import Path

import pytest
import speechbrain.core  # noqa: F401 (while tests are collected, so that its lazy modules can be set aside)
import torch
from hypothesis import given
from hypothesis import strategies as st

from sbkit.recipe import signatures
from sbkit.recipe.keys import words
from sbkit.recipe.overrides import from_python
from sbkit.recipe.signatures import bind, fits, locate
from sbkit.recipe.source import Findings, Node, Place
from sbkit.recipe.values import as_tuple, expression, is_tuple, looks_like_number


def node(value, tag=""):
    written = from_python(value, "key", Place("here.yaml", 3, 1)).mapped(lambda each: replace(each, computed=False))
    return replace(written, tag=tag)


# ------------------------------------------------------------------------------------------------ names


@pytest.mark.parametrize("name, found", [
    ("torch.nn.Linear", torch.nn.Linear), ("sorted", sorted), ("torch.optim", torch.optim),
    ("math.pi", 3.141592653589793),
    ("collections.OrderedDict.fromkeys", collections.OrderedDict.fromkeys)])
def test_a_name_is_found(name, found):
    assert locate(name) == found


@pytest.mark.parametrize("name, message, hint", [
    ("torch.nn.Linaer", "torch.nn has no Linaer", "did you mean torch.nn.Linear?"),
    ("torch.nn.linear", "torch.nn has no linear", "did you mean torch.nn.Linear?"),
    ("sbkit.tasks.ctc.CTX", "sbkit.tasks.ctc has no CTX", "did you mean sbkit.tasks.ctc.CTC?"),
    ("torhc.nn.Linear", "there is no module torhc", "did you mean torch?"),
    ("speechbrain.lobes.featurs.Fbank", "speechbrain.lobes has no featurs", "did you mean speechbrain.lobes.features?"),
    ("torch nn", "'torch nn' is not the name of a class or function", "write it as module.Class"),
    ("unheard_of.Thing", "there is no module unheard_of", "is it installed?")])
def test_a_name_that_is_not_there(name, message, hint):
    with pytest.raises(LookupError) as error:
        locate(name)
    assert error.value.args == (message, hint)


def test_a_well_known_module_that_is_not_installed_is_no_typo(monkeypatch):
    monkeypatch.setattr(signatures, "COMMON", ("unheard_of",))
    with pytest.raises(LookupError) as caught:
        locate("unheard_of.Thing")
    assert caught.value.args == ("there is no module unheard_of", "is it installed?")


def test_a_module_that_lacks_what_it_needs_says_so(tmp_path, monkeypatch):
    (tmp_path / "needs_more.py").write_text("import not_installed_anywhere\n")
    (tmp_path / "broken_inside.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(LookupError) as error:
        locate("needs_more.Layer")
    assert error.value.args[1] == "install not_installed_anywhere"
    with pytest.raises(LookupError, match="importing broken_inside fails: ZeroDivisionError"):
        locate("broken_inside.Layer")


# ------------------------------------------------------------------------------------------------ arguments


def layer(size: int, rate: float = 0.1, *, name: str | None = None, shape=(3, 3), strict=True):
    raise AssertionError("the check calls nothing")


def found(target, value, tag="!new:x", partial=False):
    findings = Findings()
    bind(target, node(value, tag), findings, partial)
    return [(f.code, f.key, f.suggestion) for f in findings]


@pytest.mark.parametrize("value, expected", [
    ({"size": 3}, []),
    ([3, 0.5], []),
    ({"size": 3, "name": None}, []),
    ({"sise": 3}, [("unknown-argument", "key.sise", "did you mean size?")]),
    ({"colour": 3}, [("unknown-argument", "key.colour", "it takes size, rate, name, shape, strict"),
                     ("missing-argument", "key", "add size: VALUE")]),
    ({"size": "3"}, [("wrong-type", "key.size", "write 3 without quotes")]),
    ({"size": 3.0}, [("wrong-type", "key.size", "write 3; in a !ref, // divides to a whole number")]),
    ({"size": 3, "rate": "1,000"}, [("wrong-type", "key.rate", "write 1000")]),
    ({"size": 3, "rate": 1}, []),
    ({"size": 3, "strict": "no"}, [("wrong-type", "key.strict", "write false")]),
    ({"size": 3, "shape": 5}, []),
    ([3, 0.5, "x"], [("too-many-arguments", "key", "it takes size, rate")]),
    ({}, [("missing-argument", "key", "add size: VALUE")])])
def test_arguments_are_compared_with_the_signature(value, expected):
    assert found(layer, value) == expected


def test_a_partial_may_lack_arguments():
    assert found(layer, {"rate": 0.3}, "!name:x", partial=True) == []
    assert found(layer, {"rat": 0.3}, "!name:x", partial=True)[0][0] == "unknown-argument"


def test_a_function_that_passes_everything_on_warns_of_near_misses_only():
    def forwards(dropout=0.1, **kwargs):
        return kwargs

    assert found(forwards, {"anything": 3}) == []
    assert found(forwards, {"droput": 3}) == [("unknown-argument", "key.droput", "did you mean dropout?")]


def test_functions_without_a_signature_are_left_alone():
    assert found(range, [1, 2, 3, 4, 5]) == []


@pytest.mark.parametrize("hint, value, good", [
    (int, 3, True), (int, True, True), (int, 3.5, False), (int, None, False), (int, [3], False),
    (float, 3, True), (float, "3", False), (bool, 1, True), (bool, 5, False), (bool, "yes", False),
    (str, "a", True), (str, ["a"], False), (Path, "a/b", True),
    (int | None, None, True), (int | str, "x", True), (typing.Literal["a", "b"], "c", False),
    (typing.Literal["a", "b"], "a", True), (list[int], [1, 2], True), (list[int], [1, "x"], False),
    (tuple[int, int], [1, 2], True), (collections.abc.Sequence[str], "train", False),
    (collections.abc.Sequence, "train", True), (collections.abc.Mapping[str, int], {"a": 1}, True), (dict, [1], False),
    (typing.Any, object, True), (torch.nn.Module, 3, False), (collections.abc.Callable, "max", False),
    (typing.TypeVar("T"), 3, True), (tuple[float, ...], "(1, 2)", True)])
def test_types_by_annotation(hint, value, good):
    if value is object:
        return
    assert fits(hint, node(value)) is good, words(hint)


def test_a_constant_is_compared_as_what_it_is():
    assert fits(float, node("", "!name:math.pi")) and not fits(str, node("", "!name:math.pi"))
    assert not fits(torch.nn.Module, node({}, "!name:torch.nn.Linear"))


def test_built_objects_are_compared_by_their_class():
    linear, name = node({}, "!new:torch.nn.Linear"), node("", "!name:torch.nn.Linear")
    assert fits(torch.nn.Module, linear) and not fits(torch.nn.RNN, linear)
    assert fits(collections.abc.Callable, name) and fits(type, name) and not fits(torch.nn.Module, name)
    assert fits(int, node([], "!apply:len"))


# ------------------------------------------------------------------------------------------------ values


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_number_looks_like_one(number):
    assert float(looks_like_number(repr(number))) == number


@given(st.integers(1000, 10**12))
def test_grouped_digits_are_one_number(number):
    assert looks_like_number(f"{number:,}") == str(number)


@pytest.mark.parametrize("text", ["", "fr", "1.2.3", "3x", "e", "12:30", "a1", "1-2", "results/12"])
def test_words_do_not_look_like_numbers(text):
    assert looks_like_number(text) is None


def test_tuples_and_sums():
    assert is_tuple("(3, 3)") and not is_tuple("(3, 3") and not is_tuple(5)
    assert as_tuple("(3, a)") == (3, "a") and as_tuple("(1e-3)") == ("1e-3",)
    assert expression("1/3") and expression("2 * 80") and not expression("results/12") and not expression("-3")


def test_a_place_names_its_line():
    assert str(Place("a/b/ctc.yaml", 7)) == "ctc.yaml:7" and str(Place()) == "command line"
    assert Node(3, Place(), "recipe.recipe.d_model").key == "d_model"
