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
from sbkit.export import clips, graph, layout, parity, publish, readme, sherpa, source, speechbrain
from sbkit.export.layout import Config
from sbkit.export.runners import RUNNERS
from sbkit.export.source import Trained
from sbkit.export.vocabulary import Vocabulary, write_tokens
from sbkit.runs.restore import BEST
from sbkit.system.console import progress

logger = logging.getLogger(__name__)

FORMATS = (layout.ONNX, layout.INT8, layout.TORCH, layout.SPEECHBRAIN)
_SPACED = 0.1  # share of texts with a space from which words are what spaces separate
_BUILT_BY = ("torch", "speechbrain", "onnx", "onnxscript", "onnxruntime")


@dataclass(frozen=True)
class ExportRequest:
    """What is to be exported.

    run : the output folder of a training
    to : the bundle's folder
    checkpoint, average : as ``sbkit.runs.restore.take_weights`` takes them
    formats : of ``onnx, int8, torch, speechbrain``; int8 is made from onnx
    force : replace the bundle that is there
    tolerance : largest difference of a log-probability
    clips : utterances of the test split to compare on
    target : ``sherpa`` adds a model for sherpa-onnx
    """

    run: Path
    to: Path
    checkpoint: str = BEST
    average: int = 1
    formats: Sequence[str] = FORMATS
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
    unknown = sorted(set(request.formats) - set(FORMATS))
    if unknown or not request.formats:
        raise SbkitError(f"there is no format {', '.join(unknown) or 'asked for'}",
                         hint=f"choose of {', '.join(FORMATS)}")
    if request.to.is_file():
        raise SbkitError(f"{request.to} is a file", hint="name a folder for the bundle")
    if request.to.exists() and not request.force:
        raise SbkitError(f"{request.to} exists", hint="--force replaces it")
    if request.to.exists() and not (request.to / layout.CONFIG).is_file() and any(request.to.iterdir()):
        raise SbkitError(f"{request.to} is no bundle and is not empty, so it is not replaced",
                         hint="choose another place")
    if {layout.ONNX, layout.INT8} & set(request.formats):
        missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if not _installed(name)]
        if missing:
            raise SbkitError(f"ONNX needs {', '.join(missing)}", hint="pip install 'sbkit[export]'")


def _installed(name: str) -> bool:
    try:
        __import__(name)
    except ImportError:
        return False
    return True


def _fill(folder: Path, trained: Trained, request: ExportRequest) -> parity.Comparison:
    """All files of the bundle, and the proof that they are right."""
    tried = [name for name in FORMATS if name in request.formats]
    with progress(what="exporting", total=3 + 2 * len(tried) + 2 * (request.target is not None), unit="step") as bar:
        def step(what: str) -> None:
            bar.set_postfix_str(what)
            bar.update()

        step("reading test clips")
        chosen = clips.choose(trained.keys.corpus, trained.sample_rate, request.clips)
        step("tracing")
        function = graph.Graph(trained.recognizer)
        program = graph.trace(function)
        config = _config(trained, program, chosen)
        write_tokens(folder / layout.TOKENS, trained.tokenizer.pieces(), config.blank_id)
        for name in tried:
            step(f"writing {name}")
            _write(name, folder, trained, program, config, request.to.name)
            config.models[name] = layout.MODELS[name]
        if request.target == layout.SHERPA:
            step("writing sherpa")
            sherpa.write(function, config, folder / layout.MODELS[layout.SHERPA])
            config.models[layout.SHERPA] = layout.MODELS[layout.SHERPA]
        step("running the checkpoint")
        vocabulary = Vocabulary.read(folder, config)
        comparison = parity.Comparison(chosen, vocabulary, source.reference(trained.recognizer, config.min_samples),
                                       trained.tokenizer.decode, trained.sample_rate)
        for name in tried:
            step(f"comparing {name}")
            path = folder if name == layout.SPEECHBRAIN else folder / layout.MODELS[name]
            comparison.add(name, RUNNERS[name](path, config.min_samples), _size(folder, name),
                           batches=name != layout.SPEECHBRAIN)
        if layout.SHERPA in config.models:
            step("comparing sherpa")
            client = sherpa.client(folder / layout.MODELS[layout.SHERPA], folder / layout.TOKENS)
            comparison.add_words(layout.SHERPA, lambda signal: sherpa.transcribe(client, signal, trained.sample_rate),
                                 _size(folder, layout.SHERPA))
    config.batching = comparison.batchable(request.tolerance)
    comparison.refuse(comparison.failures(request.tolerance, config.batching))
    if not config.batching:
        logger.warning("In a batch an utterance's neighbours change its transcript, so each will run alone: layers of "
                       "this model look beyond its end")
    _describe(folder, config, comparison, request)
    return comparison


