"""The comparison of what systems learn: which runs there are, what is counted, and what the table and the plot say."""

import json
import os
import runpy
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict
from pathlib import Path

import numpy as np
import processes
import pytest
import soundfile

from sbkit.data.manifest import Manifest
from sbkit.errors import SbkitError
from tools.bench import corpora, learning, systems
from tools.bench.figure import figure, log_ticks, points
from tools.bench.harness import read_lines
from tools.bench.learning import Length, PlannedRun, Results, as_markdown, matrix
from tools.bench.systems import Cell

ROOT = Path(__file__).parents[2]
OPTIONS = {"device": "cpu", "precision": "fp32", "threads": 2, "keys": []}
EPOCHS, MINUTES = Length(epochs=2), Length(minutes=5)


def facts(wer=50.0, seconds=(40.0, 30.0), **more):
    """What a run's file says."""
    return {"dev_wer": wer, "test_wer": wer + 1, "epoch_seconds": list(seconds), "train_seconds": sum(seconds),
            "wall_seconds": sum(seconds) + 20, "audio_hours": 0.5 * len(seconds), "parameters": 3_500_000,
            "versions": {"torch": "2.11.0"}, "commit": "abc", "others_share": 0.01, **more}


def put(results, cell, found):
    results.put(cell.name, {**asdict(cell), **found})


@pytest.fixture
def results(tmp_path):
    return Results(tmp_path, OPTIONS)


# ---------------------------------------------------------------- what is planned for


def test_a_corpus_is_hours_of_speech_or_a_folder(tmp_path):
    assert corpora.parse("es:0.3").name == "es-0.3h"
    (folder := tmp_path / "small").mkdir()
    given = corpora.parse(f"de={folder}")
    assert (given.language, given.folder, given.name) == ("de", str(folder), "de-small")
    with pytest.raises(SbkitError, match="no such folder or archive"):
        corpora.parse(f"de={folder}er")
    (made := tmp_path / "corpora" / "de-small" / "corpus.json").parent.mkdir(parents=True)
    made.write_text(json.dumps(asdict(corpora.Corpus("de-small", "de", "/other/small", "", 1.0, 2, 0.0))))
    with pytest.raises(SbkitError, match=f"was made from /other/small, not {folder}"):
        corpora.find(given, tmp_path)


@pytest.mark.parametrize("text", ["en", "en:", ":1", "en:much", "en:0", "en:-1", "=folder"])
def test_a_corpus_that_says_neither_is_refused(text):
    with pytest.raises(SbkitError, match="cannot read the corpus"):
        corpora.parse(text)


def test_systems_take_turns_and_the_first_seed_comes_whole():
    planned = list(matrix(["en", "es"], ["sbkit", "nemo"], [1, 2], [MINUTES, Length(epochs=6), EPOCHS]))
    assert len(planned) == 24
    assert [one.seed for one in planned] == [1] * 12 + [2] * 12
    assert [one.corpus for one in planned[:12]] == ["en"] * 6 + ["es"] * 6
    assert [(str(one.length), one.system) for one in planned[:6]] == [
        ("2 epochs", "sbkit"), ("2 epochs", "nemo"), ("6 epochs", "sbkit"), ("6 epochs", "nemo"),
        ("5 min", "sbkit"), ("5 min", "nemo")]


# ---------------------------------------------------------------- what results tell


def test_minutes_become_the_epochs_that_come_closest_and_stay_so(results):
    put(results, Cell("en", "sbkit", 1, 3), facts(seconds=(90.0, 30.0, 34.0)))
    assert results.fitted("en", "sbkit", MINUTES) is None
    assert results.fit("en", "sbkit", 5) == 9  # of 32 s; the first, which warms up, is not planned
    put(results, Cell("en", "sbkit", 2, 3), facts(seconds=(90.0, 100.0, 100.0)))
    assert results.fit("en", "sbkit", 5) == results.fitted("en", "sbkit", MINUTES) == 9
    assert results.fit("en", "sbkit", 0.1) == 1
    assert results.fit("en", "nemo", 5) is None


