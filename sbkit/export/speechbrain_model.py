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

_MARKS = ("unk_label", "bos_label", "eos_label")  # attributes of a CTCTextEncoder with labels that are not text
_TYPES = ("wav2vec2", "hubert", "wavlm")
_EPSILON = 1e-5  # of torch's layer_norm
#: Lengths to try layers with: a length, and the increase to a second one.
_PROBED_FRAMES, _PROBED_SAMPLES = (64, 640), (16_000, 64_000)


class WaveEncoder(nn.Module):
    """SpeechBrain's wrapper of wav2vec 2.0, HuBERT or WavLM, for waveforms [B, S] and sample counts [B].

    The original can't be traced. Waveforms and states are normalised as there, but without an utterance's padding.
    """

    def __init__(self, wrapper: Any):  # of SpeechBrain's integrations, which need transformers
        super().__init__()
        config = wrapper.model.config.to_dict()
        if wrapper.output_all_hiddens or config["model_type"] not in _TYPES:
            raise SbkitError("unsupported-model", f"the {config['model_type']} in this model can't be imported: its "
                             "type is unknown, or it returns the states of all layers (output_all_hiddens)",
                             hint=f"{', '.join(_TYPES)} can be imported", value=config["model_type"])
        options = EncoderOptions(mask_time_prob=0.0, mask_feature_prob=0.0,
                                 add_adapter=config.get("add_adapter", False))
        self.network = build_network(Settings("the model", config, {"do_normalize": False}), options)
        state = wrapper.model.state_dict()
        self.network.load_state_dict({name: state[name] for name in self.network.state_dict()})
        self.normalizes = bool(wrapper.normalize_wav)
        self.output_norm = bool(wrapper.output_norm)

    def forward(self, signals: Tensor, samples: Tensor) -> Tensor:
        """[B, S], [B] -> [B, T, D]."""
        if self.normalizes:
            signals = _normalized(signals[..., None], samples)[..., 0]
        states = self.network(signals, samples)
        return _normalized(states, self.network.frames(samples)) if self.output_norm else states


def _normalized(states: Tensor, counts: Tensor) -> Tensor:
    """Normalise [B, T, D] over all values of an utterance's ``counts`` [B] frames, as torch's layer_norm does."""
    inside = lengths_to_mask(counts, states.shape[1])[..., None]
    sizes = (counts * states.shape[2])[:, None, None]
    mean = states.masked_fill(~inside, 0.0).sum((1, 2), keepdim=True) / sizes
    centred = (states - mean).masked_fill(~inside, 0.0)
    variance = centred.square().sum((1, 2), keepdim=True) / sizes
    return centred * torch.rsqrt(variance + _EPSILON)


