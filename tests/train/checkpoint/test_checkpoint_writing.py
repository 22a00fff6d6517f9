"""Writing in the background, and disks that refuse: nothing is lost, and nothing in silence."""

import copy
import errno
import logging
import os
import subprocess
import sys
import threading

import kill_points
import pytest
import torch
import tried
from refusals import refused
from toys import ToyBrain, ToyTrainLoader, brain

from sbkit.train.checkpoint import Checkpointer, files
from sbkit.train.checkpoint.state import load_file


class Gate:
    """Holds back what writes a checkpoint until it is opened."""

    def __init__(self, monkeypatch):
        self.open, self.reached, self.threads = threading.Event(), threading.Event(), []
        write = files.write_state

        def held(state, path):
            self.threads.append(threading.current_thread().name)
            self.reached.set()
            assert self.open.wait(20)
            write(state, path)

        monkeypatch.setattr(files, "write_state", held)


both_ways = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])


@pytest.fixture
def model():
    return torch.nn.Linear(2, 2)


def checkpointer(folder, model, asynchronous=True):
    return Checkpointer(folder, {"model": model}, asynchronous=asynchronous)


def written():
    """Wait for what is written in the background, as nobody who asks a checkpointer can without its error."""
    for thread in threading.enumerate():
        if thread.name == "checkpoint-writer":
            thread.join()


# ------------------------------------------------------------------ in the background


def test_the_state_is_that_of_the_call_while_training_continues(tmp_path, model, monkeypatch):
    gate, optimizer = Gate(monkeypatch), torch.optim.Adam(model.parameters())

    def step():
        model(torch.ones(2)).sum().backward()
        optimizer.step()

    def state():
        return copy.deepcopy([model.state_dict(), optimizer.state_dict()["state"]])

    step()
    before = state()
    ckpt = Checkpointer(tmp_path, {"model": model, "optimizer": optimizer}, asynchronous=True)
    promised = ckpt.save_checkpoint()
    step()
    assert gate.reached.wait(20) and not promised.path.exists()
    gate.open.set()
    assert ckpt.wait().path == promised.path and promised.path.exists()
    assert str(state()) != str(before)
    ckpt.recover_if_possible()
    torch.testing.assert_close(state(), before, rtol=0, atol=0)
    assert gate.threads == ["checkpoint-writer"] * 2


def test_one_write_at_a_time(tmp_path, model, monkeypatch):
    gate = Gate(monkeypatch)
    ckpt = checkpointer(tmp_path, model)
    ckpt.save_checkpoint()
    assert gate.reached.wait(20)
    second = threading.Thread(target=ckpt.save_checkpoint)
    second.start()
    second.join(0.3)
    assert second.is_alive() and len(list(tmp_path.iterdir())) == 1
    gate.open.set()
    second.join(20)
    ckpt.wait()
    assert len(ckpt.list_checkpoints()) == 2


def test_old_checkpoints_are_deleted_only_after_the_new_one_is_written(tmp_path, model, monkeypatch):
    ckpt = checkpointer(tmp_path, model)
    first = ckpt.save_checkpoint()
    ckpt.wait()
    gate = Gate(monkeypatch)
    ckpt.save_and_keep_only()
    assert gate.reached.wait(20) and first.path.exists()
    gate.open.set()
    assert ckpt.wait().path != first.path and not first.path.exists()


def test_asking_for_checkpoints_waits_for_the_one_being_written(tmp_path, model, monkeypatch):
    gate = Gate(monkeypatch)
    ckpt = checkpointer(tmp_path, model)
    ckpt.save_checkpoint()
    threading.Timer(0.2, gate.open.set).start()
    assert len(ckpt.list_checkpoints()) == 1


def test_an_error_of_the_background_is_raised_by_the_next_call_once(tmp_path, model, monkeypatch):
    def broken(state, path):
        raise ValueError("no such luck")

    ckpt = checkpointer(tmp_path, model)
    monkeypatch.setattr(files, "write_state", broken)
    ckpt.save_checkpoint()
    with pytest.raises(ValueError, match="no such luck"):
        ckpt.save_checkpoint()
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    ckpt.save_checkpoint()
    assert ckpt.wait() is not None


