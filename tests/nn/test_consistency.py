"""The consistency of two views: its value by hand, its gradient on one side only, and no word about padding."""

import torch
from torch.nn.functional import kl_div

from sbkit.nn.ctc import consistency


def views(seed=0):
    return torch.randn(4, 6, 5, generator=torch.Generator().manual_seed(seed)).log_softmax(-1)


def test_it_is_the_divergence_of_each_from_the_other():
    log_probs, frames = views(), torch.tensor([6, 4, 6, 4])
    (first, second), lengths = log_probs.chunk(2), frames[:2]
    expected = sum(
        kl_div(a[i, :n], b[i, :n], log_target=True, reduction="sum")
        for a, b in ((first, second), (second, first)) for i, n in enumerate(lengths)
    )
    torch.testing.assert_close(consistency(log_probs, frames), expected)


def test_views_that_agree_cost_nothing():
    one = views()[:2]
    assert consistency(torch.cat([one, one]), torch.tensor([6, 4, 6, 4])) == 0


def test_padding_has_no_gradient_and_targets_have_none():
    scores = torch.randn(4, 6, 5, requires_grad=True)
    consistency(scores.log_softmax(-1), torch.tensor([6, 4, 6, 4])).backward()
    assert scores.grad[1, 4:].abs().max() == 0 and scores.grad[1, :4].abs().min() > 0
    # A target without a gradient: each row's gradient is its probabilities minus the other view's.
    one, other = scores.detach().softmax(-1).chunk(2)
    torch.testing.assert_close(scores.grad[0], (one - other)[0])
