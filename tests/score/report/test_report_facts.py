"""What the report says of a test set: groups, suspected labels, what stands out, curves."""

import dataclasses
import html
import random
import re
from pathlib import Path

import numpy as np
import pytest
import run_folders
from hypothesis import given, settings
from hypothesis import strategies as st

from sbkit.score import utterances
from sbkit.score.old_set import OldSet
from sbkit.score.report import charts, groups, sections
from sbkit.score.report.charts import Series
from sbkit.score.report.data import ScoredRun, read
from sbkit.score.report.findings import SuspectLabel, findings, suspects
from sbkit.score.utterances import ScoredUtterance


@pytest.fixture(scope="module")
def results():
    return ScoredRun(run_folders.scored(200))


# ---------------------------------------------------------------- groups


def test_groups_hold_every_utterance_once(results):
    kinds = [groups.breakdown(results).durations, groups.by_speaker(results),
             *(groups.by_value(results, values, name) for name, values in groups.columns(results)[0].items())]
    assert len(kinds) == 5
    for found in kinds:
        assert sum(group.utterances for group in found) == len(results)
        assert sum(group.words for group in found) == results.lengths.sum()
        assert sum(group.edits for group in found) == results.edits.sum()
        for group in found:
            assert group.low is None or group.low <= group.rate <= group.high


@pytest.mark.parametrize(("count", "drawn"), [(8, False), (200, True)])
def test_explains_whiskers_only_if_there_are_some(count, drawn):
    section = sections.where(ScoredRun(run_folders.scored(count)), None)
    page = "".join(str(block) for block in section["blocks"])
    assert ('class="whisker"' in page) is drawn
    assert ("Whiskers: 95 % interval." in page) is drawn


def test_a_column_that_divides_as_another_is_named_with_it():
    rows = [dataclasses.replace(one, meta={"corpus": ("new", "old")[i % 2], "language": ("de", "en")[i % 2],
                                            "age": ("teens", "fifties", "")[i % 3]})
             for i, one in enumerate(run_folders.scored(30))]
    found = groups.breakdown(ScoredRun(rows))
    assert (list(found.values), found.alike) == (["age", "corpus"], {"corpus": ["language"]})


def test_durations_lie_in_their_group():
    rows = [dataclasses.replace(one, duration=seconds) for one, seconds in
             zip(run_folders.scored(6), [0.5, 1.0, 1.99, 2.0, 29.9, 45.0], strict=True)]
    assert [(group.label, group.utterances) for group in groups.breakdown(ScoredRun(rows)).durations] == [
        ("0–1 s", 1), ("1–2 s", 2), ("2–3 s", 1), ("20–30 s", 1), ("30+ s", 1)]


def test_five_parts_of_equal_size_go_from_the_least_to_the_most_confident():
    rows = [dataclasses.replace(one, confidence=confidence) for one, confidence in
            zip(run_folders.scored(30), [None] * 5 + [0.5 + number / 50 for number in range(25)], strict=True)]
    random.Random(0).shuffle(rows)
    found = groups.by_confidence(ScoredRun(rows))
    assert [(group.label, group.utterances) for group in found] == [
        ("0.50–0.58", 5), ("0.60–0.68", 5), ("0.70–0.78", 5), ("0.80–0.88", 5), ("0.90–0.98", 5)]
    known = [one for one in rows if one.confidence is not None]
    assert sum(group.words for group in found) == ScoredRun(known).lengths.sum()
    assert groups.by_confidence(ScoredRun(known[1:])) == []  # parts of fewer than five say nothing


def test_ages_are_in_their_order_and_what_is_not_given_is_last():
    ages = ["fifties", "", "teens", "twenties"] * 5
    found = groups.by_value(ScoredRun(run_folders.scored(20)), ages, "age")
    assert [group.label for group in found] == ["teens", "twenties", "fifties", groups.UNKNOWN]


