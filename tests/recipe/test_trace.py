"""The forward on fake tensors gives the shapes of the real one, and finds what a GPU would stumble over."""

import json
import os
from functools import partial

import pytest
import torch
import torchaudio
from torch import nn
from written import SMALL, Head, changed, write

from sbkit.recipe import trace
from sbkit.recipe.check import check
from sbkit.recipe.cost import USABLE, WORKSPACE, BatchCost, CostEstimate, states_per_parameter
from sbkit.recipe.load import load
from sbkit.tasks.ctc import CTC
from sbkit.tasks.recognise.acoustic_model import AcousticModel


class Uneasy(Head):
    """A head that fails on a GPU only: its scale is an attribute."""

    def __init__(self, input_size, n_neurons):
        super().__init__(input_size, n_neurons)
        self.scale = torch.ones(n_neurons)

    def forward(self, x):
        return super().forward(x) * self.scale


class Reading(Head):
    """A head that reads a value on the host."""

    def forward(self, x):
        return super().forward(x) if x.abs().max().item() > -1 else x


class Memory:
    """A head with a memory."""

    def __init__(self, input_size, n_neurons):
        super().__init__(input_size, n_neurons, batch_first=True)

    def forward(self, x):
        return super().forward(x)[0]


class Recurrent(Memory, nn.LSTM):
    """One whose weights cuDNN lays out on a GPU."""


class Gated(Memory, nn.GRU):
    """One that has no kernel for fake GPU tensors."""


class Waiting(Head):
    """A head that asks a GPU whether it is done."""

    def forward(self, x):
        if x.is_cuda:
            torch.cuda.synchronize()
        return super().forward(x)


class Transducing(CTC):
    """A task whose loss has no kernel for fake tensors."""

    def compute_objectives(self, predictions, batch, stage):
        lengths = torch.full((2,), 4, dtype=torch.int32)
        return torchaudio.functional.rnnt_loss(torch.zeros(2, 4, 3, 9), torch.ones(2, 2, dtype=torch.int32), lengths,
                                               lengths - 2)


class Mistaken(CTC):
    """A task whose loss is wrong."""

    def compute_objectives(self, predictions, batch, stage):
        raise RuntimeError("no such loss")


@pytest.fixture(scope="module")
def small():
    """The report of the small recipe."""
    return check(SMALL)


def head(tmp_path, name):
    """The small recipe with another CTC head."""
    linear = "ctc_lin: !new:speechbrain.nnet.linear.Linear"
    return changed(tmp_path, {linear: f"ctc_lin: !new:test_trace.{name}"})


@pytest.mark.slow
def test_shapes_are_those_of_a_real_batch(small, tmp_path):
    sections = json.loads(small.json())["sections"]
    assert list(sections) == ["devices", "shapes", "cost"]
    assert {"parameters", "batch_bytes", "largest_max_batch_seconds"} <= set(sections["cost"]["values"])
    found = sections["shapes"]["values"]
    hparams = load(SMALL, {"output_folder": str(tmp_path)})
    keys = CTC.Keys.read(hparams)
    model = AcousticModel.of(keys, keys.ctc_lin)
    feats, frames = model.features(torch.zeros(2, 48000), torch.tensor([48000, 48000]))
    tokens = torch.ones(2, 19, dtype=torch.long)
    encoded, frames, decoded = model.encode_and_decode(feats, frames, tokens)
    assert found["compute_features"] == list(feats.shape) and found["Transformer"] == list(encoded.shape)
    assert found["seq_lin"] == [*decoded.shape[:2], 20] and found["ctc_lin"] == [*encoded.shape[:2], 20]
    assert found["subsampling"] == 2 and found["frames_per_second"] == 50


@pytest.mark.long
@pytest.mark.slow
def test_an_lstm_is_no_mistake_on_a_machine_without_a_driver(tmp_path):
    short = {"batching": {"max_batch_seconds": 1}}  # each frame is a step of its own
    report = check(head(tmp_path, "Recurrent"), {"output_folder": str(tmp_path), **short})
    assert [str(error) for error in report.errors] == []
    known = "an LSTM or GRU needs less memory than is counted here: what cuDNN saves of it is unknown"
    assert report.sections["cost"].values["inexact"] == [known] and known in report.sections["cost"].remarks


@pytest.mark.slow
@pytest.mark.skipif("torch.cuda.is_available()", reason="it can be tried with a driver")
@pytest.mark.parametrize("name, call", [("Gated", None), ("Waiting", "torch.cuda.synchronize")])
@pytest.mark.usefixtures("without_cost")
def test_what_needs_a_driver_is_a_note_where_there_is_none(tmp_path, name, call):
    report = check(head(tmp_path, name), {"output_folder": str(tmp_path)})
    assert [str(error) for error in report.errors] == []
    notes = [note for note in report.notes if note.startswith("on a GPU, the forward from ")]
    assert [note.partition(" in ctc_lin on")[0] for note in notes] == [
        f"on a GPU, the forward from {call}"] * bool(call)


@pytest.mark.parametrize("name, error, note", [
    ("Transducing", [], "the loss from torchaudio::rnnt_loss_forward on"),
    ("Mistaken", [("forward", "brain", "RuntimeError: no such loss")], "")])
@pytest.mark.usefixtures("without_cost")
@pytest.mark.slow
def test_a_loss_without_a_kernel_for_fake_tensors_is_a_note_and_one_that_fails_is_its(tmp_path, name, error, note):
    report = check(changed(tmp_path, {"!name:sbkit.tasks.ctc.CTC": f"!name:test_trace.{name}"}),
                   {"output_folder": str(tmp_path)})
    assert [(found.code, found.key, found.message.partition(": ")[2]) for found in report.errors] == error
    assert all(found.message.startswith(f"the loss fails at {os.path.relpath(__file__)}:") for found in report.errors)
    assert any(each.startswith(note) for each in report.notes)


