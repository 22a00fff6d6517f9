"""The README.md of a run and of its bundle: figures, data, what it started from, and no path of this machine."""

import dataclasses
import html
import json
import re

import huggingface_hub
import pytest
import run_folders
import yaml

from sbkit.score import utterances
from sbkit.score.old_set import OldSet
from sbkit.score.report import model_card, write_report
from sbkit.score.report.data import ScoredRun, read
from sbkit.score.significance import interval
from sbkit.score.weights import ChosenWeights, Mean


def front(text):
    """The front matter of a card, as the hub reads it."""
    return yaml.safe_load(text.split("---\n")[1])


def set_keys(run, **keys):
    """Add keys to the recipe of a run."""
    with open(run / "hyperparams.yaml", "a") as recipe:
        recipe.writelines(f"{key}: {value}\n" for key, value in keys.items())


def theirs(folder, card):
    """The folder of somebody's model, with its card."""
    (folder / "theirs").mkdir()
    (folder / "theirs" / "README.md").write_bytes(card)
    return folder / "theirs"


def test_a_run_has_a_card_with_its_figures_and_no_place_of_this_machine(run, tmp_path):
    write_report(run)
    card = (run / "README.md").read_text()
    words = read(run).results.words
    assert front(card) == {"library_name": "sbkit", "tags": ["sbkit", "speechbrain"]}
    assert f"| WER | {words.rate:.2f} % |" in card and "| parameters | 1,234,567 |" in card
    assert "Common Voice\n" in card and str(tmp_path) not in card and "/data/cv" not in card and "torchrun" not in card
    for wanted, said in ((6, "6"), (8, "6 of 8: the run has not finished")):
        (run / "hyperparams.yaml").write_text(f"number_of_epochs: {wanted}\n")
        assert f"| epochs | {said} |" in model_card.of_run(read(run))


def test_the_card_says_who_spoke_and_how_many(run):
    report = run / "manifests" / "prepare_report.json"
    whole = json.loads(report.read_text())
    whole["splits"]["train"] |= {"speakers": 20, "synthesised": {"espeak-ng": 1.5}}
    whole["splits"]["test"] = {**whole["splits"]["train"], "speakers": 0}
    whole["source"]["recorded"] = True
    report.write_text(json.dumps(whole))
    write_report(run)
    said = "peech synthesised by espeak-ng (no recordings of people), in the layout of Common Voice"
    card, page = (run / "README.md").read_text(), (run / "report.html").read_text()
    assert f"## Trained and tested on\n\nS{said}\n" in card and f"s{said}: /data/cv/en" in page
    assert "| train | 90 (1.5 h) | 20 |" in card and "| test | 90 (1.5 h) | unknown |" in card
    for split in whole["splits"].values():
        split["synthesised"] = {}
    report.write_text(json.dumps(whole))
    assert "\nCommon Voice: recordings of people\n" in model_card.of_run(read(run))


def test_a_corpus_of_the_hub_is_named_as_there(run):
    report = run / "manifests" / "prepare_report.json"
    whole = json.loads(report.read_text())
    whole["source"] = {"kind": "Hugging Face hub", "where": "hf://google/fleurs?config=cs_cz", "recorded": False}
    report.write_text(json.dumps(whole))
    assert ("\nHugging Face hub: it doesn't say whether people or a synthesiser spoke (google/fleurs?config=cs_cz)\n"
            in model_card.of_run(read(run)))


@pytest.mark.parametrize(("key", "what"), [("encoder_source", "a pretrained encoder"),
                                           ("init_from", "weights of an earlier model")])
