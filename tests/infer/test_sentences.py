"""Texts to what a voice speaks at once: sentences, long ones cut, every symbol kept, unknown characters named."""

import json
import tracemalloc
import unicodedata

import pytest
import voices
from hypothesis import example, given, settings
from hypothesis import strategies as st
from refusals import refused

from sbkit.data.text import TextRules
from sbkit.export.layout import VoiceConfig
from sbkit.infer import UnknownCharacters, UnspeakableText
from sbkit.infer.sentences import PhraseReader


def voice(**changes):
    return VoiceConfig(**({"sample_rate": 16_000, "symbols": voices.SYMBOLS, "speakers": ["anna"], "max_symbols": 30,
                           "frame_seconds": 0.02} | changes))


def pieces(text, skip_unknown=False, **changes):
    return [(piece.text, piece.ends) for piece in PhraseReader(voice(**changes), skip_unknown).read(text)]


def spelled(ids):
    return "".join(voices.SYMBOLS[number] for number in ids)


@pytest.mark.parametrize("text, expected", [
    ("Hello there. How are you? Fine", [("hello there.", True), ("how are you?", True), ("fine", True)]),
    ("J. Smith came, e.g. here. Ok", [("j. smith came, e.g. here.", True), ("ok", True)]),
    ("'Come!' he said", [("'come!'", True), ("he said", True)]),
    ("A title\n\nThe text", [("a title", True), ("the text", True)]),
    ("one\ntwo \t three", [("one two three", True)]),
    ("one two, three four five six seven eight nine", [("one two,", False), ("three four five six seven", False),
                                                       ("eight nine", True)]),
    ("one two three four five six seven", [("one two three four five six", False), ("seven", True)]),
    ("a" * 70, [("a" * 30, False), ("a" * 30, False), ("a" * 10, True)]),
])
def test_a_text_is_cut_at_sentences_then_clauses_then_spaces(text, expected):
    assert pieces(text) == expected


LETTERS = ["<pad>", " ", *"abcdefghijklmnopqrstuvwxyz"]


@pytest.mark.parametrize("text, expected", [
    ("Well, yes.", [("well,", 0.12), ("yes.", 0.25)]),
    ("\"Well\"; (yes) — no?", [("\"well\";", 0.12), ("(yes)", 0.12), ("no?", 0.25)]),
    ("one,", [("one,", 0.25)]), ("Dear John,\n\nHello", [("dear john,", 0.25), ("hello", 0.25)]),
    ("one, — , two", [("one,", 0.12), ("two", 0.25)]),
    ("¿Qu? ¡Si!", [("¿qu?", 0.25), ("¡si!", 0.25)]),
])
def test_marks_that_are_not_symbols_become_pauses(text, expected):
    found = list(PhraseReader(voice(symbols=LETTERS)).read(text))
    assert [(piece.text, piece.pause) for piece in found] == expected
    letters = "".join(LETTERS[number] for piece in found for number in piece.ids if number > 1)
    assert letters == "".join(each for each in text.lower() if each.isalpha())


def test_marks_that_are_symbols_add_no_pause():
    [piece] = PhraseReader(voice()).read("well, yes.")
    assert piece.text == "well, yes." and spelled(piece.ids) == "well, yes."


def test_unknown_marks_within_a_word_are_reported():
    with refused("unknown-characters", kind=UnknownCharacters):
        list(PhraseReader(voice(symbols=LETTERS)).read("ab.cd"))


@pytest.mark.parametrize("text", ["...", "— !", "\" ?"])
def test_a_text_of_marks_only_has_its_own_message(text):
    with refused("empty-input", kind=UnspeakableText):
        list(PhraseReader(voice(symbols=LETTERS)).read(text))


def test_sentences_without_spaces_are_split():
    symbols = ["<pad>", *"你好吗我很。？"]
    assert pieces("你好吗？我很好。", symbols=symbols) == [("你好吗？", True), ("我很好。", True)]


TEXTS = st.text(st.sampled_from("ab .,!?'\n\tÅé\u0301ﬁ。A"), max_size=300)


@settings(max_examples=100, deadline=None)
@example("a\u0301\u00e5?", 1, 1)
@given(TEXTS, st.integers(1, 40), st.integers(1, 17))
def test_phrases_keep_all_symbols_within_the_limit(text, most, size):
    config = voice(max_symbols=most)
    known = [each for each in unicodedata.normalize("NFC", text.lower()) if each in voices.SYMBOLS and each != " "]
    blocks = [text[begin : begin + size] for begin in range(0, len(text), size)]
    if not known:
        with refused("empty-input", kind=UnspeakableText):
            list(PhraseReader(config, skip_unknown=True).read(text))
        return
    found = list(PhraseReader(config, skip_unknown=True).read(blocks))
    assert [piece.ids for piece in found] == [piece.ids for piece in PhraseReader(config, skip_unknown=True).read(text)]
    assert all(0 < len(piece.ids) <= most for piece in found)
    assert "".join(spelled(piece.ids) for piece in found).replace(" ", "") == "".join(known)
    for piece in found:
        assert all(" " not in spelled(piece.ids[begin:end]) for _, begin, end in piece.words)
        assert sum(end - begin for _, begin, end in piece.words) + spelled(piece.ids).count(" ") == len(piece.ids)


