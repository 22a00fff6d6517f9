"""Runs a script again without training, up to its test: there its Brain has its best weights, and its test set is at
hand.

A script makes its objects in code that nothing else can repeat: datasets with pipelines, a tokenizer, a Brain with
attributes set from outside. So the script itself is run, as ``__main__`` and with its own arguments, while

- ``Brain.fit`` returns at once, and the first ``Brain.evaluate`` ends the script, once the hooks of SpeechBrain's own
  ``evaluate`` have loaded the weights; a script that never calls it is taken over at its end, with its validation set;
- nothing is written into its output folder, and no checkpoint is saved or deleted;
- a backward pass is an error, as a script with a loop of its own would train.

What else the script does, it does: it prepares its data as when it is resumed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import runpy
import sys
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import speechbrain
import torch
from speechbrain.core import Stage
from speechbrain.utils import checkpoints as stock

from sbkit.compat import loaders
from sbkit.compat.script_record import ScriptRecord
from sbkit.errors import SbkitError, summary
from sbkit.train.batches import DataSource
from sbkit.train.checkpoint import Checkpointer

logger = logging.getLogger(__name__)

Brain = Any  # an sbkit.Brain, whose module imports this one
#: Options of SpeechBrain's command line about devices: one with a value, and a switch.
_DEVICE, _DATA_PARALLEL = "--device", "--data_parallel_backend"
#: What torchrun sets: a script is run again by one process.
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
                   "TORCHELASTIC_RUN_ID")


class Reached(NamedTuple):
    """What a script has made when it begins its test."""

    brain: Brain
    """With its weights."""
    loader: DataSource
    """Of its test set, or of its validation set if it has no test."""
    checkpoint: stock.Checkpoint
    """The one that its test loads; a script's own ``on_evaluate_start`` may average others with it."""
    tested: bool
    """Whether the set is that of a test."""


TakeOver = Callable[[Reached], None]


class _Ended(BaseException):
    """Ends the script; not an Exception, which a script may catch."""


class ScriptRun:
    """A script that is being run again.

    run : the folder of its run
    record : how it was started
    take_over : called with what the script has made
    """

    def __init__(self, run: Path, record: ScriptRecord, take_over: TakeOver):
        self._run = run.resolve()
        self._record = record
        self._take_over = take_over
        self._fitted: tuple[Brain, DataSource | None, dict[str, Any]] | None = None
        self.error: BaseException | None = None
        """What ``take_over`` raised: a script's own ``except`` could hide it."""

    def fit(self, brain: Brain, valid_set: DataSource | None, loader_kwargs: dict[str, Any]) -> None:
        """Note the Brain and the validation set of a ``fit``, instead of training."""
        self._fitted = (brain, valid_set, loader_kwargs)

    def evaluate(self, brain: Brain, test_set: DataSource, loader_kwargs: dict[str, Any],
                 order: dict[str, str | None], tested: bool = True) -> NoReturn:
        """Begin a test as ``Brain.evaluate`` does, hand over what there is, and end the script.

        order : the arguments ``max_key`` and ``min_key``, by which the best checkpoint is found
        """
        try:
            self._check_folder(brain)
            loader = loaders.resolve_loader(brain, test_set, Stage.TEST, {**loader_kwargs, "ckpt_prefix": None})
            checkpoint = _best_checkpoint(brain, order)
            brain.on_evaluate_start(**order)
            brain.open_stage(Stage.TEST)
            self._take_over(Reached(brain, loader, checkpoint, tested))
        except BaseException as error:
            self.error = error
        raise _Ended

    def _check_folder(self, brain: Brain) -> None:
        """Raise unless the script has the weights of this very run."""
        folder = brain.run_folder
        if folder is None or folder.resolve() != self._run:
            raise SbkitError("script-other-run", f"run again, the script loads its weights from {folder}, not from "
                             f"{self._run}", file=self._run,
                             hint="move the run back, or start the script once more with the run's new place; it was "
                                  f"started in {self._record.folder} by: {self._record.command}")

    def end(self) -> NoReturn:
        """Take over a script that has ended without a test."""
        script = self._record.script
        if self._fitted is None:
            raise SbkitError("script-without-fit", f"{script} ended without calling fit or evaluate of an sbkit.Brain",
                             file=script, hint="is it the script that trained this run?")
        brain, valid_set, loader_kwargs = self._fitted
        if valid_set is None:
            raise SbkitError("script-without-test", f"{script} neither tests nor validates, so there are no recordings "
                             "to compare with", file=script, hint="give fit a validation set, or call evaluate")
        self.evaluate(brain, valid_set, loader_kwargs, {"max_key": None, "min_key": None}, tested=False)


def _best_checkpoint(brain: Brain, order: dict[str, str | None]) -> stock.Checkpoint:
    if brain.checkpointer is None:
        raise SbkitError("script-without-checkpoints", f"{type(brain).__name__} has no checkpointer, so nothing that "
                         "it trained was saved", hint="give it one, and train again")
    checkpoint = brain.checkpointer.find_checkpoint(**order)
    if checkpoint is None:
        raise SbkitError("script-without-checkpoints", f"{brain.checkpointer.checkpoints_dir} has no checkpoint",
                         file=brain.checkpointer.checkpoints_dir, hint="train, or wait for its first checkpoint")
    return checkpoint


