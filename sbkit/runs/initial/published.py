"""Published CTC models as sources of initial weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch

from sbkit.data.piece_model import piece_model
from sbkit.errors import SbkitError
from sbkit.nn.pretrained import source as pretrained
from sbkit.nn.pretrained.ctc import CTCModel
from sbkit.nn.pretrained.source import names_model
from sbkit.runs.initial import source
from sbkit.runs.initial.source import TokenRows, WeightSource
from sbkit.score.metric import Metric
from sbkit.score.run_files import RECIPE
from sbkit.score.weights import ChosenWeights

#: The names in recipes such as hparams/finetune.yaml of a model's encoder and head.
_KEYS = {"encoder": "encoder.network", "head": "ctc_lin"}
_ROLES = ("blank", "bos", "eos")  # of special tokens with a key in recipes


@dataclass
class PublishedSource(WeightSource):
    """A CTC model of transformers: its tensors, named as in a recipe with a pretrained encoder, and its tokens."""

    model: CTCModel = field(kw_only=True)

    @classmethod
    def of(cls, name: str) -> PublishedSource:
        """Open a folder or a repository; raises if that has no CTC head."""
        model = CTCModel(name)
        model.head()
        return cls(f"the CTC model {name}", encoders={"encoder": model.settings}, model=model)

    def tensors(self, shapes: bool = False) -> dict[str, torch.Tensor]:
        parts = ((name.partition("."), value) for name, value in self.model.tensors(shapes).items())
        return {f"{_KEYS[part]}.{rest}": value for (part, _, rest), value in parts}

    has_tokenizer = True

    @property
    def kept_order(self) -> list[int]:
        """The ids of its tokens in the order of a run that keeps its tokenizer, with the blank first."""
        blank = self.model.tokens.roles["blank"]
        return [blank, *(place for place in range(len(self.model.tokens.pieces)) if place != blank)]

    def piece_model(self) -> bytes:
        tokens = self.model.tokens
        order = self.kept_order
        pieces = [tokens.pieces[token_id] for token_id in order]
        silent = {place for place, token_id in enumerate(order) if token_id in tokens.silent}
        try:
            return piece_model(pieces, silent, tokens.scores, tokens.merges)
        except SbkitError as error:
            raise SbkitError(error.code, f"the tokenizer of {self.model.source} can't be kept: {error.message}",
                             hint=error.hint) from error

    def vocabulary(self) -> TokenRows:
        tokens = self.model.tokens
        return TokenRows(tokens.pieces, {role: tokens.roles[role] for role in _ROLES if role in tokens.roles})


def recipe_folder(name: str) -> Path | None:
    """Return the folder of a path or a repository with a SpeechBrain recipe; None without one, or if its config.json
    is of a model of transformers, which is data.

    From a repository, all files that the recipe's pretrainer loads are downloaded.
    """
    if pretrained.is_folder(name):
        folder = Path(name).expanduser()
        return folder if (folder / RECIPE).is_file() and not names_model(name) else None
    if not names_model(name) or pretrained.describes_model(name):
        return None
    recipe = pretrained.present(name, RECIPE)
    if recipe is None:
        return None
    for file in (*source.pretrained_files(recipe.parent), pretrained.CARD):
        pretrained.present(name, file)
    return recipe.parent


def find(path: str | Path, weights: ChosenWeights, metric: Metric) -> WeightSource:
    """Find the source at a path or a repository of the Hugging Face Hub; arguments as in ``source.find``."""
    folder = recipe_folder(str(path))
    if folder is None and names_model(str(path)):
        source.refuse_choice(Path(path), weights)
        return PublishedSource.of(str(path))
    return source.find(folder or path, weights, metric)
