"""``sbkit export``: a run becomes a bundle, made aside, compared with its checkpoint, and only then put in place."""

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
    """What is to be exported.

    run : the output folder of a training
    to : the bundle's folder
    checkpoint, average : as ``sbkit.runs.restore.take_weights`` takes them
    formats : of those that the task has, all by default; int8 is made from onnx
    force : replace the bundle that is there
    tolerance : largest difference of a log-probability
    clips : utterances of the test split to compare on
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
    """Make the bundle and print what it does; the exit code."""
    to = request.to.resolve()  # where a link leads
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
        raise SbkitError(f"{request.to} is no bundle and is not empty, so it is not replaced",
                         hint="choose another place")


def _formats(request: ExportRequest, exported: Exported) -> list[str]:
    """Those that are to be written, in the order in which they are made."""
    there = exported.formats if exported.judges_words else [name for name in exported.formats if name != layout.INT8]
    asked = there if request.formats is None else request.formats
    unknown = sorted(set(asked) - set(there))
    if unknown or not asked:
        raise SbkitError(f"there is no format {', '.join(unknown) or 'asked for'}",
                         hint=f"choose of {', '.join(there)}")
    if request.target not in (None, *exported.targets):
        raise SbkitError(f"a model of this task can't be made for {request.target}",
                         hint=f"choose of {', '.join(exported.targets)}" if exported.targets else "leave out --target")
    if {layout.ONNX, layout.INT8} & set(asked):
        missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if not _installed(name)]
        if missing:
            raise SbkitError(f"ONNX needs {', '.join(missing)}", hint="pip install 'sbkit[export]'")
    return [name for name in there if name in asked]


def _installed(name: str) -> bool:
    try:
        __import__(name)
    except ImportError:
        return False
    return True


def _fill(folder: Path, trained: Trained, request: ExportRequest) -> parity.Comparison:
    """All files of the bundle, and the proof that they are right."""
    exported = trained.exported
    tried = _formats(request, exported)
    with progress(what="exporting", total=3 + 2 * len(tried) + 2 * (request.target is not None), unit="step") as bar:
        def step(what: str) -> None:
            bar.set_postfix_str(what)
            bar.update()

        step("reading test clips")
        chosen = clips.choose(trained.keys.corpus, exported.sample_rate, request.clips)
        step("tracing")
        program = exported.trace()
        config = exported.config(program, chosen)
        config.trained = trained.facts
        config.made_by = {"sbkit": sbkit.__version__} | {
            name: metadata.version(name) for name in _BUILT_BY if _installed(name)}
        exported.write_beside(folder, config)
        for name in tried:
            step(f"writing {name}")
            _write(name, folder, exported, program, config, request.to.name)
            config.models[name] = layout.MODELS[name]
        if request.target is not None:
            step(f"writing {request.target}")
            exported.write(request.target, folder, config, request.to.name)
            config.models[request.target] = layout.MODELS[request.target]
        step("running the checkpoint")
        comparison = exported.comparison(chosen, config, folder)
        for name in tried:
            step(f"comparing {name}")
            comparison.add(name, exported.runner(name, folder, config), _size(folder, name),
                           batches=name != layout.SPEECHBRAIN)
        if request.target is not None:
            step(f"comparing {request.target}")
            exported.compare_own(request.target, folder, config, comparison, _size(folder, request.target))
    config.batching = comparison.batchable(request.tolerance)
    comparison.refuse(comparison.failures(request.tolerance, config.batching))
    if not config.batching:
        logger.warning("In a batch an utterance's neighbours change what comes out, so each will run alone: layers of "
                       "this model look beyond its end")
    _describe(folder, config, comparison, request, exported)
    return comparison


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
    """parity.json, README.md and, last, config.json with the fingerprints of the others."""
    facts = {"tolerance": request.tolerance, "threads": torch.get_num_threads(), **comparison.facts()}
    (folder / layout.PARITY).write_text(json.dumps(facts, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    (folder / layout.README).write_text(exported.readme(request.to.name, config, comparison), encoding="utf-8")
    for path in sorted(folder.iterdir()):
        path.chmod(0o644)
        config.files[path.name] = layout.fingerprint(path)
    (folder / layout.CONFIG).write_text(config.to_json(), encoding="utf-8")
