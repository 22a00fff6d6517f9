"""A step that is not finite: the report names the first bad layer and the utterances; a replay shows all layers."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import struct
import sys
import zipfile
from typing import NamedTuple

import processes
import pytest
import torch
from refusals import refused
from speechbrain.dataio.batch import PaddedBatch
from torch import nn

import sbkit
from sbkit.data.batch import PlannedBatch
from sbkit.train import rng
from sbkit.train.bad_batch import replay
from sbkit.train.bad_batch.examine import examine, measure
from sbkit.train.bad_batch.files import find_saved, load_batches
from sbkit.train.bad_batch.report import LIMIT, report
from sbkit.train.batches import KeptBatch, tensors_in, utterance_ids
from sbkit.train.distributed import ranks
from sbkit.train.keys import TrainKeys
from sbkit.train.loss import Loss
from sbkit.train.results import StepResult


@dataclasses.dataclass
class Clips(PlannedBatch):
    """A batch as sbkit.data makes them, small."""

    ids: list[str]
    signals: torch.Tensor
    tokens: torch.Tensor
    token_lengths: torch.Tensor
    texts: list[str]
    weight: float = 1.0


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.ff = nn.Linear(8, 8)

    def forward(self, x):
        return self.ff(self.norm(x.transpose(1, 2)).transpose(1, 2))


class Recipe(sbkit.Brain):
    """``breaks`` says how its forward goes wrong."""

    def __init__(self, breaks: str = "", seed: int = 0, **layers):
        torch.manual_seed(seed)
        super().__init__(layers or {
            "front": nn.Linear(16, 8), "model": nn.ModuleList([Model(), nn.Dropout(0.5), nn.Linear(8, 6)])},
            run_opts={"device": "cpu"})
        self.breaks, self.optimizer_step = breaks, 1000

    def compute_forward(self, batch, stage):
        x = self.modules.front(batch.signals.unfold(1, 16, 16))
        if self.breaks == "between":
            x = x / (batch.signals.abs().sum(1) > 0)[:, None, None]
        if self.breaks == "layer":
            x = x * 1e38
        x = self.modules.model[0](x)
        for layer in self.modules.model[1:]:
            x = layer(x)
        return x

    def compute_objectives(self, predictions, batch, stage):
        frames = torch.full((len(predictions),), predictions.shape[1])
        losses = torch.nn.functional.ctc_loss(
            predictions.log_softmax(-1).transpose(0, 1), batch.tokens, frames, batch.token_lengths,
            reduction="none")
        if self.breaks == "gradient":
            losses = losses + (predictions * 0).sum().sqrt()
        return Loss(losses.sum(), len(losses))


def clips() -> Clips:
    torch.manual_seed(1)
    return Clips(["clip-0", "clip-1", "clip-2"], torch.randn(3, 320), torch.randint(1, 6, (3, 30)),
                 torch.tensor([5, 9, 3]), ["a", "b", "c"])


def told(recipe: Recipe, *batches, folder, step: int = 12, total: float = math.nan, late: int = 0) -> str:
    """The report of a step whose generators are as they are now."""
    kept = [KeptBatch(batch, rng.capture()) for batch in batches]
    return report(recipe, folder, StepResult(total, 3, 1.0, True, 1.0, 1.0, {}, kept, number=step, late=late), epoch=3)


class Half(nn.Module):
    def forward(self, x):
        return x.half() * 4


def without_frames(recipe, batch):
    batch.token_lengths[1] = 30  # of 20 frames


def with_nan(recipe, batch):
    batch.signals[2, 7] = math.nan


def silent(recipe, batch):
    batch.signals[0] = 0


def in_half(recipe, batch):
    recipe.modules.model.insert(2, Half())  # the layer after it won't take fp16, and ends the run
    recipe.modules.model[0].ff.weight.fill_(4e4)


def too_short(recipe, batch):
    batch.signals = batch.signals[:, :3]


ALL = "utterances of the batch: clip-0, clip-1, clip-2\n"
#: What breaks, what a report says of it, and rows of the replay's tables.
CASES = {
    "too few frames for CTC": ("", without_frames, math.inf, [
        "Step 12 of epoch 3: the loss is not finite; the step was skipped.\n",
        "every layer's output is finite, but the loss is inf", ALL], ["  clip-0 ", "> clip-1 inf", "  clip-2 "]),
    "a recording with nan": ("", with_nan, math.nan, [
        "the first that is not finite is signals (batch): 1 nan of 960 values, float32",
        "affected utterances: clip-2\n"], ["> signals batch", "> clip-2 nan"]),
    "a layer that overflows": ("layer", None, math.nan, [
        "the first that is not finite is model.0.norm (BatchNorm1d): "],  # the inner layer, not the one that holds it
        ["  front Linear float32 3x20x8 ", "> model.0.norm BatchNorm1d float32 3x8x20 ", "> model.0 Model "]),
    "an operation between layers": ("between", silent, math.nan, [
        "is input of model.0.norm (BatchNorm1d): ", "affected utterances: clip-0\n"], ["  front ", "> clip-0 nan"]),
    "a gradient without a slope": ("gradient", None, 8.0, [
        "the gradient is not finite", "but in backward the gradient of the output of model.2 is not finite", ALL],
        ["> clip-0 ", "  model.2 Linear"]),
    "fp16": ("", in_half, math.nan, [
        "is model.2 (Half): ", ", float16\n"],
        ["> model.2 Half float16"]),
    "a batch that raises": ("", too_short, math.nan, ["running the batch again ended with RuntimeError", ALL],
                            ["> clip-0 RuntimeError: "]),
    "nothing, when run again": ("", None, math.nan, ["when run again, everything was finite (loss ", ALL],
                                ["  model.2 Linear float32 3x20x6"]),
}


@pytest.mark.parametrize("breaks, spoil, total, parts, rows", CASES.values(), ids=CASES)
def test_what_a_report_says_and_a_replay_shows(tmp_path, breaks, spoil, total, parts, rows):
    recipe, batch = Recipe(breaks), clips()
    with torch.no_grad():
        if spoil is not None:
            spoil(recipe, batch)
    text = told(recipe, batch, folder=tmp_path, total=total)
    for part in [*parts, f"bad_batch.replay(brain, '{tmp_path}/bad_batches/step-12-rank-0') in your script"]:
        assert part in text
    torch.manual_seed(99)
    again = replay(recipe, tmp_path)
    assert re.search(r"rank 0, micro-batch 0: (.*)", text)[1] in again, "the same loss, so the same dropout"
    shown = [line[:2] + " ".join(line[2:].split()) for line in again.splitlines()]
    for row in rows:
        assert any(line.startswith(row.rstrip()) for line in shown), (row, again)


def test_nothing_is_changed_by_the_report(tmp_path):
    recipe, batch = Recipe("gradient"), clips()
    recipe.hparams.beside = recipe.modules.pop("front")  # a layer that is not the Brain's
    recipe.modules["front"] = nn.Sequential(recipe.hparams.beside, nn.Identity())
    recipe.modules.front[0].weight.grad = torch.ones_like(recipe.modules.front[0].weight)
    before = {name: value.clone() for name, value in recipe.modules.state_dict().items()}
    generators = rng.capture()
    told(recipe, batch, folder=tmp_path)
    assert all(torch.equal(value, before[name]) for name, value in recipe.modules.state_dict().items())
    assert recipe.modules.front[0].weight.grad.eq(1).all() and recipe.modules.front[0].bias.grad is None
    assert all(torch.equal(value, generators[name]) for name, value in rng.capture().items())
    assert all(not module._forward_hooks for module in recipe.modules.modules())


def test_one_utterance_does_not_spoil_the_statistics_of_the_others(tmp_path):
    class Normalised(Recipe):
        """A running mean, of a layer beside the Brain's, that an utterance without labels makes infinite."""

        def compute_objectives(self, predictions, batch, stage):
            self.hparams.norm.running_mean += torch.where((batch.token_lengths == 0).any(), math.inf, 0.0)
            return Loss(predictions.sum() * 0 + self.hparams.norm.running_mean.sum(), 1)

    recipe, batch = Normalised(), clips()
    recipe.hparams.norm = nn.BatchNorm1d(1, affine=False)
    batch.token_lengths[0] = 0
    told(recipe, batch, folder=tmp_path)
    assert recipe.hparams.norm.running_mean.isfinite().all()
    assert re.findall(r"clip-\d +\S+", replay(recipe, tmp_path)) == [
        "clip-0     inf", "clip-1     0", "clip-2     0"]


