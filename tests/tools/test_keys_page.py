"""The generated pages of docs/reference are what the code says."""

import pytest

from sbkit.tasks.codec import Codec
from sbkit.tasks.ctc import CTC
from tools import findings_page, keys_page


@pytest.mark.parametrize("name", ["keys", "commands", "python"])
def test_the_page_is_what_would_be_made(name):
    made = getattr(keys_page, f"{name}_page")()
    assert (keys_page.FOLDER / f"{name}.md").read_text(encoding="utf-8") == made, "run make docs"


def test_the_page_of_findings_is_what_would_be_made():
    assert findings_page.PAGE.read_text(encoding="utf-8") == findings_page.findings_page(), "run make docs"


def test_each_code_that_is_used_is_explained_and_each_that_is_explained_is_used():
    assert findings_page.problems() == []


def test_each_way_of_giving_a_code_is_found(tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    (package / "errors.py").write_text(SOURCE)
    used = findings_page.used_codes(package)
    assert sorted(used) == ["by-base", "by-branch", "by-constant", "by-default", "by-field", "by-function", "by-name",
                            "by-position", "by-table", "by-variable", "other-branch"]
    assert used["by-position"] == ["package/errors.py:12"]


#: Each kind of place of a code, and words that are none.
SOURCE = '''
CONSTANT = "by-constant"
TABLE = {1: "by-table"}
class Problem(Exception):
    def __init__(self, code, message): ...
class Inherits(Problem): ...
class Own(Problem):
    def __init__(self, path): super().__init__("by-base", path)
class Finding(NamedTuple):
    severity: str
    code: str
Problem("by-position", "a message")
Inherits(CONSTANT, "message")
Problem(message="no-code", code="by-name")
Problem(TABLE[1], "message")
Problem("by-branch" if TABLE else "other-branch", "message")
Finding("no-code", "by-field")
Own("no-code")
def refuse(self, path, code="by-default"): ...
self.refuse(path, "by-function")
code = "by-variable"
logger.error("A message")
print("no-code")
'''


def test_the_arguments_of_what_recipes_build_are_listed_with_their_defaults():
    page = keys_page.keys_page()
    for row in ("| `min_duration`, `max_duration` | null | seconds; ", "| `step_seconds` | null | audio of one ",
                "| `warmup` | 0.1 | Steps until `peak`; ", "| `orthogonalize_every` | 1 | The momentum ",
                "| `limit_splits` | ['train'] | "):
        assert row in page


def test_what_bundles_are_used_with_is_listed():
    page = keys_page.python_page()
    assert "`load(" in page and "| `transcribe(" in page and "### codes.Codes" in page


def test_each_option_of_a_command_is_listed():
    page = keys_page.commands_page()
    assert "| `--max-wer PERCENT` | exit with 1 if a WER is higher |" in page and "`sbkit evaluate RUN`" in page


@pytest.mark.parametrize("task", [CTC, Codec])
def test_each_key_of_a_task_stands_once_in_the_chapter_of_the_class_that_declares_it(task):
    page = keys_page.keys_page()
    chapters = {chapter.keys.__name__: page.split(f"## {chapter.title}\n")[1].split("\n## ")[0]
                for chapter in keys_page.CHAPTERS}
    assert [name for name, known in task.Keys.declared().items()
            if chapters[known.by].count(f"\n| `{name}` |") != 1] == []
