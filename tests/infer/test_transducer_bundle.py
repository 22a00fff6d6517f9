"""A transducer's bundle is transcribed, heard live and refused as a CTC recogniser's is."""

import json

import bundles
import numpy as np
import pytest

import sbkit.infer
from sbkit.errors import SbkitError
from sbkit.export import layout


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
def test_a_stream_says_what_the_recording_says(model, piece):
    stream, signal = model.stream(), bundles.say("ab cd dc")
    heard = [each for at in range(0, len(signal), piece) for each in stream.feed(signal[at:at + piece])]
    heard += stream.finish()
    assert [word.text for each in heard for word in each.settled] == ["ab", "cd", "dc"]


def test_a_search_is_refused_with_what_to_do(model, bundle):
    with pytest.raises(SbkitError, match="a transducer is decoded greedily, so it takes no hot_words") as refused:
        model.stream(hot_words=["ab"])
    assert "CTC" in refused.value.hint


@pytest.mark.parametrize("change, told", [
    ({"context": 3}, "Got invalid dimensions|can't be run|tokens"), ({"joint_size": 7}, "joiner.onnx|decoder.onnx|7"),
    ({"joiner": "decoder.onnx"}, "takes .*encoded"), ({"decoder": "gone.onnx"}, "gone.onnx is missing"),
    ({"joiner": "../joiner.onnx"}, "joiner is '../joiner.onnx'"), ({"context": 0}, "context is 0")])
def test_a_bundle_whose_parts_do_not_fit_is_refused(tmp_path, change, told):
    folder = bundles.make_transducer(tmp_path / "b", streams=False)
    values = json.loads((folder / layout.CONFIG).read_text())
    (folder / layout.CONFIG).write_text(json.dumps({**values, **change}))
    with pytest.raises(SbkitError, match=told):
        sbkit.infer.load(folder, device="cpu", threads=1)
