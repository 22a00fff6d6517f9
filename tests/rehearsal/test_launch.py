"""What is found in the diaries of a launch, whose processes do something simple here."""

import contextlib
import faulthandler
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import run_folders
import torch
from refusals import refused

from sbkit.data.mixture import Mixture
from sbkit.recipe import arguments, cost, flops, load, speed, trace
from sbkit.recipe.batch_size import BatchSize
from sbkit.recipe.report import Report
from sbkit.rehearsal import corpus, rank, run, watch
from sbkit.rehearsal.cards import CARDS
from sbkit.rehearsal.report import assemble
from sbkit.train.memory import batch_size_search, trials

CTC, CODEC = (Path(__file__).parents[2] / "hparams" / name for name in ("ctc.yaml", "codec.yaml"))


def launched(live, folder, monkeypatch, name="train", world=2):
    """What a launch has written once it is over, whose ranks do ``live(diary, rank)``; and whether it went well."""

    def enter(launch, number, job):
        log = os.open(folder / f"{launch}.{number}.log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1), os.dup2(log, 2)
        diary = watch.Diary(folder, launch, number)
        diary.begin_stage("steps")
        live(diary, number)
        diary.write("end", 0)
        os._exit(0)

    monkeypatch.setattr(rank, "run_rank", enter)
    launch = run.Launch(name, {"folder": str(folder), "world": world})
    while not launch.is_over():
        time.sleep(0.02)
    lines = launch.close()
    assert not list(folder.glob("*.group"))  # another process may have the number soon
    return lines, launch.has_succeeded(lines)


def errors_of(lines):
    return assemble("recipe.yaml", lines, 2, CARDS["H100"], 0.0).errors


def fail(diary, words):
    diary.report("exception", ("task.py", 3), words, "", ends=True)
    diary.write("end", 1)
    os._exit(0)


def call(diary, *calls):
    diary.path.with_suffix(".collectives").write_text(json.dumps([[*each, "task.py", 7] for each in calls]))


FIGURES = {"host_ms": 5.0, "card_ms": 2.0, "operations": 1, "bytes": 1, "peak_bytes": 3 << 20, "held_bytes": 2 << 30,
           "launches": 469, "copies": 1, "batch": "", "precision": "fp32", "timeline": {"lines": []}}
GRADIENTS = ("all_reduce", "6 float32")


def test_a_process_that_ends_without_an_error_is_a_finding_with_the_last_lines_of_its_log(tmp_path, monkeypatch):
    def live(diary, number):
        diary.write("ready", "")
        if number == 1:
            diary.begin_stage("validation")
            os.write(2, b"one\ntwo\nthree\n[ma] out of order\n")
            faulthandler.disable()  # pytest's
            os.abort()

    lines, well = launched(live, tmp_path, monkeypatch, "resume")
    [error] = errors_of(lines)
    assert not well and error.code == "crash"
    assert error.message == "rank 1 ended with SIGABRT in stage 'validation'"
    assert error.suggestion.endswith("two | three | [ma] out of order")


def test_a_rehearsal_says_what_it_is_at(monkeypatch, capsys):
    @contextlib.contextmanager
    def server(command, environment, log, end_by):
        folder = Path(command[-1])
        watch.Diary(folder, "train", 0).begin_stage("validation")
        (folder / "found.json").write_text("[]")
        with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1)"]) as process:
            yield process

    monkeypatch.setattr(run, "child", server)
    monkeypatch.setattr(run, "LINE_SECONDS", 0.3)
    for name in ("build", "environment"):
        monkeypatch.setattr(run.fake_gpu, name, lambda *given, **more: {})
    assert run.rehearse([], 1, CARDS["H100"]) == []
    first, *_ = capsys.readouterr().err.splitlines()
    assert first.startswith("rehearsing for 0.3") and first.endswith(" s: validation")


