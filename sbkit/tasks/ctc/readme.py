"""The README.md of a recogniser's bundle: what it is, and how to use it in each format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sbkit.export import layout
from sbkit.export.layout import Config, Streaming
from sbkit.export.parity import Comparison
from sbkit.export.readme import NO_PAUSES, PROGRAM, of_recogniser, word_rule

_WORDS = """### From log-probabilities to words

```python
{helpers}symbols = [line.split(" ")[0] for line in open("tokens.txt", encoding="utf-8")]  # of each token: symbol, id

def text(log_probs):  # [frames, {vocabulary}] of one recording
    written, last, end = "", {blank}, 0
    for frame, best in enumerate(log_probs.argmax(-1).tolist()):
        if best not in {silent}:  # a token with text
            if best != last:
                # A pause of {seconds} s ends a word, even if the next token doesn't say that one begins.
                written += (" " if frame - end >= {pause} else "") + symbols[best]
            end = frame + 1
        last = best
    return {written}
```
"""
_USE = {
    layout.ONNX: """### ONNX Runtime, without sbkit

```python
import numpy as np, onnxruntime, soundfile
session = onnxruntime.InferenceSession("model.onnx")        # model.int8.onnx: smaller, 8-bit weights
signal, rate = soundfile.read("clip.wav", dtype="float32")  # mono, {rate} samples a second
log_probs, frames = session.run(None, {{"signals": signal[None], "lengths": np.array([len(signal)])}})
print(text(log_probs[0, :frames[0]]))
```

Inputs: `signals` [batch, samples] float32, shorter ones padded with zeros, and `lengths` [batch] int64. Outputs:
`log_probs` [batch, frames, {vocabulary}], a frame every {frame:g} ms, and `frames` [batch], how many belong to each.
Features are computed in the graph.
""",
    layout.TORCH: """### PyTorch

```python
import soundfile, torch
program = torch.export.load("model.pt2")  # on a GPU: torch.export.passes.move_to_device_pass(program, "cuda")
model = program.module()
signal, rate = soundfile.read("clip.wav", dtype="float32")  # mono, {rate} samples a second
log_probs, frames = model(torch.from_numpy(signal)[None], torch.tensor([len(signal)]))
print(text(log_probs[0, :frames[0]]))
```

""" + PROGRAM,
    layout.SPEECHBRAIN: """### SpeechBrain

```python
from speechbrain.inference.ASR import EncoderASR
asr = EncoderASR.from_hparams(source="{name}", savedir="/tmp/{name}")
print(asr.transcribe_file("clip.wav"))
```

`model.ckpt` and `tokenizer.ckpt` are `model.safetensors` and `tokenizer.model` under the names that SpeechBrain looks
for (hard links, if the file system has them). No file here is a pickle, but SpeechBrain calls what `hyperparams.yaml`
names, which can be any code.

""" + NO_PAUSES,
}
_SHERPA = """### sherpa-onnx

```python
import sherpa_onnx, soundfile
asr = sherpa_onnx.OfflineRecognizer.from_omnilingual_asr_ctc(model="{file}", tokens="tokens.txt")
signal, rate = soundfile.read("clip.wav", dtype="float32")  # mono, {rate} samples a second
stream = asr.create_stream()
stream.accept_waveform({rate}, signal)
asr.decode_stream(stream)
print(stream.result.text)
```

`omnilingual` is sherpa-onnx's kind of model that takes the waveform.

""" + NO_PAUSES
#: The template of the section on streams in sherpa-onnx, for ``SherpaStream``.
SHERPA_STREAM = """### Streams in sherpa-onnx, version {version} or later

```python
import numpy as np, sherpa_onnx
asr = sherpa_onnx.OnlineRecognizer.from_nemo_ctc(model="{file}", tokens="tokens.txt"{bands},
                                                 enable_endpoint_detection=True, rule2_min_trailing_silence=0.7)
stream = asr.create_stream()
for piece in pieces:  # of a waveform: float32 in [-1, 1], {rate} samples a second, any number of them at a time
    stream.accept_waveform({rate}, piece)
    while asr.is_ready(stream):
        asr.decode_stream(stream)
        print(asr.get_result(stream))
        if asr.is_endpoint(stream):  # a pause of 0.7 s: the line is settled, and the next one begins
            asr.reset(stream)
stream.accept_waveform({rate}, np.zeros({tail}, np.float32))  # a chunk of silence, or the last words are missing
stream.input_finished()
while asr.is_ready(stream):
    asr.decode_stream(stream)
print(asr.get_result(stream))
```

