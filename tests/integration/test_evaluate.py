"""sbkit evaluate and sbkit rerun: any checkpoint, any corpus, any number of devices, and every wrong command."""

import csv
import json
import shutil

import pytest
import run_folders
from processes import results

from sbkit.cli import main
from sbkit.data.corpus import Corpus
from sbkit.data.manifest import Manifest
from sbkit.decode import lm
from sbkit.runs.evaluation_request import EvaluateRequest
from sbkit.runs.restore import load_run
from sbkit.runs.scored_corpus import prepare
from sbkit.score import utterances

pytestmark = pytest.mark.slow  # each takes a fraction of a second, and there are many


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("evaluate")
    run_folders.run_with_model(home / "run", run_folders.corpus(home / "data", train=24, dev=5, test=9))
    return home


@pytest.fixture(scope="module")
def run(home):
    return home / "run"


def evaluate(run, *words):
    return main(["evaluate", str(run), "--device", "cpu", "--workers", "0", *map(str, words)])


def result(run, name):
    return json.loads((run / "evaluations" / name / "result.json").read_text())


def test_each_checkpoint_is_a_row_and_a_folder(run, capsys):
    assert evaluate(run, "--checkpoint", "best", "last", "epoch1") == 0
    table = capsys.readouterr().out
    assert [line.split()[0] for line in table.splitlines()[2:5]] == ["best", "last", "CKPT+epoch1"]
    for name, used in (("test-best", "CKPT+epoch2"), ("test-last", "CKPT+within"), ("test-CKPT+epoch1", "CKPT+epoch1")):
        facts = result(run, name)
        assert facts["checkpoints"] == [used] and facts["utterances"] == 9 and facts["real_time_factor"] > 0
        assert facts["WER_interval"][0] <= facts["WER"] <= facts["WER_interval"][1]
        assert f"{facts['WER']:.2f}" in table and str(run / "evaluations" / name) in table
        folder = run / "evaluations" / name
        assert (folder / "wer.txt").read_text().startswith(f"%WER {facts['WER']:.2f} [")
        assert (folder / "cer.txt").is_file() and "<html" in (folder / "report.html").read_text()
        heard = utterances.read(folder / "utterances.jsonl")
        assert [one.id for one in heard] == sorted(f"test{i}" for i in range(9))
        assert all(one.meta["accent"] in run_folders.ACCENTS and one.wav.endswith(".wav") for one in heard)


def test_the_rate_is_that_of_the_transcripts_it_wrote(run):
    from speechbrain.utils.metric_stats import ErrorRateStats

    assert evaluate(run) == 0
    heard = utterances.read(run / "evaluations" / "test-best" / "utterances.jsonl")
    stock = ErrorRateStats()
    stock.append([one.id for one in heard], [one.hypothesis.split() for one in heard],
                 [one.reference.split() for one in heard])
    assert result(run, "test-best")["WER"] == pytest.approx(stock.summarize("WER"))


def test_an_average_says_so(run, capsys):
    assert evaluate(run, "--average", 2) == 0
    assert result(run, "test-best-mean-of-2")["checkpoints"] == ["CKPT+epoch2", "CKPT+epoch3"]


def test_two_evaluations_can_be_compared(run, capsys):
    assert evaluate(run, "--checkpoint", "epoch1", "last") == 0
    folders = [str(run / "evaluations" / f"test-{name}") for name in ("CKPT+epoch1", "last")]
    assert main(["report", folders[0], "--against", folders[1]]) == 0
    (page,) = (run / "evaluations" / "test-CKPT+epoch1").glob("report-against-*-evaluations-test-last.html")
    page = page.read_text()
    assert "points of WER" in page and "evaluations/test-last" in page and "CKPT+epoch1</dd>" in page


