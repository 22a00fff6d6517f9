"""Shards of codes: what is read is what was written and of the codec that is asked for, or nothing is read."""

import json
import os
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused
from safetensors.numpy import load_file, save_file

from sbkit.codes import Books, CodedUtterance, Codes, InvalidCode, writing
from sbkit.codes.shards import MANIFEST, UnstorableUtterance
from sbkit.system import disk

BOOKS = Books((1000, 64), 50.0, 16000, "ab" * 32)


def utterances(count=7, seed=0, books=BOOKS):
    rng = np.random.default_rng(seed)
    return [CodedUtterance(f"u{i}", np.stack([rng.integers(0, size, 3 + 5 * i) for size in books.sizes], axis=1),
                           [None, "", "naïve text 語"][i % 3], [None, "anna"][i % 2]) for i in range(count)]


def write(folder, given, books=BOOKS, **options):
    with writing(folder, books, **options) as out:
        for each in given:
            out.add(each.id, each.codes, each.text, each.speaker)
    return folder


def same(one, other):
    assert (one.id, one.text, one.speaker) == (other.id, other.text, other.speaker)
    assert one.codes.dtype == np.int64
    np.testing.assert_array_equal(one.codes, other.codes)


@pytest.mark.parametrize("sizes", [(4,), (256,), (1000, 1000), (70_000, 2, 65_536)])
@pytest.mark.parametrize("shard_frames", [1, 40, 10**9])
def test_codes_are_read_in_any_order(tmp_path, sizes, shard_frames):
    books = Books(sizes, 50.0, 16000, "ab" * 32)
    given = utterances(books=books)
    given[0].codes[0], given[0].codes[1] = 0, np.array(sizes) - 1
    codes = Codes(write(tmp_path / "t", given, books, shard_frames=shard_frames), books)
    assert (len(codes), codes.books) == (7, books)
    for one, other in zip(codes, given, strict=True):
        same(one, other)
    for index in random.Random(0).sample(range(7), 7):
        same(codes[index], given[index])
    for index in (7, -1):
        with pytest.raises(IndexError, match="7 utterances"):
            codes[index]


@pytest.mark.parametrize("changed", [
    {"sizes": (1000,)}, {"sizes": (1000, 65)}, {"frame_rate": 25.0}, {"sample_rate": 24000}, {"codec": "ac" * 32}])
def test_codes_of_another_codec_are_refused_before_reading(tmp_path, changed):
    folder = write(tmp_path / "t", utterances())
    for path in folder.glob("*.safetensors"):
        path.unlink()
    with refused("other-codec"):
        Codes(folder, Books(**(BOOKS.to_dict() | changed)))


@pytest.mark.parametrize("level, id", [(0, -1), (0, 1000), (0, 1063), (1, 64), (1, 127)])
def test_an_invalid_id_leaves_no_folder(tmp_path, level, id):
    wrong = utterances()
    wrong[3].codes[2, level] = id
    with refused("code-out-of-range", kind=InvalidCode):
        write(tmp_path / "t", wrong, shard_frames=10)
    assert list(tmp_path.iterdir()) == []


def rewritten(folder, change, honest=True):
    """The shard with something changed; the manifest agrees with it if honest."""
    path, manifest = folder / "codes-00000.safetensors", json.loads((folder / MANIFEST).read_text())
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    if honest:
        manifest["shards"][0] |= {"bytes": path.stat().st_size, "sha256": disk.sha256(path)}
        (folder / MANIFEST).write_text(json.dumps(manifest))
    return folder


def test_an_invalid_id_on_disk_fails_only_its_utterance(tmp_path):
    """Also in training data that something else wrote."""
    def change(tensors):
        tensors["codes"][[0, 3, 5], 0] = 1000, 64, 1063

    given = utterances()
    codes = Codes(rewritten(write(tmp_path / "t", given), change), BOOKS)
    with refused("code-out-of-range", kind=InvalidCode) as error:
        codes[1]
    assert (error.value.position, error.value.level, error.value.id) == ((2,), 0, 1063)
    same(codes[2], given[2])
    with refused("code-out-of-range", kind=InvalidCode) as error:
        codes.check()
    assert (error.value.position, error.value.id) == ((0,), 1000)


