"""A SpeechBrain recipe whose Brain's name was changed does what it did: hooks, numbers, files, flags."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from functools import partial

import pytest
import speechbrain as sb
import torch
import yaml
from speechbrain.core import Stage
from speechbrain.dataio.dataloader import SaveableDataLoader
from speechbrain.dataio.dataset import DynamicItemDataset
from speechbrain.utils.checkpoints import Checkpointer as StockCheckpointer
from speechbrain.utils.epoch_loop import EpochCounter
from speechbrain.utils.run_opts import RunOptions

import sbkit


def dataset(count=8):
    data = {f"u{i}": {"x": torch.randn(5, generator=torch.Generator().manual_seed(i))} for i in range(count)}
    return DynamicItemDataset(data, output_keys=["id", "x"])


def recipe(base, calls):
    """A recipe as SpeechBrain's examples write them; ``calls`` gets every hook with what it was given."""

    class Recipe(base):
        def compute_forward(self, batch, stage):
            batch = batch.to(self.device)
            calls.append(("forward", stage.name, self.step))
            return self.modules.lin(batch.x.data)

        def compute_objectives(self, predictions, batch, stage):
            return (predictions - batch.x.data).abs().mean()

        def on_fit_batch_start(self, batch, should_step):
            calls.append(("batch start", len(batch), should_step))

        def on_fit_batch_end(self, batch, outputs, loss, should_step):
            assert loss.ndim == 0 and outputs.shape == batch.x.data.shape
            calls.append(("batch end", round(float(loss), 5), should_step, self.optimizer_step))

        def on_stage_start(self, stage, epoch=None):
            calls.append(("start", stage.name, epoch, self.step))

        def on_stage_end(self, stage, stage_loss, epoch=None):
            calls.append(("end", stage.name, epoch, round(stage_loss, 5), self.step, self.avg_train_loss > 0))
            if stage == Stage.VALID:
                self.checkpointer.save_and_keep_only(meta={"loss": stage_loss}, min_keys=["loss"])

        def on_fit_start(self):
            calls.append("fit start")
            super().on_fit_start()

        def on_evaluate_start(self, max_key=None, min_key=None):
            calls.append(("evaluate start", max_key, min_key))
            super().on_evaluate_start(max_key, min_key)

        def init_optimizers(self):
            if self.opt_class is not two:
                return super().init_optimizers()
            self.one, self.other = (self.opt_class([parameter]) for parameter in self.modules.lin.parameters())
            self.optimizers_dict = {"one": self.one, "other": self.other}

    return Recipe


def two(parameters):
    """The class of each of two optimizers."""
    return torch.optim.SGD(parameters, lr=0.1)


def run(base, folder, calls, opt_class, epochs=3, evaluate=True, **run_opts):
    torch.manual_seed(0)
    lin = torch.nn.Linear(5, 5)
    counter = EpochCounter(epochs)
    checkpointer = StockCheckpointer(folder, {"lin": lin, "counter": counter})
    brain = recipe(base, calls)({"lin": lin}, opt_class, {"sorting": "random"},
                                {"device": "cpu", "noprogressbar": True, **run_opts}, checkpointer)
    brain.fit(counter, dataset(), dataset(6), train_loader_kwargs={"batch_size": 2, "shuffle": True},
              valid_loader_kwargs={"batch_size": 3})
    if isinstance(brain, sbkit.Brain):
        checkpointer.wait()
    loss = brain.evaluate(dataset(4), min_key="loss", test_loader_kwargs={"batch_size": 2}) if evaluate else None
    return brain, lin.weight.detach().clone(), loss


OPTIMISERS = {"adamw": partial(torch.optim.AdamW, lr=0.1, weight_decay=0.1), "sgd": partial(torch.optim.SGD, lr=0.1),
              "lambda": lambda x: torch.optim.Adam(x, lr=0.1), "two": two}


