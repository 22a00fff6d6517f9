"""Measuring recordings: right, parallel, resumable, and no file can crash it."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
from sounds import encoded, speechlike

from sbkit.data import measure as module
from sbkit.data.measure import Cause, measure


@pytest.fixture
def wavs(tmp_path):
    paths = []
    for i in range(12):
        paths.append(str(tmp_path / f"{i}.wav"))
        (tmp_path / f"{i}.wav").write_bytes(encoded(speechlike(0.1 * (i + 1)), 16000))
    return paths


@pytest.fixture
def helpers(monkeypatch):
    """Processes are started for any number of recordings, which they get a few at a time."""
    monkeypatch.setattr(module, "WORTH_PROCESSES", 1)
    monkeypatch.setattr(module, "CHUNK", 4)


@pytest.mark.parametrize("workers", [1, 2])
def test_seconds_and_causes(wavs, tmp_path, workers, helpers):
    (tmp_path / "bad.wav").write_bytes(b"RIFF nonsense")
    names = [*wavs, str(tmp_path / "bad.wav"), str(tmp_path / "absent.wav")]
    seconds, causes = measure(names, workers=workers, show_progress=False)
    np.testing.assert_allclose(seconds[:12], 0.1 * np.arange(1, 13), atol=1e-4)
    assert np.isnan(seconds[12:]).all()
    assert {i: cause.code for i, cause in causes.items()} == {12: "unknown-audio-format", 13: "missing-audio"}
    assert causes[13].words == "no such file"


@pytest.mark.slow
def test_a_recording_that_crashes_the_decoder_is_named_and_others_are_measured(wavs, tmp_path, monkeypatch, helpers):
    # A helper that dies on one file, as libsndfile may.
    helper = tmp_path / "helper.py"
    helper.write_text(
        "import json, os, sys\nfrom sbkit.data.measure import measure_one\n"
        "for line in sys.stdin:\n"
        "    wavs, *_ = json.loads(line)\n"
        "    if any(wav.endswith('/5.wav') for wav in wavs): os._exit(139)\n"
        "    print(json.dumps([measure_one(wav) for wav in wavs]), flush=True)\n")
    monkeypatch.setattr(module, "COMMAND", [sys.executable, str(helper)])
    seconds, causes = measure(wavs, workers=2, show_progress=False)
    assert causes == {5: Cause("damaged-audio", "crashes the decoder")}
    assert np.isfinite(np.delete(seconds, 5)).all()


def test_where_helpers_do_not_run_it_is_measured_without(wavs, monkeypatch, caplog, helpers):
    monkeypatch.setattr(module, "COMMAND", [sys.executable, "-c", "import no_such_module"])
    seconds, causes = measure(wavs, workers=2, show_progress=False)
    assert np.isfinite(seconds).all() and causes == {} and "do not start" in caplog.text


def test_helpers_import_nothing_from_the_folder_they_are_started_in(wavs, tmp_path, monkeypatch, caplog, helpers):
    (tmp_path / "here").mkdir()
    for name in ("soxr", "numpy"):
        (tmp_path / "here" / f"{name}.py").write_text("open('ran', 'w').close(); raise ImportError('not this one')")
    monkeypatch.chdir(tmp_path / "here")
    seconds, _ = measure(wavs, workers=2, show_progress=False)
    assert np.isfinite(seconds).all() and not (tmp_path / "here" / "ran").exists() and caplog.text == ""


def test_an_interrupted_measurement_goes_on(wavs, tmp_path, monkeypatch):
    journal = tmp_path / "journal"
    measure(wavs[:5], journal=journal, show_progress=False)
    with open(journal, "a") as file:
        file.write('["cut sho')
    seen = []
    monkeypatch.setattr(module, "measure_one", lambda wav, *how: seen.append(wav) or 1.0)
    seconds, _ = measure(wavs, journal=journal, show_progress=False)
    assert seen == wavs[5:] and seconds[0] == pytest.approx(0.1, abs=1e-4)
    seen.clear()
    measure(wavs, journal=journal, show_progress=False)
    assert seen == []


def test_what_failed_is_tried_again(tmp_path):
    journal, wav = tmp_path / "journal", tmp_path / "a.wav"
    assert measure([str(wav)], journal=journal, show_progress=False)[1] == {0: Cause("missing-audio", "no such file")}
    wav.write_bytes(encoded(speechlike(0.5), 16000))
    assert measure([str(wav)], journal=journal, show_progress=False)[0][0] == pytest.approx(0.5)
    assert [json.loads(line)[0] for line in journal.read_text().split("\n") if line] == [str(wav)]
