"""Models survive a file, in ARPA and in KenLM's binary; a damaged file is refused and says where it broke."""

from __future__ import annotations

import gzip
import math
import os
import re
import struct
import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbkit.decode import arpa, kenlm_binary, kneser_ney
from sbkit.decode.lm import prune_by_entropy
from sbkit.errors import SbkitError

TEXT = ["a b c", "a b", "ö b c a", "c c a b a", "b a a", "ö ö"]
SENTENCES = ["a b c", "c ö a b", "x a", "b x b a c c", "", "ö ö ö ö"]

texts = st.lists(st.lists(st.sampled_from(["a", "bb", "öl", "日本", "d" * 9]), min_size=1, max_size=6).map(" ".join),
                 min_size=1, max_size=10)


def estimate(sentences=TEXT, order=3):
    return kneser_ney.estimate(kneser_ney.read(sentences), order).model


def assert_alike(model, other, tolerance=1e-5):
    assert other.counts == model.counts
    assert sorted(other.words) == sorted(model.words)
    for sentence in SENTENCES:
        assert other.sentence(sentence) == pytest.approx(model.sentence(sentence), abs=tolerance)


# ------------------------------------------------------------ there and back


@settings(max_examples=30, deadline=None)
@given(texts=texts, order=st.integers(1, 5), packed=st.booleans())
def test_arpa_there_and_back(texts, order, packed, tmp_path_factory):
    path = tmp_path_factory.mktemp("lm") / ("lm.arpa.gz" if packed else "lm.arpa")
    model = estimate(texts, order)
    arpa.write(model, path)
    assert (path.read_bytes()[:2] == b"\x1f\x8b") == packed
    assert_alike(model, arpa.read(path))


@settings(max_examples=30, deadline=None)
@given(texts=texts, order=st.integers(2, 5), pruned=st.booleans())
def test_kenlm_binary_there_and_back(texts, order, pruned, tmp_path_factory):
    path = tmp_path_factory.mktemp("lm") / "lm.bin"
    model = estimate(texts, order)
    if pruned:
        model = prune_by_entropy(model, 0.01)
    kenlm_binary.write(model, path)
    assert_alike(model, kenlm_binary.KenLM(path))


def test_kenlm_reads_what_is_written(tmp_path):
    kenlm = pytest.importorskip("kenlm", reason="the package kenlm isn't installed")
    model = prune_by_entropy(estimate(order=4), 1e-3)
    arpa.write(model, tmp_path / "lm.arpa")
    kenlm_binary.write(model, tmp_path / "lm.bin")
    for name in ("lm.arpa", "lm.bin"):
        other = kenlm.Model(str(tmp_path / name))
        for sentence in SENTENCES:
            assert other.score(sentence) == pytest.approx(model.sentence(sentence) / math.log(10), abs=1e-4)


def test_equal_histories_have_equal_states_in_both_formats(binary):
    model, other, seen = estimate(), kenlm_binary.KenLM(binary), {}
    rng = np.random.default_rng(0)
    for words in rng.choice(["a", "b", "c", "ö", "x"], size=(60, 5)):
        pair = model.start[None], other.start[None]
        for word in words:
            pair = tuple(each.score(state, np.array([each.ids.get(word, each.unknown)]))[1]
                         for each, state in zip((model, other), pair, strict=True))
        one, two = (state[0].tobytes() for state in pair)
        assert seen.setdefault(("there", one), two) == two and seen.setdefault(("back", two), one) == one


SRILM = """
\\data\\
ngram 1=4
ngram 2=2
ngram 3=1

\\1-grams:
-1.0\t</s>
-99\t<s>\t-0.5
-0.5\ta\t-0.2
-0.7 b

\\2-grams:
-0.3\t<s> a\t-0.1
-0.2\ta b

\\3-grams:
-0.05\t<s> a b

\\end\\
"""


def test_files_of_other_tools_without_some_backoffs_and_an_unknown_word(tmp_path):
    path = tmp_path / "lm.arpa"
    path.write_text(SRILM)
    model = arpa.read(path)
    assert model.counts == [5, 2, 1]  # with the unknown word
    assert model.sentence("a b") / math.log(10) == pytest.approx(-0.3 - 0.05 - 1.0)
    assert model.sentence("b a") / math.log(10) == pytest.approx(-0.5 - 0.7 - 0.5 - 0.2 - 1.0)
    assert model.sentence("a x") < -200


def test_an_ngram_whose_ending_was_pruned_backs_off_as_it_should(tmp_path):
    path = tmp_path / "lm.arpa"
    # "<s> a b" is there, "a b" isn't: after it only "b" is known.
    path.write_text(SRILM.replace("-0.2\ta b\n", "").replace("ngram 2=2", "ngram 2=1").replace("-0.7 b", "-0.7 b -0.4"))
    model = arpa.read(path)
    assert model.sentence("a b") / math.log(10) == pytest.approx(-0.3 - 0.05 - 0.4 - 1.0)
    with pytest.raises(SbkitError, match="without the shorter ones they end with"):
        kenlm_binary.write(model, tmp_path / "lm.bin")
    assert not (tmp_path / "lm.bin").exists()


