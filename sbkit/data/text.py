"""Text normalisation of transcripts by a few rules, which suit all scripts and can be changed in a recipe."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Mapping
from typing import Any

from sbkit.data.language_code import primary
from sbkit.errors import SbkitError

# Characters that people type instead of an apostrophe: curly and full-width quotes, prime, grave and acute accents.
_APOSTROPHE = re.compile("[’‘‛＇′`´]")
# Joiners decide how letters of Persian and Indic scripts connect; inside a word they are part of the spelling.
_JOINERS = "\u200c\u200d"
# Rules may make a text at most this many times longer: those of a downloaded bundle must not fill the memory.
_MAX_GROWTH = 100
# Scripts written without spaces: each character counts as a word.
_UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"  # Thai, Lao, Burmese, Khmer
    "\u3005\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"  # kana, Han
)
_WORD = re.compile(f"[{_UNSPACED}]|[^\\s{_UNSPACED}]+")

# Rules of languages that the defaults would damage. A recipe can override each of them.
LANGUAGES: dict[str, dict[str, Any]] = {
    "az": {"case_pairs": {"I": "ı", "İ": "i"}},
    "tr": {"case_pairs": {"I": "ı", "İ": "i"}},
    "tt": {"keep_punctuation": "'-"},
    "ca": {"keep_punctuation": "'·-"},
    "he": {"keep_punctuation": "'׳״"},
    "yi": {"keep_punctuation": "'׳״"},
    "uz": {"replace": {"o‘": "oʻ", "g‘": "gʻ", "O‘": "Oʻ", "G‘": "Gʻ", "o'": "oʻ", "g'": "gʻ",
                       "O'": "Oʻ", "G'": "Gʻ", "o’": "oʻ", "g’": "gʻ", "O’": "Oʻ", "G’": "Gʻ"}},
}


class TextRules:
    """Rules that turn a transcript into training text.

    Letters, combining marks and digits of every script are kept, white space becomes single blanks, and everything else
    (punctuation, symbols, emoji, control characters) becomes a blank, except for the characters in
    ``keep_punctuation`` and ``keep_anywhere``. The order is: NFC, ``replace``, Unicode form, case, filter.

    unicode : "NFC" (composed characters) or "NFKC" (also folds full-width letters, ligatures, ...)
    case : "lower", "upper" or "keep"
    keep_punctuation : characters kept inside a word, with a letter, mark or digit on both sides; typographic
        apostrophes count as ``'``
    keep_anywhere : characters kept everywhere, such as ``".,?!"``
    alphabet : the characters, besides blanks, that a normalised text may contain; None: all. Texts with other
        characters are left out and counted, never silently stripped; see :meth:`outside`
    replace : texts and their replacements, applied before everything else but composing characters (NFC), so that a
        letter is found however its accent is stored
    case_pairs : upper-case letters and their lower-case ones, for languages that differ from Unicode's default

    >>> TextRules()("« L’été, c’est 'chaud' ! »")
    "l'été c'est chaud"
    >>> TextRules(case="keep", keep_anywhere=".,")("Well-known, isn't it?")
    "Well known, isn't it"
    """

    def __init__(self, unicode: str = "NFC", case: str = "lower", keep_punctuation: str = "'",
                 keep_anywhere: str = "", alphabet: str | None = None,
                 replace: Mapping[str, str] | None = None, case_pairs: Mapping[str, str] | None = None):
        if unicode not in ("NFC", "NFKC"):
            raise SbkitError("bad-value", f"text rules: unicode is {unicode!r}", hint="use NFC or NFKC",
                             key="text.unicode", value=unicode)
        if case not in ("lower", "upper", "keep"):
            raise SbkitError("bad-value", f"text rules: case is {case!r}", hint="use lower, upper or keep",
                             key="text.case", value=case)
        for name, value in (("keep_punctuation", keep_punctuation), ("keep_anywhere", keep_anywhere),
                            ("alphabet", "" if alphabet is None else alphabet)):
            if not isinstance(value, str):
                raise SbkitError("bad-value", f"text rules: {name} is {value!r}",
                                 hint="write the characters as one text", key=f"text.{name}", value=value)
        for name, pairs in (("replace", replace), ("case_pairs", case_pairs)):
            if not isinstance(pairs, (Mapping, type(None))) or any(
                    not isinstance(x, str) or not k for k, v in (pairs or {}).items() for x in (k, v)):
                raise SbkitError("bad-value", f"text rules: {name} is {pairs!r}", hint="map texts to texts",
                                 key=f"text.{name}", value=pairs)
        self.unicode: Any = unicode  # one of the names that unicodedata takes
        self.case = case
        self.keep_punctuation = keep_punctuation
        self.keep_anywhere = keep_anywhere
        self.alphabet = alphabet
        self.replace = dict(replace or {})
        self.case_pairs = dict(case_pairs or {})
        self._table = _CharacterTable(keep_punctuation, keep_anywhere)
        inner = "".join(sorted({*keep_punctuation, *_JOINERS} - set(keep_anywhere)))
        self._inner = re.compile(f"[{re.escape(inner)}]")
        self._replace = {unicodedata.normalize("NFC", old): new for old, new in self.replace.items()}
        upper = {lower: upper for upper, lower in self.case_pairs.items()}
        self._cased = {"lower": self.case_pairs, "upper": upper, "keep": {}}[case]
        self._allowed = None if alphabet is None else frozenset(
            unicodedata.normalize(unicode, alphabet) + " ")  # type: ignore[arg-type]  # it is one of the two

    @classmethod
    def for_language(cls, language: str | None, **overrides: Any) -> TextRules:
        """The rules for a language code (``tr``, ``ca``, ``zh-CN``), with ``overrides`` of single rules."""
        base = LANGUAGES.get(primary(language or ""), {})
        try:
            return cls(**{**base, **overrides})
        except TypeError:
            known = ", ".join(cls().options())
            unknown = next(name for name in overrides if name not in known.split(", "))
            raise SbkitError("unknown-key", f"text rules: unknown rule {unknown!r}", hint=f"rules are {known}",
                             key=f"text.{unknown}") from None

    def options(self) -> dict[str, Any]:
        """The rules as plain data, for fingerprints and reports."""
        return {name: getattr(self, name) for name in
                ("unicode", "case", "keep_punctuation", "keep_anywhere", "alphabet", "replace", "case_pairs")}

    def __repr__(self) -> str:
        return f"TextRules({', '.join(f'{k}={v!r}' for k, v in self.options().items())})"

    def __call__(self, text: str) -> str:
        return self.words(self.fold(text))

    def fold(self, text: str) -> str:
        """Apply the rules up to the case; punctuation is kept."""
        max_length = _MAX_GROWTH * (len(text) + 1)
        text = text if text.isascii() else unicodedata.normalize("NFC", text)
        text = _APOSTROPHE.sub("'", _replaced(text, self._replace, max_length))
        if not text.isascii():
            text = unicodedata.normalize(self.unicode, text)
        text = _replaced(text, self._cased, max_length)
        if self.case == "lower":
            text = text.lower()
        elif self.case == "upper":
            text = text.upper()
        return text

    def words(self, text: str) -> str:
        """Filter a folded text: replace everything that the rules don't keep by single blanks."""
        text = text.translate(self._table)
        text = self._inner.sub(_keep_inside_words, text)
        text = " ".join(text.split())
        return text if text.isascii() else unicodedata.normalize(self.unicode, text)

    def outside(self, text: str) -> Counter[str]:
        """The characters of a normalised text that are not in the alphabet, with counts."""
        if self._allowed is None or self._allowed.issuperset(text):
            return Counter()
        return Counter(char for char in text if char not in self._allowed)


