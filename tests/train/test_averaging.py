"""Averages of checkpoints and of weights over time, against plain arithmetic."""

import pytest
import torch
from refusals import refused

from sbkit.errors import SbkitError
from sbkit.score.weights import Mean
from sbkit.train.averaging import EMA
from sbkit.train.checkpoint import Checkpointer
from sbkit.train.checkpoint_average import averaged_state, load_average


def model(width=3):
    return torch.nn.Sequential(torch.nn.Linear(2, width), torch.nn.BatchNorm1d(width))


def saved(folder, wers, dtype=torch.float32):
    """Checkpoints of random weights; their state dicts by WER."""
    torch.manual_seed(0)
    ckpt, states = Checkpointer(folder, {"model": model().to(dtype)}), {}
    net = ckpt.recoverables["model"]
    for i, wer in enumerate(wers):
        with torch.no_grad():
            for param in net.parameters():
                param.normal_()
        net[1].num_batches_tracked.fill_(i)
        ckpt.save_checkpoint(meta={"WER": wer})
        states[wer] = {name: value.clone() for name, value in net.state_dict().items()}
    return ckpt, states


def test_mean_of_the_best(tmp_path):
    ckpt, states = saved(tmp_path, [5.0, 1.0, 4.0, 2.0, 3.0])
    mean, used = averaged_state(ckpt, "model", Mean(3), min_key="WER")
    assert [c.meta["WER"] for c in used] == [1.0, 2.0, 3.0]
    for name in ("0.weight", "0.bias", "1.weight"):
        expected = torch.stack([states[wer][name] for wer in (1.0, 2.0, 3.0)]).double().mean(0)
        torch.testing.assert_close(mean[name].double(), expected, rtol=1e-7, atol=1e-7)
        assert mean[name].dtype == torch.float32
    assert mean["1.num_batches_tracked"] == 1  # a counter has no mean: the best one's
    ckpt.recoverables["model"].load_state_dict(mean)


def test_half_precision_is_summed_in_full(tmp_path):
    ckpt, states = saved(tmp_path, [float(i) for i in range(9)], torch.bfloat16)
    mean, _ = averaged_state(ckpt, "model", Mean(9), max_key="WER")
    expected = torch.stack([state["0.weight"] for state in states.values()]).double().mean(0).bfloat16()
    assert mean["0.weight"].dtype == torch.bfloat16 and torch.equal(mean["0.weight"], expected)


def test_damaged_checkpoints_are_replaced_by_the_next_best(tmp_path, caplog):
    ckpt, _ = saved(tmp_path, [1.0, 2.0, 3.0])
    path = ckpt.find_checkpoint(min_key="WER").paramfiles["model"]
    path.write_bytes(path.read_bytes()[:-1])
    for asked in (2, 3):
        assert "Averaging" not in caplog.text
        _, used = averaged_state(ckpt, "model", Mean(asked), min_key="WER")
        assert [c.meta["WER"] for c in used] == [2.0, 3.0] and "Leaving" in caplog.text
    assert "Averaging 2 of 3 requested checkpoints" in caplog.text


def test_checkpoints_that_cannot_be_averaged_are_an_error(tmp_path):
    ckpt, _ = saved(tmp_path, [1.0])
    with refused("unknown-metric", value="PER"):
        averaged_state(ckpt, "model", Mean(1), min_key="PER")
    with refused("no-weights"):
        averaged_state(ckpt, "lm", Mean(1))
    with pytest.raises(SbkitError, match="average 0 checkpoints"):
        Mean(0)
    Checkpointer(tmp_path, {"model": model(width=4)}).save_checkpoint(meta={"WER": 2.0})
    with refused("other-model", wording=False):
        averaged_state(ckpt, "model", Mean(2))


def walk(net, ema, steps):
    """Random steps; what a moving average should be, in plain arithmetic."""
    expected = None
    for update in range(steps):
        with torch.no_grad():
            for param in net.parameters():
                param.add_(torch.randn_like(param))
        ema.update()
        now = {name: param.detach().double().clone() for name, param in net.named_parameters()}
        decay = min(ema.decay, (1 + update) / (10 + update))
        before = expected or now
        expected = {name: value * (1 - decay) + before[name] * decay for name, value in now.items()}
    return expected


def test_moving_average_is_the_formula(tmp_path):
    net = model()
    ema = EMA(net, decay=0.7)
    expected = walk(net, ema, 40)
    weights = ema.state_dict()["weights"]
    for name, value in expected.items():
        torch.testing.assert_close(weights[name].double(), value, rtol=1e-5, atol=1e-6)
    assert torch.equal(weights["1.running_mean"], net[1].running_mean)


class Uniform(EMA):
    """The mean of the parameters after each step."""

    def weight(self, updates):
        return 1 / (1 + updates)