def test_many_values_end_in_others(results):
    values = [f"value{i % 40}" for i in range(len(results))]
    found = groups.by_value(results, values)
    assert len(found) == groups.MAX_GROUPS and found[-1].label == f"{40 - groups.MAX_GROUPS + 1} others"
    assert sum(group.utterances for group in found) == len(results)


def test_the_hardest_speakers_come_first_and_two_utterances_have_no_interval():
    rows = run_folders.scored(40)
    rows[0] = dataclasses.replace(rows[0], speaker="alone", hypothesis="nothing like it")
    found = groups.by_speaker(ScoredRun(rows))
    assert found[0].label == "alone" and found[0].low is None
    assert [group.rate for group in found] == sorted((group.rate for group in found), reverse=True)


# ---------------------------------------------------------------- suspects


def confident(count=400, seed=3):
    """Utterances with one letter wrong here and there, the less the surer."""
    rng = random.Random(seed)
    found = []
    for one in run_folders.scored(count, wrong=0.0):
        sure = rng.uniform(0.7, 0.99)
        letters = [letter if rng.random() < sure else "x" for letter in one.reference]
        found.append(dataclasses.replace(one, confidence=sure, hypothesis="".join(letters)))
    return found


def test_transcripts_that_were_exchanged_are_found_and_little_else():
    rows = confident()
    rng = random.Random(0)
    wrong = set(rng.sample(range(len(rows)), 20))
    for i in wrong:
        rows[i] = dataclasses.replace(rows[i], reference=rows[i - 1].reference)
    found = {suspect.index for suspect in suspects(ScoredRun(rows))}
    sure = {i for i in wrong if rows[i].confidence > 0.8}
    assert len(sure & found) >= 0.9 * len(sure)
    assert len(found - wrong) <= 0.25 * len(found)


def test_a_model_that_is_wrong_throughout_suspects_nobody():
    rows = [dataclasses.replace(one, hypothesis="something else", confidence=0.9 + i / 10_000)
             for i, one in enumerate(run_folders.scored(100))]
    assert len(suspects(ScoredRun(rows))) <= 5
    silent = [dataclasses.replace(one, hypothesis="", confidence=None) for one in run_folders.scored(100)]
    assert suspects(ScoredRun(silent)) == []


def test_a_recording_with_an_empty_hypothesis_is_suspected():
    rows = confident(100)
    rows[40] = dataclasses.replace(rows[40], hypothesis="", confidence=None)
    assert suspects(ScoredRun(rows))[0].index == 40


# ---------------------------------------------------------------- what stands out


def headlines(run):
    return " | ".join(finding.headline for finding in findings(read(run)))


def test_a_model_that_forgot_what_it_knew_is_reported(tmp_path):
    run = run_folders.finished_run(tmp_path, run_folders.scored(60))
    OldSet("WER", True, 5.0, (4.0, 6.0)).write(run)
    for value, forgot in ((6.0, False), (6.5, True)):
        run_folders.log(run, {"time": 1.8e9, "kind": "test", "test_WER": 3.0, "test_WER old": value})
        first = findings(read(run))[0]
        assert (first.headline == "The model forgot what it had learnt before") is forgot
    assert first.detail.startswith("WER 6.50 on the old test, beyond the interval that it had before this run: 5.00 (")


def test_an_accent_that_is_understood_worse_stands_out(tmp_path):
    rows = [dataclasses.replace(one, meta={"accent": "hard" if i % 4 == 0 else "easy"},
                                 hypothesis="no" if i % 4 == 0 else one.reference)
             for i, one in enumerate(run_folders.scored(100))]
    assert "Accent “hard”: 100.0" in headlines(run_folders.finished_run(tmp_path, rows))
    even = [dataclasses.replace(one, meta={"accent": "ab"[i % 2]}) for i, one in enumerate(run_folders.scored(100))]
    assert "Accent" not in headlines(run_folders.finished_run(tmp_path, even))


