"""Keys that the task of a voice reads."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sbkit.errors import SbkitError, first_line
from sbkit.recipe.keys import Problem, key
from sbkit.system.schema import NOT_NEGATIVE, SIZE
from sbkit.tasks.keys import TaskKeys

if TYPE_CHECKING:
    from sbkit.data.symbols import Speakers, Symbols
    from sbkit.nn.codec import CodecDecoder, Quantiser, WaveHead
    from sbkit.nn.voice import CodeHead, Durations, FrameDecoder, TextEncoder


#: The codec's parts in a voice.
CODEC_PARTS = "quantiser", "decoder", "head"
#: Attributes of these parts that may differ, since they only affect the codec's own training.
_IGNORED = {"noise"}


@dataclass(kw_only=True)
class TTSKeys(TaskKeys):
    """Keys of a voice's parts, of the codec that it speaks through, and of the recogniser that it learns from."""

    codec: str | None = key("the bundle of the codec whose codes the voice predicts; init_from must refer to it", None)
    recogniser: str | None = key("a recogniser's bundle, which finds each character's duration, and transcribes the "
                                 "voice in tests", None)
    labels: str = key("the folder for the corpus's codes and durations, which are computed once")
    symbols: Symbols = key("the characters of the corpus, or phones, a sbkit.data.symbols.Symbols")
    speakers: Speakers = key("the voices to train, a sbkit.data.symbols.Speakers")
    n_symbols: int = key("size of their embedding table; determined by the corpus", allowed=SIZE)
    n_speakers: int = key("number of voices; determined by the corpus", allowed=SIZE)
    text_encoder: TextEncoder = key("symbols and a speaker to states, a sbkit.nn.voice.TextEncoder")
    durations: Durations = key("states to the duration of each symbol, a sbkit.nn.voice.Durations")
    frame_decoder: FrameDecoder = key("states, repeated over their frames, to frame states, a "
                                      "sbkit.nn.voice.FrameDecoder")
    code_head: CodeHead = key("frame states to codes, a sbkit.nn.voice.CodeHead")
    quantiser: Quantiser = key("the codec's: codes to vectors")
    decoder: CodecDecoder = key("the codec's: vectors to frame states")
    head: WaveHead = key("the codec's: frame states to waveforms")
    duration_weight: float = key("weight of the duration loss, relative to that of the codes", 1.0, NOT_NEGATIVE)
    max_symbols: int = key("the longest text that the bundle speaks at once; longer ones are split", 400, SIZE)

    def wrong_bundles(self) -> list[Problem]:
        """Return the problems of the bundles that a corpus is labelled with: only missing ones if there are any, and
        only those of the wrong kind before the codec's parts are compared."""
        from sbkit.export import layout

        missing, other = [], []
        for name, folder, recipe in (("codec", self.codec, "codec"), ("recogniser", self.recogniser, "ctc")):
            hint = f"name a bundle, --{name} BUNDLE: sbkit export makes one of a run of hparams/{recipe}.yaml"
            if folder is None:
                missing.append(Problem(name, "it is null, but a voice can't be trained without it", hint,
                                       "missing-key"))
            elif not Path(folder, layout.CONFIG).is_file():
                missing.append(Problem(name, f"there is no bundle in {folder}", hint, "no-such-path"))
        if missing:
            return missing
        for name, folder, kind in (("codec", self.codec, layout.CodecConfig),
                                   ("recogniser", self.recogniser, layout.Config)):
            with contextlib.suppress(SbkitError):  # opening one that can't be read raises later
                found = layout.read(folder or "")
                if not isinstance(found, kind):
                    other.append(Problem(name, f"the bundle {folder} has {found.what}, but {kind.what} is needed here",
                                         f"name another one: --{name} BUNDLE", "wrong-bundle-kind"))
                elif name == "codec" and found.sample_rate != self.sample_rate:
                    other.append(Problem("sample_rate", f"it is {self.sample_rate}, but the codec's is "
                                         f"{found.sample_rate}", f"--sample_rate {found.sample_rate}",
                                         "sample-rate"))
        return other or list(self._other_codec())

    def _other_codec(self) -> Iterator[Problem]:
        """Yield parts that differ from the codec's, in their sizes or in the names and shapes of their weights."""
        from safetensors import SafetensorError, safe_open

        from sbkit.export import layout
        from sbkit.nn.codec.coder import definition

        assert self.codec is not None, "a missing one is reported before"
        path, hint = Path(self.codec, layout.WEIGHTS), "write it as in the codec's recipe"
        if not path.is_file():
            return  # init_from reports that, since it takes the weights from there
        try:
            with safe_open(path, framework="numpy") as file:
                defined = json.loads((file.metadata() or {}).get("definition", "null"))
                shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError, ValueError, RecursionError) as error:
            yield Problem("codec", f"{path} cannot be read: {first_line(error)}",
                          "is it a codec's bundle? export it again", "damaged-bundle")
            return
        if not isinstance(defined, dict):
            yield Problem("codec", f"{path} does not say what its parts are", "is it a codec's bundle? export it again",
                          "damaged-bundle")
            return
        for name in CODEC_PARTS:
            part, theirs = getattr(self, name), defined.get(name)
            if part is None:
                continue
            mine, theirs = json.loads(json.dumps(definition(part))), theirs if isinstance(theirs, dict) else {}
            numbers = [f"{key} {mine.get(key)} instead of {theirs.get(key)}"
                       for key in sorted((mine.keys() | theirs.keys()) - _IGNORED) if mine.get(key) != theirs.get(key)]
            own = {f"{name}.{key}": tuple(value.shape) for key, value in part.state_dict().items()}
            there = {key: shape for key, shape in shapes.items() if key.startswith(f"{name}.")}
            if numbers:
                yield Problem(name, f"it is not the codec's: {', '.join(numbers)}", hint, "other-codec")
            elif own != there:
                first = sorted(own.items() ^ there.items())[0][0]
                yield Problem(name, f"it is not the codec's: {first} is in only one of them, or has another shape",
                              hint, "other-codec")

    def clashes(self) -> Iterator[Problem]:
        yield from super().clashes()
        if self.augment is not None:
            yield Problem("augment", "a voice is trained on labels of the original recordings, so nothing would be "
                          "augmented", "leave it out")
        if self.codec is not None and self.init_from != self.codec:
            yield Problem("init_from", f"it is {self.init_from!r}, but the codec's own decoder has to be taken from "
                          f"{self.codec!r}", "write init_from: !ref <codec>")
        if left := [part for part in self.init_leave or () if part.split(".")[0] in CODEC_PARTS]:
            yield Problem("init_leave", f"it has {', '.join(left)}, which are the codec's and don't train: "
                          "reinitialised they would only make noise",
                          "leave them out, and write them as in the codec's recipe")
