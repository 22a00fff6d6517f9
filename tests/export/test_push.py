"""sbkit push against a stand-in for the hub's API: what arrives there, what is refused, and that no token is shown."""

import base64
import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from refusals import refused

from sbkit.export import layout
from sbkit.export.layout import GraphConfig
from sbkit.export.push import push as push_in_process

TOKEN = "hf_only_the_hub_sees_this"


class Handler(BaseHTTPRequestHandler):
    """As much of the hub as an upload needs; its server holds ``files`` and what it answers to a request first."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *given):
        pass

    def answer(self, status, values):
        data = json.dumps(values).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        self.answer(404, {"error": "there is none"})

    do_HEAD = do_GET

    def do_PUT(self):
        data = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.stored[hashlib.sha256(data).hexdigest()] = data
        self.answer(200, {})

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.server.status != 200:
            self.answer(self.server.status, {"error": f"no, {self.headers['Authorization']}"})
            return
        if self.headers["Authorization"] != f"Bearer {TOKEN}":
            self.answer(401, {"error": "Invalid username or password."})
        elif self.path == "/api/repos/create":
            self.server.made = json.loads(body)
            self.answer(200, {"url": f"{self.server.url}/me/{self.server.made['name']}"})
        elif self.path == "/api/validate-yaml":  # the front matter of README.md
            self.answer(200, {"warnings": [], "errors": []})
        elif "/preupload/" in self.path:
            self.answer(200, {"files": [
                {"path": each["path"], "uploadMode": "lfs" if each["path"].endswith(".onnx") else "regular",
                 "shouldIgnore": False} for each in json.loads(body)["files"]]})
        elif self.path.endswith("/info/lfs/objects/batch"):
            self.answer(200, {"transfer": "basic", "objects": [
                {**each, "actions": {"upload": {"href": f"{self.server.url}/storage/{each['oid']}"}}}
                for each in json.loads(body)["objects"]]})
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    self.server.files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    self.server.files[value["path"]] = self.server.stored[value["oid"]]
            self.answer(200, {"commitUrl": f"{self.server.url}/me/words/commit/{'0' * 40}", "commitOid": "0" * 40})
        else:
            self.answer(404, {"error": self.path})


@pytest.fixture
def hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.url, server.status = f"http://127.0.0.1:{server.server_address[1]}", 200
    server.files, server.stored, server.made = {}, {}, None
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def bundle(tmp_path):
    folder = tmp_path / "bundle"
    folder.mkdir()
    config = GraphConfig(sample_rate=16000, outputs=["embedding"], models={"onnx": "model.onnx"})
    for name, data in {"model.onnx": os.urandom(100_000), "README.md": b"# words\n", "[!c]*": b"a pattern"}.items():
        (folder / name).write_bytes(data)
        config.files[name] = layout.fingerprint(folder / name)
    (folder / "config.json").write_text(config.to_json())
    for name in ("notes.txt", ".env"):
        (folder / name).write_text("mine alone")
    return folder


def push(bundle, url, *words, token=TOKEN, repository="me/words"):
    """Run the command in a process of its own, since huggingface_hub reads its environment once."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {"HF_ENDPOINT": url, "HF_HOME": str(bundle.parent / "cache"), "HF_HUB_DISABLE_XET": "1",
                    "PYTHONPATH": os.pathsep.join(sys.path), **({"HF_TOKEN": token} if token else {})}
    done = subprocess.run([sys.executable, "-m", "sbkit", "push", str(bundle), repository, *words],
                          env=environment, capture_output=True, text=True)
    assert TOKEN not in done.stdout + done.stderr, "a token is shown to nobody"
    assert ("Traceback" in done.stderr) == ("--debug" in words)
    return done


@pytest.mark.slow
def test_the_bundles_own_files_arrive_and_no_others(hub, bundle):
    (bundle / "README.md").write_text("# words\n\nlicence: mine\n")
    done = push(bundle, hub.url, "--private")
    assert done.returncode == 0 and done.stdout.strip() == f"{hub.url}/me/words", done.stderr
    assert hub.made["name"] == "words" and (hub.made.get("private") or hub.made.get("visibility") == "private")
    own = ("config.json", "model.onnx", "README.md", "[!c]*")
    assert hub.files == {name: (bundle / name).read_bytes() for name in own}


@pytest.mark.slow
def test_a_file_that_was_changed_is_not_what_was_proven(hub, bundle):
    (bundle / "model.onnx").write_bytes(b"another")
    done = push(bundle, hub.url)
    assert done.returncode == 2 and "model.onnx" in done.stderr and "[damaged-bundle]" in done.stderr
    assert hub.files == {}


@pytest.mark.parametrize("name", ["README.md", "model.onnx", "config.json"])
def test_a_link_is_not_followed_to_a_file_that_nobody_meant(bundle, name):
    (bundle / name).rename(bundle.parent / "elsewhere")
    (bundle / name).symlink_to(bundle.parent / "elsewhere")
    with refused("link-in-bundle", file=bundle / name):
        push_in_process(bundle, "me/words")


@pytest.mark.slow
@pytest.mark.parametrize(("status", "code"), [(401, "hub-access-denied"), (403, "hub-access-denied"),
                                              (422, "hub-error")])
def test_each_refusal_is_one_message(hub, bundle, status, code):
    hub.status = status
    done = push(bundle, hub.url, *["--debug"] * (status == 422))
    assert done.returncode == 2 and done.stderr.endswith(f" [{code}]\n"), done.stderr


@pytest.mark.slow
def test_push_is_refused_without_a_token_a_network_a_name_or_a_bundle(hub, bundle):
    done = push(bundle, hub.url, token=None)
    assert done.returncode == 2 and "[hub-access-denied]" in done.stderr
    done = push(bundle, "http://127.0.0.1:9")
    assert done.returncode == 2 and "[no-network]" in done.stderr
    done = push(bundle, hub.url, repository="me/words/of mine")
    assert done.returncode == 2 and "[bad-option]" in done.stderr
    done = push(bundle.parent, hub.url)
    assert done.returncode == 2 and "[not-a-bundle]" in done.stderr
