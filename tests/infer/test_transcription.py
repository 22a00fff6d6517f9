"""``sbkit transcribe``: what is named, what comes out where, what is done already, and scores."""

import atexit
import contextlib
import io
import json
import os
import re
import sys
import tempfile
import types

import bundles
import numpy as np
import pytest
import soundfile

from sbkit.cli import main
from sbkit.infer.inputs import collect
from sbkit.infer.transcription import SETTINGS
from sbkit.score.rates import ErrorRates
from sbkit.score.significance import interval


@pytest.fixture
def clips(tmp_path):
    """A folder with clips below it, one of them no audio."""
    home = tmp_path / "clips"
    for name, text in (("one.wav", "first words"), ("deep/two.flac", "more words here"), ("deep/er/three.wav", "last")):
        path = home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        soundfile.write(path, bundles.say(text), bundles.RATE, subtype="PCM_16")
    (home / "notes.txt").write_text("no audio")
    return home


def run(*words):
    return main(["transcribe", *map(str, words)])


def test_one_clip_is_its_text_alone(bundle, clips, capsys):
    assert run(bundle, clips / "one.wav") == 0
    captured = capsys.readouterr()
    assert captured.out == "first words\n"
    assert "model.onnx on cpu (CPUExecutionProvider" in captured.err and "real-time factor" in captured.err


def test_vad_leaves_out_hallucinated_words(bundle, clips, tmp_path, capsys):
    assert run(bundle, clips / "one.wav", "--vad") == 0 and capsys.readouterr().out == "\n"
    assert run(bundle, clips / "one.wav", "--to", tmp_path / "out") == 0
    assert run(bundle, clips / "one.wav", "--to", tmp_path / "out", "--vad") == 2
    said = capsys.readouterr().err
    assert "made with another --vad" in said and "[other-settings]" in said


