"""``sbkit label``: what is kept and what is left out, resumed after kills, in shards, as a corpus."""

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import bundles
import numpy as np
import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from sbkit.cli import main
from sbkit.data.corpus import Corpus
from sbkit.data.manifest import Manifest
from sbkit.decode.spans import Word
from sbkit.infer.label_pieces import MARGIN_SECONDS, PAUSE_SECONDS, cut_at_pauses

WORDS = "alpha beta gamma delta epsilon zeta eta theta".split()


def clip(path, generator, noise):
    """Write a recording with noise; returns its text."""
    text = " ".join(generator.choice(WORDS, 4))
    ids = np.array(bundles.spell(text), float)
    path.parent.mkdir(parents=True, exist_ok=True)
    signal = bundles.voiced(list(ids + generator.normal(0, noise, len(ids))))
    soundfile.write(path, signal, bundles.RATE, subtype="FLOAT")
    return text


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A bundle, a list with transcripts, and recordings without: as clear, noisy, damaged, silent, and a long one."""
    home, generator = tmp_path_factory.mktemp("label"), np.random.default_rng(0)
    bundles.make(home / "bundle")
    with open(home / "dev.jsonl", "w") as file:
        for i in range(60):
            text = clip(home / "dev" / f"{i}.wav", generator, generator.uniform(0, 0.5))
            file.write(json.dumps({"audio_filepath": f"dev/{i}.wav", "text": text}) + "\n")
    said = {str(i): clip(home / "audio" / f"{i}.wav", generator, 0.05 if i % 2 else 0.5) for i in range(20)}
    (home / "said.json").write_text(json.dumps(said))
    soundfile.write(home / "audio" / "silent.wav", np.zeros(16000, np.float32), bundles.RATE)
    (home / "audio" / "broken.wav").write_bytes(b"RIFF, and no more")
    pause = np.zeros(bundles.RATE // 2, np.float32)
    parts = [part for word in WORDS * 8 for part in (bundles.say(word), pause)]
    soundfile.write(home / "audio" / "long.wav", np.concatenate(parts), bundles.RATE, subtype="FLOAT")
    soundfile.write(home / "audio" / "hasty.wav", bundles.say(" ".join(WORDS * 5)), bundles.RATE, subtype="FLOAT")
    return home


def label(home, to, *more, bundle="bundle", audio=("audio",), calibrate="dev.jsonl"):
    return main(["label", str(home / bundle), *(str(home / each) for each in audio), "--to", str(to),
                 "--calibrate", str(home / calibrate), *map(str, more)])


def rows(*paths):
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def test_what_is_sure_is_kept_and_all_else_has_its_reason(home, tmp_path, capsys):
    assert label(home, tmp_path / "labels") == 1, "a recording could not be read"
    said = json.loads((home / "said.json").read_text())
    kept, rest = rows(tmp_path / "labels/train.jsonl"), rows(tmp_path / "labels/labelling/left_out-train.jsonl")
    short = {each["id"]: each["text"] for each in kept if each["id"] in said}
    assert short == {name: text for name, text in said.items() if int(name) % 2}
    reasons = {os.path.basename(each["audio_filepath"]): each["reason"] for each in rest}
    assert reasons["broken.wav"] == "unreadable" and reasons["silent.wav"] == "no words"
    assert reasons["hasty.wav"] == "no pause" and {reasons[f"{i}.wav"] for i in range(0, 20, 2)} == {"low confidence"}
    assert all(each["confidence"] >= 0.9 for each in kept)
    out, err = capsys.readouterr()
    assert f"left out: {home}/audio/broken.wav: cannot be decoded" in err
    counts = dict(line.rsplit(maxsplit=2)[:2] for line in out.split("-----\n")[2].splitlines()[:5])
    assert counts == {"kept": str(len(kept)), "low confidence": "10", "no words": "1", "no pause": "1",
                      "unreadable": "1"}
    assert "expected calibration error" in out and "expected word accuracy %" in out


def test_recordings_unlike_all_of_the_list_are_not_kept_whatever_is_asked_for(home, tmp_path, capsys):
    generator, clear = np.random.default_rng(1), tmp_path / "clear.jsonl"
    clear.write_text("".join(json.dumps({"audio_filepath": f"clear/{i}.wav", "text": clip(
        tmp_path / "clear" / f"{i}.wav", generator, 0.05)}) + "\n" for i in range(40)))
    for i in range(4):
        clip(tmp_path / "audio" / f"{i}.wav", generator, 0.6)
    assert label(home, tmp_path / "labels", "--keep", "0.01", audio=[tmp_path / "audio"], calibrate=clear) == 0
    assert not (tmp_path / "labels/train.jsonl").read_text()
    assert {each["reason"] for each in rows(tmp_path / "labels/labelling/left_out-train.jsonl")} == {"not calibrated"}
    assert {each["code"] for each in rows(tmp_path / "labels/labelling/left_out-train.jsonl")} == {"not-calibrated"}
    out = capsys.readouterr().out
    assert "not calibrated: 4 rows with a lower confidence than all of" in out
    assert "other values of --keep" not in out


def test_a_long_recording_comes_in_pieces_that_training_reads_as_they_were_transcribed(home, tmp_path):
    label(home, tmp_path / "labels", audio=["audio/long.wav"])
    kept = rows(tmp_path / "labels/train.jsonl")
    assert len(kept) > 2 and all(2 < each["duration"] <= 20 for each in kept)
    assert " ".join(each["text"] for each in kept).split() == WORDS * 8
    heard = rows(tmp_path / "labels/labelling/heard-train.jsonl")
    assert len(heard) == 1
    again = tmp_path / "again"
    assert label(home, again, audio=[tmp_path / "labels/train.jsonl"]) == 0, "JSON lines of stretches are AUDIO too"
    assert [each["text"] for each in rows(again / "train.jsonl")] == [each["text"] for each in kept]


def test_the_hours_are_those_of_the_recordings(home, tmp_path, capsys):
    """Of an hour of silence around words, what is in no row is without words."""
    silence = np.zeros(40 * bundles.RATE, np.float32)
    (tmp_path / "audio").mkdir()
    soundfile.write(tmp_path / "audio" / "a.flac", np.concatenate([silence, bundles.say("alpha beta"), silence]),
                    bundles.RATE, subtype="PCM_16")
    soundfile.write(tmp_path / "audio" / "b.flac", silence, bundles.RATE)
    assert label(home, tmp_path / "labels", audio=[tmp_path / "audio"]) == 0
    [row] = rows(tmp_path / "labels/train.jsonl")
    assert 39 <= row["offset"] < 40 and row["duration"] < 4 and row["text"] == "alpha beta"
    out = capsys.readouterr().out
    assert re.search(r"^kept +1 +0.00$", out, re.MULTILINE) and re.search(r"^no words +1 +0.03$", out, re.MULTILINE)


def test_a_corpus_takes_the_folder(home, tmp_path):
    label(home, tmp_path / "labels")
    corpus = Corpus(str(tmp_path / "labels"), "en", tmp_path / "manifests", only=["train"])
    prepared = corpus.prepare(show_progress=False)
    kept = rows(tmp_path / "labels/train.jsonl")
    assert sorted(prepared["train"].texts) == sorted(each["text"] for each in kept)
    assert sum(prepared["train"].durations) == pytest.approx(sum(each["duration"] for each in kept), rel=1e-3)


def test_another_keep_transcribes_nothing_again(home, tmp_path, capsys):
    label(home, tmp_path / "labels")
    before = (tmp_path / "labels/labelling/heard-train.jsonl").read_bytes()
    kept = len(rows(tmp_path / "labels/train.jsonl"))
    label(home, tmp_path / "labels", "--keep", "0.2")
    assert (tmp_path / "labels/labelling/heard-train.jsonl").read_bytes().strip() == before.strip()
    assert len(rows(tmp_path / "labels/train.jsonl")) > kept
    assert "23 of 24 are already done" in capsys.readouterr().err


def test_a_folder_for_labels_within_that_of_the_recordings_is_none_of_these(home, tmp_path, capsys):
    text = clip(tmp_path / "audio" / "1.wav", np.random.default_rng(0), 0.05)
    for known in ("", "1 of 1 are already done"):
        assert label(home, tmp_path / "audio" / "labels", audio=[tmp_path / "audio"]) == 0
        assert known in capsys.readouterr().err
        assert [each["text"] for each in rows(tmp_path / "audio/labels/train.jsonl")] == [text]


def test_a_recording_that_was_repaired_is_transcribed(home, tmp_path):
    (tmp_path / "audio").mkdir()
    broken = tmp_path / "audio" / "a.wav"
    broken.write_bytes(b"RIFF")
    assert label(home, tmp_path / "labels", audio=[tmp_path / "audio"]) == 1
    soundfile.write(broken, bundles.say("alpha beta"), bundles.RATE, subtype="FLOAT")
    assert label(home, tmp_path / "labels", audio=[tmp_path / "audio"]) == 0
    assert [each["text"] for each in rows(tmp_path / "labels/train.jsonl")] == ["alpha beta"]


def test_a_recording_longer_than_its_header_says_is_read_as_that_says(home, tmp_path):
    clip(tmp_path / "audio" / "a.wav", np.random.default_rng(1), 0.05)
    with open(tmp_path / "audio" / "a.wav", "ab") as file:
        file.write(np.full(2 * bundles.RATE, 0.1, np.float32).tobytes())
    # A FLAC's frames are counted, so a header of half of them is damaged, for training, too.
    flac = tmp_path / "audio" / "b.flac"
    soundfile.write(flac, *soundfile.read(tmp_path / "audio" / "a.wav"))
    data, samples = bytearray(flac.read_bytes()), soundfile.info(flac).frames
    data[22:26] = (samples // 2).to_bytes(4, "big")
    flac.write_bytes(data)
    assert label(home, tmp_path / "labels", audio=[tmp_path / "audio"]) == 1
    assert [each["id"] for each in rows(tmp_path / "labels/train.jsonl")] == ["a"]
    [left_out] = rows(tmp_path / "labels/labelling/left_out-train.jsonl")
    assert (left_out["reason"], left_out["code"]) == ("unreadable", "damaged-audio")


@pytest.mark.skipif(sys.platform == "darwin", reason="its disks take names in UTF-8 alone")
def test_a_recording_whose_name_is_no_utf8_is_left_out_by_name_and_the_others_are_kept(home, tmp_path, capsys):
    clip(tmp_path / "audio" / "a.wav", np.random.default_rng(1), 0.05)
    shutil.copy(tmp_path / "audio" / "a.wav", os.fsencode(tmp_path / "audio") + b"/b\xff\xfe.wav")
    for _ in range(2):
        assert label(home, tmp_path / "labels", audio=[tmp_path / "audio"]) == 1
        assert [each["id"] for each in rows(tmp_path / "labels/train.jsonl")] == ["a"]
        [left_out] = rows(tmp_path / "labels/labelling/left_out-train.jsonl")
        assert left_out["audio_filepath"].endswith(r"/audio/b\udcff\udcfe.wav") and left_out["code"] == "not-utf8"
        assert r"/audio/b\udcff\udcfe.wav: its path is not UTF-8: rename it [not-utf8]" in capsys.readouterr().err


def test_a_recording_that_is_named_twice_is_one_row(home, tmp_path):
    label(home, tmp_path / "labels", audio=["audio/1.wav", "audio/3.wav", "audio/1.wav"])
    label(home, tmp_path / "labels", audio=["audio", "audio/1.wav"])
    names = [each["audio_filepath"] for each in rows(tmp_path / "labels/train.jsonl")]
    assert sum(name.endswith("/1.wav") for name in names) == 1


@pytest.mark.slow
def test_shards_together_have_what_one_has(home, tmp_path, monkeypatch, capsys):
    label(home, tmp_path / "whole", "--batch-seconds", 60, "--readers", 5)
    for number in (1, 2):
        label(home, tmp_path / "labels", "--shard", f"{number}/3")
    with_two = Corpus(str(tmp_path / "labels"), "en", tmp_path / "m", only=["train"])
    with refused("incomplete-corpus"):
        with_two.prepare(show_progress=False)
    for name, value in (("ID", "14"), ("MIN", "10"), ("COUNT", "3"), ("STEP", "2")):
        monkeypatch.setenv(f"SLURM_ARRAY_TASK_{name}", value)
    label(home, tmp_path / "labels", "--shard", "slurm")
    texts = list(with_two.prepare(show_progress=False)["train"].texts)
    assert sorted(texts) == sorted(each["text"] for each in rows(tmp_path / "whole/train.jsonl"))
    files = sorted((tmp_path / "labels").glob("train-*.jsonl"))
    assert all(len(rows(each)) < len(texts) for each in files) and len(files) == 3
    curves = {(tmp_path / to / "labelling/calibration.json").read_text() for to in ("whole", "labels")}
    assert len(curves) == 1, "in whatever order results come"
    assert label(home, tmp_path / "labels", "--shard", "1/2") == 2, "of another number, some would be labelled twice"
    assert "made with another --shard; choose another folder [other-settings]" in capsys.readouterr().err


@pytest.mark.parametrize("words, message", [
    (["--shard", "0/4"], "'0/4' is not a shard: write 1/16 to 16/16, or slurm"),
    (["--shard", "5/4"], "'5/4' is not a shard"), (["--shard", "slurm"], "this is not a task of a job array"),
    (["--keep", "90"], "'90' is not a number from 0 to 1"), (["--keep", "nan"], "'nan' is not a number from 0 to 1"),
])
def test_options_that_say_nothing_are_refused(home, tmp_path, capsys, words, message):
    assert label(home, tmp_path / "labels", *words) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "labels").exists()


@pytest.fixture
def error_of(home, tmp_path, capsys):
    """Returns what the command says to what it can't label; it leaves no corpus behind."""
    def call(to="labels", **more):
        assert label(home, tmp_path / to, **more) == 2
        assert to == "mine" or not list((tmp_path / to).glob("*.jsonl"))
        return capsys.readouterr().err
    return call


