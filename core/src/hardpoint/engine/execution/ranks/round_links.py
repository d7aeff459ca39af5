"""The connections by which the cores of replicas that share experts agree on steps: within a host, or between hosts."""

from __future__ import annotations

import json
import secrets
import struct
import time
from collections.abc import Collection
from datetime import timedelta
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import TYPE_CHECKING

from hardpoint.engine.execution.ranks.sockets import set_up
from hardpoint_plugin_api import EngineDeadError, EngineError

if TYPE_CHECKING:
    from hardpoint.parallel.process_group import Store

_RETRY_SECONDS = 0.01
_NUMBER = struct.Struct("<q")


def met_in_folder(replica: int, replicas: int, folder: Path, patience: float) -> dict[int, Connection]:
    """A connection to each other replica, by its number; all meet in ``folder``, which no other user may enter.

    Raises EngineDeadError, which names the replicas that do not come within ``patience`` seconds.
    """
    address, deadline = str(folder / f"core-{replica}"), _Deadline(patience)
    try:
        listener = Listener(address, "AF_UNIX", backlog=replicas)
    except OSError as error:
        raise EngineError(
            f"replicas that share experts cannot meet at {address}: {error}; set TMPDIR to a folder with a short name"
        ) from error
    others: dict[int, Connection] = {}
    with listener:
        for number in range(replica):
            others[number] = _connected(folder / f"core-{number}", number, deadline)
            others[number].send_bytes(_NUMBER.pack(replica))
        return others | _accepted(listener, range(replica + 1, replicas), deadline)


def met_at_store(
    replica: int, replicas: int, store: Store, host: str, patience: float, *, on_one_host: bool
) -> dict[int, Connection]:
    """As ``met_in_folder``, for replicas that share ``store``; others reach this one at ``host``.

    A caller must show a key that is in the store alone.
    """
    key, deadline = secrets.token_bytes(32), _Deadline(patience)
    others: dict[int, Connection] = {}
    with Listener((host if on_one_host else "", 0), backlog=replicas, authkey=key) as listener:
        store.set(f"core-{replica}", json.dumps({"host": host, "port": listener.address[1], "key": key.hex()}))
        for number in range(replica):
            try:
                store.wait([f"core-{number}"], timedelta(seconds=max(1.0, deadline.left)))
                link = json.loads(store.get(f"core-{number}"))
                others[number] = set_up(Client((link["host"], link["port"]), authkey=bytes.fromhex(link["key"])))
            except (RuntimeError, OSError) as error:  # the store's own is a RuntimeError
                raise absent([number], patience) from error
            others[number].send_bytes(_NUMBER.pack(replica))
        return others | _accepted(listener, range(replica + 1, replicas), deadline)


class _Deadline:
    def __init__(self, patience: float) -> None:
        self.patience, self._until = patience, time.monotonic() + patience

    @property
    def left(self) -> float:
        return max(0.0, self._until - time.monotonic())


def absent(numbers: Collection[int], patience: float) -> EngineDeadError:
    """The error of a replica for which these did not come."""
    them = f"replica {next(iter(numbers))}" if len(numbers) == 1 else f"replicas {', '.join(map(str, numbers))}"
    return EngineDeadError(
        f"{them}, with which this one shares experts, did not come within {patience:g} seconds (--core-start-timeout)"
    )


def _accepted(listener: Listener, expected: Collection[int], deadline: _Deadline) -> dict[int, Connection]:
    """Wait for the replicas ``expected``. Each says its number first."""
    found: dict[int, Connection] = {}
    while len(found) < len(expected):
        listener._listener._socket.settimeout(max(0.001, deadline.left))  # type: ignore[attr-defined]  # no public way
        try:
            connection = set_up(listener.accept())
            if not connection.poll(deadline.left):
                raise TimeoutError
            found[_NUMBER.unpack(connection.recv_bytes())[0]] = connection
        except (AuthenticationError, EOFError, ConnectionError):  # a stranger
            continue
        except TimeoutError:
            for connection in found.values():
                connection.close()
            raise absent([n for n in expected if n not in found], deadline.patience) from None
    return found


def _connected(address: Path, number: int, deadline: _Deadline) -> Connection:
    """A connection to the core that listens at ``address``, or will."""
    while True:
        try:
            return Client(str(address), "AF_UNIX")
        except (FileNotFoundError, ConnectionRefusedError):
            if not deadline.left:
                raise absent([number], deadline.patience) from None
            time.sleep(_RETRY_SECONDS)