def test_a_result_of_other_options_is_refused(results, tmp_path):
    put(results, Cell("en", "sbkit", 1, 2), facts())
    other = Results(tmp_path, {**OPTIONS, "threads": 1})
    with pytest.raises(SbkitError, match="other options"):
        other.get(Cell("en", "sbkit", 1, 2).name)


def test_an_estimate_is_a_guess_until_the_system_has_run(results):
    planned = PlannedRun("en", "nemo", 2, Length(epochs=4))
    minutes, measured = results.estimate(planned, train_seconds=3600)
    assert not measured and minutes == pytest.approx((4 * 3600 / 60 + 60) / 60)
    assert results.estimate(planned, train_seconds=None) is None
    put(results, Cell("en", "nemo", 1, 2), facts(seconds=(50.0, 30.0)))
    assert results.estimate(planned, train_seconds=3600) == (pytest.approx((4 * 30 + 20) / 60), True)


def test_training_is_timed_without_validation():
    lines = [
        {"kind": "run", "parameters": 10, "precision": "fp32", "environment": {"torch": "2.11.0", "sbkit": "0.1.0"}},
        {"kind": "step", "step": 1}, {"kind": "epoch", "epoch": 1, "step": 5, "train_seconds": 3.5},
        {"kind": "epoch", "epoch": 1, "step": 5, "valid_WER": 90.0},
        {"kind": "epoch", "epoch": 2, "step": 10, "train_seconds": 2.5},
        {"kind": "epoch", "epoch": 2, "step": 10, "valid_WER": 80.0}, {"kind": "test", "epoch": 2, "test_WER": 81.0},
    ]
    found = systems.from_metrics(lines)
    assert (found["epoch_seconds"], found["steps"], found["parameters"]) == ([3.5, 2.5], 10, 10)


def test_every_system_is_scored_on_all_references():
    references = {"a": "the cat sat", "b": "on a mat", "silence": ""}
    found = systems.score("dev", references, {"b": "on the mat", "a": "the cat sat", "silence": "oh"})
    assert found["dev_wer"] == pytest.approx(100 / 6, abs=1e-3)
    with pytest.raises(SbkitError, match="1 of 2 dev utterances were not transcribed, such as b"):
        systems.score("dev", references, {"a": "the cat sat"})


def test_work_of_others_is_told_from_ours(monkeypatch):
    monkeypatch.setattr(systems.os, "cpu_count", lambda: 2)
    clocks = [(100.0, 5000.0, 10.0), (110.0, 5018.0, 22.0)]  # in ten seconds 18 of work, 12 of it ours
    monkeypatch.setattr(systems.Others, "_now", staticmethod(lambda: clocks.pop(0)))
    assert systems.Others().share() == pytest.approx(0.3)


def test_work_of_a_child_is_ours():
    before = systems.Others._now()
    if before is None:
        pytest.skip("this system has no /proc/stat")
    program = "import time\nwhile time.process_time() < 0.5: pass"
    subprocess.run([sys.executable, "-c", program], check=True)
    seconds, work, own = (now - then for now, then in zip(systems.Others._now(), before, strict=True))
    assert 0.5 <= own <= work + 0.3 and seconds >= 0.4


def test_nemo_is_left_out_with_a_reason(tmp_path):
    setting = systems.Setting("cpu", "fp32", 1, tmp_path / "nemo")
    assert systems.missing("sbkit", setting) is None
    assert "is no environment" in systems.missing("nemo", setting) and "--make-nemo" in systems.missing("nemo", setting)
    python = tmp_path / "nemo" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)  # an environment, without NeMo
    assert "has no NeMo" in systems.missing("nemo", setting)


def test_nemo_gets_the_same_utterances_as_wavs_of_16_khz(tmp_path):
    time = np.arange(24_000) / 8000  # 3 s
    soundfile.write(tmp_path / "long.wav", 0.1 * np.sin(time), 8000)
    manifest = Manifest(ids=["x", "y"], wavs=[str(tmp_path / "long.wav")] * 2, durations=[1.0, 1.5], starts=[0.0, 1.2],
                        texts=["año nuevo", "l'été"])
    corpora.convert(manifest, tmp_path / "nemo", "dev")
    rows = read_lines(tmp_path / "nemo" / "dev.json")
    assert [(row["id"], row["text"], row["duration"]) for row in rows] == [("x", "año nuevo", 1.0), ("y", "l'été", 1.5)]
    assert [soundfile.info(row["audio_filepath"]).samplerate for row in rows] == [16_000, 16_000]
    corpus = corpora.Corpus("es", "es", "", str(tmp_path / "nemo"), 1.0, 2, 0.0)
    assert corpus.references("dev") == {"x": "año nuevo", "y": "l'été"}


