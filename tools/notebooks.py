"""Writes the tutorials as notebooks, whose cells run the pages' commands: ``python -m tools.notebooks FOLDER``."""

from __future__ import annotations

import argparse
import json
import re
import textwrap
from pathlib import Path

TUTORIALS = Path(__file__).parents[1] / "docs" / "tutorials"
#: A fenced block, or indented lines after an empty one.
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```\n|(?<=\n\n)((?: {4}[^\n]*\n|\n(?= {4}))+)", re.M | re.S)
#: What a cell runs; what waits for somebody, such as a server, is left to a terminal.
_COMMAND = re.compile(r"(?!sbkit (?:serve|listen))(?:sbkit|pip|python|torchrun|make) ")


def notebook(page: str) -> dict[str, object]:
    """A page as a notebook: files that it writes out are written, Python and commands run, all else is text."""
    cells: list[dict[str, object]] = []
    end = 0

    def text(part: str) -> None:
        if part.strip():
            cells.append({"cell_type": "markdown", "metadata": {}, "source": part.strip("\n")})

    for block in _BLOCK.finditer(page):
        language, fenced, indented = block.groups()
        body = textwrap.dedent(fenced if indented is None else indented).strip()
        name = re.match(r"# (\S+\.(?:py|yaml))\n", body)
        if name:
            source = f"%%writefile {name[1]}\n{body[name.end():]}"
        elif not language and all(_COMMAND.match(line) for line in body.split("\n")):
            source = re.sub(r"^", "!", body, flags=re.M)
        elif language == "python":
            source = body
        else:
            continue  # stays text
        text(page[end:block.start()])
        cells.append({"cell_type": "code", "metadata": {}, "source": source, "outputs": [], "execution_count": None})
        end = block.end()
    text(page[end:])
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    cells = [{"id": f"cell-{number}", **cell} for number, cell in enumerate(cells)]
    return {"nbformat": 4, "nbformat_minor": 5, "metadata": {"kernelspec": kernel}, "cells": cells}


def main() -> None:
    """Write all of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", metavar="FOLDER", type=Path)
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for page in sorted(TUTORIALS.glob("*.md")):
        written = json.dumps(notebook(page.read_text(encoding="utf-8")), indent=1, ensure_ascii=False)
        (folder / f"{page.stem}.ipynb").write_text(written + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
