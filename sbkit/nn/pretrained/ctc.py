"""Published CTC models of transformers: their head, their tokens, and transformers' own code to compare with."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sbkit.errors import SbkitError, first_line, shown, summary
from sbkit.nn.pretrained import source
from sbkit.nn.pretrained.encoder import network_class
from sbkit.nn.pretrained.networks import ENCODER_VALUES, EncoderOptions, make_config, plain_values
from sbkit.nn.pretrained.source import Settings
from sbkit.nn.pretrained.tensors import TensorFiles

#: Possible files of tokenizers in a repository.
_TOKENIZER_FILES = ("tokenizer_config.json", "vocab.json", "tokenizer.json", "special_tokens_map.json",
                    "added_tokens.json", "spiece.model")
_EXTRACTOR = {
    "feature_extractor_type": {"Wav2Vec2FeatureExtractor", "SeamlessM4TFeatureExtractor", "ParakeetFeatureExtractor",
                               "LasrFeatureExtractor"},
    "do_normalize": bool, "return_attention_mask": bool, "feature_size": (1, 1024), "num_mel_bins": (1, 1024),
    "sampling_rate": (1, 192_000), "padding_side": {"left", "right"}, "padding_value": (-1e3, 1e3), "stride": (1, 16),
    "hop_length": (1, 1 << 14), "n_fft": (1, 1 << 14), "win_length": (1, 1 << 14), "preemphasis": (0.0, 1.0)}
#: Of tokenizer_config.json; the classes of tokenizers that a CTC model can have, also with "Fast" behind.
_CLASSES = ("Wav2Vec2CTCTokenizer", "Wav2Vec2PhonemeCTCTokenizer", "Wav2Vec2Tokenizer", "ParakeetTokenizer",
            "LasrTokenizer", "PreTrainedTokenizer", "TokenizersBackend")
_TOKENIZER = {
    "tokenizer_class": {*_CLASSES, *(f"{name}Fast" for name in _CLASSES)}, "backend": str, "extra_ids": (0, 1000),
    **dict.fromkeys(("do_lower_case", "do_phonemize", "clean_up_tokenization_spaces", "legacy"), bool),
    **dict.fromkeys(("word_delimiter_token", "replace_word_delimiter_char", "phone_delimiter_token", "phonemizer_lang",
                     "phonemizer_backend", "target_lang", *(f"{name}_token" for name in (
                         "bos", "eos", "unk", "pad", "mask", "cls", "sep"))), object),
    **dict.fromkeys(("added_tokens_decoder", "additional_special_tokens", "extra_special_tokens"), object)}
_MORE_TOKENS = 5000  # MMS names its languages beside the tokens of each
_SPACE = "▁"  # in SentencePiece's pieces
#: The names of special tokens in SentencePiece, and in a search with a language model.
_NAMES = {"unk": "<unk>", "bos": "<s>", "eos": "</s>"}


class Tokens(NamedTuple):
    """The tokens of a head, in the order of its rows."""

    pieces: list[str]
    """Pieces of SentencePiece, with ``▁`` for a space."""
    roles: dict[str, int]
    """The ids of ``blank``, and of ``unk``, ``bos`` and ``eos`` if there are any."""
    silent: frozenset[int]
    """The ids of all tokens that are no text."""
    scores: dict[str, float]
    """SentencePiece's scores for tokenizing text; empty: into characters."""
    merges: bool = False
    """Whether the scores are ranks of merges."""