def test_audio_that_can_t_be_labelled_is_refused(home, tmp_path, error_of, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.jsonl").write_text('{"audio_filepath": "a.wav"}\n{"text": "no audio"}\n')
    assert "[no-audio-files]" in error_of(audio=[tmp_path / "empty"])
    assert "[no-such-path]" in error_of(audio=["nowhere"])
    assert "[malformed-row]" in error_of(audio=[tmp_path / "bad.jsonl"])
    assert main(["label", str(home / "bundle"), "-", "--to", str(tmp_path / "labels"), "--calibrate", "dev.csv"]) == 2
    assert "[bad-option]" in capsys.readouterr().err


def test_a_bundle_that_is_no_recogniser_is_refused(codec_bundle, error_of):
    assert "[wrong-bundle-kind]" in error_of(bundle=codec_bundle)
    assert "[not-a-bundle]" in error_of(bundle="audio")


def test_a_list_that_can_t_calibrate_is_refused(home, tmp_path, error_of):
    lines = (home / "dev.jsonl").read_text().replace("dev/", f"{home}/dev/").splitlines(True)
    (tmp_path / "short.jsonl").write_text("".join(lines[:30]))
    (tmp_path / "without.jsonl").write_text(json.dumps({"audio_filepath": f"{home}/dev/1.wav"}) + "\n")
    assert "[no-such-path]" in error_of(calibrate="nothing.csv")
    silent = {"audio_filepath": f"{home}/audio/silent.wav", "text": "alpha"}
    (tmp_path / "silent.jsonl").write_text("".join(json.dumps({"id": f"{i}", **silent}) + "\n" for i in range(40)))
    assert "[bad-calibration-list]" in error_of(calibrate=tmp_path / "silent.jsonl")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sbkit.infer.pipeline.Pipeline.run", None)  # nothing is transcribed before an error
        for name, count in (("short", 30), ("without", 0)):
            said = error_of(calibrate=tmp_path / f"{name}.jsonl")
            assert f"{name}.jsonl has {count} recordings" in said and "[bad-calibration-list]" in said
    assert label(home, tmp_path / "labels", "--beam", 4, audio=["audio/1.wav"]) == 0, "nothing stands in the way"


def test_a_list_that_the_bundle_s_run_was_trained_on_is_refused(home, tmp_path, error_of):
    run = tmp_path / "run"
    bundles.make(run / "bundle")
    (run / "manifests").mkdir()
    wavs = [str(home / "dev" / f"{i}.wav") for i in (*range(7), *range(100, 110))]
    Manifest(ids=wavs, durations=[1.0] * 17, wavs=wavs, texts=["alpha"] * 17).write(run / "manifests" / "train.csv")
    assert f"dev.jsonl: the model was trained on 7 of its 60 recordings ({run}/manifests/train.csv)" in error_of(
        bundle=run / "bundle")
    Manifest(ids=wavs, durations=[1.0] * 17, wavs=wavs, texts=["alpha"] * 17, starts=[9.0] * 17).write(
        run / "manifests" / "train.csv")
    assert label(home, tmp_path / "labels", bundle=run / "bundle", audio=["audio/1.wav"]) == 0, "other stretches"
    Manifest(ids=wavs[:7] * 6, durations=[1.0] * 42, wavs=wavs[:7] * 6, texts=["alpha"] * 42).write(
        run / "manifests" / "train.csv")
    (run / "save" / "CKPT+1").mkdir(parents=True)
    (run / "hyperparams.yaml").touch()
    learnt, bundle = run / "manifests" / "train.csv", bundles.make(tmp_path / "sent", trained={"checkpoint": "CKPT+1"})
    assert f"the model was trained on 42 of its 42 recordings ({learnt})" in error_of(
        "other", bundle=bundle, calibrate=learnt)
    (run / "save" / "CKPT+1").rename(run / "save" / "CKPT+2")
    dev = shutil.copy(home / "dev.jsonl", run / "manifests" / "dev.jsonl")
    dev.write_text(dev.read_text().replace("dev/", f"{home}/dev/"))
    assert label(home, tmp_path / "others", bundle=bundle, audio=["audio/1.wav"], calibrate=dev) == 0, "another run's"


def test_a_folder_of_others_is_left_alone(tmp_path, error_of):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "train.jsonl").write_text("mine")
    assert "[output-exists]" in error_of("mine")
    assert [each.read_text() for each in (tmp_path / "mine").iterdir()] == ["mine"]
    mine = tmp_path / "mine"
    assert "[output-is-input]" in error_of("mine", audio=[mine / "train.jsonl"])


