"""sbkit tune finds what fits by trying, in few attempts, and remembers it."""

import contextlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sbkit import cli, tune
from sbkit.recipe import batch_size
from sbkit.recipe.bill import GIB
from sbkit.train import device as devices
from sbkit.train.memory import host
from sbkit.train.memory.trials import BESIDE, READER

SMALL = Path(__file__).parents[1] / "recipe" / "small.yaml"
on_linux = pytest.mark.skipif(not host.can_bound(), reason="only Linux keeps a process to a bound of memory")


@settings(max_examples=200, deadline=None)
@given(capacity=st.floats(0.5, 5000), edges=st.lists(st.floats(0.5, 30), min_size=1, max_size=6, unique=True),
       most=st.integers(30, 4000), bend=st.floats(0, 0.2))
def test_the_largest_that_fits_is_found_in_few_attempts(capacity, edges, most, bend):
    tried = []

    def needs(n, seconds):
        return n * seconds * (1 + bend * seconds)  # attention grows with the square

    def fits(n, seconds):
        tried.append((n, seconds))
        assert n >= 1 and n * seconds <= most + seconds
        return needs(n, seconds) <= capacity

    edges = sorted(edges)
    found = tune.search(edges, fits, most, show=False)
    for edge, n in zip(edges, found, strict=True):
        assert n == 0 or needs(n, edge) <= capacity
        beyond = n + max(1, int(tune.PRECISION * n) + 1)
        assert beyond > most / edge or needs(beyond, edge) > capacity
    assert len(tried) <= 25 * len(edges)


def test_what_is_recommended_leaves_a_margin_and_is_no_more_than_a_step():
    assert batch_size.BatchSize(2, [10.0, 20.0], [12, 5], 400).seconds == 90
    assert batch_size.BatchSize(2, [10.0, 20.0], [30, 14], 200).seconds == 200
    assert batch_size.BatchSize(2, [10.0, 20.0], [3, 0], 200).seconds == 0


def test_what_is_recommended_has_room_for_batches_of_many_lengths():
    found, tried = batch_size.BatchSize(2, [10.0, 20.0], [60, 30], 400), []

    def fits(n, seconds):
        tried.append(n * seconds)
        return tried[-1] <= 300

    assert tune.rehearse(found, lambda n, seconds: True) is found and found.seconds == 400
    assert tune.rehearse(found, fits).seconds == 291  # 400 x 0.9 x 0.9 x 0.9
    assert len(tried) >= tune.REHEARSED and max(tried[-tune.REHEARSED:]) <= 291 < 300 < tried[0]
    assert tune.rehearse(found, lambda n, seconds: False).seconds == 0


def test_results_are_kept_by_memory(tmp_path):
    path = tmp_path / "tune" / "x.json"
    assert batch_size.remembered(path) == []
    few, many = batch_size.BatchSize(2.0, [1.0], [7], 100), batch_size.BatchSize(16.0, [1.0], [70], 100)
    for found in (many, batch_size.BatchSize(2.0, [1.0], [9], 100), few):
        batch_size.remember(path, found)
    assert batch_size.remembered(path) == [few, many]
    path.write_text('[{"gib": 2}]')
    assert batch_size.remembered(path) == []
    path.write_text("{")
    assert batch_size.remembered(path) == []


def test_they_are_kept_by_model_device_and_precision():
    def place(width=3, precision="fp32", **hparams):
        model = batch_size.model_of({"m": torch.nn.Linear(2, width)})
        return batch_size.place(model, hparams, precision, torch.device("cpu"))

    assert place() == place()
    assert len({place(), place(4), place(precision="bf16"), place(ctc_weight=0.3), place(ema=1)}) == 5


class _Fake:
    """A card with room for so many seconds."""

    edges, most_seconds, tried = [2.0, 4.0], 100.0, 0
    device_name, device = "a card", SimpleNamespace(type="cuda")
    brain, batching = SimpleNamespace(precision="bf16"), SimpleNamespace(max_batch_seconds=30)

    def __init__(self, cache):
        self.cache = cache

    def fits(self, n, seconds):
        _Fake.tried += 1
        return n * seconds <= 40


def test_a_command_tunes_once_for_each_amount_of_memory(tmp_path, monkeypatch, capsys):
    shares = []
    monkeypatch.setattr(devices, "resolve", lambda name: _Fake.device)
    monkeypatch.setattr(tune, "trial", lambda request, device: contextlib.nullcontext(_Fake(tmp_path / "tune.json")))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80 * GIB))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, device: shares.append(share))
    assert cli.main(["tune", str(SMALL)]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[3].split() == ["up", "to", "4.0", "s", "10", "40"]
    assert "a card with 80 GiB, bf16: --max_batch_seconds 36 (90% of what fitted; the recipe has 30)" in out
    tried = _Fake.tried
    assert cli.main(["tune", str(SMALL)]) == 0
    assert "found before" in capsys.readouterr().err and _Fake.tried == tried
    assert cli.main(["tune", str(SMALL), "--fresh"]) == 0 and _Fake.tried == 2 * tried
    assert cli.main(["tune", str(SMALL), "--memory", "40"]) == 0 and _Fake.tried == 3 * tried
    assert shares == [1.0] * 4 + [0.5] * 2  # searched and rehearsed each time


@pytest.mark.parametrize("words, told", [
    (["--memory"], "takes a number of GiB"), (["--memory", "much"], "takes a number of GiB"),
    (["--memory=-1"], "takes a number of GiB"), (["--memory", "1e6"], "--memory 1e+06: there are")])
@on_linux
def test_memory_that_can_not_be_had_is_told(words, told, capsys):
    assert cli.main(["tune", str(SMALL), "--device", "cpu", *words]) == 2
    assert told in capsys.readouterr().err


def test_a_system_that_can_not_bound_memory_is_told(monkeypatch, capsys):
    monkeypatch.setattr(host, "can_bound", lambda: False)
    assert cli.main(["tune", str(SMALL), "--device", "cpu"]) == 2
    assert "can't bound the memory of a process" in capsys.readouterr().err


@on_linux
def test_what_a_cpu_has_room_for_is_found_by_running_out_of_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SBKIT_CACHE", str(tmp_path))
    monkeypatch.setattr(tune, "PRECISION", 0.5)  # each attempt too many costs a process
    monkeypatch.setattr(tune, "REHEARSED", 1)
    gib = round((BESIDE + 2 * READER) / GIB + 1.1, 1)  # what a process holds before its first batch, and a little
    words = [str(SMALL), "--device", "cpu", "--batching.step_seconds", "4000"]
    assert cli.main(["tune", *words, "--memory", str(gib)]) == 0
    (found,) = [one for path in (tmp_path / "tune").iterdir() for one in batch_size.remembered(path)]
    told = f"cpu with {gib:g} GiB, fp32: --max_batch_seconds {found.seconds} ({found.share:.0%}"
    assert told in capsys.readouterr().out
    assert 20 <= found.seconds < 3600 and found.share <= batch_size.MARGIN
    assert cli.main(["check", str(SMALL), "--device", "cpu"]) == 0
    told = next(line for line in capsys.readouterr().out.splitlines() if "tried" in line)
    assert f"with {gib:g} GiB on cpu" in told and f"{found.seconds} s" in told