@pytest.mark.slow
@pytest.mark.parametrize("optimiser, run_opts", [
    *(("adamw", run_opts) for run_opts in (
        {}, {"grad_accumulation_factor": 2}, {"max_grad_norm": 0.01}, {"precision": "bf16", "eval_precision": "bf16"},
        {"remove_vector_weight_decay": True}, {"optimizer_step_limit": 6}, {"debug": True}, {"jit": True})),
    ("sgd", {"precision": "bf16", "eval_precision": "bf16"}), ("sgd", {"remove_vector_weight_decay": True}),
    ("two", {}), ("two", {"max_grad_norm": 0.01}),
    ("lambda", {}), ("lambda", {"remove_vector_weight_decay": True})], ids=str)
def test_the_same_recipe_calls_the_same_hooks_and_learns_the_same(tmp_path, optimiser, run_opts):
    calls, expected = [], []
    _, weight, loss = run(sbkit.Brain, tmp_path / "ours", calls, OPTIMISERS[optimiser], **run_opts)
    _, reference, reference_loss = run(sb.core.Brain, tmp_path / "theirs", expected, OPTIMISERS[optimiser],
                                           **run_opts)
    half = "precision" in run_opts
    torch.testing.assert_close(weight, reference, rtol=1e-5, atol=2e-3 if half else 1e-6)
    assert float(loss) == pytest.approx(float(reference_loss), rel=1e-2 if half else 1e-5)
    if half:  # losses are computed in fp32 here, and shown so
        calls, expected = [c[0] for c in calls], [c[0] for c in expected]
    assert _rough(calls) == _rough(expected)


#: Names of what a plan's batch says of itself, of its methods, and of its fields.
NAMES_OF_A_PLAN = ["weight", "seconds", "padded_seconds", "last", "micro", "micros", "beyond_shape", "damaged", "ids",
                   "real", "samples", "tensors"]


@pytest.mark.parametrize("key", NAMES_OF_A_PLAN)
@pytest.mark.parametrize("step", ["of the trainer", "of the recipe"])
def test_a_key_of_a_recipe_s_batch_may_have_any_name(key, step):
    def trained_by(base):
        class Recipe(base):
            def compute_forward(self, batch, stage):
                return self.modules.lin(batch.to(self.device).x.data)

            def compute_objectives(self, predictions, batch, stage):
                return ((predictions - batch.x.data).abs().mean(1) * (0.5 + getattr(batch, key))).mean()

        class OwnStep(Recipe):
            def fit_batch(self, batch):
                return super().fit_batch(batch)

        data = {f"u{i}": {"x": torch.full((5,), float(i)), key: float(i % 2)} for i in range(8)}
        torch.manual_seed(0)
        lin = torch.nn.Linear(5, 5)
        brain = (Recipe if step == "of the trainer" else OwnStep)(
            {"lin": lin}, OPTIMISERS["sgd"], {}, {"device": "cpu", "noprogressbar": True})
        brain.fit([1], DynamicItemDataset(data, output_keys=["id", "x", key]), train_loader_kwargs={"batch_size": 2})
        return lin.weight.detach(), brain.optimizer_step

    weight, steps = trained_by(sbkit.Brain)
    expected, expected_steps = trained_by(sb.core.Brain)
    torch.testing.assert_close(weight, expected)
    assert steps == expected_steps == 4


@pytest.mark.parametrize("method", ["", "fit_batch", "optimizers_step"])
def test_steps_in_which_all_optimizers_are_frozen_count(method):
    def trained_by(base):
        class Resting(base):
            def compute_forward(self, batch, stage):
                return self.modules.lin(batch.to(self.device).x.data)

            def compute_objectives(self, predictions, batch, stage):
                return (predictions - batch.x.data).abs().mean()

            def freeze_optimizers(self, optimizers):
                return optimizers if self.optimizer_step >= 2 else {}

            if method:
                vars()[method] = lambda self, *args: getattr(base, method)(self, *args)

        torch.manual_seed(0)
        lin = torch.nn.Linear(5, 5)
        brain = Resting({"lin": lin}, OPTIMISERS["sgd"], {}, {"device": "cpu", "noprogressbar": True})
        brain.fit([1], dataset(), train_loader_kwargs={"batch_size": 2})
        return lin.weight.detach(), brain.optimizer_step

    weight, steps = trained_by(sbkit.Brain)
    expected, expected_steps = trained_by(sb.core.Brain)
    assert steps == expected_steps == 4
    torch.testing.assert_close(weight, expected)