def test_deleted_words_and_the_commonest_mistake_stand_out(tmp_path):
    rows = [dataclasses.replace(one, reference=f"the {one.reference}", hypothesis=one.reference)
             for one in run_folders.scored(60)]
    found = headlines(run_folders.finished_run(tmp_path, rows))
    assert "Words are deleted: 100" in found and "“the” is deleted 60 times" in found


def test_training_that_should_go_on_or_waited_or_lost_data_stands_out(tmp_path):
    run = run_folders.finished_run(tmp_path, None)
    found = headlines(run)
    assert "Not trained to its end: the WER was still falling" in found
    assert "10.0\N{NO-BREAK SPACE}% of the training rows were left out" in found
    waits = {"data": 0.3, "forward": 0.4, "backward": 0.3}
    run_folders.log(run, *({"kind": "epoch", "epoch": epoch, "time_shares": waits, "train_seconds": 125,
                            "skipped_steps": 2} for epoch in range(1, 7)))
    found = headlines(run)
    assert "waited for data during 30" in found and "12 steps were skipped" in found


def validated(run, steps=100, **values_by_epoch):
    """Log epochs of so many steps, each with its values."""
    for epoch, values in enumerate(zip(*values_by_epoch.values(), strict=True), start=1):
        run_folders.log(run, {"time": 1.7e9, "kind": "epoch", "epoch": epoch, "step": epoch * steps,
                              **dict(zip(values_by_epoch, values, strict=True))})


def with_non_words(folder):
    """A run without epochs whose hypotheses have words that no transcript has, which a language model would avoid."""
    rows = [dataclasses.replace(one, hypothesis=f"{one.reference} zzyx") for one in run_folders.scored(60)]
    run = run_folders.finished_run(folder, rows, epochs=0)
    (run / "manifests" / "train.csv").write_text(f"ID,duration,wav,spk_id,wrd\na,1,a.wav,,{rows[0].reference}\n")
    return run


@pytest.mark.parametrize(("values", "steps", "headline"), [
    ({"valid_WER": [90, 80, 70], "valid_loss": [3, 3, 3]}, 180, "the WER was still falling"),
    ({"valid_WER": [90, 89, 88], "valid_loss": [3, 3, 3]}, 180, None),  # by less than 3 %
    ({"valid_WER": [100, 100, 100], "valid_loss": [3.0, 2.5, 2.0]}, 180, "the loss on dev was still falling"),
    ({"valid_loss": [-5.0, -6.0]}, 5000, "the loss on dev was still falling"),  # below zero, as decibels are
    ({"valid_WER": [100]}, 540, "540 steps are a trial"),
    ({"valid_WER": [100]}, 5000, None),  # a large corpus
    ({"valid_WER": [60, 50, 50]}, 50, None),  # little data, and no progress
])
def test_says_first_that_a_model_is_not_trained_to_its_end(tmp_path, values, steps, headline):
    run = with_non_words(tmp_path)
    validated(run, steps, **values)
    assert "are non-words" in headlines(run)
    first = findings(read(run))[0]
    if headline is None:
        assert "Not trained" not in headlines(run)
    else:
        assert first.headline == f"Not trained to its end: {headline}"
        assert "Train longer before you try a language model" in first.detail
        assert first.points is None, "the gain of an early epoch on dev is no possible gain of the test's WER"


def test_says_first_that_a_run_has_not_finished_unless_it_has_tested(tmp_path):
    run = with_non_words(tmp_path)
    validated(run, 5000, valid_WER=[50, 50, 50])
    (run / "hyperparams.yaml").write_text("number_of_epochs: 12\n")
    assert findings(read(run))[0].headline == "Not trained to its end: epoch 3 of 12"
    run_folders.log(run, {"time": 1.8e9, "kind": "test", "test_WER": 50})
    assert "Not trained" not in headlines(run), "it stopped because it no longer improved"