# ---------------------------------------------------------------- what is run


class Machine:
    """Stands in for the systems: notes what was run, takes a second an epoch; ``breaks``: a system that fails."""

    def __init__(self):
        self.ran, self.breaks, self.error = [], None, None

    def measure(self, run):
        assert not run.folder.exists(), "a run that was stopped would be resumed"
        run.folder.mkdir(parents=True)
        self.ran.append((run.cell.system, run.cell.epochs))
        if run.cell.system == self.breaks:
            raise self.error
        return facts(seconds=[30.0] * run.cell.epochs)


@pytest.fixture
def machine(monkeypatch):
    machine = Machine()
    monkeypatch.setattr(systems, "measure", machine.measure)
    monkeypatch.setattr(corpora, "prepare", lambda *_: None)
    return machine


def bench(tmp_path, monkeypatch, *more):
    words = ["--out", str(tmp_path), "--corpora", "en:1", "--seeds", "1", "--systems", "sbkit,stock", *more]
    monkeypatch.setattr(sys, "argv", ["learning", "--precision", "fp32", *words])
    return learning.main()


def test_only_what_is_missing_is_run(machine, tmp_path, monkeypatch, capsys):
    (tmp_path / "work" / "en-1h.sbkit.2-epochs.seed-1").mkdir(parents=True)  # left behind by a run that was stopped
    assert bench(tmp_path, monkeypatch, "--epochs", "2", "--minutes", "") == 0
    assert machine.ran == [("sbkit", 2), ("stock", 2)]
    assert "2 of 2 runs are missing: about 4 min" in capsys.readouterr().err.splitlines()[0]
    assert bench(tmp_path, monkeypatch, "--epochs", "2,4", "--minutes", "") == 0
    assert machine.ran[2:] == [("sbkit", 4), ("stock", 4)]
    assert "| en-1h | 4 epochs | SpeechBrain |" in (tmp_path / "learning.md").read_text()
    capsys.readouterr()
    assert bench(tmp_path, monkeypatch, "--epochs", "2,6", "--minutes", "", "--plan") == 0
    assert "2 of 4 runs are missing" in capsys.readouterr().out and len(machine.ran) == 4


def test_minutes_alone_begin_with_a_run_that_tells_the_speed(machine, tmp_path, monkeypatch):
    assert bench(tmp_path, monkeypatch, "--epochs", "", "--minutes", "3") == 0
    assert machine.ran == [("sbkit", 2), ("sbkit", 6), ("stock", 2), ("stock", 6)]
    assert bench(tmp_path, monkeypatch, "--epochs", "6", "--minutes", "3") == 0
    assert len(machine.ran) == 4, "three minutes and six epochs are the same run here"


@pytest.mark.parametrize(("error", "code", "expected", "ran"), [
    (SbkitError("out of luck"), 1, ["out of luck", "1 of 2 runs failed"], [("sbkit", 2), ("stock", 2), ("sbkit", 2)]),
    (KeyboardInterrupt(), 130, ["the same command runs what is missing"], [("sbkit", 2), ("sbkit", 2), ("stock", 2)])],
    ids=["a system fails", "stopped"])
def test_a_run_that_ends_early_leaves_no_result_and_is_tried_again(machine, tmp_path, monkeypatch, capsys, error, code,
                                                                  expected, ran):
    machine.breaks, machine.error = "sbkit", error
    assert bench(tmp_path, monkeypatch, "--epochs", "2", "--minutes", "") == code
    output = capsys.readouterr().err
    assert all(each in output for each in expected)
    machine.breaks = None
    assert bench(tmp_path, monkeypatch, "--epochs", "2", "--minutes", "") == 0
    assert machine.ran == ran


# ---------------------------------------------------------------- what is shown


