"""Greedy decoding equals a loop over frames, whatever else is in the batch, with one copy to the host."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused
from torch.overrides import TorchFunctionMode

from sbkit.decode.greedy import align, greedy


def random_batch(seed, batch=5, frames=40, labels=6, sharpness=3.0):
    generator = torch.Generator().manual_seed(seed)
    scores = sharpness * torch.randn(batch, frames, labels, generator=generator)
    lengths = torch.randint(0, frames + 1, (batch,), generator=generator)
    lengths[0] = frames
    return scores.log_softmax(-1), lengths


def ids(found):
    return [spans.ids.tolist() for spans in found]


def by_hand(log_probs, length, blank=0):
    """(id, start, end, mean probability) of each token, frame by frame."""
    rows = [(int(row.argmax()), float(row.max().exp())) for row in log_probs[:length]]
    found, frame = [], 0
    for label, run in itertools.groupby(rows, key=lambda row: row[0]):
        probabilities = [probability for _, probability in run]
        if label != blank:
            found.append((label, frame, frame + len(probabilities), np.mean(probabilities)))
        frame += len(probabilities)
    return found


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10_000), st.integers(0, 5))
def test_equals_a_loop_over_frames(seed, blank):
    log_probs, lengths = random_batch(seed)
    result = greedy(log_probs, lengths, blank_id=blank)
    for row, spans in enumerate(result):
        expected = by_hand(log_probs[row], int(lengths[row]), blank)
        assert spans.ids.tolist() == [label for label, *_ in expected]
        assert spans.starts.tolist() == [start for _, start, *_ in expected]
        assert spans.ends.tolist() == [end for _, _, end, _ in expected]
        np.testing.assert_allclose(spans.confidence, [p for *_, p in expected], rtol=1e-5)


def test_one_copy_to_the_host_per_batch():
    class Copies(TorchFunctionMode):
        names = ("cpu", "item", "tolist", "__int__", "__bool__", "__float__", "nonzero", "to")
        seen: list[str] = []  # noqa: RUF012

        def __torch_function__(self, function, types, args=(), kwargs=None):
            name = getattr(function, "__name__", "")
            if name in self.names and not (name == "to" and isinstance(args[1], torch.device)):
                self.seen.append(name)
            return function(*args, **(kwargs or {}))

    log_probs, lengths = random_batch(2, batch=16)
    with Copies() as copies:
        greedy(log_probs, lengths)
    assert copies.seen == ["cpu"]


def test_low_precision_and_large_vocabularies_keep_their_ids():
    log_probs = torch.full((1, 3, 70_001), -20.0, dtype=torch.bfloat16)
    for frame, label in enumerate((70_000, 0, 65_537)):
        log_probs[0, frame, label] = 0.0
    assert ids(greedy(log_probs, torch.tensor([3]))) == [[70_000, 65_537]]


def test_what_is_not_a_number_is_named():
    log_probs, lengths = random_batch(4)
    log_probs[2, 0] = float("nan")
    lengths[2] = 5
    with refused("nan-output"):
        greedy(log_probs, lengths)
    lengths[2] = 0
    greedy(log_probs, lengths)  # beyond the end it doesn't matter


def test_relative_lengths_are_refused():
    log_probs, _ = random_batch(5)
    with pytest.raises(ValueError, match="numbers of frames"):
        greedy(log_probs, torch.ones(len(log_probs)))
    with pytest.raises(ValueError, match=r"\[B\]"):
        greedy(log_probs, torch.ones(2, dtype=torch.int64))


def test_no_utterances_and_no_frames():
    assert greedy(torch.zeros(0, 4, 3), torch.zeros(0, dtype=torch.int64)) == []
    assert ids(greedy(torch.zeros(2, 0, 3), torch.zeros(2, dtype=torch.int64))) == [[], []]


def test_align_finds_the_best_of_all_alignments():
    log_probs, _ = random_batch(6, batch=1, frames=6, labels=4, sharpness=1.0)
    target = [2, 2, 1]
    best = max(
        (path for path in itertools.product(range(4), repeat=6)
         if [label for label, _ in itertools.groupby(path) if label] == target),
        key=lambda path: sum(float(log_probs[0, frame, label]) for frame, label in enumerate(path)))
    (spans,) = align(log_probs, torch.tensor([6]), torch.tensor([target]), torch.tensor([3]))
    expected, frame = [], 0
    for label, run in itertools.groupby(best):
        size = len(list(run))
        if label:
            expected.append((label, frame, frame + size))
        frame += size
    assert list(zip(spans.ids.tolist(), spans.starts.tolist(), spans.ends.tolist(), strict=True)) == expected
    probability = [log_probs[0, start:end, label].exp().mean() for label, start, end in expected]
    np.testing.assert_allclose(spans.confidence, probability, rtol=1e-5)


def test_align_in_a_batch_equals_each_alone():
    log_probs, _ = random_batch(7, batch=3)
    lengths, targets = torch.tensor([40, 9, 20]), torch.tensor([[1, 2, 3, 4], [5, 5, 0, 0], [0, 0, 0, 0]])
    sizes = torch.tensor([4, 2, 0])
    together = align(log_probs, lengths, targets, sizes)
    assert ids(together) == [[1, 2, 3, 4], [5, 5], []]
    for i in range(3):
        alone = align(log_probs[i:i + 1, :lengths[i]], lengths[i:i + 1], targets[i:i + 1], sizes[i:i + 1])[0]
        np.testing.assert_array_equal(alone.starts, together[i].starts)
        np.testing.assert_array_equal(alone.confidence, together[i].confidence)


def test_align_names_every_transcript_that_cannot_fit():
    log_probs, _ = random_batch(8, batch=3)
    targets = torch.tensor([[1, 1, 1], [1, 2, 3], [0, 1, 2]])
    with refused("unalignable-transcript") as error:
        align(log_probs, torch.tensor([4, 3, 9]), targets, torch.tensor([3, 3, 3]), ids=["u1", "u2", "u3"])
    assert "u1 (its 3 tokens need 5 frames, but it has 4)" in str(error.value)
    assert "u3 (a token is the blank" in str(error.value) and "u2" not in str(error.value)
