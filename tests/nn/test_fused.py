"""A Conformer's layers by compiled kernels against the same layers by torch's, with the same dropout masks."""

import copy
import ctypes
import logging
import os
import platform
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import processes
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from refusals import refused
from speechbrain.lobes.models.convolution import ConvolutionFrontEnd
from speechbrain.nnet import attention
from speechbrain.nnet.normalization import BatchNorm2d
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from sbkit.nn import accelerate as accelerating
from sbkit.nn.accelerate import accelerate, compile_kernels
from sbkit.nn.fast import conformer, fused
from sbkit.nn.native import library
from sbkit.system import disk
from tests.nn.conformer_layers import encoder, padding


@pytest.fixture(autouse=True)
def kernels(own_kernels):
    if platform.system() != "Linux" or shutil.which("gcc") is None:
        pytest.skip("the kernels need Linux and gcc")
    assert library.load() is None


def positions(x):
    """As many as there are distances between its frames."""
    return torch.randn(1, 2 * x.shape[1] - 1, x.shape[2], generator=torch.Generator().manual_seed(2))


def outcome(module, x, mask, amp=False, by_kernels=True, recomputed=False):
    """Output outside the padding, and the gradients by name; and which kernels were called."""
    if by_kernels:
        library.load()
    else:
        library.unload()
    return step(module, x, mask, amp, recomputed)


def step(module, x, mask, amp=False, recomputed=False):
    """The same, with kernels or without as it now is."""
    module.zero_grad()
    x = x.clone().requires_grad_()
    calls, plain_call = [], library.call

    def recorded(kernel, dtype, /, **arguments):
        calls.append(kernel)
        plain_call(kernel, dtype, **arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "call", recorded)
        torch.manual_seed(7)

        def run(x):
            if isinstance(module, ConvolutionFrontEnd):
                return module(x)
            return module(x, src_key_padding_mask=mask, pos_embs=positions(x))[0]

        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            out = checkpoint(run, x, use_reentrant=False) if recomputed else run(x)
        kept = torch.ones(out.shape[:2], dtype=torch.bool) if mask is None else ~mask
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
        (out.float() * weights)[kept].sum().backward()
    grads = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    return out.detach().float()[kept], grads | {"x": x.grad}, calls


def both(run):
    """What it gives with kernels, and what by torch alone; or the kind of error that it ends in."""
    found = []
    for load in (library.load, library.unload):
        load()
        torch.manual_seed(7)
        try:
            found.append(run())
        except (RuntimeError, TypeError) as error:
            found.append(type(error))
    return found


def assert_alike(run):
    ours, theirs = both(run)
    assert ours is theirs if isinstance(theirs, type) else far(ours.detach(), theirs.detach()) < 1e-5


def far(ours, theirs):
    return ((ours - theirs).norm() / theirs.norm().clamp(min=1.0)).item()  # some gradients are 0 but for rounding


def assert_same(module, x, mask=None, tolerance=1e-5):
    fast, fast_grads, calls = outcome(module, x, mask)
    slow, slow_grads, none = outcome(module, x, mask, by_kernels=False)
    assert not none and calls
    assert far(fast, slow) < tolerance
    assert fast_grads.keys() == slow_grads.keys()
    for name, grad in slow_grads.items():
        assert fast_grads[name].dtype == grad.dtype and fast_grads[name].shape == grad.shape, name
        assert far(fast_grads[name], grad) < 5 * tolerance, name
    return calls


def every(kind):
    heads = "relative" if kind == "RelPosMHAXL" else "heads"
    return {f"{part}_{way}" for part in ("norm", "silu", "add", "glu", "depthwise", heads, "softmax")
            for way in ("forward", "backward")}


