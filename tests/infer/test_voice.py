"""Text to speech: the sound is the text's, at the requested speed and in the requested voice."""

import sys

import bundles
import numpy as np
import onnx
import pytest
import voices
from refusals import refused

import sbkit.infer
from sbkit.data import demo_voice
from sbkit.data.pronunciation import pronunciation
from sbkit.infer import UnknownCharacters
from sbkit.infer.sentences import SENTENCE_PAUSE
from sbkit.infer.voice import Voice
from sbkit.infer.voice_engine import SpeechInput

TEXT = "Hello there. Good bye, all of you!"


@pytest.fixture(scope="module")
def voice(voice_bundle):
    with sbkit.infer.load(voice_bundle, device="cpu") as loaded:
        assert isinstance(loaded, Voice)
        yield loaded


@pytest.mark.slow
def test_words_are_spoken_as_written(voice):
    speech = voice.speak(TEXT)
    assert voices.heard(speech.samples) == "hello there. good bye, all of you!"
    assert (speech.text, speech.sentences) == ("hello there. good bye, all of you!",
                                               ["hello there.", "good bye, all of you!"])
    assert speech.sample_rate == voices.RATE and speech.samples.dtype == np.float32
    assert np.abs(speech.samples).max() == pytest.approx(0.5, abs=0.01)
    assert speech.seconds == pytest.approx((len(TEXT) - 1) * voices.SYMBOL_SECONDS + SENTENCE_PAUSE)


def test_words_have_their_times(voice):
    speech = voice.speak(TEXT)
    assert [word.text for word in speech.words] == speech.text.split()
    for word in speech.words:
        part = speech.samples[round(word.start * voices.RATE) : round(word.end * voices.RATE)]
        assert voices.heard(part) == word.text
    assert speech.words[-1].end == pytest.approx(speech.seconds)


@pytest.mark.parametrize("speed", [0.25, 0.5, 1.5, 2, 4.0])
def test_a_speed_divides_the_length(voice, speed):
    usual, speech = voice.speak(TEXT), voice.speak(TEXT, speed=speed)
    frames = round(voices.FRAMES / speed)
    assert voices.heard(speech.samples, voices.FRAMES / frames) == speech.text
    assert speech.seconds == pytest.approx(usual.seconds * frames / voices.FRAMES, rel=0.05)


def test_a_voice_is_chosen_by_name_and_the_first_by_default(voice):
    assert voice.voices == ["anna", "ben"]
    for name, gain in ((None, 0.5), ("anna", 0.5), ("ben", 0.25)):
        assert np.abs(voice.speak("aaa", voice=name).samples).max() == pytest.approx(gain, abs=0.01)


def test_a_stream_has_the_samples_of_speak(voice):
    parts = list(voice.stream(TEXT, speed=2.0))
    assert [part.text for part in parts] == ["hello there.", "good bye, all of you!"]
    assert np.array_equal(np.concatenate([part.samples for part in parts]), voice.speak(TEXT, speed=2.0).samples)
    for part in parts:
        assert [voices.heard(part.samples[round(word.start * voices.RATE) : round(word.end * voices.RATE)], 2.0)
                for word in part.words] == part.text.split()


def test_text_longer_than_the_model_takes_is_cut(voice):
    text = " ".join(["over and over,"] * 30)
    speech = voice.speak(text)
    assert voices.heard(speech.samples) == text and speech.sentences == [text]


def test_a_text_that_comes_in_blocks_is_spoken_as_it_comes(voice):
    came = []

    def blocks():
        for number in range(40):
            came.append(number)
            yield "Over and over. "

    first = next(voice.say(blocks()))
    assert first.text == "over and over." and len(came) < 10


@pytest.mark.parametrize("given, code", [
    ({"text": ""}, "empty-input"), ({"text": " \n "}, "empty-input"), ({"text": "Fine. naïve"}, "unknown-characters"),
    ({"voice": "clara"}, "voice-not-found"), ({"speed": 9}, "bad-value"), ({"speed": 0.2}, "bad-value"),
    ({"speed": float("nan")}, "bad-value"), ({"speed": float("inf")}, "bad-value"), ({"speed": True}, "bad-value"),
    ({"speed": "1"}, "bad-value"),
])
@pytest.mark.parametrize("way", ["speak", "stream"])
def test_an_unspeakable_text_raises_before_any_sound(voice, monkeypatch, way, given, code):
    monkeypatch.setattr(voice.engine, "submit", lambda _: pytest.fail("nothing must be computed"))
    with refused(code):
        getattr(voice, way)(**({"text": "Fine. Good"} | given))


