"""A CTC recogniser that a SpeechBrain script has trained: its export, and its evaluation."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from speechbrain.core import Stage
from speechbrain.utils import checkpoints as stock
from torch import nn

from sbkit.compat import loaders, script_run
from sbkit.compat.script_model import ScriptRecogniser, find_recogniser
from sbkit.compat.script_run import Reached, run_again
from sbkit.compat.script_test_set import values_of
from sbkit.compat.script_tokens import reference as text_of_row
from sbkit.data.corpus import Corpus
from sbkit.data.manifest import Manifest
from sbkit.decode.greedy import greedy
from sbkit.decode.spans import WORD_START, Spelling, TokenSpans, best_path, collapse
from sbkit.errors import SbkitError
from sbkit.export import bundle, graph, layout
from sbkit.export.bundle import ExportRequest
from sbkit.export.clips import Clip, ComparisonClips, comparison_clips
from sbkit.export.exported import Exported
from sbkit.export.layout import Config
from sbkit.export.parity import Comparison, Reference
from sbkit.export.script_graph import ScriptGraph, frame_rule, trace_script
from sbkit.export.source import Trained
from sbkit.export.vocabulary import Vocabulary, write_tokens
from sbkit.runs import evaluation, restore
from sbkit.runs.evaluation import CheckpointResult
from sbkit.runs.evaluation_request import EvaluateRequest
from sbkit.runs.keys import Bundles
from sbkit.score.weights import BEST_CHECKPOINT, LAST, ChosenWeights
from sbkit.system.console import progress
from sbkit.tasks.ctc import readme
from sbkit.tasks.ctc.exported import compared
from sbkit.tasks.recognise.graph import OUTPUTS
from sbkit.tasks.recognise.spelling import have_spaces
from sbkit.tasks.recognise.transcripts import ASRResults, TranscribedUtterance, score
from sbkit.train.batches import DataSource
from sbkit.train.distributed import ranks

logger = logging.getLogger(__name__)

Brain = Any  # an sbkit.Brain of a script
#: Texts that show whether spaces separate words.
_TEXTS = 200
#: Seconds of audio with which the number of frames is counted, and that are added for a second count.
_COUNTED_SECONDS, _ADDED_SECONDS = 1.0, 4.0
_MIN_CHUNK, _MAX_CHUNK = 10.0, 30.0  # seconds of audio per forward


@dataclass(frozen=True)
class ScriptKeys:
    """What an export asks a run's recipe for; a script has no corpus of sbkit's."""

    language: str | None
    corpus: Corpus | None = None


@dataclass
class ExportedScriptCTC(Exported):
    """A script's CTC recogniser to export, with its own ``compute_forward`` as the reference."""

    graph: ScriptGraph
    recogniser: ScriptRecogniser = field(kw_only=True)
    samples_per_frame: float = field(kw_only=True)

    judges_words = True

    @classmethod
    def of(cls, recogniser: ScriptRecogniser) -> ExportedScriptCTC:
        """Export a recogniser that has its weights, on the CPU."""
        brain, forward = recogniser.brain, recogniser.forward
        rate = recogniser.sample_rate

        def count_frames(samples: int) -> int:
            return int(forward(torch.zeros(1, samples), torch.ones(1)).shape[1])

        rule, samples_per_frame = frame_rule(count_frames, round(_COUNTED_SECONDS * rate), round(_ADDED_SECONDS * rate))
        parts = [*brain.layer_roots, *(value for value in vars(brain).values() if isinstance(value, nn.Module)),
                 *recogniser.modules]

        def log_probs(signals: torch.Tensor, relative_lengths: torch.Tensor) -> torch.Tensor:
            return recogniser.log_probs(forward.traced(signals, relative_lengths))

        return cls(ScriptGraph(log_probs, parts, rule), OUTPUTS, rate, recogniser=recogniser,
                   samples_per_frame=samples_per_frame)

    @cached_property
    def spelling(self) -> Spelling:
        """How tokens are written: as by the script, with words that also end at pauses."""
        recogniser = self.recogniser
        silent = {recogniser.blank, *recogniser.tokens.silent}
        rows = recogniser.test_set.evenly_by_length(_TEXTS)
        texts = [text for row in rows if (text := self._text(row))]
        separator = WORD_START if not texts or have_spaces(texts) else None
        return Spelling(recogniser.tokens.symbols, self.samples_per_frame / self.sample_rate, silent, separator)

    def _text(self, row: int) -> str | None:
        recogniser = self.recogniser
        return text_of_row(recogniser.test_set, recogniser.texts, recogniser.tokens, row) or None

    def clips(self, corpus: Corpus | None, count: int) -> ComparisonClips:
        test_set = self.recogniser.test_set
        rows = test_set.evenly_by_length(count)
        clips = [Clip(test_set.signal(row).numpy(), self._text(row), test_set.id(row)) for row in rows]
        return comparison_clips(clips, self.sample_rate, f"{len(clips)} utterances of the script's test set")

    def trace(self) -> torch.export.ExportedProgram:
        # The script may keep tensors of the trace among its attributes.
        with self.recogniser.brain.restoring(), self.recogniser.forward.evaluating():
            return trace_script(self.graph)

    def config(self, program: torch.export.ExportedProgram, clips: ComparisonClips) -> Config:
        recogniser, spelling = self.recogniser, self.spelling
        return Config(
            sample_rate=self.sample_rate, hop_samples=1, subsampling=round(self.samples_per_frame),
            vocabulary=len(spelling.symbols), blank_id=recogniser.blank,
            silent_ids=sorted(set(spelling.silent) - {recogniser.blank}), word_separator=spelling.separator,
            min_samples=graph.min_samples(program),
            chunk_seconds=round(min(max(clips.longest, _MIN_CHUNK), _MAX_CHUNK), 2))

    def write_beside(self, folder: Path, config: Config) -> None:
        """Write tokens.txt."""
        write_tokens(folder / layout.TOKENS, list(self.spelling.symbols), config.blank_id)

    def metadata(self, config: Config) -> dict[str, str]:
        return {"sample_rate": str(config.sample_rate), "subsampling_factor": str(config.subsampling),
                "vocab_size": str(config.vocabulary), "blank_id": str(config.blank_id), "comment": "made by sbkit"}

    def reference(self, config: Config) -> Callable[[np.ndarray], np.ndarray]:
        """Return the script's own ``compute_forward`` on one waveform, as log-probabilities [T, V].

        Its words by the script's tokenizer must be those of the bundle's vocabulary.
        """
        recogniser = self.recogniser

        def run(signal: np.ndarray) -> np.ndarray:
            padded = np.pad(signal, (0, max(0, config.min_samples - len(signal))))
            relative_length = len(signal) / len(padded)
            outputs = recogniser.forward(torch.from_numpy(padded)[None], torch.tensor([relative_length]))
            log_probs: np.ndarray = recogniser.log_probs(outputs)[0, :self._frames(len(signal), outputs)].numpy()
            self._check_words(log_probs)
            return log_probs

        return run

    def _frames(self, samples: int, outputs: torch.Tensor) -> int:
        if self.graph.rule is None:
            return int(outputs.shape[1])
        factor, shift = self.graph.rule
        return max(0, (samples + shift) // factor)

    def _check_words(self, log_probs: np.ndarray) -> None:
        """Raise unless the script's tokenizer writes the best tokens as the bundle's vocabulary does."""
        labels, confidence = best_path(log_probs[None], np.array([len(log_probs)]), self.recogniser.blank)
        [spans] = collapse(labels, confidence, blank_id=self.recogniser.blank)
        written = self.spelling.text(spans)
        by_script = self._decoded(spans)
        if _letters(written) != _letters(by_script):
            raise SbkitError("script-words", f"the script's tokenizer writes {by_script!r}, but the bundle would write "
                             f"{written!r}", hint="please report it, with the kind of tokenizer")

    def _decoded(self, spans: TokenSpans) -> str:
        """Write tokens by the script's own tokenizer."""
        return self.recogniser.tokens.decode([label for label in spans.ids.tolist()
                                              if label not in self.spelling.silent])

    def comparison(self, clips: ComparisonClips, config: Config, folder: Path) -> Comparison:
        reference = Reference(self.reference(config), "compute_forward", "the script's compute_forward")
        return compared(clips, Vocabulary.read(folder, config), reference, self.spelling, self._decoded,
                        config.sample_rate)

    def readme(self, name: str, config: Config, comparison: Comparison, of_targets: Sequence[str] = ()) -> str:
        return readme.text(name, config, comparison, self.spelling.symbols, of_targets)


def _letters(text: str) -> str:
    """Return a text without spaces: the bundle's words also end at pauses."""
    return "".join(text.split())


# ------------------------------------------------------------------ the weights


@contextlib.contextmanager
def _ready(brain: Brain) -> Iterator[None]:
    """Have a Brain with the weights that it tests with, in fp32 on the CPU; put everything back on exit."""
    average = brain.trainer.moving_average
    with contextlib.nullcontext() if average is None else average.swapped(), _on_cpu_in_fp32(brain):
        yield


@contextlib.contextmanager
def _on_cpu_in_fp32(brain: Brain) -> Iterator[None]:
    layers = list(dict.fromkeys(layer for root in brain.layer_roots for layer in root.modules()))
    attributes = [dict(vars(layer)) for layer in layers]
    buffers = [dict(layer._buffers) for layer in layers]
    weights = [(weight, weight.data) for layer in layers for weight in layer.parameters(recurse=False)]
    device = brain.device
    try:
        for root in brain.layer_roots:
            root.to("cpu").float()
        for layer in layers:
            for name, value in vars(layer).items():
                if isinstance(value, torch.Tensor):  # which isn't registered, such as running statistics
                    vars(layer)[name] = value.cpu()
        brain.device = "cpu"
        yield
    finally:
        brain.device = device
        for weight, data in weights:
            weight.data = data
        for layer, before, of_layer in zip(layers, attributes, buffers, strict=True):
            vars(layer).clear()
            vars(layer).update(before)
            layer._buffers.clear()
            layer._buffers.update(of_layer)


def _take_weights(reached: Reached, weights: ChosenWeights) -> stock.Checkpoint:
    """Load a checkpoint, unless it is that which the script's test has loaded."""
    checkpointer = reached.brain.checkpointer
    if weights.average.several or weights.share is not None:
        raise SbkitError("script-option", "the script itself says which weights it tests, so they can't be averaged",
                         hint="leave out --average and --mean; its on_evaluate_start may average checkpoints")
    if weights.by_name:
        checkpoint = restore.find_checkpoint(checkpointer, weights.checkpoint)
        checkpointer.load_checkpoint(checkpoint)
        return checkpoint
    if weights.checkpoint == LAST:
        return checkpointer.recover_if_possible()
    return reached.checkpoint


# ------------------------------------------------------------------ the export


def export_run(request: ExportRequest, bundles: Bundles | None = None) -> int:
    """Export the run of a script: run the script again up to its test, and export what it has there.

    bundles : see ``bundle.export``
    """
    if request.target is not None:
        raise SbkitError("script-option", "a script's model can't be exported for --target yet", hint="leave it out")
    absolute = replace(request, run=request.run.resolve(), to=request.to.absolute())
    codes = []

    def take_over(reached: Reached) -> None:
        checkpoint = _take_weights(reached, request.weights)
        facts = {**request.weights.facts([checkpoint]), "script": Path(sys.argv[0]).name}
        if request.weights == BEST_CHECKPOINT:
            facts["valid"] = {name: value for name, value in checkpoint.meta.items() if isinstance(value, (int, float))}
        codes.append(_export(reached.brain, reached.loader, absolute, facts, bundles))

    run_again(absolute.run, take_over)
    return codes[0]


def export_brain(brain: Brain, to: str | Path, test_set: DataSource = None, *, formats: Sequence[str] | None = None,
                 force: bool = False, tolerance: float = ExportRequest.tolerance, clips: int = ExportRequest.clips,
                 bundles: Bundles | None = None) -> None:
    """Export a Brain with the weights that it has, within its script; see ``sbkit.export``."""
    if script_run.current() is not None:  # the script is run again, for another export or an evaluation
        return
    loader = brain.latest_loader if test_set is None else loaders.resolve_loader(brain, test_set, Stage.TEST,
                                                                                 {"ckpt_prefix": None})
    if loader is None:
        raise SbkitError("script-without-test", "sbkit.export needs recordings to compare with, and this Brain has "
                         "neither validated nor tested", hint="call it after evaluate, or give it test_set=...")
    if not ranks.is_main():
        return
    run = brain.run_folder or Path.cwd()
    request = ExportRequest(run, Path(to), formats=formats, force=force, tolerance=tolerance, clips=clips)
    _export(brain, loader, request, {"script": Path(sys.argv[0]).name}, bundles)


def _export(brain: Brain, loader: DataSource, request: ExportRequest, facts: dict[str, Any], bundles: Bundles | None
            ) -> int:
    with _ready(brain):
        recogniser = find_recogniser(brain, loader)
        for what, found in recogniser.describe():
            logger.info("%s: %s", what, found)
        exported = ExportedScriptCTC.of(recogniser)
        parameters = sum(weight.numel() for weight in brain.modules.parameters())
        language = vars(brain.hparams).get("language")
        keys: Any = ScriptKeys(language if isinstance(language, str) else None)  # an export asks for no others
        trained = Trained(exported, keys, {**facts, "parameters": parameters})
        return bundle.export(request, bundles, open_model=lambda: trained)


# ------------------------------------------------------------------ the evaluation


def evaluate_run(request: EvaluateRequest) -> list[CheckpointResult]:
    """Score the run of a script on its own test set: run the script again up to its test."""
    _refuse_options(request)
    absolute = replace(request, run=request.run.resolve(), out=request.out and request.out.absolute())
    results: list[CheckpointResult] = []

    def take_over(reached: Reached) -> None:
        for weights in request.weights:
            checkpoint = _take_weights(reached, weights)
            results.append(_score(reached, absolute, weights, checkpoint))

    run_again(absolute.run, take_over, on_cpu=request.device == "cpu")
    return results


def _refuse_options(request: EvaluateRequest) -> None:
    """Refuse options that need a task, and several processes."""
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise SbkitError("script-option", "the run of a script is scored by one process",
                         hint="start sbkit evaluate without torchrun")
    default = vars(EvaluateRequest(request.run))
    taken = {"run", "checkpoints", "average", "max_wer", "max_values", "min_values", "name", "out", "device", "workers"}
    options = [name for name, value in vars(request).items()
               if name not in taken and value and value != default[name]]
    if options:
        names = {"on": "data_folder", "hot_words": "hot-word"}
        option = names.get(options[0], options[0]).replace("_", "-")
        raise SbkitError("script-option", f"the run of a script is scored greedily on the script's own test set, so "
                         f"--{option} has no effect",
                         hint="leave it out; sbkit transcribe takes --lm and --hot-word with the bundle of the run")


def _score(reached: Reached, request: EvaluateRequest, weights: ChosenWeights, checkpoint: stock.Checkpoint
           ) -> CheckpointResult:
    """Score some weights on the script's test set, and write the results."""
    brain = reached.brain
    average = brain.trainer.moving_average
    with contextlib.nullcontext() if average is None else average.swapped():
        recogniser = find_recogniser(brain, reached.loader)
        if not recogniser.texts.known:
            raise SbkitError("script-texts", "the texts of the script's test set can't be told, as no column of its "
                             "list gives the tokens that its dataset makes", key="text",
                             hint="add to the YAML: sbkit_export: {text: COLUMN}, the column of the list, or the "
                                  "output key with token ids")
        exported = ExportedScriptCTC.of(recogniser)
        began = time.monotonic()
        rows, manifest = _transcribe(recogniser, exported, request.workers)
        took = time.monotonic() - began

    words, characters = score(rows)
    results = ASRResults({"WER": words.rate, "CER": characters.rate}, len(rows), rows=rows, words=words,
                         characters=characters, remark=f"references: {recogniser.texts.describe()}")
    results.check()
    seconds = float(manifest.durations.sum(dtype="float64"))
    label = weights.label(Path(checkpoint.path).name, 1)
    name = request.name or ("test" if reached.tested else "valid")
    scored = CheckpointResult(results, {
        "utterances": len(rows), "hours": seconds / 3600, **results.facts(), "seconds": took,
        "real_time_factor": took / seconds, "devices": 1, "device": str(brain.device), "precision": "fp32",
        "damaged": {}, "run": str(request.run), "corpus": None, "source": "script", "manifest": None,
        "references": recogniser.texts.describe(), "checkpoint": label, "checkpoints": [Path(checkpoint.path).name],
        "folder": str(request.folder / f"{name}-{label}")}, "WER")
    return scored._replace(replaced=evaluation.write(scored, manifest))


def _transcribe(recogniser: ScriptRecogniser, exported: ExportedScriptCTC, workers: int | None,
                ) -> tuple[list[TranscribedUtterance], Manifest]:
    """Transcribe the script's test set greedily, in the script's batches."""
    test_set, forward = recogniser.test_set, recogniser.forward
    rows: list[TranscribedUtterance] = []
    durations: list[float] = []
    order: list[int] = []
    with forward.evaluating(), torch.no_grad(), progress(what="test", total=len(test_set), unit="utterance") as bar:
        for indices, batch in test_set.batches(workers):
            signals, relative_lengths = values_of(batch)[test_set.signal_key]
            log_probs = recogniser.log_probs(forward.unguarded(batch))
            # As SpeechBrain's decoders count the frames of an utterance.
            frames = torch.round(relative_lengths.to(log_probs.device) * log_probs.shape[1]).long()
            decoded = greedy(log_probs, frames, blank_id=recogniser.blank)
            for index, spans in zip(indices, decoded, strict=True):
                confidence = float(spans.confidence.mean()) if len(spans) else None
                text = text_of_row(test_set, recogniser.texts, recogniser.tokens, index)
                rows.append(TranscribedUtterance(test_set.id(index), text, exported.spelling.text(spans), confidence))
            durations += (relative_lengths * signals.shape[1] / recogniser.sample_rate).tolist()
            order += indices
            bar.update(len(indices))
    speakers = [str(test_set.listed(index).get("spk_id") or "") for index in order]
    wavs = [test_set.wav(index) for index in order]
    manifest = Manifest(ids=[row.id for row in rows], durations=durations, wavs=wavs,
                        texts=[row.reference for row in rows], speakers=speakers)
    return rows, manifest
