"""Statistics of a training split: exact, the same however many processes compute them, and computed once."""

import json

import numpy as np
import pytest
import run_folders
import soundfile
import torch
from refusals import refused
from speechbrain.lobes.features import Fbank
from speechbrain.processing.features import InputNormalization

from sbkit.data.audio import read_audio
from sbkit.data.manifest import Manifest
from sbkit.nn.global_norm import GlobalNorm
from sbkit.nn.kaldi import FilterBank
from sbkit.recipe import load
from sbkit.runs import initial
from sbkit.runs.start_guard import StartGuard
from sbkit.score.run_files import RECIPE
from sbkit.tasks import feature_statistics as statistics

COUNT = 12


@pytest.fixture(scope="module")
def manifest(tmp_path_factory):
    """Clips of 0.3 to 0.85 s, not in order of length."""
    folder = tmp_path_factory.mktemp("clips")
    seconds = 0.3 + np.random.default_rng(0).permutation(COUNT) * 0.05
    for i, length in enumerate(seconds):
        noise = np.random.default_rng(i).standard_normal(round(length * 16_000))
        soundfile.write(folder / f"{i}.wav", 0.1 * (1 + i % 3) * noise + 0.02, 16_000)
    return Manifest(ids=[f"u{i}" for i in range(COUNT)], durations=seconds, texts=["a"] * COUNT,
                    wavs=[str(folder / f"{i}.wav") for i in range(COUNT)])


def front(features=None):
    return statistics.FeatureSettings(features or FilterBank(n_mels=8, snip_edges=False), 160, 16_000)


def frames_of(manifest, features):
    return torch.cat([features(torch.from_numpy(read_audio(wav))[None])[0] for wav in manifest.wavs]).double()


@pytest.mark.parametrize("features", [FilterBank(n_mels=8, snip_edges=False), Fbank(n_mels=8)])
def test_they_are_those_of_all_frames_of_all_utterances(manifest, features):
    mean, deviation, count, left_out = statistics.compute(front(features), manifest)
    frames = frames_of(manifest, features)
    assert (count, left_out) == (len(frames), 0)
    np.testing.assert_allclose(mean, frames.mean(0), rtol=1e-9)
    np.testing.assert_allclose(deviation, frames.std(0, correction=0), rtol=1e-9)


def test_the_number_of_processes_changes_no_bit(manifest):
    threads = torch.get_num_threads()
    alone, shared = (statistics.compute(front(), manifest, workers=workers) for workers in (0, 2))
    assert np.array_equal(alone[:2], shared[:2])
    assert torch.get_num_threads() == threads