def test_a_process_that_crashes_is_named_with_its_line(tmp_path, monkeypatch):
    monkeypatch.setitem(rank.LAUNCHES, "export", lambda job, diary: os.abort())  # crashes
    launch = run.Launch("export", {"folder": str(tmp_path)})
    while not launch.is_over():
        time.sleep(0.02)
    [error] = errors_of(launch.close())
    assert error.code == "crash" and error.message == "rank 0 ended with SIGABRT in stage 'start'"
    assert Path(error.file).read_text().splitlines()[error.line - 1].endswith("# crashes")


def test_a_card_for_which_torch_has_no_kernels_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 0))
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_90"])
    diary = watch.Diary(tmp_path, "prepare", 0)
    assert rank.prepare({}, diary) == 1
    lines = map(json.loads, diary.path.read_text().splitlines())
    [error] = errors_of([{"launch": "prepare", "rank": 0, **line} for line in lines])
    assert error.code == "no-kernels" and "capability is 7.0" in error.message and error.message.endswith("sm_90")


def test_a_card_that_holds_no_utterance_is_an_error(tmp_path, monkeypatch):
    trial = SimpleNamespace(device_name="a card", brain=SimpleNamespace(precision="bf16"), longest=20.0,
                            batching=SimpleNamespace(min_capacity=1))
    for module, name, result in ((rank, "runs_on", True), (torch.cuda, "get_device_capability", (9, 0)),
                                 (torch.cuda, "get_arch_list", ["sm_90"]), (rank, "check", Report("recipe.yaml")),
                                 (corpus, "write", {"args": []}), (batch_size_search, "memory_budget", 2.0),
                                 (batch_size_search, "measure", BatchSize(2.0, [20.0], [0], 20)),
                                 (trials, "open_trial", contextlib.nullcontext(trial))):
        monkeypatch.setattr(module, name, lambda *given, result=result, **options: result)
    diary = watch.Diary(tmp_path, "prepare", 0)
    job = {"args": [str(CTC), "--max_batch_seconds", "auto"], "folder": str(tmp_path), "world": 1}
    with refused("no-batch-fits", key="max_batch_seconds"):
        rank.prepare(job, diary)
    assert "--batching" not in diary.path.read_text()


def test_a_launch_succeeds_only_if_each_process_does(tmp_path, monkeypatch):
    assert launched(lambda diary, number: None, tmp_path, monkeypatch, "resume")[1]
    assert not launched(lambda diary, number: os._exit(0), tmp_path, monkeypatch, "fail")[1]
    assert not launched(lambda diary, number: number or diary.write("ready", ""), tmp_path, monkeypatch, "train")[1]


def test_stages_that_nothing_reached_are_an_error_if_nothing_else_says_why():
    [error] = errors_of([{"launch": "prepare", "rank": 0, "stage": "corpus", "at": 1.0}])
    assert error.code == "not-reached" and "validation" in error.message and "corpus" not in error.message


@pytest.mark.parametrize("leaves", [False, True])
def test_the_error_of_one_rank_is_the_cause_and_not_what_the_other_does_then(tmp_path, monkeypatch, leaves):
    """It leaves, which is no crash, or calls collectives that the first no longer calls."""
    def live(diary, number):
        if number == 0 and leaves:
            os._exit(1)
        call(diary, *[GRADIENTS] * (3 - number))
        if number == 1:
            fail(diary, "ValueError: no such label")

    lines, well = launched(live, tmp_path, monkeypatch)
    assert [error.message for error in errors_of(lines)] == ["ValueError: no such label"] and not well


@pytest.mark.parametrize("others", [[GRADIENTS, ("all_reduce", "7 float32")], [GRADIENTS]])
def test_collectives_that_differ_are_the_cause_of_what_follows_from_them(others, tmp_path, monkeypatch):
    def live(diary, number):
        call(diary, *([GRADIENTS] * 2, others)[number])
        if number == 1 and len(others) == 2:
            fail(diary, "RuntimeError: timeout")

    [error] = errors_of(launched(live, tmp_path, monkeypatch)[0])
    assert error.code == "collectives" and (error.file, error.line) == ("task.py", 7)
    assert "collective 2 of the run differs: rank 0 calls all_reduce of 6 float32 at task.py:7" in error.message