@pytest.mark.parametrize("text", ["", " ", "\n\t \u00a0"])
def test_an_empty_text_is_refused(text):
    with refused("empty-input", kind=UnspeakableText):
        pieces(text)


def test_characters_that_the_voice_never_learnt_are_named_with_their_places():
    with refused("unknown-characters", kind=UnknownCharacters) as caught:
        pieces("Café, naïve é é é")
    assert str(caught.value).startswith(
        "the voice has no symbols for 'é' (character 4; character 13; character 15; 1 more), 'ï' (character 9);")
    with refused("unknown-characters", kind=UnknownCharacters):
        pieces("one\ntwoß\n\n\0")
    with refused("unknown-characters", kind=UnknownCharacters):
        pieces("\ud800")
    with refused("unknown-characters", kind=UnknownCharacters):
        pieces("0123456789")
    assert pieces("Café, naïve", skip_unknown=True) == [("café, naïve", True)]
    with refused("empty-input", kind=UnspeakableText):
        pieces("éé ïï", skip_unknown=True)


def test_a_decomposed_character_is_the_symbol_that_it_looks_like():
    [piece] = PhraseReader(voice(symbols=["<pad>", *"aé"])).read("A\u0065\u0301")
    assert piece.ids == (1, 2)


def test_case_follows_symbols_of_one_case():
    assert pieces("aB", symbols=["<pad>", *"AB"]) == [("AB", True)]
    assert pieces("aB", symbols=["<pad>", *"aB"]) == [("aB", True)]
    with refused("unknown-characters"):
        pieces("AB", symbols=["<pad>", *"aB"])


@pytest.mark.slow
@pytest.mark.parametrize("word", ["word ", "x", "é. "])
def test_memory_does_not_grow_with_the_text(word):
    blocks = (word * 1_000 for _ in range(5))
    tracemalloc.start()
    try:
        assert sum(len(piece.ids) for piece in PhraseReader(voice(), skip_unknown=True).read(blocks)) > 300
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


# ---------------------------------------------------------------- rules of the voice's corpus


RULED = ["<pad>", " ", "'", *"abcdefghijklmnopqrstuvwxyzıéʻ"]


def ruled(language, symbols=RULED, **changes):
    rules = {name: value for name, value in TextRules.for_language(language, **changes).options().items()
             if name != "alphabet"}
    return voice(symbols=symbols, max_symbols=60, text=rules)


def spoken(config, text, skip_unknown=False):
    phrases = PhraseReader(config, skip_unknown).read(text)
    return "".join(config.symbols[number] for phrase in phrases for number in phrase.ids)


@pytest.mark.parametrize("language, text, expected", [
    ("tr", "ISPARTA", "ısparta"), ("tr", "İzmir", "izmir"), ("en", "ISPARTA", "isparta"),
    ("en", "don’t", "don't"), ("en", "don't", "don't"), ("en", "pin-tip", "pin tip"),
    ("en", "‘Rock ’n’ roll’", "rock n roll"),
    ("en", "so\u00adft", "soft"), ("uz", "o‘zbek O'zbek", "oʻzbek oʻzbek"), ("en", "Cafe\u0301", "café"),
])
def test_texts_are_normalised_as_in_training(language, text, expected):
    config = ruled(language)
    assert spoken(config, text) == TextRules.for_language(language)(text) == expected


def test_a_bundle_without_rules_is_spoken_without_them(tmp_path):
    values = json.loads(ruled("en").to_json())
    del values["text"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    config = VoiceConfig.read(tmp_path)
    assert spoken(config, "Don't") == "don't"
    with refused("unknown-characters", kind=UnknownCharacters):
        spoken(config, "don’t")


def test_punctuation_that_the_rules_keep_is_spoken_and_the_case_that_they_keep_is_kept():
    assert spoken(ruled("en", [*RULED, *"A-.,"], case="keep", keep_anywhere="-.,"), "A pin-tip.") == "A pin-tip."
    assert spoken(ruled("en", case="keep"), "A pin") == "a pin", "there is but one case to speak in"


def test_the_text_of_a_phrase_still_has_its_marks():
    [piece] = PhraseReader(ruled("en")).read("It’s a (pin-tip).")
    assert piece.text == "it's a (pin-tip)." and [word for word, _, _ in piece.words] == ["it's", "a", "(pin-tip)."]


@pytest.mark.parametrize("text", ["so 100% sure", "a&b", "don’t ñ", "e\u0301\u00adé ae\u0301\u00adbñ", "ab.cd", "İİñ"])
def test_unknown_characters_have_their_places_in_the_text(text):
    with refused("unknown-characters", kind=UnknownCharacters):
        spoken(ruled("en"), text)


def test_places_are_exact_after_a_replacement_of_another_length():
    with refused("unknown-characters", kind=UnknownCharacters):
        spoken(ruled("en", replace={"ß": "ss", "abc": "x"}), "ßaßñ")
    with refused("unknown-characters", kind=UnknownCharacters):
        spoken(ruled("en", replace={"abc": "x"}), "abcñ")


@pytest.mark.parametrize("name", ["replace", "case_pairs"])
def test_rules_that_grow_a_text_are_bounded(name):
    chain = {chr(97 + number): chr(98 + number) * 50 for number in range(8)}
    with refused("bad-value"):
        spoken(ruled("en", **{name: chain}), "aaaa")
