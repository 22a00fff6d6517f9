"""The guard: nothing outside a table gets through, everything inside does, and the message says where."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys

import pytest
import torch
from host_syncs import CountsHostSyncs
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

from sbkit.errors import SbkitError
from sbkit.nn import guard
from sbkit.nn.guard import IndexTable, guard_indices

BLANK = 0


def on_device(indices, size, lengths=None, ids=None, forbidden=()):
    """The device's way, run on the CPU."""
    return guard.guard_on_device(indices, IndexTable("tokens", size, ids, forbidden), lengths)


@st.composite
def tables(draw):
    """(indices [B, U], lengths [B], size): mostly good indices with the edges sprinkled in."""
    size = draw(st.integers(2, 9))
    rows, width = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    edges = st.sampled_from([size - 1, size, -1, BLANK, -(2**62), 2**62])
    value = st.one_of(st.integers(1, size - 1), st.integers(1, size - 1), edges)
    indices = draw(st.lists(st.lists(value, min_size=width, max_size=width), min_size=rows, max_size=rows))
    lengths = draw(st.lists(st.integers(0, width), min_size=rows, max_size=rows))
    return torch.tensor(indices), torch.tensor(lengths), size


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(tables(), st.booleans(), st.booleans())
def test_host_and_device_agree_with_a_plain_loop(case, with_lengths, with_blank):
    indices, lengths, size = case
    ids = [f"clip-{row}" for row in range(len(indices))]
    forbidden = (BLANK,) if with_blank else ()
    kwargs = {"lengths": lengths if with_lengths else None, "forbidden": forbidden, "ids": ids}
    first = next(((row, column, value) for row, values in enumerate(indices.tolist())
                  for column, value in enumerate(values)
                  if (not with_lengths or column < lengths[row])
                  and (not 0 <= value < size or value in forbidden)), None)

    given_back = on_device(indices, size, **kwargs)
    assert ((given_back >= 0) & (given_back < size)).all(), "an index outside its table got through"
    good = (indices >= 0) & (indices < size)
    if first is None:
        host = guard_indices(indices, size, name="tokens", **kwargs)
        assert torch.equal(host, given_back)
        assert torch.equal(host[good], indices[good])
        guard.poll(wait=True)
        return
    row, column, value = first
    for check in (lambda: guard_indices(indices, size, name="tokens", **kwargs), lambda: guard.poll(True)):
        with refused("index-out-of-range", wording=False) as caught:  # of values that are generated
            check()
        for part in ("tokens", f"utterance clip-{row},", f"position {column}:", f"index {value} "):
            assert part in str(caught.value)


def test_the_message_is_for_people():
    with refused("index-out-of-range") as caught:
        guard_indices(torch.tensor([[1, 2], [1, 1000]]), 1000, name="CTC labels", ids=["a", "fr_17"])
    assert str(caught.value).startswith(
        "CTC labels: utterance fr_17, position 1: index 1000 is outside the table of 1000 (0 to 999)")
    assert isinstance(pickle.loads(pickle.dumps(caught.value)), SbkitError)  # a loader's worker sends it
    with refused("index-out-of-range"):
        guard_indices(torch.tensor([[0]]), 5, name="CTC labels", forbidden=(0,))


def test_padding_is_made_safe_and_not_complained_about():
    labels = torch.tensor([[4, -100], [2, 3]])
    lengths = torch.tensor([1, 2])
    expected = torch.tensor([[4, 1], [2, 3]])
    assert torch.equal(guard_indices(labels, 5, name="labels", lengths=lengths, forbidden=(0,)), expected)
    assert torch.equal(on_device(labels, 5, lengths=lengths, forbidden=(0,)), expected)
    guard.poll(wait=True)


def test_good_indices_come_back_as_they_are():
    labels = torch.tensor([[1, 2], [3, 4]])
    assert guard_indices(labels, 5, name="labels") is labels


def test_codebooks_with_more_dimensions():
    codes = torch.zeros(2, 3, 4, dtype=torch.int32)
    codes[1, 2, 3] = 9
    with refused("index-out-of-range"):
        guard_indices(codes, 8, name="codebook")
    assert guard_indices(codes, 8, name="codebook", lengths=torch.tensor([3, 2])).max() == 0
    given_back = on_device(codes, 8)
    assert given_back.max() == 0 and given_back.dtype == torch.int32
    with refused("index-out-of-range"):
        guard.poll(wait=True)


