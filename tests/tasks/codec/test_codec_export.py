"""What a codec's bundle says of it: a hash of all that its codes depend on, and how far it looks; and the gate."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from sbkit.export import gate, graph, parity_report
from sbkit.export.bundle import ExportRequest, export
from sbkit.export.clips import Clip, ComparisonClips
from sbkit.export.layout import CodecConfig as Config
from sbkit.export.parity import Comparison, Reference
from sbkit.export.source import Trained
from sbkit.nn.codec import CodecDecoder, CodecEncoder, Coder, FiniteScalars, LogMel, ResidualVectors, WaveHead
from sbkit.tasks.codec.exported import OTHER_CODES, CodesMeasure, ExportedCodec, fingerprint, reach

SIZE = {"size": 8, "hidden": 12}
CONFIG = Config(sample_rate=16_000, codec="0" * 64, books=[40, 40], stride=320, context=9)


def coder(quantiser=None, layers=1, **features):
    torch.manual_seed(0)
    quantiser = quantiser or FiniteScalars([8, 5], codebooks=2)
    made = Coder(LogMel(n_mels=10, **features), CodecEncoder(10, quantiser.size, **SIZE, layers=layers), quantiser,
                 CodecDecoder(quantiser.size, **SIZE, slow_layers=1, fast_layers=1), WaveHead(8))
    return made.eval()


def clips(seconds=(0.05, 0.4, 0.7, 1.3)):
    draw = np.random.default_rng(0)
    return ComparisonClips([Clip(draw.normal(0, 0.1, round(16_000 * each)).astype(np.float32), "a text", str(each))
                            for each in seconds], "noise", 1.0)


# ---------------------------------------------------------------- the hash


@pytest.mark.parametrize("part", ["encoder", "decoder", "head", "quantiser"])
def test_another_weight_is_another_codec(part):
    made = coder(ResidualVectors(6, codebooks=2, entries=16))
    before = fingerprint(made)
    with torch.no_grad():
        next(getattr(made, part).parameters()).view(-1)[0].add_(1e-6)
    assert fingerprint(made) != before


def test_the_same_weights_with_other_numbers_are_another_codec():
    one, other = coder(FiniteScalars([8, 5], codebooks=2)), coder(FiniteScalars([5, 8], codebooks=2))
    later = coder(size=320)  # of a feature frame
    other.load_state_dict(one.state_dict())
    later.load_state_dict(one.state_dict())
    assert len({fingerprint(one), fingerprint(other), fingerprint(later)}) == 3


def test_the_weights_are_those_of_the_parts_by_name(tmp_path):
    made = coder(ResidualVectors(6, codebooks=2, entries=16))
    ExportedCodec.of(made).write_beside(tmp_path, CONFIG)
    found = load_file(tmp_path / "model.safetensors")
    assert {name.split(".")[0] for name in found} == {"encoder", "quantiser", "decoder", "head"}
    another = coder(ResidualVectors(6, codebooks=2, entries=16), layers=1)
    another.load_state_dict(found)
    assert fingerprint(another) == fingerprint(made)


# ---------------------------------------------------------------- how far it looks


@pytest.mark.parametrize("layers", [1, 3])
def test_a_frame_is_decided_by_those_within_reach(layers):
    made = coder(layers=layers)
    around = reach(made)
    assert around == max(3 * layers + 1, 3 + 2 + 1), "three frames a block, at half the rate in the fast one, and one"
    signals = 0.1 * torch.randn(1, 60 * 320, requires_grad=True)
    vectors = made.encoder(*made.features(signals, torch.tensor([60 * 320])))
    [gradient] = torch.autograd.grad(vectors[0, 30].square().sum(), signals)
    inside = gradient[0].abs().view(60, 320).sum(1)
    assert not inside[:30 - around].any() and not inside[31 + around:].any()


def test_a_codec_that_looks_at_the_mean_of_a_recording_may_look_at_everything():
    made = coder()

    class Centred(CodecEncoder):
        def forward(self, feats, frames):
            return super().forward(feats - feats.mean(1, keepdim=True), frames)

    made.encoder.__class__ = Centred
    assert reach(made) is None


# ---------------------------------------------------------------- the gate


@pytest.mark.parametrize("share, passes", [(0.0, True), (OTHER_CODES / 2, True), (OTHER_CODES * 2, False)])
def test_so_many_codes_may_differ_as_rounding_changes(share, passes):
    codes = {len(clip.signal): np.zeros((1000, 2), np.int64) for clip in clips().alone}
    compared = Comparison(clips(), Reference(lambda signal: codes[len(signal)]), 16_000, CodesMeasure())

    def run(signals):
        found = [codes[len(each)].copy() for each in signals]
        for each in found:
            each[: round(share * 1000)] += 1
        return found

    compared.add("onnx", run, 1)
    assert compared.is_batchable() == passes and {result.wer for result in compared.results} == {None}
    assert (gate.failures(compared) == []) == passes
    if not passes:
        [failure] = gate.failures(compared)
        assert re.fullmatch(r"onnx: codes differ by 1\.00%, but only 0\.50% is allowed "
                            r"\(.+, frame 0 of 1000: 1 where the checkpoint has 0\)", str(failure))
        assert "1.00%" in parity_report.table(compared) and "WER" not in parity_report.table(compared)


def test_another_number_of_frames_never_passes():
    compared = Comparison(clips(), Reference(lambda signal: np.zeros((9, 2), np.int64)), 16_000, CodesMeasure())
    compared.add("onnx", lambda signals: [np.zeros((8, 2), np.int64) for _ in signals], 1)
    [failure] = gate.failures(compared)
    assert re.fullmatch(r"onnx: codes differ by their number, but only 0\.50% is allowed "
                        r"\(.+: \[8, 2\] where the checkpoint has \[9, 2\]\)", str(failure))


def test_a_decoder_is_compared_on_the_checkpoints_own_codes(tmp_path, monkeypatch):
    made = coder()
    [decoder] = ExportedCodec.of(made).companions
    asked = []

    def call(codes, frames):
        asked.append((codes, frames))
        signals = made.decode(torch.from_numpy(codes), torch.from_numpy(frames)).detach().numpy()
        return [signals + 0.01 * (len(asked) > 12), frames * 320]

    monkeypatch.setattr("sbkit.tasks.codec.exported.open_runner", lambda *_: call)
    [(way, compared)] = decoder.comparisons(clips(), CONFIG, tmp_path).items()
    run = decoder.runners("onnx", tmp_path, CONFIG)[way]
    compared.add("onnx", run, 1)
    assert gate.failures(compared) == []
    own = made.encode(torch.from_numpy(clips().alone[-1].signal)[None], torch.tensor([20_800]))[0]
    assert any(codes.shape == own.shape and (codes == own.numpy()).all() for codes, _ in asked)
    asked += asked * 3
    compared.add("torch", run, 1)
    [failure] = gate.failures(compared)
    assert re.fullmatch(r"torch: samples differ by 0\.01, but only 0\.001 is allowed "
                        r"\(.+, frame \d+ of \d+: \S+ where the checkpoint has \S+, in a batch\)", str(failure))


@pytest.mark.long
@pytest.mark.slow
def test_a_format_whose_decoder_fails_is_left_out_with_its_encoder(tmp_path, monkeypatch):
    made, write = coder(), graph.write_torch

    def without_decoder(program, path):
        if path.name.startswith("decoder"):
            raise RuntimeError("no such operator")
        write(program, path)

    monkeypatch.setattr(graph, "write_torch", without_decoder)
    exported = ExportedCodec.of(made)
    exported.forward = lambda signal, samples: made(signal[None], torch.tensor([samples]))
    keys = SimpleNamespace(corpus=None, language="")
    assert export(ExportRequest(tmp_path / "run", tmp_path / "b"),
                  open_model=lambda: Trained(exported, keys, {})) == 0
    config = Config.read(tmp_path / "b")
    assert (config.models, config.decoders) == ({"onnx": "model.onnx"}, {"onnx": "decoder.onnx"})
    assert config.left_out == {"torch": "RuntimeError: no such operator"}
    assert not [*(tmp_path / "b").glob("*.pt2")]
