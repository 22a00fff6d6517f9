"""SECURITY.md claims no more than the tests try."""

import os
import subprocess
import sys

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


def test_no_runtime_reports_to_its_maker():
    code = "import sbkit, onnxruntime, os; print(os.environ['ORT_DISABLE_TELEMETRY'])"
    environment = {name: value for name, value in os.environ.items() if name != "ORT_DISABLE_TELEMETRY"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout == "1\n", done.stderr
