"""``sbkit improve``: a run goes on with corrections, and only a model that is surely better is published."""

import hashlib
import json
from types import SimpleNamespace

import bundles
import processes
import pytest
from processes import ROOT
from run_folders import corpus

from sbkit.cli import main
from sbkit.runs import restore
from sbkit.system import environment

SMALL = ("--no-check --noprogressbar --d_model 48 --nhead 2 --num_encoder_layers 2 --d_ffn 96 --cnn_channels 8 "
         "--cnn_first_channels 8 --number_of_epochs 6 --min_steps 200 --precision fp32 --num_workers 0").split()
LITTLE = ("--no-check --noprogressbar --d_model 16 --nhead 2 --num_encoder_layers 1 --d_ffn 16 --cnn_channels 4 "
          "--cnn_first_channels 4 --number_of_epochs 1 --min_steps 0 --precision fp32 --num_workers 0 --language en "
          "--max_batch_seconds 10 --step_seconds 10").split()


@pytest.mark.parametrize("words, told", [
    (["nowhere", "--with", "{data}"], "[no-such-path]"), (["{run}", "--with", "nowhere"], "[no-such-path]"),
    (["{run}", "--with", "{data}"], "[no-corrections]"),
    (["{run}", "--with", "{data}", "--set", "lr"], "[bad-option]"),
    (["{run}", "--with", "{data}", "--to", "{run}"], "is neither a bundle nor empty"),
    (["{run}", "--with", "{data}"], "[missing-option]")])
def test_mistakes_are_told_before_anything_is_trained(words, told, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "hyperparams.yaml").write_text("output_folder: here\n")
    (tmp_path / "run" / "bundle").mkdir()
    (tmp_path / "run" / "bundle" / "config.json").write_text("{}")
    given = [word.format(data=tmp_path, run=tmp_path / "run") for word in words]
    named = [] if "--to" in words or told == "[missing-option]" else ["--to", str(tmp_path / "bundle")]
    assert main(["improve", *named, *given]) == 2
    assert told in capsys.readouterr().err and [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("trained, told", [
    ({"run": "../../mine"}, "[run-not-found]"), ({}, "[run-not-found]"), ({"run": "../run"}, "[no-such-path]")])
def test_a_bundle_names_its_run_and_one_that_is_gone_is_told(trained, told, tmp_path, capsys):
    here = tmp_path / "here"
    (here / "run").mkdir(parents=True)
    (here / "run" / "hyperparams.yaml").write_text("output_folder: here\n")
    bundles.make(here / "b", trained=trained)
    assert main(["improve", str(here / "b"), "--with", "nowhere"]) == 2
    error = capsys.readouterr().err
    assert told in error and (f"{tmp_path}/mine" in error) == ("../mine" in trained.get("run", ""))


def test_corrections_that_a_bundle_has_learnt_are_not_learnt_again(tmp_path, capsys):
    (tmp_path / "kept.jsonl").write_text("{}\n")
    mark = hashlib.sha256(b"{}\n").hexdigest()[:8]
    run = tmp_path / f"demo-improved-{mark}" / "run"
    run.mkdir(parents=True)
    (run / "hyperparams.yaml").write_text("output_folder: here\n")
    (run.parent / "recipe.yaml").write_text(f"# with the corrections {mark}\nlr: 1\n")
    bundles.make(tmp_path / "b", trained={"run": f"../demo-improved-{mark}/run"})
    assert main(["improve", str(tmp_path / "b"), "--with", str(tmp_path / "kept.jsonl")]) == 0
    assert "b has learnt these corrections already" in capsys.readouterr().out
    (tmp_path / "kept.jsonl").write_text("{}\n{}\n")  # more than those
    assert main(["improve", str(tmp_path / "b"), "--with", str(tmp_path / "kept.jsonl")]) != 0


def test_a_bundle_that_was_improved_in_a_named_folder_leaves_that_work_as_it_is(tmp_path, monkeypatch, capsys):
    for name in "run", "work/run":
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "hyperparams.yaml").write_text("output_folder: here\n")
    for name in "new", "more":
        corpus(tmp_path / name, train=3)
    monkeypatch.setattr(restore, "read_run", lambda run: SimpleNamespace(task=SimpleNamespace(writes_words=True)))
    monkeypatch.setattr(environment, "training_command", lambda *_: ["false"])

    def improve(run, data):
        return main(["improve", str(tmp_path / run), "--with", str(tmp_path / data), "--work", str(tmp_path / "work"),
                     "--to", str(tmp_path / "b")])

    assert improve("run", "new") == 1 and "[training-failed]" in capsys.readouterr().err
    recipe = (tmp_path / "work" / "recipe.yaml").read_text()
    bundles.make(tmp_path / "b", trained={"run": "../work/run"})
    assert improve("b", "new") == 0 and "b has learnt these corrections already" in capsys.readouterr().out
    for run, data in ("b", "more"), ("work/run", "new"):
        assert improve(run, data) == 2
        assert "[conflicting-options]" in capsys.readouterr().err
    assert (tmp_path / "work" / "recipe.yaml").read_text() == recipe


