"""One rank's trouble is all ranks' business: failures, signals, values that are not finite."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from processes import outcomes, programs, results
from speechbrain.utils.epoch_loop import EpochCounter
from toys import ToyBrain, ToyEvalLoader, ToyTrainLoader, brain, furthest, state

from sbkit.errors import SbkitError
from sbkit.system.processes import free_port
from sbkit.train.checkpoint import Checkpointer
from sbkit.train.checkpoint.pending import PendingCheckpoint
from sbkit.train.distributed import failures, ranks
from sbkit.train.distributed.ranks import PeerFailed
from sbkit.train.signals import Stopped
from sbkit.train.trainer import NotFinite

pytestmark = pytest.mark.slow


def prepare(fail):
    ranks.init(torch.device("cpu"))

    def work():
        time.sleep(0.5)
        if fail:
            raise SbkitError("disk-full", "no disk", hint="buy one")
        return {"rank": ranks.rank(), "big": b"x" * (9 << 20)}  # more than the store takes

    found = ranks.run_on_main(work)
    return found["rank"], len(found["big"]), ranks.gather_objects(ranks.rank())


def test_results_of_the_main_process_are_shared_with_all_ranks():
    assert results(prepare, False, world=3) == [(0, 9 << 20, [0, 1, 2])] * 3


def test_a_failure_in_preparation_ends_all_ranks_in_seconds_with_its_message_once():
    first, second, third = outcomes(prepare, True, world=3)
    assert str(first.error) == "no disk; buy one"
    for other in (second, third):
        assert isinstance(other.error, PeerFailed) and other.error.code == 2
        assert other.seconds < 15


class Fails(ToyBrain):
    def on_stage_start(self, stage, epoch):
        if stage.name == "VALID" and ranks.rank() == 1:
            raise ValueError("bad reference")


def validation_fails():
    brain(Fails).fit(range(1, 3), ToyTrainLoader(2, 4, ranks.rank(), 2), ToyEvalLoader(0))


def test_a_rank_that_fails_in_validation_ends_the_ones_that_wait_for_it():
    first, second = outcomes(validation_fails)
    assert isinstance(second.error, ValueError)
    assert isinstance(first.error, PeerFailed) and first.seconds < 20


class FailsAtItsEnd(ToyBrain):
    def on_stage_end(self, stage, stage_loss, epoch):
        if stage.name == "VALID" and ranks.rank() in self.hparams.on:
            raise ValueError("no such key")
        ranks.barrier()  # as saving does


def stage_end_fails(folder, on):
    write = PendingCheckpoint.write
    PendingCheckpoint.write = lambda self: (time.sleep(failures.PATIENCE_SECONDS + 2), write(self))  # a slow disk
    toy = brain(FailsAtItsEnd, checkpointer=Checkpointer(folder), hparams={"on": on})
    toy.fit(range(1, 3), ToyTrainLoader(2, 4, ranks.rank(), 2), ToyEvalLoader(2))


@pytest.mark.slow
@pytest.mark.parametrize("on", [[1], [0, 1]])
def test_an_error_after_validation_costs_no_training_on_whichever_ranks_it_occurs(tmp_path, on):
    with contextlib.suppress(EOFError):  # a main process that is ended once it has written
        outcomes(stage_end_fails, tmp_path, on)
    [saved] = Checkpointer(tmp_path).list_checkpoints()
    assert not saved.meta["end-of-epoch"] and not [path for path in tmp_path.iterdir() if path.name.startswith(".tmp")]


def mistake(on):
    """What each rank's log says when some ranks meet a mistake."""
    ranks.init(torch.device("cpu"))
    said = []
    failures.logger.error = lambda text, *values: said.append(text % values)
    try:
        with ranks.failing_together():
            if ranks.rank() in on:
                raise SbkitError("damaged-file", "clip 7 is damaged")
            ranks.barrier()
    except (SbkitError, PeerFailed) as error:
        return type(error).__name__, said


def test_a_mistake_is_reported_once_on_whichever_ranks_it_occurs():
    said = "Rank 1 failed: clip 7 is damaged [damaged-file]"
    assert results(mistake, [1]) == [("PeerFailed", []), ("SbkitError", [said])]
    assert results(mistake, [0, 1]) == [("SbkitError", []), ("SbkitError", [])]  # the command says rank 0's