`nemo_ctc` is its kind of model that takes features in chunks, here of {milliseconds} ms, and any state. Until 2.0.0,
sherpa-onnx computed other features, with which this model makes many errors: check `sherpa_onnx.__version__`.
"""

_STREAM_USE = {
    layout.ONNX: """```python
import json, numpy as np, onnxruntime, soundfile
session = onnxruntime.InferenceSession("{file}")
signal, rate = soundfile.read("clip.wav", dtype="float32")  # mono, {rate} samples a second
parts = json.load(open("config.json"))["streaming"]["state"]
state = {{name: np.zeros([1, *part["shape"]], part["type"]) for name, part in parts.items()}}
outputs = []
for window, frames in windows(signal):
    inputs = {{"samples": window[None], "frames": np.array([frames]), **state}}
    log_probs, counts, *after = session.run(None, inputs)
    state = dict(zip(state, after))
    outputs.append(log_probs[0, :counts[0]])
print(text(np.concatenate(outputs)))
```
""",
    layout.TORCH: """```python
import json, soundfile, torch
model = torch.export.load("{file}").module()
signal, rate = soundfile.read("clip.wav", dtype="float32")  # mono, {rate} samples a second
parts = json.load(open("config.json"))["streaming"]["state"]
state = [torch.zeros([1, *part["shape"]], dtype=getattr(torch, part["type"])) for part in parts.values()]
outputs = []
for window, frames in windows(signal):
    log_probs, counts, *state = model(torch.from_numpy(window)[None], torch.tensor([frames]), *state)
    outputs.append(log_probs[0, :counts[0]])
print(text(torch.cat(outputs)))
```
""",
}
_LIVE = """```
sbkit listen {name}
```

```python
for result in model.stream()(microphone):  # arrays of samples, of any size
    print([word.text for word in result.settled], [word.text for word in result.partial])
```
"""
#: The names in braces are properties of ``StreamFacts``.
_STREAMS = """{files}: a chunk of a stream and a state in, its log-probabilities and the next state out. A chunk has
{chunks} output frames ({milliseconds} ms); all chunks of a stream have the same size. Mirror the stream at both ends,
by {before} samples before its beginning and {after} after its end. The window of a chunk of C frames has
{frame} C + {overlap} samples (`samples` [batch, {frame} C + {overlap}] float32). The first window begins with the
mirrored samples, each further one {frame} {moves} samples later, and the last is padded with zeros. `frames` [batch]
int64: how many of its {subsampling} C feature frames are real, {hop} samples from one to the next and {size} in each;
fewer in a stream's last window; 0 for a stream without new audio, whose state stays the same.

Outputs: `log_probs` [batch, C, {vocabulary}], `counts` [batch], how many of C are final{again}, and the state under
`next_` and its name. The state begins with zeros. The windows of a whole recording, and how to transcribe them:

