"""The README.md of a bundle whose model outputs tensors: what it is and how to use each format."""

from __future__ import annotations

from collections.abc import Sequence

from sbkit.export import layout
from sbkit.export.layout import Bundle, Config, GraphConfig, LabelsConfig
from sbkit.export.parity import Comparison

#: The warning about a program of torch, in READMEs of all kinds of bundles.
PROGRAM = """A `.pt2` file is a program: opening it can run any code of its author. Open it only if you trust who made
this bundle. sbkit opens it only if you ask for it (`--model torch`).
"""
_USE = {
    layout.ONNX: """### ONNX Runtime, without sbkit

```python
import numpy as np, onnxruntime, soundfile
session = onnxruntime.InferenceSession("model.onnx")
signal, rate = soundfile.read("clip.wav", dtype="float32")  # mono, {rate} samples a second
outputs = session.run(None, {{"signals": signal[None], "lengths": np.array([len(signal)])}})  # {outputs}
```

`signals` [batch, samples] float32, shorter ones padded with zeros; `lengths` [batch] int64: their samples.
""",
    layout.TORCH: """### PyTorch

```python
import torch
model = torch.export.load("model.pt2").module()
outputs = model(torch.from_numpy(signal)[None], torch.tensor([len(signal)]))
```

""" + PROGRAM,
}


def heading(name: str, config: Bundle) -> str:
    """The experiment or imported model if the folder is named ``bundle``, otherwise the folder's name."""
    known = config.trained.get("imported") or config.trained.get("experiment")
    return f"# {known}" if known and name == "bundle" else f"# {name}"


def text(name: str, config: Bundle, comparison: Comparison, of_targets: Sequence[str] = ()) -> str:
    outputs = ", ".join(getattr(config, "outputs", []))
    labels = getattr(config, "labels", [])
    result = ".labels" if isinstance(config, LabelsConfig) else ".label" if labels else ".outputs"
    if result == ".outputs" and isinstance(config, GraphConfig) and type(config).results is not GraphConfig.results:
        result = ".results"  # a kind of somebody's own says more of its outputs
    values = {"rate": config.sample_rate, "outputs": outputs}
    parts = [f"""{heading(name, config)}

A model at {config.sample_rate} Hz, trained by sbkit. It outputs {outputs} for each recording.

```
sbkit run {name} clip.mp3
```

```python
import sbkit.infer
model = sbkit.infer.load("{name}")
print(model.run("clip.mp3"){result})
```
"""]
    if isinstance(config, LabelsConfig):
        parts.append(f"A label is a result if its value in {config.outputs[0]} is at least its number in `thresholds` "
                     "of `config.json`.\n")
    parts += [*(_USE[each].format(**values) for each in _USE if each in config.models), *of_targets]
    parts.append(compared(comparison))
    return "\n".join(parts)


def of_recogniser(name: str, model: str, config: Config, comparison: Comparison, sections: Sequence[str]) -> str:
    """Make the whole text for a recogniser: what it is and how sbkit runs it, its ``sections``, and the comparison."""
    experiment, imported = config.trained.get("experiment"), config.trained.get("imported")
    origin = f"imported from {imported}" if imported else \
        f"trained\nby sbkit{f' (experiment {experiment})' if experiment else ''}"
    language = f" ({config.language})" if config.language else ""
    head = f"""{heading(name, config)}

Speech recognition{language} with {model} at {config.sample_rate} Hz, {origin}.

```
sbkit transcribe {name} FILES...
```

```python
import sbkit.infer
model = sbkit.infer.load("{name}")
print(model.transcribe("clip.mp3").text)
```
"""
    alone = "Run one utterance at a time: layers of this model see a batch's padding.\n"
    return "\n".join([head, *sections, *([] if config.batching else [alone]), compared(comparison)])


def joined(config: Config) -> str:
    """Make the expression that joins the symbols ``pieces`` into a text."""
    if config.word_separator is None:
        return '"".join(pieces).replace("▁", "")'
    return f'" ".join("".join(pieces).replace("{config.word_separator}", " ").split())'


def compared(comparison: Comparison) -> str:
    """Make the section on the comparison, the last in READMEs of all kinds of bundles."""
    left_out = "".join(f"- {name}: {reason}\n" for name, reason in comparison.left_out.items())
    if left_out:
        left_out = f"\nFormats that could not be made or differ too much are left out:\n\n{left_out}"
    return f"""## What was compared

On {comparison.clips.origin}, and one clip longer than any in training. The first row is {comparison.compared_with}.

```
{comparison.table()}
```
{left_out}
`config.json` has what a program needs to run the model, `parity.json` these numbers.
"""
