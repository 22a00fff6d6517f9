"""report.html: whole, honest, escaped, and without any need of a network."""

import base64
import dataclasses
import hashlib
import json
import os
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest
import run_folders
import soundfile
from refusals import refused

from sbkit.cli import main
from sbkit.data.manifest import Manifest
from sbkit.data.suspects import Suspect
from sbkit.runs import results
from sbkit.score import utterances
from sbkit.score.report import charts, suspect_page, write_report
from sbkit.score.report.data import read
from sbkit.score.results import Player, Results, SoundSample, Table

EVIL = '<script>alert("x")</script><img src=http://evil/x onerror=alert(1)>'


class Page(HTMLParser):
    """What a browser would make of a page: elements with attributes, and the text in them."""

    def __init__(self, path):
        super().__init__()
        self.source = path.read_text()
        self.elements, self.texts, self._inside = [], [], []
        self.feed(self.source)

    def handle_starttag(self, name, attributes):
        self.elements.append((name, dict(attributes)))
        self._inside.append(name)

    def handle_endtag(self, name):
        while self._inside and self._inside.pop() != name:
            pass

    def handle_data(self, data):
        if self._inside[-1:] not in (["script"], ["style"]):
            self.texts.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.texts).replace("\N{NO-BREAK SPACE}", " ").split())

    def all(self, name, **wanted):
        return [attributes for each, attributes in self.elements if each == name
                and all(attributes.get(key) == value for key, value in wanted.items())]


@pytest.fixture
def wav(tmp_path):
    return run_folders.sound(tmp_path / "sound.wav")


@pytest.fixture
def heard(tmp_path, wav):
    """A run with all its recordings."""
    return run_folders.finished_run(tmp_path / "heard", run_folders.scored(wav=wav))


def page_of(folder, rows, **options):
    """The page of a run with these rows."""
    return Page(write_report(run_folders.finished_run(folder, rows), **options))


def right(rows):
    """The same rows without an error."""
    return [dataclasses.replace(one, hypothesis=one.reference) for one in rows]


@pytest.mark.parametrize(("points", "expected"), [
    ([(1, 4.0), (2, 2.0), (3, 0.0)],
     "loss: . training\n    4 |.\n      |     .\n    0 |          .\nepoch            1"),
    ([(1, float("nan"))], ""), ([], ""),
    ([(1, -90.0), *((step, 1.0) for step in range(2, 40))], None),
])
def test_the_curve_for_a_terminal_stands_where_its_points_are(points, expected):
    series = charts.Series("training", *zip(*points, strict=True)) if points else charts.Series("training", [], [])
    assert charts.in_text("loss", [series], [(3, "1")], width=11, height=3) == expected or expected is None


