"""Parts of a batch of any class."""

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
