"""The command ``sbkit speak``: speaks a text of any length into an audio file."""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from sbkit.decode.file_errors import unreadable, unwritable
from sbkit.errors import SbkitError
from sbkit.export import layout
from sbkit.infer.formats import ModelRequest
from sbkit.infer.sentences import PhraseReader
from sbkit.infer.sound_file import SoundStream, SoundWriter, kind_of
from sbkit.infer.voice import Voice, check_speed, speaker_of
from sbkit.system import disk
from sbkit.system.console import atomic_write, progress, time_span
from sbkit.system.untrusted import standard_input

STD = "-"
_BLOCK = 1 << 16  # characters
_LIVE = "wav"  # the format of standard output


@dataclass(frozen=True)
class SpeakRequest(ModelRequest):
    """What to say, and how.

    text : ``-`` for standard input; None: in ``file``
    to : a file, whose suffix names the format, or ``-`` for 16-bit WAV to standard output
    skip_unknown : skip characters that the voice never learnt
    """

    bundle: Path
    to: str
    text: str | None = None
    file: Path | None = None
    voice: str | None = None
    speed: float = 1.0
    skip_unknown: bool = False


def speak(request: SpeakRequest) -> int:
    """Speak and return the exit code. The whole text is checked before any of it is spoken."""
    if (request.text is None) == (request.file is None):
        raise SbkitError("missing-option", "give a text, - for standard input, or --file FILE",
                         hint='sbkit speak BUNDLE "good morning" --to morning.wav')
    config = layout.VoiceConfig.read(request.bundle)
    if request.to == STD and sys.stdout.isatty():
        raise SbkitError("bad-option", "--to - writes sound to standard output, but that is a terminal",
                         hint="sbkit speak BUNDLE TEXT --to - | aplay", key="--to")
    kind = _LIVE if request.to == STD else kind_of(Path(request.to))
    speaker_of(config, request.voice)
    check_speed(request.speed)
    with _opened(request) as text:
        reader = PhraseReader(config, request.skip_unknown)
        count = sum(len(phrase.ids) for phrase in reader.read(_blocks(text, request)))
        if reader.unknown.counts:
            print(f"left out because the voice has no symbol for it: {reader.unknown}", file=sys.stderr)
        with Voice.open(request.bundle, request.model, request.device, request.threads) as voice:
            print(voice.running, file=sys.stderr)
            text.seek(0)
            # In another thread: Ctrl-C in a callback of libsndfile would be lost.
            with _encoder(request.to, kind, config.sample_rate) as encoder, \
                    ThreadPoolExecutor(1, "sbkit-sound") as thread:
                began = time.perf_counter()
                seconds = 0.0
                parts = voice.say(_blocks(text, request), request.voice, request.speed, request.skip_unknown)
                with progress(what="speaking", total=count, unit="char", show=count > config.max_symbols) as bar:
                    for speech in parts:
                        thread.submit(encoder.add, speech.samples).result()
                        seconds += speech.seconds
                        bar.update(min(len(speech.text), count - bar.n))
                    bar.update(count - bar.n)
                elapsed = time.perf_counter() - began
                where = "" if request.to == STD else f" -> {request.to}"
                factor = f" (real-time factor {elapsed / seconds:.4f})" if seconds else ""
                print(f"{seconds:.1f} s of speech in {time_span(elapsed)}{factor}{where}", file=sys.stderr)
                thread.submit(encoder.end).result()
    return 0


# ---------------------------------------------------------------------- the text


@contextlib.contextmanager
def _opened(request: SpeakRequest) -> Iterator[IO[str]]:
    """Open the text as a file that can be read twice."""
    with contextlib.ExitStack() as stack:
        if request.file is not None and not request.file.is_fifo():
            binary = stack.enter_context(_file(request.file))
        else:
            binary = stack.enter_context(tempfile.TemporaryFile("w+b"))
            with disk.disk_errors_as_user_error(tempfile.gettempdir(), "a copy of the text"):
                write_text(request, binary)
                binary.flush()
            binary.seek(0)
        with open(binary.fileno(), encoding="utf-8-sig", newline="", closefd=False) as text:
            yield text


def write_text(request: SpeakRequest, to: IO[bytes]) -> None:
    """Write a text that can't be read twice to a file."""
    if request.file is not None:
        with _file(request.file) as source:
            shutil.copyfileobj(source, to)
    elif request.text == STD:
        example = "echo good morning | sbkit speak BUNDLE - --to morning.wav"
        shutil.copyfileobj(standard_input("a text", example).buffer, to)
    else:
        to.write((request.text or "").encode("utf-8", "surrogateescape"))


def _file(path: Path) -> IO[bytes]:
    try:
        return path.open("rb")
    except OSError as error:
        raise unreadable(path, error) from error


def _blocks(text: IO[str], request: SpeakRequest) -> Iterator[str]:
    try:
        while block := text.read(_BLOCK):
            yield block
    except (UnicodeDecodeError, OSError) as error:
        if request.file is not None:
            name = str(request.file)
        elif request.text == STD:
            name = "standard input"
        else:
            name = "the text"
        raise unreadable(name, error, "give a file of text in UTF-8") from error


# ---------------------------------------------------------------------- the sound


class _Piped(SoundStream):
    """Writes sound to standard output as it comes."""

    def add(self, samples: np.ndarray) -> None:
        super().add(samples)
        self._send()

    def end(self) -> None:
        super().end()
        self._send()

    def _send(self) -> None:
        sys.stdout.buffer.write(self.take())
        sys.stdout.buffer.flush()


@contextlib.contextmanager
def _encoder(to: str, kind: str, rate: int) -> Iterator[SoundWriter | SoundStream]:
    if to == STD:
        yield _Piped(kind, rate)
        return
    path = Path(to)
    if path.is_dir():
        raise SbkitError("not-a-file", f"--to {to} is a folder", hint="name the file: --to out.wav", file=to,
                         key="--to")
    try:
        with atomic_write(path, "wb") as file, contextlib.closing(SoundWriter(file, kind, rate)) as writer:
            yield writer
    except (PermissionError, NotADirectoryError, FileExistsError) as error:
        raise unwritable(to, error, "choose another place with --to") from error
