"""The order in which keys are built that overrides add to a recipe."""

from __future__ import annotations

import pytest

from sbkit.recipe.overrides import _order_with
from sbkit.recipe.source import Node, Place

OWN = "own.yaml"
COMMAND = "command line"
BASE = {"seed": "1", "width": "4", "model": "!new:Model", "epochs": "3"}


def mapping(values, file_of=None):
    """A mapping of keys to values, which are plain, or have a tag and maybe a text after a space."""
    nodes = {}
    places = {}
    for line, (key, text) in enumerate(values.items(), start=1):
        tag, _, value = text.partition(" ") if text.startswith("!") else ("", "", text)
        places[key] = Place((file_of or {}).get(key, OWN), line)
        nodes[key] = Node(value, places[key], key, tag)
    return Node(nodes, Place(OWN, 1), "", key_places=places)


@pytest.mark.parametrize(("given", "file_of", "nested", "order"), [
    ({"depth": "3", "width": "!ref <depth>"}, {}, False, "seed depth width model epochs"),
    ({"depth": "3", "width": "5"}, {}, True, "seed depth width model epochs"),
    ({"extra": "!new:Loss"}, {}, False, "seed width model epochs extra"),
    ({"extra": "!new:Loss", "width": "5"}, {"width": COMMAND}, False, "seed width model epochs extra"),
    ({"rate": "2", "width": "!ref <rate>"}, {"rate": COMMAND}, False, "seed rate width model epochs"),
    ({"rate": "2", "width": "5"}, {"rate": COMMAND}, True, "seed width model epochs rate"),
    ({"rate": "!ref <epochs>", "width": "5"}, {}, False, "seed width model epochs rate"),
    ({"depth": "3", "width": "!ref <depth>", "rate": "2", "epochs": "!ref <rate>", "extra": "!new:Loss"},
     {"rate": COMMAND}, False, "seed depth width model rate epochs extra"),
], ids=["before the next of its file", "also within a value", "otherwise last", "an object waits for no other file's",
        "a plain value does", "but not within a value", "never before what it refers to", "the example of the comment"])
def test_a_new_key_is_built_where_it_reads(given, file_of, nested, order):
    assert _order_with(mapping(BASE), mapping(given, file_of), nested) == order.split()
