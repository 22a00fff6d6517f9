"""A codec from a corpus without texts: trained, killed and resumed, on two ranks, scored, and heard in its report."""

import base64
import contextlib
import json
import re
from pathlib import Path

import numpy as np
import processes
import pytest
import soundfile
import torch
import yaml

from sbkit.data.audio import read_audio

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
TINY = [
    "--n_mels", "20", "--size", "16", "--hidden", "24", "--encoder_layers", "1", "--slow_layers", "1",
    "--fast_layers", "1", "--sizes", "[256, 512]", "--crop_seconds", "0.5", "--step_seconds", "4", "--least_steps", "0",
    "--max_batch_seconds", "8", "--number_of_epochs", "2", "--num_workers", "1", "--precision", "fp32",
    "--noprogressbar",
    "--ckpt_interval_minutes", "0", "--ckpt_interval_steps", "2", "--no-check",
    "--adversarial_from", "5", "--discriminators.channels", "4", "--discriminators.sizes", "[256]",
]
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def voice(seconds, seed):
    """A buzz whose pitch glides and whose loudness comes and goes, with a little noise."""
    drawn, at = np.random.default_rng(seed), np.arange(int(seconds * 16_000)) / 16_000
    pitch = 120 + 60 * np.sin(2 * np.pi * drawn.uniform(0.5, 2) * at + drawn.uniform(0, 6))
    phase = 2 * np.pi * np.cumsum(pitch) / 16_000
    buzz = sum(np.sin(k * phase) / k for k in range(1, 12)) * (0.6 + 0.4 * np.sin(2 * np.pi * 3 * at))
    return (0.1 * buzz + 0.003 * drawn.standard_normal(len(at))).astype(np.float32)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Recordings, and lists of them that have no texts."""
    folder = tmp_path_factory.mktemp("data")
    for split, count in (("train", 48), ("dev", 8), ("test", 12)):
        lines = ["ID,wav"]
        for i in range(count):
            soundfile.write(folder / f"{split}{i}.wav", voice(0.6 + 0.1 * (i % 7), 1000 * len(split) + i), 16_000)
            lines.append(f"{split}{i},{split}{i}.wav")
        (folder / f"{split}.csv").write_text("\n".join(lines) + "\n")
    return folder


def words(out, data, *more):
    return "train", "hparams/codec.yaml", *TINY, "--data_folder", data, "--output_folder", out, *more


def train(out, data, *more, ranks=1):
    return processes.sbkit(*words(out, data, *more), cwd=ROOT, ranks=ranks, **ENVIRONMENT)


def latest(out):
    return max((out / "save").glob("CKPT+*"), key=lambda f: yaml.safe_load((f / "CKPT.yaml").read_text())["unixtime"])


def outcome(out):
    """Everything that training left, but for times."""
    folder = latest(out)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    measured = ("kind", "epoch", "step", "train_loss", "valid_loss", "valid_mel_distance", "test_loss",
                "test_perplexity")
    return {"model": torch.load(folder / "model.ckpt", weights_only=True),
            "optimizer": torch.load(folder / "optimizer.ckpt", weights_only=True)["state"],
            "metrics": [[line.get(key) for key in measured] for line in lines if line["kind"] in ("epoch", "test")]}


def same(one, other):
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "out"
    said = train(out, data)
    assert "48    48" in re.sub(r" +", "    ", said.stderr), "no row is left out for want of a text"
    return out


def test_it_learns_from_recordings_without_texts(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    valid = [line["valid_loss"] for line in lines if line["kind"] == "epoch" and "valid_loss" in line]
    assert len(valid) == 2 and valid[1] < valid[0]
    last = [line for line in lines if line["kind"] == "epoch" and "train_loss" in line][-1]
    assert last["step"] > 5, "the discriminators had their turn"


def test_killed_and_started_again_it_ends_as_if_it_had_never_been_stopped(run, data, tmp_path):
    out = tmp_path / "out"

    def saved():
        with contextlib.suppress(ValueError, FileNotFoundError):  # there is none yet, or it has just been deleted
            return yaml.safe_load((latest(out) / "brain.ckpt").read_text())["optimizer_step"] >= 6

    processes.killed(saved, *words(out, data), cwd=ROOT, **ENVIRONMENT)
    said = train(out, data)
    assert "Loading a checkpoint from" in (out / "log.txt").read_text() + said.stderr
    found, wanted = outcome(out), outcome(run)
    assert [key for key in wanted if not same(found[key], wanted[key])] == []


def test_two_ranks_train_what_one_does(data, tmp_path):
    """But for noise in the place of rounding, which each rank draws for itself."""
    for ranks in (1, 2):
        train(tmp_path / str(ranks), data, "--noise", "0", "--number_of_epochs", "1", ranks=ranks)
    one, two = (outcome(tmp_path / str(ranks)) for ranks in (1, 2))
    furthest = max((one["model"][name] - two["model"][name]).abs().max().item() for name in one["model"])
    assert furthest < 1e-3
    for ours, theirs in zip(one["metrics"][-2:], two["metrics"][-2:], strict=True):
        assert ours[:3] == theirs[:3]
        assert ours[3:7] == [None if each is None else pytest.approx(each, rel=1e-3) for each in theirs[3:7]]


def test_the_report_lets_one_hear_recordings_and_what_became_of_them(run):
    page = (run / "report.html").read_text()
    assert "The codebooks" in page and "How it sounds" in page
    section = page[page.index('id="listen"'):page.index("</section>", page.index('id="listen"'))]
    sounds = [base64.b64decode(each) for each in re.findall(r'src="data:audio/mpeg;base64,([^"]+)"', section)]
    assert len(sounds) == 20 and section.count("recording") >= 10, "ten clips, two of each"
    before, after = (read_audio(each) for each in sounds[:2])
    assert abs(len(before) - len(after)) < 0.1 * 16_000


def test_it_is_scored_again_and_its_numbers_are_the_tests(run):
    said = processes.sbkit("evaluate", run, "--device", "cpu", "--workers", "0", cwd=ROOT, **ENVIRONMENT)
    assert "mel distance" in said.stdout
    facts = json.loads((run / "evaluations" / "test-best" / "result.json").read_text())
    tested = json.loads((run / "test_results.json").read_text())["stats"]
    assert facts["mel_distance"] == pytest.approx(tested["mel_distance"], rel=1e-4)
    assert facts["bit_rate"] == pytest.approx(996.58, abs=0.01)
    assert 0 < facts["coding_real_time_factor"] < facts["real_time_factor"]
    assert [book["entries"] for book in facts["codebooks"]] == [1000, 1000]
    assert (run / "evaluations" / "test-best" / "report.html").is_file()
