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
from sbkit.nn.pretrained.source import is_folder, names_model
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
from sbkit.runs.start_guard import NO_KEY
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
    _refuse_missing_corpus(keys, changed)
    for key in SOURCES:
        _refuse_other_source(keys, key, changed)

    norm = "normalize.norm_type"
    before, now = changed.get(norm, (NO_KEY, NO_KEY))
    if NO_KEY not in (before, now):
        raise SbkitError("changed-key",
                         f"{norm}: it is {now}, but the run in {keys.folder} was last started with {before}",
                         hint=f"resume it with --{norm} {before}, or start a new run in another --output_folder",
                         key=norm)


def _refuse_missing_corpus(keys: TaskKeys, changed: Mapping[str, tuple[str, str]]) -> None:
    """Refuse a run that was started with a corpus, and is resumed without one."""
    _, folder_now = changed.get("data_folder", ("", ""))
    # A mapping of splits to files has a value for each, such as ``data_folder.train``.
    folders_before = [before for name, (before, _) in changed.items()
                      if re.match(r"data_folder\b", name) and before != NO_KEY]
    if folders_before and folder_now == "null":
        raise SbkitError("changed-key",
                         f"data_folder: it is missing, but the run in {keys.folder} was last started with "
                         f"{', '.join(folders_before)}", hint="give it again, or start a new run in another "
                         "--output_folder", key="data_folder")


def _refuse_other_source(keys: TaskKeys, key: str, changed: Mapping[str, tuple[str, str]]) -> None:
    """Refuse another value of one of the ``SOURCES``, because a run keeps what it started from."""
    before, now = ("null" if value == NO_KEY else value for value in changed.get(key, ("null", "null")))
    if key == "replay":  # another share is the same source
        same = (before == "null") == (now == "null")
    else:
        # A value that refers to another key, such as a voice's codec, may have moved with it.
        changes_elsewhere = {change for name, change in changed.items() if name not in SOURCES and name.isidentifier()}
        moved = changed.get(key) in changes_elsewhere
        no_longer_needed = key == "init_from" and now == "null"
        same = moved or no_longer_needed or Path(before).expanduser().resolve() == Path(now).expanduser().resolve()
    if same:
        return
    began = arguments_of({name: value for name, (value, _) in changed.items()})
    how = f"without --{key}" if before == "null" else f"with {began} (the source need not exist any more)"
    raise SbkitError("changed-key", f"{key}: it is {now}, but the run in {keys.folder} was last started with {before}",
                     hint=f"resume it {how}, or start a new run in another --output_folder", key=key)


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
    keys = recipe.keys
    modules = torch.nn.ModuleDict(recipe.hparams["modules"])
    if keys.init_from is None or keys.pretrainer is None:
        return set()
    tensors = modules.state_dict(keep_vars=True)
    paths = ranks.run_on_main(
        lambda: Match(modules, recipe.hparams, _find_source(keys), keys.init_leave or (), shapes=True).taken())
    path_of = {id(tensors[path]): path for path in paths}
    loaded_but_unsaved = (pretrained.loaded_ids(keys.pretrainer)
                          - pretrained.saved_ids(keys.checkpointer.recoverables.values()))
    unsaved = [path for tensor_id, path in path_of.items() if tensor_id in loaded_but_unsaved]
    if unsaved:
        raise SbkitError("unsaved-weights",
                         f"init_from: {len(unsaved)} tensors, such as {unsaved[0]}, would be taken, but no checkpoint "
                         "of this run saves them: once resumed, it would use those of its pretrainer",
                         hint="name their part under the recoverables of the checkpointer, or under init_leave",
                         key="init_from")
    return set(path_of)


def load(brain: Task) -> None:
    """Load the initial weights into a Brain; one rank reads them, and the others get them from it."""
    if brain.keys.init_from is None:
        return
    statistics, outcome_table = ranks.run_on_main(_fill, brain)
    if ranks.is_main():
        logger.info("%s", outcome_table)
    for path, module in counting_modules(brain.modules):
        if path in statistics:
            values = statistics[path]
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
        self._initial = {name: value.detach().clone() for name, value in self._state.items()}
        for name, value in self._initial.items():
            # Still as trained, so the source lacks this adapter, which was zero when the run started.
            if adapters.is_zero_at_first(name) and torch.equal(value, trained[name]):
                value.zero_()
        brain.modules.load_state_dict(trained)
        self._trained = {name: trained[name] for name in self._state}

    @torch.no_grad()
    def take(self, share: float) -> None:
        """Load the mean into the Brain, with a weight of ``share`` for the trained weights."""
        for name, value in self._state.items():
            value.copy_(torch.lerp(self._initial[name], self._trained[name], share))


