"""Makes a bundle of a published CTC model without training, and compares it with the model's original code."""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from sbkit.data.language_code import LANGUAGE_CODE
from sbkit.data.sources import check_exists
from sbkit.data.tokens import Tokenizer
from sbkit.errors import SbkitError
from sbkit.export import bundle, layout, source
from sbkit.export.bundle import ExportRequest
from sbkit.export.runners import Runner
from sbkit.export.source import Trained
from sbkit.export.speechbrain_model import SpeechBrainModel
from sbkit.nn.pretrained.source import is_folder
from sbkit.recipe import load, starter
from sbkit.runs import initial, restore
from sbkit.runs.initial.published import PublishedSource, recipe_folder
from sbkit.system.schema import Nullable, require


@dataclass(frozen=True)
class ImportRequest:
    """The options of ``sbkit import``.

    source : a folder or a repository of the Hugging Face Hub, of transformers or for SpeechBrain's EncoderASR
    to, formats, force, tolerance, clips : as ``ExportRequest`` has them
    corpus : whatever a recipe's ``data_folder`` may be; its test split is used for the comparison; None: noise
    language : of the corpus, and named in the bundle
    trust_code : whether the hyperparams.yaml of a SpeechBrain model, which is code, may run
    """

    source: str
    to: Path
    corpus: str | None = None
    language: str | None = None
    trust_code: bool = False
    formats: Sequence[str] | None = None
    force: bool = False
    tolerance: float = ExportRequest.tolerance
    clips: int = ExportRequest.clips


def import_model(request: ImportRequest) -> int:
    """Import a model, print how its bundle compares with it, and return the exit code."""
    require("--language", request.language, Nullable(LANGUAGE_CODE))
    if request.corpus is not None:
        check_exists(request.corpus)
    with tempfile.TemporaryDirectory() as temporary:
        run = Path(temporary)
        export_request = ExportRequest(run, to=request.to, formats=request.formats, force=request.force,
                                       tolerance=request.tolerance, clips=request.clips)
        return bundle.export(export_request, open_model=lambda: _open(request, run))


def _open(request: ImportRequest, run: Path) -> Trained:
    """Open the model as if a run in the folder ``run`` had trained it with its tokenizer."""
    _check_source(request)
    folder = recipe_folder(request.source)
    if folder is not None:
        return _open_speechbrain(request, run, folder)
    return _open_transformers(request, run)


def _check_source(request: ImportRequest) -> None:
    """Refuse files, bundles, and folders without a model."""
    path = Path(request.source).expanduser()
    own_run = f"for your own run: sbkit export RUN --to {request.to}"
    if path.is_file():
        raise SbkitError("not-a-model",
                         f"{request.source} is a file: a bundle also needs the model's layers and its tokenizer",
                         hint="name its folder, with a tokenizer and either a hyperparams.yaml for EncoderASR or a "
                              f"config.json; {own_run}", file=path)
    if not is_folder(request.source):  # a repository of the hub
        return
    config = None
    with contextlib.suppress(SbkitError):
        config = layout.read(path)
    if config is not None:
        raise SbkitError("made-by-sbkit", f"{request.source} is already an sbkit bundle", hint=config.use.format(path),
                         file=path)
    if not any((path / name).is_file() for name in (layout.CONFIG, layout.RECIPE)):
        raise SbkitError("not-a-model", f"{request.source} has neither a config.json of transformers nor a "
                         "hyperparams.yaml for EncoderASR",
                         hint=f"name a folder with all files of a model; {own_run}", file=path)


def _open_speechbrain(request: ImportRequest, run: Path, folder: Path) -> Trained:
    """Let SpeechBrain build the model's layers, and put them in the place of those of a CTC recipe."""
    model = SpeechBrainModel(request.source, folder, request.trust_code)
    brain, tokenizer = _brain(request, run, "ctc", model.piece_model, sample_rate=model.sample_rate, d_model=8,
                              nhead=1, d_ffn=8, num_encoder_layers=1)
    brain.use_acoustic_model(type(brain.acoustic_model)(model.features, model.layers, nn.Identity(),
                                                normalize=model.normalize, hop_samples=model.hop_samples))
    brain.modules = nn.ModuleDict({"model": model.layers})
    original = _original_runner(model.own_code(), model.order, tokenizer)
    return _trained(request, run, brain, ("SpeechBrain", original))