BOTH = ["RoPEMHA", "RelPosMHAXL"]


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("mask", [None, padding(9, 1, 5)], ids=["whole", "padded"])
def test_every_part_is_what_torch_computes(kind, dropout, mask):
    width, heads = (16, 2) if kind == "RoPEMHA" else (15, 3)  # relative positions take heads of an odd width
    calls = assert_same(encoder(width, heads, dropout, attention_type=kind), torch.randn(3, 9, width), mask)
    assert set(calls) == every(kind)


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=4), st.integers(1, 5), st.integers(1, 9),
       st.sampled_from([1, 3, 31]), st.sampled_from([1, 2, 3, 5]), st.sampled_from(BOTH))
def test_any_shape_and_any_number_of_threads(lengths, heads, pairs, taps, threads, kind):
    assume(pairs * heads > 2)  # the norm of two values is 1 and -1 whatever they are: gradients are rounding
    module = encoder(2 * pairs * heads, heads, kernel_size=taps, attention_type=kind)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        assert_same(module, torch.randn(len(lengths), max(lengths), 2 * pairs * heads), padding(*lengths), 3e-5)
    finally:
        torch.set_num_threads(before)


def front_end(dropout=0.2, **options):
    torch.manual_seed(0)
    module = ConvolutionFrontEnd(
        input_shape=(8, 10, 20), num_blocks=2, num_layers_per_block=2, out_channels=(6, 4), kernel_sizes=(3, 5),
        strides=(2, 1), residuals=(True, False), dropout=dropout, **options)
    accelerate(module)
    with torch.no_grad():
        for name, p in module.named_parameters():
            if "norm" in name:
                p.add_(torch.randn(p.shape) * 0.2)
    return module


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("frames", [17, 6])
def test_a_front_ends_norms_with_what_follows_them(dropout, frames):
    calls = assert_same(front_end(dropout), torch.randn(3, frames, 20))
    assert sorted(set(calls)) == ["norm_backward", "norm_forward"] and len(calls) == 2 * 4


def test_a_front_end_in_bf16_is_as_near_to_fp32():
    module, ours, theirs = front_end(), 0.0, 0.0
    for seed in range(6):  # one seed says little: values near the bend of an activation fall to either side
        x = torch.randn(4, 60, 20, generator=torch.Generator().manual_seed(seed))
        exact, exact_grads, _ = outcome(module, x, None, by_kernels=False)
        slow, slow_grads, _ = outcome(module, x, None, amp=True, by_kernels=False)
        fast, fast_grads, calls = outcome(module, x, None, amp=True)
        assert calls and far(fast, exact) < 1.1 * far(slow, exact) < 2e-2
        ours += sum(far(fast_grads[name], grad) for name, grad in exact_grads.items())
        theirs += sum(far(slow_grads[name], grad) for name, grad in exact_grads.items())
    assert ours < 1.1 * theirs


@pytest.mark.parametrize("options", [{"activation": nn.ReLU}, {"norm": BatchNorm2d}, {"dropout": 0.001}])
def test_another_front_end_goes_by_torch(options):
    _, grads, calls = outcome(front_end(**options), torch.randn(3, 17, 20), None)
    assert not calls and all(grad.isfinite().all() for grad in grads.values())


