"""Exports a run as a bundle: writes it to a temporary folder, compares and tries it, then publishes it."""

from __future__ import annotations

import copy
import inspect
import json
import logging
import os
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import sbkit
from sbkit.data import publish
from sbkit.errors import SbkitError
from sbkit.export import gate, graph, layout, parity_report, source
from sbkit.export.behaviour_trial import Trial, try_out
from sbkit.export.clips import ComparisonClips
from sbkit.export.companion import Companion, Target
from sbkit.export.exported import Exported
from sbkit.export.formats import Formats, choose_formats
from sbkit.export.measures import TOLERANCE
from sbkit.export.parity import Comparison
from sbkit.export.source import Trained
from sbkit.runs.keys import Bundles
from sbkit.score.report import model_card
from sbkit.score.weights import BEST_CHECKPOINT, ChosenWeights
from sbkit.system.console import atomic_write, progress
from sbkit.system.environment import onnxruntimes, version_of

logger = logging.getLogger(__name__)

_BUILT_BY = ("torch", "speechbrain", "onnx", "onnxscript")


@dataclass(frozen=True)
class ExportRequest:
    """The options of ``sbkit export``.

    run : the output folder of a training
    to, force, keep_previous : the bundle's folder, whether it replaces an existing one, and whether that is kept
        beside it
    weights, accept_worse : which weights, as ``source.open_run`` takes them
    formats : which of the task's formats to write; None: all that pass the comparison. int8 is made from onnx
    tolerance : largest allowed difference from the checkpoint's outputs, unless the task sets a bound
    clips : number of test utterances to compare on
    target : ``sherpa`` adds models for sherpa-onnx
    chunk : milliseconds of a chunk, for a target program that takes streams in chunks of one size
    mark : a file for a copy of the bundle's config.json, written before the bundle is put in place: whoever compares
        both knows whether that happened, even after a kill
    """

    run: Path
    to: Path
    weights: ChosenWeights = BEST_CHECKPOINT
    accept_worse: bool = False
    formats: Sequence[str] | None = None
    force: bool = False
    tolerance: float = TOLERANCE
    clips: int = 40
    target: str | None = None
    chunk: int | None = None
    keep_previous: bool = False
    mark: Path | None = None


def export(request: ExportRequest, bundles: Bundles | None = None,
           open_model: Callable[[], Trained] | None = None) -> int:
    """Export a run, print how it compares with its checkpoint, and return the exit code.

    bundles : opens the recogniser that transcribes a model's audio, and the bundle itself to try it; None: neither
    open_model : returns a model that is not a run's
    """
    to = request.to.resolve()  # a link to a bundle stays a link
    publish.clean_up(to, layout.FOLDER)
    if request.to.exists() and not request.force and not request.to.is_file():
        raise SbkitError("output-exists", f"{request.to} exists already", hint="--force replaces it", file=request.to)
    layout.FOLDER.check_replaceable(request.to)
    keep = publish.previous(to) if request.keep_previous else None
    if keep is not None:
        layout.FOLDER.check_replaceable(keep)
    trained = open_model() if open_model else source.open_run(
        request.run, request.weights, bundles, request.accept_worse)
    run = request.run.resolve()
    if open_model is None and os.path.commonpath([run, to]) != to.anchor:  # else it would be a path of this machine
        trained.facts["run"] = os.path.relpath(run, to)  # improve finds it there, also when both are moved together

    def write_mark() -> None:
        if request.mark is not None:
            with atomic_write(request.mark, "wb") as copy:
                copy.write((temporary / layout.CONFIG).read_bytes())

    with publish.temporary_folder(to, layout.FOLDER) as temporary:
        writer = _BundleWriter(temporary, trained, request)
        comparison, config = writer.write_and_compare()
        trial = try_out(temporary, config, bundles, comparison.clips.alone, trained.keys.corpus)
        writer.finish(comparison, config, trial)
        publish.publish(temporary, to, layout.FOLDER, request.force, keep, write_mark)

    print(f"compared on {comparison.clips}:\n{parity_report.table(comparison)}")
    print(parity_report.joined_words(comparison), parity_report.changed_clips(comparison), sep="", end="")
    if comparison.words is not None and any(result.format == layout.INT8 for result in comparison.results):
        print(f"{layout.INT8} has 8-bit weights, so some of its outputs differ: its {comparison.words.rate} may be "
              f"{gate.INT8_POINTS:g} point or {100 * gate.INT8_SHARE:.0f} % above that of "
              f"{comparison.reference.title}, whichever is more")
    for name, reason in config.left_out.items():
        print(f"left out: {name}, because {reason}")
    if config.left_out and writer.advice is not None:
        print(writer.advice)
    _warn_of_other_search(trained.search_class, config)
    print(trial.line, end="")
    print(f"\n{request.to}  ({config.use.format(request.to)})")
    return 0


