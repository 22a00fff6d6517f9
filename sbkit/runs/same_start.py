"""Checks that all ranks of a run were started with the same recipe and command line."""

from __future__ import annotations

import itertools

from sbkit.errors import SbkitError
from sbkit.recipe.arguments import CommandLine
from sbkit.recipe.load import resolved
from sbkit.recipe.run_options import NOT_OF_TRAINING
from sbkit.train.distributed import ranks

#: Run options that may differ between ranks: the recipe's path, options of the output, and the device's number.
_MAY_DIFFER = NOT_OF_TRAINING - {"test_only"}
_NAMED, _WIDTH = 5, 60


def require(request: CommandLine) -> None:
    """Refuse a run whose ranks have different recipes or options, and name the keys that differ."""
    if ranks.is_alone():
        return
    options = {name: str(getattr(request.run_opts, name))
               for name in request.run_opts.overridden_args if name not in _MAY_DIFFER}
    options["check"] = str(request.check)
    options["device"] = str(request.run_opts.device).partition(":")[0]
    texts = resolved(request.path, request.overrides).texts()
    found = ranks.gather_objects((texts | options, set(request.overrides)))
    first = found[0][0]
    differing: list[tuple[str, dict[str, list[int]]]] = []
    for key in dict.fromkeys(itertools.chain.from_iterable(each for each, _ in found)):
        values: dict[str, list[int]] = {}
        for rank, (each, _) in enumerate(found):
            values.setdefault(each.get(key, "not given"), []).append(rank)
        if len(values) > 1 and all(values != same for _, same in differing):  # not a copy by reference
            differing.append((key, values))
    if not differing:
        return
    overridden = set().union(*(names for _, names in found))
    differing.sort(key=lambda each: each[0].partition(".")[0] not in overridden and each[0] in first)
    differences = [f"{key} is " + ", ".join(
        f"{value if len(value) <= _WIDTH else f'{value[:_WIDTH]}...'} on rank{'s'[:len(on) - 1]} "
        f"{', '.join(map(str, on))}" for value, on in values.items()) for key, values in differing[:_NAMED]]
    more = f"; and {len(differing) - _NAMED} more keys" if len(differing) > _NAMED else ""
    ranks.raise_on_main(SbkitError(f"the ranks were started differently: {'; '.join(differences)}{more}",
                                   hint="start all with the same recipe and options"))
