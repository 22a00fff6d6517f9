"""Results of a voice's test: WER, how fast it spoke, the worst texts, and sample clips."""

import json

import numpy as np
import pytest
import soundfile
from run_folders import sound

from sbkit.data.manifest import Manifest
from sbkit.tasks.tts.results import WORST, SpokenRow, VoiceResults, measures

NOISE = np.arange(-800, 800, dtype=np.int16)
ROWS = [
    SpokenRow("a", "one two", 100, 80.0, 0.02, 2.0, 0.1, "one two", "one too", NOISE),
    SpokenRow("b", "three", 50, 20.0, 0.04, 1.0, 0.05, "three", "three"),
    SpokenRow("c", "four five six", 0, 0.0, 0.0, 1.0, 0.05, "four five", "fish"),
]


def test_labels_are_measured_over_frames_and_over_utterances_that_have_some():
    assert measures(ROWS) == {"right_choices": pytest.approx(100 * 100 / 150), "duration_error_ms": pytest.approx(30)}
    assert measures(ROWS[2:]) == measures([]) == {}


def test_words_are_counted_in_what_was_said_and_in_the_recordings():
    results = VoiceResults.of(ROWS, 3.5, {"d": "gone"}, 16_000)
    assert results.stats["WER"] == pytest.approx(100 * 4 / 6) and results.stats["loss"] == 3.5
    assert results.stats["WER_of_recordings"] == pytest.approx(100 / 6)
    assert results.stats["real_time_factor"] == pytest.approx(0.05) and results.unread == {"d": "gone"}
    low, high = results.facts()["WER_interval"]
    assert low <= results.stats["WER"] <= high
    assert results.headline() == "WER 66.67 % (recordings 16.67 %), real-time factor 0.0500, 3 utterances"
    assert results.columns() == [("WER %", "66.67"), ("of recordings %", "16.67")]
    assert list(results.figures("WER")) == ["of the voice's output"]
    assert [row[0] for row in results.tables[0].rows] == ["WER", "WER of the recordings", "right choices", "durations",
                                                          "real-time factor"]


def test_the_texts_that_were_heard_worst_come_first():
    many = [SpokenRow(f"{i:02}", "one two three four", 1, 1.0, 0.0, 1.0, 0.1, "one two three four",
                      " ".join(["one", "two", "three", "four"][:i % 5])) for i in range(30)]
    table = VoiceResults.of(many, 1.0, {}, 16_000).tables[1]
    wrong = [int(row[-1]) for row in table.rows]
    assert len(wrong) == WORST and wrong == sorted(wrong, reverse=True) and wrong[0] == 100


def test_without_a_recogniser_and_without_labels_only_the_time_is_known():
    rows = [row._replace(frames=0, recording_transcript=None, output_transcript=None) for row in ROWS]
    results = VoiceResults.of(rows, 0.0, {}, 16_000)
    assert set(results.stats) == {"real_time_factor"} and len(results.tables) == 1
    assert results.headline() == "real-time factor 0.0500, 3 utterances" and results.figures("WER") == {}


def test_clips_are_written_beside_the_recordings(tmp_path):
    results = VoiceResults.of(ROWS, 1.0, {}, 16_000)
    wavs = [sound(tmp_path / f"{name}.wav") for name in "abc"]
    manifest = Manifest(ids=["a", "b", "c"], durations=[0.8] * 3, wavs=wavs, texts=[row.reference for row in ROWS])
    results.write(tmp_path, manifest, "test")
    [player] = json.loads((tmp_path / "test_results.json").read_text())["players"]
    assert player["title"] == "one two" and player["remark"] == "transcript: one too · a"
    assert [each["label"] for each in player["sounds"]] == ["recording", "voice"]
    samples, rate = soundfile.read(tmp_path / player["sounds"][1]["wav"], dtype="int16")
    assert rate == 16_000 and np.array_equal(samples, NOISE)
    assert set(results.files("test")) == {"test_results.json", "test_sounds"}