ENDS = """
import os, time, torch
from sbkit.train.checkpoint import Checkpointer, files
from sbkit.train.checkpoint.state import load_file
for folder, meanwhile, end in {cases}:
    if os.fork() == 0:  # saves and ends as a script of its own does
        break
    os.wait()
else:
    os._exit(0)
write = files.write_state
def slow(state, path):
    time.sleep(0.5)
    exec(meanwhile)
    write(state, path)
files.write_state = slow
Checkpointer(folder, {{"model": torch.nn.Linear(2, 2)}}, asynchronous=True).save_checkpoint()
exec(end)
"""


@pytest.mark.slow
def test_at_exit_the_write_is_finished_or_its_error_printed(tmp_path, model):
    good, bad = tmp_path / "good", tmp_path / "bad"
    cases = [(str(good), "", "raise ValueError"), (str(bad), "raise OSError(28, 'No space left on device')", "")]
    done = subprocess.run([sys.executable, "-c", ENDS.format(cases=cases)], capture_output=True, text=True, timeout=120)
    assert checkpointer(good, model).recover_if_possible() is not None
    assert done.stderr.count("error: the checkpoint") == 1 and "No space left" in done.stderr
    assert list(bad.iterdir()) == []


# ------------------------------------------------------------------ a disk that refuses


class Full:
    """A disk that refuses at a chosen moment."""

    def __init__(self, monkeypatch, moment="write_state", number=errno.ENOSPC):
        self.full, keep = True, getattr(files, moment)

        def maybe(*args):
            if self.full:
                raise OSError(number, os.strerror(number))
            return keep(*args)

        monkeypatch.setattr(files, moment, maybe)


def shown(folder):
    return [path.name for path in folder.iterdir()]


@both_ways
@pytest.mark.parametrize("moment", ["create_hidden", "write_state", "seal", "publish"])
def test_at_the_end_of_an_epoch_it_ends_the_run_and_the_last_good_one_stays(
        tmp_path, model, monkeypatch, moment, asynchronous):
    ckpt = checkpointer(tmp_path, model, asynchronous)
    good = ckpt.save_checkpoint()
    ckpt.wait()
    Full(monkeypatch, moment)
    with refused("disk-full", wording=False) as error:
        ckpt.save_and_keep_only()
        ckpt.wait()
    text = str(error.value)
    kept = f"the last good one, {good.path}, is kept"
    for part in ("No space left on device", "it needs about", "free: ", kept):
        assert part in text
    assert shown(tmp_path) == [good.path.name]


@both_ways
def test_in_mid_epoch_two_failed_saves_are_warnings_and_the_third_is_an_error(
        tmp_path, model, monkeypatch, caplog, asynchronous):
    ckpt = checkpointer(tmp_path, model, asynchronous)
    disk = Full(monkeypatch)

    def save():
        saved = ckpt.save_checkpoint(end_of_epoch=False)
        return saved, ckpt.wait()

    for _ in range(2):
        assert save()[1] is None
    assert caplog.text.count("Training continues") == 2 and "there is no earlier one" in caplog.text
    disk.full = False
    assert save()[1] is not None
    disk.full = True
    assert save()[1] is None and save()[1] is None
    with refused("disk-full", wording=False):
        save()
    assert len(shown(tmp_path)) == 1


def test_an_error_in_the_background_is_raised_without_waiting(
        tmp_path, model, monkeypatch):
    ckpt = checkpointer(tmp_path, model, True)
    disk, go_on = Full(monkeypatch), threading.Event()
    refuse = files.write_state
    monkeypatch.setattr(files, "write_state", lambda *args: go_on.wait(60) and refuse(*args))
    assert disk.full
    ckpt.save_checkpoint()
    assert not ckpt.writer.failed
    go_on.set()
    written()
    assert ckpt.writer.failed
    with refused("disk-full", wording=False):
        ckpt.writer.wait()
    assert not ckpt.writer.failed


