"""A codec's config.json: what is written is read again, and what nothing could be coded with is told."""

import json

import pytest
import voices

from sbkit.errors import SbkitError
from sbkit.export import layout
from sbkit.export.layout import Codec

MODELS = {"models": {"onnx": "model.onnx"}, "decoders": {"onnx": "decoder.onnx"}}


def codec(**changes):
    return Codec(**({"sample_rate": 16_000, "codec": "0f" * 32, "books": [1000, 1000], "stride": 320, "context": 16}
                    | MODELS | changes))


def test_a_configuration_is_read_as_it_was_written(tmp_path):
    for mine in (codec(), codec(context=None, min_frames=2, min_samples=321, batching=False)):
        (tmp_path / "config.json").write_text(mine.to_json())
        assert Codec.read(tmp_path) == layout.read(tmp_path) == mine


@pytest.mark.parametrize("changes, expected", [
    ({"codec": "0F" * 32}, "codec must be a sha256"), ({"codec": None}, "codec must be a sha256"),
    ({"books": []}, "books is empty"), ({"books": [1000, 0]}, "books must be a list of whole numbers above 0"),
    ({"books": 1000}, "books must be"), ({"stride": 0}, "stride is 0"), ({"min_frames": 1.5}, "min_frames is 1.5"),
    ({"context": -1}, "context is -1, but must be a whole number of 0 or more"), ({"context": True}, "context is True"),
    ({"context": ...}, "lacks keys"), ({"decoders": {}}, "decoders must give a file for each of onnx"),
    ({"decoders": ["decoder.onnx"]}, "decoders must give"),
    ({"decoders": {"onnx": "../decoder.onnx"}}, "outside of the bundle"),
    ({"models": ["model.onnx"]}, "models must be an object"),
    ({"min_frames": 10**9}, "min_frames is 1000000000, but must be 3,000 at most"),
    ({"min_samples": 10**11}, "min_samples is 100000000000, but must be 960,000 at most"),
    ({"stride": 10**11}, "stride is 100000000000, but must be 16,000 at most"),
    ({"context": 10**9}, "context is 1000000000, but must be 3,000 at most"),
])
def test_what_nothing_can_be_coded_with_is_refused(tmp_path, changes, expected):
    values = {name: value for name, value in (json.loads(codec().to_json()) | changes).items() if value is not ...}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(SbkitError, match=expected):
        layout.read(tmp_path)


def test_a_bundle_of_another_kind_is_told_from_it(tmp_path):
    with pytest.raises(SbkitError, match="has a voice, and a codec is needed here"):
        Codec.read(voices.make(tmp_path / "voice"))
