"""The README.md of a codec's bundle: what it is and how to use it without sbkit."""

from __future__ import annotations

from sbkit.export import layout, readme
from sbkit.export.parity import Comparison

_USE = {
    layout.ONNX: """## ONNX Runtime, without sbkit

```python
import numpy as np, onnxruntime, soundfile
encoder, decoder = (onnxruntime.InferenceSession(name) for name in ("model.onnx", "decoder.onnx"))
signal, rate = soundfile.read("clip.wav", dtype="float32")  # mono, {rate} samples a second
codes, frames = encoder.run(None, {{"signals": signal[None], "lengths": np.array([len(signal)])}})

sizes = np.array({books})
assert ((codes >= 0) & (codes < sizes)).all()  # a graph does not look: other ids give noise, or worse
signals, lengths = decoder.run(None, {{"codes": codes, "frames": frames}})
soundfile.write("again.wav", signals[0, :len(signal)], {rate})
```

| | |
| --- | --- |
| `signals` [B, S] float32, `lengths` [B] int64 | samples from -1 to 1, and how many of S are real |
| `codes` [B, T, {count}] int64, `frames` [B] int64 | ids of each book, from 0, and how many of T are real |

A frame is {stride} samples; the last one of a recording may reach beyond its end. What pads a batch has no effect, be
it zeros or not; PyTorch needs S of {least} and T of {least_frames} at least.
""",
    layout.TORCH: """## PyTorch

```python
import torch
encoder, decoder = (torch.export.load(name).module() for name in ("model.pt2", "decoder.pt2"))
codes, frames = encoder(torch.from_numpy(signal)[None], torch.tensor([len(signal)]))
signals, lengths = decoder(codes, frames)
```
""",
}


def text(name: str, config: layout.Codec, comparison: Comparison) -> str:
    """Make the whole text."""
    rate, count = config.sample_rate / config.stride, len(config.books)
    values = {"rate": config.sample_rate, "books": config.books, "count": count, "stride": config.stride,
              "least": config.min_samples, "least_frames": config.min_frames}
    each = f"{count} codes of" if count > 1 else "a code of"
    parts = [f"""# {name}

A codec of speech at {config.sample_rate} Hz, trained by sbkit: {rate:g} frames a second, in each of them {each} \
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

Codes are of this codec alone, which is `{config.codec}`.
"""]
    parts += [_USE[each].format(**values) for each in _USE if each in config.models]
    parts += ["""## Weights

`model.safetensors` has the weights by their names in the codec: `encoder.*`, `quantiser.*` (if it has any), `decoder.*`
and `head.*`.
""", readme.compared(comparison)]
    return "\n".join(parts)