def _fill(brain: Task) -> tuple[dict[str, dict[str, torch.Tensor]], str]:
    """Returns the running statistics, which no state dict has, and a table of the tensors' outcomes."""
    source = _find_source(brain.keys)
    match = _match(brain, source)
    lines = [text(f"{source.description}{_merged(match)}", match.fill())]
    for module in brain.modules.modules():
        if isinstance(module, Encoder):
            module.keep()  # its pretrainer, which would do it, has nothing to load
            lines += module.notes()
    statistics = {path: {value: match.source_tensors[name] for value, name in names.items()}
                  for path, names in match.statistics.items()}
    return statistics, "\n".join(lines)


def _merged(match: Match) -> str:
    return f", its LoRA merged into {len(match.merged)} weights" if match.merged else ""


def _match(brain: Task, source: WeightSource, shapes: bool = False) -> Match:
    match = Match(brain.modules, vars(brain.hparams), source, brain.keys.init_leave or (), brain.token_tables(), shapes)
    taken_ids = {id(match.model_tensors[path]) for path in match.taken()}
    match.pretrained = pretrained.loaded_ids(brain.keys.pretrainer, taken_ids)
    return match


def _find_source(keys: TaskKeys) -> WeightSource:
    """The source; refuses the run itself."""
    assert keys.init_from is not None
    if Path(keys.init_from).resolve() == keys.folder.resolve():
        raise SbkitError("conflicting-options", f"init_from: {keys.init_from} is the folder of this run itself",
                         hint="the same command resumes a run; name another --output_folder to start a new one",
                         file=keys.init_from, key="init_from")
    source = source_of(keys)
    assert source is not None
    return source


def checkpoints_of(trace: Trace) -> list[Path]:
    """The folders of the run's checkpoints; the check's own checkpointer is elsewhere."""
    checkpointer = trace.built.nodes.get("checkpointer")
    if checkpointer is None or not isinstance(checkpointer.value, dict):
        return []
    folder_node = checkpointer.value.get("checkpoints_dir")
    folder = None if folder_node is None else static(folder_node)
    return sorted(Path(folder).glob(f"{CKPT_PREFIX}+*")) if isinstance(folder, str) else []


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
            if names_model(keys.init_from) and not is_folder(keys.init_from):
                # It would be downloaded for a run that can't start.
                trace.unchecked.append(f"init_from: {keys.init_from} is no folder here, so it names a model of the "
                                       "Hugging Face Hub, which is looked up once the model can be built")
            else:
                _find_source(keys)
            return None
        description, outcomes = check(keys, trace.brain)
    except SbkitError as error:
        nodes = trace.built.nodes
        key = error.key or ""
        if key not in nodes or not key.startswith("init_"):
            key = "init_from"
        findings.error("start", nodes[key].place, key, error.message.removeprefix(f"{key}: "), error.hint or "")
        return None
    parts = [{"part": outcome.name, "numbers": outcome.numbers, "what": outcome.what, "why": outcome.why}
             for outcome in collapsed(outcomes)]
    return Section(f"Start: from {description}", COLUMNS, rows(outcomes),
                   values={"from": description, "parts": parts})


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
    for outcome in outcomes:
        module_name = ".".join(outcome.name.split(".")[:depth])
        modules.setdefault(module_name, []).append(outcome)
    of_modules = []
    for module_name, below in modules.items():
        if len({(outcome.what, outcome.why) for outcome in below}) == 1:
            of_modules.append(_together(module_name, below))
        else:
            of_modules += collapsed(below, depth + 1)

    def same_for_layers(outcome: ParameterOutcome) -> tuple[object, ...]:
        """The same for layers of one list with one outcome; the outcome itself for anything else."""
        *above, last = outcome.name.split(".")
        is_layer = above and len(above) == depth - 1 and last.isdigit()
        return (outcome.what, outcome.why, above) if is_layer else outcome

    rows = []
    for _, group in itertools.groupby(of_modules, same_for_layers):
        first, *more = group
        name = f"{first.name}-{more[-1].name.rpartition('.')[2]}" if more else first.name
        rows.append(_together(name, [first, *more]))
    return rows


def _together(name: str, outcomes: Sequence[ParameterOutcome]) -> ParameterOutcome:
    return outcomes[0]._replace(name=name, numbers=sum(outcome.numbers for outcome in outcomes))
