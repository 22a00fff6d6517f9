"""The README.md of a bundle whose model outputs tensors: what it is and how to use each format."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from sbkit.decode.spans import PAUSE_SECONDS, Spelling
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


#: What other programs do that decode by themselves, in their sections of a recogniser's README.
NO_PAUSES = f"""In this program no pause ends a word: in recordings of several sentences it may write two words as one.
sbkit and the snippet above end a word after {PAUSE_SECONDS:g} s without a token.
"""
_BYTES = '''import re

def characters(word):  # <0xC3><0xB6> is a character that has no symbol
    return re.sub("(?:<0x[0-9A-F]{2}>)+", lambda found: bytes.fromhex(re.sub("<0x|>", "", found[0])).decode(
        errors="replace"), word)

'''


def word_rule(config: Config, symbols: Sequence[str]) -> dict[str, str]:
    """Return the parts of a snippet that writes tokens as ``sbkit.decode.spans.Spelling`` does.

    ``silent`` are the ids without text, ``pause`` the frames that end a word, ``written`` the expression that turns the
    string ``written`` into a text, and ``helpers`` the functions that it needs.
    """
    spelling = Spelling(symbols, config.frame_seconds, {config.blank_id, *config.silent_ids}, config.word_separator)
    in_bytes = any(re.fullmatch("<0x[0-9A-F]{2}>", symbol) for symbol in symbols)
    if config.word_separator is None:  # no space shows where a word ends
        written = f'{"characters(written)" if in_bytes else "written"}.replace("▁", "").replace(" ", "")'
    else:
        words = f'written.replace("{config.word_separator}", " ").split()'
        written = f'" ".join(characters(word) for word in {words})' if in_bytes else f'" ".join({words})'
    return {"silent": str(sorted(spelling.silent)), "pause": str(math.ceil(spelling.pause)),
            "seconds": f"{spelling.pause_seconds:g}", "written": written, "helpers": _BYTES if in_bytes else ""}


def compared(comparison: Comparison) -> str:
    """Make the section on the comparison, the last in READMEs of all kinds of bundles."""
    left_out = "".join(f"- {name}: {reason}\n" for name, reason in comparison.left_out.items())
    if left_out:
        left_out = f"\nFormats that could not be made or differ too much are left out:\n\n{left_out}"
    joining = comparison.joining()
    joining = f"\n{joining}" if joining else ""
    return f"""## What was compared

On {comparison.clips.origin}, and one clip longer than any in training. The first row is {comparison.reference.title}.

```
{comparison.table()}
```
{joining}{left_out}
`config.json` has what a program needs to run the model, `parity.json` these numbers.
"""
