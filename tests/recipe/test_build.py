"""A recipe is built into what HyperPyYAML builds, and an error of an object is placed where the value to blame was
written.
"""

import itertools

import pytest
from hyperpyyaml import load_hyperpyyaml
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from refusals import refused
from written import described, write

from sbkit.recipe import build, writing
from sbkit.recipe.arguments import parse_overrides
from sbkit.recipe.check import check
from sbkit.recipe.load import load
from sbkit.recipe.resolve import flatten, resolve
from sbkit.recipe.source import Findings
from sbkit.recipe.values import is_tuple

load_hyperpyyaml("a: 1")  # from here on it reads tuples the same way each time
NEW, APPLY, NAME = f"!new:{__name__}.Thing", f"!apply:{__name__}.made", f"!name:{__name__}.Thing"
NUMBERS = itertools.count()


class Thing:
    """What it was built from, and how many were built before it."""

    def __init__(self, *args, **kwargs):
        self.args, self.kwargs, self.number = args, kwargs, next(NUMBERS)


def made(*args, **kwargs):
    return Thing(*args, **kwargs)


def description(builds, *args):
    global NUMBERS
    NUMBERS = itertools.count()
    return described(builds(*args), {})


def require_hyperpyyamls(tmp_path, text):
    """What is built is what HyperPyYAML builds of the file, and of the one that a run saves."""
    root = flatten(resolve(write(tmp_path, text), {}, findings := Findings(), call=True).root)
    errors = [each for each in findings if each.severity == "error"]
    if errors or any(node.computed and is_tuple(node.value) for node in root.walk()):
        return False  # of such a tuple, HyperPyYAML makes something else each time, which is a finding
    try:
        expected = description(load_hyperpyyaml, text)
    except Exception:  # each object has its own
        with pytest.raises(Exception):  # noqa: B017
            build.objects(root)
        return False
    assert description(build.objects, root) == expected, text
    assert description(load_hyperpyyaml, writing.text(root)) == expected, writing.text(root)
    return True


@pytest.mark.parametrize("text", [
    f"a: {NEW}\nb: !ref <a>\nc: !copy <a>\nd: [!ref <a>, !ref <a>]",
    f"a: {NEW} [1, x]\nb: {NEW}\n    one: !ref <a>\n    other: !ref <a.number>",
    f"a: {NAME}\nb: {NAME} [1]\nc: {NAME} {{x: 1}}\nd: !ref <c>\ne: !copy <c>",
    f"b: {NEW} {{x: {{y: 1}}}}\na: {APPLY} [2]\n__seed: {APPLY} [3]\nc: {NEW} [!ref <__seed>]",
    "a: !module:math\nb: !name:math.pi\nc: !apply:math.sqrt [9]\nd: !apply:builtins.sorted [[2, 1]]",
    "a: 3\nb: !ref <a> * 2 + 1\nc: !ref <a> // 2 ** 2\nd: !ref <b> / <a>\ne: !ref -<a>\nf: !ref <a>/<b>/x\n"
    "g: !ref <a> % 2 - 1.5\nh: !ref 1 - <a>",
    "a: (3, 4)\nb: !tuple (1, x)\nc: '(3, 4)'\nd: !ref <a>\ne: [(1), (x)]\nf: !tuple '(5, 6)'\ng: ()",
    "a: &x {b: 1}\nc: *x\nd: {<<: *x, e: 2}\nf: &y [1, *x]\ng: *y\nh: !ref <f>\ni: !copy <f>",
    "a: {b: {c: [1]}}\nd: !ref <a[b]>\ne: !ref <a[b][c]>\nf: !copy <a[b]>\ng: !ref <f[c]>",
    "a: 0x1F\nb: 0o17\nc: 017\nd: 1_000\ne: .inf\nf: 12e3\ng: 1e-5\nh: '1:30'\ni: 2024-01-01\nj: ~\nk: yes\n"
    "l: !!str 5\nm: !!float 5\nn: ''\no: .nan\np: '\\n'\nq: \"a\\tb\\u00e9\"",
    f"a: !applyref:builtins.sorted [[2, 1]]\nb: !ref <a>\nc: {NEW} [!ref <b>]\n"
    "d: !applyref:builtins.sorted\n    _args: [[1, 2]]\n    _kwargs: {reverse: true}",
    f"__seed: !!python/object/apply:{__name__}.made [1]\na: !!python/tuple [1, 2]\nb: !!python/name:{__name__}.made\n"
    f"d: !!python/module:math\ne: !!python/object/apply:{__name__}.made\n    args: [1]\n    kwds: {{x: 2}}",
    f"a: {NEW}\n    x: &z\n        - {NEW} [1]\n    y: *z\nb: {{c: *z}}",
    f"a: {NEW} ignored\nb: {NEW} []\nc: {NAME} {{}}", "a: [[], {}]\nb: !ref <a>\nc: {x: !ref <a>}",
])
def test_each_part_of_the_language_is_built_as_hyperpyyaml_builds_it(tmp_path, text):
    assert require_hyperpyyamls(tmp_path, text + "\n")


