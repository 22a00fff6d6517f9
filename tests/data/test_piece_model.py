"""SentencePiece models of pieces that others have made: SentencePiece reads them as they were meant."""

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from sbkit.data.piece_model import piece_model
from sbkit.export.vocabulary import read_tokens, write_tokens


def opened(*args):
    return sentencepiece.SentencePieceProcessor(model_proto=piece_model(*args))


@given(st.lists(st.characters(exclude_categories=("Z", "C"), exclude_characters="▁"), min_size=1, max_size=40,
                unique=True), st.data())
def test_characters_are_read_back_and_written_as_they_were(letters, data):
    own = opened(["<pad>", "<s>", "</s>", "[UNK]", "▁", *letters], {1, 2, 3})
    assert [own.id_to_piece(i) for i in range(own.vocab_size())][5:] == letters
    assert (own.unk_id(), own.bos_id(), own.eos_id(), own.pad_id()) == (0, 1, 2, -1)
    assert [own.is_control(i) for i in range(own.vocab_size())] == [False] + [True] * 3 + [False] * (len(letters) + 1)
    words = data.draw(st.lists(st.text(st.sampled_from(letters), min_size=1), min_size=1, max_size=4))
    ids = own.encode(" ".join(words))
    assert own.decode(ids) == " ".join(words) and ids.count(4) == len(words)
    assert own.decode([3, *ids, 1]) == " ".join(words)


def test_pieces_cut_a_text_by_their_scores_or_by_merges():
    pieces = ["<blank>", "▁", "a", "b", "ab", "▁a"]
    cut = opened(pieces, (), {"▁": -1.0, "a": -9.0, "b": -2.0, "ab": -1.0, "▁a": -5.0})
    assert cut.encode("ab bab", out_type=str) == ["▁", "ab", "▁", "b", "ab"] and cut.bos_id() == -1
    merged = opened(pieces, (), {"▁a": 0.0, "ab": -1.0}, True)
    assert merged.encode("ab bab", out_type=str) == ["▁a", "b", "▁", "b", "ab"], "▁a first"


@pytest.mark.parametrize("pieces", [["_", "a", "a"], ["_", "", "a"], ["a", "a"]])
def test_pieces_that_are_ambiguous_are_refused(pieces):
    with refused("bad-tokenizer"):
        piece_model(pieces)


@pytest.mark.parametrize("piece", ["\x1b]0;title\x07", "a\nb", "\x9b2J", "\x7f"])
def test_refuses_control_characters_in_tokens(tmp_path, piece):
    with refused("control-character") as caught:
        piece_model(["_", "a", piece])
    assert piece not in str(caught.value)
    with refused("control-character"):
        write_tokens(tmp_path / "tokens.txt", ["_", piece], 0)
    (tmp_path / "tokens.txt").write_bytes(f"<blk> 0\n{piece.replace(chr(10), chr(27))} 1\n".encode())
    with refused("control-character"):
        read_tokens(tmp_path / "tokens.txt", 2)
