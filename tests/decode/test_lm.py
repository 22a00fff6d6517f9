"""Models are made from text in one call, and one that doesn't fit the recogniser is refused in one sentence."""

from __future__ import annotations

import gzip

import pytest
from refusals import refused

from sbkit.decode import arpa, kneser_ney, lm
from sbkit.decode.beam import BeamSearch
from sbkit.decode.pieces import Pieces

TEXT = ["the cat sat on the mat", "the dog sat on the cat", "a cat and a dog", "the mat"]
LETTERS = ["<unk>", "<s>", "</s>", "▁", *"abcdefghijklmnopqrstuvwxyz'"]
WORDS = ["<unk>", "▁the", "▁c", "at", "▁s", "▁on", "▁m", "▁d", "og", "▁a", "nd"]


class Tokenizer:
    """What a tokenizer has to be able to for a model over its pieces."""

    def encode(self, text):
        return [LETTERS.index(letter) for word in text.split() for letter in f"▁{word}"]

    def piece(self, i):
        return LETTERS[i]

    def pieces(self):
        return LETTERS


def test_a_model_is_written_and_reported(tmp_path):
    report = lm.build(iter(TEXT), tmp_path / "lm.arpa", order=3, evaluate=["the cat sat", "the bird"])
    assert report.file == tmp_path / "lm.arpa"
    assert (report.sentences, report.tokens, report.vocabulary) == (4, 19, 8)
    assert report.held_out
    assert (report.quality.words, report.quality.unknown) == (5, 1)
    text = str(report)
    assert "19 words in 4 sentences, 8 different" in text
    assert "1 of 5 words unknown (20.00 %)" in text
    assert "on the text given for it" in text
    model = arpa.read(report.file)
    assert model.counts == report.counts
    assert model.quality(["the cat sat", "the bird"]).perplexity == pytest.approx(report.quality.perplexity, rel=1e-4)


def test_without_other_text_the_report_is_of_the_text_itself(tmp_path):
    report = lm.build(iter(TEXT), tmp_path / "lm.arpa", min_count=2)
    assert not report.held_out
    assert (report.quality.words, report.quality.unknown) == (19, 1)  # "and"
    assert "on the text it was estimated from" in str(report)


@pytest.mark.parametrize("prune", [[0, 0, 1], 1, 1e-2])
def test_pruning_by_counts_or_by_entropy(tmp_path, prune):
    whole = lm.build(TEXT, tmp_path / "whole.arpa")
    small = lm.build(TEXT, tmp_path / "small.arpa.gz", prune=prune)
    assert small.counted == whole.counts
    assert sum(small.counts) < sum(whole.counts)
    assert small.counts[0] == whole.counts[0]


def test_a_model_over_pieces_serves_a_search_over_them(tmp_path):
    report = lm.build(TEXT, tmp_path / "pieces.arpa", order=5, unit="piece", tokenizer=Tokenizer())
    assert report.unit == "piece"
    search = BeamSearch(Tokenizer(), lm=tmp_path / "pieces.arpa")
    assert search.fusion.per_piece
    assert lm.unit_of(arpa.read(tmp_path / "pieces.arpa"), Pieces(LETTERS)) == "piece"
    assert not BeamSearch(Tokenizer(), lm=lm.build(TEXT, tmp_path / "words.arpa").file).fusion.per_piece


def test_files_are_read_line_by_line(tmp_path):
    (tmp_path / "a.txt").write_text("one two\n\n three \n")
    with gzip.open(tmp_path / "b.txt.gz", "wt") as file:
        file.write("four\n")
    assert list(lm.read_texts([tmp_path / "a.txt", tmp_path / "b.txt.gz"])) == ["one two", "", "three", "four"]
    (tmp_path / "c.txt").write_bytes(b"\xff\xfe\xfa")
    for name, code in (("none.txt", "no-such-path"), ("c.txt", "not-utf8")):
        with refused(code, file=tmp_path / name):
            list(lm.read_texts([tmp_path / name]))


@pytest.mark.parametrize("options, code", [
    ({"order": 0}, "bad-value"), ({"order": 99}, "bad-value"), ({"unit": "phone"}, "bad-value"),
    ({"unit": "piece"}, "no-tokenizer"), ({"min_count": 0}, "bad-value"), ({"prune": [1, 1]}, "bad-value"),
    ({"prune": [0, 2, 1]}, "bad-value"), ({"prune": 2.0}, "bad-value"), ({"prune": -1}, "bad-value"),
])
def test_options_that_make_no_model(tmp_path, options, code):
    with refused(code):
        lm.build(TEXT, tmp_path / "lm.arpa", **options)
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------ models that don't fit


def model(*sentences):
    return kneser_ney.estimate(kneser_ney.read(sentences), 2).model


@pytest.mark.parametrize("sentences, pieces", [
    (["THE CAT", "THE DOG"], LETTERS), (["the cat", "the dog"], ["<unk>", "▁", *"ACDEGHOT"]), (["кот спит"], LETTERS),
    (["▁th e ▁ca t", "▁th e ▁do g"], LETTERS), (["the cat"], ["<unk>", *"theca"]),
    (["the cat"], ["<unk>", "▁the▁c", "at", "▁t", "he"]),
])
def test_a_model_of_something_else_is_refused(sentences, pieces):
    with refused("lm-mismatch"):
        lm.unit_of(model(*sentences), Pieces(pieces), name="lm.arpa")


def test_a_model_with_some_words_in_another_case_is_named_and_taken(caplog):
    some = model(" ".join([*(f"{a}{b}" for a in "abc" for b in "ehot"), "The", "Dog"]))
    assert lm.unit_of(some, Pieces(LETTERS), name="lm.arpa") == "word"
    assert "lm.arpa only partly fits this model's tokens: 14 % of its words" in caplog.text
    assert "the tokens are in lower case" in caplog.text
    caplog.clear()
    few = model(" ".join([*(f"{a}{b}" for a in "abcdef" for b in "ehot"), "café"]))
    assert lm.unit_of(few, Pieces(LETTERS)) == "word" and not caplog.text


def test_what_the_unit_has_to_be_can_be_said():
    words, pieces = model("the cat sat", "a dog"), model("▁the ▁c at", "▁a ▁d og")
    assert lm.unit_of(words, Pieces(WORDS)) == lm.unit_of(words, Pieces(WORDS), "word") == "word"
    assert lm.unit_of(pieces, Pieces(WORDS)) == lm.unit_of(pieces, Pieces(WORDS), "piece") == "piece"
    with refused("lm-mismatch"):
        lm.unit_of(words, Pieces(WORDS), "piece")
    with refused("lm-mismatch"):
        lm.unit_of(pieces, Pieces(WORDS), "word")
    with refused("bad-value"):
        lm.unit_of(words, Pieces(WORDS), "phone")


def test_languages_without_spaces_take_a_model_over_their_characters():
    pieces = Pieces(["<unk>", "你", "好", "世", "界"], separator=None)
    assert lm.unit_of(model("你 好 世 界", "世 界 好"), pieces) == "piece"


def test_a_search_refuses_what_does_not_fit_before_it_begins(tmp_path):
    lm.build(["THE CAT SAT"], tmp_path / "upper.arpa")
    with refused("lm-mismatch"):
        BeamSearch(LETTERS, lm=tmp_path / "upper.arpa").load()
    (tmp_path / "text.arpa").write_text("the cat sat\n")
    with refused("damaged-lm"):
        BeamSearch(LETTERS, lm=tmp_path / "text.arpa").load()
    with refused("no-such-path"):
        BeamSearch(LETTERS, lm=tmp_path).load()