def _open_transformers(request: ImportRequest, run: Path) -> Trained:
    """Load the weights of a model of transformers into a fine-tuning recipe."""
    published = PublishedSource.of(request.source)
    add_adapter = bool(published.model.settings.config.get("add_adapter"))
    brain, tokenizer = _brain(request, run, "finetune", published.piece_model(), init_from=request.source,
                              head_kernel=0, encoder={"add_adapter": add_adapter})
    initial.load(brain)
    encoder = brain.acoustic_model.encoder
    for note in encoder.notes(trains=False):
        print(note)
    original = _original_runner(published.model.own_code(encoder.frames), published.kept_order, tokenizer,
                                min_samples=getattr(encoder.network, "min_samples", 1))
    return _trained(request, run, brain, ("transformers", original))


def _brain(request: ImportRequest, run: Path, recipe_name: str, piece_model: bytes,
           **keys: object) -> tuple[Any, Tokenizer]:  # Any: a Brain, whose class only the packages of tasks have
    """Build the Brain of a recipe with the tokenizer of a SentencePiece model; prepare the corpus to compare on."""
    tokenizer_path = run / "tokenizer.model"
    tokenizer_path.write_bytes(piece_model)
    tokenizer = Tokenizer(run, model=tokenizer_path).load()

    # SentencePiece has -1 for a token that its model lacks.
    bos, eos = (index if index >= 0 else None for index in (tokenizer.bos_id, tokenizer.eos_id))
    values = {"output_folder": str(run), "data_folder": request.corpus, "language": request.language or "",
              "output_neurons": tokenizer.size, "tokenizer": {"model": str(tokenizer_path)}, **keys,
              "bos_index": bos, "eos_index": eos}
    recipe_path = starter.HOME / starter.RECIPES / f"{recipe_name}.yaml"
    recipe = load.open_recipe(recipe_path, values)
    # The model card is made from the recipe in the run's folder.
    merged = load.merged(recipe_path, {**values, "init_from": request.source})
    (run / layout.RECIPE).write_text(merged, encoding="utf-8")
    if request.corpus is not None:
        recipe.keys.corpus.prepare(needed=("test",))
    return restore.build(recipe, "cpu"), tokenizer


def _trained(request: ImportRequest, run: Path, brain: Any, original: tuple[str, Runner]) -> Trained:  # Any: a Brain
    name = Path(request.source).name if is_folder(request.source) else request.source
    trained = source.of_brain(brain, run, {"imported": name})
    trained.exported.original = original
    return trained


def _original_runner(original: Callable[[np.ndarray], tuple[np.ndarray, str]], order: Sequence[int],
                     tokenizer: Tokenizer, min_samples: int = 1) -> Runner:
    """Return a runner of a model's original code, whose text of each clip must equal that of the run's tokenizer.

    original : a waveform [S] to log-probabilities [T, V] and a text
    order : the index of each of the run's tokens in the original vocabulary
    min_samples : samples that shorter clips are padded to
    """
    def run(signals: Sequence[np.ndarray]) -> list[np.ndarray]:
        outputs = []
        for signal in signals:
            padding = max(0, min_samples - len(signal))
            log_probs, text = original(np.pad(signal, (0, padding)))
            log_probs = log_probs[:, order]
            best_labels = log_probs.argmax(-1).tolist()
            decoded = tokenizer.decode(label for label, _ in itertools.groupby(best_labels) if label)
            if decoded.split() != text.split():
                raise SbkitError("tokenizer-differs",
                                 f"the model's own tokenizer writes {text!r}, but the bundle would write {decoded!r}",
                                 hint="please report it, with the model's name")
            outputs.append(log_probs)
        return outputs

    return run
