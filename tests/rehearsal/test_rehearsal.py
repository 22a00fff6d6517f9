"""A whole run on cards that compute nothing: the flagship passes, and faults that are planted in each stage are named."""

import json
import re
from pathlib import Path

import numpy as np
import processes
import pytest
import soundfile

ROOT = Path(__file__).parents[2]
WORDS = ("low", "high", "both")
#: Tasks with one fault each, on top of the word spotter of docs/extend.md.
FAULTS = '''
import torch
import sbkit
from spotter import Spotter, Model

TRAIN, VALID = sbkit.Stage.TRAIN, sbkit.Stage.VALID


class Lazy(Spotter):
    """Waits, leaks, asks one rank alone, and gives a graph that can't be traced."""

    kept = []

    def compute_objectives(self, scores, batch, stage):
        loss = super().compute_objectives(scores, batch, stage)
        if stage == TRAIN and torch.is_grad_enabled() and not torch._subclasses.fake_tensor.is_fake(loss.total):
            loss.total.item()  # waits
            self.kept.append(scores * 2)  # grows
            if torch.distributed.is_initialized() and torch.distributed.get_rank() == 0:
                torch.distributed.all_reduce(torch.ones(7, device=self.device))  # alone
        return loss

    def exported(self, run):
        found = super().exported(run)
        found.graph = Untraceable(found.graph)
        return found


class Graph(Spotter):
    def exported(self, run):
        found = super().exported(run)
        found.graph = Untraceable(found.graph)
        return found


class Untraceable(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, signals, lengths):
        return self.inner(signals, lengths) if signals.sum() < 1e9 else signals  # untraceable


class Left(Spotter):
    """Leaves a tensor on the CPU where only a validation needs it."""

    def compute_objectives(self, scores, batch, stage):
        if stage == VALID:
            scores = scores + torch.zeros(3)  # left
        return super().compute_objectives(scores, batch, stage)
'''


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with the word spotter, the tasks with faults, and recordings."""
    folder = tmp_path_factory.mktemp("mine")
    page = (ROOT / "docs" / "extend.md").read_text(encoding="utf-8")
    for name, text in re.findall(r"```(?:python|yaml)\n# (spotter\S+)\n(.*?)```", page, re.S):
        (folder / name).write_text(text)
    (folder / "faults.py").write_text(FAULTS)
    drawn = np.random.default_rng(0)
    for split, count in (("train", 60), ("dev", 15), ("test", 15)):
        lines = ["ID,duration,wav,wrd"]
        for i in range(count):
            path = folder / "data" / f"{split}{i}.wav"
            path.parent.mkdir(exist_ok=True)
            soundfile.write(path, 0.1 * drawn.standard_normal(8_000), 16_000)
            lines.append(f"{split}{i},0.5,{path},{WORDS[i % 3]}")
        (folder / "data" / f"{split}.csv").write_text("\n".join(lines) + "\n")
    return folder
