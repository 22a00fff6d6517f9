"""README.md of a bundle whose model gives tensors: what it is and how to use it in each of its forms."""

from __future__ import annotations

from sbkit.export import layout
from sbkit.export.layout import Bundle
from sbkit.export.parity import Comparison

_USE = {
    layout.ONNX: """### ONNX Runtime, without sbkit

```python
import numpy as np, onnxruntime, soundfile
session = onnxruntime.InferenceSession("model.onnx")
signal, rate = soundfile.read("clip.wav", dtype="float32")  # mono, {rate} samples a second
found = session.run(None, {{"signals": signal[None], "lengths": np.array([len(signal)])}})  # {outputs}
```

`signals` [batch, samples] float32, zeros behind shorter ones; `lengths` [batch] int64.
""",
    layout.TORCH: """### PyTorch

```python
import torch
model = torch.export.load("model.pt2").module()
found = model(torch.from_numpy(signal)[None], torch.tensor([len(signal)]))
```
""",
}


def text(name: str, config: Bundle, comparison: Comparison) -> str:
    """The whole file."""
    outputs = ", ".join(getattr(config, "outputs", []))
    labels = getattr(config, "labels", [])
    values = {"rate": config.sample_rate, "outputs": outputs}
    parts = [f"""# {name}

A model at {config.sample_rate} Hz, trained by sbkit. It gives {outputs} for each recording.

```python
import sbkit.infer
model = sbkit.infer.load("{name}")
print(model.run("clip.mp3"){".label" if labels else ".outputs"})
```
"""]
    parts += [_USE[each].format(**values) for each in _USE if each in config.models]
    parts.append(compared(comparison))
    return "\n".join(parts)


def compared(comparison: Comparison) -> str:
    """The last section of any bundle's page."""
    return f"""## What was compared

On {comparison.clips.origin}, and one clip longer than any in training. The checkpoint is the first row.

```
{comparison.table()}
```

`config.json` says what a program has to know, `parity.json` has these numbers.
"""
