"""Runs each format of a bundle, for the comparison with the checkpoint."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from sbkit.export import layout
from sbkit.export.padding import pad

#: A graph's output for an utterance, without padding: an array, or a tuple of several.
Output = Any  # depends on the task's graph
#: Maps a batch of waveforms [S] to the output of each.
Runner = Callable[[Sequence[np.ndarray]], list[Output]]


@runtime_checkable
class TranscribingRunner(Protocol):
    """A runner of a program that also decodes words by itself."""

    def __call__(self, signals: Sequence[np.ndarray], /) -> list[Output]:
        """Return the output of each waveform [S]."""

    def transcribe(self, signal: np.ndarray, /) -> str:
        """Return what the program writes for a waveform [S]."""


#: Maps a graph's inputs, in their order, to its outputs.
Call = Callable[..., list[np.ndarray]]


def main_outputs(outputs: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Return the names of the outputs that aren't lengths of others."""
    dimensions = {dimension for names in outputs.values() for dimension in names}
    return [name for name in outputs if name not in dimensions]


def split_batch(outputs: Mapping[str, tuple[str, ...]], values: Sequence[np.ndarray]) -> list[Output]:
    """Split a graph's outputs by utterance and cut off the padding; ``outputs`` is as in ``Exported``."""
    arrays = dict(zip(outputs, values, strict=True))
    utterances: list[Output] = []
    for row in range(len(values[0])):
        tensors = []
        for name in main_outputs(outputs):
            tensor = arrays[name][row]
            dimensions = outputs[name]
            if len(dimensions) > 1 and dimensions[1] in arrays:  # that output has the lengths along this dimension
                tensor = tensor[: int(arrays[dimensions[1]][row])]
            tensors.append(tensor)
        utterances.append(tensors[0] if len(tensors) == 1 else tuple(tensors))
    return utterances


def open_runner(name: str, path: Path) -> Call:
    """Open a graph that was written in one of the formats onnx, int8 and torch."""
    if name == layout.TORCH:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about read-only buffers, which are never written to
            module = torch.export.load(path).module()

        @torch.no_grad()
        def call(*inputs: np.ndarray) -> list[np.ndarray]:
            outputs = module(*map(torch.from_numpy, inputs))
            tensors = outputs if isinstance(outputs, tuple) else (outputs,)
            return [tensor.numpy() for tensor in tensors]

        return call
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [graph_input.name for graph_input in session.get_inputs()]
    return lambda *inputs: session.run(None, dict(zip(names, inputs, strict=True)))


def on_waveforms(call: Call, outputs: Mapping[str, tuple[str, ...]], min_samples: int = 1) -> Runner:
    """Make a runner of a graph that takes waveforms and their lengths, and has these outputs."""
    return lambda signals: split_batch(outputs, call(*pad(signals, min_samples)))
