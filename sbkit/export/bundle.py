"""Exports a run as a bundle: writes it to a temporary folder, compares it with the checkpoint, then publishes it."""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

import sbkit
from sbkit.data import publish
from sbkit.errors import SbkitError
from sbkit.export import graph, layout, parity, source
from sbkit.export.clips import ComparisonClips
from sbkit.export.companion import Companion
from sbkit.export.exported import Exported
from sbkit.export.source import Trained
from sbkit.runs.keys import Bundles
from sbkit.runs.restore import BEST
from sbkit.score.report import model_card
from sbkit.system.console import progress
from sbkit.system.environment import onnxruntimes, version_of

logger = logging.getLogger(__name__)

_BUILT_BY = ("torch", "speechbrain", "onnx", "onnxscript")


@dataclass(frozen=True)
class ExportRequest:
    """The options of ``sbkit export``.

    run : the output folder of a training
    to, force : the bundle's folder, and whether it replaces an existing one
    checkpoint, average, mean, accept_worse : which weights, as ``source.open_run`` takes them
    formats : which of the task's formats to write, by default all; int8 is made from onnx
    tolerance : largest allowed difference from the checkpoint's outputs, unless the task sets a bound
    clips : number of test utterances to compare on
    target : ``sherpa`` adds models for sherpa-onnx
    chunk : milliseconds of a chunk, for a target program that takes streams in chunks of one size
    """

    run: Path
    to: Path
    checkpoint: str = BEST
    average: int = 1
    mean: float | None = None
    accept_worse: bool = False
    formats: Sequence[str] | None = None
    force: bool = False
    tolerance: float = parity.TOLERANCE
    clips: int = 40
    target: str | None = None
    chunk: int | None = None


def export(request: ExportRequest, bundles: Bundles | None = None,
           open_model: Callable[[], Trained] | None = None) -> int:
    """Export a run, print how it compares with its checkpoint, and return the exit code.

    bundles : opens the recogniser that transcribes a model's audio; None: no transcripts are compared
    open_model : returns a model that is not a run's
    """
    to = request.to.resolve()  # a link to a bundle stays a link
    publish.clean_up(to)
    _check(request)
    trained = open_model() if open_model else source.open_run(
        request.run, request.checkpoint, request.average, bundles, request.mean, request.accept_worse)
    with publish.temporary_folder(to) as temporary:
        comparison, config = _write_and_compare(temporary, trained, request)
        publish.publish(temporary, to, request.force)
    print(f"compared on {comparison.clips.origin}:\n{comparison.table()}")
    if comparison.has_words and layout.INT8 in comparison.formats():
        print(f"{layout.INT8} has 8-bit weights, so some of its outputs differ: its {comparison.rate} may be "
              f"{parity.POINTS:g} point or {100 * parity.SHARE:.0f} % above that of {comparison.compared_with}, "
              "whichever is more")
    print(f"\n{request.to}  ({config.use.format(request.to)})")
    return 0


def _check(request: ExportRequest) -> None:
    if request.to.is_file():
        raise SbkitError(f"{request.to} is a file", hint="name a folder for the bundle")
    if request.to.exists() and not request.force:
        raise SbkitError(f"{request.to} exists", hint="--force replaces it")
    if request.to.exists() and not (request.to / layout.CONFIG).is_file() and any(request.to.iterdir()):
        raise SbkitError(f"{request.to} is neither a bundle nor empty, so it is not replaced",
                         hint="choose another folder")


def _formats(request: ExportRequest, exported: Exported) -> list[str]:
    """Return the formats to write, in the order in which they are made."""
    available = [name for name in exported.formats if exported.judges_words or name != layout.INT8]
    wanted = available if request.formats is None else request.formats
    unknown = sorted(set(wanted) - set(available))
    if unknown or not wanted:
        raise SbkitError(f"this model has no format {', '.join(unknown)}" if unknown else "--formats names no format",
                         hint=f"it has {', '.join(available)}" + (
                             "; int8 is judged by recognised words, so a task of your own needs labels for it"
                             if layout.INT8 in unknown else ""))
    if request.chunk is not None and request.target is None:
        raise SbkitError("--chunk is for --target: a bundle's streaming graph takes all chunk sizes that the model "
                         "was trained with", hint="leave it out, or add --target sherpa")
    targets = ", ".join(exported.targets)
    if request.target not in (None, *exported.targets):
        raise SbkitError(f"this task's models can't be exported for {request.target}",
                         hint=f"choose from {targets}" if targets else "leave out --target")
    if {layout.ONNX, layout.INT8} & set(wanted):
        missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if find_spec(name) is None]
        if missing:
            raise SbkitError(f"ONNX export needs {', '.join(missing)}", hint="pip install 'sbkit[export]'")
    return [name for name in available if name in wanted]


