"""A voice whose words espeak-ng spells: its output, the times of words, and what it refuses."""

import sys

import pytest
import voices

import sbkit.infer
from sbkit.data import demo_voice
from sbkit.data.pronunciation import pronunciation
from sbkit.errors import SbkitError
from sbkit.infer import UnknownCharacters

PHONES = {"spelling": "xx", "characters": sorted(" abcdehlnot'.")}


@pytest.fixture
def asked(monkeypatch):
    """Every batch of words that were spelled: backwards, and twice as long; é has a sound of its own, c none."""
    batches = []

    def pronounce(words, voice):
        batches.append(words)
        return ["".join(2 * each for each in reversed(word)).replace("d", "ð").replace("c", "") for word in words]

    monkeypatch.setattr(demo_voice, "pronounce", pronounce)
    pronunciation.cache_clear()
    yield batches
    pronunciation.cache_clear()


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return voices.make(tmp_path_factory.mktemp("voice") / "v", **PHONES)


@pytest.fixture
def voice(bundle, asked):
    with sbkit.infer.load(bundle, device="cpu") as loaded:
        yield loaded


def test_phones_are_spoken_and_words_have_their_times(voice, asked):
    speech = voice.speak("Hello, not at. All")
    assert speech.text == "hello, not at. all"
    assert voices.heard(speech.samples) == "oolllleehh ttoonn ttaa. llllaa"
    assert [word.text for word in speech.words] == ["hello,", "not", "at.", "all"]
    for word, sound in zip(speech.words, ["oolllleehh", "ttoonn", "ttaa.", "llllaa"], strict=True):
        part = speech.samples[round(word.start * voices.RATE) : round(word.end * voices.RATE)]
        assert voices.heard(part) == sound
    assert asked[1:] == [["all", "at", "hello", "not"]], "all words of a text at once"


def test_marks_that_are_symbols_are_kept_where_they_are(voice):
    [piece] = voice.pieces("'hello' not.")
    assert "".join(voices.SYMBOLS[number] for number in piece.ids) == "'oolllleehh' ttoonn."


def test_unknown_characters_are_reported_and_so_are_unknown_sounds(voice):
    with pytest.raises(UnknownCharacters) as refused:
        voice.speak("hello wet bad c")
    assert str(refused.value).startswith(
        "the voice never learnt 'w' (character 7), '[ð] in bad' (character 11; character 11), 'c' (character 15)")
    assert voice.speak("hello wet", skip_unknown=True).text == "hello wet"
    assert voices.heard(voice.speak("hello wet", skip_unknown=True).samples) == "oolllleehh ttee"


def test_a_long_text_in_blocks_is_spelled_block_by_block(voice, asked):
    spoken = list(voice.say(["hello no", "t. ", "the bell is no", ""], skip_unknown=True))
    assert " ".join(piece.text for piece in spoken) == "hello not. the bell no"
    assert asked[1:] == [["hello", "no"], ["t"], ["not"], ["bell", "the"]], "none with characters that it never learnt"


def test_a_voice_that_needs_espeak_is_refused_without_it_when_it_is_loaded(bundle, monkeypatch):
    monkeypatch.setitem(sys.modules, "espeakng_loader", None)
    pronunciation.cache_clear()
    with pytest.raises(SbkitError, match="voices trained on phones, need the package espeakng-loader") as refused:
        sbkit.infer.load(bundle, device="cpu")
    assert "sbkit[demo]" in refused.value.hint
