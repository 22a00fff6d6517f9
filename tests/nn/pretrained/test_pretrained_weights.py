"""Weights of every form come in to the bit; what is missing, more, broken or no tensor is told."""

import json
import logging
import pickle
import time

import encoders
import pytest
import torch
import transformers
from published import Evil
from refusals import refused
from safetensors.torch import load_file, save_file

from sbkit.nn.pretrained import Encoder, Weights
from sbkit.nn.pretrained.networks import EncoderOptions, make_config
from sbkit.nn.pretrained.source import Settings

KIND = "wav2vec2-layer"


@pytest.fixture
def folder(tmp_path):
    return encoders.make(tmp_path / "encoder", KIND)


def states(folder):
    encoder = Encoder(str(folder), mask_time_prob=0.05)
    encoder.load()
    return encoder.state_dict()


def same(one, other):
    assert one.keys() == other.keys()
    return all(torch.equal(value, other[name]) for name, value in one.items())


def tensors_of(folder):
    return load_file(folder / "model.safetensors")


def put(folder, tensors):
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("head", ["Wav2Vec2ForCTC", "Wav2Vec2ForPreTraining"])
def test_an_encoder_within_a_larger_model_is_the_same_encoder(tmp_path, head, caplog):
    inner = encoders.make(tmp_path / "inner", KIND)
    whole = encoders.make(tmp_path / "whole", KIND, head=head, seed=1)
    plain = tensors_of(inner)
    put(whole, {name: plain.get(name.removeprefix("wav2vec2."), value) for name, value in tensors_of(whole).items()})
    with caplog.at_level(logging.INFO):
        assert same(states(whole), states(inner))
    left = "lm_head (2)" if head.endswith("CTC") else "quantizer"
    assert any("tensors loaded" in line and left in line for line in caplog.messages)


def test_shards_are_one_model(tmp_path, folder):
    model = transformers.Wav2Vec2Model.from_pretrained(folder)
    model.save_pretrained(tmp_path / "shards", max_shard_size="40KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    assert same(states(tmp_path / "shards"), states(folder))
    missing = sorted((tmp_path / "shards").glob("*.safetensors"))[1]
    missing.unlink()
    with refused("damaged-pretrained", file=missing):
        Encoder(str(tmp_path / "shards"))


@pytest.mark.parametrize("old", [True, False])
def test_a_file_of_torch_is_read_as_tensors_alone(folder, old):
    expected, found = states(folder), tensors_of(folder)
    (folder / "model.safetensors").unlink()
    torch.save(found, folder / "pytorch_model.bin", _use_new_zipfile_serialization=not old)
    assert same(states(folder), expected)


def test_a_pickle_is_refused_and_not_run(folder, tmp_path):
    (folder / "model.safetensors").unlink()
    torch.save({"a": Evil(tmp_path / "run")}, folder / "pytorch_model.bin")
    with refused("unsafe-file"):
        Encoder(str(folder))
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Evil(tmp_path / "run")))
    with refused("unsafe-file"):
        Encoder(str(folder))
    assert not (tmp_path / "run").exists()


def test_the_names_of_an_old_weight_norm_are_understood(folder):
    expected, found = states(folder), tensors_of(folder)
    old = {"original0": "weight_g", "original1": "weight_v"}
    renamed = {}
    for name, value in found.items():
        head, _, last = name.rpartition(".")
        renamed[f"{head.removesuffix('.parametrizations.weight')}.{old[last]}" if last in old else name] = value
    assert "encoder.pos_conv_embed.conv.weight_g" in renamed
    put(folder, renamed)
    assert same(states(folder), expected)


def test_half_precision_becomes_whole(folder):
    put(folder, {name: value.half() for name, value in tensors_of(folder).items()})
    assert {value.dtype for value in states(folder).values()} == {torch.float32}


def test_what_only_training_needs_may_be_missing(folder, caplog):
    found = tensors_of(folder)
    assert found.pop("masked_spec_embed").shape == (32,)
    put(folder, found)
    with caplog.at_level(logging.INFO):
        states(folder)
    assert any("reinitialised, since the source lacks them: masked_spec_embed" in line for line in caplog.messages)


def test_a_run_that_kept_the_config_needs_no_source(folder, tmp_path):
    encoder = Encoder(str(folder), tmp_path / "save", mask_time_prob=0.05)
    assert not (tmp_path / "save").exists(), "building leaves no trace"
    Weights(encoder).collect_files()
    encoder.load()
    folder.rename(tmp_path / "away")
    again = Encoder(str(folder), tmp_path / "save", mask_time_prob=0.05)
    again.load_state_dict(encoder.state_dict())
    signals, counts = torch.randn(1, 4000), torch.tensor([4000])
    with torch.no_grad():
        assert torch.equal(again.eval()(signals, counts), encoder.eval()(signals, counts))
    with refused("no-such-path"):
        Weights(again).collect_files()
    with refused("no-such-path"):
        Encoder(str(tmp_path / "other"), tmp_path / "save")


