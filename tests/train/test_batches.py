"""Parts of a batch of any class."""

import pickle

import pytest
import torch
from speechbrain.dataio.batch import PaddedBatch

from sbkit.data.batch import Batch
from sbkit.train import batches


def test_rows_of_any_batch():
    ours = Batch(
        ids=list("abcd"), texts=list("wxyz"), damaged=[("e", "cut"), ("f", "cut"), ("g", "cut"), ("h", "cut")],
        signals=torch.arange(8.0).reshape(4, 2), signal_lengths=torch.tensor([2, 2, 1, 1]),
        tokens=torch.ones(4, 3, dtype=torch.long), token_lengths=torch.tensor([3, 2, 1, 1]))
    part = batches.rows(ours, 1, 3)
    assert part.ids == ["b", "c"] and part.texts == ["x", "y"] and part.signals.tolist() == [[2, 3], [4, 5]]
    assert part.signal_lengths.tolist() == [2, 1] and len(part.damaged) == 4
    assert (batches.length(ours), batches.length(part)) == (4, 2)

    theirs = PaddedBatch([{"id": name, "sig": torch.ones(n), "n": n} for name, n in zip("abc", (3, 1, 2), strict=True)])
    part = batches.rows(theirs, 0, 2)
    assert part.id == ["a", "b"] and part.sig.data.shape == (2, 3)
    assert part.sig.lengths.tolist() == pytest.approx([1, 1 / 3])
    assert batches.length(theirs) == 3 and batches.length(part) == 2

    x, y = torch.arange(4), torch.arange(8).reshape(4, 2)
    assert [t.tolist() for t in batches.rows((x, y), 2, 4)] == [[2, 3], [[4, 5], [6, 7]]]
    assert batches.rows({"x": x, "rate": 16000}, 0, 1)["x"].tolist() == [0] and batches.length([x, y]) == 4
    assert batches.length(object()) == 1


def test_keys_of_a_recipe_s_batch_are_cut_whatever_their_names():
    keys = ("damaged", "goes_on", "monkeys", "ids", "weight")
    theirs = PaddedBatch([{"id": name, **{key: float(i) for key in keys}} for i, name in enumerate("abc")])
    part = batches.rows(theirs, 1, 3)
    assert part.id == ["b", "c"] and all(getattr(part, key).tolist() == [1, 2] for key in keys)
    words = PaddedBatch([{"id": name, "ids": [1, 2]} for name in "abc"])
    assert batches.utterance_ids(words) == ["a", "b", "c"]


def test_a_batch_that_an_earlier_version_saved_has_rows():
    saved = Batch(ids=["a", "b"], texts=["x", "y"], signals=torch.ones(2, 4), signal_lengths=torch.tensor([4, 4]),
                  tokens=torch.ones(2, 1, dtype=torch.long), token_lengths=torch.tensor([1, 1]))
    del saved.goes_on
    saved = pickle.loads(pickle.dumps(saved))
    assert batches.rows(saved, 1, 2).ids == ["b"] and saved.repeated(2).ids == ["a", "b"] * 2
