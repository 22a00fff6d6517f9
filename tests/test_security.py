"""SECURITY.md claims no more than the tests try."""

import hostile_files
import tried


def test_the_page_is_short_and_its_table_counts_what_tests_count():
    text, table = tried.PAGE.read_text(encoding="utf-8"), tried.promised()
    assert len(text.split()) < 500
    tests = "".join(path.read_text(encoding="utf-8") for path in tried.PAGE.parent.glob("tests/**/test_*.py"))
    assert set(table) and all(f'tried.record("{what}"' in tests for what in table if what != tried.FILES)
    assert table[tried.FILES][0] <= len(hostile_files.KINDS) and table[tried.FILES][1] <= tried.LONG
    makefile = (tried.PAGE.parent / "Makefile").read_text(encoding="utf-8")
    assert f"SBKIT_HOSTILE_FILES={tried.LONG} " in makefile