def test_collectives_are_counted_in_all_launches(tmp_path, monkeypatch):
    def live(diary, number):
        call(diary, *[GRADIENTS] * 4)
        if number == 0:
            diary.write("figures", FIGURES)

    lines = [line for name in ("train", "resume") for line in launched(live, tmp_path, monkeypatch, name)[0]]
    figures = assemble("recipe.yaml", lines, 2, CARDS["H100"], 0.0).sections["figures"]
    assert figures.values["collectives"] == 8 and ["collectives", "8, the same on all ranks"] in figures.rows


@pytest.mark.long
def test_a_rank_whose_children_compute_does_not_hang(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "IDLE", 2.5)
    work = "import os, time\nwhile time.process_time() < 3: pass"

    def live(diary, number):
        subprocess.run([sys.executable, "-c", work], check=True)

    lines, well = launched(live, tmp_path, monkeypatch, "prepare")
    assert well and errors_of(lines)[0].code == "not-reached"


@pytest.mark.long
def test_a_rank_to_which_others_leave_no_core_does_not_hang(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "IDLE", 2.5)
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))  # others have only just begun

    spin = "import time\nuntil = time.monotonic() + 30\nwhile time.monotonic() < until: pass"

    def live(diary, number):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        others = [subprocess.Popen([sys.executable, "-c", spin], start_new_session=True) for _ in range(12)]
        try:
            until = time.process_time() + 0.3  # four seconds at a thirteenth of a core
            while time.process_time() < until:
                pass
        finally:
            for other in others:
                other.kill()

    lines, well = launched(live, tmp_path, monkeypatch, "prepare")
    assert well and errors_of(lines)[0].code == "not-reached"


def test_a_function_that_the_fake_gpu_lacks_is_a_warning_and_a_note():
    lines = [{"stage": "steps"}, {"skip": "the fake GPU has no cudnnRNN"}, {"lacks": "cudnnRNN"}]
    lines = [{"launch": "train", "rank": 0, "at": 1.0} | line for line in lines]
    report = assemble("recipe.yaml", lines, 2, CARDS["H100"], 0.0)
    assert not report.errors and report.notes[0].startswith("cudnnRNN, which the fake GPU does not have")
    [warning] = report.warnings
    assert all(stage in warning.message for stage in ("steps", "validation", "export", "cudnnRNN"))
    assert "1 warning" in report.verdict()
    assert report.sections["rehearsal"].values["stages"]["steps"]["result"].startswith("skipped: the fake GPU has no")


@pytest.mark.parametrize(("said", "left_out"), [
    ("Could not run 'aten::rare' with arguments from the 'CUDA' backend", True), ("my layer has no such mode", False)])
def test_the_count_of_flops_is_left_out_where_fake_tensors_lack_an_operation(said, left_out, tmp_path, monkeypatch):
    class Measured(Exception):
        """The count is over."""

    class Trial:
        brain, edges, batching = None, [1.0], SimpleNamespace(max_batch_seconds=1.0)

        def batch(self, count, seconds):
            raise Measured

    def count(*given):
        raise NotImplementedError(said)

    monkeypatch.setattr(trials, "open_trial", lambda *given: contextlib.nullcontext(Trial()))
    monkeypatch.setattr(flops, "run", count)
    diary = watch.Diary(tmp_path, "measure", 0)
    with pytest.raises(Measured if left_out else NotImplementedError):
        rank.measure({"args": [str(CTC)]}, diary)
    assert ("skip" in diary.path.read_text()) == left_out


def test_an_epoch_of_noise_has_all_steps_although_training_uses_crops(tmp_path):
    recipe = load.open_recipe(CODEC, {"output_folder": str(tmp_path)})
    made = corpus.write(recipe, tmp_path / "data", 2)
    rows = len((tmp_path / "data" / "train.csv").read_text().splitlines()) - 1
    assert rows * recipe.hparams["crop_seconds"] >= corpus.STEPS * made["step_seconds"]


