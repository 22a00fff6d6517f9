"""A test as a listener of live speech sees it: transcripts that grow with each chunk, for several sizes at once."""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

from torch import Tensor

from sbkit.data.batch import Batch
from sbkit.decode.greedy import align
from sbkit.decode.spans import TokenSpans, Word, words
from sbkit.decode.token_search import TokenSearch
from sbkit.errors import SbkitError
from sbkit.nn.chunks import Seen
from sbkit.nn.ctc import ctc_frames_needed
from sbkit.score import chunk_size
from sbkit.score.latency import COLUMNS, LiveRates, LiveTranscript, live_transcript, rates
from sbkit.tasks.asr import ASR, Choice, TranscribedUtterance, choices
from sbkit.tasks.recognise.keys import EncoderKeys
from sbkit.tasks.recognise.recognizer import Recognizer
from sbkit.tasks.transcripts import Transcripts

Scored = Any  # a tensor, or several: what the task finds transcripts in


class Text(NamedTuple):
    """One transcript of the beginning of an utterance."""

    text: str
    confidence: float | None
    nbest: Sequence[Choice] = ()  # of a whole utterance: a stream has one transcript


def frame_seconds(model: Recognizer, keys: EncoderKeys) -> float:
    """Return how long a frame of the encoder is."""
    return model.subsampling * model.hop_samples / keys.sample_rate


def _shown(words: Sequence[Word], space: str) -> Text:
    confidence = sum(word.confidence for word in words) / len(words) if words else None
    return Text(space.join(word.text for word in words), confidence)


class HearingTask(ASR):
    """A recogniser whose encoder states become scores, and these transcripts."""

    keys: EncoderKeys
    recognizer: Recognizer

    def scored(self, encoded: Tensor) -> Scored:
        """Compute what transcripts are found in, from encoder states [B, T, D]."""
        return self.recognizer.head(encoded)

    def of_ctc(self, scores: Scored) -> Tensor | None:
        """Return a CTC head's part of these [B, T, V], by which words are aligned; None if there is none."""
        return scores

    @abstractmethod
    def searched(self, scores: Scored) -> Tensor:
        """Return what a ``Search`` takes of these."""

    @abstractmethod
    def greedy(self, scores: Tensor, frames: Tensor) -> Iterable[TokenSpans]:
        """Decode what a ``Search`` takes [B, T, ...], and frames [B], without one."""


