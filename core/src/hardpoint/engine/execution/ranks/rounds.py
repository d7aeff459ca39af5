"""Rounds: before each step the cores of replicas that share experts tell each other of what size it is.

A core that has a step begins a round, and each other core answers with its own step, or an empty one. No core begins
another round before all have answered. So ranks of all replicas run the same number of steps in the same order, and
nobody runs or waits busily where no replica has requests.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Self

from hardpoint.engine.execution.ranks.sockets import shut
from hardpoint_plugin_api import EngineDeadError, EngineError

CLOSED = "the engine is closed"
"""The reason where another replica was closed first."""
CANNOT_GO_ON = "cannot go on: RankLostError"
"""In the reasons of ranks whose work was lost with another rank's, which may be another replica's."""
_BROKEN_OFF = "this replica's ranks are lost"
"""The reason where the ranks themselves give none."""

_GRACE = 0.5
"""Seconds for a replica that is gone to be missed where all are watched, and its end be told with its reason."""
_SMALL_STEP = 512
"""Tokens from which on the kernels of an 8B model take as long as the host: docs/distribution.md has the arithmetic."""
_NUMBER = struct.Struct("<q")
_LEAVES = b""
"""In place of a step: the replica is being closed."""
_FINISHED = b"."
"""In place of a step: the replica begins no more rounds, and takes part in those of others."""
_MEETS = b"?"
"""In place of a step, before what the replica says: see ``meet``. No step has a length like these messages'."""
_LIVES = b"!"
"""In place of a step, now and then: the replica's process runs."""
_BEATS = 4
"""How many times within a step's time limit a replica says so. One that is silent for 3/4 of it counts as hung."""


@dataclass(frozen=True)
class Share:
    """One replica's step: its number of ``tokens``, and the numbers to which it may be padded to replay a graph."""

    tokens: int
    captured: frozenset[int] = frozenset()

    @property
    def packed(self) -> bytes:
        """The share as ``unpack`` reads it."""
        return b"".join(map(_NUMBER.pack, (self.tokens, *self.captured)))

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        """The share of ``packed``."""
        tokens, *captured = (number for (number,) in _NUMBER.iter_unpack(data))
        return cls(tokens, frozenset(captured))


def captured_by_all(shares: Iterable[Share]) -> int:
    """The least number of tokens to which all replicas' steps may be padded to replay graphs; 0: there is none.

    Of large steps at most half is padding: a graph saves the host's time, and padding takes the device's.
    """
    shares = tuple(shares)
    least = min(frozenset.intersection(*(share.captured for share in shares)), default=0)
    is_worth_it = least <= _SMALL_STEP or least * len(shares) <= 2 * sum(share.tokens for share in shares)
    return least if is_worth_it else 0


