"""Exports a transducer trained in chunks for sherpa-onnx's streams, as the kind that it calls *nemo_transducer*.

Of sherpa-onnx's transducers only NeMo's may emit several tokens in a frame, which letters need, and only they get the
features of ``hparams/transducer.yaml``. NeMo's prediction network is an LSTM; ours sees the last tokens, so these are
the state that sherpa-onnx keeps for it. NeMo's blank is the last token, so tokens have other ids there, in their own
tokens.txt.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from sbkit.export import graph, layout
from sbkit.export.layout import Config
from sbkit.export.vocabulary import write_tokens
from sbkit.nn.transducer import TransducerHead
from sbkit.tasks.recognise.acoustic_model import AcousticModel
from sbkit.tasks.recognise.sherpa_stream import SherpaStream, imported
from sbkit.tasks.recognise.streaming_graph import Compare
from sbkit.tasks.transducer import readme

if TYPE_CHECKING:
    from sherpa_onnx import OnlineRecognizer

DECODER, JOINER, TOKENS = "decoder.sherpa.onnx", "joiner.sherpa.onnx", "tokens.sherpa.txt"
_NEVER = -1e4  # the score of a token that can't occur
_BATCH = 2  # for tracing


def order(vocabulary: int, blank: int) -> list[int]:
    """Return our ids of tokens in sherpa-onnx's order, in which the blank is the last."""
    return [*(i for i in range(vocabulary) if i != blank), blank]


class SherpaPrediction(nn.Module):
    """Tokens [B, 1] by sherpa-onnx's ids and the state before them to predictions [B, J, 1] and the state after them.

    The state [1, B, H] has the tokens before, each as its id plus one, and zero for the blank.
    """

    ours: Tensor

    def __init__(self, head: TransducerHead):
        super().__init__()
        self.head = head
        self.register_buffer("ours", torch.tensor(order(head.vocabulary, head.blank)))

    def forward(self, targets: Tensor, target_length: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        vocabulary = self.head.vocabulary
        last = torch.cat([h[0], ((targets + 1) % vocabulary).float()], 1)[:, -self.head.context:]
        predicted = self.head.predict(self.ours[(last.long() - 1) % vocabulary])
        return predicted.transpose(1, 2), target_length, last[None, :, -h.shape[2]:], c


class SherpaJoiner(nn.Module):
    """States [B, J, 1] of a frame and of the last tokens to scores [B, 1, 1, V] by sherpa-onnx's ids.

    Tokens that are no text are ``silent``: sherpa-onnx would output them, so they never occur.
    """

    ours: Tensor
    never: Tensor

    def __init__(self, head: TransducerHead, silent: list[int]):
        super().__init__()
        self.head = head
        self.register_buffer("ours", torch.tensor(order(head.vocabulary, head.blank)))
        self.register_buffer("never", torch.isin(self.ours[:-1], torch.tensor(silent, dtype=torch.int64)))

    def forward(self, encoder_outputs: Tensor, decoder_outputs: Tensor) -> Tensor:
        scores = self.head.join(encoder_outputs[:, :, 0], decoder_outputs[:, :, 0])[:, self.ours]
        tokens = scores[:, :-1].masked_fill(self.never, _NEVER)
        return torch.cat([tokens, scores[:, -1:]], 1)[:, None, None]


class _Transposed(nn.Module):
    """States [B, C, J] to [B, J, C]."""

    def forward(self, states: Tensor) -> Tensor:
        return states.transpose(1, 2)


class SherpaTransducer(SherpaStream):
    """The transducer for streams."""

    output, section = "states", readme.SHERPA_STREAM

    def __init__(self, acoustic_model: AcousticModel, milliseconds: int, compared: Compare, head: TransducerHead,
                 pieces: list[str]):
        super().__init__(acoustic_model, milliseconds, compared)
        self.head, self.pieces = copy.deepcopy(head).eval().requires_grad_(False), pieces

    @property
    def size(self) -> int:
        """The number of tokens in a state."""
        return max(1, self.head.context - 1)

    def output_layer(self, config: Config) -> tuple[nn.Module, int]:
        return _Transposed(), 1

    def facts(self, config: Config) -> dict[str, object]:
        return {"pred_rnn_layers": 1, "pred_hidden": self.size, "normalize_type": "NA"}

    def write(self, folder: Path, config: Config) -> None:
        super().write(folder, config)
        head, ids = self.head, order(config.vocabulary, config.blank_id)
        states = torch.zeros(2, 1, _BATCH, self.size)
        joined = torch.zeros(2, _BATCH, head.size, 1)
        for name, module, inputs, outputs in (
                (DECODER, SherpaPrediction(head),
                 {"targets": torch.ones(_BATCH, 1, dtype=torch.int32),
                  "target_length": torch.ones(_BATCH, dtype=torch.int32), "h": states[0], "c": states[1]},
                 ("outputs", "lengths", "next_h", "next_c")),
                (JOINER, SherpaJoiner(head, config.silent_ids),
                 {"encoder_outputs": joined[0], "decoder_outputs": joined[1]}, ("scores",))):
            program = graph.trace_module(module, tuple(each.clone() for each in inputs.values()),
                                         {each: (1,) if each in "hc" else (0,) for each in inputs})
            dimensions = {each: ("layers", "batch") if each[-2:] in ("h", "c", "_h", "_c") else ("batch",)
                          for each in (*inputs, *outputs)}
            graph.write_onnx(program, folder / name, {each: dimensions[each] for each in inputs},
                             {each: dimensions[each] for each in outputs}, {"comment": "made by sbkit"})
        write_tokens(folder / TOKENS, [self.pieces[i] for i in ids], len(ids) - 1)

    def open_recognizer(self, folder: Path) -> OnlineRecognizer:
        encoder, decoder, joiner, tokens = (
            str(folder / name) for name in (layout.MODELS[self.name], DECODER, JOINER, TOKENS))
        return imported().OnlineRecognizer.from_transducer(
            encoder=encoder, decoder=decoder, joiner=joiner, tokens=tokens, feature_dim=self.bands,
            num_threads=torch.get_num_threads())
