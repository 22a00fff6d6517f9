"""A stand-in for the Hugging Face hub on this machine: as much of its protocol as datasets and models are loaded by."""

from __future__ import annotations

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import PurePosixPath
from urllib.parse import parse_qs, unquote, urlsplit

#: What is stored elsewhere there: a request for it is sent on, as to the hub's storage on another host.
LARGE = ".parquet"


class Repository:
    """Files by path, and what the hub says of who may read them."""

    def __init__(self, files: dict[str, bytes], *, gated: bool = False, readers: tuple[str, ...] = ()):
        self.files, self.gated, self.readers = files, gated, readers

    @property
    def commit(self) -> str:
        digest = hashlib.sha1()
        for path, data in sorted(self.files.items()):
            digest.update(f"{path} {len(data)}\n".encode() + data)
        return digest.hexdigest()

    def tree(self, folder: str, recursive: bool) -> list[dict] | None:
        """What the hub lists below ``folder``; None where there is no such folder."""
        found: dict[str, dict] = {}
        for path, data in sorted(self.files.items()):
            inside = PurePosixPath(path)
            if folder and not inside.is_relative_to(folder):
                continue
            for parent in [*inside.parents][-2::-1]:
                if parent.is_relative_to(folder) and str(parent) != folder:
                    folder_entry = {"type": "directory", "oid": "0" * 40, "size": 0, "path": str(parent)}
                    found.setdefault(str(parent), folder_entry)
            found[path] = self.entry(path, data)
        depth = len(PurePosixPath(folder).parts) + 1
        listed = [entry for path, entry in found.items() if recursive or len(PurePosixPath(path).parts) == depth]
        return listed if found or not folder else None

    @staticmethod
    def entry(path: str, data: bytes) -> dict:
        entry = {"type": "file", "oid": hashlib.sha1(data).hexdigest(), "size": len(data), "path": path}
        if path.endswith(LARGE):
            entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
        return entry


