"""A test as on live streams: transcripts that grow with each chunk, for several chunk sizes at once."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from sbkit.data.batch import Batch
from sbkit.decode.greedy import align
from sbkit.decode.spans import Spelling, TokenSpans, Word
from sbkit.decode.token_search import TokenSearch
from sbkit.errors import SbkitError
from sbkit.nn.chunks import ChunkConfig
from sbkit.nn.ctc import ctc_frames_needed
from sbkit.score import chunk_size
from sbkit.score.latency import COLUMNS, LiveRates, LiveTranscript, live_transcript, rates
from sbkit.tasks.recognise.acoustic_model import AcousticModel
from sbkit.tasks.recognise.decoding import DecoderScores, Decoding
from sbkit.tasks.recognise.keys import EncoderKeys
from sbkit.tasks.recognise.spelling import frame_seconds
from sbkit.tasks.recognise.transcripts import ASRResults, NBestEntry, TranscribedUtterance, nbest_entries


class PartialTranscript(NamedTuple):
    """A transcript of an utterance up to some chunk."""

    text: str
    confidence: float | None
    nbest: Sequence[NBestEntry] = ()  # of a whole utterance: a stream has only one transcript


def _greedy_partials(spans: TokenSpans, cuts: Sequence[int], spelling: Spelling) -> list[PartialTranscript]:
    """The transcripts up to each cut of tokens that were decoded greedily; each is final from its first frame on."""
    starts = spans.starts.tolist()
    confidence = float(spans.confidence.mean()) if len(spans) else None
    texts = [spelling.text(spans.take(slice(bisect_left(starts, cut)))) for cut in cuts]
    return [PartialTranscript(text, confidence) for text in texts]


def _stream_partials(search: TokenSearch, scores: np.ndarray, cuts: Sequence[int],
                     spelling: Spelling) -> list[PartialTranscript]:
    """The transcripts up to each cut of a stream's search, which ends with the utterance's last chunk.

    scores : [T, ...] of the utterance
    """
    stream = search.stream(spelling)
    settled: list[Word] = []
    partials = []
    for start, end in pairwise([0, *cuts]):
        results = stream.feed(scores[start:end])
        if end == cuts[-1]:
            results.append(stream.finish())
        settled += [word for result in results for word in result.settled]
        words = settled + results[-1].partial
        confidence = sum(word.confidence for word in words) / len(words) if words else None
        partials.append(PartialTranscript(spelling.join(words), confidence))
    return partials


class LiveTest:
    """Transcribes each utterance of a test in chunks of several sizes.

    The encoder computes all chunks of a batch at once, with the same scores as on a stream. The transcript after each
    chunk is that of a stream's search on the scores so far.

    acoustic_model, keys, decoding : of the model that is tested
    chunk : sizes in milliseconds; None is the whole utterance. The first one's transcripts are the test's
    """

    def __init__(self, acoustic_model: AcousticModel, keys: EncoderKeys, decoding: Decoding,
                 chunk: Sequence[int | None]):
        if keys.chunks is None:
            raise SbkitError("no-chunks",
                             "--chunk needs a model that was trained in chunks, but the recipe has no chunks",
                             key="chunk", hint="train one with hparams/streaming.yaml, or leave out --chunk")
        self.acoustic_model = acoustic_model
        self.keys = keys
        self.decoding = decoding
        self.chunk = tuple(chunk)
        self.frame_seconds = frame_seconds(acoustic_model, keys)
        sizes = keys.chunks.in_milliseconds(self.frame_seconds)
        self.configs: dict[int | None, ChunkConfig | None] = {}
        """The context of frames with chunks of each size; None: the whole utterance."""
        for one in (*self.chunk, None):
            if one is not None and one not in sizes:
                raise SbkitError("untrained-chunk", f"--chunk {one}: the model wasn't trained for chunks of {one} ms",
                                 key="chunk", value=one, hint="it was trained for "
                                 f"{', '.join(map(str, sorted(sizes)))} and {chunk_size.WHOLE}")
            self.configs[one] = None if one is None else keys.chunks.config(sizes[one])

    def scores(self, feats: Tensor, frames: Tensor, first: DecoderScores) -> list[DecoderScores]:
        """Compute the scores of features [B, T', F] for each size in order, and for whole utterances at the end.

        first : the scores of the first size
        """
        found: dict[int | None, DecoderScores] = {self.chunk[0]: first}
        for chunk, config in self.configs.items():
            if chunk not in found:
                encoded, _ = self.acoustic_model.encode(feats, frames, config)
                found[chunk] = self.decoding.scores(encoded)
        return [found[chunk] for chunk in (*self.chunk, None)]

    def partials(self, scores: DecoderScores, frames: Tensor, cuts: Sequence[Sequence[int]], search: TokenSearch | None,
                 spelling: Spelling, live: bool) -> list[list[PartialTranscript]]:
        """Transcribe each utterance of a batch up to each of its ``cuts``, the last of which is its end.

        search : finds the transcripts; None: they are decoded greedily
        live : decode as a stream, whose words settle; False: there is one cut, and the whole utterance is known
        """
        inputs = self.decoding.search_input(scores)
        if search is None:
            decoded = self.decoding.greedy(inputs, frames)
            return [_greedy_partials(spans, ends, spelling) for spans, ends in zip(decoded, cuts, strict=True)]
        if not live:
            return [[PartialTranscript(best[0].text, best[0].confidence, nbest_entries(best))]
                    for best in search.decode(inputs, frames)]
        rows = inputs.cpu().numpy()
        return [_stream_partials(search, row, ends, spelling) for row, ends in zip(rows, cuts, strict=True)]

    def rows(self, scores: Sequence[DecoderScores], frames: Tensor, batch: Batch,
             search: TokenSearch | None, spelling: Spelling) -> Iterator[TranscribedUtterance]:
        """Yield the row of each utterance, with the transcripts after each chunk of each size.

        scores : as returned by :meth:`scores`
        frames : [B], frames of each utterance
        search : as for :meth:`partials`
        spelling : how the model's tokens are written
        """
        ctc = self.decoding.ctc_scores(scores[-1])
        word_ends: list[list[float] | None] = [None] * len(batch.ids)
        if ctc is not None:
            word_ends = self._word_ends(ctc.float().log_softmax(-1), frames, batch)
        seconds = (batch.signal_lengths / self.keys.sample_rate).tolist()
        live_transcripts: list[list[LiveTranscript]] = [[] for _ in batch.ids]
        finals: list[PartialTranscript] = []
        for chunk, chunk_scores in zip(self.chunk, scores, strict=False):
            config = self.configs[chunk]
            ahead = 0 if config is None else config.ahead
            # The number of final frames after each chunk.
            cuts = [[count] for count in frames.tolist()]
            if config is not None:
                shift = config.chunk_size - ahead
                cuts = [[*range(shift, count - ahead, shift), count] for count in frames.tolist()]
            partials = self.partials(chunk_scores, frames, cuts, search, spelling, config is not None)
            for i, transcripts in enumerate(partials):
                times = [min((cut + ahead) * self.frame_seconds, seconds[i]) for cut in cuts[i][:-1]] + [seconds[i]]
                texts = [one.text for one in transcripts]
                live_transcripts[i].append(live_transcript(texts, times, batch.texts[i].split(), word_ends[i]))
            if not finals:
                finals = [transcripts[-1] for transcripts in partials]
        for name, reference, final, live in zip(batch.ids, batch.texts, finals, live_transcripts, strict=True):
            yield TranscribedUtterance(name, reference, final.text, final.confidence, final.nbest, tuple(live))

    def _word_ends(self, log_probs: Tensor, frames: Tensor, batch: Batch) -> list[list[float] | None]:
        """Return when each word of a text ends, by the model's own alignment; None if it can't be aligned.

        That is if a word has no token, or the text has more tokens than there are frames.
        """
        lengths = batch.token_lengths
        fits = ((ctc_frames_needed(batch.tokens, lengths) <= frames) & (lengths > 0)).cpu()
        rows = fits.nonzero()[:, 0]
        found: list[list[float] | None] = [None] * len(batch.ids)
        if not len(rows):
            return found
        index = rows.to(log_probs.device)
        aligned = align(log_probs[index], frames[index], batch.tokens[index], lengths[index],
                        self.keys.blank_index, [batch.ids[i] for i in rows.tolist()])
        # Of a known text: only its marks end a word.
        spelling = Spelling(self.keys.tokenizer.pieces(), self.frame_seconds, silent=(), pause_seconds=math.inf)
        for i, spans in zip(rows.tolist(), aligned, strict=True):
            aligned_words = spelling.words(spans)
            if len(aligned_words) == len(batch.texts[i].split()):
                found[i] = [word.end for word in aligned_words]
        return found


@dataclass
class LiveResults(ASRResults):
    """Rows of a test in chunks of several sizes; the transcripts are those of the first."""

    chunk: Sequence[int | None] = field(kw_only=True)
    """Milliseconds of each size in the rows' ``live``; None is the whole utterance."""

    @cached_property
    def live(self) -> list[LiveRates]:
        """The rates with chunks of each size."""
        scored = [row for row in self.rows if row.reference.split()]
        references = [(row.id, row.reference) for row in scored]
        return [rates(chunk, references, [row.live[number] for row in scored])
                for number, chunk in enumerate(self.chunk)]

    def facts(self) -> dict[str, Any]:
        return {**super().facts(), "chunks": [rates_of_size.facts() for rates_of_size in self.live]}

    def table_rows(self) -> list[list[tuple[str, Any]]]:
        return [list(zip(COLUMNS, rates_of_size.row(), strict=True)) for rates_of_size in self.live]

    def figures(self, name: str) -> Mapping[str, float]:
        if name != "WER":
            return super().figures(name)
        return {f"(chunk: {chunk_size.to_label(size.chunk)})": size.WER for size in self.live}