def test_any_corpus_by_the_rules_of_the_run(run, home, capsys):
    other = run_folders.corpus(home / "other", test=4, validated=6)
    lines = (other / "test.csv").read_text().splitlines()
    shouted = [lines[0], *(line[:line.index("speaker")] + line[line.index("speaker"):].upper() for line in lines[1:])]
    (other / "test.csv").write_text("\n".join(shouted) + "\n")
    assert evaluate(run, "--data_folder", other) == 0
    assert result(run, "other-best")["utterances"] == 4
    heard = utterances.read(run / "evaluations" / "other-best" / "utterances.jsonl")
    assert all(one.reference and one.reference == one.reference.lower() for one in heard)
    capsys.readouterr()
    assert evaluate(run, "--data_folder", other, "--split", "validated", "--name", "mine") == 0
    assert "test (validated) " in capsys.readouterr().err
    assert result(run, "mine-best")["utterances"] == 6
    assert evaluate(run, "--data_folder", other / "validated.csv") == 0
    assert result(run, "validated-best")["WER"] == result(run, "mine-best")["WER"]
    assert evaluate(run, "--split", "dev") == 0
    assert result(run, "dev-best")["utterances"] == 5


def test_another_split_of_the_runs_own_corpus_is_prepared_by_its_options(home, capsys, monkeypatch):
    made = []

    def make(out, **options):
        made.append(options)
        return home / "data"

    monkeypatch.setattr("sbkit.data.demo.make_demo_corpus", make)
    shutil.copy(home / "data" / "test.csv", home / "data" / "extra.csv")
    own = Corpus(None, "en", home / "own", demo_hours=0.1, demo_seed=7, skip_short_texts=["test"], short_text=5)
    name, corpus = prepare(EvaluateRequest(home / "run", split="extra", out=home / "out"), own, own.source)
    assert name == "demo-extra" and made[0]["hours"] == 0.1 and made[0]["seed"] == 7
    assert all(len(text.split()) == 5 for text in corpus.manifest("test").texts)
    assert not (home / "own").exists(), "the run's own manifests stay as they are"


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".ndjson"])
def test_a_list_of_any_kind_is_scored_under_its_own_name(home, tmp_path, suffix):
    rows = list(csv.DictReader((home / "data" / "test.csv").open()))
    lines = [json.dumps(row) for row in rows] if suffix == ".ndjson" else [
        {".csv": ",", ".tsv": "\t"}[suffix].join(line) for line in (rows[0], *(row.values() for row in rows))]
    path = tmp_path / f"mine{suffix}"
    path.write_text("\n".join(lines) + "\n")
    request = EvaluateRequest(home / "run", on=str(path), out=tmp_path / "out")
    name, corpus = prepare(request, Corpus(None, "en", tmp_path / "own"), request.on)
    assert name == "mine" and len(corpus.manifest("test")) == len(rows)


def test_results_can_go_elsewhere(run, tmp_path):
    assert evaluate(run, "--to", tmp_path / "here") == 0
    assert (tmp_path / "here" / "test-best" / "result.json").is_file()


def test_too_many_errors_are_an_exit_code(run, capsys):
    wer = (evaluate(run), result(run, "test-best")["WER"])[1]
    assert evaluate(run, "--max-wer", wer + 0.01) == 0
    assert evaluate(run, "--max-wer", wer - 0.01) == 1
    assert f"best: WER is {wer:.4g}, more than" in capsys.readouterr().err
    assert evaluate(run, "--max", f"WER={wer + 0.01}", "--min", "CER=0") == 0
    assert evaluate(run, "--min", f"WER={wer + 0.01}") == 1 and "less than" in capsys.readouterr().err
    assert evaluate(run, "--max", "EER=5") == 2
    assert "there is no EER to compare with 5" in capsys.readouterr().err


def test_a_recording_that_cannot_be_read_is_named_and_not_scored(run, home, capsys):
    recording = home / "data" / "wavs" / "test2.wav"
    whole = recording.read_bytes()
    recording.write_bytes(b"RIFF nothing")
    try:
        assert evaluate(run) == 0
    finally:
        recording.write_bytes(whole)
    facts = result(run, "test-best")
    assert facts["utterances"] == 8 and list(facts["damaged"]) == ["test2"]
    assert "not scored: 1 utterance that could not be read: test2" in capsys.readouterr().out


