"""A step's arithmetic: counted right, on a copy, and set against what the device's data sheet says."""

import math
import time
import types
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from run_folders import TINY
from speechbrain.lobes.models.convolution import ConvBlock
from speechbrain.nnet.RNN import GRU, LiGRU
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from sbkit.nn.accelerate import accelerate
from sbkit.recipe import flops, load, speed, trace
from sbkit.recipe.speed import Utilisation

RECIPE = Path(__file__).parents[2] / "hparams" / "ctc.yaml"
LARGE = RECIPE.parents[1] / "recipes/CommonVoice/ASR/CTC/hparams/large.yaml"
SECONDS = 4.0


@pytest.fixture(scope="module")
def hparams(tmp_path_factory):
    return load.load(RECIPE, {**TINY, "dropout": 0.0, "output_folder": str(tmp_path_factory.mktemp("run"))})


def by_hand(width=16, ffn=16, channels=(4, 4), layers=1, kernel=15, vocabulary=28, heads=1, seconds=SECONDS):
    """Products of the flagship's layers by their formulas, and of three times as much where gradients of weights and
    inputs follow; the first convolution has no gradient of its input to compute."""
    bins, frames = 80, round(100 * seconds) + 1
    filterbank = 2 * frames * 201 * bins
    padded = frames + 16  # the guard that the front end pads with
    first = 2 * 9 * channels[0] * (padded // 2) * (bins // 2)
    second = 2 * 9 * channels[0] * channels[1] * (padded // 4) * (bins // 4)
    encoded = -(-frames // 4)
    projection, attention = bins // 4 * channels[1] * width, (3 + 1) * width**2
    feed_forward, convolution = 4 * width * ffn, (2 + 1) * width**2 + kernel * width
    linear = 2 * encoded * (projection + layers * (attention + feed_forward + convolution) + heads * width * vocabulary)
    scores = layers * 2 * 2 * encoded**2 * width
    return filterbank + 2 * first + 3 * (second + linear + scores)


def brain_of(hparams, **more):
    return trace.build_brain(hparams["brain"], hparams, **more)


@pytest.mark.slow
def test_it_is_what_the_formulas_say(hparams):
    found = flops.operations_per_second(brain_of(hparams, intermediate_ctc=0.0), SECONDS) * SECONDS
    assert found == pytest.approx(by_hand(), rel=0.05)


@pytest.mark.parametrize("recipe, given, sizes, billions", [
    (RECIPE, {}, {"width": 144, "ffn": 576, "channels": (32, 32), "layers": 6, "heads": 2}, 0.52),
    pytest.param(LARGE, {"language": "en", "ctc_weight": 1.0},
                 {"width": 512, "ffn": 2048, "channels": (64, 32), "layers": 12, "kernel": 31, "vocabulary": 1024,
                  "heads": 2}, 11.5, marks=pytest.mark.long)])
@pytest.mark.slow
def test_a_second_of_audio_costs_a_shipped_recipe_this_much(recipe, given, sizes, billions, tmp_path):
    brain = brain_of(load.load(recipe, {**given, "data_folder": "none", "output_folder": str(tmp_path)}))
    found = flops.operations_per_second(brain, 5.52)
    assert found == pytest.approx(by_hand(**sizes, seconds=5.52) / 5.52, rel=0.01)
    assert found / 1e9 == pytest.approx(billions, rel=0.02)


GROUPED = [(nn.Conv1d(512, 512, 31, padding=15, groups=512), 2 * 512 * 31),
           (nn.Conv1d(8, 12, 3, padding=1, groups=4), 2 * 12 * 2 * 3),
           (nn.ConvTranspose1d(8, 12, 3, padding=1, groups=4), 2 * 8 * 3 * 3),
           (nn.ConvTranspose1d(8, 8, 3, padding=1, groups=8), 2 * 8 * 3)]


@pytest.mark.parametrize("layer, per_frame", GROUPED)
@pytest.mark.parametrize("frozen", [False, True])
def test_a_grouped_convolution_costs_its_forward_again_for_each_gradient(layer, per_frame, frozen):
    layer.requires_grad_(not frozen)
    x = torch.zeros(3, layer.in_channels, 40, requires_grad=True)
    with flops.FlopCounter() as counter:
        layer(x).sum().backward()
    assert counter.operations == (2 if frozen else 3) * 3 * 40 * per_frame


@pytest.mark.slow
def test_it_is_what_torch_counts_besides_gradients_of_convolutions(tmp_path):
    aten = torch.ops.aten
    brain = brain_of(load.load(RECIPE, {**TINY, "ctc_weight": 0.3, "output_folder": str(tmp_path)}))

    def three_forwards(grad, x, weight, _bias, _stride, _padding, _dilation, _transposed, _more, _groups, wanted, **_):
        return sum(wanted[:2]) * 2 * grad[0] * math.prod(grad[2:]) * math.prod(weight)

    with FlopCounterMode(display=False, custom_mapping={aten.convolution_backward: three_forwards}) as theirs:
        ours = flops.run(brain, 2, SECONDS, flops.FlopCounter)
    assert ours.operations == theirs.get_total_flops() > 0


@pytest.mark.gpu
def test_an_lstm_is_counted_on_a_card_as_on_a_cpu(hparams):
    def counted(device):
        brain = brain_of(hparams)
        plain, lstm = brain.trainer.parallel.loss_of, nn.LSTM(16, 16)
        brain.modules["model"].append(nn.ModuleList([lstm]))
        brain.modules.to(device)
        brain.device = torch.device(device)
        without = flops.run(brain, 2, SECONDS, flops.FlopCounter).operations
        def with_lstm(batch):
            computed = plain(batch)
            more = lstm(torch.ones(9, 2, 16, device=device))[0].sum()
            return computed._replace(loss=computed.loss._replace(total=computed.loss.total + more))

        brain.trainer.parallel.loss_of = with_lstm
        return flops.run(brain, 2, SECONDS, flops.FlopCounter).operations - without

    assert counted("cuda") == counted("cpu") > 9 * 2 * 2 * 16 * 128


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.slow
def test_what_a_forward_gives_is_held_until_backward_ends_as_in_training(gpu, hparams, monkeypatch):
    computed, given, held = hparams["brain"].compute_forward, [], []

    class Looking(flops.FlopCounter):
        def __torch_dispatch__(self, *call):
            held.extend(each() is not None for each in given)
            return super().__torch_dispatch__(*call)

    def compute_forward(brain, batch, stage):
        outputs = computed(brain, batch, stage)
        given.append(weakref.ref(outputs[0]))
        return outputs

    monkeypatch.setattr(hparams["brain"], "compute_forward", compute_forward)
    flops.run(brain_of(hparams), 2, SECONDS, Looking, gpu=gpu)
    assert len(held) > 100 and all(held) and not any(each() for each in given)


@pytest.mark.slow
def test_what_a_task_keeps_of_a_forward_is_not_kept(hparams, monkeypatch):
    brain, computed = brain_of(hparams), hparams["brain"].compute_forward

    def remembering(self, batch, stage):
        found = computed(self, batch, stage)
        self.mean = 0.9 * self.mean + 0.1 * found.ctc.mean()
        self.last = found.ctc
        return found

    monkeypatch.setattr(hparams["brain"], "compute_forward", remembering)
    brain.mean = mean = torch.zeros(())
    flops.operations_per_second(brain, SECONDS)
    assert brain.mean is mean and not hasattr(brain, "last")


def test_nothing_of_the_recipe_is_touched(hparams):
    brain = brain_of(hparams)
    before = {name: value.clone() for name, value in hparams["model"].state_dict().items()}
    generator, kinds = torch.get_rng_state(), [type(module) for module in hparams["model"].modules()]
    flops.operations_per_second(brain, SECONDS)
    assert torch.equal(torch.get_rng_state(), generator)
    assert [type(module) for module in hparams["model"].modules()] == kinds
    assert all(parameter.grad is None for parameter in hparams["model"].parameters())
    assert all(torch.equal(value, before[name]) for name, value in hparams["model"].state_dict().items())


@pytest.mark.slow
def test_what_the_loss_does_not_reach_costs_nothing(hparams):
    alone = flops.operations_per_second(brain_of(hparams), SECONDS)
    within = flops.operations_per_second(brain_of(hparams, intermediate_ctc=0.0), SECONDS)
    joint = flops.operations_per_second(brain_of(hparams, ctc_weight=0.3), SECONDS)
    twice = flops.operations_per_second(brain_of(hparams, consistency=0.2), SECONDS)
    assert joint > 1.01 * alone and alone >= within
    assert twice == pytest.approx(2 * alone - 2 * 401 * 201 * 80 / SECONDS), "the views share their features"


def test_the_typical_length_costs_what_all_lengths_cost():
    durations = np.array([1.0, 2.0, 9.0], dtype=np.float32)
    cost = lambda seconds: 5 * seconds + 3 * seconds**2  # noqa: E731
    typical = flops.typical_seconds(durations)
    assert cost(typical) / typical == pytest.approx(cost(durations).sum() / durations.sum())


@pytest.mark.parametrize("name, precision, peak", [
    ("NVIDIA H200", "bf16", 989e12), ("NVIDIA H200 NVL", "bf16", 836e12), ("NVIDIA H100 PCIe", "fp16", 756e12),
    ("NVIDIA H100 80GB HBM3", "bf16", 989e12), ("NVIDIA GH200 480GB", "bf16", 990e12),
    ("NVIDIA A100-SXM4-80GB", "fp32", 19.5e12), ("NVIDIA H200", "tf32", 495e12), ("NVIDIA L40S", "bf16", 362e12),
    ("NVIDIA GeForce RTX 4090", "bf16", 165.2e12), ("NVIDIA GeForce RTX 3090 Ti", "bf16", None),
    ("NVIDIA H800 PCIe", "bf16", 756e12), ("NVIDIA B200", "bf16", 2250e12), ("NVIDIA L4", "bf16", 121e12),
    ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", None), ("NVIDIA A10G", "bf16", None),
    ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16", None), ("Some card", "bf16", None),
])
def test_a_gpu_is_known_by_its_name(monkeypatch, name, precision, peak):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    products = "high" if precision == "tf32" else "highest"
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: products)
    found, source = speed.peak_of(torch.device("cuda"), precision.replace("tf32", "fp32"))
    assert found == peak and (peak is not None or source == name)


def test_a_cpu_is_measured():
    found, source = speed.peak_of(torch.device("cpu"), "fp32")
    assert found > 1e8 and source == "a large matrix product here"


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_peak_of_a_cpu_is_that_of_fp32_where_a_precision_is_emulated(monkeypatch, precision):
    speeds = {"fp32": 5e10, precision: 9e8}
    monkeypatch.setattr(speed, "speed_of", lambda device, precision: speeds[precision])
    assert speed.peak_of(torch.device("cpu"), precision)[0] == 5e10
    speeds[precision] = 2e11
    assert speed.peak_of(torch.device("cpu"), precision)[0] == 2e11


def test_no_utilisation_is_reported_above_the_whole_peak():
    measured_too_low = Utilisation(6e8, 2e10, "a product")
    assert measured_too_low.share(33.0) == pytest.approx(0.99)
    assert measured_too_low.share(67.0) is None and measured_too_low.words(67.0) == "40.2 GFLOP/s"


def test_a_share_is_told_only_where_the_device_is_known():
    known, unknown = Utilisation(6e8, 2e11, "its data sheet"), Utilisation(6e8, None, "Some card")
    assert known.share(100.0) == pytest.approx(0.3) and known.words(100.0) == "MFU 30 %"
    assert unknown.share(100.0) is None and unknown.words(100.0) == "60 GFLOP/s"
    assert "200 GFLOP/s" in str(known) and "its data sheet" in str(known)
    assert "the peak of Some card is unknown" in str(unknown)


# ---------------------------------------------------------------- backward from node to node, as on a GPU


class Scaled(torch.autograd.Function):
    """One with an input that needs no gradient, and two outputs of which one is used."""

    @staticmethod
    def forward(ctx, x, factor, weight):
        ctx.save_for_backward(x, weight)
        ctx.factor = factor
        return x @ weight * factor, x + 1

    @staticmethod
    def backward(ctx, gradient, other):
        x, weight = ctx.saved_tensors
        return gradient @ weight.t() * ctx.factor + other, None, x.t() @ gradient * ctx.factor


def block(number):
    return nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16)) if number else nn.Linear(16, 16)


