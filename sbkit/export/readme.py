"""The README.md of a bundle whose model outputs tensors: what it is and how to use each format."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from sbkit.decode.spans import PAUSE_SECONDS, Spelling
from sbkit.export import layout, parity_report
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
import soundfile, torch
model = torch.export.load("model.pt2").module()
signal, rate = soundfile.read("clip.wav", dtype="float32")  # mono, {rate} samples a second
outputs = model(torch.from_numpy(signal)[None], torch.tensor([len(signal)]))
```

""" + PROGRAM,
}


def heading(name: str, config: Bundle) -> str:
    """Name the experiment or the imported model if the folder is named ``bundle``, otherwise the folder."""
    origin = config.trained.get("imported") or config.trained.get("experiment")
    return f"# {origin}" if origin and name == "bundle" else f"# {name}"


def text(name: str, config: Bundle, comparison: Comparison, of_targets: Sequence[str] = ()) -> str:
    """Make the whole text for a model that outputs tensors; ``of_targets`` are the sections of ``--target``."""
    outputs = ", ".join(getattr(config, "outputs", []))
    result = _result_attribute(config)
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
    for model_format, section in _USE.items():
        if model_format in config.models:
            parts.append(section.format(rate=config.sample_rate, outputs=outputs))
    parts += [*of_targets, compared(comparison)]
    return "\n".join(parts)


def _result_attribute(config: Bundle) -> str:
    """Return the attribute of ``sbkit.infer``'s result that says the most of it."""
    if isinstance(config, LabelsConfig):
        return ".labels"
    if getattr(config, "labels", []):
        return ".label"
    if isinstance(config, GraphConfig) and type(config).results is not GraphConfig.results:
        return ".results"  # of a kind that a user defined
    return ".outputs"


def of_recogniser(name: str, model: str, config: Config, comparison: Comparison, sections: Sequence[str]) -> str:
    """Make the whole text for a recogniser: what it is and how sbkit runs it, its ``sections``, and the comparison."""
    experiment = config.trained.get("experiment")
    imported = config.trained.get("imported")
    origin = "trained\nby sbkit"
    if imported:
        origin = f"imported from {imported}"
    elif experiment:
        origin += f" (experiment {experiment})"
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
    parts = [head, *sections]
    if not config.batching:
        parts.append("Run one utterance at a time: layers of this model see a batch's padding.\n")
    parts.append(compared(comparison))
    return "\n".join(parts)


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

    ``silent`` are the ids without text, ``pause`` the frames that end a word and ``seconds`` their time, ``written`` an
    expression that turns the string ``written`` into a text, and ``helpers`` the functions that it needs.
    """
    spelling = Spelling(symbols, config.frame_seconds, {config.blank_id, *config.silent_ids}, config.word_separator)
    in_bytes = any(re.fullmatch("<0x[0-9A-F]{2}>", symbol) for symbol in symbols)
    if config.word_separator is None:  # no space shows where a word ends
        symbols_read = "characters(written)" if in_bytes else "written"
        written = f'{symbols_read}.replace("▁", "").replace(" ", "")'
    else:
        words = f'written.replace("{config.word_separator}", " ").split()'
        if in_bytes:
            words = f"characters(word) for word in {words}"
        written = f'" ".join({words})'
    return {"silent": str(sorted(spelling.silent)), "pause": str(math.ceil(spelling.pause)),
            "seconds": f"{spelling.pause_seconds:g}", "written": written, "helpers": _BYTES if in_bytes else ""}


def compared(comparison: Comparison) -> str:
    """Make the section on the comparison, the last in READMEs of all kinds of bundles."""
    left_out = ""
    if comparison.left_out:
        reasons = "".join(f"- {name}: {reason}\n" for name, reason in comparison.left_out.items())
        left_out = f"\nFormats that could not be made or differ too much are left out:\n\n{reasons}"
    joining = parity_report.joined_words(comparison)
    if joining:
        joining = f"\n{joining}"
    return f"""## What was compared

On {comparison.clips}. The first row is {comparison.reference.title}.

```
{parity_report.table(comparison)}
```
{joining}{left_out}
`config.json` has what a program needs to run the model, `parity.json` these numbers.
"""