def test_what_it_started_from_is_named_with_its_licence(run, tmp_path, monkeypatch, key, what):
    source = theirs(tmp_path, b"---\nlanguage: cs\nlicense: cc-by-sa-4.0\n---\n# a model\n")
    set_keys(run, language="cs  # Czech", **{key: source})
    card = model_card.of_run(read(run))
    assert f"- {what}: theirs, licence: cc-by-sa-4.0" in card and str(tmp_path) not in card
    assert front(card)["license"] == "cc-by-sa-4.0" and front(card)["language"] == "cs"
    (source / "README.md").unlink()
    card = model_card.of_run(read(run))
    assert "theirs, licence unknown" in card and "license" not in front(card)
    recipe = run / "hyperparams.yaml"
    recipe.write_text(recipe.read_text().replace(str(source), "openai/whisper-base"))
    cached = tmp_path / "cached.md"
    cached.write_text("---\nlicense: apache-2.0\n---\n")
    for found, licence in ((None, None), (str(cached), "apache-2.0")):
        monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *given, found=found, **named: found)
        matter = front(model_card.of_run(read(run)))
        assert matter["base_model"] == ["openai/whisper-base"] and matter.get("license") == licence


def test_each_part_of_a_mixture_has_its_own_figures_and_what_was_forgotten_is_said(run):
    rows = [dataclasses.replace(one, hypothesis=one.hypothesis if i % 2 else "no",
                                 meta={"corpus": ("old", "new")[i % 2], "language": ("en", "de")[i % 2]})
             for i, one in enumerate(read(run).results.utterances)]
    utterances.write(run / "test_utterances.jsonl", rows)
    assert "| WER | " in model_card.of_run(read(run)), "the column of another corpus names no parts"
    prepared = run / "manifests" / "prepare_report.json"
    whole = json.loads(prepared.read_text())
    for part, language in (("old", "en"), ("new", "de")):
        (run / "manifests" / part).mkdir()
        (run / "manifests" / part / prepared.name).write_text(json.dumps(whole | {"options": {"language": language}}))
    prepared.write_text(json.dumps(whole | {"source": {"kind": "mixture", "where": "new, old"},
                                            "options": {"parts": {"new": {}, "old": {}}}}))
    (run / "hyperparams.yaml").write_text("replay: 0.25\naverage_checkpoints: 5\n")
    OldSet("WER", True, 5.0, (4.0, 6.0)).write(run)
    run_folders.log(run, {"time": 1.8e9, "kind": "test", "test_WER old": 90.0})
    assert "| new | Common Voice | de | 90 (1.5 h) |  |  |  |  |" in model_card.of_run(read(run)), "no hours in the log"
    run_folders.log(run, *({
        "kind": "epoch", "epoch": epoch, "step": 20 * epoch, "hours new": 0.5 * epoch, "epochs new": epoch / 3,
        "hours old": epoch / 6, "epochs old": 0.1 * epoch, "valid_WER": 14.0, "valid_WER new": 9.0,
        "valid_WER old": 19.0, "valid_CER": 2.0, "valid_CER new": 2.0} for epoch in range(1, 7)))
    write_report(run)
    card, page = (run / "README.md").read_text(), (run / "report.html").read_text()
    assert "WER 90.00 on the old test, beyond the interval that it had before this run: 5.00 (4.00 to 6.00)." in card
    for part in ("old", "new"):
        value = ScoredRun([one for one in rows if one.meta["corpus"] == part]).words.rate
        assert f"| WER {part} | {value:.2f} % |" in card and f"Word error rate of {part}" in page
    assert "| WER | " not in card and "Corpus “old”" not in page, "it is said that it forgot"
    assert "| new | Common Voice | de | 90 (1.5 h) |  |  |  | 3 h, 2.0 times, 75 % of the audio |" in card
    assert "| old | Common Voice | en | 90 (1.5 h) |  |  |  | 60 min, 0.6 times, 25 % of the audio |" in card
    assert "Part old is data that its initial model was trained on" in card and "(replay) is 0.25." in card
    assert "Part old is data that its initial model was trained on" in page
    titles = re.findall(r"<figcaption>([^<]*)", page)
    assert [title for title in titles if title.endswith("on dev")] == ["WER on dev", "CER on dev"]
    drawn = [json.loads(html.unescape(each)) for each in re.findall(r'data-chart="([^"]*)"', page)]
    assert [[one["name"] for one in each["series"]] for each in drawn if any(
        one["name"] == "new" for one in each["series"])] == [["new", "old", "mean"], ["new"]]
    assert "Grouping by language gives the same groups." in page and "--mean" not in page
    OldSet("WER", True, 5.0, (4.0, 6.0), 0.5, 5.5, 9.0).write(run)
    write_report(run)
    assert f"sbkit export {run} --to BUNDLE --mean 0.5 --average 5 exports" in (run / "report.html").read_text()
    assert "The model forgot" in model_card.of_bundle("# words\n", run, None, facts={"old_test": "The model forgot"})