@dataclass(frozen=True)
class CTCModel:
    """A CTC model saved by transformers: a folder, or a repository of the Hugging Face Hub."""

    source: str

    @cached_property
    def settings(self) -> Settings:
        """The configuration of its encoder."""
        return Settings.of(self.source)

    @cached_property
    def files(self) -> TensorFiles:
        """Its tensors; those of the encoder by their names in the encoder."""
        prefixes = network_class(self.settings).prefixes
        return TensorFiles(source.weights(self.source), prefixes)

    def head(self) -> dict[str, str]:
        """Return the names of the head's weight [V, D] and bias [V]; raises if it has none."""
        for name in source.HEADS:
            names = {part: name + part for part in ("weight", "bias") if name + part in self.files.shapes}
            if len(names) == 2:
                return names
        kind = self.settings.config["model_type"]
        raise SbkitError("no-ctc-head", f"{self.source} is a model of transformers ({kind}) without a CTC head",
                         value=self.source,
                         hint="a recipe with a pretrained encoder, such as hparams/finetune.yaml, takes it as "
                              f"--encoder_source {self.source}")

    @cached_property
    def folder(self) -> Path:
        """The folder with its files, including the tokenizer's."""
        for name in _TOKENIZER_FILES:
            source.present(self.source, name)
        return source.find(self.source, source.CONFIG).parent

    @cached_property
    def _safe_folder(self) -> tempfile.TemporaryDirectory[str]:
        """A folder that transformers may open: links to its files, but of settings only plain values in ranges.

        The files may be a stranger's: a key such as ``_attn_implementation`` fetches code, and numbers take memory.
        """
        safe = tempfile.TemporaryDirectory()
        rows, *_ = self.files.shapes[self.head()["weight"]]
        settings = self._safe_settings(rows)
        for name in _TOKENIZER_FILES:
            path = self.folder / name
            if not path.is_file() or name.endswith(".model"):
                continue
            values = source.read_object(path)
            _check_entries(values, path, rows)
            if name == _TOKENIZER_FILES[0]:
                settings[name] = plain_values(values, _TOKENIZER, str(path))
        for name, values in settings.items():
            if values:
                Path(safe.name, name).write_text(json.dumps(values), encoding="utf-8")
        others = [self.folder / name for name in (*source.WEIGHTS, *_TOKENIZER_FILES)]
        for path in (*source.weights(self.source), *others):
            if path.is_file() and not Path(safe.name, path.name).exists():
                Path(safe.name, path.name).symlink_to(path.absolute())
        return safe

    def _safe_settings(self, rows: int) -> dict[str, dict[str, Any]]:
        """Return the contents of its config and of its feature extractor's, by file; ``rows``: of the head."""
        make_config(self.settings, EncoderOptions())  # refuses what sbkit doesn't know
        kind = self.settings.config["model_type"]
        values = plain_values(self.settings.config, ENCODER_VALUES, f"the config.json of {self.source}")
        config: dict[str, Any] = {"model_type": kind, **values}
        if kind.endswith("_encoder"):  # its head has a config around the encoder's
            config = {"model_type": kind.replace("_encoder", "_ctc"), "encoder_config": config}
        config |= {"vocab_size": rows, "pad_token_id": 0}  # that one is only for a loss
        extractor = plain_values(self.settings.preprocessor, _EXTRACTOR, f"the feature extractor of {self.source}")
        return {source.CONFIG: config, source.PREPROCESSOR: extractor}

    def _opened(self, auto: str, fails: str, hint: str, **options: Any) -> Any:  # each family has a class for it
        """Open its files by one of transformers' auto classes."""
        import transformers

        folder = self._safe_folder.name
        try:
            return getattr(transformers, auto).from_pretrained(folder, trust_remote_code=False, local_files_only=True,
                                                               **options)
        except Exception as error:  # of any kind, depending on the files
            raise SbkitError("damaged-pretrained", f"{fails}: {first_line(error).replace(folder, str(self.folder))}",
                             hint=hint, file=self.folder) from error

    @cached_property
    def tokenizer(self) -> Any:  # each family has a class for it
        """Its own tokenizer."""
        return self._opened("AutoTokenizer", f"{self.source} has no tokenizer that transformers can open",
                            f"fetch its files too: some of {', '.join(_TOKENIZER_FILES)}")

    @cached_property
    def tokens(self) -> Tokens:
        """The tokens of the head's rows; raises unless its tokenizer has exactly these."""
        try:
            return self._tokens(self.tokenizer, self.files.shapes[self.head()["weight"]][0])
        except SbkitError:
            raise
        except Exception as error:  # of any kind, by what its files hold instead of texts and numbers
            raise SbkitError("damaged-pretrained", f"the tokenizer of {self.source} can't be used: {summary(error)}",
                             hint="download its files again", value=self.source) from error

    def _tokens(self, tokenizer: Any, size: int) -> Tokens:  # each family has a class for it
        self._check_fit(tokenizer, size)
        blank = tokenizer.pad_token_id
        delimiter = getattr(tokenizer, "word_delimiter_token_id", None)
        roles = {"blank": blank}
        for role in _NAMES:
            index = getattr(tokenizer, f"{role}_token_id")
            if index is not None and index < size and index != blank:
                roles[role] = index
        special_ids = [index for index in tokenizer.all_special_ids if index < size]
        silent = frozenset(index for index in special_ids if index != delimiter) - {blank}
        pieces = [str(tokenizer.convert_ids_to_tokens(index)).replace(" ", _SPACE) for index in range(size)]
        if getattr(tokenizer, "do_lower_case", False):
            pieces = [piece.lower() for piece in pieces]
        if delimiter is not None and delimiter < size:
            pieces[delimiter] = _SPACE
        for role, name in _NAMES.items():
            if roles.get(role) in silent:
                pieces[roles[role]] = name
        model = json.loads(tokenizer.backend_tokenizer.to_str())["model"] if tokenizer.is_fast else {}
        if model.get("type") == "Unigram" or not model:
            return Tokens(pieces, roles, silent, dict(model.get("vocab", {})))
        pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model.get("merges", ())]
        scores = {"".join(pair): -float(rank) for rank, pair in enumerate(pairs)}
        return Tokens(pieces, roles, silent, scores, merges=True)

    def _check_fit(self, tokenizer: Any, size: int) -> None:  # each family has a class for it
        """Raise unless a tokenizer has a token for each row of the head, and no others, and a blank among them."""
        known = {index for index in tokenizer.get_vocab().values() if isinstance(index, int)}
        missing = [index for index in range(size) if index not in known]
        beyond = sorted(index for index in known - set(tokenizer.all_special_ids) if index >= size)
        if missing:
            problem = f"none for {len(missing)}, such as row {missing[0]}"
        elif beyond:
            problem = f"{len(beyond)} more, such as {shown(tokenizer.convert_ids_to_tokens(beyond[0]))}"
        elif tokenizer.pad_token_id is None or tokenizer.pad_token_id >= size:
            problem = f"{shown(tokenizer.pad_token)} for the blank, which is none of them"
        else:
            return
        raise SbkitError("pretrained-mismatch", f"the tokenizer of {self.source} doesn't fit its head: that has {size} "
                         f"rows, but the tokenizer has {problem}", value=self.source,
                         hint="are its tokenizer and its weights of the same model?")

    def own_code(self, frames: Callable[[int], int]) -> Callable[[np.ndarray], tuple[np.ndarray, str]]:
        """Return transformers' own model and tokenizer, from a waveform [S] to log-probabilities [T, V] and text.

        frames : the number of frames for a number of samples; transformers' outputs may have more, of padding
        """
        refused = f"transformers itself can't open {self.source}", "is the folder complete?"
        extractor = self._opened("AutoFeatureExtractor", *refused)
        model = self._opened("AutoModelForCTC", *refused, dtype=torch.float32).eval()
        adapted = self.settings.config.get("add_adapter")
        tokenizer = self.tokenizer
        silent = [tokenizer.convert_ids_to_tokens(index) for index in self.tokens.silent]
        if getattr(tokenizer, "do_lower_case", False):
            silent = [token.lower() for token in silent]

        @torch.no_grad()
        def run(signal: np.ndarray) -> tuple[np.ndarray, str]:
            try:
                inputs = extractor(signal, sampling_rate=self.settings.sample_rate, return_tensors="pt")
                if adapted and "input_features" in inputs:  # without padding, which an adapter would see
                    inputs = {name: value[:, :int(inputs["attention_mask"].sum())] for name, value in inputs.items()}
                scores = model(**inputs).logits[0, :frames(len(signal))].log_softmax(-1)
                text = tokenizer.decode(scores.argmax(-1).tolist(), clean_up_tokenization_spaces=False)
            except Exception as error:  # of any kind, if its files don't fit each other
                raise SbkitError("pretrained-mismatch",
                                 f"transformers itself can't run {self.source}: {summary(error)}",
                                 value=self.source,
                                 hint="are its config.json and preprocessor_config.json of one model?") from error
            for token in silent:
                text = text.replace(token, "")
            return scores.numpy(), text

        return run

    def tensors(self, shapes: bool = False) -> dict[str, Tensor]:
        """Return the tensors of the encoder, named ``encoder.*``, and of the head, named ``head.*``.

        shapes : only their shapes, as meta tensors
        """
        heads = {name: f"head.{part}" for part, name in self.head().items()}
        names = {name: heads.get(name, f"encoder.{name}") for name in self.files.shapes}
        tensors = {new: torch.empty(self.files.shapes[name], device="meta") if shapes else self.files[name]
                   for name, new in names.items()}
        tensors["head.weight"] = tensors["head.weight"].flatten(1)  # a convolution's, in some families
        return tensors


def _check_entries(values: object, path: Path, rows: int) -> None:
    """Raise if a tokenizer's file has a list or an object of far more entries than a model of ``rows`` tokens has."""
    most = 4 * rows + _MORE_TOKENS
    unchecked = [values]
    while unchecked:
        value = unchecked.pop()
        if not isinstance(value, (dict, list)):
            continue
        if len(value) > most:
            raise SbkitError("pretrained-mismatch", f"{path} has {len(value):,} entries for a model of {rows:,} tokens",
                             file=path, hint="are its tokenizer and its weights of the same model?")
        if isinstance(value, list):
            unchecked += value
        else:
            unchecked += [item for key, item in value.items() if key != "merges"]