def test_a_script_without_an_optimizer_is_warned(tmp_path, caplog):
    _, weight, _ = run(sbkit.Brain, tmp_path, [], None)
    torch.manual_seed(0)
    assert torch.equal(weight, torch.nn.Linear(5, 5).weight), "as in SpeechBrain, which may be meant"
    assert caplog.text.count("init_optimizers sets no optimizers_dict") == 1


def _rough(calls):
    """Losses to four digits: two ways of summing floats may differ in the last."""
    return [tuple(round(x, 3) if isinstance(x, float) else x for x in call) if isinstance(call, tuple) else call
            for call in calls]


def test_the_same_files_are_written(tmp_path):
    names = {}
    for base in (sb.core.Brain, sbkit.Brain):
        run(base, tmp_path / base.__module__, [], partial(torch.optim.SGD, lr=0.1), evaluate=False)
        (folder,) = [path for path in (tmp_path / base.__module__).iterdir() if not path.name.startswith(".")]
        names[base] = {path.name for path in folder.iterdir()}
        assert folder.name.startswith("CKPT+")
        assert "loss" in yaml.safe_load((folder / "CKPT.yaml").read_text())
    ours, theirs = names[sbkit.Brain], names[sb.core.Brain]
    assert theirs <= ours
    assert {"brain.ckpt", "optimizer.ckpt", "dataloader-TRAIN.ckpt", "lin.ckpt", "counter.ckpt"} <= ours


@pytest.mark.parametrize("first, second", [(sb.core.Brain, sbkit.Brain), (sbkit.Brain, sb.core.Brain)])
def test_each_resumes_from_the_other_s_checkpoint(tmp_path, first, second):
    sgd = partial(torch.optim.AdamW, lr=0.1)
    _, whole, _ = run(sb.core.Brain, tmp_path / "whole", [], sgd, epochs=4, evaluate=False)
    run(first, tmp_path / "cut", [], sgd, epochs=2, evaluate=False)
    brain, weight, _ = run(second, tmp_path / "cut", [], sgd, epochs=4, evaluate=False)
    assert brain.optimizer_step == 16
    torch.testing.assert_close(weight, whole, rtol=1e-4, atol=1e-5)


class Killed(Exception):
    pass


def mid_epoch(folder, die_at=None, workers=0):
    class Dies(recipe(sbkit.Brain, [])):
        def on_fit_batch_start(self, batch, should_step):
            if self.optimizer_step == die_at:
                raise Killed

        def compute_forward(self, batch, stage):
            return torch.nn.functional.dropout(super().compute_forward(batch, stage), 0.5)

    torch.manual_seed(0)
    lin, counter = torch.nn.Linear(5, 5), EpochCounter(2)
    checkpointer = StockCheckpointer(folder, {"lin": lin, "counter": counter})
    brain = Dies({"lin": lin}, partial(torch.optim.AdamW, lr=0.1), {"seed": 7},
                 {"device": "cpu", "noprogressbar": True, "ckpt_interval_steps": 2}, checkpointer)
    try:
        brain.fit(counter, dataset(14), train_loader_kwargs={"batch_size": 2, "shuffle": True, "num_workers": workers})
    finally:
        checkpointer.wait()
        if workers:  # left to the garbage collector, each takes five seconds to end
            checkpointer.recoverables["dataloader-TRAIN"]._speechbrain_iterator._shutdown_workers()
    return brain, lin.weight


@pytest.mark.slow
@pytest.mark.parametrize("die_at, workers", [(3, 0), (5, 2), (11, 0)])
def test_speechbrain_s_loaders_resume_where_the_run_died_in_the_middle_of_an_epoch(tmp_path, die_at, workers):
    whole, weight = mid_epoch(tmp_path / "whole")
    with pytest.raises(Killed):
        mid_epoch(tmp_path / "cut", die_at, workers)
    again, resumed = mid_epoch(tmp_path / "cut", workers=workers)
    assert again.optimizer_step == whole.optimizer_step == 14
    assert torch.equal(weight, resumed)


