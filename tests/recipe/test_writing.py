"""A recipe that rests on another exchanges any part of it; the check and the loader agree on what comes out."""

import inspect
import textwrap
from fractions import Fraction
from pathlib import Path

import pytest
from refusals import refused
from written import write

from sbkit.recipe.arguments import parse_overrides
from sbkit.recipe.build import build
from sbkit.recipe.check import check
from sbkit.recipe.load import load, merged, tree
from sbkit.recipe.reading import read
from sbkit.recipe.resolve import flatten, resolve
from sbkit.recipe.signatures import locate
from sbkit.recipe.source import Findings
from sbkit.recipe.writing import text

FLAGSHIP = Path(__file__).parents[2] / "hparams" / "ctc.yaml"
BASE = """\
    lr: 0.5
    masks: !new:collections.Counter
        a: 1
        b: 2
    alone: !new:collections.Counter
    sizes: {x: 1, y: 2}
    parts:
        masks: !ref <masks>
        lr: !ref <lr>
    nothing: null
    """


def both(tmp_path, text, *words, base=BASE):
    """The recipe as it's loaded, which is as the check builds it."""
    (tmp_path / "base.yaml").write_text(textwrap.dedent(base))
    path = write(tmp_path, textwrap.dedent(text))
    given, findings = parse_overrides(list(words)), Findings()
    loaded = load(path, given)
    root = flatten(resolve(path, given, findings).root)
    with build(root, findings) as built:
        assert findings == [] and built.hparams == loaded
        for key, value in loaded.items():
            assert type(built.hparams[key]) is type(value), key
    assert "!ref" not in merged(path, given) and "!include" not in merged(path, given)
    return loaded


@pytest.mark.parametrize("words", [[], ["--wide", "!ref <size> * 4"]], ids=["in a file", "on the command line"])
def test_a_number_that_becomes_a_reference_keeps_its_place_above_what_refers_to_it(tmp_path, words):
    (tmp_path / "middle.yaml").write_text(
        "recipe: !include:base.yaml\n    size: 3\n    wide: 5\n    model: {wide: !ref <wide>}\n")
    own = [] if words else ["    wide: !ref <size> * 4\n"]
    loaded = both(tmp_path, "recipe: !include:middle.yaml\n    size: 4\n" + "".join(own), *words,
                  base="model: null\nlast: !ref <model>\n")
    assert loaded["wide"] == 16 and loaded["model"] == {"wide": 16}


def test_a_new_part_is_the_last_of_its_mapping_whatever_else_is_given(tmp_path):
    loaded = both(tmp_path, "recipe: !include:base.yaml\n    parts: {z: 3}\n", "--parts.y", "7",
                  base="parts: {x: 1, y: 2}\n")
    assert list(loaded["parts"].items()) == [("x", 1), ("y", 7), ("z", 3)]


def over(*lines):
    return "\n".join(["recipe: !include:base.yaml", *(f"    {line}" for line in lines)]) + "\n"


@pytest.mark.parametrize("lines, expected", [
    (["masks: !new:collections.OrderedDict {c: 3}"], {"c": 3}),
    (["masks: !new:collections.Counter {a: 3}"], {"a": 3}),
    (["masks: !apply:builtins.sorted [[2, 1]]"], [1, 2]),
    (["masks: !name:collections.Counter"], locate("collections.Counter")),
    (["masks: null"], None), (["masks: 3"], 3), (["masks: [1]"], [1]),
    (["masks: {a: 3}"], {"a": 3, "b": 2}),
    (["masks: {b: !new:fractions.Fraction [1, 2]}"], {"a": 1, "b": 0.5}),
    (["masks: !ref <other>", "other: !new:collections.Counter {d: 4}"], {"d": 4}),
    (["masks: !new:collections.Counter", "    c: !ref <lr> * 4"], {"c": 2}),
    (["masks: !ref <sizes>"], {"x": 1, "y": 2}),
])
def test_what_has_a_tag_replaces_an_object_whole_and_a_mapping_changes_parts(tmp_path, lines, expected):
    loaded = both(tmp_path, over(*lines))
    assert loaded["masks"] == expected
    assert loaded["parts"]["masks"] is loaded["masks"], "references elsewhere mean the new one"