class Rounds:
    """One replica's part in the rounds. One thread calls ``agree``; a thread of its own listens to the others."""

    def __init__(
        self, replica: int, others: dict[int, Connection], seconds: float, elsewhere: Collection[int] = ()
    ) -> None:
        """``others``: a connection to each other replica, by its number. A round waits for them ``seconds``.

        Replicas ``elsewhere`` belong to other servers: this one ends where one of them is closed.
        """
        self._replica, self._others, self._seconds, self._elsewhere = replica, others, seconds, elsewhere
        self._running = set(others)
        self._heard, self._sending = dict.fromkeys(others, time.monotonic()), threading.Lock()
        self._is_patient = False  # waits for other replicas however long they take, while they run
        self._shares: dict[int, deque[Share]] = {number: deque() for number in others}
        self._said: dict[int, deque[str]] = {number: deque() for number in others}
        self._changed = threading.Condition()
        self._lost: str | None = None
        self._is_closed = self._has_left = self._is_broken_off = False
        self._notify: Callable[[], None] = lambda: None
        self._reader = threading.Thread(target=self._read, name="hardpoint-rounds", daemon=True)
        self._reader.start()

    @property
    def has_begun(self) -> bool:
        """Whether another replica waits for this one's step."""
        return any(self._shares.values())

    def agree(self, own: Share) -> tuple[Share, ...]:
        """Tell the other replicas of this one's step; returns those of all, in the order of the replicas.

        Waits for the others. Raises EngineDeadError where one is gone or does not answer, and once this replica breaks
        off.
        """
        self._tell(own.packed)
        with self._changed:
            self._changed.wait_for(
                lambda: self._ended or self._is_broken_off or all(self._shares.values()), self._seconds
            )
            if all(self._shares.values()):
                shares = {number: each.popleft() for number, each in self._shares.items()} | {self._replica: own}
                return tuple(shares[number] for number in sorted(shares))
            silent = ", ".join(str(number) for number, each in self._shares.items() if not each)
        raise EngineDeadError(
            self._ended
            or (_BROKEN_OFF if self._is_broken_off else "")
            or f"replica {silent}, with which this one shares experts, did not take part in a step within "
            f"{self._seconds:g} seconds (--step-timeout)"
        )

    def break_off(self) -> None:
        """Have no call wait any longer: this replica's own ranks are lost. The other replicas learn of it at once."""
        with self._changed:
            self._is_broken_off = True
            self._changed.notify_all()
        for connection in self._others.values():
            shut(connection, socket.SHUT_WR)

    def lost_within(self, seconds: float) -> str | None:
        """Which replica is gone, where it turns out within ``seconds`` that one is, which was not closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended, seconds)
        return self._lost

    def check(self) -> None:
        """Raise EngineDeadError if a replica is gone, unless it was closed."""
        if self._lost is not None:
            raise EngineDeadError(self._lost)

    def when_begun(self, notify: Callable[[], None]) -> None:
        """Call ``notify``, from another thread, when a round begins or a replica is gone; that may have happened."""
        self._notify = notify
        if self.has_begun or self._lost is not None:
            notify()

    def finish(self, keep_up: Callable[[], None]) -> None:
        """Begin no more rounds, and call ``keep_up`` for each of the others', until none begins any.

        Returns at once where one is gone or does not run, and once this replica breaks off. Raises EngineDeadError
        where that happens in ``keep_up``.
        """
        self._tell(_FINISHED)
        self._is_patient = True
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._ended or self._is_broken_off or self.has_begun or not self._running
                )
                if self._ended or self._is_broken_off or not self.has_begun:
                    return
            keep_up()

    def meet(self, said: str, keep_up: Callable[[], None]) -> None:
        """Wait until all replicas have come here, and call ``keep_up`` for each round that one of them still begins.

        Each begins no more rounds before it returns. Raises EngineError where another says something else than
        ``said``, or has finished; EngineDeadError where one is gone or does not run, and once this replica breaks off.
        """
        padding = b" " * (-len(said.encode()) % _NUMBER.size)
        self._tell(_MEETS + said.encode() + padding)
        self._is_patient = True
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._ended or self._is_broken_off or self.has_begun or self._have_met or self._missed
                )
                if self._ended or self._is_broken_off:
                    raise EngineDeadError(self._ended or _BROKEN_OFF)
                if not self.has_begun:
                    break
            keep_up()
        self._is_patient = False
        with self._changed:
            if self._missed:
                raise EngineError(f"this replica {said}, and replica {self._missed[0]} is being closed")
            others = {number: each.popleft() for number, each in self._said.items()}
        for number, other in others.items():
            if other != said:
                raise EngineError(
                    f"this replica {said}, and replica {number} {other}: all that share experts must do the same"
                )

    @property
    def _have_met(self) -> bool:
        return all(self._said.values())

    @property
    def _missed(self) -> list[int]:
        """Replicas that say nothing any more."""
        return [number for number, each in self._said.items() if not each and number not in self._running]

    def leave(self, *, is_lost: bool = False) -> None:
        """Tell the others that this replica is being closed, unless ``is_lost``, and listen no more. Twice is once."""
        with self._changed:
            has_left, self._has_left, self._is_closed = self._has_left, True, True
            self._changed.notify_all()
        if has_left:
            return
        if not is_lost:
            self._tell(_LEAVES)
        for connection in self._others.values():
            shut(connection)
        self._reader.join()
        for connection in self._others.values():
            connection.close()

    @property
    def _ended(self) -> str | None:
        return self._lost or (CLOSED if self._is_closed else None)

    def _tell(self, message: bytes, but: Collection[int] = ()) -> None:
        """Send ``message`` to the other replicas, from any thread, ``but`` to some."""
        for number, connection in self._others.items():
            if number not in but:
                with self._sending, suppress(OSError):  # it is gone: the reader says so
                    connection.send_bytes(message)

    def _beat(self) -> None:
        """Say that this replica runs, and find those that have not said so for long."""
        limit = self._seconds * (_BEATS - 1) / _BEATS
        hung = [number for number, heard in self._heard.items() if time.monotonic() - heard > limit]
        self._tell(_LIVES, but=hung)  # a connection that nobody reads fills up
        with self._changed:
            if hung and self._is_patient and not self._ended:
                self._lost = (
                    f"replica {hung[0]}, with which this one shares experts, did not react within {self._seconds:g} "
                    "seconds (--step-timeout)"
                )
            self._changed.notify_all()

    def _read(self) -> None:
        listening: dict[object, int] = {connection: number for number, connection in self._others.items()}
        interval = self._seconds / _BEATS
        beats = time.monotonic() + interval
        while listening:
            found = wait(list(listening), max(0.0, beats - time.monotonic()))  # type: ignore[arg-type]  # connections
            for each in found:
                self._heard[listening[each]] = time.monotonic()
                data = _received(self._others[listening[each]])
                if data is None and not self._is_closed:
                    time.sleep(_GRACE)
                with self._changed:
                    number = listening[each]
                    if not data:
                        del listening[each]
                        is_closed = data == _LEAVES
                        self._is_closed |= is_closed and number not in self._elsewhere
                        if not self._is_closed:
                            ended = "was closed" if is_closed else "is gone"
                            gone = f"replica {number} {ended}, with which this one shares experts"
                            self._lost = self._lost or gone
                    elif data == _FINISHED:
                        self._running.discard(number)
                    elif data == _LIVES:
                        continue
                    elif len(data) % _NUMBER.size:
                        self._said[number].append(data.removeprefix(_MEETS).decode().rstrip())
                    else:
                        self._shares[number].append(Share.unpack(data))
                    self._changed.notify_all()
                self._notify()
            if time.monotonic() >= beats:
                self._beat()
                beats = time.monotonic() + interval


def _received(connection: Connection) -> bytes | None:
    """The message of a replica, None where it is gone."""
    try:
        return connection.recv_bytes()
    except (EOFError, OSError):
        return None