def _replaced(text: str, pairs: Mapping[str, str], max_length: int) -> str:
    for old, new in pairs.items():
        text = text.replace(old, new)
        if len(text) > max_length:
            raise SbkitError("bad-value", f"text rules: a text becomes more than {_MAX_GROWTH} times as long",
                             hint="shorten their replacements", key="text")
    return text


class AsWritten(TextRules):
    """Rules that only convert texts to Unicode's form NFC and single blanks."""

    def __call__(self, text: str) -> str:
        return " ".join(unicodedata.normalize("NFC", text).split())

    def options(self) -> dict[str, Any]:
        return super().options() | {"as_written": True}


class NormalizedBefore(AsWritten):
    """Rules that texts have been normalised by already: not applied again, since a replacement may match once more."""

    def options(self) -> dict[str, Any]:
        return TextRules.options(self)


class _CharacterTable(dict[int, str | None]):
    """A table for ``str.translate`` that decides about a character when it occurs for the first time."""

    def __init__(self, inner: str, anywhere: str):
        super().__init__()
        for char in inner + anywhere + _JOINERS:
            self[ord(char)] = char

    def __missing__(self, code: int) -> str:
        char = chr(code)
        if _is_word(char):
            result = char
        elif unicodedata.category(char) == "Cf" and char != "\u200b":
            result = ""  # soft hyphens, direction marks: invisible, inside words; U+200B separates words
        else:
            result = " "
        self[code] = result
        return result


def _is_word(char: str) -> bool:
    return unicodedata.category(char)[0] in "LMN"


def _keep_inside_words(match: re.Match[str]) -> str:
    """Replace inner punctuation or a joiner: it is kept between two characters of a word."""
    text = match.string
    at = match.start()
    char = match[0]
    if 0 < at < len(text) - 1 and _is_word(text[at - 1]) and _is_word(text[at + 1]):
        return char
    return "" if char in _JOINERS else " "


def count_words(text: str) -> int:
    """The number of words, separated by blanks; in scripts without spaces each character counts as one.

    >>> count_words("three small words"), count_words("三个字")
    (3, 3)
    """
    return len(_WORD.findall(text))
