"""How likely labels are by a CTC model, compared with its own transcript, for rows that it was not trained on."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from speechbrain.core import Stage
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sbkit.compat import loaders
from sbkit.data.columns import BatchColumns
from sbkit.data.loader import EvalLoader
from sbkit.data.manifest import Manifest
from sbkit.decode import lm
from sbkit.decode.beam import BeamSearch
from sbkit.nn.ctc import ctc_loss
from sbkit.runs import restore
from sbkit.score.label_errors import LabelScore, units
from sbkit.system import untrusted
from sbkit.system.console import atomic_write, progress
from sbkit.tasks.ctc.task import CTC

_IMPOSSIBLE = -1e4  # log-likelihood of a label that has more tokens than its recording has frames


def score(run: Path, manifest: Manifest, device: str | torch.device) -> list[LabelScore]:
    """Score each row by the run's best checkpoint and a language model of its training labels; leaves out unreadable
    rows.

    The scores are cached in the run's folder until the checkpoint or a row changes.
    """
    recipe = restore.read_run(run)
    brain = restore.build(recipe, device)
    keys = recipe.keys
    assert isinstance(brain, CTC), "the command refuses other recipes"
    [checkpoint] = restore.take_weights(brain)
    cache = run / "label_scores.json"
    scored = [Path(checkpoint.path).name, checkpoint.meta["unixtime"], manifest.digest()]
    try:
        cached = untrusted.parse_json(cache.read_text(encoding="utf-8"))
        if cached["of"] == scored:
            return [LabelScore(*row) for row in cached["scores"]]
    except (OSError, ValueError, TypeError, KeyError):
        pass  # there is no cache, or it is damaged

    texts = list(keys.corpus.manifest("train").texts)
    unit = "word" if units(texts) == "word" else "piece"
    language_model = run / "labels.arpa"
    lm.build(texts, language_model, unit=unit, tokenizer=keys.tokenizer)
    search = BeamSearch(keys.tokenizer, lm=language_model, unit=unit, blank_id=keys.blank_index)
    brain.transcriber.complete(search).load()

    loader = EvalLoader(
        manifest, recipe.task.tokenizer(keys), columns=BatchColumns(recipe.task.columns, keys),
        max_batch_seconds=keys.batching.max_batch_seconds, workers=keys.num_workers, sample_rate=keys.sample_rate)
    scores: list[LabelScore] = []
    with loader, torch.no_grad(), progress(what=run.name, total=len(manifest), unit="row") as bar:
        brain.open_stage(Stage.VALID)
        for batch in loaders.on_device(loader, loader, str(brain.device)):
            with brain.evaluation_ctx:
                outputs = brain.compute_forward(batch, Stage.VALID)
            log_probs = outputs.ctc.float().log_softmax(-1)
            hypotheses = [nbest[0] for nbest in search.decode(log_probs, outputs.frames)]
            tokens = [torch.from_numpy(hypothesis.spans.ids) for hypothesis in hypotheses]
            of_hypotheses = _likelihoods(brain, log_probs, outputs.frames, pad_sequence(tokens, batch_first=True),
                                         torch.tensor([len(ids) for ids in tokens]))
            of_labels = _likelihoods(brain, log_probs, outputs.frames, batch.tokens, batch.token_lengths)
            for row, hypothesis in enumerate(hypotheses):
                gain = of_hypotheses[row] - of_labels[row]
                scores.append(LabelScore(batch.ids[row], batch.texts[row], hypothesis.text, gain,
                                         hypothesis.confidence or 0.0))
            bar.update(len(batch))
    with atomic_write(cache) as out:
        json.dump({"of": scored, "scores": scores}, out)
    return scores


def _likelihoods(brain: CTC, log_probs: Tensor, frames: Tensor, tokens: Tensor, lengths: Tensor) -> list[float]:
    """Compute the log-likelihood [B] of tokens [B, U] over all alignments."""
    device = log_probs.device
    result = ctc_loss(log_probs, tokens.to(device), frames, lengths.to(device), blank=brain.keys.blank_index,
                      from_logits=False)
    likelihoods: list[float] = (-result.losses).masked_fill(~result.feasible, _IMPOSSIBLE).tolist()
    return likelihoods
