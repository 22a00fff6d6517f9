"""Systems as their authors ship them, on some cores of a CPU: the sides of ``python -m tools.bench.train --shipped``.

All train a model of one size (6 Conformer layers of 144) on the same utterances, each with its own settings. No side is
told a number of threads, so ``OMP_NUM_THREADS`` is not set: each finds the cores that it may use (``--cores``) itself.

A *step* is of the same utterances on all sides, in memory, 15 s of audio each (``step_seconds`` of the recipe):
forward, backward and update, without reading. An *epoch* reads the corpus and trains on it once; a *validation* follows
it and scores, as in every run of each system. Saving checkpoints is not counted. Speeds are of the audio of the corpus:
what a user waits for a pass through it. A turn begins with steps that aren't counted, as other processes have used the
caches.

- ``sbkit``: the recipe with all that it has (Muon, masks, intermediate CTC, a quarter more audio of silence and of
  speech in it, which "epoch, all audio" counts), but an epoch goes through the corpus once (``min_steps``). An epoch
  and a validation are those of a real ``sbkit train``, which chooses its ranks and threads, and waits after each
  validation for its next turn (``turns.py``); the seconds are those of its ``metrics.jsonl``. Its turns begin without a
  warm-up. A step is measured with as many ranks and threads as such a run chooses.
- ``stock``: SpeechBrain's Brain and data pipeline with the same model and seconds of a batch, as in ``train.py``, AdamW
  and the dropout of its recipes. Their augmentation of waveforms, which doubles each batch, is left out.
- ``nemo``: NVIDIA NeMo's Conformer-CTC in its own environment, see ``peers/nemo_side.py``. It reads WAVs, the others
  the corpus' own files.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.bench import corpora, systems, train
from tools.bench.harness import ROOT, as_words
from tools.bench.peers.stock_ctc import WITHOUT_THEM
from tools.bench.turns import ALL_AUDIO

#: What each side does in its turn; names of parts with a + between them are done one after the other.
PIECES = ("epoch+validation", "step")
#: Epochs of sbkit's run, more than there are turns: it is stopped when its turns are over.
_EPOCHS = 1000
#: Variables that would decide a number of threads.
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True)
class Prepared:
    """What is the same for all sides: the recipe with its corpus, and the steps to measure."""

    recipe: Path
    overrides: list[str]
    folder: Path
    audio: dict[str, float]
    """Seconds of audio in an epoch and in a validation."""
    nemo: Path
    """The Python of NeMo's environment."""

    @property
    def manifests(self) -> Path:
        """The folder of the manifests that NeMo reads."""
        return self.folder / "nemo"

    @property
    def steps(self) -> Path:
        """The file with the ids of the utterances of each step."""
        return self.folder / "steps.json"


def compare(args: argparse.Namespace, rest: list[str], folder: Path) -> dict[str, Any]:
    """Run both pieces of every side, alternating, on each number of cores; returns audio seconds per second."""
    from sbkit.system import environment

    sides = [name for name in args.sides.split(",") if _can_run(name, args.nemo)]
    prepared = prepare(args, rest, folder)
    speeds: train.Speeds = {}
    for cores in args.cores:
        where = f"{cores} core{'s' * (cores > 1)}: "
        for piece in PIECES:
            commands = {f"{name} {precision}": COMMANDS[name](prepared, piece, precision, cores)
                        for precision in args.precisions.split(",") for name in sides}
            with started(commands, cores, piece) as workers:
                train.alternate(workers, piece, args.rounds, speeds, where)
        all_audio = speeds.get(f"{where}{ALL_AUDIO}", {})
        speeds[f"{where}{ALL_AUDIO}"] = {**speeds[f"{where}epoch"], **all_audio}  # peers add none to the corpus
    return {"audio_s_per_s": speeds, "environment": environment.describe(), "arguments": rest}


def _can_run(name: str, nemo: Path) -> bool:
    reason = systems.missing(name, systems.Setting("cpu", "fp32", 1, nemo.absolute()))
    if reason is not None:
        print(f"without {name}: {reason}", file=sys.stderr)
    return reason is None