def _warn_of_other_search(search_class: type | None, config: layout.Bundle) -> None:
    """Warn if a task evaluates with a search of its own, but its bundle has a kind of sbkit, which has sbkit's search.
    """
    if search_class is None or not type(config).__module__.startswith("sbkit."):
        return
    if search_class.__module__.startswith("sbkit."):
        return
    of_sbkit = [base.__name__ for base in search_class.__mro__
                if base.__module__.startswith("sbkit.") and not inspect.isabstract(base)]
    logger.warning("sbkit evaluate --beam searches with %s, but the bundle with %s, so their words may differ; to ship "
                   "your own search, define a kind of bundle that has it", search_class.__name__,
                   of_sbkit[0] if of_sbkit else "sbkit's search for its kind")


class _BundleWriter:
    """Writes the files of a bundle, and compares each format with the checkpoint."""

    def __init__(self, folder: Path, trained: Trained, request: ExportRequest):
        self.folder = folder
        self.trained = trained
        self.request = request
        self.exported = trained.exported
        names = choose_formats(self.exported, request.formats)
        self.formats = Formats(folder, request.to.name, names, must_have_all=request.formats is not None)
        self.targets = self._targets()
        self.advice: str | None = None
        """What to do about formats that differ; known once they are compared."""
        self.companions: list[tuple[Companion, dict[str, str]]] = []
        """Those that have a wanted format, each with its files by format."""
        for companion in self.exported.companions:
            files = {name: companion.files[name] for name in self.formats.names if name in companion.files}
            if files:
                self.companions.append((companion, files))

    def _targets(self) -> Sequence[Target]:
        """The models for ``--target``."""
        request = self.request
        if request.chunk is not None and request.target is None:
            raise SbkitError("missing-option", "--chunk is for --target: a bundle's streaming graph takes all chunk "
                             "sizes that the model was trained with", hint="leave it out, or add --target sherpa",
                             key="--target")
        if request.target is None:
            return []
        if request.target not in self.exported.targets:
            targets = ", ".join(self.exported.targets)
            raise SbkitError("unknown-target", f"this task's models can't be exported for {request.target}",
                             hint=f"choose from {targets}" if targets else "leave out --target",
                             key="--target", value=request.target)
        return self.exported.target(request.target, request.chunk)

    def write_and_compare(self) -> tuple[Comparison, layout.Bundle]:
        """Return the comparison and the configuration of a bundle whose model files are all written."""
        parts = len(self.formats.names) + len(self.targets) + len(self.companions)
        with progress(what="exporting", total=3 + 2 * parts, unit="step") as bar:
            def step(what: str) -> None:
                bar.set_postfix_str(what)
                bar.update()

            step("reading test clips")
            clips = self.exported.clips(self.trained.keys.corpus, self.request.clips)
            step("tracing")
            program = self.exported.trace()
            of_model = complete(self.exported.config(program, clips), self.trained)
            layout.check_kind(of_model)
            # What is written and compared is described with all formats, what is published with those that are kept.
            with_all = self._describe(of_model, self.formats.names)
            self._write(program, with_all, step)
            comparison = self._compare(clips, with_all, step)
        self._judge(comparison)
        return comparison, self._settle(self._describe(of_model, self.formats.kept), comparison)

    def _describe(self, of_model: layout.Bundle, names: Sequence[str]) -> layout.Bundle:
        """Return the configuration of a bundle that has these formats.

        of_model : what it says of the model in any format
        """
        config = copy.deepcopy(of_model)
        config.models = {name: layout.MODELS[name] for name in (*names, *(target.name for target in self.targets))}
        for companion, files in self.companions:
            present = {name: file for name, file in files.items() if name in names}
            if present:
                companion.describe(config, present)
        return config

    def _write(self, program: torch.export.ExportedProgram, config: layout.Bundle, step: Callable[[str], None]) -> None:
        """Write each format and target."""
        traced_models = {name: layout.MODELS[name] for name in self.formats.names if name in layout.TRACED}
        graphs: list[tuple[Exported | Companion, torch.export.ExportedProgram, Mapping[str, str]]]
        graphs = [(self.exported, program, traced_models)]
        for companion, files in self.companions:
            step(f"tracing {companion.name}")
            graphs.append((companion, companion.trace(), files))
        self.exported.write_beside(self.folder, config)
        for name in self.formats.names:
            step(f"writing {name}")
            if name in self.formats.left_out:  # with the format that it is made from
                continue
            with self.formats.attempt(name):
                if name not in layout.TRACED:
                    self.exported.write(name, self.folder, config, self.request.to.name)
                for model, traced, models in graphs:
                    if name in models:
                        _write(name, self.folder, models, traced, model, config)
        self.formats.refuse_if_none_is_kept()
        for target in self.targets:
            step(f"writing {target.name}")
            target.write(self.folder, config)

    def _compare(self, clips: ComparisonClips, config: layout.Bundle, step: Callable[[str], None]
                 ) -> Comparison:
        """Run the checkpoint and each format on the clips."""
        step("running the checkpoint")
        comparison = self.exported.comparison(clips, config, self.folder)
        for companion, _ in self.companions:
            step(f"running the checkpoint for {companion.name}")
            comparison.companions[companion.name] = companion.comparisons(clips, config, self.folder)
        for name in self.formats.names:
            step(f"comparing {name}")
            if name in self.formats.left_out:
                continue
            with self.formats.attempt(name):
                self._compare_format(name, comparison, config)
        for target in self.targets:
            step(f"comparing {target.name}")
            target.compare(self.folder, config, comparison)
        return comparison

    def _compare_format(self, name: str, comparison: Comparison, config: layout.Bundle) -> None:
        of_speechbrain = name == layout.SPEECHBRAIN
        files = [layout.RECIPE, layout.WEIGHTS, layout.TOKENIZER] if of_speechbrain else [layout.MODELS[name]]
        runner = self.exported.runner(name, self.folder, config)
        comparison.add(name, runner, layout.size(self.folder, *files), batches=not of_speechbrain)
        for companion, companion_files in self.companions:
            if name not in companion_files:
                continue
            file = companion_files[name]
            for mode, run in companion.runners(name, self.folder / file, config).items():
                comparison.companions[companion.name][mode].add(name, run, layout.size(self.folder, file))

    def _judge(self, comparison: Comparison) -> None:
        """Leave out the formats that differ from the checkpoint; raises if no other is left."""
        self.advice = gate.advice(comparison)
        # Alone, because outputs that depend on the batch are the model's, and not the format's.
        failures = gate.failures(comparison, self.request.tolerance, batching=False)
        of_formats = {name: [failure for failure in failures if failure.format == name] for name in self.formats.names}
        if not self.formats.must_have_all:
            for name, of_format in of_formats.items():
                if of_format and name in self.formats.kept:
                    self.formats.leave_out(name, "; ".join(failure.public_reason for failure in of_format))
        if not self.formats.kept:
            others = [gate.Failure(name, reason) for name, reason in self.formats.left_out.items()
                      if not of_formats[name]]
            gate.refuse_if_any([*failures, *others], comparison)
        self.formats.refuse_if_only_programs_are_kept()

    def _settle(self, config: layout.Bundle, comparison: Comparison) -> layout.Bundle:
        """Add what the comparison decides to a configuration; raises if the formats that are kept still differ."""
        tolerance = self.request.tolerance
        left_out = self.formats.left_out | self.exported.left_out
        if left_out:
            config.left_out = {name: _without_folders(reason) for name, reason in left_out.items()}
            comparison.leave_out(config.left_out)
        config.batching = comparison.is_batchable(tolerance)
        gate.refuse_if_any(gate.failures(comparison, tolerance, config.batching), comparison)
        if not config.batching:
            logger.warning("Utterances have different outputs in a batch than alone, because layers of this model use "
                           "the padding, so the bundle runs each utterance alone, which is slower")
        return config

    def finish(self, comparison: Comparison, config: layout.Bundle, trial: Trial) -> None:
        """Write the comparison and the README, and last config.json with the fingerprints of all other files."""
        trial.add_to(config)
        request = self.request
        readme = self.exported.readme(request.to.name, config, comparison,
                                      [target.readme() for target in self.targets])
        readme = model_card.of_bundle(readme, request.run, config.pipeline_tag, request.weights, self.trained.facts)
        facts = {"tolerance": request.tolerance, "threads": torch.get_num_threads(), **parity_report.facts(comparison)}
        text = json.dumps(facts, indent=1, ensure_ascii=False) + "\n"
        (self.folder / layout.PARITY).write_text(text, encoding="utf-8")
        (self.folder / layout.README).write_text(readme + trial.sections, encoding="utf-8")

        for path in sorted(self.folder.iterdir()):
            if path.name != layout.CONFIG:  # of a trial, without fingerprints
                path.chmod(0o644)
                config.files[path.name] = layout.fingerprint(path)
        config.check(self.folder / layout.CONFIG)  # as a reader does
        (self.folder / layout.CONFIG).write_text(config.to_json(), encoding="utf-8")


