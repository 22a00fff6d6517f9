"""Global normalisation: what it computes, and what it says before it knows anything."""

import torch
from refusals import refused

from sbkit.nn.global_norm import GlobalNorm


def known(tmp_path):
    norm = GlobalNorm(3, tmp_path)
    norm.set_statistics(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 2.0, 4.0]))
    return norm


def test_it_subtracts_the_mean_and_divides_by_the_deviation(tmp_path):
    x = torch.tensor([[[1.0, 2.0, 3.0], [2.0, 0.0, 7.0]]])
    found = known(tmp_path)(x, torch.tensor([0.5]))
    assert found.tolist() == [[[0.0, 0.0, 0.0], [1.0, -1.0, 1.0]]]


def test_without_statistics_it_says_so(tmp_path):
    norm = GlobalNorm(3, tmp_path)
    for _ in range(2):
        with refused("no-statistics") as caught:
            norm(torch.zeros(1, 4, 3))
        assert "sbkit train" in str(caught.value.hint)
        norm.load_state_dict(GlobalNorm(3, tmp_path).state_dict())  # of a model that never saw its corpus


def test_a_checkpoint_holds_them(tmp_path):
    other, x = GlobalNorm(3, tmp_path), torch.randn(2, 5, 3)
    assert not other.known
    other.load_state_dict(known(tmp_path).state_dict())
    assert other.known and torch.equal(other(x), known(tmp_path)(x))


def test_values_that_are_copied_into_its_buffers_will_do(tmp_path):
    """As init_from does."""
    norm = GlobalNorm(3, tmp_path)
    for name, value in known(tmp_path).state_dict().items():
        norm.state_dict(keep_vars=True)[name].copy_(value)
    assert torch.equal(norm(torch.ones(1, 2, 3)), known(tmp_path)(torch.ones(1, 2, 3)))


def test_stand_ins_go_through_until_there_are_statistics(tmp_path):
    norm, x = GlobalNorm(3, tmp_path), torch.randn(1, 4, 3)
    norm.allow_missing()
    assert torch.equal(norm(x), x)
    norm.load_state_dict(known(tmp_path).state_dict())
    norm.allow_missing()
    assert torch.equal(norm(x), known(tmp_path)(x))
