"""Where each token of a transcript begins and ends, and how likely it is there."""

import numpy as np
import pytest

from sbkit.decode.posteriors import Events, spans_of

LABELS = 5


def utterances(drawn):
    """Events of some utterances, and a transcript of each that begins its tokens at some of them."""
    frames, runs, first, begin, likely, probs, tokens, events = [], [], [0], [0], [], [], [], []
    for _ in range(drawn.integers(1, 5)):
        frame, before, count = 0, len(frames), drawn.integers(0, 40)
        for _ in range(count):
            frame += drawn.random() < 0.1  # a blank is between
            frames.append(frame)
            runs.append(int(drawn.choice([1, 1, 1, 3])))
            frame += runs[-1]
            likely += sorted(drawn.choice(np.arange(1, LABELS), drawn.integers(1, LABELS), replace=False))
            begin.append(len(likely))
        first.append(len(frames))
        events.append(np.sort(drawn.choice(np.arange(before, before + count), min(count, 4), replace=False)))
        tokens.append(drawn.integers(1, LABELS, len(events[-1])))
    probs, blank = drawn.random(len(likely)), 0.5 * drawn.random(len(frames))
    return Events(np.array(first), np.zeros(len(first) - 1), np.array(frames), np.array(runs),
                  np.zeros(len(frames), bool), blank, np.array(begin), np.array(likely, np.int32), probs,
                  LABELS), tokens, events


def followed(batch, token, event, limit):
    """The end and the confidence of one token, from event to event."""
    def prob(event):
        here = slice(batch.begin[event], batch.begin[event + 1])
        return dict(zip(batch.token[here].tolist(), batch.prob[here].tolist(), strict=True)).get(token, 0.0)

    mass, frames, at = prob(event) * batch.run[event], batch.run[event], event + 1
    while at < limit and batch.frame[at] == batch.frame[at - 1] + batch.run[at - 1] and \
            0 < prob(at) >= batch.blank[at]:
        mass, frames, at = mass + prob(at) * batch.run[at], frames + batch.run[at], at + 1
    return batch.frame[event] + frames, np.float32(mass / frames)


@pytest.mark.parametrize("seed", range(40))
def test_a_token_lasts_while_no_blank_comes_between_or_is_likelier(seed):
    batch, tokens, events = utterances(np.random.default_rng(seed))
    for i, found in enumerate(spans_of(batch, tokens, events)):
        limits = [*events[i], batch.first[i + 1]][1:]
        expected = [followed(batch, *each) for each in zip(tokens[i].tolist(), events[i], limits, strict=True)]
        assert list(zip(found.ends, found.confidence, strict=True)) == expected
        assert found.ids.tolist() == tokens[i].tolist() and found.starts.tolist() == batch.frame[events[i]].tolist()
