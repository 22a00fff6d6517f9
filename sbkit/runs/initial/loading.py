"""A new run takes the weights that its recipe names; all ranks get the same."""

from __future__ import annotations

import copy
import itertools
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from speechbrain.utils.checkpoints import CKPT_PREFIX

from sbkit.errors import SbkitError
from sbkit.nn import adapters
from sbkit.nn.pretrained import Encoder
from sbkit.nn.pretrained.source import names_model
from sbkit.recipe.keys import Task
from sbkit.recipe.load import Recipe
from sbkit.recipe.report import Section
from sbkit.recipe.source import Findings
from sbkit.recipe.trace import Trace
from sbkit.recipe.values import static
from sbkit.runs import pretrained
from sbkit.runs.initial.files import counting_modules
from sbkit.runs.initial.matching import Match, ParameterOutcome
from sbkit.runs.initial.published import find
from sbkit.runs.initial.source import WeightSource
from sbkit.runs.keys import TaskKeys
from sbkit.runs.replay import SOURCES, arguments_of
from sbkit.system.console import table
from sbkit.train.distributed import ranks

logger = logging.getLogger(__name__)


def fresh(keys: TaskKeys) -> bool:
    """Whether a run has no checkpoint yet."""
    return not keys.checkpointer.list_checkpoints()


def source_of(keys: TaskKeys) -> WeightSource | None:
    """The source that a recipe names for its run's initial weights."""
    if keys.init_from is None:
        return None
    return find(keys.init_from, keys.source_weights, keys.brain.metric)


def open_source(keys: TaskKeys, changed: Mapping[str, tuple[str, str]]) -> None:
    """Refuse, before the corpus is prepared, a missing or invalid source, or another one than the run started with, as
    well as another normalisation of features.

    changed : recipe values that differ from the run's previous start, before and now
    """
    if fresh(keys):
        if keys.init_from is not None:
            _find_source(keys)
        return
    given = [before for name, (before, _) in changed.items()
             if re.match(r"data_folder\b", name) and before != "nothing"]
    if given and changed.get("data_folder", ("", ""))[1] == "null":
        raise SbkitError(f"data_folder: it is missing, but the run in {keys.folder} was last started with "
                         f"{', '.join(given)}", hint="give it again, or start a new run in another --output_folder")
    elsewhere = {change for name, change in changed.items() if name not in SOURCES and name.isidentifier()}
    began = arguments_of({key: before for key, (before, _) in changed.items()})
    for key in SOURCES:
        before, now = ("null" if value == "nothing" else value for value in changed.get(key, ("null", "null")))
        if key == "replay":  # another share is the same source
            other = (before == "null") != (now == "null")
        else:  # one that refers to another key, such as a voice's codec, may have moved; init_from: null is fine, too
            other = changed.get(key) not in elsewhere and (key, now) != ("init_from", "null") and \
                Path(before).expanduser().resolve() != Path(now).expanduser().resolve()
        if other:
            same = f"without --{key}" if before == "null" else f"with {began} (the source need not exist any more)"
            raise SbkitError(f"{key}: it is {now}, but the run in {keys.folder} was last started with {before}",
                             hint=f"resume it {same}, or start a new run in another --output_folder")
    norm = "normalize.norm_type"
    if "nothing" not in (change := changed.get(norm, ("nothing", ""))):
        raise SbkitError(f"{norm}: it is {change[1]}, but the run in {keys.folder} was last started with {change[0]}",
                         hint=f"resume it with --{norm} {change[0]}, or start a new run in another --output_folder")


def check(keys: TaskKeys, brain: Task) -> tuple[str, list[ParameterOutcome]]:
    """Refuse names and shapes that don't fit, and whatever ``open_source`` refuses; token rows need the corpus first.

    keys, brain : of the run that is to start; the Brain need not be able to train

    Returns a description of the source, and the outcome for each tensor of both.
    """
    source = _find_source(keys)
    match = _match(brain, source, shapes=True)
    return f"{source.description}{_merged(match)}", match.check()


