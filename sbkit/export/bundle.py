"""Exports a run as a bundle: writes it to a temporary folder, compares it with the checkpoint, then publishes it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

import sbkit
from sbkit.data import publish
from sbkit.errors import SbkitError, is_out_of_memory, summary
from sbkit.export import graph, layout, parity, source
from sbkit.export.companion import Companion
from sbkit.export.exported import Exported
from sbkit.export.silence import try_behaviour
from sbkit.export.source import Trained
from sbkit.runs.keys import Bundles
from sbkit.runs.restore import BEST
from sbkit.score.report import model_card
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
    checkpoint, average, mean, accept_worse : which weights, as ``source.open_run`` takes them
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
    keep_previous: bool = False
    mark: Path | None = None


def export(request: ExportRequest, bundles: Bundles | None = None,
           open_model: Callable[[], Trained] | None = None) -> int:
    """Export a run, print how it compares with its checkpoint, and return the exit code.

    bundles : opens the recogniser that transcribes a model's audio; None: no transcripts are compared
    open_model : returns a model that is not a run's
    """
    to = request.to.resolve()  # a link to a bundle stays a link
    publish.clean_up(to, layout.FOLDER)
    if request.to.exists() and not request.force and not request.to.is_file():
        raise SbkitError(f"{request.to} exists", hint="--force replaces it")
    layout.FOLDER.check_replaceable(request.to)
    keep = publish.previous(to) if request.keep_previous else None
    if keep is not None:
        layout.FOLDER.check_replaceable(keep)
    trained = open_model() if open_model else source.open_run(
        request.run, request.checkpoint, request.average, bundles, request.mean, request.accept_worse)
    run = request.run.resolve()
    if open_model is None and os.path.commonpath([run, to]) != to.anchor:  # else it would be a path of this machine
        trained.facts["run"] = os.path.relpath(run, to)  # improve finds it there, also when both are moved together

    def write_mark() -> None:
        if request.mark is not None:
            with atomic_write(request.mark, "wb") as copy:
                copy.write((temporary / layout.CONFIG).read_bytes())

    with publish.temporary_folder(to, layout.FOLDER) as temporary:
        comparison, config = _write_and_compare(temporary, trained, request)
        told = "" if bundles is None else try_behaviour(
            temporary, config, bundles, comparison.clips.alone, trained.keys.corpus)
        publish.publish(temporary, to, layout.FOLDER, request.force, keep, write_mark)
    print(f"compared on {comparison.clips.origin}:\n{comparison.table()}")
    print(comparison.joining(), comparison.clip_names(), sep="", end="")
    if comparison.has_words and layout.INT8 in comparison.formats():
        print(f"{layout.INT8} has 8-bit weights, so some of its outputs differ: its {comparison.rate} may be "
              f"{parity.POINTS:g} point or {100 * parity.SHARE:.0f} % above that of {comparison.compared_with}, "
              "whichever is more")
    for name, reason in config.left_out.items():
        print(f"left out: {name}, because {reason}")
    if config.left_out and comparison.hint:
        print(comparison.hint)
    print(told, end="")
    print(f"\n{request.to}  ({config.use.format(request.to)})")
    return 0


def _formats(request: ExportRequest, exported: Exported) -> list[str]:
    """Return the formats to write, in the order in which they are made."""
    available = [name for name in exported.formats if exported.judges_words or name != layout.INT8]
    wanted = available if request.formats is None else request.formats
    unknown = sorted(set(wanted) - set(available))
    if unknown or not wanted:
        reasons = {layout.INT8: "judged by words, so a task of your own needs labels for it", **exported.left_out}
        raise SbkitError(f"this model has no format {', '.join(unknown)}" if unknown else "--formats names no format",
                         hint="; ".join([f"it has {', '.join(available)}",
                                         *(f"{name}: {reasons[name]}" for name in unknown if name in reasons)]))
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
    """Write all files of the bundle, and compare each format with the checkpoint.

    A format that can't be written, run or published is left out, with its reason. It refuses the whole bundle if the
    user named it, or if no other is left.
    """
    exported = trained.exported
    formats = _formats(request, exported)
    targets = [] if request.target is None else exported.target(request.target, request.chunk)
    companions = [(each, files) for each in exported.companions
                  if (files := {name: each.files[name] for name in formats if name in each.files})]
    kept, left_out, written = list(formats), dict[str, str](), {name: set[Path]() for name in formats}

    def leave_out(name: str, reason: str) -> None:
        kept.remove(name)
        left_out[name] = reason
        for path in written[name]:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        if name == layout.ONNX and layout.INT8 in kept:  # its own gate, of words, is wider than onnx's
            leave_out(layout.INT8, f"it is made from {layout.ONNX}, which is left out")

    @contextlib.contextmanager
    def attempt(name: str) -> Iterator[None]:
        before, failure = set(folder.iterdir()), None
        try:
            yield
        except Exception as error:  # of torch, ONNX Runtime, SpeechBrain or the recipe's own classes
            # A full disk or memory is no property of the format.
            told, named = isinstance(error, SbkitError), request.formats is not None
            if isinstance(error, OSError) or is_out_of_memory(error) or (told and named):
                raise
            failure = (str(error) if told else summary(error)).replace(str(folder), request.to.name)
            if named:
                raise SbkitError(f"the format {name} can't be made or run: {failure}",
                                 hint="leave it out of --formats") from error
        written[name] |= set(folder.iterdir()) - before
        if failure is not None:
            leave_out(name, failure)

    steps = 3 + 2 * (len(formats) + len(targets) + len(companions))
    with progress(what="exporting", total=steps, unit="step") as bar:
        def step(what: str) -> None:
            bar.set_postfix_str(what)
            bar.update()

        def configure(kept: Sequence[str]) -> layout.Bundle:
            config = complete(exported.config(program, clips), trained)
            config.models = {name: layout.MODELS[name] for name in kept}
            for companion, files in companions:
                if present := {name: file for name, file in files.items() if name in kept}:
                    companion.describe(config, present)
            return config

        step("reading test clips")
        clips = exported.clips(trained.keys.corpus, request.clips)
        step("tracing")
        program = exported.trace()
        graphs: list[tuple[Exported | Companion, torch.export.ExportedProgram, Mapping[str, str]]]
        graphs = [(exported, program, {name: layout.MODELS[name] for name in formats if name in layout.TRACED})]
        for companion, files in companions:
            step(f"tracing {companion.name}")
            graphs.append((companion, companion.trace(), files))
        config = configure(formats)
        exported.write_beside(folder, config)
        for name in formats:
            step(f"writing {name}")
            if name in left_out:
                continue
            with attempt(name):
                if name not in layout.TRACED:
                    exported.write(name, folder, config, request.to.name)
                for model, traced, models in graphs:
                    if name in models:
                        _write(name, folder, models, traced, model, config)
        if not kept:
            raise SbkitError("no format of the model can be written, so nothing was published:"
                             + "".join(f"\n  {name}: {reason}" for name, reason in left_out.items()))
        for target in targets:
            step(f"writing {target.name}")
            target.write(folder, config)
        step("running the checkpoint")
        comparison = exported.comparison(clips, config, folder)
        for companion, _ in companions:
            step(f"running the checkpoint for {companion.name}")
            comparison.companions[companion.name] = companion.comparisons(clips, config, folder)
        for name in formats:
            step(f"comparing {name}")
            if name in left_out:
                continue
            own = [layout.RECIPE, layout.WEIGHTS, layout.TOKENIZER] if name == layout.SPEECHBRAIN else [
                layout.MODELS[name]]
            with attempt(name):
                comparison.add(name, exported.runner(name, folder, config), layout.size(folder, *own),
                               batches=name != layout.SPEECHBRAIN)
                for companion, files in companions:
                    if name in files:
                        for mode, run in companion.runners(name, folder / files[name], config).items():
                            comparison.companions[companion.name][mode].add(name, run, layout.size(folder, files[name]))
        for target in targets:
            step(f"comparing {target.name}")
            target.compare(folder, config, comparison)
    if request.formats is None:
        for name in formats:
            # Alone, because outputs that depend on the batch are the model's, and not the format's.
            wrong = comparison.failures(request.tolerance, batching=False, of=name)
            if name in kept and wrong:
                leave_out(name, "; ".join(each.removeprefix(f"{name}: ") for each in wrong))
    if not kept:
        judged = {name: comparison.failures(request.tolerance, batching=False, of=name) for name in formats}
        comparison.raise_if_any([*comparison.failures(request.tolerance, batching=False),
                                 *(f"{name}: {reason}" for name, reason in left_out.items() if not judged[name])])
    if left_out:
        of_targets = {name: file for name, file in config.models.items() if name not in formats}
        config = configure(kept)
        config.models |= of_targets
    # The reasons are published: a path in them, which may name people or projects, is cut to its last part.
    home = os.path.expanduser("~")
    if left_out := left_out | exported.left_out:
        for name, reason in left_out.items():
            known = reason if home == "/" else reason.replace(home, "~")
            left_out[name] = re.sub(r"(?<![\w.])(?<!:/)~?/(?:[^\s/'\"]+/)+", "", known)
        comparison.leave_out(left_out)
        config.left_out = dict(left_out)
    config.batching = comparison.batchable(request.tolerance)
    comparison.raise_if_any(comparison.failures(request.tolerance, config.batching))
    if not config.batching:
        logger.warning("Utterances have different outputs in a batch than alone, because layers of this model use the "
                       "padding. Each utterance will run alone")
    readme = exported.readme(request.to.name, config, comparison, [target.readme() for target in targets])
    readme = model_card.of_bundle(readme, request.run, config.pipeline_tag, request.checkpoint, request.average,
                                  request.mean, trained.facts)
    # Last comes config.json, with the fingerprints of all other files.
    facts = {"tolerance": request.tolerance, "threads": torch.get_num_threads(), **comparison.facts()}
    (folder / layout.PARITY).write_text(json.dumps(facts, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    (folder / layout.README).write_text(readme, encoding="utf-8")
    for path in sorted(folder.iterdir()):
        path.chmod(0o644)
        config.files[path.name] = layout.fingerprint(path)
    config.check(folder / layout.CONFIG)  # as a reader does
    (folder / layout.CONFIG).write_text(config.to_json(), encoding="utf-8")
    return comparison, config


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
