"""``sbkit speak``: texts from the command line, a file and a pipe, to files and to a pipe; nothing half-written."""

import io
import os
import re
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import soundfile
import voices
from disks import REFUSED, small_disk

from sbkit import cli
from sbkit.infer import speaking

TEXT = "Hello there. Good bye!"
SAID = TEXT.lower()


def speak(*words):
    return cli.main(["speak", *map(str, words)])


def error_of(capsys, *words):
    assert speak(*words) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1, "one line, and no model was loaded"
    return captured.err


def heard(path, speed=1.0):
    samples, rate = soundfile.read(path)
    return voices.heard(samples, speed, rate)


@pytest.mark.parametrize("suffix", [".wav", ".mp3"])
def test_speaks_into_a_file_of_the_suffixs_format(voice_bundle, tmp_path, suffix, capsys):
    path = tmp_path / "new" / f"out{suffix}"
    assert speak(voice_bundle, TEXT, "--to", path, "--device", "cpu") == 0
    assert heard(path) == SAID
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    assert f"1.9 s of speech in 0.{capsys.readouterr().err.rpartition(' in 0.')[2]}".endswith(f" -> {path}\n")


def test_speaks_with_a_voice_and_a_speed(voice_bundle, tmp_path):
    assert speak(voice_bundle, "aaa aaa", "--to", tmp_path / "a.wav", "--voice", "ben", "--speed", 2) == 0
    assert np.abs(soundfile.read(tmp_path / "a.wav")[0]).max() == pytest.approx(0.25, abs=0.01)
    assert heard(tmp_path / "a.wav", 2.0) == "aaa aaa"


def test_a_text_file_may_have_any_line_ends(voice_bundle, tmp_path):
    (tmp_path / "text.txt").write_bytes(b"\xef\xbb\xbfHello\r\nthere.\r\n\r\nGood bye!\r\n")
    assert speak(voice_bundle, "--file", tmp_path / "text.txt", "--to", tmp_path / "a.flac") == 0
    assert heard(tmp_path / "a.flac") == SAID


def test_a_pipe_with_a_name_is_a_file_too(voice_bundle, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    writing = threading.Thread(target=(tmp_path / "pipe").write_text, args=(TEXT,))
    writing.start()
    assert speak(voice_bundle, "--file", tmp_path / "pipe", "--to", tmp_path / "a.wav") == 0
    writing.join()
    assert heard(tmp_path / "a.wav") == SAID


def test_standard_input_to_standard_output(voice_bundle):
    done = subprocess.run([sys.executable, "-m", "sbkit", "speak", voice_bundle, "-", "--to", "-"], input=TEXT.encode(),
                          capture_output=True, check=True)
    assert heard(io.BytesIO(done.stdout)) == SAID
    assert b"s of speech" in done.stderr


@pytest.mark.slow
def test_a_long_text_is_streamed_with_progress(voice_bundle, tmp_path, monkeypatch, capsys):
    (tmp_path / "book.txt").write_text("abc. " * 120)
    most = 0
    add = speaking.SoundWriter.add

    def counted(writer, samples, **last):
        nonlocal most
        most = max(most, len(samples))
        add(writer, samples, **last)

    monkeypatch.setattr(speaking.SoundWriter, "add", counted)
    assert speak(voice_bundle, "--file", tmp_path / "book.txt", "--to", tmp_path / "a.wav") == 0
    assert most < 2 * voices.RATE
    assert heard(tmp_path / "a.wav") == ("abc. " * 120).strip()
    assert re.search(r"speaking: .*\(100 %\), took", capsys.readouterr().err)


@pytest.mark.parametrize("words, code", [
    (["", "--to", "a.wav"], "empty-input"), (["na\u00efve. b\u00e9", "--to", "a.wav"], "unknown-characters"),
    (["a", "--to", "a.aac"], "bad-option"), (["a", "--to", "a"], "bad-option"),
    (["a", "--to", "a.wav", "--voice", "clara"], "voice-not-found"),
    (["a", "--to", "a.wav", "--speed", "9"], "bad-value"),
    (["a", "--to", "a.wav", "--speed", "nan"], "bad-value"), (["--to", "a.wav"], "missing-option"),
    (["a", "--file", "b.txt", "--to", "a.wav"], "missing-option"),
    (["--file", "b.txt", "--to", "a.wav"], "no-such-path"), (["--file", "latin.txt", "--to", "a.wav"], "not-utf8"),
    (["\udcff", "--to", "a.wav"], "not-utf8"),
])
def test_an_unspeakable_text_leaves_no_file(voice_bundle, tmp_path, monkeypatch, capsys, words, code):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    assert f"[{code}]" in error_of(capsys, voice_bundle, *words)
    assert [each.name for each in tmp_path.iterdir()] == ["latin.txt"]


def test_all_of_a_text_is_checked_before_any_of_it_is_spoken(voice_bundle, tmp_path, capsys):
    (tmp_path / "book.txt").write_text("Fine. " * 20_000 + "\n\u0416")
    assert "'\u0416' (line 2, character 1)" in error_of(capsys, voice_bundle, "--file", tmp_path / "book.txt", "--to",
                                                       tmp_path / "a.wav")
    assert speak(voice_bundle, "a \u0416 b", "--to", tmp_path / "a.wav", "--skip-unknown") == 0
    assert "left out because the voice has no symbol for it: '\u0416' (character 3)" in capsys.readouterr().err
    assert heard(tmp_path / "a.wav") == "a b"


def test_unwritable_outputs_are_reported(voice_bundle, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert speak(voice_bundle, "a", "--to", tmp_path / "file" / "a.wav") == 2
    assert "[not-writable]" in capsys.readouterr().err
    (tmp_path / "folder.wav").mkdir()
    assert speak(voice_bundle, "a", "--to", tmp_path / "folder.wav") == 2
    assert "[not-a-file]" in capsys.readouterr().err


@pytest.mark.parametrize("suffix", [".wav", ".opus"])
def test_a_full_disk_is_one_error_and_leaves_no_file(voice_bundle, tmp_path, capsys, suffix):
    (tmp_path / "book.txt").write_text("abc. " * 100)
    with small_disk(tmp_path / "small") as disk, disk.full(left=4096):
        assert speak(voice_bundle, "--file", tmp_path / "book.txt", "--to", disk.path / f"a{suffix}") == 2
        assert not [each for each in disk.path.iterdir() if each.name != "filler"]
    assert re.search(rf"^error: .*a{suffix} could not be written: {REFUSED} ", capsys.readouterr().err, re.M)


@pytest.mark.slow
@pytest.mark.parametrize("number", [
    signal.SIGKILL, signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_a_killed_command_leaves_nothing_under_the_final_name(voice_bundle, tmp_path, number):
    (tmp_path / "book.txt").write_text("abc defg. " * 10_000)
    path = tmp_path / "out" / "a.opus"
    running = subprocess.Popen([sys.executable, "-m", "sbkit", "speak", voice_bundle, "--file", tmp_path / "book.txt",
                                "--to", path], stderr=subprocess.DEVNULL)
    end = time.monotonic() + 60
    while not path.parent.exists() or not any(path.parent.iterdir()):
        assert time.monotonic() < end and running.poll() is None
        time.sleep(0.05)
    time.sleep(0.1)
    running.send_signal(number)
    assert running.wait(30) == (-number if number == signal.SIGKILL else 128 + number)
    left = list(path.parent.iterdir())
    assert not left if number != signal.SIGKILL else path not in left