_current: ScriptRun | None = None


def current() -> ScriptRun | None:
    """Return the run of a script again, in which this process is; None: it trains."""
    return _current


def run_again(run_folder: Path, take_over: TakeOver, on_cpu: bool = True) -> None:
    """Run the script of a run up to its test, and call ``take_over`` there.

    on_cpu : whether it runs on the CPU, whatever device it was started with
    """
    global _current
    record = ScriptRecord.read(run_folder)
    if not os.path.isfile(record.script) or not os.path.isdir(record.folder):
        missing = record.folder if os.path.isfile(record.script) else record.script
        raise SbkitError("script-gone", f"{missing} is gone, but the run was trained by: {record.command}",
                         file=missing, hint="put it back, or start the script once more where it is now: that records "
                         "its new place, and trains no finished epoch again")
    run = ScriptRun(run_folder, record, take_over)
    arguments = _on_cpu(record.arguments) if on_cpu else list(record.arguments)
    _current = run
    try:
        with _as_started(record, arguments, on_cpu), _writing_nothing(), contextlib.suppress(_Ended):
            with _script_errors(record.script):
                _execute(record, run.end)
    finally:
        _current = None
    if run.error is not None:
        raise run.error


def _on_cpu(arguments: Sequence[str]) -> list[str]:
    """Remove options that name a device: without one, a script takes the CPU if there is no GPU.

    >>> _on_cpu(["train.yaml", "--device=cuda:0", "--lr", "0.1", "--device", "cuda"])
    ['train.yaml', '--lr', '0.1']
    """
    kept: list[str] = []
    is_value = False
    for word in arguments:
        name, equals, _ = word.partition("=")
        if is_value:
            is_value = False
        elif name == _DEVICE:
            is_value = not equals
        elif name != _DATA_PARALLEL:
            kept.append(word)
    return kept


def _execute(record: ScriptRecord, at_end: Callable[[], NoReturn]) -> None:
    """Execute the script as ``__main__``, then ``at_end`` while its module is still there."""
    if record.module:
        runpy.run_module(record.module, run_name="__main__", alter_sys=True)
        at_end()
    main = types.ModuleType("__main__")
    main.__file__ = record.script
    vars(main)["__builtins__"] = __builtins__
    code = compile(Path(record.script).read_bytes(), record.script, "exec", dont_inherit=True)
    earlier = sys.modules["__main__"]
    sys.modules["__main__"] = main
    try:
        exec(code, vars(main))
        at_end()
    finally:
        sys.modules["__main__"] = earlier


@contextlib.contextmanager
def _script_errors(script: str) -> Iterator[None]:
    """Turn what the script raises, and an exit, into an error with the script's line."""
    try:
        yield
    except SbkitError:
        raise
    except (Exception, SystemExit) as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == script]
        place = f"{script}:{lines[-1]}" if lines else script
        what = f"exits with {error.code!r} before its test" if isinstance(error, SystemExit) else summary(error)
        raise SbkitError("script-fails-again", f"{place}: run again without training, it fails: {what}", file=script,
                         line=lines[-1] if lines else None,
                         hint="does the same command still work in its folder? fit trains nothing here, so what it "
                              "would have set is missing") from error


@contextlib.contextmanager
def _as_started(record: ScriptRecord, arguments: Sequence[str], on_cpu: bool) -> Iterator[None]:
    """Have the working directory, arguments, import path and environment of the script's start.

    on_cpu : whether GPUs are hidden, so that a script that names no device takes the CPU
    """
    folder, argv, path, hook, variables = os.getcwd(), sys.argv, list(sys.path), sys.excepthook, dict(os.environ)
    for name in _RANK_VARIABLES:
        os.environ.pop(name, None)
    if on_cpu and not torch.cuda.is_initialized():
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.chdir(record.folder)
    sys.argv = [record.script, *arguments]
    sys.path.insert(0, record.folder if record.module else os.path.dirname(record.script))
    try:
        yield
    finally:
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(variables)
        sys.argv, sys.path[:], sys.excepthook = argv, path, hook


@contextlib.contextmanager
def _writing_nothing() -> Iterator[None]:
    """Let nothing write to the run's folder: no checkpoint, no copy of the recipe, no log; let nothing train."""
    def skip(*args: object, **kwargs: object) -> None:
        logger.debug("skipped, since the script is run again without training")

    def refuse_backward(*args: object, **kwargs: object) -> NoReturn:
        raise SbkitError("script-trains-itself", "the script trains by a loop of its own, not by Brain.fit, so it "
                         "can't be run again without training", hint="call sbkit.export(brain, to=...) at its end")

    places: list[tuple[object, str, object]] = [
        (speechbrain.core, "create_experiment_directory", skip), (speechbrain, "create_experiment_directory", skip),
        (torch.Tensor, "backward", refuse_backward), (torch.autograd, "backward", refuse_backward)]
    for kind in (stock.Checkpointer, Checkpointer):
        places += [(kind, name, skip) for name in ("save_checkpoint", "save_and_keep_only", "delete_checkpoints")]
    earlier = [(place, name, getattr(place, name)) for place, name, _ in places]
    for place, name, value in places:
        setattr(place, name, value)
    try:
        yield
    finally:
        for place, name, value in earlier:
            setattr(place, name, value)
