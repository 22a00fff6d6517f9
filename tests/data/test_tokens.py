"""The tokenizer: trained once, reused only for the same text and options, and never says blank."""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import pickle
from collections import Counter

import pytest
import sentencepiece as spm
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused
from speechbrain.tokenizers.SentencePiece import SentencePiece

from sbkit.data.manifest import Column
from sbkit.data.tokens import Tokenizer, count_characters

TEXTS = [f"{a} {b} the {c}" for a in ("cats", "dogs", "horses") for b in ("see", "hear", "follow")
         for c in ("river", "mountain", "house", "road's end")]


@pytest.fixture(params=["unigram", "bpe", "char"])
def tokenizer(request, tmp_path):
    size = 23 if request.param == "char" else 30
    return Tokenizer(tmp_path / "a folder", size, request.param).prepare(TEXTS)


def test_text_survives_and_ids_are_speechbrains(tokenizer):
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert (tokenizer.piece(0), tokenizer.piece(1), tokenizer.piece(2)) == ("<unk>", "<s>", "</s>")
    assert len(tokenizer.pieces()) == tokenizer.size == len(tokenizer)
    assert tokenizer.decode([1, *tokenizer.encode(TEXTS[0]), 0, 2]) == TEXTS[0]


@pytest.mark.slow
@given(st.lists(st.text(st.characters(exclude_categories=("Cs",)), max_size=9), max_size=9))
def test_characters_are_counted_as_in_each_text(texts):
    assert count_characters(texts) == Counter("".join(texts)) == count_characters(Column(texts))


def test_the_fingerprint_is_that_of_the_texts_which_are_not_empty(tmp_path):
    made = Tokenizer(tmp_path, None, "char").prepare(["", *TEXTS, ""])
    text = json.dumps(made.options(), sort_keys=True) + "".join(f"{line}\n" for line in TEXTS)
    assert json.loads(made.path.with_suffix(".json").read_text())["fingerprint"] == \
        hashlib.sha256(text.encode()).hexdigest(), "runs that exist would need another tokenizer"


def test_speechbrain_loads_it_and_encodes_alike(tokenizer):
    theirs = SentencePiece(str(tokenizer.folder), tokenizer.vocab_size, model_type=tokenizer.model_type)
    assert theirs.sp.encode_as_ids(TEXTS[0]) == tokenizer.encode(TEXTS[0])
    assert theirs.sp.vocab_size() == tokenizer.size
    assert (theirs.sp.bos_id(), theirs.sp.eos_id()) == (1, 2)


@settings(max_examples=100, deadline=None)
@given(text=st.text())
def test_blank_is_never_a_label(trained, text):
    ids = trained.encode(text)
    assert 0 not in ids and all(0 < i < trained.size for i in ids)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return Tokenizer(tmp_path_factory.mktemp("tokens"), 30).prepare(TEXTS)


def test_what_it_cannot_say_is_counted(trained):
    assert trained.coverage(TEXTS) == {}
    assert trained.coverage(["zebra zoo", "été"]) == {"z": 2, "b": 1, "é": 2}
    assert trained.decode(trained.encode("zcatsz")) != ""


def test_it_is_trained_once(tmp_path, monkeypatch):
    first = Tokenizer(tmp_path, 30).prepare(TEXTS)
    before = first.path.read_bytes()
    monkeypatch.setattr(spm.SentencePieceTrainer, "train", lambda **_: pytest.fail("trained twice"))
    assert Tokenizer(tmp_path, 30).prepare(TEXTS).pieces() == first.pieces()
    assert first.path.read_bytes() == before


@pytest.mark.parametrize("change", [
    {"texts": [*TEXTS, "foxes run"]}, {"character_coverage": 0.99}, {"max_piece_length": 3},
    {"characters": "z"}])
def test_other_text_or_options_train_it_anew(tmp_path, change, caplog):
    texts = change.pop("texts", TEXTS)
    old = json.loads(Tokenizer(tmp_path, 30).prepare(TEXTS).path.with_suffix(".json").read_text())
    with caplog.at_level(logging.WARNING):
        new = Tokenizer(tmp_path, 30, **change).prepare(texts)
    assert json.loads(new.path.with_suffix(".json").read_text())["fingerprint"] != old["fingerprint"]
    assert "training it again" in caplog.text


