"""--compile: one graph for all layers and lengths, the same objects and keys, and a run where nothing compiles."""

import logging

import pytest
import torch
from refusals import refused
from speechbrain.lobes.models.transformer.Conformer import ConformerEncoder
from speechbrain.lobes.models.transformer.TransformerASR import TransformerASR
from speechbrain.nnet import attention
from speechbrain.utils.dynamic_chunk_training import DynChunkTrainConfig
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import sbkit
from sbkit.nn.accelerate import accelerate
from sbkit.nn.fast.attention import rotary_table
from sbkit.nn.native import library
from sbkit.recipe.trace import fake_tensors
from sbkit.train import compiling

COMPILE = torch.compile


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x):
        return x + self.lin(x).relu()


def stacked():
    return nn.ModuleDict({"model": nn.ModuleList([nn.ModuleList([Layer(), Layer(), Layer()]), nn.Linear(4, 2)])})


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    torch.compiler.reset()
    compiling._compiled.cache_clear()
    compiling.compile_problem.cache_clear()
    monkeypatch.setattr(compiling.torch, "compile", lambda f, options=None, _compile=torch.compile, **kwargs: _compile(
        f, backend="eager", **kwargs))
    yield
    torch.compiler.reset()


def test_layers_are_compiled_once_for_all_lengths_and_stay_what_they_were():
    modules = stacked()
    layers, keys = list(modules["model"][0]), list(modules.state_dict())
    x = torch.randn(2, 9, 4)
    expected = [layer(x) for layer in layers]
    seen = []
    assert compiling.compile_blocks(modules, None, "cpu") == 3
    assert list(modules["model"][0]) == layers and list(modules.state_dict()) == keys
    assert all(type(layer).__name__ == "Layer" and isinstance(layer, Layer) for layer in layers)
    before = compiling.compiled_graphs()
    for layer, value in zip(layers, expected, strict=True):
        hook = layer.register_forward_hook(lambda module, inputs, output: seen.append(output))
        torch.testing.assert_close(layer(x), value)
        hook.remove()
    assert len(seen) == 3, "a hook that comes and goes is called, and compiles nothing anew"
    for length in (3, 17, 40):
        for layer in layers:
            layer(torch.randn(5, length, 4))
    assert compiling.compiled_graphs() - before == 1


def test_layers_that_fake_tensors_went_through_are_compiled_afterwards():
    modules = stacked()
    assert compiling.compile_blocks(modules, None, "cpu") == 3
    before = compiling.compiled_graphs()
    with fake_tensors(modules), FlopCounterMode(display=False):
        modules["model"][0][0](torch.randn(2, 9, 4)).sum().backward()
    modules.zero_grad()
    modules["model"][0][0](torch.randn(2, 9, 4))
    assert compiling.compiled_graphs() - before == 1


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("with_kernels", [False, True])
def test_a_flagship_layer_compiles_once_for_all_lengths(with_kernels):
    if with_kernels and library.load() is not None:
        pytest.skip("no kernels here")
    model = TransformerASR(
        input_size=8, tgt_vocab=5, d_model=8, nhead=2, num_encoder_layers=2, num_decoder_layers=0, d_ffn=8,
        dropout=0.1, encoder_module="conformer", attention_type="RoPEMHA", kernel_size=3, normalize_before=True,
        causal=False)
    accelerate(model)
    assert compiling.compile_blocks(nn.ModuleDict({"model": model}), None, "cpu") == 2
    model.eval()
    x, lengths = torch.randn(3, 33, 8), torch.tensor([1.0, 0.8, 0.5])
    with torch.no_grad():
        compiled = model.encode(x, lengths)
        with torch.compiler.set_stance("force_eager"):
            torch.testing.assert_close(compiled, model.encode(x, lengths), atol=1e-5, rtol=1e-4)
    model.train()
    counts = []
    for length in (21, 40, 35):
        before = compiling.compiled_graphs()
        model.encode(torch.randn(4, length, 8), torch.tensor([1.0, 0.8, 0.5, 0.3])).sum().backward()
        counts.append(compiling.compiled_graphs() - before)
    assert counts[0] > 0 and counts[1:] == [0, 0], "a length compiled anew"


