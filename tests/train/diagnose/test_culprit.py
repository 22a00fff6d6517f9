"""A step that is not finite: the report names utterance, layer and value, and a replay shows the same."""

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
from speechbrain.dataio.batch import PaddedBatch
from torch import nn

import sbkit
from sbkit.errors import SbkitError
from sbkit.train import rng
from sbkit.train.batches import tensors_in, utterance_ids
from sbkit.train.diagnose.culprit import find_culprit, load_batches, replay, report
from sbkit.train.diagnose.inspection import KeptBatch, examine, measure
from sbkit.train.distributed import ranks
from sbkit.train.step import Loss


@dataclasses.dataclass
class Clips:
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


def told(recipe: Recipe, batch, folder, **kwargs) -> str:
    return report(recipe, folder, [KeptBatch(batch, rng.capture())], step=12, epoch=3, **kwargs)


class Half(nn.Module):
    def forward(self, x):
        return x.half() * 4


def without_frames(recipe, batch):
    batch.token_lengths[1] = 30  # of 20 frames


def with_nan(recipe, batch):
    batch.signals[2, 7] = math.nan


def silent(recipe, batch):
    batch.signals[0] = 0


def broken(recipe, batch):
    recipe.modules.model[0].ff.bias[3] = math.inf


def in_half(recipe, batch):
    recipe.modules.model.insert(2, Half())  # the layer after it won't take fp16, and ends the run
    recipe.modules.model[0].ff.weight.fill_(4e4)


CASES = {
    "too few frames for CTC": ("", without_frames, "loss", [
        "Step 12 of epoch 3: the loss is not finite; the step was skipped.",
        "every layer's output is finite, but the loss is inf", "affected utterances: clip-1\n",
        "utterances of the batch: clip-0, clip-1, clip-2", "too few frames for the labels"]),
    "a recording with nan": ("", with_nan, "loss", [
        "the batch itself is damaged: 'signals' holds values that are not finite", "affected utterances: clip-2\n",
        "first layer whose output is not finite is front (Linear, call 1): 8 nan of 480 values"]),
    "a layer that overflows": ("layer", None, "loss", [
        "is model.0.norm (BatchNorm1d, call 1)",  # the inner layer, not the one that holds it
        "activations have grown to", "e+38"]),
    "an operation between layers": ("between", silent, "loss", [
        "its input is not finite either, although the output of front is", "an operation outside of layers"]),
    "a gradient without a slope": ("gradient", None, "gradient", [
        "the gradient is not finite", "the output of model.2 goes into a square root",
        "but the gradients of 8 parameters are not finite (front.weight, front.bias, "]),
    "weights that are already broken": ("", broken, "loss", [
        "parameters are already not finite (model.0.ff.bias)"]),
    "fp16": ("", in_half, "loss", [
        "is model.2 (Half, call 1)", "float16, from an input float32 of at most", "fp16 overflow",
        "use --precision bf16"]),
}


def test_one_utterance_does_not_spoil_the_statistics_of_the_others(tmp_path):
    class Normalised(Recipe):
        """A running mean that an utterance without labels makes infinite."""

        def __init__(self):
            super().__init__()
            self.modules["norm"] = nn.BatchNorm1d(1, affine=False)

        def compute_objectives(self, predictions, batch, stage):
            self.modules.norm.running_mean += torch.where((batch.token_lengths == 0).any(), math.inf, 0.0)
            return Loss(predictions.sum() * 0 + self.modules.norm.running_mean.sum(), 1)

    batch = clips()
    batch.token_lengths[0] = 0
    assert "affected utterances: clip-0\n" in told(Normalised(), batch, tmp_path)


@pytest.mark.parametrize("breaks, spoil, what, parts", CASES.values(), ids=CASES)
def test_what_a_report_says(tmp_path, breaks, spoil, what, parts):
    recipe, batch = Recipe(breaks), clips()
    with torch.no_grad():
        if spoil is not None:
            spoil(recipe, batch)
    text = told(recipe, batch, tmp_path, what=what)
    for part in [*parts, f"sbkit replay {tmp_path}/culprits/step-12-rank-0"]:
        assert part in text


def test_a_failure_that_cannot_be_reproduced_is_reported_and_saved(tmp_path):
    text = told(Recipe(), clips(), tmp_path)
    assert "run again, everything was finite (loss " in text and "could not be reproduced" in text
    assert find_culprit(tmp_path).name == "step-12-rank-0"