def killed(victim):
    """A program: one of its ranks is killed while others wait for it in an exchange."""
    ranks.init(torch.device("cpu"))
    try:
        with ranks.failing_together():
            torch.distributed.all_reduce(torch.ones(1))
            if ranks.rank() == int(victim):
                os.kill(os.getpid(), signal.SIGKILL)
            torch.distributed.all_reduce(torch.ones(1))
    except SbkitError as error:
        if ranks.rank() == 0:  # as commands do
            print(error, file=sys.stderr)
        sys.exit(error.exit_code)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_one_line_of_the_ones_that_waited_for_it(victim):
    ended = programs(3, killed, str(victim))
    assert [each.returncode for each in ended] == [-signal.SIGKILL if i == victim else 1 for i in range(3)]
    said = "".join(each.stderr for each in ended)
    assert "lost the connection to another rank (" in said and "Traceback" not in said, said


def spoil(bad, patience, folder):
    """Rows that are NaN at the given steps of an epoch, on rank 1 only."""

    def touch(batch):
        if batch.step in bad and ranks.rank() == ranks.world_size() - 1:
            batch.x[0, 0] = float("nan")

    toy = brain(nonfinite_patience=patience, hparams={"output_folder": str(folder)})
    toy.fit(range(1, 3), ToyTrainLoader(5, 7, ranks.rank(), ranks.world_size(), touch=touch))
    return state(toy), toy.optimizer_step, toy.ends


def test_a_value_that_is_not_finite_on_one_rank_skips_the_step_on_all(tmp_path):
    (first, steps, ends), (second, _, _) = results(spoil, (2,), 5, tmp_path)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert all(torch.isfinite(value).all() for value in first.values())
    assert steps == 10 and all(loss == pytest.approx(loss) for _, loss in ends)
    assert list((tmp_path / "bad_batches").iterdir())


def test_patience_ends_all_ranks(tmp_path):
    first, second = outcomes(spoil, (1, 2, 3), 2, tmp_path)
    assert isinstance(first.error, NotFinite) and first.error.exit_code == 1
    assert "3 steps" in str(first.error)
    assert isinstance(second.error, PeerFailed) and second.error.code == 1


def run(folder, epochs=3, stop_rank=None, stop_at=None, validates=False):
    """Train with checkpoints; ``stop_rank`` sends itself SIGTERM after ``stop_at`` optimizer steps (or in the
    validation that follows)."""
    rank, world = ranks.rank(), ranks.world_size()

    class Stops(ToyBrain):
        def stop_if_due(self):
            if self.optimizer_step == stop_at and rank == stop_rank:
                os.kill(os.getpid(), signal.SIGTERM)

        def compute_forward(self, batch, stage):
            predictions = super().compute_forward(batch, stage)
            return torch.nn.functional.dropout(predictions, 0.2, validates and stage.name == "TRAIN")

        def on_fit_batch_end(self, batch, outputs, loss, should_step):
            if should_step and not validates:
                self.stop_if_due()

        def evaluate_batch(self, batch, stage):
            self.stop_if_due()
            torch.rand(1)
            return super().evaluate_batch(batch, stage)

    ranks.init(torch.device("cpu"))
    counter = EpochCounter(epochs)
    toy = brain(Stops, checkpointer=Checkpointer(folder, {"counter": counter}))
    toy.checkpointer.add_recoverable("model", toy.hparams.model)
    toy.fit(counter, ToyTrainLoader(5, 7, rank, world, 2), ToyEvalLoader(11, rank, world) if validates else None)
    return state(toy), toy.optimizer_step, [loss for _, loss in toy.ends]


def test_a_signal_to_one_rank_stops_all_and_any_number_of_ranks_resumes(tmp_path):
    whole, steps, losses = results(run, tmp_path / "whole", world=2)[0]
    first, second = outcomes(run, tmp_path / "cut", 3, 1, 7, world=2)
    assert isinstance(first.error, Stopped) and first.error.exit_code == 143
    assert "stopped by SIGTERM after step 8" in str(first.error) or "after step 7" in str(first.error)
    assert isinstance(second.error, PeerFailed) and second.error.code == 143
    for resumed_on, most in ((1, 1e-5), (2, 1e-12), (3, 1e-5)):
        folder = shutil.copytree(tmp_path / "cut", tmp_path / f"on{resumed_on}")
        (again, steps_again, losses_again), *_ = results(run, folder, world=resumed_on)
        assert steps_again == steps == 15
        assert furthest(whole, again) < most
        assert losses_again == pytest.approx(losses[-len(losses_again):], rel=1e-5)


def test_a_signal_to_one_rank_in_validation_stops_all_and_the_run_goes_on_exactly(tmp_path):
    whole, _, losses = results(run, tmp_path / "whole", 3, None, None, True)[0]
    first, second = outcomes(run, tmp_path / "cut", 3, 1, 10, True)
    assert isinstance(first.error, Stopped) and "after step 10, checkpoint saved at" in str(first.error)
    assert isinstance(second.error, PeerFailed) and second.error.code == 143
    (again, steps, losses_again), _ = results(run, tmp_path / "cut", 3, None, None, True)
    assert steps == 15 and furthest(whole, again) == 0.0
    assert losses_again == losses[-4:]  # from the end of the second epoch's training on


