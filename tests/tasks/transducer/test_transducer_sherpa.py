"""What sherpa-onnx runs a transducer's streams with, as one of NeMo's."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused
from streaming_recognisers import recogniser

from sbkit.export import layout
from sbkit.nn.transducer import TransducerHead
from sbkit.tasks.transducer.exported import ExportedTransducer
from sbkit.tasks.transducer.sherpa import SherpaJoiner, SherpaPrediction, order

SIZE = 8


def head_of(context, blank, vocabulary=5):
    torch.manual_seed(context)
    return TransducerHead(vocabulary, 4, SIZE, context, blank).eval().requires_grad_(False)


@given(context=st.integers(1, 4), blank=st.integers(0, 4), said=st.lists(st.integers(0, 3), max_size=7))
@settings(deadline=None)
def test_the_state_that_sherpa_keeps_is_the_last_tokens(context, blank, said):
    """It begins with the blank, which is the last of its tokens, and with zeros."""
    head, theirs = head_of(context, blank), order(5, blank)
    assert sorted(theirs) == [0, 1, 2, 3, 4] and theirs[4] == blank
    states, ours = torch.zeros(2, 1, 1, max(1, context - 1)), [blank] * context
    for token in [4, *said]:
        found, _, *states = SherpaPrediction(head)(torch.tensor([[token]], dtype=torch.int32),
                                                   torch.tensor([1], dtype=torch.int32), *states)
        ours = [*ours, theirs[token]][-context:]
        torch.testing.assert_close(found, head.predict(torch.tensor([ours])).transpose(1, 2))


@given(blank=st.integers(0, 4), silent=st.sets(st.integers(0, 4), max_size=3))
@settings(deadline=None)
def test_scores_stand_in_sherpas_order_and_what_is_no_text_is_never_said(blank, silent):
    head, (encoded, predicted) = head_of(2, blank), torch.randn(2, 3, SIZE, generator=torch.Generator().manual_seed(1))
    found = SherpaJoiner(head, sorted(silent))(encoded[..., None].clone(), predicted[..., None])
    assert found.shape == (3, 1, 1, 5)
    expected = head.join(encoded, predicted)
    for place, token in enumerate(order(5, blank)):
        if token in silent - {blank}:
            assert (found[:, 0, 0, place] < -1000).all()
        else:
            torch.testing.assert_close(found[:, 0, 0, place], expected[:, token])


def test_one_that_did_not_learn_in_chunks_is_refused(monkeypatch):
    monkeypatch.setattr("sbkit.tasks.recognise.sherpa_stream.imported", lambda: None)
    made = recogniser()
    made.chunks = None
    with refused("no-chunks"):
        ExportedTransducer(None, {}, 16_000, acoustic_model=made, keys=None).target(layout.SHERPA)