def test_a_source_that_changed_since_the_run_began_is_refused(folder, tmp_path):
    encoder = Encoder(str(folder), tmp_path / "save")
    Weights(encoder).collect_files()
    encoders.change(folder, layer_norm_eps=1e-3)
    with refused("changed-source"):
        Weights(Encoder(str(folder), tmp_path / "save")).collect_files()


# ---------------------------------------------------------------------------------------------- sources that won't do


def without(name):
    return lambda folder: (folder / name).unlink()


def config(text):
    return lambda folder: (folder / "config.json").write_text(text)


def changed(**values):
    return lambda folder: encoders.change(folder, **values)


def index(files):
    def write(folder):
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))

    return write


def cut_short(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def a_pickle_cut_short(folder):
    (folder / "model.safetensors").unlink()
    path = folder / "pytorch_model.bin"
    torch.save({"a": torch.ones(1000)}, path)
    path.write_bytes(path.read_bytes()[:path.stat().st_size // 2])


def without_a_layer(folder):
    put(folder, {name: value for name, value in tensors_of(folder).items() if ".layers.1." not in name})


@pytest.mark.parametrize("spoil, code", [
    (without("model.safetensors"), "damaged-pretrained"), (without("config.json"), "damaged-pretrained"),
    (without_a_layer, "pretrained-mismatch"), (changed(intermediate_size=48), "pretrained-mismatch"),
    (changed(model_type="bert"), "unsupported-pretrained"), (config("{}"), "unsupported-pretrained"),
    (changed(model_type=["wav2vec2"]), "unsupported-pretrained"),
    *((changed(**{name: value}), "damaged-pretrained")
      for name, value in (
          ("num_hidden_layers", 10**9), ("num_hidden_layers", True), ("num_hidden_layers", 2.5),
          ("layer_norm_eps", float("nan")), ("hidden_act", "evil/kernel"), ("conv_dim", [2**28]),
          ("conv_dim", [32] * 40), ("conv_stride", [0, 2, 2]), ("conv_bias", "yes"),
          ("do_stable_layer_norm", {"a": 1}))),
    (changed(conv_stride=[64, 64, 64]), "unsupported-pretrained"),
    *((changed(**more), "pretrained-mismatch") for more in (
        {"num_hidden_layers": 256, "intermediate_size": 65_536}, {"hidden_size": 16_384},
        {"conv_dim": [32, 16_384, 16_384]})),
    *((index(files), "damaged-pretrained") for files in ({}, [], None, {"a": 1}, {"a": "../b"})),
])
def test_a_source_that_will_not_do_is_told(folder, spoil, code):
    spoil(folder)
    with refused(code):
        Encoder(str(folder))


@pytest.mark.parametrize("spoil", [
    cut_short, a_pickle_cut_short, changed(conv_stride=[5, 2]), changed(num_attention_heads=3), config("{"),
    config("[" * 100_000)], ids=["cut", "a pickle", "strides", "heads", "no JSON", "too deep"])
def test_what_another_library_cannot_read_is_told_in_its_words(folder, spoil):
    spoil(folder)
    with refused("damaged-pretrained", wording=False):
        Encoder(str(folder))


@pytest.mark.parametrize("name", ["/nowhere/model", "./model", "~/no/model", "a/b/c", ""])
def test_a_place_where_nothing_is_is_told(name):
    with refused("no-such-path" if name else "missing-key"):
        Encoder(name)


def test_a_file_in_place_of_its_folder_is_told(folder):
    with refused("no-such-path", file=folder / "model.safetensors"):
        Encoder(str(folder / "model.safetensors"))


def test_without_transformers_it_says_how_to_get_it(folder, monkeypatch):
    import sys

    for name in [name for name in sys.modules if name.split(".")[0] == "transformers"]:
        monkeypatch.setitem(sys.modules, name, None)
    with refused("missing-package"):
        Encoder(str(folder))


# ---------------------------------------------------------------------------------------------- the hub


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A hub's cache of this test's own, and a hub that nobody may ask."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def cached(cache, folder, name):
    commit = "0" * 40
    home = cache / f"models--{name.replace('/', '--')}"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text(commit)
    (home / "snapshots").mkdir()
    folder.rename(home / "snapshots" / commit)
    return home / "snapshots" / commit, home / ".no_exist" / commit


def test_what_the_hubs_cache_holds_needs_no_network(cache, folder):
    expected = states(folder)
    there, absent = cached(cache, folder, "someone/encoder")
    assert same(states("someone/encoder"), expected) and same(states("someone/encoder@main"), expected)
    (there / "preprocessor_config.json").unlink()
    absent.mkdir(parents=True)
    for name in ("preprocessor_config.json", "processor_config.json"):
        (absent / name).touch()  # the hub was asked, and it has none
    assert same(states("someone/encoder"), expected)


def test_weights_from_the_hub_that_do_not_fit_are_told_once_they_are_fetched(cache, folder):
    tensors = tensors_of(folder)
    del tensors["encoder.layers.0.final_layer_norm.weight"]
    put(folder, tensors)
    cached(cache, folder, "someone/encoder")
    with refused("pretrained-mismatch"):
        Weights(Encoder("someone/encoder")).collect_files()


def test_without_a_network_what_the_cache_lacks_is_told(cache, folder):
    with refused("no-network"):
        Encoder("someone/encoder")
    there, _ = cached(cache, folder, "someone/encoder")
    (there / "model.safetensors").unlink()
    encoder = Encoder("someone/encoder")  # a check looks at no weights of the hub
    with refused("no-network"):
        Weights(encoder).collect_files()


@pytest.mark.parametrize("kind, code", [
    ("RepositoryNotFoundError", "no-such-path"), ("GatedRepoError", "gated-model"),
    ("RevisionNotFoundError", "no-such-path"), ("ConnectionError", "no-network")])
def test_what_the_hub_says_is_told_in_a_line(cache, monkeypatch, kind, code):
    import httpx
    from huggingface_hub import constants, errors

    def refuse(*args, **kwargs):
        if kind == "ConnectionError":
            raise ConnectionError("no route")
        raise getattr(errors, kind)("no", response=httpx.Response(404, request=httpx.Request("GET", "http://hub")))

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "https://hub")
    for name in ("get_hf_file_metadata", "hf_hub_download"):
        monkeypatch.setattr(f"huggingface_hub.{name}", refuse)
    with refused(code, value="someone/encoder"):
        Encoder("someone/encoder")


def test_where_no_hub_answers_that_is_told_at_once_with_ways_out(cache, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE",
                        "http://127.0.0.1:9/{repo_id}/resolve/{revision}/{filename}")
    began = time.monotonic()
    with refused("no-network", wording=False) as error:
        Encoder("someone/encoder")
    assert time.monotonic() - began < 10, "a download tries again and again"
    assert "\n" not in str(error.value) and "locate the file on the Hub" not in str(error.value)
    assert error.value.hint == ("with a network, starting again continues the download; without one, name a folder, or "
                                "set HF_HOME to a cache that has it")


def test_the_hubs_paragraph_of_advice_gives_way_to_what_happened(cache, monkeypatch):
    from huggingface_hub import constants, errors

    def lost(*args, **kwargs):
        raise errors.LocalEntryNotFoundError("An error happened. Please check your connection.") from OSError("lost")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "https://hub")
    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", lambda url: None)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lost)
    with refused("no-network"):
        Encoder("someone/encoder")


def test_a_model_of_the_hub_of_a_hundred_billion_numbers_is_refused_before_it_is_built(cache, folder):
    encoders.change(folder, num_hidden_layers=256, hidden_size=16_384, intermediate_size=65_536)
    cached(cache, folder, "someone/encoder")
    with refused("pretrained-mismatch"):
        Encoder("someone/encoder")


@pytest.mark.parametrize("kind", encoders.KINDS)
def test_what_a_config_says_beyond_a_network_never_reaches_transformers(kind, tmp_path):
    """The ranges take what transformers itself writes, and of what it doesn't know nothing comes through."""
    folder = encoders.make(tmp_path / kind, kind)
    hostile = {"_attn_implementation": "evil/kernel@main", "attn_implementation": "evil/kernel@main", "dtype": "evil",
               "auto_map": {"AutoConfig": "evil.Evil"}, "quantization_config": {"quant_method": "evil"},
               "torch_dtype": "evil", "experts_implementation": "evil/kernel", "vocab_size": 2**40, "num_labels": 10**9,
               "id2label": {"0": 1}, "use_weighted_layer_sum": True, "classifier_proj_size": 2**40}
    settings = Settings.of(str(folder))
    known = make_config(settings, EncoderOptions()).to_dict()
    told = make_config(Settings(settings.source, settings.config | hostile, {}), EncoderOptions()).to_dict()
    assert told == known


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
def test_attention_is_of_the_kind_that_leaves_padding_out(folder, key):
    encoders.change(folder, **{key: "eager"})
    encoder = Encoder(str(folder)).eval()
    signals = torch.randn(2, 6000)
    with torch.no_grad():
        together = encoder(signals, torch.tensor([6000, 4000]))
        alone = encoder(signals[1:, :4000], torch.tensor([4000]))
    torch.testing.assert_close(together[1, :alone.shape[1]], alone[0], rtol=0, atol=1e-5)
