"""The systems of tools.bench.learning: processes that train, times and scores."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sbkit.errors import SbkitError
from tools.bench.corpora import Corpus
from tools.bench.harness import RECIPE, ROOT, call, processor_seconds, read_lines

#: Their names, as a command line and as a reader has them.
NAMES = {"sbkit": "sbkit", "stock": "SpeechBrain", "nemo": "NeMo"}
SYSTEMS = tuple(NAMES)
NEMO = "nemo_toolkit[asr]==3.0.0"
NEMO_SCRIPT = Path(__file__).parent / "peers" / "nemo_ctc.py"


# ---------------------------------------------------------------- runs


@dataclass(frozen=True)
class Cell:
    """One run: a system on a corpus, with a seed and a number of epochs."""

    corpus: str
    system: str
    seed: int
    epochs: int

    @property
    def name(self) -> str:
        return f"{self.corpus}.{self.system}.{self.epochs}-epochs.seed-{self.seed}"


@dataclass(frozen=True)
class Setting:
    """What is the same for all runs: device, precision, threads, and keys of the recipe."""

    device: str
    precision: str
    threads: int
    nemo: Path  # the environment that --make-nemo makes
    keys: Sequence[str] = ()  # for sbkit and stock SpeechBrain

    def options(self) -> dict[str, Any]:
        return {"device": self.device, "precision": self.precision, "threads": self.threads, "keys": list(self.keys)}


@dataclass
class Run:
    """A run in progress: its folder, its log, and the seconds that a user would have waited so far."""

    cell: Cell
    corpus: Corpus
    setting: Setting
    folder: Path
    log: Path
    wall: float = 0.0

    def call(self, command: Sequence[Any], waits: bool = True) -> None:
        """Run a program, with its output in the log.

        waits : its time counts, since a user of the system would wait for it too
        """
        began = time.perf_counter()
        call(self.cell.name, command, self.log, self.setting.threads)
        self.wall += (time.perf_counter() - began) * waits

    def keys(self) -> list[str]:
        """Return the run's overrides of the recipe; an epoch goes through the corpus once, however small it is."""
        cell, setting = self.cell, self.setting
        return ["--data_folder", self.corpus.source, "--language", self.corpus.language, "--output_folder",
                str(self.folder / "run"), "--number_of_epochs", str(cell.epochs), "--min_steps", "0",
                "--seed", str(cell.seed),
                "--device", setting.device, "--precision", setting.precision, *setting.keys]


def train_sbkit(run: Run) -> dict[str, Any]:
    """Train hparams/ctc.yaml as ``make demo`` does, and transcribe with its last weights."""
    run.call([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1", ROOT / "train.py",
              RECIPE, *run.keys()])
    transcripts = {}
    for split in ("dev", "test"):
        run.call([sys.executable, "-m", "sbkit", "evaluate", run.folder / "run", "--checkpoint", "last", "--split",
                  split, "--name", split, "--to", run.folder / "transcripts", "--device", run.setting.device],
                 waits=False)
        rows = read_lines(run.folder / "transcripts" / f"{split}-last" / "utterances.jsonl")
        transcripts[split] = {row["id"]: row["hypothesis"] for row in rows}
    return {**from_metrics(read_lines(run.folder / "run" / "metrics.jsonl")), "transcripts": transcripts}