def test_comments_stay_where_they_are_written(tmp_path):
    text = """\
        masks: !new:collections.Counter
            a: 1    # of it
        counts: !new:collections.OrderedDict
            of:    # a list
                - !new:collections.Counter
                    a: 1    # its only one
        # ---- parts
        parts:
            one: !ref <masks>    # the first
            other: !ref <masks>

        # ---- more
        more: !ref <masks>    # the last
        # the end
        """
    (tmp_path / "recipe.yaml").write_text(textwrap.dedent(text))
    lines = [line.strip() for line in merged(tmp_path / "recipe.yaml", {}).splitlines() if line.strip()]
    at = [next(i for i, line in enumerate(lines) if text in line) for text in (
        "masks: ", "# of it", "# a list", "of:", "# its only one", "# ---- parts", "one: ", "# the first", "other: ",
        "# ---- more", "more: ", "# the last", "# the end")]
    assert at == sorted(at)
    assert both(tmp_path, textwrap.dedent(text))["parts"] == {"one": {"a": 1}, "other": {"a": 1}}


@pytest.mark.parametrize("line, key, expected", [
    ("lr: !apply:builtins.abs [-2]", "lr", 2), ("nothing: {a: 1}", "nothing", {"a": 1}),
    ("nothing: !new:collections.Counter {a: 1}", "nothing", {"a": 1}), ("alone: {a: 1}", "alone", {"a": 1}),
    ("sizes: {x: 3}", "sizes", {"x": 3, "y": 2}), ("sizes: 3", "sizes", 3), ("sizes: [1]", "sizes", [1])])
def test_a_scalar_may_become_an_object_and_the_other_way_round(tmp_path, line, key, expected):
    assert both(tmp_path, over(line))[key] == expected


def test_a_plain_mapping_of_its_own_replaces_where_it_is_referred_to(tmp_path):
    text = over("sizes: !ref <mine>", "masks: !ref <object>") + "width: 4\nmine: {z: !ref <width>}\n".replace(
        "{z: !ref <width>}", "\n    z: !ref <width>") + "object: !new:collections.Counter\n    c: !ref <width>\n"
    loaded = both(tmp_path, text)
    assert loaded["sizes"] == {"z": 4} and loaded["masks"] == {"c": 4}


def test_a_reference_sees_the_own_file_and_what_it_rests_on(tmp_path):
    loaded = both(tmp_path, "width: 4\n" + over("both: !ref <width> * <lr>", "own: !ref <width>", "theirs: !ref <lr>"))
    assert (loaded["both"], loaded["own"], loaded["theirs"]) == (2, 4, 0.5)


def test_keys_reach_the_file_that_they_belong_to_over_two_includes(tmp_path):
    (tmp_path / "middle.yaml").write_text(over("lr: 2", "masks: !new:collections.Counter {m: 1}", "added: {a: 1}"))
    text = "recipe: !include:middle.yaml\n    lr: 3\n    sizes: !new:collections.Counter\n        s: !ref <lr>\n"
    loaded = both(tmp_path, text, "--masks.n", "2", "--added.b", "3")
    assert loaded["parts"] == {"masks": {"m": 1, "n": 2}, "lr": 3}
    assert loaded["sizes"] == {"s": 3} and loaded["added"] == {"a": 1, "b": 3}
    nested = both(tmp_path, text.replace("    lr: 3", "    recipe: {lr: 4}\n    d: 1"))
    assert nested["lr"] == nested["parts"]["lr"] == 4
    of_its_own = text + "    fresh: !new:collections.Counter\n        f: !ref <lr>\n    again: !ref <fresh>\n"
    loaded = both(tmp_path, of_its_own, "--fresh.g", "2")
    assert loaded["fresh"] == loaded["again"] == {"f": 3, "g": 2}


def test_keys_of_one_recipe_that_are_alike_are_overridden_together_over_two_includes(tmp_path):
    base = "number_of_encoders: 1\nnumber_of_decoders: 1\n"
    (tmp_path / "base.yaml").write_text(base)
    (tmp_path / "middle.yaml").write_text("recipe: !include:base.yaml\n    number_of_encoders: 2\n")
    (tmp_path / "top.yaml").write_text("recipe: !include:middle.yaml\n    other: 1\n")
    given = {"number_of_decoders": 5, "number_of_encoders": 4}
    for name in ("middle.yaml", "top.yaml"):
        assert not check(tmp_path / name, given).errors
        loaded = load(tmp_path / name, given)
        assert (loaded["number_of_decoders"], loaded["number_of_encoders"]) == (5, 4)
        wrong, = check(tmp_path / name, {"number_of_decoder": 5}).errors
        assert "did you mean --number_of_decoders?" in str(wrong)


def test_keys_that_a_recipe_adds_are_built_before_the_key_of_its_base_that_they_stand_above(tmp_path):
    base = "seed: 1\nmodel: !PLACEHOLDER\nused: [!ref <model>]\n"
    (tmp_path / "middle.yaml").write_text(over("width: 1", "used: 3"))
    text = ("recipe: !include:middle.yaml\n    num_encoder_layers: 2    # alike\n    num_decoder_layers: 3\n"
            "    model: !ref <num_encoder_layers> * 2\n    end: 5\n")
    assert list(both(tmp_path, text, base=base).items()) == [
        ("seed", 1), ("num_encoder_layers", 2), ("num_decoder_layers", 3), ("model", 4), ("width", 1), ("used", 3),
        ("end", 5)]
    assert "num_encoder_layers: 2    # alike" in merged(tmp_path / "recipe.yaml", {})
    given = "folder: !ref <run>/b\n    seed: 3\n"
    assert both(tmp_path, over(given), base="seed: 1\nname: a\nrun: !ref <name>/<seed>\n")["folder"] == "a/3/b"


