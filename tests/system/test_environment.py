"""A torch and a torchaudio that do not load together are told apart before they are imported."""

from importlib import metadata

import pytest

from sbkit.errors import SbkitError
from sbkit.system.environment import check_torch_exports, check_torch_pair, describe, inventory


def test_the_installed_pair_and_other_builds_of_one_release_are_accepted():
    check_torch_pair()
    check_torch_pair("2.11.0+cu130", "2.11.1+cpu")


def test_two_releases_are_an_error_with_what_to_install():
    with pytest.raises(SbkitError) as caught:
        check_torch_pair("2.13.0+cpu", "2.11.0")
    message = str(caught.value)
    assert "torch 2.13.0+cpu and torchaudio 2.11.0" in message and "pip install 'torchaudio==2.13.*'" in message
    assert "\n" not in message


@pytest.mark.parametrize("cores, told", [(1, ", 1 core"), (2, ", 2 cores")])
def test_versions_and_hardware(monkeypatch, cores, told):
    monkeypatch.setattr("sbkit.system.environment.usable_cores", lambda: cores)
    facts = describe()
    assert facts["torch"].startswith("2.") and facts["cpu"].endswith(told)


def test_an_exporter_that_is_too_old_is_an_error():
    check_torch_exports("2.9.1+cu128")
    with pytest.raises(SbkitError, match=r"exporter of torch 2\.8\.0 fails"):
        check_torch_exports("2.8.0")


def test_the_inventory_is_of_this_interpreters_packages_whatever_a_shell_would_find(monkeypatch):
    monkeypatch.setenv("PATH", "")
    lines = inventory().splitlines()
    assert f"torch=={metadata.version('torch')}" in lines and f"pytest=={pytest.__version__}" in lines
    assert lines[0] == "SpeechBrain system description" and lines[lines.index("Git revision:") + 1] == "none"
