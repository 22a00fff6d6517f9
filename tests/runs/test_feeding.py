"""What a run decides and says before it trains: padding to shapes, and whether its data workers keep up."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from refusals import refused
from sounds import encoded, speechlike

from sbkit.data.loader import TrainLoader
from sbkit.data.manifest import Manifest
from sbkit.data.plan import Batching, Plan
from sbkit.recipe import flops
from sbkit.recipe.speed import Speed
from sbkit.runs import feeding


@pytest.fixture(scope="module", params=["wav", "mp3"])
def manifest(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("sounds") / f"one.{request.param}"
    path.write_bytes(encoded(speechlike(4.0), 16000, request.param))
    return Manifest(ids=["a", "b"], durations=[4.0, 4.0], wavs=[str(path)] * 2, texts=["some text", "text"])


def test_workers_that_cannot_keep_up_are_named_with_what_helps(manifest, caplog, monkeypatch):
    loader = TrainLoader(manifest, None, Plan(manifest.durations, Batching(500, 4000)), workers=2, world=8)
    brain = SimpleNamespace(precision="bf16", modules=torch.nn.ModuleDict(), hparams=SimpleNamespace(),
                            keys=SimpleNamespace(moving_average=None), captures_steps=False)

    def warned(kernels, limits):
        monkeypatch.setattr(flops, "run", lambda brain, utterances, *_: SimpleNamespace(kernels=kernels(utterances)))
        monkeypatch.setattr(feeding, "limits_of", lambda device, precision: limits)
        caplog.clear()
        feeding.warn_of_slow_reading(brain, loader, torch.device("cuda"))
        return caplog.text

    card = Speed(989e12, 3.35e12)
    assert not warned(lambda utterances: [(1, 1)], None)  # the speed is unknown
    assert not warned(lambda utterances: [(int(1e14), 1)] * 125, card), "a step of 13 s"
    assert not warned(lambda utterances: [(1, 1)] * 1_000_000, card), "launches of 32 s"
    found = warned(lambda utterances: [(utterances * int(7.912e9), 1)], card)  # 1 ms, for 500 s of audio
    for part in (f"second ({manifest.wavs[0][-3:]}: ", "about 500,000: use --num_workers ", "2 data workers can read ",
                 "sbkit shard MANIFEST.csv SHARDS --encode wav16k"):
        assert part in found


@pytest.mark.parametrize("asked, device, graphs, reason, shapes", [
    (None, "cuda", None, None, True), (None, "cuda", False, None, False), (None, "cpu", True, None, False),
    (True, "cpu", False, None, True), (False, "cuda", True, None, False),
    (None, "cuda", True, "norm normalises over the rows of a batch", False),
    (True, "cpu", False, "it may count such rows", None)])
def test_batches_are_padded_where_steps_are_captured_or_a_recipe_asks_for_it(
        asked, device, graphs, reason, shapes, caplog, monkeypatch):
    manifest = Manifest(ids=["a", "b"], durations=[4.0, 4.0], wavs=[""] * 2, texts=["some text", "text"])
    plan = Plan(manifest.durations, Batching(8, pad_to_shapes=asked))
    monkeypatch.setattr(feeding, "why_not_padded", lambda brain: reason)
    brain = SimpleNamespace(captures_steps=graphs is not False)
    encoder = SimpleNamespace(encode=lambda text: list(range(len(text))))
    with caplog.at_level("INFO"):
        if shapes is None:
            with refused("cannot-pad-to-shapes", key="batching"):
                feeding.pad_to_shapes(brain, plan, torch.device(device), manifest, encoder)
            return
        feeding.pad_to_shapes(brain, plan, torch.device(device), manifest, encoder)
    found = plan.shapes(1)
    assert (found is not None) == shapes
    assert ("aren't padded to few shapes: norm normalises" in caplog.text) == (device == "cuda" and reason is not None)
    if shapes:
        assert found.of_bucket == [(2, np.float32(4.0), 9)] and "1 shape, of up to 2 utterances, 4.0 s and 9 " in \
            caplog.text


def test_wide_buckets_are_not_padded_unless_a_recipe_asks_for_it(caplog, monkeypatch):
    seconds = np.tile([1.0, 8.0], 20)
    manifest = Manifest(ids=list(map(str, range(40))), durations=seconds, wavs=[""] * 40, texts=[""] * 40)
    monkeypatch.setattr(feeding, "why_not_padded", lambda brain: None)
    brain = SimpleNamespace(captures_steps=True)
    for asked, padded in ((None, False), (True, True)):
        plan = Plan(seconds, Batching(200, 400, buckets=1, pad_to_shapes=asked))
        with caplog.at_level("INFO"):
            feeding.pad_to_shapes(brain, plan, torch.device("cuda"), manifest, None)
        assert (plan.shapes(1) is not None) == padded
        assert ("Micro-batches are padded to 1 shape" in caplog.text) == padded
    assert "are not padded to 1 shape, of up to 20 utterances, 8.0 s and 0 tokens each: 78 % more" in caplog.text
