"""A checkpoint of an adapted model holds what was trained, and names its base."""

import pytest
import torch
from refusals import refused
from torch import nn

from sbkit.nn.adapters import LoRA
from sbkit.score.weights import Mean
from sbkit.train.averaging import EMA
from sbkit.train.checkpoint import Checkpointer
from sbkit.train.checkpoint.adapted import Adapted, base_file
from sbkit.train.checkpoint_average import averaged_state


def made(folder, seed=0, rank=2):
    torch.manual_seed(seed)
    encoder, head = nn.Sequential(nn.Linear(40, 60), nn.ReLU(), nn.Linear(60, 40)), nn.Linear(40, 3)
    model = nn.ModuleList([encoder, head])
    LoRA(encoder, "*", rank=rank)
    return model, Adapted(model, encoder, folder)


def train(model, steps=3):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model[1](model[0](torch.randn(5, 40))).square().sum().backward()
        optimizer.step()


def test_a_checkpoint_is_small_and_brings_its_base_along(tmp_path):
    model, trained = made(tmp_path)
    trained.start_afresh()
    train(model)
    shelf = Checkpointer(tmp_path, {"model": trained})
    saved = shelf.save_checkpoint()
    whole = sum(p.numel() * 4 for p in model.parameters())
    held = torch.load(saved.path / "model.ckpt", weights_only=True)
    assert sum(t.numel() * 4 for t in held.values() if isinstance(t, torch.Tensor)) < whole / 3
    assert len(list(tmp_path.glob("base-*.safetensors"))) == 1

    other, again = made(tmp_path, seed=1)
    Checkpointer(tmp_path, {"model": again}).recover_if_possible()
    x = torch.randn(2, 40)
    assert torch.equal(other[1](other[0](x)), model[1](model[0](x)))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert [p.requires_grad for p in other.parameters()] == [p.requires_grad for p in model.parameters()]


def test_checkpoints_are_averaged_and_followed_by_a_moving_one(tmp_path):
    model, trained = made(tmp_path)
    trained.start_afresh()
    ema = EMA(trained, 0.5)
    shelf = Checkpointer(tmp_path, {"model": trained, "ema": ema})
    seen = []
    for _ in range(2):
        train(model)
        ema.update()
        seen.append(model[1].weight.detach().clone())
        shelf.save_checkpoint()
    mean, used = averaged_state(shelf, "model", Mean(2))
    trained.load_state_dict(mean)
    assert len(used) == 2
    torch.testing.assert_close(model[1].weight, (seen[0] + seen[1]) / 2)
    assert not any("0.weight" in name and "lora" not in name for name in ema.state_dict()["weights"])
    with ema.swapped():
        averaged = model[1].weight.detach().clone()
    assert not torch.equal(averaged, model[1].weight)


def test_another_base_is_refused_where_the_runs_own_is_gone(tmp_path):
    _, trained = made(tmp_path / "one")
    trained.start_afresh()
    state = trained.state_dict()
    _, other = made(tmp_path / "two", seed=1)
    with refused("missing-base"):
        other.load_state_dict(state)
    [file] = (tmp_path / "one").glob("base-*")
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / file.name).write_bytes(file.read_bytes()[:-100])
    with refused("damaged-checkpoint", file=tmp_path / "two" / file.name):
        other.load_state_dict(state)
    (tmp_path / "two" / file.name).write_bytes(file.read_bytes()[:-4] + b"\0\0\0\0")
    with refused("damaged-checkpoint", file=tmp_path / "two" / file.name):
        other.load_state_dict(state)
    (tmp_path / "two" / file.name).write_bytes(file.read_bytes())
    other.load_state_dict(state)
    assert other.base_hash() == trained.base_hash()
    with pytest.raises(RuntimeError, match="of another shape"):
        made(tmp_path / "two", rank=3)[1].load_state_dict(state)


def test_a_model_without_a_frozen_base_is_refused(tmp_path):
    encoder = nn.Linear(3, 3)
    with refused("bad-adapted"):
        Adapted(nn.ModuleList([encoder]), encoder, tmp_path)
    with refused("bad-adapted"):
        Adapted(nn.ModuleList([nn.Linear(2, 2)]), encoder, tmp_path)


@pytest.mark.parametrize("named", ["x/../../../y", "", "0" * 63, "G" * 64])
def test_a_base_is_named_by_a_hash_alone(tmp_path, named):
    with refused("damaged-checkpoint", file=tmp_path):
        base_file(tmp_path, named)
