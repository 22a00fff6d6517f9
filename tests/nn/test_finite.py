"""Running statistics learn nothing from a batch with NaN, and from others what the plain layer does."""

import copy
import math

import pytest
import torch
from host_syncs import HostSyncs
from processes import results
from speechbrain.nnet.normalization import BatchNorm1d
from speechbrain.nnet.RNN import LiGRU
from speechbrain.processing.features import InputNormalization
from torch import nn
from toys import SIZE, ToyBrain, ToyTrainLoader, brain, state

from sbkit.nn.accelerate import accelerate
from sbkit.nn.finite import all_finite, keep_finite
from sbkit.train.distributed import ranks


class Codes(nn.Module):
    """An author's own: a codebook whose rows follow the vectors that are next to them."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.randn(4, SIZE, generator=torch.Generator().manual_seed(0)))

    def forward(self, x):
        chosen = torch.cdist(x, self.table).argmin(-1)
        if self.training:
            new = self.table.index_copy(0, chosen, self.table[chosen].lerp(x.detach(), 0.1))
            torch.where(all_finite(new), new, self.table, out=self.table)
        return x + self.table[chosen]


class Layers(nn.Module):
    """One of each kind: [B, SIZE] to [B]."""

    def __init__(self, alone=True):
        super().__init__()
        self.first = InputNormalization(norm_type="global")
        self.vectors, self.frames = nn.BatchNorm1d(SIZE), BatchNorm1d(input_size=SIZE)
        self.images = nn.BatchNorm2d(2)
        self.instances = nn.InstanceNorm1d(2, track_running_stats=True)
        self.recurrent = LiGRU(8, input_shape=[None, None, SIZE], normalization="batchnorm")
        # Not on several ranks: theirs is another layer, without that option, and each rank's codes follow its vectors.
        self.cumulative = nn.BatchNorm1d(SIZE, momentum=None, affine=False) if alone else nn.Identity()
        self.codes = Codes() if alone else nn.Identity()
        self.last = nn.Linear(8, 1)

    def forward(self, x):
        x = self.codes(self.cumulative(self.vectors(self.first(x[:, None])[:, 0])))
        x = self.frames(x[:, None])[:, 0]
        x = self.instances(self.images(x.view(-1, 2, 3, 1))[..., 0]).flatten(1)
        return self.last(self.recurrent(x[:, None].repeat(1, 3, 1))[0].mean(1))[:, 0]


class LayersBrain(ToyBrain):
    def compute_forward(self, batch, stage):
        return self.modules.model(batch.x)


class Epoch(ToyTrainLoader):
    """Three steps of which some are left out."""

    def __init__(self, left_out=(), spoilt=None):
        super().__init__(3, 8, ranks.rank(), ranks.world_size())
        self.left_out, self.spoilt = left_out, spoilt

    def steps(self, epoch):
        return self.count - len(self.left_out)

    def at(self, epoch, step=0):
        for batch in super().at(epoch, step):
            if batch.step == self.spoilt and self.rank == self.world - 1:
                batch.x[0, 2] = math.nan
            if batch.step not in self.left_out:
                yield batch


def trained(epoch, accelerated):
    """The state after an epoch."""
    torch.manual_seed(0)
    toy = brain(LayersBrain, modules=Layers(ranks.world_size() == 1), hparams={"accelerate": accelerated})
    toy.fit([1], epoch)
    first = toy.modules.model.first
    return {**state(toy), "count": torch.as_tensor(first.count), "mean": first.glob_mean, "std": first.glob_std}


def with_and_without(at, accelerated):
    """The state after an epoch in which a batch has one NaN, and after one without that batch."""
    return trained(Epoch(spoilt=at), accelerated), trained(Epoch(left_out=[at]), accelerated)


def compare(found, expected):
    assert len(found) > 25 and found["count"] == 16
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


@pytest.mark.parametrize("accelerated", [True, False])
@pytest.mark.parametrize("at", [0, 1])
def test_a_batch_with_nan_leaves_no_trace(at, accelerated, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the batch is saved for a replay
    compare(*with_and_without(at, accelerated))


@pytest.mark.slow
def test_on_two_ranks_neither(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for found, expected in results(with_and_without, 1, True):
        compare(found, expected)


def test_finite_batches_are_learnt_to_the_bit_without_a_wait():
    torch.manual_seed(0)
    plain = Layers()
    plain.cumulative = nn.Identity()  # torch reads its count on the host
    accelerate(plain)
    kept = copy.deepcopy(plain)
    keep_finite(kept)
    keep_finite(kept)  # as a second fit does
    grads = []
    for layers in (plain, kept):
        x = 3 + 5 * torch.randn(2, 8, SIZE, generator=torch.Generator().manual_seed(1))
        torch.manual_seed(2)
        with HostSyncs() as syncs:
            for batch in x:
                layers(batch).square().sum().backward()
        assert syncs.found == []
        grads.append([each.grad for each in layers.parameters()])
    assert all(map(torch.equal, *grads)) and list(plain.state_dict()) == list(kept.state_dict())
    assert all(map(torch.equal, plain.state_dict().values(), kept.state_dict().values()))
    assert torch.equal(plain.eval()(x[0]), kept.eval()(x[0]))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_value_is_enough(value):
    x = torch.full((3, 4), 3e38)
    assert all_finite(x, -x)
    x[2, 1] = value
    assert not all_finite(torch.zeros(2), x)


def test_what_keeps_finite_can_be_copied_and_pickled(tmp_path):
    norm = nn.BatchNorm1d(4)
    keep_finite(norm)
    torch.save(norm, tmp_path / "norm.pt")
    for again in (copy.deepcopy(norm), torch.load(tmp_path / "norm.pt", weights_only=False)):
        assert isinstance(again, nn.BatchNorm1d)
        again(torch.full((3, 4), math.nan))
        assert again.running_mean.isfinite().all() and again.running_mean is not norm.running_mean


def test_a_failed_forward_leaves_the_layer_its_own_buffers():
    norm = nn.BatchNorm1d(4)
    keep_finite(norm)
    before = norm.running_mean
    with pytest.raises(ValueError, match="expected 2D or 3D"):
        norm(torch.zeros(3))
    assert norm.running_mean is before and norm.num_batches_tracked == 0
