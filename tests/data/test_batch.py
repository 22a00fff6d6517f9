"""Batches: lengths known without asking the device, moves that lose nothing, dummy batches that do no harm."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from batches import tensors_by_field
from speechbrain.dataio.batch import PaddedData

from sbkit.data.batch import DUMMY_ID, Batch, DevicePrefetcher, dummy_batch
from sbkit.data.columns import Padded
from sbkit.train.batches import rows as rows_of


def batch(rows: int = 3, step: int = 7) -> Batch:
    lengths = torch.tensor([16000 - 1000 * i for i in range(rows)])
    return Batch(
        ids=[f"u{i}" for i in range(rows)], signals=torch.randn(rows, 16000), signal_lengths=lengths,
        tokens=torch.ones(rows, 4, dtype=torch.long), token_lengths=torch.tensor([4] * rows),
        texts=["hello"] * rows, step=step, micro=1, micros=2, samples=int(lengths.sum()),
    )


def test_seconds_come_from_python_numbers():
    it = batch()
    meta = it.to("meta")  # a device that cannot be asked for a value
    assert len(meta) == 3 and meta.seconds == it.seconds == (16000 + 15000 + 14000) / 16000
    assert meta.padded_seconds == 3.0
    assert isinstance(meta.seconds, float) and isinstance(meta.padded_seconds, float)


def test_moves_every_tensor_and_keeps_the_rest():
    it = batch()
    it.damaged = [("x", "gone")]
    moved = it.to("meta")
    assert {tensor.device.type for tensor in moved.tensors()} == {"meta"}
    assert all(tensor.device.type == "cpu" for tensor in it.tensors())
    for name in ("ids", "texts", "step", "micro", "micros", "weight", "damaged", "samples"):
        assert getattr(moved, name) == getattr(it, name)


@dataclass
class Marked(Batch):
    """A batch with fields of which the rest of the package knows nothing."""

    mark: torch.Tensor = None
    marks: dict[str, Padded] = None


class Alignment(NamedTuple):
    starts: torch.Tensor
    spans: list[torch.Tensor]


def test_tensors_within_named_tuples_lists_and_dicts_of_a_field_are_moved_repeated_and_cut():
    """Lists have one entry for each row; what has no tensors stays what it is."""
    it = batch()
    spans = [torch.arange(rows) for rows in (1, 2, 3)]
    it.columns = {"words": Alignment(torch.arange(3), spans), "pair": ({"deep": torch.ones(3, 2)}, "note")}
    held = [it.columns["words"].starts, *spans, it.columns["pair"][0]["deep"]]
    assert all(any(tensor is other for other in it.tensors()) for tensor in held)

    moved = it.to("meta")
    assert {tensor.device.type for tensor in moved.tensors()} == {"meta"}
    assert isinstance(moved.columns["words"], Alignment) and moved.columns["pair"][1] == "note"
    assert moved.texts is it.texts and it.columns["words"].spans is spans

    longer = it.repeated(2)
    assert longer.columns["words"].starts.tolist() == [0, 1, 2, 0, 1, 2]
    assert [len(span) for span in longer.columns["words"].spans] == [1, 2, 3, 1, 2, 3]
    assert longer.columns["pair"][0]["deep"].shape == (6, 2)

    part = rows_of(longer, 3, 6)
    assert part.columns["words"].starts.tolist() == [0, 1, 2]
    assert [len(span) for span in part.columns["words"].spans] == [1, 2, 3]


def test_a_new_field_is_moved_repeated_and_copied_to_graphs_like_the_others():
    it = batch()
    it = Marked(**vars(it), mark=torch.arange(3), marks={"more": Padded(torch.rand(3, 2), torch.tensor([2, 2, 1]))})
    moved = it.to("meta")
    assert {moved.mark.device.type, moved.marks["more"].data.device.type} == {"meta"}
    assert it.repeated(2).mark.tolist() == [0, 1, 2, 0, 1, 2]
    assert any(tensor is it.mark for tensor in it.tensors())
    assert any(tensor is it.marks["more"].lengths for tensor in it.tensors())


def test_each_field_with_tensors_is_on_the_page_about_batches():
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "extend.md").read_text(encoding="utf-8")
    section = page.partition("## A batch\n")[2].partition("\n## ")[0]
    assert set(tensors_by_field(batch())) <= set(re.findall(r"`(\w+)`", section))


def test_is_speechbrains_padded_data_when_asked():
    it = batch()
    data, lengths = it.sig
    assert isinstance(it.sig, PaddedData)
    assert data is it.signals and torch.allclose(lengths, torch.tensor([1.0, 15 / 16, 14 / 16]))


def test_a_dummy_batch_gives_finite_losses_and_counts_for_nothing():
    it = dummy_batch(step=3, micro=0, micros=2)
    assert (it.weight, it.seconds, it.ids, it.step, it.micros) == (0.0, 0.0, [DUMMY_ID], 3, 2)
    assert it.signals.std() > 0 and it.tokens.tolist() == [[1]] and it.token_lengths.tolist() == [1]
    assert torch.equal(it.signals, dummy_batch().signals)
    scores = torch.randn(40, 1, 8).log_softmax(-1)
    loss = torch.nn.functional.ctc_loss(scores, it.tokens, torch.tensor([40]), it.token_lengths)
    assert torch.isfinite(loss)
    assert dummy_batch(tokens=False).tokens.shape == (1, 0)


def test_the_prefetcher_hands_on_every_batch_in_order_on_a_cpu():
    batches = [batch(step=i) for i in range(5)]
    moved = list(DevicePrefetcher(batches, "cpu"))
    assert [it.step for it in moved] == [0, 1, 2, 3, 4]
    assert all(torch.equal(a.signals, b.signals) for a, b in zip(batches, moved, strict=True))


def test_all_epochs_copy_on_one_stream(monkeypatch):
    made = []

    class Stream:
        def __init__(self, device):
            made.append(device)

        def record_event(self):
            return None

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(wait_event=lambda event: None))
    monkeypatch.setattr(Batch, "to", lambda self, device: self)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: None)
    epochs = [list(DevicePrefetcher([batch(step=i) for i in range(3)], "cuda:7")) for _ in range(3)]
    assert [[each.step for each in epoch] for epoch in epochs] == [[0, 1, 2]] * 3
    assert made == [torch.device("cuda:7")]


@pytest.mark.gpu
def test_epochs_hold_no_more_memory_than_one():
    held = []
    for _ in range(8):
        for _ in DevicePrefetcher([batch().pin_memory() for _ in range(4)], "cuda"):
            pass
        held.append(torch.cuda.memory_reserved())
    assert held[-1] == held[0]


@pytest.mark.gpu(values=True)
def test_the_prefetcher_hands_on_every_batch_in_order_on_a_gpu():
    batches = [batch(step=i).pin_memory() for i in range(5)]
    moved = []
    for it in DevicePrefetcher(batches, "cuda"):
        moved.append(it.signals.sum())
        del it
    expected = torch.stack([it.signals.sum() for it in batches])
    assert torch.allclose(torch.stack(moved).cpu(), expected, atol=1e-2)
