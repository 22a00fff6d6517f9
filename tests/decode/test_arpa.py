"""Models survive a file, in ARPA; a damaged file is refused and says where it broke."""

from __future__ import annotations

import gzip
import math
import re
import time
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

from sbkit.decode import arpa, kneser_ney
from sbkit.decode.lm import prune_by_entropy

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


def test_kenlm_reads_what_is_written(tmp_path):
    kenlm = pytest.importorskip("kenlm", reason="the package kenlm isn't installed")
    model = prune_by_entropy(estimate(order=4), 1e-3)
    arpa.write(model, tmp_path / "lm.arpa")
    other = kenlm.Model(str(tmp_path / "lm.arpa"))
    for sentence in SENTENCES:
        assert other.score(sentence) == pytest.approx(model.sentence(sentence) / math.log(10), abs=1e-4)


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


# ------------------------------------------------------------- damaged files


@pytest.fixture
def whole(tmp_path):
    path = tmp_path / "lm.arpa"
    arpa.write(estimate(), path)
    return path


def test_wherever_an_arpa_file_is_cut_it_is_refused(whole):
    data = whole.read_bytes()
    for size in range(0, len(data) - len("\n\\end\\\n") + 1, 7):
        whole.write_bytes(data[:size])
        with refused("damaged-lm", file=whole, wording=False):
            arpa.read(whole)


def test_a_truncated_section_is_named_with_what_it_should_hold(whole):
    lines = whole.read_text().splitlines(keepends=True)
    second, third = lines.index("\\2-grams:\n"), lines.index("\\3-grams:\n")
    whole.write_text("".join(lines[: second + 4]))
    with refused("damaged-lm", file=whole):
        arpa.read(whole)
    whole.write_text("".join(lines[: second]))
    with refused("damaged-lm", file=whole):
        arpa.read(whole)
    whole.write_text("".join(lines[: third + 3] + lines[third + 4:]))
    with refused("damaged-lm", file=whole):
        arpa.read(whole)


@pytest.mark.parametrize("old, new", [
    (r"\\data", "data"), (r"(?s).*", "mmap lm http://kheafield.com/code format version 5"), ("ngram 1=", "n 1="),
    ("<s> a\t", "<s> zzz\t"), ("\ta b c\n", "\tc ö b\n"), ("\t<s> a b\n", "\t<s> b a\n"), ("\tb\t", "\ta\t"),
    ("\t<s> a b\n", "\t<s> a b c d\n"),
    *((r"\S+\t<s> a b\n", f"{wrong}\t<s> a b\n") for wrong in ("x-1.5", "nan", "inf", "2.5")),
])
def test_what_can_not_be_is_named(whole, old, new):
    text, count = re.subn(old, new, whole.read_text(), count=1)
    assert count
    whole.write_text(text)
    with refused("damaged-lm", file=whole):
        arpa.read(whole)


def test_a_model_in_another_encoding_is_named_with_its_word(whole):
    whole.write_text(whole.read_text(), encoding="latin1")
    with refused("not-utf8", file=whole):
        arpa.read(whole)


def test_a_compressed_file_cut_short(tmp_path):
    path = tmp_path / "lm.arpa.gz"
    arpa.write(estimate(), path)
    path.write_bytes(path.read_bytes()[:-40])
    with refused("damaged-lm", file=path):
        arpa.read(path)


def test_a_bomb_is_not_unpacked(tmp_path):
    path = tmp_path / "lm.arpa.gz"
    path.write_bytes(gzip.compress(b"\\data\\\nngram 1=1\n" + bytes(100 << 20)))
    with refused("not-readable", wording=False):
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
    with refused("damaged-lm", file=path):
        arpa.read(path)
    assert time.perf_counter() - began < 5


def test_a_failed_write_leaves_what_was_there(whole, monkeypatch):
    before = whole.read_bytes()
    model = arpa.read(whole)
    monkeypatch.setattr(arpa, "_lines", lambda model: iter(["\\data\\\n", 1]))
    with pytest.raises(TypeError):
        arpa.write(model, whole)
    assert whole.read_bytes() == before
    assert [path.name for path in whole.parent.iterdir()] == [whole.name]
