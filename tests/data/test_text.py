"""Text rules: no script loses a letter, and normal text stays as it is."""

from __future__ import annotations

import itertools
import pickle
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

from sbkit.data.text import LANGUAGES, AsWritten, TextRules, count_words

RULES = [TextRules(unicode=u, case=c, keep_anywhere=k) for u in ("NFC", "NFKC")
         for c in ("lower", "upper", "keep") for k in ("", ".,?!")]


def word_characters(text: str) -> list[str]:
    """Letters, marks and digits, taken apart; symbols such as U+2260 are none, whatever they are made of."""
    kept = (c for c in unicodedata.normalize("NFC", text) if unicodedata.category(c)[0] in "LMN")
    return sorted("".join(unicodedata.normalize("NFD", c) for c in kept))


@settings(max_examples=400)
@given(st.text(), st.sampled_from(RULES))
def test_normal_text_stays_as_it_is(text, rules):
    once = rules(text)
    assert rules(once) == once


@settings(max_examples=400)
@given(st.text())
def test_no_letter_mark_or_digit_is_lost_and_nothing_else_stays(text):
    result = TextRules(case="keep")(text)
    assert word_characters(result) == word_characters(text)
    assert all(c in " '\u200c\u200d" or unicodedata.category(c)[0] in "LMN" for c in result)
    assert result == " ".join(result.split())
    result.encode()  # what a file can hold


@settings(max_examples=200)
@given(st.text(st.sampled_from("ab' ’-.`"), max_size=12))
def test_apostrophes_stay_only_inside_words(text):
    result = TextRules()(text)
    for word in result.split():
        assert word.strip("'") == word


@pytest.mark.parametrize(("text", "expected"), [
    ("Hello, World! It's 5 o'clock.", "hello world it's 5 o'clock"),
    ("« L’été, c’est 'chaud' ! »", "l'été c'est chaud"),
    ("السَّلامُ عليكم، يا صديقي؟", "السَّلامُ عليكم يا صديقي"),
    ("नमस्ते, क्या हाल है।", "नमस्ते क्या हाल है"),
    ("می‌خواهم برم؟", "می\u200cخواهم برم"),
    ("你好，世界。", "你好 世界"),
    ("カタカナ・ラーメン々", "カタカナ ラーメン々"),
    ("Привет — мир…", "привет мир"),
    ("e\u0301te\u0301", "été"),
    ("co\u00adop e\u200bf", "coop e f"),
    ("ที่นี่", "ที่นี่"),
    ("snake_case 100% €5", "snake case 100 5"),
    ("😀👨‍👩‍👧", ""),
    ("\ud800lone", "lone"),
    ("", ""),
])
def test_scripts(text, expected):
    assert TextRules()(text) == expected


def test_languages_differ_in_data_only():
    assert TextRules.for_language("tr")("ISPARTA İzmir") == "ısparta izmir"
    assert TextRules.for_language("tr", case="upper")("ısparta izmir") == "ISPARTA İZMİR"
    assert TextRules.for_language("ca")("Col·lecció d'aigua") == "col·lecció d'aigua"
    assert TextRules.for_language("uz")("O‘zbek bo'lsa") == "oʻzbek boʻlsa"
    assert TextRules.for_language("he")("צה״ל") == "צה״ל"
    assert TextRules.for_language("ca", keep_punctuation="")("l·l") == "l l"
    assert TextRules.for_language("zh-CN").options() == TextRules().options()
    for language in LANGUAGES:
        TextRules.for_language(language)


def test_options():
    assert TextRules(case="keep", keep_anywhere=".,?")("Well, isn't it?") == "Well, isn't it?"
    assert TextRules(unicode="NFKC")("Ｆｕｌｌ ﬁ") == "full fi"
    assert TextRules(replace={"&": " and ", "ß": "ss"})("Groß & klein") == "gross and klein"
    for old, text in itertools.product(("\u00e9", "e\u0301"), repeat=2):
        assert TextRules(replace={old: "e"})(f"Caf{text}") == "cafe", "however an accent is stored"
    assert TextRules(case="upper")("straße") == "STRASSE"
    assert TextRules(keep_punctuation="'-")("well-known - no") == "well-known no"


def test_characters_outside_the_alphabet_are_counted():
    rules = TextRules(alphabet="abcdefghijklmnopqrstuvwxyz'")
    assert rules.outside(rules("It's fine")) == {}
    assert rules.outside(rules("Éé ж ok")) == {"é": 2, "ж": 1}
    assert TextRules().outside("anything é") == {}


@pytest.mark.parametrize(("options", "code"), [
    ({"unicode": "NFX"}, "bad-value"), ({"case": "title"}, "bad-value"),
    ({"keep_punctuation": ["'"]}, "bad-value"), ({"alphabet": 3}, "bad-value"),
    ({"alphabet": []}, "bad-value"),
    ({"replace": ["a"]}, "bad-value"), ({"replace": {"": "x"}}, "bad-value"),
    ({"lowercase": True}, "unknown-key"),
])
def test_wrong_options_are_named(options, code):
    with refused(code):
        TextRules.for_language(None, **options)


def test_rules_travel_to_workers():
    rules = pickle.loads(pickle.dumps(TextRules(alphabet="ab", replace={"c": "b"})))
    assert rules("c’A") == "b'a" and rules.outside("x") == {"x": 1}


def test_words_are_counted_as_people_do():
    assert count_words("three small words") == 3
    assert count_words("") == 0
    assert count_words("今天 天气") == 4
    assert count_words("ok 好") == 2
    assert count_words("ひらカナ") == 4


def test_texts_can_stay_as_they_are_written():
    rules = AsWritten()
    assert rules(" “Well — isn’t it?”\n 50 % \t nai\u0308ve ") == "“Well — isn’t it?” 50 % naïve"
    assert rules.options() != TextRules().options()
    assert pickle.loads(pickle.dumps(rules))(" A  b!") == "A b!"
