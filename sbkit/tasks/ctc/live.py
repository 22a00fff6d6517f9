"""A test of CTC in chunks: what greedy decoding or a beam search shows of a stream after each of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor

from sbkit.decode.beam import BeamSearch
from sbkit.decode.beam_stream import BeamStream
from sbkit.decode.greedy import greedy
from sbkit.decode.spans import Word
from sbkit.tasks.asr import choices
from sbkit.tasks.recognise.live import LiveTest, Text


class Live(LiveTest):
    """Hears each utterance of a test in chunks of each size that was asked for."""

    def texts(self, scores: Tensor, frames: Tensor, cuts: Sequence[Sequence[int]], search: BeamSearch | None,
              live: bool) -> list[list[Text]]:
        log_probs = scores.float().log_softmax(-1)
        if search is None:
            return self.beginnings(greedy(log_probs, frames, blank_id=self.keys.blank_index), cuts)
        if live:
            return self._by_streams(search, log_probs, cuts)
        return [[Text(best[0].text, best[0].confidence, choices(best))]
                for best in search.decode(log_probs, frames)]

    def _by_streams(self, search: BeamSearch, log_probs: Tensor, cuts: Sequence[Sequence[int]]) -> list[list[Text]]:
        """Search utterances as streams, each of which is over with its last chunk."""
        stream, grown = BeamStream(search, search.spelling(self.frame_seconds)), []
        for scores, ends in zip(log_probs.cpu().numpy(), cuts, strict=True):
            stream.reset()
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


def _shown(words: Sequence[Word], space: str) -> Text:
    confidence = sum(word.confidence for word in words) / len(words) if words else None
    return Text(space.join(word.text for word in words), confidence)