@pytest.mark.parametrize("place", ["b", "b.previous"])
@pytest.mark.parametrize("bundle, told", [
    (False, "is neither a bundle nor empty, so it is not replaced"),
    (True, "has files that are not part of a bundle: thesis.tex, so it is not replaced; move them elsewhere")])
def test_files_of_others_are_named_before_anything_is_trained(place, bundle, told, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "hyperparams.yaml").write_text("output_folder: here\n")
    if bundle:
        bundles.make(tmp_path / place)
    else:
        (tmp_path / place).mkdir()
        (tmp_path / place / "config.json").write_text('{"model_type": "wav2vec2"}')
    (tmp_path / place / "thesis.tex").write_text("years of work")
    before = sorted(path.name for path in (tmp_path / place).iterdir())
    assert main(["improve", str(tmp_path / "run"), "--with", str(tmp_path), "--to", str(tmp_path / "b")]) == 2
    assert f"{place} {told}" in capsys.readouterr().err
    assert sorted(path.name for path in (tmp_path / place).iterdir()) == before


def test_a_bundle_that_a_kill_left_beside_its_place_is_back_before_its_run_is_read(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "hyperparams.yaml").write_text("output_folder: here\n")
    bundles.make(tmp_path / "b", trained={"run": "../run"}).rename(tmp_path / ".b.kept")
    assert main(["improve", str(tmp_path / "b"), "--with", "nowhere"]) == 2
    assert "[no-such-path]" in capsys.readouterr().err and (tmp_path / "b" / "config.json").is_file()


def test_a_rollback_refuses_to_move_files_of_others(tmp_path, capsys):
    for name in "b", "b.previous":
        bundles.make(tmp_path / name)
    (tmp_path / "b" / "thesis.tex").write_text("years of work")
    assert main(["rollback", str(tmp_path / "b")]) == 2
    assert "b has files that are not part of a bundle: thesis.tex" in capsys.readouterr().err
    assert (tmp_path / "b" / "thesis.tex").is_file() and (tmp_path / "b.previous").is_dir()


def test_a_run_can_be_the_working_directory_and_a_refused_one_leaves_nothing(tmp_path, monkeypatch, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "hyperparams.yaml").write_text("lr: 1\n")
    (tmp_path / "kept.jsonl").write_text("{}\n")
    monkeypatch.chdir(tmp_path / "run")
    assert main(["improve", ".", "--with", str(tmp_path / "kept.jsonl"), "--to", str(tmp_path / "bundle")]) == 2
    assert "lacks output_folder" in capsys.readouterr().err
    assert sorted(each.name for each in tmp_path.iterdir()) == ["kept.jsonl", "run"]


def said(*texts, seconds=9.0):
    return [{"id": f"c{i}", "audio_filepath": f"clips/c{i}.wav", "duration": seconds, "text": text}
            for i, text in enumerate(texts)]


@pytest.mark.parametrize("corrections, told", [
    ([{"audio_filepath": "a.wav", "sentence": "good morning"}],
     """corrections.jsonl, line 1 is no correction: KeyError('text'); write {"audio_filepath": ..., "text": ...}"""),
    ([], "has 0 usable corrections of 0 sentences"),
    ([*said("good morning"), "ü"], "has 1 usable corrections of 1 sentence"),
    (said(" ", "...", "—"), "3 without words: c0, c1, c2"),
    (said(*["One, and the same!"] * 9), "has 9 usable corrections of 1 sentence;"),
    (said("доброе утро", "good morning", "добрый day"), "2 in another script than the run's texts: c0, c2"),
    (said("good morning 15", "dear old hands", "řad old hands dear morning"),
     "has 1 usable corrections of 1 sentence; 1 with letters that the run's texts lack (1, 5): write what is spoken: "
     "c0; 1 with letters that the run's texts lack (ř): write what is spoken: c2"),
    (said("Green River.", "the old ladder", seconds=2.01),
     "has 1 usable corrections of 1 sentence; 1 recordings of the run's own dev or test, which has to stay")])
