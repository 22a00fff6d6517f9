"""A finished run, and the recording of all its utterances."""

import pytest
import run_folders


@pytest.fixture
def wav(tmp_path):
    return run_folders.sound(tmp_path / "sound.wav")


@pytest.fixture
def run(tmp_path, wav):
    return run_folders.finished_run(tmp_path / "run", run_folders.scored(wav=wav))
