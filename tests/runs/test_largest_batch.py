"""max_batch_seconds: auto is what fits, the same on all ranks, and a run keeps it."""

import contextlib
import json
import multiprocessing
from pathlib import Path
from types import SimpleNamespace

import pytest
import run_folders
import torch
from processes import CONTEXT, results
from refusals import refused
from trained_runs import here, metrics

from sbkit.data.plan import Batching
from sbkit.recipe import arguments
from sbkit.recipe.cost import GIB
from sbkit.runs import largest_batch
from sbkit.runs.run_config import RunConfig
from sbkit.score.run_files import MEASURED
from sbkit.system import memory
from sbkit.train.distributed import ranks
from sbkit.train.memory import batch_size_search
from sbkit.train.memory.bounded_trial import BASE_BYTES, WORKER_BYTES

ROOT = Path(__file__).parents[2]
#: What a process holds before a batch.
LEAST = (BASE_BYTES + 2 * WORKER_BYTES) / GIB
on_linux = pytest.mark.skipif(not memory.can_bound(), reason="only Linux bounds a process")


@pytest.mark.parametrize("auto, checkpoints, stored, result", [
    (True, ["step 3"], {largest_batch.KEY: 24.0}, 24.0), (True, [], {largest_batch.KEY: 24.0}, None),
    (False, ["step 3"], {largest_batch.KEY: 24.0}, None), (True, ["step 3"], {}, None)])
def test_a_run_with_a_checkpoint_keeps_what_it_has_measured(tmp_path, auto, checkpoints, stored, result):
    (tmp_path / MEASURED).write_text(json.dumps(stored))
    keys = SimpleNamespace(batching=SimpleNamespace(auto=auto), folder=tmp_path,
                           checkpointer=SimpleNamespace(list_checkpoints=lambda: checkpoints))
    assert largest_batch.earlier_result(keys, SimpleNamespace(overrides={"batching": {"buckets": 3}})) == result


class Sorted(Batching):
    """A batching of one's own."""


@pytest.mark.parametrize("words, usable", [("{max_batch_seconds: auto, step_seconds: 24}", True),
                                           ("[auto, 24]", False)])
def test_a_batching_given_as_a_whole_keeps_its_class_or_is_refused_at_the_start(tmp_path, words, usable):
    command = arguments.parse([str(ROOT / "tests" / "recipe" / "small.yaml"), "--output_folder", str(tmp_path),
                               "--batching", f"!new:{__name__}.Sorted {words}"])
    config = RunConfig.of(command, torch.device("cpu"))
    with contextlib.nullcontext() if usable else refused("bad-option", key="batching"):
        assert largest_batch.earlier_result(config.keys(), command) is None
        batching = config.deciding_batch_size(12.0).build().keys.batching
        assert config.keys().batching.auto, "the first description stays as it was"
        assert isinstance(batching, Sorted) and (batching.max_batch_seconds, batching.step_seconds) == (12.0, 24)


def measured(folder, gib):
    """What this rank measures if it has the memory that ``gib`` has for it, in GiB."""
    folder.mkdir(exist_ok=True)
    words = [str(ROOT / "tests" / "recipe" / "small.yaml"), "--device", "cpu", "--batching.max_batch_seconds", "auto",
             "--batching.step_seconds", "24", "--corpus.max_duration", "4", "--output_folder", str(folder)]
    command, device = arguments.parse(words), torch.device("cpu")
    config = RunConfig.of(command, device)
    ranks.init(device)
    batch_size_search.memory_budget = lambda requested, device: gib[ranks.rank()]
    multiprocessing.get_context = lambda method: CONTEXT  # whose processes have imported all; a run spawns them
    return largest_batch.measure(config), largest_batch.earlier_result(config.keys(), command)


@pytest.mark.slow
@on_linux
def test_all_ranks_have_what_fits_into_the_smallest_share(tmp_path, cache, monkeypatch):
    monkeypatch.setenv("SBKIT_CACHE", str(cache))
    (found, kept), (other, _) = results(measured, tmp_path / "run", [64.0, 2 * (LEAST + 1.5)], timeout=300)
    assert found == other == 24.0 and kept is None, "a run without a checkpoint measures again"
    stored = json.loads((tmp_path / "run" / MEASURED).read_text())
    assert stored[largest_batch.KEY] == 24.0 and f"cpu with {LEAST + 1.5:.3g} GiB, fp32" in stored["measured"]


@pytest.mark.long
@on_linux
def test_a_memory_that_is_too_small_is_an_error(tmp_path, cache, monkeypatch):
    monkeypatch.setenv("SBKIT_CACHE", str(cache))
    for changed, name in ((batch_size_search, "memory_budget"), (multiprocessing, "get_context")):
        monkeypatch.setattr(changed, name, None)  # put back at the end
    with refused("no-batch-fits", wording=False):
        measured(tmp_path / "run", [LEAST])


@pytest.mark.long
@on_linux
def test_a_run_measures_before_its_first_step_and_never_again(tmp_path, cache, monkeypatch):
    monkeypatch.setenv("SBKIT_CACHE", str(cache))
    data, out = run_folders.corpus(tmp_path / "data", 1.0, train=8, dev=2, test=2), tmp_path / "out"
    words = [str(ROOT / "hparams" / "ctc.yaml"), *(f"--{name}={value}" for name, value in run_folders.TINY.items()),
             "--max_batch_seconds=auto", "--step_seconds=4", f"--data_folder={data}", f"--output_folder={out}",
             "--device=cpu", "--no-check", "--noprogressbar"]
    here("train", *words, "--number_of_epochs=1")
    assert json.loads((out / MEASURED).read_text())[largest_batch.KEY] == 4.0

    def again(*given):
        raise AssertionError("it was measured")

    monkeypatch.setattr(largest_batch, "measure", again)
    (out / MEASURED).write_text(json.dumps({largest_batch.KEY: 2.5}))  # as if no more had fitted
    here("train", *words, "--number_of_epochs=2")
    assert [line["max_batch_seconds"] for line in metrics(out, "run")] == [4.0, 2.5]
