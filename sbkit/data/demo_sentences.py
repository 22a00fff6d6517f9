"""Texts of the demo corpus: small grammars for some languages, and lists of numbers for all others.

A grammar is a table of slots; ``expand`` picks one alternative of a slot and fills the slots named in it. Each grammar
yields more than 100,000 sentences over 90 to 150 words: too many to learn by heart, so a model has to recognise words.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

Grammar = Mapping[str, Sequence[str]]


def _read(file: Path) -> dict[str, Grammar]:
    return {name: {slot: tuple(map(str.strip, text.split("|"))) for slot, text in slots.items()}
            for name, slots in yaml.safe_load(file.read_text(encoding="utf-8")).items()}


#: By espeak-ng's name of the language.
GRAMMARS = _read(Path(__file__).with_suffix(".yaml"))


def numbers_grammar(sayable: Sequence[int]) -> Grammar:
    """A grammar of number lists, for a language that has no sentences here.

    espeak-ng reads digits as number words of the language, and the transcript keeps the digits, so no knowledge of its
    script is needed. ``sayable`` are the numbers with a pronunciation of their own.
    """
    numbers = [f"{number}" for number in sayable]
    return {"sentence": tuple(", ".join(["{n}"] * count) + "." for count in (3, 4, 5)), "n": tuple(numbers)}


def expand(grammar: Grammar, rng: random.Random, slot: str = "sentence") -> str:
    """A random sentence of the grammar, with a capital letter, and ``an`` before vowels in English."""
    text = _fill(grammar, rng, slot)
    if grammar is GRAMMARS["en"]:
        text = re.sub(r"\ba (?=[aeiou])", "an ", text)
    first = next((i for i, char in enumerate(text) if char.isalnum()), 0)
    return text[:first] + text[first].upper() + text[first + 1:]


def _fill(grammar: Grammar, rng: random.Random, slot: str) -> str:
    return re.sub(r"\{(\w+)\}", lambda match: _fill(grammar, rng, match.group(1)), rng.choice(grammar[slot]))


def words(grammar: Grammar) -> set[str]:
    """All words of the grammar in lower case; for Chinese, which has no spaces, all phrases."""
    texts = " ".join(text for alternatives in grammar.values() for text in alternatives)
    return set(re.findall(r"[^\s.,?¿؟।。？]+", re.sub(r"\{\w+\}", " ", texts).lower()))
