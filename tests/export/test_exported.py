"""What a task exports is compared with its own forward, and traced or told why not; all in small models."""

import dataclasses
import inspect
import re
import sys
from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime
import pytest
import run_folders
import runtimes
import torch
from onnx import TensorProto
from onnx_text import write
from refusals import refused

from sbkit.data.columns import LabelColumn
from sbkit.data.corpus import Corpus
from sbkit.export import gate, graph, parity_report, source
from sbkit.export.bundle import complete
from sbkit.export.clips import Clip, ComparisonClips
from sbkit.export.exported import Exported
from sbkit.export.layout import GraphConfig, LabelsConfig

CONFIG = GraphConfig(sample_rate=16_000, min_samples=4, outputs=["scores"])
EXAMPLE = torch.randn(2, 2400), torch.tensor([2400, 1600])
SHORT = GraphConfig(sample_rate=16_000, min_samples=1, outputs=["scores"])
OPEN = {"signals": (0, 1), "lengths": (0,)}


class FixedBatch(torch.nn.Module):
    def forward(self, signals, lengths):
        inside = torch.arange(signals.shape[1]).expand(len(lengths), -1) < lengths[:, None]
        return (signals * inside).sum(1)


class Branch(torch.nn.Module):
    def forward(self, signals, lengths):
        return signals.sum(1) if signals.sum() > 0 else signals.mean(1)


class LogOfSilence(torch.nn.Module):
    def forward(self, signals, lengths):
        return (signals.abs().mean(1) + 1e-10).log() * 1.000001


@pytest.mark.parametrize("model, code", [(FixedBatch, "len(lengths)"), (Branch, "if signals.sum() > 0")])
def test_a_graph_that_cannot_be_traced_is_told_with_its_line(model, code):
    lines, first = inspect.getsourcelines(model)
    line = first + next(i for i, text in enumerate(lines) if code in text)
    with refused("not-traceable", wording=False) as error:  # it ends with torch's own words
        graph.trace_module(model(), EXAMPLE, OPEN)
    assert f"({__file__}, line {line}: " in error.value.message


@pytest.mark.slow
def test_numbers_near_to_nothing_stay_in_onnx(tmp_path):
    program = graph.trace_module(LogOfSilence(), EXAMPLE, OPEN)
    graph.write_onnx(program, tmp_path / "model.onnx", {"signals": ("batch", "samples"), "lengths": ("batch",)},
                     {"scores": ("batch",)}, {})
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    (found,) = session.run(None, {"signals": np.zeros((3, 100), np.float32), "lengths": np.array([100, 50, 1])})
    assert found == pytest.approx(np.log(1e-10) * 1.000001, rel=1e-7)


def test_products_of_bytes_saturate_on_no_processor(tmp_path):
    weights = np.concatenate([np.ones((512, 2)), -np.ones((512, 2))], axis=1, dtype=np.float32)
    write(tmp_path / "m.onnx", "float[frames, 512] x", "float[frames, 4] y", "y = MatMul(x, w)", w=weights)
    graph.quantize(tmp_path / "m.onnx", tmp_path / "q.onnx")
    nodes = {node.op_type: node for node in onnx.load(tmp_path / "q.onnx").graph.node}
    assert "MatMul" not in nodes
    kinds = {each.name: each.data_type for each in onnx.load(tmp_path / "q.onnx").graph.initializer}
    assert kinds[nodes["MatMulInteger"].input[1]] == TensorProto.UINT8, "signed ones saturate where there is no VNNI"
    signal = np.linspace(0, 1, 3 * 512, dtype=np.float32).reshape(3, 512)[::-1]
    session = onnxruntime.InferenceSession(tmp_path / "q.onnx", providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(session.run(None, {"x": signal})[0], signal @ weights, rtol=0.01)


def test_products_that_swap_numbers_stay_exact_in_eight_bits(tmp_path):
    write(tmp_path / "m.onnx", "float[frames, 2] x", "float[frames, 2] y", "y = MatMul(x, w)",
          w=np.array([[0, 1], [1, 0]], np.float32))
    graph.quantize(tmp_path / "m.onnx", tmp_path / "q.onnx")
    signal = np.random.default_rng(0).standard_normal((9, 2)).astype(np.float32)
    session = onnxruntime.InferenceSession(tmp_path / "q.onnx", providers=["CPUExecutionProvider"])
    assert (session.run(None, {"x": signal})[0] == signal[:, ::-1]).all()


def test_the_build_of_onnxruntime_that_is_installed_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(runtimes.install(tmp_path, "onnxruntime-gpu")), *sys.path])
    trained = SimpleNamespace(keys=SimpleNamespace(language=""), facts={})
    made_by = complete(dataclasses.replace(CONFIG), trained).made_by
    assert made_by["onnxruntime-gpu"] == "1.23.0" and "torch" in made_by
    assert "onnxruntime" not in made_by


def made(outputs=None, **more):
    exported = Exported(torch.nn.Identity(), outputs or {"scores": ("batch",)}, 16_000, **more)
    exported.forward = lambda signal, samples: (signal[None, :samples].repeat(2, 1).T[None], torch.tensor([samples]))
    return exported


def test_the_checkpoint_is_the_tasks_own_forward():
    outputs = {"scores": ("batch", "frames"), "frames": ("batch",)}
    signal = np.array([1.0, 2.0], np.float32)
    assert made(outputs).reference(CONFIG)(signal).tolist() == [[1.0, 1.0], [2.0, 2.0]], "its length, not the padding's"
    doubled = made(outputs, from_forward=lambda given: (2 * given[0], given[1]))
    assert doubled.reference(CONFIG)(signal).tolist() == [[2.0, 2.0], [4.0, 4.0]]


