"""The recipe as shipped learns whatever is asked of it: the design of the benchmark's runs, and a cheap one."""

import itertools
import sys

import processes
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbkit.errors import SbkitError
from sbkit.recipe import load
from tools.bench import convergence as bench
from tools.bench.harness import Results, discard
from tools.gpu import corpus

values = st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True).map(tuple)
PEAK = load.tree(bench.RECIPE).at("lr")


@settings(deadline=None, max_examples=30)
@given(st.tuples(values, values, values))
def test_every_pair_of_values_that_is_possible_occurs_in_some_run(lists):
    factors = {"epochs": lists[0], "corpus": lists[1], "model": lists[2]}
    everything = [dict(zip(factors, each, strict=True)) for each in itertools.product(*factors.values())]
    wanted = {pair for run in filter(bench.possible, everything) for pair in bench.pairs(run)}
    runs = bench.design(factors)
    assert wanted == {pair for run in runs for pair in bench.pairs(run)}
    assert len(runs) <= len(everything)


def test_the_design_is_small():
    assert len(bench.design(bench.FACTORS)) <= 30


def ran(monkeypatch, tmp_path, *words):
    """The runs that a command line starts, none of which trains."""
    found = []

    def train(run, *more):
        found.append(run)
        raise SbkitError("no run")

    monkeypatch.setattr(bench, "train", train)
    monkeypatch.setattr(sys, "argv", ["convergence", "--out", str(tmp_path), *words])
    with pytest.raises(SystemExit, match="runs failed"):
        bench.main()
    return found


def test_runs_are_announced_and_short_ones_come_first(monkeypatch, tmp_path, capsys):
    runs = ran(monkeypatch, tmp_path, "--spec_augment.ramp", "null")
    assert [bench.guess(run) for run in runs] == sorted(bench.guess(run) for run in runs)
    output = capsys.readouterr().err
    assert output.startswith(f"{len(runs)} of {len(runs)} runs are missing: about ") and "guessed" in output


def test_the_plan_has_the_runs_in_their_order_and_learns_the_speed(monkeypatch, tmp_path, capsys):
    runs = ran(monkeypatch, tmp_path)
    results = bench.results_of(tmp_path, PEAK, [])
    for run in runs[:3]:
        results.put(bench.name_of(run), {**run, "seconds": 3 * bench.guess(run)})
    monkeypatch.setattr(sys, "argv", ["convergence", "--out", str(tmp_path), "--plan", "--workers", "2"])
    capsys.readouterr()
    bench.main()
    lines = capsys.readouterr().out.splitlines()
    minutes = 3 * sum(map(bench.guess, runs[3:])) / 60
    assert lines[-1] == (f"{len(runs) - 3} of {len(runs)} runs are missing: about {minutes / 2:.0f} min "
                         "with --workers 2")
    assert [line.split()[0] for line in lines if "seed" in line] == [bench.name_of(run) for run in runs[3:]]


def test_results_of_another_recipe_are_refused(tmp_path):
    run = bench.design(bench.FACTORS)[0]
    same = {"peak": 0.003, "keys": [], "recipe": bench.recipe_hash()}
    for changed in ({"peak": 0.002}, {"keys": ["--spec_augment.ramp", "null"]}, {"recipe": "an older one"}, {}):
        Results(tmp_path / "results", same | changed).put(bench.name_of(run), {**run, "cer": 5.0})
        if changed:
            with pytest.raises(SbkitError, match=r"was measured with other options.*choose another --out"):
                bench.train(run, tmp_path, None, 0.003, [])
    assert bench.train(run, tmp_path, None, 0.003, [])["cer"] == 5.0


def test_a_run_that_was_warned_fails_the_benchmark(monkeypatch, tmp_path, capsys):
    def found(run, *more):
        return {**run, "steps": 9, "cer": 5.0, "wer": 9.0, "seconds": 1, "warnings": int(run["epochs"] == 60)}

    monkeypatch.setattr(bench, "train", found)
    monkeypatch.setattr(sys, "argv", ["convergence", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"not learnt, or with warnings: .*-60ep-") as ended:
        bench.main()
    assert "-3ep-" not in str(ended.value) and "warnings" in capsys.readouterr().out


@pytest.mark.long
def test_thirty_clips_are_learnt_by_two_processes_in_a_hurry(tmp_path, monkeypatch):
    """As the benchmark's recordings, but each letter is a tone, and in steps of 5 s."""
    def call(name, command, log, threads):
        *torchrun, processes_, script = map(str, command[:6])
        assert torchrun[1:3] == ["-m", "torch.distributed.run"] and script.endswith("train.py")
        processes.sbkit("train", *command[6:], "--no-check", ranks=int(processes_.partition("=")[2]))

    monkeypatch.setattr(bench, "call", call)
    clips = corpus.write(tmp_path / "tones", {"train": 0.02}, longest=3.0)
    run = {"epochs": 6, "seed": 3, "rate": 3.0, "processes": 2, "tokens": "char", "model": "small"}
    copies = bench.to_hear(clips, tmp_path / "clips")
    found = bench.train({"corpus": bench.RECORDINGS, **run}, tmp_path, copies, PEAK,
                        ["--step_seconds", "5", "--least_steps", "100", "--num_encoder_layers", "2"])
    assert found["cer"] < bench.LEARNT and not found["warnings"]


def test_of_a_run_what_sbkit_reproduce_needs_stays(tmp_path):
    folder = tmp_path / "es.seed-1"
    (folder / "run" / "save").mkdir(parents=True)
    (folder / "run" / "reproduce.json").write_text("{}")
    discard(folder)
    assert [each.name for each in tmp_path.iterdir()] == ["es.seed-1.reproduce.json"]
