"""Exports a run as a bundle: written to a temporary folder, compared with the checkpoint, and only then published."""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch

import sbkit
from sbkit.errors import SbkitError
from sbkit.export import clips, graph, layout, parity, publish, source
from sbkit.export.exported import INPUTS, Exported
from sbkit.export.source import Trained
from sbkit.runs.restore import BEST
from sbkit.system.console import progress

logger = logging.getLogger(__name__)

_BUILT_BY = ("torch", "speechbrain", "onnx", "onnxscript", "onnxruntime")


@dataclass(frozen=True)
class ExportRequest:
    """The options of ``sbkit export``.

    run : the output folder of a training
    to : the bundle's folder
    checkpoint, average : as ``sbkit.runs.restore.take_weights`` takes them
    formats : which of the task's formats to write, by default all; int8 is made from onnx
    force : replace an existing bundle
    tolerance : largest allowed difference from the checkpoint's outputs
    clips : number of test utterances to compare on
    target : ``sherpa`` adds a model for sherpa-onnx
    """

    run: Path
    to: Path
    checkpoint: str = BEST
    average: int = 1
    formats: Sequence[str] | None = None
    force: bool = False
    tolerance: float = parity.TOLERANCE
    clips: int = 40
    target: str | None = None


def export(request: ExportRequest) -> int:
    """Export a run, print how it compares with its checkpoint, and return the exit code."""
    to = request.to.resolve()  # a link to a bundle stays a link
    publish.tidy(to)
    _check(request)
    trained = source.open_run(request.run, request.checkpoint, request.average)
    with publish.room_beside(to) as aside:
        comparison = _fill(aside, trained, request)
        publish.publish(aside, to, request.force)
    print(comparison.table())
    print(f"\n{request.to}  (use it: sbkit transcribe {request.to} FILES...)")
    return 0


def _check(request: ExportRequest) -> None:
    if request.to.is_file():
        raise SbkitError(f"{request.to} is a file", hint="name a folder for the bundle")
    if request.to.exists() and not request.force:
        raise SbkitError(f"{request.to} exists", hint="--force replaces it")
    if request.to.exists() and not (request.to / layout.CONFIG).is_file() and any(request.to.iterdir()):
        raise SbkitError(f"{request.to} is neither a bundle nor empty, so it is not replaced",
                         hint="choose another place")


def _formats(request: ExportRequest, exported: Exported) -> list[str]:
    """Return the formats to write, in the order in which they are made."""
    available = [name for name in exported.formats if exported.judges_words or name != layout.INT8]
    wanted = available if request.formats is None else request.formats
    unknown = sorted(set(wanted) - set(available))
    if unknown or not wanted:
        raise SbkitError(f"there is no format {', '.join(unknown)}" if unknown else "--formats names no format",
                         hint=f"choose from {', '.join(available)}")
    targets = ", ".join(exported.targets)
    if request.target not in (None, *exported.targets):
        raise SbkitError(f"this task's models can't be exported for {request.target}",
                         hint=f"choose from {targets}" if targets else "leave out --target")
    if {layout.ONNX, layout.INT8} & set(wanted):
        missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if not _installed(name)]
        if missing:
            raise SbkitError(f"ONNX export needs {', '.join(missing)}", hint="pip install 'sbkit[export]'")
    return [name for name in available if name in wanted]


def _installed(name: str) -> bool:
    try:
        __import__(name)
    except ImportError:
        return False
    return True


def _fill(folder: Path, trained: Trained, request: ExportRequest) -> parity.Comparison:
    """Write all files of the bundle, compare each format with the checkpoint, and refuse one that differs."""
    exported = trained.exported
    formats = _formats(request, exported)
    with progress(what="exporting", total=3 + 2 * len(formats) + 2 * (request.target is not None), unit="step") as bar:
        def step(what: str) -> None:
            bar.set_postfix_str(what)
            bar.update()

        step("reading test clips")
        chosen = clips.choose(trained.keys.corpus, exported.sample_rate, request.clips)
        step("tracing")
        program = exported.trace()
        config = complete(exported.config(program, chosen), trained)
        exported.write_beside(folder, config)
        for name in formats:
            step(f"writing {name}")
            _write(name, folder, exported, program, config, request.to.name)
            config.models[name] = layout.MODELS[name]
        if request.target is not None:
            step(f"writing {request.target}")
            exported.write(request.target, folder, config, request.to.name)
            config.models[request.target] = layout.MODELS[request.target]
        step("running the checkpoint")
        comparison = exported.comparison(chosen, config, folder)
        for name in formats:
            step(f"comparing {name}")
            comparison.add(name, exported.runner(name, folder, config), _size(folder, name),
                           batches=name != layout.SPEECHBRAIN)
        if request.target is not None:
            step(f"comparing {request.target}")
            exported.compare_own(request.target, folder, config, comparison, _size(folder, request.target))
    config.batching = comparison.batchable(request.tolerance)
    comparison.refuse(comparison.failures(request.tolerance, config.batching))
    if not config.batching:
        logger.warning("Utterances get other outputs in a batch than alone, since layers of this model look beyond an "
                       "utterance's end; so each will run alone")
    _describe(folder, config, comparison, request, exported)
    return comparison


def complete(config: layout.Bundle, trained: Trained) -> layout.Bundle:
    """Add to a bundle's configuration what the run and this installation say, whatever the task."""
    config.language = config.language or trained.keys.language or None
    config.trained = trained.facts
    config.made_by = {"sbkit": sbkit.__version__} | {
        name: metadata.version(name) for name in _BUILT_BY if _installed(name)}
    return config


def _write(name: str, folder: Path, exported: Exported, program: torch.export.ExportedProgram, config: layout.Bundle,
           title: str) -> None:
    path = folder / layout.MODELS[name]
    if name == layout.ONNX:
        graph.write_onnx(program, path, INPUTS, exported.outputs, exported.metadata(config))
    elif name == layout.INT8:
        whole = folder / layout.MODELS[layout.ONNX]
        if whole.is_file():
            graph.quantize(whole, path)
        else:
            with tempfile.TemporaryDirectory(dir=folder) as aside:
                graph.write_onnx(program, Path(aside) / whole.name, INPUTS, exported.outputs, exported.metadata(config))
                graph.quantize(Path(aside) / whole.name, path)
    elif name == layout.TORCH:
        graph.write_torch(program, path)
    else:
        exported.write(name, folder, config, title)


def _size(folder: Path, name: str) -> int:
    names = [layout.MODELS[name], f"{layout.MODELS[name]}.data"]
    if name == layout.SPEECHBRAIN:
        names = [layout.RECIPE, layout.WEIGHTS, layout.TOKENIZER]
    return sum((folder / each).stat().st_size for each in names if (folder / each).exists())


def _describe(folder: Path, config: layout.Bundle, comparison: parity.Comparison, request: ExportRequest,
              exported: Exported) -> None:
    """Write parity.json, README.md and, last, config.json with the fingerprints of all other files."""
    facts = {"tolerance": request.tolerance, "threads": torch.get_num_threads(), **comparison.facts()}
    (folder / layout.PARITY).write_text(json.dumps(facts, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    (folder / layout.README).write_text(exported.readme(request.to.name, config, comparison), encoding="utf-8")
    for path in sorted(folder.iterdir()):
        path.chmod(0o644)
        config.files[path.name] = layout.fingerprint(path)
    (folder / layout.CONFIG).write_text(config.to_json(), encoding="utf-8")
