"""Checks of options from a YAML: a wrong type or value is refused with the option's name."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

from sbkit.errors import SbkitError


def check_number(what: str, value: Any, *,  # as the YAML has it
                 above: float | None = None, minimum: float | None = None, whole: bool = False, optional: bool = False
                 ) -> None:
    """Refuse a value that isn't a (whole) number ``above`` or at ``least`` a limit; ``optional`` allows null.

    >>> check_number("batching: buckets", 2.0, above=0, whole=True, optional=True)
    Traceback (most recent call last):
    sbkit.errors.SbkitError: batching: buckets is 2.0; it must be a whole number above 0, or null
    """
    if value is None and optional:
        return
    fits = isinstance(value, Integral if whole else Real) and not isinstance(value, bool)
    if fits and (above is None or value > above) and (minimum is None or value >= minimum):
        return
    limit = f" above {above:g}" if above is not None else f", {minimum:g} or more" if minimum is not None else ""
    raise SbkitError(f"{what} is {value!r}",
                     hint=f"it must be a {'whole ' if whole else ''}number{limit}{', or null' if optional else ''}")


def texts(what: str, value: object) -> list[str]:
    """A list of texts, from one text or several.

    >>> texts("corpus: only", "test"), texts("corpus: only", ["train", "dev"])
    (['test'], ['train', 'dev'])
    """
    several = [value] if isinstance(value, str) else value
    if not isinstance(several, Sequence) or not all(isinstance(one, str) for one in several):
        raise SbkitError(f"{what} is {value!r}", hint="it must be a text, or a list of texts")
    return list(several)
