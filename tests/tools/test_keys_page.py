"""docs/keys.md is what the classes declare."""

from sbkit.tasks.ctc import CTC
from tools import keys_page


def test_the_page_is_what_would_be_made():
    assert keys_page.PAGE.read_text(encoding="utf-8") == keys_page.page(), "run make docs"


def test_each_key_stands_there_once():
    page = keys_page.page()
    assert [name for name in CTC.Keys.declared() if page.count(f"\n| `{name}` |") != 1] == []