def own_fit_batch(base):
    class Own(recipe(base, [])):
        def fit_batch(self, batch):
            with self.no_sync(self.step % 2 == 0):
                loss = self.compute_objectives(self.compute_forward(batch, Stage.TRAIN), batch, Stage.TRAIN)
                self.scaler.scale(loss / 2).backward()
            self.check_loss_isfinite(loss)
            if self.step % 2 == 0:
                self.optimizers_step()
            return loss.detach().cpu()

        def evaluate_batch(self, batch, stage):
            return self.compute_objectives(self.compute_forward(batch, stage), batch, stage).cpu()

        def on_stage_end(self, stage, stage_loss, epoch=None):
            self.losses = [*getattr(self, "losses", []), stage_loss]

    torch.manual_seed(0)
    lin = torch.nn.Linear(5, 5)
    brain = Own({"lin": lin}, partial(torch.optim.SGD, lr=0.1), {}, {"device": "cpu", "noprogressbar": True})
    brain.fit(range(1, 3), dataset(), dataset(4), train_loader_kwargs={"batch_size": 2})
    return brain, lin.weight


def test_a_recipe_s_own_fit_batch_and_evaluate_batch():
    ours, weight = own_fit_batch(sbkit.Brain)
    theirs, reference = own_fit_batch(sb.core.Brain)
    torch.testing.assert_close(weight, reference)
    assert ours.optimizer_step == theirs.optimizer_step == 4
    assert ours.losses == pytest.approx([float(loss) for loss in theirs.losses])
    assert all(isinstance(loss, float) for loss in ours.losses)


def accumulated(folder, die_at, loader, die_in=None, average=sbkit.Brain.update_average):
    """Batches of one row whose gradients say which they are: what each step was made of, after a stop or not."""
    steps = []

    class Counting(sbkit.Brain):
        def compute_forward(self, batch, stage):
            if self.optimizer_step == die_at and die_in in (None, int(batch)):
                raise Killed
            return self.modules.lin(torch.ones(1, 1)) * batch.flatten()[0]

        def compute_objectives(self, predictions, batch, stage):
            return predictions.sum()

        def on_fit_batch_end(self, batch, outputs, loss, should_step):
            self.part = [*getattr(self, "part", []), int(batch)]
            if should_step:
                steps.append(self.part)
                self.part = []

    Counting.update_average = average
    counter = EpochCounter(1)
    checkpointer = StockCheckpointer(folder, {"counter": counter})
    brain = Counting({"lin": torch.nn.Linear(1, 1)}, partial(torch.optim.SGD, lr=0.0), {}, {
        "device": "cpu", "noprogressbar": True, "ckpt_interval_steps": 1, "grad_accumulation_factor": 3}, checkpointer)
    with contextlib.suppress(Killed):
        brain.fit(counter, loader(torch.arange(8.0), brain), train_loader_kwargs={"batch_size": 1})
    checkpointer.wait()
    return steps


def recoverable(rows, brain):
    loader = SaveableDataLoader(rows, batch_size=1)
    brain.checkpointer.add_recoverable("mine", loader)
    return loader


LOADERS = {
    "a dataset": (lambda rows, brain: rows, [[3, 4, 5], [6, 7]]), "SpeechBrain's": (recoverable, [[3, 4, 5], [6, 7]]),
    "SpeechBrain's, not saved": (lambda rows, brain: SaveableDataLoader(rows, batch_size=1), None),
    "torch's": (lambda rows, brain: torch.utils.data.DataLoader(rows, batch_size=1), None),
}


@pytest.mark.parametrize("loader, left", LOADERS.values(), ids=LOADERS)
def test_a_resumed_epoch_closes_its_steps_where_the_loader_ends(tmp_path, loader, left, caplog):
    """One that can't go on in the middle begins with its first batch; its steps are whole all the same."""
    assert accumulated(tmp_path, 1, loader) == [[0, 1, 2]]
    assert accumulated(tmp_path, None, loader) == (left or [[0, 1, 2], [3, 4, 5], [6, 7]])
    assert ("can't resume in the middle" in caplog.text) is (left is None)


