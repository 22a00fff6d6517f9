"""Transcripts: text, words and segments with times and confidences, in common formats."""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sbkit.decode.spans import PAUSE_SECONDS, Word

#: A segment ends at a pause, or before it exceeds these: the characters are two lines of subtitles.
SEGMENT_SECONDS, SEGMENT_CHARACTERS = 7.0, 84


def mean_confidence(words: Sequence[Word]) -> float | None:
    """Return the mean confidence of words; None if there are none."""
    return sum(word.confidence for word in words) / len(words) if words else None


@dataclass
class Segment:
    """Words between two pauses."""

    words: list[Word]
    text: str

    @property
    def start(self) -> float:
        return self.words[0].start

    @property
    def end(self) -> float:
        return self.words[-1].end


@dataclass
class Transcript:
    """The transcript of one recording; times in seconds, confidences from 0 to 1."""

    id: str
    text: str
    words: list[Word] = field(default_factory=list)
    duration: float = 0.0
    language: str | None = None
    spaced: bool = True
    """Whether words are written with spaces between them."""
    warning: str | None = None
    """What is missing of the recording."""

    @property
    def confidence(self) -> float | None:
        return mean_confidence(self.words)

    @property
    def segments(self) -> list[Segment]:
        """Group the words into lines for subtitles."""
        space = " " if self.spaced else ""
        lines: list[list[Word]] = []
        width = 0
        for word in self.words:
            width += len(space) + len(word.text)
            line = lines[-1] if lines else None
            if (line is None or word.start - line[-1].end >= PAUSE_SECONDS or width > SEGMENT_CHARACTERS
                    or word.end - line[0].start > SEGMENT_SECONDS):
                lines.append([word])
                width = len(word.text)
            else:
                line.append(word)
        return [Segment(line, space.join(word.text for word in line)) for line in lines]

    def facts(self) -> dict[str, Any]:
        confidence = self.confidence
        facts: dict[str, Any] = {
            "id": self.id, "text": self.text, "duration": round(self.duration, 3), "language": self.language,
            "confidence": None if confidence is None else round(confidence, 4),
            "words": [{"text": word.text, **word.facts()} for word in self.words],
            "segments": [{"start": round(segment.start, 3), "end": round(segment.end, 3), "text": segment.text}
                         for segment in self.segments],
        }
        if self.warning is not None:
            facts["warning"] = self.warning
        return facts


def as_json(transcript: Transcript) -> str:
    return json.dumps(transcript.facts(), ensure_ascii=False, indent=1) + "\n"


def as_srt(transcript: Transcript) -> str:
    return "\n".join(
        f"{number}\n{clock(segment.start, ',')} --> {clock(segment.end, ',')}\n{segment.text}\n"
        for number, segment in enumerate(transcript.segments, 1))


def as_vtt(transcript: Transcript) -> str:
    cues = (f"\n{clock(segment.start, '.')} --> {clock(segment.end, '.')}\n"
            f"{html.escape(segment.text, quote=False)}\n" for segment in transcript.segments)
    return "WEBVTT\n" + "".join(cues)


def as_ctm(transcript: Transcript) -> str:
    """Format as NIST's time-marked conversation (CTM): ``id channel start duration word confidence``."""
    name = "_".join(transcript.id.split()) or "-"  # spaces separate the columns
    return "".join(f"{name} 1 {word.start:.2f} {word.end - word.start:.2f} {word.text} {word.confidence:.3f}\n"
                   for word in transcript.words)


FORMATS: dict[str, Callable[[Transcript], str]] = {
    "txt": lambda transcript: transcript.text + "\n", "json": as_json, "srt": as_srt, "vtt": as_vtt, "ctm": as_ctm,
}


def clock(seconds: float, point: str) -> str:
    """``HH:MM:SS.mmm``."""
    whole, milliseconds = divmod(round(seconds * 1000), 1000)
    return f"{whole // 3600:02d}:{whole // 60 % 60:02d}:{whole % 60:02d}{point}{milliseconds:03d}"