def test_a_tokenizer_that_checkpoints_depend_on_is_never_replaced(tmp_path):
    Tokenizer(tmp_path, 30).prepare(TEXTS)
    (tmp_path / "CKPT+2026-01-01+00-00-00+00").mkdir()
    Tokenizer(tmp_path, 30).prepare(TEXTS)
    with refused("corpus-changed"):
        Tokenizer(tmp_path, 30).prepare([*TEXTS, "foxes run"])


def test_a_tokenizer_stays_when_text_is_added_that_it_can_write(tmp_path, caplog):
    before = Tokenizer(tmp_path, 30).prepare(TEXTS).path.read_bytes()
    (tmp_path / "CKPT+2026-01-01+00-00-00+00").mkdir()
    with caplog.at_level(logging.INFO):
        grown = Tokenizer(tmp_path, 30).prepare([*TEXTS, TEXTS[0] * 2], grows=True)
    assert grown.path.read_bytes() == before and "trained on other text, but kept" in caplog.text
    with refused("corpus-changed"):
        Tokenizer(tmp_path, 30).prepare([*TEXTS, "šest"], grows=True)
    with refused("corpus-changed"):
        Tokenizer(tmp_path, 31).prepare([*TEXTS, "šest"], grows=True)


def test_somebody_elses_model_is_neither_reused_nor_replaced_unasked(tmp_path):
    theirs = Tokenizer(tmp_path / "other", 30).prepare(TEXTS).path
    ours = Tokenizer(tmp_path / "mine", 30)
    ours.folder.mkdir()
    ours.path.write_bytes(theirs.read_bytes())
    with refused("output-exists"):
        ours.prepare(TEXTS)
    given_by_hand = Tokenizer(tmp_path / "mine", model=theirs).prepare(["anything"])
    assert given_by_hand.size == 30 and (given_by_hand.bos_id, given_by_hand.eos_id) == (1, 2)


def test_a_truncated_model_is_made_anew(tmp_path):
    tokenizer = Tokenizer(tmp_path, 30).prepare(TEXTS)
    whole = tokenizer.path.read_bytes()
    tokenizer.path.write_bytes(whole[:100])
    assert Tokenizer(tmp_path, 30).prepare(TEXTS).path.read_bytes() == whole


@pytest.mark.parametrize(("size", "kind"), [(5000, "unigram"), (5000, "bpe"), (5, "bpe"), (5, "unigram"), (30, "char")])
def test_a_vocabulary_that_does_not_fit_the_text_is_an_error_with_the_right_size(tmp_path, size, kind):
    with refused("wrong-vocab-size"):
        Tokenizer(tmp_path, size, kind).prepare(TEXTS)
    assert not list(tmp_path.iterdir())


def test_the_sizes_that_the_errors_name_work(tmp_path):
    assert Tokenizer(tmp_path, 23, "unigram").prepare(TEXTS).size == 23
    assert Tokenizer(tmp_path, 23, "char").prepare(TEXTS).size == 23


@settings(max_examples=25, deadline=None)
@given(texts=st.lists(st.text("abcdé中 '", min_size=1).filter(str.strip), min_size=1, max_size=5),
       bos=st.sampled_from([1, -1]), characters=st.sampled_from(["", "xa"]))
def test_a_char_model_can_follow_its_text(tmp_path_factory, texts, bos, characters):
    texts = [" ".join(text.split()) for text in texts]
    tokenizer = Tokenizer(tmp_path_factory.mktemp("t"), 30, "char", bos_id=bos, eos_id=1 if bos < 0 else 2,
                          characters=characters)
    size = tokenizer.follow(texts)
    assert tokenizer.prepare(texts).size == size == tokenizer.vocab_size
    assert tokenizer.follow([*texts, "and more"]) is None  # a model of this size is there


