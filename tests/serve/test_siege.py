"""The server with few files to open, a full temporary folder and clients that mean harm, all at once; then a right
answer."""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
import serving

HEAD = (b"POST /v1/audio/transcriptions HTTP/1.1\r\nhost: localhost\r\n"
        b"content-type: multipart/form-data; boundary=x\r\ncontent-length: 1000000\r\n\r\n--x\r\n")
OWN_MOUNTS = ["unshare", "--mount", "--user", "--map-root-user"]


@pytest.fixture
def small(tmp_path):
    """A temporary folder of 3 MB, and what starts a command with it and 200 files to open."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = f"mount -t tmpfs -o size=3m tmpfs {folder}"
    if not shutil.which("unshare") or subprocess.run([*OWN_MOUNTS, "sh", "-c", mount], capture_output=True).returncode:
        pytest.skip("this machine doesn't let us mount")
    return folder, lambda words: [*OWN_MOUNTS, "sh", "-c", f"{mount} && ulimit -n 200 && export TMPDIR={folder} && "
                                                           f"exec {' '.join(map(str, words))}"]


def memory(process):
    """In MB."""
    return int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{process.pid}/status").read_text())[1]) / 1024


def fill(path):
    """As far as it goes; half a block may go in at the end."""
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 16))


def ask(url, data):
    return httpx.post(f"{url}/v1/audio/transcriptions", data={"model": "level"}, files={"file": ("a", data)},
                      timeout=60)


@pytest.mark.slow
def test_few_files_a_full_disk_and_trickling_clients_then_a_right_answer(bundle, small):
    folder, command = small
    process = subprocess.Popen(command([sys.executable, "-m", "sbkit", "serve", f"level={bundle}", "--port", 0,
                                        "--threads", 1, "--upload-grace-seconds", 3]),
                               stderr=subprocess.PIPE, text=True)
    lines, url = [], None
    for line in process.stderr:
        lines.append(line)
        if line.startswith("ready on "):
            url = line.split()[-1]
            break
    assert url, lines
    threading.Thread(target=lambda: lines.extend(process.stderr), daemon=True).start()
    port, over = int(url.rsplit(":", 1)[1]), threading.Event()
    silent, trickling = [], []
    try:
        before, rubbish = memory(process), Path(f"/proc/{process.pid}/root{folder}/rubbish")
        fill(rubbish)
        for data in (serving.wav("small"), serving.silence(50, 16_000)):
            answer = ask(url, data)
            assert answer.status_code == 503 and answer.json()["error"]["code"] == "no_room", answer.text

        def trickle():
            while not over.wait(0.2):
                for each in list(trickling):
                    with contextlib.suppress(OSError):
                        each.send(b"a")

        threading.Thread(target=trickle, daemon=True).start()
        for number in range(264):
            with contextlib.suppress(OSError):  # the queue may be full for a while
                each = socket.create_connection(("127.0.0.1", port), timeout=1)
                silent.append(each)
                if number % 4 == 0 and len(trickling) < 64:
                    each.sendall(HEAD)
                    trickling.append(each)
        assert len(trickling) > 30
        assert httpx.get(f"{url}/health", timeout=20).status_code == 200
        rubbish.unlink()
        until = time.monotonic() + 60
        while (answer := ask(url, serving.wav("a right answer"))).status_code != 200 and time.monotonic() < until:
            assert answer.status_code in (429, 503) and answer.headers["retry-after"], answer.text
            time.sleep(0.5)
        assert answer.json()["text"] == "a right answer"
        assert httpx.get(f"{url}/health", timeout=20).status_code == 200
        assert memory(process) < before + 150, "nothing is piled up"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert len(lines) < 20 and not any("Traceback" in each for each in lines), lines[:50]
    finally:
        over.set()
        for each in silent:
            each.close()
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