def forward(layers, weight, x, recomputed):
    x = torch.relu(layers[0](x))
    x, _ = Scaled.apply(x, 3.0, weight)
    for layer in layers[1:]:
        branch = checkpoint(layer, x, use_reentrant=False) if recomputed else layer(x)
        x = nn.functional.layer_norm(x + torch.tanh(branch), (16,))
    return x.square().sum()


@pytest.mark.parametrize("recomputed", [False, True])
def test_it_computes_what_the_engine_does_and_frees_what_it_has_used(recomputed):
    found = []
    for by_node in (True, False):
        with trace.fake_tensors():
            layers, weight = nn.ModuleList(map(block, range(4))), nn.Parameter(torch.ones(16, 16))
            x = torch.ones(8, 16, requires_grad=True)
            with flops.FlopCounter() as counter:
                if by_node:
                    flops.backward(lambda: forward(layers, weight, x, recomputed))  # noqa: B023 (called here)
                else:
                    forward(layers, weight, x, recomputed).backward()
        found.append(counter.operations)
    assert found[0] == found[1] > 0


@pytest.mark.parametrize("shape", [(2, 5, 16), (2, 4, 5, 16)])
@pytest.mark.parametrize("mask", [None, torch.ones(5, 5, dtype=torch.bool)])
def test_attention_of_any_shape_has_the_shape_that_it_has(shape, mask):
    with trace.fake_tensors():
        x = torch.ones(shape)
        with flops.FusedAttention():
            found = nn.functional.scaled_dot_product_attention(x, x, x, None if mask is None else mask.clone())
    assert tuple(found.shape) == shape