def test_empty_and_one_dimensional():
    assert guard_indices(torch.zeros(0, 3, dtype=torch.long), 4, name="x").shape == (0, 3)
    assert on_device(torch.zeros(2, 0, dtype=torch.long), 4).shape == (2, 0) and guard.pending() == 0
    with refused("index-out-of-range"):
        guard_indices(torch.tensor([1, 2, 4]), 4, name="x")


def test_floats_are_refused():
    with refused("bad-value"):
        guard_indices(torch.zeros(1, 2), 4, name="x")


def test_nothing_is_read_until_somebody_polls():
    labels = torch.tensor([[1, 9]])
    with CountsHostSyncs() as syncs:
        on_device(labels, 5)
        guard_indices(torch.tensor([[1, 4]]), 5, name="labels")
    assert syncs.count == 0
    with refused("index-out-of-range"):
        guard.poll()
    guard.poll()  # said once


def test_where_nobody_polls_the_next_call_raises():
    on_device(torch.tensor([[9]]), 5, ids=["clip"])
    with refused("index-out-of-range"):
        on_device(torch.tensor([[1]]), 5)


def test_a_log_that_nobody_polls_does_not_grow(monkeypatch):
    class Slow(guard.Peek):
        ready = False

    monkeypatch.setattr(guard, "Peek", Slow)
    for _ in range(guard.MAX_PENDING + 5):
        on_device(torch.tensor([[1]]), 5)
    assert 0 < guard.pending() <= guard.MAX_PENDING
    guard.poll()  # does not wait
    guard.poll(wait=True)
    assert guard.pending() == 0


def test_what_a_captured_step_collects_is_reported_for_the_utterances_of_each_replay():
    with guard.collecting() as calls:
        on_device(torch.tensor([[1, 4]] * 4), 5, ids=["a", "b"] * 2)  # two views of each
        on_device(torch.tensor([[1, 9]]), 5)
    assert len(calls) == 2 and guard.pending() == 0
    results = torch.tensor([[1, 5, 7], [0, 0, 1]])  # of a replay, whose third row has a bad second index
    guard.check_later(results, calls, ids=["c", "d"])
    with refused("index-out-of-range"):
        guard.poll()
    guard.check_later(torch.tensor([[0, 0, 1], [0, 0, 1]]), calls, ids=["e", "f"])
    guard.poll()


def test_shape_checks_on_fake_tensors_pass_through():
    assert guard_indices(torch.zeros(2, 3, dtype=torch.long, device="meta"), 5, name="labels").shape == (2, 3)
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        assert guard_indices(torch.zeros(2, 3, dtype=torch.long), 5, name="labels").shape == (2, 3)


def test_a_compiled_model_calls_it_as_it_is():
    def look_up(indices, table):
        return torch.nn.functional.embedding(guard_indices(indices * 1, 5, name="codes"), table) * 2

    compiled = torch.compile(look_up, backend="eager")
    assert compiled(torch.tensor([[1, 4]]), torch.ones(5, 2)).sum() == 8
    with refused("index-out-of-range"):
        compiled(torch.tensor([[1, 5]]), torch.ones(5, 2))


@pytest.mark.slow
def test_importing_it_does_not_import_the_compiler():
    code = "import sys, sbkit.nn.guard, sbkit.nn.ctc; sys.exit('torch._dynamo' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=environment).returncode == 0


@pytest.mark.gpu
def test_no_host_sync_on_a_gpu():
    labels, lengths = torch.tensor([[1, 9], [1, 1]]).cuda(), torch.tensor([2, 1]).cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        guard_indices(labels, 5, name="labels", ids=["a", "b"], lengths=lengths)
        guard.poll()
    except SbkitError:
        pass  # the verdict may already be there
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu(values=True)
def test_on_a_gpu_no_index_is_out_of_range():
    labels, lengths = torch.tensor([[1, 9], [1, 1]]).cuda(), torch.tensor([2, 1]).cuda()
    assert guard_indices(labels, 5, name="labels", ids=["a", "b"], lengths=lengths).max().item() < 5
    with refused("index-out-of-range"):
        guard.poll(wait=True)