def test_a_recording_that_was_cut_off_comes_with_a_warning(bundle, clips, capsys):
    data = (clips / "one.wav").read_bytes()
    (clips / "one.wav").write_bytes(data[: len(data) // 2])
    assert run(bundle, clips / "one.wav", "--format", "json") == 0
    captured = capsys.readouterr()
    warning = json.loads(captured.out)["warning"]
    assert warning.startswith("cut off: ") and f"warning: {clips}/one.wav: {warning}\n" in captured.err


def test_transcripts_are_printed_in_the_order_given(bundle, clips, capsys):
    """Independent of batches: the longest is transcribed first."""
    assert run(bundle, clips / "deep/er/three.wav", clips / "deep/two.flac", clips / "one.wav") == 0
    assert capsys.readouterr().out.splitlines() == ["three\tlast", "two\tmore words here", "one\tfirst words"]


def test_a_folder_is_searched_and_its_shape_is_kept(bundle, clips, tmp_path, capsys):
    out = tmp_path / "out"
    assert run(bundle, clips, "--to", out, "--format", "txt,json,srt,vtt,ctm") == 0
    files = sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file() and path.name != SETTINGS)
    kinds = ("ctm", "json", "srt", "txt", "vtt")
    assert files == sorted(f"{stem}.{kind}" for stem in ("deep/er/three", "deep/two", "one") for kind in kinds)
    assert (out / "deep/two.txt").read_text() == "more words here\n"
    assert json.loads((out / "one.json").read_text())["text"] == "first words"
    assert "3 of 3 recordings" in capsys.readouterr().err


def test_existing_transcripts_are_skipped(bundle, clips, tmp_path, capsys):
    out = tmp_path / "out"
    run(bundle, clips / "one.wav", "--to", out)
    (out / "one.txt").write_text("mine\n")
    assert run(bundle, clips / "one.wav", clips / "deep/two.flac", "--to", out) == 0
    assert "1 are already done" in capsys.readouterr().err
    assert (out / "one.txt").read_text() == "mine\n" and (out / "two.txt").exists()
    run(bundle, clips / "one.wav", "--to", out, "--overwrite")
    assert (out / "one.txt").read_text() == "first words\n"
    # A format that is missing is made, and the recording is done again for it.
    run(bundle, clips / "one.wav", "--to", out, "--format", "txt,srt")
    assert (out / "one.srt").exists()


def test_another_model_s_transcripts_are_not_mixed_in(bundle, clips, tmp_path, capsys):
    other = str(bundles.make(tmp_path / "other", language="fr"))
    out = tmp_path / "out"
    run(bundle, clips / "one.wav", "--to", out)
    assert run(other, clips / "one.wav", "--to", out) == 2
    said = capsys.readouterr().err
    assert "made with another BUNDLE" in said and "[other-settings]" in said
    assert run(other, clips / "one.wav", "--to", out, "--overwrite") == 0


def test_a_bundle_among_the_recordings_is_explained(bundle, clips, capsys):
    assert main(["transcribe", str(clips / "one.wav"), str(bundle)]) == 2
    assert "give it once, before the recordings [no-audio-files]" in capsys.readouterr().err
    assert main(["transcribe", str(clips / "one.wav"), str(clips / "one.wav"), str(bundle)]) == 2
    assert "[not-a-bundle]" in capsys.readouterr().err


def test_folders_without_audio_are_named_in_a_warning(clips, tmp_path, caplog):
    (none := tmp_path / "none").mkdir()
    assert len(collect([str(clips / "one.wav"), str(none)])) == 1
    assert f"There is no audio in {none}: looked for " in caplog.text


def test_impossible_durations_in_a_list_are_ignored(bundle, clips, tmp_path, capsys):
    line = json.dumps({"audio_filepath": str(clips / "one.wav"), "duration": 1e308, "text": "first words"})
    (tmp_path / "clips.jsonl").write_text(f"{line}\n{line}\n")
    assert run(bundle, tmp_path / "clips.jsonl") == 0
    assert capsys.readouterr().out.count("first words") == 2
    (tmp_path / "clips.jsonl").write_text(line.replace("duration", "offset"))
    assert run(bundle, tmp_path / "clips.jsonl") == 2
    assert "[malformed-row]" in capsys.readouterr().err


def test_recordings_with_equal_names_get_distinct_files(bundle, clips, tmp_path):
    again = tmp_path / "again" / "one.wav"
    again.parent.mkdir()
    soundfile.write(again, bundles.say("other"), bundles.RATE)
    soundfile.write(clips / "one.flac", bundles.say("flac"), bundles.RATE)
    found = collect([str(clips / "one.wav"), str(again), str(clips / "one.flac")])
    assert [each.id for each in found] == ["one.wav-1", "one.wav-2", "one.flac"]
    assert run(bundle, clips / "one.wav", again, clips / "one.flac", "--to", tmp_path / "out") == 0
    texts = {path.name: path.read_text() for path in (tmp_path / "out").glob("*.txt")}
    assert texts == {"one.wav-1.txt": "first words\n", "one.wav-2.txt": "other\n", "one.flac.txt": "flac\n"}


@pytest.mark.skipif(sys.platform == "darwin", reason="its disks take names in UTF-8 alone")
def test_names_in_invalid_utf8_get_replacement_characters(bundle, clips, tmp_path):
    strange = os.fsdecode(os.fsencode(clips) + b"/caf\xe9.wav")
    os.rename(clips / "one.wav", strange)
    assert run(bundle, strange, "--to", tmp_path / "out", "--format", "json,ctm,srt") == 0
    assert json.loads((tmp_path / "out" / "caf\ufffd.json").read_text())["id"] == "caf\ufffd"
    assert run(bundle, clips, "--to", tmp_path / "all", "--format", "json") == 0
    assert (tmp_path / "all" / "caf\ufffd.json").exists()


def test_a_number_added_to_an_id_is_not_another_id(clips):
    names = [clips / "x" / "a.wav", clips / "y" / "a.wav", clips / "a.wav-1.wav"]
    for name in names:
        name.parent.mkdir(exist_ok=True)
        soundfile.write(name, bundles.say("a"), bundles.RATE)
    assert len({each.id for each in collect(list(map(str, names)))}) == 3


def test_standard_input(bundle, clips, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    at_exit = contextlib.ExitStack()
    monkeypatch.setattr(atexit, "register", at_exit.callback)
    monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(
        buffer=io.BytesIO((clips / "one.wav").read_bytes()), isatty=lambda: False))
    assert run(bundle, "-") == 0
    assert capsys.readouterr().out == "first words\n"
    assert run(bundle, "-") == 1, "all of it was read"
    assert "left out: standard input: is empty" in capsys.readouterr().err
    assert len(list(tmp_path.glob("sbkit-*"))) == 2
    at_exit.close()
    assert not list(tmp_path.glob("sbkit-*"))


def test_a_manifest_is_scored_against_its_texts(bundle, clips, tmp_path, capsys):
    seconds = [len(bundles.say(text)) / bundles.RATE for text in ("first words", "last")]
    (tmp_path / "test.csv").write_text(
        "ID,duration,wav,spk_id,wrd\n"
        f"u1,{seconds[0]},{clips}/one.wav,,first word\n"
        f"u2,{seconds[1]},{clips}/deep/er/three.wav,,last\n")
    assert run(bundle, tmp_path / "test.csv") == 0
    captured = capsys.readouterr()
    assert captured.out.splitlines() == ["u1\tfirst words", "u2\tlast"]
    assert "WER 33.33 %" in captured.err and "2 with a reference" in captured.err
    assert "without case" not in captured.err, "it would be the same line"


def test_references_with_case_and_punctuation_are_scored_both_ways(bundle, clips, tmp_path, capsys):
    (tmp_path / "refs.tsv").write_text("one\tFirst, words!\ntwo.flac\t...\n")
    assert run(bundle, clips, "--references", tmp_path / "refs.tsv") == 0
    err = capsys.readouterr().err
    assert "WER 166.67 %" in err and "2 with a reference" in err
    assert re.search(r"^without case and punctuation: WER 0\.00 % \(.+\), CER 0\.00 %$", err, re.MULTILINE), err


def test_the_interval_equals_that_of_evaluate(bundle, clips, tmp_path, capsys):
    texts = {"one.wav": "first words", "deep/two.flac": "more words here", "deep/er/three.wav": "last"}
    rows = [(f"u{i}", name, texts[name] + i % 5 * " word") for i, name in enumerate(6 * [*texts])]
    (tmp_path / "test.csv").write_text("ID,duration,wav,wrd\n" + "".join(
        f"{id},{len(bundles.say(texts[name])) / bundles.RATE},{clips}/{name},{words}\n" for id, name, words in rows))
    assert run(bundle, tmp_path / "test.csv") == 0
    words = ErrorRates("word")
    words.add(*zip(*((each, reference, texts[name]) for each, name, reference in rows), strict=True))
    assert "(95 % interval {:.2f} to {:.2f})".format(*interval(words)) in capsys.readouterr().err


@pytest.mark.parametrize("name, form", [
    ("refs.csv", "recording_id,file,transcript\n1,clips/one.wav,first words\n2,two.flac,more words there\n"),
    ("refs.csv", "id,sentence\none,first words\ntwo,more words there\n"),
    ("test.tsv", 'client_id\tpath\tsentence\n"x\tone.wav\tfirst words\nx\ttwo.flac\tmore words there\n'),
])
def test_references_are_any_list_that_can_be_prepared(bundle, clips, tmp_path, capsys, name, form):
    (tmp_path / name).write_text(form)
    assert run(bundle, clips, "--references", tmp_path / name) == 0
    assert "WER 20.00 %" in capsys.readouterr().err
    (tmp_path / name).write_text(form + form.splitlines()[-1] + "\tmore,more\n")
    assert run(bundle, clips, "--references", tmp_path / name) == 2
    assert "[malformed-row]" in capsys.readouterr().err
    (tmp_path / "refs.csv").write_text("file,what\none.wav,first words\n")
    assert run(bundle, clips, "--references", tmp_path / "refs.csv") == 2
    assert "[missing-column]" in capsys.readouterr().err


def test_an_ambiguous_file_name_is_not_used_as_reference(bundle, clips, tmp_path, capsys):
    (tmp_path / "refs.csv").write_text("path,text\na/one.wav,other words\nb/one.wav,first\ndeep/two.flac,more words\n")
    assert run(bundle, clips, "--references", tmp_path / "refs.csv") == 0
    assert "1 with a reference" in capsys.readouterr().err


def test_references_from_lines_of_name_and_text(bundle, clips, tmp_path, capsys):
    (tmp_path / "refs.tsv").write_text("one\tfirst words\ntwo.flac\tmore words there\n\n")
    assert run(bundle, clips, "--references", tmp_path / "refs.tsv") == 0
    err = capsys.readouterr().err
    assert "WER 20.00 %" in err and "not scored: 1 recording without a reference: deep/er/three" in err
    (tmp_path / "refs.tsv").write_text("else\tfirst words\n")
    assert run(bundle, clips, "--references", tmp_path / "refs.tsv") == 2
    assert "[no-references]" in capsys.readouterr().err
    (tmp_path / "refs.tsv").write_text("no tab here\n")
    assert run(bundle, clips, "--references", tmp_path / "refs.tsv") == 2
    assert "[malformed-row]" in capsys.readouterr().err


def test_a_bad_clip_is_named_counted_and_left_out(bundle, clips, tmp_path, capsys):
    (clips / "bad.wav").write_bytes(b"RIFFnothing")
    assert run(bundle, clips, "--to", tmp_path / "out") == 1
    err = capsys.readouterr().err
    assert "left out:" in err and "bad.wav" in err and "3 of 4 recordings" in err
    assert (tmp_path / "out" / "one.txt").exists() and not (tmp_path / "out" / "bad.txt").exists()


@pytest.mark.parametrize("words, code", [
    (["none.wav"], "no-such-path"), (["."], "no-audio-files"), (["CLIP", "--format", "docx"], "bad-value"),
    (["CLIP", "CLIP", "--format", "srt"], "missing-option"), (["CLIP", "--format", "txt,json"], "missing-option"),
    (["CLIP", "--device", "cuda"], "device-unavailable"), (["CLIP", "--model", "int8"], "missing-format"),
    (["CLIP", "--chunk-seconds", "-1"], "bad-option"), (["CLIP", "--threads", "0"], "bad-option"),
])
def test_command_line_errors_are_one_line(bundle, clips, tmp_path, capsys, monkeypatch, words, code):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    assert run(bundle, *(str(clips / "one.wav") if word == "CLIP" else word for word in words)) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and f"[{code}]" in captured.err and captured.err.count("error:") == 1


def test_relative_paths_start_at_the_list_or_the_working_directory(bundle, tmp_path, monkeypatch, capsys):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for name in ("../a.wav", "b.wav"):
        soundfile.write(name, bundles.say(name[-5]), bundles.RATE)
    seconds = len(bundles.say("a")) / bundles.RATE
    (tmp_path / "m.csv").write_text(f"ID,duration,wav,wrd\nu1,{seconds},a.wav,a\nu2,{seconds},b.wav,b\n")
    assert run(bundle, tmp_path / "m.csv") == 0
    assert capsys.readouterr().out.splitlines() == ["u1\ta", "u2\tb"]


def test_ids_can_not_leave_the_folder(bundle, tmp_path):
    soundfile.write(tmp_path / "a.wav", bundles.say("a"), bundles.RATE)
    (tmp_path / "m.csv").write_text(f"ID,duration,wav,spk_id,wrd\n../../evil,0.2,{tmp_path}/a.wav,,\n")
    out = tmp_path / "x" / "y" / "out"
    assert run(bundle, tmp_path / "m.csv", "--to", out) == 0
    assert (out / "evil.txt").exists() and not list(tmp_path.glob("evil*"))


def test_what_can_not_be_written_is_reported(bundle, clips, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "two").write_text("a file where a folder has to be")
    (tmp_path / "m.csv").write_text(f"ID,duration,wav,spk_id,wrd\ntwo/one,0.5,{clips}/one.wav,,a\n")
    assert run(bundle, tmp_path / "m.csv", "--to", tmp_path / "out") == 2
    assert "[not-writable]" in capsys.readouterr().err


def test_ids_that_mean_one_file_are_refused(bundle, clips, tmp_path, capsys):
    (tmp_path / "m.csv").write_text("ID,duration,wav,spk_id,wrd\n" + "".join(
        f"{name},0.5,{clips}/one.wav,,a\n" for name in ("a/one", "../a//one")))
    assert run(bundle, tmp_path / "m.csv", "--to", tmp_path / "out") == 2
    assert "[same-output]" in capsys.readouterr().err


def test_json_of_several_is_a_line_each(bundle, clips, capsys):
    assert run(bundle, clips, "--format", "json") == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["id"] for row in rows] == ["deep/er/three", "deep/two", "one"]
    assert np.isclose(rows[2]["duration"], len(bundles.say("first words")) / bundles.RATE, atol=1e-3)


