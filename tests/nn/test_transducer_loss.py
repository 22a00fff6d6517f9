"""The transducer's loss against the sum over all paths, written out, and against torchaudio's."""

import itertools

import pytest
import torch
import torchaudio
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

from sbkit.nn.transducer import TransducerHead, transducer_loss


def by_paths(log_probs, tokens, blank=0):
    """Sum the probabilities of all paths through [T, U + 1, V]: where each token is said, between the blanks."""
    frames, paths = len(log_probs), []
    for places in itertools.combinations_with_replacement(range(frames), len(tokens)):
        said = sum(log_probs[place, u, token] for u, (place, token) in enumerate(zip(places, tokens, strict=True)))
        silent = sum(log_probs[t, sum(place <= t for place in places), blank] for t in range(frames))
        paths.append(said + silent)
    return -torch.stack(paths).logsumexp(0)


@given(st.integers(1, 5), st.lists(st.integers(1, 3), max_size=4), st.integers(0, 3), st.integers(0, 2),
       st.integers(0, 1000))
@settings(deadline=None, max_examples=60)
def test_it_is_the_sum_over_all_paths_whatever_the_padding(frames, tokens, more_frames, more_tokens, seed):
    torch.manual_seed(seed)
    logits = 3 * torch.randn(2, frames + more_frames, len(tokens) + more_tokens + 1, 4, dtype=torch.float64)
    targets = torch.tensor([tokens + [3] * more_tokens] * 2, dtype=torch.int64)
    lengths = torch.tensor([frames, frames + more_frames]), torch.tensor([len(tokens), len(tokens) + more_tokens])
    found = transducer_loss(logits, targets, *lengths)
    expected = by_paths(logits[0, :frames, :len(tokens) + 1].log_softmax(-1), tokens)
    torch.testing.assert_close(found[0], expected)


def batch(dtype=torch.float32):
    torch.manual_seed(1)
    logits = (2 * torch.randn(3, 9, 5, 6, dtype=dtype)).requires_grad_()
    return logits, torch.randint(1, 6, (3, 4)), torch.tensor([9, 7, 1]), torch.tensor([4, 0, 2])


def test_losses_and_gradients_are_torchaudios():
    logits, tokens, frames, lengths = batch()
    mine = transducer_loss(logits, tokens, frames, lengths)
    theirs = torchaudio.functional.rnnt_loss(logits, tokens.int(), frames.int(), lengths.int(), blank=0,
                                             reduction="none")
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-4)
    weights = torch.tensor([1.0, 0.0, -2.0])
    [gradient], [expected] = (torch.autograd.grad((each * weights).sum(), logits) for each in (mine, theirs))
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-5)
    assert not gradient[1].any() and not gradient[2, 1:].any(), "nothing beyond an utterance's end"


@pytest.mark.slow
def test_gradients_are_exact_and_long_utterances_stay_so():
    assert torch.autograd.gradcheck(lambda logits: transducer_loss(logits, *batch()[1:]), batch(torch.float64)[0],
                                    fast_mode=True)
    torch.manual_seed(2)
    logits = 4 * torch.randn(1, 1000, 41, 5)
    given_ = torch.randint(1, 5, (1, 40)), torch.tensor([1000]), torch.tensor([40])
    single, double = (transducer_loss(each, *given_) for each in (logits, logits.double()))
    assert single.item() == pytest.approx(double.item(), rel=1e-6)


def test_stand_ins_have_its_shape():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        logits = torch.empty(2, 5, 4, 6, requires_grad=True)
        lengths = torch.empty(2, dtype=torch.int64)
        loss = transducer_loss(logits, torch.empty(2, 3, dtype=torch.int64), lengths, lengths)
        loss.sum().backward()
        assert loss.shape == (2,) and logits.grad.shape == logits.shape


def test_a_label_outside_the_vocabulary_is_named():
    logits, tokens, frames, lengths = batch()
    tokens[0, 1] = 6
    with refused("index-out-of-range"):
        transducer_loss(logits, tokens, frames, lengths, ids=["first", "second", "third"])


def test_a_prediction_depends_on_the_last_tokens_alone():
    torch.manual_seed(0)
    head = TransducerHead(6, 8, size=12, context=2)
    tokens = torch.tensor([[1, 2, 3, 4], [5, 2, 3, 4]])
    started = head.with_start(tokens)
    assert started.tolist() == [[0, 0, 1, 2, 3, 4], [0, 0, 5, 2, 3, 4]]
    whole = head.predict(started)
    assert whole.shape == (2, 5, 12), "one more than tokens: before the first"
    torch.testing.assert_close(whole[0, 3:], whole[1, 3:])
    assert not torch.allclose(whole[0, 1:3], whole[1, 1:3])
    torch.testing.assert_close(head.predict(torch.tensor([[2, 3]]))[:, 0], whole[:1, 3])