def test_characters_that_the_model_cannot_write_are_counted(run, home, caplog):
    other = run_folders.corpus(home / "strange", test=3)
    text = (other / "test.csv").read_text().splitlines()
    text[1] = text[1].rsplit(",", 2)[0] + ",ñandú,Scottish English"
    (other / "test.csv").write_text("\n".join(text) + "\n")
    assert evaluate(run, "--data_folder", other) == 0
    assert "can't output 2 characters" in caplog.text
    assert "'ñ' x 1, 'ú' x 1. Evaluate on texts in the model's language, or train" in caplog.text


@pytest.fixture(scope="module")
def wrong(home):
    """The folder with corpora and language models that won't do."""
    for name, columns in (("silent", "ID,duration,wav,spk_id,wrd"), ("textless", "ID,duration,wav,spk_id")):
        blank = "," if name == "silent" else ""
        rows = [f"a{i},0.8,{run_folders.sound(home / name / f'{i}.wav')},s{blank}" for i in range(3)]
        (home / name / "test.csv").write_text("\n".join([columns, *rows]) + "\n")
    lm.build(["ÄÖÜ ß"], home / "other.arpa", order=2)
    (home / "cut.arpa").write_bytes((home / "other.arpa").read_bytes()[:-60])
    (home / "two").mkdir()
    for name in "ab":
        shutil.copy(home / "data" / "test.csv", home / "two" / f"{name}.csv")
    return home


@pytest.mark.parametrize("words, message", [
    (["--data_folder", "{home}/nowhere"], "no such file or folder"),
    (["--data_folder", "{home}/data/wavs"], "has recordings but no list with their transcripts"),
    (["--data_folder", "{home}/two"], "has no test split (it has a, b); choose one with --split"),
    (["--data_folder", "{home}/silent"], "3 no text"),
    (["--data_folder", "{home}/textless"], "has no column for the text"),
    (["--checkpoint", "nosuch"], "there is no checkpoint 'nosuch'"),
    (["--split", "other"], "the corpus of {home}/run: {home}/data has no split 'other'"),
    (["--average", "0"], "can't average 0 checkpoints"),
    (["--max-wer", "low"], "invalid float value"),
    (["--max", "WER"], "argument --max: 'WER' is not NAME=VALUE"),
    (["--tune-lm"], "there is no language model to weight; name one: --lm FILE.arpa"),
    (["--lm", "{home}/nowhere.arpa"], "nowhere.arpa: there is no such language model"),
    (["--lm", "{home}/cut.arpa"], "cut.arpa is truncated: its section"),
    (["--lm", "{home}/other.arpa"], "other.arpa doesn't fit this model's tokens: 100 % of its words"),
    (["--lm-weight", "1"], "there is no language model to weight"),
    (["--beam", "0"], "beam is 0"),
    (["--nbest", "0"], "nbest is 0"),
    (["--hot-word", "Ñandú"], "hot word 'ñandú' can't be spelled with this model's tokens"),
    (["--hot-word", "?!=3"], "the run's text rules leave nothing of the hot word '?!'"),
    (["--hot-word", "ladder=high"], "the boost 'high' is not a number"),
    (["--joint"], "has no trained attention decoder: its recipe says ctc_weight: 1.0"),
    (["--joint", "--hot-word", "ladder"], "the joint search takes no language model"),
    (["--ctc-weight", "0.3"], "add --joint"),
    (["--chunk", "320,whole"], "the recipe has no chunks"),
])
def test_every_wrong_command_is_one_line(run, wrong, capsys, words, message):
    assert evaluate(run, *(word.format(home=wrong) for word in words)) == 2
    told = capsys.readouterr()
    assert message.format(home=wrong) in told.err and "Traceback" not in told.err and not told.out


