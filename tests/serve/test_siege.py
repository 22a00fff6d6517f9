"""The server with few files to open, a full temporary folder and clients that mean harm, all at once; then a right
answer. And all that one address can do, at once, while another is served."""

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
from statistics import median

import httpx
import pytest
import serving
from test_connection import NO_HANDSHAKES
from test_pauses import REQUESTS

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


SERVE = (sys.executable, "-m", "sbkit", "serve", "--port", 0, "--threads", 1, "--drain-seconds", 0)


def started(words):
    """The process, where it listens, and the lines that it writes."""
    process, url, lines = serving.started(*words)
    threading.Thread(target=lambda: lines.extend(process.stderr), daemon=True).start()
    return process, url, lines


@pytest.mark.long
def test_few_files_a_full_disk_and_trickling_clients_then_a_right_answer(bundle, small):
    folder, command = small
    process, url, lines = started(command([*SERVE, f"level={bundle}", "--upload-grace-seconds", 3]))
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
        requests = [each for each in lines if " sbkit.serve.access: " in each]
        ids = {each.split()[-1] for each in requests}
        assert len(ids) == len(requests), "a line for each request"
        assert len(lines) - len(requests) < 20 and not any("Traceback" in each for each in lines), lines[:50]
    finally:
        over.set()
        for each in silent:
            each.close()
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()


@pytest.mark.long
@pytest.mark.timeout(300)
def test_while_one_address_does_all_that_it_can_another_has_right_answers_soon(bundle):
    process, url, lines = started([*SERVE, f"level={bundle}"])
    port, over, threads = int(url.rsplit(":", 1)[1]), threading.Event(), []
    bomb = serving.silence(7100, rate=1000)

    def again(act):
        def run():
            while not over.is_set():
                with contextlib.suppress(httpx.HTTPError, OSError):
                    act()
                time.sleep(0.5)  # else it is the test that takes the time of this machine
        threads.append(threading.Thread(target=run, daemon=True))
        threads[-1].start()

    def bombard():
        with httpx.Client(transport=httpx.HTTPTransport(local_address="127.0.0.3"), timeout=60) as client:
            client.post(f"{url}/v1/audio/transcriptions", data={"model": "level"}, files={"file": ("a", bomb)})

    def hold_upgrades():
        with contextlib.ExitStack() as all_, contextlib.suppress(OSError):
            for number in range(600):
                each = all_.enter_context(socket.create_connection(("127.0.0.1", port), 5, ("127.0.0.3", 0)))
                each.sendall([*NO_HANDSHAKES.values()][number % len(NO_HANDSHAKES)])
            over.wait(3)

    def trickle():
        with contextlib.ExitStack() as all_, contextlib.suppress(OSError):
            each = all_.enter_context(socket.create_connection(("127.0.0.1", port), 5, ("127.0.0.3", 0)))
            each.sendall(HEAD)
            while not over.wait(0.5):
                each.send(b"a")

    try:
        before = memory(process)
        for _ in range(40):
            again(bombard)
        for name in ("fields in punycode", "options of parts", "a long query", "objects in JSON"):
            again(lambda data=REQUESTS[name]: serving.exchange(port, data, "127.0.0.3"))
        again(hold_upgrades)
        for _ in range(10):
            again(trickle)
        time.sleep(2)
        took, until = [], time.monotonic() + 2
        with httpx.Client(transport=httpx.HTTPTransport(local_address="127.0.0.2"), timeout=60) as honest:
            while time.monotonic() < until or len(took) < 4:
                began = time.monotonic()
                answer = honest.post(f"{url}/v1/audio/transcriptions", data={"model": "level"},
                                     files={"file": ("a", serving.wav("a right answer"))})
                took.append(time.monotonic() - began)
                assert answer.status_code == 200 and answer.json()["text"] == "a right answer", answer.text
        print(f"{len(took)} answers, after {median(took):.2f} s in the middle and {max(took):.2f} s at most")
        assert median(took) < 5  # the longest is up to what else this machine does
        assert memory(process) < before + 300 and not any("Traceback" in each for each in lines), lines[:50]
    finally:
        over.set()
        process.kill()
        process.wait()
        for each in threads:
            each.join(60)
