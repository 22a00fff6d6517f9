"""The generated pages of docs/reference are what the code says."""

import pytest

from sbkit.tasks.codec import Codec
from sbkit.tasks.ctc import CTC
from tools import keys_page


@pytest.mark.parametrize("name", ["keys", "commands", "python"])
def test_the_page_is_what_would_be_made(name):
    made = getattr(keys_page, f"{name}_page")()
    assert (keys_page.FOLDER / f"{name}.md").read_text(encoding="utf-8") == made, "run make docs"


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
