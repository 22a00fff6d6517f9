"""Whether the checkpoints in an output folder are of the recipe's model, as far as the check knows it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from speechbrain.utils.checkpoints import ckpt_recency, torch_recovery

from sbkit.errors import SbkitError
from sbkit.recipe import load
from sbkit.recipe.ownership import recoverables
from sbkit.recipe.source import Findings
from sbkit.recipe.trace import Trace
from sbkit.recipe.values import static
from sbkit.runs.initial import checkpoints_of
from sbkit.runs.start_guard import changed_since, in_words
from sbkit.score.run_files import BEFORE_START, RECIPE
from sbkit.train.checkpoint.files import CheckpointError, readable_checkpoints
from sbkit.train.checkpoint.hooks import loading_hook
from sbkit.train.checkpoint.state import differences, other_model, read_state


def check_checkpoints(trace: Trace, findings: Findings, sized_by_corpus: Sequence[str]) -> None:
    """Refuse an output folder whose newest checkpoint is of another model, as training does when it loads it.

    sized_by_corpus : keys whose values a run takes from its corpus; they may differ here, and with them some shapes
    """
    output = trace.built.hparams.get("output_folder")
    newest_first = sorted(readable_checkpoints(checkpoints_of(trace))[0], key=ckpt_recency, reverse=True)
    if not newest_first or not isinstance(output, str):
        return
    # A start that was killed while it prepared has left another recipe there, until the next start puts this one back.
    interrupted = (Path(output) / BEFORE_START).is_dir()
    sizes = None if interrupted else _sizes_of_run(trace, Path(output), sized_by_corpus)
    if sizes is None:
        return
    for name, module in (recoverables(trace.built) or {}).items():
        path = newest_first[0].paramfiles.get(name)
        plain = isinstance(module, torch.nn.Module) and \
            loading_hook(module) is torch_recovery
        if path is None or not plain:
            continue
        try:
            saved = read_state(path, lazily=True)
        except (CheckpointError, OSError):  # training skips a damaged checkpoint
            return
        differing = _differences(module, saved, sizes)
        if differing:
            error = other_model(name, path, differing)
            message = error.message
            changes = in_words(changed_since(Path(output), trace.built.root))
            if changes:  # as training says it
                message = f"the checkpoints in {output} are of another model; what has changed: {'; '.join(changes)}"
            node = trace.built.nodes["output_folder"]
            node = node.source or node
            findings.error("other-model", node.place, node.key if node.place.line else f"--{node.key}", message,
                           error.hint or "")
            return


def _differences(module: torch.nn.Module, saved: Any,  # what a checkpoint holds: a dict, but for damage
                 sizes: set[tuple[int, int]]) -> str:
    """How what a checkpoint has saved differs from a module, except for shapes that differ because of the corpus."""
    state = module.state_dict()
    if isinstance(saved, dict):
        resized = {key for key, value in state.items()
                   if key in saved and _differ_only_by(_shape(saved[key]), _shape(value), sizes)}
        state = {key: value for key, value in state.items() if key not in resized}
        saved = {key: value for key, value in saved.items() if key not in resized}
    return differences(state, saved)


def _sizes_of_run(trace: Trace, output: Path, keys: Sequence[str]) -> set[tuple[int, int]] | None:
    """The values of these keys in the run and here, where they differ; None if the run's recipe can't be read."""
    try:
        run = load.tree(output / RECIPE).value
    except SbkitError:
        return None
    here = trace.built.root.value
    pairs = set()
    for key in keys:
        was, now = (static(tree[key]) if key in tree else None for tree in (run, here))
        if isinstance(was, int) and isinstance(now, int) and was != now:
            pairs.add((was, now))
    return pairs


def _shape(value: Any) -> tuple[int, ...]:  # a tensor, or what else a state dict holds
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


def _differ_only_by(saved: tuple[int, ...], here: tuple[int, ...], sizes: set[tuple[int, int]]) -> bool:
    """Whether two shapes differ, and by as much as these sizes: a table may have a row more than a key says."""
    if saved == here or len(saved) != len(here):
        return False
    differences_of_keys = {now - was for was, now in sizes}
    return all(was == now or now - was in differences_of_keys for was, now in zip(saved, here, strict=True))