def test_batching_does_not_change_the_sound(voice):
    lines = [SpeechInput([2, 3, 4]), SpeechInput([5] * 30, 1, 2.0), SpeechInput([6])]
    together = voice.engine.submit(lines).result()
    for line, sound in zip(lines, together, strict=True):
        [alone] = voice.engine.submit([line]).result()
        assert np.array_equal(alone.samples, sound.samples) and np.array_equal(alone.frames, sound.frames)


def test_the_torch_program_has_the_same_output(voice_bundle, voice):
    with sbkit.infer.load(voice_bundle, model="torch", device="cpu") as program:
        mine, theirs = voice.speak(TEXT, "ben", 2.0), program.speak(TEXT, "ben", 2.0)
    assert np.allclose(mine.samples, theirs.samples, atol=1e-3) and mine.words == theirs.words


def test_nan_samples_raise(tmp_path):
    folder = bundles.change(voices.make(tmp_path / "v"), files={})
    model = onnx.load(folder / "model.onnx")
    node = next(each for each in model.graph.node if each.output[0] == "endless")
    node.op_type, node.input[1] = "Div", "sounding"
    onnx.save(model, folder / "model.onnx")
    with refused("nan-output"):
        sbkit.infer.load(folder, device="cpu")


# ---------------------------------------------------------------- words that espeak-ng spells


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
def phone_bundle(tmp_path_factory):
    return voices.make(tmp_path_factory.mktemp("voice") / "v", **PHONES)


@pytest.fixture
def phone_voice(phone_bundle, asked):
    with sbkit.infer.load(phone_bundle, device="cpu") as loaded:
        yield loaded


def test_phones_are_spoken_and_words_have_their_times(phone_voice, asked):
    speech = phone_voice.speak("Hello, not at. All")
    assert speech.text == "hello, not at. all"
    assert voices.heard(speech.samples) == "oolllleehh ttoonn ttaa. llllaa"
    assert [word.text for word in speech.words] == ["hello,", "not", "at.", "all"]
    for word, sound in zip(speech.words, ["oolllleehh", "ttoonn", "ttaa.", "llllaa"], strict=True):
        part = speech.samples[round(word.start * voices.RATE) : round(word.end * voices.RATE)]
        assert voices.heard(part) == sound
    assert asked[1:] == [["all", "at", "hello", "not"]], "all words of a text at once"


def test_marks_that_are_symbols_are_kept_where_they_are(phone_voice):
    [phrase] = phone_voice.phrases("'hello' not.")
    assert "".join(voices.SYMBOLS[number] for number in phrase.ids) == "'oolllleehh' ttoonn."


def test_unknown_characters_are_reported_and_so_are_unknown_sounds(phone_voice):
    with refused("unknown-characters", kind=UnknownCharacters) as caught:
        phone_voice.speak("hello wet bad c")
    assert str(caught.value).startswith(
        "the voice has no symbols for 'w' (character 7), '[ð] in bad' (character 11; character 11), 'c' (character 15)")
    assert phone_voice.speak("hello wet", skip_unknown=True).text == "hello wet"
    assert voices.heard(phone_voice.speak("hello wet", skip_unknown=True).samples) == "oolllleehh ttee"


def test_a_long_text_in_blocks_is_spelled_block_by_block(phone_voice, asked):
    spoken = list(phone_voice.say(["hello no", "t. ", "the bell is no", ""], skip_unknown=True))
    assert " ".join(piece.text for piece in spoken) == "hello not. the bell no"
    assert asked[1:] == [["hello", "no"], ["t"], ["not"], ["bell", "the"]], "none with characters that it never learnt"


def test_a_voice_that_needs_espeak_is_refused_without_it_when_it_is_loaded(phone_bundle, monkeypatch):
    monkeypatch.setitem(sys.modules, "espeakng_loader", None)
    pronunciation.cache_clear()
    with refused("missing-package") as caught:
        sbkit.infer.load(phone_bundle, device="cpu")
    assert "sbkit[demo]" in caught.value.hint
