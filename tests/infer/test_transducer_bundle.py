"""A transducer's bundle is transcribed, streamed and refused as a CTC recogniser's is."""

import gc
import weakref

import bundles
import numpy as np
import pytest
from refusals import refused

import sbkit.infer
from sbkit.decode import lm
from sbkit.infer.decoding import decoder
from sbkit.infer.pipeline import Options


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return bundles.make_transducer(tmp_path_factory.mktemp("transducer"))


@pytest.fixture(scope="module")
def model(bundle):
    with sbkit.infer.load(bundle, device="cpu", threads=1) as model:
        yield model


def test_recordings_of_any_length_are_transcribed(model):
    silence = np.zeros(20 * bundles.FRAME, np.float32)
    long = np.concatenate([np.concatenate([bundles.say("ab cd"), silence]) for _ in range(40)])
    short, other, many = model.transcribe([bundles.say("ab cd"), bundles.say("d"), long])
    assert (short.text, other.text, many.text) == ("ab cd", "d", " ".join(["ab cd"] * 40))
    assert [round(word.start, 2) for word in short.words] == [0.12, 0.48] and short.words[0].end == pytest.approx(0.28)
    assert all(0 < word.confidence <= 1 for word in short.words)


@pytest.mark.parametrize("piece", [100, 1000, 100_000])
def test_a_stream_has_the_words_of_the_recording(model, piece):
    stream, signal = model.stream(), bundles.say("ab cd dc")
    results = [each for at in range(0, len(signal), piece) for each in stream.feed(signal[at:at + piece])]
    results += stream.finish()
    assert [word.text for each in results for word in each.settled] == ["ab", "cd", "dc"]


#: A frame says a and b, in either order.
UNSURE = bundles.voiced([3, 0, (bundles.PIECES.index("a") + bundles.PIECES.index("b")) / 2, 0, *bundles.spell("cd")])


@pytest.fixture(scope="module")
def searching(bundle):
    options = Options(search={"hot_words": {"ba": 8.0}})
    with sbkit.infer.load(bundle, device="cpu", threads=1, options=options) as model:
        yield model


@pytest.mark.slow
def test_hot_words_are_found_in_recordings_and_streams(model, searching):
    silence = np.zeros(20 * bundles.FRAME, np.float32)
    long = np.concatenate([np.concatenate([UNSURE, silence]) for _ in range(10)])
    found, other, many = searching.transcribe([UNSURE, bundles.say("d"), long])
    assert (found.text, other.text, many.text) == ("ba cd", "d", " ".join(["ba cd"] * 10))
    assert [round(word.start, 2) for word in found.words] == [0.08, 0.28] and 0.3 < found.words[0].confidence < 0.7
    for hot in ("ba", "ab"):
        stream = model.stream(hot_words={hot: 8.0})
        results = [each for at in range(0, len(long), 3000) for each in stream.feed(long[at:at + 3000])]
        results += stream.finish()
        assert [word.text for each in results for word in each.settled] == [hot, "cd"] * 10
        assert sum(each.endpoint for each in results) == 10


def test_a_language_model_decides_where_the_sound_leaves_a_choice(model, tmp_path):
    for first in ("ba", "ab"):
        lm.build([f"{first} cd", first, f"{first} {first} cd"], tmp_path / f"{first}.arpa", order=2)
        stream = model.stream(lm=tmp_path / f"{first}.arpa")
        results = stream.feed(UNSURE) + stream.finish()
        assert [word.text for each in results for word in each.settled] == [first, "cd"]


def test_nan_outputs_are_refused_before_the_search(model):
    search = decoder(model.engine.vocabulary, {"hot_words": ["ba"]})
    [states] = model.engine.run([bundles.say("d")])
    kept = search.keep(states)
    with refused("nan-output"):
        search.keep(np.full_like(states, np.nan))
    [[results]] = search.tokens([[kept]])
    assert [bundles.PIECES[i] for i in results.spans.ids] == ["▁", "d"]


@pytest.mark.parametrize("options, code", [
    ({"lm_weight": 1.0}, "conflicting-options"), ({"hot_words": ["Ü"]}, "unspellable-word"),
    ({"lm": "/none/such.arpa"}, "no-such-path"), ({"beam": 0}, "bad-value"),
])
def test_invalid_search_options_are_refused(model, options, code):
    with refused(code):
        model.stream(**options)


@pytest.mark.parametrize("change, code", [
    ({"context": 3}, "damaged-bundle"), ({"joint_size": 7}, "mismatched-bundle"),
    ({"joiner": "decoder.onnx"}, "mismatched-bundle"), ({"decoder": "gone.onnx"}, "damaged-bundle"),
    ({"joiner": "../joiner.onnx"}, "damaged-bundle"), ({"context": 0}, "damaged-bundle"),
])
def test_a_bundle_whose_parts_do_not_fit_is_refused(tmp_path, change, code):
    folder = bundles.change(bundles.make_transducer(tmp_path / "b", streams=False), **change)
    with refused(code, wording=False):
        sbkit.infer.load(folder, device="cpu", threads=1)


def test_a_cancelled_recordings_data_is_freed(model):
    """A beam gathers some before it searches them together; those of others are searched."""
    beam = decoder(model.engine.vocabulary, {"hot_words": {"ba": 8.0}})
    states = np.zeros((50, len(bundles.PIECES)), np.float32)
    cancelled = [beam.keep(states.copy()) for _ in range(5)]
    other = beam.keep(states.copy())
    held = [weakref.ref(stretch) for stretch in cancelled]
    del cancelled
    gc.collect()
    assert [each() for each in held] == [None] * 5
    gathered = [beam.keep(states.copy()) for _ in range(beam.at_once)]
    assert other.states is None, "it was searched with those of others"
    assert len(beam.tokens([[other], gathered])) == 2
