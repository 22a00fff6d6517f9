"""Our three splits are found under a source's own names for them, and are written down in one place."""

import ast
from pathlib import Path

import pytest

import sbkit
from sbkit.data.splits import ALIASES, SPLITS, choose_splits
from sbkit.errors import SbkitError


class Named:
    """A source of which only the names of its splits matter."""

    where, kind = "here", "a test"

    def __init__(self, *names):
        self._names = list(names)

    def names(self):
        return self._names


@pytest.mark.parametrize("split, alias", [(split, alias) for split in SPLITS for alias in ALIASES[split]])
def test_a_split_is_found_under_each_alias_whatever_its_case(split, alias):
    assert choose_splits(Named("other", alias.title()), SPLITS, {}) == {split: [alias.title()]}


def test_what_the_corpus_names_goes_before_aliases():
    source = Named("train", "validated", "dev", "test")
    assert choose_splits(source, ("train", "dev"), {"train": ["validated", "train"]}) == {
        "train": ["validated", "train"], "dev": ["dev"]}


@pytest.mark.parametrize("names, wanted, named, message, hint", [
    (["train"], SPLITS, {"dev": ["valid"]}, "here has no split 'valid' for dev", "it has train"),
    (["other"], SPLITS, {}, "here (a test) has no split train, dev or test (it has other)", "{train: NAME}"),
    ([], ("test",), {}, "here (a test) has no split test (it has none)", "{train: NAME}"),
])
def test_a_source_without_them_is_refused(names, wanted, named, message, hint):
    with pytest.raises(SbkitError) as error:
        choose_splits(Named(*names), wanted, named)
    assert error.value.message == message and hint in error.value.hint


@pytest.mark.slow
def test_they_are_defined_once():
    home = Path(sbkit.__file__).parent
    found = [str(path.relative_to(home)) for path in sorted(home.rglob("*.py"))
             for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
             if isinstance(node, (ast.Tuple, ast.List))
             and [getattr(each, "value", None) for each in node.elts] == [*SPLITS]]
    assert found == ["data/splits.py"]
