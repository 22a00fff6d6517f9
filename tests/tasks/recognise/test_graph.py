"""Whole recognisers, from waveforms to log-probabilities, through ONNX Runtime and torch.export."""

import encoders
import numpy as np
import onnxruntime
import pytest
import torch
from conformers import conformer
from refusals import refused
from speechbrain.lobes.features import MFCC, Fbank
from speechbrain.lobes.models.convolution import ConvolutionFrontEnd
from speechbrain.lobes.models.CRDNN import CRDNN
from speechbrain.nnet import RNN
from speechbrain.nnet.linear import Linear
from speechbrain.processing.features import InputNormalization
from torch import nn

from sbkit.export import graph, runners
from sbkit.export.exported import INPUTS
from sbkit.infer.backends import move_program
from sbkit.nn.accelerate import accelerate
from sbkit.nn.causal import CausalFrontEnd
from sbkit.nn.global_norm import GlobalNorm
from sbkit.nn.kaldi import FilterBank
from sbkit.nn.lengths import LengthRule
from sbkit.nn.pretrained import Encoder, Head
from sbkit.tasks.recognise import graph as recogniser
from sbkit.tasks.recognise.acoustic_model import AcousticModel
from sbkit.tasks.recognise.graph import OUTPUTS, reference

MELS, LABELS = 16, 9
#: Samples: the first is shorter than a window, the last far longer than what is traced.
LENGTHS = (90, 4_000, 24_001, 100_000)


def transformer(size, **changes):
    return conformer(size, LABELS, num_decoder_layers=1, **changes)


def one_layer(size, **changes):
    """What the variants differ in is in their first layer; that a second follows, export/test_lobes.py shows."""
    return transformer(size, num_encoder_layers=1, **changes)


def front(blocks=2):
    return ConvolutionFrontEnd(
        input_shape=[4, 40, MELS], num_blocks=blocks, num_layers_per_block=1, out_channels=[6] * blocks,
        kernel_sizes=[3] * blocks, strides=[2] * blocks, residuals=[False] * blocks)


def fixed_norm():
    made = GlobalNorm(MELS, "nowhere")
    made.set_statistics(torch.linspace(-9, -7, MELS), torch.linspace(2, 3, MELS))
    return made


def acoustic_model(encoder=None, norm="sentence", features=None, frontend=front, swap=True):
    torch.manual_seed(0)
    made = frontend() if frontend else None
    width = MELS // 4 * 6 if made else MELS
    encoder = encoder(width) if encoder else transformer(width)
    outer = getattr(encoder, "out_size", 16)
    normalize = norm() if callable(norm) else norm and InputNormalization(norm_type=norm)
    lin = Linear(input_size=outer, n_neurons=LABELS)
    features = features or Fbank(n_mels=MELS)
    for module in (made, encoder, lin):
        for parameter in module.parameters() if module else ():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.15)
        if module:
            module.eval()
            if swap:
                accelerate(module)
    if norm == "global":
        normalize.train()(torch.randn(3, 50, MELS) * 8 - 30, torch.ones(3))
    if normalize:
        normalize.eval()
    return AcousticModel(features, encoder, lin, made, normalize, n_features=MELS)


def crdnn(width):
    encoder = CRDNN(
        input_size=width, rnn_class=RNN.LSTM, rnn_layers=1, rnn_neurons=8, cnn_blocks=1, cnn_channels=[4],
        inter_layer_pooling_size=[2], dnn_blocks=1, dnn_neurons=10)
    encoder.out_size = 10
    return encoder


