"""Codebooks: each id is in its own or refused by name, and another codec's are refused as a whole."""

import json
import pickle
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from refusals import refused

from sbkit.codes import Books, InvalidCode

CODEC = "ab" * 32
BOOKS = Books((1000, 64), 50.0, 16000, CODEC)


@pytest.mark.parametrize("level, size", list(enumerate(BOOKS.sizes)))
@pytest.mark.parametrize("beyond", [-1, 0, 63])
def test_an_id_outside_its_codebook_is_refused_by_name(level, size, beyond):
    wrong, id = np.array([[0, 0], [999, 63], [5, 6]]), -1 if beyond < 0 else size + beyond
    wrong[1, level] = id
    with refused("code-out-of-range", kind=InvalidCode) as error:
        BOOKS.check(wrong, "a request")
    assert (error.value.position, error.value.level, error.value.id) == ((1,), level, id)
    assert wrong[1, level] == id, "nothing was clamped"


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64])
def test_ids_at_both_bounds_are_valid_in_each_type(dtype):
    books = Books((100, 64), 50.0, 16000, CODEC)
    found = books.check(np.array([[0, 0], [99, 63]], dtype), "x")
    assert found.dtype == np.int64 and found.tolist() == [[0, 0], [99, 63]]


def test_a_batch_names_its_utterance_and_counts_the_others():
    codes = np.zeros((3, 4, 2), int)
    codes[2, 1, 0], codes[2, 3, 1] = 1000, -7
    with refused("code-out-of-range", kind=InvalidCode) as e:
        BOOKS.check(codes, "x")
    assert e.value.position == (2, 1)


@given(st.lists(st.tuples(st.integers(-2**70, 2**70), st.integers(-2**70, 2**70)), min_size=1, max_size=4))
@example(rows=[(0, 2**63 + 1)])  # which numpy would round
def test_check_accepts_valid_ids_and_names_the_first_invalid_one(rows):
    wrong = [((frame,), level, id) for frame, row in enumerate(rows) for level, id in enumerate(row)
             if not 0 <= id < BOOKS.sizes[level]]
    if not wrong:
        assert BOOKS.check(rows, "x").tolist() == [list(row) for row in rows]
        return
    with refused("code-out-of-range", kind=InvalidCode, wording=False) as error:
        BOOKS.check(rows, "x")
    assert (error.value.position, error.value.level, error.value.id) == wrong[0]


@pytest.mark.parametrize("codes", [
    [[0.0, 1.0]], [[np.nan, 0]], [[True, False]], [["1", "2"]], [[1, None]], [1, 2], [[1, 2, 3]], [[1], [1, 2]], 7])
def test_check_refuses_other_types_and_shapes(codes):
    with refused("bad-codes", wording=codes != [[1], [1, 2]]):  # numpy's words
        BOOKS.check(codes, "here")


def test_invalid_code_can_be_pickled():
    with refused("code-out-of-range", kind=InvalidCode) as error:
        BOOKS.check([[1000, 0]], "x")
    again = pickle.loads(pickle.dumps(error.value))
    assert (type(again), again.position, again.level, again.id) == (InvalidCode, (0,), 0, 1000)
    assert str(again) == str(error.value)


@pytest.mark.parametrize("changed", [
    {"sizes": ()}, {"sizes": (0,)}, {"sizes": (4.0,)}, {"sizes": (True,)}, {"sizes": (1 << 40,)}, {"frame_rate": 0},
    {"frame_rate": float("nan")}, {"frame_rate": "50"}, {"frame_rate": 10**400}, {"sample_rate": 16000.0},
    {"codec": "me"}, {"codec": None}])
def test_invalid_codebooks_are_refused(changed):
    with refused("bad-value"):
        Books(**(BOOKS.to_dict() | changed))


def test_codebooks_survive_json():
    assert Books.from_dict(json.loads(json.dumps(BOOKS.to_dict())), "x") == BOOKS
    assert Books(tuple(np.array([4, 8])), 50, 16000, CODEC).to_dict()["sizes"] == [4, 8]


@pytest.mark.parametrize("values", [None, [], {}, {"sizes": [4]}, BOOKS.to_dict() | {"more": 1},
                                    BOOKS.to_dict() | {"sizes": 4}, BOOKS.to_dict() | {"sizes": ["4"]}])
def test_invalid_json_of_codebooks_is_refused(values):
    with refused("damaged-codes"):
        Books.from_dict(values, "manifest.json")


def test_the_bit_rate_and_the_smallest_type():
    assert Books((1000, 1000), 50.0, 16000, CODEC).bit_rate == pytest.approx(996.6, abs=0.1)
    assert [Books((size,), 50.0, 16000, CODEC).dtype for size in (1, 256, 257, 65536, 65537)] == [
        np.uint8, np.uint8, np.uint16, np.uint16, np.uint32]


def test_codes_need_no_torch():
    code = "import sys, sbkit.codes; print([name for name in ('torch', 'speechbrain') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stderr
