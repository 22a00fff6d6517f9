"""CTC models that others have published: their head, their tokens, and their own code to compare with."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sbkit.errors import SbkitError, first_line
from sbkit.nn.pretrained import source
from sbkit.nn.pretrained.encoder import network_class
from sbkit.nn.pretrained.source import Settings
from sbkit.nn.pretrained.tensors import TensorFiles

#: Files of tokenizers, of which a repository has some.
_TOKENIZER_FILES = ("tokenizer_config.json", "vocab.json", "tokenizer.json", "special_tokens_map.json",
                    "added_tokens.json", "spiece.model")
_SPACE = "▁"  # how SentencePiece writes it
#: The names that SentencePiece, and a search with a language model, have for tokens that are no text.
_NAMES = {"unk": "<unk>", "bos": "<s>", "eos": "</s>"}


class Tokens(NamedTuple):
    """The tokens of a head, in the order of its rows."""

    pieces: list[str]
    """As SentencePiece writes them, with ``▁`` for a space."""
    roles: dict[str, int]
    """The ids of ``blank``, and of ``unk``, ``bos`` and ``eos`` if there are any."""
    silent: frozenset[int]
    """The ids of all that are no text."""
    scores: dict[str, float]
    """By which a text is cut into pieces, as SentencePiece does it; empty: into characters."""
    merges: bool = False
    """Whether these are ranks of merges."""


@dataclass(frozen=True)
class CTCModel:
    """A CTC model as transformers saves it: a folder, or a repository of the Hugging Face Hub."""

    source: str

    @cached_property
    def settings(self) -> Settings:
        """The configuration of its encoder."""
        return Settings.of(self.source)

    @cached_property
    def files(self) -> TensorFiles:
        """Its tensors, those of the encoder by their names in it."""
        prefixes = network_class(self.settings).prefixes
        return TensorFiles(source.weights(self.source), prefixes)

    def head(self) -> dict[str, str]:
        """Return the names of the head's weight [V, D] and bias [V]; raises if it has none."""
        for name in source.HEADS:
            found = {part: name + part for part in ("weight", "bias") if name + part in self.files.shapes}
            if len(found) == 2:
                return found
        kind = self.settings.config["model_type"]
        raise SbkitError(f"{self.source} is a model of transformers ({kind}) without a CTC head",
                         hint="a recipe with a pretrained encoder, such as hparams/ssl.yaml, takes it as "
                              f"--encoder_source {self.source}")

    @cached_property
    def folder(self) -> Path:
        """The folder that has its tokenizer's files, too."""
        for name in _TOKENIZER_FILES:
            source.present(self.source, name)
        return source.find(self.source, source.CONFIG).parent

    @cached_property
    def tokenizer(self) -> Any:  # each family has a class for it
        """Its own tokenizer."""
        import transformers

        try:
            return transformers.AutoTokenizer.from_pretrained(str(self.folder), trust_remote_code=False,
                                                              local_files_only=True)
        except Exception as error:  # whatever its files make of transformers
            raise SbkitError(f"{self.source} has no tokenizer that transformers can open: {first_line(error)}",
                             hint=f"fetch its files too: some of {', '.join(_TOKENIZER_FILES)}") from error

    @cached_property
    def tokens(self) -> Tokens:
        """What the rows of its head stand for; raises unless its tokenizer says it of each."""
        own, size = self.tokenizer, self.files.shapes[self.head()["weight"]][0]
        known = set(own.get_vocab().values())
        lacking = [place for place in range(size) if place not in known]
        beyond = sorted(place for place in known - set(own.all_special_ids) if place >= size)
        blank = own.pad_token_id
        if lacking or beyond or blank is None or blank >= size:
            what = f"none for {len(lacking)}, such as row {lacking[0]}" if lacking else \
                f"{len(beyond)} more, such as {own.convert_ids_to_tokens(beyond[0])!r}" if beyond else \
                f"{own.pad_token!r} for the blank, which is none of them"
            raise SbkitError(f"the tokenizer of {self.source} doesn't fit its head: that has {size} rows, and the "
                             f"tokenizer has {what}", hint="are its tokenizer and its weights of the same model?")
        delimiter = getattr(own, "word_delimiter_token_id", None)
        roles = {"blank": blank} | {role: place for role in _NAMES if (
            place := getattr(own, f"{role}_token_id")) is not None and place < size and place != blank}
        silent = frozenset(place for place in own.all_special_ids if place < size and place != delimiter) - {blank}
        pieces = [_piece(own, place) for place in range(size)]
        if delimiter is not None and delimiter < size:
            pieces[delimiter] = _SPACE
        for role, name in _NAMES.items():
            if roles.get(role) in silent:
                pieces[roles[role]] = name
        return Tokens(pieces, roles, silent, *_scores(own))

    def own_code(self, frames: Callable[[int], int]) -> Callable[[np.ndarray], tuple[np.ndarray, str]]:
        """Return what transformers' own model and tokenizer make of a waveform [S]: log-probabilities [T, V], text.

        frames : the number of frames for a number of samples; theirs may be followed by some of padding
        """
        import transformers

        folder = str(self.folder)
        try:
            extractor = transformers.AutoFeatureExtractor.from_pretrained(  # type: ignore[no-untyped-call]
                folder, trust_remote_code=False)
            model = transformers.AutoModelForCTC.from_pretrained(folder, dtype=torch.float32,
                                                                 trust_remote_code=False).eval()
        except Exception as error:  # whatever its files make of transformers
            raise SbkitError(f"transformers itself can't open {self.source}: {first_line(error)}",
                             hint="is the folder complete?") from error
        adapted = self.settings.config.get("add_adapter")
        own, silent = self.tokenizer, [self.tokenizer.convert_ids_to_tokens(place) for place in self.tokens.silent]

        @torch.no_grad()
        def run(signal: np.ndarray) -> tuple[np.ndarray, str]:
            given = extractor(signal, sampling_rate=self.settings.sample_rate, return_tensors="pt")
            if adapted and "input_features" in given:  # without padding, which an adapter would hear
                given = {name: value[:, :int(given["attention_mask"].sum())] for name, value in given.items()}
            scores = model(**given).logits[0, :frames(len(signal))].log_softmax(-1)
            text = own.decode(scores.argmax(-1).tolist(), clean_up_tokenization_spaces=False)
            for token in silent:
                text = text.replace(token.lower() if getattr(own, "do_lower_case", False) else token, "")
            return scores.numpy(), text

        return run

    def tensors(self, shapes: bool = False) -> dict[str, Tensor]:
        """Return the tensors of the encoder, as ``encoder.``, and of the head, as ``head.``.

        shapes : without values
        """
        heads = {name: f"head.{part}" for part, name in self.head().items()}
        names = {name: heads.get(name, f"encoder.{name}") for name in self.files.shapes}
        found = {new: torch.empty(self.files.shapes[name], device="meta") if shapes else self.files[name]
                 for name, new in names.items()}
        found["head.weight"] = found["head.weight"].flatten(1)  # a convolution's, in some families
        return found


def _piece(tokenizer: Any, place: int) -> str:  # each family has a class for it
    piece = str(tokenizer.convert_ids_to_tokens(place)).replace(" ", _SPACE)
    return piece.lower() if getattr(tokenizer, "do_lower_case", False) else piece


def _scores(tokenizer: Any) -> tuple[dict[str, float], bool]:  # as there
    """Return by what a tokenizer with pieces cuts a text, and whether by merges."""
    if not tokenizer.is_fast:
        return {}, False
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    if model.get("type") == "Unigram":
        return dict(model["vocab"]), False
    pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model.get("merges", ())]
    return {"".join(pair): -float(rank) for rank, pair in enumerate(pairs)}, True
