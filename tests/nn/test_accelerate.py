"""Every faster layer gives what SpeechBrain's gives: outputs and gradients, fp32 and bf16, same checkpoint keys."""

import copy

import pytest
import torch
from conformers import conformer
from host_syncs import HostSyncs
from refusals import refused
from speechbrain.lobes.features import Fbank
from speechbrain.lobes.models.convolution import ConvolutionFrontEnd
from speechbrain.lobes.models.transformer.Conformer import ConvolutionModule
from speechbrain.nnet.attention import MultiheadAttention
from speechbrain.nnet.CNN import Conv2d
from speechbrain.processing.features import InputNormalization

from sbkit.nn.accelerate import FASTER, accelerate, restore

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 6e-2}


def transformer(attention, encoder="conformer", decoder=0):
    torch.manual_seed(0)
    return conformer(20, 30, d_model=32, nhead=4, num_decoder_layers=decoder, dropout=0.0, activation=torch.nn.GELU,
                     encoder_module=encoder, attention_type=attention)


def front_end():
    torch.manual_seed(0)
    return ConvolutionFrontEnd(
        input_shape=(8, 10, 20), num_blocks=2, num_layers_per_block=2, out_channels=(6, 4), kernel_sizes=(3, 5),
        strides=(2, 1), residuals=(True, False), dropout=0.0,
    )