def _write_and_compare(folder: Path, trained: Trained, request: ExportRequest
                       ) -> tuple[parity.Comparison, layout.Bundle]:
    """Write all files of the bundle, compare each format with the checkpoint, and refuse one that differs."""
    exported = trained.exported
    formats = _formats(request, exported)
    targets = [] if request.target is None else exported.target(request.target, request.chunk)
    companions = [(each, files) for each in exported.companions
                  if (files := {name: each.files[name] for name in formats if name in each.files})]
    steps = 3 + 2 * (len(formats) + len(targets)) + sum(2 + 2 * len(files) for _, files in companions)
    with progress(what="exporting", total=steps, unit="step") as bar:
        def step(what: str) -> None:
            bar.set_postfix_str(what)
            bar.update()

        step("reading test clips")
        clips = exported.clips(trained.keys.corpus, request.clips)
        step("tracing")
        program = exported.trace()
        config = complete(exported.config(program, clips), trained)
        exported.write_beside(folder, config)
        for name in formats:
            step(f"writing {name}")
            if name in layout.TRACED:
                _write(name, folder, layout.MODELS, program, exported, config)
            else:
                exported.write(name, folder, config, request.to.name)
            config.models[name] = layout.MODELS[name]
        for target in targets:
            step(f"writing {target.name}")
            target.write(folder, config)
        for companion, files in companions:
            _write_companion(companion, files, folder, config, step)
        step("running the checkpoint")
        comparison = exported.comparison(clips, config, folder)
        for name in formats:
            step(f"comparing {name}")
            comparison.add(name, exported.runner(name, folder, config), _size(folder, name),
                           batches=name != layout.SPEECHBRAIN)
        for companion, files in companions:
            comparison.companions[companion.name] = _compare_companion(companion, files, folder, config, clips, step)
        for target in targets:
            step(f"comparing {target.name}")
            target.compare(folder, config, comparison)
    config.batching = comparison.batchable(request.tolerance)
    comparison.raise_if_any(comparison.failures(request.tolerance, config.batching))
    if not config.batching:
        logger.warning("Utterances have different outputs in a batch than alone, because layers of this model use the "
                       "padding. Each utterance will run alone")
    readme = exported.readme(request.to.name, config, comparison, [target.readme() for target in targets])
    readme = model_card.of_bundle(readme, request.run, config.pipeline_tag, request.checkpoint, request.average,
                                  request.mean, trained.facts)
    _write_description(folder, config, comparison, request.tolerance, readme)
    return comparison, config


def _write_companion(companion: Companion, files: Mapping[str, str], folder: Path, config: layout.Bundle,
                     step: Callable[[str], None]) -> None:
    """Write a further graph, and describe it in the configuration."""
    step(f"tracing {companion.name}")
    program = companion.trace()
    companion.describe(config, files)
    for name in files:
        step(f"writing {companion.name}, {name}")
        _write(name, folder, files, program, companion, config)


def _compare_companion(companion: Companion, files: Mapping[str, str], folder: Path, config: layout.Bundle,
                       clips: ComparisonClips, step: Callable[[str], None]) -> Mapping[str, parity.Comparison]:
    """Compare the formats of a further graph with the checkpoint, in each mode of running it."""
    step(f"running the checkpoint for {companion.name}")
    comparisons = companion.comparisons(clips, config, folder)
    for name, file in files.items():
        step(f"comparing {companion.name}, {name}")
        for mode, run in companion.runners(name, folder / file, config).items():
            comparisons[mode].add(name, run, layout.size(folder, file))
    return comparisons


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


def _size(folder: Path, name: str) -> int:
    names = [layout.RECIPE, layout.WEIGHTS, layout.TOKENIZER] if name == layout.SPEECHBRAIN else [layout.MODELS[name]]
    return layout.size(folder, *names)


def _write_description(folder: Path, config: layout.Bundle, comparison: parity.Comparison, tolerance: float,
              readme: str) -> None:
    """Write parity.json, README.md and, last, config.json with the fingerprints of all other files."""
    facts = {"tolerance": tolerance, "threads": torch.get_num_threads(), **comparison.facts()}
    (folder / layout.PARITY).write_text(json.dumps(facts, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    (folder / layout.README).write_text(readme, encoding="utf-8")
    for path in sorted(folder.iterdir()):
        path.chmod(0o644)
        config.files[path.name] = layout.fingerprint(path)
    config.check(folder / layout.CONFIG)  # as a reader does
    (folder / layout.CONFIG).write_text(config.to_json(), encoding="utf-8")
