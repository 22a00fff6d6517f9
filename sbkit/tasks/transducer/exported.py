"""The export of a transducer: graphs of the encoder, of the prediction network and of the joint network."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from sbkit.decode.spans import Spelling, TokenSpans
from sbkit.decode.transducer import GraphJoint, Joint, TransducerSearch
from sbkit.errors import SbkitError
from sbkit.export import graph, layout
from sbkit.export.clips import ComparisonClips
from sbkit.export.companion import Target
from sbkit.export.layout import TransducerConfig
from sbkit.export.measures import OutputMeasure
from sbkit.export.parity import Comparison, ParityResult, Reference, WordRules
from sbkit.export.runners import Runner, open_runner
from sbkit.export.vocabulary import Vocabulary
from sbkit.nn.transducer import TransducerHead
from sbkit.tasks.recognise import sherpa_stream
from sbkit.tasks.recognise.acoustic_model import AcousticModel
from sbkit.tasks.recognise.exported import ExportedRecogniser
from sbkit.tasks.recognise.graph import Graph
from sbkit.tasks.transducer import readme
from sbkit.tasks.transducer.keys import TransducerKeys
from sbkit.tasks.transducer.search import TorchJoint
from sbkit.tasks.transducer.sherpa import SherpaTransducer

OUTPUTS = {"states": ("batch", "frames"), "frames": ("batch",)}
_ROWS = 2  # for tracing; sizes of 0 and 1 would become constants


class Prediction(nn.Module):
    """The last tokens [N, context] to states [N, J]."""

    def __init__(self, head: TransducerHead):
        super().__init__()
        self.head = copy.deepcopy(head).eval().requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head.predict(tokens)[:, 0]


class Joiner(Prediction):
    """States of a frame and of the last tokens, [N, J] each, to scores of the next token [N, V]."""

    def forward(self, encoded: Tensor, predicted: Tensor) -> Tensor:  # type: ignore[override]  # another graph
        return self.head.join(encoded, predicted)


class SearchMeasure(OutputMeasure):
    """Measures states [T, J] and log-probabilities [N, V] of a search; the latter decide what is a tie."""

    def __init__(self) -> None:
        super().__init__("states or log-probabilities", ("states", "log_probs"))

    def is_undecided(self, expected: tuple[np.ndarray, np.ndarray]) -> bool:
        _, log_probs = expected
        return super().is_undecided(log_probs)

    def is_tied(self, expected: tuple[np.ndarray, np.ndarray], output: tuple[np.ndarray, np.ndarray]) -> bool:
        """Whether a search differs from the checkpoint's only where the latter scores two tokens almost equally."""
        _, log_probs = expected
        _, exported_log_probs = output
        return super().is_tied(log_probs, exported_log_probs)


