"""A voice's config.json: what is written is read again, and what no text could be spoken with is told."""

import json

import bundles
import pytest
import voices

from sbkit.errors import SbkitError
from sbkit.export import layout
from sbkit.export.layout import VoiceConfig


def voice(**changes):
    return VoiceConfig(**({"sample_rate": 24_000, "symbols": ["<pad>", " ", "a", "é"], "speakers": ["anna"],
                           "max_symbols": 200, "frame_seconds": 0.02} | changes))


def written(folder, **changes):
    values = json.loads(voice().to_json()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in values.items() if v is not ...}))
    return folder


def test_a_configuration_is_read_as_it_was_written(tmp_path):
    mine = voice(language="fr", codec="0" * 64, books=[1000, 1000], models={"onnx": "model.onnx"})
    (tmp_path / "config.json").write_text(mine.to_json())
    assert VoiceConfig.read(tmp_path) == layout.read(tmp_path) == mine


@pytest.mark.parametrize("changes, expected", [
    ({"symbols": ["<pad>"]}, "must be a list of 2 to 1,000,000, each a text"),
    ({"symbols": "abc"}, "symbols is .* must be a list"),
    ({"symbols": ["<pad>", "a", 3]}, "symbols is .* must be a list"),
    ({"symbols": ["<pad>", "a", ""]}, "symbols is .* must be a list"),
    ({"symbols": ["<pad>", "a", "b", "a"]}, "symbols has 'a' twice"),
    ({"symbols": ["<pad>", "ab"]}, "symbol 'ab' is not one character"),
    ({"symbols": ["<pad>", "\u212b"]}, r"symbol '.u212b' is not one character in Unicode's form NFC"),
    ({"speakers": []}, "speakers is .*, but must be a list of 1 to"),
    ({"speakers": ["a", "a"]}, "speakers has 'a' twice"),
    ({"speakers": ...}, "lacks keys"), ({"max_symbols": 0}, "max_symbols is 0"),
    ({"max_symbols": True}, "max_symbols is True"), ({"frame_seconds": 0}, "frame_seconds is 0"),
    ({"frame_seconds": True}, "frame_seconds is True"), ({"frame_seconds": float("nan")}, "frame_seconds is nan"),
    ({"frame_seconds": float("inf")}, "frame_seconds is inf"), ({"books": [1000, 0]}, "books is .* must be a list"),
    ({"books": 1000}, "books is .* must be a list"), ({"sample_rate": -1}, "sample_rate is -1"),
    ({"models": {"onnx": "../model.onnx"}}, "name of a file in the bundle's folder"),
    ({"models": ["model.onnx"]}, "models is .* must be an object"),
    ({"models": None}, "models is .* must be an object"),
    ({"files": ["model.onnx"]}, "files is .* must be an object"),
    ({"files": {"model.onnx": 3}}, "files is .* must be an"),
    ({"files": {"model.onnx": {"bytes": "3"}}}, "files is .* must be an"),
    ({"trained": []}, "trained is .* must be an object"),
    ({"made_by": "me"}, "made_by is .* must be an object"),
    ({"language": 3}, "language is 3, but must be a text in UTF-8 of 0 to 100 characters, or null"),
    ({"batching": 1}, "batching is 1, but must be true or false"),
    ({"codec": 1}, "codec is 1, but must be a sha256 in hexadecimal, or null"),
    ({"max_symbols": 10**9}, "max_symbols is 1000000000, but must be a whole number from 1 to 50,000"),
    ({"sample_rate": 10**400}, "sample_rate is 1000.*, but must be a whole number from 1,000 to 768,000"),
    ({"min_samples": 10**7}, "min_samples is 10000000, but must be a whole number from 1 to 1,440,000"),
])
def test_what_no_text_can_be_spoken_with_is_refused(tmp_path, changes, expected):
    with pytest.raises(SbkitError, match=expected):
        layout.read(written(tmp_path, **changes))


def test_a_bundle_of_another_kind_is_told_from_it(tmp_path):
    with pytest.raises(SbkitError, match="has a voice, and a speech recogniser is needed here"):
        layout.Config.read(voices.make(tmp_path / "voice"))
    with pytest.raises(SbkitError, match="has a speech recogniser, and a voice is needed here"):
        VoiceConfig.read(bundles.make(tmp_path / "level"))


@pytest.mark.parametrize("text", ['{"format":' + "[" * 100_000, "{" + " " * layout.MAX_BYTES + "}"])
def test_a_configuration_without_end_is_refused(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(SbkitError, match=r"config\.json cannot be read"):
        layout.read(tmp_path)
