"""How a script was started that trains a run: recorded in the run's folder, so that it can be run again."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from sbkit.errors import SbkitError
from sbkit.score.run_files import RECIPE, SCRIPT
from sbkit.system import untrusted
from sbkit.system.console import atomic_write

_MAX_BYTES = 1 << 20  # of the record


@dataclass(frozen=True)
class ScriptRecord:
    """The start of a script.

    script : its file, an absolute path
    module : its name for ``python -m``; None if it was started as a file
    arguments : what followed it on the command line
    folder : the working directory
    """

    script: str
    module: str | None
    arguments: Sequence[str]
    folder: str

    @classmethod
    def of_this_process(cls) -> ScriptRecord | None:
        """Describe this process; None if it doesn't run a script of the user's, as in a notebook or an installed
        program."""
        main = sys.modules["__main__"]
        file = getattr(main, "__file__", None)
        if file is None or not os.path.isfile(file):
            return None
        script = os.path.abspath(file)
        installed = [sysconfig.get_path(name) for name in ("scripts", "purelib", "platlib", "stdlib")]
        if any(Path(script).is_relative_to(folder) for folder in installed):
            return None
        spec = getattr(main, "__spec__", None)
        return cls(script, None if spec is None else spec.name, sys.argv[1:], os.getcwd())

    @classmethod
    def read(cls, run: Path) -> ScriptRecord:
        """Read the record in a run's folder."""
        path = run / SCRIPT
        try:
            values = untrusted.read_json(path, _MAX_BYTES)
            return cls(values["script"], values["module"], [str(word) for word in values["arguments"]],
                       values["folder"])
        except FileNotFoundError:
            raise SbkitError(
                "script-not-recorded",
                f"{run} was trained by a script, and has no {SCRIPT}, which says how to run that script again",
                file=path, hint="start the script once more, as before: it records this, and trains no finished epoch "
                "again; in a notebook, call sbkit.export(brain, to=...)") from None
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise SbkitError("script-record-damaged", f"{path} can't be read: {error}", file=path,
                             hint="start the script once more, as before: it writes this file anew") from error

    def write(self, run: Path) -> None:
        """Write the record into a run's folder."""
        run.mkdir(parents=True, exist_ok=True)
        with atomic_write(run / SCRIPT) as out:
            json.dump(asdict(self), out, indent=1, ensure_ascii=False)

    @property
    def command(self) -> str:
        """The command line, for messages."""
        started = ["-m", self.module] if self.module else [os.path.relpath(self.script, self.folder)]
        return shlex.join(["python", *started, *self.arguments])


def is_of_script(run: Path) -> bool:
    """Whether a script trained the run in a folder, and not a task."""
    recipe = run / RECIPE
    if recipe.is_file() and re.search("^brain:", recipe.read_text(encoding="utf-8"), re.MULTILINE):
        return False
    return recipe.is_file() or (run / SCRIPT).is_file()