def test_a_folder_that_is_no_run_is_told_so(home, capsys):
    assert evaluate(home / "data") == 2
    assert "is not a run: it has no hyperparams.yaml" in capsys.readouterr().err


def test_a_language_model_is_weighed_on_dev_and_used_on_test(run, tmp_path, capsys):

    model = tmp_path / "three.arpa"
    lm.build(Manifest.read(run / "manifests" / "train.csv").texts, model, order=2)
    assert evaluate(run, "--lm", model, "--tune-lm", "--beam", 8) == 0
    assert "tuned on 5 utterances of dev: --lm-weight" in capsys.readouterr().out
    facts = result(run, "test-best-three-tuned-beam8")
    weights = facts["decoder"]
    assert weights["dev_WER"] <= 100 and weights["beam"] == 8 and facts["utterances"] == 9
    again = ["--lm-weight", weights["lm_weight"], "--word-score", weights["word_score"], "--beam", 8, "--name", "again"]
    assert evaluate(run, "--lm", model, *again) == 0
    [folder] = (run / "evaluations").glob("again-best-three-lm*-word*-beam8")
    assert result(run, folder.name)["WER"] == facts["WER"]


def nbest(run, name):
    return [json.loads(line) for line in (run / "evaluations" / name / "nbest.jsonl").read_text().splitlines()]


def test_a_search_needs_no_language_model_and_tells_its_scores(run, tmp_path, capsys):
    assert evaluate(run, "--beam", 20, "--nbest", 3) == 0
    lines = nbest(run, "test-best-beam20-nbest3")
    heard = utterances.read(run / "evaluations" / "test-best-beam20-nbest3" / "utterances.jsonl")
    assert [line["id"] for line in lines] == [one.id for one in heard]
    assert [line["hypotheses"][0]["text"] for line in lines] == [one.hypothesis for one in heard]
    assert max(len(line["hypotheses"]) for line in lines) == 3
    for line in lines:
        scores = [one["score"] for one in line["hypotheses"]]
        assert scores == sorted(scores, reverse=True)
        assert scores == pytest.approx([one["acoustic"] for one in line["hypotheses"]])  # nothing else counts
    facts = result(run, "test-best-beam20-nbest3")["decoder"]
    assert facts["beam"] == 20 and facts["lm"] is None and facts["word_score"] == 0.0
    # A phrase that is worth enough is heard, written by the run's rules.
    (tmp_path / "phrases.txt").write_text("River, GREEN!=400\n")
    assert evaluate(run, "--hot-word", f"@{tmp_path / 'phrases.txt'}", "--hot-word", "ladder=2", "--name", "hot") == 0
    assert result(run, "hot-best-hot")["decoder"]["hot_words"] == {"river green": 400.0, "ladder": 2.0}
    assert any("river green" in line["hypotheses"][0]["text"] for line in nbest(run, "hot-best-hot"))


def test_a_run_with_a_decoder_is_searched_jointly(home, capsys):
    joint = run_folders.run_with_model(home / "joint", home / "data", (70.0,), ctc_weight=0.4)
    assert evaluate(joint, "--joint", "--beam", 4, "--nbest", 2) == 0
    lines = nbest(joint, "test-best-joint-beam4-nbest2")
    assert len(lines) == 9 and all(len(line["hypotheses"]) == 2 for line in lines)
    assert result(joint, "test-best-joint-beam4-nbest2")["decoder"] == {"joint": True, "ctc_weight": 0.4, "beam": 4}