class LiveTest:
    """Hears each utterance of a test in chunks of each size that was asked for.

    The encoder hears the utterances of a batch at once, as if each came chunk by chunk, which gives a stream's scores.
    What was live_transcript after a chunk is what a stream's search shows of the scores up to there.

    task : whose model hears
    chunk : sizes in milliseconds; None is the whole utterance. The first one's transcripts are the test's
    """

    def __init__(self, task: HearingTask, chunk: Sequence[int | None]):
        keys = task.keys
        if keys.chunks is None:
            raise SbkitError("--chunk needs a model that was trained in chunks, but the recipe has no chunks",
                             hint="train one with hparams/streaming.yaml, or leave out --chunk")
        self.task, self.keys, self.chunk = task, keys, tuple(chunk)
        self.frame_seconds = frame_seconds(task.recognizer, keys)
        sizes = keys.chunks.in_milliseconds(self.frame_seconds)
        self._sizes = {one: self._size(one, sizes) for one in (*self.chunk, None)}
        self._ahead = keys.chunks.ahead

    def _size(self, chunk: int | None, sizes: dict[int, int]) -> int | None:
        if chunk is not None and chunk not in sizes:
            raise SbkitError(f"--chunk {chunk}: the model wasn't trained for chunks of {chunk} ms",
                             hint=f"it was trained for {', '.join(map(str, sorted(sizes)))} and {chunk_size.WHOLE}")
        return None if chunk is None else sizes[chunk]

    def config(self, chunk: int | None) -> Seen | None:
        """Return what each frame sees with chunks of this size, which was asked for; None: the whole utterance."""
        size = self._sizes[chunk]
        assert self.keys.chunks is not None, "the constructor refuses that"
        return None if size is None else self.keys.chunks.config(size)

    def scores(self, feats: Tensor, frames: Tensor, first: Scored) -> list[Scored]:
        """Compute the task's ``scored`` of features [B, T', F] for each size in order, and for whole utterances at the
        end.

        first : that of the first size
        """
        found: dict[int | None, Scored] = {self.chunk[0]: first}
        for chunk in self._sizes:
            if chunk not in found:
                encoded, _ = self.task.recognizer.encode(feats, frames, self.config(chunk))
                found[chunk] = self.task.scored(encoded)
        return [found[chunk] for chunk in (*self.chunk, None)]

    def texts(self, scores: Scored, frames: Tensor, cuts: Sequence[Sequence[int]], search: TokenSearch | None,
              live: bool) -> list[list[Text]]:
        """Transcribe each utterance of a batch up to each of its ``cuts``, the last of which is its end.

        search : finds the transcripts; None: they are decoded greedily
        live : decode as a stream, whose words settle; False: there is one cut, and the whole utterance is known
        """
        searched = self.task.searched(scores)
        if search is None:
            return self._beginnings(self.task.greedy(searched, frames), cuts)
        if live:
            return self._by_streams(search, searched, cuts)
        return [[Text(best[0].text, best[0].confidence, choices(best))] for best in search.decode(searched, frames)]

    def _by_streams(self, search: TokenSearch, searched: Tensor, cuts: Sequence[Sequence[int]]) -> list[list[Text]]:
        """Search utterances as streams, each of which is over with its last chunk."""
        spelling, grown = search.spelling(self.frame_seconds), []
        for scores, ends in zip(searched.cpu().numpy(), cuts, strict=True):
            stream = search.stream(spelling)
            settled: list[Word] = []
            texts = []
            for start, end in pairwise([0, *ends]):
                heard = stream.feed(scores[start:end])
                if end == ends[-1]:
                    heard.append(stream.finish())
                settled += [word for each in heard for word in each.settled]
                texts.append(_shown(settled + heard[-1].partial, "" if search.separator is None else " "))
            grown.append(texts)
        return grown

    def rows(self, scores: Sequence[Scored], frames: Tensor, batch: Batch,
             search: TokenSearch | None) -> Iterator[TranscribedUtterance]:
        """Yield the row of each utterance, with what was live_transcript of it with chunks of each size.

        scores : as returned by :meth:`scores`
        frames : [B], frames of each utterance
        search : as for :meth:`texts`
        """
        ctc = self.task.of_ctc(scores[-1])
        ends = [None] * len(batch.ids) if ctc is None else \
            self._word_ends(ctc.float().log_softmax(-1), frames, batch)
        seconds = (batch.signal_lengths / self.keys.sample_rate).tolist()
        seen: list[list[LiveTranscript]] = [[] for _ in batch.ids]
        finals: list[Text] = []
        for chunk, each in zip(self.chunk, scores, strict=False):
            cuts = [self._cuts(chunk, count) for count in frames.tolist()]
            ahead = 0 if self._sizes[chunk] is None else self._ahead
            grown = self.texts(each, frames, cuts, search, self._sizes[chunk] is not None)
            for i, texts in enumerate(grown):
                times = [min((cut + ahead) * self.frame_seconds, seconds[i]) for cut in cuts[i][:-1]] + [seconds[i]]
                seen[i].append(live_transcript([one.text for one in texts], times, batch.texts[i].split(), ends[i]))
            finals = finals or [texts[-1] for texts in grown]
        for name, said, final, live in zip(batch.ids, batch.texts, finals, seen, strict=True):
            yield TranscribedUtterance(name, said, final.text, final.confidence, final.nbest, tuple(live))

    def _beginnings(self, found: Iterable[TokenSpans], cuts: Sequence[Sequence[int]]) -> list[list[Text]]:
        """Write the beginnings of utterances whose tokens nothing later changes: one is there from its first frame on.
        """
        decode, grown = self.keys.tokenizer.decode, []
        for spans, ends in zip(found, cuts, strict=True):
            ids, starts = spans.ids.tolist(), spans.starts.tolist()
            confidence = float(spans.confidence.mean()) if len(spans) else None
            grown.append([Text(decode(ids[:bisect_left(starts, end)]), confidence) for end in ends])
        return grown

    def _cuts(self, chunk: int | None, frames: int) -> list[int]:
        """Return the frames up to which an utterance is said with each chunk, the last of them its end."""
        size = self._sizes[chunk]
        moves = size and size - self._ahead
        return [*range(moves, frames - self._ahead, moves), frames] if moves else [frames]

    def _word_ends(self, log_probs: Tensor, frames: Tensor, batch: Batch) -> list[list[float] | None]:
        """Return when each word of a text ends, by the model's own alignment; None where there is none.

        That is where a word has no token, or the text more tokens than there are frames.
        """
        lengths = batch.token_lengths
        fits = ((ctc_frames_needed(batch.tokens, lengths) <= frames) & (lengths > 0)).cpu()
        rows = fits.nonzero()[:, 0]
        found: list[list[float] | None] = [None] * len(batch.ids)
        if not len(rows):
            return found
        there = rows.to(log_probs.device)
        aligned = align(log_probs[there], frames[there], batch.tokens[there], lengths[there],
                        self.keys.blank_index, [batch.ids[i] for i in rows.tolist()])
        for i, spans in zip(rows.tolist(), aligned, strict=True):
            heard = words(spans, self.keys.tokenizer.piece, self.frame_seconds)
            if len(heard) == len(batch.texts[i].split()):
                found[i] = [word.end for word in heard]
        return found


@dataclass
class LiveTranscripts(Transcripts):
    """Rows of a test that was heard in chunks of several sizes; the transcripts are those of the first."""

    chunk: Sequence[int | None] = field(kw_only=True)
    """Milliseconds of each size in the rows' ``live``; None is the whole utterance."""

    @cached_property
    def live(self) -> list[LiveRates]:
        """The rates with chunks of each size."""
        scored = [row for row in self.rows if row.reference.split()]
        said = [(row.id, row.reference) for row in scored]
        return [rates(chunk, said, [row.live[number] for row in scored]) for number, chunk in enumerate(self.chunk)]

    def facts(self) -> dict[str, Any]:
        return {**super().facts(), "chunks": [each.facts() for each in self.live]}

    def table_rows(self) -> list[list[tuple[str, Any]]]:
        return [list(zip(COLUMNS, each.row(), strict=True)) for each in self.live]

    def figures(self, name: str) -> Mapping[str, float]:
        if name != "WER":
            return super().figures(name)
        return {f"(chunk: {chunk_size.named(each.chunk)})": each.WER for each in self.live}
