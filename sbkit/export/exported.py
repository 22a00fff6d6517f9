"""What a task exports: a graph with named inputs and outputs, and how its outputs are written, run and compared."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from sbkit.errors import SbkitError
from sbkit.export import graph, layout, readme
from sbkit.export.clips import Clip, ComparisonClips, choose_clips
from sbkit.export.companion import Companion, OwnBundle, Target
from sbkit.export.measures import OutputMeasure, ThresholdMeasure
from sbkit.export.parity import Comparison, Reference, WordRules
from sbkit.export.runners import Output, Runner, main_outputs, on_waveforms, open_runner, split_batch

if TYPE_CHECKING:
    from sbkit.data.corpus import Corpus

INPUTS = {"signals": ("batch", "samples"), "lengths": ("batch",)}
_EXAMPLE = (2, 24_000)  # batch and samples for tracing; torch.export takes sizes of 0 and 1 for constants


@dataclass
class Exported:
    """A model that maps waveforms to tensors, ready for export.

    A task with more than tensors (words, audio) derives from it and overrides how the model is written, run, compared
    and described. A model with further graphs has companions.
    """

    graph: nn.Module
    """Waveforms [B, S] and sample counts [B] to tensors; in evaluation mode, on the CPU, in fp32. An utterance's
    outputs must not depend on its batch."""
    outputs: Mapping[str, tuple[str, ...]]
    """Names of the outputs and of their dynamic dimensions, e.g. ``{"scores": ("batch",)}``. An output with the same
    name as a dynamic dimension holds each utterance's length along that dimension."""
    sample_rate: int
    language: str | None = None
    """If it differs from the recipe's ``language``."""
    labels: Sequence[str] = field(default_factory=list)
    """Names for the entries of the first output's last dimension; the one with the largest value is the result."""
    thresholds: Sequence[float] | None = None
    """For several labels of a recording: the value of each entry from which its label is a result."""
    label_column: str | None = None
    """The corpus's column with the label of each recording. None: the ``LabelColumn`` whose classes are ``labels``, and
    without one the texts."""
    examples: tuple[Tensor, ...] | None = None
    """A batch to trace with, for models that can't be traced with the default (1.5 s of noise)."""
    from_forward: Callable[[Any], Any] | None = None
    """Converts the result of ``compute_forward`` to the graph's outputs, in order; None: they are the same."""
    forward: Callable[[Tensor, int], Any] | None = field(default=None, init=False)
    """Runs the checkpoint's ``compute_forward`` on one padded waveform [S] and its length; set by the export."""
    original: tuple[str, Runner] | None = field(default=None, init=False)
    """For an imported model: the name of its original library, and a function that runs it, to compare formats with."""

    left_out: dict[str, str] = field(default_factory=dict, init=False)
    """Models that the task can't make, such as one of a target's, with the reason."""

    #: Values that ``--target`` takes for this task.
    targets: ClassVar[tuple[str, ...]] = ()

    @property
    def formats(self) -> tuple[str, ...]:
        """The formats that the model can be written in."""
        return layout.TRACED

    @property
    def judges_words(self) -> bool:
        """Whether outputs can be decoded to text, by which an 8-bit model is judged."""
        return bool(self.labels)

    @property
    def companions(self) -> Sequence[Companion]:
        """Further graphs of the model, such as one for streams."""
        return ()

    @property
    def inputs(self) -> Mapping[str, tuple[str, ...]]:
        """Names of the inputs and of their dynamic dimensions."""
        return INPUTS

    def clips(self, corpus: Corpus | None, count: int) -> ComparisonClips:
        """Choose the clips for the comparison: ``count`` utterances of the run's test split."""
        return choose_clips(corpus, self.sample_rate, count, column=self.label_column)

    def trace(self) -> torch.export.ExportedProgram:
        """Trace the graph with dynamic batch and time dimensions."""
        batch, samples = _EXAMPLE
        example = self.examples or (torch.randn(batch, samples) * 0.1, torch.tensor([samples, samples * 2 // 3]))
        program = graph.trace_module(self.graph.eval(), example, {"signals": (0, 1), "lengths": (0,)})
        count = len(program.graph_signature.user_outputs)
        if count != len(self.outputs):
            raise SbkitError("wrong-export-outputs", f"the graph returns {count} tensors, but outputs names "
                             f"{len(self.outputs)}: {', '.join(self.outputs)}",
                             hint="name each of them in Exported(outputs=...)")
        return program

    def config(self, program: torch.export.ExportedProgram, clips: ComparisonClips) -> layout.Bundle:
        """Make the contents of config.json, without files, training and versions, which the export adds."""
        lengths = {}
        for name in main_outputs(self.outputs):
            dimensions = self.outputs[name]
            if len(dimensions) > 1 and dimensions[1] in self.outputs:
                lengths[name] = dimensions[1]
        config = layout.GraphConfig(
            sample_rate=self.sample_rate, language=self.language, min_samples=graph.min_samples(program),
            outputs=list(self.outputs), labels=list(self.labels), lengths=lengths)
        if self.thresholds is not None:
            config = layout.LabelsConfig(**vars(config), thresholds=[float(value) for value in self.thresholds])
            config.check(Path(layout.CONFIG))
        return config

    def write_beside(self, folder: Path, config: OwnBundle) -> None:
        """Write files that all formats share, such as a vocabulary."""

    def metadata(self, config: OwnBundle) -> dict[str, str]:
        """Return the metadata to put into ONNX files, for runtimes that read it."""
        return {"sample_rate": str(config.sample_rate), "comment": "made by sbkit", **config.onnx_metadata()}

    def write(self, name: str, folder: Path, config: OwnBundle, title: str) -> None:
        """Write one of the task's own formats."""
        raise SbkitError("unknown-format", f"{type(self).__name__} can't write the format {name}",
                         hint="override its method write", value=name)

    def runner(self, name: str, folder: Path, config: OwnBundle) -> Runner:
        """Return a function that runs a written format."""
        return on_waveforms(open_runner(name, folder / layout.MODELS[name]), self.outputs, config.min_samples)

    def reference(self, config: OwnBundle) -> Callable[[np.ndarray], Output]:
        """Return a function that runs the task's ``compute_forward`` on one waveform [S]."""
        names = main_outputs(self.outputs)
        forward = self.forward
        assert forward is not None, "the export sets it"

        @torch.no_grad()
        def run(signal: np.ndarray) -> Output:
            padded = np.pad(signal, (0, max(0, config.min_samples - len(signal))))
            result = forward(torch.from_numpy(padded), len(signal))
            if self.from_forward is not None:
                result = self.from_forward(result)
            values = result if isinstance(result, (tuple, list)) else (result,)
            all_tensors = all(isinstance(value, Tensor) for value in values)
            if not all_tensors or len(values) not in (len(names), len(self.outputs)):
                raise SbkitError("wrong-export-outputs", f"compute_forward returns {_described(result)}, and the graph "
                                 f"{', '.join(self.outputs)}, so they can't be compared",
                                 hint="convert the first into the second: Exported(..., from_forward=function)")
            # Without lengths, no output has padding: there is one utterance.
            outputs = self.outputs if len(values) == len(self.outputs) else dict.fromkeys(names, ())
            [output] = split_batch(outputs, [value.numpy() for value in values])
            return output

        return run

    def comparison(self, clips: ComparisonClips, config: OwnBundle, folder: Path) -> Comparison:
        """Run the reference on the clips, to compare formats with."""
        names = main_outputs(self.outputs)
        # Labels are compared by their numbers: a label of several words counts as one word.
        numbers = {str(label): str(number) for number, label in enumerate(self.labels)}

        def text(output: Output) -> str:
            scores = output[0] if len(names) > 1 else output
            if isinstance(config, layout.LabelsConfig):
                return " ".join(sorted(numbers[label] for label in config.found(scores.tolist()))) or "none"
            return str(scores.argmax())

        def reference_text(clip: Clip) -> str | None:
            """The number of the clip's label; None, which isn't scored, for a text that is no label or has several."""
            if clip.text is None or self.thresholds is not None:
                return None
            return numbers.get(clip.text)

        if self.labels:
            clips = dataclasses.replace(clips, alone=[
                Clip(clip.signal, reference_text(clip), clip.name) for clip in clips.alone])
        of_several = names if len(names) > 1 else ()
        measure = OutputMeasure(names=of_several)
        if self.thresholds is not None:
            measure = ThresholdMeasure(self.thresholds, of_several)
        words = WordRules(text=text, rate="label errors") if self.labels else None
        return Comparison(clips, Reference(self.reference(config)), config.sample_rate, measure, words)

    def target(self, name: str, chunk: int | None = None) -> Sequence[Target]:
        """Return the models for the programs of one of ``targets``; those that can't be made are refused.

        chunk : milliseconds of a chunk, for programs with chunks of one size
        """
        raise SbkitError("unknown-target", f"{type(self).__name__} has no target {name}",
                         hint="override its method target", value=name)

    def readme(self, name: str, config: OwnBundle, comparison: Comparison, of_targets: Sequence[str] = ()) -> str:
        """Make the text of the bundle's README.md; ``of_targets`` are the targets' sections."""
        return readme.text(name, config, comparison, of_targets)


def _described(result: object) -> str:
    """Name the type of what a task's forward returned, and the types in it."""
    if isinstance(result, Tensor):
        return "a tensor"
    parts = result if isinstance(result, (tuple, list)) else ()
    return f"{type(result).__name__}({', '.join(type(part).__name__ for part in parts)})"