def test_a_batch_that_raises_is_a_finding(tmp_path):
    batch = clips()
    batch.signals = batch.signals[:, :3]
    text = told(Recipe(), batch, tmp_path)
    assert "running the batch again ended with RuntimeError" in text and "affected utterances" not in text
    assert "ended with RuntimeError" in replay(Recipe(), tmp_path)


def test_nothing_is_changed_by_the_report(tmp_path):
    recipe, batch = Recipe("gradient"), clips()
    recipe.modules.front.weight.grad = torch.ones_like(recipe.modules.front.weight)
    before = {name: value.clone() for name, value in recipe.modules.state_dict().items()}
    generators = rng.capture()
    told(recipe, batch, tmp_path)
    assert all(torch.equal(value, before[name]) for name, value in recipe.modules.state_dict().items())
    assert recipe.modules.front.weight.grad.eq(1).all() and recipe.modules.front.bias.grad is None
    assert all(torch.equal(value, generators[name]) for name, value in rng.capture().items())
    assert all(not module._forward_hooks for module in recipe.modules.modules())


def test_a_replay_shows_the_same_layer_by_layer(tmp_path):
    batch = clips()
    batch.token_lengths[1] = 30
    recipe = Recipe("layer", seed=7)
    state = rng.capture()
    report(recipe, tmp_path, [KeptBatch(batch, state)], step=5)
    torch.manual_seed(99)
    other = Recipe("layer", seed=8)  # other weights: those of the step are in the folder
    text = replay(other, tmp_path)
    assert "Weights: those of that step." in text
    for name, value in other.modules.named_parameters():
        assert torch.equal(value, recipe.modules.get_parameter(name))
    table = [line for line in text.splitlines() if "Linear" in line or "Norm" in line or "Dropout" in line]
    assert [line.split()[:2] for line in table[:2]] == [["front", "Linear"], [">", "model.0.norm"]]
    assert "3x8x20" in text and "clip-1" in text
    assert "first layer whose output is not finite is model.0.norm" in text


def test_a_replay_repeats_the_dropout(tmp_path):
    recipe, batch = Recipe(), clips()
    kept = KeptBatch(batch, rng.capture())
    told_loss = examine(recipe, kept, step=5).loss
    report(recipe, tmp_path, [kept], step=5)
    torch.manual_seed(3)
    assert f"(loss {told_loss:.4g})" in replay(Recipe(), tmp_path)


def test_a_report_and_a_replay_are_of_the_step_that_failed(tmp_path):
    """On which what a forward computes may depend, and which is over."""
    class Stepwise(Recipe):
        def compute_forward(self, batch, stage):
            self.seen = self.optimizer_step
            return super().compute_forward(batch, stage)

    recipe, again = Stepwise("layer"), Stepwise("layer")
    told(recipe, clips(), tmp_path)
    replay(again, tmp_path)
    assert recipe.seen == again.seen == 12 - 1
    assert recipe.optimizer_step == again.optimizer_step == 1000


def test_the_weights_of_a_step_after_others_that_were_skipped_are_those_of_the_first(tmp_path):
    recipe = Recipe("layer", seed=7)
    for step in (5, 6, 7, 9):
        report(recipe, tmp_path, [KeptBatch(clips())], step=step)
    other = Recipe("layer", seed=8)
    assert "Weights: those of that step." in replay(other, tmp_path / "culprits" / "step-7-rank-0")
    assert torch.equal(other.modules.front.weight, recipe.modules.front.weight)
    assert "Weights: the checkpoint's, not those of that step." in replay(Recipe(seed=8), tmp_path), "8 was taken"


def test_a_replay_with_another_model_is_refused(tmp_path):
    report(Recipe(), tmp_path, [KeptBatch(clips())], step=5)
    other = Recipe()
    other.modules["extra"] = nn.Linear(2, 2)
    with pytest.raises(SbkitError, match=r"another model: extra\.bias, extra\.weight differ"):
        replay(other, tmp_path)