def test_a_report_and_a_replay_are_of_the_step_that_failed(tmp_path):
    """On which what a forward computes may depend, and which is over."""
    class Stepwise(Recipe):
        def compute_forward(self, batch, stage):
            self.seen = self.optimizer_step, self.written
            return super().compute_forward(batch, stage)

        def write_numbers(self, number):
            self.written = number

    recipe, again = Stepwise("layer"), Stepwise("layer")
    told(recipe, clips(), folder=tmp_path)
    replay(again, tmp_path)
    assert recipe.seen == again.seen == (12 - 1, 12)
    assert recipe.optimizer_step == again.optimizer_step == 1000 and recipe.written == again.written == 1001


def test_a_replay_uses_the_weights_of_the_step_if_they_were_kept(tmp_path):
    """They are large, and kept once; steps that were skipped right after that one have the same."""
    recipe = Recipe("layer", seed=7)
    for step in (5, 6, 7, 9):
        told(recipe, clips(), folder=tmp_path, step=step)
    assert [path.parent.name for path in tmp_path.glob("bad_batches/*/model.safetensors")] == ["step-5-rank-0"]
    other = Recipe("layer", seed=8)
    assert "Weights: those of that step." in replay(other, tmp_path / "bad_batches" / "step-7-rank-0")
    for name, value in other.modules.named_parameters():
        assert torch.equal(value, recipe.modules.get_parameter(name))
    assert "Weights: the checkpoint's, not those of that step." in replay(Recipe(seed=8), tmp_path), "8 was taken"
    other.modules["extra"] = nn.Linear(2, 2)
    with refused("other-model"):
        replay(other, tmp_path / "bad_batches" / "step-5-rank-0")


