"""What the doctor says of this machine, and of ones where something is broken, too old, twice there, or too little."""

import errno
import json
import os
import platform
import shutil
import subprocess
import sys
import time

import pytest

from sbkit import doctor
from sbkit.cli import main
from sbkit.doctor import MachineFinding
from sbkit.system import disk

TORCH = {"version": "2.11.0+cu130", "cuda": "13.0", "hip": None}
H100 = {"name": "NVIDIA H100", "capability": [9, 0], "total": 80 << 30, "free": 79 << 30}
SMI = "| NVIDIA-SMI 550.54.14    Driver Version: 550.54.14    CUDA Version: 12.4     |\n"


@pytest.fixture
def examined(monkeypatch):
    """Examine a machine whose libraries say what a test gives, with these versions of packages; findings by name."""
    def examine(packages=None, kernels=None, **said):
        parts = {"torch": TORCH, "cards": {"cards": [], "architectures": []}, "torchaudio": {"version": "2.11.0"},
                 "kernels": {"why_not": kernels}, "onnxruntime": {"providers": ["CPUExecutionProvider"]}} | said
        monkeypatch.setattr(doctor, "ask", lambda library: parts)
        if packages is not None:
            found = {name.replace("_", "-"): version for name, version in packages.items()}
            for module in (doctor, sys.modules["sbkit.system.environment"]):
                monkeypatch.setattr(module, "version_of", found.get)
            monkeypatch.setattr(doctor, "onnxruntimes", lambda: {
                name: version for name, version in found.items() if name.startswith("onnxruntime")})
        return {finding.what: finding for finding in doctor.examine()}
    return examine


@pytest.mark.slow
def test_the_table_has_80_columns_and_torch_is_not_imported():
    code = "import sys; from sbkit.cli import main; sys.exit(main(['doctor']) or 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | {"COLUMNS": "80"}, capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    for what in ("Python", "packages", "torch", "torchaudio", "NVIDIA driver", "onnxruntime", "C compiler", "cores",
                 "memory", "shared memory", "open files", "locale", "temporary", "output"):
        assert any(f"  {what}  " in line for line in lines), what
    assert lines[-1].startswith("no errors")


def test_an_error_ends_with_1_and_says_what_to_do(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "examine", lambda: [
        MachineFinding("torch", "2.11.0, built for CUDA 13.0"),
        MachineFinding("NVIDIA driver", "550.54, for CUDA up to 12.4; torch is built for CUDA 13.0, which needs 580 or "
                       "newer", "old-driver", "update the driver to 580, or install a torch for an older CUDA", True),
        MachineFinding("shared memory", "/dev/shm: 0.1 GiB free", "little-shared-memory",
                       "docker run --shm-size=8g, or fewer workers")])
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["doctor"]) == 1
    assert capsys.readouterr().out == """\
ok       torch          2.11.0, built for CUDA 13.0
error    NVIDIA driver  550.54, for CUDA up to 12.4; torch is built for CUDA
                        13.0, which needs 580 or newer
                        -> update the driver to 580, or install a torch for an
                           older CUDA [old-driver]
warning  shared memory  /dev/shm: 0.1 GiB free
                        -> docker run --shm-size=8g, or fewer workers
                           [little-shared-memory]

1 error, 1 warning
"""
    assert main(["doctor", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["errors"] == 1
    assert [(each["verdict"], each["code"]) for each in report["findings"]] == [
        ("ok", ""), ("error", "old-driver"), ("warning", "little-shared-memory")]


def test_a_mixed_pair_is_an_error_with_what_to_install(examined):
    found = examined({"torch": "2.13.0", "torchaudio": "2.11.0"}, torch=TORCH | {"version": "2.13.0"},
                     torchaudio={"error": "OSError: undefined symbol"})
    assert found["torch pair"].is_error and "torchaudio==2.13.0" in found["torch pair"].fix
    assert found["torch"].verdict == "ok"
    assert found["torchaudio"].is_error and found["torchaudio"].found.endswith("OSError: undefined symbol")
    lost = {"error": "ModuleNotFoundError: torch"}
    found = examined(torch=lost, cards=lost, kernels=lost, torchaudio=lost)
    assert found["torch"].is_error and found["NVIDIA driver"].verdict == "ok"


@pytest.mark.parametrize("signum, name", [(11, "SIGSEGV"), (35, "signal 35")])
def test_a_torch_that_ends_its_process_is_a_line(monkeypatch, signum, name):
    doctor.ask.cache_clear()
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, -signum, "", ""))
    assert doctor.ask("torch")["torch"] == {"error": f"its process was ended by {name}"}
    doctor.ask.cache_clear()