def test_a_run_without_culprits_and_a_damaged_one(tmp_path):
    with pytest.raises(SbkitError, match="holds no culprit"):
        find_culprit(tmp_path)
    with pytest.raises(SbkitError, match="nowhere does not exist; name the output_folder of a run"):
        find_culprit(tmp_path / "nowhere")
    report(Recipe(), tmp_path, [KeptBatch(clips())], step=5)
    (tmp_path / "culprits/step-5-rank-0/culprit.json").write_text("{", encoding="utf-8")
    with pytest.raises(SbkitError, match="is damaged"):
        replay(Recipe(), tmp_path)


def test_the_number_of_culprits_is_limited_and_the_newest_is_found(tmp_path):
    for step in range(1, 5):
        text = report(Recipe("layer"), tmp_path, [KeptBatch(clips())], step=step, limit=3)
    assert sorted(path.name for path in (tmp_path / "culprits").iterdir()) == [
        "step-1-rank-0", "step-2-rank-0", "step-3-rank-0"]
    assert "already has reports of 3 such steps" in text
    assert find_culprit(tmp_path).name == "step-3-rank-0"
    assert find_culprit(tmp_path / "culprits").name == "step-3-rank-0"
    kept = [path.parent.name for path in tmp_path.glob("culprits/*/model.safetensors")]
    assert kept == ["step-1-rank-0"], "weights are large: once per run"


def test_the_folder_is_json_for_readers_and_batches_for_a_replay(tmp_path):
    batch = clips()
    batch.signals[0, 0] = math.inf
    told(Recipe(), batch, tmp_path, lr=torch.tensor(0.25))
    folder = tmp_path / "culprits/step-12-rank-0"
    assert sorted(path.name for path in folder.iterdir()) == ["batches.pt", "culprit.json", "model.safetensors"]
    content = json.loads((folder / "culprit.json").read_text(), parse_constant=pytest.fail)
    assert content["accounts"][0]["bad_ids"] == ["clip-0"] and content["lr"] == 0.25


def test_a_disk_that_cannot_be_written_costs_the_report_not_the_run(tmp_path, caplog):
    (tmp_path / "culprits").write_text("a file where the folder should be", encoding="utf-8")
    assert "first layer" in told(Recipe("layer"), clips(), tmp_path)
    assert "could not be written" in caplog.text


def test_a_placeholder_batch_is_never_a_culprit(tmp_path):
    good, stand_in = clips(), dataclasses.replace(clips(), weight=0.0)
    stand_in.signals = stand_in.signals * math.nan
    good.token_lengths[0] = 30
    text = report(Recipe(), tmp_path, [KeptBatch(good), KeptBatch(stand_in)], step=1)
    assert "micro-batch 0" in text and "micro-batch 1" not in text


# ------------------------------------------------------------------ the pieces


def test_measure_tells_nan_inf_and_rows():
    values = measure(torch.tensor([[1.0, math.nan], [-5.0, 2.0], [math.inf, -math.inf]]))
    assert (values.nan, values.inf, values.minus_inf, values.rows) == (1, 1, 1, [0, 2])
    assert (values.low, values.high) == (-5, 2)
    assert measure(torch.tensor([True, False])).high == 1
    assert measure(torch.zeros(0)).low is None
    assert measure(torch.full((2,), math.nan)).low is None


class Bare(Recipe):
    """The sum of the layers' result is the loss."""

    def compute_objectives(self, predictions, batch, stage):
        return predictions.sum()


def test_a_mask_of_minus_infinity_is_no_culprit():
    class Mask(nn.Module):
        def forward(self, x):
            return torch.zeros_like(x).masked_fill(x > 0, -math.inf)

    class Masked(Bare):
        def compute_forward(self, batch, stage):
            self.modules.mask(batch)
            return (self.modules.bad(batch) / 0.0).sum() * 0

    recipe = Masked(mask=Mask(), bad=nn.Linear(3, 3))
    kept = KeptBatch(torch.ones(2, 3))
    found = examine(recipe, kept, step=1)
    assert found.what == "loss" and found.layers[found.first].name == "mask"  # nothing else explains it
    with torch.no_grad():
        recipe.modules.bad.bias[0] = math.nan
    found = examine(recipe, kept, step=1)
    assert found.layers[found.first].name == "bad"


