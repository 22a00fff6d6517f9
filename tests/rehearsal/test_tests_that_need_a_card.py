"""The tests that need a card pass on cards that compute nothing, except those that judge what was computed."""

import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

TESTS = Path(__file__).resolve().parents[1]


@pytest.mark.long
@pytest.mark.timeout(900)  # a minute on a core that is free
@pytest.mark.skipif(torch.version.cuda is None, reason="torch is a build for CPUs here, without its CUDA code")
def test_what_is_marked_gpu_passes_on_two_cards_that_compute_nothing(tmp_path):
    # Collecting all other files would take longer than running these.
    files = [str(path) for path in sorted(TESTS.rglob("test_*.py")) if re.search(r"mark\.gpu", path.read_text())]
    report = tmp_path / "junit.xml"
    done = subprocess.run([sys.executable, "-m", "sbkit.rehearsal.fake_gpu", "--cards", "2xH100", "--",
                           sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider",
                           f"--junitxml={report}", *files], cwd=TESTS.parent, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout[-8000:]}{done.stderr[-2000:]}"
    cases = list(ElementTree.parse(report).iter("testcase"))
    skipped = [str(each.get("message")) for case in cases for each in case.iter("skipped")]
    assert len(cases) - len(skipped) >= 20
    assert all("this one computes nothing" in why for why in skipped), skipped