class TransducerComparison(Comparison):
    """Compares the encoder's states, the joint network's scores during a search, and the words found.

    The scores are those on the path of the checkpoint's search, so that they can be compared one by one; the words are
    of a search in the bundle's graphs.

    reference : runs the checkpoint's encoder
    own, exported : prediction and joint network of the checkpoint, and of the bundle
    spelling, exported_spelling : how tokens are written in tests of the checkpoint, and by the bundle
    tokenizer_text : writes tokens by the checkpoint's own tokenizer
    """

    def __init__(self, clips: ComparisonClips, reference: Reference, sample_rate: float,
                 own: Joint, exported: Joint, spelling: Spelling, exported_spelling: Spelling,
                 tokenizer_text: Callable[[TokenSpans], str]):
        self._exported = exported
        self._spans: dict[bytes, TokenSpans] = {}
        self._paths: dict[bytes, SearchPath] = {}

        def expected(signal: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            states = reference.run(signal)
            spans = self._spans[states.tobytes()] = _search(own, states)
            path = self._paths[signal.tobytes()] = SearchPath.of(spans, len(states), own)
            return states, path.scores(own, states)

        super().__init__(clips, replace(reference, run=expected), sample_rate, SearchMeasure(), WordRules(
            text=lambda output: exported_spelling.text(_search(exported, output[0])),
            reference_text=lambda output: spelling.text(self._spans[output[0].tobytes()]),
            joined_text=lambda output: tokenizer_text(self._spans[output[0].tobytes()]),
            spaced=spelling.separator is not None))

    def add(self, name: str, run: Runner, size: int | None, batches: bool = True) -> ParityResult:
        def both(signals: Sequence[np.ndarray]) -> list[tuple[np.ndarray, np.ndarray]]:
            return [(states, self._paths[signal.tobytes()].scores(self._exported, states))
                    for signal, states in zip(signals, run(signals), strict=True)]

        return super().add(name, both, size, batches)


class SearchPath(NamedTuple):
    """The inputs of a joint network on the path of a search through an utterance."""

    frames: np.ndarray
    """The frame [N] of each step: a frame occurs once for each of its tokens, and once for the final blank."""
    tokens: np.ndarray
    """The last tokens [N, context] of each step."""

    @classmethod
    def of(cls, spans: TokenSpans, frames: int, joint: Joint) -> SearchPath:
        steps = np.sort(np.concatenate([spans.starts, np.arange(frames)]))
        emitted = np.arange(len(steps)) - steps  # tokens before each step, since each frame has one blank
        history = np.concatenate([np.full(joint.context, joint.blank), spans.ids]).astype(np.int64)
        return cls(steps, np.lib.stride_tricks.sliding_window_view(history, joint.context)[emitted].copy())

    def scores(self, joint: Joint, states: np.ndarray) -> np.ndarray:
        """Compute a joint network's log-probabilities [N, V] of all steps."""
        return joint.join(states[self.frames], joint.predict(self.tokens))


def _search(joint: Joint, states: np.ndarray) -> TokenSpans:
    return TransducerSearch(joint).feed([states])[0]


@dataclass
class ExportedTransducer(ExportedRecogniser):
    """A transducer to export."""

    keys: TransducerKeys = field(kw_only=True)

    targets = (layout.SHERPA,)

    @classmethod
    def of(cls, acoustic_model: AcousticModel, keys: TransducerKeys) -> ExportedTransducer:
        """Export the recogniser of a run in evaluation mode, which isn't changed."""
        return cls(Graph(acoustic_model), OUTPUTS, keys.sample_rate, acoustic_model=acoustic_model, keys=keys,
                   from_forward=lambda scores: (scores.states.float(), scores.frames))

    def config(self, program: torch.export.ExportedProgram, clips: ComparisonClips) -> TransducerConfig:
        head = self.keys.transducer
        return TransducerConfig(**vars(super().config(program, clips)), joint_size=head.size, context=head.context,
                                decoder=layout.PREDICTION, joiner=layout.JOINER)

    def write_beside(self, folder: Path, config: TransducerConfig) -> None:
        """Write tokens.txt, and the graphs of the prediction and the joint network."""
        super().write_beside(folder, config)
        head, rows = self.keys.transducer, ("rows",)
        first, second = torch.zeros(2, _ROWS, head.size)  # one tensor twice would be traced as one input
        for name, module, inputs, output in (
                (config.decoder, Prediction(head), {"tokens": torch.zeros(_ROWS, head.context, dtype=torch.int64)},
                 "predicted"),
                (config.joiner, Joiner(head), {"encoded": first, "predicted": second}, "scores")):
            program = graph.trace_module(module, tuple(inputs.values()), dict.fromkeys(inputs, (0,)))
            graph.write_onnx(program, folder / name, dict.fromkeys(inputs, rows), {output: rows},
                             self.metadata(config) | {"context_size": str(head.context)})

    def target(self, name: str, chunk: int | None = None) -> Sequence[Target]:
        """Return the model for sherpa-onnx, for streams."""
        sherpa_stream.imported()
        model = self.acoustic_model
        if model.chunks is None:
            raise SbkitError("no-chunks", "sherpa-onnx runs a transducer in chunks, but the recipe has no chunks",
                             key="chunks", hint="train one with hparams/transducer.yaml, or leave out --target")
        frame_seconds = model.subsampling * model.hop_samples / self.sample_rate
        milliseconds = sherpa_stream.chunk_milliseconds(model.chunks, frame_seconds, chunk)
        target = SherpaTransducer(model, milliseconds, self.compared, self.keys.transducer,
                                  self.keys.tokenizer.pieces())
        sherpa_stream.check_version()
        return [target]

    def compared(self, clips: ComparisonClips, config: TransducerConfig, folder: Path, reference: Reference,
                 ) -> TransducerComparison:
        vocabulary = Vocabulary.read(folder, config)
        decoder, joiner = (open_runner(layout.ONNX, folder / name) for name in (config.decoder, config.joiner))
        exported = GraphJoint(lambda tokens: decoder(tokens)[0], lambda *states: joiner(*states)[0], config.vocabulary,
                              config.context, config.blank_id)
        return TransducerComparison(
            clips, reference, config.sample_rate, TorchJoint(self.keys.transducer, self.keys.blank_index), exported,
            self.spelling, vocabulary.spelling, self.tokenizer_text)

    def readme(self, name: str, config: TransducerConfig, comparison: Comparison,
               of_targets: Sequence[str] = ()) -> str:
        return readme.text(name, config, comparison, self.spelling.symbols, of_targets)
