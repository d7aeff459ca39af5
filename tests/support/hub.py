"""A stand-in for the Hugging Face hub: as much of its HTTP API as ``huggingface_hub`` uses to download a repository."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


@dataclass(frozen=True)
class Repository:
    """``files`` by commit and path; ``branches`` name commits. ``listed`` are paths that the hub names and lacks.

    ``token`` is what a request must carry, if any: without it a gated repository answers with 401, with another
    account's with 403, and a private one is not found.
    """

    files: Mapping[str, Mapping[str, bytes]]
    branches: Mapping[str, str]
    listed: tuple[str, ...] = ()
    token: str | None = None
    gated: bool = False


@dataclass
class Hub:
    """The repositories by id. ``requests`` are the lines that were asked for, such as ``GET /api/models/a/b``."""

    repositories: dict[str, Repository]
    requests: list[str] = field(default_factory=list)
    endpoint: str = ""


@dataclass(frozen=True)
class _Answer:
    status: HTTPStatus
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""


def _json(value: object) -> _Answer:
    return _Answer(HTTPStatus.OK, {"Content-Type": "application/json"}, json.dumps(value).encode())


def _error(status: HTTPStatus, code: str, message: str) -> _Answer:
    return _Answer(status, {"X-Error-Code": code, "X-Error-Message": message})


def _digest(content: bytes) -> str:
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()


def _answer(hub: Hub, path: str, token: str | None) -> _Answer:
    parts = path.strip("/").split("/")
    is_api = parts[:2] == ["api", "models"]
    owner, name, *rest = [*parts[2:], "", ""] if is_api else [*parts, "", ""]
    repo = hub.repositories.get(f"{owner}/{name}")
    if repo is None or (repo.token not in (None, token) and not repo.gated):
        return _error(
            HTTPStatus.NOT_FOUND if token else HTTPStatus.UNAUTHORIZED, "RepoNotFound", "Repository not found"
        )
    asks = next((part for part in rest if part), "revision")
    if repo.gated and repo.token != token and asks in ("tree", "resolve"):  # what a repository holds is no secret
        status = HTTPStatus.FORBIDDEN if token else HTTPStatus.UNAUTHORIZED
        return _error(status, "GatedRepo", f"Access to model {owner}/{name} is restricted.")
    revision = rest[1] if len(rest) > 1 and rest[1] else "main"
    commit = repo.branches.get(revision, revision)
    if commit not in repo.files:
        return _error(HTTPStatus.NOT_FOUND, "RevisionNotFound", f"Invalid rev id: {revision}")
    files = repo.files[commit]
    if asks == "revision":
        return _json({"id": f"{owner}/{name}", "sha": commit, "siblings": [{"rfilename": each} for each in files]})
    if asks == "tree":
        listed = {**files, **dict.fromkeys(repo.listed, b"")}
        return _json(
            [{"type": "file", "path": p, "size": len(data), "oid": _digest(data)} for p, data in listed.items()]
        )
    wanted = "/".join(part for part in rest[2:] if part)
    if wanted not in files:
        return _error(HTTPStatus.NOT_FOUND, "EntryNotFound", "Entry not found")
    headers = {"X-Repo-Commit": commit, "ETag": f'"{_digest(files[wanted])}"'}
    return _Answer(HTTPStatus.OK, headers, files[wanted])


@contextmanager
def running(hub: Hub) -> Iterator[Hub]:
    """Serve ``hub`` at its ``endpoint``."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.requests.append(f"{self.command} {path}")
            token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
            answer = _answer(hub, path, token)
            self.send_response(answer.status)
            for name, value in {**answer.headers, "Content-Length": str(len(answer.body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(answer.body)

        def do_HEAD(self) -> None:
            self.do_GET()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
