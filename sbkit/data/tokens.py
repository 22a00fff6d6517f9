"""The tokenizer: a SentencePiece model, trained once and stored with a fingerprint of its text and options."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import math
import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import sentencepiece as spm

from sbkit.data.manifest import Column
from sbkit.errors import SbkitError
from sbkit.system import untrusted
from sbkit.system.console import atomic_write
from sbkit.system.schema import POSITIVE, SIZE, Nullable, require

logger = logging.getLogger(__name__)

MODEL_TYPES = ("unigram", "bpe", "char")
BLANK_ID = 0
_MAX_BYTES = 1 << 26  # of a model
ENOUGH_TEXTS = 20_000  # for the frequencies of tokens
_TOO_LARGE = re.compile(r"Vocabulary size too high \(\d+\)\. Please set it to a value <= (\d+)")
_TOO_SMALL = re.compile(r"Vocabulary size is smaller than required_chars\. \d+ vs (\d+)")


def _set_to(size: int | str) -> str:
    """Return the advice to set the vocabulary size, by the recipe's key for it."""
    return f"set output_neurons (which the tokenizer's vocab_size follows) to {size}"


class Tokenizer:
    """Converts text to token ids and back. The constructor reads no file; call :meth:`prepare` or :meth:`load`.

    Ids are as in SpeechBrain: 0 is the unknown piece and also the blank of CTC, 1 begins and 2 ends a sentence.
    :meth:`encode` never returns 0, so a label can't be mistaken for a blank.

    The files are ``<folder>/<vocab_size>_<model_type>.model`` and ``.vocab``, where SpeechBrain's ``SentencePiece``
    looks for them, and ``.json`` with the fingerprint of the text and the options.

    folder : where the files are stored
    vocab_size : entries of the vocabulary, including blank, bos and eos; with ``char`` it follows from the text, so it
        may be None, and a wrong number is an error with the right one (see :meth:`follow`)
    model_type : "unigram", "bpe" or "char"
    character_coverage : share of the characters that get a piece
    characters : characters that get a piece even if they are not in the text
    bos_id, eos_id : ids of the pieces that begin and end a sentence; -1: the model has none
    max_piece_length : longest piece in characters
    split_by_whitespace : False lets a piece span words (languages written without spaces)
    user_defined_symbols : texts that are always one piece
    max_texts : train on at most this many texts, evenly spaced; the characters of all texts are kept
    model : an existing SentencePiece model to use instead of training one
    """

    def __init__(self, folder: str | Path, vocab_size: int | None = None, model_type: str = "unigram",
                 character_coverage: float = 1.0, characters: str = "", bos_id: int = 1, eos_id: int = 2,
                 max_piece_length: int = 10, split_by_whitespace: bool = True,
                 user_defined_symbols: Sequence[str] = (), max_texts: int | None = 2_000_000,
                 model: str | Path | None = None):
        if model_type not in MODEL_TYPES:
            raise SbkitError("bad-value", f"tokenizer: model_type is {model_type!r}",
                             hint=f"use {', '.join(MODEL_TYPES)}", key="tokenizer.model_type", value=model_type)
        require("tokenizer: vocab_size", vocab_size, Nullable(SIZE))
        require("tokenizer: character_coverage", character_coverage, POSITIVE)
        require("tokenizer: max_piece_length", max_piece_length, SIZE)
        require("tokenizer: max_texts", max_texts, Nullable(SIZE))
        if vocab_size is None and model_type != "char" and model is None:
            raise SbkitError("bad-value", f"tokenizer: model_type {model_type} needs a vocab_size",
                             key="tokenizer.vocab_size")
        if character_coverage > 1:
            raise SbkitError("bad-value", f"tokenizer: character_coverage is {character_coverage}",
                             hint="use 0.98 to 1.0", key="tokenizer.character_coverage", value=character_coverage)
        self.folder = Path(folder)
        self.vocab_size = vocab_size
        self.model_type = model_type
        self.character_coverage = float(character_coverage)
        self.characters = characters
        self.bos_id = bos_id
        self.eos_id = eos_id
        self.blank_id = BLANK_ID
        self.max_piece_length = max_piece_length
        self.split_by_whitespace = split_by_whitespace
        self.user_defined_symbols = list(user_defined_symbols)
        self.max_texts = max_texts
        self.model = None if model is None else Path(model)
        self._processor: spm.SentencePieceProcessor | None = None

    # ------------------------------------------------------------------ files

    @property
    def path(self) -> Path:
        """The model file."""
        name = f"{'all' if self.vocab_size is None else self.vocab_size}_{self.model_type}"
        return self.model or self.folder / f"{name}.model"

    def options(self) -> dict[str, Any]:
        """What the model depends on besides the text."""
        names = ("vocab_size", "model_type", "character_coverage", "characters", "bos_id", "eos_id",
                 "max_piece_length", "split_by_whitespace", "user_defined_symbols", "max_texts")
        return {name: getattr(self, name) for name in names}

    def follow(self, texts: Iterable[str]) -> int | None:
        """Set ``vocab_size`` to what the characters of ``texts`` need; return it, or None if nothing changes.

        Only char models that keep all characters change. If there is a model of the old size already, nothing
        changes either, because checkpoints may depend on it.
        """
        if self.model_type != "char" or self.character_coverage < 1 or self.vocab_size is None \
                or self.path.exists():
            return None
        special = 1 + (self.bos_id >= 0) + (self.eos_id >= 0)
        pieces = {"▁", *self.characters, *self.user_defined_symbols, *count_characters(texts)} - {" "}
        if len(pieces) + special == self.vocab_size:
            return None
        self.vocab_size = len(pieces) + special
        return self.vocab_size

    def prepare(self, texts: Iterable[str], grows: bool = False) -> Tokenizer:
        """Train on ``texts``, unless the model on disk was made from the same text and options; then load it.

        In a run of several processes, one of them prepares and the others call :meth:`load` afterwards.

        grows : whether a model that checkpoints depend on is kept when the text has changed, if it can encode all of it
        """
        if self.model is not None:
            return self.load()
        texts = texts if isinstance(texts, Column) else Column(list(texts))
        digest = hashlib.sha256(json.dumps(self.options(), sort_keys=True).encode())
        for lines in texts.lines():
            digest.update(lines)
        fingerprint = digest.hexdigest()
        if self.path.exists():
            stored_fingerprint = self._stored_fingerprint()
            if stored_fingerprint == fingerprint:
                logger.info("tokenizer %s: already trained on this text", self.path)
                return self.load()
            may_keep = grows and stored_fingerprint is not None and self._checkpoint() is not None
            if may_keep and not self.load().coverage(texts):
                logger.info("tokenizer %s: trained on other text, but kept: it can encode this text too", self.path)
                return self
            self._check_replaceable()
            logger.warning("tokenizer %s: its text or options changed, training it again", self.path)
        elif grows:
            checkpoint = self._checkpoint()
            if checkpoint is not None:
                raise SbkitError("corpus-changed", f"the texts now need another tokenizer, {self.path.name}, but "
                                 f"checkpoints in {self.folder} such as {checkpoint.name} were trained with the old "
                                 "one",
                                 hint="leave out the part with new characters, or start a new run from this one: "
                                      "--init_from RUN with another output_folder", file=self.path)
        self._train(texts, fingerprint)
        return self.load()

    def _stored_fingerprint(self) -> str | None:
        """The fingerprint of what the model on disk was trained on; None if that isn't recorded, or not of this model.
        """
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # not trained here, or damaged
            stored = json.loads(self.path.with_suffix(".json").read_text(encoding="utf-8"))
            if hashlib.sha256(self.path.read_bytes()).hexdigest() == stored["model_sha256"]:
                return stored["fingerprint"]
        return None

    def _check_replaceable(self) -> None:
        """Refuse to replace a model that may be the user's own, or that checkpoints depend on."""
        if not self.path.with_suffix(".json").exists():
            raise SbkitError("output-exists", f"{self.path} already exists, and there is no record of what it was "
                             "trained on",
                             hint="remove it to train a new one, or set the tokenizer's `model` to it to use it "
                                  "unchanged", file=self.path)
        checkpoint = self._checkpoint()
        if checkpoint is not None:
            raise SbkitError("corpus-changed", f"{self.path} was trained on other text or with other options, and "
                             f"checkpoints such as {checkpoint.name} were trained with it",
                             hint="start in a new output_folder, or restore text and options", file=self.path)

    def load(self) -> Tokenizer:
        """Load the model file and check that it agrees with the options."""
        try:
            proto = untrusted.read_bytes(self.path, _MAX_BYTES)
        except FileNotFoundError:
            if self.model is not None:
                raise SbkitError("no-such-path", f"tokenizer: model: {self.path}: no such file",
                                 hint="name a SentencePiece model, or leave model out to train one",
                                 file=self.path) from None
            raise SbkitError("not-prepared", f"{self.path}: there is no tokenizer yet",
                             hint="prepare the corpus first (sbkit prepare)", file=self.path) from None
        except OSError as error:
            raise SbkitError("not-readable", f"{self.path}: cannot be read ({error.strerror})",
                             file=self.path) from None
        try:
            processor = spm.SentencePieceProcessor(model_proto=proto)
            size = processor.vocab_size()
        except (RuntimeError, OSError):
            raise SbkitError("bad-tokenizer", f"{self.path} is not a SentencePiece model", file=self.path) from None
        if processor.unk_id() != BLANK_ID:
            raise SbkitError("bad-tokenizer", f"{self.path}: its unknown piece has id {processor.unk_id()}, but must "
                             f"have id {BLANK_ID}, which is CTC's blank too",
                             hint="train a tokenizer with unk_id 0, as SpeechBrain does", file=self.path)
        if self.model is not None:
            self.bos_id = processor.bos_id()
            self.eos_id = processor.eos_id()
        elif (processor.bos_id(), processor.eos_id()) != (self.bos_id, self.eos_id):
            raise SbkitError("bad-tokenizer", f"{self.path}: bos and eos have ids {processor.bos_id()} and "
                             f"{processor.eos_id()}, but the recipe says {self.bos_id} and {self.eos_id}",
                             hint="set bos_index and eos_index to these ids, or delete the file so that a tokenizer "
                                  "that fits is trained", file=self.path)
        if self.vocab_size not in (None, size):
            raise SbkitError("wrong-vocab-size", f"{self.path} has {size} entries, but the recipe says vocab_size "
                             f"{self.vocab_size}", hint=_set_to(size), file=self.path, key="vocab_size",
                             value=self.vocab_size)
        self._processor = processor
        return self

    def check(self, output_neurons: int) -> None:
        """Raise unless a model with ``output_neurons`` outputs fits this vocabulary exactly."""
        if output_neurons != self.size:
            raise SbkitError("wrong-vocab-size", f"output_neurons is {output_neurons}, but the tokenizer {self.path} "
                             f"has {self.size} entries (blank, bos and eos included)",
                             hint=f"set output_neurons to {self.size}", file=self.path, key="output_neurons",
                             value=output_neurons)

    def _checkpoint(self) -> Path | None:
        return next(self.folder.glob("CKPT+*"), None)

    # --------------------------------------------------------------- training

    def _train(self, column: Column, fingerprint: str) -> None:
        rows = np.flatnonzero(pc.not_equal(column.arrow, "").to_numpy(zero_copy_only=False))
        required_chars = self.characters
        # A char model's vocabulary is all characters: the size is a bound beyond them.
        vocab_size = sys.maxunicode + 1 if self.model_type == "char" else self.vocab_size
        if self.max_texts and len(rows) > self.max_texts:
            if self.character_coverage == 1.0:
                required_chars = "".join(sorted({*count_characters(column), *self.characters} - {" "}))
            step = len(rows) / self.max_texts
            rows = rows[[int(i * step) for i in range(self.max_texts)]]
        texts = list(column.take(rows))
        if not any(text.strip() for text in texts):
            raise SbkitError("missing-text", "tokenizer: there is no text to train on",
                             hint="is the train split empty?")
        model = io.BytesIO()
        try:
            spm.SentencePieceTrainer.train(
                sentence_iterator=iter(texts), model_writer=model, model_type=self.model_type,
                character_coverage=self.character_coverage, vocab_size=vocab_size, required_chars=required_chars,
                unk_id=BLANK_ID, bos_id=self.bos_id,
                eos_id=self.eos_id, pad_id=-1, max_sentencepiece_length=self.max_piece_length,
                split_by_whitespace=self.split_by_whitespace, user_defined_symbols=self.user_defined_symbols,
                # The corpus's text rules have normalised the text; more normalisation here would make
                # decode(encode(text)) differ from it.
                normalization_rule_name="identity",
                max_sentence_length=max(10, max(len(text) for text in texts) * 4 + 1),
                minloglevel=2)
        except (RuntimeError, OSError, IndexError) as error:
            if match := _TOO_LARGE.search(str(error)):
                raise SbkitError("wrong-vocab-size", f"tokenizer: vocab_size {self.vocab_size} is too large for this "
                                 "text",
                                 hint=f"a {self.model_type} model of it can have {match[1]} entries at most: "
                                      f"{_set_to(match[1])} or less", key="vocab_size",
                                 value=self.vocab_size) from error
            if match := _TOO_SMALL.search(str(error)):
                raise SbkitError("wrong-vocab-size", f"tokenizer: vocab_size {self.vocab_size} is too small for this "
                                 "text",
                                 hint=f"its characters alone need {match[1]}: {_set_to(match[1])} or more, or lower "
                                      "character_coverage", key="vocab_size", value=self.vocab_size) from error
            raise SbkitError("tokenizer-training-failed", "tokenizer: SentencePiece cannot train on this text "
                             f"({error})") from error
        processor = spm.SentencePieceProcessor(model_proto=model.getvalue())
        if self.vocab_size not in (None, processor.vocab_size()):
            raise SbkitError("wrong-vocab-size", f"tokenizer: vocab_size is {self.vocab_size}, but a char model of "
                             f"this text has exactly {processor.vocab_size()} entries",
                             hint=f"{_set_to(processor.vocab_size())}; for pieces of words, --token_type unigram",
                             key="vocab_size", value=self.vocab_size)
        vocab = "".join(f"{processor.id_to_piece(i)}\t{processor.get_score(i):g}\n"
                        for i in range(processor.vocab_size()))
        stored = {"fingerprint": fingerprint, "options": self.options(), "texts": len(texts),
                  "model_sha256": hashlib.sha256(model.getvalue()).hexdigest()}
        # If the disk is full, all files are written or none. The last one is renamed first: a model without a
        # fingerprint would count as one that wasn't trained here.
        with (atomic_write(self.path, "wb") as model_file, atomic_write(self.path.with_suffix(".vocab")) as vocab_file,
              atomic_write(self.path.with_suffix(".json")) as record_file):
            model_file.write(model.getvalue())
            vocab_file.write(vocab)
            json.dump(stored, record_file, indent=1, ensure_ascii=False)
            for file in (model_file, vocab_file, record_file):
                file.flush()

    # ------------------------------------------------------------------- use

    @property
    def processor(self) -> spm.SentencePieceProcessor:
        """The SentencePiece processor, loaded on first use."""
        if self._processor is None:
            self.load()
        assert self._processor is not None, "load sets it"
        return self._processor

    @property
    def size(self) -> int:
        """The number of entries in the vocabulary, including the blank."""
        return self.processor.vocab_size()

    def __len__(self) -> int:
        return self.size

    def encode(self, text: str) -> list[int]:
        """The ids of a text; characters without a piece are dropped (:meth:`coverage` counts them), so none is 0."""
        return [i for i in self.processor.encode(text) if i != BLANK_ID]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some ids; blank, bos and eos are skipped."""
        silent = (BLANK_ID, self.bos_id, self.eos_id)
        return self.processor.decode([int(i) for i in ids if i not in silent])

    def piece(self, i: int) -> str:
        """The piece with id ``i``, its leading blank written as ``▁``."""
        return self.processor.id_to_piece(int(i))

    def pieces(self) -> list[str]:
        """All pieces in order of their ids."""
        return self.processor.id_to_piece(list(range(self.size)))

    def silent_ids(self) -> list[int]:
        """The ids of pieces that aren't text, such as those that begin and end a sentence."""
        return [i for i in range(self.size) if self.processor.is_control(i)]

    def coverage(self, texts: Iterable[str]) -> Counter[str]:
        """The characters in ``texts`` that have no piece, with counts; empty if all have one."""
        return Counter({char: count for char, count in count_characters(texts).items()
                        if char != " " and BLANK_ID in self.processor.encode(char)})

    def entropy(self, texts: Sequence[str]) -> float:
        """The entropy of single tokens in nats, from their frequencies; estimated from a sample of many texts."""
        stride = max(1, len(texts) // ENOUGH_TEXTS)
        counts = Counter(chain.from_iterable(map(self.encode, texts[::stride])))
        total = counts.total()
        return sum(count / total * math.log(total / count) for count in counts.values())

    def __repr__(self) -> str:
        return f"Tokenizer({str(self.path)!r}, {self.vocab_size} entries, {self.model_type})"


def count_characters(texts: Iterable[str]) -> Counter[str]:
    """How often each character occurs in some texts."""
    column = texts if isinstance(texts, Column) else Column(list(texts))
    counts = np.zeros(sys.maxunicode + 1, np.int64)
    for lines in column.lines():
        codes = np.frombuffer(lines, np.uint8)
        if codes.max(initial=0) > 127:  # otherwise a byte is a character
            codes = np.frombuffer(str(lines, "utf-8").encode("utf-32-le"), np.uint32)
        counts += np.bincount(codes, minlength=len(counts))
    counts[ord("\n")] -= pc.sum(pc.not_equal(column.arrow, "")).as_py() or 0
    return Counter({chr(code): int(counts[code]) for code in np.flatnonzero(counts).tolist()})
