"""The tutorials as notebooks: nothing of a page is lost, and its commands and files are cells."""

import re

import pytest

from tools import notebooks

PAGES = sorted(notebooks.TUTORIALS.glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_notebook_has_all_of_its_page_in_order(page):
    text = page.read_text(encoding="utf-8")
    cells = notebooks.notebook(text)["cells"]
    words = " ".join(re.sub(r"^(?:!|%%writefile )", "", cell["source"], flags=re.M) for cell in cells).split()
    assert words == re.sub(r"^```\w*$\n?|^# (?=\S+\.(?:py|yaml)$)", "", text, flags=re.M).split()


def test_commands_run_and_files_are_written_but_a_server_is_left_to_a_terminal():
    found = notebooks.notebook("# Title\n\nDo\n\n    sbkit check a.yaml\n    sbkit train a.yaml\n\nand\n\n"
                               "```python\n# mine.py\nprint(1)\n```\n\n    sbkit serve bundle\n\n"
                               "```python\nprint(2)\n```\n")
    assert [(cell["cell_type"], cell["source"]) for cell in found["cells"]] == [
        ("markdown", "# Title\n\nDo"), ("code", "!sbkit check a.yaml\n!sbkit train a.yaml"), ("markdown", "and"),
        ("code", "%%writefile mine.py\nprint(1)"), ("markdown", "    sbkit serve bundle"), ("code", "print(2)")]
