"""What each code of an error or a finding means: ``sbkit explain CODE``, and the page of the reference.

The texts are the Markdown files beside this one, one for each part of sbkit. A section explains one code::

    ## missing-column

    What is wrong, in a sentence or two.

    **Why it matters.** What would happen otherwise.

    **Example.** What shows it, as a block of code or an indented line.

    **What to do.** The remedy.
"""

from __future__ import annotations

import difflib
import re
import textwrap
from dataclasses import asdict, dataclass
from importlib import resources

from sbkit.errors import SbkitError, shown

_PARTS = ("Why it matters.", "Example.", "What to do.")


@dataclass(frozen=True)
class Explanation:
    """The meaning of a code."""

    code: str
    area: str
    """The title of the file that it stands in."""
    what: str
    why: str
    example: str
    remedy: str
    text: str
    """All of it in Markdown."""

    def as_dict(self) -> dict[str, str]:
        """Its fields for programs."""
        return asdict(self)


def all_explanations() -> dict[str, Explanation]:
    """Read the explanations of all codes, by code, in the order of their files."""
    explanations: dict[str, Explanation] = {}
    folder = resources.files(__name__)
    for file in sorted(folder.iterdir(), key=lambda file: file.name):
        if not file.name.endswith(".md"):
            continue
        for explanation in parse(file.read_text(encoding="utf-8")):
            assert explanation.code not in explanations, f"{explanation.code} is explained twice"
            explanations[explanation.code] = explanation
    return explanations


def parse(text: str) -> list[Explanation]:
    """Parse a file of explanations: a title, and a section for each code."""
    title, *sections = re.split(r"^## ", text, flags=re.MULTILINE)
    area = title.strip().removeprefix("# ").partition("\n")[0]
    return [_parse_section(section, area) for section in sections]


def explanation(code: str) -> Explanation:
    """Return the explanation of a code; an unknown one is an error with the nearest."""
    explanations = all_explanations()
    if code not in explanations:
        code = code.replace("_", "-")  # as the server writes the codes of other commands, in OpenAI's spelling
    if code not in explanations:
        near = difflib.get_close_matches(code, explanations, n=1)
        raise SbkitError("unknown-code", f"there is no code {shown(code)}", value=code,
                         hint=(f"did you mean {near[0]}? " if near else "") + "sbkit explain lists all codes")
    return explanations[code]


def _parse_section(section: str, area: str) -> Explanation:
    code, _, body = section.partition("\n")
    labels = "|".join(re.escape(label) for label in _PARTS)
    what, *labelled = re.split(rf"^\*\*({labels})\*\*", body, flags=re.MULTILINE)
    found_labels = tuple(labelled[::2])
    assert found_labels == _PARTS, f"the explanation of {code} has {found_labels}, not {_PARTS}"
    why, example, remedy = (textwrap.dedent(part).strip() for part in labelled[1::2])
    return Explanation(code.strip(), area, what.strip(), why, example, remedy, text=f"## {section.strip()}")
