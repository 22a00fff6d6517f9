"""A model for SpeechBrain's ``EncoderASR``, opened by SpeechBrain, and its parts for a recogniser."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
import torch
from speechbrain.dataio.encoder import CTCTextEncoder
from speechbrain.decoders import ctc_greedy_decode
from speechbrain.lobes import features as lobes
from torch import Tensor, nn

from sbkit.data.piece_model import piece_model
from sbkit.errors import SbkitError, summary
from sbkit.export.features import is_input_normalization
from sbkit.nn.lengths import N, lengths_to_mask
from sbkit.nn.pretrained.encoder import build_network
from sbkit.nn.pretrained.networks import EncoderOptions
from sbkit.nn.pretrained.source import Settings
from sbkit.runs.initial import source
from sbkit.score.metric import Metric
from sbkit.score.run_files import RECIPE
from sbkit.score.weights import BEST_CHECKPOINT

_MARKS = ("unk_label", "bos_label", "eos_label")  # of a CTCTextEncoder
_TYPES, _EPSILON = ("wav2vec2", "hubert", "wavlm"), 1e-5
_PROBED = {True: (64, 640), False: (16_000, 64_000)}  # frames, or samples: a length, and the increase to a second one


class WaveEncoder(nn.Module):
    """SpeechBrain's wrapper of wav2vec 2.0, HuBERT or WavLM, for waveforms [B, S] and sample counts [B].

    The original can't be traced. Waveforms and states are normalised as there, but without an utterance's padding.
    """

    def __init__(self, own: Any):  # of SpeechBrain's integrations, which need transformers
        super().__init__()
        config = own.model.config.to_dict()
        if own.output_all_hiddens or config["model_type"] not in _TYPES:
            raise SbkitError(f"the {config['model_type']} in this model can't be imported: its type is unknown, or "
                             "it returns the states of all layers (output_all_hiddens)",
                             hint=f"{', '.join(_TYPES)} can be imported")
        options = EncoderOptions(mask_time_prob=0.0, mask_feature_prob=0.0,
                                 add_adapter=config.get("add_adapter", False))
        self.network = build_network(Settings("the model", config, {"do_normalize": False}), options)
        state = own.model.state_dict()
        self.network.load_state_dict({name: state[name] for name in self.network.state_dict()})
        self.normalizes, self.output_norm = bool(own.normalize_wav), bool(own.output_norm)

    def forward(self, signals: Tensor, samples: Tensor) -> Tensor:
        """[B, S], [B] -> [B, T, D]."""
        if self.normalizes:
            signals = _normalized(signals[..., None], samples)[..., 0]
        states = self.network(signals, samples)
        return _normalized(states, self.network.frames(samples)) if self.output_norm else states


def _normalized(states: Tensor, counts: Tensor) -> Tensor:
    """Normalise [B, T, D] over all values of an utterance's ``counts`` [B] frames, as torch's layer_norm does."""
    inside, numbers = lengths_to_mask(counts, states.shape[1])[..., None], (counts * states.shape[2])[:, None, None]
    mean = states.masked_fill(~inside, 0.0).sum((1, 2), keepdim=True) / numbers
    centred = (states - mean).masked_fill(~inside, 0.0)
    return centred * torch.rsqrt(centred.square().sum((1, 2), keepdim=True) / numbers + _EPSILON)


class Layers(nn.Module):
    """All layers after the features: [B, T, F] and frame counts [B], or waveforms and samples, to scores [B, T', V].

    layers : SpeechBrain's, in order, each with the name of its argument for relative lengths, if any
    order : the index in their outputs of each output
    width : features of a frame; None if the input is waveforms
    """

    order: Tensor

    def __init__(self, layers: list[tuple[nn.Module, str | None]], order: list[int], width: int | None):
        super().__init__()
        self.layers, self.names = nn.ModuleList(layer for layer, _ in layers).eval(), [name for _, name in layers]
        self.register_buffer("order", torch.tensor(order), persistent=False)
        self.factor, self.shift = self._frame_rule(width)

    @torch.no_grad()
    def _frame_rule(self, width: int | None) -> tuple[int, int]:
        """Find (factor, shift) with ``frames(n) == (n + shift) // factor``, by experiment."""
        def count(size: int) -> int:
            return int(self(torch.zeros(1, size, *([] if width is None else [width])), torch.tensor([size])).shape[1])

        shortest, more = _PROBED[width is not None]
        base = count(shortest)
        factor = round(more / (count(shortest + more) - base))
        below, above = shortest, shortest + factor  # the length with one more output lies between
        while above - below > 1:
            middle = (below + above) // 2
            below, above = (below, middle) if count(middle) > base else (middle, above)
        return factor, factor * (base + 1) - above

    def frames(self, count: N) -> N:
        """Return the number of outputs for a number of frames or samples."""
        return (count + self.shift) // self.factor

    def forward(self, states: Tensor, frames: Tensor) -> Tensor:
        """[B, T, ...], [B] -> [B, T', V]."""
        lengths = frames / states.shape[1]
        for layer, name in zip(self.layers, self.names, strict=True):
            if isinstance(layer, WaveEncoder):
                output = layer(states, frames)
            else:
                output = layer(states) if name is None else layer(states, **{name: lengths})
            states = output[0] if isinstance(output, tuple) else output
        return states[..., self.order]


class SpeechBrainModel:
    """A model for ``EncoderASR``. Opening it runs its hyperparams.yaml, which is code; weights are only read.

    name : what the user called it
    trust_code : whether that code may run
    """

    def __init__(self, name: str, folder: Path, trust_code: bool):
        try:
            found = source.find(folder, BEST_CHECKPOINT, Metric("WER"))
        except SbkitError as error:  # names a recipe's key
            raise SbkitError(error.message.removeprefix("init_from: "),
                             hint="download or copy all that belongs to the model") from error
        if found.checkpointer is not None:
            raise SbkitError(f"{folder} is an sbkit run", hint=f"sbkit export {folder} --to BUNDLE")
        found.tensors(shapes=True)  # refuses files with more than tensors
        if not trust_code:
            raise SbkitError(f"{name} is a SpeechBrain model, and its hyperparams.yaml is code that would run here",
                             hint=f"read {folder / RECIPE}; if you trust it, add --trust-code")
        from speechbrain.inference.ASR import EncoderASR

        try:
            with tempfile.TemporaryDirectory() as temporary:
                self.own: Any = EncoderASR.from_hparams(  # its attributes depend on the YAML
                    source=str(folder), savedir=temporary, run_opts={"device": "cpu"})
        except Exception as error:  # a YAML may do anything
            raise SbkitError(
                f"SpeechBrain can't open {folder} as an EncoderASR: {summary(error).replace(temporary, str(folder))}",
                hint="its hyperparams.yaml needs encoder, tokenizer and decoding_function, and the folder all "
                     "files that its pretrainer loads") from error
        values, encoder = self.own.hparams, self.own.mods.encoder
        if not hasattr(encoder, "lengths_arg_names"):
            raise SbkitError(f"the encoder of {folder} is a {type(encoder).__name__}, not the LengthsCapableSequential "
                             "that EncoderASR needs", hint="name another model")
        self.folder, self.sample_rate = folder, int(values.sample_rate)
        decoding = values.decoding_function
        blank = decoding.keywords.get("blank_id") if isinstance(decoding, functools.partial) else None
        self.blank = int(getattr(values, "blank_index", 0) if blank is None else blank)
        own = [WaveEncoder(layer) if hasattr(layer, "normalize_wav") else layer for layer in encoder.values()]
        layers = list(zip(own, encoder.lengths_arg_names, strict=True))
        self.features = layers.pop(0)[0] if isinstance(layers[0][0], (lobes.Fbank, lobes.MFCC)) else None
        self.normalize = layers.pop(0)[0] if is_input_normalization(layers[0][0]) else None
        with torch.no_grad():
            scores = self.own.encode_batch(torch.zeros(1, self.sample_rate), torch.ones(1))
            width = None if self.features is None else self.features(torch.zeros(1, self.sample_rate)).shape[-1]
        self.size = int(scores.shape[-1])
        self.order = [self.blank, *(index for index in range(self.size) if index != self.blank)]
        self.piece_model = self._piece_model()
        self.layers = Layers(layers, self.order, width)

    @property
    def hop_samples(self) -> int:
        """Samples between two frames of features; 1 if the input is waveforms."""
        stft: Any = None if self.features is None else self.features.compute_STFT  # SpeechBrain has no types
        return 1 if stft is None else int(stft.hop_length)

    def _piece_model(self) -> bytes:
        """Make a SentencePiece model of its tokens, with the blank first."""
        own = self.own.tokenizer
        if isinstance(own, sentencepiece.SentencePieceProcessor):
            pieces = [own.id_to_piece(i) for i in range(own.vocab_size())]
            silent = {i for i in range(len(pieces)) if own.is_control(i) or own.is_unknown(i)}
            scores = {piece: own.get_score(i) for i, piece in enumerate(pieces)}
        elif isinstance(own, CTCTextEncoder):
            labels = source.label_rows(own)
            pieces, silent, scores = list(labels.pieces), set(labels.roles.values()), {}
        else:
            raise SbkitError(f"the tokenizer of {self.folder} is a {type(own).__name__}",
                             hint="a SentencePiece model and SpeechBrain's CTCTextEncoder can be imported")
        if len(pieces) != self.size or not 0 <= self.blank < self.size:
            raise SbkitError(f"the tokenizer of {self.folder} doesn't fit its head: the head has {self.size} outputs, "
                             f"the tokenizer {len(pieces)} tokens, and the blank is {self.blank}",
                             hint="do its tokenizer and its weights come from the same model?")
        if isinstance(own, sentencepiece.SentencePieceProcessor) and self.blank == own.unk_id() == 0:
            return bytes(own.serialized_model_proto())
        return piece_model([pieces[i] for i in self.order], {new for new, i in enumerate(self.order) if i in silent},
                           scores)

    def own_code(self) -> Callable[[np.ndarray], tuple[np.ndarray, str]]:
        """Return a function that runs SpeechBrain on a waveform [S]: log-probabilities [T, V] and text."""
        own = self.own.tokenizer

        @torch.no_grad()
        def run(signal: np.ndarray) -> tuple[np.ndarray, str]:
            scores = self.own.encode_batch(torch.from_numpy(signal)[None], torch.ones(1)).log_softmax(-1)
            (tokens,) = ctc_greedy_decode(scores, torch.ones(1), blank_id=self.blank)
            if isinstance(own, sentencepiece.SentencePieceProcessor):
                return scores[0].numpy(), own.decode_ids(tokens)
            marks = {getattr(own, label, None) for label in _MARKS}
            return scores[0].numpy(), "".join(label for label in own.decode_ndim(tokens) if label not in marks)

        return run