def test_what_forward_saved_is_free_after_its_use():
    x, kept = torch.ones(3, requires_grad=True), []

    def compute():
        loss = (x * 2).exp().sum()
        kept.append(loss.grad_fn.next_functions[0][0])
        return loss

    flops.backward(compute)
    with pytest.raises(IndexError):
        kept[0](torch.ones(3))


class Wrapped(nn.Module):
    """A user's encoder with a layer of SpeechBrain's and with one that is sbkit's."""

    def __init__(self):
        super().__init__()
        self.rnn = GRU(hidden_size=8, input_size=8, bidirectional=True)
        self.own = ConvBlock(1, 2, input_shape=[2, 10, 8])
        accelerate(self)

    def forward(self, x):
        return self.rnn(x)[0].sum() + self.own(x).sum()


def test_the_layers_that_others_wrote_are_named_with_their_share():
    encoder = Wrapped()
    with trace.fake_tensors(encoder) as fakes, flops.FlopCounter() as counter:
        x = fakes.mode.from_tensor(torch.randn(2, 10, 8))
        encoder(x).backward()
    rnn, layers = encoder.rnn.rnn, dict(counter.by_layer)
    line = flops.layer_shares(types.SimpleNamespace(hparams=types.SimpleNamespace(
        model=nn.ModuleList([encoder]), encoder=encoder)), counter)
    share = layers[rnn] / sum(layers.values())
    assert layers.keys() == {None, rnn} and 0 < share < 1
    assert counter.operations > sum(layers.values()), "backward is counted, too"
    assert line == (f"sbkit's layers compute {100 * (1 - share):.0f} % of a forward's FLOPs, and layers of "
                    f"SpeechBrain, torch or your own: encoder.rnn.rnn (GRU) {100 * share:.0f} %")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("kind, gates", [(nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)])
