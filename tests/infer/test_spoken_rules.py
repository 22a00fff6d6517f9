"""Texts are spoken as the rules of the voice's corpus wrote those that it learnt from."""

import json
import re

import pytest

from sbkit.data.text import TextRules
from sbkit.errors import SbkitError
from sbkit.export.layout import VoiceConfig
from sbkit.infer import UnknownCharacters
from sbkit.infer.sentences import PhraseReader

SYMBOLS = ["<pad>", " ", "'", *"abcdefghijklmnopqrstuvwxyzıéʻ"]


def voice(language, symbols=SYMBOLS, **changes):
    rules = {name: value for name, value in TextRules.for_language(language, **changes).options().items()
             if name != "alphabet"}
    return VoiceConfig(sample_rate=16_000, symbols=symbols, speakers=["anna"], max_symbols=60, frame_seconds=0.02,
                       text=rules)


def spoken(config, text, skip_unknown=False):
    phrases = PhraseReader(config, skip_unknown).read(text)
    return "".join(config.symbols[number] for phrase in phrases for number in phrase.ids)


@pytest.mark.parametrize("language, text, expected", [
    ("tr", "ISPARTA", "ısparta"), ("tr", "İzmir", "izmir"), ("en", "ISPARTA", "isparta"),
    ("en", "don’t", "don't"), ("en", "don't", "don't"), ("en", "pin-tip", "pin tip"),
    ("en", "‘Rock ’n’ roll’", "rock n roll"),
    ("en", "so\u00adft", "soft"), ("uz", "o‘zbek O'zbek", "oʻzbek oʻzbek"), ("en", "Cafe\u0301", "café"),
])
def test_a_text_is_spoken_as_training_wrote_it(language, text, expected):
    config = voice(language)
    assert spoken(config, text) == TextRules.for_language(language)(text) == expected


def test_a_bundle_of_before_has_no_rules_and_speaks_as_before(tmp_path):
    values = json.loads(voice("en").to_json())
    del values["text"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    config = VoiceConfig.read(tmp_path)
    assert spoken(config, "Don't") == "don't"
    with pytest.raises(UnknownCharacters, match="never learnt '’'"):
        spoken(config, "don’t")


def test_punctuation_that_the_rules_keep_is_spoken_and_the_case_that_they_keep_is_kept():
    assert spoken(voice("en", [*SYMBOLS, *"A-.,"], case="keep", keep_anywhere="-.,"), "A pin-tip.") == "A pin-tip."
    assert spoken(voice("en", case="keep"), "A pin") == "a pin", "there is but one case to speak in"


def test_the_text_of_a_phrase_still_has_its_marks():
    [piece] = PhraseReader(voice("en")).read("It’s a (pin-tip).")
    assert piece.text == "it's a (pin-tip)." and [word for word, _, _ in piece.words] == ["it's", "a", "(pin-tip)."]


@pytest.mark.parametrize("text, message", [
    ("so 100% sure", "'1' (character 4), '0' (character 5; character 6)"), ("a&b", "'&' (character 2)"),
    ("don’t ñ", "'ñ' (character 7)"), ("e\u0301\u00adé ae\u0301\u00adbñ", "'ñ' (character 11)"),
    ("ab.cd", "'.' (character 3)"), ("İİñ", "'ñ' (character 3)"),
])
def test_unknown_characters_are_named_where_they_were_written(text, message):
    with pytest.raises(UnknownCharacters, match=re.escape(message)):
        spoken(voice("en"), text)


def test_a_place_is_exact_behind_a_replacement_of_another_length():
    with pytest.raises(UnknownCharacters, match=r"'ñ' \(character 4\)"):
        spoken(voice("en", replace={"ß": "ss", "abc": "x"}), "ßaßñ")
    with pytest.raises(UnknownCharacters, match=r"'ñ' \(character 4\)"):
        spoken(voice("en", replace={"abc": "x"}), "abcñ")


@pytest.mark.parametrize("name", ["replace", "case_pairs"])
def test_rules_that_make_a_text_grow_without_end_are_stopped(name):
    chain = {chr(97 + number): chr(98 + number) * 50 for number in range(8)}
    with pytest.raises(SbkitError, match="more than 100 times as long"):
        spoken(voice("en", **{name: chain}), "aaaa")