# ------------------------------------------------------------- damaged files


@pytest.fixture
def binary(tmp_path):
    path = tmp_path / "lm.bin"
    kenlm_binary.write(estimate(), path)
    return path


def spoil(path, cells, value):
    """Write a value at each of some places."""
    data = bytearray(path.read_bytes())
    for cell in cells:
        data[cell:cell + len(value)] = value
    path.write_bytes(data)


@pytest.fixture
def whole(tmp_path):
    path = tmp_path / "lm.arpa"
    arpa.write(estimate(), path)
    return path


def test_wherever_an_arpa_file_is_cut_it_is_refused(whole):
    data = whole.read_bytes()
    for size in range(0, len(data) - len("\n\\end\\\n") + 1, 7):
        whole.write_bytes(data[:size])
        with pytest.raises(SbkitError, match=r"lm\.arpa"):
            arpa.read(whole)


def test_a_truncated_section_is_named_with_what_it_should_hold(whole):
    lines = whole.read_text().splitlines(keepends=True)
    second, third = lines.index("\\2-grams:\n"), lines.index("\\3-grams:\n")
    count = third - second - 2
    whole.write_text("".join(lines[: second + 4]))
    with pytest.raises(SbkitError, match=rf"section \\2-grams: has 3 n-grams, and \\data\\ says {count}"):
        arpa.read(whole)
    whole.write_text("".join(lines[: second]))
    with pytest.raises(SbkitError, match=rf"section \\2-grams: is missing, and .* there are {count}"):
        arpa.read(whole)
    whole.write_text("".join(lines[: third + 3] + lines[third + 4:]))
    with pytest.raises(SbkitError, match=r"truncated: its section \\3-grams:"):
        arpa.read(whole)


@pytest.mark.parametrize("old, new, message", [
    (r"\\data", "data", r"not an ARPA language model"),
    ("ngram 1=", "n 1=", r"doesn't say how many"),
    ("<s> a\t", "<s> zzz\t", r"the word 'zzz' is in a 2-gram, but not among the 1-grams"),
    ("\ta b c\n", "\tc ö b\n", r"the 3-gram '.*c ö b' begins with a 2-gram that the file lacks"),
    ("\t<s> a b\n", "\t<s> b a\n", r"the 3-gram|is there twice"),
    ("\tb\t", "\ta\t", r"a word occurs twice"),
    ("\t<s> a b\n", "\t<s> a b c d\n", r"is not a 3-gram"),
    *((r"\S+\t<s> a b\n", f"{wrong}\t<s> a b\n", rf"the line '{wrong}.*<s> a b' is not a 3-gram with its log10")
      for wrong in ("x-1.5", "nan", "inf", "2.5")),
])
def test_what_can_not_be_is_named(whole, old, new, message):
    text, count = re.subn(old, new, whole.read_text(), count=1)
    assert count
    whole.write_text(text)
    with pytest.raises(SbkitError, match=message):
        arpa.read(whole)


def test_a_model_in_another_encoding_is_named_with_its_word(whole):
    whole.write_text(whole.read_text(), encoding="latin1")
    with pytest.raises(SbkitError, match="is not UTF-8; convert the file to UTF-8"):
        arpa.read(whole)


def test_a_compressed_file_cut_short(tmp_path):
    path = tmp_path / "lm.arpa.gz"
    arpa.write(estimate(), path)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(SbkitError, match="truncated"):
        arpa.read(path)


