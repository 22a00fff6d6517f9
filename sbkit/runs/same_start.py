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
    gathered = ranks.gather_objects((texts | options, set(request.overrides)))
    values_of_ranks = [values for values, _ in gathered]
    differing: list[tuple[str, dict[str, list[int]]]] = []  # each key with its values, and the ranks that have them
    for key in dict.fromkeys(itertools.chain.from_iterable(values_of_ranks)):
        ranks_by_value: dict[str, list[int]] = {}
        for rank, values in enumerate(values_of_ranks):
            ranks_by_value.setdefault(values.get(key, "not given"), []).append(rank)
        # A key that differs in the same way as an earlier one is a copy of it by reference.
        if len(ranks_by_value) > 1 and all(ranks_by_value != earlier for _, earlier in differing):
            differing.append((key, ranks_by_value))
    if not differing:
        return
    overridden = set().union(*(names for _, names in gathered))
    # First those that somebody typed, or that the first rank lacks: the others follow from them.
    differing.sort(key=lambda pair: pair[0].partition(".")[0] not in overridden and pair[0] in values_of_ranks[0])
    differences = [f"{key} is " + ", ".join(
        f"{value if len(value) <= _WIDTH else f'{value[:_WIDTH]}...'} on rank{'s'[:len(on) - 1]} "
        f"{', '.join(map(str, on))}" for value, on in values.items()) for key, values in differing[:_NAMED]]
    more = f"; and {len(differing) - _NAMED} more keys" if len(differing) > _NAMED else ""
    ranks.raise_on_main(SbkitError(f"the ranks were started differently: {'; '.join(differences)}{more}",
                                   hint="start all with the same recipe and options"))
