"""docker/: what the images are made by, and that a server on another device than the image's is found."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCKER = ROOT / "docker"
#: Where a Debian is made to install sbkit into; it takes ten minutes and 8 GB.
CHROOT = os.environ.get("SBKIT_CHROOT", "")


@pytest.mark.long
@pytest.mark.parametrize(("device", "code", "said"), [
    ("cpu", 0, "asked for cpu, computed on cpu: well"), ("cuda", 1, "the server doesn't start")])
def test_the_last_step_fails_where_the_server_has_not_the_images_device(device, code, said):
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT),
                   "http_proxy": "http://127.0.0.1:9"}  # as docker sets where the network is behind one
    done = subprocess.run([sys.executable, DOCKER / "try_server.py", device], env=environment, capture_output=True,
                          text=True)
    assert (done.returncode, said in done.stdout) == (code, True), done.stdout + done.stderr


@pytest.mark.long
def test_an_answer_from_another_device_fails(monkeypatch):
    """As of a server that was told cuda and went on without it."""
    sys.path.insert(0, str(DOCKER))
    try:
        import try_server
    finally:
        sys.path.remove(str(DOCKER))
    told = []
    popen = subprocess.Popen

    def start(words, **given):
        told.append(words)
        return popen([*words[:words.index("--device") + 1], "cpu", *words[words.index("--device") + 2:]], **given)

    monkeypatch.setattr(subprocess, "Popen", start)
    assert try_server.main("cuda") == 1 and "cuda" in told[0]


def test_the_scripts_are_shell_and_name_what_there_is():
    scripts = sorted(DOCKER.glob("*.sh"))
    assert [script.name for script in scripts] == ["build.sh", "entry.sh", "install.sh"]
    for script in scripts:
        assert os.access(script, os.X_OK)
        subprocess.run(["sh", "-n", script], check=True)
    used = re.findall(r"/opt/sbkit/(docker/[\w.]+)", "".join(path.read_text() for path in DOCKER.iterdir()
                                                             if path.is_file()))
    assert {"docker/install.sh", "docker/entry.sh", "docker/try_server.py"} == set(used)
    assert all((ROOT / path).is_file() for path in used)


def test_a_container_is_not_root():
    lines = (DOCKER / "Dockerfile").read_text().replace("\\\n", "").splitlines()
    users = [line.split()[1] for line in lines if line.startswith("USER ")]
    assert users and users[-1] not in ("root", "0")
    after = lines[lines.index(f"USER {users[-1]}"):]
    assert not any(line.startswith("RUN ") for line in after), "what needs root comes before"


def test_an_image_gets_what_is_installed_and_no_keys():
    patterns = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    assert patterns[0] == "*", "what isn't named stays outside, such as keys.txt, .env and recordings"
    named = {line.removeprefix("!") for line in patterns if line.startswith("!")}
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.splitlines()
    assert named <= {path.split("/")[0] for path in tracked} or not tracked, "nothing that only some machines have"
    assert {"setup.cfg", "pyproject.toml", "README.md", "LICENSE", "sbkit", "docker"} <= named
    linked = {(path.parent / os.readlink(path)).resolve().relative_to(ROOT).parts[0]
              for path in (ROOT / "sbkit").rglob("*") if path.is_symlink()}
    assert linked <= named


def test_the_docs_open_no_port_to_others_without_a_key():
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        for block in re.findall(r"(?:^    .*\n)+", page.read_text(encoding="utf-8"), re.MULTILINE):
            if "0.0.0.0" in block or re.search(r"-p \d+:\d+", block):
                assert "SBKIT_API_KEY" in block or "--api-key-file" in block, f"{page}: {block}"


@pytest.mark.parametrize(("words", "run"), [
    (["serve", "model"], "sbkit serve model --device cuda"), (["train", "a.yaml"], "sbkit train a.yaml --device cuda"),
    (["serve", "model", "--device", "cpu"], "sbkit serve model --device cpu"),
    (["transcribe", "model", "a.wav"], "sbkit transcribe model a.wav --device cuda"),
    (["evaluate", "run"], "sbkit evaluate run --device cuda"),
    (["enhance", "model", "a.wav"], "sbkit enhance model a.wav --device cuda"),
    (["rerun", "run"], "sbkit rerun run --device cuda"),
    (["check", "a.yaml"], "sbkit check a.yaml")])
def test_a_container_computes_on_its_device_unless_told_otherwise(tmp_path, words, run):
    (tmp_path / "sbkit").write_text('#!/bin/sh\necho sbkit "$@"\n')
    (tmp_path / "sbkit").chmod(0o755)
    done = subprocess.run([DOCKER / "entry.sh", *words], capture_output=True, text=True, check=True, env={
        "PATH": f"{tmp_path}:{os.environ['PATH']}", "SBKIT_DEVICE": "cuda"})
    assert done.stdout.strip() == run


def test_all_commands_that_compute_do_so_on_the_images_device(capsys):
    from sbkit import cli

    with_device = set()
    for path in (ROOT / "sbkit/commands").glob("[a-z]*.py"):
        with contextlib.suppress(SystemExit):
            cli.main([path.stem, "--help"])
        if "--device" in capsys.readouterr().out:
            with_device.add(path.stem)
    named = set(re.findall(r'" (\w+) "\*', (DOCKER / "entry.sh").read_text()))
    assert named == with_device - {"check", "prepare"}


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not CHROOT, reason="makes a Debian to install into, as root: SBKIT_CHROOT names its folder")
def test_the_steps_of_an_image_in_a_debian(tmp_path):
    root = Path(CHROOT)
    if not (root / "bin/sh").exists():
        subprocess.run(["debootstrap", "--variant=minbase", "bookworm", root], check=True)
    for file, place in {"/etc/resolv.conf": "etc", "/etc/pip.conf": "etc",  # as this machine finds packages
                        "/etc/ssl/certs/ca-certificates.crt": "usr/local/share/ca-certificates"}.items():
        if Path(file).exists():  # certificates where those of install.sh's package are added to them
            (root / place).mkdir(parents=True, exist_ok=True)
            shutil.copy(file, root / place)
    shutil.copytree(ROOT, root / "opt/sbkit", dirs_exist_ok=True,
                    ignore=shutil.ignore_patterns(".git", ".venv", "results", "__pycache__"))
    network = {name: value for name, value in os.environ.items()
               if name.startswith(("PIP_", "SSL_")) or name.lower().endswith("_proxy")}
    plain = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "TORCH_INDEX": "",
             "DEBIAN_FRONTEND": "noninteractive", **network}
    subprocess.run(["mount", "--bind", "/proc", root / "proc"], check=True)
    try:
        inside = ["chroot", root]
        subprocess.run([*inside, "/opt/sbkit/docker/install.sh", "cpu"], env=plain, check=True)
        python = "/opt/venv/bin/python"
        subprocess.run([*inside, python, "/opt/sbkit/docker/try_server.py", "cpu"], env=plain, check=True)
        wrong = subprocess.run([*inside, python, "/opt/sbkit/docker/try_server.py", "cuda"], env=plain)
        assert wrong.returncode == 1
    finally:
        subprocess.run(["umount", root / "proc"], check=True)
