"""Utterances on the page: reference above hypothesis, word by word, with a player and their metadata."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence

import soundfile

from sbkit.data.audio import AudioError, read_audio
from sbkit.data.manifest import Utterance
from sbkit.data.remote import NO_REMOTE, Remote
from sbkit.score.edits import DELETION, EQUAL, INSERTION, SUBSTITUTION, Tokens
from sbkit.score.markup import Markup, tag, text
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
        self.why_foreign, self.remote = why_foreign, remote
        self.left = int(megabytes * 1e6)
        self.megabytes = megabytes
        self._embedded: set[str] = set()

    def player(self, one: Recording) -> Markup:
        """Make a player, or a remark why there is none; a recording that is shown twice is embedded once."""
        if one.id in self._embedded:  # the page's script copies it from the player that has it
            return tag("audio", controls=True, preload="none", data_same=one.id)
        uri, why_not = self.get(one)
        if uri is None:
            return tag("p", why_not, class_="remark")
        self._embedded.add(one.id)
        return tag("audio", controls=True, preload="metadata", src=uri, data_clip=one.id)

    def get(self, one: Recording) -> tuple[str | None, str | None]:
        """Return (a data URI, None), or (None, the reason why there is none)."""
        if self.left <= 0:
            return None, f"not embedded: the page's {self.megabytes:g} MB for recordings are used up"
        try:
            if (foreign := self.why_foreign(one.wav)) is not None:
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
        if len(uri) > self.left:
            self.left = 0
            return self.get(one)
        self.left -= len(uri)
        return uri, None


_CLASSES = {EQUAL: "eq", INSERTION: "ins", DELETION: "del", SUBSTITUTION: "sub"}
_NOTHING = "·"  # placeholder for a missing word in an alignment


def card(results: ScoredRun, clips: AudioEmbedder, index: int, *remarks: str,
         other: tuple[Tokens, str, str] | None = None) -> Markup:
    """Make a card of an utterance from its index, remarks about it, and another run's (words, alignment, name)."""
    one, reference = results.utterances[index], results.words.references[index]
    words = diff(reference, results.words.hypotheses[index], results.alignments[index])
    if other is not None:
        words = text(tag("p", other[2], class_="side"), diff(reference, other[0], other[1]),
                     tag("p", "this run", class_="side"), words)
    edits, length = int(results.edits[index]), int(results.lengths[index])
    facts = [f"{counted(edits, 'error')} in {counted(length, 'word')}", f"{one.duration:.1f} s"]
    if one.confidence is not None:
        facts.append(f"confidence {percent(one.confidence)}")
    facts += [value.replace("_", " ") for name, value in one.meta.items() if name in ("accent", "age", "gender")]
    if one.speaker:
        facts.append(f"speaker {short(one.speaker)}")
    below = tag("p", " · ".join(facts), " ", tag("span", one.id, class_="id"), class_="facts")
    return tag("article", words, clips.player(one), *(tag("p", remark, class_="remark") for remark in remarks), below,
               class_="utterance")


def diff(reference: Tokens, hypothesis: Tokens, alignment: str) -> Markup:
    """Lay out both texts as pairs of words, the reference's above."""
    pairs = [tag("span", tag("span", ref or _NOTHING), " ", tag("span", hyp or _NOTHING), class_=_CLASSES[step])
             for step, ref, hyp in aligned(reference, hypothesis, alignment)]
    return tag("p", [text(pair, " ") for pair in pairs], class_="diff", dir="auto")


def key(above: str) -> Markup:
    """Make the legend of the colours of an alignment; ``above`` says what its upper words are."""
    return tag("p", f"Above the {above}, below the hypothesis: ", tag("span", "substitution", class_="k sub"), " ",
               tag("span", "deletion", class_="k del"), " ", tag("span", "insertion", class_="k ins"), class_="key")


def short(name: str, limit: int = 12) -> str:
    """Shorten a long name, such as a hash."""
    return name if len(name) <= limit else name[:8] + "…"


def most_wrong(results: ScoredRun, count: int, without: Sequence[int] = ()) -> list[int]:
    """Return the utterances with the most errors beyond what is expected for their length.

    Sorted by rate alone, utterances of one word would come first.
    """
    excess = results.edits - results.lengths * (results.edits.sum() / results.lengths.sum())
    order = (-excess).argsort(kind="stable")
    out = set(without)
    return [int(i) for i in order if i not in out and results.edits[i] > 0][:count]
