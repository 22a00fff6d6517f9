"""The loss, the measures and the tables of an enhancement, of rows and signals that are known."""

import numpy as np
import pytest
import soundfile
import torch

from sbkit.data.manifest import Manifest
from sbkit.nn.enhance.enhancer import si_snr
from sbkit.score.estimate import estimate
from sbkit.tasks.enhance import Enhancement
from sbkit.tasks.enhance.task import EnhancedRow, EnhancementResults, measures
from sbkit.tasks.generation import stoi

RATE = 16_000


def row(number, before, after, **more):
    return EnhancedRow(f"u{number}", "a text", RATE, before, after, **more)


ROWS = [row(0, -3.0, 4.0, stoi_before=0.6, stoi=0.7), row(1, 2.0, 10.0, stoi_before=0.8, stoi=0.9),
        row(2, 20.0, 19.0)]


def results(rows=ROWS):
    return EnhancementResults.of(rows, -5.0, {}, RATE)


def test_measures_are_means_over_utterances_of_what_was_measured():
    found = measures(ROWS)
    assert found == pytest.approx({"SI_SNRi": 14 / 3, "SI_SNR": 11.0, "STOI": 0.8, "STOI_of_noisy": 0.7})
    assert measures([]) == {}


def test_the_headline_has_an_interval_that_holds_the_mean():
    found = results()
    assert f"improved by {14 / 3:.2f} dB, STOI" in found.headline()
    found.estimate = estimate(Enhancement.metric, ROWS, measures)
    low, high = found.facts()["SI_SNRi_interval"]
    assert -1 <= low < found.stats["SI_SNRi"] < high <= 8 and found.estimate.worst() == [2, 0, 1]
    assert f"improved by {14 / 3:.2f} dB (95 % interval {low:.2f} to {high:.2f})" in found.headline()


def test_a_table_parts_clips_by_their_noise():
    [by_noise] = results().tables
    assert [line[:2] for line in by_noise.rows] == [["below 0 dB", 1], ["0 to 5 dB", 1], ["15 dB and more", 1]]
    assert by_noise.rows[2][2:] == ["19", "-1", "", ""]


def test_what_one_hears_is_noisy_enhanced_and_clean(tmp_path):
    sound = np.stack([np.full(8000, value, np.int16) for value in (3000, 2000, 1000)])
    manifest = Manifest(ids=["u0", "u1", "u2"], durations=np.ones(3), wavs=["a.wav"] * 3, texts=["a text"] * 3)
    found = results([ROWS[0]._replace(sound=sound), *ROWS[1:]])
    found.write(tmp_path, manifest, "test")
    [player] = found.players
    assert [each.label for each in player.sounds] == ["noisy", "enhanced", "clean"]
    for each, value in zip(player.sounds, (3000, 2000, 1000), strict=True):
        samples, rate = soundfile.read(tmp_path / each.wav, dtype="int16")
        assert (samples == value).all() and rate == RATE and each.duration == 0.5
    assert "STOI 0.600 to 0.700" in player.remark


def test_stoi_and_the_ratio_fall_with_noise_and_too_little_speech_has_none():
    pytest.importorskip("pystoi")
    time = np.arange(2 * RATE) / RATE
    clean = sum(np.sin(2 * np.pi * 150 * k * time) / k for k in range(1, 20)) * np.sin(6 * np.pi * time) ** 2
    clean, noise = (0.1 * clean).astype(np.float32), np.random.default_rng(0).standard_normal(2 * RATE)
    lengths, found = torch.tensor([2 * RATE]), []
    for level in (0.0, 0.01, 0.1, 1.0):
        noisy = (clean + level * noise).astype(np.float32)
        ratio = si_snr(torch.from_numpy(noisy)[None], torch.from_numpy(clean)[None], lengths).item()
        found.append((stoi(clean, noisy, RATE), ratio))
    assert found == sorted(found, reverse=True) and found[0][0] == pytest.approx(1.0, abs=1e-3)
    assert stoi(noise[:2000], noise[:2000], RATE) is None