@pytest.mark.parametrize("options", [{}, {"bidirectional": True}, {"num_layers": 2, "dropout": 0.1, "bias": False},
                                     {"proj_size": 3, "num_layers": 2, "bidirectional": True}], ids=str)
def test_recurrent_layers_are_computed_at_once_with_their_products_and_shapes(device, kind, gates, options):
    """Frame by frame takes minutes on fake tensors, and torch has no shapes for some cells of a GPU."""
    if "proj_size" in options and kind is not nn.LSTM:
        pytest.skip("only an LSTM projects its states")
    ways, layers = 1 + options.get("bidirectional", False), options.get("num_layers", 1)
    size = options.get("proj_size", 0)
    out, states = kind(5, 7, batch_first=True, **options)(torch.zeros(2, 10, 5))
    expected = [each.shape for each in (out, *(states if isinstance(states, tuple) else (states,)))]
    with trace.fake_tensors(), trace.without_driver(), flops.FlopCounter() as counter:
        layer = kind(5, 7, batch_first=True, device=device, **options)
        x = torch.zeros(2, 10, 5, device=device, requires_grad=True)
        out, states = layer(x)
        found = [each.shape for each in (out, *(states if isinstance(states, tuple) else (states,)))]
        if device == "cpu":
            (out.sum() + sum(each.sum() for each in states)).backward()
            assert all(weight.grad is not None for weight in layer.parameters())
        else:
            flops.backward(lambda: layer(x)[0].sum())
    assert found == expected
    products = sum(gates * 7 * ((size or 7) + (5 if number == 0 else ways * (size or 7))) + 7 * size
                   for number in range(layers))
    assert counter.by_layer[layer] == 2 * 2 * 10 * ways * products * (1 if device == "cpu" else 2)
    assert counter.operations > counter.by_layer[layer], "backward is counted, too"


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_the_first_state_of_recurrent_layers_has_a_gradient_and_must_be_on_their_device(kind):
    def states(device):
        several = [nn.Parameter(torch.zeros(1, 2, 7, device=device)) for _ in range(2 if kind is nn.LSTM else 1)]
        return several if kind is nn.LSTM else several[0]

    with trace.fake_tensors(), trace.without_driver():
        first = states("cpu")
        kind(5, 7, batch_first=True)(torch.zeros(2, 10, 5), first)[0].sum().backward()
        assert all(state.grad is not None for state in (first if isinstance(first, list) else [first]))
        with pytest.raises(RuntimeError, match="same device"):
            kind(5, 7, batch_first=True, device="cuda")(torch.zeros(2, 10, 5, device="cuda"), states("cpu"))


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_a_cell_in_a_loop_has_shapes_on_a_gpu(kind):
    with trace.fake_tensors(), trace.without_driver():
        states = kind(5, 7, device="cuda")(torch.zeros(2, 5, device="cuda"))
        assert all(state.shape == (2, 7) for state in (states if isinstance(states, tuple) else (states,)))


def test_speechbrains_light_gru_is_computed_at_once():
    light = LiGRU(hidden_size=6, input_shape=(2, 2000, 5), num_layers=2, bidirectional=True)
    shapes = [each.shape for each in light(torch.zeros(2, 9, 5))]
    begun = time.perf_counter()
    with trace.fake_tensors(light) as fakes, flops.FlopCounter() as counter:
        assert [each.shape for each in light(fakes.mode.from_tensor(torch.zeros(2, 9, 5)))] == shapes
        long = counter.operations
        light(fakes.mode.from_tensor(torch.zeros(2, 2000, 5)))[0].sum().backward()
    assert long == 2 * 2 * 2 * 9 * 12 * (5 + 12 + 6 + 6)
    assert time.perf_counter() - begun < 10, "a loop would take minutes"
