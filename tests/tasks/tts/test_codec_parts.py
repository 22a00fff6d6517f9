"""A recipe whose decoder, head or quantiser is not its codec's is told so, before anything is labelled."""

import json

import bundles
import pytest
import torch
import toy_codec
import toy_voice
from safetensors.torch import save_file

from sbkit.nn.codec.coder import definition
from sbkit.tasks.tts import TTS
from sbkit.tasks.tts.keys import CODEC_PARTS


@pytest.fixture
def keys(tmp_path):
    """Of a tiny voice whose codec has its very parts."""
    found = TTS.Keys.read(toy_voice.hparams(tmp_path))
    parts = torch.nn.ModuleDict({name: getattr(found, name) for name in CODEC_PARTS})
    defined = {name: definition(part) for name, part in parts.items()}
    found.written = lambda **changes: save_file(
        parts.state_dict(), f"{found.codec}/model.safetensors", {"definition": json.dumps(defined | changes)})
    found.written()
    return found


def test_the_codecs_own_parts_do_not_differ(keys):
    assert keys.wrong_bundles() == []


def test_other_numbers_of_a_part_are_named(keys):
    keys.written(quantiser=definition(keys.quantiser) | {"levels": [2, 2]})
    [problem] = keys.wrong_bundles()
    assert problem.key == "quantiser" and "levels" in problem.message and "[2, 2]" in problem.message


def test_a_layer_more_is_named(keys):
    keys.decoder.fast.blocks.append(keys.decoder.fast.blocks[0])
    [problem] = keys.wrong_bundles()
    assert problem.key == "decoder" and "decoder.fast.blocks." in problem.message


@pytest.mark.parametrize("content", [b"", b"\xff" * 64])
def test_weights_that_cannot_be_read_are_told(keys, content):
    with open(f"{keys.codec}/model.safetensors", "wb") as file:
        file.write(content)
    [problem] = keys.wrong_bundles()
    assert problem.key == "codec" and "cannot be read" in problem.message


def test_parts_of_the_codec_cannot_be_reinitialised(keys):
    keys.init_leave = ["decoder.slow", "head"]
    [problem] = [each for each in keys.clashes() if each.key == "init_leave"]
    assert "decoder.slow, head" in problem.message


def test_a_bundle_that_is_not_there_or_of_another_kind_or_rate_is_told(keys, tmp_path):
    keys.codec = str(tmp_path / "nowhere")
    [problem] = keys.wrong_bundles()
    assert problem.key == "codec" and problem.message == f"there is no bundle in {keys.codec}"
    bundles.make(tmp_path / "recogniser")
    toy_codec.make(tmp_path / "codec")
    keys.codec = keys.recogniser = str(tmp_path / "recogniser")
    assert [each.key for each in keys.wrong_bundles()] == ["codec"]
    keys.codec, keys.sample_rate = str(tmp_path / "codec"), 22_050
    assert [each.key for each in keys.wrong_bundles()] == ["sample_rate"]
