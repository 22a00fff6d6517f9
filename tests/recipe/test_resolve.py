"""References, includes and overrides mean what they mean to HyperPyYAML; what it can't load gets a message."""

import textwrap

import pytest
from hyperpyyaml import load_hyperpyyaml
from hyperpyyaml.core import parse_arithmetic
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from written import write

from sbkit.recipe.arguments import parse_overrides
from sbkit.recipe.build import build
from sbkit.recipe.check import check
from sbkit.recipe.load import load
from sbkit.recipe.resolve import compute, flatten, resolve
from sbkit.recipe.source import Findings
from sbkit.recipe.values import is_tuple, static

load_hyperpyyaml("a: 1")  # from here on it reads tuples the same way each time


def plain(node):
    """A tree of Nodes as Python values; tags stay visible."""
    if isinstance(node.value, dict):
        value = {key: plain(child) for key, child in node.value.items()}
    elif isinstance(node.value, list):
        value = [plain(child) for child in node.value]
    else:
        value = static(node) if not node.tag else node.value
    return (node.tag, value) if node.tag else value


def read(tmp_path, text, overrides=None):
    path = write(tmp_path, textwrap.dedent(text))
    findings = Findings()
    root = resolve(path, overrides or {}, findings).root
    return root, findings


NAMES = ("a", "b", "c", "d")
SCALARS = st.one_of(
    st.integers(-50, 50), st.booleans(), st.none(), st.floats(-4, 4, allow_nan=False).map(lambda x: round(x, 3)),
    st.sampled_from(["text", "'12'", "1e-3", "yes", "results/run", "1,5", "(3, 4)", "x y", "2024-01-01", "~"]))
REFERENCES = st.one_of(
    st.sampled_from(NAMES).map(lambda n: f"!ref <{n}>"), st.sampled_from(NAMES).map(lambda n: f"!copy <{n}>"),
    st.tuples(st.sampled_from(NAMES), st.sampled_from(NAMES)).map(lambda p: f"!ref <{p[0]}>/<{p[1]}>"),
    st.tuples(st.sampled_from(NAMES), st.integers(1, 9)).map(lambda p: f"!ref <{p[0]}> * {p[1]}"),
    st.sampled_from(NAMES).map(lambda n: f"!ref <{n}[x]>"))


def written(value):
    return {None: "null", True: "true", False: "false"}.get(value, str(value)) if not isinstance(value, str) else value


@st.composite
def documents(draw):
    lines = []
    for name in draw(st.permutations(NAMES)):
        kind = draw(st.sampled_from(["scalar", "reference", "list", "mapping"]))
        if kind == "scalar":
            lines.append(f"{name}: {written(draw(SCALARS))}")
        elif kind == "reference":
            lines.append(f"{name}: {draw(REFERENCES)}")
        elif kind == "list":
            items = draw(st.lists(st.one_of(SCALARS.map(written), REFERENCES), max_size=3))
            lines += [f"{name}:" + (" []" if not items else ""), *(f"    - {item}" for item in items)]
        else:
            lines += [f"{name}:", f"    x: {draw(st.one_of(SCALARS.map(written), REFERENCES))}"]
    return "\n".join(lines) + "\n"


@pytest.mark.slow
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=documents())
def test_values_are_hyperpyyamls_or_there_is_a_message(tmp_path, text):
    root, findings = read(tmp_path, text)
    errors = [f for f in findings if f.severity == "error"]
    # of a tuple that references are put together to, each load in a process makes something else, which is told
    changing = root is not None and any(node.computed and is_tuple(node.value) for node in root.walk())
    if not errors and not changing:  # else HyperPyYAML fails too, makes a list a text, or doubles one for ever
        assert plain(root) == load_hyperpyyaml(text), text


@pytest.mark.parametrize("text", [
    "a: !ref <b>", "a: 0\nb: !ref 1 / <a>", "a: !ref <b>\nb: !ref <c>\nc: 3", "a: !PLACEHOLDER"])
def test_what_hyperpyyaml_cannot_load_gets_a_message(tmp_path, text):
    with pytest.raises(Exception):  # noqa: B017 (it raises whatever comes up)
        load_hyperpyyaml(text)
    _, findings = read(tmp_path, text)
    assert len(findings) == 1 and findings[0].severity == "error"


def test_an_included_file_is_read_with_what_stands_under_it(tmp_path):
    (tmp_path / "base.yaml").write_text("width: 3\nnames: {a: 1, b: 2}\nouter: !ref <width> * 2\n")
    text = "size: 9\nrecipe: !include:base.yaml\n    width: !ref <size>\n    names: {b: 5}\nown: 1\n"
    root, findings = read(tmp_path, text, {"size": 7, "own": 2})
    assert findings == []
    flat = flatten(root)
    assert plain(flat) == {"width": 7, "names": {"a": 1, "b": 5}, "outer": 14, "size": 7, "own": 2}
    assert plain(flat) == load(tmp_path / "recipe.yaml", {"size": 7, "own": 2})
    assert (flat.value["outer"].place.line, flat.place_of("width").line) == (3, 3)