@pytest.mark.parametrize("version, verdict", [("3.10.14", "warning"), ("3.10.15", "ok"), ("3.11.9", "warning"),
                                              ("3.11.10", "ok"), ("3.12.0", "ok"), ("3.9.1", "error")])
def test_a_python_whose_forked_processes_may_hang_is_a_warning(examined, monkeypatch, version, verdict):
    monkeypatch.setattr(platform, "python_version", lambda: version)
    found = examined()["Python"]
    assert found.verdict == verdict and ("fork" in found.fix) == (verdict == "warning")


def test_builds_of_onnxruntime(examined):
    both = examined({"onnxruntime": "1.23.0", "onnxruntime-gpu": "1.23.0"})["onnxruntime"]
    assert both.is_error and both.fix.startswith("pip uninstall -y onnxruntime onnxruntime-gpu")
    one = examined({"onnxruntime": "1.23.0"}, cards={"cards": [H100], "architectures": []})["onnxruntime"]
    assert one.found == "onnxruntime 1.23.0, built for CPU" and "onnxruntime-gpu" in one.fix


def test_packages_that_are_missing_or_too_old_are_named_with_the_range(examined, monkeypatch):
    wanted = ["numpy>=1.26", "tqdm>=4.66", "soxr>=0.5", 'onnx>=1.21; extra == "export"']
    monkeypatch.setattr(doctor.metadata, "requires", lambda _: wanted)
    found = examined({"sbkit": "0.1.0", "numpy": "1.20", "tqdm": "4.70"})
    assert found["numpy"] == MachineFinding("numpy", "1.20", "wrong-version", "pip install 'numpy>=1.26'", True)
    assert found["soxr"] == MachineFinding("soxr", "not installed", "missing-package", "pip install 'soxr>=0.5'", True)
    assert found["packages"].found.endswith("1 of its 3 requirements are met: tqdm 4.70")
    assert examined({})["packages"].fix == "pip install -e . in its folder, or make install"


