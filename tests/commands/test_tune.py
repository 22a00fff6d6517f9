"""sbkit tune tries what fits once for each amount of memory, and says what it can not have."""

import contextlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sbkit import cli
from sbkit.data.plan import Batching
from sbkit.recipe import batch_size
from sbkit.recipe.cost import GIB
from sbkit.system import memory
from sbkit.train import device as devices
from sbkit.train.memory import batch_size_search, trials
from sbkit.train.memory.bounded_trial import BASE_BYTES, WORKER_BYTES

SMALL = Path(__file__).parents[1] / "recipe" / "small.yaml"
on_linux = pytest.mark.skipif(not memory.can_bound(), reason="only Linux keeps a process to a bound of memory")


class _Fake:
    """A card with room for so many seconds."""

    edges, most_seconds, tried = [2.0, 4.0], 100.0, 0
    device_name, device = "a card", SimpleNamespace(type="cuda")
    brain, batching = SimpleNamespace(precision="bf16"), Batching(max_batch_seconds=30)
    longest = 4.0

    def __init__(self, cache):
        self.cache = cache

    def fits(self, n, seconds):
        _Fake.tried += 1
        return n * seconds <= 40


def test_a_command_tunes_once_for_each_amount_of_memory(tmp_path, monkeypatch, capsys):
    shares = []
    monkeypatch.setattr(devices, "resolve", lambda name: _Fake.device)
    monkeypatch.setattr(trials, "open_trial", lambda *given: contextlib.nullcontext(_Fake(tmp_path / "tune.json")))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80 * GIB))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, device: shares.append(share))
    assert cli.main(["tune", str(SMALL)]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[3].split() == ["up", "to", "4.0", "s", "10", "40"]
    assert "a card with 80 GiB, bf16: 90% of what fits: --max_batch_seconds 36 (the recipe has 30)" in out
    tried = _Fake.tried
    monkeypatch.setattr(_Fake, "batching", Batching("auto", step_seconds=30))
    assert cli.main(["tune", str(SMALL)]) == 0 and "(the recipe has auto)" in capsys.readouterr().out
    assert cli.main(["tune", str(SMALL)]) == 0
    assert "from the cache" in capsys.readouterr().err and _Fake.tried == tried
    assert cli.main(["tune", str(SMALL), "--fresh"]) == 0 and _Fake.tried == 2 * tried
    assert cli.main(["tune", str(SMALL), "--memory", "40"]) == 0 and _Fake.tried == 3 * tried
    assert shares == [1.0] * 4 + [0.5] * 2  # searched and rehearsed each time


@pytest.mark.parametrize("words, expected", [
    (["--memory"], "--memory: expected one argument"), (["--memory", "much"], "--memory: invalid float value: 'much'"),
    (["--memory=-1"], "--memory -1: there are"), (["--memory", "nan"], "--memory nan: there are"),
    (["--memory", "1e6"], "--memory 1e+06: there are")])
@on_linux
def test_memory_that_can_not_be_had_is_an_error(words, expected, capsys):
    assert cli.main(["tune", str(SMALL), "--device", "cpu", *words]) == 2
    assert expected in capsys.readouterr().err


def test_a_system_that_can_not_bound_memory_is_an_error(monkeypatch, capsys):
    monkeypatch.setattr(memory, "can_bound", lambda: False)
    assert cli.main(["tune", str(SMALL), "--device", "cpu"]) == 2
    assert "can't limit the memory of a process" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.long
@on_linux
def test_what_a_cpu_has_room_for_is_found_by_running_out_of_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SBKIT_CACHE", str(tmp_path))
    monkeypatch.setattr(batch_size_search, "PRECISION", 0.5)  # each attempt too many costs a process
    monkeypatch.setattr(batch_size_search, "REHEARSED", 1)
    gib = round((BASE_BYTES + 2 * WORKER_BYTES) / GIB + 1.1, 1)  # what a process holds before a batch, and more
    words = [str(SMALL), "--device", "cpu", "--batching.step_seconds", "4000"]
    assert cli.main(["tune", *words, "--memory", str(gib)]) == 0
    (found,) = [one for path in (tmp_path / "tune").iterdir() for one in batch_size.cached(path)]
    expected = f"cpu with {gib:g} GiB, fp32: {found.share:.0%} of what fits: --max_batch_seconds {found.seconds} ("
    assert expected in capsys.readouterr().out
    assert 20 <= found.seconds < 3600 and found.share <= batch_size.MARGIN
    assert cli.main(["check", str(SMALL), "--device", "cpu"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if "sbkit tune" in line)
    assert f"with {gib:g} GiB on cpu" in line and f"{found.seconds} s" in line