def test_replay_is_not_rehearsed(tmp_path):
    known = str(run_folders.corpus(tmp_path / "known", train=4, dev=2, test=2))
    given = {"output_folder": str(tmp_path), "init_from": "model", "replay": 0.2, "replay_from": known}
    words = corpus.write(load.open_recipe(CTC, given), tmp_path / "data", 1)["args"]
    again = arguments.parse([str(CTC), *words]).overrides
    assert again["replay"] is None and again["replay_from"] is None
    recipe = load.open_recipe(CTC, {**given, **again})
    assert not isinstance(recipe.keys.corpus, Mixture)


def test_an_inexact_estimate_is_a_note():
    checked = {"errors": [], "warnings": [], "sections": {"cost": {"values": {"inexact": ["an LSTM needs less"]}}}}
    report = assemble("recipe.yaml", [{"launch": "prepare", "rank": 0, "report": checked}], 1, CARDS["H100"], 0.0)
    assert report.notes[0] == "an LSTM needs less"


@pytest.mark.parametrize(("card_ms", "said", "advised"), [
    (16.0, ": not launch-bound", 0), (14.0, ": launch-bound", 1), (0.01, "too little to keep the GPU busy", 0)])
def test_a_larger_batch_is_advised_only_where_the_host_is_late_for_work_that_fills_a_card(card_ms, said, advised):
    line = {"launch": "measure", "rank": 0, "figures": FIGURES | {"card_ms": card_ms}}
    report = assemble("recipe.yaml", [line], 1, CARDS["H100"], 0.0)
    rows = dict(report.sections["figures"].rows)
    assert said in rows["GPU time per step"] and report.sections["figures"].remarks == advised * [
        "the GPU waits for the host in each step: a larger max_batch_seconds (and step_seconds) helps; `graphs: true` "
        "launches its kernels at once"]
    assert rows["peak memory"].startswith("3.0 MiB of 79.18 GiB")
    assert report.sections["memory"].remarks[0].startswith("plus 2.00 GiB")


@pytest.mark.long
def test_a_step_takes_what_it_took_on_an_h200(tmp_path):
    """There, large.yaml with CTC alone took 71 ms for 359 s of audio, in 2,422 launches of which an update had 240, and
    SpeechBrain's own 79.6 ms in 2,355: both waited for the host."""
    recipe = load.load(CTC.parents[1] / "recipes/CommonVoice/ASR/CTC/hparams/large.yaml", {
        "language": "en", "ctc_weight": 1.0, "data_folder": "none", "output_folder": str(tmp_path)})
    kernels = flops.run(trace.build_brain(recipe["brain"], recipe, precision="bf16"), 65, 5.52, cost.MemoryCounter,
                        gpu=True).kernels
    assert len(kernels) == pytest.approx(2422 - 240, rel=0.1)
    limits = speed.limits_of(torch.device("cuda"), "bf16", CARDS["H200"].name)
    least = 1e3 * flops.least_seconds(kernels, limits)
    for launches, took in ((2422, 71), (2355, 79.6)):
        assert max(speed.LAUNCH_MS * launches, least) == pytest.approx(took, rel=0.15)
    assert 10 < least < 71 / 2


@pytest.mark.parametrize(("rate", "step_seconds", "warned"), [
    (843.0, 1800, True), (1e5, 1800, False), (None, 1800, False),
    (843.0, 100, False)])  # a micro-batch has 12.5 s, and the launches of 225 s
def test_a_corpus_that_is_read_slower_than_all_cards_train_is_a_warning_with_figures(rate, step_seconds, warned):
    figures = FIGURES | {"reads": rate and [rate, "mp3", 16], "num_workers": 2, "batch_seconds": 225,
                         "step_seconds": step_seconds, "card_ms": 15.5}
    report = assemble("recipe.yaml", [{"launch": "measure", "rank": 0, "figures": figures}], 8, CARDS["H100"], 0.0)
    found = [each for each in report.warnings if each.code == "slow-reading"]
    assert bool(found) == warned
    if warned:
        assert "2 data workers can read 1,686 s" in found[0].message and "about 14,516" in found[0].message
        assert "if there are 144 cores" in found[0].suggestion
