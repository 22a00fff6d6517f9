"""What the doctor says where something is broken, too old, twice there, or too little."""

import collections
import os
import platform
import shutil
import subprocess
import sys
import time
from functools import partial

import pytest

from sbkit.doctor import cards, examination, finding, folders, probe
from sbkit.doctor.finding import IN_THE_WAY, NOTE, OK, MachineFinding, run_check
from sbkit.recipe import finished_runs

SMI = """\
| NVIDIA-SMI 550.54.14    Driver Version: 550.54.14    CUDA Version: 12.4     |
"""
PERFORMANCE = """
GPU 00000000:01:00.0
    Performance State                     : P0
    Clocks Event Reasons
        Idle                              : Not Active
        SW Power Cap                      : Not Active
        HW Slowdown                       : Active
            HW Thermal Slowdown           : Active
            HW Power Brake Slowdown       : Not Active
    Clocks Event Reasons Counters
        SW Power Capping                  : 540000000 us
        SW Thermal Slowdown               : 0 us

GPU 00000000:02:00.0
    Performance State                     : P8
    Clocks Event Reasons
        Idle                              : Active
"""
TORCH = {"version": "2.11.0+cu130", "cuda": "13.0", "hip": None, "available": True, "threads": 8}
H100 = {"name": "NVIDIA H100", "capability": [9, 0], "total": 80 << 30, "free": 79 << 30}


@pytest.fixture
def says(monkeypatch):
    """Let torch and onnxruntime say what a test gives; what isn't given was never reached."""
    def answer(ended="", **parts):
        monkeypatch.setattr(probe, "inspect_library", lambda library: {"ended": ended, **parts})
    return answer


@pytest.fixture
def installed(monkeypatch):
    """Let these packages be installed, and no others."""
    def there(**versions):
        found = {name.replace("_", "-"): version for name, version in versions.items()}
        for module in (examination, sys.modules["sbkit.system.environment"]):
            monkeypatch.setattr(module, "version_of", found.get)
        builds = {name: version for name, version in found.items() if name.startswith("onnxruntime")}
        monkeypatch.setattr(examination, "onnxruntimes", lambda: builds)
    return there


def only(check, *given):
    (found,) = run_check("it", partial(check, *given))
    return found


# ---------------------------------------------------------------- packages


def test_a_mixed_pair_is_in_the_way_with_what_to_install(says, installed):
    installed(torch="2.13.0", torchaudio="2.11.0")
    says(torch=TORCH | {"version": "2.13.0"}, torchaudio={"error": "OSError: undefined symbol: _ZN3c10"})
    pair, torch, audio = run_check("torch", examination.torch_pair)
    assert (pair.what, pair.verdict) == ("torch pair", IN_THE_WAY) and "torchaudio==2.13.0" in pair.fix
    assert torch.verdict == OK
    assert (audio.verdict, audio.found) == (IN_THE_WAY, "2.11.0 doesn't work: OSError: undefined symbol: _ZN3c10")


@pytest.mark.parametrize("signum, name", [(11, "SIGSEGV"), (35, "signal 35")])
def test_a_torch_that_ends_its_process_is_a_line(monkeypatch, installed, signum, name):
    installed(torch="2.11.0", torchaudio="2.11.0")
    probe.inspect_library.cache_clear()
    monkeypatch.setattr(probe.subprocess, "run", lambda command, **_: subprocess.CompletedProcess(
        command, -signum, "", ""))
    assert only(examination.torch_pair).found == (
        f"2.11.0 can't be imported: the process that imported it was ended by {name}")
    probe.inspect_library.cache_clear()


@pytest.mark.parametrize("version, verdict", [
    ("3.10.14", NOTE), ("3.10.15", OK), ("3.11.9", NOTE), ("3.11.10", OK), ("3.12.0", OK), ("3.9.1", IN_THE_WAY)])
def test_a_python_whose_forked_processes_may_hang_is_noted(monkeypatch, version, verdict):
    monkeypatch.setattr(platform, "python_version", lambda: version)
    (found,) = examination.python()
    assert found.verdict == verdict and ("fork" in found.fix) == (verdict == NOTE)


def test_both_builds_of_onnxruntime_are_in_the_way(says, installed):
    installed(onnxruntime="1.23.0", onnxruntime_gpu="1.23.0")
    says()
    found = only(examination.onnxruntime)
    assert found.verdict == IN_THE_WAY and found.fix.startswith("pip uninstall -y onnxruntime onnxruntime-gpu")


def test_an_onnxruntime_without_cuda_beside_a_card_is_noted(says, installed):
    installed(onnxruntime="1.23.0")
    says(onnxruntime={"version": "1.23.0", "providers": ["CPUExecutionProvider"]}, cards={"cards": [H100]})
    found = only(examination.onnxruntime)
    assert (found.verdict, found.found) == (NOTE, "onnxruntime 1.23.0, built for CPU")
    assert "onnxruntime-gpu" in found.fix


