"""A full disk, met by each kind of file that sbkit writes: one message with the path, the last good state, and on."""

import io
import json
import logging
import math
import re
import sys
import tempfile
from types import SimpleNamespace

import disks
import pyarrow as pa
import pytest
import run_folders
import torch
import toys
from corpora import archive, common_voice
from disks import REFUSED, small_disk
from safetensors.torch import save_file

from sbkit.cli import main
from sbkit.data import publish
from sbkit.data.corpus import Corpus
from sbkit.data.manifest import Manifest
from sbkit.data.shards import write_shards
from sbkit.data.sources.archive import unpack
from sbkit.data.sources.embedded import store_rows
from sbkit.data.tokens import Tokenizer
from sbkit.decode import lm
from sbkit.errors import SbkitError
from sbkit.export import layout
from sbkit.infer import inputs, transcription
from sbkit.infer.recordings import Recording
from sbkit.infer.transcript import Transcript
from sbkit.runs.lock import RunLock
from sbkit.runs.start_guard import StartGuard
from sbkit.score import utterances
from sbkit.score.rates import ErrorRates
from sbkit.score.report import write_report
from sbkit.system import disk
from sbkit.system.console import LogFile
from sbkit.tasks.recognise.transcripts import write_nbest
from sbkit.train.bad_batch.report import report as report_bad_batch
from sbkit.train.batches import KeptBatch
from sbkit.train.checkpoint import Checkpointer
from sbkit.train.monitor.loggers import Run, TensorBoard
from sbkit.train.monitor.metrics import MetricsLog
from sbkit.train.results import StepResult
from sbkit.train.train_log import TrainLog

LINES = 300


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """What is read, on a disk with room: two corpora, their archives and a run to report on."""
    home = tmp_path_factory.mktemp("given")
    for number in (1, 2):
        said = [f"{text} {run_folders.WORDS[number]}" for text in run_folders.WORDS]
        release = common_voice(home / f"release{number}", train=said, dev=said[:2], test=said[:2])
        archive(release, home / f"release{number}.tar.gz")
        run_folders.corpus(home / f"csv{number}", train=3 + number)
    heard = run_folders.scored(20)
    return SimpleNamespace(home=home, run=run_folders.finished_run(home / "run", heard), heard=heard)


@pytest.fixture
def room(tmp_path):
    with small_disk(tmp_path / "small") as made:
        yield made


# Each writes its file or files below ``to``, others for number 1 than for number 2.


def checkpoint(to, number, given):
    model = torch.nn.Linear(100, 100)
    torch.nn.init.constant_(model.weight, number)
    checkpointer = Checkpointer(to, {"model": model})
    checkpointer.save_and_keep_only(meta={"number": number})
    checkpointer.wait()


def manifests(to, number, given):
    Corpus(given.home / f"release{number}" / "en", folder=to).prepare(show_progress=False)


def tokenizer(to, number, given):
    Tokenizer(to, 26, "unigram").prepare(run_folders.WORDS[number:] * 20)


def shards(to, number, given):
    write_shards(Manifest.read(given.home / f"csv{number}" / "train.csv"), to, show_progress=False, workers=number)


def unpacked_archive(to, number, given):
    unpack(given.home / f"release{number}.tar.gz", to / "audio", show_progress=False)


def embedded_audio(to, number, given):
    sound = (given.home / "release1" / "en" / "clips").glob("*.mp3")
    row = {"id": "a", "path": "a.mp3", "bytes": next(sound).read_bytes(), "text": "one", "speaker": "", "duration": "",
           "start": ""}
    store_rows(lambda done: iter([pa.Table.from_pylist([row])]), to, f"train{number}", "there", show_progress=False)


def rates(to, number, given):
    found = ErrorRates()
    found.add([f"utterance {i}" for i in range(LINES)], ["a b c"] * LINES, ["a b d"] * LINES)
    found.write(to / f"wer_test_{number}.txt")


def heard(to, number, given):
    utterances.write(to / "test_utterances.jsonl", given.heard[number:])


def nbest(to, number, given):
    rows = [SimpleNamespace(id=str(i), reference="a" * number, nbest=[]) for i in range(LINES)]
    write_nbest(to / "nbest.jsonl", rows)


def report(to, number, given):
    write_report(given.run, out=to / "report.html", title=f"run {number}")


def language_model(to, number, given):
    lm.build([f"{word} {number}{i}" for i in range(100) for word in run_folders.WORDS], to / "words.arpa")


def bundle(to, number, given):
    with publish.temporary_folder(to / "bundle", layout.FOLDER) as aside:
        save_file({"weights": torch.full((10_000,), float(number))}, aside / "model.safetensors")
        (aside / layout.CONFIG).write_text(json.dumps({"format": layout.FORMAT, "files": {"model.safetensors": {}}}))
        publish.publish(aside, to / "bundle", layout.FOLDER, force=True)


def transcripts(to, number, given):
    said = Transcript("a", "word " * 1000 * number)
    transcription.write_transcript(to, Recording("a.wav", id="a"), said, ["txt", "json"])


KINDS = [checkpoint, manifests, tokenizer, shards, unpacked_archive, embedded_audio, rates, heard, nbest, report,
         language_model, bundle, transcripts]
#: Where an earlier part of the same work is kept for the next start.
BEGUN = (".lock", ".partial/", ".durations-")


def state(folder):
    """Every file, and what is in it."""
    files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*")
             if path.is_file() and path.name != "filler"}
    return {name: data for name, data in files.items() if not any(part in name for part in BEGUN)}


