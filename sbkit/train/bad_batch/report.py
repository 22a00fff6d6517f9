"""The report about a step that was not finite: all ranks decide together which batches are to blame, and save those."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import speechbrain as sb

from sbkit.recipe.report import listed
from sbkit.score.run_files import BAD_BATCHES
from sbkit.train.bad_batch import files
from sbkit.train.bad_batch.examine import Finding, examine
from sbkit.train.distributed import ranks
from sbkit.train.keys import ScriptKeys
from sbkit.train.results import StepResult

LIMIT = 10  # reports that a rank saves in one run


class _Blamed(NamedTuple):
    """A micro-batch that a report names."""

    micro: int
    """Its number in the step."""
    rank: int
    finding: Finding


def report(brain: sb.Brain, folder: str | os.PathLike[str], result: StepResult, epoch: int | None = None) -> str:
    """Find out why a step was not finite; all ranks must call it, and all get the same text.

    Each of this rank's micro-batches is run again, which is slow. Those that show the problem are saved in
    ``folder/bad_batches/step-N-rank-R``, for ``sbkit rerun``. If they can't be saved, the run goes on without.
    """
    bad_batches = Path(folder) / BAD_BATCHES
    rank = ranks.rank()
    heading = _heading(result, epoch)
    is_full = len(list(bad_batches.glob(f"step-*-rank-{rank}"))) >= LIMIT
    if all(ranks.gather_objects(is_full)):
        return f"{heading} {bad_batches} already has reports of {LIMIT} such steps."

    findings = [examine(brain, kept, result.number, result.scale * result.sum_scale)[0] for kept in result.batches]
    blamed = _blamed(ranks.gather_objects(findings))
    blamed_here = [each for each in blamed if each.rank == rank]
    saved_folder = None
    if blamed_here and not is_full:
        # One rank alone saves the weights, which are the same on all.
        saves_weights = blamed[0].rank == rank
        saved_folder = _save(brain, bad_batches, result, epoch, blamed_here, saves_weights)
    return "\n".join([heading, *_lines(brain, blamed, ranks.gather_objects(saved_folder))])


def _heading(result: StepResult, epoch: int | None) -> str:
    of_epoch = "" if epoch is None else f" of epoch {epoch}"
    heading = f"Step {result.number}{of_epoch}: the {result.failed_part} is not finite; the step was skipped."
    if result.late:  # on a GPU, where the values of a step are known only after the next
        heading += f" It was run again with the weights after step {result.number + result.late}."
    return heading


def _blamed(findings_of_ranks: Sequence[Sequence[Finding]]) -> list[_Blamed]:
    """Return the micro-batches that were bad again; if none was, those of rank 0, which stand for all."""
    all_of_ranks = [[_Blamed(micro, rank, finding) for micro, finding in enumerate(findings)]
                    for rank, findings in enumerate(findings_of_ranks)]
    bad = [each for of_rank in all_of_ranks for each in of_rank if each.finding.bad]
    return bad or all_of_ranks[0]


def _save(brain: sb.Brain, bad_batches: Path, result: StepResult, epoch: int | None, blamed: Sequence[_Blamed],
          saves_weights: bool) -> str | None:
    """Save this rank's micro-batches; return their folder, None if they can't be saved."""
    rank = ranks.rank()
    content = {
        "format": files.FORMAT, "step": result.number, "epoch": epoch, "rank": rank, "what": result.failed_part,
        "scale": result.scale, "sum_scale": result.sum_scale, "late": result.late, "precision": brain.precision,
        "device": str(brain.device),
        "accounts": [{"micro": each.micro, "rank": each.rank, **each.finding._asdict()} for each in blamed]}
    folder = bad_batches / f"step-{result.number}-rank-{rank}"
    batches = {each.micro: result.batches[each.micro] for each in blamed}
    is_saved = files.save(folder, batches, content, weights=brain.modules if saves_weights else None)
    return str(folder) if is_saved else None


def _lines(brain: sb.Brain, blamed: Sequence[_Blamed], folders: Sequence[str | None]) -> list[str]:
    """Return a report's lines: what was found in each micro-batch, and how to run it again."""
    lines = []
    for each in blamed:
        lines.append(f"  rank {each.rank}, micro-batch {each.micro}: {each.finding.where}")
        if each.finding.bad_ids:
            lines.append(f"    affected utterances: {listed(each.finding.bad_ids)}")
        else:
            lines.append(f"    utterances of the batch: {listed(each.finding.ids) or '(no ids)'}")
    for folder in folders:
        if folder is None:
            continue
        replays = f"sbkit rerun {folder}"
        if isinstance(brain.keys, ScriptKeys):  # sbkit rerun builds the Brain from a recipe
            replays = f"sbkit.train.bad_batch.replay(brain, {folder!r}) in your script"
        lines.append(f"  saved; every layer, and each utterance's own loss: {replays}")
    return lines