def filled(recipe: Recipe) -> set[int]:
    """The ids of the tensors that a new run takes from its source, so that no pretrainer must load them."""
    keys, modules = recipe.keys, torch.nn.ModuleDict(recipe.hparams["modules"])
    if keys.init_from is None or keys.pretrainer is None:
        return set()
    own = modules.state_dict(keep_vars=True)
    paths = ranks.run_on_main(
        lambda: Match(modules, recipe.hparams, _find_source(keys), keys.init_leave or (), shapes=True).taken())
    taken = {id(own[path]): path for path in paths}
    lost = pretrained.loaded_ids(keys.pretrainer) - pretrained.saved_ids(keys.checkpointer.recoverables.values())
    unsaved = [path for each, path in taken.items() if each in lost]
    if unsaved:
        raise SbkitError(f"init_from: {len(unsaved)} tensors, such as {unsaved[0]}, would be taken, but no checkpoint "
                         "of this run saves them: once resumed, it would use those of its pretrainer",
                         hint="name their part under the recoverables of the checkpointer, or under init_leave")
    return set(taken)


def load(brain: Task) -> None:
    """Load the initial weights into a Brain; one rank reads them, and the others get them from it."""
    if brain.keys.init_from is None:
        return
    counted, outcome = ranks.run_on_main(_fill, brain)
    if ranks.is_main():
        logger.info("%s", outcome)
    for path, module in counting_modules(brain.modules):
        if path in counted:
            values = dict(counted[path])
            module._load_statistics_dict({**values, "count": int(values["count"])})
    ranks.take_from_main(brain.modules.state_dict(keep_vars=True).values())


class MeanWithSource:
    """The mean of a trained Brain's weights and its initial ones, with a share of each.

    Tensors that the source lacks, such as rows of new tokens, stay as trained; adapters that it lacks are scaled by the
    share.
    """

    def __init__(self, brain: Task):
        self._state = {name: value for name, value in brain.modules.state_dict(keep_vars=True).items()
                       if isinstance(value, torch.Tensor) and value.is_floating_point()}
        trained = copy.deepcopy(brain.modules.state_dict())
        ranks.run_on_main(_fill, brain)
        ranks.take_from_main(brain.modules.state_dict(keep_vars=True).values())
        self._old = {name: value.detach().clone() for name, value in self._state.items()}
        for name, value in self._old.items():
            if adapters.is_zero_at_first(name) and torch.equal(value, trained[name]):
                value.zero_()
        brain.modules.load_state_dict(trained)
        self._new = {name: trained[name] for name in self._state}

    @torch.no_grad()
    def take(self, share: float) -> None:
        """Load the mean into the Brain, with a weight of ``share`` for the trained weights."""
        for name, value in self._state.items():
            value.copy_(torch.lerp(self._old[name], self._new[name], share))


def _fill(brain: Task) -> tuple[dict[str, dict[str, torch.Tensor]], str]:
    """Returns the running statistics, which no state dict has, and a table of the tensors' outcomes."""
    source = _find_source(brain.keys)
    match = _match(brain, source)
    lines = [text(f"{source.description}{_merged(match)}", match.fill())]
    for module in brain.modules.modules():
        if isinstance(module, Encoder):
            module.keep()  # its pretrainer, which would do it, has nothing to load
            lines += module.notes()
    statistics = {path: {own: match.theirs[name] for own, name in names.items()}
                  for path, names in match.counted.items()}
    return statistics, "\n".join(lines)


def _merged(match: Match) -> str:
    return f", its LoRA merged into {len(match.merged)} weights" if match.merged else ""


def _match(brain: Task, source: WeightSource, shapes: bool = False) -> Match:
    match = Match(brain.modules, vars(brain.hparams), source, brain.keys.init_leave or (), brain.token_tables(), shapes)
    match.pretrained = pretrained.loaded_ids(brain.keys.pretrainer, {id(match.own[path]) for path in match.taken()})
    return match


def _find_source(keys: TaskKeys) -> WeightSource:
    """The source; refuses the run itself."""
    assert keys.init_from is not None
    if Path(keys.init_from).resolve() == keys.folder.resolve():
        raise SbkitError(f"init_from: {keys.init_from} is the folder of this run itself",
                         hint="the same command resumes a run; name another --output_folder to start a new one")
    source = source_of(keys)
    assert source is not None
    return source