def test_the_table_has_each_seed_the_mean_and_the_ratio(results):
    for seed, wer in ((1, 10.0), (2, 20.0)):
        put(results, Cell("en", "sbkit", seed, 2), facts(wer))
        put(results, Cell("en", "nemo", seed, 2), facts(4 * wer, others_share=0.4))
    lines = as_markdown(results, ["en"], [EPOCHS, MINUTES]).splitlines()
    assert lines[2] == "| en | 2 epochs | sbkit | 2 | 1.00 | 1.2 | 1.5 | 10.0, 20.0 | 15.0 % |  | 16.0 % |"
    assert lines[3] == "| en | 2 epochs | NeMo | 2 | 1.00 | 1.2 | 1.5 | 40.0, 80.0 | 60.0 % | 4.0x | 61.0 % |"
    assert lines[4] == "", "nothing is known of 5 minutes yet"
    assert "2 of 4 runs (others took up to 40 % of the cores)" in lines[-1]


def test_the_plot_has_a_curve_for_each_system_in_both_panels(results):
    for epochs, wer in ((2, 90.0), (4, 9.0)):
        for system, factor in (("sbkit", 0.1), ("nemo", 1.0)):
            for seed in (1, 2):
                put(results, Cell("en", system, seed, epochs), facts(wer * factor * seed / 2, [30.0] * epochs))
    runs = results.of()
    ours = points(runs, "en", "sbkit")
    assert [(one.hours, one.minutes) for one in ours] == [(1.0, 1.0), (2.0, 2.0)]
    assert [one.mean for one in ours] == pytest.approx([6.75, 0.675])
    svg = ElementTree.fromstring(figure(runs, ["en", "es"]))
    curves = [each for each in svg.iter() if each.tag.endswith("polyline")]
    assert len(curves) == 4
    heights = [[float(pair.split(",")[1]) for pair in curve.get("points").split()] for curve in curves[:2]]
    assert all(one > other for one, other in zip(*heights, strict=True)), "a lower rate lies lower"
    assert all(early < late for early, late in heights)


@pytest.mark.parametrize("low, high", [(0.0, 0.0), (0.3, 105.0), (5.0, 5.0), (2.0, 50.0), (99.0, 250.0)])
def test_the_axis_of_rates_holds_them_all(low, high):
    ticks = log_ticks(low, high)
    assert len(ticks) > 1 and ticks == sorted(ticks)
    assert ticks[0] <= max(low, 0.1) and ticks[-1] >= high


def module(*words):
    """``python -m WORDS`` with its imports done."""
    os.chdir(ROOT)
    sys.argv = list(words)
    runpy.run_module(words[0], run_name="__main__")


@pytest.mark.long
def test_sbkit_and_stock_are_trained_and_scored(tmp_path, monkeypatch, capsys):
    """The real programs, with a model of one small layer; NeMo isn't there."""
    def call(name, command, log, threads):
        words = list(map(str, command))[2:]
        if words[0] == "torch.distributed.run":
            assert words[2] == "--nproc_per_node=1" and words[3].endswith("train.py")
            words = ["sbkit", "train", *words[4:], "--no-check"]
        done = processes.program(module, *words, timeout=400, OMP_NUM_THREADS="1")
        assert done.returncode == 0, done.stderr

    monkeypatch.setattr(systems, "call", call)
    assert bench(tmp_path, monkeypatch, "--corpora", "en:0.02", "--epochs", "1", "--minutes", "", "--threads", "1",
                 "--systems", ",".join(systems.SYSTEMS), "--nemo", str(tmp_path / "none"), "--num_encoder_layers", "1",
                 "--d_model", "32", "--d_ffn", "32", "--num_workers", "0") == 0
    assert "without nemo" in capsys.readouterr().err
    runs = [json.loads(path.read_text()) for path in (tmp_path / "results").glob("*.json")]
    found = {run["system"]: run for run in runs}
    assert sorted(found) == ["sbkit", "stock"]
    for one in found.values():
        assert one["dev_wer"] > 0 and one["test_wer"] > 0 and one["parameters"] == found["sbkit"]["parameters"]
        assert 0 < one["train_seconds"] == sum(one["epoch_seconds"]) < one["wall_seconds"]
    assert (tmp_path / "learning.md").is_file() and (tmp_path / "learning.svg").is_file()