def test_a_result_keeps_others_and_says_which_it_replaces(run, tmp_path, capsys):
    out = ("--to", tmp_path)
    assert evaluate(run, "--beam", 5, *out) == evaluate(run, "--beam", 6, *out) == evaluate(run, *out) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["test-best", "test-best-beam5", "test-best-beam6"]
    rows = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("best")]
    assert rows == ["best-beam5", "best-beam6", "best"]
    assert evaluate(run, "--beam", 5, *out) == 0
    assert "replaced" not in capsys.readouterr().out, "the same once more"
    hot = ("--hot-word", "ladder=2", *out)
    assert evaluate(run, *hot) == evaluate(run, *hot[:1], "ladder=3", *hot[2:]) == 0
    lines = capsys.readouterr().out.splitlines()
    [line] = [line for line in lines if "replaced the result of" in line]
    assert f"(WER {json.loads((tmp_path / 'test-best-hot' / 'result.json').read_text())['WER']:.2f})" in line
    assert "; another --name keeps both" in line
    assert lines[lines.index(line) - 1].startswith(f"{tmp_path / 'test-best-hot'}  (")
    assert (tmp_path / "test-best-hot" / "report.html").is_file()


def score_on_a_rank(run, name):
    return main(["evaluate", str(run), "--device", "cpu", "--workers", "0", "--name", name])


def test_two_devices_score_the_same_as_one(run):
    assert evaluate(run, "--name", "one") == 0
    assert results(score_on_a_rank, run, "two") == [0, 0]
    one, two = result(run, "one-best"), result(run, "two-best")
    assert two["devices"] == 2 and one["devices"] == 1
    assert {key: one[key] for key in ("WER", "CER", "utterances", "hours")} == {
        key: two[key] for key in ("WER", "CER", "utterances", "hours")}
    lines = [(run / "evaluations" / name / "utterances.jsonl").read_text() for name in ("one-best", "two-best")]
    assert [json.loads(line)["hypothesis"] for line in lines[0].splitlines()] == [
        json.loads(line)["hypothesis"] for line in lines[1].splitlines()]


def test_a_step_that_was_not_finite_is_replayed_from_the_run_alone(run, capsys):
    from sbkit.data.loader import TrainLoader
    from sbkit.data.plan import Plan
    from sbkit.train.bad_batch.report import report
    from sbkit.train.batches import KeptBatch
    from sbkit.train.results import StepResult

    recipe, brain = load_run(run, "cpu", precision="fp32")
    manifest = recipe.keys.corpus.load()["train"]
    plan = Plan(manifest.durations, recipe.keys.batching)
    with TrainLoader(manifest, recipe.keys.tokenizer, plan, workers=0) as loader:
        batch = next(loader.at(1))
    batch.signals[1] = float("nan")
    brain.modules.train()
    report(brain, run, StepResult(float("nan"), 1, 1.0, True, 1.0, 1.0, {}, [KeptBatch(batch)], number=7))
    assert main(["rerun", str(run), "--device", "cpu"]) == 0
    told = capsys.readouterr().out
    assert batch.ids[1] in told and "Step 7 of rank 0" in told and "those of that step" in told
    assert main(["rerun", str(run / "manifests")]) == 2
    assert "holds no bad batch" in capsys.readouterr().err


def test_behaviour_is_tried_shown_and_gated(run, capsys):
    code = evaluate(run, "--behaviour", "--name", "beyond", "--max", "behaviour.silence=-1", "--max",
                    "behaviour.hum=1e9")
    shown, told = capsys.readouterr()
    facts = result(run, "beyond-best")
    figures = facts["behaviour"]
    assert code == 1 and f"behaviour.silence is {figures['behaviour.silence']:.4g}, more than -1" in told
    assert "behaviour.hum is" not in told
    for title in ("Hallucinated words per minute on non-speech", "The same utterances, changed"):
        assert title in shown and title in (run / "evaluations" / "beyond-best" / "report.html").read_text()
    assert {"behaviour.digital_zero", "behaviour.music", "behaviour.telephone"} <= set(figures)
    assert facts["utterances"] == 9, "the battery is no part of the test"


def test_behaviour_is_for_recognisers(run, monkeypatch, capsys):
    monkeypatch.setattr("sbkit.tasks.ctc.CTC.writes_words", False)
    assert evaluate(run, "--behaviour") == 2
    assert "CTC is none; leave it out [option-not-for-task]" in capsys.readouterr().err
