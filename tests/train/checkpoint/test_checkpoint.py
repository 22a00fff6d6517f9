"""Checkpoints: what SpeechBrain reads and writes, which one is used, and what a user is told."""

import copy
import logging
import threading
from functools import partial

import numpy as np
import pytest
import torch
import yaml
from refusals import refused
from speechbrain.nnet.schedulers import InverseSquareRootScheduler, NewBobScheduler, NoamScheduler
from speechbrain.processing.features import InputNormalization
from speechbrain.utils import checkpoints as stock
from speechbrain.utils.epoch_loop import EpochCounter

from sbkit.train.checkpoint import Checkpointer
from sbkit.train.muon import Muon


class Run:
    """A model, its optimizer and an epoch counter with a checkpointer over them."""

    def __init__(self, folder, kind=Checkpointer, width=4, **options):
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.BatchNorm1d(width))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.counter = EpochCounter(100)
        self.checkpointer = kind(folder, {"model": self.model, "optimizer": self.optimizer,
                                          "counter": self.counter}, **options)

    def train(self):
        self.model(torch.randn(5, 3)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self

    def epoch(self, **meta):
        next(self.counter)
        self.train()
        self.checkpointer.save_checkpoint(meta=meta)
        return self.weights()

    def weights(self):
        return {name: value.clone() for name, value in self.model.state_dict().items()}

    def recovered(self, **how):
        return self.checkpointer.recover_if_possible(**how)

    def newest(self):
        return self.checkpointer.find_checkpoint().path


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def asynchronous(request):
    return request.param


# ------------------------------------------------------------------ the format is SpeechBrain's


@pytest.mark.parametrize("writer, reader", [
    (Checkpointer, Checkpointer), (partial(Checkpointer, asynchronous=True), Checkpointer),
    (Checkpointer, stock.Checkpointer), (stock.Checkpointer, Checkpointer)])
def test_what_one_saves_the_other_loads(tmp_path, writer, reader):
    run = Run(tmp_path, kind=writer)
    weights = run.epoch(WER=3.0)
    moments = run.optimizer.state_dict()["state"][0]["exp_avg"].clone()
    run.epoch(WER=4.0)
    assert run.newest().exists()  # now it is written
    other = Run(tmp_path, kind=reader).train().train()
    assert other.recovered(min_key="WER").meta["WER"] == 3.0
    assert same(other.weights(), weights) and other.counter.current == 1
    assert torch.equal(other.optimizer.state_dict()["state"][0]["exp_avg"], moments)


def test_files_of_a_checkpoint(tmp_path):
    run = Run(tmp_path)
    run.epoch()
    names = {path.name for path in run.newest().iterdir()}
    assert names == {"CKPT.yaml", "CKPT.sums.json", "model.ckpt", "optimizer.ckpt", "counter.ckpt"}


class Own(stock.Checkpointer):
    """A recipe's."""

    calls = 0

    def save_checkpoint(self, *args, **kwargs):
        self.calls += 1
        return super().save_checkpoint(*args, **kwargs)


@pytest.mark.parametrize("kind", [stock.Checkpointer, Own])
def test_adopting_keeps_the_object_its_recoverables_and_its_overrides(tmp_path, kind):
    run = Run(tmp_path, kind=kind)
    assert Checkpointer.adopt(run.checkpointer, asynchronous=True) is run.checkpointer
    assert isinstance(run.checkpointer, Checkpointer) and run.checkpointer.asynchronous
    run.epoch()
    assert (run.newest() / "CKPT.sums.json").exists()
    assert getattr(run.checkpointer, "calls", 1) == 1 and isinstance(run.checkpointer, kind)
    assert Checkpointer.adopt(None) is None


def test_defaults_are_not_shared_between_calls(tmp_path):
    """SpeechBrain appends to a default list: there, the second call keeps recent checkpoints unasked."""
    run = Run(tmp_path)
    for wer in (1.0, 2.0, 3.0):
        run.checkpointer.save_and_keep_only(meta={"WER": wer}, min_keys=["WER"])
        run.checkpointer.save_and_keep_only(meta={"WER": wer}, min_keys=["WER"], keep_recent=False)
    assert {ckpt.meta["WER"] for ckpt in run.checkpointer.list_checkpoints()} == {1.0}


def test_meta_values_that_yaml_does_not_know(tmp_path):
    """SpeechBrain writes these as Python objects and then can't read its own file."""
    run = Run(tmp_path)
    run.epoch(WER=np.float32(1.5), loss=torch.tensor(2.0), shape=(1, 2), at=tmp_path, many=torch.ones(2))
    meta = Run(tmp_path).recovered().meta
    assert meta["WER"] == 1.5 and meta["loss"] == 2.0 and meta["shape"] == [1, 2]
    assert meta["at"] == str(tmp_path) and meta["many"] == [1.0, 1.0]


def test_tied_weights_stay_one_tensor_in_the_file(tmp_path, asynchronous):
    big = torch.nn.Linear(100, 100, bias=False)
    model = torch.nn.ModuleDict({"a": big, "b": big})
    ckpt = Checkpointer(tmp_path, {"model": model}, asynchronous=asynchronous)
    path = ckpt.save_checkpoint().paramfiles["model"]
    ckpt.wait()
    assert path.stat().st_size < 60_000


SCHEDULERS = InverseSquareRootScheduler(3), NoamScheduler(1.0, 3), NewBobScheduler(1.0)


@pytest.mark.parametrize("scheduler", SCHEDULERS, ids=lambda scheduler: type(scheduler).__name__)
def test_schedulers_come_back(tmp_path, scheduler):
    """Inverse square root has no loader in SpeechBrain; NewBob keeps numpy numbers if it is given them."""
    def use(obj):
        if isinstance(obj, NewBobScheduler):
            obj(np.float64(3.0))
        else:
            obj(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0))
        return obj

    ckpt = Checkpointer(tmp_path, {"schedule": use(use(scheduler))})
    state = copy.deepcopy({key: vars(scheduler).get(key) for key in ("n_steps", "metric_values")})
    ckpt.save_checkpoint()
    use(scheduler)
    ckpt.recover_if_possible()
    assert {key: vars(scheduler).get(key) for key in state} == state