def checkpoints_of(trace: Trace) -> list[Path]:
    """The folders of the run's checkpoints; the check's own checkpointer is elsewhere."""
    saver = trace.built.nodes.get("checkpointer")
    saves = saver.value.get("checkpoints_dir") if saver is not None and isinstance(saver.value, dict) else None
    saved_in = static(saves) if saves is not None else None
    return sorted(Path(saved_in).glob(f"{CKPT_PREFIX}+*")) if isinstance(saved_in, str) else []


def check_start(trace: Trace, findings: Findings) -> Section | None:
    """Report a source that is missing or doesn't fit; a run with a checkpoint needs none.

    Without a Brain, because other mistakes keep it from being built, only the source itself is checked.

    Returns a table of which tensors the run will take.
    """
    keys = trace.keys
    if keys is None:  # of the keys of every task, at least those that were built are there
        hparams = trace.built.hparams
        keys = None if TaskKeys.wrong(hparams) else TaskKeys.read(hparams)
    if keys is None or keys.init_from is None or checkpoints_of(trace):
        return None
    if trace.brain is None and any(finding.key == "init_from" for finding in findings):
        return None  # it clashes with another key, or is reported as wrong
    try:
        if trace.brain is None:
            if not names_model(keys.init_from):  # one on the hub would be downloaded for a run that can't start
                _find_source(keys)
            return None
        described, outcomes = check(keys, trace.brain)
    except SbkitError as error:
        nodes, (key, _, message) = trace.built.nodes, error.message.partition(": ")
        key, message = (key, message) if key in nodes and key.startswith("init_") else ("init_from", error.message)
        findings.error("start", nodes[key].place, key, message, error.hint or "")
        return None
    parts = [{"part": outcome.name, "numbers": outcome.numbers, "what": outcome.what, "why": outcome.why}
             for outcome in collapsed(outcomes)]
    return Section(f"Start: from {described}", COLUMNS, rows(outcomes),
                   values={"from": described, "parts": parts})


COLUMNS = ["part", "values", "what", "why"]


def text(source: str, outcomes: Sequence[ParameterOutcome]) -> str:
    """The table, below a line with the source."""
    return f"Starting from {source}\n{table(COLUMNS, rows(outcomes), indent='  ')}"


def rows(outcomes: Sequence[ParameterOutcome]) -> list[list[str]]:
    """The rows of the table with ``COLUMNS``."""
    return [[outcome.name, f"{outcome.numbers:,}", outcome.what, outcome.why] for outcome in collapsed(outcomes)]


def collapsed(outcomes: Iterable[ParameterOutcome], depth: int = 1) -> list[ParameterOutcome]:
    """One row for each module whose tensors all have one outcome; such layers in sequence share a row.

    depth : how many parts of names are compared; one more where these have several outcomes

    >>> rows = collapsed([ParameterOutcome(name, 2, what) for name, what in
    ...                   (("a.0.w", "taken"), ("a.1.w", "taken"), ("a.2.w", "left"), ("b", "taken"))])
    >>> [(outcome.name, outcome.numbers, outcome.what) for outcome in rows]
    [('a.0-1', 4, 'taken'), ('a.2', 2, 'left'), ('b', 2, 'taken')]
    """
    modules: dict[str, list[ParameterOutcome]] = {}
    for each in outcomes:
        modules.setdefault(".".join(each.name.split(".")[:depth]), []).append(each)
    found = []
    for name, below in modules.items():
        alike = len({(each.what, each.why) for each in below}) == 1
        found += [_together(name, below)] if alike else collapsed(below, depth + 1)

    def layer(outcome: ParameterOutcome) -> tuple[object, ...]:
        *above, last = outcome.name.split(".")
        return (outcome.what, outcome.why, above) if len(above) == depth - 1 > 0 and last.isdigit() else outcome

    rows = []
    for _, group in itertools.groupby(found, layer):
        first, *more = group
        name = f"{first.name}-{more[-1].name.rpartition('.')[2]}" if more else first.name
        rows.append(_together(name, [first, *more]))
    return rows


def _together(name: str, outcomes: Sequence[ParameterOutcome]) -> ParameterOutcome:
    return outcomes[0]._replace(name=name, numbers=sum(outcome.numbers for outcome in outcomes))
