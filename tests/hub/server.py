# SPDX-License-Identifier: Apache-2.0
"""A hub on this machine, as far as huggingface_hub asks one for models, with the faults of networks."""

import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

TOKEN = "hf_of_this_test"  # noqa: S105 opens nothing
# The hub keeps such files apart, behind a redirection and with a SHA-256; others are part of the git repository.
APART = (".safetensors", ".gguf", ".bin", ".onnx")


@dataclass
class Repository:
    """A repository with one commit.

    Attributes:
        files: its files' contents by path.
        gated: its files are given for TOKEN only.
    """

    files: dict[str, bytes]
    gated: bool = False

    @property
    def commit(self) -> str:
        return hashlib.sha1(repr(sorted(self.files.items())).encode(), usedforsecurity=False).hexdigest()


@dataclass
class Hub:
    """Repositories by name, what was asked for, and faults.

    Attributes:
        asked: method, path and range of each request.
        cuts: for each answer with a file kept apart, in turn, after how many bytes the connection breaks.
        damages: whether the last byte of files kept apart is another.
        held: set by the server when `hold` let it wait in the middle of such a file.
    """

    repositories: dict[str, Repository] = field(default_factory=dict)
    asked: list[tuple[str, str, str]] = field(default_factory=list)
    cuts: list[int] = field(default_factory=list)
    damages: bool = False
    hold: threading.Event | None = None
    held: threading.Event = field(default_factory=threading.Event)
    address: str = ""

    def downloaded(self) -> list[str]:
        """The names of the files that were asked for, in order."""
        return [path.rpartition("/")[2] for method, path, _ in self.asked if method == "GET" and "/api/" not in path]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Else a body waits for the acknowledgement of its headers, 40 ms.
    disable_nagle_algorithm = True
    hub: Hub

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append((self.command, path, self.headers.get("Range", "")))
        _, *parts = path.split("/")
        if parts[:2] == ["api", "models"]:
            self._describe("/".join(parts[2:4]), parts[4:])
        elif parts[0] == "apart":
            self._send_apart(*self._find("/".join(parts[1:3]), "/".join(parts[3:])))
        else:
            self._resolve("/".join(parts[:2]), parts[3], "/".join(parts[4:]))

    def _find(self, name: str, file: str) -> tuple[Repository, bytes]:
        repository = self.hub.repositories[name]
        return repository, repository.files[file]

    def _describe(self, name: str, rest: list[str]) -> None:
        repository = self.hub.repositories.get(name)
        if repository is None:
            self._refuse(401, "RepoNotFound")
            return
        revision = rest[1] if len(rest) > 1 else "main"
        if revision not in ("main", "v1", repository.commit):
            self._refuse(404, "RevisionNotFound")
        elif rest[:1] == ["tree"]:
            entries = [_entry(file, contents) for file, contents in repository.files.items()]
            self._send(200, json.dumps(entries).encode(), {"Content-Type": "application/json"})
        else:
            about = {"id": name, "sha": repository.commit, "gated": repository.gated, "siblings": []}
            self._send(200, json.dumps(about).encode(), {"Content-Type": "application/json"})

    def _resolve(self, name: str, revision: str, file: str) -> None:
        repository, contents = self._find(name, file)
        assert revision == repository.commit
        if repository.gated and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._refuse(401, "GatedRepo")
            return
        tag = hashlib.sha256(contents).hexdigest()
        headers = {"X-Repo-Commit": revision, "ETag": f'"{tag}"'}
        if file.endswith(APART):
            # Another host: huggingface_hub asks for the file itself once it is sent elsewhere.
            place = f"{self.hub.address.replace('127.0.0.1', 'localhost')}/apart/{name}/{file}"
            headers |= {"X-Linked-ETag": f'"{tag}"', "X-Linked-Size": str(len(contents)), "Location": place}
            self._send(302, b"", headers)
        else:
            self._send(200, contents, headers)

    def _send_apart(self, repository: Repository, contents: bytes) -> None:
        del repository
        if self.hub.damages:
            contents = contents[:-1] + bytes([contents[-1] ^ 1])
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").split("-")[0])
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(contents) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(contents) - 1}/{len(contents)}")
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.hub.hold is not None:
            self.wfile.write(contents[start : start + 1000])
            self.hub.held.set()
            self.hub.hold.wait(60)
            start += 1000
        if self.hub.cuts:
            self.wfile.write(contents[start : start + self.hub.cuts.pop(0)])
            self.close_connection = True
            return
        self.wfile.write(contents[start:])

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, b"", {"X-Error-Code": code, "X-Error-Message": f"this is {code}"})

    def _send(self, status: int, contents: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(contents))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(contents)


def _entry(file: str, contents: bytes) -> dict[str, object]:
    size = len(contents)
    entry: dict[str, object] = {"type": "file", "path": file, "size": size, "oid": "0" * 40}
    if file.endswith(APART):
        entry["lfs"] = {"oid": hashlib.sha256(contents).hexdigest(), "size": size, "pointerSize": 135}
    return entry


class Server(ThreadingHTTPServer):
    """Serves a hub on a free port until it is closed."""

    def __init__(self, hub: Hub) -> None:
        super().__init__(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
        hub.address = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def handle_error(self, *_: object) -> None:
        """Says nothing: clients that are killed close their connections."""


def files_of(folder: Path) -> dict[str, bytes]:
    """The contents of a folder's files, by path."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