def test_only_a_char_model_with_all_characters_follows(tmp_path):
    for options in ({"model_type": "bpe"}, {"model_type": "char", "character_coverage": 0.99},
                    {"model_type": "char", "vocab_size": None}, {"model_type": "char", "vocab_size": 23}):
        assert Tokenizer(tmp_path, **{"vocab_size": 30, **options}).follow(TEXTS) is None


def test_output_neurons_must_fit(trained):
    trained.check(30)
    with refused("wrong-vocab-size", key="output_neurons", value=31):
        trained.check(31)


def test_no_text_no_model(tmp_path):
    for texts in ([], ["", " "]):
        with refused("missing-text"):
            Tokenizer(tmp_path, 30).prepare(texts)
    with refused("not-prepared"):
        Tokenizer(tmp_path, 30).load()


def test_files_that_are_no_fitting_model_are_named(tmp_path):
    (tmp_path / "x.model").write_bytes(b"not a model")
    with refused("bad-tokenizer"):
        Tokenizer(tmp_path, model=tmp_path / "x.model").load()
    os.truncate(tmp_path / "x.model", 1 << 30)  # takes no room on the disk
    with refused("not-readable", file=tmp_path / "x.model"):
        Tokenizer(tmp_path, model=tmp_path / "x.model").load()
    model = io.BytesIO()
    spm.SentencePieceTrainer.train(sentence_iterator=iter(TEXTS), model_writer=model, vocab_size=30, unk_id=3,
                                   bos_id=1, eos_id=2, pad_id=0, minloglevel=2)
    (tmp_path / "x.model").write_bytes(model.getvalue())
    with refused("bad-tokenizer"):
        Tokenizer(tmp_path, model=tmp_path / "x.model").load()
    Tokenizer(tmp_path, 30).prepare(TEXTS).path.rename(tmp_path / "31_unigram.model")
    with refused("wrong-vocab-size", file=tmp_path / "31_unigram.model", value=31):
        Tokenizer(tmp_path, 31).load()
    with refused("bad-tokenizer"):
        Tokenizer(tmp_path, 31, bos_id=-1, eos_id=-1).load()


@pytest.mark.parametrize("options", [
    {"model_type": "word"}, {"vocab_size": None}, {"character_coverage": 98}, {"vocab_size": 30.0},
    {"vocab_size": "30"}, {"character_coverage": "all"}])
def test_wrong_options_are_named_at_once(tmp_path, options):
    with refused("bad-value"):
        Tokenizer(tmp_path / "nowhere", **{"vocab_size": 30, **options})
    assert not (tmp_path / "nowhere").exists()


def test_the_constructor_touches_no_file_and_loading_waits_for_use(tmp_path):
    tokenizer = Tokenizer(tmp_path / "later", 30)
    assert not (tmp_path / "later").exists()
    assert pickle.loads(pickle.dumps(tokenizer)).path == tokenizer.path
    Tokenizer(tmp_path / "later", 30).prepare(TEXTS)
    assert tokenizer.encode("cats see")


def test_it_travels_to_workers_with_its_model(trained):
    copy = pickle.loads(pickle.dumps(trained))
    trained_path, copy.folder = copy.folder, copy.folder / "gone"
    assert copy.encode(TEXTS[0]) == trained.encode(TEXTS[0]) and trained_path == trained.folder


def test_few_texts_of_many_are_enough_and_no_character_is_lost(tmp_path):
    texts = [*TEXTS, "zebra quiz"]
    sampled = Tokenizer(tmp_path, 30, max_texts=20).prepare(texts)
    assert sampled.coverage(texts) == {}
    assert Tokenizer(tmp_path, None, "char", characters="xyz").prepare(TEXTS).coverage(["xyz"]) == {}


def test_scripts_without_spaces(tmp_path):
    texts = ["今天天气很好", "天气很好今天", "नमस्ते दुनिया", "السلام عليكم"]
    tokenizer = Tokenizer(tmp_path, None, "char", split_by_whitespace=False).prepare(texts)
    assert [tokenizer.decode(tokenizer.encode(text)) for text in texts] == texts
