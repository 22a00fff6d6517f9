"""Keys of a recipe on the command line of a benchmark, refused before its first run if the recipe can't have them."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from sbkit.errors import SbkitError


def check_keys(recipe: Path, words: list[str], own: Collection[str] = ()) -> None:
    """Refuse words that are no options of the benchmark, unless they are ``--key value`` of its recipe.

    own : keys that the benchmark itself gives each run
    """
    from sbkit.recipe import arguments
    from sbkit.recipe.check import check

    options = "--help lists this program's own options"
    request = arguments.parse([str(recipe), *words], beside=False)
    if taken := sorted(request.overrides.keys() & own):
        raise SbkitError(f"--{taken[0]} is set by this program, for each run as its plan says", hint=options)
    if wrong := check(request.path, request.overrides, run=False).errors:
        raise SbkitError("; ".join(f"{each.key}: {each.message}" for each in wrong),
                         hint=wrong[0].suggestion if wrong[0].suggestion.startswith("did you") else options)