VARIANTS = {
    "the flagship": {},
    "mfcc, one block, relative positions, global normalisation": {
        "features": MFCC(n_mfcc=MELS, n_mels=20, deltas=False, context=False), "frontend": lambda: front(1),
        "norm": "global", "encoder": lambda size: one_layer(2 * size, attention_type="RelPosMHAXL", causal=True)},
    "what can run live": {
        "features": FilterBank(n_mels=MELS, snip_edges=False), "norm": fixed_norm,
        "frontend": lambda: CausalFrontEnd(MELS, [6, 6]), "encoder": one_layer},
    "branchformer": {"encoder": lambda size: one_layer(
        size, encoder_module="branchformer", attention_type="RelPosMHAXL")},
    "nothing before a crdnn": {"encoder": crdnn, "frontend": None, "norm": None},
}
#: That an export costs seconds decides which of them is exported on a CPU: export/test_bundle.py has the flagship,
#: streaming_bundles.py what can run live, and export/test_lobes.py the Branchformer and what recurs.
ON_A_CPU = "mfcc, one block, relative positions, global normalisation"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Its model, its traced program and the folder with its files."""
    folder, model = tmp_path_factory.mktemp("made"), acoustic_model(**VARIANTS[ON_A_CPU])
    program = recogniser.trace(recogniser.Graph(model))
    graph.write_torch(program, folder / "m.pt2")
    graph.write_onnx(program, folder / "m.onnx", INPUTS, recogniser.OUTPUTS, {"a": "b"})
    return model, program, folder


def test_without_a_head_the_graph_gives_encoder_states():
    whole = acoustic_model()
    model = AcousticModel(whole.compute_features, whole.encoder, None, whole.frontend, whole.normalize, n_features=MELS)
    signals, lengths = torch.randn(2, 9000) * 0.1, torch.tensor([9000, 5000])
    signals[1, 5000:] = 0.0
    with torch.no_grad():
        states, frames = recogniser.Graph(model)(signals, lengths)
        expected, counts = model.encode(*model.features(signals, lengths))
        scores = recogniser.Graph(whole)(signals, lengths)[0]
    assert frames.tolist() == counts.tolist()
    for row, other, count in zip(states, expected, counts, strict=True):
        torch.testing.assert_close(row[:count], other[:count], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(whole.head(states).log_softmax(-1), scores)


def sound(size, seed=0):
    rng = np.random.default_rng(seed)
    time = np.arange(size) / 16_000
    loud = 0.1 * (1 + np.sin(5 * time + seed))
    return (loud * (np.sin(2 * np.pi * 300 * time) + 0.3 * rng.standard_normal(size))).astype(np.float32)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # nor is it written to
def test_every_runtime_says_what_the_recogniser_says(made):
    model, program, folder = made
    least = graph.min_samples(program)
    signals = [sound(size, size) for size in LENGTHS]
    expected = list(map(reference(model, least), signals))
    for name in ("onnx", "torch"):
        path = folder / ("m.onnx" if name == "onnx" else "m.pt2")
        run = runners.on_waveforms(runners.open_runner(name, path), OUTPUTS, least)
        for mine, signal, together in zip(expected, signals, run(signals), strict=True):
            alone = run([signal])[0]
            assert alone.shape == mine.shape
            np.testing.assert_allclose(alone, mine, atol=5e-4)
            np.testing.assert_allclose(together, mine, atol=1e-3)
    # On another device nothing of it is left behind.
    elsewhere = move_program(torch.export.load(folder / "m.pt2"), torch.device("meta")).module()
    found = elsewhere(torch.zeros(2, 30_000, device="meta"), torch.zeros(2, dtype=torch.long, device="meta"))
    assert {each.device.type for each in (*elsewhere.state_dict().values(), *found)} == {"meta"}
    assert not any("fft" in str(node.target) for node in program.graph.nodes), "it has products for transforms"
    session = onnxruntime.InferenceSession(str(folder / "m.onnx"))
    assert [each.shape[:2] for each in session.get_inputs()] == [["batch", "samples"], ["batch"]]
    assert session.get_modelmeta().custom_metadata_map == {"a": "b"}


@pytest.mark.gpu(values=True)
@pytest.mark.parametrize("name", VARIANTS)
def test_a_program_says_on_a_card_what_the_recogniser_says(name, tmp_path):
    model = acoustic_model(**VARIANTS[name])
    graph.write_torch(recogniser.trace(recogniser.Graph(model)), tmp_path / "m.pt2")
    module = move_program(torch.export.load(tmp_path / "m.pt2"), torch.device("cuda", 0)).module()
    signal = torch.from_numpy(sound(24_001))[None]
    with torch.no_grad(), torch.backends.cudnn.flags(allow_tf32=False):
        expected = model.outputs(signal, torch.tensor([24_001]))[0]
        found = module(signal.cuda(), torch.tensor([24_001]).cuda())[0].cpu()
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-3)


def test_the_recogniser_is_left_as_it_was():
    model = acoustic_model()
    kinds = {name: type(layer) for name, layer in model.encoder.named_modules()}
    signal = torch.from_numpy(sound(9_000))[None]
    with torch.no_grad():
        before = model.outputs(signal, torch.tensor([9_000]))[0]
        made = recogniser.Graph(model)
        after = model.outputs(signal, torch.tensor([9_000]))[0]
    assert torch.equal(before, after)
    assert kinds == {name: type(layer) for name, layer in model.encoder.named_modules()}
    assert not any("decoder" in name for name, _ in made.named_parameters()), "the attention decoder stays at home"


@pytest.mark.parametrize("outputs, expected", [
    ([0, *range(1, 64)], (1, 0)), ([0, *((t + 3) // 4 for t in range(1, 64))], (4, 3)),
    ([0, *((t - 1) // 2 for t in range(1, 64))], (2, -1)),
])
def test_lengths_have_a_closed_form(outputs, expected):
    rule = LengthRule(outputs)
    factor, shift = recogniser.closed_form(rule)
    assert (factor, shift) == expected
    assert all((t + shift) // factor == rule(t) for t in range(1, 5000))


def test_lengths_without_one_are_refused():
    with refused("not-exportable"):
        recogniser.closed_form(LengthRule([0, 5, 5, 5, *((t + 1) // 2 for t in range(4, 64))]))


@pytest.mark.long
@pytest.mark.slow
def test_eight_bits_are_in_matrix_products_alone_and_features_stay_exact(made):
    import onnx

    _, _, folder = made
    graph.quantize(folder / "m.onnx", folder / "m8.onnx")
    kinds = [node.op_type for node in onnx.load(folder / "m8.onnx").graph.node]
    assert "MatMulInteger" in kinds and "Conv" in kinds and "ConvInteger" not in kinds
    assert not any(node.op_type in ("STFT", "DFT") for node in onnx.load(folder / "m.onnx").graph.node)
    one, other = (runners.on_waveforms(runners.open_runner("onnx", folder / name), OUTPUTS)([sound(16_000)])[0]
                  for name in ("m.onnx", "m8.onnx"))
    assert 0 < np.abs(one - other).max() < 1.0


@pytest.mark.long
@pytest.mark.slow
def test_a_pretrained_encoder_that_nobody_imports_with_a_head_is_exported(tmp_path):
    """Of the other families export/test_imported.py compares whole models."""
    encoder = Encoder(str(encoders.make(tmp_path / "encoder", "whisper", encoder_layers=1)))
    encoder.load()
    model = AcousticModel(None, encoder.eval(), Head(encoder, 30, kernel_size=5).eval(), hop_samples=1)
    program = recogniser.trace(recogniser.Graph(model))
    least = graph.min_samples(program)
    assert least < 1_000 and not any("fft" in str(node.target) for node in program.graph.nodes)
    graph.write_onnx(program, tmp_path / "m.onnx", INPUTS, OUTPUTS, {})
    signals = [sound(size, size) for size in (16_000, 12_345, 800, 37_000)]
    run = runners.on_waveforms(runners.open_runner("onnx", tmp_path / "m.onnx"), OUTPUTS, least)
    for signal, found in zip(signals, run(signals), strict=True):
        for each in (found, run([signal])[0]):
            np.testing.assert_allclose(each, reference(model, least)(signal), rtol=0, atol=1e-3)