@pytest.mark.slow
@pytest.mark.usefixtures("without_cost")
def test_a_constant_that_stays_on_the_cpu_is_an_error_where_the_forward_meets_it(tmp_path):
    report = check(head(tmp_path, "Uneasy"))
    assert [(f.code, f.key) for f in report.errors] == [("device-mismatch", "ctc_lin")]
    assert next(row for row in report.sections["devices"].rows if row[0] == "ctc_lin")[4] == "1 tensors stay on cpu"


@pytest.mark.usefixtures("without_cost")
def test_without_a_checkpointer_the_table_does_not_say_what_checkpoints_hold():
    table = check(SMALL, {"checkpointer": {"checkpoints_dir": [1]}}).sections["devices"]
    assert {row[-1] for row in table.rows} == {"-"}
    assert table.remarks[-1].startswith("the contents of checkpoints are unknown")


@pytest.mark.usefixtures("without_cost")
def test_a_forward_that_reads_values_is_no_mistake(tmp_path):
    report = check(head(tmp_path, "Reading"))
    assert report.errors == []
    assert any(note.startswith("the forward after ctc_lin, which reads values") for note in report.notes)


@pytest.mark.parametrize("text", [
    "layer: !new:torch.nn.Linear [3, 5]\nmodules: {layer: !ref <layer>}\n",
    SMALL.read_text().replace("brain: !name:sbkit.tasks.ctc.CTC\n", "")], ids=["a layer", "parts of a recogniser"])
def test_a_recipe_that_names_no_brain_is_checked_as_far_as_it_goes(text, tmp_path):
    """What a script of one's own computes with its parts nobody knows, whatever they are called."""
    path = write(tmp_path, text)
    report = check(path, {"output_folder": str(tmp_path)} if "output_folder" in text else {})
    assert report.errors == [] and "shapes" not in report.sections and "devices" in report.sections
    assert report.notes[0].startswith("the forward: the recipe has no brain, so only its script knows what its parts ")
    assert "sbkit.Brain" in report.notes[0]


def test_fake_tensors_take_no_memory_and_end():
    with trace.fake_tensors():
        assert torch.empty(1 << 50).numel() == 1 << 50
    assert type(torch.empty(1)) is torch.Tensor


# ------------------------------------------------------------------------------------------------ the cost


@pytest.mark.slow
def test_the_cost_counts_what_a_step_holds(small, tmp_path):
    values = small.sections["cost"].values
    model = load(SMALL, {"output_folder": str(tmp_path)})["model"]
    parameters = sum(p.numel() for p in model.parameters())
    assert values["parameters"] == parameters
    buffers = sum(b.numel() * b.element_size() for b in model.state_dict().values()) - 4 * parameters
    # weights, gradients and two states of AdamW, 4 bytes each
    assert values["weights_bytes"] == 16 * parameters + buffers + WORKSPACE
    assert values["batch_seconds"] == 40 and not values["measured"]


@pytest.mark.slow
def test_memory_and_operations_grow_with_the_batch(small):
    few = small.sections["cost"].values
    many = check(SMALL, {"batching": {"max_batch_seconds": 160}}).sections["cost"].values
    assert 3.5 < many["batch_bytes"] / few["batch_bytes"] < 4.5
    assert many["operations_per_second_of_audio"] == pytest.approx(few["operations_per_second_of_audio"], rel=0.05)


def test_the_largest_batch_fits_and_no_larger_one():
    estimate = CostEstimate(1000, frozen=0, weights=10**9, cost=BatchCost(4, 10.0, 2 * 10**9, 1e12), hours_per_100=None,
                            device="cpu")
    largest = estimate.largest(20e9)
    assert estimate.weights + largest * 2e9 / 40 == pytest.approx(USABLE * 20e9)
    assert estimate.largest(1e9) == 0 and estimate.largest_text(20e9) == "320 s"


def test_optimizers_differ_in_what_they_keep():
    assert states_per_parameter(partial(torch.optim.AdamW, lr=1)) == 2
    assert states_per_parameter(partial(partial(torch.optim.SGD, momentum=0.9), lr=1)) == 1
    assert states_per_parameter(torch.optim.SGD) == 0

    class Three(torch.optim.Optimizer):
        states_per_parameter = 3

    assert states_per_parameter(partial(Three, lr=1)) == 3


@pytest.mark.slow
def test_a_pretrained_encoder_of_speechbrains_is_placed_and_pointed_to_the_recipe_for_one(tmp_path):
    transformers = pytest.importorskip("transformers")
    transformers.Wav2Vec2Model(transformers.Wav2Vec2Config(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, conv_dim=[8],
        conv_stride=[320], conv_kernel=[400], num_feat_extract_layers=1)).save_pretrained(tmp_path / "w2v")
    transformers.Wav2Vec2FeatureExtractor().save_pretrained(tmp_path / "w2v")
    recipe = write(tmp_path, f"""recipe: !include:{SMALL}
    encoder: !new:speechbrain.integrations.huggingface.wav2vec2.Wav2Vec2
        {{source: {tmp_path}/w2v, save_path: {tmp_path}}}
    Transformer: null
    CNN: null
    seq_lin: null
    compute_features: null
    normalize: null
    spec_augment: null
    ctc_weight: 1
    model: !new:torch.nn.ModuleList
        - [!ref <encoder>, !ref <ctc_lin>]
""")
    (error,) = check(recipe).errors
    assert f"{recipe.name}:2: error: encoder: it is called with" in str(error)
    assert error.code == "forward" and error.message.endswith("Wav2Vec2.encode takes kwargs")
    assert error.suggestion == "hparams/finetune.yaml trains a pretrained encoder"