@pytest.mark.parametrize("kind", BOTH)
def test_in_bf16_it_is_nearer_to_fp32_than_torch_is(kind):
    module, x = encoder(64, 4, attention_type=kind), torch.randn(4, 60, 64)
    mask = padding(60, 31, 50, 8)
    exact, exact_grads, _ = outcome(module, x, mask, by_kernels=False)
    slow, slow_grads, _ = outcome(module, x, mask, amp=True, by_kernels=False)
    fast, fast_grads, calls = outcome(module, x, mask, amp=True)
    assert set(calls) == every(kind) and fast_grads.keys() == exact_grads.keys()
    assert far(fast, exact) < far(slow, exact) * 1.05 < 1e-2
    ours, theirs = ({name: far(grads[name], grad) for name, grad in exact_grads.items()}
                    for grads in (fast_grads, slow_grads))
    assert all(ours[name] < 1.5 * theirs[name] + 1e-6 for name in ours), (ours, theirs)
    assert sum(ours.values()) < sum(theirs.values())


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("amp", [False, True])
def test_a_batch_that_is_all_padding_gives_numbers_and_no_gradient(amp, kind):
    module, x = encoder(attention_type=kind), torch.randn(2, 5, 16)
    mask = torch.tensor([[False] * 5, [True] * 5])
    _, grads, calls = outcome(module, x, mask, amp)
    assert calls and all(grad.isfinite().all() for grad in grads.values())
    assert not grads["x"][1].any()


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("amp", [False, True])
def test_what_is_no_number_stays_none(value, amp, kind):
    module, x = encoder(attention_type=kind), torch.randn(2, 5, 16)
    x[0, 2, 3] = value
    out, grads, calls = outcome(module, x, None, amp)
    assert calls and out[:5].isnan().any(-1).all(), "each frame attends to the one that is broken"
    assert out[5:].isfinite().all()
    assert grads["layers.0.norm1.norm.weight"].isnan().all()


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("recomputed", [False, True])
def test_the_same_seed_gives_the_same_bits_and_activation_checkpointing_the_same_masks_again(kind, recomputed):
    module, x, mask = encoder(attention_type=kind), torch.randn(3, 30, 16), padding(30, 4, 22)
    out, grads, _ = outcome(module, x, mask)
    again, again_grads, _ = outcome(module, x, mask, recomputed=recomputed)
    assert torch.equal(out, again) and all(torch.equal(grads[name], again_grads[name]) for name in grads)


@pytest.mark.parametrize("kind", BOTH)
def test_frozen_parameters_get_no_gradient_and_the_others_theirs(kind):
    module, x = encoder(attention_type=kind), torch.randn(2, 6, 16)
    for name, p in module.named_parameters():
        p.requires_grad_("ffn_module1" not in name)
    assert_same(module, x)
    assert all((p.grad is None) == ("ffn_module1" in name) for name, p in module.named_parameters())


@pytest.mark.parametrize("options", [
    {"attention_type": "RelPosMHAXL", "causal": True},
    {"kernel_size": 5, "causal": True}, {"activation": nn.GELU}, {"dropout": 0.001}, {"bias": False}])
def test_other_layers_go_by_torch_where_they_differ_and_come_out_the_same(options):
    calls = assert_same(encoder(**options), torch.randn(2, 11, 16), padding(11, 6))
    assert set(calls) != every("RoPEMHA") and set(calls) != every("RelPosMHAXL")


@pytest.mark.parametrize("given", [(1, 15, 16), (2, 17, 16), (1, 17, 12), (17, 16), None])
def test_positions_of_another_shape_are_what_they_are_to_torch(given):
    layer, x = encoder(attention_type="RelPosMHAXL").layers[0], torch.randn(2, 9, 16)
    embeddings = None if given is None else torch.randn(given)
    assert_alike(lambda: layer(x, pos_embs=embeddings)[0])


@pytest.fixture
def refusals(caplog):
    """The lines of the log that say why a part of a layer is computed by torch."""
    conformer._log_refusal.cache_clear()
    caplog.set_level(logging.INFO, conformer.logger.name)
    yield lambda: [record.getMessage() for record in caplog.records if record.name == conformer.logger.name]
    conformer._log_refusal.cache_clear()


@pytest.mark.parametrize(("options", "part", "reason"), [
    ({"kernel_size": 5, "causal": True}, "convolution module", "it is causal"),
    ({"activation": nn.GELU}, "feed-forward module", "a layer is of a class that they don't know"),
    ({"dropout": 0.001}, "attention", "its share of dropout is too close to 0 or 1, or it works in place"),
    ({"bias": False}, "convolution module", conformer._CHANGED)])
def test_the_log_says_once_why_torch_computes_a_part(options, part, reason, refusals):
    module, x = encoder(**options), torch.randn(2, 11, 16)
    for _ in range(2):
        outcome(module, x, padding(11, 6))
    line = f"sbkit's compiled kernels don't compute the {part} of a Conformer layer, torch does: {reason}"
    assert refusals().count(line) == 1


