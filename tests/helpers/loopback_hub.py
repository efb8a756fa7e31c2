"""A hub on loopback: the endpoints by which huggingface_hub and datasets read models and data sets."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest


@dataclass
class LoopbackHub:
    """Repositories by kind ("models" or "datasets") and name: revisions, each the folder of its files."""

    url: str = ""
    repositories: dict[str, dict[str, Path]] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    gated: set[str] = field(default_factory=set)
    delay_s: float = 0.0

    def add(self, kind: str, name: str, folder: Path, revision: str = "main") -> str:
        """Serve a folder as a revision; returns its commit, by which it is served, too."""
        commit = hashlib.sha1(f"{name} {folder}".encode()).hexdigest()
        revisions = self.repositories.setdefault(f"{kind}/{name}", {})
        revisions[revision] = revisions[commit] = folder
        return commit

    def reply(self, method: str, target: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
        """Answer a request with status, headers and content."""
        self.requests.append(f"{method} {target}")
        time.sleep(self.delay_s)
        parts = unquote(urlsplit(target).path).strip("/").split("/")
        is_api, parts = parts[0] == "api", parts[parts[0] == "api" :]
        if parts[0] not in ("models", "datasets"):
            parts = ["models", *parts]
        kind, name, rest = parts[0], "/".join(parts[1:3]), parts[3:]
        revisions = self.repositories.get(f"{kind}/{name}")
        if revisions is None:
            return 404, {"X-Error-Code": "RepoNotFound"}, b""
        revision = rest[1] if len(rest) > 1 else "main"
        if revision not in revisions:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        folder = revisions[revision]
        commit = next(key for key, each in revisions.items() if each == folder and len(key) == 40)
        if not is_api and f"{kind}/{name}" in self.gated:
            return 403, {"X-Error-Code": "GatedRepo"}, b""
        if is_api:
            value = self._listing(rest, folder, body)
            if value is None:
                value = {"id": name, "sha": commit, "private": False, "tags": [], "downloads": 0, "likes": 0}
                value["siblings"] = [{"rfilename": each["path"]} for each in _entries(folder)]
            return 200, {"Content-Type": "application/json"}, json.dumps(value).encode()
        file = folder.joinpath(*rest[2:])
        if not file.is_file():
            return 404, {"X-Error-Code": "EntryNotFound"}, b""
        content = file.read_bytes()
        etag = hashlib.sha1(content).hexdigest()
        return 200, {"ETag": f'"{etag}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}, content

    def _listing(self, rest: list[str], folder: Path, body: bytes) -> list[dict[str, Any]] | None:
        if rest[:1] == ["tree"]:
            below = "/".join(rest[2:])
            return [each for each in _entries(folder) if each["path"].startswith(below)]
        if rest[:1] == ["paths-info"]:
            form = unquote(body.decode())
            try:
                paths = json.loads(form)["paths"]
            except ValueError:
                paths = [part.partition("=")[2] for part in form.split("&") if part.startswith("paths=")]
            return [each for each in _entries(folder) if each["path"] in paths]
        return None


def _entries(folder: Path) -> list[dict[str, Any]]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return [
        {
            "type": "file",
            "path": path.relative_to(folder).as_posix(),
            "size": path.stat().st_size,
            "oid": hashlib.sha1(path.read_bytes()).hexdigest(),
        }
        for path in files
    ]


def use_hub(monkeypatch: pytest.MonkeyPatch, hub: LoopbackHub, home: Path) -> None:
    """Let huggingface_hub of this process read models from a hub, with its cache in `home`."""
    from huggingface_hub import constants

    template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HF_HOME", str(home))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


@contextmanager
def loopback_hub() -> Generator[LoopbackHub]:
    """Serve a hub until the context ends."""
    hub = LoopbackHub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, headers, content = hub.reply(self.command, self.path, body)
            start = 0
            if status == 200 and (ranges := self.headers.get("Range")):
                first, _, last = ranges.removeprefix("bytes=").partition("-")
                start, end = int(first), int(last or len(content) - 1)
                headers["Content-Range"] = f"bytes {start}-{end}/{len(content)}"
                status, content = 206, content[start : end + 1]
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        do_GET = do_HEAD = do_POST = _answer  # names of http.server

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
