"""MMS's adapters of a language come from its file beside the model; what isn't there is told."""

import logging

import encoders
import pytest
import torch
import transformers
from refusals import refused
from safetensors.torch import load_file, save_file

from sbkit.nn.pretrained import Encoder, Weights

HEAD = {"vocab_size": 7, "pad_token_id": 0}


@pytest.fixture
def folder(tmp_path):
    """A model with a head, and the adapters and heads of two languages beside it, as MMS's folder has them."""
    made = encoders.make(tmp_path / "mms", "mms-adapters", head="Wav2Vec2ForCTC", **HEAD)
    for seed, language in enumerate(("fra", "uig-script_arabic"), 1):
        drawn = torch.Generator().manual_seed(seed)
        theirs = {name: torch.randn(value.shape, generator=drawn)
                  for name, value in load_file(made / "model.safetensors").items()
                  if ".adapter_layer." in name or "lm_head" in name}
        save_file(theirs, made / f"adapter.{language}.safetensors")
    return made


def outputs(encoder):
    signals = torch.randn(1, 8_000, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return encoder.eval()(signals, torch.tensor([8_000]))[0]


@pytest.mark.parametrize("language", [None, "fra", "uig-script_arabic"])
def test_with_a_languages_adapters_it_is_what_transformers_says(folder, language, caplog):
    encoder = Encoder(str(folder), adapter_language=language)
    with caplog.at_level(logging.INFO):
        encoder.load()
    theirs = transformers.Wav2Vec2ForCTC.from_pretrained(folder, attn_implementation="eager").eval()
    if language is not None:
        theirs.load_adapter(language)
    signal = torch.randn(1, 8_000, generator=torch.Generator().manual_seed(0))
    extractor = transformers.AutoFeatureExtractor.from_pretrained(folder)
    given = extractor(signal[0].numpy(), sampling_rate=16_000, return_tensors="pt")["input_values"]
    with torch.no_grad():
        expected = theirs.wav2vec2(given).last_hidden_state[0]
    torch.testing.assert_close(outputs(encoder), expected, rtol=1e-4, atol=1e-4)
    told = f"adapters of {language}" if language else "the model's own adapters, of no language"
    assert any(told in line and "left out, since this encoder does not use them: lm_head" in line
               for line in caplog.messages)


def test_a_run_that_kept_the_config_has_them_in_its_checkpoint(folder, tmp_path):
    encoder = Encoder(str(folder), tmp_path / "save", adapter_language="fra")
    Weights(encoder).collect_files()
    encoder.load()
    folder.rename(tmp_path / "away")
    again = Encoder(str(folder), tmp_path / "save", adapter_language="fra")
    again.load_state_dict(encoder.state_dict())
    assert torch.equal(outputs(again), outputs(encoder))


@pytest.mark.parametrize("language, code", [
    ("deu", "no-language-adapter"), ("xho", "no-language-adapter"), ("../fra", "bad-value")])
def test_a_language_that_is_not_there_is_told_when_the_recipe_is_built(folder, language, code):
    (folder / "adapter.xho.bin").write_bytes(b"\x80")
    with refused(code, key="adapter_language", value=language):
        Encoder(str(folder), adapter_language=language)


def test_of_many_languages_some_are_named(folder):
    for number in range(40):
        (folder / f"adapter.a{number:02d}.safetensors").touch()
    with refused("no-language-adapter"):
        Encoder(str(folder), adapter_language="deu")


def test_a_file_that_lacks_some_or_is_of_another_model_is_refused(folder):
    path = folder / "adapter.fra.safetensors"
    whole = load_file(path)
    lacking = "encoder.layers.1.adapter_layer.norm.bias"
    save_file({name: value for name, value in whole.items() if name != f"wav2vec2.{lacking}"}, path)
    with refused("pretrained-mismatch"):
        Encoder(str(folder), adapter_language="fra")
    save_file({name: torch.zeros(*value.shape, 2) for name, value in whole.items()}, path)
    with refused("pretrained-mismatch"):
        Encoder(str(folder), adapter_language="fra")


def test_an_encoder_without_such_adapters_takes_no_language(tmp_path):
    with refused("no-language-adapter"):
        Encoder(str(encoders.make(tmp_path, "wav2vec2-layer")), adapter_language="fra")
