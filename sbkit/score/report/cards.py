"""Utterances on the page: reference above hypothesis, word by word, with a player and their metadata."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from typing import Any

import soundfile

from sbkit.data.audio import AudioError, read_audio
from sbkit.data.manifest import Utterance
from sbkit.data.remote import NO_REMOTE, Remote
from sbkit.score.edits import DELETION, EQUAL, INSERTION, SUBSTITUTION, Tokens
from sbkit.score.rates import aligned
from sbkit.score.report.data import ScoredRun, percent
from sbkit.score.results import SoundSample
from sbkit.score.utterances import ScoredUtterance
from sbkit.system.console import counted

_RATE = 16_000
_COMPRESSION = 0.8  # variable bit rate, about 37 kbit/s for speech at 16 kHz
_LONGEST = 120.0  # seconds of one recording
Recording = ScoredUtterance | SoundSample | Utterance


class AudioEmbedder:
    """Makes data URIs of recordings until ``megabytes`` are used up.

    why_foreign : why a recording doesn't belong to the run or corpus, None if it does. Pages are shared, and a run's
        results or a corpus' list may name any file
    remote : which URLs may be opened
    """

    def __init__(self, megabytes: float, why_foreign: Callable[[str], str | None], remote: Remote = NO_REMOTE):
        self.why_foreign = why_foreign
        self.remote = remote
        self.megabytes = megabytes
        self.bytes_left = int(megabytes * 1e6)
        self._embedded: set[str] = set()

    def player(self, one: Recording) -> dict[str, str | None]:
        """Make the content of a player: its id with the data URI or the reason why there is none, or with neither for
        a recording that is on the page already."""
        if one.id in self._embedded:
            return {"id": one.id, "uri": None, "why_not": None}
        uri, why_not = self.get(one)
        if uri is not None:
            self._embedded.add(one.id)
        return {"id": one.id, "uri": uri, "why_not": why_not}

    def get(self, one: Recording) -> tuple[str | None, str | None]:
        """Return (a data URI, None), or (None, the reason why there is none)."""
        if self.bytes_left <= 0:
            return None, f"not embedded: the page's {self.megabytes:g} MB for recordings are used up"
        try:
            foreign = self.why_foreign(one.wav)
            if foreign is not None:
                return None, f"not embedded: {foreign}"
            signal = read_audio(one.wav, start=one.start, duration=min(one.duration, _LONGEST), sample_rate=_RATE,
                                remote=self.remote)
            encoded = io.BytesIO()
            soundfile.write(encoded, signal, _RATE, format="MP3", subtype="MPEG_LAYER_III",
                            bitrate_mode="VARIABLE", compression_level=_COMPRESSION)
        except AudioError as error:
            return None, f"the recording can't be read: {error.cause}"
        except ValueError as error:  # paths can't contain zeros or lone surrogates
            return None, f"not embedded: its path is invalid ({error})"
        except soundfile.LibsndfileError as error:  # it may be built without MP3
            return None, f"not embedded: {error}"
        uri = "data:audio/mpeg;base64," + base64.b64encode(encoded.getvalue()).decode()
        if len(uri) > self.bytes_left:
            self.bytes_left = 0  # from here on, also of shorter ones
            return self.get(one)
        self.bytes_left -= len(uri)
        return uri, None


_CLASSES = {EQUAL: "eq", INSERTION: "ins", DELETION: "del", SUBSTITUTION: "sub"}
Card = dict[str, Any]
"""The content of a card, as ``cards`` in pieces.html shows it."""


def card(results: ScoredRun, clips: AudioEmbedder, index: int, remark: str = "",
         other: tuple[Tokens, str] | None = None) -> Card:
    """Make a card of an utterance from its index, a remark about it, and another run's (words, alignment)."""
    one = results.utterances[index]
    reference = results.words.references[index]
    texts = [("this run" if other else "", diff(reference, results.words.hypotheses[index], results.alignments[index]))]
    if other is not None:
        texts.insert(0, ("the other run", diff(reference, *other)))
    edits = int(results.edits[index])
    length = int(results.lengths[index])
    facts = [f"{counted(edits, 'error')} in {counted(length, 'word')}", f"{one.duration:.1f} s"]
    if one.confidence is not None:
        facts.append(f"confidence {percent(one.confidence)}")
    facts += [value.replace("_", " ") for name, value in one.meta.items() if name in ("accent", "age", "gender")]
    if one.speaker:
        facts.append(f"speaker {short(one.speaker)}")
    return {"texts": texts, "sounds": [("", clips.player(one))], "remark": remark, "facts": " · ".join(facts),
            "id": one.id}


def diff(reference: Tokens, hypothesis: Tokens, alignment: str) -> list[tuple[str, str, str]]:
    """Lay out both texts as pairs of words, each with the class of its colour."""
    return [(_CLASSES[step], ref, hyp) for step, ref, hyp in aligned(reference, hypothesis, alignment)]


def short(name: str, limit: int = 12) -> str:
    """Shorten a long name, such as a hash."""
    return name if len(name) <= limit else name[:8] + "…"
