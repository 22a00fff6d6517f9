"""Makes a bundle of a CTC model that others trained, with no training, and holds it against their own code."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sbkit.data.tokens import Tokenizer
from sbkit.errors import SbkitError
from sbkit.export import bundle, layout, source
from sbkit.export.bundle import ExportRequest
from sbkit.export.runners import Runner
from sbkit.export.source import Trained
from sbkit.nn.pretrained.source import is_folder
from sbkit.recipe import load, starter
from sbkit.runs import initial, restore
from sbkit.runs.initial.published import PublishedSource

#: The recipe of such a model, if it were trained here.
_RECIPE = starter.HOME / starter.RECIPES / "ssl.yaml"


@dataclass(frozen=True)
class ImportRequest:
    """The options of ``sbkit import``.

    source : a folder, or a repository of the Hugging Face Hub
    to, formats, force, tolerance, clips : as ``ExportRequest`` has them
    corpus : whatever a recipe's ``data_folder`` may be; its test split is what is compared on. None: noise is
    language : of the corpus, and named in the bundle
    """

    source: str
    to: Path
    corpus: str | None = None
    language: str | None = None
    formats: Sequence[str] | None = None
    force: bool = False
    tolerance: float = ExportRequest.tolerance
    clips: int = ExportRequest.clips


def import_model(request: ImportRequest) -> int:
    """Import a model, print how its bundle compares with it, and return the exit code."""
    with tempfile.TemporaryDirectory() as room:
        run = Path(room)
        same = {name: getattr(request, name) for name in ("to", "formats", "force", "tolerance", "clips")}
        return bundle.export(ExportRequest(run, **same), opened=lambda: _opened(request, run))


def _opened(request: ImportRequest, run: Path) -> Trained:
    """Open the model as if a run in the folder ``run`` had kept its tokenizer and trained it."""
    published = PublishedSource.of(request.source)
    path = run / "tokenizer.model"
    path.write_bytes(published.piece_model())
    tokenizer = Tokenizer(run, model=path).load()
    ends = {"bos_index": tokenizer.bos_id, "eos_index": tokenizer.eos_id}
    values = {"output_folder": str(run), "data_folder": request.corpus, "language": request.language or "",
              "init_from": request.source, "output_neurons": tokenizer.size, "tokenizer": {"model": str(path)},
              **{key: place if place >= 0 else None for key, place in ends.items()}}
    (run / layout.RECIPE).write_text(load.merged(_RECIPE, values), encoding="utf-8")  # for the model card
    recipe = load.open_recipe(load.load(_RECIPE, values), _RECIPE)
    if request.corpus is not None:
        recipe.keys.corpus.prepare(needed=("test",))
    brain = restore.build(recipe, "cpu")
    initial.load(brain)
    for note in brain.recognizer.encoder.notes():
        print(note)
    name = Path(request.source).name if is_folder(request.source) else request.source
    trained = source.of_brain(brain, run, {"imported": name})
    trained.exported.original = "transformers", _own_code(published, tokenizer, brain.recognizer.encoder)
    return trained


def _own_code(published: PublishedSource, tokenizer: Tokenizer, encoder: Any) -> Runner:  # an Encoder
    """Return what runs the model's own code, whose tokenizer has to say the same as the run's of each clip."""
    least = getattr(encoder.network, "min_samples", 1)
    own = published.model.own_code(encoder.frames)

    def run(signals: Sequence[np.ndarray]) -> list[np.ndarray]:
        found = []
        for signal in signals:
            log_probs, text = own(np.pad(signal, (0, max(0, least - len(signal)))))
            log_probs = log_probs[:, published.kept_order]
            said = tokenizer.decode(label for label, _ in itertools.groupby(log_probs.argmax(-1).tolist()) if label)
            if said.split() != text.split():
                raise SbkitError(f"the tokenizer of {published.model.source} writes {text!r}, and the bundle would "
                                 f"write {said!r}", hint="please report it, with the model's name")
            found.append(log_probs)
        return found

    return run
