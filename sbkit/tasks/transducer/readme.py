"""The README.md of a transducer's bundle: what it is, and how to use it in each format."""

from __future__ import annotations

from collections.abc import Sequence

from sbkit.decode.transducer import MAX_TOKENS_PER_FRAME
from sbkit.export import layout
from sbkit.export.layout import TransducerConfig
from sbkit.export.parity import Comparison
from sbkit.export.readme import NO_PAUSES, PROGRAM, of_recogniser, word_rule

_SEARCH = """### From states to words

```python
import numpy as np, onnxruntime
decoder, joiner = map(onnxruntime.InferenceSession, ("{decoder}", "{joiner}"))
{helpers}symbols = [line.split(" ")[0] for line in open("tokens.txt", encoding="utf-8")]  # of each token: symbol, id

def text(states):  # [frames, {size}] of one recording
    written, last, end = "", [{blank}] * {context}, 0
    predicted = decoder.run(None, {{"tokens": np.array([last])}})[0]
    for frame, state in enumerate(states):
        for _ in range({most}):  # tokens in one frame
            best = int(joiner.run(None, {{"encoded": state[None], "predicted": predicted}})[0].argmax())
            if best == {blank}:
                break
            if best not in {silent}:  # a token with text
                # A pause of {seconds} s ends a word, even if the next token doesn't say that one begins.
                written += (" " if frame - end >= {pause} else "") + symbols[best]
                end = frame + 1
            last = [*last[1:], best]
            predicted = decoder.run(None, {{"tokens": np.array([last])}})[0]
    return {written}
```

`{decoder}` maps the last tokens [rows, {context}] int64 to states [rows, {size}], `{joiner}` a frame's state and that
of the last tokens to scores [rows, {vocabulary}] of the next one.
"""
_USE = {
    layout.ONNX: """### ONNX Runtime, without sbkit

```python
import soundfile
session = onnxruntime.InferenceSession("model.onnx")        # model.int8.onnx: smaller, 8-bit weights
signal, rate = soundfile.read("clip.wav", dtype="float32")  # mono, {rate} samples a second
states, frames = session.run(None, {{"signals": signal[None], "lengths": np.array([len(signal)])}})
print(text(states[0, :frames[0]]))
```

Inputs: `signals` [batch, samples] float32, shorter ones padded with zeros, and `lengths` [batch] int64. Outputs:
`states` [batch, frames, {size}], one every {frame:g} ms, and `frames` [batch], how many belong to each.
""",
    layout.TORCH: """### PyTorch

```python
import soundfile, torch
model = torch.export.load("model.pt2").module()
signal, rate = soundfile.read("clip.wav", dtype="float32")  # mono, {rate} samples a second
states, frames = model(torch.from_numpy(signal)[None], torch.tensor([len(signal)]))
print(text(states[0, :frames[0]].detach().numpy()))
```

""" + PROGRAM,
}
_STREAMS = """### Streams

```
sbkit listen {name}
```

{files}: a chunk of a stream and a state in, `states` of its frames and the next state out, in chunks of {milliseconds}
ms; config.json has the sizes under `streaming`.
"""


#: The template of the section on streams in sherpa-onnx, for ``SherpaStream``.
SHERPA_STREAM = """### Streams in sherpa-onnx

`{file}` with `decoder.sherpa.onnx`, `joiner.sherpa.onnx` and `tokens.sherpa.txt` is a transducer of NeMo's kind for
sherpa-onnx {version} or later, in chunks of {milliseconds} ms. Samples of silence as long as a chunk must follow a
stream, since only whole chunks are processed. In Python; other languages take the same four files:

```python
import numpy as np, sherpa_onnx, soundfile
recognizer = sherpa_onnx.OnlineRecognizer.from_transducer(
    encoder="{file}", decoder="decoder.sherpa.onnx", joiner="joiner.sherpa.onnx", tokens="tokens.sherpa.txt"{bands})
signal, rate = soundfile.read("clip.wav", dtype="float32")  # mono, {rate} samples a second
stream = recognizer.create_stream()
stream.accept_waveform(rate, np.pad(signal, (0, {tail})))
stream.input_finished()
while recognizer.is_ready(stream):
    recognizer.decode_stream(stream)
print(recognizer.get_result(stream))
```

""" + NO_PAUSES


def words(config: TransducerConfig, symbols: Sequence[str]) -> str:
    """Return the section on how states become words."""
    return _SEARCH.format(decoder=config.decoder, joiner=config.joiner, size=config.joint_size,
                          vocabulary=config.vocabulary, blank=config.blank_id, context=config.context,
                          most=MAX_TOKENS_PER_FRAME, **word_rule(config, symbols))


def text(name: str, config: TransducerConfig, comparison: Comparison, symbols: Sequence[str],
         of_targets: Sequence[str] = ()) -> str:
    """Return the whole file as a string; ``of_targets`` are sections on the programs that models were exported for."""
    values = {"rate": config.sample_rate, "size": config.joint_size, "frame": 1000 * config.frame_seconds}
    parts = [words(config, symbols), *(_USE[each].format(**values) for each in _USE if each in config.models)]
    if config.streaming is not None and config.streaming.models:
        parts.append(_STREAMS.format(
            name=name, files=", ".join(f"`{file}`" for file in config.streaming.models.values()),
            milliseconds=", ".join(f"{1000 * size * config.frame_seconds:g}" for size in config.streaming.chunks)))
    return of_recogniser(name, "a transducer", config, comparison, [*parts, *of_targets])
