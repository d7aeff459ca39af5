"""Responses that are kept for later requests, in SQLite: bounded in size and age, each its owner's alone."""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hardpoint_plugin_api import ConfigError

_FORM = 3
"""The form of the tables, which SQLite keeps as the file's user_version."""
_UPGRADES = {2: "ALTER TABLE responses ADD COLUMN events TEXT;"}
"""Statements that bring tables of an earlier form to this one."""
_TABLES = """
CREATE TABLE IF NOT EXISTS responses (
    owner TEXT, id TEXT, previous TEXT, used REAL, size INTEGER, input TEXT, response TEXT, maker INTEGER,
    events TEXT,
    PRIMARY KEY (owner, id)
);
CREATE INDEX IF NOT EXISTS by_use ON responses (used);
CREATE TABLE IF NOT EXISTS total (size INTEGER);
INSERT INTO total SELECT 0 WHERE NOT EXISTS (SELECT * FROM total);
CREATE TRIGGER IF NOT EXISTS added AFTER INSERT ON responses BEGIN UPDATE total SET size = size + new.size; END;
CREATE TRIGGER IF NOT EXISTS removed AFTER DELETE ON responses BEGIN UPDATE total SET size = size - old.size; END;
"""
_BUSY_SECONDS = 30.0
"""How long another process may hold the file."""
OPEN = ("queued", "in_progress")
"""Statuses of a response that is being made."""


@dataclass(frozen=True)
class StoredResponse:
    """A response as its client got it, and the items of its own request. ``previous``: the id of the one before."""

    response: dict[str, Any]
    input: list[dict[str, Any]]
    previous: str | None = None

    @property
    def response_id(self) -> str:
        """The response's id."""
        return str(self.response["id"])

    @property
    def is_open(self) -> bool:
        """True while it is being made in the background."""
        return self.response["status"] in OPEN


class MissingResponseError(LookupError):
    """No response of this owner has that id: it was never kept, or not any more."""


