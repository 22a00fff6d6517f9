"""The streaming graph gives, chunk by chunk, what the checkpoint gives for whole recordings in chunks.

test_streams.py has the same of the files of each format.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from refusals import refused
from streaming_recognisers import BANDS, CHUNKS, agrees, described, eager, recogniser, signals
from torch import nn

from sbkit.nn.chunks import Chunks
from sbkit.nn.kaldi import FilterBank
from sbkit.tasks.recognise.graph import reference
from sbkit.tasks.recognise.streaming_graph import StreamingGraph, run


@pytest.fixture(scope="module")
def model():
    return recogniser()


def test_it_gives_what_the_checkpoint_does_for_every_chunk_alone_and_in_a_batch(model):
    made = StreamingGraph(model)
    agrees(eager(made), model, described(made))
    assert described(made).streaming.left == 16, "the most that it was trained with"


def test_it_does_so_where_a_chunk_looks_ahead():
    made = recogniser(chunks=Chunks(sizes=[4, 8], left_context=[8, 16], validate=4, lookahead=3))
    streaming = StreamingGraph(made)
    agrees(eager(streaming), made, described(streaming))


@pytest.mark.parametrize("changes", [{"snip_edges": True}, {"snip_edges": False, "frame_length": 20.0},
                                     {"snip_edges": False, "window": "hann", "mel": "slaney", "remove_dc": False}])
def test_features_of_any_filter_bank_are_computed_in_it(changes):
    made = recogniser(FilterBank(n_mels=BANDS, **changes))
    streaming = StreamingGraph(made)
    for signal in signals()[1:]:
        found, = run(eager(streaming), described(streaming), 4, [signal])
        np.testing.assert_allclose(found, reference(made, chunks=CHUNKS.config(4))(signal), atol=1e-4)


def test_what_config_json_says_is_how_it_is_run(model):
    made = StreamingGraph(model)
    config = described(made)
    assert [config.window(size) for size in CHUNKS.sizes] == [made.window(size) for size in CHUNKS.sizes]
    for told, (name, part) in zip(config.streaming.state.items(), made.step.state(3)._asdict().items(), strict=True):
        assert told == (name, {"type": str(part.dtype).removeprefix("torch."), "shape": list(part.shape[1:])})
    assert (config.streaming.before, config.streaming.after, config.streaming.overlap) == (120, 200, 240)


def test_the_recogniser_stays_as_it_was(model):
    weights = [each.clone() for each in model.encoder.parameters()]
    made = StreamingGraph(model)
    for each in made.parameters():
        each.data.zero_()
    assert all(torch.equal(a, b) for a, b in zip(weights, model.encoder.parameters(), strict=True))
    assert all(each.requires_grad for each in model.encoder.parameters())


@pytest.mark.parametrize("given, key", [
    ({"features": nn.Identity()}, "compute_features"),
    ({"features": FilterBank(n_mels=BANDS, frame_length=8.0)}, "frame_length"),
    ({"attention_type": "RelPosMHAXL"}, "attention_type"),
])
def test_what_cannot_run_on_a_stream_is_refused(given, key):
    with refused("not-streamable", key=key):
        StreamingGraph(recogniser(**given))
