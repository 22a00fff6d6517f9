"""A run may go on with the tokenizer of what it starts from: copied, so that the source may go."""

from __future__ import annotations

import shutil
from types import SimpleNamespace

import pytest
import torch
from refusals import refused

from sbkit.data.tokens import Tokenizer
from sbkit.runs import initial
from sbkit.runs.initial.source import WeightSource
from sbkit.tasks.text_tokens import KEPT_TOKENIZER, keep_tokenizer

TEXTS = ["a cab", "bad cab", "a bee"]


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A folder with a tokenizer of char pieces, as what a run starts from."""
    made = Tokenizer(tmp_path / "theirs", model_type="char").prepare(TEXTS)
    found = WeightSource("the run there", tokenizer=made.path)
    monkeypatch.setattr(initial, "source_of", lambda keys: found if keys.init_from else None)
    return found


def keys(tmp_path, init_from="there", checkpoints=()):
    shelf = SimpleNamespace(list_checkpoints=lambda: list(checkpoints))
    return SimpleNamespace(tokenizer=Tokenizer(tmp_path / "ours", 28, "unigram"), init_from=init_from,
                           checkpointer=shelf)


def test_it_becomes_the_runs_own_and_sizes_follow(tmp_path, source):
    tokenizer, follows = keep_tokenizer(keys(tmp_path), ["bad bee"], {"tokenizer": {"max_texts": 3}})
    path = tmp_path / "ours" / KEPT_TOKENIZER
    assert path.read_bytes() == source.tokenizer.read_bytes()
    theirs = Tokenizer(tmp_path, model=source.tokenizer).load()
    assert tokenizer.pieces() == theirs.pieces()
    assert follows == {"output_neurons": theirs.size, "token_type": "char", "bos_index": 1, "eos_index": 2,
                       "tokenizer": {"max_texts": 3, "model": str(path), "model_type": "char",
                                     "vocab_size": theirs.size}}


def test_a_run_that_goes_on_needs_the_source_no_more(tmp_path, source, monkeypatch):
    first, follows = keep_tokenizer(keys(tmp_path), TEXTS, {})
    shutil.rmtree(tmp_path / "theirs")
    monkeypatch.setattr(initial, "source_of", lambda keys: pytest.fail("it is asked for"))
    again, same = keep_tokenizer(keys(tmp_path, checkpoints=["one"]), TEXTS, {})
    assert again.pieces() == first.pieces() and same == follows


def test_characters_that_it_lacks_are_an_error_that_names_them(tmp_path, source):
    with refused("uncovered-characters") as error:
        keep_tokenizer(keys(tmp_path), ["a ñña", "boa"], {})
    assert "init_tokenizer: new" in error.value.hint


def none(source):
    source.tokenizer = None


def other_file(source):
    torch.save({"a": 1}, source.tokenizer)


@pytest.mark.parametrize(("init_from", "change", "code"), [
    (None, lambda source: None, "missing-key"), ("there", none, "source-without-tokenizer"),
    ("there", other_file, "bad-tokenizer")])
def test_where_there_is_no_tokenizer_none_is_copied(tmp_path, source, init_from, change, code):
    change(source)
    with refused(code):
        keep_tokenizer(keys(tmp_path, init_from), TEXTS, {})
    assert not (tmp_path / "ours" / KEPT_TOKENIZER).exists()