@pytest.mark.slow
def test_a_convolution_in_chunks_compiles_once_for_all_lengths():
    module = conformer().train().layers[0].convolution_module
    batches = [torch.randn(16, length, 8) for length in (20, 24, 33, 8)]  # of which some are whole chunks
    expected = [module(x, dynchunktrain_config=DynChunkTrainConfig(8, 1)) for x in batches]
    assert compiling.compile_blocks(nn.ModuleDict({"model": module}), ["model"], "cpu") == 1
    before = compiling.compiled_graphs()
    found = [module(x, dynchunktrain_config=DynChunkTrainConfig(8, 1)) for x in batches]
    torch.testing.assert_close(found, expected)
    assert compiling.compiled_graphs() - before == 1


def conformer(layers=1):
    model = ConformerEncoder(layers, 8, 16, 2, kernel_size=3, dropout=0.0, attention_type="RoPEMHA")
    accelerate(model)
    return model


@pytest.mark.long
@pytest.mark.slow
def test_a_compiled_layer_leaves_nothing_in_the_memory_of_its_graphs(monkeypatch):
    """SpeechBrain's memo of rotary tables, filled while CUDA graphs warm up, would lie where a replay writes."""
    monkeypatch.setattr(attention._get_precomputed_values, "memo", {})
    model, x = conformer(), torch.randn(2, 9, 8)
    assert compiling.compile_blocks(nn.ModuleDict({"model": model, "other": conformer(2)}), ["model"], "cpu") == 1
    compiled, _ = model(x)
    assert attention._get_precomputed_values.memo == {}
    with torch.compiler.set_stance("force_eager"):
        expected, _ = model(x)
    assert attention._get_precomputed_values.memo != {}
    torch.testing.assert_close(compiled, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("length, size, dtype", [(1, 2, torch.float32), (700, 36, torch.float32),
                                                 (300, 64, torch.bfloat16), (50, 10, torch.float64)])
def test_rotary_tables_are_speechbrains(length, size, dtype):
    table = attention._get_precomputed_values(length, size, dtype, torch.device("cpu"))
    for ours, theirs in zip(rotary_table(length, size, dtype, torch.device("cpu")), (table.cosines, table.sines),
                            strict=True):
        torch.testing.assert_close(ours, theirs[:length], rtol=0, atol=1e-6)


@pytest.mark.parametrize("mode", [None, "max-autotune"])
def test_a_mode_is_kept_and_layouts_of_one_length_are_not_asked_for(monkeypatch, mode):
    """With inductor's layouts on a CPU, the flagship's attention weights were of one length (seen with torch 2.11)."""
    asked = []
    monkeypatch.setattr(compiling.torch, "compile", lambda f, **kwargs: asked.append(kwargs) or f)
    assert compiling.compile_blocks(stacked(), None, "cpu", mode=mode) == 3
    options, = (kwargs["options"] for kwargs in asked if "options" in kwargs)
    assert options["layout_optimization"] is options["triton.cudagraphs"] is False  # steps are captured as a whole
    assert options.get("max_autotune", False) == (mode is not None)


def test_a_machine_without_a_compiler_says_so_once_and_trains(monkeypatch, caplog):
    def broken(function, **kwargs):
        def run(*args):
            raise RuntimeError("no working C++ compiler\nmore")
        return run

    monkeypatch.setattr(compiling.torch, "compile", broken)
    caplog.set_level(logging.WARNING)
    modules = stacked()
    brain = sbkit.Brain(modules, torch.optim.SGD, {}, {"device": "cpu", "compile": True})
    brain._compile()
    told = [record.message for record in caplog.records if "--compile" in record.message]
    assert told == ["--compile: this machine can't compile for cpu, so the run continues without it: "
                    "RuntimeError: no working C++ compiler"]
    assert not brain.compiled and not any(isinstance(m, compiling.Compiled) for m in brain.modules.modules())


def test_keys_choose_and_a_wrong_one_is_named():
    modules = nn.ModuleDict({"one": nn.Linear(4, 4), "two": nn.ModuleList([Layer(), Layer()])})
    assert compiling.compile_blocks(modules, ["one"], "cpu") == 1
    assert isinstance(modules["one"], compiling.Compiled) and not isinstance(modules["two"][0], compiling.Compiled)
    with refused("bad-option", key="compile_module_keys"):
        compiling.compile_blocks(modules, ["tow"], "cpu")


def test_an_unknown_mode_is_an_error_that_lists_the_known_ones():
    with refused("bad-option", key="compile_mode", value="reduce-overhead"):
        compiling._compiled(nn.Linear, "reduce-overhead", False)
