"""``sbkit listen``: samples of a program or a microphone, words on a screen or for programs, and every way to end."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import signal
import subprocess
import sys
import time
import types

import bundles
import numpy as np
import pytest
import soundfile
from refusals import refused

from sbkit.cli import main
from sbkit.decode.spans import Word
from sbkit.decode.streaming import StreamResult
from sbkit.errors import SbkitError
from sbkit.infer.lines import Lines
from sbkit.infer.listening import CtrlC
from sbkit.infer.sound_sources import FileSniffer, Microphone, Pcm
from sbkit.infer.stream_engine import StreamEngine


def pcm(*lines, repeat=1):
    """Lines with a second of silence after each, as bytes."""
    parts = [part for line in lines for part in (bundles.say(line), np.zeros(bundles.RATE, np.float32))]
    return np.round(np.concatenate(parts).repeat(repeat) * 32768).astype("<i2").tobytes()


def listen(bundle, monkeypatch, tmp_path, data, *words):
    """Run it in this process with these bytes as standard input."""
    (tmp_path / "pcm").write_bytes(data)
    with open(tmp_path / "pcm") as file:
        monkeypatch.setattr(sys, "stdin", file)
        return main(["listen", str(bundle), "-", *words])


def process(bundle, *words, **streams):
    return subprocess.Popen([sys.executable, "-m", "sbkit.cli", "listen", str(bundle), "-", *words],
                            stdin=subprocess.PIPE, **streams)


def in_a_terminal(bundle, data, *words):
    """What a terminal shows of standard output and of errors, and the exit code."""
    ours, theirs = pty.openpty()
    with process(bundle, *words, stdout=theirs, stderr=theirs) as running:
        os.close(theirs)
        running.stdin.write(data)
        running.stdin.close()
        shown = b""
        with contextlib.suppress(OSError):  # how a terminal says that its last program is gone
            while True:
                shown += os.read(ours, 10_000)
    os.close(ours)
    return shown, running.returncode


def facts(text):
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.slow
def test_complete_lines_are_printed_as_text(bundle, monkeypatch, tmp_path, capsys):
    assert listen(bundle, monkeypatch, tmp_path, pcm("she sells", "the end")) == 0
    captured = capsys.readouterr()
    assert captured.out == "she sells\nthe end\n"
    assert "stream.onnx on cpu" in captured.err and "at 16000 Hz in chunks of 320 ms" in captured.err


@pytest.mark.slow
def test_json_has_an_object_for_every_change(bundle, monkeypatch, tmp_path, capsys):
    assert listen(bundle, monkeypatch, tmp_path, pcm("she sells", "no"), "--json", "--chunk", "160") == 0
    found = facts(capsys.readouterr().out)
    assert [(each["type"], each.get("text"), each.get("settled")) for each in found] == [
        ("partial", "sh", ""), ("partial", "she", ""), ("partial", "she", "she"), ("partial", "she se", "she"),
        ("partial", "she sel", "she"), ("partial", "she sell", "she"), ("partial", "she sells", "she"),
        ("final", "she sells", None), ("partial", "n", ""), ("partial", "no", ""), ("final", "no", None),
        ("end", None, None)]
    final = next(each for each in found if each["type"] == "final")
    assert [word["word"] for word in final["words"]] == ["she", "sells"]
    assert final["start"] == final["words"][0]["start"] == found[0]["start"] == 0.16
    assert found[-1]["duration"] == round(len(pcm("she sells", "no")) / 32_000, 3)


def test_listens_with_another_rate_a_search_and_hot_words(bundle, monkeypatch, tmp_path, capsys):
    data = bytes(960 * 2) + pcm("aab aab", repeat=3)  # a filter rings where levels change: not at a frame
    options = ["--rate", "48000", "--hot-word", "aab=2", "--beam", "8"]
    assert listen(bundle, monkeypatch, tmp_path, data, *options) == 0
    assert len(capsys.readouterr().out.split()) == 2


@pytest.mark.parametrize("make", [bundles.make, bundles.make_transducer])
def test_listens_with_a_model_for_whole_recordings(make, monkeypatch, tmp_path, capsys):
    options = {"streams": False} if make is bundles.make_transducer else {}
    whole = make(tmp_path / "whole", **options)
    assert listen(whole, monkeypatch, tmp_path, pcm("she sings", "the end"), "--json") == 0
    captured = capsys.readouterr()
    found = facts(captured.out)
    assert [each["text"] for each in found if each["type"] == "final"] == ["she sings", "the end"]
    assert found[-1] == {"type": "end", "duration": round(len(pcm("she sings", "the end")) / 32_000, 3)}
    assert "model.onnx on cpu" in captured.err and "because the model has no streaming graph" in captured.err
    assert listen(whole, monkeypatch, tmp_path, pcm("no", repeat=3), "--rate", "48000") == 0
    assert len(capsys.readouterr().out.split()) == 1  # a filter rings where levels change
    assert listen(whole, monkeypatch, tmp_path, pcm("no"), "--chunk", "320") == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith("[no-streaming-graph]")


@pytest.mark.parametrize(("data", "options", "code"), [
    (b"RIFF\0\0\0\0WAVEfmt ", [], "not-pcm"), (b"ID3\x04\0\0", [], "not-pcm"), (b"OggS", [], "not-pcm"),
    (b"", ["--microphone", "3"], "conflicting-options"), (b"", ["--lm-weight", "0.6"], "conflicting-options"),
    (b"", ["--chunk", "200"], "bad-value"), (b"", ["--rate", "100"], "bad-value"), (b"", ["--rate", "x"], "bad-option"),
    (b"", ["--lm", "nowhere.arpa"], "no-such-path"),
])
def test_errors_are_one_line(bundle, monkeypatch, tmp_path, capsys, data, options, code):
    assert listen(bundle, monkeypatch, tmp_path, data, *options) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: ") and last.endswith(f" [{code}]")


def test_a_file_as_source_points_to_transcribe(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for missing in (", and there is no such file", ""):
        assert main(["listen", "none", "talk.wav"]) == 2  # and no bundle is looked at
        assert capsys.readouterr().err == (
            f"error: listen takes a microphone, or - for standard input, but not talk.wav{missing}; to transcribe a "
            "file: sbkit transcribe none talk.wav; if it is raw 16-bit PCM: sbkit listen none - < talk.wav "
            "[bad-option]\n")
        (tmp_path / "talk.wav").touch()


@pytest.mark.parametrize("data", [b"", b"a", b"abc", b"\1\0", bytes(10_001)])
def test_a_few_bytes_are_transcribed_and_half_a_sample_is_a_warning(bundle, monkeypatch, tmp_path, capsys, data):
    assert listen(bundle, monkeypatch, tmp_path, data, "--json") == 0
    captured = capsys.readouterr()
    assert [each["type"] for each in facts(captured.out)] == ["end"]
    assert ("ended in the middle of a sample" in captured.err) == bool(len(data) % 2)
    assert ("standard input was empty" in captured.err) == (not data)


def test_pcm_may_be_split_within_a_sample():
    data = pcm("abc")[:5_001]
    for size in (1, 2, 3, 5, 1_000):
        file = io.BytesIO(data)
        slow = types.SimpleNamespace(read1=lambda _, file=file, size=size: file.read(size))
        found = np.concatenate(list(Pcm(slow, 16_000)))
        assert found.dtype == np.int16 and found.tobytes() == data[:5_000]


def test_file_sniffer_recognises_a_file_in_any_pieces():
    written, sound = io.BytesIO(), 0.1 * np.random.default_rng(0).normal(size=48_000)
    soundfile.write(written, sound, 16_000, format="MP3", subtype="MPEG_LAYER_III")
    data, sniffer = written.getvalue(), FileSniffer()
    assert "MP3" in [sniffer.kind(data[i : i + 7]) for i in range(0, 1_443, 7)]


def test_file_sniffer_ignores_later_bytes():
    sniffer = FileSniffer()
    assert sniffer.kind(bytes(2_000)) is None and sniffer.kind(b"RIFF") is None


@pytest.mark.slow
def test_words_come_before_the_input_ends(bundle):
    with process(bundle, "--json", "--chunk", "160", stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as ours:
        ours.stdin.write(pcm("abc def")[:20_000])
        ours.stdin.flush()
        assert json.loads(ours.stdout.readline())["text"]
        ours.stdin.close()
        assert facts(ours.stdout.read().decode())[-1]["type"] == "end" and ours.wait() == 0


@pytest.mark.slow
def test_ctrl_c_prints_the_last_words_and_ends(bundle):
    with process(bundle, "--json", "--chunk", "160", stdout=subprocess.PIPE, stderr=subprocess.PIPE) as ours:
        ours.stdin.write(pcm("abc def")[:20_000])
        ours.stdin.flush()
        ours.stdout.readline()
        time.sleep(0.5)
        ours.send_signal(signal.SIGINT)
        rest, errors = ours.stdout.read(), ours.stderr.read()
        assert ours.wait() == 130
    assert [each["type"] for each in facts(rest.decode())][-2:] == ["final", "end"]
    assert errors.decode().splitlines()[-1].startswith("listening to standard input")


@pytest.mark.slow
def test_a_closed_output_ends_it_quietly(bundle):
    with process(bundle, "--json", stdout=subprocess.PIPE, stderr=subprocess.PIPE) as ours:
        ours.stdout.close()
        ours.stdin.write(pcm("abc def", "abc"))
        ours.stdin.close()
        errors = ours.stderr.read().decode()
        assert ours.wait() == 1 and errors.splitlines()[-1].startswith("listening to standard input")


@pytest.mark.slow
def test_in_a_terminal_the_line_in_progress_is_rewritten(bundle):
    shown, code = in_a_terminal(bundle, pcm("she sells", "the end"), "--chunk", "160")
    shown = shown.removesuffix(b"\r\x1b[J\x1b[2m\xe2\x80\xa6\x1b[0m\r\x1b[J")  # in silence, and erased at the end
    assert code == 0
    assert b"\r\x1b[Jshe \x1b[2mse\x1b[0m" in shown and b"\r\x1b[Jshe sells\r\n" in shown
    assert shown.endswith(b"the end\r\n")


@pytest.mark.slow
def test_a_warning_comes_after_the_line_in_progress(bundle):
    shown, _ = in_a_terminal(bundle, pcm("the end")[:-32_000] + b"\0")  # no pause, and half a sample
    assert shown.endswith(b"the end\r\nstandard input ended in the middle of a sample: is it 16-bit PCM of "
                          b"one channel?\r\n")


@pytest.mark.parametrize(("state", "message"), [
    ("terminal", "that is a terminal"), ("closed", "standard input is closed")])
def test_a_terminal_or_closed_stdin_is_refused(bundle, monkeypatch, capsys, state, message):
    typed = types.SimpleNamespace(isatty=lambda: True)
    monkeypatch.setattr(sys, "stdin", typed if state == "terminal" else None)  # Python's own value for a closed one
    assert main(["listen", str(bundle), "-", "--rate", "8000"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"error: - reads 16-bit PCM from standard input, but {message}; "
        "arecord -t raw -f S16_LE -r 8000 | sbkit listen BUNDLE - [no-standard-input]")


# ---------------------------------------------------------------------- Ctrl-C


def test_ctrl_c_waits_until_an_item_is_processed():
    done = []
    with pytest.raises(KeyboardInterrupt), CtrlC() as ctrl_c:
        for item in ctrl_c.defer_during([1, 2, 3]):
            if item == 2:
                signal.raise_signal(signal.SIGINT)
            done.append(item)
    assert done == [1, 2]


def test_ctrl_c_twice_interrupts_at_once():
    with pytest.raises(KeyboardInterrupt), CtrlC() as ctrl_c:
        for _ in ctrl_c.defer_during([1]):
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            raise AssertionError


def test_the_former_sigint_handler_is_restored():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), CtrlC():
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


# ---------------------------------------------------------------------- lines


def test_a_line_without_a_pause_ends_after_a_while():
    lines, over = Lines(60.0), []
    for second in range(200):
        word = Word(str(second), second, second + 1, 1.0)
        over += [line for line in lines.add(StreamResult([word], [], False, second + 1.0)) if line.complete]
    assert [len(line.words) for line in over] == [60, 60, 60]


def test_no_empty_line_follows_a_split_line():
    lines, word = Lines(60.0), Word("a", 0.0, 61.0, 1.0)
    assert [line.complete for line in lines.add(StreamResult([word], [], False, 61.0))] == [True]
    (line,) = lines.add(StreamResult([], [], True, 62.0))
    assert not line.complete and line.words == []


# ---------------------------------------------------------------------- the microphone


class PortAudioError(Exception):
    pass


def library(blocks, rates=(16_000,), found=True):
    """The package sounddevice as it is used, with a microphone that gives these blocks and then stops."""
    class Recording:
        def __init__(self, callback, finished_callback, **options):
            self.options, self._callback, self._finished = options, callback, finished_callback
            made.opened.append(options)

        def __enter__(self):
            for block in blocks:
                self._callback(memoryview(block), len(block) // 2, None, None)
            self._finished()

        def __exit__(self, *_):
            pass

    def query_devices(device, kind):
        if not found:
            raise PortAudioError("Error querying device -1")
        return {"name": "Built-in", "default_samplerate": 48_000.0}

    def check_input_settings(samplerate, **_):
        if samplerate not in rates:
            raise PortAudioError("Invalid sample rate [PaErrorCode -9997]")

    made = types.SimpleNamespace(PortAudioError=PortAudioError, RawInputStream=Recording, opened=[],
                                 query_devices=query_devices, check_input_settings=check_input_settings)
    return made


def test_the_microphone_is_transcribed_until_it_stops(bundle, monkeypatch, capsys):
    data = pcm("abc def")
    made = library([data[i : i + 1_280] for i in range(0, len(data), 1_280)])
    monkeypatch.setitem(sys.modules, "sounddevice", made)
    assert main(["listen", str(bundle), "--microphone", "3"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "abc def\n" and "listening to Built-in at 16000 Hz" in captured.err
    assert "the microphone Built-in stopped; is it still connected?" in captured.err
    assert made.opened[0]["device"] == 3 and made.opened[0]["samplerate"] == 16_000


@pytest.mark.parametrize("words", [[], ["--json"]])
def test_the_line_in_progress_when_the_microphone_stops_is_not_lost(bundle, monkeypatch, capsys, words):
    data = np.round(bundles.say("abc def") * 32768).astype("<i2").tobytes()  # and no pause
    monkeypatch.setitem(sys.modules, "sounddevice", library([data]))
    assert main(["listen", str(bundle), *words]) == 2
    captured = capsys.readouterr()
    if words:
        found = [(each["type"], each.get("text")) for each in facts(captured.out) if "type" in each]
        assert found[-2:] == [("final", "abc def"), ("end", None)]
    else:
        assert captured.out == "abc def\n"
    assert captured.err.splitlines()[-1] == (
        "error: the microphone Built-in stopped; is it still connected? [no-microphone]")


def test_a_model_that_fails_is_one_error(bundle, monkeypatch, tmp_path, capsys):
    def broken(_engine, sessions, _windows):
        for each in sessions:
            each.fail(SbkitError("model-failed", "it broke"))

    monkeypatch.setattr(StreamEngine, "take_step", broken)
    assert listen(bundle, monkeypatch, tmp_path, pcm("abc")) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.splitlines()[-1] == "error: it broke [model-failed]"


def test_a_microphone_that_cannot_do_the_models_rate_uses_its_own(monkeypatch):
    monkeypatch.setitem(sys.modules, "sounddevice", library([], rates=[48_000]))
    assert Microphone(None, 16_000).rate == 48_000
    with refused("no-microphone"):
        Microphone(16_000, 16_000)


def test_a_model_that_falls_behind_the_microphone_is_an_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "sounddevice", library([bytes(1_280)] * 1_000))
    with refused("too-slow"):
        list(Microphone(None, 16_000))


def test_no_microphone_and_no_package_are_reported(bundle, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "sounddevice", library([], found=False))
    assert main(["listen", str(bundle)]) == 2
    assert "[no-microphone]" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "sounddevice", None)
    assert main(["listen", str(bundle)]) == 2
    assert "[missing-package]" in capsys.readouterr().err