def test_hot_words_and_a_language_model_on_the_command_line(bundle, clips, tmp_path, capsys):
    (tmp_path / "hot.txt").write_text("first=3\n\nwords\n")
    assert run(bundle, clips / "one.wav", "--hot-word", "last=4", "--hot-word", f"@{tmp_path}/hot.txt") == 0
    assert capsys.readouterr().out == "first words\n"
    for empty in ("", "=5"):
        assert run(bundle, clips / "one.wav", "--hot-word", empty) == 2
        assert "[bad-hot-word]" in capsys.readouterr().err
    assert run(bundle, clips / "one.wav", "--hot-word", "x=much") == 2
    assert "[bad-hot-word]" in capsys.readouterr().err
    assert run(bundle, clips / "one.wav", "--lm", tmp_path / "none.arpa") == 2
    assert "[no-such-path]" in capsys.readouterr().err
    arpa = tmp_path / "lm.arpa"
    rows = ("<s>", "</s>", "<unk>", "first", "words", "more")
    arpa.write_text("\\data\\\nngram 1=6\n\n\\1-grams:\n" + "".join(f"-0.8\t{w}\n" for w in rows) + "\n\\end\\\n")
    assert run(bundle, clips / "one.wav", "--lm", arpa, "--lm-weight", "0.4", "--to", tmp_path / "out") == 0
    assert (tmp_path / "out" / "one.txt").read_text() == "first words\n"
    assert run(bundle, clips / "one.wav", "--to", tmp_path / "out") == 2, "searched and greedy ones are not mixed"