class ResponseStore:
    """Keeps responses of ``owner``, an opaque text, in ``file``; without a file, for as long as this object lives.

    At most ``max_bytes`` of JSON are kept, for ``max_seconds`` since the last use; the least recently used go first. A
    conversation that goes on counts as a use of all its responses. Several threads may call it, and several processes
    may open one file.
    """

    def __init__(self, file: Path | None, max_bytes: int, max_seconds: float, maker: int = 0) -> None:
        """``maker``: the number of the process that makes what is put here. Raises ConfigError for a file that is no
        such store."""
        self._max_bytes, self._max_seconds, self._maker = max_bytes, max_seconds, maker
        self._lock = threading.Lock()
        try:
            # The empty name is SQLite's for a file that nobody else sees, and that is gone when it is closed.
            self._db = sqlite3.connect(file or "", timeout=_BUSY_SECONDS, check_same_thread=False, isolation_level=None)
            try:
                self._begin(file)
            except BaseException:
                self._db.close()
                raise
        except sqlite3.Error as error:
            raise ConfigError(f"--response-store {file}: {error}; give a file that a server made") from None

    def _begin(self, file: Path | None) -> None:
        form = self._db.execute("PRAGMA user_version").fetchone()[0]
        if form not in (0, _FORM, *_UPGRADES):
            raise ConfigError(f"--response-store {file}: its form is {form}, this version reads {_FORM}; give another")
        self._db.execute(f"PRAGMA journal_mode={'WAL' if file else 'MEMORY'}")
        self._db.execute(f"PRAGMA synchronous={'NORMAL' if file else 'OFF'}")
        self._db.executescript(f"BEGIN IMMEDIATE;{_UPGRADES.get(form, '')}{_TABLES}PRAGMA user_version={_FORM};COMMIT;")

    def end_open(self, maker: int | None = None) -> None:
        """Responses that ``maker`` was making have failed: it has ended. None: those of all."""
        error = {"code": "server_error", "message": "the server ended before the response was complete"}
        with self._changes():
            chosen = self._db.execute(
                "SELECT owner, id, response FROM responses WHERE maker=coalesce(?, maker)", (maker,)
            )
            for owner, key, text in chosen.fetchall():
                response = json.loads(text)
                if response["status"] in OPEN:
                    text = json.dumps(response | {"status": "failed", "error": error})
                    self._db.execute("UPDATE responses SET response=? WHERE owner=? AND id=?", (text, owner, key))

    def put(self, owner: str, stored: StoredResponse, events: Sequence[str] | None = None) -> None:
        """Keep ``stored`` in place of what has its id; not where it alone is larger than the store.

        ``events``: the events of its stream, so far none while it is made in the background; None: it has no stream.
        """
        given, response = json.dumps(stored.input), json.dumps(stored.response)
        streamed = None if events is None else json.dumps(events)
        size = len(given) + len(response) + len(streamed or "")
        with self._changes():
            self._remove(owner, stored.response_id)
            self._clear(self._max_bytes - size)
            if size <= self._max_bytes:
                row = (owner, stored.response_id, stored.previous, time.time(), size, given, response, self._maker)
                self._db.execute("INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", (*row, streamed))

    def get(self, owner: str, response_id: str) -> StoredResponse:
        """The response. Raises MissingResponseError."""
        with self._lock:
            return self._get(owner, response_id)

    def events(self, owner: str, response_id: str) -> list[str] | None:
        """The events of its stream, none while it is made; None where it has no stream, or is not kept."""
        with self._lock:
            row = self._db.execute(
                "SELECT events FROM responses WHERE owner=? AND id=?", (owner, response_id)
            ).fetchone()
        return None if row is None or row[0] is None else list(json.loads(row[0]))

    def conversation(self, owner: str, response_id: str) -> list[StoredResponse]:
        """The response behind all that it followed, the oldest first. Raises MissingResponseError, naming one."""
        found: list[StoredResponse] = []
        seen: set[str] = set()
        wanted: str | None = response_id
        with self._changes():
            while wanted is not None and wanted not in seen:  # files of earlier versions may hold circles
                seen.add(wanted)
                found.append(self._get(owner, wanted))
                wanted = found[-1].previous
            now = time.time()
            for stored in found:
                self._db.execute("UPDATE responses SET used=? WHERE owner=? AND id=?", (now, owner, stored.response_id))
        return found[::-1]

    def delete(self, owner: str, response_id: str) -> None:
        """Forget the response. Raises MissingResponseError."""
        with self._changes():
            if not self._remove(owner, response_id):
                raise MissingResponseError(response_id)

    def close(self) -> None:
        """Close the file. Nothing may be asked after that."""
        with self._lock:
            self._db.close()

    @contextmanager
    def _changes(self) -> Iterator[None]:
        """Changes that other threads and processes see all at once, or not at all where they raise."""
        with self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")

    def _get(self, owner: str, response_id: str) -> StoredResponse:
        row = self._db.execute(
            "SELECT response, input, previous FROM responses WHERE owner=? AND id=? AND used>=?",
            (owner, response_id, time.time() - self._max_seconds),
        ).fetchone()
        if row is None:
            raise MissingResponseError(response_id)
        return StoredResponse(json.loads(row[0]), json.loads(row[1]), row[2])

    def _remove(self, owner: str, response_id: str) -> bool:
        return self._db.execute("DELETE FROM responses WHERE owner=? AND id=?", (owner, response_id)).rowcount > 0

    def _clear(self, max_bytes: int) -> None:
        """Forget what is too old, and then the least recently used until ``max_bytes`` are left."""
        oldest = time.time() - self._max_seconds
        first = "SELECT owner, id, used FROM responses ORDER BY used LIMIT 1"
        total = "SELECT size FROM total"
        while (row := self._db.execute(first).fetchone()) and (
            row[2] < oldest or self._db.execute(total).fetchone()[0] > max_bytes
        ):
            self._remove(row[0], row[1])
