"""Words as phones: whose pronunciation is asked for, what of a text each phone stands for, and what is unknown."""

import json
import pickle
import sys

import numpy as np
import pytest
from refusals import refused

from sbkit.data import demo_voice
from sbkit.data.pronunciation import Pronunciation, pronunciation, split_punctuation, symbol_weights
from sbkit.data.symbols import Symbols, phones
from sbkit.decode.durations import symbol_durations

SOUNDS = {"a": "ˈeɪ", "the": "ðə", "cat": "kˈæt", "sat": "sˈæt", "12": "twˈɛlv", "twenty": "(de)tvɛn-(en) ti",
          "mute": ""}


@pytest.fixture
def asked(monkeypatch):
    """Every batch of words that espeak-ng's stand-in was asked about."""
    batches = []

    def pronounce(words, voice):
        batches.append(words)
        return [SOUNDS[word] for word in words]

    monkeypatch.setattr(demo_voice, "pronounce", pronounce)
    pronunciation.cache_clear()
    yield batches
    pronunciation.cache_clear()


def symbols(folder, *texts):
    return Symbols(folder / "symbols.json", "xx").prepare(texts)


def test_a_word_is_asked_about_once_and_without_what_is_no_sound(asked):
    said = Pronunciation("xx")
    said.learn(["cat", "twenty", "cat", ""])
    assert (said("twenty"), said("cat"), said("a"), said("cat")) == ("tvɛn ti", "kˈæt", "ˈeɪ", "kˈæt")
    assert asked == [["cat", "twenty"], ["a"]]


def test_a_long_word_is_asked_about_in_parts(monkeypatch):
    monkeypatch.setattr(demo_voice, "pronounce", lambda words, voice: [str(len(word)) for word in words])
    assert Pronunciation("xx")("a" * 150) == "646422"


def test_marks_around_a_word_are_not_pronounced():
    assert split_punctuation("«don't!»") == ("«", "don't", "!»")
    assert split_punctuation("...") == ("...", "", "") and split_punctuation("e\u0301") == ("", "e\u0301", "")


def test_a_words_phones_share_its_characters_and_stress_takes_no_time(asked):
    found = list(phones("the cat, a", pronunciation("xx")))
    assert "".join(symbol for symbol, _ in found) == "ðə kˈæt, ˈeɪ"
    assert [end for _, end in found] == [1.5, 3, 4, 5, 5, 6, 7, 8, 9, 9, 9.5, 10]
    assert symbol_weights("ˈː") == [1.0, 1.0], "something of it has to last"


def test_symbols_are_the_phones_of_a_corpus_and_its_characters_are_kept(asked, tmp_path):
    made = symbols(tmp_path, "the cat", "a cat")
    assert len(asked) == 2, "once whether there is such a voice, and once for all words"
    assert made.names == ["<pad>", *sorted(" ðəkˈæteɪ")]
    assert json.loads((tmp_path / "characters.json").read_text()) == sorted(" aceht") == made.characters
    again = pickle.loads(pickle.dumps(Symbols(tmp_path / "symbols.json", "xx").load()))
    assert [made.names[number] for number in again.encode("the a")] == list("ðə ˈeɪ")
    assert again.unknown(["the cat sat"]) == {"s"} and again.unknown(["a 12"]) == {"1", "2", *"wɛlv"}
    assert again.encode("mute") == []


def test_characters_are_symbols_without_a_spelling(asked, tmp_path):
    made = Symbols(tmp_path / "symbols.json").prepare(["the cat"])
    assert made.names[1:] == sorted(" aceht") and made.characters == [] and not asked
    assert made.write("the sat")[1] == [1, 2, 3, 4, 6, 7] and made.unknown(["sat"]) == {"s"}
    assert not (tmp_path / "characters.json").exists()


@pytest.mark.parametrize("voice", ["../en", "en us", "", "e" * 50])
def test_a_name_that_no_voice_can_have_is_refused_before_anything_is_loaded(asked, voice):
    with refused("unknown-voice"):
        pronunciation(voice)
    assert not asked


def test_without_espeak_it_is_said_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "espeakng_loader", None)
    pronunciation.cache_clear()
    with refused("missing-package") as caught:
        pronunciation("en-us")
    assert "pip install 'sbkit[demo]'" in caught.value.hint


def test_espeak_says_words_as_if_alone():
    pytest.importorskip("espeakng_loader")
    pronunciation.cache_clear()
    said = pronunciation("en-us")
    said.learn(["out", "of", "the"])
    assert [said(word) for word in ("out", "of", "the")] == ["ˈaʊt", "ʌv", "ðə"]
    assert pronunciation("fr")("les") == "lˈe" and "(" not in pronunciation("de")("computer")
    with refused("unknown-voice"):
        pronunciation("xy")


def test_all_clauses_of_a_text_are_pronounced():
    pytest.importorskip("espeakng_loader")
    spoken, silent = demo_voice.pronounce(["one, two. three", ""], "en-us")
    assert spoken.endswith("tˈuː θɹˈiː") and silent == ""


# ---------------------------------------------------------------- the frames of symbols


def test_symbols_that_are_characters_have_their_frames():
    frames = np.array([3, 5, 0, 7, 2])
    assert symbol_durations(frames, [1, 2, 3]).tolist() == frames.tolist()


def test_a_words_phones_share_its_frames_and_none_is_lost():
    frames = np.array([3, 4, 8, 4, 2, 5])  # "the" and a space after it, silence at both ends
    assert symbol_durations(frames, [1.5, 3, 4]).tolist() == [3, 8, 8, 2, 5]
    assert symbol_durations(frames, [0.0, 1.5, 3, 4]).tolist() == [3, 0, 8, 8, 2, 5]
    assert symbol_durations(frames, [4]).tolist() == [3, 18, 5]
    odd = symbol_durations(np.array([1, 7, 1]), np.linspace(0, 1, 5)[1:])
    assert odd.sum() == 9 and odd.min() >= 1