@pytest.mark.parametrize("change, code", [
    (lambda t: t.update(codes=t["codes"].astype(np.float32)), "damaged-codes"),
    (lambda t: t.update(codes=t["codes"][:, None].copy()), "damaged-codes"),
    (lambda t: t.update(codes=t["codes"] > 0), "damaged-codes"),
    (lambda t: t.update(rows=t["rows"].astype(np.int16)), "damaged-codes"),
    (lambda t: t.update(codes=t["codes"][:, :1].copy()), "bad-codes"),
    (lambda t: t.update(codes=t["codes"][:-1].copy()), "damaged-codes"),
    (lambda t: t.pop("rows"), "damaged-codes"), (lambda t: t.update(more=np.zeros(3)), "damaged-codes"),
    (lambda t: t.update(ends=t["ends"][:-1].copy()), "damaged-codes"),
    (lambda t: t["ends"].__setitem__(0, 30), "damaged-codes"), (lambda t: t["ends"].__setitem__(0, 0), "damaged-codes"),
    (lambda t: t["ends"].__setitem__(-1, 10**15), "damaged-codes"),
    (lambda t: t["row_ends"].__setitem__(0, -5), "damaged-codes"),
    (lambda t: t.update(ends=t["ends"].astype(np.float64)), "damaged-codes"),
    (lambda t: t["rows"].__setitem__(0, ord("[")), "damaged-codes"),
    (lambda t: t["rows"].__setitem__(2, ord("x")), "damaged-codes"),
])
def test_a_shard_with_wrong_contents_is_refused(tmp_path, change, code):
    codes = Codes(rewritten(write(tmp_path / "t", utterances()), change))
    with refused(code):
        codes[0]


def test_a_shard_that_changed_is_refused_even_if_its_ids_are_valid(tmp_path):
    folder = rewritten(write(tmp_path / "t", utterances()), lambda t: t["codes"].__setitem__((0, 0), 1), honest=False)
    with refused("damaged-codes"):
        Codes(folder)[0]
    (folder / "codes-00000.safetensors").unlink()
    with refused("damaged-codes"):
        Codes(folder)[0]


def test_any_damaged_byte_of_a_shard_is_noticed(tmp_path):
    folder = write(tmp_path / "t", utterances(3))
    path = folder / "codes-00000.safetensors"
    whole = path.read_bytes()
    for at in range(0, len(whole), 37):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with refused("damaged-codes"):
            Codes(folder)[0]
    path.write_bytes(whole[:-1])
    with refused("damaged-codes"):
        Codes(folder)[0]


@pytest.mark.parametrize("where, value", [
    (("format",), "sbkit bundle"), (("version",), 2), (("version",), None), (("books",), None), (("shards",), []),
    (("shards",), {}), (("books", "sizes"), [0]), (("books", "codec"), "x"), (("books", "frame_rate"), float("nan")),
    (("shards", 0, "file"), "../codes.safetensors"), (("shards", 0, "file"), ".."), (("shards", 0, "file"), 3),
    (("shards", 0, "utterances"), -1), (("shards", 0, "frames"), 1 << 40), (("shards", 0, "bytes"), True),
    (("shards", 0, "sha256"), None), (("shards", 0), "codes-00000.safetensors"), (("shards", 0, "more"), 1),
])
def test_invalid_manifests_are_refused(tmp_path, where, value):
    code = {"format": "not-codes", "version": "newer-version"}.get(where[0], "damaged-codes")
    folder = write(tmp_path / "t", utterances())
    values = json.loads((folder / MANIFEST).read_text())
    at = values
    for key in where[:-1]:
        at = at[key]
    at[where[-1]] = value
    (folder / MANIFEST).write_text(json.dumps(values))
    with refused(code) as caught:
        Codes(folder)
    assert MANIFEST in str(caught.value)


@pytest.mark.slow
@given(st.recursive(st.none() | st.booleans() | st.floats() | st.text() | st.integers(), lambda children: st.lists(
    children, max_size=3) | st.dictionaries(st.sampled_from(["format", "version", "books", "shards"]), children)))
def test_any_json_as_manifest_raises_sbkit_error(tmp_path_factory, values):
    folder = tmp_path_factory.mktemp("t")
    (folder / MANIFEST).write_text(json.dumps(values))
    with refused("not-codes", wording=False):
        Codes(folder)


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "\ud800".encode("utf-8", "surrogatepass")])
def test_a_manifest_that_is_not_json_raises_sbkit_error(tmp_path, text):
    (tmp_path / MANIFEST).write_bytes(text if isinstance(text, bytes) else text.encode())
    with refused("damaged-codes", wording=False, file=tmp_path / MANIFEST):
        Codes(tmp_path)


def test_other_folders_are_reported(tmp_path):
    with refused("not-codes"):
        Codes(tmp_path)
    with refused("no-such-path"):
        Codes(tmp_path / "none")