def test_the_number_of_bad_batches_is_limited_and_the_newest_is_found(tmp_path):
    for step in range(1, LIMIT):
        (tmp_path / f"bad_batches/step-{step}-rank-0").mkdir(parents=True)
    told(Recipe("layer"), clips(), folder=tmp_path, step=50)
    text = told(Recipe("layer"), clips(), folder=tmp_path, step=51)
    assert f"already has reports of {LIMIT} such steps" in text
    assert len(list((tmp_path / "bad_batches").iterdir())) == LIMIT
    for given in (tmp_path, tmp_path / "bad_batches", tmp_path / "bad_batches/step-50-rank-0"):
        assert find_saved(given)[0].name == "step-50-rank-0"


def test_with_a_recipe_a_command_shows_more(tmp_path):
    recipe = Recipe("layer")
    recipe.keys = TrainKeys()  # as a task's, which has more
    assert told(recipe, clips(), folder=tmp_path).endswith(f"sbkit rerun {tmp_path}/bad_batches/step-12-rank-0")


def test_a_run_without_bad_batches_and_a_damaged_one(tmp_path):
    with refused("no-bad-batch", file=tmp_path):
        find_saved(tmp_path)
    with refused("no-such-path", file=tmp_path / "nowhere"):
        find_saved(tmp_path / "nowhere")
    told(Recipe(), clips(), folder=tmp_path, step=5)
    (tmp_path / "bad_batches/step-5-rank-0/bad_batch.json").write_text("{", encoding="utf-8")
    with refused("damaged-file"):
        replay(Recipe(), tmp_path)


def test_the_folder_is_json_for_readers_and_batches_for_a_replay(tmp_path):
    batch = clips()
    batch.signals[0, 0] = math.inf
    told(Recipe(), batch, folder=tmp_path)
    folder = tmp_path / "bad_batches/step-12-rank-0"
    assert sorted(path.name for path in folder.iterdir()) == ["bad_batch.json", "batches.pt", "model.safetensors"]
    content = json.loads((folder / "bad_batch.json").read_text(), parse_constant=pytest.fail)
    assert content["accounts"][0]["bad_ids"] == ["clip-0"] and content["step"] == 12