# ------------------------------------------------------------------ a checkpoint that is damaged


def flip_a_byte(path):
    data = bytearray(path.read_bytes())
    weights = torch.load(path)["0.weight"].numpy().tobytes()
    data[data.index(weights) + 7] ^= 1
    path.write_bytes(data)


DAMAGES = {
    "cut off": lambda ckpt: (ckpt / "model.ckpt").write_bytes((ckpt / "model.ckpt").read_bytes()[:-10]),
    "a flipped bit": lambda ckpt: flip_a_byte(ckpt / "model.ckpt"),
    "text cut off": lambda ckpt: (ckpt / "counter.ckpt").write_text(""),
    "a file gone": lambda ckpt: (ckpt / "optimizer.ckpt").unlink(),
    "meta empty": lambda ckpt: (ckpt / "CKPT.yaml").write_text(""),
    "meta no yaml": lambda ckpt: (ckpt / "CKPT.yaml").write_text("WER: [1,"),
    "meta without time": lambda ckpt: (ckpt / "CKPT.yaml").write_text("WER: 1"),
}


@pytest.mark.parametrize("writer", [Checkpointer, stock.Checkpointer], ids=["ours", "speechbrain's"])
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_checkpoint_is_skipped_with_one_warning(tmp_path, damage, writer, caplog):
    run = Run(tmp_path, kind=writer)
    weights = run.epoch()
    run.epoch()
    newest = run.newest()
    damage(newest)
    with caplog.at_level(logging.WARNING):
        other = Run(tmp_path)
        other.recovered()
    assert same(other.weights(), weights) and other.counter.current == 1
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1 and "Skipping" in warnings[0], warnings


