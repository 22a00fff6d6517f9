"""The export of a voice: one graph from symbols to samples, compared by spectra and by a recogniser's transcripts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from sbkit.data.manifest import Manifest
from sbkit.data.text import TextRules
from sbkit.export import graph, layout, readme
from sbkit.export.clips import Clip, ComparisonClips
from sbkit.export.exported import Exported
from sbkit.export.measures import OutputMeasure
from sbkit.export.padding import pad
from sbkit.export.parity import Comparison, Reference, WordRules
from sbkit.export.runners import Runner, open_runner
from sbkit.nn.codec.spectral_loss import DECIBELS, MelDistance
from sbkit.nn.voice.voice import VoiceModel
from sbkit.tasks.tts import labels
from sbkit.tasks.tts.keys import TTSKeys

if TYPE_CHECKING:
    from sbkit.data.corpus import Corpus

#: Transcribes waveforms [S].
Transcribe = Callable[[Sequence[np.ndarray]], list[str]]
#: Decibels by which spectra may differ, a mean over clips. Runtimes add up in different orders, so that now and then
#: another level of a number is the likeliest, or an end is rounded to the next frame: that moves what follows by 20 ms.
#: A wrong graph differs by several.
MAX_DIFFERENCE = 0.2
#: The share of the clips, at least one, whose transcript may differ for such a reason.
OTHER_WORDS = 0.05
_SPEED = 1.0
_EXAMPLE = (2, 17)  # texts and symbols to trace with
_BEYOND = 1.25  # length of the long text, as a multiple of the longest of the test split


class SpectraMeasure(OutputMeasure):
    """Measures sound [S] by how many decibels mel spectra differ, a mean over the clips."""

    def __init__(self, sample_rate: int):
        super().__init__("spectra")
        self._distance = MelDistance(sample_rate)

    @torch.no_grad()
    def largest(self, expected: Sequence[np.ndarray], outputs: Sequence[np.ndarray]) -> float:
        if not all(np.isfinite(sound).all() for sound in outputs):
            return float("inf")
        distances = []
        for sound, exported in zip(expected, outputs, strict=True):
            size = max(len(sound), len(exported))
            pair = [torch.from_numpy(np.pad(part, (0, size - len(part))))[None] for part in (exported, sound)]
            distances.append(float(DECIBELS * self._distance(*pair, torch.tensor([size]))))
        return float(np.mean(distances))

    def allowed(self, tolerance: float) -> float:
        return MAX_DIFFERENCE

    def shown(self, difference: float) -> str:
        return f"{difference:.2g} dB"

    def is_tied(self, expected: np.ndarray, output: np.ndarray) -> bool:
        return False  # samples are no scores of labels


def sound_comparison(clips: ComparisonClips, reference: Reference, sample_rate: int, transcribe: Transcribe | None
                     ) -> Comparison:
    """Compare sound by its spectra, and by a recogniser's transcripts if there is one.

    clips : texts, whose signals are ids of symbols
    """
    symbols = sum(len(clip.signal) for clip in clips.alone)
    seconds = sum(len(reference.run(clip.signal)) for clip in clips.alone) / sample_rate
    symbols_per_second = symbols / seconds
    words = None
    if transcribe is not None:
        words = WordRules(text=lambda sound: transcribe([sound])[0],
                          max_changed_clips=max(1, int(OTHER_WORDS * len(clips.alone))))
    return Comparison(replace(clips, longest=clips.longest / symbols_per_second), reference, symbols_per_second,
                      SpectraMeasure(sample_rate), words)


@dataclass
class ExportedVoice(Exported):
    """A voice to export."""

    keys: TTSKeys = field(kw_only=True)
    transcribe: Transcribe | None = None

    @classmethod
    def of(cls, voice: VoiceModel, keys: TTSKeys, transcribe: Transcribe | None) -> ExportedVoice:
        """Export a voice in evaluation mode, which isn't changed.

        transcribe : a recogniser, for comparing transcripts; None: only spectra are compared
        """
        keys.symbols.load()
        outputs = {"audio": ("batch", "audio_lengths"), "audio_lengths": ("batch",), "durations": ("batch", "symbols")}
        return cls(voice, outputs, keys.sample_rate, keys=keys, transcribe=transcribe)

    @property
    def inputs(self) -> Mapping[str, tuple[str, ...]]:
        return {"text": ("batch", "symbols"), **dict.fromkeys(layout.VOICE_INPUTS[1:], ("batch",))}

    # int8 changes durations and spectra (by 3 dB), and a recogniser makes more errors.
    formats = layout.ONNX, layout.TORCH

    def clips(self, corpus: Corpus | None, count: int) -> ComparisonClips:
        """Choose texts of the run's test split, from the shortest to the longest, one of a symbol, and a long one."""
        path = corpus.manifest_path("test") if corpus is not None else None
        texts = list(Manifest.read(path).texts) if path is not None and path.is_file() else []
        texts = sorted({text for text in texts if self.keys.symbols.encode(text)}, key=lambda text: (len(text), text))
        origin = f"{min(count, len(texts))} texts of the run's test split"
        if not texts:  # of several lengths, with all symbols in them
            symbols = self.keys.symbols.characters or self.keys.symbols.names[1:]
            texts = ["".join(symbols[(i * 7 + size) % len(symbols)] for i in range(size)) for size in (3, 10, 30, 60)]
            origin = "made-up texts, since the run's corpus is missing"
        places = np.unique(np.linspace(0, len(texts) - 1, min(count, len(texts))).round().astype(int))
        chosen = [texts[i] for i in places]
        limit = self.keys.max_symbols
        joined = " ".join(chosen * 2)[:min(limit, round(_BEYOND * len(chosen[-1])))]
        clips = [Clip(self._ids(text)[:limit], text, text) for text in chosen]
        clips.insert(0, Clip(clips[0].signal[:1], None, "the first symbol of another"))
        return ComparisonClips([*clips, Clip(self._ids(joined)[:limit], None, "several joined")], origin,
                               len(chosen[-1]), others="the first symbol of one and several joined")

    def _ids(self, text: str) -> np.ndarray:
        return np.array(self.keys.symbols.encode(text), np.int64)

    def trace(self) -> torch.export.ExportedProgram:
        batch, symbols = _EXAMPLE
        text = torch.ones(batch, symbols, dtype=torch.int64)
        example = (text, torch.tensor([symbols, symbols // 2]), torch.zeros(batch, dtype=torch.int64),
                   torch.full((batch,), _SPEED))
        return graph.trace_module(self.graph.eval(), example, {name: tuple(range(len(dims)))
                                                               for name, dims in self.inputs.items()})

    def config(self, program: torch.export.ExportedProgram, clips: ComparisonClips) -> layout.VoiceConfig:
        keys, voice, corpus = self.keys, self.graph, self.keys.corpus
        assert isinstance(voice, VoiceModel), "of made it so"
        rules = None if corpus is None or type(corpus.text) is not TextRules else {
            name: value for name, value in corpus.text.options().items() if name != "alphabet"}
        return layout.VoiceConfig(
            sample_rate=self.sample_rate, symbols=keys.symbols.names, speakers=keys.speakers.names,
            max_symbols=keys.max_symbols, frame_seconds=voice.stride / self.sample_rate,
            codec=(labels.pinned_facts(keys) or labels.label_facts(keys) or {}).get("codec"),
            books=list(keys.quantiser.sizes),
            spelling=keys.symbols.spelling, characters=keys.symbols.characters, text=rules)

    def metadata(self, config: layout.VoiceConfig) -> dict[str, str]:
        return {**super().metadata(config), "language": config.language or "",
                **({} if config.spelling is None else {"spelling": config.spelling})}

    def runner(self, name: str, folder: Path, config: layout.VoiceConfig) -> Runner:
        call = open_runner(name, folder / layout.MODELS[name])

        def run(texts: Sequence[np.ndarray]) -> list[np.ndarray]:
            audio, samples, _ = call(*pad(texts), self._speakers(texts), np.full(len(texts), _SPEED, np.float32))
            return [sound[:size] for sound, size in zip(audio, samples, strict=True)]

        return run

    def reference(self, config: layout.VoiceConfig) -> Callable[[np.ndarray], np.ndarray]:
        @torch.no_grad()
        def run(ids: np.ndarray) -> np.ndarray:
            audio, _, _ = self.graph(torch.from_numpy(ids)[None], torch.tensor([len(ids)]),
                                     torch.from_numpy(self._speakers([ids])), torch.tensor([_SPEED]))
            return audio[0].numpy()

        return run

    def _speakers(self, texts: Sequence[np.ndarray]) -> np.ndarray:
        """Choose a speaker for each text, the same in any batch."""
        return np.array([int(ids.sum()) % self.keys.n_speakers for ids in texts])

    def comparison(self, clips: ComparisonClips, config: layout.VoiceConfig, folder: Path) -> Comparison:
        return sound_comparison(clips, Reference(self.reference(config)), config.sample_rate, self.transcribe)

    def readme(self, name: str, config: layout.VoiceConfig, comparison: Comparison,
               of_targets: Sequence[str] = ()) -> str:
        example = next((clip.text for clip in comparison.clips.alone if clip.text), config.symbols[1])
        written = next((clip.signal for clip in comparison.clips.alone if clip.text), [1])
        values = {"rate": config.sample_rate, "most": config.max_symbols, "frame": config.frame_seconds,
                  "symbols": "".join(config.symbols[number] for number in written)}
        characters = config.characters or config.symbols[1:]
        spelled = "" if config.spelling is None else f""" Its symbols are phones: words are spelled in IPA, \
each by itself, by espeak-ng's voice `{config.spelling}`, which `pip install 'sbkit[demo]'` installs."""
        speakers = ", ".join(config.speakers[:10]) + (", ..." if len(config.speakers) > 10 else "")
        parts = [f"""{readme.heading(name, config)}

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

If you publish its speech, say that it is synthetic.
"""]
        parts += [_USE[each].format(**values) for each in _USE if each in config.models]
        parts.append(readme.compared(comparison))
        return "\n".join(parts)


_USE = {
    layout.ONNX: """## ONNX Runtime, without sbkit

```python
import json, numpy as np, onnxruntime, soundfile
ids = {{symbol: number for number, symbol in enumerate(json.load(open("config.json", encoding="utf-8"))["symbols"])}}
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
import json, soundfile, torch
ids = {{symbol: number for number, symbol in enumerate(json.load(open("config.json", encoding="utf-8"))["symbols"])}}
voice = torch.export.load("model.pt2").module()
text = torch.tensor([[ids[symbol] for symbol in {symbols!r}]])
audio, samples, durations = voice(text, torch.tensor([text.shape[1]]), torch.tensor([0]), torch.tensor([1.0]))
soundfile.write("said.wav", audio[0, :samples[0]].numpy(), {rate})
```

""" + readme.PROGRAM,
}