class Hub:
    """Serves ``repositories`` for as long as its ``with`` block lasts; ``url`` is what HF_ENDPOINT must be.

    ``breaks[path]`` of the next answers with a file end after half of it; ``seen`` has all requests, and
    ``stored`` what lies in the storage by its name there. Asked as a proxy, it is every host.
    """

    def __init__(self):
        self.repositories: dict[str, Repository] = {}
        self.breaks: dict[str, int] = {}
        self.seen: list[str] = []
        self.stored: dict[str, tuple[str, bytes]] = {}

    def __enter__(self) -> Hub:
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self.server.daemon_threads = True
        self.port = self.server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        address = urlsplit(self.path)  # whole where we are asked as a proxy
        self.hub.seen.append(f"{self.command} {self.path} {self.headers.get('Range', '')}".strip())
        parts = [unquote(part) for part in address.path.strip("/").split("/")]
        if parts[0] == "storage":
            path, data = self.hub.stored[parts[1]]
            return self.send_file(data, path, {"ETag": f'"{parts[1]}"'})
        if parts[:2] == ["api", "datasets"]:
            return self.api(parts[2:], parse_qs(address.query), body)
        if "resolve" in parts:
            at = parts.index("resolve")
            return self.file("/".join(parts[parts[0] == "datasets":at]), parts[at + 1], "/".join(parts[at + 2 :]))
        return self.refuse(404, "", "Not found")

    do_HEAD = do_POST = do_GET

    def api(self, parts: list[str], query: dict[str, list[str]], body: bytes) -> None:
        verb = next((i for i, part in enumerate(parts) if i and part in ("revision", "tree", "paths-info")), len(parts))
        name, verb, *rest = "/".join(parts[:verb]), *(parts[verb:] or ["revision", "main"])
        repository = self.repository(name, rest[0])
        if repository is None:
            return None
        if verb == "revision":
            info = {"_id": "0" * 24, "id": name, "sha": repository.commit, "private": False, "disabled": False,
                    "gated": "auto" if repository.gated else False, "downloads": 0, "likes": 0, "tags": [],
                    "lastModified": "2025-01-01T00:00:00.000Z", "createdAt": "2025-01-01T00:00:00.000Z",
                    "siblings": [{"rfilename": path} for path in sorted(repository.files)]}
            return self.send_json(info)
        if verb == "tree":
            recursive = query.get("recursive", ["false"])[0].lower() in ("true", "1")
            listed = repository.tree("/".join(rest[1:]), recursive)
            if listed is None:
                return self.refuse(404, "EntryNotFound", f"{'/'.join(rest[1:])} does not exist on {rest[0]!r}")
            return self.send_json(listed)
        if self.headers.get("Content-Type", "").startswith("application/json"):
            wanted = json.loads(body)["paths"]
        else:
            wanted = parse_qs(body.decode())["paths"]
        return self.send_json([repository.entry(path, repository.files[path]) for path in wanted
                               if path in repository.files])

    def repository(self, name: str, revision: str) -> Repository | None:
        repository = self.hub.repositories.get(name)
        if repository is None:  # told as one that may not be seen to whoever is nobody
            known = self.token is not None
            self.refuse(404 if known else 401, "RepoNotFound",
                        "Repository not found" if known else "Invalid username or password.")
        elif revision not in ("main", repository.commit):
            self.refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        else:
            return repository
        return None

    def file(self, name: str, revision: str, path: str) -> None:
        repository = self.repository(name, revision)
        if repository is None:
            return None
        facts = {"X-Repo-Commit": repository.commit}
        if repository.gated and self.token not in repository.readers:
            if self.token is None:
                return self.refuse(401, "GatedRepo", f"Access to dataset {name} is restricted. You must have access to "
                                   "it and be authenticated to access it. Please log in.", facts)
            return self.refuse(403, "GatedRepo", f"Access to dataset {name} is restricted and you are not in the "
                               "authorized list.", facts)
        data = repository.files.get(path)
        if data is None:
            return self.refuse(404, "EntryNotFound", "Entry not found", facts)
        if not path.endswith(LARGE):
            return self.send_file(data, path, {**facts, "ETag": f'"{hashlib.sha1(data).hexdigest()}"'})
        oid = hashlib.sha256(data).hexdigest()
        self.hub.stored[oid] = path, data
        return self.send(302, {**facts, "X-Linked-ETag": f'"{oid}"', "X-Linked-Size": len(data),
                               "Location": f"http://localhost:{self.hub.port}/storage/{oid}"})

    @property
    def token(self) -> str | None:
        return (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None

    def send_file(self, data: bytes, path: str, headers: dict[str, str]) -> None:
        first, last = 0, len(data) - 1
        wanted = self.headers.get("Range", "").removeprefix("bytes=")
        if wanted:
            begin, _, end = wanted.partition("-")
            first = int(begin) if begin else max(0, len(data) - int(end))
            last = min(int(end), last) if begin and end else last
            if first > last:
                return self.refuse(416, "", "Range not satisfiable", {"Content-Range": f"bytes */{len(data)}"})
            headers = {**headers, "Content-Range": f"bytes {first}-{last}/{len(data)}"}
        whole = part = data[first : last + 1]
        if self.command != "HEAD" and self.hub.breaks.get(path):
            self.hub.breaks[path] -= 1
            part = part[: len(part) // 2]
            self.close_connection = True
        return self.send(206 if wanted else 200, {"Accept-Ranges": "bytes", "Content-Length": len(whole), **headers},
                         part)

    def send_json(self, value: object) -> None:
        self.send(200, {"Content-Type": "application/json; charset=utf-8"}, json.dumps(value).encode())

    def refuse(self, status: int, code: str, message: str, headers: dict[str, str] | None = None) -> None:
        coded = {"X-Error-Code": code} if code else {}
        self.send(status, {**coded, "X-Error-Message": message, "Content-Type": "application/json", **(headers or {})},
                  json.dumps({"error": message}).encode())

    def send(self, status: int, headers: dict[str, object], body: bytes = b"") -> None:
        self.send_response(status)
        for header, value in {"Content-Length": len(body), **headers}.items():
            self.send_header(header, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
