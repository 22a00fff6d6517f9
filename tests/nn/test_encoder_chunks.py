"""What frames see is drawn from the seed and the step alone, and no frame sees nothing."""

import pytest
import torch
from conformers import conformer
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused
from speechbrain.lobes.models.transformer.TransformerASR import make_transformer_src_mask
from speechbrain.utils.dynamic_chunk_training import DynChunkTrainConfig

from sbkit.nn.accelerate import accelerate
from sbkit.nn.chunks import ChunkConfig, Chunks, mask_last_chunk_padding

DRAWN = Chunks(sizes=[4, 8, 16], left_context=[16, 32], whole=0.25)


@given(st.integers(-(2**70), 2**70), st.integers(0, 10**9))
def test_a_step_draws_the_same_again_and_what_it_may(seed, step):
    drawn = DRAWN.at(seed, step)
    assert drawn == Chunks(sizes=[16, 8, 4, 4], left_context=[32, 16], whole=0.25).at(seed, step)
    assert drawn is None or (drawn.chunk_size in (4, 8, 16) and drawn.left_context_size_frames() in (16, 32))


def test_each_is_drawn_as_often_as_it_is_to_be():
    drawn = [DRAWN.at(7, step) for step in range(4000)]
    assert 0.22 < sum(each is None for each in drawn) / 4000 < 0.28
    for size in (4, 8, 16):
        for left in (16, 32):
            assert 0.1 < sum(each == DynChunkTrainConfig(size, left // size) for each in drawn) / 4000 < 0.15


def test_another_seed_and_another_step_draw_something_else():
    steps = [[DRAWN.at(seed, step) for step in range(40)] for seed in (1, 2)]
    assert steps[0] != steps[1] and len({str(each) for each in steps[0]}) == 7


def test_what_is_only_looked_at_changes_what_a_stream_hears_and_no_step_of_training():
    ahead = Chunks(sizes=[4, 8, 16], left_context=[16, 32], whole=0.25, lookahead=3)
    assert [ahead.at(1, step) for step in range(20)] == [DRAWN.at(1, step) for step in range(20)]
    assert not any(isinstance(ahead.at(1, step), ChunkConfig) for step in range(20))
    assert ahead.config(8) == ChunkConfig(8, 4, 3) and ahead.validation() == ChunkConfig(16, 2, 3)


def test_what_it_was_not_trained_for_is_refused_with_what_it_was():
    assert DRAWN.config(8) == ChunkConfig(8, 4) and DRAWN.config(8, 16) == ChunkConfig(8, 2)
    assert DRAWN.validation() == DRAWN.config(16) and Chunks(validate=None).validation() is None
    with refused("untrained-chunk") as error:
        DRAWN.config(12)
    assert error.value.hint == "it was trained for 4, 8, 16"
    with refused("untrained-chunk") as error:
        DRAWN.config(8, 48)
    assert error.value.hint == "it was trained for 16, 32"


@pytest.mark.parametrize("given, told", [
    ({"sizes": []}, r"sizes is \[\], not a list of whole numbers above 0"),
    ({"sizes": "8"}, "sizes is '8', not a list"), ({"sizes": 8}, "sizes is 8, not a list"),
    ({"sizes": [8, 0]}, r"sizes is \[8, 0\], not a list"), ({"sizes": [8.0]}, r"sizes is \[8.0\], not a list"),
    ({"left_context": [True]}, r"left_context is \[True\], not a list"),
    ({"left_context": None}, "left_context is None, not a list"),
    ({"left_context": [64, 40]},
     r"left_context is 40, not a multiple of each of sizes \(16, 32\): multiples of 32 are, such as 32"),
    ({"whole": 1.0}, "whole is 1.0, not a share of steps from 0 to below 1"), ({"whole": "half"}, "whole is 'half'"),
    ({"validate": 12}, r"validate is 12, not one of sizes \(8, 16, 32\) or null"),
    ({"lookahead": 8}, r"lookahead is 8, not a whole number from 0 to below the smallest of sizes \(8\)"),
    ({"lookahead": -1}, "lookahead is -1"), ({"lookahead": True}, "lookahead is True"),
    ({"lookahead": 1.0}, "lookahead is 1.0"),
])
def test_what_a_recipe_gives_it_is_checked(given, told):
    with pytest.raises(ValueError, match=told):
        Chunks(**given)


@settings(deadline=None)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=4), st.integers(1, 12), st.integers(0, 4))
def test_each_frame_sees_some_frame_and_a_real_one_all_real_ones_of_its_chunks(lengths, size, left):
    config, frames, t = DynChunkTrainConfig(size, left), torch.tensor(lengths), max(30, *lengths)
    masks = {}

    class Encoder(torch.nn.Module):
        def forward(self, src, src_key_padding_mask=None):
            masks["keys"] = src_key_padding_mask

    encoder = Encoder()
    with mask_last_chunk_padding(encoder, frames, config):
        encoder(src=torch.zeros(len(lengths), t, 6))
    pairs = make_transformer_src_mask(torch.zeros(1, t, 6), dynchunktrain_config=config)
    seen = ~(pairs[None] | masks["keys"][:, None])
    for row, length in enumerate(lengths):
        for frame in range(t):
            begin = frame // size * size
            found = seen[row, frame].nonzero().flatten().tolist()
            assert found
            if frame < length:
                assert found == list(range(max(0, begin - left * size), min(begin + size, length)))
    encoder(src=torch.zeros(1, t, 6))
    assert masks["keys"] is None, "the hook is gone"


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("attention", ["RoPEMHA", "RelPosMHAXL", "regularMHA"])
def test_short_utterances_beside_long_ones_give_no_nan(attention, fast):
    torch.manual_seed(0)
    encoder = conformer(6, 5, attention_type=attention).train()
    if fast:
        accelerate(encoder)
    x, frames = torch.randn(3, 40, 6, requires_grad=True), torch.tensor([40, 5, 1])
    config = DynChunkTrainConfig(4, 1)
    with mask_last_chunk_padding(encoder.encoder, frames, config):
        out = encoder.encode(x, frames / 40, dynchunktrain_config=config)
    assert out.isfinite().all()
    (out * (torch.arange(40) < frames[:, None])[..., None]).square().sum().backward()
    assert x.grad.isfinite().all() and x.grad[1, :5].abs().sum() > 0
    assert all(p.grad.isfinite().all() for p in encoder.parameters() if p.grad is not None)