def outcome(module, run, precision):
    """Output and gradient by parameter of ``run(module)``."""
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == torch.bfloat16):
        out = run(module)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    (out.float() * weights).mean().backward()  # a plain square would be constant behind a LayerNorm
    return out.detach().float(), {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def assert_same(module, run, precision=torch.float32):
    original = copy.deepcopy(module)
    keys = list(module.state_dict())
    assert accelerate(module), "nothing was swapped"
    assert list(module.state_dict()) == keys
    slow, slow_grads = outcome(original, run, precision)
    fast, fast_grads = outcome(module, run, precision)
    tolerance = TOLERANCE[precision]
    torch.testing.assert_close(fast, slow, atol=tolerance * slow.abs().max().item(), rtol=tolerance)
    assert fast_grads.keys() == slow_grads.keys()
    for name, grad in slow_grads.items():
        difference = (fast_grads[name] - grad).norm() / grad.norm().clamp_min(1e-8)
        assert difference < 10 * tolerance, (name, difference.item())


@pytest.mark.parametrize("precision", TOLERANCE, ids=str)
@pytest.mark.parametrize("attention", ["RelPosMHAXL", "RoPEMHA", "regularMHA"])
@pytest.mark.parametrize("encoder", ["conformer", "transformer", "branchformer"])
def test_encoders_equal_the_originals(encoder, attention, precision):
    if encoder == "branchformer" and attention == "RoPEMHA":
        pytest.skip("SpeechBrain's Branchformer has no RoPEMHA")
    x = torch.randn(2, 23, 20)
    assert_same(transformer(attention, encoder), lambda m: m.encode(x, torch.ones(2)), precision)


@pytest.mark.parametrize("attention", ["RelPosMHAXL", "RoPEMHA", "regularMHA"])
def test_decoder_equals_the_original(attention):
    x, tokens = torch.randn(2, 23, 20), torch.tensor([[1, 4, 5, 6], [1, 7, 8, 0]])
    assert_same(transformer(attention, decoder=2), lambda m: m(x, tokens, torch.ones(2), pad_idx=0)[1])


@pytest.mark.parametrize("attention", ["RelPosMHAXL", "RoPEMHA", "regularMHA"])
def test_in_a_batch_each_utterance_comes_out_as_the_original_gives_it_alone(attention):
    slow = transformer(attention).eval()
    fast = copy.deepcopy(slow)
    accelerate(fast)
    lengths = [23, 9, 16]
    x = torch.randn(3, 23, 20)
    with torch.no_grad():
        batch = fast.encode(x, torch.tensor(lengths) / 23)
        for row, n in enumerate(lengths):
            alone = slow.encode(x[row : row + 1, :n], torch.ones(1))
            torch.testing.assert_close(batch[row : row + 1, :n], alone, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("precision", TOLERANCE, ids=str)
@pytest.mark.parametrize("frames", [7, 12, 33])
def test_front_end_equals_the_original(frames, precision):
    x = torch.randn(2, frames, 20)
    assert_same(front_end(), lambda m: m(x), precision)


@pytest.mark.parametrize("options", [
    {"padding": "valid"}, {"stride": (2, 1)}, {"kernel_size": (5, 3)}, {"kernel_size": (3, 1)}, {"dilation": (2, 1)},
    {"groups": 2}, {"bias": False}, {"swap": True}, {"padding_mode": "constant"}, {"weight_norm": True},
    {"padding": "causal"}, {"max_norm": 0.5}, {"kernel_size": (1, 1)}, {"kernel_size": (1, 1), "stride": (2, 3)},
    {"kernel_size": (1, 1), "stride": (3, 2), "groups": 2, "bias": False}, {"kernel_size": (1, 3), "stride": (2, 2)},
])
def test_conv2d_equals_the_original_with_every_option(options):
    torch.manual_seed(0)
    module = Conv2d(**{"out_channels": 6, "kernel_size": (3, 3), "in_channels": 4, **options})
    x = torch.randn(2, 14, 9, 4)
    assert_same(module, lambda m: m(x))


def test_kernels_of_one_value_are_convolved_without_a_stride(monkeypatch):
    """With channels last and a stride the backward of torch's convolution spoils the heap."""
    module = ConvolutionFrontEnd((8, 10, 20), num_blocks=2, num_layers_per_block=1, out_channels=[6, 4],
                                 kernel_sizes=[3, 3], strides=[2, 2], residuals=[True, True])
    accelerate(module)
    strides, plain = [], torch.nn.functional.conv2d
    monkeypatch.setattr(torch.nn.functional, "conv2d", lambda *given: (strides.append(given[3]), plain(*given))[1])
    module(torch.randn(3, 17, 20)).sum().backward()
    assert strides == [(2, 2), (2, 2)], "of the two larger kernels"


@pytest.mark.parametrize("causal", [False, True])
def test_convolution_module_equals_the_original(causal):
    torch.manual_seed(0)
    x = torch.randn(2, 19, 16)
    assert_same(ConvolutionModule(16, 5, causal=causal), lambda m: m(x.clone()))


@pytest.mark.parametrize("mask", [
    None, torch.tensor([[False, True, False], [True, False, False], [False, False, False]]),
    torch.tensor([[0.0, -1.0, 0.5], [0.0, 0.0, 0.0], [2.0, 0.0, 0.0]]),
])
@pytest.mark.parametrize("padded", [False, True])
def test_multihead_attention_takes_speechbrains_masks(mask, padded):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8)
    keys = torch.tensor([[False, False, False], [False, False, True]]) if padded else None
    if padded and mask is not None and mask.is_floating_point():
        keys = torch.zeros(2, 3).masked_fill(keys, float("-inf"))  # torch wants both masks of one type
        pytest.skip("SpeechBrain passes boolean key masks only")
    assert_same(MultiheadAttention(2, 8), lambda m: m(x, x, x, attn_mask=mask, key_padding_mask=keys)[0])


def test_restore_gives_the_original_classes_back():
    module = transformer("RoPEMHA", decoder=1)
    before = [type(layer) for layer in module.modules()]
    accelerate(module)
    assert any(type(layer) in FASTER.values() for layer in module.modules())
    restore(module)
    assert [type(layer) for layer in module.modules()] == before


def test_a_users_subclass_is_left_alone():
    class Mine(torch.nn.Dropout):
        pass

    module = torch.nn.Sequential(Mine(0.1), torch.nn.Dropout(0.1))
    accelerate(module)
    assert type(module[0]) is Mine and type(module[1]) is FASTER[torch.nn.Dropout]


@pytest.mark.parametrize("options", [{}, {"deltas": True, "context": True}, {"filter_shape": "gaussian"},
                                     {"requires_grad": True}, {"param_rand_factor": 0.1}])
def test_features_equal_the_originals_call_after_call(options):
    slow = Fbank(n_mels=20, **options)
    fast = copy.deepcopy(slow)
    assert accelerate(fast)["Filterbank"] == 1
    assert fast.state_dict().keys() == slow.state_dict().keys()
    for samples in (8_000, 5_000):
        x = torch.randn(2, samples)
        torch.manual_seed(3)
        expected = slow(x)
        torch.manual_seed(3)
        torch.testing.assert_close(fast(x), expected, atol=1e-4, rtol=1e-5)


def test_fixed_filters_are_made_once(monkeypatch):
    fast = Fbank(n_mels=20)
    accelerate(fast)
    fast(torch.randn(1, 4_000))
    monkeypatch.setattr(type(fast.compute_fbanks), "_create_fbank_matrix", None)
    fast(torch.randn(1, 4_000))


@pytest.mark.parametrize("norm_type", ["global", "batch", "sentence"])
def test_normalization_equals_the_original_batch_after_batch(norm_type, tmp_path):
    slow = InputNormalization(norm_type=norm_type)
    fast = copy.deepcopy(slow)
    assert accelerate(fast)
    for seed in range(4):
        x = 100 + 3 * torch.randn(3, 40, 5, generator=torch.Generator().manual_seed(seed))
        lengths = torch.tensor([1.0, 0.5, 0.8])
        torch.testing.assert_close(fast(x, lengths), slow(x, lengths), atol=1e-4, rtol=1e-4)
    fast._save(tmp_path / "stats")
    again = InputNormalization(norm_type=norm_type)
    again._load(tmp_path / "stats")
    assert again.count == slow.count
    torch.testing.assert_close(again.glob_std, slow.glob_std)


def test_what_is_not_counted_enters_no_statistics():
    one, other = InputNormalization(), InputNormalization()
    for norm in (one, other):
        accelerate(norm)
    x, lengths = 5 + torch.randn(3, 40, 5), torch.tensor([1.0, 0.5, 0.8])
    noise = torch.randn(1, 30, 5)
    nothing, first = torch.tensor([False]), torch.tensor([True, False, False])
    assert one.counting(noise, None, nothing).isfinite().all()  # even where nothing was counted yet
    for norm in (one, other):
        norm(x, lengths)
    torch.testing.assert_close(one.counting(noise, None, nothing), (noise - other.glob_mean) / other.glob_std)
    torch.testing.assert_close(one(x, lengths), other(x, lengths))
    torch.testing.assert_close(one.counting(x, lengths, first)[:1], other(x[:1], lengths[:1]))
    assert one.count == other.count and torch.equal(one.glob_std, other.glob_std)


def test_running_statistics_don_t_make_the_host_wait():
    norm = InputNormalization()
    accelerate(norm)
    with HostSyncs() as syncs:
        for _ in range(2):
            norm(torch.randn(2, 30, 4), torch.tensor([1.0, 0.5]))
    assert not syncs.found, syncs.found


@pytest.mark.parametrize("training", [True, False])
def test_statistics_go_where_the_features_are(training):
    norm = InputNormalization()
    accelerate(norm)
    norm(torch.randn(2, 30, 4))
    norm.train(training)
    out = norm(torch.randn(2, 30, 4, device="meta"), torch.tensor([1.0, 0.5], device="meta"))
    assert out.device == norm.glob_mean.device == norm.glob_std.device == torch.device("meta")


def test_evaluation_without_statistics_is_told():
    norm, x = InputNormalization(), torch.randn(2, 30, 4)
    accelerate(norm)
    norm.eval()
    for evaluate in (norm, lambda x: norm.counting(x, None, torch.tensor([True, False])),
                     lambda x: norm.train()(x, epoch=norm.update_until_epoch)):
        with refused("no-statistics"):
            evaluate(x)
    norm.train()(x)
    expected = (x - norm.glob_mean) / norm.glob_std
    torch.testing.assert_close(norm.eval()(x), expected)
    for norm_type in ("sentence", "batch"):
        other = InputNormalization(norm_type=norm_type)
        accelerate(other)
        assert other.eval()(x).isfinite().all()