def test_labels_of_another_bundle_or_list_are_not_mixed_in(home, tmp_path, capsys):
    label(home, tmp_path / "labels", audio=["audio/1.wav"])
    bundles.make(home / "other", language="fr")
    assert label(home, tmp_path / "labels", bundle="other") == 2
    assert "made with another BUNDLE; choose another folder [other-settings]" in capsys.readouterr().err
    assert label(home, tmp_path / "labels", "--beam", 4, "--hot-word", "alpha") == 2
    assert "made with another --beam, --hot-word; choose another folder [other-settings]" in capsys.readouterr().err
    (home / "dev2.jsonl").write_text((home / "dev.jsonl").read_text() + "\n")
    assert label(home, tmp_path / "labels", calibrate="dev2.jsonl") == 2
    assert "[other-settings]" in capsys.readouterr().err
    path = tmp_path / "labels/labelling/calibration.json"
    path.write_text(path.read_text().replace("lowest", "of earlier versions"))
    assert label(home, tmp_path / "labels") == 2
    assert "[damaged-output]" in capsys.readouterr().err
    assert [each["id"] for each in rows(tmp_path / "labels/train.jsonl")] == ["1"]


@pytest.mark.slow
def test_killed_at_any_moment_it_goes_on_and_gives_no_row_twice(home, tmp_path):
    """A hundred recordings; the process is killed as soon as it has written some more lines."""
    generator = np.random.default_rng(3)
    for i in range(100):
        clip(tmp_path / "audio" / f"{i}.wav", generator, generator.uniform(0, 0.4))
    words = list(map(str, (home / "bundle", tmp_path / "audio", "--calibrate", home / "dev.jsonl",
                           "--batch-seconds", 4)))
    heard, kills = tmp_path / "labels/labelling/heard-train.jsonl", 0
    for least in (1, 30, 70):
        process = subprocess.Popen([sys.executable, "-m", "sbkit", "label", *words, "--to", str(tmp_path / "labels")],
                                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while process.poll() is None and (not heard.exists() or heard.read_bytes().count(b'"key"') < least):
            time.sleep(0.002)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            kills += 1
        process.wait()
    assert kills, "none was killed in time: the recordings are too few"
    with open(heard, "ab") as file:
        file.write(b'{"key": "[\\"/nowhere')  # as a power cut leaves it
    for to in ("labels", "whole"):
        assert main(["label", *words, "--to", str(tmp_path / to)]) == 0
    for name in ("train.jsonl", "labelling/left_out-train.jsonl"):
        found, wanted = (sorted(map(json.dumps, rows(tmp_path / to / name))) for to in ("labels", "whole"))
        assert found == wanted and len(wanted) > 10


# ---------------------------------------------------------------- pieces of long recordings


def spoken(lengths, pauses):
    """Words of so many seconds after so long pauses."""
    found, time = [], 0.0
    for number, (length, pause) in enumerate(zip(lengths, pauses, strict=False)):
        found.append(Word(str(number), time + pause, time + pause + length, 0.5))
        time = found[-1].end
    return found


@given(st.lists(st.tuples(st.floats(0.05, 3), st.floats(0, 4)), max_size=60), st.floats(2, 30), st.floats(0, 9))
def test_every_word_is_in_one_piece_with_what_is_around_it(words, longest, silence):
    heard = spoken(*zip(*words, strict=True)) if words else []
    duration = (heard[-1].end if heard else 0.0) + silence
    pieces = cut_at_pauses(heard, duration, longest)
    assert [word for piece in pieces for word in piece.words] == heard
    assert all(0 <= each.start <= each.end <= duration for each in pieces)
    assert all(one.end <= other.start for one, other in itertools.pairwise(pieces))
    for one, other in itertools.pairwise(pieces):
        assert other.words[0].start - one.words[-1].end >= PAUSE_SECONDS, "a cut goes through a pause"
    for piece in pieces:
        assert piece.start <= (piece.words[0].start if piece.words else 0.0)
        assert piece.end >= (piece.words[-1].end if piece.words else duration)
        pauses = [after.start - before.end for before, after in itertools.pairwise(piece.words)]
        whole = duration <= longest or not words
        assert whole or piece.end - piece.start <= longest / 2 + 2 * MARGIN_SECONDS or (
            max(pauses, default=0.0) < PAUSE_SECONDS), "only without a pause it may be longer"


def test_a_short_recording_is_one_piece_with_its_silence():
    words = spoken([1, 1], [3, 5])
    assert cut_at_pauses(words, 20.0, 20.0) == [(0.0, 20.0, words)]


def test_a_recording_without_words_is_one_piece():
    assert cut_at_pauses([], 3.0, 20.0) == [(0.0, 3.0, [])] and cut_at_pauses([], 30.0, 20.0) == [(0.0, 30.0, [])]


def test_a_piece_keeps_some_of_a_long_pause_and_half_of_a_short_one():
    words = spoken([4, 4, 4], [2, 0.6, 5])
    pieces = cut_at_pauses(words, 30.0, 8.0)
    assert [(round(each.start, 3), round(each.end, 3)) for each in pieces] == [(1.5, 6.3), (6.3, 11.1), (15.1, 20.1)]