def test_an_included_file_is_built_as_hyperpyyaml_builds_it(tmp_path):
    (tmp_path / "part.yaml").write_text(f"width: !PLACEHOLDER\nlayer: {NEW} [!ref <width>]\nsame: !ref <layer>\n")
    path = write(tmp_path, f"a: {NEW}\npart: !include:part.yaml\n    width: 3\nother: !include:part.yaml\n"
                           "    width: 4\nlayer: !ref <part[layer]>\n")
    with path.open() as file:
        expected = description(load_hyperpyyaml, file)
    assert description(load, path, {}) == expected and expected.count("Thing") > 3


SCALARS = st.sampled_from(["1", "-2.5", "true", "null", "word", "'12'", "1e-3", "yes", "a/b", "(3, 4)", "'(3, 4)'", "~",
                           "2024-01-01", "''", f"{NEW}", f"{NAME}", "!module:math"])
NAMES = "abcd"
REFERENCES = st.builds(str.format, st.sampled_from(
    ["!ref <{0}>", "!ref <{0}>", "!copy <{0}>", "!ref '<{0}[x]>'", "!ref <{0}>/<{1}>", "!ref <{0}> * 2",
     "!ref <{0}.number>"]), st.sampled_from(NAMES), st.sampled_from(NAMES))
TREES = st.recursive(st.one_of(SCALARS, REFERENCES), lambda inside: st.tuples(
    st.sampled_from(["", "", NEW, APPLY, NAME]),
    st.one_of(st.lists(inside, max_size=3), st.dictionaries(st.sampled_from("xyz"), inside, max_size=3))), max_leaves=6)


def lines(name, tree):
    """A key or item as lines of YAML."""
    if isinstance(tree, str):
        return [f"{name} {tree}"]
    tag, inside = tree
    head = f"{name} {tag}"
    if not inside:  # of a copy of an empty list, ruamel loses the tag
        return [f"{head} {'{}' if isinstance(inside, dict) else '' if tag else '[]'}"]
    items = [("-", each) for each in inside] if isinstance(inside, list) else [
        (f"{key}:", each) for key, each in inside.items()]
    return [head, *(f"    {line}" for key, each in items for line in lines(key, each))]


@pytest.mark.slow
@settings(max_examples=100, deadline=None, suppress_health_check=[
    HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much])
@given(trees=st.lists(TREES, min_size=1, max_size=4))
def test_a_small_recipe_is_built_as_hyperpyyaml_builds_it(tmp_path, trees):
    text = "\n".join(line for name, tree in zip(NAMES, trees, strict=False) for line in lines(f"{name}:", tree))
    assume(require_hyperpyyamls(tmp_path, text + "\n"))


