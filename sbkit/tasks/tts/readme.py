"""The README.md of a voice's bundle: what it is and how to use it without sbkit."""

from __future__ import annotations

from sbkit.export import layout, readme
from sbkit.export.parity import Comparison

_USE = {
    layout.ONNX: """## ONNX Runtime, without sbkit

```python
import json, numpy as np, onnxruntime, soundfile
ids = {{symbol: number for number, symbol in enumerate(json.load(open("config.json"))["symbols"])}}
session = onnxruntime.InferenceSession("model.onnx")
text = np.array([[ids[symbol] for symbol in {symbols!r}]])
audio, samples, durations = session.run(None, {{
    "text": text, "lengths": np.array([text.shape[1]]),
    "speaker": np.array([0]), "speed": np.array([1.0], np.float32)}})
soundfile.write("said.wav", audio[0, :samples[0]], {rate})
```

| | |
| --- | --- |
| `text` [B, U] int64, `lengths` [B] int64 | ids of symbols, 0 for padding, and how many of U are real: 1 to {most} |
| `speaker` [B] int64 | the place of a name in `config.json`'s `speakers` |
| `speed` [B] float32 | 0.25 to 4 |
| `audio` [B, S] float32, `audio_lengths` [B] int64 | samples from -1 to 1, and how many of S are real |
| `durations` [B, U] int64 | frames of {frame:g} s of each symbol, with the silence at both ends |

What a text sounds like does not depend on its batch.
""",
    layout.TORCH: """## PyTorch

```python
import torch
voice = torch.export.load("model.pt2").module()
audio, samples, durations = voice(torch.from_numpy(text), torch.tensor([text.shape[1]]), torch.tensor([0]),
                                  torch.tensor([1.0]))
```
""",
}


def text(name: str, config: layout.Voice, comparison: Comparison) -> str:
    """Make the whole text."""
    example = next((clip.text for clip in comparison.clips.alone if clip.text), config.symbols[1])
    written = next((clip.signal for clip in comparison.clips.alone if clip.text), [1])
    values = {"rate": config.sample_rate, "most": config.max_symbols, "frame": config.frame_seconds,
              "symbols": "".join(config.symbols[number] for number in written)}
    characters = config.characters or config.symbols[1:]
    spelled = "" if config.spelling is None else f""" Its symbols are phones: words are spelled in IPA, \
each as if it were said alone, by espeak-ng's voice `{config.spelling}`, which `pip install 'sbkit[demo]'` installs."""
    speakers = ", ".join(config.speakers[:10]) + (", ..." if len(config.speakers) > 10 else "")
    parts = [f"""# {name}

A voice at {config.sample_rate} Hz, trained by sbkit: {speakers}. It knows the characters \
`{"".join(characters).strip()}`{" and the space" if " " in characters else ""}.{spelled}

```
sbkit speak {name} "{example}" --to said.wav
sbkit serve {name}
```

```python
import sbkit.infer
speech = sbkit.infer.load("{name}").speak("{example}")
speech.samples, speech.sample_rate, speech.words
```

Whoever publishes what it says should say that it is synthetic.
"""]
    parts += [_USE[each].format(**values) for each in _USE if each in config.models]
    parts.append(readme.compared(comparison))
    return "\n".join(parts)
