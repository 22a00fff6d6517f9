"""The path from waveforms to token scores that training, checking, scoring and export share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from speechbrain.utils.dynamic_chunk_training import DynChunkTrainConfig
from torch import Tensor, nn
from torch.nn import functional

from sbkit.errors import SbkitError
from sbkit.nn import recurrent
from sbkit.nn.chunks import ChunkConfig, Chunks, mask_last_chunk_padding
from sbkit.nn.lengths import LengthRule, N, feature_frames, lengths_to_mask, takes_lengths
from sbkit.nn.spec_augment import SpecAugment
from sbkit.nn.streaming.layers import encode_in_chunks
from sbkit.nn.tf32 import without_tf32
from sbkit.tasks.recognise.keys import EncoderKeys

# Zero frames appended to every utterance before the convolutions, more than their kernels reach, so that the last
# frames of an utterance are the same alone and in a batch.
GUARD_FRAMES = 16
# The most frames at once in features and front end on a CPU outside training, so that intermediate results stay in its
# caches and don't raise the memory peak.
FRAMES_AT_ONCE = 4000


class AcousticModel:
    """Features, front end, encoder and head of a recipe in one object.

    It is not a module and owns no parameters; the recipe's modules are registered elsewhere.

    features : [B, S] waveforms to [B, T, F] features (``speechbrain.lobes.features.Fbank``); None if the encoder takes
        waveforms. One whose forward takes a second argument gets the lengths [B]. One that doesn't make a frame for
        each ``hop_samples`` and one more has a method ``frames``, which maps numbers of samples to those of frames
    encoder : a SpeechBrain transformer (its ``encode``), or any module [B, T, F] (or [B, S]) -> [B, T', D], or a tuple
        that begins with it. One of SpeechBrain's gets relative lengths, if it takes them by a name of theirs; another
        one whose forward takes a second argument gets the lengths [B]. One that changes the length has a method
        ``frames``, which maps input lengths (an int or a tensor) to output lengths; SpeechBrain's containers are tried
    head : [B, T, D] -> [B, T, V] scores, for those that score tokens frame by frame
    frontend : [B, T, F] -> [B, T', ...], such as SpeechBrain's ``ConvolutionFrontEnd``
    normalize : called with features and relative lengths, as SpeechBrain's ``InputNormalization``
    augment : called in training with features [B, T, F] and lengths [B]
    hop_samples : samples between two frames of ``features``
    chunks : the context of frames in training, for a model that also runs live
    scores_tokens : whether the head's outputs are scores of tokens, to be normalised to log-probabilities
    """

    def __init__(
        self,
        features: nn.Module | None,
        encoder: nn.Module,
        head: nn.Module | None = None,
        frontend: nn.Module | None = None,
        normalize: nn.Module | None = None,
        augment: Callable[[Tensor, Tensor], Tensor] | None = None,
        hop_samples: int = 160,
        n_features: int = 80,
        chunks: Chunks | None = None,
        scores_tokens: bool = True,
    ):
        self.encoder: Any = encoder  # with whatever methods its class has
        self.compute_features = features
        self.head: Any = head  # None, or what scores states
        self.scores_tokens = scores_tokens
        self.frontend = frontend
        self.normalize = normalize
        self.augment = augment
        self.hop_samples = hop_samples
        self.chunks = chunks
        self.features_take_lengths = features is not None and takes_lengths(features)
        self.frontend_rule = LengthRule.probe(frontend, n_features) if frontend else LengthRule.identity()
        self.encoder_rule: Callable[..., Any] | None = None
        """Input frames to output frames of the encoder; None: SpeechBrain's transformers keep the number."""
        self.takes_lengths = False
        self.padding: dict[str, int] = {}
        """What :func:`recurrent.call` appends for an encoder of SpeechBrain's layers."""
        if not hasattr(encoder, "encode"):
            self._find_lengths_of(encoder, n_features)

    def _find_lengths_of(self, encoder: nn.Module, n_features: int) -> None:
        """Find out how an encoder that is no transformer of SpeechBrain's takes lengths, and changes them."""
        self.takes_lengths = recurrent.sees_lengths(encoder)
        self.encoder_rule = getattr(encoder, "frames", None)
        convolves = any(isinstance(layer, (nn.Conv1d, nn.Conv2d)) for layer in encoder.modules())
        guard = GUARD_FRAMES if convolves else 0
        takes_features = self.compute_features is not None
        if recurrent.take_lengths(encoder) and takes_features and self.encoder_rule is None:
            with contextlib.suppress(ValueError):  # layers that don't fit raise an error of their own in the forward
                rule = LengthRule.probe(encoder, self.frontend_rule.width or n_features)
                self.encoder_rule = rule
                self.padding = {"guard": guard, "factor": rule.factor}
        elif recurrent.by_name(encoder) and recurrent.lengths_name(encoder) == recurrent.MASK:
            self.encoder_rule = LengthRule.identity()
            self.padding = {"guard": guard}

    @classmethod
    def of(cls, keys: EncoderKeys, head: nn.Module | None = None, scores_tokens: bool = True) -> AcousticModel:
        """Put a recipe's features, front end, encoder and head together."""
        return cls(features=keys.compute_features, encoder=getattr(keys, keys.encoder_key), head=head,
                   frontend=keys.CNN, normalize=keys.normalize, augment=keys.spec_augment, n_features=keys.n_mels,
                   hop_samples=keys.hop_samples, chunks=keys.chunks, scores_tokens=scores_tokens)

    def describe(self, sample_rate: int) -> tuple[list[str], dict[str, Any]]:
        """Describe the lengths of a feature frame, of an encoder frame and of a chunk, for the check's report."""
        hop = 1000 * self.hop_samples / sample_rate
        frame = hop * self.subsampling
        features = ""
        if self.compute_features is not None:
            features = f"features every {hop:g} ms, subsampled by {self.subsampling}: "
        lines = [f"{features}an encoder frame every {frame:g} ms, {1000 / frame:g} a second"]
        if self.frontend is not None:
            lines.append(f"the front end gets {GUARD_FRAMES} more feature frames of zeros, whose output is cut off")
        if self.chunks is not None:
            sizes = ", ".join(f"{frame * size:g}" for size in self.chunks.sizes)
            left = ", ".join(f"{frame * size:g}" for size in self.chunks.left)
            again = ""
            if self.chunks.ahead:
                again = f"; its last {frame * self.chunks.ahead:g} ms are lookahead, and computed again with the next"
            lines.append(f"trained to run live in chunks of {sizes} ms, each with {left} ms of left context{again}")
        return lines, {"subsampling": self.subsampling, "frames_per_second": 1000 / frame}

    @property
    def subsampling(self) -> int:
        """Feature frames (or samples) per encoder frame."""
        if self.encoder_rule is None:
            return self.frontend_rule.factor
        long = 1_000_000 * self.frontend_rule.factor
        return round(self.frontend_rule.factor * long / (self.encoder_rule(2 * long) - self.encoder_rule(long)))

    def frames(self, samples: N) -> N:
        """Return the number of encoder frames for a number of samples."""
        return self._after(self.frontend_rule(self._feature_frames(samples)))

    def _feature_frames(self, samples: N) -> N:
        features = self.compute_features
        return samples if features is None else feature_frames(features, samples, self.hop_samples)

    def _after(self, frames: N) -> N:
        """Return the number of frames after the encoder."""
        return frames if self.encoder_rule is None else self.encoder_rule(frames)

    def features(
        self, signals: Tensor, samples: Tensor, training: bool = False, views: int = 1, real: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Compute normalised features [B, T, F] and frame counts [B] from waveforms [B, S] and sample counts [B].

        views : augmented versions of each utterance: [views B, T, F], the first versions of all utterances first
        real : [B] bool, False for rows that are no utterances: running statistics leave them out, if ``normalize`` is
            sbkit's, and ``SpecAugment`` draws no masks for them; None: all are
        """
        if self.compute_features is None:
            keep = lengths_to_mask(samples, signals.shape[1])
            return signals.masked_fill(~keep, 0.0).repeat(views, 1), samples.repeat(views)
        inputs = (signals, samples) if self.features_take_lengths else (signals,)
        with without_tf32():
            feats = by_rows(self.compute_features, FRAMES_AT_ONCE * self.hop_samples, *inputs)
        frames = self._feature_frames(samples)
        if self.normalize is not None:
            # Half a frame less, since rounding a relative length times T in fp32 may otherwise add a frame.
            relative = (frames - 0.5) / feats.shape[1]
            counting = getattr(self.normalize, "counting", None) if training and real is not None else None
            feats = self.normalize(feats, relative) if counting is None else counting(feats, relative, real)

        feats = feats.repeat(views, 1, 1)
        frames = frames.repeat(views)
        if training and self.augment is not None:
            frames_to_mask = frames
            if isinstance(self.augment, SpecAugment) and real is not None:
                frames_to_mask = frames * real.repeat(views)
            feats = self.augment(feats, frames_to_mask)
        keep = lengths_to_mask(frames, feats.shape[1])
        return feats.masked_fill(~keep[..., None], 0.0), frames

    def embed(self, feats: Tensor, frames: Tensor) -> tuple[Tensor, Tensor]:
        """Run the front end on features, flattened over channels: [B, T, F] -> [B, T', D], with frame counts [B]."""
        frontend = self.frontend
        if frontend is None:
            return feats, frames
        longest = self.frontend_rule(feats.shape[1])
        padded = functional.pad(feats, (0, 0, 0, GUARD_FRAMES))
        out = by_rows(lambda rows: frontend(rows)[:, :longest].flatten(2), FRAMES_AT_ONCE, padded)
        return out, self.frontend_rule(frames)

    def encode(self, feats: Tensor, frames: Tensor,
               chunks: DynChunkTrainConfig | None = None) -> tuple[Tensor, Tensor]:
        """Compute encoder states [B, T', D] and their counts [B] from features [B, T, F].

        chunks : the context of frames, for SpeechBrain's Conformer; None: the whole utterance
        """
        input_frames = frames
        source, frames = self.embed(feats, frames)
        if isinstance(chunks, ChunkConfig) and chunks.ahead:
            encoded = encode_in_chunks(self.encoder, source, input_frames, self.frontend_rule.factor, chunks)
        elif chunks is not None:
            with mask_last_chunk_padding(self.encoder.encoder, frames, chunks):
                encoded = self.encoder.encode(source, frames / source.shape[1], dynchunktrain_config=chunks)
        elif hasattr(self.encoder, "encode"):
            encoded = self.encoder.encode(source, frames / source.shape[1])
        else:
            encoded = recurrent.call(self.encoder, source, frames, **self.padding)
            made = encoded.shape[1]
            longest = self._after(source.shape[1])
            if made != longest and self.encoder_rule is None:
                raise SbkitError("unknown-lengths", f"{type(self.encoder).__name__} makes {made} frames of {longest}, "
                                 "but has no method frames, so it is unknown how many of them belong to each "
                                 "utterance of a batch",
                                 hint="def frames(self, frames): return the number of its output frames for a number "
                                      "of input frames, an int or a tensor [B], such as (frames + 3) // 4")
            encoded = encoded[:, :longest]
        return encoded[0] if isinstance(encoded, tuple) else encoded, self._after(frames)

    def encode_and_decode(self, feats: Tensor, frames: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute encoder states and counts as :meth:`encode`, and decoder states [B, U, D] for tokens [B, U].

        No token id is treated as padding: the decoder is causal, so padding affects only the states after it.
        """
        source, frames = self.embed(feats, frames)
        encoded, decoded = self.encoder(source, tokens, frames / source.shape[1], pad_idx=-1)
        return encoded, frames, decoded

    def decode(self, tokens: Tensor, encoded: Tensor, frames: Tensor) -> Tensor:
        """Compute decoder states [B, U, D] for tokens [B, U] and encoder states [B, T', D].

        frames : [B], each utterance's number of encoder states; at least one has all T'
        """
        return self.encoder.decode(tokens, encoded, frames)[0]

    def outputs(self, signals: Tensor, samples: Tensor,
                chunks: DynChunkTrainConfig | None = None) -> tuple[Tensor, Tensor]:
        """Compute log-probabilities [B, T', V], or other outputs of the head, in fp32, and frame counts [B] from
        waveforms [B, S]."""
        encoded, frames = self.encode(*self.features(signals, samples), chunks)
        return self.scores(encoded), frames

    def scores(self, encoded: Tensor) -> Tensor:
        """Compute log-probabilities, or other outputs of the head, in fp32 from encoder states [B, T', D]."""
        outputs: Tensor = self.head(encoded).float()
        return outputs.log_softmax(-1) if self.scores_tokens else outputs


def by_rows(layer: Callable[..., Tensor], at_once: int, x: Tensor, *more: Tensor) -> Tensor:
    """Return ``layer(x, *more)``, computed a few rows at a time on a CPU without gradients."""
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or x.device.type != "cpu":
        return layer(x, *more)  # comparing sizes would tie a compiler's graph to them
    rows = max(1, at_once // max(1, x.shape[1]))
    if rows >= len(x):
        return layer(x, *more)
    return torch.cat([layer(*parts) for parts in zip(*(each.split(rows) for each in (x, *more)), strict=True)])