def test_non_words_are_for_a_language_model(tmp_path):
    rows = [dataclasses.replace(one, hypothesis=f"{one.reference} zzyx" if i % 2 else one.reference)
             for i, one in enumerate(run_folders.scored(60))]
    run = run_folders.finished_run(tmp_path, rows)
    assert "are non-words" not in headlines(run), "nobody knows which words there are"
    transcripts = "".join(f"a{i},1,a.wav,,{one.reference}\n" for i, one in enumerate(rows))
    (run / "manifests").mkdir(exist_ok=True)
    (run / "manifests" / "train.csv").write_text(f"ID,duration,wav,spk_id,wrd\n{transcripts}")
    (finding,) = [one for one in findings(read(run)) if "are non-words" in one.headline]
    assert finding.headline.startswith("100") and "'zzyx'" in finding.detail
    words = sum(len(one.reference.split()) for one in rows)
    assert finding.points == pytest.approx(100 * 30 / words)


@pytest.mark.parametrize(("train", "valid", "said"), [
    ([2.0, 1.0, 0.5, 0.3, 0.2], [2.0, 1.2, 0.9, 0.95, 1.1], "More data or augmentation would help more than a larger"),
    ([2.0, 1.6, 1.52, 1.5, 1.49], [1.9, 1.5, 1.45, 1.42, 1.41], "A larger model would help more than more data"),
    ([2.0, 1.0, 0.6, 0.4, 0.3], [2.0, 1.2, 0.9, 0.8, 0.7], None),  # both still fall
])
def test_what_the_losses_of_training_and_dev_say_of_the_size(tmp_path, train, valid, said):
    run = run_folders.finished_run(tmp_path, None, epochs=0)
    for name, losses in (("train_loss", train), ("valid_loss", valid)):
        run_folders.log(run, *({"time": 1.7e9, "kind": "epoch", "epoch": epoch, "step": epoch, name: loss}
                               for epoch, loss in enumerate(losses, start=1)))
    found = [one.headline for one in findings(read(run)) if "would help more" in one.headline]
    assert [one[:len(said)] for one in found] == [said] if said else found == []
    run_folders.log(run, *({"time": 1.7e9, "kind": "epoch", "epoch": epoch, "valid_WER": 50 - epoch}
                           for epoch in range(1, 6)))
    assert "would help more" not in headlines(run), "to train longer comes first"


@pytest.mark.parametrize("wrong, said", [(0.5, True), (0.7, False)])
def test_labels_are_suspected_of_nothing_where_most_words_are_wrong(tmp_path, wrong, said):
    rows = run_folders.scored(60, wrong=wrong)
    found = findings(read(run_folders.finished_run(tmp_path, rows)), [SuspectLabel(3, 0.9, 0.1)])
    assert any("1 transcript may be wrong" in one.headline for one in found) is said


def waited(folder, device, seconds):
    """What the findings say about data of a run of six epochs, which waited for it for a third of the time."""
    run = run_folders.finished_run(folder, None)
    run_folders.log(run, {"kind": "run", "device": device}, *(
        {"kind": "epoch", "epoch": epoch, "time_shares": {"data": 0.33}, "train_seconds": seconds / 6}
        for epoch in range(1, 7)))
    return [one.detail for one in findings(read(run)) if "waited for data" in one.headline]


def test_waiting_of_some_seconds_is_no_finding_and_advice_depends_on_the_device(tmp_path):
    assert waited(tmp_path, "cuda", seconds=170) == []
    assert waited(tmp_path, "cuda", seconds=190)[0].startswith("More num_workers")
    assert waited(tmp_path, "cpu", seconds=600)[0].startswith("Data workers and training share the cores here")


def warned(run, *lines, key="code"):
    """The run's folder with lines about warnings, each of (code, headline, holds, at_end).

    key : of the code; runs of earlier versions have "what"
    """
    run_folders.log(run, *({
        "time": 1.8e9, "kind": "warning", key: code, "step": 500, "headline": headline, "detail": "So it is.",
        "advice": ["try this", "or <that>"] if holds else [], "holds": holds, "at_end": at_end}
        for code, headline, holds, at_end in lines))
    return [(one.headline, one.detail) for one in findings(read(run))]