@pytest.mark.parametrize("given", [None, lambda values: {"a": 1}], ids=["tuple", "dictionary"])
def test_a_forward_that_gives_something_else_needs_a_function(given):
    with refused("wrong-export-outputs"):
        made(from_forward=given).reference(CONFIG)(np.zeros(5, np.float32))


SIGNALS = [np.arange(3, dtype=np.float32), np.arange(5, dtype=np.float32)]
WRONG = {
    "a frame too few": (lambda signal: signal[:-1],
                       r"differ by inf.*\(short, scores: \[2\] where the checkpoint has \[3\]\)"),
    "not finite": (lambda signal: np.where(signal > 3, np.nan, signal),
                   r"differ by inf.*\(long, scores: not a number \(NaN\) from frame 4 of 5 on\)"),
    "infinite": (lambda signal: np.where(signal > 1, -np.inf, signal),
                 r"\(short, scores: infinite from frame 2 of 3 on"),
    "another value": (lambda signal: signal + 0.5 * (signal == 3),
                      r"differ by 0\.5, .*\(long, scores, frame 3 of 5: 3\.5 where the checkpoint has 3\)"),
}


@pytest.mark.parametrize("how", WRONG)
def test_a_difference_is_told_with_clip_output_and_frame(how):
    change, told = WRONG[how]
    exported = made({"scores": ("batch", "frames"), "other": ("batch", "frames"), "frames": ("batch",)})
    exported.forward = lambda signal, samples: (signal[None], -signal[None], torch.tensor([samples]))
    clips = ComparisonClips([Clip(signal, None, name) for signal, name in zip(SIGNALS, ("short", "long"), strict=True)],
                            "x", 1.0)
    comparison = exported.comparison(clips, SHORT, None)
    comparison.add("onnx", lambda signals: [(change(signal), -signal) for signal in signals], 1)
    (failure,) = gate.failures(comparison)
    assert re.search(told, str(failure)), failure


def test_a_checkpoint_that_gives_nan_is_no_reference():
    exported = made({"scores": ("batch", "frames"), "frames": ("batch",)})
    exported.forward = lambda signal, samples: (signal[None] * torch.nan, torch.tensor([samples]))
    clips = ComparisonClips([Clip(SIGNALS[0], None, "short")], "x", 1.0)
    comparison = exported.comparison(clips, SHORT, None)
    comparison.add("onnx", lambda signals: list(signals), 1)
    assert "the checkpoint's is not a number" in str(gate.failures(comparison)[0])


@pytest.mark.parametrize("wrong, rate", [(0, 0.0), (1, 25.0)])
def test_a_classifier_is_compared_with_its_own_column_and_not_with_transcripts(tmp_path, wrong, rate):
    data = run_folders.corpus(tmp_path / "data", train=2, dev=2, test=4)
    corpus = Corpus(str(data), folder=tmp_path / "manifests")
    columns, accents = {"accent": LabelColumn("accents")}, list(run_folders.ACCENTS[::-1])
    corpus.prepare(show_progress=False, columns=columns)
    task = SimpleNamespace(
        columns=columns, keys=SimpleNamespace(accents=accents, corpus=corpus), modules=torch.nn.ModuleDict(),
        hparams=SimpleNamespace(), transcriber=None, exported=lambda run: made(labels=accents))
    exported = source.of_brain(task, tmp_path, {}).exported
    clips = exported.clips(corpus, 4)
    right = {clip.signal.tobytes(): clip.text for clip in clips.alone}
    assert set(right.values()) == {*run_folders.ACCENTS, None}

    mistaken = [sound for sound, text in right.items() if text is not None][:wrong]

    def forward(signal, samples):
        sound = signal.numpy().tobytes()
        return torch.tensor([[float((label == right.get(sound)) != (sound in mistaken)) for label in accents]])

    exported.forward = forward
    comparison = exported.comparison(clips, SHORT, None)
    assert comparison.of_reference.wer == rate and "label errors %" in parity_report.table(comparison)


def test_a_transcript_that_is_no_label_is_no_reference():
    exported = made(labels=["low", "high"])
    exported.forward = lambda signal, samples: torch.tensor([[0.0, 1.0]])
    clips = ComparisonClips([Clip(SIGNALS[0], "high", "one"), Clip(SIGNALS[1], "a word", "other")], "x", 1.0)
    assert exported.comparison(clips, SHORT, None).of_reference.wer == 0.0


def test_several_labels_are_compared_by_those_that_reach_their_thresholds():
    exported = made(labels=["a", "b", "c"], thresholds=[0.5, 0.2, -1.0])
    exported.forward = lambda signal, samples: torch.tensor([[0.6, 0.2, -2.0 if samples < 4 else 0.0]])
    config = LabelsConfig(sample_rate=16_000, outputs=["scores"], labels=["a", "b", "c"], thresholds=[0.5, 0.2, -1.0])
    clips = ComparisonClips([Clip(signal, "a text", str(i)) for i, signal in enumerate(SIGNALS)], "x", 1.0)
    comparison = exported.comparison(clips, config, None)
    assert comparison.texts == ["0 1", "0 1 2"] and comparison.of_reference.wer is None
    said = dict(zip(map(len, SIGNALS), comparison.expected, strict=True))
    tie = comparison.add("onnx", lambda signals: [said[len(signals[0])] - np.float32(5e-5)], 1, False)
    assert tie.words_changed == 0 and gate.failures(comparison) == [], "rounding decides whether b has its 0.2"
    comparison.add("int8", lambda signals: [np.array([0.6, 0.1, -2.0])], 1, False)
    (failure,) = gate.failures(comparison)
    assert str(failure) == "int8: label errors 60.00 % where the checkpoint has 0.00 %"