@pytest.mark.parametrize(("text", "code"), [
    ("a: !foo 3", "unknown-tag"), ("a: !apply:torch.nn.Linear [1, 2]", "wrong-kind"),
    ("a: !new:builtins.sorted [[1]]", "wrong-kind"), ("a: !new:nowhere.at.all", "no-such-name"),
    ("a: !new:fractions.Fraction [x]", "not-built"), ("a: (1, [2)", "tuple-as-text"),
    ("a: !module:math.pi", "wrong-kind")])
def test_what_cannot_be_built_names_its_line(tmp_path, text, code):
    with pytest.raises(Exception):  # noqa: B017 (each has its own)
        load_hyperpyyaml(text)
    with refused(code) as error:
        load(write(tmp_path, text + "\n"), {})
    assert "recipe.yaml" in str(error.value)

RECIPE = """
left_context: [32]
chunks: !new:sbkit.nn.chunks.Chunks
    sizes: [8, 16]
    left_context: !ref <left_context>
    whole: 0.1
    validate: 16
"""


def blamed(tmp_path, words, text=RECIPE):
    (tmp_path / "recipe.yaml").write_text(text)
    (error,) = check(tmp_path / "recipe.yaml", parse_overrides(words.split("|") if words else [])).errors
    return error.where.replace(f"{tmp_path}/", ""), error.key


@pytest.mark.parametrize(("words", "key"), [
    ("--chunks.whole|1.5", "chunks.whole"), ("--chunks.sizes|[8, 30]", "chunks.sizes"),
    ("--chunks.left_context|[50]", "chunks.left_context"), ("--chunks.validate|12", "chunks.validate"),
    ("--left_context|[50]", "left_context"), ("--chunks.size|8", "chunks.size"),
    ("--chunks.left_context|[50]|--chunks.sizes|[8, 30]|--chunks.validate|8", "chunks")])
def test_what_the_command_line_gave_is_blamed_there(tmp_path, words, key):
    assert blamed(tmp_path, words) == ("command line", key)


@pytest.mark.parametrize(("written", "instead", "line", "key"), [
    ("whole: 0.1", "whole: 1.5", 6, "chunks.whole"), ("validate: 16", "validate: 12", 3, "chunks"),
    ("[32]", "[50]", 3, "chunks")])
def test_what_the_recipe_says_is_blamed_in_it(tmp_path, written, instead, line, key):
    assert blamed(tmp_path, "", RECIPE.replace(written, instead)) == (f"recipe.yaml:{line}", key)


def test_what_a_recipe_gives_to_the_one_it_is_based_on_is_blamed_in_it(tmp_path):
    (tmp_path / "base.yaml").write_text(RECIPE)
    text = "recipe: !include:base.yaml\n    chunks:\n        validate: 12\n"
    where, key = blamed(tmp_path, "", text)
    assert (where.partition(":")[0], key) == ("recipe.yaml", "chunks.validate")


def test_an_object_that_another_file_builds_is_not_to_blame_for_who_refers_to_it(tmp_path):
    (tmp_path / "base.yaml").write_text("layer: !new:torch.nn.ReLU\n")
    text = ("recipe: !include:base.yaml\n    normed: !apply:torch.nn.utils.parametrizations.weight_norm\n"
            "        module: !ref <layer>\n")
    assert blamed(tmp_path, "", text) == ("recipe.yaml:2", "normed")


def test_a_recipe_told_to_freeze_everything_on_the_command_line_is_told_so_there(tmp_path):
    (tmp_path / "model.yaml").write_text("""
freeze: {}
brain: !name:sbkit.tasks.ctc.CTC
layer: !new:torch.nn.Linear [3, 3]
modules: {layer: !ref <layer>}
""")
    report = check(tmp_path / "model.yaml", parse_overrides(["--freeze", "{'*': true}"]))
    assert [error.where for error in report.errors if error.key == "freeze"] == ["command line"]