class StopsAfterItsLastStep(ToyBrain):
    """One rank receives a signal when no step is left in which ranks could agree on it."""

    def on_fit_batch_end(self, batch, outputs, loss, should_step):
        if self.optimizer_step == 2 and ranks.rank() == self.hparams.stopped:
            os.kill(os.getpid(), signal.SIGTERM)


def stopped_after_its_last_step(stopped):
    toy = brain(StopsAfterItsLastStep, hparams={"stopped": stopped})
    toy.fit(range(1, 2), ToyTrainLoader(2, 4, ranks.rank(), 2))
    ranks.barrier()  # as a test after training does


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_signal_to_one_rank_after_the_last_step_ends_all_alike(stopped):
    first, second = outcomes(stopped_after_its_last_step, stopped, timeout=40)
    assert isinstance(first.error, Stopped) and first.error.exit_code == 143
    assert "stopped by SIGTERM after step 2, and nothing is saved, because there is no checkpointer" in str(first.error)
    assert isinstance(second.error, PeerFailed) and second.error.code == 143


def profiled(folder, slow):
    """One rank's trace takes longer than a rank is waited for that has heard of another's end, and it hears at once."""
    failures.WATCH_SECONDS, failures.PATIENCE_SECONDS = 0.01, 0.5
    toy = brain(hparams={"output_folder": str(folder)}, profile_training=True, profile_warmup=1, profile_steps=1)
    stop = toy.profiler.stop
    toy.profiler.stop = lambda: (time.sleep(2 * (ranks.rank() == slow)), stop())
    toy.fit([1], ToyTrainLoader(8, 6, ranks.rank(), 2))


@pytest.mark.parametrize("slow", [0, 1])
def test_ranks_that_were_profiled_end_when_all_have_written_their_traces(tmp_path, slow):
    ends = outcomes(profiled, tmp_path, slow)
    assert [(type(each.error), each.error.code) for each in ends] == [(SystemExit, 0)] * 2
    assert len(list(tmp_path.glob("profiler_logs/*.json"))) == 2


def trained_and_left():
    """The threads of the process group before and after it was left, while the Brain still lives."""
    trained = brain()
    trained.fit(range(1, 2), ToyTrainLoader(2, 4, ranks.rank(), 2))
    before = group_threads()
    ranks.shutdown()
    return before, group_threads(), trained.optimizer_step


def group_threads():
    count = 0
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it ended meanwhile
            count += "gloo" in (task / "comm").read_text()
    return count


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="the system doesn't list a process's threads")
def test_leaving_the_group_waits_for_its_threads():
    """One that still drops a tensor while Python ends aborts the process: a run that was done has failed."""
    for before, after, steps in results(trained_and_left):
        assert before > 0 and after == 0 and steps > 0


CASES = [(INIT := 'ranks.init(torch.device("cpu"))', ""), (f"dist.init_process_group('gloo'); {INIT}", ""),
         (INIT, "dist.destroy_process_group()")]
ENDS_AT_ONCE = """
import atexit, gc, os, pathlib, speechbrain, time, torch._dynamo, torch.distributed as dist
gc.freeze()
def names():
    found = []
    for task in pathlib.Path("/proc/self/task").glob("*/comm"):
        try:
            found.append(task.read_text())
        except OSError:  # it ended meanwhile
            pass
    return found
atexit.register(lambda: print("at the end", sum("gloo" in name for name in names())))  # runs after all others
for joins, leaves, os.environ["MASTER_PORT"] in {cases}:
    if os.fork() == 0:  # imports sbkit and ends as a script of its own does
        break
    print(os.wait()[1], flush=True)
else:
    os._exit(0)
from sbkit.train.distributed import exchange, ranks
exec(joins)
layer = torch.nn.Linear(4, 4)
exchanged = exchange.GradientExchange(layer.named_parameters())
layer(torch.ones(2, 4)).sum().backward()
for _ in range(500):  # until both threads have their names
    if (count := sum("gloo" in name for name in names())) > 1:
        break
    time.sleep(0.01)
print("before", count)
exec(leaves)
"""


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="the system doesn't list a process's threads")
def test_a_script_leaves_the_process_group_at_its_end():
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1",
           "MASTER_ADDR": "127.0.0.1"}
    code = ENDS_AT_ONCE.format(cases=[(*case, str(free_port())) for case in CASES])
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines() == ["before 2", "at the end 0", "0"] * len(CASES), done