def from_metrics(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Read the seconds of each epoch's training, and facts about the model, from metrics.jsonl."""
    about = next(line for line in lines if line["kind"] == "run")
    epochs = [line for line in lines if line["kind"] == "epoch" and "train_seconds" in line]
    return {"epoch_seconds": [line["train_seconds"] for line in epochs], "steps": epochs[-1]["step"],
            "parameters": about["parameters"], "precision": about["precision"],
            "versions": {name: about["environment"].get(name) for name in ("torch", "speechbrain", "sbkit", "cpu")}}


def train_stock(run: Run) -> dict[str, Any]:
    """Train the same model with SpeechBrain's own Brain and data pipeline."""
    answer = run.folder / "answer.json"
    run.call([sys.executable, "-m", "tools.bench.peers.stock_ctc", answer, *run.keys()])
    return json.loads(answer.read_text(encoding="utf-8"))


def train_nemo(run: Run) -> dict[str, Any]:
    """Train NeMo's small Conformer-CTC in its own environment."""
    answer, setting = run.folder / "answer.json", run.setting
    run.call([setting.nemo / "bin" / "python", NEMO_SCRIPT, run.corpus.manifests, answer, "--epochs",
              run.cell.epochs, "--seed", run.cell.seed, "--device", setting.device, "--precision", setting.precision])
    run.wall += run.corpus.convert_seconds
    return json.loads(answer.read_text(encoding="utf-8"))


TRAIN: dict[str, Callable[[Run], dict[str, Any]]] = {
    "sbkit": train_sbkit, "stock": train_stock, "nemo": train_nemo,
}


def measure(run: Run) -> dict[str, Any]:
    """Train and score; returns the content of the result's file."""
    run.folder.mkdir(parents=True)
    run.log.parent.mkdir(parents=True, exist_ok=True)
    run.log.unlink(missing_ok=True)
    others = Others()
    found = TRAIN[run.cell.system](run)
    transcripts = found.pop("transcripts")
    rates: dict[str, float] = {}
    for split in ("dev", "test"):
        rates |= score(split, run.corpus.references(split), transcripts[split])
    return {**rates, "audio_hours": run.cell.epochs * run.corpus.train_hours,
            "train_seconds": sum(found["epoch_seconds"]),
            "wall_seconds": round(run.wall - found.pop("extra_seconds", 0.0), 1), **found,
            "others_share": others.share(), "commit": commit(), "time": time.strftime("%Y-%m-%d %H:%M")}


def score(split: str, references: dict[str, str], transcripts: dict[str, str]) -> dict[str, float]:
    """Compute WER and CER by sbkit's scorer; raises if an utterance that has words was not transcribed."""
    from sbkit.score.rates import ErrorRates

    scored = {name: text for name, text in references.items() if text.split()}
    missing = [name for name in scored if name not in transcripts]
    if missing:
        raise SbkitError("bench", f"{len(missing)} of {len(scored)} {split} utterances were not transcribed, "
                         f"such as {missing[0]}")
    words, characters = ErrorRates("word"), ErrorRates("character")
    for rates in (words, characters):
        rates.add(list(scored), list(scored.values()), [transcripts[name] for name in scored])
    return {f"{split}_wer": round(words.rate, 3), f"{split}_cer": round(characters.rate, 3)}


class Others:
    """Measures how much of the machine's cores other programs used meanwhile, which makes times unreliable."""

    def __init__(self) -> None:
        self.began = self._now()

    def share(self) -> float | None:
        """The share of all cores, 0 to 1, since this object was made; None if the system does not report it."""
        now = self._now()
        if self.began is None or now is None:
            return None
        seconds, all_work, ours = (new - old for new, old in zip(now, self.began, strict=True))
        return round(max(0.0, all_work - ours) / (seconds * (os.cpu_count() or 1)), 3)

    @staticmethod
    def _now() -> tuple[float, float, float] | None:
        """Return seconds by the clock, of work on all cores, and of work by this process's children."""
        try:
            ticks = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
        except OSError:
            return None
        user, nice, system, _, _, irq, softirq, steal = map(int, ticks)
        work = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
        return time.perf_counter(), work, processor_seconds()


def commit() -> str:
    """Return the commit of sbkit's checkout, with a + if files have been changed."""
    found = subprocess.run(["git", "describe", "--always", "--dirty=+", "--exclude=*"], cwd=ROOT, capture_output=True,
                           text=True, check=False)
    return found.stdout.strip() or "unknown"


def precision(asked: str, device: str) -> str:
    """Return the precision for all systems: of ``auto`` bf16 if the device has it."""
    if asked != "auto":
        return asked
    import torch

    from sbkit.recipe.speed import native_precision

    return native_precision(torch.device(device))


def missing(system: str, setting: Setting) -> str | None:
    """Return why a system can't be measured here; None if it can."""
    if system != "nemo":
        return None
    python = setting.nemo / "bin" / "python"
    how = f"make it with: python -m tools.bench.learning --make-nemo --nemo {setting.nemo}"
    if not python.exists():
        return f"{setting.nemo} is no environment; {how}"
    there = subprocess.run([python, "-c", "from importlib.metadata import version; version('nemo_toolkit')"],
                           capture_output=True, check=False)
    return None if there.returncode == 0 else f"{setting.nemo} has no NeMo; {how}"


def make_nemo(folder: Path) -> None:
    """Make an environment for NeMo, which needs another version of torch."""
    for command in ([sys.executable, "-m", "venv", folder],
                    [folder / "bin" / "python", "-m", "pip", "install", "--disable-pip-version-check", NEMO]):
        code = subprocess.run([str(word) for word in command], check=False).returncode
        if code:
            raise SbkitError("bench", f"NeMo's environment was not made: {' '.join(map(str, command))} ended with "
                             f"code {code}")