def test_a_bundles_readme_goes_on_with_it(run):
    text = model_card.of_bundle("# words\n\nHow to use it.\n", run, "automatic-speech-recognition")
    assert front(text)["pipeline_tag"] == "automatic-speech-recognition"
    assert text.index("How to use it.") < text.index("## Figures") < text.index("## Training")


@pytest.mark.parametrize(("count", "shown"), [(3, False), (9, False), (10, True)])
def test_shows_an_interval_only_of_enough_utterances(run, count, shown):
    utterances.write(run / "test_utterances.jsonl", run_folders.scored(count))
    rates = read(run).results.words
    row = "unknown, fewer than 10 utterances"
    if shown:
        low, high = interval(rates)
        row = f"{low:.2f} to {high:.2f} %"
    assert f"| WER | {rates.rate:.2f} % | {row} |\n" in model_card.of_bundle("# words\n", run, None)
    write_report(run)
    assert ("(95\N{NO-BREAK SPACE}%)" in (run / "report.html").read_text()) is shown


def test_exporting_what_training_had_warned_of_says_so(run, caplog):
    model_card.of_bundle("# words\n", run, None)
    assert not caplog.messages
    headline = "The model has learnt nothing: its loss stays at chance"
    run_folders.log(run, {"kind": "warning", "what": "chance", "headline": headline, "detail": "", "holds": True})
    model_card.of_bundle("# words\n", run, None)
    assert caplog.messages == [f"The training of {run} ended with a warning: {headline}; report.html says more"]


def test_a_recipe_that_includes_another_has_its_keys_there(run):
    """As the copy of recipes/ in a run's folder has them."""
    (run / "hyperparams.yaml").write_text(
        'recipe:\n    experiment: "words # 2"\n    language: cs    # Czech\n    init_from: null\n'
        "    encoder_source: openai/whisper-base    # a folder\n    corpus: !new:sbkit.Corpus\n        language: de\n")
    card = model_card.of_run(read(run))
    assert front(card)["language"] == "cs" and front(card)["base_model"] == ["openai/whisper-base"]
    assert "# words # 2\n" in card and "an earlier model" not in card


@pytest.mark.parametrize("data", [b"---\nlicense: mit\n---\n\xff", b"---\nlicense: mit\n---\n" + bytes(2 << 20)])
def test_the_card_of_a_source_costs_no_report(run, tmp_path, data):
    set_keys(run, init_from=theirs(tmp_path, data))
    write_report(run)
    assert "licence unknown" in (run / "README.md").read_text()


def test_the_licence_of_one_of_two_sources_is_not_that_of_the_model(run, tmp_path):
    set_keys(run, init_from=theirs(tmp_path, b"---\nlicense: mit\n---\n"), encoder_source="openai/whisper-base")
    card = model_card.of_run(read(run))
    assert "theirs, licence: mit" in card and "license" not in front(card)


