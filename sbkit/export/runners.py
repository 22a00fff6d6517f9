"""Each format of a bundle as one function, for the comparison: signals in, what the graph gives for each out."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from sbkit.export import layout

#: A batch of waveforms [S] to what the graph gives for each, all its outputs in one array; padding is cut off.
Runner = Callable[[Sequence[np.ndarray]], list[np.ndarray]]


def padded(signals: Sequence[np.ndarray], at_least: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """[B, S] with zeros behind each signal, and lengths [B]."""
    lengths = np.array([len(signal) for signal in signals], dtype=np.int64)
    batch = np.zeros((len(signals), max(at_least, int(lengths.max()))), dtype=np.float32)
    for row, signal in zip(batch, signals, strict=True):
        row[: len(signal)] = signal
    return batch, lengths


def each(outputs: Mapping[str, tuple[str, ...]], values: Sequence[np.ndarray]) -> list[np.ndarray]:
    """What a graph gave, by utterance. An output that is called as an open dimension says how much of that is real."""
    found = dict(zip(outputs, values, strict=True))
    shown = [name for name in outputs if name not in {part for dims in outputs.values() for part in dims}]
    parts = [[_cut(found, outputs[name], found[name][i], i) for name in shown] for i in range(len(values[0]))]
    return [one[0] if len(one) == 1 else np.concatenate([part.ravel() for part in one]) for one in parts]


def _cut(found: Mapping[str, np.ndarray], dimensions: tuple[str, ...], value: np.ndarray, row: int) -> np.ndarray:
    return value[: int(found[dimensions[1]][row])] if len(dimensions) > 1 and dimensions[1] in found else value


def onnx(path: Path, outputs: Mapping[str, tuple[str, ...]], at_least: int = 1) -> Runner:
    """Through ONNX Runtime on the CPU."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def run(signals: Sequence[np.ndarray]) -> list[np.ndarray]:
        return each(outputs, session.run(None, dict(zip(layout.INPUTS, padded(signals, at_least), strict=True))))

    return run


def exported(path: Path, outputs: Mapping[str, tuple[str, ...]], at_least: int = 1) -> Runner:
    """Through torch.export."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of read-only buffers, which nobody writes to
        module = torch.export.load(path).module()

    @torch.no_grad()
    def run(signals: Sequence[np.ndarray]) -> list[np.ndarray]:
        batch, lengths = padded(signals, at_least)
        found = module(torch.from_numpy(batch), torch.from_numpy(lengths))
        return each(outputs, [value.numpy() for value in (found if isinstance(found, tuple) else (found,))])

    return run


RUNNERS: dict[str, Callable[..., Runner]] = {layout.ONNX: onnx, layout.INT8: onnx, layout.TORCH: exported}