@pytest.mark.parametrize("terminal", [True, False])
def test_a_training_ends_with_its_curve_on_a_terminal_alone(run, terminal, capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    results.show(Results({"accuracy": 0.5}, 2), run, Manifest.read(run / "manifests/test.csv"), None,
                 SimpleNamespace(close=lambda: None))
    said = capsys.readouterr().out
    assert ("loss: . training, o validation\n" in said) == terminal and "report: " in said


def test_the_page_says_what_the_files_say(run):
    page = Page(write_report(run))
    results = read(run).results
    assert f"{results.words.rate:.2f} %" in page.text and f"{results.characters.rate:.2f} %" in page.text
    places = [attributes["id"] for attributes in page.all("section")]
    assert places == ["first", "curves", "where", "words", "worst", "labels", "data", "making"]
    assert [link["href"] for link in page.all("a")][:len(places)] == [f"#{place}" for place in places]
    titles = " ".join(attributes.get("aria-label", "") for attributes in page.all("svg"))
    for title in ("Loss", "Error rates on dev", "Learning rate", "Throughput", "Padding",
                  "How the time of a step is spent", "By duration", "By confidence"):
        assert title in titles
    for text in ("By accent", "By age", "By gender", "speakers", "not given", "Scottish English", "Substitutions",
                 "Deletions", "longer than 20.0 s : 7 rows", "clip<7>",
                 "torchrun train.py hparams/ctc.yaml --lr 1e-3 <&>", "a processor", "1,234,567",
                 "lr: 0.001 # <b>not bold</b>", "812 s/s", "of audio, padding 4 %, MFU 37 %",
                 "Common Voice: /data/cv/en"):
        assert text in page.text, text


def test_the_worst_come_first_with_every_word_in_its_place(tmp_path, wav):
    scored = run_folders.scored(wrong=0.0, wav=wav)
    scored[7] = dataclasses.replace(scored[7], reference="one two three four", hypothesis="one too four five")
    page = page_of(tmp_path / "run", scored)
    card = page.source[page.source.index("<article"):]
    words = re.findall(r'<span class="(eq|sub|del|ins)"><span>(.*?)</span> <span>(.*?)</span>',
                       card[:card.index("</article>")])
    assert words == [("eq", "one", "one"), ("sub", "two", "too"), ("del", "three", "·"), ("eq", "four", "four"),
                     ("ins", "·", "five")]
    assert len(page.all("article")) == 1, "what is right is not among the worst"


def test_where_no_label_is_suspected_it_says_so_and_where_none_could_be(tmp_path, wav):
    rows = run_folders.scored(100, wrong=0.0, wav=wav)
    assert "None: no transcript differs from its hypothesis" in page_of(tmp_path / "right", rows).text
    few = page_of(tmp_path / "few", rows[:10]).text
    assert "Not checked: this needs at least 20 utterances" in few and "None: no" not in few


def test_text_from_data_is_text_and_nothing_else_runs(tmp_path, wav):
    scored = [dataclasses.replace(one, id=f"{EVIL}{i}", reference=f"{EVIL} {one.reference}", speaker=f"{EVIL}{i % 5}",
                                 hypothesis=f"{one.hypothesis} {EVIL}",
                                 meta={"accent": f"{EVIL}{i % 2}", EVIL: str(i % 2)})
             for i, one in enumerate(run_folders.scored(wav=wav))]
    run = run_folders.finished_run(tmp_path / "run", scored)
    (run / "hyperparams.yaml").write_text(f"# </pre>{EVIL}")
    page = Page(write_report(run, against=run, title=EVIL))
    assert len(page.all("script")) == 1 and not page.all("img")
    assert not [attributes for _, attributes in page.elements if any(key.startswith("on") for key in attributes)]
    assert EVIL in " ".join(page.texts)
    script = re.search(r"<script>(.*?)</script>", page.source, re.DOTALL)[1]
    allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    [policy] = [meta["content"] for meta in page.all("meta") if meta.get("http-equiv") == "Content-Security-Policy"]
    assert "default-src 'none'" in policy and f"script-src 'sha256-{allowed}';" in policy


def test_facts_of_a_start_with_parts_are_listed_for_a_reader(heard):
    run_folders.log(heard, {"kind": "run", "time": 1.8e9, "command": "sbkit train", "devices": 1,
                            "manifests": {"train": "d9df67", "dev": "524f39"}})
    text = Page(write_report(heard)).text
    assert "train: d9df67, dev: 524f39" in text and "{'train'" not in text


def test_nothing_in_it_comes_from_elsewhere(heard):
    page = Page(write_report(heard))
    for name, attributes in page.elements:
        for key in ("src", "href", "action", "data", "srcset", "poster"):
            value = attributes.get(key)
            assert value is None or value.startswith(("data:", "#")), (name, key, value)
    assert "@import" not in page.source and "url(" not in page.source


def test_recordings_fill_no_more_than_they_may_and_each_is_in_it_once(tmp_path, heard):
    few = Page(write_report(heard, audio_megabytes=0.02))
    size = sum(len(audio.get("src", "")) for audio in few.all("audio"))
    assert 0 < size <= 20_000 and "MB for recordings are used up" in few.text
    both = Page(write_report(heard, against=_other(tmp_path, heard), utterances=40))
    clips = [audio["data-clip"] for audio in both.all("audio") if "data-clip" in audio]
    again = {audio["data-same"] for audio in both.all("audio") if "data-same" in audio}
    assert len(clips) == len(set(clips)) and again and again <= set(clips)
    assert not Page(write_report(heard, audio_megabytes=0)).all("audio")


def test_a_recording_that_is_no_part_of_the_run_is_not_in_its_page(tmp_path, heard, wav):
    inside = run_folders.sound(heard / "test_sounds" / "1.wav")
    (heard / "link.wav").symlink_to(wav)
    names = {wav: True, inside: True, str(tmp_path / "other.wav"): False, f"{heard}/link.wav": False,
             f"{heard}/../other.wav": False, "shard.tar?offset=512&size=9": False}
    run_folders.sound(tmp_path / "other.wav")
    for name, embedded in names.items():
        scored = [dataclasses.replace(one, wav=name) for one in run_folders.scored()]
        utterances.write(heard / "test_utterances.jsonl", scored)
        page = Page(write_report(heard))
        assert bool(page.all("audio")) == embedded, name
        assert ("neither in the run's folder nor in its manifests" in page.text) != embedded


@pytest.mark.parametrize("report", [{"folders": ["/data/cv"]}, {}], ids=["now", "of an earlier version"])
def test_a_recording_that_a_strangers_list_names_outside_of_the_corpus_is_not_in_its_page(heard, wav, report):
    prepared = heard / "manifests" / "prepare_report.json"
    source = {"kind": "SpeechBrain CSV", "where": "/data/cv"} | report
    prepared.write_text(json.dumps(json.loads(prepared.read_text()) | {"source": source}))
    page = Page(write_report(heard))
    assert "outside of the corpus' folder (/data/cv); if it belongs to the corpus" in page.text
    assert not page.all("audio")
    # A link in the corpus leads elsewhere; a part of a mixture has a corpus of its own.
    part = prepared.parent / "part" / prepared.name
    part.parent.mkdir()
    for folder, embedded in ((os.path.dirname(wav) + "/cv", False), (os.path.dirname(wav), True)):
        part.write_text(json.dumps({"source": {"where": folder}}))
        os.makedirs(folder, exist_ok=True)
        assert bool(Page(write_report(heard)).all("audio")) == embedded


@pytest.mark.parametrize("folder, embedded", [
    ("/", False), ("/data/..", False), ("{tmp}", False), ("{tmp}/me", False), ("{tmp}/me/corpus", True)])
def test_a_strangers_run_cannot_say_that_its_corpus_is_all_of_the_disk_or_of_the_home_folder(
        tmp_path, monkeypatch, folder, embedded):
    wav = run_folders.sound(tmp_path / "me" / "corpus" / "sound.wav")
    heard = run_folders.finished_run(tmp_path / "me" / "run", run_folders.scored(wav=wav))
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    prepared = heard / "manifests" / "prepare_report.json"
    source = {"kind": "SpeechBrain CSV", "where": "/data/cv", "folders": [folder.format(tmp=tmp_path)]}
    prepared.write_text(json.dumps(json.loads(prepared.read_text()) | {"source": source}))
    assert bool(Page(write_report(heard)).all("audio")) == embedded


def test_the_page_of_suspects_embeds_only_what_lies_in_the_corpus(tmp_path, wav):
    train = Manifest(ids=["a"], durations=[0.8], wavs=[wav], texts=["yes"])
    row = Suspect("a", "drop", "other words", 9.0, 0.01, "yes", "no", "", wav, "/data/mine")
    for folder, embedded in ((tmp_path, True), (tmp_path / "corpus", False)):
        suspect_page.write(tmp_path / "suspects.html", [row], train, [str(folder)])
        page = Page(tmp_path / "suspects.html")
        assert bool(page.all("audio")) == embedded and ("outside of the corpus' folder" in page.text) != embedded


@pytest.mark.parametrize("name, said", [
    ("/data/cv/en/nowhere.wav", "the recording can't be read: no such file"),
    ("a\0b.wav", "not embedded: its path is invalid"), ("\ud800.wav", "not embedded: its path is invalid")])
def test_a_recording_that_is_gone_or_whose_name_no_file_can_have_is_said_on_its_card(run, name, said):
    path = run / "test_utterances.jsonl"
    path.write_text(path.read_text().replace("/data/cv/en/nowhere.wav", json.dumps(name)[1:-1]))
    page = Page(write_report(run))
    assert said in page.text and not page.all("audio")


def test_players_stand_side_by_side_even_after_the_run_has_moved(tmp_path, wav):
    run = run_folders.finished_run(tmp_path / "run", None)
    run_folders.manifest(run, wav)
    run_folders.sound(run / "test_sounds" / "01.wav", seed=1)
    sounds = [SoundSample("recording", wav, 0.0, 0.8), SoundSample("codec", "test_sounds/01.wav", 0.0, 0.8)]
    results = Results({"loss": 1.0, "STOI": 0.9, "mel_distance": 2.5}, 1,
                      players=[Player("what is <said>", "a remark", sounds)],
                      tables=[Table("Rates", ["of <b>", "rate"], [["a < b", None]])])
    results.write(run, Manifest(ids=[], durations=[], wavs=[], texts=[]), "test")
    page = Page(write_report(run.rename(tmp_path / "moved")))
    assert all(f"<h3>{name}</h3>" in page.source for name in ("Loss", "STOI", "Mel distance"))
    found = page.source.partition('id="listen"')[2].partition("</section>")[0]
    assert found.count('src="data:audio/mpeg;base64,') == 2
    assert "what is &lt;said&gt;" in found and "a remark" in found
    assert '<td class="text">a &lt; b</td><td class="text"></td>' in page.source  # a cell without a value is empty
    assert found.index("recording") < found.index("codec")


def test_without_an_mp3_encoder_the_page_has_no_sound_and_says_so(heard, monkeypatch):
    def no_mp3(*args, **kwargs):
        raise soundfile.LibsndfileError(1)

    monkeypatch.setattr(soundfile, "write", no_mp3)
    page = Page(write_report(heard))
    assert "not embedded: " in page.text and not page.all("audio") and page.all("article")


def test_a_run_that_has_just_begun_has_a_page_too(tmp_path):
    run = run_folders.finished_run(tmp_path / "run", None, epochs=1)
    with open(run / "metrics.jsonl", "a") as out:
        out.write('{"kind": "ste')  # it is being written right now
    page = Page(write_report(run))
    assert "No test result is recorded" in page.text and "Loss" in page.text
    (run / "metrics.jsonl").unlink()
    assert "# a recipe" in Page(write_report(run)).text


def _other(tmp_path, run):
    """The same run with half of the errors."""
    scored = [dataclasses.replace(one, hypothesis=one.reference) if i % 2 else one
             for i, one in enumerate(utterances.read(run / "test_utterances.jsonl"))]
    return run_folders.finished_run(tmp_path / "other", scored, epochs=3)


def test_against_another_run_it_says_who_is_better_and_where(tmp_path, run):
    other = _other(tmp_path, run)
    page = Page(write_report(other, against=run))
    assert "Significantly better: −" in page.text and "30 have as many errors" not in page.text
    better = int(re.search(r"Of 60 utterances (\d+) got better, 0 worse", page.text)[1])
    changed = [a for a, b in zip(read(run).results.edits, read(other).results.edits, strict=True) if a != b]
    assert better == len(changed)
    assert page.all("polyline", **{"class": "curve c1 other"}), "the other run's curves, dashed"
    assert page.all("i", **{"class": "before"}), "the other run's rate in each group"
    assert "Significantly worse: +" in Page(write_report(run, against=other)).text
    assert "No significant difference (+0.00 points of WER)" in Page(write_report(run, against=run)).text


def test_a_comparison_shows_what_the_other_run_recognised_in_the_same_recordings_and_how_many_there_are(tmp_path):
    scored = run_folders.scored()
    better = run_folders.finished_run(tmp_path, right(scored))
    others = [run_folders.finished_run(tmp_path / place / "other", rows)
              for place, rows in (("a", scored), ("b", scored[::-1]))]
    first, second = (write_report(better, against=other).read_text().split("<h3>Better")[1].split("</section>")[0]
                     for other in others)
    wrong = sum(one.hypothesis != one.reference for one in scored)
    assert first == second and first.startswith(f" (the first 6 of {wrong})")


def test_a_comparison_leaves_the_runs_own_page_alone(tmp_path, run):
    own = write_report(run)
    before, both = own.read_bytes(), write_report(run, against=_other(tmp_path, run))
    assert both.parent == run and both.name.startswith("report-against-") and both.name.endswith("-other.html")
    assert own.read_bytes() == before != both.read_bytes()


def test_the_command_prints_who_is_better_in_the_pages_words(tmp_path, run, capsys):
    other = _other(tmp_path, run)
    assert main(["report", str(other), "--against", str(run)]) == 0
    verdict, path = capsys.readouterr().out.splitlines()
    assert path == str(other / f"report-against-{read(run).name.replace('/', '-')}.html")
    assert verdict.startswith("Significantly better: -")
    assert verdict.replace("-", "−") in Page(Path(path)).text


def test_marks_of_the_run_compared_with_stand_where_its_rates_are(tmp_path):
    scored = run_folders.scored()
    page = page_of(tmp_path / "right", right(scored), against=run_folders.finished_run(tmp_path / "other", scored))
    marks = [re.fullmatch(r"left:([\d.]+)%", mark["style"])[1] for mark in page.all("i", **{"class": "before"})]
    tables = page.source.count('<table class="groups">')
    assert marks.count("100.0") == tables < len(marks), "the highest in each table alone is at its end"
    assert re.search(r"\.mean \{ stroke: var\(--soft\)", page.source), "no line has the colour of the marks"


def test_marks_and_lines_are_spoken_of_where_there_are_some(tmp_path):
    keys = ("Orange marks", "Dashed: the other run")
    rows = run_folders.scored()
    whole, other = (run_folders.finished_run(tmp_path / name, rows) for name in ("whole", "other"))
    assert all(key in Page(write_report(whole, against=other)).text for key in keys)
    nobody = [dataclasses.replace(one, speaker="", meta={}) for one in rows]
    plain, silent = (run_folders.finished_run(tmp_path / name, nobody) for name in ("plain", "silent"))
    (silent / "metrics.jsonl").unlink()
    assert not any(key in Page(write_report(plain, against=silent)).text for key in keys)


def test_runs_that_cannot_be_compared_are_reported(tmp_path, run, capsys):
    other = run_folders.finished_run(tmp_path / "other", run_folders.scored(50))
    with refused("not-comparable"):
        write_report(run, against=other)
    unscored = run_folders.finished_run(tmp_path / "unscored", None)
    with refused("no-results"):
        write_report(run, against=unscored)
    assert main(["report", str(run), "--against", str(tmp_path / "nowhere")]) == 2
    assert "nowhere does not exist; name the output_folder of a run" in capsys.readouterr().err
    assert main(["report", str(tmp_path)]) == 2
    assert f"{tmp_path} is not a run: it has no metrics.jsonl" in capsys.readouterr().err


def test_damaged_files_are_named(run):
    metrics = run / "metrics.jsonl"
    metrics.write_text("no json\n" + metrics.read_text())
    with refused("damaged-results", file=metrics, line=1):
        write_report(run)
    run_folders.finished_run(run, run_folders.scored())
    with open(run / "test_utterances.jsonl", "a") as out:
        out.write('{"id": "x"}\n')
    with refused("damaged-results", file=run / "test_utterances.jsonl"):
        write_report(run)


@pytest.mark.parametrize("name", ["metrics.jsonl", "test_utterances.jsonl", "manifests/prepare_report.json"])
def test_json_that_is_nested_too_deeply_or_too_large_is_named(run, name):
    (run / name).write_text("[" * 200_000 + "\n\n")
    with refused("damaged-results"):
        write_report(run)
    os.truncate(run / name, 3 << 30)  # takes no room on the disk
    with refused("damaged-results" if name == "test_utterances.jsonl" else "not-readable", file=run / name):
        write_report(run)


def test_utterances_without_a_reference_are_not_scored(tmp_path):
    scored = run_folders.scored()
    scored[3] = dataclasses.replace(scored[3], reference="")
    run = run_folders.finished_run(tmp_path / "run", scored)
    assert len(read(run).results) == 59 and "59 utterances" in Page(write_report(run)).text


def test_the_command_writes_it_and_says_where(tmp_path, heard, capsys):
    out = tmp_path / "page.html"
    assert main(["report", str(heard), "--to", str(out), "--utterances", "3", "--audio-mb", "1"]) == 0
    assert capsys.readouterr().out.strip() == str(out) and len(Page(out).all("audio")) <= 6
    (tmp_path / "notes").write_text("no folder")
    assert main(["report", str(heard), "--to", str(tmp_path / "notes" / "page.html")]) == 2
    assert "cannot write" in capsys.readouterr().err


def transcribed_in_chunks(run, chunks):
    """An evaluation's folder with what ``--chunk`` leaves there."""
    folder = run / "evaluations" / "test-best-chunk"
    folder.mkdir(parents=True, exist_ok=True)
    utterances.write(folder / "utterances.jsonl", run_folders.scored())
    (folder / "result.json").write_text(json.dumps({"run": str(run), "chunks": chunks}))
    return folder


def test_live_speech_has_its_table_and_its_picture(run):
    said = {"WER_interval": [9.0, 13.0], "measured": 100, "changed": 2.5}
    page = Page(write_report(transcribed_in_chunks(run, [
        {"chunk": 640, "WER": 11.25, "latency": 0.51, "latency_p95": 0.93, **said},
        {"chunk": "whole", "WER": 9.75, "latency": None, "latency_p95": None, **said}])))
    assert "640 ms 11.25 % 9.00 to 13.00 0.51 s 0.93 s 2.5" in page.text
    assert "whole 9.75 % 9.00 to 13.00 not measured not measured 2.5" in page.text
    assert "those of the first line (640 ms)" in page.text and page.all("a", href="#live")
    assert page.all("svg", **{"aria-label": "WER by latency"})
    assert not Page(write_report(run)).all("section", id="live")
    unmeasured = Page(write_report(transcribed_in_chunks(run, [
        {"chunk": 320, "WER": 100.0, "latency": None, "latency_p95": None, **said}])))
    assert unmeasured.all("section", id="live") and not unmeasured.all("svg", **{"aria-label": "WER by latency"})