def test_the_log_says_nothing_where_kernels_compute_all_or_are_not_used(refusals):
    module, x = encoder(), torch.randn(2, 11, 16)
    outcome(module, x, padding(11, 6))
    outcome(encoder(activation=nn.GELU), x, padding(11, 6), by_kernels=False)
    assert refusals() == []


def refusal_of_attention(kind, change=lambda layer: None, embeddings=(1, 17, 16), **masks):
    layer, x = encoder(attention_type=kind).layers[0], torch.randn(2, 9, 16)
    change(layer)
    positions = torch.randn(embeddings) if kind == "RelPosMHAXL" else None
    return conformer.attention_refusal(layer.mha_layer, layer.norm1, x, masks.get("mask"), masks.get("keys"), positions)


@pytest.mark.parametrize("kind", BOTH)
def test_each_reason_against_attention_by_kernels_is_given(kind):
    def of_mha(**values):
        return lambda layer: vars(layer.mha_layer).update(values)

    assert refusal_of_attention(kind) is None
    assert refusal_of_attention(kind, of_mha(_qkv_same_embed_dim=False)) == \
        "queries, keys and values have weights of their own"
    assert refusal_of_attention(kind, of_mha(vbias=True)) == "values have a bias"
    assert refusal_of_attention(kind, of_mha(dropout=0.001)) == conformer._OTHER_DROPOUT
    assert refusal_of_attention(kind, lambda layer: setattr(layer.mha_layer, "out_proj", nn.Identity())) == \
        "out_proj is a Identity, not a Linear"
    assert refusal_of_attention(kind, lambda layer: setattr(layer, "norm1", nn.LayerNorm(16))) == conformer._OTHER_NORM
    assert refusal_of_attention(kind, lambda layer: shaped("in_proj_weight", 40, 16)(layer.mha_layer)) == \
        "in_proj_weight is not [48, 16]"
    assert refusal_of_attention(kind, lambda layer: layer.double()) == conformer._CHANGED
    assert refusal_of_attention(kind, keys=torch.zeros(2, 8, dtype=torch.bool)) == \
        "the mask of padding is not a boolean tensor [B, T] on the CPU"
    assert refusal_of_attention(kind, mask=torch.zeros(9, 9)) == \
        "the mask of pairs of frames is not a boolean tensor [T, T] on the CPU"


def test_each_reason_against_positions_by_kernels_is_given():
    assert refusal_of_attention("RoPEMHA", lambda layer: vars(layer.mha_layer).update(head_dim=7)) == \
        "heads have an odd number of features, which can't be rotated"
    assert refusal_of_attention("RelPosMHAXL", embeddings=(1, 16, 16)) == \
        "the embeddings of relative positions are not a tensor [1, 2 T - 1, D]"
    assert refusal_of_attention("RelPosMHAXL", lambda layer: shaped("pos_bias_u", 8)(layer.mha_layer)) == \
        "pos_bias_u or pos_bias_v doesn't have 16 values"
    x = torch.randn(2, 9, 16)
    assert conformer.projection_refusal(torch.randn(1, 17, 16), x, torch.float32) is None
    assert conformer.projection_refusal(torch.randn(1, 17, 8), x, torch.float32) == \
        "linear_pos doesn't return a tensor [1, 2 T - 1, D]"
    assert conformer.projection_refusal(torch.randn(1, 17, 16).double(), x, torch.float32) == \
        "linear_pos returns torch.float64 on cpu"


def test_positions_that_are_learnt_and_hooked_get_their_gradient():
    layer, x = encoder(attention_type="RelPosMHAXL").layers[0], torch.randn(2, 9, 16)
    layer.mha_layer.linear_pos.register_forward_hook(lambda layer, args, out: 2 * out)

    def gradient():
        embeddings = torch.linspace(-2, 2, 17 * 16).view(1, 17, 16).requires_grad_()
        layer(x, pos_embs=embeddings)[0].square().sum().backward()
        return embeddings.grad

    assert far(*both(gradient)) < 5e-5