def test_a_warning_of_an_earlier_start_is_no_finding_once_a_later_one_trains(tmp_path):
    """Each start watches anew and says again what still holds."""
    run = run_folders.finished_run(tmp_path, run_folders.scored(60))

    def headlines():
        return [each.headline for each in findings(read(run)) if each.headline == "Nothing yet"]

    assert warned(run, ("chance", "Nothing yet", True, False)) and headlines()
    run_folders.log(run, {"time": 1.9e9, "kind": "run"}, {"time": 1.9e9, "kind": "test"})
    assert headlines(), "a start that only tests trains nothing"
    run_folders.log(run, {"time": 1.9e9, "kind": "run"}, {"time": 1.9e9, "kind": "step", "step": 900})
    assert not headlines()


def test_what_training_was_warned_of_and_holds_stands_first(tmp_path):
    rows = [dataclasses.replace(one, reference=f"the {one.reference}", hypothesis="") for one in run_folders.scored(60)]
    run = run_folders.finished_run(tmp_path, rows)
    found = warned(run, ("nothing-learnt", "Nothing yet", True, False))
    assert found[0] == ("Nothing yet", "Reported at step 500. So it is. What to try, the likeliest first: try "
                                       "this; or <that>.")
    assert findings(read(run))[0].code == "nothing-learnt"
    found = warned(run, ("nothing-learnt", "Nothing at all", True, True))
    assert found[0][0] == "Nothing at all" and found[0][1].startswith("So it is. What to try")
    assert "Nothing yet" not in str(found), "said again at the end, it stands there once"


def test_which_words_are_wrong_is_no_finding_while_nothing_is_recognised_and_that_is_reported_once(tmp_path):
    rows = [dataclasses.replace(one, reference=f"the {one.reference}", hypothesis="e" if i % 9 == 0 else "")
             for i, one in enumerate(run_folders.scored(60))]  # a letter here and there
    run = run_folders.finished_run(tmp_path, rows)
    found = headlines(run)
    assert "The model recognises almost nothing: CER 9" in found and "the WER was still falling" in found
    assert not any(noise in found for noise in ("deleted", "hypothesis", "wrong", "speakers"))
    found = str(warned(run, ("chance", "Nothing yet", True, True)))
    assert "Nothing yet" in found and "almost nothing" not in found and "deleted" not in found


@pytest.mark.parametrize("key", ["code", "what"])
def test_what_has_passed_is_no_finding_also_of_runs_of_earlier_versions(tmp_path, key):
    run = run_folders.finished_run(tmp_path, None)
    found = warned(run, ("chance", "Nothing yet", True, False), ("divergence", "Lost", True, False),
                   ("chance", "It hears now", False, False), key=key)
    assert found[0][0] == "Lost" and "hear" not in str(found) and "Nothing yet" not in str(found)


def test_a_rate_of_nothing_that_was_not_the_last_stands_out(tmp_path):
    run = run_folders.finished_run(tmp_path, None, epochs=16)
    run_folders.log(run, {"kind": "epoch", "epoch": 10, "valid_WER": 0.0})
    assert "The WER was best in epoch 10 of 16" in headlines(run)


# ---------------------------------------------------------------- curves


@pytest.mark.parametrize("values, points", [
    ([4.0, 2.0, 0.0], "44,12 217,98 390,184"), ([-2.0, -8.0, -14.0], "44,34.9 217,103.7 390,172.5")])
def test_a_curve_goes_where_its_numbers_are_and_zero_is_on_the_picture(values, points):
    """Also those below zero, as a loss in decibels is."""
    drawn = charts.curves("Loss", [Series("loss", [0, 50, 100], values)], [(50, "1"), (100, "2")])
    assert f'points="{points}"' in drawn and ">0<" in drawn


