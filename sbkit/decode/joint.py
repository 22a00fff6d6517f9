"""Joint search with an attention decoder and CTC, for models trained with both.

A hypothesis grows by one token at a time. Each is scored by the decoder and by CTC's prefix probability, which sums
all paths that begin with these tokens. The probabilities of a prefix over time follow a linear recurrence, solved for
all frames at once by a cumulative sum; those of all its continuations are one matrix product.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from sbkit.decode.greedy import align
from sbkit.decode.posteriors import near_speech
from sbkit.decode.spans import Spelling, TokenSpans, check_shapes, refuse_nan
from sbkit.decode.token_search import Hypothesis
from sbkit.errors import SbkitError

if TYPE_CHECKING:
    from sbkit.data.tokens import Tokenizer

Step = Callable[[Tensor, Tensor], Tensor]
_IMPOSSIBLE = -1e30  # a log-probability; finite, so that the difference of two is not NaN
_SILENT = -1e4  # CTC's log-probability of a token where nobody speaks: no decoder is so sure of one
_POSSIBLE = -1e20  # scores above this are of real hypotheses


@dataclass
class _Beams:
    """K hypotheses for each of B unfinished utterances. Of T + 1 frames, frame 0 is before the first."""

    ctc: Tensor  # [B, T, V] log-probabilities
    probs: Tensor  # [B, T, V] the same as probabilities
    lengths: Tensor  # [B]
    tokens: Tensor  # [B, K, 1 + U], the start token first
    blank: Tensor  # [B, K, T + 1] log-probability of the paths up to a frame that end in a blank
    other: Tensor  # [B, K, T + 1] the same for paths that end in the last token
    attention: Tensor  # [B, K] the decoder's log-probability
    score: Tensor  # [B, K]

    def take(self, rows: Tensor) -> _Beams:
        return _Beams(*(getattr(self, field.name)[rows] for field in fields(self)))

    @property
    def size(self) -> int:
        return self.tokens.shape[2] - 1


class _Finished(NamedTuple):
    """A transcript that has ended."""

    score: float
    ctc: float  # CTC's log-probability
    tokens: tuple[int, ...]


class JointSearch:
    """Search for the best transcripts of a batch with an attention decoder and CTC.

    A transcript's score is ``ctc_weight`` times CTC's log-probability of its tokens, plus 1 - ``ctc_weight`` times
    the decoder's of the tokens and the end, plus ``token_score`` per token. The search of an utterance ends when no
    hypothesis can beat those that are finished.

    tokenizer : the model's tokenizer; can be set later
    beam : hypotheses kept per utterance
    ctc_weight : above 0, up to 1; CTC keeps the decoder from stopping early and from repeating itself
    nbest : transcripts per utterance
    """

    def __init__(self, tokenizer: Tokenizer | None = None, beam: int = 10, ctc_weight: float = 0.4, nbest: int = 1,
                 token_score: float = 0.0, blank_id: int = 0, bos_id: int = 1, eos_id: int = 2):
        for name, value in (("beam", beam), ("nbest", nbest)):
            if not isinstance(value, int) or value < 1:
                raise SbkitError("bad-value", f"joint search: {name} is {value!r}",
                                 hint="use a whole number of at least 1", key=name, value=value)
        if not 0 < ctc_weight <= 1:
            raise SbkitError("bad-value", f"joint search: ctc_weight is {ctc_weight}",
                             hint="use a value above 0 and up to 1, such as 0.4", key="ctc_weight", value=ctc_weight)
        self.tokenizer: Any = tokenizer  # a Tokenizer when a search begins
        self.model_spelling: Spelling | None = None
        """How the model's tokens are written. None: the length of a frame is unknown, so pauses end no word."""
        self.beam = max(beam, nbest)
        self.nbest = nbest
        self.ctc_weight = float(ctc_weight)
        self.token_score = float(token_score)
        self.blank_id = blank_id
        self.bos_id = bos_id
        self.eos_id = eos_id

    @torch.no_grad()
    def decode(self, log_probs: Tensor, lengths: Tensor, step: Step) -> list[list[Hypothesis]]:
        """The ``nbest`` transcripts of each utterance, best first.

        log_probs : [B, T, V] CTC's log-probabilities
        lengths : [B] frames of each utterance, integers
        step : the decoder: maps tokens [N, U] that begin with bos, and their rows [N] in the batch, to
            log-probabilities [N, V] of the next token
        """
        check_shapes(log_probs, lengths)
        log_probs = self._silenced(log_probs, lengths)
        finished = self._search(log_probs, lengths, step)

        # The spans of their tokens are those of CTC's alignment.
        utterance = [number for number, transcripts in enumerate(finished) for _ in transcripts]
        tokens = [torch.tensor(transcript.tokens, dtype=torch.int64)
                  for transcripts in finished for transcript in transcripts]
        if not tokens:
            return [[] for _ in finished]
        spans = iter(align(log_probs[utterance], lengths[utterance],
                           torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True),
                           torch.tensor(list(map(len, tokens))), self.blank_id))
        return [[self._hypothesis(transcript, next(spans)) for transcript in transcripts] for transcripts in finished]

    def _silenced(self, log_probs: Tensor, lengths: Tensor) -> Tensor:
        """Make frames that are far from speech, as in ``near_speech``, blanks."""
        outside = torch.arange(log_probs.shape[1], device=lengths.device) >= lengths[:, None]
        log_probs = log_probs.masked_fill(outside[..., None], 0.0)  # values beyond the end are arbitrary
        refuse_nan(log_probs.sum(-1).cpu().numpy())
        spoken = (log_probs.amax(-1) > log_probs[..., self.blank_id]).cpu().numpy()
        silent = torch.from_numpy(~near_speech(spoken)).to(log_probs.device)[..., None]
        blank = torch.arange(log_probs.shape[-1], device=log_probs.device) == self.blank_id
        return log_probs.masked_fill(silent & ~blank, _SILENT).masked_fill(silent & blank, 0.0)

    def _search(self, log_probs: Tensor, lengths: Tensor, step: Step) -> list[list[_Finished]]:
        """The best transcripts of each utterance."""
        finished: list[list[_Finished]] = [[] for _ in range(len(lengths))]
        rows = torch.arange(len(lengths), device=log_probs.device)  # of utterances that go on
        beams = self._begin(log_probs, lengths)
        while len(rows):
            following = step(beams.tokens.flatten(0, 1), rows.repeat_interleave(self.beam))
            following = following.double().view(len(rows), self.beam, -1)
            finished_of_rows = [finished[row] for row in rows.tolist()]
            self._finish(beams, following[..., self.eos_id], finished_of_rows)
            beams = self._extend(beams, following)

            # An utterance goes on while one of its hypotheses may still beat the finished ones.
            bound = beams.score.amax(1) + max(0.0, self.token_score) * (beams.lengths - beams.size)
            to_beat = [transcripts[-1].score if len(transcripts) == self.nbest else _POSSIBLE
                       for transcripts in finished_of_rows]
            active = bound > torch.tensor(to_beat, dtype=bound.dtype, device=bound.device)
            active &= beams.size <= beams.lengths
            if not active.all():
                rows = rows[active]
                beams = beams.take(active)
        return finished

    def _hypothesis(self, transcript: _Finished, spans: TokenSpans) -> Hypothesis:
        if self.model_spelling is None:
            text = self.tokenizer.decode(transcript.tokens)
        else:
            text = self.model_spelling.text(spans)
        return Hypothesis(text, transcript.score, transcript.ctc, spans)

    def _begin(self, log_probs: Tensor, lengths: Tensor) -> _Beams:
        ctc = log_probs.double().clamp_min(-1e4)
        blanks = torch.nn.functional.pad(ctc[..., self.blank_id].cumsum(1), (1, 0))
        blank = blanks[:, None].repeat(1, self.beam, 1)
        score = ctc.new_full((len(ctc), self.beam), _IMPOSSIBLE)
        score[:, 0] = 0.0  # there is only one first hypothesis
        tokens = torch.full((len(ctc), self.beam, 1), self.bos_id, device=ctc.device)
        return _Beams(ctc, ctc.exp(), lengths, tokens, blank, torch.full_like(blank, _IMPOSSIBLE),
                      torch.zeros_like(score), score)

    def _finish(self, beams: _Beams, end: Tensor, finished: list[list[_Finished]]) -> None:
        """End every hypothesis with the decoder's log-probability ``end`` [B, K], and add the best to ``finished``."""
        last = beams.lengths[:, None, None].expand(-1, self.beam, 1)
        ctc = torch.logaddexp(beams.blank.gather(2, last), beams.other.gather(2, last))[..., 0]
        score = self._combine(ctc, beams.attention + end, beams.size).where(beams.score > _POSSIBLE, _IMPOSSIBLE)
        scores = score.tolist()
        ctc_scores = ctc.tolist()
        token_lists = beams.tokens[..., 1:].tolist()
        for utterance, transcripts in enumerate(finished):
            for place, tokens in enumerate(token_lists[utterance]):
                if scores[utterance][place] > _POSSIBLE:
                    transcripts.append(_Finished(scores[utterance][place], ctc_scores[utterance][place],
                                                 tuple(tokens)))
            transcripts.sort(key=lambda transcript: -transcript.score)
            del transcripts[self.nbest:]

    def _combine(self, ctc: Tensor, attention: Tensor, tokens: int) -> Tensor:
        return self.ctc_weight * ctc + (1 - self.ctc_weight) * attention + self.token_score * tokens

    def _extend(self, beams: _Beams, following: Tensor) -> _Beams:
        """Keep the best hypotheses with one more token, given the decoder's log-probabilities [B, K, V]."""
        batch, frames, labels = beams.ctc.shape
        outside = (torch.arange(frames, device=beams.ctc.device) >= beams.lengths[:, None])[:, None]
        total = torch.logaddexp(beams.blank, beams.other)
        last = beams.tokens[..., -1]

        # The probability that a continuation begins in any frame, after all tokens before it.
        before = total[..., :-1].masked_fill(outside, _IMPOSSIBLE)
        peak = before.amax(-1, keepdim=True)
        prefix = torch.matmul((before - peak).exp(), beams.probs).log() + peak
        repeat = beams.blank[..., :-1].masked_fill(outside, _IMPOSSIBLE) + _log_probs_of(beams.ctc, last)
        prefix.scatter_(2, last[..., None], repeat.logsumexp(-1, keepdim=True))
        attention = beams.attention[..., None] + following
        score = self._combine(prefix.clamp_min(_IMPOSSIBLE), attention, beams.size + 1)
        score[..., [self.blank_id, self.bos_id, self.eos_id]] = _IMPOSSIBLE
        score = score.masked_fill((beams.score <= _POSSIBLE)[..., None], _IMPOSSIBLE)
        score, place = score.flatten(1).topk(self.beam, dim=1)
        parent = place // labels
        token = place % labels

        utterance = torch.arange(batch, device=place.device)[:, None]
        repeats = token == last[utterance, parent]
        # The new token may begin after any path of the prefix, but a repeated token only after a blank.
        preceding = beams.blank[utterance, parent].where(repeats[..., None], total[utterance, parent])
        other = _recur(_log_probs_of(beams.ctc, token), preceding)
        return replace(
            beams,
            tokens=torch.cat([beams.tokens[utterance, parent], token[..., None]], 2),
            other=other,
            blank=_recur(beams.ctc[:, None, :, self.blank_id].expand(-1, self.beam, -1), other),
            attention=attention.flatten(1).gather(1, place),
            score=score,
        )


def _log_probs_of(ctc: Tensor, tokens: Tensor) -> Tensor:
    """Gather log-probabilities [B, K, T] of tokens [B, K] from [B, T, V]."""
    return ctc.gather(2, tokens[:, None].expand(-1, ctc.shape[1], -1)).transpose(1, 2)


def _recur(token: Tensor, before: Tensor) -> Tensor:
    """Logarithms of p[t] = token[t] (p[t - 1] + before[t - 1]) and p[0] = 0: [..., T], [..., T + 1] -> [..., T + 1].

    Divided by the product of ``token`` up to t, the recurrence is a plain sum.
    """
    product = torch.nn.functional.pad(token.cumsum(-1), (1, 0))
    summed = torch.logcumsumexp(before[..., :-1] - product[..., :-1], -1) + product[..., 1:]
    return torch.nn.functional.pad(summed, (1, 0), value=_IMPOSSIBLE)
