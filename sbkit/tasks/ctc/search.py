"""The search of ``sbkit evaluate``: builds it, tunes its weights, and runs it over a whole test set at once."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from sbkit.data.manifest import Manifest
from sbkit.decode import kenlm_binary
from sbkit.decode.beam import BeamSearch
from sbkit.decode.joint import JointSearch
from sbkit.decode.posteriors import Events
from sbkit.decode.search_options import hot_words
from sbkit.errors import SbkitError
from sbkit.runs.evaluation import EvaluateRequest
from sbkit.system.cores import usable_cores
from sbkit.tasks.asr import choices
from sbkit.tasks.ctc import lm_weights
from sbkit.tasks.ctc.keys import CTCKeys
from sbkit.train.distributed import ranks

_PAYS = 1000  # utterances for which another process is worth its start
LARGE = 200e6  # bytes of an ARPA file that is too large to hold in every process


class Searches(Protocol):
    """A Brain with a search, and a row for each utterance that it has transcribed."""

    decoder: Any  # a search, or a recorder in its place
    rows: list[Any]


def build(request: EvaluateRequest, keys: CTCKeys) -> BeamSearch | JointSearch | None:
    """Build and load the search that an ``EvaluateRequest`` describes; the recipe's own if it describes none."""
    names = "lm", "lm_weight", "word_score", "beam", "nbest"
    options = {name: value for name in names if (value := getattr(request, name)) is not None}
    if request.hot_words:
        options["hot_words"] = _normalised(hot_words(request.hot_words), keys.corpus.text)
    if request.joint:
        return _joint(request, keys, options)
    if request.ctc_weight is not None:
        raise SbkitError("--ctc-weight is for the search with CTC and the attention decoder", hint="add --joint")
    if not request.lm and (request.tune_lm or request.lm_weight is not None):
        raise SbkitError("there is no language model to weight", hint="name one: --lm FILE.arpa (see sbkit lm)")
    search = keys.decoder
    if options:
        search = BeamSearch(keys.tokenizer, blank_id=keys.blank_index, **options)
    if search is not None and search.tokenizer is None:
        search.tokenizer = keys.tokenizer
    return search.load() if isinstance(search, BeamSearch) else search


def _normalised(phrases: Mapping[str, float], rules: Callable[[str], str]) -> dict[str, float]:
    """Normalise hot words by the rules of the run's transcripts: case, punctuation."""
    normalised: dict[str, float] = {}
    for phrase, boost in phrases.items():
        text = rules(phrase)
        if not text:
            raise SbkitError(f"the run's text rules leave nothing of the hot word {phrase!r}",
                             hint="write words as they are spoken")
        normalised[text] = max(boost, normalised.get(text, boost))
    return normalised


def _joint(request: EvaluateRequest, keys: CTCKeys, options: dict[str, Any]) -> JointSearch:
    if set(options) - {"beam", "nbest"} or request.tune_lm:
        raise SbkitError("the joint search takes no language model, no word score and no hot words",
                         hint="leave out these, or --joint")
    weight = keys.ctc_weight
    if weight >= 1:
        raise SbkitError(f"{request.run} has no trained attention decoder: its recipe says ctc_weight: {weight}",
                         hint="train with less than 1, such as --ctc_weight 0.3, or leave out --joint")
    if request.ctc_weight is not None:
        options["ctc_weight"] = request.ctc_weight
    begin, end = keys.ends
    return JointSearch(keys.tokenizer, blank_id=keys.blank_index, bos_id=begin, eos_id=end, **options)


def describe(search: object) -> dict[str, Any]:
    """Describe a search for result.json."""
    if isinstance(search, JointSearch):
        return {"joint": True, "ctc_weight": search.ctc_weight, "beam": search.beam}
    if not isinstance(search, BeamSearch):
        return {"class": type(search).__name__}
    weights = search.weights
    return {"lm": None if search.lm is None else str(search.lm), "lm_weight": weights.lm, "word_score": weights.word,
            "beam": search.beam, "hot_words": search.hot_words.boosts}


def tune(brain: Searches, manifest: Manifest, hear: Callable[[Manifest], object]) -> dict[str, Any]:
    """Give the brain's search the weights that make the fewest errors on dev; returns facts for result.json."""
    search = brain.decoder
    manifest = lm_weights.some_of(manifest)
    brain.decoder = recorder = lm_weights.Recorder(search)
    hear(manifest)
    with search_processes(search, len(recorder)):
        tuned = lm_weights.tune(recorder, brain.rows)
    search.weights = tuned.weights
    brain.decoder = search
    if ranks.is_main():
        print(f"tuned on {len(manifest)} utterances of dev: --lm-weight {tuned.weights.lm:g} --word-score "
              f"{tuned.weights.word:g} (WER {tuned.rate:.2f} %, greedily {tuned.greedy:.2f} %)")
    return {"tuned_on": len(manifest), "dev_WER": tuned.rate, "dev_WER_greedy": tuned.greedy}


@contextlib.contextmanager
def over_all(brain: Searches) -> Iterator[None]:
    """Context in which a beam search only records; at its end it searches all utterances and updates the brain's rows.

    It is faster on many utterances at once, and can use several processes.
    """
    search = brain.decoder
    if not isinstance(search, BeamSearch):
        yield
        return
    brain.decoder = recorder = lm_weights.Recorder(search)
    try:
        yield
    finally:
        brain.decoder = search
    with search_processes(search, len(recorder)):
        found = search.search(Events.join(recorder.batches))
    brain.rows = [row._replace(hypothesis=hypotheses[0].text, confidence=hypotheses[0].confidence,
                               nbest=choices(hypotheses))
                  for row, hypotheses in zip(brain.rows, found, strict=True)]


@contextlib.contextmanager
def search_processes(search: BeamSearch, utterances: int) -> Iterator[None]:
    """Context in which a search has as many processes as are worth their start."""
    before = search.workers
    if search.lm is None or kenlm_binary.recognise(search.lm) or os.path.getsize(search.lm) < LARGE:
        search.workers = max(before, min(usable_cores() // ranks.world_size(), utterances // _PAYS) - 1)
    try:
        yield
    finally:
        search.close()
        search.workers = before
