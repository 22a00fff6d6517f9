"""What a recipe's check says of the weights that a run is to start from."""

from __future__ import annotations

from pathlib import Path

from sbkit.errors import SbkitError
from sbkit.recipe.build import Built
from sbkit.recipe.report import Section
from sbkit.recipe.source import Findings
from sbkit.recipe.trace import Trace
from sbkit.recipe.values import static
from sbkit.runs.initial import loading, table


def check_start(trace: Trace, findings: Findings) -> Section | None:
    """Find a source that isn't there, or doesn't fit; a run that has a checkpoint needs none.

    Returns a table of what the run will take, and what not.
    """
    if trace.brain is None or trace.keys.init_from is None or _has_checkpoint(trace.built):
        return None
    try:
        described, fates = loading.check(trace.keys, trace.brain)
    except SbkitError as error:
        nodes, (key, _, said) = trace.built.nodes, error.message.partition(": ")
        key, said = (key, said) if key in nodes and key.startswith("init_") else ("init_from", error.message)
        findings.error("start", nodes[key].place, key, said, error.hint or "")
        return None
    parts = [{"part": fate.name, "numbers": fate.numbers, "what": fate.what, "why": fate.why}
             for fate in table.collapsed(fates)]
    return Section(f"Start: from {described}", table.COLUMNS, table.rows(fates),
                   values={"from": described, "parts": parts})


def _has_checkpoint(built: Built) -> bool:
    """Whether the run has a checkpoint: not where the check has put its checkpointer, but where the recipe does."""
    node = built.nodes.get("checkpointer")
    folder = node.value.get("checkpoints_dir") if node is not None and isinstance(node.value, dict) else None
    said = static(folder) if folder is not None else None
    return isinstance(said, str) and any(Path(said).glob("CKPT+*"))
