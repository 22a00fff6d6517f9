"""A recogniser step by step gives what it gives for whole utterances in chunks, in any batch.

With its features tasks/recognise/test_streaming_graph.py has it, and exported test_streams.py beside it.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import streaming_recognisers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused
from streaming_recognisers import BANDS
from torch import nn

from sbkit.nn.adapters import Houlsby, LoRA, is_added
from sbkit.nn.chunks import Chunks
from sbkit.nn.streaming.encoder import StreamingEncoder
from sbkit.nn.streaming.layers import EncoderState

EACH = 4
CHUNKS = Chunks(sizes=[1, 2, 4, 8], left_context=[8, 16], validate=4)
AHEAD = {ahead: Chunks(sizes=[4, 8], left_context=[8, 16], validate=4, lookahead=ahead) for ahead in (1, 3)}


class Scaled(nn.Module):
    """Statistics of a corpus."""

    def forward(self, features, lengths=None):
        return (features - 0.3) / 1.7


def recogniser(chunks=CHUNKS, **options):
    return streaming_recognisers.recogniser(nn.Identity(), Scaled(), chunks, **options)


def whole(model, features, frames, config):
    """Log-probabilities of whole utterances, masked, and how many are of each."""
    feats = model.normalize(features).masked_fill((torch.arange(features.shape[1]) >= frames[:, None])[..., None], 0.0)
    encoded, counts = model.encode(feats, frames, config)
    return model.head(encoded).log_softmax(-1), counts


def pieces(features, frames, steps, size, ahead):
    """Chunks of each row, whose first is at its number of ``steps``; what isn't real is NaN."""
    width, moves = size * EACH, (size - ahead) * EACH
    over = [False] * len(features)
    for number in range(max(steps) + features.shape[1] // moves + 1):
        piece, there = torch.full((len(features), width, BANDS), float("nan")), torch.zeros(len(features)).long()
        for row, (first, n) in enumerate(zip(steps, frames.tolist(), strict=True)):
            begin = (number - first) * moves
            if 0 <= begin < n and not over[row]:
                there[row] = min(width, n - begin)
                over[row] = n - begin < width
                piece[row, : there[row]] = features[row, begin : begin + there[row]]
        yield piece, there


def streamed(step, features, frames, steps, size):
    """Log-probabilities of each row, put together of its chunks."""
    state, rows = step.state(len(features)), [[] for _ in features]
    for piece, there in pieces(features, frames, steps, size, step.ahead):
        log_probs, counts, state = step(piece, there, state)
        assert log_probs.shape[1] == size
        assert counts.tolist() == [-(-n // EACH) - step.ahead * (n == EACH * size) for n in there.tolist()]
        for row, count in enumerate(counts.tolist()):
            rows[row].append(log_probs[row, :count])
    return [torch.cat(row) for row in rows]


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("fast", [True, False])
@settings(deadline=None, max_examples=10)
@given(lengths=st.lists(st.integers(1, 100), min_size=1, max_size=3), size=st.sampled_from(CHUNKS.sizes),
       left=st.sampled_from(CHUNKS.left), taps=st.sampled_from([3, 7, 15]), seed=st.integers(0, 99), data=st.data())
def test_chunk_by_chunk_is_the_masked_whole(fast, lengths, size, left, taps, seed, data):
    """In a batch of streams that begin at different steps."""
    model, frames = recogniser(fast=fast, kernel_size=taps), torch.tensor(lengths)
    features = torch.randn(len(lengths), max(lengths), BANDS, generator=torch.Generator().manual_seed(seed))
    steps = data.draw(st.lists(st.integers(0, 5), min_size=len(lengths), max_size=len(lengths)))
    found = streamed(StreamingEncoder(model, left).eval(), features, frames, steps, size)
    for row, n in enumerate(lengths):  # alone, since SpeechBrain's own layers see the padding of a batch
        expected, counts = whole(model, features[row : row + 1, :n], frames[row : row + 1], CHUNKS.config(size, left))
        assert len(found[row]) == counts
        torch.testing.assert_close(found[row], expected[0], atol=1e-4, rtol=1e-4)


def by_speechbrain(model, features, config):
    """Log-probabilities of one utterance: SpeechBrain's own streaming layers, whose contexts end where its chunk's
    frames do that are ahead."""
    source = model.frontend(model.normalize(features)).flatten(2)
    layers, left, ahead = model.encoder.encoder.layers, config.left_context_size_frames(), config.ahead
    contexts = [layer.make_streaming_context(10_000) for layer in layers]
    start, said = 0, []
    while start * EACH < features.shape[1]:
        full = features.shape[1] - start * EACH >= config.chunk_size * EACH
        x = model.encoder.custom_src_module(source[:, start : start + config.chunk_size])
        moves = x.shape[1] - ahead * full
        for layer, context in zip(layers, contexts, strict=True):
            convolved = []
            watch = layer.convolution_module.register_forward_pre_hook(
                lambda _, args, into=convolved: into.extend(args))
            x, _ = layer.forward_streaming(x, context)
            watch.remove()
            there = context.mha_left_context.shape[1] - ahead
            context.mha_left_context = context.mha_left_context[:, max(0, there - left) : there]
            context.dcconv_left_context = convolved[0][:, : convolved[0].shape[1] - ahead]
            context.dcconv_left_context = context.dcconv_left_context[:, -layer.convolution_module.padding:]
        said.append(model.encoder.encoder.norm(x)[:, :moves])
        start += config.chunk_size if not full else moves
    return model.head(torch.cat(said, 1)).log_softmax(-1)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("ahead", AHEAD)
@settings(deadline=None, max_examples=8)
@given(lengths=st.lists(st.integers(1, 100), min_size=1, max_size=3), size=st.sampled_from([4, 8]),
       left=st.sampled_from([8, 16]), taps=st.sampled_from([3, 7, 15]), seed=st.integers(0, 99), data=st.data())
def test_looking_ahead_it_is_speechbrains_own_step_and_the_whole(ahead, lengths, size, left, taps, seed, data):
    model, frames = recogniser(AHEAD[ahead], fast=False, kernel_size=taps), torch.tensor(lengths)
    features = torch.randn(len(lengths), max(lengths), BANDS, generator=torch.Generator().manual_seed(seed))
    steps = data.draw(st.lists(st.integers(0, 5), min_size=len(lengths), max_size=len(lengths)))
    config = AHEAD[ahead].config(size, left)
    found = streamed(StreamingEncoder(model, left).eval(), features, frames, steps, size)
    together, counts = whole(model, features, frames, config)
    for row, n in enumerate(lengths):
        [expected] = by_speechbrain(model, features[row : row + 1, :n], config)
        assert len(found[row]) == len(expected) == counts[row]
        torch.testing.assert_close(found[row], expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(together[row, : counts[row]], expected, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_a_frame_hears_those_ahead_of_its_chunk_and_none_behind_them():
    model, features = recogniser(AHEAD[3]), torch.randn(1, 40, BANDS)
    expected, counts = whole(model, features, torch.tensor([40]), AHEAD[3].config(8, 16))
    for place, first in ((4 * 4, 0), (5 * 4, 0), (8 * 4, 5)):  # chunks of eight, from each to the next five
        later = features.clone()
        later[:, place:] += 1.0
        found, _ = whole(model, later, torch.tensor([40]), AHEAD[3].config(8, 16))
        same = (found - expected).abs().amax((0, 2)) < 1e-5
        assert same[:first].all() and not same[first:].any(), place
    assert counts.tolist() == [10]


@torch.no_grad()
def test_a_row_without_frames_keeps_its_state_and_one_of_zeros_is_a_fresh_start():
    step = StreamingEncoder(recogniser()).eval()
    features, more = torch.randn(2, 2, 16, BANDS)
    full, none = torch.tensor([16, 16]), torch.tensor([16, 0])
    first, _, begun = step(features, full, step.state(2))
    more[1] = float("nan")
    out, counts, after = step(more, none, begun)
    assert counts.tolist() == [4, 0] and out.isfinite().all() and begun.seen.tolist() == [4, 4]
    for before, now in zip(begun, after, strict=True):
        assert torch.equal(before[1], now[1]) and not torch.equal(before[0], now[0])
    again, _, _ = step(features, full, EncoderState(*(part * torch.tensor([1, 0]).view(2, *(1,) * (part.dim() - 1))
                                                      for part in after)))
    torch.testing.assert_close(again[1], first[1])
    assert not torch.allclose(again[0], first[0])


@torch.no_grad()
def test_the_state_never_grows():
    step = StreamingEncoder(recogniser(), 8).eval()
    state = begin = step.state(3)
    assert all(not part.any() for part in begin)
    for _ in range(20):
        _, _, state = step(torch.randn(3, 16, BANDS), torch.tensor([16, 16, 16]), state)
        assert [(part.shape, part.dtype) for part in state] == [(part.shape, part.dtype) for part in begin]
    assert state.seen.tolist() == [8, 8, 8] and state.keys.shape == (3, 2, 8, 16)


@pytest.mark.parametrize("given, key", [
    ({"chunks": None}, "chunks"), ({"attention_type": "RelPosMHAXL"}, "attention_type"),
    ({"encoder_module": "transformer"}, "encoder_module"), ({"frontend": nn.Flatten(2)}, "frontend"),
])
def test_what_has_no_step_is_refused(given, key):
    with refused("not-streamable", key=key):
        StreamingEncoder(recogniser(**given))


@pytest.mark.parametrize("target", ["encoder", "encoder.layers.*", "*.mha_layer", "*.convolution_module"])
def test_adapters_that_a_step_would_pass_by_are_refused(target):
    model = recogniser()
    Houlsby(model.encoder, target, width=16)
    with refused("not-streamable"):
        StreamingEncoder(model)


@torch.no_grad()
@pytest.mark.parametrize("adapters, target", [(Houlsby, "*.ffn_module1"), (LoRA, "*.out_proj")])
def test_other_adapters_are_heard_by_steps_too(adapters, target):
    model, features = recogniser(AHEAD[1], fast=False), torch.randn(1, 40, BANDS)
    before, _ = whole(model, features, torch.tensor([40]), AHEAD[1].config(8, 16))
    adapters(model.encoder, target)
    for name, weights in model.encoder.named_parameters():
        if is_added(name):
            weights.add_(torch.randn(weights.shape, generator=torch.Generator().manual_seed(1)))
    found, _ = whole(model, features, torch.tensor([40]), AHEAD[1].config(8, 16))
    assert not torch.allclose(found, before, atol=0.1)
    torch.testing.assert_close(found, by_speechbrain(model, features, AHEAD[1].config(8, 16)), atol=1e-4, rtol=1e-4)


def test_a_left_context_that_it_was_not_trained_for_is_refused():
    with refused("untrained-chunk"):
        StreamingEncoder(recogniser(), 24)
    assert StreamingEncoder(recogniser()).left == 16


def test_it_takes_any_object_with_the_parts():
    made = recogniser()
    names = "normalize", "frontend", "encoder", "head", "scores_tokens", "chunks"
    parts = {name: getattr(made, name) for name in names}
    assert StreamingEncoder(SimpleNamespace(**parts)).subsampling == EACH