def test_the_last_epoch_has_its_tick_also_if_the_curve_ends_some_steps_before():
    drawn = charts.curves("Loss", [Series("loss", [10, 50, 95], [3.0, 2.0, 1.0])], [(33, "1"), (66, "2"), (99, "3")])
    assert [number for number in "123" if f">{number}<" in drawn] == ["1", "2", "3"]


def test_long_runs_are_thinned_by_means_and_lose_what_is_no_number():
    values = np.sin(np.arange(50_000) / 500)
    values[10] = np.nan
    thin = charts.thinned(Series("x", range(50_000), values))
    assert len(thin.x) == charts.MAX_POINTS and thin.x == sorted(thin.x)
    assert np.nanmean(values) == pytest.approx(np.mean(thin.y), abs=0.01)
    assert charts.curves("Loss", [Series("x", [1, 2], [None, float("nan")])], []) is None


def test_a_wild_beginning_does_not_flatten_the_rest():
    y = [5000.0] + [3.0 - i / 100 for i in range(200)]
    drawn = charts.curves("Loss", [Series("loss", range(201), y)], [])
    assert ">4<" in drawn and ">5,000<" not in drawn


@pytest.mark.parametrize("values", [[0.0], [1e-9, 2e-9], [3.7], [-3.7], [-1e6, 1e6], [99.99, 100.0], [1e6], [0.0, 0.0]])
def test_any_numbers_have_an_axis(values):
    drawn = charts.curves("x", [Series("x", range(len(values)), values)], [(0, "1")])
    assert "nan" not in drawn and drawn.count('class="grid"') >= 2


# ---------------------------------------------------------------- pieces


@given(st.text())
def test_a_page_shows_any_text_as_it_is(value):
    drawn = charts.histogram(value, [1.0], "WER %")
    places = (("<figcaption>", "</figcaption>"), ('aria-label="', '"'))
    for inside in (drawn.split(before)[1].split(after)[0] for before, after in places):
        assert "<" not in inside and html.unescape(inside) == html.unescape(html.escape(value))


@settings(deadline=None, max_examples=50)  # it waits for the disk
@given(st.lists(st.builds(
    ScoredUtterance, id=st.uuids().map(str), reference=st.text(), hypothesis=st.text(), wav=st.text(),
    speaker=st.text(), confidence=st.none() | st.floats(0, 1), duration=st.floats(0, 1e5), start=st.floats(0, 1e5),
    meta=st.dictionaries(st.text(), st.text(min_size=1))), max_size=5))
def test_utterances_come_back_from_disk_as_they_went(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("rows") / "u.jsonl"
    utterances.write(path, rows)
    assert utterances.read(path) == rows


@pytest.mark.parametrize("folder, name", [("/out/run", "/out/run"), ("/a/b/run/evaluations/x", "run/evaluations/x")])
def test_a_run_is_named_by_the_end_of_its_path_or_by_all_of_a_short_one(tmp_path, folder, name):
    run = read(run_folders.finished_run(tmp_path / "run", run_folders.scored()))
    assert dataclasses.replace(run, folder=Path(folder)).name == name


def test_points_of_a_rate_have_their_ranges_and_names():
    drawn = charts.points("WER by latency", [("320 ms", -0.1, 12.0, 0.5), ("whole", 2, 9, 3.9)],
                          "seconds")
    assert drawn.count("<li>") == drawn.count("<circle") == 2, "each has its colour's name and its dot"
    lines = [tuple(map(float, found)) for found in re.findall(r'class="whisker" x1="([\d.]+)" x2="([\d.]+)"', drawn)]
    assert len(lines) == 2 and lines[0][0] == charts.LEFT, "what is shown before its word ends is on the picture too"
    assert all(start < end <= charts.WIDTH - charts.RIGHT for start, end in lines)
