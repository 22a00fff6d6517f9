"""Checkpoints of several processes: one writes, all agree, and trouble on one is told to all."""

from __future__ import annotations

import errno
import logging
import os
import random
from functools import partial

import pytest
import torch
from processes import outcomes, results
from speechbrain.utils.checkpoints import mark_as_loader, mark_as_saver, register_checkpoint_hooks

from sbkit.errors import SbkitError
from sbkit.train.checkpoint import Checkpointer, files
from sbkit.train.distributed import ranks
from sbkit.train.distributed.ranks import PeerFailed
from sbkit.train.rng import RngState

pytestmark = pytest.mark.slow


@partial(register_checkpoint_hooks, save_on_main_only=False)
class Everyone:
    """A recoverable whose hook runs on all ranks, as those that gather do."""

    @mark_as_saver
    def _save(self, path):
        (path.parent / f"part{ranks.rank()}").touch()
        if ranks.is_main():
            path.touch()

    @mark_as_loader
    def _load(self, path, end_of_epoch):
        self.found = sorted(part.name for part in path.parent.glob("part*"))


@register_checkpoint_hooks
class MainOnly:
    """As most: SpeechBrain runs its hook on rank 0."""

    def __init__(self, error=None):
        self.error, self.calls = error, 0

    @mark_as_saver
    def _save(self, path):
        self.calls += 1
        if self.error is not None:
            raise self.error
        path.write_text("x")

    @mark_as_loader
    def _load(self, path, end_of_epoch):
        pass


def made(folder, asynchronous=True, **more):
    ranks.init(torch.device("cpu"))
    model = torch.nn.Linear(2, 2)
    recoverables = {"model": model, "rng": RngState(7, lambda: 3), **more}
    return Checkpointer(folder, recoverables, asynchronous=asynchronous), model


def rounds(folder, asynchronous):
    everyone, main = Everyone(), MainOnly()
    ckpt, model = made(folder, asynchronous, everyone=everyone, main=main)
    for param in model.parameters():
        torch.nn.init.constant_(param, 1.0 + ranks.rank())
    seed = 100 + ranks.rank()
    random.seed(seed), torch.manual_seed(seed)
    result = ckpt.save_checkpoint(meta={"WER": 1.0})
    path = ckpt.wait().path
    drawn = random.random(), float(torch.rand(1))
    ckpt.save_and_keep_only(meta={"WER": 2.0}, min_keys=["WER"], keep_recent=False)
    ckpt.wait()
    ckpt.recover_if_possible(min_key="WER")
    again = random.random(), float(torch.rand(1))
    assert (result is not None) == ranks.is_main()
    return path, drawn == again, drawn, float(model.weight[0, 0]), main.calls, everyone.found


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_all_ranks_load_what_rank_0_saved_and_their_own_random_numbers(tmp_path, asynchronous):
    first, second = results(rounds, tmp_path, asynchronous)
    assert first[0] == second[0] and [path.name for path in tmp_path.iterdir()] == [first[0].name]
    assert first[1] and second[1] and first[2] != second[2]
    assert first[3] == second[3] == 1.0
    assert (first[4], second[4]) == (2, 0)
    assert first[5] == second[5] == ["part0", "part1"]


def hook_fails(folder, where):
    def fails(obj, path):
        if ranks.rank() == where:
            raise ValueError("no gather")

    ckpt, _ = made(folder, main=MainOnly(ValueError("not picklable") if where is None else None))
    ckpt.add_recoverable("fails", Everyone(), custom_save_hook=fails)
    ckpt.save_checkpoint()


@pytest.mark.parametrize("where", [0, 1, None], ids=["rank 0's", "rank 1's", "the main rank's own"])
def test_a_hook_that_fails_on_one_rank_ends_all(tmp_path, where):
    """In SpeechBrain the others wait in its broadcast until a timeout of two hours."""
    found = outcomes(hook_fails, tmp_path, where)
    failed = found.pop(where or 0)
    assert isinstance(failed.error, ValueError) and isinstance(found[0].error, PeerFailed)
    assert max(failed.seconds, found[0].seconds) < 20 and not list(tmp_path.glob("CKPT*"))


def full(folder, where, asynchronous, end_of_epoch):
    logged = []
    logging.getLogger("sbkit.train.checkpoint").addHandler(handler := logging.Handler())
    handler.emit = lambda record: logged.append(record.getMessage())

    def refuse(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    ckpt, _ = made(folder, asynchronous, main=MainOnly())
    if where == "write":
        files.write_state = refuse
    elif where == "main's hook":
        ckpt.recoverables["main"].error = OSError(errno.ENOSPC, "full")
    elif ranks.rank() == 1:
        ckpt.custom_save_hooks["model"] = refuse
    else:
        ckpt.custom_save_hooks["model"] = lambda obj, path: None
    for _ in range(1 if end_of_epoch else 2):
        ckpt.save_checkpoint(end_of_epoch=end_of_epoch)
    return ckpt.wait(), sum("Training continues" in line for line in logged)


PLACES = ["write", "main's hook", "a hook of rank 1"]


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("where", PLACES)
def test_a_full_disk_in_mid_epoch_lets_all_ranks_continue(tmp_path, where, asynchronous):
    assert results(full, tmp_path, where, asynchronous, False) == [(None, 2), (None, 0)]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("where", PLACES)
def test_a_full_disk_at_the_end_of_an_epoch_ends_all(tmp_path, where):
    first, second = outcomes(full, tmp_path, where, True, True)
    assert isinstance(first.error, SbkitError) and "No space left" in str(first.error)
    assert isinstance(second.error, PeerFailed) and list(tmp_path.iterdir()) == []


def recover(folder):
    ckpt, _ = made(folder)
    return ckpt.recover_if_possible().path.name


def wrong_key(folder, to_keep):
    ckpt, _ = made(folder)
    if to_keep:
        ckpt.save_and_keep_only(meta={"WER": 1.0}, min_keys=["PER"])
    return ckpt.recover_if_possible(min_key="PER")


def test_a_wrong_metric_is_reported_once(tmp_path):
    """For keeping it is found after saving; for recovering no rank loads anything."""
    first, second = outcomes(wrong_key, tmp_path, True)
    assert "has 'PER'" in str(first.error) and isinstance(second.error, PeerFailed)
    assert results(wrong_key, tmp_path, False) == [None, None] and len(list(tmp_path.glob("CKPT*"))) == 1


def test_damaged_checkpoints_are_skipped_on_all_ranks(tmp_path):
    results(keep_two, tmp_path)
    newest = sorted(tmp_path.iterdir())[-1]
    (newest / "model.ckpt").write_bytes(b"")
    first, second = results(recover, tmp_path)
    assert first == second == sorted(tmp_path.iterdir())[0].name


def keep_two(folder):
    ckpt, _ = made(folder)
    ckpt.save_checkpoint(name="1")
    ckpt.save_checkpoint(name="2")
    ckpt.wait()


def test_a_rank_that_does_not_see_the_folder_says_so(tmp_path):
    results(keep_two, tmp_path)
    found = outcomes(other_disk, tmp_path)
    assert "rank 1 does not see the checkpoint" in str(found[1].error) and "share" in str(found[1].error)


def other_disk(folder):
    from sbkit.train.checkpoint import checkpointer

    checkpointer.VISIBLE_WITHIN = 1
    ckpt, _ = made(folder)
    wait_for = files.wait_for
    if ranks.rank() == 1:
        files.wait_for = lambda path, seconds: wait_for(path.with_name("not here"), seconds)
    ckpt.recover_if_possible()
