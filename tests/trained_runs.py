"""What training left in an output folder, recordings to train on, and commands in the tests' own process."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import processes
import pytest
import soundfile
import torch
import yaml
from processes import ROOT

from sbkit.cli import main
from sbkit.recipe import flops
from sbkit.train.checkpoint import Checkpointer


def options(**keys: object) -> list[str]:
    """Keys of a recipe as words of a command."""
    return [f"--{key}={value}" for key, value in keys.items()]


def checkpoints(out: Path) -> Iterator[tuple[int, Path]]:
    """The optimizer steps and folders of the checkpoints of a run, which may be under way."""
    for path in out.glob("save/CKPT+*/brain.ckpt"):
        with contextlib.suppress(FileNotFoundError):  # it has just been deleted
            yield yaml.safe_load(path.read_text())["optimizer_step"], path.parent


def saved_step(out: Path) -> int:
    """The optimizer step of the latest checkpoint; 0 without one."""
    return max((step for step, _ in checkpoints(out)), default=0)


def latest(out: Path) -> Path:
    """The folder of the newest checkpoint."""
    return max((out / "save").glob("CKPT+*"), key=lambda f: yaml.safe_load((f / "CKPT.yaml").read_text())["unixtime"])


def saved(out: Path) -> set[str]:
    """What the newest checkpoint holds, by name: a run goes on from no more than that."""
    return {path.stem for path in latest(out).glob("*.ckpt")}


def weights(out: Path) -> dict[str, torch.Tensor]:
    """The weights of the newest checkpoint."""
    return torch.load(latest(out) / "model.ckpt", weights_only=True)


def metrics(out: Path, *kinds: str) -> list[dict[str, Any]]:  # as JSON gives it
    """The lines of the metrics, or those of these kinds."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if not kinds or line["kind"] in kinds]


def outcome(out: Path, *measured: str, kinds: tuple[str, ...] = ("epoch", "test")) -> dict[str, Any]:
    """Everything that training left, but for times: of the lines of the metrics, what is named besides losses."""
    names = ("kind", "epoch", "step", "train_loss", "valid_loss", "test_loss", *measured)
    return {"model": weights(out), "optimizer": torch.load(latest(out) / "optimizer.ckpt", weights_only=True)["state"],
            "steps": saved_step(out),
            "metrics": [[line.get(name) for name in names] for line in metrics(out, *kinds)]}


def same(one: object, other: object) -> bool:
    """Whether two outcomes are equal to the bit."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def different(found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """What of two outcomes or models is not equal to the bit, or in one alone."""
    return [key for key in found | wanted if not same(found.get(key), wanted.get(key))]


@contextlib.contextmanager
def copied(out: Path, step: int, to: Path) -> Iterator[None]:
    """What is trained here to ``out`` is copied right after it has saved this step or a later one: as a kill leaves it.

    Task by task this shows that all of a run's state is saved and taken up again; test_kill_resume.py kills, anywhere.
    """
    save = Checkpointer.save_and_keep_only

    def save_and_copy(self: Checkpointer, *args: Any, **kwargs: Any) -> None:  # as SpeechBrain's
        save(self, *args, **kwargs)
        self.wait()
        if saved_step(out) >= step and not to.exists():
            shutil.copytree(out, to)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpointer, "save_and_keep_only", save_and_copy)
        yield
    assert 0 < saved_step(to) < saved_step(out)


def go_on(out: Path, *words: object, **how: Any) -> str:  # what `processes.sbkit` takes
    """What a run says that goes on from its checkpoint to its end."""
    done = processes.sbkit(*words, **how)
    assert "Loading a checkpoint from" in (out / "log.txt").read_text() + done.stderr
    return done.stdout + done.stderr


def here(*words: object, cwd: Path = ROOT, code: int = 0) -> str:
    """What ``sbkit WORDS`` says in the tests' process, which has other hashes of texts than what the server forks."""
    on_a_cpu = ["--device", "cpu"] if words[0] == "train" else []
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as said, \
            contextlib.redirect_stderr(said):
        patch.chdir(cwd)
        if on_a_cpu and "COUNT_FLOPS" not in os.environ:  # as processes.command
            patch.setattr(flops, "operations_per_second", lambda *_: 1e6)
        assert main([*map(str, words), *on_a_cpu]) == code, said.getvalue()
    return said.getvalue()


def voice(seconds: float, seed: int, noise: float = 0.003) -> np.ndarray:
    """A buzz whose pitch glides and whose loudness comes and goes, with a little noise."""
    drawn, at = np.random.default_rng(seed), np.arange(int(seconds * 16_000)) / 16_000
    pitch = 120 + 60 * np.sin(2 * np.pi * drawn.uniform(0.5, 2) * at + drawn.uniform(0, 6))
    phase = 2 * np.pi * np.cumsum(pitch) / 16_000
    buzz = sum(np.sin(k * phase) / k for k in range(1, 12)) * (0.6 + 0.4 * np.sin(2 * np.pi * 3 * at))
    return (0.1 * buzz + noise * drawn.standard_normal(len(at))).astype(np.float32)


def voices(folder: Path, noise: float = 0.003) -> Path:
    """Such recordings, and lists of them that have no texts."""
    for split, count in (("train", 48), ("dev", 8), ("test", 12)):
        lines = ["ID,wav"]
        for i in range(count):
            samples = voice(0.6 + 0.1 * (i % 7), 1000 * len(split) + i, noise)
            soundfile.write(folder / f"{split}{i}.wav", samples, 16_000)
            lines.append(f"{split}{i},{split}{i}.wav")
        (folder / f"{split}.csv").write_text("\n".join(lines) + "\n")
    return folder


TONES = ("low", "high", "both")


def tone(word: str, seconds: float, seed: int) -> np.ndarray:
    """A word of a language of three: a low tone, a high one, or both, with a little noise."""
    drawn = np.random.default_rng(seed)
    at = np.arange(int(seconds * 16_000)) / 16_000
    pitches = {"low": [300], "high": [1100], "both": [300, 1100]}[word]
    return sum(0.2 * np.sin(2 * np.pi * each * at + drawn.uniform(0, 6)) for each in pitches) \
        + 0.01 * drawn.standard_normal(len(at))


def tones(folder: Path, train: int, rest: int, shortest: float = 0.4) -> None:
    """A corpus of these words."""
    (folder / "wavs").mkdir(parents=True)
    for split, count in (("train", train), ("dev", rest), ("test", rest)):
        lines = ["ID,duration,wav,wrd"]
        for i in range(count):
            word, seconds, path = TONES[i % 3], shortest + 0.05 * (i % 7), folder / "wavs" / f"{split}{i}.wav"
            soundfile.write(path, tone(word, seconds, 1000 * len(split) + i), 16_000)
            lines.append(f"{split}{i},{seconds},{path},{word}")
        (folder / f"{split}.csv").write_text("\n".join(lines) + "\n")
