"""Small runs to start from, and models that start from them."""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import torch
from run_folders import RECIPE, TINY, prepared, sound

from sbkit.runs import initial, pretrained

SPANISH = "el niño camina por la calle mientras su hermana juega con el perro pequeño bajo la lluvia".split()


def spanish(folder: Path, **splits: int) -> Path:
    """CSVs of noise with texts of another alphabet."""
    for split, count in splits.items():
        rng = random.Random(split)
        lines = ["ID,duration,wav,spk_id,wrd"]
        for i in range(count):
            wav = sound(folder / "wavs" / f"{split}{i}.wav", 0.9, seed=i)
            lines.append(f"{split}{i},0.9,{wav},speaker,{' '.join(rng.choices(SPANISH, k=3))}")
        (folder / f"{split}.csv").write_text("\n".join(lines) + "\n")
    return folder


SOURCE = ("init_from", "init_checkpoint", "init_average", "init_leave")


@cache
def _flagship(data: Path):
    """A Brain on this corpus, its weights, and what its recipe says of a source."""
    brain = target(data.with_name(f"{data.name}-target"), data, **{"lr": 0.003})
    return brain, state(brain), {name: getattr(brain.keys, name) for name in SOURCE}


def target(folder: Path, data: Path, recipe: Path = RECIPE, tiny: Mapping[str, object] = TINY, **keys):
    """The Brain of a run that has only been prepared; one for all of the flagship whose source alone is given."""
    if recipe == RECIPE and tiny is TINY and keys.keys() <= set(SOURCE):
        brain, weights, asked = _flagship(data)
        brain.modules.load_state_dict(weights)
        vars(brain.keys).update({**asked, **keys})
        return brain
    made, _ = prepared(recipe, {**tiny, **keys, "output_folder": str(folder), "data_folder": str(data)})
    return made.brain({"device": "cpu", "noprogressbar": True})


def state(brain) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in brain.modules.state_dict().items()}


def started(folder: Path, data: Path, caplog, *recipe, **keys):
    """The Brain of a run that has begun, its weights before it took those of its source, and the table of these."""
    brain = target(folder, data, *recipe, **keys)
    pretrained.load(brain.keys.pretrainer)
    before = state(brain)
    with caplog.at_level("INFO", "sbkit.runs.initial"):
        initial.load(brain)
    tables = [each.getMessage() for each in caplog.records if "Starting from" in each.getMessage()]
    return brain, before, tables[-1] if tables else ""


def lines_of(table: str) -> list[str]:
    """With single spaces."""
    return [" ".join(line.split()) for line in table.splitlines()]
