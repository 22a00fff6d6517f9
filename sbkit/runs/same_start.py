"""Checks that all ranks of a run were started with the same recipe and command line."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from sbkit.errors import SbkitError
from sbkit.recipe.arguments import CommandLine
from sbkit.recipe.load import resolved
from sbkit.recipe.run_options import NOT_OF_TRAINING
from sbkit.train.distributed import ranks

#: Run options that may differ between ranks: the recipe's path, options of the output, and the device's number.
_MAY_DIFFER = NOT_OF_TRAINING - {"test_only"}
_NAMED, _WIDTH = 5, 60


#: The ranks that were started with each value of a key.
RanksByValue = dict[str, list[int]]


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
    differing = _differing(values_of_ranks)
    if not differing:
        return

    # First those that somebody typed, or that the first rank lacks: the others follow from them.
    overridden = set().union(*(names for _, names in gathered))

    def follows(key: str) -> bool:
        return key.partition(".")[0] not in overridden and key in values_of_ranks[0]

    keys = sorted(differing, key=follows)
    differences = [_in_words(key, differing[key]) for key in keys[:_NAMED]]
    more = f"; and {len(keys) - _NAMED} more keys" if len(keys) > _NAMED else ""
    ranks.raise_on_main(SbkitError("ranks-started-differently",
                                   f"the ranks were started differently: {'; '.join(differences)}{more}",
                                   hint="start all with the same recipe and options"))


def _differing(values_of_ranks: Sequence[Mapping[str, str]]) -> dict[str, RanksByValue]:
    """The keys whose values differ between ranks. One that differs as an earlier one does is a copy of it by reference,
    and left out."""
    differing: dict[str, RanksByValue] = {}
    for key in dict.fromkeys(itertools.chain.from_iterable(values_of_ranks)):
        ranks_by_value: RanksByValue = {}
        for rank, values in enumerate(values_of_ranks):
            ranks_by_value.setdefault(values.get(key, "not given"), []).append(rank)
        if len(ranks_by_value) > 1 and ranks_by_value not in differing.values():
            differing[key] = ranks_by_value
    return differing


def _in_words(key: str, ranks_by_value: RanksByValue) -> str:
    """Say which value of a key which ranks have."""
    values = []
    for value, numbers in ranks_by_value.items():
        shown = value if len(value) <= _WIDTH else f"{value[:_WIDTH]}..."
        rank = "rank" if len(numbers) == 1 else "ranks"
        values.append(f"{shown} on {rank} {', '.join(map(str, numbers))}")
    return f"{key} is {', '.join(values)}"
