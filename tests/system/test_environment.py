"""A torch and a torchaudio that do not load together are told apart before they are imported."""

from importlib import metadata
from pathlib import Path

import pytest
import torch
from refusals import refused

from sbkit.system import untrusted
from sbkit.system.environment import TORCH, check_torch, describe, inventory


def test_the_installed_pair_and_other_builds_of_one_release_are_accepted():
    check_torch()
    check_torch("2.11.1+cu130", "2.11.0+cpu")


@pytest.mark.parametrize("torch, torchaudio, wanted", [
    ("2.13.0+cpu", "2.11.0", "2.13.0"), ("2.11.0", "2.11.1", "2.11.0")])
def test_two_releases_are_an_error_with_what_to_install(torch, torchaudio, wanted):
    with refused("torchaudio-mismatch", wording=False) as caught:
        check_torch(torch, torchaudio)
    message = str(caught.value)
    assert f"torch {torch} and torchaudio {torchaudio}" in message and f"pip install 'torchaudio=={wanted}'" in message
    assert "\n" not in message


@pytest.mark.parametrize("cores, told", [(1, ", 1 core"), (2, ", 2 cores")])
def test_versions_and_hardware(monkeypatch, cores, told):
    monkeypatch.setattr("sbkit.system.environment.usable_cores", lambda: cores)
    facts = describe()
    assert facts["torch"].startswith("2.") and facts["cpu"].endswith(told)


def test_a_torch_that_a_file_of_weights_could_corrupt_is_an_error_and_the_range_is_that_of_setup_cfg():
    check_torch("2.10.0+cpu", "2.10.0")
    with refused("wrong-version") as error:
        check_torch("2.9.1+cu128", "2.9.1")
    wanted = [line.strip().replace(" ", "") for line in (Path(__file__).parents[2] / "setup.cfg").open()
              if line.strip().startswith("torch")]
    assert " ".join(f"'{each}'" for each in wanted[:2]) == TORCH and TORCH in error.value.hint


@pytest.mark.parametrize("versions", [("nightly", "2.11.0"), ("2.11.0", "main"), ("2", "2")])
def test_a_version_without_a_release_is_named(versions):
    with refused("wrong-version"):
        check_torch(*versions)


def test_weights_are_read_whatever_torchaudio_is_installed(tmp_path, monkeypatch):
    torch.save({"a": torch.ones(2)}, tmp_path / "a.pt")
    monkeypatch.setattr(metadata, "version", lambda name: "2.3.0")
    with refused("wrong-version"):
        check_torch()
    assert untrusted.load_tensors(tmp_path / "a.pt")["a"].sum() == 2


def test_the_inventory_is_of_this_interpreters_packages_whatever_a_shell_would_find(monkeypatch):
    monkeypatch.setenv("PATH", "")
    lines = inventory().splitlines()
    assert f"torch=={metadata.version('torch')}" in lines and f"pytest=={pytest.__version__}" in lines
    assert lines[0] == "SpeechBrain system description" and lines[lines.index("Git revision:") + 1] == "none"
