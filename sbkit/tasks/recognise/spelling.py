"""How a recogniser writes its tokens as words: in validation and tests, and in the bundle that is exported of it."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sbkit.data.manifest import Manifest
from sbkit.decode.spans import WORD_START, Spelling
from sbkit.tasks.recognise.keys import EncoderKeys

if TYPE_CHECKING:
    from sbkit.tasks.recognise.acoustic_model import AcousticModel

#: The share of texts with a space above which spaces separate words, and how many texts are looked at.
_SPACED, _TEXTS = 0.1, 1000
#: Scripts that are written without spaces between words, as the names of their characters in Unicode begin.
_WITHOUT_SPACES = ("CJK", "HIRAGANA", "KATAKANA", "THAI", "LAO", "KHMER", "MYANMAR", "TIBETAN")


def frame_seconds(model: AcousticModel, keys: EncoderKeys) -> float:
    """Return the seconds between two frames of the encoder."""
    return model.hop_samples * model.subsampling / keys.sample_rate


def spelling_of(model: AcousticModel, keys: EncoderKeys) -> Spelling:
    """Return how a recogniser's tokens are written."""
    tokenizer = keys.tokenizer
    ends = keys.bos_index, keys.eos_index, *tokenizer.silent_ids()
    silent = {keys.blank_index, *(i for i in ends if i is not None and i > 0)}
    return Spelling(tokenizer.pieces(), frame_seconds(model, keys), silent,
                    WORD_START if separates_words(keys.corpus) else None)


def separates_words(corpus: Any) -> bool:  # a Corpus, a Mixture, or one of a user's own
    """Whether the texts that a model learns from, or without them those it is tested on, have spaces between words.

    Without any text it is assumed.
    """
    for split in ("train", "test") if hasattr(corpus, "manifest_path") else ():
        path = Path(corpus.manifest_path(split))
        if not path.is_file():
            continue
        texts = Manifest.open_prepared(path).texts
        places = np.unique(np.linspace(0, len(texts) - 1, min(_TEXTS, len(texts))).astype(np.int64))
        sample = [text for i in places.tolist() if (text := texts[i])]
        if sample:
            return have_spaces(sample)
    return True


def have_spaces(texts: Sequence[str]) -> bool:
    """Whether spaces separate words in texts of a language."""
    if sum(" " in text for text in texts) > _SPACED * len(texts):
        return True
    # Single words, such as keywords, have no spaces either.
    letters = [character for text in texts for character in text if character.isalpha()]
    unspaced = sum(unicodedata.name(letter, "").startswith(_WITHOUT_SPACES) for letter in letters)
    return 2 * unspaced <= len(letters)
