"""Each format of a bundle as one function, for the comparison: signals in, log-probabilities out."""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from sbkit.export import layout

#: A batch of waveforms [S] to log-probabilities [T, V], each with its own T.
Runner = Callable[[Sequence[np.ndarray]], list[np.ndarray]]


def padded(signals: Sequence[np.ndarray], at_least: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """[B, S] with zeros behind each signal, and lengths [B]."""
    lengths = np.array([len(signal) for signal in signals], dtype=np.int64)
    batch = np.zeros((len(signals), max(at_least, int(lengths.max()))), dtype=np.float32)
    for row, signal in zip(batch, signals, strict=True):
        row[: len(signal)] = signal
    return batch, lengths


def _cut(log_probs: np.ndarray, frames: np.ndarray) -> list[np.ndarray]:
    return [row[:count] for row, count in zip(log_probs, frames.tolist(), strict=True)]


def onnx(path: Path, at_least: int = 1) -> Runner:
    """Through ONNX Runtime on the CPU."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def run(signals: Sequence[np.ndarray]) -> list[np.ndarray]:
        return _cut(*session.run(None, dict(zip(layout.INPUTS, padded(signals, at_least), strict=True))))

    return run


def exported(path: Path, at_least: int = 1) -> Runner:
    """Through torch.export."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of read-only buffers, which nobody writes to
        module = torch.export.load(path).module()

    @torch.no_grad()
    def run(signals: Sequence[np.ndarray]) -> list[np.ndarray]:
        batch, lengths = padded(signals, at_least)
        return _cut(*(each.numpy() for each in module(torch.from_numpy(batch), torch.from_numpy(lengths))))

    return run


def speechbrain(bundle: Path, at_least: int = 1) -> Runner:
    """Through stock SpeechBrain's ``EncoderASR``, one at a time: its batches have no lengths in samples."""
    from speechbrain.inference.ASR import EncoderASR

    for name in ("fetching", "parameter_transfer"):
        logging.getLogger(f"speechbrain.utils.{name}").setLevel(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        model = EncoderASR.from_hparams(source=str(bundle), savedir=folder, run_opts={"device": "cpu"})

    def run(signals: Sequence[np.ndarray]) -> list[np.ndarray]:
        found = []
        for signal in signals:
            batch, _ = padded([signal], at_least)
            found.append(model.encode_batch(torch.from_numpy(batch), torch.ones(1))[0].numpy())
        return found

    return run


RUNNERS: dict[str, Callable[..., Runner]] = {
    layout.ONNX: onnx, layout.INT8: onnx, layout.TORCH: exported, layout.SPEECHBRAIN: speechbrain,
}