def prepare(args: argparse.Namespace, rest: list[str], folder: Path) -> Prepared:
    """Prepare the corpus for all sides, and choose the utterances of the steps that are measured."""
    from sbkit.recipe import arguments, load

    words = [*rest, "--min_steps", "0"]
    if args.data:
        words += ["--data_folder", args.data]
    in_folder = ["--output_folder", str(folder / "run")]
    words = [word for word in train.prepare(args.recipe, [*in_folder, *words]) if word not in in_folder]
    request = arguments.parse([str(args.recipe), *in_folder, *words])
    hparams = load.load(request.path, {**request.overrides, "num_workers": 0})
    manifests = hparams["corpus"].load()
    audio = {part: manifests[split].hours * 3600 for part, split in (("epoch", "train"), ("validation", "dev"))}
    prepared = Prepared(args.recipe, words, folder, audio, args.nemo.absolute() / "bin" / "python")

    batches = train.planned(hparams, "cpu")[1]
    prepared.steps.write_text(json.dumps([batch.ids for batch in batches]), encoding="utf-8")
    for split in ("train", "dev"):
        corpora.convert(manifests[split], prepared.manifests, split)
    return prepared


@contextlib.contextmanager
def started(commands: Mapping[str, list[str]], cores: int, piece: str) -> Iterator[dict[str, train.Side]]:
    """A context with a process for each command, on the first cores of this process; none decides its threads.

    piece : done once by each as soon as it is started, which isn't counted: no other process disturbs a side while it
        tries what is fastest here
    """
    environment = {name: value for name, value in os.environ.items() if name not in _THREADS}
    environment["PYTHONPATH"] = str(ROOT)
    workers: dict[str, train.Side] = {}
    try:
        for name, command in commands.items():
            workers[name] = train.Side(command, environment, cores)
            workers[name].do(piece)
        yield workers
    finally:
        for worker in workers.values():
            worker.end()


# ------------------------------------------------------------------ the sides


def sbkit(prepared: Prepared, piece: str, precision: str, cores: int) -> list[str]:
    """Return the command of sbkit's side: a real training, and for steps its model on the ranks of such a training."""
    if piece == "step":
        return _worker("sbkit", prepared, precision)
    folder = prepared.folder / f"run-{cores}-{precision}"
    turns = {"limit": _EPOCHS, "folder": str(folder), "audio": prepared.audio}
    return [sys.executable, "-m", "sbkit", "train", str(prepared.recipe), *prepared.overrides, *_in(precision),
            *as_words({"output_folder": folder, "number_of_epochs": _EPOCHS,
                       "epoch_counter": f"!new:tools.bench.turns.Turns {json.dumps(turns)}"})]


def stock(prepared: Prepared, piece: str, precision: str, cores: int) -> list[str]:
    """Return the command of stock SpeechBrain's side."""
    return _worker("stock", prepared, precision)


def nemo(prepared: Prepared, piece: str, precision: str, cores: int) -> list[str]:
    """Return the command of NeMo's side."""
    return [str(prepared.nemo), "-m", "tools.bench.peers.nemo_side", str(prepared.manifests), str(prepared.steps),
            "--precision", precision]


COMMANDS: dict[str, Callable[[Prepared, str, str, int], list[str]]] = {"stock": stock, "nemo": nemo, "sbkit": sbkit}


def _worker(whose: str, prepared: Prepared, precision: str) -> list[str]:
    return [sys.executable, "-m", "tools.bench.train", "--shipped", "--side", whose, "--recipe", str(prepared.recipe),
            "--output_folder", str(prepared.folder / "run"), *prepared.overrides, *_in(precision)]


def _in(precision: str) -> list[str]:
    return ["--precision", precision, "--eval_precision", precision]


def work(args: argparse.Namespace, rest: list[str]) -> None:
    """Be the side of stock SpeechBrain, or that of sbkit's steps with the ranks and threads that a run chooses."""
    if args.side == "stock":
        train.work(args, rest, train.SIDES, {**WITHOUT_THEM, **train.NOT_OF_STOCK})
        return
    import torch

    from sbkit.recipe import arguments
    from sbkit.runs import cpu_layout
    from sbkit.runs.run_config import RunConfig
    from sbkit.train.distributed.local_ranks import LocalRanks

    request = arguments.parse([str(args.recipe), "--device", "cpu", *rest])
    layout = cpu_layout.choose(RunConfig.of(request, torch.device("cpu")))
    assert layout is not None, "no variable decides it, and nothing but a missing trial leaves it open"
    print(f"steps of sbkit with {layout}", file=sys.stderr)
    with LocalRanks(layout.ranks, layout.threads, _be_rank, args, rest):
        _be_rank(args, rest)


def _be_rank(args: argparse.Namespace, rest: Sequence[str]) -> None:
    import torch

    from sbkit.train.distributed import ranks

    ranks.init(torch.device("cpu"))
    try:
        train.work(args, list(rest), train.SIDES, {})
    finally:
        ranks.shutdown()