```python
import numpy as np

def windows(signal, chunk={chunk}):
    full, step, samples = {subsampling} * chunk, {subsampling} * (chunk{ahead}), {frame} * chunk + {overlap}
    mirrored = np.pad(signal, ({before}, {after}), "symmetric")
    left = (len(mirrored) - {size}) // {hop} + 1
    while left > 0:
        frames = min(left, full)
        window = mirrored[:{hop} * (frames - 1) + {size}]
        yield np.pad(window, (0, samples - len(window))), frames
        left, mirrored = left - step if frames == full else 0, mirrored[{hop} * step:]
```
"""


def sherpa(rate: int) -> str:
    """Return the section on sherpa-onnx and whole recordings."""
    return _SHERPA.format(file=layout.MODELS[layout.SHERPA], rate=rate)


def words(config: Config, symbols: Sequence[str]) -> str:
    """Return the section on how log-probabilities become words."""
    return _WORDS.format(vocabulary=config.vocabulary, blank=config.blank_id, **word_rule(config, symbols))


def text(name: str, config: Config, comparison: Comparison, symbols: Sequence[str],
         of_targets: Sequence[str] = ()) -> str:
    """Return the whole file as a string; ``of_targets`` are sections on the programs that models were exported for."""
    sections = [words(config, symbols), *_uses(name, config)]
    if config.streaming is not None and config.streaming.models:
        sections.append(_streams(name, config, config.streaming))
    return of_recogniser(name, "CTC", config, comparison, [*sections, *of_targets])


def _uses(name: str, config: Config) -> list[str]:
    """Return a section on each format of whole recordings that the bundle has."""
    values = {
        "name": name,
        "rate": config.sample_rate,
        "vocabulary": config.vocabulary,
        "frame": 1000 * config.frame_seconds,
    }
    return [template.format(**values) for kind, template in _USE.items() if kind in config.models]


def _streams(name: str, config: Config, streaming: Streaming) -> str:
    """Return the section on streams: in sbkit, what the model takes and gives, and in the programs that run it."""
    facts = StreamFacts(config, streaming)
    files = {
        layout.ONNX: streaming.models.get(layout.ONNX, streaming.models.get(layout.INT8)),
        layout.TORCH: streaming.models.get(layout.TORCH),
    }
    programs = [_STREAM_USE[kind].format(file=file, rate=config.sample_rate)
                for kind, file in files.items() if file is not None]
    return "### Streams\n\n" + "\n".join([_LIVE.format(name=name), _STREAMS.format_map(facts), *programs])


@dataclass(frozen=True)
class StreamFacts:
    """What ``_STREAMS`` says of a model for streams. ``facts["hop"]`` is ``facts.hop``, for ``str.format_map``."""

    config: Config
    streaming: Streaming

    @property
    def files(self) -> str:
        return _listed([f"`{file}`" for file in self.streaming.models.values()])

    # ------------------------------------------------------------ chunks, in output frames

    @property
    def chunks(self) -> str:
        """The sizes that a chunk may have."""
        return _listed(self.streaming.chunks)

    @property
    def milliseconds(self) -> str:
        """The same in milliseconds."""
        return _listed([f"{1000 * size * self.config.frame_seconds:g}" for size in self.streaming.chunks])

    @property
    def chunk(self) -> int:
        """The size in the example: the middle one."""
        return self.streaming.chunks[len(self.streaming.chunks) // 2]

    @property
    def ahead(self) -> str:
        """What the lookahead takes off a chunk's size in the example."""
        return f" - {self.streaming.ahead}" if self.streaming.ahead else ""

    @property
    def moves(self) -> str:
        """The output frames between the beginnings of two windows, for a chunk of C."""
        return f"(C - {self.streaming.ahead})" if self.streaming.ahead else "C"

    @property
    def again(self) -> str:
        """Which of a window's outputs the next one repeats, in brackets; empty without lookahead."""
        if not self.streaming.ahead:
            return ""
        return (f" (not the last {self.streaming.ahead} of a full window, the lookahead: the next window begins with"
                " them, even if it has no others)")

    # ------------------------------------------------------------ windows, in samples

    @property
    def before(self) -> int:
        return self.streaming.before

    @property
    def after(self) -> int:
        return self.streaming.after

    @property
    def hop(self) -> int:
        """From one feature frame to the next."""
        return self.config.hop_samples

    @property
    def size(self) -> int:
        """Of a feature frame."""
        return self.config.hop_samples + self.streaming.overlap

    @property
    def overlap(self) -> int:
        """Of feature frames."""
        return self.streaming.overlap

    @property
    def frame(self) -> int:
        """From one output frame to the next."""
        return self.config.hop_samples * self.config.subsampling

    @property
    def subsampling(self) -> int:
        """Feature frames per output frame."""
        return self.config.subsampling

    @property
    def vocabulary(self) -> int:
        return self.config.vocabulary

    def __getitem__(self, name: str) -> object:
        return getattr(self, name)


def _listed(values: Sequence[object]) -> str:
    return ", ".join(map(str, values))