def test_without_a_compiler_triton_and_the_kernels_say_what_they_miss(examined, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    found = examined(kernels="there is no C compiler")
    assert [found[what].verdict for what in ("C compiler", "CPU kernels", "Triton")] == ["warning"] * 3
    assert found["C compiler"].fix == "apt install gcc" and "apt install gcc" in found["Triton"].fix


@pytest.mark.parametrize("said, visible, verdict, expected, fix", [
    ({}, None, "error", "torch is built for CUDA 13.0, which needs 580 or newer", "whl/cu126"),
    ({"torch": TORCH | {"cuda": "12.8"}}, None, "error", "torch finds no card that works", "--gpus all"),
    ({}, "", "warning", "CUDA_VISIBLE_DEVICES='' hides all cards", "unset"),
    ({}, "-1", "warning", "CUDA_VISIBLE_DEVICES='-1' hides all cards", "unset"),
    ({"torch": TORCH | {"cuda": None}}, None, "error", "this torch is built without CUDA", "pip uninstall -y"),
    ({"cards": {"error": "CUDA error: all devices are busy"}}, None, "error", "can't use the cards: CUDA error",
     "another process"),
    ({"torch": {"error": "ImportError"}}, None, "ok", "550.54.14", ""),
    ({"cards": {"cards": [H100], "architectures": ["sm_90"]}}, None, "ok", "550.54.14, for CUDA up to 12.4", ""),
])
def test_a_driver_and_whether_torch_can_use_it(examined, monkeypatch, tmp_path, said, visible, verdict, expected, fix):
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\necho '{SMI}'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = examined(**said)["NVIDIA driver"]
    assert found.verdict == verdict and expected in found.found and fix in found.fix and bool(fix) == bool(found.fix)


@pytest.mark.parametrize("answer", ["exec sleep 60", "echo 'Driver/library version mismatch'; exit 18"])
def test_without_an_answer_of_nvidia_smi_the_driver_and_the_cards_are_reported(examined, monkeypatch, tmp_path, answer):
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{answer}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu Feb 22\n")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(doctor, "SMI_SECONDS", 0.2)
    monkeypatch.setattr(doctor, "DRIVER", tmp_path / "version")
    found = examined(torch=TORCH | {"cuda": "12.4"})["NVIDIA driver"]
    assert found.is_error and found.found.startswith("550.54.14; torch finds no card") and "reboot" in found.fix
    found = examined(cards={"cards": [H100], "architectures": []})
    assert found["NVIDIA driver"] == MachineFinding("NVIDIA driver", "550.54.14") and "cuda:0" in found
    (tmp_path / "version").unlink()
    found = examined()["NVIDIA driver"]
    assert found.verdict == "warning" and found.found.startswith("nvidia-smi doesn't say its version: ")


def test_cards_that_are_taken_or_too_new(examined):
    taken, new = H100 | {"free": 9 << 30}, H100 | {"name": "NVIDIA B300", "capability": [11, 0]}
    found = examined(cards={"cards": [H100, taken, new], "architectures": ["sm_80", "sm_90"]})
    assert found["cuda:0"] == MachineFinding("cuda:0", "NVIDIA H100, 79.0 of 80.0 GiB free, compute capability 9.0")
    assert found["cuda:1"].verdict == "warning" and "another process" in found["cuda:1"].fix
    assert found["cuda:2"].is_error and "not built for it" in found["cuda:2"].found
    rocm = examined(cards={"cards": [H100], "architectures": ["gfx90a"]})
    assert rocm["cuda:0"].verdict == "ok", "what ROCm is built for isn't judged"


@pytest.mark.parametrize("usable, threads, verdict, fix", [
    (1, None, "warning", "two or more"), (4, "16", "warning", "OMP_NUM_THREADS=4"), (4, "4", "ok", ""),
    (4, None, "ok", "")])
def test_cores_and_threads_that_fight_for_them(examined, monkeypatch, usable, threads, verdict, fix):
    monkeypatch.setattr(doctor, "usable_cores", lambda: usable)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if threads:
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
    found = examined()["cores"]
    assert found.verdict == verdict and fix in found.fix


def test_little_of_everything(examined, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(disk, "free", lambda folder: 64 << 20)
    monkeypatch.setattr(doctor.memory, "available", lambda: 1 << 30)
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda _: (256, 1024))
    monkeypatch.setattr(doctor.sys, "getfilesystemencoding", lambda: "ascii")
    found = examined()
    assert "--shm-size" in found["shared memory"].fix and "sbkit tune --memory" in found["memory"].fix
    assert found["open files"].fix.startswith("ulimit -n 1024") and "C.UTF-8" in found["locale"].fix
    assert found["output"].verdict == "warning" and found["output"].found == "results, 0.1 GiB free"
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda _: (256, 256))
    assert "hard limit" in examined()["open files"].fix
    assert str(tmp_path) not in "".join(each.found for each in found.values()), "a home's name isn't shown"
    def refused(**where):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(doctor.tempfile, "TemporaryFile", refused)
    found = examined()
    assert found["output"].is_error and found["output"].found == "results can't be written: Read-only file system"
    assert found["sbkit's cache"].is_error and found["sbkit's cache"].fix == "export SBKIT_CACHE=FOLDER"
    assert found["Hugging Face"].verdict == "warning"


def test_a_check_that_fails_or_never_ends_is_a_warning(examined, monkeypatch):
    def broken():
        raise ZeroDivisionError("of all things\nand more")

    with monkeypatch.context() as stuck:
        stuck.setattr(doctor, "CHECK_SECONDS", 0.2)
        stuck.setattr(disk, "free", lambda folder: time.sleep(1))
        assert examined()["folders"].found == "no answer within 0.2 s"

    monkeypatch.setattr(doctor.memory, "total", broken)
    found = examined()
    assert found["machine"].verdict == "warning"
    assert found["machine"].found == "unknown: ZeroDivisionError: of all things"
    assert "output" in found


@pytest.mark.slow
def test_no_library_that_is_asked_is_imported_from_the_working_directory(tmp_path, monkeypatch):
    for name in ("onnxruntime", "numpy", "json"):
        (tmp_path / f"{name}.py").write_text("open('ran', 'w').close(); raise ImportError('not this one')")
    monkeypatch.chdir(tmp_path)
    doctor.ask.cache_clear()
    assert "not this one" not in str(doctor.ask("onnxruntime")) and not (tmp_path / "ran").exists()
    doctor.ask.cache_clear()