def test_checkpointed_layers_are_seen_once():
    class Checkpointed(Bare):
        def compute_forward(self, batch, stage):
            return torch.utils.checkpoint.checkpoint(self.modules.layer, batch, use_reentrant=False)

    found = examine(Checkpointed(layer=nn.Linear(3, 3)), KeptBatch(torch.ones(2, 3)), step=1)
    assert [one.name for one in found.layers] == ["layer"] and found.what == "nothing" and not found.error


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
    told(Recipe(), batch, tmp_path)
    [saved] = load_batches(tmp_path / "culprits/step-12-rank-0/batches.pt", "cpu")
    again = saved["batch"]
    assert type(again) is type(batch) and utterance_ids(again) == utterance_ids(batch)
    for (name, one), (of, other) in zip(tensors_in(again), tensors_in(batch), strict=True):
        assert name == of and torch.equal(one, other)
    if isinstance(batch, PaddedBatch):
        assert torch.equal(again.to("cpu").sig.lengths, batch.sig.lengths) and len(again) == 2


def test_what_cannot_be_saved_costs_the_replay_and_not_the_run(tmp_path, caplog):
    told(Recipe("layer"), PaddedBatch([{"id": "a", "file": open(os.devnull)}]), tmp_path)  # noqa: SIM115
    assert "The culprit of step 12 is not saved: " in caplog.text and "TextIOWrapper" in caplog.text
    assert not list((tmp_path / "culprits").iterdir())


class Thief:
    def __reduce__(self):
        return os.mkdir, (str(Thief.folder),)


def test_a_file_that_would_make_a_process_is_refused(tmp_path):
    """A class that is loaded, and makes what it says when it is called."""
    torch.save([1], whole := tmp_path / "whole.pt")
    words = b"".join(b"X" + struct.pack("<i", len(word)) + word for word in (b"touch", str(tmp_path / "made").encode()))
    process = b"csubprocess\nPopen\n]q\x00(" + words + b"e\x85R."
    for calls, said in ((process, "holds a subprocess.Popen, which is not a batch class"),
                        (b"csbkit.none\nX\n.", "can't be read: No module named"), (b".", "can't be read: "),
                        (b"h\x05.", "can't be read: ")):
        with zipfile.ZipFile(whole) as parts, zipfile.ZipFile(tmp_path / "batches.pt", "w") as made:
            for name in parts.namelist():
                made.writestr(name, b"\x80\x02" + calls if name.endswith("data.pkl") else parts.read(name))
        with pytest.raises(SbkitError, match=re.escape(said)):
            load_batches(tmp_path / "batches.pt", "cpu")
    (tmp_path / "batches.pt").write_text("garbage")
    with pytest.raises(SbkitError, match=r"batches\.pt can't be read: "):
        load_batches(tmp_path / "batches.pt", "cpu")


def test_a_file_that_would_run_something_is_refused(tmp_path, monkeypatch):
    recipe, folder = Recipe("layer"), tmp_path / "culprits/step-12-rank-0"
    told(recipe, clips(), tmp_path)
    Thief.folder = tmp_path / "taken"
    torch.save([Thief()], folder / "batches.pt")
    with pytest.raises(SbkitError, match=r"posix\.mkdir, which is not a batch class"):
        replay(recipe, folder)
    torch.save(clips(), folder / "batches.pt")
    monkeypatch.delitem(sys.modules, clips.__module__)
    with pytest.raises(SbkitError, match=f"a Clips of {clips.__module__}, which is not imported"):
        replay(recipe, folder)
    (folder / "batches.pt").unlink()
    with pytest.raises(SbkitError, match=r"batches.pt can't be read: .*was it written by this sbkit"):
        replay(recipe, folder)
    assert not Thief.folder.exists()


def report_of_two(folder):
    """A rank's report of two micro-batches, of which rank 1's second has more letters than frames."""
    ranks.init(torch.device("cpu"))
    batches = [clips(), clips()]
    if ranks.rank() == 1:
        batches[1].token_lengths[2] = 30  # of 20 frames
    return report(Recipe(), folder, [KeptBatch(batch, rng.capture()) for batch in batches], step=3)


@pytest.mark.slow
def test_every_rank_gets_the_report_of_the_rank_that_failed(tmp_path):
    for text in processes.results(report_of_two, str(tmp_path / "run")):
        assert "rank 1, micro-batch 1" in text and "rank 0" not in text.replace("step-3-rank-0", ""), text
        assert "affected utterances: clip-2" in text
    assert [path.name for path in (tmp_path / "run/culprits").iterdir()] == ["step-3-rank-1"]
    assert (tmp_path / "run/culprits/step-3-rank-1/model.safetensors").exists()
