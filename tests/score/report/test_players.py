"""Players of a report: recordings side by side, found after the run has moved, and told of where they can't be read."""

import shutil

import run_folders

from sbkit.data.manifest import Manifest
from sbkit.score.report import write_report
from sbkit.score.results import Player, Results, SoundSample


def run_with_players(folder, recording):
    run_folders.run_that_tells(folder, None)
    run_folders.manifest(folder, recording)
    run_folders.sound(folder / "test_sounds" / "01.wav", seed=1)
    sounds = [SoundSample("recording", recording, 0.0, 0.8), SoundSample("codec", "test_sounds/01.wav", 0.0, 0.8)]
    results = Results({"loss": 1.0, "STOI": 0.9, "mel_distance": 2.5}, 1,
                      players=[Player("what is <said>", "a remark", sounds)])
    results.write(folder, Manifest(ids=[], durations=[], wavs=[], texts=[]), "test")
    return folder


def listen(page):
    text = page.read_text(encoding="utf-8")
    begin = text.index('id="listen"')
    return text[begin:text.index("</section>", begin)]


def test_recordings_stand_side_by_side_even_after_the_run_has_moved(tmp_path):
    run = run_with_players(tmp_path / "run", run_folders.sound(tmp_path / "said.wav"))
    shutil.move(run, tmp_path / "moved")
    page = write_report(tmp_path / "moved")
    assert all(f"<h3>{name}</h3>" in page.read_text(encoding="utf-8") for name in ("Loss", "STOI", "Mel distance"))
    found = listen(page)
    assert found.count('src="data:audio/mpeg;base64,') == 2
    assert "what is &lt;said&gt;" in found and "a remark" in found
    assert found.index("recording") < found.index("codec")


def test_a_recording_that_is_gone_is_told_of_and_the_other_one_plays(tmp_path):
    found = listen(write_report(run_with_players(tmp_path / "run", str(tmp_path / "gone.wav"))))
    assert found.count('src="data:audio/mpeg;base64,') == 1 and "be read" in found


def test_they_take_no_more_than_their_megabytes(tmp_path):
    run = run_with_players(tmp_path / "run", run_folders.sound(tmp_path / "said.wav"))
    found = listen(write_report(run, audio_megabytes=0.0))
    assert "src=" not in found and found.count("not embedded") == 2


def test_a_task_without_players_has_no_such_section(tmp_path):
    page = write_report(run_folders.run_that_tells(tmp_path / "run", None))
    assert 'id="listen"' not in page.read_text(encoding="utf-8")
