"""What decides a run is one value, from which its objects are built once."""

import dataclasses
from pathlib import Path

import encoders
import pytest
import run_folders
import torch
from speechbrain.lobes.models.transformer.TransformerASR import TransformerASR
from trained_runs import here, metrics

from sbkit.errors import SbkitError
from sbkit.recipe import arguments
from sbkit.runs import pretrained
from sbkit.runs.run_config import RunConfig

ROOT = Path(__file__).parents[2]
SMALL = ROOT / "tests" / "recipe" / "small.yaml"


def config_of(tmp_path, *words, recipe=SMALL):
    command = arguments.parse([str(recipe), "--output_folder", str(tmp_path / "run"), *words])
    return RunConfig.of(command, torch.device("cpu"))


def test_what_the_corpus_decides_leads_to_another_config(tmp_path):
    config = config_of(tmp_path, "--d_model", "8")
    decided = config.deciding({"output_neurons": 25})
    assert decided.overrides["output_neurons"] == 25 and decided.overrides["d_model"] == 8
    assert decided.tree.at("tokenizer", "vocab_size") == 25 and decided.tree.at("ctc_lin", "n_neurons") == 25

    assert config.tree.at("tokenizer", "vocab_size") == 20 and "output_neurons" not in config.command.overrides
    assert config.deciding({}) is config
    for value in (config, config.command):
        with pytest.raises(dataclasses.FrozenInstanceError):
            value.overrides = {}


def test_a_measured_batch_size_keeps_the_other_arguments(tmp_path):
    config = config_of(tmp_path, "--batching.max_batch_seconds", "auto", "--batching.step_seconds", "24")
    decided = config.deciding_batch_size(12.0).keys().batching
    assert config.keys().batching.auto and not decided.auto
    assert (decided.max_batch_seconds, decided.step_seconds) == (12.0, 24)
    assert config.command.overrides == {"batching": {"max_batch_seconds": "auto", "step_seconds": 24},
                                        "output_folder": str(tmp_path / "run")}


def test_an_accumulation_factor_is_refused_with_the_key_to_use(tmp_path):
    with pytest.raises(SbkitError, match=r"command line: --grad_accumulation_factor: it is 3, .*"
                                         r"set batching\.step_seconds: the audio of an update"):
        config_of(tmp_path, "--grad_accumulation_factor", "3")
    with pytest.raises(SbkitError, match=r"grad_accumulation_factor: it is 4, .*set batching\.step_seconds"):
        config_of(tmp_path, recipe=SMALL.parent / "broken" / "accumulation.yaml")
    with pytest.raises(SbkitError, match=r"--grad_accumulation_factor: it is 2, .*set step_seconds: the audio"):
        config_of(tmp_path, "--grad_accumulation_factor", "2", recipe=ROOT / "hparams" / "ctc.yaml")
    assert config_of(tmp_path, "--grad_accumulation_factor", "1").run_opts.grad_accumulation_factor == 1


@pytest.mark.parametrize("kind", ["whisper", "wav2vec2-layer"])
def test_preparing_asks_a_pretrained_encoder_for_facts_and_checks_its_files_without_its_weights(kind, tmp_path):
    source = encoders.make(tmp_path / "encoder", kind)
    config = config_of(tmp_path, "--encoder_source", str(source), recipe=ROOT / "hparams" / "finetune.yaml")
    keys = config.keys()
    assert pretrained.fetch(keys.pretrainer) == {"encoder": str(source)}
    assert {parameter.device.type for parameter in keys.encoder.parameters()} == {"meta"}
    assert keys.encoder.longest_seconds == (30 if kind == "whisper" else None)
    assert keys.pretrainer.loadables["encoder"] is keys.encoder


@pytest.mark.slow
def test_a_run_builds_its_model_once_also_if_the_corpus_decides_its_size(tmp_path, monkeypatch):
    built, construct = [], TransformerASR.__init__

    def counted(self, tgt_vocab, *args, **kwargs):
        built.append(tgt_vocab)
        construct(self, tgt_vocab, *args, **kwargs)

    monkeypatch.setattr(TransformerASR, "__init__", counted)
    data, out = run_folders.corpus(tmp_path / "data", 1.0, train=8, dev=2, test=2), tmp_path / "out"
    words = [str(ROOT / "hparams" / "ctc.yaml"), *(f"--{name}={value}" for name, value in run_folders.TINY.items()),
             f"--data_folder={data}", f"--output_folder={out}", "--device=cpu", "--no-check", "--noprogressbar"]
    for epochs in (1, 2):  # the second start resumes
        built.clear()
        here("train", *words, f"--number_of_epochs={epochs}")
        assert len(built) == 1 and built[0] != 28, "28 is the recipe's"
    assert len(metrics(out, "run")) == 2
