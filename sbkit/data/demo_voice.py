"""Speech synthesis by espeak-ng through its C interface; the same sentence always gives the same waveform."""

from __future__ import annotations

import _ctypes
import contextlib
import ctypes
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from sbkit.errors import SbkitError

INSTALL = "install it with: pip install 'sbkit[demo]'"

# espeak-ng's speak_lib.h
_SYNCHRONOUS = 2
_DONT_EXIT = 0x8000
_RATE = 1
_PITCH = 3
_RANGE = 4
_UTF8 = 1
_IPA = 2
_AudioCallback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)


def _loader() -> ModuleType:
    try:
        import espeakng_loader
    except ImportError as error:
        raise SbkitError("missing-package", "espeak-ng is missing: the demo corpus, and voices trained on phones, need "
                         "the package espeakng-loader", hint=INSTALL, value="espeakng-loader") from error
    return espeakng_loader


@contextlib.contextmanager
def _library() -> Iterator[tuple[ctypes.CDLL, int]]:
    """A freshly loaded espeak-ng and its sample rate; it is unloaded at the end.

    The synthesiser has static variables that no call resets (not even Terminate), so a sentence would sound slightly
    different after another one. Unloading the library resets them and takes 5 ms.
    """
    loader = _loader()
    library = ctypes.CDLL(loader.get_library_path())
    library.espeak_TextToPhonemes.restype = ctypes.c_char_p
    try:
        rate = library.espeak_Initialize(_SYNCHRONOUS, 0, str(loader.get_data_path()).encode(), _DONT_EXIT)
        if rate <= 0:
            raise SbkitError("missing-package", f"espeak-ng found no data in {loader.get_data_path()}", hint=INSTALL,
                             value="espeakng-loader")
        yield library, rate
    finally:
        library.espeak_Terminate()
        _ctypes.dlclose(library._handle)


def _select(library: ctypes.CDLL, voice: str) -> None:
    """Choose a voice such as ``en-us+f2``; an unknown one, which espeak-ng would replace silently, is an error."""
    variant = voice.partition("+")[2]
    has_variant = not variant or (Path(_loader().get_data_path()) / "voices" / "!v" / variant).is_file()
    if library.espeak_SetVoiceByName(voice.encode()) != 0 or not has_variant:
        raise SbkitError("unknown-voice", f"espeak-ng has no voice '{voice}'",
                         hint="voices have names such as en-us or fr+f2", value=voice)


def speak(text: str, voice: str, *, words_per_minute: int = 175, pitch: int = 50, pitch_range: int = 50,
          seed: int = 1) -> tuple[np.ndarray, int]:
    """Synthesise a text; return it as mono float32 [S] within -1..1, and its sample rate.

    voice : such as ``en-us+f2``
    pitch, pitch_range : from 0 to 99
    """
    chunks: list[np.ndarray] = []

    def collect(samples: Any, count: int, _events: Any) -> int:  # called from C
        if samples and count > 0:
            chunks.append(np.ctypeslib.as_array(samples, (count,)).copy())
        return 0

    callback = _AudioCallback(collect)
    with _library() as (library, rate):
        _select(library, voice)
        library.espeak_SetSynthCallback(callback)
        library.espeak_ng_SetRandSeed(ctypes.c_long(seed))
        for parameter, value in ((_RATE, words_per_minute), (_PITCH, pitch), (_RANGE, pitch_range)):
            library.espeak_SetParameter(parameter, value, 0)
        data = text.encode()
        failed = library.espeak_Synth(data, ctypes.c_size_t(len(data) + 1), 0, 0, 0, _UTF8, None, None)
    if failed or not chunks:
        raise SbkitError("synthesis-failed", f"espeak-ng's voice '{voice}' gives no audio for {text!r}", value=voice)
    return np.concatenate(chunks).astype(np.float32) / 32768, rate


def pronounce(texts: list[str], voice: str) -> list[str]:
    """The pronunciation of each text in IPA; empty if the voice has no sound for it."""
    spoken = []
    with _library() as (library, _):
        _select(library, voice)
        for text in texts:
            pointer = ctypes.pointer(ctypes.c_char_p(text.encode()))
            clauses = []
            while pointer.contents.value:  # it moves on to the next clause
                clauses.append((library.espeak_TextToPhonemes(pointer, _UTF8, _IPA) or b"").decode())
            spoken.append(" ".join(filter(None, clauses)))
    return spoken


def languages() -> list[str]:
    """The names of all languages and dialects that espeak-ng can speak."""
    files = (Path(_loader().get_data_path()) / "lang").rglob("*")
    return sorted(path.name.lower() for path in files if path.is_file())