def test_of_a_large_corpus_utterances_that_are_spread_evenly_are_read(manifest, monkeypatch):
    monkeypatch.setattr(statistics, "ENOUGH", 3)
    last = len(manifest) - 1
    three = manifest.select([0, last // 2, last])
    assert np.array_equal(statistics.compute(front(), manifest)[0], statistics.compute(front(), three)[0])


def test_a_run_computes_them_once(manifest, tmp_path, monkeypatch, capsys):
    norm = GlobalNorm(8, tmp_path / "save")
    statistics.load(norm)
    assert not norm.known
    statistics.prepare(norm, front(), manifest)
    assert "statistics of features" in capsys.readouterr().err
    statistics.load(norm)
    frames = frames_of(manifest, front().features)
    normed = norm(frames.float())
    torch.testing.assert_close(normed.mean(0), torch.zeros(8), rtol=0, atol=1e-4)
    torch.testing.assert_close(normed.std(0), torch.ones(8), rtol=1e-3, atol=0)
    monkeypatch.setattr(statistics, "compute", None)
    statistics.prepare(norm, front(), manifest)


@pytest.mark.parametrize("other", ["corpus", "features", "file"])
def test_what_they_depend_on_has_them_computed_again(manifest, tmp_path, other):
    norm = GlobalNorm(8, tmp_path)
    statistics.prepare(norm, front(), manifest)
    before = json.loads(statistics.path_of(norm).read_text())
    if other == "file":
        statistics.path_of(norm).write_text('{"fingerprint": ')
    features = FilterBank(n_mels=8, snip_edges=False, remove_dc=False) if other == "features" else None
    statistics.prepare(norm, front(features), manifest.select(range(6)) if other == "corpus" else manifest)
    after = json.loads(statistics.path_of(norm).read_text())
    assert (after == before) == (other == "file")


def test_a_corpus_that_moved_is_the_same(manifest, tmp_path, monkeypatch):
    norm = GlobalNorm(8, tmp_path)
    statistics.prepare(norm, front(), manifest)
    monkeypatch.setattr(statistics, "compute", None)
    statistics.prepare(norm, front(), manifest.replace(wavs=[f"/moved/{i}.wav" for i in range(COUNT)]))


def test_damaged_recordings_are_named_and_left_out(manifest, tmp_path, caplog):
    (tmp_path / "bad.wav").write_bytes(b"RIFF")
    wavs = list(manifest.wavs)
    wavs[3] = str(tmp_path / "bad.wav")
    mean, _, frames, left_out = statistics.compute(front(), manifest.replace(wavs=wavs))
    rest_mean, _, rest_frames, _ = statistics.compute(front(), manifest.select([i for i in range(COUNT) if i != 3]))
    assert left_out == 1 and "u3" in caplog.text and "bad.wav" in caplog.text
    assert np.array_equal(mean, rest_mean) and frames == rest_frames
    with refused("too-much-damaged-audio"):
        statistics.compute(front(), manifest.replace(wavs=[wavs[3]] * COUNT))


class Logarithms(torch.nn.Module):
    """Infinite where a recording is silent."""

    def forward(self, signals):
        return signals.unfold(1, 160, 160)[..., :8].square().log()


def test_features_that_are_not_finite_are_left_out(manifest, tmp_path, caplog):
    soundfile.write(tmp_path / "silent.wav", np.zeros(16_000, np.float32), 16_000)
    mean, _, _, left_out = statistics.compute(front(Logarithms()), manifest.replace(
        wavs=[str(tmp_path / "silent.wav"), *manifest.wavs[1:]]))
    assert np.isfinite(mean).all() and left_out == 1 and "features are not finite" in caplog.text


class WithConstant(torch.nn.Module):
    """A feature that is always the same beside one that isn't."""

    def forward(self, signals):
        energy = signals.unfold(1, 160, 160).square().mean(2).log()
        return torch.stack([energy, torch.full_like(energy, -13.815511)], dim=2)


def test_a_constant_feature_becomes_zero(manifest, tmp_path):
    norm = GlobalNorm(2, tmp_path)
    statistics.prepare(norm, front(WithConstant()), manifest)
    statistics.load(norm)
    normed = norm(WithConstant()(torch.randn(1, 1_600)))
    assert normed.isfinite().all() and normed[..., 1].abs().max() < 1e-5


def test_statistics_of_another_width_are_refused(manifest, tmp_path):
    statistics.prepare(GlobalNorm(8, tmp_path), front(), manifest)
    with refused("shape-mismatch"):
        statistics.load(GlobalNorm(80, tmp_path))


def test_speechbrains_global_normalisation_gets_them_and_keeps_them_in_training(manifest, tmp_path):
    norm = InputNormalization(norm_type="global")
    statistics.prepare(norm, front(), manifest, str(tmp_path))
    statistics.load(norm, str(tmp_path))
    mean, deviation, _, _ = statistics.compute(front(), manifest)
    features = torch.randn(2, 30, 8)
    normed = norm.train()(features, torch.ones(2))
    np.testing.assert_allclose(normed, (features.numpy() - mean) / deviation, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(norm(features, torch.ones(2)), normed)
    np.testing.assert_allclose(norm.glob_mean, mean, rtol=1e-6)


@pytest.mark.slow
def test_a_run_with_another_normalisation_does_not_go_on_with_it(tmp_path):
    data = run_folders.corpus(tmp_path / "data", train=3, dev=1, test=1)
    run = run_folders.run_with_model(tmp_path / "run", data, rates=(50.0,), normalize={"norm_type": "sentence"})
    given = {**run_folders.TINY, "output_folder": str(run), "data_folder": str(data)}
    with StartGuard(run, True) as guard:
        (run / RECIPE).write_text(load.merged(run_folders.RECIPE, given))
        with refused("changed-key") as raised:
            initial.open_source(load.open_recipe(run_folders.RECIPE, given).keys, guard.changed())
    assert raised.value.message == (f"normalize.norm_type: it is global, but the run in {run} was last started with "
                                     "sentence")
    assert raised.value.hint.startswith("resume it with --normalize.norm_type sentence, or ")