def test_a_folder_of_an_earlier_version_is_replayed(tmp_path):
    """Its batches are the same, its files have other names, and its JSON has fewer entries."""
    told(Recipe("layer"), clips(), folder=tmp_path)
    (tmp_path / "bad_batches").rename(tmp_path / "culprits")
    (tmp_path / "culprits/step-12-rank-0/bad_batch.json").unlink()
    saved = tmp_path / "culprits/step-12-rank-0/culprit.json"
    saved.write_text(json.dumps({"step": 12, "epoch": 3, "rank": 0, "what": "loss", "scale": 1.0, "lr": 0.25,
                                 "precision": "fp32", "device": "cpu", "accounts": []}), encoding="utf-8")
    assert "is model.0.norm (BatchNorm1d)" in replay(Recipe("layer"), tmp_path)


def test_a_dummy_batch_is_never_bad(tmp_path):
    good, stand_in = clips(), dataclasses.replace(clips(), weight=0.0)
    stand_in.signals = stand_in.signals * math.nan
    good.token_lengths[0] = 30
    text = told(Recipe(), good, stand_in, folder=tmp_path)
    assert "micro-batch 0" in text and "micro-batch 1" not in text


@pytest.mark.parametrize("batch, said", [
    (None, "could not be written|cannot write into"),  # a file where the folder should be
    (PaddedBatch([{"id": "a", "file": sys.stdout}]), "TextIO|EncodedFile|pickle"),
], ids=["a disk", "a batch that can't be pickled"])
def test_what_cannot_be_saved_costs_the_replay_and_not_the_run(tmp_path, caplog, batch, said):
    if batch is None:
        (tmp_path / "bad_batches").write_text("", encoding="utf-8")
    text = told(Recipe("layer"), batch or clips(), folder=tmp_path)
    assert "replay" not in text and "rerun" not in text
    assert re.search(f"The bad batch of step 12 is not saved: .*({said})", caplog.text)
    assert batch is None or not list((tmp_path / "bad_batches").iterdir())


# ------------------------------------------------------------------ the pieces


def test_measure_tells_nan_inf_and_rows():
    values = measure(torch.tensor([[1.0, math.nan], [-5.0, 2.0], [math.inf, -math.inf]]), "x", "batch")
    assert (values.nan, values.inf, values.minus_inf, values.rows) == (1, 1, 1, [0, 2])
    assert (values.low, values.high) == (-5, 2)
    assert measure(torch.tensor([True, False]), "x", "batch").high == 1
    assert measure(torch.zeros(0), "x", "batch").low is None
    assert measure(torch.full((2,), math.nan), "x", "batch").low is None


class Bare(Recipe):
    """The sum of the layers' result is the loss."""

    def compute_objectives(self, predictions, batch, stage):
        return predictions.sum()


def test_a_mask_of_minus_infinity_is_not_bad():
    class Mask(nn.Module):
        def forward(self, x):
            return torch.zeros_like(x).masked_fill(x > 0, -math.inf)

    class Masked(Bare):
        def compute_forward(self, batch, stage):
            self.modules.mask(batch)
            return (self.modules.bad(batch) / 0.0).sum() * 0

    recipe = Masked(mask=Mask(), bad=nn.Linear(3, 3))
    kept = KeptBatch(torch.ones(2, 3))
    assert "is mask (Mask): 6 -inf of 6" in examine(recipe, kept, step=1)[0].where  # nothing else explains it
    with torch.no_grad():
        recipe.modules.bad.bias[0] = math.nan
    assert "is bad (Linear): 2 nan of 6" in examine(recipe, kept, step=1)[0].where


def test_checkpointed_layers_are_seen_once():
    class Checkpointed(Bare):
        def compute_forward(self, batch, stage):
            return torch.utils.checkpoint.checkpoint(self.modules.layer, batch, use_reentrant=False)

    recipe = Checkpointed(layer=nn.Sequential(nn.Linear(3, 3), nn.Tanh()))
    finding, layers = examine(recipe, KeptBatch(torch.ones(2, 3)), step=1)
    assert [one.name for one in layers] == ["tensor", "layer.0", "layer.1", "layer"] and not finding.bad


class Pair(NamedTuple):
    left: torch.Tensor
    right: list


