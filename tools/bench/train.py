"""Training speed of a CTC recipe: sbkit, stock SpeechBrain and NVIDIA NeMo, alternating in the same run.

    python -m tools.bench.train [--recipe hparams/ctc.yaml] [--rounds 3] [--device cpu] [--data FOLDER] [--json FILE]
        [--key value ...]
    python -m tools.bench.train --shipped [--cores 1,2] [--nemo FOLDER] [--sides stock,nemo,sbkit] [...]

The first compares the same work on both sides, without NeMo; the second, on a CPU, each system as its authors ship it
(shipped.py).

Each side is a separate process that does one piece of work in its turn, so that both see the same machine and don't
share an allocator. Stock is SpeechBrain's own Brain, data pipeline (DynamicItemDataset, read_audio,
DynamicBatchSampler, PaddedBatch), modules, CTC loss, greedy decoder and ErrorRateStats, with AdamW. The model, the
corpus and the audio seconds of a batch are the same; a step is measured on the same batches. The first piece of each
kind is not counted, and each turn begins with a warm-up, since other processes have used the caches. Ratios are of
medians; above 1, sbkit is faster.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from sbkit.system.cores import usable_cores
from tools.bench.growth import peak_mib
from tools.bench.harness import RECIPE, whole_numbers

if TYPE_CHECKING:  # each side imports only what it needs, when it starts to work
    import torch

    from sbkit.data.batch import Batch
    from sbkit.data.corpus import Corpus
    from sbkit.data.loader import TrainLoader
    from sbkit.data.plan import Batching
    from sbkit.recipe.arguments import CommandLine
    from sbkit.tasks.task import Task

    MakeSide = Callable[[dict[str, Any], CommandLine], SimpleNamespace]

#: Systems that sbkit is compared with, as a command line and as a reader has them.
PEERS = {"stock": "stock", "nemo": "NeMo"}
#: Audio seconds per second by piece and side, of each turn.
Speeds = dict[str, dict[str, list[float]]]
WARM_UP = {"step": "step", "validation": "validation", "epoch": "step"}  # the piece before each that is not counted
#: Keys that switch off what stock SpeechBrain doesn't have, and checkpoints within an epoch.
NOT_OF_STOCK = {"spec_augment": None, "intermediate_ctc": 0.0, "initial_weights": None, "ckpt_interval_minutes": 0}
#: The number of batches that a step is measured on: the same for both sides and in each turn, kept in memory.
STEP_BATCHES = 12


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--recipe", type=Path, default=RECIPE, help="a joint one needs --ctc_weight 1.0")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data", help="a corpus (default: the demo corpus)")
    parser.add_argument("--pieces", default=",".join(WARM_UP))
    parser.add_argument("--precisions", default="fp32,bf16")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--shipped", action="store_true", help="compare systems as their authors ship them, on a CPU")
    parser.add_argument("--cores", type=whole_numbers, default=[usable_cores()], help="with --shipped: 1,2 or others")
    parser.add_argument("--sides", default="stock,nemo,sbkit", help="with --shipped")
    parser.add_argument("--nemo", type=Path, default=Path("results/nemo"), help="NeMo's environment (results/nemo)")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    args, rest = parser.parse_known_args()
    if args.shipped and args.device != "cpu":
        parser.error("--shipped compares on a CPU")
    from tools.bench import shipped  # which imports this module

    if args.side:
        if args.shipped:
            shipped.work(args, rest)
        else:
            work(args, rest, SIDES, NOT_OF_STOCK)
        return
    with tempfile.TemporaryDirectory() as folder:
        if args.shipped:
            results = shipped.compare(args, rest, Path(folder))
        else:
            results = compare(args, rest, Path(folder), "train")
    print(show(results))
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


# ------------------------------------------------------------------ the referee


def compare(args: argparse.Namespace, rest: list[str], folder: Path, bench: str) -> dict[str, Any]:
    """Run every piece of every side, alternating; returns audio seconds per second by piece and side."""
    from sbkit.system import environment

    overrides = [*rest, "--output_folder", str(folder / "run")] + (["--data_folder", args.data] if args.data else [])
    overrides = prepare(args.recipe, overrides)
    sides = {}
    for precision in args.precisions.split(","):
        for whose in ("stock", "sbkit"):
            command = [sys.executable, "-m", f"tools.bench.{bench}", "--side", whose, "--recipe", str(args.recipe),
                       "--device", args.device, *overrides, "--precision", precision, "--eval_precision", precision]
            sides[f"{whose} {precision}"] = Side(command)
    times: Speeds = {}
    try:
        for piece in args.pieces.split(","):
            for side in sides.values():
                side.do(piece)
            alternate(sides, piece, args.rounds, times)
        memory = {name: side.do("memory")["mib"] for name, side in sides.items()}
    finally:
        for side in sides.values():
            side.end()
    return {"audio_s_per_s": times, "peak_mib": memory, "environment": environment.describe(), "arguments": rest}


def alternate(sides: Mapping[str, Side], piece: str, rounds: int, speeds: Speeds, where: str = "") -> None:
    """Let the sides, which have done a piece before, do it in turn, and add the speed of each of its parts.

    where : stands before the names of the parts
    """
    for turn in range(1, rounds + 1):
        for name, side in sides.items():
            for part, found in side.do(piece).items():
                print(f"{where}{part} {turn}/{rounds} {name}: {found['seconds']:.3f} s", file=sys.stderr)
                speeds.setdefault(where + part, {}).setdefault(name, []).append(found["audio"] / found["seconds"])


def prepare(path: Path, overrides: list[str]) -> list[str]:
    """Prepare manifests and tokenizer; returns the overrides, with those that follow from the corpus."""
    from sbkit.infer.bundles import BundleLoader
    from sbkit.recipe import arguments, load
    from sbkit.runs.preparation import prepare_data

    request = arguments.parse([str(path), *overrides])
    recipe = load.open_recipe(request.path, request.overrides)
    follows = prepare_data(recipe.keys, request.overrides, BundleLoader())
    return overrides + [f"--{name}={value}" for name, value in follows.items()]


class Side:
    """A worker process that does a piece of work for each line it is sent.

    environment : of the process; None: that of this one
    cores : the number of cores that it and its processes may use; None: all
    """

    def __init__(self, command: list[str], environment: Mapping[str, str] | None = None, cores: int | None = None):
        before = os.sched_getaffinity(0) if cores else set()
        if cores:  # a process has those of the one that starts it
            os.sched_setaffinity(0, sorted(before)[:cores])
        try:
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                            env=environment)
        finally:
            if cores:
                os.sched_setaffinity(0, before)
        assert self.process.stdin is not None and self.process.stdout is not None, "both are pipes"
        self.requests, self.answers = self.process.stdin, self.process.stdout

    def do(self, piece: str) -> dict[str, Any]:
        """Have a piece done; returns the seconds that each of its parts took, and their audio."""
        self.requests.write(piece + "\n")
        self.requests.flush()
        for line in self.answers:
            if line.startswith("{"):
                return json.loads(line)
        raise SystemExit(f"a side ended with code {self.process.wait()}; its output is above")

    def end(self) -> None:
        self.requests.close()
        self.process.wait(60)


def show(results: dict[str, Any]) -> str:
    """Format a table of medians with their spread, and ratios to each peer in the same precision and to its best."""
    from sbkit.system.console import table

    names = {name.split()[0] for sides in results["audio_s_per_s"].values() for name in sides}
    peers = [peer for peer in PEERS if peer in names]
    rows = []
    for piece, sides in results["audio_s_per_s"].items():
        medians = {name: statistics.median(values) for name, values in sides.items()}
        for name, values in sides.items():
            digits = 0 if medians[name] >= 20 else 2
            row = [piece, name, f"{medians[name]:.{digits}f}", f"{min(values):.{digits}f} to {max(values):.{digits}f}"]
            for peer in peers:
                same = medians.get(f"{peer} {name.split()[1]}")
                best = max((value for other, value in medians.items() if other.startswith(peer)), default=None)
                row += [f"{medians[name] / value:.2f}x" if value else "" for value in (same, best)]
            rows.append(row)
    for name, mib in results.get("peak_mib", {}).items():
        rows.append(["peak memory", name, f"{mib:.0f} MiB", "", *[""] * (2 * len(peers))])
    facts = results["environment"]
    head = f"{facts.get('gpu', facts['cpu'])}; torch {facts['torch']}, speechbrain {facts['speechbrain']}"
    ratios = [title for peer in peers for title in (f"to {PEERS[peer]}", f"to {PEERS[peer]}'s best")]
    return head + "\n" + table(["piece", "side", "audio s/s", "spread", *ratios], rows)


# ------------------------------------------------------------------ one side


def work(args: argparse.Namespace, rest: list[str], sides: Mapping[str, MakeSide], keys: Mapping[str, Any]) -> None:
    """Be one of the sides: do the piece that each line of stdin names, and answer in JSON.

    A side may have several ranks: rank 0 reads and answers.

    keys : overrides of the recipe
    """
    answer, sys.stdout = sys.stdout, sys.stderr  # so that what libraries print is not taken for an answer
    from sbkit.recipe import arguments, load
    from sbkit.train.distributed import ranks

    request = arguments.parse([str(args.recipe), "--device", args.device, *rest])
    if args.side == "sbkit" and args.device == "cpu":
        from sbkit.system.memory import keep_freed_memory

        keep_freed_memory()
    hparams = load.load(request.path, {**request.overrides, **keys})
    hparams["schedule"].total_steps = 10**6
    side = sides[args.side](hparams, request)
    if side.brain.precision != request.run_opts.precision:
        raise SystemExit(f"{args.side} trains in {side.brain.precision}, not in {request.run_opts.precision}")
    while piece := ranks.run_on_main(sys.stdin.readline).strip():
        if piece == "memory":
            found: dict[str, Any] = {"mib": peak_mib(args.device)}
        else:
            parts = piece.split("+")
            getattr(side, WARM_UP[parts[0]])()
            found = {part: timed(getattr(side, part), args.device) for part in parts}
        if ranks.is_main():
            print(json.dumps(found), file=answer, flush=True)


def timed(do: Callable[[], float], device: str) -> dict[str, float]:
    """Do a part of a piece, which returns the seconds of its audio, and measure it."""
    finish(device)
    started = time.perf_counter()
    audio = do()
    finish(device)
    return {"seconds": time.perf_counter() - started, "audio": audio}


def finish(device: str) -> None:
    import torch

    if device.startswith("cuda"):
        torch.cuda.synchronize()


def seconds_of(batches: Sequence[Batch]) -> float:
    return sum(float(batch.signal_lengths.sum()) / 16000 for batch in batches)


def planned(hparams: dict[str, Any], device: str, batches: int = STEP_BATCHES) -> tuple[TrainLoader, list[Batch]]:
    """Make sbkit's loader of the training set, and the batches on which a step is measured on all sides.

    With several ranks, these are this rank's parts of the same steps.
    """
    import itertools

    from sbkit.data.loader import TrainLoader
    from sbkit.data.plan import Plan
    from sbkit.train.distributed import ranks

    corpus: Corpus = hparams["corpus"]
    batching: Batching = hparams["batching"]
    manifest, tokenizer = corpus.load()["train"], hparams["tokenizer"].load()
    plan = Plan(manifest.durations, batching, round_seconds=batching.rounding(device.split(":")[0]))
    loader = TrainLoader(manifest, tokenizer, plan, workers=hparams["num_workers"], rank=ranks.rank(),
                         world=ranks.world_size())
    return loader, list(itertools.islice(loader.at(1), batches))


def ours(hparams: dict[str, Any], request: CommandLine, batches: int = STEP_BATCHES) -> SimpleNamespace:
    """Set up sbkit's Brain, plan and loaders."""
    import itertools

    import torch

    from sbkit.data.loader import EvalLoader
    from sbkit.train.distributed import ranks

    hparams["checkpointer"] = None
    corpus: Corpus = hparams["corpus"]
    manifests, tokenizer = corpus.load(), hparams["tokenizer"].load()
    brain: Task = hparams["brain"](modules=hparams["modules"], opt_class=hparams["opt_class"], hparams=hparams,
                                   run_opts=request.run_opts)
    train, kept = planned(hparams, request.run_opts.device, batches)
    valid = EvalLoader(manifests["dev"], tokenizer, max_batch_seconds=hparams["max_batch_seconds"],
                       workers=hparams["num_workers"])
    brain.hparams.train_logger.log_stats = lambda *_, **__: None
    brain.on_fit_start()
    brain.trainer.begin_fit(validates=True)
    brain.train_state.first_step_checked = True  # checks that a run does once are not part of a step
    kept = [batch.to(brain.device) for batch in kept]
    kept_seconds = float(ranks.sum_across(torch.tensor(seconds_of(kept))))
    epochs = itertools.count(1)

    def step() -> float:
        brain.modules.train()
        micro_batches = ((batch, batch.last) for batch in kept)
        while brain.trainer.train_step(micro_batches):
            brain.open_step(brain.optimizer_step + 1)
            brain.trainer.receive_results()
        brain.trainer.receive_results(wait=True)
        return kept_seconds

    def epoch() -> float:
        brain.step = brain.train_state.steps_in_epoch = 0
        brain.noprogressbar = True
        brain._fit_train(train, next(epochs), enable=False)
        return manifests["train"].hours * 3600

    def validation() -> float:
        brain.train_stats = {}
        brain._fit_valid(valid, 1, enable=False)
        return manifests["dev"].hours * 3600

    return SimpleNamespace(step=step, epoch=epoch, validation=validation, brain=brain)


