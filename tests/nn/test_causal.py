"""The causal front end: what it sees, and equal results in pieces and as a whole."""

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from sbkit.nn.causal import CausalFrontEnd
from sbkit.nn.fast import fused
from sbkit.nn.lengths import LengthRule
from sbkit.nn.native import library


def front_end(**options):
    torch.manual_seed(0)
    return CausalFrontEnd(**{"n_features": 20, "channels": [4, 6], **options}).eval()


def features(frames, rows=2, width=20):
    return torch.randn(rows, frames, width, generator=torch.Generator().manual_seed(1))


def reference(layer, x):
    """The same layers with torch's own padding, [B, C, T, F]."""
    x = x[:, None]
    for each in layer.layers:
        side = each.conv.kernel_size[0] // 2
        x = functional.pad(x, (side, side, 2 * side, 0))
        x = functional.conv2d(x, each.conv.weight, each.conv.bias, each.conv.stride)
        x = functional.leaky_relu(each.norm(x.permute(0, 2, 3, 1))).permute(0, 3, 1, 2)
    return x.permute(0, 2, 3, 1)


@pytest.mark.parametrize("options", [{}, {"channels": [3]}, {"kernel_size": 5}, {"channels": [2, 3, 4]},
                                     {"n_features": 21}, {"stride": 1}])
def test_its_layers_are_convolution_norm_and_activation(options):
    layer = front_end(**options)
    x = features(37, width=options.get("n_features", 20))
    torch.testing.assert_close(layer(x), reference(layer, x))


@torch.no_grad()
def test_frame_j_sees_features_up_to_4_j():
    layer, x = front_end(), features(40, rows=1)
    before = layer(x)
    for changed in range(40):
        other = x.clone()
        other[:, changed] += 1
        moved = (layer(other) != before).any(3).any(2)[0].nonzero().flatten().tolist()
        assert moved and moved[0] == -(-changed // 4) if changed <= 36 else moved == []


@given(st.lists(st.integers(1, 5), min_size=1, max_size=8), st.integers(0, 3), st.integers(0, 1000))
@settings(max_examples=25, deadline=None)
@torch.no_grad()
def test_in_pieces_it_is_the_whole(pieces, rest, seed):
    """Pieces of whole frames, and a last one of any length."""
    layer = front_end()
    x = torch.randn(2, 4 * sum(pieces) + rest, 20, generator=torch.Generator().manual_seed(seed))
    state, found = layer.state(2), []
    for piece in x.split([4 * each for each in pieces] + ([rest] if rest else []), dim=1):
        y, after = layer.forward_step(piece, state)
        assert [each.shape for each in after] == [each.shape for each in state]
        state = after
        found.append(y)
    torch.testing.assert_close(torch.cat(found, dim=1), layer(x), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_rows_of_a_step_keep_their_own_states():
    layer, x = front_end(), features(16)
    _, first = layer.forward_step(x[:1, :8], layer.state(1))
    mixed = tuple(torch.cat([a, b]) for a, b in zip(first, layer.state(1), strict=True))
    found, _ = layer.forward_step(torch.stack([x[0, 8:], x[1, :8]]), mixed)
    torch.testing.assert_close(found[0], layer(x)[0, 2:])
    torch.testing.assert_close(found[1], layer(x)[1, :2])


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_the_compiled_kernels_train_it_as_torch_does(precision, monkeypatch):
    if library.load() is not None:
        pytest.skip("no compiler")
    layer, x = front_end(dropout=0.0).train(), features(30)

    def trained():
        layer.zero_grad()
        with torch.autocast("cpu", precision, enabled=precision != torch.float32):
            out = layer(x)
        (out.float() ** 2).mean().backward()
        return [out.float(), *(p.grad.clone() for p in layer.parameters())]

    with mock.patch.object(library, "call", wraps=library.call) as calls:
        fast = trained()
    assert {call.args[0] for call in calls.mock_calls} == {"norm_forward", "norm_backward"}
    monkeypatch.setattr(fused, "precision", lambda x: None)
    close = {"rtol": 1e-4, "atol": 1e-5} if precision == torch.float32 else {"rtol": 0.05, "atol": 0.03}
    for found, expected in zip(fast, trained(), strict=True):
        torch.testing.assert_close(found, expected, **close)


def test_its_rule_of_lengths_is_found():
    rule = LengthRule.probe(front_end(), 20)
    assert rule.factor == 4 and all(rule(frames) == -(-frames // 4) for frames in range(1, 300))


@pytest.mark.parametrize(("options", "message"), [
    ({"kernel_size": 4}, "odd"), ({"channels": []}, "channels"), ({"stride": 0}, "stride")])
def test_wrong_sizes_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        front_end(**options)