BATCHES = [
    clips(),
    (torch.randn(2, 3), torch.tensor([1, 2])),
    {"id": ["a"], "x": [torch.ones(2), None, 3.5, "text", True]},
    Pair(torch.ones(1), [1, 2]),
    PaddedBatch([{"id": "a", "sig": torch.ones(3), "n": 1}, {"id": "b", "sig": torch.ones(5), "n": 2}]),
]


@pytest.mark.parametrize("batch", BATCHES, ids=lambda batch: type(batch).__name__)
def test_batches_of_any_kind_are_read_back(batch, tmp_path):
    told(Recipe(), batch, folder=tmp_path)
    [saved] = load_batches(tmp_path / "bad_batches/step-12-rank-0/batches.pt", "cpu")
    again = saved["batch"]
    assert type(again) is type(batch) and utterance_ids(again) == utterance_ids(batch)
    for (name, one), (of, other) in zip(tensors_in(again), tensors_in(batch), strict=True):
        assert name == of and torch.equal(one, other)
    if isinstance(batch, PaddedBatch):
        assert torch.equal(again.to("cpu").sig.lengths, batch.sig.lengths) and len(again) == 2


class Thief:
    def __reduce__(self):
        return os.mkdir, (str(Thief.folder),)


def test_a_file_that_would_make_a_process_is_refused(tmp_path):
    """A class that is loaded, and makes what it says when it is called."""
    torch.save([1], whole := tmp_path / "whole.pt")
    words = b"".join(b"X" + struct.pack("<i", len(word)) + word for word in (b"touch", str(tmp_path / "made").encode()))
    process = b"csubprocess\nPopen\n]q\x00(" + words + b"e\x85R."
    for calls, code in ((process, "unsafe-file"), (b"csbkit.none\nX\n.", "damaged-file"), (b".", "damaged-file"),
                        (b"h\x05.", "damaged-file")):
        with zipfile.ZipFile(whole) as parts, zipfile.ZipFile(tmp_path / "batches.pt", "w") as made:
            for name in parts.namelist():
                made.writestr(name, b"\x80\x02" + calls if name.endswith("data.pkl") else parts.read(name))
        with refused(code, file=tmp_path / "batches.pt", wording=False):
            load_batches(tmp_path / "batches.pt", "cpu")
    (tmp_path / "batches.pt").write_text("garbage")
    with refused("damaged-file", wording=False):
        load_batches(tmp_path / "batches.pt", "cpu")


def test_a_file_that_would_run_something_is_refused(tmp_path, monkeypatch):
    recipe, folder = Recipe("layer"), tmp_path / "bad_batches/step-12-rank-0"
    told(recipe, clips(), folder=tmp_path)
    Thief.folder = tmp_path / "taken"
    torch.save([Thief()], folder / "batches.pt")
    with refused("unsafe-file", file=folder / "batches.pt"):
        replay(recipe, folder)
    torch.save(clips(), folder / "batches.pt")
    monkeypatch.delitem(sys.modules, clips.__module__)
    with refused("unsafe-file", file=folder / "batches.pt"):
        replay(recipe, folder)
    (folder / "batches.pt").unlink()
    with refused("damaged-file", file=folder / "batches.pt", wording=False):
        replay(recipe, folder)
    assert not Thief.folder.exists()


def report_of_two(folder):
    """A rank's report of two micro-batches, of which rank 1's second has more letters than frames."""
    ranks.init(torch.device("cpu"))
    batches = [clips(), clips()]
    if ranks.rank() == 1:
        batches[1].token_lengths[2] = 30  # of 20 frames
    return told(Recipe(), *batches, folder=folder, step=3)


@pytest.mark.slow
def test_every_rank_gets_the_report_of_the_rank_that_failed(tmp_path):
    for text in processes.results(report_of_two, str(tmp_path / "run")):
        assert "rank 1, micro-batch 1" in text and "rank 0" not in text.replace("step-3-rank-0", ""), text
        assert "every layer's output is finite, but the loss is inf" in text and "clip-2" in text
    assert [path.name for path in (tmp_path / "run/bad_batches").iterdir()] == ["step-3-rank-1"]
    assert (tmp_path / "run/bad_batches/step-3-rank-1/model.safetensors").exists()
