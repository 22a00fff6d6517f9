"""Random numbers after a resume are those that would have come without the stop."""

import logging
import random

import numpy as np
import pytest
import torch

from sbkit.train import ranks
from sbkit.train.checkpoint import Checkpointer
from sbkit.train.rng import RngState, capture, restore, seed_all


def draw():
    return random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(3).tolist()


@pytest.fixture(autouse=True)
def untouched():
    state = capture()
    yield
    restore(state)


def test_captured_state_repeats_the_numbers():
    random.gauss(0, 1), np.random.randn()  # each keeps a second number back
    state = capture()
    first = draw()
    assert draw() != first
    restore(state)
    assert draw() == first


def saved(folder, end_of_epoch):
    checkpointer = Checkpointer(folder, {"rng": RngState(seed=3, step=lambda: 77)})
    checkpointer.save_checkpoint(end_of_epoch=end_of_epoch)
    return checkpointer, checkpointer.recoverables["rng"]


def test_loading_sets_them(tmp_path):
    checkpointer, _ = saved(tmp_path, end_of_epoch=True)
    first = draw()
    checkpointer.recover_if_possible()
    assert draw() == first


def test_of_a_mid_epoch_checkpoint_they_can_be_set_again_once(tmp_path):
    """Between loading and the first step, workers and hooks draw numbers that had been drawn before."""
    checkpointer, rng = saved(tmp_path, end_of_epoch=False)
    first = draw()
    checkpointer.recover_if_possible()
    draw()
    assert rng.restore() and draw() == first
    assert not rng.restore() and draw() != first


def test_at_the_end_of_an_epoch_there_is_nothing_to_set_again(tmp_path):
    checkpointer, rng = saved(tmp_path, end_of_epoch=True)
    checkpointer.recover_if_possible()
    assert not rng.restore()


def test_on_another_number_of_ranks_they_are_seeded_by_seed_rank_and_step(tmp_path, monkeypatch, caplog):
    checkpointer, _ = saved(tmp_path, end_of_epoch=True)
    drawn = []
    for rank in (0, 1):
        monkeypatch.setattr(ranks, "world_size", lambda: 2)
        monkeypatch.setattr(ranks, "rank", lambda rank=rank: rank)
        with caplog.at_level(logging.INFO):
            checkpointer.recoverables["rng"]._load(checkpointer.find_checkpoint().paramfiles["rng"], True)
        drawn.append(draw())
        seed_all(3, rank, 77)
        assert draw() == drawn[-1]
        monkeypatch.undo()
    assert drawn[0] != drawn[1]
    assert "is of 1 processes, now there are 2" in caplog.text
    assert "seed 3, the rank and step 77" in caplog.text


def test_seeds_of_other_parts_give_other_numbers():
    found = set()
    for parts in [(0,), (1,), (0, 1), (1, 0), (0, 0, 1), (2**31,), (-1,)]:
        seed_all(*parts)
        found.add(str(draw()))
    assert len(found) == 7


def test_state_from_another_kind_of_device_is_left_alone(tmp_path):
    checkpointer, rng = saved(tmp_path, end_of_epoch=True)
    rng.device = "meta"
    first = draw()
    checkpointer.load_checkpoint(checkpointer.find_checkpoint())
    assert draw() == first


class Cards:
    """Stand-ins for two cards' generators."""

    def __init__(self, monkeypatch, *states):
        self.states = [torch.tensor([state]) for state in states]
        for name, stand_in in {
            "is_available": lambda: True, "is_initialized": lambda: True, "device_count": lambda: len(self.states),
            "get_rng_state_all": lambda: list(self.states), "get_rng_state": lambda device: self.states[device.index],
            "set_rng_state": self.set,
        }.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)

    def set(self, state, device):
        self.states[device if isinstance(device, int) else device.index] = state


@pytest.mark.parametrize("before, after", [(0, 1), (1, 0), (1, 1)])
def test_a_run_that_goes_on_on_another_card_has_the_generator_of_the_one_it_had(tmp_path, monkeypatch, before, after):
    cards = Cards(monkeypatch, 10, 11)
    checkpointer = Checkpointer(tmp_path, {"rng": RngState(device=f"cuda:{before}")})
    checkpointer.save_checkpoint()
    cards.states = [torch.tensor([0]), torch.tensor([0])]
    checkpointer.recoverables["rng"].device = f"cuda:{after}"
    checkpointer.recover_if_possible()
    assert cards.states[after] == 10 + before and cards.states[1 - after] == 11 - after


@pytest.mark.gpu
def test_a_card_s_numbers_go_on_whatever_its_number_is(tmp_path):
    before, after = torch.device("cuda", 0), torch.device("cuda", torch.cuda.device_count() - 1)
    checkpointer = Checkpointer(tmp_path, {"rng": RngState(device=before)})
    torch.rand(5, device=before), torch.rand(9, device=after)  # so that two cards differ
    checkpointer.save_checkpoint()
    expected = torch.rand(3, device=before)
    checkpointer.recoverables["rng"].device = after
    checkpointer.recover_if_possible()
    assert torch.equal(torch.rand(3, device=after).cpu(), expected.cpu())
