"""Loggers for a run's numbers: TensorBoard, Weights & Biases, MLflow and trackio, each an optional dependency, and
classes of the user's own."""

from __future__ import annotations

import importlib.util
import inspect
import logging
import os
import sys
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from sbkit.errors import SbkitError, first_line
from sbkit.score.run_files import LOGGERS, TENSORBOARD
from sbkit.system import disk
from sbkit.system.schema import Array, String

logger = logging.getLogger(__name__)


class Run(NamedTuple):
    """What loggers need to know of a run."""

    folder: Path
    values: Mapping[str, bool | int | float | str]
    """The recipe's plain values, by key."""

    @property
    def project(self) -> str:
        """The name that groups the runs of an experiment."""
        return str(self.values.get("experiment") or "sbkit")

    def identity(self) -> str:
        """Return the id of this run, which it keeps when it is resumed."""
        path = self.folder / LOGGERS
        if not path.is_file() or not path.read_text().strip():
            path.write_text(uuid.uuid4().hex[:8] + "\n")
        return path.read_text().strip()


class Logger(ABC):
    """Sends numbers to one tool, which is opened with the first number. An error there never ends a run.

    A class of your own has ``_log``, and if it keeps something open or has to know where a resumed run continues,
    ``_begin`` and ``_close``. A logger that fails is not used for the rest of the run, with a warning: metrics.jsonl
    has the same numbers.
    """

    module: ClassVar[str | None] = None
    """The tool's module, which is imported; None: nothing needs to be installed."""
    buffers: ClassVar[bool] = False
    """Whether the tool buffers numbers until it is flushed, which a killed run would lose."""

    def __init__(self, name: str, run: Run):
        self.name, self.run = name, run
        self._open: Any = None  # the tool's own object for a run
        self._begun = False
        self._failed = False
        self._module: Any = self.module and importlib.import_module(self.module)  # without types

    def log(self, values: Mapping[str, float], step: int, seconds: float) -> None:
        """Send numbers of a step, at ``seconds`` since 1970."""
        self._try(self._send, values, step, seconds)

    def flush(self) -> None:
        """Send buffered numbers."""
        if self.buffers and self._open is not None:
            self._try(self._open.flush)

    def close(self) -> None:
        """End the tool's run, if one was begun."""
        if self._open is not None:
            self._try(self._close)
            self._open = None

    def _send(self, values: Mapping[str, float], step: int, seconds: float) -> None:
        if not self._begun:
            self._begin(step)
            self._begun = True
        self._log(values, step, seconds)

    def _try(self, call: Callable[..., None], *args: object) -> None:
        if self._failed:
            return
        try:
            call(*args)
        except OSError as error:
            self._drop(disk.explain(error, self.run.folder))
        except Exception as error:  # of a tool's own kinds, from anywhere between here and its server
            self._drop(f"{type(error).__name__}: {first_line(error)}".rstrip("."))
        except SystemExit as error:  # of a tool that asks for a login
            self._drop(f"it exited with {error.code}")

    def _drop(self, why: str) -> None:
        self._failed = True
        logger.warning("loggers: %s failed, so the run continues without it: %s. metrics.jsonl has all values",
                       self.name, why)

    def _begin(self, step: int) -> None:  # noqa: B027 (some need nothing)
        """Open the tool's run, before the first numbers are sent; keep what has to be closed as ``_open``.

        step : that of the first numbers. A run that is resumed continues from its checkpoint: an earlier start may
            have sent numbers of this step and of later ones, which are sent again
        """

    @abstractmethod
    def _log(self, values: Mapping[str, float], step: int, seconds: float) -> None:
        """Send the numbers of a step."""

    def _close(self) -> None:  # noqa: B027 (most have nothing to end)
        """End what ``_open`` holds; called if it holds something."""


class TensorBoard(Logger):
    """Files in ``tensorboard/`` of the run's folder. After a full disk, it continues in another file."""

    module = "torch.utils.tensorboard"
    buffers = True
    _warned = False

    def _begin(self, step: int) -> None:
        # purge_step hides points that a resumed run writes again.
        self._open = self._module.SummaryWriter(str(self.run.folder / TENSORBOARD), purge_step=step or None)

    def _log(self, values: Mapping[str, float], step: int, seconds: float) -> None:
        for name, value in values.items():
            self._open.add_scalar(name, value, step, walltime=seconds)

    def _drop(self, why: str) -> None:
        if not self._warned:
            logger.warning("%s. Some points are missing in TensorBoard", why)
        self._warned = True
        self._open = None
        self._begun = False

    def _close(self) -> None:
        self._open.close()


