"""The README.md of a recogniser's bundle: what it is, and how to use it in each format."""

from __future__ import annotations

from sbkit.export import layout
from sbkit.export.layout import Config
from sbkit.export.parity import Comparison
from sbkit.export.readme import compared

_USE = {
    layout.ONNX: """### ONNX Runtime, without sbkit

```python
import numpy as np, onnxruntime, soundfile
session = onnxruntime.InferenceSession("model.onnx")        # model.int8.onnx: smaller, 8-bit weights
signal, rate = soundfile.read("clip.wav", dtype="float32")  # mono, {rate} samples a second
log_probs, frames = session.run(None, {{"signals": signal[None], "lengths": np.array([len(signal)])}})
```

Inputs: `signals` [batch, samples] float32, shorter ones padded with zeros, and `lengths` [batch] int64. Outputs:
`log_probs` [batch, frames, {vocabulary}], a frame every {frame:g} ms, and `frames` [batch], how many belong to each.
Features are computed in the graph.
""",
    layout.TORCH: """### PyTorch

```python
import torch
program = torch.export.load("model.pt2")  # on a GPU: torch.export.passes.move_to_device_pass(program, "cuda")
model = program.module()
log_probs, frames = model(torch.from_numpy(signal)[None], torch.tensor([len(signal)]))
```
""",
    layout.SPEECHBRAIN: """### SpeechBrain

```python
from speechbrain.inference.ASR import EncoderASR
asr = EncoderASR.from_hparams(source="{name}", savedir="/tmp/{name}")
print(asr.transcribe_file("clip.wav"))
```

`model.ckpt` and `tokenizer.ckpt` are `model.safetensors` and `tokenizer.model` under the names that SpeechBrain looks
for (hard links, if the file system has them). No file here is a pickle.
""",
    layout.SHERPA: """### sherpa-onnx

```python
import sherpa_onnx
asr = sherpa_onnx.OfflineRecognizer.from_omnilingual_asr_ctc(model="model.sherpa.onnx", tokens="tokens.txt")
stream = asr.create_stream()
stream.accept_waveform({rate}, signal)
asr.decode_stream(stream)
print(stream.result.text)
```

`omnilingual` is sherpa-onnx's kind of model that takes the waveform.
""",
}


def text(name: str, config: Config, comparison: Comparison) -> str:
    """Write the whole file as a string."""
    values = {"name": name, "rate": config.sample_rate, "vocabulary": config.vocabulary,
              "frame": 1000 * config.frame_seconds}
    trained = config.trained
    parts = [f"""# {name}

Speech recognition{f" ({config.language})" if config.language else ""} with CTC at {config.sample_rate} Hz, trained by
sbkit{f" (experiment {trained['experiment']})" if trained.get("experiment") else ""}.

```
sbkit transcribe {name} FILES...
```

```python
import sbkit.infer
model = sbkit.infer.load("{name}")
print(model.transcribe("clip.mp3").text)
```
"""]
    parts += [_USE[each].format(**values) for each in _USE if each in config.models]
    if not config.batching:
        parts.append("Run one utterance at a time: layers of this model see a batch's padding.\n")
    parts.append(compared(comparison))
    parts.append("`tokens.txt` has one line, `symbol id`, for each token.\n")
    return "\n".join(parts)