def shaped(name, *shape):
    return lambda attention: setattr(attention, name, nn.Parameter(torch.randn(shape)))


def positions_as(dtype):
    return lambda attention: attention.linear_pos.register_forward_hook(lambda layer, args, out: out.to(dtype))


@pytest.mark.parametrize("kind, change", [
    ("RelPosMHAXL", shaped("pos_bias_u", 8)), ("RelPosMHAXL", shaped("pos_bias_v", 4, 8)),
    ("RelPosMHAXL", shaped("in_proj_weight", 40, 16)), ("RoPEMHA", shaped("in_proj_weight", 40, 16)),
    ("RelPosMHAXL", positions_as(torch.float64)), ("RelPosMHAXL", positions_as(torch.complex64))])
def test_parameters_of_another_shape_and_positions_of_another_type_are_refused_as_by_torch(kind, change):
    layer, x = encoder(attention_type=kind).layers[0], torch.randn(2, 9, 16)
    change(layer.mha_layer)
    with pytest.raises(RuntimeError):
        layer(x, pos_embs=positions(x))


def test_what_is_no_training_step_goes_by_torch():
    module, x = encoder(), torch.randn(2, 6, 16)
    with torch.no_grad():
        assert fused.precision(x) is None
    assert fused.precision(x.double()) is None and fused.precision(x.to("meta")) is None
    assert fused.precision(x) is torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert fused.precision(x) is torch.bfloat16
    with torch.autocast("cpu", torch.float16):
        assert fused.precision(x) is None
    module.double()
    assert not outcome(module, x.double(), None)[2]


def change(module, what):
    layer = module.layers[0]
    if what == "a forward of its own":
        layer.mha_layer.forward = lambda x, *given, **options: (0.5 * x, None)
    elif what == "a hook":
        layer.ffn_module1[1].ffn[0].register_forward_hook(lambda layer, args, out: 2 * out)
    elif what == "a subclass":
        layer.convolution_module.conv.__class__ = type("Mine", (nn.Conv1d,), {"forward": lambda self, x: 0 * x})
    else:
        nn.utils.parametrizations.weight_norm(layer.ffn_module2[1].ffn[3])


@pytest.mark.parametrize("what", ["a hook", "a subclass", "a parametrization", "a forward of its own"])
def test_a_part_that_a_user_changed_is_run_as_it_is(what):
    module = encoder()
    changed = copy.deepcopy(module)
    change(changed, what)
    x = torch.randn(2, 6, 16)
    calls, before = assert_same(changed, x), outcome(module, x, None)[2]
    assert 0 < len(calls) < len(before)


def with_autocast_behind(module, x, mask, amp):
    """The forward is an island in fp32, or in bf16; the backward of the kernels isn't (torch refuses some mixtures)."""
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            out, _ = module(x, src_key_padding_mask=mask, pos_embs=positions(x))
    with torch.autocast("cpu", torch.float16 if amp else torch.bfloat16, enabled=library.loaded()):
        out.float().square().sum().backward()
    return [out, x.grad, *(p.grad for p in module.parameters())]


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("amp", [False, True])
def test_a_backward_under_another_autocast_is_that_of_the_forward(amp, kind):
    x, mask = torch.randn(3, 9, 16), padding(9, 1, 5)
    ours_and_theirs = both(lambda: with_autocast_behind(encoder(attention_type=kind), x, mask, amp))
    for ours, theirs in zip(*ours_and_theirs, strict=True):
        assert far(ours.detach(), theirs.detach()) < (0.1 if amp else 1e-2)


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("mask", [
    padding(9, 1, 5).long(), padding(9, 1, 5).float(), padding(9, 5)[:1].expand(3, 9), padding(9, 5)[:1],
    padding(8, 1, 5), padding(12, 1, 5)], ids=["whole numbers", "floats", "expanded", "one for all", "short", "long"])
