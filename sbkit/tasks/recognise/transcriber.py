"""The transcripts of validations and tests: greedy, by a search, or as on a live stream."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from speechbrain.core import Stage
from speechbrain.utils.dynamic_chunk_training import DynChunkTrainConfig
from torch import Tensor

from sbkit.data.batch import Batch
from sbkit.data.manifest import Manifest
from sbkit.decode.joint import JointSearch
from sbkit.decode.spans import Spelling
from sbkit.decode.token_search import TokenSearch
from sbkit.errors import SbkitError
from sbkit.runs.evaluation_request import EvaluateRequest
from sbkit.system.console import counted
from sbkit.tasks.recognise.acoustic_model import AcousticModel
from sbkit.tasks.recognise.decoding import DecoderScores, Decoding, Search
from sbkit.tasks.recognise.keys import EncoderKeys
from sbkit.tasks.recognise.live import LiveResults, LiveTest
from sbkit.tasks.recognise.search import Recorder, best_weights, options, search_processes, tuning_subset
from sbkit.tasks.recognise.spelling import frame_seconds, spelling_of
from sbkit.tasks.recognise.transcripts import ASRResults, TranscribedUtterance, nbest_entries, rates_by_name
from sbkit.train.distributed import ranks


class Transcriber:
    """Decodes what a model outputs in validations and tests into rows with transcripts.

    Validations decode greedily. Tests use ``search``: the recipe's ``decoder``, or the one of an evaluation's options.
    """

    def __init__(self, acoustic_model: AcousticModel, keys: EncoderKeys, decoding: Decoding):
        self.acoustic_model = acoustic_model
        self.keys = keys
        self.decoding = decoding
        self.search: Search | None = keys.decoder
        """A search, a recorder instead of it, or a recipe's own; None: greedy decoding."""
        self.live: LiveTest | None = None
        """Tests in chunks; None: on whole utterances only."""
        self.test_context: DynChunkTrainConfig | None = None
        """The context of frames in a test; None: the whole utterance."""

    @cached_property
    def spelling(self) -> Spelling:
        """How the model's tokens are written, as in its bundle."""
        return spelling_of(self.acoustic_model, self.keys)

    def complete(self, search: Search) -> Search:
        """Give a search the parts of the model that it needs; returns it."""
        self.decoding.complete(search)
        if search.tokenizer is None:
            search.tokenizer = self.keys.tokenizer
        if isinstance(search, (TokenSearch, JointSearch)):
            search.model_spelling = self.spelling
        return search

    # ------------------------------------------------------------ rows

    def live_scores(self, feats: Tensor, frames: Tensor, first: DecoderScores, stage: Stage) -> Sequence[DecoderScores]:
        """Compute the scores for each chunk size of a test; empty if it is on whole utterances only.

        feats, frames : features [B, T', F] and their lengths [B]
        first : the scores of the first size
        """
        if self.live is None or stage != Stage.TEST:
            return ()
        return self.live.scores(feats, frames, first)

    def rows(self, scores: Tensor, frames: Tensor, batch: Batch, stage: Stage, live: Sequence[DecoderScores] = (),
             *more: Any) -> list[TranscribedUtterance]:
        """Transcribe a batch: by the search in a test, otherwise greedily; nothing for a dummy batch.

        scores, frames : the input of a search [B, T, ...] and lengths [B]
        live : as returned by :meth:`live_scores`
        more : further arguments of a recipe's own search
        """
        if not batch.weight:
            return []
        search = None
        if stage == Stage.TEST and self.search is not None:
            search = self.complete(self.search)
        if self.live is not None and live:
            return list(self.live.rows(live, frames, batch, search, self.spelling))
        if search is None:
            decoded = list(self.decoding.greedy(scores, frames))
            texts = map(self.spelling.text, decoded)
            confidences = (float(spans.confidence.mean()) if len(spans) else None for spans in decoded)
            return list(map(TranscribedUtterance, batch.ids, batch.texts, texts, confidences))
        rows = []
        for name, reference, nbest in zip(batch.ids, batch.texts, search.decode(scores, frames, *more), strict=True):
            best = nbest[0]
            rows.append(TranscribedUtterance(name, reference, best.text, best.confidence, nbest_entries(nbest)))
        return rows

    def stats(self, rows: Sequence[TranscribedUtterance]) -> dict[str, float]:
        """Compute the error rates of a validation or test."""
        return rates_by_name(rows)

    def results(self, rows: Sequence[TranscribedUtterance], loss: float, unread: Mapping[str, str]) -> ASRResults:
        """Build the results of a test from its rows."""
        results = ASRResults.of(rows, loss, unread)
        if self.live is not None:
            return LiveResults(**vars(results), chunk=self.live.chunk)
        chunks = self.keys.chunks
        if chunks is not None and chunks.validate is not None:
            size = 1000 * frame_seconds(self.acoustic_model, self.keys) * chunks.validate
            results.remark = (f"the test used whole utterances, but validations chunks of {size:.0f} ms; "
                              f"sbkit evaluate {self.keys.folder} --chunk {size:.0f},whole compares both")
        return results

    # ------------------------------------------------------------ what an evaluation asks for

    def use_search(self, request: EvaluateRequest) -> None:
        """Build and load the search of an evaluation's options, by default the recipe's own."""
        if request.joint:
            self.search = self.decoding.joint_search(request)
            return
        if request.ctc_weight is not None:
            raise SbkitError("bad-option", "--ctc-weight is for the search with CTC and the attention decoder",
                             key="ctc-weight", hint="add --joint")
        if not request.lm and (request.tune_lm or request.lm_weight is not None):
            raise SbkitError("bad-option", "there is no language model to weight", key="lm",
                             hint="name one: --lm FILE.arpa (see sbkit lm)")
        search = self.keys.decoder
        arguments = options(request, self.keys)
        if arguments:
            if self.decoding.search_class is None:
                option = next(iter(arguments)).replace("_", "-").removesuffix("s")  # --hot-word fills hot_words
                raise SbkitError("no-such-search", f"the model has no search that takes --{option}", key=option,
                                 hint="leave it out")
            search = self.decoding.search_class(self.keys.tokenizer, blank_id=self.keys.blank_index, **arguments)
        if search is not None:
            self.complete(search)
        self.search = search.load() if isinstance(search, TokenSearch) else search

    def use_chunks(self, chunk: Sequence[int | None]) -> None:
        """Test as on live streams, in chunks of each of these sizes.

        chunk : milliseconds; None is the whole utterance
        """
        nbest = getattr(self.search, "nbest", 1)  # a recipe's own search may give one transcript only
        if nbest > 1 and chunk[0] is not None:
            raise SbkitError("conflicting-options", "--nbest lists the transcripts of the first size of --chunk, but a "
                             "stream has only one", key="nbest",
                             hint="name whole first, as in --chunk whole,320, or leave out --nbest")
        self.live = LiveTest(self.acoustic_model, self.keys, self.decoding, chunk)
        self.test_context = self.live.configs[chunk[0]]

    def tune(self, manifest: Manifest,
             evaluate: Callable[[Manifest], Sequence[TranscribedUtterance]]) -> dict[str, Any]:
        """Set the weights of the search that give the fewest errors on dev; returns facts for result.json.

        evaluate : runs the model over a manifest and returns this rank's rows
        """
        search, manifest = self.search, tuning_subset(manifest)
        assert isinstance(search, TokenSearch), "there is a language model to weight"
        live, self.live = self.live, None  # tuning only needs final transcripts, in ``test_context``
        self.search = recorder = Recorder(search, self.decoding.greedy, self.spelling.text)
        try:
            rows = evaluate(manifest)
        finally:
            self.search, self.live = search, live
        with search_processes(search, len(recorder)):
            weights, rate, greedy = best_weights(recorder, rows)
        search.weights = weights
        if ranks.is_main():
            print(f"tuned on {counted(len(manifest), 'utterance')} of dev: --lm-weight {weights.lm:g} --word-score "
                  f"{weights.word:g} (WER {rate:.2f} %, greedy {greedy:.2f} %)")
        return {"tuned_on": len(manifest), "dev_WER": rate, "dev_WER_greedy": greedy}

    @contextlib.contextmanager
    def searching_at_the_end(
            self) -> Iterator[Callable[[list[TranscribedUtterance]], list[TranscribedUtterance]]]:
        """Context of a pass over a test set, in which a search that ``keeps_events`` only records its inputs. It gives
        a function that, called after the pass, searches them all and returns the rows with the transcripts.

        Searching many utterances at once is faster, and can use several processes.
        """
        search = self.search
        if self.live is not None or not isinstance(search, TokenSearch) or not search.keeps_events:
            yield lambda rows: rows
            return
        self.complete(search)
        self.search = recorder = Recorder(search, self.decoding.greedy, self.spelling.text)

        def finish(rows: list[TranscribedUtterance]) -> list[TranscribedUtterance]:
            with search_processes(search, len(recorder)):
                hypotheses = search.search(search.join(recorder.batches))
            return [row._replace(hypothesis=nbest[0].text, confidence=nbest[0].confidence, nbest=nbest_entries(nbest))
                    for row, nbest in zip(rows, hypotheses, strict=True)]

        try:
            yield finish
        finally:
            self.search = search

    def search_facts(self) -> dict[str, Any]:
        """Describe the search for result.json."""
        search = self.search
        if search is None:
            return {}
        if isinstance(search, JointSearch):
            return {"joint": True, "ctc_weight": search.ctc_weight, "beam": search.beam}
        if not isinstance(search, TokenSearch):
            return {"class": type(search).__name__}
        weights = search.weights
        facts: dict[str, Any] = {}
        if not type(search).__module__.startswith("sbkit."):  # a class of the user's own may search otherwise
            facts["class"] = type(search).__name__
        return {**facts, "lm": None if search.lm is None else str(search.lm), "lm_weight": weights.lm,
                "word_score": weights.word, "beam": search.beam, "hot_words": search.hot_words.boosts}