def test_a_text_file_that_speechbrain_left_broken_shows_at_loading(tmp_path, caplog):
    run = Run(tmp_path, kind=stock.Checkpointer)
    weights = run.epoch()
    run.epoch()
    (run.newest() / "counter.ckpt").write_text("not a number")
    other = Run(tmp_path)
    with caplog.at_level(logging.WARNING):
        other.recovered()
    assert same(other.weights(), weights) and "counter.ckpt can't be loaded" in caplog.text


def test_all_damaged_is_an_error_and_not_a_start_from_scratch(tmp_path):
    run = Run(tmp_path)
    run.epoch()
    flip_a_byte(run.newest() / "model.ckpt")
    run.epoch()
    (run.newest() / "CKPT.yaml").write_text("")
    with refused("damaged-checkpoint", file=tmp_path, wording=False) as error:
        Run(tmp_path).recovered()
    for part in ("CKPT.yaml is empty", "model.ckpt does not match its checksum", "from scratch"):
        assert part in str(error.value)


def test_a_checkpoint_that_speechbrain_did_not_finish_is_skipped(tmp_path):
    """Its CKPT.yaml comes first: a folder with nothing else looks like a checkpoint."""
    run = Run(tmp_path)
    weights = run.epoch()
    half = tmp_path / "CKPT+2099-01-01+00-00-00+00"
    half.mkdir()
    (half / "CKPT.yaml").write_text(yaml.dump({"unixtime": 4e9, "end-of-epoch": True}))
    other = Run(tmp_path)
    assert other.recovered() is not None and same(other.weights(), weights)


def test_loading_a_damaged_one_by_hand_is_an_error(tmp_path):
    run = Run(tmp_path)
    run.epoch()
    flip_a_byte(run.newest() / "model.ckpt")
    with refused("damaged-checkpoint", file=run.newest(), wording=False):
        run.checkpointer.load_checkpoint(run.checkpointer.find_checkpoint())


def test_no_checkpoint_is_no_error(tmp_path):
    assert Run(tmp_path).recovered(min_key="WER") is None


# ------------------------------------------------------------------ a checkpoint of something else


def test_the_error_for_another_model_lists_keys_and_shapes(tmp_path):
    Run(tmp_path).epoch()
    other = Run(tmp_path, width=6)
    with refused("other-model", key="model", wording=False) as error:
        other.recovered()
    text = str(error.value)
    assert "of another shape" in text and "0.weight: 4x3 saved, 6x3 here" in text


def test_missing_and_unexpected_keys_are_counted_and_some_named(tmp_path):
    model = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(4))
    Checkpointer(tmp_path, {"model": model}).save_checkpoint()
    other = torch.nn.ModuleDict({f"layer{i}": torch.nn.Linear(2, 2, bias=False) for i in range(7)})
    with refused("other-model", key="model", wording=False) as error:
        Checkpointer(tmp_path, {"model": other}).recover_if_possible()
    text = str(error.value)
    assert "7 missing in the checkpoint (layer0.weight, " in text and "and 2 more" in text
    assert "8 only in the checkpoint (0.weight, 0.bias, " in text


def test_another_optimizer_is_an_error(tmp_path):
    Run(tmp_path).epoch()
    other = Run(tmp_path)
    other.checkpointer.recoverables["optimizer"] = torch.optim.AdamW(other.model[0].parameters())
    with refused("other-model", key="optimizer", wording=False) as error:
        other.recovered()
    assert "groups have [4] tensors, and [2] here" in error.value.message


@pytest.mark.parametrize("before, now, lacks", [
    (Muon, torch.optim.AdamW, "step'"), (torch.optim.AdamW, torch.optim.SGD, ""),
    (torch.optim.AdamW, torch.optim.Adagrad, ""), (torch.optim.AdamW, torch.optim.Adafactor, "")])