def test_a_script_s_step_that_was_cut_by_the_end_of_a_process_is_repeated_whole(tmp_path):
    script = {"loader": lambda rows, brain: rows, "average": lambda brain, loss, mean: mean}  # runs SpeechBrain's loop
    assert accumulated(tmp_path, 1, die_in=5, **script) == [[0, 1, 2]]
    assert accumulated(tmp_path, None, **script) == [[3, 4, 5]]


def test_a_command_line_with_every_flag_still_works(tmp_path):
    flags = {field: default for field, default in RunOptions().as_dict().items()
             if field not in ("overridden_args", "param_file", "tqdm_barcolor", "distributed_launch",
                              "data_parallel_count", "log_config", "data_parallel_backend", "test_only")}
    values = {"device": "cpu", "distributed_backend": "gloo", "precision": "bf16", "eval_precision": "fp32",
              "optimizer_step_limit": "5", "ckpt_interval_steps": "0", "debug_batches": "1", "debug_epochs": "1"}
    line = ["recipe.yaml"]
    for name, default in flags.items():
        if name in ("compile", "jit", "compile_module_keys", "jit_module_keys", "profile_training"):
            continue
        if name in ("auto_mix_prec", "bfloat16_mix_prec"):
            continue
        line += [f"--{name}"] if default is False else [f"--{name}", str(values.get(name, default))]
    _, run_opts, _ = RunOptions.from_command_line_args(line)
    lin = torch.nn.Linear(5, 5)
    checkpointer = StockCheckpointer(tmp_path, {"lin": lin})
    brain = recipe(sbkit.Brain, [])({"lin": lin}, torch.optim.SGD, {}, run_opts, checkpointer)
    brain.fit(EpochCounter(1), dataset(), dataset(2))
    assert brain.optimizer_step == 1 and brain.debug_persistently


@pytest.mark.parametrize("switch, precision", [("auto_mix_prec", "fp16"), ("bfloat16_mix_prec", "bf16")])
def test_the_old_precision_switches_still_work(switch, precision):
    brain = sbkit.Brain({"lin": torch.nn.Linear(1, 1)}, run_opts={"device": "cpu", switch: True})
    assert brain.precision == precision and brain.scaler.is_enabled() is (precision == "fp16")


def test_it_is_a_speechbrain_brain():
    assert issubclass(sbkit.Brain, sb.core.Brain)
    brain = sbkit.Brain({"lin": torch.nn.Linear(1, 1)}, run_opts={"device": "cpu"})
    assert brain.raw_modules is brain.modules and brain.device == "cpu" and brain.device_type == "cpu"


def test_a_script_may_be_moved_by_its_import_alone():
    script = ("import sbkit as sb, sys; assert not {'torch', 'speechbrain'} & sys.modules.keys(); "
              "print(sb.parse_arguments(['r.yaml', '--debug'])[0], sb.Stage.TRAIN.name, sb.Brain.__module__, "
              "sb.dataio.dataset.DynamicItemDataset.__module__, sb.create_experiment_directory.__module__); "
              "from sbkit import data; sb.utils.data_pipeline.takes; "
              "assert sb.core.Brain is sb.Brain; sb.nothing")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "r.yaml TRAIN sbkit.compat.brain speechbrain.dataio.dataset speechbrain.core\n"
    assert done.stderr.endswith("AttributeError: module 'sbkit' has no attribute 'nothing'\n")


def test_a_sampler_inside_a_batch_sampler_gets_the_epoch():
    """SpeechBrain never does, so its DynamicBatchSampler repeats one order on a single device."""

    class Sampler(torch.utils.data.Sampler):
        epochs = ()

        def set_epoch(self, epoch):
            self.epochs = (*self.epochs, epoch)

        def __iter__(self):
            return iter([[0, 1], [2, 3]])

        def __len__(self):
            return 2

    sampler = Sampler()
    brain = recipe(sbkit.Brain, [])({"lin": torch.nn.Linear(5, 5)}, torch.optim.SGD, {},
                                    {"device": "cpu", "noprogressbar": True})
    brain.fit(range(1, 4), dataset(), train_loader_kwargs={"batch_sampler": sampler})
    assert sampler.epochs == (1, 2, 3)