@pytest.mark.parametrize("id, codes, code", [
    ("", [[0, 0]], "bad-codes"), ("u0", [[0, 0]], "repeated-id"),
    ("v", np.zeros((0, 2), int), "bad-codes"),
    ("v", np.zeros((1, 3, 2), int), "bad-codes"), ("v", np.zeros((2, 2)), "bad-codes"),
    ("v", np.zeros(((1 << 20) + 1, 2), np.uint8), "unstorable-utterance"),
    ("\ud800", [[0, 0]], "unstorable-utterance"),
])
def test_invalid_utterances_are_refused(tmp_path, id, codes, code):
    with refused(code), writing(tmp_path / "t", BOOKS) as out:
        out.add("u0", [[1, 2]])
        out.add(id, codes)
    assert list(tmp_path.iterdir()) == []


def test_types_that_numpy_lacks_are_refused(tmp_path):
    folder = write(tmp_path / "t", utterances(1))
    path, manifest = folder / "codes-00000.safetensors", json.loads((folder / MANIFEST).read_text())
    whole = path.read_bytes()
    end = 8 + int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8:end])
    header["codes"]["dtype"] = "BF16"
    changed = json.dumps(header).encode()
    path.write_bytes(len(changed).to_bytes(8, "little") + changed + whole[end:])
    manifest["shards"][0] |= {"bytes": path.stat().st_size, "sha256": disk.sha256(path)}
    (folder / MANIFEST).write_text(json.dumps(manifest))
    with refused("damaged-codes"):
        Codes(folder)[0]


@pytest.mark.parametrize("row", [b'{"id": "\\ud800"}', b'{"id": "a", "text": "\\udfff"}'])
def test_lone_surrogates_are_refused(tmp_path, row):
    def change(tensors):
        tensors.update(rows=np.frombuffer(row, np.uint8), row_ends=np.array([len(row)]))

    codes = Codes(rewritten(write(tmp_path / "t", utterances(1)), change))
    for use in (codes.check, lambda: codes.ids):
        with refused("damaged-codes"):
            use()


def test_an_unstorable_utterance_leaves_the_others(tmp_path):
    with writing(tmp_path / "t", BOOKS) as out:
        out.add("u0", [[1, 2]])
        for wrong in ({"text": "a" * (1 << 20)}, {"speaker": "\udc00"}):
            with refused("unstorable-utterance", kind=UnstorableUtterance):
                out.add("v", [[3, 4]], **wrong)
        out.add("v", [[5, 6]])
    assert [each.codes.tolist() for each in Codes(tmp_path / "t")] == [[[1, 2]], [[5, 6]]]


def test_an_empty_folder_is_not_written(tmp_path):
    with refused("no-utterances"):
        write(tmp_path / "t", [])
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_replaced_atomically(tmp_path):
    given = utterances()
    folder = write(tmp_path / "t", given, shard_frames=10)
    with refused("output-exists"):
        write(folder, given[:1])
    reading = Codes(folder)
    same(reading[0], given[0])
    with refused("code-out-of-range", kind=InvalidCode):
        write(folder, [CodedUtterance("a", np.array([[0, 0]])), CodedUtterance("b", np.array([[0, 64]]))], force=True)
    assert len(Codes(folder)) == 7
    write(folder, given[5:], force=True)
    assert [each.id for each in Codes(folder)] == ["u5", "u6"] and len(os.listdir(folder)) == 2
    assert os.listdir(tmp_path) == ["t"]


def test_a_folder_of_something_else_is_not_replaced(tmp_path):
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "thesis.txt").write_text("all of it")
    with refused("output-exists"):
        write(tmp_path / "t", utterances(), force=True)
    assert (tmp_path / "t" / "thesis.txt").read_text() == "all of it"
    (tmp_path / "t" / "manifest.json").write_text('{"name": "a web page"}')
    with refused("output-exists"):
        write(tmp_path / "t", utterances(), force=True)
    (write(tmp_path / "codes", utterances()) / "thesis.txt").write_text("all of it")
    with refused("output-exists"):
        write(tmp_path / "codes", utterances(), force=True)
    assert (tmp_path / "t" / "thesis.txt").read_text() == (tmp_path / "codes" / "thesis.txt").read_text()


def test_a_manifest_that_is_no_regular_file_or_too_large_is_refused_before_it_is_read(tmp_path):
    folder = write(tmp_path / "t", utterances())
    (folder / MANIFEST).unlink()
    (folder / MANIFEST).symlink_to("/dev/zero")  # whose size is said to be 0
    with refused("not-readable"):
        Codes(folder)
    (folder / MANIFEST).unlink()
    with open(folder / MANIFEST, "wb") as file:
        file.truncate(1 << 30)
    with refused("not-readable"):
        Codes(folder)
