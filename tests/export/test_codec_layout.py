"""A codec's config.json: what is written is read again, and what nothing could be coded with is told."""

import json

import pytest
import voices

from sbkit.errors import SbkitError
from sbkit.export import layout
from sbkit.export.layout import CodecConfig

MODELS = {"models": {"onnx": "model.onnx"}, "decoders": {"onnx": "decoder.onnx"}}


def codec(**changes):
    return CodecConfig(**({"sample_rate": 16_000, "codec": "0f" * 32, "books": [1000, 1000], "stride": 320,
                           "context": 16}
                          | MODELS | changes))


def test_a_configuration_is_read_as_it_was_written(tmp_path):
    for mine in (codec(), codec(context=None, min_frames=2, min_samples=321, batching=False)):
        (tmp_path / "config.json").write_text(mine.to_json())
        assert CodecConfig.read(tmp_path) == layout.read(tmp_path) == mine


@pytest.mark.parametrize("changes, expected", [
    ({"codec": "0F" * 32}, "codec is .* must be a sha256"), ({"codec": None}, "codec is .* must be a sha256"),
    ({"books": []}, "books is .* must be a list of 1 to"),
    ({"books": [1000, 0]}, "books is .* must be a list of 1 to 256, each a whole number from 1"),
    ({"books": 1000}, "books is 1000"), ({"stride": 0}, "stride is 0"), ({"min_frames": 1.5}, "min_frames is 1.5"),
    ({"context": -1}, "context is -1, but must be a whole number from 0 to"), ({"context": True}, "context is True"),
    ({"context": ...}, "lacks keys"), ({"decoders": {}}, "decoders must give a file for each of onnx"),
    ({"decoders": ["decoder.onnx"]}, "decoders is .* must be an object"),
    ({"decoders": {"onnx": "../decoder.onnx"}}, "name of a file in the bundle's folder"),
    ({"models": ["model.onnx"]}, "models is .* must be an object"),
    ({"min_frames": 10**9}, "min_frames is 1000000000, but must be a whole number from 1 to 3,000"),
    ({"min_samples": 10**7}, "min_samples is 10000000, but must be a whole number from 1 to 960,000"),
    ({"stride": 10**7}, "stride is 10000000, but must be a whole number from 1 to 16,000"),
    ({"context": 10**9}, "context is 1000000000, but must be a whole number from 0 to 3,000, or null"),
])
def test_what_nothing_can_be_coded_with_is_refused(tmp_path, changes, expected):
    values = {name: value for name, value in (json.loads(codec().to_json()) | changes).items() if value is not ...}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(SbkitError, match=expected):
        layout.read(tmp_path)


def test_a_bundle_of_another_kind_is_told_from_it(tmp_path):
    with pytest.raises(SbkitError, match="has a voice, and a codec is needed here"):
        CodecConfig.read(voices.make(tmp_path / "voice"))
