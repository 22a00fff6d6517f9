"""The export of a codec: a graph from samples to codes, one from codes to samples, and the weights of its parts."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from sbkit.export import graph, layout, readme
from sbkit.export.clips import Clip, ComparisonClips
from sbkit.export.companion import Companion
from sbkit.export.exported import Exported
from sbkit.export.measures import OutputMeasure
from sbkit.export.padding import pad
from sbkit.export.parity import Comparison, Reference
from sbkit.export.runners import Runner, open_runner
from sbkit.nn.codec.coder import Coder, Decode, Encode

OUTPUTS = {"codes": ("batch", "frames"), "frames": ("batch",)}
#: The share of codes that may differ from the checkpoint's. Runtimes add up in different orders, so numbers differ by a
#: relative 1e-6, and one that close to the middle between two levels may be rounded to the other. That happens to one
#: code in ten thousand or fewer; a wrong graph changes most of them.
OTHER_CODES = 0.005
_EXAMPLE = (2, 40)  # utterances and frames to trace the decoder with


class Decoded(nn.Module):
    """The graph from codes [B, T, Q] and frames [B] to signals [B, T * stride] and lengths [B]."""

    def __init__(self, coder: Coder):
        super().__init__()
        self.decode, self.stride = Decode(coder.quantiser, coder.decoder, coder.head), coder.stride

    def forward(self, codes: Tensor, frames: Tensor) -> tuple[Tensor, Tensor]:
        return self.decode(codes, frames), frames * self.stride


class CodesMeasure(OutputMeasure):
    """Measures codes [T, Q] by the share that differs; different numbers of frames fail."""

    def __init__(self) -> None:
        super().__init__("codes")

    def largest(self, expected: Sequence[np.ndarray], outputs: Sequence[np.ndarray]) -> float:
        if any(codes.shape != exported.shape for codes, exported in zip(expected, outputs, strict=True)):
            return float("inf")
        return float(np.mean(np.concatenate(expected) != np.concatenate(outputs)))

    def allowed(self, tolerance: float) -> float:
        return OTHER_CODES

    def shown(self, difference: float) -> str:
        return f"{difference:.2%}" if math.isfinite(difference) else "their number"


class DecoderGraph(Companion):
    """The graph from codes to samples; it is compared on the checkpoint's codes, so that both have the same input."""

    name, files = "decoder", layout.DECODERS
    inputs: ClassVar[Mapping[str, tuple[str, ...]]] = OUTPUTS
    outputs: Mapping[str, tuple[str, ...]] = {"signals": ("batch", "samples"), "lengths": ("batch",)}

    def __init__(self, coder: Coder):
        self.coder, self.min_frames = coder, 1

    def trace(self) -> torch.export.ExportedProgram:
        batch, frames = _EXAMPLE
        codes = torch.stack([torch.randint(size, (batch, frames)) for size in self.coder.quantiser.sizes], -1)
        example = (codes, torch.tensor([frames, frames * 2 // 3]))
        program = graph.trace_module(Decoded(self.coder).eval(), example, {"codes": (0, 1), "frames": (0,)})
        self.min_frames = graph.min_samples(program, "codes")
        return program

    def describe(self, config: layout.CodecConfig, files: Mapping[str, str]) -> None:
        config.decoders, config.min_frames = dict(files), self.min_frames

    def comparisons(self, clips: ComparisonClips, config: layout.CodecConfig, folder: Path
                    ) -> Mapping[str, Comparison]:
        with torch.no_grad():
            encoded = [self.coder.encode(torch.from_numpy(clip.signal)[None], torch.tensor([len(clip.signal)]))[0][0]
                       for clip in clips.alone]
        codes = [Clip(each.numpy(), None, clip.name) for each, clip in zip(encoded, clips.alone, strict=True)]
        comparison = Comparison(ComparisonClips(codes, clips.origin, clips.longest), Reference(self._decoded),
                                config.sample_rate / config.stride, OutputMeasure("samples"))
        return {"from its codes": comparison}

    def runners(self, name: str, path: Path, config: layout.CodecConfig) -> Mapping[str, Runner]:
        call = open_runner(name, path)

        def run(codes: Sequence[np.ndarray]) -> list[np.ndarray]:
            signals, lengths = call(*pad(codes, config.min_frames))
            return [signal[:length] for signal, length in zip(signals, lengths, strict=True)]

        return {"from its codes": run}

    @torch.no_grad()
    def _decoded(self, codes: np.ndarray) -> np.ndarray:
        return self.coder.decode(torch.from_numpy(codes)[None], torch.tensor([len(codes)]))[0].numpy()


@dataclass
class ExportedCodec(Exported):
    """A codec to export."""

    coder: Coder = field(kw_only=True)

    formats = layout.ONNX, layout.TORCH  # int8 would change the codes

    @classmethod
    def of(cls, coder: Coder) -> ExportedCodec:
        """Export a codec in evaluation mode, which isn't changed."""
        return cls(Encode(coder.features, coder.encoder, coder.quantiser), OUTPUTS, coder.features.sample_rate,
                   coder=coder, from_forward=lambda outputs: (outputs.quantised.codes, outputs.frames))

    @property
    def companions(self) -> Sequence[Companion]:
        return (DecoderGraph(self.coder),)

    def config(self, program: torch.export.ExportedProgram, clips: ComparisonClips) -> layout.CodecConfig:
        return layout.CodecConfig(
            sample_rate=self.sample_rate, min_samples=graph.min_samples(program), codec=fingerprint(self.coder),
            books=list(self.coder.quantiser.sizes), stride=self.coder.stride, context=reach(self.coder))

    def write_beside(self, folder: Path, config: layout.CodecConfig) -> None:
        """Write the weights, for voices with this codec's decoder."""
        save_file(weights(self.coder), folder / layout.WEIGHTS,
                  {"codec": config.codec, "definition": json.dumps(self.coder.definition())})

    def comparison(self, clips: ComparisonClips, config: layout.CodecConfig, folder: Path) -> Comparison:
        return Comparison(clips, Reference(self.reference(config)), config.sample_rate, CodesMeasure())

    def readme(self, name: str, config: layout.CodecConfig, comparison: Comparison,
               of_targets: Sequence[str] = ()) -> str:
        rate, count = config.sample_rate / config.stride, len(config.books)
        values = {"rate": config.sample_rate, "books": config.books, "count": count, "stride": config.stride,
                  "least": config.min_samples, "least_frames": config.min_frames}
        each = f"{count} codes of" if count > 1 else "a code of"
        parts = [f"""{readme.heading(name, config)}

A codec of speech at {config.sample_rate} Hz, trained by sbkit: {rate:g} frames a second, each with {each} \
{" and ".join(f"{size:,}" for size in config.books)}.

```
sbkit tokenize {name} CORPUS --to codes      # recordings to codes
sbkit resynthesize {name} codes --to sounds  # and back
```

```python
import sbkit.infer
codec = sbkit.infer.load("{name}")
[codes] = codec.encode(["clip.mp3"])  # [T, {count}]
[samples] = codec.decode([codes])
```

Only this codec, `{config.codec}`, can decode these codes.
"""]
        parts += [_USE[each].format(**values) for each in _USE if each in config.models]
        parts += ["""## Weights

`model.safetensors` has the weights by their names in the codec: `encoder.*`, `quantiser.*` (if it has any), `decoder.*`
and `head.*`.
""", readme.compared(comparison)]
        return "\n".join(parts)


def weights(coder: Coder) -> dict[str, Tensor]:
    """Return the weights by their names in the codec: ``encoder.*``, ``quantiser.*``, ``decoder.*``, ``head.*``."""
    return {name: value.detach().cpu().contiguous() for name, value in coder.state_dict().items()}


def fingerprint(coder: Coder) -> str:
    """Compute the sha256 of a codec's weights and of the sizes of its parts, on which its codes depend."""
    digest = hashlib.sha256(json.dumps(coder.definition(), sort_keys=True).encode())
    for name, value in sorted(weights(coder).items()):
        digest.update(json.dumps([name, str(value.dtype), list(value.shape)]).encode())
        digest.update(value.numpy().tobytes())
    return digest.hexdigest()


#: Length and amplitude of the noise in which the context is measured.
_FRAMES, _AMPLITUDE = 512, 0.1


def reach(coder: Coder) -> int | None:
    """Return how many frames on each side affect a frame's codes or samples; None: possibly all.

    These are the frames at which the gradient of the middle frame's outputs is not zero.
    """
    draw, frames, middle = torch.Generator().manual_seed(0), torch.tensor([_FRAMES]), _FRAMES // 2
    signals = (_AMPLITUDE * torch.randn(1, _FRAMES * coder.stride, generator=draw)).requires_grad_()
    vectors = coder.encoder(*coder.features(signals, frames * coder.stride))
    encoded = _affects(vectors[0, middle], signals, draw)
    vectors = vectors.detach().requires_grad_()
    sound = coder.sound(vectors, frames)[0].unflatten(0, (_FRAMES, -1))
    affecting = torch.cat([torch.nonzero(each) for each in (encoded, _affects(sound[middle], vectors, draw))])
    if not len(affecting):  # all weights are zero
        return None
    first, last = int(affecting.min()), int(affecting.max())
    return None if first == 0 or last == _FRAMES - 1 else max(middle - first, last - middle)


def _affects(output: Tensor, inputs: Tensor, draw: torch.Generator) -> Tensor:
    """Whether each frame of the inputs [1, frames * N, ...] affects an output [N]: [frames]."""
    [gradient] = torch.autograd.grad((output * torch.randn(output.shape, generator=draw)).sum(), inputs)
    return gradient.reshape(_FRAMES, -1).ne(0).any(1)


_USE = {
    layout.ONNX: """## ONNX Runtime, without sbkit

```python
import numpy as np, onnxruntime, soundfile
encoder, decoder = (onnxruntime.InferenceSession(name) for name in ("model.onnx", "decoder.onnx"))
signal, rate = soundfile.read("clip.wav", dtype="float32")  # mono, {rate} samples a second
codes, frames = encoder.run(None, {{"signals": signal[None], "lengths": np.array([len(signal)])}})

sizes = np.array({books})
assert ((codes >= 0) & (codes < sizes)).all()  # the graph doesn't check this: other ids give noise, or worse
signals, lengths = decoder.run(None, {{"codes": codes, "frames": frames}})
soundfile.write("again.wav", signals[0, :len(signal)], {rate})
```

| | |
| --- | --- |
| `signals` [B, S] float32, `lengths` [B] int64 | samples from -1 to 1, and how many of S are real |
| `codes` [B, T, {count}] int64, `frames` [B] int64 | ids of each book, from 0, and how many of T are real |

A frame is {stride} samples; the last one of a recording may reach beyond its end. The values of padding have no effect.
PyTorch needs S of {least} and T of {least_frames} at least.
""",
    layout.TORCH: """## PyTorch

```python
import soundfile, torch
encoder, decoder = (torch.export.load(name).module() for name in ("model.pt2", "decoder.pt2"))
signal, rate = soundfile.read("clip.wav", dtype="float32")  # mono, {rate} samples a second
codes, frames = encoder(torch.from_numpy(signal)[None], torch.tensor([len(signal)]))
signals, lengths = decoder(codes, frames)
```

""" + readme.PROGRAM,
}
