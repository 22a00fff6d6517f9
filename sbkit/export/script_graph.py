"""The forward of a script's model as a graph: its own code is traced, with layers that can't be traced replaced.

Layers are replaced in place, and put back, since the script's code reaches them by any path: ``self.modules``,
``self.hparams``, a global. The graph is that of ``compute_forward`` up to the recogniser's output.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from speechbrain.lobes import features as lobes
from speechbrain.lobes.models.transformer.TransformerASR import TransformerASR
from torch import Tensor, nn

from sbkit.errors import SbkitError
from sbkit.export import features
from sbkit.export.graph import trace_module
from sbkit.export.lobes import exportable
from sbkit.export.speechbrain_model import WaveEncoder
from sbkit.nn.accelerate import FASTER

Layer = Any  # a module with whatever attributes its class has
EXAMPLE = (2, 24_000)  # batch and samples to trace with; sizes of 0 and 1 would become constants
_LOBES = (lobes.Fbank, lobes.MFCC)


class ScriptGraph(nn.Module):
    """A script's recogniser as a function of waveforms [B, S] and sample counts [B].

    forward_of : maps waveforms and lengths relative to S to log-probabilities [B, T, V]
    parts : all modules that it may use
    factor, shift : an utterance of n samples has (n + shift) // factor frames; None: they are rounded as SpeechBrain's
        decoders round
    """

    def __init__(self, forward_of: Callable[[Tensor, Tensor], Tensor], parts: Iterable[nn.Module],
                 rule: tuple[int, int] | None):
        super().__init__()
        self.forward_of = forward_of
        self.parts = nn.ModuleList(outermost(parts))
        self.rule = rule

    def forward(self, signals: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Compute log-probabilities [B, T, V] and frame counts [B]."""
        lengths = lengths.clamp(max=signals.shape[1])
        relative_lengths = lengths.float() / signals.shape[1]
        log_probs = self.forward_of(signals, relative_lengths)
        if self.rule is None:
            return log_probs, torch.round(relative_lengths * log_probs.shape[1]).long()
        factor, shift = self.rule
        return log_probs, ((lengths + shift) // factor).clamp(min=0)


def outermost(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return modules without those that are inside another, or hold nothing that isn't in one before them."""
    listed = list(dict.fromkeys(modules))
    inner = {part for module in listed for part in module.modules() if part is not module}
    kept: list[nn.Module] = []
    seen: set[nn.Module] = set()
    for module in listed:
        further = [part for part in module.modules() if part not in seen]
        # A list of modules, as scripts make for their checkpoints, has no weights of its own.
        if module not in inner and any(_has_weights(part) or not any(part.children()) for part in further):
            kept.append(module)
            seen |= set(further)
    return kept


def _has_weights(module: nn.Module) -> bool:
    return any(True for _ in (*module.parameters(recurse=False), *module.buffers(recurse=False)))


def trace_script(graph: ScriptGraph) -> torch.export.ExportedProgram:
    """Trace the graph with dynamic batch and time dimensions.

    What the script's modules have besides, such as an attention decoder, isn't part of it.
    """
    batch, samples = EXAMPLE
    example = (torch.randn(batch, samples) * 0.1, torch.tensor([samples, samples * 2 // 3]))
    dynamic: dict[str, tuple[int, ...] | list[tuple[int, ...]]] = {"signals": (0, 1), "lengths": (0,)}
    replaced: list[nn.Module] = []
    with replacing(graph.parts, replaced), no_gradients(graph.parts):
        graph.replacements = nn.ModuleList(replaced)
        try:
            program = trace_module(graph, example, dynamic)
            parameters, buffers = _unused_weights(graph, program)
            # A layer may ask an unused one for its device or shape, a buffer more likely: then the graph keeps it.
            for unused in filter(None, (parameters | buffers, parameters)):
                with _without(graph, unused), contextlib.suppress(SbkitError):
                    program = trace_module(graph, example, dynamic)
                    break
        finally:
            del graph.replacements
    features.refuse_transforms(program, "of the script")
    return program


def _unused_weights(graph: nn.Module, program: torch.export.ExportedProgram) -> tuple[set[str], set[str]]:
    """Return the names of parameters, and of buffers, that no operation reads under any of their names."""
    signature = program.graph_signature
    names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    parameters = dict(graph.named_parameters(remove_duplicate=False))
    tensors = {**parameters, **dict(graph.named_buffers(remove_duplicate=False))}
    placeholders = [node for node in program.graph.find_nodes(op="placeholder") if node.name in names]
    used = {id(tensors[names[node.name]]) for node in placeholders if node.users}
    unused = {names[node.name] for node in placeholders if id(tensors[names[node.name]]) not in used}
    return unused & parameters.keys(), unused - parameters.keys()


@contextlib.contextmanager
def _without(graph: nn.Module, names: Iterable[str]) -> Iterator[None]:
    """Take parameters and buffers out of their modules, and put them back on exit."""
    removed: list[tuple[dict[str, Any], str, Tensor | None]] = []
    for name in names:
        owner, _, weight = name.rpartition(".")
        module = graph.get_submodule(owner)
        tensors: dict[str, Any] = module._parameters if weight in module._parameters else module._buffers
        removed.append((tensors, weight, tensors[weight]))
        tensors[weight] = None
    try:
        yield
    finally:
        for tensors, weight, tensor in reversed(removed):  # one module may have several names
            tensors[weight] = tensor


@contextlib.contextmanager
def no_gradients(parts: Iterable[nn.Module]) -> Iterator[None]:
    """Have weights that need no gradients inside this context."""
    trained = [weight for part in parts for weight in part.parameters() if weight.requires_grad]
    for weight in trained:
        weight.requires_grad_(False)
    try:
        yield
    finally:
        for weight in trained:
            weight.requires_grad_(True)


@contextlib.contextmanager
def replacing(parts: Sequence[nn.Module] | nn.ModuleList, replacements: list[nn.Module]) -> Iterator[None]:
    """Replace layers by equivalents that can be traced, and put the originals back on exit.

    replacements : receives the modules that are called instead of others
    """
    layers = list(dict.fromkeys(layer for part in parts for layer in part.modules()))
    classes = [type(layer) for layer in layers]
    forwards: list[nn.Module] = []
    try:
        for part in parts:
            exportable(part)
        for layer in layers:
            forward = _traceable_forward(layer, replacements)
            if forward is not None:
                layer.forward = forward
                forwards.append(layer)
        yield
    finally:
        for layer in forwards:
            del layer.forward
        for layer, kind in zip(layers, classes, strict=True):
            layer.__class__ = kind


def _traceable_forward(layer: Layer, replacements: list[nn.Module]) -> Callable[..., Any] | None:
    """Return a forward with the same arguments and results as a layer's own; None if that can be traced as it is."""
    if type(layer) in (*_LOBES, FASTER[lobes.Fbank]):
        return _features(layer, replacements)
    if features.is_input_normalization(layer):
        return _normalization(layer, replacements)
    if hasattr(layer, "normalize_wav") and hasattr(layer, "model"):
        return _wave_encoder(layer, replacements)
    if isinstance(layer, TransformerASR) and hasattr(layer, "custom_tgt_module"):
        return _encoder_alone(layer)
    return None


def _features(layer: Layer, replacements: list[nn.Module]) -> Callable[..., Tensor]:
    equivalent = features.Features(layer, layer.compute_STFT.hop_length).eval()
    replacements.append(equivalent)

    def forward(wav: Tensor) -> Tensor:
        # As in the original, the padding is part of the signal.
        samples = torch.full_like(wav[:, 0], 0).long() + wav.shape[1]
        feats: Tensor = equivalent(wav, samples)[0]
        return feats

    return forward


def _normalization(layer: nn.Module, replacements: list[nn.Module]) -> Callable[..., Tensor]:
    equivalent = features.normalization(layer)
    assert equivalent is not None
    replacements.append(equivalent)

    def forward(x: Tensor, lengths: Tensor | None = None, epoch: int | None = None) -> Tensor:
        del epoch  # for updates in training
        frames = torch.full_like(x[:, 0, 0], 0).long() + x.shape[1]
        if lengths is not None:  # as the original's mask
            frames = torch.ceil(lengths * x.shape[1] - 1e-6).long()
        normalized: Tensor = equivalent(x, frames)
        return normalized

    return forward


def _wave_encoder(layer: Layer, replacements: list[nn.Module]) -> Callable[..., Tensor]:
    equivalent = WaveEncoder(layer).eval()
    replacements.append(equivalent)

    def forward(wav: Tensor, wav_lens: Tensor | None = None) -> Tensor:
        samples = torch.full_like(wav[:, 0], 0).long() + wav.shape[1]
        if wav_lens is not None:
            samples = torch.round(wav_lens * wav.shape[1]).long()
        states: Tensor = equivalent(wav, samples)
        return states

    return forward


def _encoder_alone(layer: Layer) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Encode, and return zeros for what the decoder would say, which no CTC output depends on."""
    def forward(src: Tensor, tgt: Tensor | None, wav_len: Tensor | None = None, pad_idx: int = 0
                ) -> tuple[Tensor, Tensor | None]:
        if layer.output_hidden_states:
            raise SbkitError("script-layer", "a TransformerASR with output_hidden_states can't be exported",
                             hint="leave output_hidden_states out")
        encoded = layer.encode(src, wav_len, pad_idx)
        if tgt is None:
            return encoded, None
        return encoded, encoded.new_zeros(tgt.shape[0], tgt.shape[1], encoded.shape[2])

    return forward


def frame_rule(count_frames: Callable[[int], int], shortest: int, increase: int
               ) -> tuple[tuple[int, int] | None, float]:
    """Find (factor, shift) with ``count_frames(n) == (n + shift) // factor``, by experiment.

    shortest, increase : a number of samples to begin with, and what to add for a second one

    Returns None if there is no such rule, and in any case the samples for each frame.
    """
    base = count_frames(shortest)
    more = count_frames(shortest + increase)
    if more <= base:
        return None, float(increase)
    samples_per_frame = increase / (more - base)
    factor = round(samples_per_frame)

    # The shortest length with one more frame, by bisection.
    below, above = shortest, shortest + 2 * factor
    while above - below > 1:
        middle = (below + above) // 2
        if count_frames(middle) > base:
            above = middle
        else:
            below = middle
    shift = factor * (base + 1) - above
    tried = [shortest + step * factor + offset for step in (1, 3, 7) for offset in (-1, 0, 1, factor // 3)]
    if any(count_frames(samples) != (samples + shift) // factor for samples in tried):
        return None, samples_per_frame
    return (factor, shift), samples_per_frame