class Saving(ToyBrain):
    """Saves as at the end of an epoch after its second step."""

    def on_fit_batch_end(self, batch, outputs, loss, should_step):
        if self.optimizer_step == 2:
            self.checkpointer.save_checkpoint()
            written()


def test_a_run_that_could_not_save_ends_at_the_next_step_and_not_at_the_next_save(tmp_path, monkeypatch):
    Full(monkeypatch)
    toy = brain(Saving, checkpointer=Checkpointer(tmp_path))
    with refused("disk-full", wording=False):
        toy.fit(range(1, 3), ToyTrainLoader())
    assert toy.optimizer_step == 2


@pytest.mark.parametrize("number, code", [
    (errno.ENOSPC, "disk-full"), (errno.EDQUOT, "disk-full"), (errno.EROFS, "not-writable"),
    (errno.EIO, "broken-disk")], ids=["ENOSPC", "EDQUOT", "EROFS", "EIO"])
def test_errors_name_quotas_and_read_only_disks(tmp_path, model, monkeypatch, number, code):
    Full(monkeypatch, number=number)
    with refused(code, wording=False) as error:
        checkpointer(tmp_path, model, asynchronous=False).save_checkpoint()
    assert os.strerror(number) in error.value.message


def test_a_hook_that_writes_for_itself_may_meet_the_full_disk_too(tmp_path, model, caplog):
    def full(obj, path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    ckpt = checkpointer(tmp_path, model)
    ckpt.add_recoverable("other", object(), custom_save_hook=full, custom_load_hook=lambda *a: None)
    assert ckpt.save_checkpoint(end_of_epoch=False) is None and "Training continues" in caplog.text
    with refused("disk-full", wording=False):
        ckpt.save_checkpoint()
    assert shown(tmp_path) == []


def test_what_it_needs_is_the_size_of_all_states(tmp_path, monkeypatch):
    Full(monkeypatch, "seal")
    with refused("disk-full", wording=False) as error:
        checkpointer(tmp_path, torch.nn.Linear(1000, 1000, bias=False), asynchronous=False).save_checkpoint()
    assert "needs about 4.0 MB" in error.value.message


def test_another_error_of_a_hook_is_raised_unchanged_and_leaves_no_files(tmp_path, model):
    ckpt = checkpointer(tmp_path, model)
    ckpt.add_recoverable("other", object(), custom_save_hook=lambda obj, path: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ckpt.save_checkpoint(end_of_epoch=False)
    assert shown(tmp_path) == []


def test_deleting_may_fail_without_ending_training(tmp_path, model, monkeypatch, caplog):
    ckpt = checkpointer(tmp_path, model)
    ckpt.save_checkpoint()
    ckpt.wait()

    def refuse(path):
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(files, "delete", refuse)
    with caplog.at_level(logging.WARNING):
        ckpt.save_and_keep_only()
        assert ckpt.wait() is not None
    assert "Could not delete an old checkpoint" in caplog.text


# ------------------------------------------------------------------ no memory


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous, name, error", [(False, None, MemoryError), (True, "best", MemoryError),
                                                       (True, None, torch.OutOfMemoryError)])
def test_without_memory_at_any_operation_a_checkpoint_is_whole_or_absent(tmp_path, asynchronous, name, error):
    found, number = [], 1
    while (ended := kill_points.saved_without_memory(str(tmp_path / str(number)), asynchronous, name, number, error)):
        found.append(ended)
        number += 1
    tried.record("operations at which the writing of a checkpoint finds no memory", len(found))
    assert {number for _, number in found} == {1, 2}
    assert all(failed for failed, number in found if number == 1), "what isn't saved is an error"


@both_ways
@pytest.mark.parametrize("where", [(torch.Tensor, "clone"), (files, "write_state"), (files, "seal")],
                         ids=["copied", "written", "sealed"])