class Layers(nn.Module):
    """All layers after the features: [B, T, F] and frame counts [B], or waveforms and samples, to scores [B, T', V].

    layers : SpeechBrain's, in order, each with the name of its argument for relative lengths, if any
    order : for each output, its index in the outputs of the layers
    width : features of a frame; None if the input is waveforms
    """

    order: Tensor

    def __init__(self, layers: list[tuple[nn.Module, str | None]], order: list[int], width: int | None):
        super().__init__()
        self.layers = nn.ModuleList(layer for layer, _ in layers).eval()
        self.names = [name for _, name in layers]
        self.register_buffer("order", torch.tensor(order), persistent=False)
        self.factor, self.shift = self._frame_rule(width)

    @torch.no_grad()
    def _frame_rule(self, width: int | None) -> tuple[int, int]:
        """Find (factor, shift) with ``frames(n) == (n + shift) // factor``, by experiment."""
        feature_dims = [] if width is None else [width]

        def count(size: int) -> int:
            return int(self(torch.zeros(1, size, *feature_dims), torch.tensor([size])).shape[1])

        shortest, increase = _PROBED_SAMPLES if width is None else _PROBED_FRAMES
        base = count(shortest)
        factor = round(increase / (count(shortest + increase) - base))

        # The shortest length with one more output, by bisection.
        below, above = shortest, shortest + factor
        while above - below > 1:
            middle = (below + above) // 2
            if count(middle) > base:
                above = middle
            else:
                below = middle
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
            weights = source.find(folder, BEST_CHECKPOINT, Metric("WER"))
        except SbkitError as error:  # names a recipe's key
            raise SbkitError(error.code, error.message.removeprefix("init_from: "), file=error.file,
                             hint="download or copy all that belongs to the model") from error
        if weights.checkpointer is not None:
            raise SbkitError("made-by-sbkit", f"{folder} is a run of sbkit", file=folder,
                             hint=f"sbkit export {folder} --to BUNDLE makes a bundle of it")
        weights.tensors(shapes=True)  # refuses files with more than tensors
        if not trust_code:
            raise SbkitError("untrusted-code",
                             f"{name} is a SpeechBrain model, and its hyperparams.yaml is code that would run here",
                             hint=f"read {folder / RECIPE}; if you trust it, add --trust-code", file=folder / RECIPE)
        from speechbrain.inference.ASR import EncoderASR

        try:
            with tempfile.TemporaryDirectory() as temporary:
                self.asr: Any = EncoderASR.from_hparams(  # its attributes depend on the YAML
                    source=str(folder), savedir=temporary, run_opts={"device": "cpu"})
        except Exception as error:  # a YAML may do anything
            reason = summary(error).replace(temporary, str(folder))
            raise SbkitError("unsupported-model", f"SpeechBrain can't open {folder} as an EncoderASR: {reason}",
                             hint="its hyperparams.yaml needs encoder, tokenizer and decoding_function, and the folder "
                                  "all files that its pretrainer loads", file=folder) from error
        hparams = self.asr.hparams
        encoder = self.asr.mods.encoder
        if not hasattr(encoder, "lengths_arg_names"):
            raise SbkitError("unsupported-model", f"the encoder of {folder} is a {type(encoder).__name__}, not the "
                             "LengthsCapableSequential that EncoderASR needs", hint="name another model", file=folder)
        self.folder = folder
        self.sample_rate = int(hparams.sample_rate)
        self.blank = _blank_id(hparams)

        modules = [WaveEncoder(layer) if hasattr(layer, "normalize_wav") else layer for layer in encoder.values()]
        layers = list(zip(modules, encoder.lengths_arg_names, strict=True))
        self.features: Any = None  # a front end of SpeechBrain's, which has no types
        self.normalize: nn.Module | None = None
        if isinstance(layers[0][0], (lobes.Fbank, lobes.MFCC)):
            self.features, _ = layers.pop(0)
        if is_input_normalization(layers[0][0]):
            self.normalize, _ = layers.pop(0)

        one_second = torch.zeros(1, self.sample_rate)
        with torch.no_grad():
            self.size = int(self.asr.encode_batch(one_second, torch.ones(1)).shape[-1])
            width = None if self.features is None else self.features(one_second).shape[-1]
        # sbkit's blank is the first token.
        self.order = [self.blank, *(index for index in range(self.size) if index != self.blank)]
        self.piece_model = self._piece_model()
        self.layers = Layers(layers, self.order, width)

    @property
    def hop_samples(self) -> int:
        """Samples between two frames of features; 1 if the input is waveforms."""
        if self.features is None:
            return 1
        return int(self.features.compute_STFT.hop_length)

    def _piece_model(self) -> bytes:
        """Make a SentencePiece model of its tokens, with the blank first."""
        tokenizer = self.asr.tokenizer
        scores: dict[str, float] = {}
        if isinstance(tokenizer, sentencepiece.SentencePieceProcessor):
            pieces = [tokenizer.id_to_piece(i) for i in range(tokenizer.vocab_size())]
            silent = {i for i in range(len(pieces)) if tokenizer.is_control(i) or tokenizer.is_unknown(i)}
            scores = {piece: tokenizer.get_score(i) for i, piece in enumerate(pieces)}
        elif isinstance(tokenizer, CTCTextEncoder):
            labels = source.label_rows(tokenizer)
            pieces = list(labels.pieces)
            silent = set(labels.roles.values())
        else:
            raise SbkitError("unsupported-model", f"the tokenizer of {self.folder} is a {type(tokenizer).__name__}",
                             hint="a SentencePiece model and SpeechBrain's CTCTextEncoder can be imported",
                             file=self.folder)
        if len(pieces) != self.size or not 0 <= self.blank < self.size:
            raise SbkitError("tokenizer-does-not-fit", f"the tokenizer of {self.folder} doesn't fit its head: the head "
                             f"has {self.size} outputs, the tokenizer {len(pieces)} tokens, and the blank is "
                             f"{self.blank}",
                             hint="do its tokenizer and its weights come from the same model?", file=self.folder)
        if isinstance(tokenizer, sentencepiece.SentencePieceProcessor) and self.blank == tokenizer.unk_id() == 0:
            return bytes(tokenizer.serialized_model_proto())
        silent_in_order = {new for new, old in enumerate(self.order) if old in silent}
        return piece_model([pieces[i] for i in self.order], silent_in_order, scores)

    def own_code(self) -> Callable[[np.ndarray], tuple[np.ndarray, str]]:
        """Return a function that runs SpeechBrain on a waveform [S]: log-probabilities [T, V] and text."""
        tokenizer = self.asr.tokenizer

        @torch.no_grad()
        def run(signal: np.ndarray) -> tuple[np.ndarray, str]:
            log_probs = self.asr.encode_batch(torch.from_numpy(signal)[None], torch.ones(1)).log_softmax(-1)
            (tokens,) = ctc_greedy_decode(log_probs, torch.ones(1), blank_id=self.blank)
            if isinstance(tokenizer, sentencepiece.SentencePieceProcessor):
                text = tokenizer.decode_ids(tokens)
            else:
                marks = {getattr(tokenizer, name, None) for name in _MARKS}
                text = "".join(label for label in tokenizer.decode_ndim(tokens) if label not in marks)
            return log_probs[0].numpy(), text

        return run


def _blank_id(values: Any) -> int:  # a namespace of whatever SpeechBrain's YAML defines
    """Return the blank of the decoding function, or else the recipe's, or else 0."""
    decoding = values.decoding_function
    if isinstance(decoding, functools.partial) and decoding.keywords.get("blank_id") is not None:
        return int(decoding.keywords["blank_id"])
    return int(getattr(values, "blank_index", 0))
