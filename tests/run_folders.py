"""Run folders made on the spot: one that only tells of a run, and one with a model and checkpoints."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import soundfile

from sbkit.recipe import load
from sbkit.recipe.load import Recipe
from sbkit.score import utterances
from sbkit.score.utterances import ScoredUtterance
from sbkit.train.checkpoint.adapted import Adapted

RECIPE = Path(__file__).parents[1] / "hparams" / "ctc.yaml"
WORDS = "the brave teacher finds an old ladder near green river after dinner while seven quiet horses sleep".split()
ACCENTS, AGES, GENDERS = ("Scottish English", "England English"), ("teens", "fifties", ""), ("female", "male")


def sound(path: Path, seconds: float = 0.8, rate: int = 16000, seed: int = 0) -> str:
    """A noisy tone in a file; its path."""
    drawn = np.random.default_rng(seed)
    time = np.arange(int(seconds * rate)) / rate
    tone = 0.3 * np.sin(2 * np.pi * drawn.uniform(150, 800) * time) + 0.02 * drawn.standard_normal(len(time))
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, tone.astype(np.float32), rate)
    return str(path)


def scored(count: int = 60, seed: int = 0, wrong: float = 0.2,
           wav: str = "/data/cv/en/nowhere.wav") -> list[ScoredUtterance]:
    """Utterances of which a share of the words is wrong."""
    rng = random.Random(seed)
    found = []
    for i in range(count):
        reference = rng.choices(WORDS, k=rng.randint(3, 9))
        hypothesis = [word if rng.random() > wrong else rng.choice(["", word[:-1] or "a", f"{word} uh"])
                      for word in reference]
        meta = {"accent": rng.choice(ACCENTS), "age": rng.choice(AGES), "gender": rng.choice(GENDERS)}
        found.append(ScoredUtterance(f"clip{i:03d}", " ".join(reference), " ".join(" ".join(hypothesis).split()),
                           round(rng.uniform(0.7, 1.0), 4), round(rng.uniform(0.5, 12.0), 3), wav,
                           speaker=f"speaker{i % 12}", meta={name: value for name, value in meta.items() if value}))
    return found


def finished_run(folder: Path, rows: list[ScoredUtterance] | None, epochs: int = 6, steps: int = 20) -> Path:
    """A run's folder with all that the report reads, and no model."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [{"time": 1.7e9, "kind": "run", "command": "torchrun train.py hparams/ctc.yaml --lr 1e-3 <&>",
              "devices": 2, "parameters": 1234567, "environment": {"torch": "2.11.0", "cpu": "a processor"}}]
    for epoch in range(1, epochs + 1):
        for step in range(2, steps + 1, 2):
            at = (epoch - 1) * steps + step
            lines.append({"time": 1.7e9 + at, "kind": "step", "epoch": epoch, "step": at, "loss": 60 / (at + 10),
                          "lr": 1e-3 / epoch, "grad_norm": 1.0, "audio_s_per_s": 800.0 + at})
        end = {"time": 1.7e9 + at, "kind": "epoch", "epoch": epoch, "step": at}
        lines.append({**end, "train_loss": 60 / at, "train_seconds": 12.5, "skipped_steps": 0,
                      "audio_s_per_s": 812.0, "padding_share": 0.04, "mfu": 0.371,
                      "time_shares": {"data": 0.02, "forward": 0.4, "backward": 0.5, "other": 0.08}})
        lines.append({**end, "valid_loss": 66 / at, "valid_WER": 400 / (at + 10), "valid_CER": 90 / (at + 10)})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "hyperparams.yaml").write_text("# a recipe\nlr: 0.001  # <b>not bold</b>\n")
    split = {"rows": 100, "kept": 90, "hours": 1.5, "outside_alphabet": {"<": 3}, "left_out": {
        "too long": {"count": 7, "hours": 0.1, "examples": ["clip<7>"]},
        "alphabet": {"count": 3, "hours": 0.0, "examples": ["clip8: é"]}}}
    (folder / "manifests").mkdir(exist_ok=True)
    (folder / "manifests" / "prepare_report.json").write_text(json.dumps({
        "source": {"kind": "Common Voice", "where": "/data/cv/en", "folders": ["/data/cv/en", str(folder.parent)]},
        "options": {"max_duration": 20.0},
        "splits": {"train": split}}))
    if rows is not None:
        utterances.write(folder / "test_utterances.jsonl", rows)
        manifest(folder, *(one.wav for one in rows))
    return folder


