"""How a script of a user's own starts: what it is spared, and in which words a mistyped option ends it."""

from __future__ import annotations

import ast
import logging
import re

from speechbrain.utils.run_opts import RunOptions

from sbkit.errors import SbkitError
from sbkit.recipe.report import did_you_mean
from sbkit.system.console import end_scripts_in_one_line

#: The message of HyperPyYAML about an override that the recipe doesn't have.
_NOT_FOUND = re.compile(r"Override '(?P<key>.*)' not found in: (?P<keys>\[.*\])", re.DOTALL)


def prepare() -> None:
    """Let errors end the script in one line, and hide a warning that is not about it."""
    hide_figure_warning()
    end_scripts_in_one_line(unknown_override)


def hide_figure_warning() -> None:
    """Hide that figures can't be saved without torchvision, which SpeechBrain logs as soon as its loggers are imported,
    whether or not anything saves figures."""
    logging.getLogger("speechbrain.utils.train_logger").addFilter(_is_not_about_figures)


def _is_not_about_figures(record: logging.LogRecord) -> bool:
    return "torchvision" not in str(record.msg)


def unknown_override(error: BaseException) -> SbkitError | None:
    """Word HyperPyYAML's error about an option that the recipe has no key for; None for any other error.

    >>> print(unknown_override(KeyError("Override 'number_of_epoch' not found in: ['seed', 'number_of_epochs']")))
    the recipe has no key number_of_epoch; did you mean --number_of_epochs?
    """
    match = _NOT_FOUND.fullmatch(str(error.args[0])) if isinstance(error, KeyError) and error.args else None
    if match is None:
        return None
    keys = [key for key in ast.literal_eval(match["keys"]) if not str(key).startswith("__")]  # such as __set_seed
    options = [name for name in RunOptions.__dataclass_fields__ if name != "overridden_args"]
    near = did_you_mean(match["key"], [*keys, *options])
    return SbkitError("unknown-key", f"the recipe has no key {match['key']}",
                      hint=f"did you mean --{near}?" if near else f"its keys are {', '.join(keys)}", key=match["key"])