@pytest.mark.parametrize("left", [0, 6000], ids=["full", "nearly full"])
@pytest.mark.parametrize("write", KINDS, ids=lambda write: write.__name__)
def test_the_last_good_state_stays_and_the_same_command_goes_on(write, left, given, room):
    to = room.path / "here"
    to.mkdir()
    write(to, 1, given)
    before = state(to)
    assert before
    with room.full(left), pytest.raises(SbkitError) as error:
        write(to, 2, given)
    told = str(error.value)
    path = re.search(rf"({re.escape(str(to))}\S*) could not be written: {REFUSED} \(", told)
    assert path, told
    assert "free: " in told and "; " in told
    assert told.count("could not be written") == 1 and "\n" not in told
    assert state(to) == before
    write(to, 2, given)
    assert state(to) != before


def test_a_start_is_refused_before_it_changes_the_run(room, given):
    run = run_folders.finished_run(room.path / "run", given.heard)
    before = state(run)
    with room.full():
        with pytest.raises(SbkitError, match=rf"{run}\S* could not be written: {REFUSED} \("), RunLock(run):
            pass
        with pytest.raises(SbkitError, match=rf"{run}\S* could not be written: {REFUSED} \("), StartGuard(run):
            pass
    with RunLock(run), StartGuard(run):
        pass
    assert before.items() <= state(run).items()


# ------------------------------------------------------------------ what a training step writes


def test_metrics_and_log_lines_wait_for_room_and_training_hears_of_it_once(room, caplog):
    metrics, log = MetricsLog(room.path), TrainLog(room.path / "train_log.txt")
    with room.full():
        for epoch in range(LINES):  # the first ones still have room in a block
            metrics.write("epoch", epoch=epoch)
            log.log_stats({"epoch": epoch}, {"loss": 1.0})
    for path in (metrics.path, room.path / "train_log.txt"):
        told = [record.getMessage() for record in caplog.records if record.getMessage().startswith(str(path))]
        assert len(told) == 1 and re.search(rf"could not be written: {REFUSED} \(free: .*Its lines are kept", told[0])
    metrics.write("epoch", epoch=LINES)
    log.log_stats({"epoch": LINES}, {"loss": 1.0})
    assert metrics.path.read_text().count("\n") == LINES + 1 == (room.path / "train_log.txt").read_text().count("\n")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_tensorboard_lacks_points_and_goes_on_with_the_metrics(room, caplog):
    pytest.importorskip("tensorboard")
    drawn = TensorBoard("tensorboard", Run(room.path, {}))
    metrics = MetricsLog(room.path, [drawn])
    metrics.write("step", step=1, loss=1.0)
    metrics.flush()
    with room.full():
        for step in range(LINES):  # as if the disk filled up between the two files
            drawn.log({"step/loss": 1.0}, step, 1.0)
        drawn.flush()
        metrics.write("step", step=2, loss=1.0)
    metrics.write("step", step=3, loss=1.0)
    metrics.close()
    assert "Some points are missing in TensorBoard" in caplog.text and metrics.path.read_text().count("\n") == 3
    assert len(list((room.path / "tensorboard").iterdir())) > 1, "another file once there is room"


def test_the_log_says_once_that_it_lacks_lines(room, capfd):
    handler = LogFile(room.path / "log.txt")
    logger = logging.Logger("alone")
    logger.addHandler(handler)
    with room.full():
        for _ in range(3000):
            logger.warning("a line")
    told = capfd.readouterr().err
    assert re.fullmatch(rf"warning: {re.escape(str(room.path))}/log.txt could not be written: {REFUSED} .*\n", told)
    logger.warning("there is room")
    handler.close()
    assert "there is room" in (room.path / "log.txt").read_text()


def test_a_bad_batch_that_is_not_saved_ends_no_training(room, caplog):
    kept = KeptBatch(toys.batch_of(range(3000)))
    result = StepResult(math.nan, 1, 1.0, True, 1.0, 1.0, {}, [kept], number=3)
    with room.full():
        report_bad_batch(toys.brain(), room.path, result)
    assert re.search(rf"The bad batch of step 3 is not saved: .* could not be written: {REFUSED}", caplog.text)
    assert list((room.path / "bad_batches").iterdir()) == []


# ------------------------------------------------------------------ around a command


def test_audio_from_stdin_names_its_temporary_file(room, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(room.path))
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: False, buffer=io.BytesIO(bytes(100_000))))
    with room.full(), pytest.raises(SbkitError, match=rf"{room.path}/sbkit-stdin-\w+ could not be written: {REFUSED}"):
        inputs.collect(["-"])


def test_what_no_stage_tells_is_one_line_of_the_command(monkeypatch, capsys):
    def full(argv):
        raise OSError(28, "No space left on device")

    monkeypatch.setenv("TMPDIR", "/tmp")
    monkeypatch.setattr("sbkit.cli.dispatch", full)
    assert main(["report", "run"]) == 2
    assert re.fullmatch(r"error: the output or a temporary file could not be written: No space left on device "
                        r"\(free in /tmp: .*\n", capsys.readouterr().err)


def test_what_is_free_says_when_it_is_files_that_are_too_many(tmp_path, monkeypatch):
    full = SimpleNamespace(f_bavail=1000, f_frsize=4096, f_files=10, f_favail=0)
    monkeypatch.setattr(disk.os, "statvfs", lambda path: full)
    assert "free: 4.1 MB, but it can hold no more files" in disk.explain(OSError(28, ""), tmp_path)


def test_without_a_small_disk_the_tests_bound_files(tmp_path, given):
    """What these tests do where nothing may be mounted."""
    room = disks.Disk(tmp_path, mounted=False)
    with room.full(), pytest.raises(SbkitError, match="File too large"):
        rates(tmp_path, 1, given)
    rates(tmp_path, 1, given)
