"""What fills a shape changes neither loss nor count nor SpecAugment's masks, and gradients only by rounding."""

from pathlib import Path
from types import SimpleNamespace

import encoders
import numpy as np
import pytest
import torch
from run_folders import TINY
from sounds import encoded, speechlike

from sbkit.data.columns import BatchColumns
from sbkit.data.manifest import Manifest
from sbkit.data.reader import Reader, ReadRequest
from sbkit.data.shapes import Shape
from sbkit.recipe import load, trace
from sbkit.runs.feeding import why_not_padded
from sbkit.tasks.ctc import CTC

HPARAMS = Path(__file__).parents[2] / "hparams"
CONFORMER = {**TINY, "dropout": 0.0, "spec_augment.ramp": None, "spec_augment.time_warp": 2}
CODEC = {"size": 8, "hidden": 8, "encoder_layers": 1, "slow_layers": 1, "fast_layers": 1, "noise": 0.0,
         "adversarial_from": 1, "discriminators.channels": 4, "discriminators.sizes": [256]}
CHUNKS = {key: value for key, value in CONFORMER.items() if key not in ("num_decoder_layers", "cnn_first_channels")}
RECIPES = {
    "CTC": ("ctc.yaml", {**CONFORMER, "consistency": 0.2}),
    "joint": ("ctc.yaml", {**CONFORMER, "ctc_weight": 0.3}),
    "statistics": ("ctc.yaml", {**CONFORMER, "normalize.norm_type": "global"}),
    "transducer": ("transducer.yaml", CHUNKS),
    "streaming": ("streaming.yaml", CHUNKS),
    "enhancement": ("enhance.yaml", {"channels": 8, "hidden": 8, "layers": 2}),
    "codec": ("codec.yaml", CODEC),
    "finetune": ("finetune.yaml", {"head_dropout": 0.0, "mask_time_prob": 0.0, "mask_feature_prob": 0.0}),
}
SECONDS = np.array([1.3, 1.2, 0.9, 0.75, 0.5])
TEXTS = ["a long first text", "two", "three", "another one", "five"]


def overrides(given):
    found = {}
    for key, value in given.items():
        *path, last = key.split(".")
        place = found
        for name in path:
            place = place.setdefault(name, {})
        place[last] = value
    return found


@pytest.fixture(scope="module")
def manifest(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sounds")
    paths = [folder / f"{i}.wav" for i in range(2 * len(SECONDS))]
    for i, path in enumerate(paths):
        path.write_bytes(encoded(speechlike(SECONDS[i % len(SECONDS)], seed=i), 16000))
    recordings, clean = map(str, paths[:len(SECONDS)]), map(str, paths[len(SECONDS):])
    return Manifest(ids=[f"u{i}" for i in range(len(SECONDS))], durations=SECONDS, wavs=list(recordings), texts=TEXTS,
                    meta={"clean": list(clean)})


def step(brain, batch):
    """Loss, count and gradients of a batch, with the same random numbers each time."""
    torch.manual_seed(0)
    for each in brain.modules.parameters():
        each.grad = None
    loss = brain.trainer.parallel.loss_of(batch).loss
    loss.total.backward()
    gradients = {name: each.grad for name, each in brain.modules.named_parameters() if each.grad is not None}
    sums = [float(loss.total.detach()), float(loss.count)]
    return sums + [float(number.detach()) for pair in (loss.extras or {}).values() for number in pair], gradients


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_what_fills_a_shape_counts_nowhere(name, manifest, tmp_path):
    recipe, given = RECIPES[name]
    if name == "finetune":
        given = {**given, "encoder_source": str(encoders.make(tmp_path / "source"))}
    torch.manual_seed(1)
    hparams = load.load(HPARAMS / recipe, overrides({**given, "output_folder": str(tmp_path / "run")}))
    brain = trace.build_brain(hparams["brain"], hparams)
    assert why_not_padded(brain) is None
    for layer in brain.modules.modules():  # front ends have dropout that no key sets
        if "Dropout" in type(layer).__name__ and hasattr(layer, "p"):
            layer.p = 0.0
    brain.dummy_batch(1, 1.0)  # lets GlobalNorm do without statistics
    brain.train_state.optimizer_step = 1
    tokens = SimpleNamespace(encode=lambda text: [3 + ord(letter) % 20 for letter in text])
    reader = Reader(manifest, tokens if type(brain).needs_text() else None,
                    columns=BatchColumns(brain.columns, brain.keys))
    rows = np.arange(len(SECONDS))
    plain, padded, none = (reader.read(ReadRequest(1, 0, 0, 1, some, shape=shape)) for some, shape in (
        (rows, None), (rows, Shape(8, 1.6, 24)), (rows[:0], Shape(8, 1.6, 24))))
    assert padded.signals.shape[1] > plain.signals.shape[1] and len(padded) == 8
    state = {key: value.clone() for key, value in brain.modules.state_dict().items()}
    (sums, gradients), (same, alike) = step(brain, plain), step(brain, padded)
    assert same == pytest.approx(sums, rel=1e-5) and sums[0] != 0 and alike.keys() == gradients.keys()
    for key, gradient in gradients.items():
        assert (alike[key] - gradient).norm() <= 1e-4 * gradient.norm() + 1e-6, key
    counted = vars(brain.hparams).get("normalize") and getattr(brain.hparams.normalize, "count", None)
    # Such a batch without an utterance is what a rank computes that has none.
    sums, gradients = step(brain, none)
    assert sums == [0] * len(sums)
    assert {name: float(each.abs().max()) for name, each in gradients.items() if each.any()} == {}
    torch.testing.assert_close(brain.modules.state_dict(), state, rtol=0, atol=0, equal_nan=True)
    assert brain.hparams.normalize.count == counted if name == "statistics" else True


def test_a_loss_or_layer_that_may_count_such_rows_is_named(tmp_path):
    class Mine(CTC):
        def compute_objectives(self, *given):
            return super().compute_objectives(*given)

    class Says(Mine):
        counts_real_rows = True

    hparams = load.load(HPARAMS / "ctc.yaml", {**TINY, "output_folder": str(tmp_path)})
    reasons = [why_not_padded(trace.build_brain(cls, hparams)) for cls in (CTC, Mine, Says)]
    assert reasons == [None, "Mine doesn't have counts_real_rows = True: its loss may count such rows", None]
    brain = trace.build_brain(CTC, hparams)
    brain.modules["more"] = torch.nn.Sequential(torch.nn.BatchNorm1d(4))
    assert why_not_padded(brain) == "more.0 (BatchNorm1d) normalises over the rows of a batch"
    brain = trace.build_brain(CTC, load.load(HPARAMS / "ctc.yaml", {
        **TINY, "output_folder": str(tmp_path), "normalize": {"norm_type": "batch"}}))
    assert why_not_padded(brain) == "normalize (InputNormalization) normalises over the rows of a batch"