def test_masks_mean_what_they_mean_to_torch(mask, kind):
    module, x = encoder(attention_type=kind), torch.randn(3, 9, 16)
    assert_alike(lambda: module(x, src_key_padding_mask=mask, pos_embs=positions(x))[0])


@pytest.mark.parametrize("width", [8, 24, 9000])
def test_features_of_another_width_are_refused(width):
    with pytest.raises(RuntimeError):
        encoder()(torch.randn(2, 5, width))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_another_default_type_is_of_no_account(dtype):
    module, x = encoder(), torch.randn(2, 6, 16)
    _, expected, _ = outcome(module, x, None)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        _, grads, calls = outcome(module, x, None)
    finally:
        torch.set_default_dtype(before)
    assert calls and all(grad.isfinite().all() and grad.shape == expected[name].shape for name, grad in grads.items())


def test_parameters_that_are_no_one_piece_of_memory_are_left_to_torch():
    module = encoder()
    norm = module.layers[0].norm1.norm
    norm.weight = nn.Parameter(torch.rand(32)[::2])
    assert_same(module, torch.randn(2, 6, 16))


def test_tables_made_without_gradients_serve_a_training(monkeypatch):
    monkeypatch.setattr(attention._get_precomputed_values, "memo", {})  # SpeechBrain's own layers can't use such ones
    module, x = encoder(), torch.randn(2, 77, 16)
    with torch.inference_mode():
        module(x)
    assert outcome(module, x, None)[2]


@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
def test_what_comes_out_has_the_type_that_torch_gives_it(given):
    module, x = encoder(), torch.randn(2, 6, 16).to(given)
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = both(lambda: (module.layers[0](x)[0].dtype, module(x)[0].dtype))
    assert ours == theirs


def test_a_kernel_refuses_what_it_would_misread():
    good = torch.zeros(4, 8)
    rest = {"bias": good, "skip": None, "out": good, "rows": 4, "columns": 4, "threads": 1}
    for bad in (good.double(), good.t(), good.to("meta"), good[:, ::2]):
        with pytest.raises(TypeError, match="no kernel takes"):
            library.call("glu_forward", torch.float32, x=bad, **rest)
    with FakeTensorMode():
        bad = torch.zeros(4, 8)
    with refused("fake-tensor") as told:
        library.call("glu_forward", torch.float32, x=bad, **rest)
    assert "registered buffer" in told.value.hint
    with pytest.raises(AssertionError, match="takes x, bias, skip, out, rows, columns, threads, and got bias, skip"):
        library.call("glu_forward", torch.float32, **rest)


#: A C type without its qualifiers, to the type that ctypes converts to.
C_TYPES = {"int": ctypes.c_int, "int64_t": ctypes.c_int64, "float": ctypes.c_float, "double": ctypes.c_double,
           "Dropout *": ctypes.POINTER(library.DropoutStruct)}


