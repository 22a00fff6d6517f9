"""Random numbers after a resume are those that would have come without the stop."""

import logging
import random

import numpy as np
import pytest
import torch
from toys import load

from sbkit.train.checkpoint import Checkpointer
from sbkit.train.distributed import ranks
from sbkit.train.rng import RngState, capture, restore, seed_all, seed_rank, seeded


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


def test_of_a_mid_epoch_checkpoint_they_can_be_set_again_once(tmp_path):
    """Between loading and the first step, workers and hooks draw numbers that had been drawn before."""
    checkpointer, rng = saved(tmp_path, end_of_epoch=False)
    first = draw()
    checkpointer.recover_if_possible()
    draw()
    assert rng.restore() and draw() == first
    assert not rng.restore() and draw() != first


def test_on_another_number_of_ranks_they_are_seeded_by_seed_rank_and_step(tmp_path, monkeypatch, caplog):
    checkpointer, _ = saved(tmp_path, end_of_epoch=True)
    drawn = []
    for rank in (0, 1):
        monkeypatch.setattr(ranks, "world_size", lambda: 2)
        monkeypatch.setattr(ranks, "rank", lambda rank=rank: rank)
        with caplog.at_level(logging.INFO):
            load(checkpointer.recoverables["rng"], checkpointer.find_checkpoint().paramfiles["rng"], True)
        drawn.append(draw())
        seed_all(3, 77)
        seed_rank(rank, 77, "cpu")
        assert draw() == drawn[-1]
        monkeypatch.undo()
    assert drawn[0][2:] != drawn[1][2:] and drawn[0][:2] == drawn[1][:2]
    assert "was written by 1 processes and now there are 2" in caplog.text
    assert "seed 3, the rank and step 77" in caplog.text


def drawn_by(rank, monkeypatch, device="cpu", world=2, step=0):
    """What a rank draws: by Python, twice by numpy, and by torch on the host."""
    monkeypatch.setattr(ranks, "world_size", lambda: world)
    monkeypatch.setattr(ranks, "rank", lambda: rank)
    seed_all(5)
    RngState(step=lambda: step, device=device).seed_rank()
    return draw()


def test_ranks_draw_their_own_masks_but_make_the_same_decisions(monkeypatch):
    first, again, second, later = (drawn_by(rank, monkeypatch, step=step) for rank, step in
                                   ((0, 0), (0, 0), (1, 0), (0, 9)))
    assert first == again and first[:2] == second[:2] == later[:2]  # Python's
    for place in (2, 3, 4):  # numpy's and torch's
        assert len({str(drawn[place]) for drawn in (first, second, later)}) == 3
    seed_all(5)
    assert draw() == drawn_by(0, monkeypatch, world=1)


def test_with_a_gpu_torch_on_the_host_draws_the_same_on_all_ranks(monkeypatch):
    seeds = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    first, second = (drawn_by(rank, monkeypatch, device="cuda:0") for rank in (0, 1))
    assert first[4] == second[4] and first[2] != second[2] and len({*seeds}) == 3


def test_numbers_drawn_from_another_seed_do_not_change_the_generators():
    before = capture()
    with seeded(1, 2):
        first = draw()
    with seeded(1, 2):
        assert draw() == first
    with pytest.raises(KeyError), seeded(1, 3):
        assert draw() != first
        raise KeyError
    assert all(torch.equal(value, before[name]) for name, value in capture().items())


@pytest.mark.gpu(values=True)
def test_ranks_draw_their_own_masks_on_a_gpu(monkeypatch):
    drawn = []
    for rank in (0, 1, 0):
        drawn_by(rank, monkeypatch, device="cuda")
        drawn.append(torch.nn.functional.dropout(torch.ones(1000, device="cuda")))
    assert torch.equal(drawn[0], drawn[2]) and not torch.equal(drawn[0], drawn[1])


def test_seeds_of_other_parts_give_other_numbers():
    found = set()
    for parts in [(0,), (1,), (0, 1), (1, 0), (0, 0, 1), (2**31,), (-1,)]:
        seed_all(*parts)
        found.add(str(draw()))
    assert len(found) == 7


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_loading_sets_all_but_those_of_another_kind_of_device_and_after_an_epoch_for_good(tmp_path, device):
    checkpointer, rng = saved(tmp_path, end_of_epoch=True)
    rng.device = device
    first = draw()
    checkpointer.recover_if_possible()
    assert draw() == first and not rng.restore()


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
def test_a_run_resumed_on_another_gpu_keeps_its_generator(tmp_path, monkeypatch, before, after):
    cards = Cards(monkeypatch, 10, 11)
    checkpointer = Checkpointer(tmp_path, {"rng": RngState(device=f"cuda:{before}")})
    checkpointer.save_checkpoint()
    cards.states = [torch.tensor([0]), torch.tensor([0])]
    checkpointer.recoverables["rng"].device = f"cuda:{after}"
    checkpointer.recover_if_possible()
    assert cards.states[after] == 10 + before and cards.states[1 - after] == 11 - after


@pytest.mark.gpu(values=True)
def test_a_gpus_random_numbers_continue_whatever_its_index_is(tmp_path):
    before, after = torch.device("cuda", 0), torch.device("cuda", torch.cuda.device_count() - 1)
    checkpointer = Checkpointer(tmp_path, {"rng": RngState(device=before)})
    torch.rand(5, device=before), torch.rand(9, device=after)  # so that two cards differ
    checkpointer.save_checkpoint()
    expected = torch.rand(3, device=before)
    checkpointer.recoverables["rng"].device = after
    checkpointer.recover_if_possible()
    assert torch.equal(torch.rand(3, device=after).cpu(), expected.cpu())