def test_a_run_without_memory_for_its_checkpoint_says_so_in_one_line(tmp_path, monkeypatch, where, asynchronous):
    def refuse(*args):
        raise MemoryError("there is none left")

    class WithoutMemory(ToyBrain):
        def on_fit_batch_end(self, batch, outputs, loss, should_step):
            if self.optimizer_step == 2:
                monkeypatch.setattr(*where, refuse)
                try:
                    self.checkpointer.save_checkpoint()
                    written()
                finally:
                    monkeypatch.undo()

    toy = brain(WithoutMemory, checkpointer=Checkpointer(tmp_path, asynchronous=asynchronous))
    with refused("out-of-memory") as error:
        toy.fit(range(1, 3), ToyTrainLoader())
    assert "\n" not in str(error.value) and shown(tmp_path) == [] and toy.optimizer_step <= 3


# ------------------------------------------------------------------ held until it is needed


HELD = {"held": True}


def refuse(obj, path):
    path.write_text("the first half")
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def fail(obj, path):
    raise ValueError("a mistake in a hook")


def test_a_held_state_is_published_with_the_numbers_of_when_it_was_held(tmp_path, model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    ckpt = Checkpointer(tmp_path, {"model": model, "optimizer": optimizer}, asynchronous=True)
    ckpt.hold(HELD)
    assert ckpt.list_checkpoints() == []
    optimizer.param_groups[0]["lr"] = 9.0
    published = ckpt.publish()
    assert load_file(published.paramfiles["optimizer"])["param_groups"][0]["lr"] == 0.5
    assert torch.equal(load_file(published.paramfiles["model"])["weight"], model.weight)
    assert published.meta["held"] is True and published.meta["end-of-epoch"] is False
    assert shown(tmp_path) == [published.path.name] and ckpt.wait().path == published.path
    assert ckpt.publish() is None, "it is published once"


def test_publishing_deletes_what_was_published_before_and_nothing_else(tmp_path, model):
    ckpt = checkpointer(tmp_path, model)
    ckpt.hold(HELD)
    ckpt.publish()
    of_epoch = ckpt.save_checkpoint()
    ckpt.hold(HELD)
    published = ckpt.publish()
    assert sorted(shown(tmp_path)) == sorted([of_epoch.path.name, published.path.name])


def test_what_is_dropped_or_held_anew_leaves_nothing(tmp_path, model):
    ckpt = checkpointer(tmp_path, model)
    ckpt.hold(HELD)
    assert len(shown(tmp_path)) == 1
    ckpt.hold(HELD)
    assert len(shown(tmp_path)) == 1
    ckpt.drop()
    assert shown(tmp_path) == [] and ckpt.publish() is None


def test_on_a_full_disk_nothing_is_held_and_training_goes_on(tmp_path, model, monkeypatch):
    ckpt = checkpointer(tmp_path, model)
    ckpt.custom_save_hooks["model"] = refuse
    ckpt.hold(HELD)
    assert shown(tmp_path) == [] and ckpt.publish() is None
    Full(monkeypatch, "create_hidden")
    ckpt.hold(HELD)
    assert shown(tmp_path) == [] and ckpt.publish() is None


def test_a_hook_that_fails_is_an_error_and_leaves_nothing(tmp_path, model):
    ckpt = checkpointer(tmp_path, model)
    ckpt.custom_save_hooks["model"] = fail
    for save in (lambda: ckpt.hold(HELD), ckpt.save_checkpoint):
        with pytest.raises(ValueError, match="a mistake in a hook"):
            save()
        assert shown(tmp_path) == []


def test_a_held_state_that_does_not_fit_on_the_disk_is_a_warning(tmp_path, model, monkeypatch, caplog):
    ckpt = checkpointer(tmp_path, model)
    ckpt.hold(HELD)
    Full(monkeypatch)
    assert ckpt.publish() is None
    assert "Training continues" in caplog.text and shown(tmp_path) == []