def test_kernels_get_the_arguments_of_their_c_functions_in_the_order_there():
    declared = {}
    for source in library.SOURCES:
        for name, listed in re.findall(r"^API void OUT\((\w+)\)\((.*?)\) \{", source.read_text(), re.M | re.S):
            arguments = {}
            for argument in listed.split(","):
                kind, label = re.fullmatch(r"\s*(.*?)(\w+)", argument, re.S).groups()
                kind = " ".join(re.sub(r"\b(const|restrict)\b", " ", kind).split())
                arguments[label] = C_TYPES.get(kind, ctypes.c_void_p if "*" in kind else None)
            declared[name] = list(arguments.items())
    assert declared == {name: list(arguments.items()) for name, arguments in library.KERNELS.items()}


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    library.unload()
    monkeypatch.setenv("SBKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(library, "FLAGS", ["-O0" if flag == "-O3" else flag for flag in library.FLAGS])  # in no time
    return tmp_path / "cache"


def test_they_are_compiled_once(fresh, monkeypatch):
    assert library.load() is None
    (built,) = (fresh / "kernels").iterdir()
    library.unload()
    monkeypatch.setattr(library, "_compile", lambda *given: pytest.fail("compiled again"))
    assert library.load() is None and library.loaded() and built.stat().st_mode & 0o022 == 0


def no_compiler(monkeypatch, fresh):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    return "no C compiler"


def a_compiler_that_fails(monkeypatch, fresh):
    monkeypatch.setattr(library, "FLAGS", [*library.FLAGS, "-include", "not-there.h"])
    return "not-there.h"


def turned_off(monkeypatch, fresh):
    monkeypatch.setenv("SBKIT_KERNELS", "0")
    return "SBKIT_KERNELS=0"


def a_compiler_that_speaks_in_tongues(monkeypatch, fresh):
    script = fresh.parent / "gcc"
    script.write_text("#!/bin/sh\nprintf '\\377\\376 error: \\200' >&2\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setenv("CC", str(script))
    return "gcc failed: "


def no_openmp(monkeypatch, fresh):
    monkeypatch.setattr(library.ctypes, "cast", lambda *given: SimpleNamespace(value=None))
    return "OpenMP"


def no_home(monkeypatch, fresh):
    for name in ("SBKIT_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(disk.Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    return "no home"


def a_folder_others_write_to(monkeypatch, fresh):
    (fresh / "kernels").mkdir(parents=True)
    (fresh / "kernels").chmod(0o777)
    return "others may write"


def a_cache_that_is_a_file(monkeypatch, fresh):
    fresh.write_text("")
    return str(fresh)


@pytest.mark.parametrize("trouble", [no_compiler, a_compiler_that_fails, a_compiler_that_speaks_in_tongues, turned_off,
                                     no_openmp, no_home, a_folder_others_write_to, a_cache_that_is_a_file])
def test_without_them_training_goes_on_and_the_log_says_why(trouble, fresh, monkeypatch, caplog):
    why = trouble(monkeypatch, fresh)
    with caplog.at_level(logging.INFO, accelerating.logger.name):
        compile_kernels(encoder())
    assert why in caplog.text
    out, grads, calls = step(encoder(), torch.randn(2, 6, 16), None)
    assert not calls and out.isfinite().all() and all(grad.isfinite().all() for grad in grads.values())


@pytest.mark.parametrize("spoil", [
    lambda path: os.truncate(path, path.stat().st_size // 2), lambda path: os.truncate(path, 0),
    lambda path: path.write_bytes(path.read_bytes()[:-4096] + bytes(4096)), lambda path: path.chmod(0o666)])
@pytest.mark.slow
def test_what_was_cut_off_or_may_be_anothers_is_compiled_anew(spoil, fresh):
    assert library.load() is None
    (built,) = (fresh / "kernels").iterdir()
    whole = built.read_bytes()
    library.unload()  # the process still has the old file mapped: another one may spoil it
    shutil.copy(built, fresh / "copy")
    built.unlink()
    shutil.move(fresh / "copy", built)
    spoil(built)
    assert library.load() is None and built.read_bytes() == whole and not built.stat().st_mode & 0o077


@pytest.mark.slow
def test_they_use_the_openmp_that_torch_uses_whatever_else_was_imported():
    code = "import sentencepiece, torch; from sbkit.nn.native import library; print(library.openmp())"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found == f"{library.openmp()}\n" and "torch" in found


def test_a_model_without_such_layers_compiles_nothing(fresh):
    compile_kernels(nn.Linear(2, 2))
    assert not library.loaded() and not fresh.exists()


def loads():
    library.FLAGS = ["-O0" if flag == "-O3" else flag for flag in library.FLAGS]
    sys.exit(library.load() and 1)


@pytest.mark.slow
def test_processes_that_start_together_all_get_them(fresh):
    assert [each.returncode for each in processes.programs(2, loads, SBKIT_CACHE=str(fresh))] == [0, 0]
    assert len(list((fresh / "kernels").iterdir())) == 1