def log(run: Path, *lines: Mapping[str, object]) -> None:
    """Append lines to the metrics of a run."""
    with open(run / "metrics.jsonl", "a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def manifest(folder: Path, *wavs: str) -> None:
    """A run's manifest of its test set."""
    rows = [f"row{i},0.8,{wav},,a text" for i, wav in enumerate(wavs)]
    (folder / "manifests" / "test.csv").write_text("\n".join(["ID,duration,wav,spk_id,wrd", *rows]) + "\n")


def corpus(folder: Path, longer: float = 1.0, **splits: int) -> Path:
    """SpeechBrain CSVs, each with so many utterances of noise.

    longer : 3 and more gives each as many frames as CTC needs for its text
    """
    for split, count in splits.items():
        rng = random.Random(split)
        lines = ["ID,duration,wav,spk_id,wrd,accent"]
        for i in range(count):
            seconds = round(longer * rng.uniform(0.6, 1.2), 2)
            wav = sound(folder / "wavs" / f"{split}{i}.wav", seconds, seed=i)
            text = " ".join(rng.choices(WORDS, k=rng.randint(3, 5)))
            lines.append(f"{split}{i},{seconds},{wav},speaker{i % 3},{text},{ACCENTS[i % 2]}")
        (folder / f"{split}.csv").write_text("\n".join(lines) + "\n")
    return folder


TINY = {
    "d_model": 16, "nhead": 2, "num_encoder_layers": 1, "num_decoder_layers": 1, "d_ffn": 16, "cnn_first_channels": 4,
    "cnn_channels": 4, "num_workers": 0, "min_steps": 0,
}


def prepared(path: Path, given: Mapping[str, object]) -> tuple[Recipe, dict[str, object]]:
    """A recipe whose corpus was prepared, read again as other ranks of a run do it, and all that it is given."""
    made = load.open_recipe(path, given)
    follows = made.task.prepare(made.keys, made.keys.corpus.prepare(show_progress=False), given)
    given = {**given, **{key: value for key, value in follows.items() if key in made.hparams}}
    made = load.open_recipe(path, given)
    made.task.tokenizer(made.keys)
    return made, given


def run_with_model(folder: Path, data: Path, rates: tuple[float, ...] = (70.0, 40.0, 55.0), recipe: Path = RECIPE,
                   tiny: Mapping[str, object] = TINY, **keys: object) -> Path:
    """A run as training leaves it: recipe (with other values of some keys), tokenizer, manifests, and a checkpoint
    for each rate."""
    made, given = prepared(recipe, {**tiny, **keys, "output_folder": str(folder), "data_folder": str(data)})
    (folder / "hyperparams.yaml").write_text(load.merged(recipe, given))
    brain = made.brain({"device": "cpu"})
    brain.init_optimizers()
    for saved in brain.checkpointer.recoverables.values():
        if isinstance(saved, Adapted):
            saved.start_afresh()
    for epoch, rate in enumerate(rates, 1):
        for parameter in brain.modules.parameters():
            if parameter.requires_grad:
                parameter.data.add_(0.01 * epoch)
        brain.checkpointer.save_checkpoint(meta={"WER": rate, "epoch": epoch}, name=f"epoch{epoch}")
    brain.checkpointer.save_checkpoint(end_of_epoch=False, name="within")
    brain.checkpointer.wait()
    return folder