def test_a_binary_cut_short_or_of_another_kind(binary):
    data = binary.read_bytes()
    for size in (20, 100, 200, len(data) // 2, len(data) - 3):
        binary.write_bytes(data[:size])
        with pytest.raises(SbkitError, match="is truncated"):
            kenlm_binary.KenLM(binary)
    for other, says in ((data[:96] + b"\x02" + data[97:], "is a KenLM trie model"),
                        (data.replace(b"version 5", b"version 4"), "another version")):
        binary.write_bytes(other)
        with pytest.raises(SbkitError, match=says):
            kenlm_binary.KenLM(binary)


@pytest.mark.parametrize("more, says", [(1, "zeros where words should be"), (100 << 20, "is too long, or damaged")])
def test_a_binary_that_goes_on_after_its_words_is_not_copied(binary, more, says):
    os.truncate(binary, binary.stat().st_size + more)  # takes no room on the disk
    tracemalloc.start()
    try:
        with pytest.raises(SbkitError, match=says):
            kenlm_binary.KenLM(binary)
        assert tracemalloc.get_traced_memory()[1] < 10 << 20
    finally:
        tracemalloc.stop()
    with binary.open("ab") as file:
        file.truncate(binary.stat().st_size - more)
        file.write(b"more")
    with pytest.raises(SbkitError, match="its last 4 bytes are not words"):
        kenlm_binary.KenLM(binary)


def test_a_bomb_is_not_unpacked(tmp_path):
    path = tmp_path / "lm.arpa.gz"
    path.write_bytes(gzip.compress(b"\\data\\\nngram 1=1\n" + bytes(100 << 20)))
    with pytest.raises(SbkitError, match=r"unpacks to more than 16\.8 MB, too much for a text"):
        arpa.read(path)


@pytest.mark.slow
def test_lines_are_not_objects_all_at_once(tmp_path):
    path, size = tmp_path / "lm.arpa.gz", 15 << 20
    path.write_bytes(gzip.compress(b"\\data\\\nngram 1=2\n\n\\1-grams:\n-1 a\n" + b"\n" * size + b"-1 b\n\n\\end\\\n"))
    tracemalloc.start()
    try:
        assert arpa.read(path).words[:2] == ["a", "b"]
        assert tracemalloc.get_traced_memory()[1] < 5 * size
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("header", ["ngram 1=" + "9" * 5000, "ngram " + "1" * 5000 + "=4",
                                    "\n".join(f"ngram {i}=1" for i in range(1, 40)), "ngram" + " " * 1_000_000])
def test_a_header_of_no_model_is_refused_at_once(tmp_path, header):
    path = tmp_path / "lm.arpa"
    path.write_text(f"\\data\\\n{header}\n\n\\1-grams:\n-1 a\n\n\\end\\\n")
    began = time.perf_counter()
    with pytest.raises(SbkitError, match="section doesn't say how many n-grams"):
        arpa.read(path)
    assert time.perf_counter() - began < 5


ORDER, SIZE = "its header has the order", "is truncated"


@pytest.mark.parametrize("at, value, message", [
    *((88, value, ORDER) for value in (b"\0", b"\1", b"\xff")),
    *((92, struct.pack("<f", value), ORDER) for value in (math.nan, math.inf, 0.5)),
    *((108, struct.pack("<Q", count), SIZE) for count in (0, 2**40, 2**63)),
])
def test_a_binary_whose_header_no_model_has_is_refused(binary, at, value, message):
    spoil(binary, [at], value)
    with pytest.raises(SbkitError, match=message):
        kenlm_binary.KenLM(binary)


def cells_of_the_longest(path):
    """Where the table of the longest n-grams has its cells: it is the last thing before the words."""
    model, size = kenlm_binary.KenLM(path), path.stat().st_size
    end = size - sum(len(word.encode()) + 1 for word in model.words)
    return range(end - 12 * int(1.5 * model.counts[-1]), end, 12)


def test_a_binary_with_a_table_that_has_no_free_slot_is_refused_and_not_searched_for_ever(binary):
    data = binary.read_bytes()
    spoil(binary, [cell for cell in cells_of_the_longest(binary) if not any(data[cell:cell + 8])], b"\7" * 8)
    with pytest.raises(SbkitError, match="is damaged: 10,000 slots of a table are occupied in a row"):
        kenlm_binary.KenLM(binary)


def test_a_binary_whose_probabilities_are_no_numbers_is_refused_when_they_are_used(binary):
    spoil(binary, [cell + 8 for cell in cells_of_the_longest(binary)], struct.pack("<f", math.nan))
    with pytest.raises(SbkitError, match="is damaged: it has probabilities that are not numbers"):
        kenlm_binary.KenLM(binary).quality(SENTENCES)


def test_a_failed_write_leaves_what_was_there(whole, monkeypatch):
    before = whole.read_bytes()
    model = arpa.read(whole)
    monkeypatch.setattr(arpa, "_lines", lambda model: iter(["\\data\\\n", 1]))
    with pytest.raises(TypeError):
        arpa.write(model, whole)
    assert whole.read_bytes() == before
    assert [path.name for path in whole.parent.iterdir()] == [whole.name]


def test_the_interfaces_of_both_formats_are_one(binary):
    model, other = estimate(), kenlm_binary.KenLM(binary)
    for name in ("ids", "unknown", "end", "order", "counts"):
        assert getattr(other, name) == getattr(model, name), name
    assert other.quality(SENTENCES).perplexity == pytest.approx(model.quality(SENTENCES).perplexity, rel=1e-5)


def test_a_binary_model_keeps_nothing_of_the_histories_that_it_scored(binary):
    """A stream is searched for days."""
    model = kenlm_binary.KenLM(binary)
    held = lambda: {name: len(kept) for name, kept in vars(model).items() if hasattr(kept, "__len__")}  # noqa: E731
    before = held()
    for sentence in SENTENCES:
        model.sentence(sentence)
    assert held() == before
