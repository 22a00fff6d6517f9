"""Masked spans: as many and as long as asked for, within an utterance, drawn by torch."""

import pytest
import torch
from refusals import refused

from sbkit.nn.pretrained.networks import MaskSpans, mask


def runs(row):
    """The lengths of the stretches of True."""
    found, length = [], 0
    for value in [*row.tolist(), False]:
        if value:
            length += 1
        elif length:
            found.append(length)
            length = 0
    return found


def test_spans_have_their_length_and_lie_within_the_utterance():
    torch.manual_seed(0)
    counts = torch.tensor([200, 57, 10, 9, 1])
    for _ in range(50):
        drawn = MaskSpans(0.3, 10, 2).draw(counts, 220)
        assert all(length >= 10 for row in drawn for length in runs(row))
        for row, count in zip(drawn, counts.tolist(), strict=True):
            assert not row[count:].any()
        assert drawn[2, :10].all() and not drawn[3:].any(), "one place for a span of ten, and none"


def test_as_much_is_masked_as_asked_for():
    torch.manual_seed(0)
    counts = torch.full((400,), 500)
    assert MaskSpans(0.05, 10).draw(counts, 500).float().mean() == pytest.approx(0.05, abs=0.005)
    many = MaskSpans(0.65, 10).draw(counts, 500).float().mean()  # spans that lie on each other
    assert 0.4 < many < 0.55


def test_the_share_is_right_on_average_where_it_is_less_than_a_span():
    torch.manual_seed(0)
    drawn = MaskSpans(0.05, 10).draw(torch.full((4000,), 50), 50)
    assert drawn.float().mean() == pytest.approx(0.05, abs=0.005)


def test_there_are_at_least_as_many_as_asked_for():
    torch.manual_seed(0)
    drawn = MaskSpans(0.001, 4, 2).draw(torch.full((100,), 400), 400)
    assert all(runs(row) in ([4, 4], [5], [6], [7], [8]) for row in drawn)


def test_no_mask_draws_no_numbers():
    states = torch.randn(2, 30, 8)
    before = torch.get_rng_state()
    found = mask(states, torch.tensor([30, 20]), MaskSpans(0.0, 10, 2), MaskSpans(0.0, 10))
    assert found is states and torch.equal(torch.get_rng_state(), before)


def test_masked_frames_become_the_filling_and_masked_features_nothing():
    torch.manual_seed(0)
    states, fill = torch.randn(2, 60, 8), torch.arange(8.0)
    found = mask(states, torch.tensor([60, 40]), MaskSpans(0.5, 5), MaskSpans(0.0, 2), fill)
    changed = (found != states).any(-1)
    assert changed.any() and torch.equal(found[changed], fill.expand(int(changed.sum()), 8))
    found = mask(states, torch.tensor([60, 40]), MaskSpans(0.0, 5), MaskSpans(0.4, 2))
    zero = (found == 0).all(1)
    assert zero.any() and torch.equal(found.transpose(1, 2)[~zero], states.transpose(1, 2)[~zero])


@pytest.mark.parametrize("share, length, key", [(1.5, 10, "mask_time_prob"), (0.1, 0, "mask_time_length")])
def test_values_out_of_range_are_refused(share, length, key):
    with refused("bad-value", key=key):
        MaskSpans.of({}, "time", share, length)
    with refused("bad-value", key=key):
        MaskSpans.of({"mask_time_prob": share, "mask_time_length": length}, "time", None, None)


def test_what_a_recipe_does_not_say_the_config_does():
    config = {"mask_time_prob": 0.075, "mask_time_length": 7, "mask_time_min_masks": 1}
    assert MaskSpans.of(config, "time", None, None) == MaskSpans(0.075, 7, 1)
    assert MaskSpans.of(config, "time", 0.2, 5) == MaskSpans(0.2, 5, 1)
    assert MaskSpans.of({}, "feature", None, None) == MaskSpans(0.0, 10, 0)
    assert MaskSpans.of({**config, "apply_spec_augment": False}, "time", None, None).share == 0, "as Whisper's says"
