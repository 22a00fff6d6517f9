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
        same = {name: getattr(request, name) for name in ("to", "formats", "force", "tolerance", "clips")}
        return bundle.export(ExportRequest(run, **same), open_model=lambda: _open(request, run))


def _open(request: ImportRequest, run: Path) -> Trained:
    """Open the model as if a run in the folder ``run`` had trained it with its tokenizer."""
    given, own_run = Path(request.source).expanduser(), f"for your own run: sbkit export RUN --to {request.to}"
    if given.is_file():
        raise SbkitError(f"{request.source} is a file: a bundle also needs the model's layers and its tokenizer",
                         hint="name its folder, with a tokenizer and either a hyperparams.yaml for EncoderASR or a "
                              f"config.json; {own_run}")
    if is_folder(request.source):
        config = None
        with contextlib.suppress(SbkitError):
            config = layout.read(given)
        if config is not None:
            raise SbkitError(f"{request.source} is already an sbkit bundle", hint=config.use.format(given))
        if not any((given / name).is_file() for name in (layout.CONFIG, layout.RECIPE)):
            raise SbkitError(f"{request.source} has neither a config.json of transformers nor a hyperparams.yaml for "
                             "EncoderASR", hint=f"name a folder with all files of a model; {own_run}")
    folder = recipe_folder(request.source)
    if folder is not None:
        # SpeechBrain builds the model's layers; they replace those of a CTC recipe.
        model = SpeechBrainModel(request.source, folder, request.trust_code)
        brain, tokenizer = _brain(request, run, "ctc", model.piece_model, sample_rate=model.sample_rate, d_model=8,
                                  nhead=1, d_ffn=8, num_encoder_layers=1)
        brain.use_recognizer(type(brain.recognizer)(model.features, model.layers, nn.Identity(),
                                                    normalize=model.normalize, hop_samples=model.hop_samples))
        brain.modules = nn.ModuleDict({"model": model.layers})
        return _trained(request, run, brain, ("SpeechBrain", _own_code(model.own_code(), model.order, tokenizer, 1)))
    published = PublishedSource.of(request.source)
    brain, tokenizer = _brain(request, run, "finetune", published.piece_model(), init_from=request.source,
                              head_kernel=0, encoder={
                                  "add_adapter": bool(published.model.settings.config.get("add_adapter"))})
    initial.load(brain)
    encoder = brain.recognizer.encoder
    for note in encoder.notes(trains=False):
        print(note)
    own, min_samples = published.model.own_code(encoder.frames), getattr(encoder.network, "min_samples", 1)
    return _trained(request, run, brain, ("transformers", _own_code(own, published.kept_order, tokenizer, min_samples)))


def _brain(request: ImportRequest, run: Path, task: str, model: bytes,
           **keys: object) -> tuple[Any, Tokenizer]:  # Any: a Brain, whose class only the rooms of tasks have
    """Build the Brain of a recipe with the tokenizer of this SentencePiece model; prepare the corpus to compare on."""
    path, recipe_path = run / "tokenizer.model", starter.HOME / starter.RECIPES / f"{task}.yaml"
    path.write_bytes(model)
    tokenizer = Tokenizer(run, model=path).load()
    ends = {"bos_index": tokenizer.bos_id, "eos_index": tokenizer.eos_id}
    values = {"output_folder": str(run), "data_folder": request.corpus, "language": request.language or "",
              "output_neurons": tokenizer.size, "tokenizer": {"model": str(path)}, **keys,
              **{key: index if index >= 0 else None for key, index in ends.items()}}
    recipe = load.open_recipe(recipe_path, values)
    card = load.merged(recipe_path, {**values, "init_from": request.source})
    (run / layout.RECIPE).write_text(card, encoding="utf-8")  # what the model card is made from
    if request.corpus is not None:
        recipe.keys.corpus.prepare(needed=("test",))
    return restore.build(recipe, "cpu"), tokenizer


def _trained(request: ImportRequest, run: Path, brain: Any, original: tuple[str, Runner]) -> Trained:  # Any: a Brain
    name = Path(request.source).name if is_folder(request.source) else request.source
    trained = source.of_brain(brain, run, {"imported": name})
    trained.exported.original = original
    return trained


def _own_code(original: Callable[[np.ndarray], tuple[np.ndarray, str]], order: Sequence[int], tokenizer: Tokenizer,
              min_samples: int) -> Runner:
    """Return a runner of a model's original code, whose text of each clip must equal that of the run's tokenizer.

    order : the index of each of the run's tokens in the original vocabulary
    min_samples : samples that shorter clips are padded to
    """
    def run(signals: Sequence[np.ndarray]) -> list[np.ndarray]:
        found = []
        for signal in signals:
            log_probs, text = original(np.pad(signal, (0, max(0, min_samples - len(signal)))))
            log_probs = log_probs[:, order]
            decoded = tokenizer.decode(label for label, _ in itertools.groupby(log_probs.argmax(-1).tolist()) if label)
            if decoded.split() != text.split():
                raise SbkitError(f"the model's own tokenizer writes {text!r}, but the bundle would write {decoded!r}",
                                 hint="please report it, with the model's name")
            found.append(log_probs)
        return found

    return run