def test_an_optimizer_that_needs_what_another_did_not_save_is_an_error(tmp_path, before, now, lacks):
    layer = torch.nn.Linear(4, 4)
    optimizer = before(layer.parameters(), **{"modules": [layer]} if before is Muon else {})
    layer(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    Checkpointer(tmp_path, {"optimizer": optimizer}).save_checkpoint()
    other = Checkpointer(tmp_path, {"optimizer": now(layer.parameters())})
    with refused("other-optimizer", wording=False) as error:
        other.recover_if_possible()
    assert f"another optimizer than {now.__name__}, which needs '{lacks}" in error.value.message
    assert "--init_from" in error.value.hint


@pytest.mark.parametrize("opt_class, before, now", [
    (torch.optim.AdamW, {"weight_decay": 0.1, "betas": (0.9, 0.999)}, {"weight_decay": 0.2, "betas": (0.8, 0.98)}),
    (torch.optim.AdamW, {"fused": False}, {"fused": True}),
    (torch.optim.SGD, {"momentum": 0.9}, {"momentum": 0.8}),
    (Muon, {"orthogonalize_every": 4, "update_rms": 0.1, "weight_decay": 0.1}, {"weight_decay": 0.0})])
def test_a_resumed_optimizer_has_the_new_options_and_the_old_rate(tmp_path, opt_class, before, now):
    layer = torch.nn.Linear(4, 4)
    more = {"modules": [layer]} if opt_class is Muon else {}
    first = opt_class(layer.parameters(), lr=0.1, **more, **before)
    first.param_groups[0]["lr"] = 0.05
    Checkpointer(tmp_path, {"optimizer": first}).save_checkpoint()
    second = opt_class(layer.parameters(), lr=0.1, **more, **now)
    for _ in range(2):  # the second time it tests, say
        Checkpointer(tmp_path, {"optimizer": second}).recover_if_possible()
        group = second.param_groups[0]
        assert {name: group[name] for name in now} == now and group["lr"] == 0.05


def test_a_missing_state_is_an_error_unless_it_is_optional(tmp_path, caplog):
    Run(tmp_path).epoch()
    other = Run(tmp_path)
    other.checkpointer.add_recoverable("ema", torch.nn.Linear(1, 1))
    with refused("no-saved-state", key="ema", wording=False):
        other.recovered()
    other.checkpointer.add_recoverable("ema", torch.nn.Linear(1, 1), optional_load=True)
    assert other.recovered() is not None and "has no state for 'ema', which keeps its initial state" in caplog.text


def test_code_in_a_file_is_never_run(tmp_path):
    class Evil:
        def __reduce__(self):
            return (threading.Thread, ())

    run = Run(tmp_path, kind=stock.Checkpointer)
    run.epoch()
    torch.save({"x": Evil()}, run.newest() / "model.ckpt")
    with refused("unsafe-file", file=run.newest() / "model.ckpt", wording=False):
        Run(tmp_path).recovered()


def test_a_metric_that_no_meta_file_has_lists_those_there_are(tmp_path):
    run = Run(tmp_path)
    run.epoch(WER=1.0, loss=2.0)
    for how in ({"min_key": "PER"}, {"max_key": "PER"}):
        with refused("unknown-metric", value="PER"):
            run.checkpointer.find_checkpoints(**how)


@pytest.mark.parametrize("how", [{"min_key": "PER"}, {"max_key": "PER"}])
def test_with_a_metric_that_no_meta_file_has_the_weights_at_hand_stay_as_in_speechbrain(tmp_path, how, caplog):
    """Recipes name one by mistake, and would end in an error after all their training."""
    saved = {kind: Run(tmp_path / kind.__module__, kind=kind) for kind in (stock.Checkpointer, Checkpointer)}
    for run in saved.values():
        run.epoch(WER=1.0)
        with torch.no_grad():
            for weight in run.model.parameters():
                weight.add_(1.0)
        before = [weight.clone() for weight in run.model.parameters()]
        assert run.checkpointer.recover_if_possible(**how) is None
        assert all(map(torch.equal, before, run.model.parameters()))
    assert "has 'PER' in its CKPT.yaml; existing keys: WER. So no checkpoint is loaded" in caplog.text
    assert run.checkpointer.recover_if_possible(min_key="WER") is not None
    assert not any(map(torch.equal, before, run.model.parameters()))


def test_a_wrong_metric_for_keeping_is_an_error_after_saving_and_before_deleting(tmp_path, asynchronous):
    run = Run(tmp_path, asynchronous=asynchronous)
    run.epoch(WER=1.0)
    with refused("unknown-metric", value="PER"):
        run.checkpointer.save_and_keep_only(meta={"WER": 2.0}, min_keys=["PER"])
    assert sorted(ckpt.meta["WER"] for ckpt in run.checkpointer.list_checkpoints()) == [1.0, 2.0]


def test_state_outside_the_state_dict_is_reported_once(tmp_path, caplog):
    normalize = InputNormalization()
    model = torch.nn.ModuleDict({"normalize": normalize, "linear": torch.nn.Linear(2, 2)})
    ckpt = Checkpointer(tmp_path, {"model": model})
    ckpt.save_checkpoint()
    ckpt.save_checkpoint()
    assert caplog.text.count("model.normalize (InputNormalization) has state") == 1
    caplog.clear()
    ckpt.add_recoverable("normalizer", normalize)
    ckpt.save_checkpoint()
    assert "has state" not in caplog.text


# ------------------------------------------------------------------ which ones are kept


def wers(run):
    return sorted(ckpt.meta["WER"] for ckpt in run.checkpointer.list_checkpoints())


def test_best_and_last_and_every_third_are_kept(tmp_path, asynchronous):
    run = Run(tmp_path, asynchronous=asynchronous)
    for epoch, wer in enumerate([9.0, 3.0, 8.0, 1.0, 2.0, 7.0, 6.0], start=1):
        run.counter.current = epoch
        run.checkpointer.save_and_keep_only(meta={"WER": wer}, min_keys=["WER"], num_to_keep=2, keep_every=3)
    # the best two are 1 and 2, the last two 7 and 6, every third 8 and 7
    assert wers(run) == [1.0, 2.0, 6.0, 7.0, 8.0]


def test_keeping_every_few_epochs_needs_an_epoch(tmp_path):
    ckpt = Checkpointer(tmp_path, {"model": torch.nn.Linear(1, 1)})
    with refused("no-epoch-counter"):
        ckpt.save_and_keep_only(keep_every=2)
    ckpt.save_and_keep_only(meta={"epoch": 2}, keep_every=2)
    ckpt.save_and_keep_only(meta={"epoch": 3}, keep_every=2)
    ckpt.save_and_keep_only(meta={"epoch": 5}, keep_every=2)
    assert sorted(c.meta["epoch"] for c in ckpt.list_checkpoints()) == [2, 5]


@pytest.mark.parametrize("nan", [float("nan"), "not a number"])
def test_nan_is_never_the_best(tmp_path, nan):
    run = Run(tmp_path)
    for wer in (nan, 5.0, nan, 4.0, nan):
        run.epoch(WER=wer)
    for how in ({"min_key": "WER"}, {"max_key": "WER"}):
        found = [ckpt.meta["WER"] for ckpt in run.checkpointer.find_checkpoints(**how)]
        assert found[:2] == ([4.0, 5.0] if "min_key" in how else [5.0, 4.0])


@pytest.mark.parametrize(("epochs", "best"), [
    ([(100.0, 2.9), (100.9, 2.0), (100.2, 2.5), (100.0, float("nan"))], [(100.9, 2.0), (100.2, 2.5), (100.0, 2.9)]),
    ([(100.0, 1.0), (99.0, 2.9), (98.0, 3.0)], [(98.0, 3.0), (99.0, 2.9), (100.0, 1.0)]),
    ([(100.0, 2.0), (150.0, 2.0)], [(150.0, 2.0), (100.0, 2.0)])])
def test_empty_transcripts_are_no_better_than_more_than_a_hundred_percent(tmp_path, epochs, best):
    run = Run(tmp_path)
    for wer, loss in epochs:
        run.checkpointer.save_and_keep_only(meta={"WER": wer, "loss": loss}, num_to_keep=3, min_keys=["WER"])
    found = [(ckpt.meta["WER"], ckpt.meta["loss"]) for ckpt in run.checkpointer.find_checkpoints(min_key="WER")]
    assert found[:3] == best
    assert run.recovered(min_key="WER").meta["WER"] == best[0][0]


def test_the_last_saved_is_the_newest_though_the_clock_went_back(tmp_path, monkeypatch):
    run = Run(tmp_path)
    monkeypatch.setattr("time.time", lambda: 2e9)
    run.epoch(n=1)
    monkeypatch.setattr("time.time", lambda: 1e9)
    weights = run.epoch(n=2)
    run.checkpointer.delete_checkpoints()
    assert run.recovered().meta["n"] == 2 and same(run.weights(), weights)


def test_two_orders_at_once_are_refused(tmp_path):
    with pytest.raises(ValueError, match="only one of"):
        Run(tmp_path).checkpointer.find_checkpoints(min_key="a", max_key="b")


def test_saving_under_a_name_replaces_what_had_it(tmp_path):
    run = Run(tmp_path)
    run.checkpointer.save_checkpoint(name="best", meta={"n": 1})
    weights = run.train().weights()
    run.checkpointer.save_checkpoint(name="best", meta={"n": 2})
    assert [path.name for path in tmp_path.iterdir()] == ["CKPT+best"]
    assert Run(tmp_path).recovered().meta["n"] == 2 and not same(weights, Run(tmp_path).weights())


TORCH_SCHEDULERS = {
    "lambda": lambda opt: torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 0.9**step),
    "multi-step": lambda opt: torch.optim.lr_scheduler.MultiStepLR(opt, [1, 5]),
    "one cycle": lambda opt: torch.optim.lr_scheduler.OneCycleLR(opt, 0.1, total_steps=20),
    "restarts": lambda opt: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(opt, 3),
    "cyclic": lambda opt: torch.optim.lr_scheduler.CyclicLR(opt, 0.1, 0.5, step_size_up=3),
    "sequence": lambda opt: torch.optim.lr_scheduler.SequentialLR(
        opt, [torch.optim.lr_scheduler.ConstantLR(opt), torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)], [2]),
    "plateau": lambda opt: torch.optim.lr_scheduler.ReduceLROnPlateau(opt, patience=1),
}


@pytest.mark.parametrize("make", TORCH_SCHEDULERS.values(), ids=TORCH_SCHEDULERS)
def test_torchs_schedulers_continue_where_they_were(tmp_path, make, asynchronous):
    def begin():
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0, momentum=0.9)
        schedule = make(optimizer)
        ckpt = Checkpointer(tmp_path, {"optimizer": optimizer, "schedule": schedule}, asynchronous=asynchronous)
        return ckpt, optimizer, schedule

    def rates(optimizer, schedule, steps):
        found = []
        for _ in range(steps):
            optimizer.step()
            schedule.step(*([1.0] if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau) else []))
            found.append(optimizer.param_groups[0]["lr"])
        return found

    ckpt, *first = begin()
    rates(*first, 3)
    ckpt.save_checkpoint()
    ckpt.wait()
    expected = rates(*first, 6)
    ckpt, *second = begin()
    ckpt.recover_if_possible()
    assert rates(*second, 6) == expected and len(set(expected)) > 1
