"""Symbols and speakers: stored once, the same for good, read with a limit, and never an id that isn't there."""

import pytest
from refusals import refused

from sbkit.data.symbols import MAX_SPEAKERS, MAX_SYMBOLS, PADDING, Speakers, Symbols


def test_symbols_are_the_corpus_characters_and_padding_is_the_first(tmp_path):
    symbols = Symbols(tmp_path / "new" / "symbols.json").prepare(["ba b", "ñ"])
    assert symbols.names == [PADDING, " ", "a", "b", "ñ"] and len(symbols) == 5
    assert symbols.encode("ab ñ") == [2, 3, 1, 4] and symbols.encode("xaxb") == [2, 3] and symbols.encode("") == []
    assert symbols.unknown(["abx", "y "]) == {"x", "y"}


def test_the_same_corpus_is_prepared_again_and_another_is_refused(tmp_path):
    with refused("not-prepared"):
        Symbols(tmp_path / "s.json").load()
    Symbols(tmp_path / "s.json").prepare(["ab"])
    assert len(Symbols(tmp_path / "s.json").prepare(["ba"])) == 3
    with refused("corpus-changed"):
        Symbols(tmp_path / "s.json").prepare(["abc"])
    assert Symbols(tmp_path / "s.json").load().names == [PADDING, "a", "b"]


def test_a_corpus_without_text_or_not_in_letters_is_refused(tmp_path):
    with refused("missing-text"):
        Symbols(tmp_path / "s.json").prepare(["", ""])
    with refused("too-many-values"):
        Symbols(tmp_path / "s.json").prepare(map(chr, range(0x4E00, 0x4E00 + MAX_SYMBOLS + 1)))
    assert not (tmp_path / "s.json").exists()


@pytest.mark.parametrize("content", ["", "{", "{}", "[]", "7", '["b", "a"]', '["a", "a"]', '["a", 7]', '["", "a"]',
                                     '["ab", "c"]', "[" * 10_000, b"\xff\xfe"])
def test_a_damaged_file_is_a_plain_error(tmp_path, content):
    (tmp_path / "s.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    with refused("damaged-preparation", wording=False, file=tmp_path / "s.json"):
        Symbols(tmp_path / "s.json").load()


# ---------------------------------------------------------------- speakers


@pytest.mark.parametrize(("found", "names"), [(["anna", "anna"], ["anna"]), (["ben", "anna"], ["voice"]),
                                              (["", ""], ["voice"]), (["", "anna"], ["voice"])])
def test_all_of_a_corpus_is_one_voice_with_its_name_if_it_has_one(tmp_path, found, names):
    speakers = Speakers(tmp_path / "s.json")
    assert speakers.prepare(found) == names == Speakers(tmp_path / "s.json").names
    assert {speakers.number(each) for each in (*found, "nobody")} == {0}


def test_several_speakers_have_numbers_of_their_own_and_a_stranger_the_firsts(tmp_path):
    speakers = Speakers(tmp_path / "s.json", several=True)
    assert speakers.prepare(["carl", "anna", "carl", ""]) == ["anna", "carl", "voice"]
    assert [speakers.number(each) for each in ("anna", "carl", "", "nobody")] == [0, 1, 2, 0]


def test_names_are_cut_and_too_many_speakers_refused(tmp_path):
    speakers = Speakers(tmp_path / "s.json", several=True)
    [name] = speakers.prepare(["x" * 5000])
    assert len(name) == 200 and speakers.number("x" * 5000) == 0
    with refused("too-many-values"):
        Speakers(tmp_path / "t.json", several=True).prepare(map(str, range(MAX_SPEAKERS + 1)))
