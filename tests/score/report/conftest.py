"""A finished run; the recordings of its test are gone, so that none is encoded."""

import pytest
import run_folders


@pytest.fixture
def run(tmp_path):
    return run_folders.finished_run(tmp_path / "run", run_folders.scored())