class Trackio(Logger):
    """Trackio's database on this machine, or the place that its environment variables name."""

    module = "trackio"

    def _begin(self, step: int) -> None:
        self._open = self._run_of_tool(embed=False)

    def _log(self, values: Mapping[str, float], step: int, seconds: float) -> None:
        self._open.log(dict(values), step=step)

    def _run_of_tool(self, **options: object) -> Any:  # the tool's own object
        return self._module.init(project=self.run.project, name=f"{self.run.folder.name}-{self.run.identity()}",
                                 config=dict(self.run.values), resume="allow", **options)

    def _close(self) -> None:
        self._open.finish()


class WandB(Trackio):
    """Weights & Biases, which sends from its own process; WANDB_MODE=offline keeps all in the run's folder."""

    module = "wandb"

    def _begin(self, step: int) -> None:
        self._open = self._run_of_tool(
            id=self.run.identity(), dir=str(self.run.folder), settings={"init_timeout": 30})
        # Its own count of steps may only grow, and a resumed run goes back to its checkpoint.
        self._open.define_metric("*", step_metric="step")

    def _log(self, values: Mapping[str, float], step: int, seconds: float) -> None:
        self._open.log({**values, "step": step})


class MLflow(Logger):
    """The server or files that MLFLOW_TRACKING_URI names."""

    module = "mlflow"

    def __init__(self, name: str, run: Run):
        # Numbers are sent within a step, and by default a server that doesn't answer would block it for minutes.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        super().__init__(name, run)

    def _log(self, values: Mapping[str, float], step: int, seconds: float) -> None:
        metric = self._module.entities.Metric
        self._open.log_batch(self._id, [metric(name, value, int(1000 * seconds), step)
                                        for name, value in values.items()])

    def _begin(self, step: int) -> None:
        client = self._module.MlflowClient()
        name = self.run.identity()
        existing = client.get_experiment_by_name(self.run.project)
        experiment = existing.experiment_id if existing else client.create_experiment(self.run.project)
        earlier_runs = client.search_runs([experiment], f"tags.sbkit = '{name}'", max_results=1)
        if earlier_runs:
            self._id = earlier_runs[0].info.run_id
            client.update_run(self._id, "RUNNING")
        else:
            self._id = client.create_run(experiment, run_name=f"{self.run.folder.name}-{name}",
                                         tags={"sbkit": name}).info.run_id
        if not earlier_runs or not earlier_runs[0].data.params:
            param = self._module.entities.Param
            client.log_batch(self._id, params=[param(key, str(value)) for key, value in self.run.values.items()])
        self._open = client

    def _close(self) -> None:
        self._open.set_terminated(self._id)


KINDS: dict[str, type[Logger]] = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow, "trackio": Trackio}
#: The allowed values of ``loggers``.
NAMES = Array(String(pattern="|".join((*KINDS, r"\w+(\.\w+)+"))),
                what=f"a list of {', '.join(KINDS)}, or classes of your own, such as mine.Csv")


def make(names: Iterable[str], run: Run) -> list[Logger]:
    """Make the loggers that a recipe names."""
    loggers = []
    for name in dict.fromkeys(names):
        kind = class_of(name)
        try:
            loggers.append(kind(name, run))
        except ImportError as error:  # the tool is installed, but lacks something
            raise _not_importable(name, kind, first_line(error)) from error
    return loggers


def class_of(name: str) -> type[Logger]:
    """Return the class of a logger that a recipe names; its tool is installed, but not imported: that takes seconds."""
    module, _, class_name = name.rpartition(".")
    try:
        kind = KINDS.get(name) or getattr(importlib.import_module(module), class_name)
    except Exception as error:  # a module of the user's own can raise anything
        raise SbkitError("bad-logger", f"loggers: {name} can't be imported ({first_line(error)})",
                         hint="name a class by its module, such as mine.Csv", key="loggers", value=name) from error
    if not (isinstance(kind, type) and issubclass(kind, Logger)):
        raise SbkitError("bad-logger", f"loggers: {name} is no Logger", hint=f"derive it from {__name__}.Logger",
                         key="loggers", value=name)
    if inspect.isabstract(kind):
        raise SbkitError("bad-logger", f"loggers: {name} lacks {', '.join(sorted(kind.__abstractmethods__))}",
                         hint="write _log(self, values, step, seconds)", key="loggers", value=name)
    tool = (kind.module or "sbkit").removeprefix("torch.utils.").partition(".")[0]  # TensorBoard's writer is torch's
    if sys.modules.get(tool) is None and importlib.util.find_spec(tool) is None:
        raise _not_importable(name, kind, f"no module {tool}")
    return kind


def _not_importable(name: str, kind: type[Logger], why: str) -> SbkitError:
    return SbkitError("missing-package", f"loggers: {name} can't be imported ({why})", hint=(
        f"pip install 'sbkit[{name}]'" if name in KINDS else f"install what has the module {kind.module}"),
                      key="loggers", value=name)