def test_corrections_that_teach_nothing_are_told_before_anything_is_trained(corrections, told, tmp_path, capsys,
                                                                            monkeypatch):
    (tmp_path / "run" / "manifests").mkdir(parents=True)
    (tmp_path / "run" / "hyperparams.yaml").write_text("output_folder: here\n")
    for split, text in (("train", "good morning dear old ladder hands just be quick with examples of a vote"),
                        ("test", "green river")):
        (tmp_path / "run" / "manifests" / f"{split}.csv").write_text(
            f"ID,duration,wav,spk_id,wrd\n{split}0,2.0,{split}.wav,,{text}\n")
    (tmp_path / "kept").mkdir()
    kept = tmp_path / "kept" / "corrections.jsonl"
    kept.write_text("".join(json.dumps(row) + "\n" for row in corrections if isinstance(row, dict)))
    with kept.open("ab") as file:  # a row that a server is writing
        file.write("".join(each for each in corrections if isinstance(each, str)).encode()[:1])
    monkeypatch.setattr(restore, "read_run", lambda run: SimpleNamespace(task=SimpleNamespace(writes_words=True)))
    for given in kept.parent, kept:
        assert main(["improve", str(tmp_path / "run"), "--with", str(given), "--to", str(tmp_path / "b")]) == 2
        assert told in capsys.readouterr().err
    assert not list(tmp_path.glob("run-improved*"))


@pytest.mark.long
@pytest.mark.slow
def test_what_is_not_surely_better_is_not_published(tmp_path):
    corpus(tmp_path / "data", train=24, dev=4, test=4, longer=3)
    corpus(tmp_path / "more", train=30, longer=3)
    processes.sbkit("train", ROOT / "hparams" / "ctc.yaml", *LITTLE, "--data_folder", "data", "--output_folder", "run",
                    cwd=tmp_path)
    words = ["improve", "run", "--with", "more/train.csv", "--to", "bundle", "--set", "schedule.peak=0"]
    done = processes.sbkit(*words[:-1], "opt_class.lr=0", cwd=tmp_path, code=2)
    assert "--set opt_class.lr: it is 0, and has no effect" in done.stderr and "set schedule.peak to 0" in done.stderr
    done = processes.sbkit(*words, cwd=tmp_path, code=1)
    assert "not published, so bundle is unchanged:" in done.stderr
    assert "the new test is not significantly better" in done.stderr
    assert "old test, WER %" in done.stdout and not (tmp_path / "bundle").exists()
    [work] = tmp_path.glob("run-improved-*")
    steps = len((work / "run" / "metrics.jsonl").read_text().splitlines())
    processes.sbkit(*words, cwd=tmp_path, code=1)  # goes on where it ended
    assert len((work / "run" / "metrics.jsonl").read_text().splitlines()) <= steps + 2


@pytest.mark.long
@pytest.mark.slow
def test_corrections_make_a_model_better_and_it_is_published(tmp_path):
    for name, hours, seed in ("old", 0.12, 1), ("new", 0.12, 2):
        processes.sbkit("demo-data", name, "--hours", hours, "--seed", seed, cwd=tmp_path)
    processes.sbkit("train", ROOT / "hparams" / "ctc.yaml", *SMALL, "--data_folder", "old/en", "--output_folder", "run",
                    cwd=tmp_path)
    lines = (tmp_path / "new" / "en" / "train.tsv").read_text().splitlines()
    names = lines[0].split("\t")
    rows = [dict(zip(names, line.split("\t"), strict=True)) for line in lines[1:]]
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "corrections.jsonl").write_text("".join(json.dumps(
        {"audio_filepath": str(tmp_path / "new" / "en" / "clips" / row["path"]), "text": row["sentence"]}) + "\n"
        for row in rows))
    (tmp_path / "bundle").mkdir()
    old = '{"format": "sbkit bundle", "files": {}}'
    (tmp_path / "bundle" / "config.json").write_text(old)
    done = processes.sbkit("improve", "run", "--with", "kept", "--to", "bundle", "--set", "schedule.peak=0.002",
                           "--set", "batching.min_steps=300", cwd=tmp_path)
    assert "Significantly better" in done.stdout and "not worse" in done.stdout
    assert "trained" in json.loads((tmp_path / "bundle" / "config.json").read_text())
    assert "a running server of bundle switches to it" in done.stdout and "sbkit rollback bundle" in done.stdout
    assert (tmp_path / "bundle.previous" / "config.json").read_text() == old
    done = processes.sbkit("improve", "run", "--with", "kept", "--to", "bundle", "--set", "schedule.peak=0.002",
                           "--set", "batching.min_steps=300", cwd=tmp_path)
    assert "bundle is that model already" in done.stdout
    assert (tmp_path / "bundle.previous" / "config.json").read_text() == old, "the one to go back to is kept"