def test_a_run_that_is_gone_is_no_name_on_the_hub(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results").mkdir()
    set_keys(run, init_from="results/first")
    card = model_card.of_run(read(run))
    assert "base_model" not in front(card) and "weights of an earlier model: first," in card


def test_a_bundle_of_another_checkpoint_than_was_tested_says_so(run):
    set_keys(run, average_checkpoints=3)
    card = model_card.of_bundle("# words\n", run, None, ChosenWeights(average=Mean(3)))
    assert "this bundle has" not in card and "| WER | " in card
    tested = "The run tested the mean of 3 checkpoints (`best`), and this bundle has "
    for given, has in ((("last", Mean(1)), "the checkpoint `last`, whose figures are not recorded: `sbkit evaluate RUN "
                                     "--checkpoint last` measures them, and the next export shows them."),
                       (("best", Mean(2)), "the mean of 2 checkpoints (`best`), whose figures are not recorded: `sbkit "
                                     "evaluate RUN --average 2` measures them, and the next export shows them."),
                       (("best", Mean(3), 0.25), "0.25 of the mean of 3 checkpoints (`best`) and 0.75 of the initial "
                                           "weights, whose figures are not recorded.")):
        card = model_card.of_bundle("# words\n", run, None, ChosenWeights(*given))
        assert f"{tested}{has}" in card and "| WER | " not in card, "the figures of other weights"


def test_a_bundle_of_other_weights_has_their_own_figures_where_they_were_measured(run):
    set_keys(run, average_checkpoints=3)
    own = run_folders.scored(seed=7, wrong=0.5)
    made = {"run": str(run), "checkpoint": "best-mean-of-2", "checkpoints": ["CKPT+b", "CKPT+a"], "corpus": None,
            "manifest": f"{run}/manifests/test.csv"}
    facts = {"checkpoint": "CKPT+b", "mean_of": 2}

    def figures(mean=None, average=2, **other):
        folder = run / "evaluations" / "test-best-mean-of-2"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "result.json").write_text(json.dumps(made | other))
        utterances.write(folder / "utterances.jsonl", own)
        return model_card.of_bundle("# words\n", run, None, ChosenWeights("best", Mean(average), mean), facts)

    row = f"| WER | {ScoredRun(own).words.rate:.2f} % |"
    assert row in figures() and "which `sbkit evaluate` tested: these are its figures." in figures()
    for other in ({"checkpoint": "best-mean-of-2-beam10"}, {"checkpoint": "last-mean-of-2"}, {"corpus": "/data/other"},
                  {"checkpoints": ["CKPT+c", "CKPT+a"]}, {"manifest": f"{run}/manifests/dev.csv"}, {"mean": 0.5}):
        assert "| WER | " not in figures(**{"mean": None} | other), other
    figures()
    odd = run / "evaluations" / "a" / "result.json"
    odd.parent.mkdir()
    for text in ("{broken", "[]", "{}", json.dumps(made | {"checkpoints": []}), json.dumps(made | {"manifest": None}),
                 json.dumps({key: value for key, value in made.items() if key != "corpus"})):
        odd.write_text(text)
        assert row in figures(), text
    OldSet("WER", True, 5.0, (4.0, 6.0), 0.5, 5.5, 9.0).write(run)
    assert "| WER old | 5.50 |\n| WER new | 9.00 |" in figures(0.5, 3)
    for mean, average in ((0.25, 3), (0.5, 2)):
        card = figures(mean, average)
        assert "| WER" not in card and "whose figures on the new test are not recorded." in card


def test_a_readme_that_somebody_wrote_stays_and_a_card_is_written_again(run):
    (run / "README.md").write_text("# My notes\n")
    write_report(run)
    assert (run / "README.md").read_text() == "# My notes\n"
    (run / "README.md").write_text(model_card.of_run(read(run)).replace("1,234,567", "7"))
    write_report(run)
    assert "1,234,567" in (run / "README.md").read_text()


def test_a_log_that_is_damaged_costs_the_card_and_no_export(run, caplog):
    (run / "metrics.jsonl").write_text("{broken\n{}\n")
    assert model_card.of_bundle("# words\n", run, None) == "# words\n"
    assert "metrics.jsonl, line 1" in caplog.text
