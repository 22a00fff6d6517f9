"""Mutations of a small tree: which there are, and which its tests catch."""

import ast
import json
import subprocess
import sys

import pytest

from tools import mutations

SOURCE = '''
def shown(rows, most: int = 3):
    print("é", f"{most + 1}")
    if (len(rows)) < most:
        return [row for row in rows if row is not None]
    return rows[:most] if rows else None
'''
KINDS = ["branches", "call", "comparison", "constant"]


def test_each_changes_one_place_and_no_type_or_text():
    found = mutations.mutations("sbkit/rows.py", SOURCE)
    assert sorted((each.kind, each.new) for each in found) == [
        ("branches", "(not ((len(rows)) < most))"), ("branches", "(not (rows))"), ("call", "pass"),
        ("comparison", " is "), ("comparison", ") <= "), ("constant", "(3 + 1)")]
    for each in found:
        assert ast.unparse(ast.parse(each.applied(SOURCE))) != ast.unparse(ast.parse(SOURCE))


@pytest.fixture
def tree(tmp_path):
    for name, text in {"sbkit/__init__.py": "", "sbkit/room/__init__.py": "", "sbkit/room/rows.py": 5 * SOURCE,
                       "tests/room/test_rows.py": "from sbkit.room.rows import shown", "tests/room/test_more.py": "",
                       "tests/test_far.py": "from sbkit.room import rows", "tests/test_no.py": "rows"}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_the_same_seed_draws_the_same_of_all_kinds(tree):
    found = mutations.drawn(tree, 4, seed=1)
    assert found == mutations.drawn(tree, 4, seed=1) != mutations.drawn(tree, 4, seed=2)
    assert sorted(each.kind for each in found) == KINDS


def test_tests_of_a_file_are_its_own_and_those_that_import_it_or_those_of_its_room(tree):
    assert mutations.tests_of(tree, "sbkit/room/rows.py") == ["tests/room/test_rows.py", "tests/test_far.py"]
    assert mutations.tests_of(tree, "sbkit/room/none.py") == ["tests/room/test_more.py", "tests/room/test_rows.py"]


@pytest.mark.long
def test_what_is_caught_and_what_survives_is_written_down_and_a_second_start_goes_on(tree, tmp_path):
    (tree / "sbkit/room/rows.py").write_text("def low(x):\n    return x < 3\n" + 4 * "\nX = 7 if 1 < 2 else 3\nid(X)\n")
    (tree / "tests/room/test_rows.py").write_text(
        "from sbkit.room.rows import low\ndef test():\n    assert low(2) and not low(3)\n")
    results = tmp_path / "results.jsonl"
    for count in (2, 4):
        said = subprocess.run([sys.executable, mutations.__file__, results, "--tree", tree, "--count", str(count)],
                              capture_output=True, text=True, check=True).stdout
    told = [json.loads(line) for line in results.read_text().splitlines()]
    assert sorted(each["kind"] for each in told) == KINDS
    for each in told:  # nothing but the function is asked for
        assert each["verdict"] == ("caught" if each["line"] == 2 else "survived"), each
    assert said.splitlines()[-1] == "caught: {}, survived: {} of 4".format(
        *([each["verdict"] for each in told].count(one) for one in ("caught", "survived")))