@pytest.mark.parametrize("word, expected", [
    ("--lr", "it has no value; write one after it, such as --lr 3"), ("--lr.a=1", "lr has no parts that could be set"),
    ("--masks.c=1", "Counter has no argument c"), ("--maskss.c=1", "did you mean --masks?")])
def test_what_is_wrong_with_a_key_that_a_recipe_overrides_is_told_as_of_its_own(tmp_path, word, expected):
    path = write(tmp_path, over("lr: 3", "masks: {a: 2}", "mask_count: 1"))
    (tmp_path / "base.yaml").write_text("lr: !PLACEHOLDER\nmasks: !new:fractions.Fraction\nmask_counts: 0\n")
    assert expected.replace("Counter", "Fraction") in "; ".join(map(str, check(path, parse_overrides([word])).errors))


def test_the_command_line_has_the_last_word(tmp_path):
    text = over("masks: !new:collections.Counter {m: 1}") + "lone: 1\n"
    assert both(tmp_path, text, "--masks.n", "2", "--lone", "2")["parts"]["masks"] == {"m": 1, "n": 2}
    assert both(tmp_path, text, "--masks", "null")["masks"] is None
    assert both(tmp_path, text, "--masks", "!new:collections.OrderedDict {o: !ref <lr>}".replace("!ref <lr>", "5"))[
        "masks"] == {"o": 5}
    assert both(tmp_path, text, "--alone.a", "1")["alone"] == {"a": 1}


def test_a_key_beside_the_include_is_overridden_where_it_wins(tmp_path):
    assert both(tmp_path, over() + "nothing: 1\n", "--nothing", "2")["nothing"] == 2


def test_parts_of_what_has_none_are_refused_without_a_check_too(tmp_path):
    (tmp_path / "base.yaml").write_text(textwrap.dedent(BASE))
    path = write(tmp_path, over("masks: null"))
    for word in ("--masks.a", "--lr.a"):
        with refused("override-structure"):
            load(path, parse_overrides([word, "1"]))


def test_every_argument_of_the_flagships_objects_can_be_given_on_the_command_line():
    """Those that the YAML doesn't write, too."""
    given = {}
    for key, node in flatten(resolve(FLAGSHIP, {}, Findings()).root).value.items():
        if not key.startswith("__") and node.tag.startswith(("!new:", "!name:")) and not isinstance(node.value, list):
            taken = inspect.signature(locate(node.tag.partition(":")[2])).parameters.values()
            given[key] = {p.name: p.default for p in taken if isinstance(p.default, (bool, int, float, str))}
    assert len(given) > 12 and "fill" in given["spec_augment"] and "sort" not in given["batching"]
    findings = Findings()
    root = read(FLAGSHIP, {key: parts for key, parts in given.items() if parts}, findings)
    assert [f for f in findings if f.code in ("unknown-argument", "override-structure", "unknown-override")] == []
    for key, parts in given.items():
        assert set(parts) <= set(root.value[key].value or ()), key
    findings.clear()
    read(FLAGSHIP, {"spec_augment": {"time_mask": 0}}, findings)
    assert [str(f) for f in findings] == [
        "command line: error: spec_augment.time_mask: SpecAugment has no argument time_mask; did you mean time_masks? "
        "[unknown-argument]"]


def test_arguments_within_brackets_reach_their_object(tmp_path):
    path = write(tmp_path, "a: !new:collections.OrderedDict\n    steps: [!new:fractions.Fraction {numerator: 1, "
                    "denominator: 3}, !new:fractions.Fraction [2, 3], 1]\n")
    assert load(path, {})["a"]["steps"] == [Fraction(1, 3), Fraction(2, 3), 1]


def test_a_recipe_is_read_whole_each_time_and_nobody_changes_anothers(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("near: !apply:collections.deque []\nsizes: &sizes {a: 1}\n"
                    "more:\n  <<: *sizes\n  b: 2\nsame: *sizes\n")
    root = tree(path)
    root.value["sizes"].value["a"] = root.value["more"]
    written = text(tree(path))
    assert "a: 1" in written and tree(path).at("sizes", "a") == 1
    root = tree(path)
    assert root.value["same"] is root.value["sizes"] and root.at("more", "b") == 2
