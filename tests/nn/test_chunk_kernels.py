"""Chunks through the fast layers against SpeechBrain's own: outputs and gradients, compiled kernels and torch's."""

import copy
import platform
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from speechbrain.lobes.models.transformer.TransformerASR import make_transformer_src_mask
from speechbrain.utils.dynamic_chunk_training import DynChunkTrainConfig

from sbkit.nn.accelerate import accelerate
from sbkit.nn.native import library
from tests.nn.conformer_layers import encoder, padding

WIDTH = 16


@pytest.fixture(autouse=True)
def kernels(own_kernels):
    yield
    library.unload()


def compiled():
    if platform.system() != "Linux" or shutil.which("gcc") is None:
        pytest.skip("the kernels need Linux and gcc")
    assert library.load() is None


def positions(module, frames, longest=None):
    """Of as many distances as there are, the same ones of the same distances if ``longest`` is."""
    if module.attention_type != "RelPosMHAXL":
        return None
    longest = longest or frames
    drawn = torch.randn(1, 2 * longest - 1, WIDTH, generator=torch.Generator().manual_seed(2))
    return drawn[:, longest - frames : longest - 1 + frames]


def outcome(module, x, config, keys=None):
    """Output and gradients, with the masks that SpeechBrain's transformers make."""
    module.zero_grad()
    x = x.clone().requires_grad_()
    pairs = make_transformer_src_mask(x, dynchunktrain_config=config)
    torch.manual_seed(7)
    out = module(x, src_mask=pairs, src_key_padding_mask=keys, pos_embs=positions(module, x.shape[1]),
                 dynchunktrain_config=config)[0]
    kept = torch.ones(out.shape[:2], dtype=torch.bool) if keys is None else ~keys
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    (out * weights)[kept].sum().backward()
    return out.detach()[kept], [x.grad, *(p.grad for p in module.parameters() if p.grad is not None)]


def assert_same(one, other, tolerance=1e-5):
    torch.testing.assert_close(one[0], other[0], atol=tolerance, rtol=tolerance)
    for ours, theirs in zip(one[1], other[1], strict=True):
        assert (ours - theirs).norm() < 5 * tolerance * theirs.norm().clamp(min=1.0)


@pytest.mark.slow
@pytest.mark.parametrize("by_kernels", [False, True])
@pytest.mark.parametrize("attention", ["RoPEMHA", "RelPosMHAXL"])
@settings(deadline=None, max_examples=8)
@given(frames=st.integers(1, 40), size=st.integers(1, 17), left=st.integers(0, 5), taps=st.sampled_from([1, 5, 15]))
def test_whole_utterances_in_chunks_are_speechbrains(attention, by_kernels, frames, size, left, taps):
    slow = encoder(dropout=0.0, fast=False, attention_type=attention, kernel_size=taps)
    fast = copy.deepcopy(slow)
    accelerate(fast)
    x, config = torch.randn(2, frames, WIDTH), DynChunkTrainConfig(size, left)
    expected = outcome(slow, x, config)
    if by_kernels:
        compiled()
    assert_same(outcome(fast, x, config), expected)


@pytest.mark.slow
@settings(deadline=None, max_examples=25)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=4), size=st.integers(1, 12), left=st.integers(0, 4),
       dropout=st.sampled_from([0.0, 0.2]), attention=st.sampled_from(["RoPEMHA", "RelPosMHAXL"]))
def test_padded_batches_by_kernels_are_torchs_with_the_same_dropout(lengths, size, left, dropout, attention):
    compiled()
    module, calls, call = encoder(dropout=dropout, attention_type=attention), [], library.call
    x, config, keys = torch.randn(len(lengths), max(lengths), WIDTH), DynChunkTrainConfig(size, left), padding(*lengths)

    def recorded(kernel, dtype, /, **arguments):
        calls.append(kernel)
        call(kernel, dtype, **arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "call", recorded)
        ours = outcome(module, x, config, keys)
    assert {"softmax_forward", "softmax_backward", "depthwise_forward", "depthwise_backward"} <= set(calls)
    library.unload()
    assert_same(ours, outcome(module, x, config, keys), 3e-5)


@pytest.mark.slow
@pytest.mark.parametrize("by_kernels", [False, True])
@pytest.mark.parametrize("attention", ["RoPEMHA", "RelPosMHAXL"])
def test_in_a_batch_an_utterance_comes_out_as_speechbrain_gives_it_alone(attention, by_kernels):
    slow = encoder(dropout=0.0, fast=False, attention_type=attention, kernel_size=15)
    lengths = [37, 3, 16, 22]
    fast = copy.deepcopy(slow)
    accelerate(fast)
    if by_kernels:
        compiled()
    x = torch.randn(4, 37, WIDTH)
    for config in (DynChunkTrainConfig(4, 1), DynChunkTrainConfig(16, 1)):
        together = outcome(fast, x, config, padding(*lengths))[0].split(lengths)
        for row, n in enumerate(lengths):
            alone = slow(x[row : row + 1, :n], src_mask=make_transformer_src_mask(x[:1, :n], False, config),
                         pos_embs=positions(slow, n, 37), dynchunktrain_config=config)[0]
            torch.testing.assert_close(together[row], alone[0], atol=2e-5, rtol=1e-4)
