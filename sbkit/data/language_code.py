"""Codes of languages: which a recipe may name, and whether a model's is the one that a client asks for."""

from __future__ import annotations

from sbkit.system.schema import String

#: ISO 639's codes of an undetermined language, and of several.
UNKNOWN = "und"
SEVERAL = "mul"
#: What clients of a server write too: two or three letters, and perhaps a region or script.
LANGUAGE_CODE = String(2, 100, r"[A-Za-z]{2,3}([-_][A-Za-z0-9]+)*", "a code such as en or zh-CN")


def primary(code: str) -> str:
    """The language of a code without its region.

    >>> primary("zh-CN"), primary("pt_BR")
    ('zh', 'pt')
    """
    return code.replace("_", "-").split("-")[0].lower()


def may_be_same(one: str | None, other: str | None) -> bool:
    """Whether two codes may mean the same language; regions don't count, and either may be unknown or several.

    >>> may_be_same("en-GB", "en"), may_be_same("en", "klingon"), may_be_same("mul", "en")
    (True, False, True)
    """
    languages = {primary(code) for code in (one, other) if code}
    return len(languages) < 2 or not languages.isdisjoint({UNKNOWN, SEVERAL})