def test_a_package_that_is_missing_or_too_old_is_named_with_the_range(installed, monkeypatch):
    installed(numpy="1.20", tqdm="4.70")
    wanted = ["numpy>=1.26", "tqdm>=4.66", "soxr>=0.5", 'onnx>=1.21; extra == "export"']
    monkeypatch.setattr(examination.metadata, "requires", lambda _: wanted)
    numpy, soxr, rest = run_check("packages", examination.needed)
    assert numpy == MachineFinding("numpy", "1.20", IN_THE_WAY, "pip install 'numpy>=1.26'")
    assert soxr == MachineFinding("soxr", "not installed", IN_THE_WAY, "pip install 'soxr>=0.5'")
    assert rest.found.endswith("1 of its 3 requirements are met: tqdm 4.70")


def test_a_checkout_that_is_not_installed_says_so_in_words(installed, monkeypatch):
    def missing(name):
        raise examination.metadata.PackageNotFoundError(name)

    installed()
    for asked in ("requires", "metadata"):
        monkeypatch.setattr(examination.metadata, asked, missing)
    found = only(examination.needed)
    assert (found.verdict, found.fix) == (NOTE, "pip install -e . in its folder, or make install")
    assert "not installed, so its requirements are unknown" in found.found
    monkeypatch.setattr(platform, "python_version", lambda: "3.12.1")
    assert only(examination.python).verdict == OK


@pytest.mark.parametrize(("hours", "verdict", "expected"), [
    ((), OK, "0 finished runs, none of them predicted"),
    ((1.15,), OK, "1 finished run, 1 predicted: off by 15%, 1 of 1 within their interval"),
    ((1.46,), NOTE, "1 finished run, 1 predicted: off by 46%, 1 of 1 within their interval"),
    ((1.46, 1.1, 0.9), OK, "3 finished runs, 3 predicted: median error 10%, 3 of 3 within their interval")])
def test_predictions_are_right_within_what_the_page_says(monkeypatch, hours, verdict, expected):
    steps = finished_runs.Steps(20e9, 1, 20.0, 100, 400.0, "CTC")
    runs = [finished_runs.FinishedRun(finished_runs.Setting("a CPU", "bf16", 1, 1), steps, 1.0, each,
                                      finished_runs.RunEstimate(1.0, 1.0, 0.5, 2.0, "trial")) for each in hours]
    monkeypatch.setattr(finished_runs, "read", lambda: runs)
    found = only(examination.predictions)
    assert found.verdict == verdict and found.found.startswith(expected)
    assert ("within 20%" in found.fix) == (verdict == NOTE)


def test_without_a_compiler_triton_and_the_kernels_say_what_they_miss(says, monkeypatch):
    says(kernels={"why_not": "there is no C compiler"})
    monkeypatch.setattr(shutil, "which", lambda name: None)
    compiler, kernels, triton = run_check("compilers", examination.compilers)
    assert [each.verdict for each in (compiler, kernels, triton)] == [NOTE] * 3
    assert compiler.fix == "apt install gcc" and "a C compiler" in triton.found


# ---------------------------------------------------------------- cards


@pytest.mark.parametrize("torch, visible, verdict, expected, fix", [
    ({"available": False}, None, IN_THE_WAY, "torch is built for CUDA 13.0, which needs 580 or newer", "whl/cu126"),
    ({"available": False, "cuda": "12.8"}, None, IN_THE_WAY, "torch finds no card that works", "--gpus all"),
    ({"available": False}, "", NOTE, "CUDA_VISIBLE_DEVICES='' hides all cards", "unset"),
    ({"available": False, "cuda": None}, None, IN_THE_WAY, "this torch is built without CUDA", "pip uninstall -y"),
    ({}, None, OK, "550.54.14, for CUDA up to 12.4", ""),
])
def test_a_driver_and_whether_torch_can_use_it(says, monkeypatch, torch, visible, verdict, expected, fix):
    says(torch=TORCH | torch)
    monkeypatch.setattr(cards, "_smi", lambda *words: SMI)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = only(cards.driver)
    assert found.verdict == verdict and expected in found.found and fix in found.fix and bool(fix) == bool(found.fix)


def test_cards_that_are_taken_or_too_new_or_far_from_each_other(says):
    taken, new = H100 | {"free": 9 << 30}, H100 | {"name": "NVIDIA B300", "capability": [11, 0]}
    says(cards={"cards": [H100, taken, new], "architectures": ["sm_80", "sm_90"], "without_peer_access": [[0, 2]]})
    sound, busy, unknown, apart = run_check("cards", cards.cards)
    assert sound == MachineFinding("cuda:0", "NVIDIA H100, 79.0 of 80.0 GiB free, compute capability 9.0")
    assert busy.verdict == NOTE and "another process" in busy.fix
    assert unknown.verdict == IN_THE_WAY and "not built for it" in unknown.found
    assert apart.verdict == NOTE and "0 and 2" in apart.found