def _write(name: str, folder: Path, trained: Trained, program: torch.export.ExportedProgram, config: Config,
           title: str) -> None:
    path = folder / layout.MODELS[name]
    if name == layout.ONNX:
        graph.write_onnx(program, path, _metadata(config))
    elif name == layout.INT8:
        whole = folder / layout.MODELS[layout.ONNX]
        if whole.is_file():
            graph.quantize(whole, path)
        else:
            with tempfile.TemporaryDirectory(dir=folder) as aside:
                graph.write_onnx(program, Path(aside) / whole.name, _metadata(config))
                graph.quantize(Path(aside) / whole.name, path)
    elif name == layout.TORCH:
        graph.write_torch(program, path)
    else:
        speechbrain.write(folder, trained.run, trained.recognizer, trained.tokenizer, trained.sample_rate,
                          config.blank_id, title)


def _config(trained: Trained, program: torch.export.ExportedProgram, chosen: clips.Clips) -> Config:
    recognizer, tokenizer = trained.recognizer, trained.tokenizer
    silent = sorted({i for i in (trained.keys.bos_index, trained.keys.eos_index, getattr(tokenizer, "bos_id", None),
                                 getattr(tokenizer, "eos_id", None)) if i is not None and i > 0})
    texts = [clip.text for clip in chosen.alone if clip.text]
    spaced = not texts or sum(" " in text for text in texts) > _SPACED * len(texts)
    return Config(
        sample_rate=trained.sample_rate, hop_samples=recognizer.hop_samples, subsampling=recognizer.subsampling,
        vocabulary=len(tokenizer.pieces()), blank_id=trained.keys.blank_index, silent_ids=silent,
        word_separator="▁" if spaced else None, language=trained.keys.language or None,
        min_samples=graph.least_samples(program), chunk_seconds=round(min(max(chosen.longest, 10.0), 30.0), 2),
        trained=trained.facts,
        made_by={"sbkit": sbkit.__version__} | {name: metadata.version(name) for name in _BUILT_BY if _installed(name)},
    )


def _metadata(config: Config) -> dict[str, str]:
    """What an ONNX file says of itself, for runtimes that look there."""
    return {"sample_rate": str(config.sample_rate), "subsampling_factor": str(config.subsampling),
            "vocab_size": str(config.vocabulary), "blank_id": str(config.blank_id), "comment": "made by sbkit"}


def _size(folder: Path, name: str) -> int:
    names = [layout.MODELS[name], f"{layout.MODELS[name]}.data"]
    if name == layout.SPEECHBRAIN:
        names = [layout.RECIPE, layout.WEIGHTS, layout.TOKENIZER]
    return sum((folder / each).stat().st_size for each in names if (folder / each).exists())


def _describe(folder: Path, config: Config, comparison: parity.Comparison, request: ExportRequest) -> None:
    """parity.json, README.md and, last, config.json with the fingerprints of the others."""
    facts = {"tolerance": request.tolerance, "threads": torch.get_num_threads(), **comparison.facts()}
    (folder / layout.PARITY).write_text(json.dumps(facts, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    (folder / layout.README).write_text(readme.text(request.to.name, config, comparison), encoding="utf-8")
    for path in sorted(folder.iterdir()):
        path.chmod(0o644)
        config.files[path.name] = layout.fingerprint(path)
    (folder / layout.CONFIG).write_text(config.to_json(), encoding="utf-8")