def adamw(hparams: dict[str, Any]) -> Callable[..., Any]:
    """Return the optimizer of SpeechBrain's recipes, with the recipe's rate and weight decay."""
    import functools

    import torch

    return functools.partial(torch.optim.AdamW, lr=hparams["lr"], betas=(0.9, 0.98),
                             weight_decay=hparams["weight_decay"])


def stock(hparams: dict[str, Any], request: CommandLine) -> SimpleNamespace:
    """Set up SpeechBrain's Brain and data pipeline, as in its CTC recipes, and their optimizer."""
    import functools

    import speechbrain as sb
    import torch
    import torchaudio
    from speechbrain.dataio.dataloader import SaveableDataLoader
    from speechbrain.dataio.dataset import DynamicItemDataset
    from speechbrain.dataio.sampler import DynamicBatchSampler
    from speechbrain.utils.metric_stats import ErrorRateStats

    tokenizer = hparams["tokenizer"].load()

    class Stock(sb.core.Brain):
        def compute_forward(self, batch: Any, stage: Any) -> Any:
            batch = batch.to(self.device)
            signals, lengths = batch.sig
            feats = hparams["compute_features"](signals)
            feats = hparams["normalize"](feats, lengths)
            encoded = hparams["Transformer"].encode(hparams["CNN"](feats), lengths)
            return hparams["ctc_lin"](encoded).log_softmax(-1), lengths

        def compute_objectives(self, predictions: Any, batch: Any, stage: Any) -> Any:
            log_probs, lengths = predictions
            tokens, token_lengths = batch.tokens
            loss = sb.nnet.losses.ctc_loss(log_probs.float(), tokens, lengths, token_lengths, blank_index=0)
            if stage != sb.Stage.TRAIN:
                ids = sb.decoders.ctc_greedy_decode(log_probs, lengths, blank_id=0)
                transcripts = [tokenizer.decode(line).split() for line in ids]
                references = [text.split() for text in batch.wrd]
                self.words.append(batch.id, transcripts, references)
                self.characters.append(batch.id, transcripts, references)
            return loss

        def on_stage_start(self, stage: Any, epoch: int | None = None) -> None:
            self.words, self.characters = ErrorRateStats(), ErrorRateStats(split_tokens=True)

        def on_stage_end(self, stage: Any, stage_loss: float, epoch: int | None = None) -> None:
            if stage == sb.Stage.VALID:
                self.words.summarize("error_rate"), self.characters.summarize("error_rate")

        def on_fit_batch_start(self, batch: Any, should_step: bool) -> None:
            hparams["schedule"].apply(self.optimizer, self.optimizer_step + 1)

    @sb.utils.data_pipeline.takes("wav")
    @sb.utils.data_pipeline.provides("sig")
    def audio(wav: str) -> torch.Tensor:  # read_audio does not return the rate, for which recipes open the file twice
        signal, rate = sb.dataio.audio_io.load(wav)
        return resampler(rate)(signal.mean(0))

    @functools.cache
    def resampler(rate: int) -> Any:
        return torchaudio.transforms.Resample(rate, hparams["sample_rate"])

    @sb.utils.data_pipeline.takes("wrd")
    @sb.utils.data_pipeline.provides("wrd", "tokens")
    def text(wrd: str) -> Iterator[Any]:
        yield wrd
        yield torch.LongTensor(tokenizer.encode(wrd))

    def dataset(split: str) -> Any:
        return DynamicItemDataset.from_csv(
            hparams["corpus"].manifest_path(split), dynamic_items=[audio, text],
            output_keys=["id", "sig", "wrd", "tokens", "duration"],
        )

    train_set = dataset("train")
    valid_set, test_set = (dataset(split).filtered_sorted(sort_key="duration", reverse=True)
                           for split in ("dev", "test"))
    sampler = DynamicBatchSampler(
        train_set, max_batch_length=hparams["step_seconds"], num_buckets=60, length_func=lambda row: row["duration"],
        shuffle=True, batch_ordering="random",
    )
    workers = {"num_workers": hparams["num_workers"], "collate_fn": sb.dataio.batch.PaddedBatch}
    train = SaveableDataLoader(train_set, batch_sampler=sampler, **workers)
    valid, test = (SaveableDataLoader(data, **workers, batch_sampler=DynamicBatchSampler(
        data, max_batch_length=hparams["max_batch_seconds"], num_buckets=60, length_func=lambda row: row["duration"],
        shuffle=False)) for data in (valid_set, test_set))
    options = {"device": request.run_opts.device, "precision": request.run_opts.precision,
               "eval_precision": request.run_opts.precision}
    brain = Stock(hparams["modules"], adamw(hparams), hparams, options)
    brain.on_fit_start()
    brain.nonfinite_count, brain.nonfinite_patience = 0, sys.maxsize  # only its speed is measured, not its loss
    hours = {split: float(sum(row["duration"] for row in data.data.values())) for split, data in
             (("train", train_set), ("dev", valid_set))}

    @functools.cache
    def kept() -> list[Any]:
        rows = {name: row for row, name in enumerate(train_set.data_ids)}
        return [sb.dataio.batch.PaddedBatch([train_set[rows[name]] for name in batch.ids])
                for batch in planned(hparams, request.run_opts.device)[1]]

    def step() -> float:
        brain.modules.train()
        for batch in kept():
            brain.step += 1
            brain.fit_batch(batch)
        return sum(float(batch.duration.sum()) if torch.is_tensor(batch.duration) else sum(batch.duration)
                   for batch in kept())

    def epoch() -> float:
        brain._fit_train(train, 1, enable=False)
        return hours["train"]

    def validation() -> float:
        brain._fit_valid(valid, 1, enable=False)
        return hours["dev"]

    def evaluation() -> None:
        brain.evaluate(test, progressbar=False)

    return SimpleNamespace(step=step, epoch=epoch, validation=validation, evaluation=evaluation, brain=brain,
                           epoch_steps=len(train), train=train, clips=len(train_set))


SIDES: dict[str, MakeSide] = {"stock": stock, "sbkit": ours}


if __name__ == "__main__":
    main()
