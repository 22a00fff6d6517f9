"""SpecAugment: masks of the right size and place, padding untouched, nothing asked of the device."""

from __future__ import annotations

import pytest
import torch
from host_syncs import HostSyncs

from sbkit.nn.spec_augment import SpecAugment

LENGTHS = torch.tensor([200, 150, 60, 7, 1])


def features(batch: int = 5, time: int = 200, bands: int = 80) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(batch, time, bands) + 3


def masked(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    return before != after


@pytest.mark.parametrize(("ramp", "strengths"), [
    ([0.4, 0.8], [0.0, 0.0, 0.25, 1.0, 1.0]), ([0.5, 0.5], [0.0, 0.0, 1.0, 1.0, 1.0]), ([0.0, 0.0], [1.0] * 5),
    ([1.0, 1.0], [0.0, 0.0, 0.0, 0.0, 1.0]), (None, [1.0] * 5)])
def test_masks_widen_along_the_ramp_which_may_be_a_single_step(ramp, strengths):
    module = SpecAugment(ramp=ramp)
    found = []
    for score in (0.0, 0.4, 0.5, 0.8, 1.0):
        module.set_score(score)
        found.append(module.strength)
    assert found == pytest.approx(strengths)


def test_evaluation_changes_nothing():
    module, feats = SpecAugment(time_warp=5).eval(), features()
    assert module(feats, LENGTHS) is feats
    assert not list(module.parameters()) and not module.state_dict()


def test_padding_comes_out_as_it_went_in():
    feats = features()
    for options in ({}, {"time_warp": 20}, {"fill": "zero"}):
        out = SpecAugment(**options)(feats, LENGTHS)
        for row, length in enumerate(LENGTHS.tolist()):
            assert torch.equal(out[row, length:], feats[row, length:])


def test_time_masks_are_whole_frames_of_at_most_their_share():
    module, feats = SpecAugment(time_masks=3, time_share=0.1, frequency_masks=0), features()
    widest = torch.zeros(5)
    for _ in range(200):
        hit = masked(feats, module(feats, LENGTHS))
        assert torch.equal(hit.any(2), hit.all(2))
        widest = torch.maximum(widest, hit.any(2).sum(1))
    assert (widest <= 3 * (0.1 * LENGTHS).floor()).all()
    assert widest[0] > 30 and widest[3] == widest[4] == 0


def test_one_time_mask_is_one_stretch_and_reaches_every_frame():
    module = SpecAugment(time_masks=1, time_share=0.5, frequency_masks=0)
    feats = features(400, 20, 4)
    hit = masked(feats, module(feats)).any(2)
    edges = (hit[:, 1:] != hit[:, :-1]).sum(1) + hit[:, 0].int() + hit[:, -1].int()
    assert set(edges.tolist()) <= {0, 2}
    assert hit.any(0).all() and hit.sum(1).max() == 10 and hit.sum(1).min() == 0


def test_frequency_masks_are_whole_bands_of_at_most_their_width():
    module, feats = SpecAugment(time_masks=0, frequency_masks=2, frequency_width=10), features()
    widest = 0
    for _ in range(100):
        hit = masked(feats, module(feats, LENGTHS))
        for row, length in enumerate(LENGTHS.tolist()):
            assert torch.equal(hit[row, :length].any(0), hit[row, :length].all(0))
        widest = max(widest, int(hit.any(1).sum(1).max()))
    assert 12 < widest <= 20
    assert SpecAugment(time_masks=0, frequency_width=500)(feats, LENGTHS).shape == feats.shape


def test_utterances_are_masked_differently():
    feats = features(8)
    hit = masked(feats, SpecAugment()(feats)).flatten(1)
    assert all(not torch.equal(hit[i], hit[j]) for i in range(8) for j in range(i))


def test_masks_hold_the_mean_of_the_utterance_or_zero():
    feats = features()
    out = SpecAugment()(feats, LENGTHS)
    hit = masked(feats, out)
    for row, length in enumerate(LENGTHS.tolist()):
        expected = feats[row, :length].mean()
        assert torch.allclose(out[row][hit[row]], expected, atol=1e-4)
    out = SpecAugment(fill="zero")(feats, LENGTHS)
    assert not out[masked(feats, out)].any()


def test_a_warp_moves_frames_by_at_most_its_reach_and_keeps_their_order():
    ramp = torch.arange(200.0)[None, :, None].expand(300, 200, 2).contiguous()
    lengths = torch.randint(1, 201, (300,))
    lengths[:4] = torch.tensor([1, 2, 3, 200])
    out = SpecAugment(time_masks=0, frequency_masks=0, time_warp=10)(ramp, lengths)
    assert torch.isfinite(out).all()
    moved = (out - ramp).abs().amax((1, 2))
    assert moved.max() <= 10.01 and moved[lengths > 60].median() > 2
    for row, length in enumerate(lengths.tolist()):
        line = out[row, :length, 0]
        assert (line.diff() >= -1e-4).all() and line[0] == 0 and abs(line[-1] - (length - 1)) < 0.05


def test_the_same_generator_state_gives_the_same_masks():
    feats, module = features(), SpecAugment(time_warp=5)
    outs = []
    for _ in range(2):
        torch.manual_seed(3)
        outs.append(module(feats, LENGTHS))
    assert torch.equal(*outs) and not torch.equal(outs[0], module(feats, LENGTHS))


def test_nothing_is_fetched_from_the_device():
    with HostSyncs() as syncs:
        SpecAugment(time_warp=5)(features(), LENGTHS)
    assert not syncs.found, syncs.found
    out = SpecAugment(time_warp=5)(features().to("meta"), LENGTHS.to("meta"))
    assert out.shape == (5, 200, 80)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_type_stays(dtype):
    out = SpecAugment(time_warp=5)(features().to(dtype), LENGTHS)
    assert out.dtype == dtype and torch.isfinite(out).all()


def test_gradients_flow_through_what_is_not_masked():
    feats = features().requires_grad_()
    module = SpecAugment(fill="zero")
    out = module(feats, LENGTHS)
    out.sum().backward()
    assert torch.equal(feats.grad == 0, masked(feats.detach(), out.detach()))


@pytest.mark.parametrize("given, told", [
    ({"time_share": 5}, "time_share is 5"), ({"time_masks": -1}, "must not be below 0"),
    ({"fill": "noise"}, "fill is 'noise'"), ({"ramp": [0.5, 0.1]}, "ramp is"), ({"ramp": [0.5]}, "ramp is"),
])
def test_mistakes_are_refused(given, told):
    with pytest.raises(ValueError, match=told):
        SpecAugment(**given)