def _without_folders(reason: str) -> str:
    """Cut each path in a reason to its last part: reasons are published, and a path may name people or projects."""
    home = os.path.expanduser("~")
    known = reason if home == "/" else reason.replace(home, "~")
    return re.sub(r"(?<![\w.])(?<!:/)~?/(?:[^\s/'\"]+/)+", "", known)


def complete(config: layout.Bundle, trained: Trained) -> layout.Bundle:
    """Add facts of the run and of this installation to a bundle's configuration."""
    config.language = config.language or trained.keys.language or None
    config.trained = trained.facts
    versions = {name: version for name in _BUILT_BY if (version := version_of(name)) is not None}
    config.made_by = {"sbkit": sbkit.__version__, **versions, **onnxruntimes()}
    return config


def _write(name: str, folder: Path, files: Mapping[str, str], program: torch.export.ExportedProgram,
           model: Exported | Companion, config: layout.Bundle) -> None:
    """Write a traced graph in one of the formats; int8 after onnx, if both are wanted."""
    def write_onnx(path: Path) -> None:
        graph.write_onnx(program, path, model.inputs, model.outputs, model.metadata(config))

    path = folder / files[name]
    if name == layout.TORCH:
        graph.write_torch(program, path)
    elif name == layout.ONNX:
        write_onnx(path)
    elif (onnx := folder / files.get(layout.ONNX, "")).is_file():
        graph.quantize(onnx, path)
    else:
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            onnx = Path(temporary) / layout.MODELS[layout.ONNX]
            write_onnx(onnx)
            graph.quantize(onnx, path)
