"""docs/reference/keys.md is what the classes declare."""

import pytest

from sbkit.tasks.codec import Codec
from sbkit.tasks.ctc import CTC
from tools import keys_page


def test_the_page_is_what_would_be_made():
    assert keys_page.PAGE.read_text(encoding="utf-8") == keys_page.page(), "run make docs"


@pytest.mark.parametrize("task", [CTC, Codec])
def test_each_key_of_a_task_stands_once_in_the_chapter_of_the_class_that_declares_it(task):
    page = keys_page.page()
    chapters = {chapter.keys.__name__: page.split(f"## {chapter.title}\n")[1].split("\n## ")[0]
                for chapter in keys_page.CHAPTERS}
    assert [name for name, known in task.Keys.declared().items()
            if chapters[known.by].count(f"\n| `{name}` |") != 1] == []