def test_a_reference_and_what_it_names_are_one_object(tmp_path):
    text = """\
        layer: !new:collections.Counter {a: 1}
        same: !ref <layer>
        other: !copy <layer>
        """
    root, findings = read(tmp_path, text)
    with build(root, findings) as built:
        assert findings == [] and built.hparams["same"] is built.hparams["layer"]
        assert built.hparams["other"] == built.hparams["layer"] and built.hparams["other"] is not built.hparams["layer"]
        assert built.origin(built.hparams["same"]).key == "layer"


def test_attributes_and_anchors(tmp_path):
    text = """\
        act: !new:torch.nn.GELU
        how: !ref <act.approximate>
        base: &base {x: 1, y: 2}
        more:
            <<: *base
            y: 3
        """
    root, findings = read(tmp_path, text)
    with build(root, findings) as built:
        assert findings == [] and built.hparams["how"] == "none" and built.hparams["more"] == {"x": 1, "y": 3}


@pytest.mark.parametrize("text", [
    "a: !ref <b>\nb: !ref <a>", "a: !ref <a>", "a: {x: !ref <a>}", "a: !ref <b>/x\nb: !ref <a>/y", "a: !ref <a>/<a>"])
def test_circles_end(tmp_path, text):
    _, findings = read(tmp_path, text)
    assert [f.code for f in findings] == ["circular-ref"]


def test_an_override_reaches_into_arguments_and_knows_its_place(tmp_path):
    root, findings = read(tmp_path, "layer: !new:torch.nn.Linear\n    in_features: 3\n", {"layer": {"out_features": 5}})
    assert findings == [] and plain(root)["layer"][1] == {"in_features": 3, "out_features": 5}
    assert str(root.value["layer"].place_of("out_features")) == "command line"


def test_a_tuple_on_the_command_line_is_a_tuple_each_time(tmp_path):
    for _ in range(2):
        given = parse_overrides(["--strides", "(2,", "2)"])
        root, findings = read(tmp_path, "strides: [1, 1]\nsame: !ref <strides>\n", given)
        assert findings == [] and plain(root) == {"strides": (2, 2), "same": (2, 2)}
        assert load(tmp_path / "recipe.yaml", given) == plain(root)


def test_a_key_beside_the_included_recipe_may_replace_what_nothing_refers_to(tmp_path):
    (tmp_path / "base.yaml").write_text("width: 3\nouter: !ref <width> * 2\nbrain: first\n")
    root, findings = read(tmp_path, "recipe: !include:base.yaml {}\nbrain: second\n")
    assert findings == [] and plain(flatten(root))["brain"] == "second"
    (tmp_path / "middle.yaml").write_text("recipe: !include:base.yaml\n    width: 7\n")
    for name in ("base", "middle"):
        _, findings = read(tmp_path, f"recipe: !include:{name}.yaml {{}}\nwidth: 5\n")
        assert [f.code for f in findings] == ["shadowed"]
    (tmp_path / "middle.yaml").write_text("recipe: !include:base.yaml\n    deep: 7\n    sizes: [!ref <deep>]\n")
    _, findings = read(tmp_path, "recipe: !include:middle.yaml {}\ndeep: 5\n")
    assert [f.code for f in findings] == ["shadowed"]


# ------------------------------------------------------------ arithmetic takes neither for ever nor all of the memory


@pytest.mark.parametrize("text", [
    "2 * 6", "7 // 2 + 0.5", "2 ** 60 + 1 - 2 ** 60", "2 ** 0.5", "7 % 4", "-5", "a/b/c", "some words", "3 * 'x",
    "'a' + 'b'", "results/ctc/fr/1234", "1 / data", "(-8) ** 0.5"])
def test_what_is_computed_is_what_hyperpyyaml_computes(text):
    assert compute(text) == parse_arithmetic(text)


@pytest.mark.parametrize("text", [
    "9 ** 9 ** 9", "9 ** 9 ** 9 / data", "'x' * 9 ** 12", "('x' + 'y') * 9 ** 12", "'%999999999999d' % 1", "1 / 0",
    "-" * 9000 + "1", " + ".join("1" * 4000)], ids=lambda text: text[:20])
def test_what_would_take_for_ever_is_an_error(text):
    with pytest.raises((ArithmeticError, ValueError)):
        compute(text)


DOUBLING = [f"a{i}: !ref <a{i - 1}><a{i - 1}>" for i in range(1, 40)]


@pytest.mark.parametrize(("lines", "line", "message"), [
    (["a: 9", "b: !ref <a> ** <a> ** <a>"], 2, "9 ** 9 ** 9 can't be computed: the number is too large"),
    (["a0: xxxxxxxxxx", *DOUBLING], 11, "with its references resolved, this text has more than 10000 characters"),
    ([*reversed(DOUBLING), "a0: !ref <a39>"], 1, "this reference is circular: a39 -> a38 -> "),
], ids=["a tower of powers", "texts that double", "a circle with many ways around"])
def test_a_recipe_that_takes_for_ever_to_compute_is_one_error(tmp_path, lines, line, message):
    finding, = check(write(tmp_path, "\n".join(lines)), run=False).findings
    assert finding.line == line and finding.message.startswith(message)