def test_another_moving_average_overrides_the_weight_alone(tmp_path):
    net = model()
    average = Uniform(net)
    seen = []
    for _ in range(6):
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.normal_()
        seen.append(net[0].weight.detach().clone())
        average.update()
    expected = torch.stack(seen).mean(0)
    with average.swapped():
        torch.testing.assert_close(net[0].weight.detach(), expected)

    Checkpointer(tmp_path, {"model": net, "ema": average}).save_checkpoint()
    again = Uniform(net)
    shelf = Checkpointer(tmp_path, {"model": net, "ema": again})
    shelf.recover_if_possible()
    assert again.updates == 6 and torch.equal(again.tensors()[0], average.tensors()[0])
    load_average(shelf, Mean(1))
    torch.testing.assert_close(net[0].weight.detach(), expected)


def test_half_precision_parameters_are_averaged_in_full():
    """In bf16, 1 + 0.001 is 1: an average would never move."""
    net = torch.nn.Linear(1, 1, bias=False).bfloat16()
    ema = EMA(net, decay=0.999)
    with torch.no_grad():
        net.weight.fill_(1.0)
    ema.update()
    ema.updates = 100_000
    with torch.no_grad():
        net.weight.fill_(2.0)
    for _ in range(10):
        ema.update()
    assert 1.009 < float(ema.state_dict()["weights"]["weight"]) < 1.011


def test_swapped_evaluates_with_averages_and_gives_the_own_weights_back():
    net = model()
    ema = EMA(net, decay=0.9)
    with ema.swapped():  # before the first update there is nothing to swap
        pass
    walk(net, ema, 5)
    own = {name: param.detach().clone() for name, param in net.named_parameters()}
    with pytest.raises(ZeroDivisionError), ema.swapped():
        inside = {name: param.detach().clone() for name, param in net.named_parameters()}
        with pytest.raises(RuntimeError, match="inside"):
            ema.update()
        raise ZeroDivisionError
    weights = ema.state_dict()["weights"]
    assert all(torch.equal(inside[name], weights[name]) for name in own)
    assert not torch.equal(inside["0.weight"], own["0.weight"])
    assert all(torch.equal(param, own[name]) for name, param in net.named_parameters())


def test_a_resumed_average_continues_to_the_same_bits(tmp_path):
    torch.manual_seed(1)
    net = model()
    ema = EMA(net, decay=0.9)
    ckpt = Checkpointer(tmp_path, {"model": net, "ema": ema}, asynchronous=True)
    walk(net, ema, 5)
    ckpt.save_checkpoint()
    state = torch.get_rng_state()
    walk(net, ema, 5)
    ckpt.wait()
    expected = ema.state_dict()["weights"]

    net = model()
    ema = EMA(net, decay=0.9)
    Checkpointer(tmp_path, {"model": net, "ema": ema}).recover_if_possible()
    torch.set_rng_state(state)
    walk(net, ema, 5)
    assert ema.updates == 10
    assert all(torch.equal(value, expected[name]) for name, value in ema.state_dict()["weights"].items())


def test_averages_can_be_averaged_and_loaded_into_the_model(tmp_path):
    net = model()
    ema = EMA(net)
    ema.update()
    ckpt = Checkpointer(tmp_path, {"ema": ema})
    ckpt.save_checkpoint()
    ckpt.save_checkpoint()
    net.load_state_dict(averaged_state(ckpt, "ema", Mean(2))[0], strict=True)


def test_an_average_of_another_model_is_an_error(tmp_path):
    ema = EMA(model())
    ema.update()
    Checkpointer(tmp_path, {"ema": ema}).save_checkpoint()
    with refused("other-model"):
        Checkpointer(tmp_path, {"ema": EMA(model(width=4))}).recover_if_possible()


def test_tied_weights_are_averaged_under_each_name():
    layer = torch.nn.Linear(2, 2)
    net = torch.nn.ModuleDict({"a": layer, "b": layer})
    ema = EMA(net, decay=0.9)
    walk(net, ema, 3)
    weights = ema.state_dict()["weights"]
    assert torch.equal(weights["a.weight"], weights["b.weight"])
    assert not torch.equal(weights["a.weight"], layer.weight)


def test_frozen_parameters_stay_the_models():
    net = model()
    net[0].weight.requires_grad_(False)
    ema = EMA(net, decay=0.9)
    walk(net, ema, 3)
    assert torch.equal(ema.state_dict()["weights"]["0.weight"], net[0].weight)


@pytest.mark.parametrize("decay", [-0.1, 1.0, 2])
def test_invalid_decays_are_refused(decay):
    with refused("bad-value", key="decay", value=decay):
        EMA(model(), decay)