def test_what_rocm_is_built_for_is_not_judged(says):
    says(cards={"cards": [H100], "architectures": ["gfx90a"]})
    assert only(cards.cards).verdict == OK


def test_attention_names_the_kernel_for_each_size_of_a_head(says):
    says(attention={"cards": [{"precision": "bf16", "kernels": {"memory-efficient": [32, 64], "math": [36]}}]})
    assert only(cards.attention).found.startswith(
        "cuda:0 in bf16, masked: memory-efficient for heads of 32, 64; math for heads of 36")


def test_clocks_that_are_held_down_say_by_what(monkeypatch):
    monkeypatch.setattr(cards, "_smi", lambda *words: PERFORMANCE)
    hot, idle = run_check("clocks", cards.clocks)
    assert hot.verdict == NOTE
    assert hot.found == "throttled now by heat; throttled now by the board; was throttled by its power limit for 9 min"
    assert (idle.verdict, idle.found) == (OK, "not throttled")


def test_a_card_with_errors_and_slices_is_noted(monkeypatch):
    row = "0, NVIDIA A100, 81920, 10, 3, Enabled, Disabled, 35, 210, 1410, 300.00, 400.00\n"
    monkeypatch.setattr(cards, "_smi", lambda *words: row)
    found = only(cards.health)
    assert found.verdict == NOTE and "SM clock 210 of 1410 MHz" in found.found and "persistence off" in found.found
    assert all(word in found.fix for word in ("memory has errors", "MIG slices", "300.00 W of 400.00"))


# ---------------------------------------------------------------- machine and folders


def test_little_shared_memory_as_docker_gives(monkeypatch):
    state = collections.namedtuple("State", "f_bavail f_frsize f_blocks")(16_000, 4096, 16_384)
    monkeypatch.setattr(examination.os, "statvfs", lambda _: state)
    monkeypatch.setattr(examination.os.path, "isdir", lambda _: True)
    found = only(examination.shared_memory)
    assert (found.verdict, found.found) == (NOTE, "/dev/shm: 0.06 of 0.06 GiB free") and "--shm-size" in found.fix


@pytest.mark.parametrize("usable, threads, verdict, fix", [
    (1, None, NOTE, "two or more"), (4, "16", NOTE, "OMP_NUM_THREADS=4"), (4, "4", OK, ""), (4, None, OK, "")])
def test_cores_and_threads_that_fight_for_them(monkeypatch, usable, threads, verdict, fix):
    monkeypatch.setattr(examination, "usable_cores", lambda: usable)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if threads:
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
    found = only(examination.cores)
    assert found.verdict == verdict and fix in found.fix


def test_few_open_files_and_names_that_are_not_utf8(monkeypatch):
    monkeypatch.setattr(examination.resource, "getrlimit", lambda _: (256, 1024))
    monkeypatch.setattr(examination.sys, "getfilesystemencoding", lambda: "ascii")
    assert only(examination.open_files).fix.startswith("ulimit -n 1024")
    assert only(examination.language).verdict == NOTE


def test_a_run_from_the_future_and_a_corpus_that_is_not_there(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    assert only(folders.time_stamps, tmp_path).verdict == OK
    os.utime(tmp_path / "metrics.jsonl", (time.time() + 7200,) * 2)
    found = only(folders.time_stamps, tmp_path)
    assert found.verdict == NOTE and "120 min in the future" in found.found and "timedatectl" in found.fix
    assert only(folders.data, tmp_path / "absent").verdict == IN_THE_WAY
    assert only(folders.data, tmp_path).verdict == OK


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr(folders.os, "access", lambda *_: False)
    assert only(folders.output, tmp_path).verdict == IN_THE_WAY
    assert {each.verdict for each in run_check("caches", folders.caches)} == {NOTE}


# ---------------------------------------------------------------- whatever else


def test_a_check_that_breaks_or_never_answers_is_a_line():
    def broken():
        yield MachineFinding("one", "well")
        raise ZeroDivisionError("of all things\nand more")

    one, rest = run_check("disk", broken)
    assert one.verdict == OK
    assert rest == MachineFinding("disk", "unknown: ZeroDivisionError: of all things", NOTE)
    (late,) = run_check("disk", lambda: time.sleep(60), timeout=0.05)
    assert late.found == "no answer within 0.05 s"


def test_neither_home_nor_user_nor_host_are_told(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "alice"))
    monkeypatch.setenv("LOGNAME", "alice")
    monkeypatch.setattr(finding.socket, "gethostname", lambda: "gpu-box-7")
    text = f"{tmp_path}/alice/.venv, /data/alice/cv and nfs on gpu-box-7:/export, not malice"
    assert finding.anonymised(text) == "~/.venv, /data/USER/cv and nfs on HOST:/export, not malice"
