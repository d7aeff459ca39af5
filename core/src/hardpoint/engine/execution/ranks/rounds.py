"""Rounds: before each step the cores of replicas that share experts tell each other of what size it is.

A core that has a step begins a round, and each other core answers with its own step, or an empty one. No core begins
another round before all have answered. So ranks of all replicas run the same number of steps in the same order, and
nobody runs or waits busily where no replica has requests.
"""

from __future__ import annotations

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
        for connection in self._others.values():
            with suppress(OSError):  # it is gone: the reader says so
                connection.send_bytes(own.packed)
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
            or f"replica {silent} did not take part in a step within {self._seconds:g} seconds (--step-timeout)"
        )

    def break_off(self) -> None:
        """Have ``agree`` and ``meet`` wait no longer: this replica's own ranks are lost.

        Others may wait for it to say so.
        """
        with self._changed:
            self._is_broken_off = True
            self._changed.notify_all()

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

        Returns at once where one is gone. Raises EngineDeadError where one goes, or does not answer.
        """
        for connection in self._others.values():
            with suppress(OSError):
                connection.send_bytes(_FINISHED)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ended or self.has_begun or not self._running)
                if self._ended or not self.has_begun:
                    return
            keep_up()

    def meet(self, said: str, keep_up: Callable[[], None]) -> None:
        """Wait until all replicas have come here, and call ``keep_up`` for each round that one of them still begins.

        Each begins no more rounds before it returns. Raises EngineError where another says something else than
        ``said``, or has finished; EngineDeadError where one is gone, and once this replica breaks off.
        """
        padding = b" " * (-len(said.encode()) % _NUMBER.size)
        for connection in self._others.values():
            with suppress(OSError):
                connection.send_bytes(_MEETS + said.encode() + padding)
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
        for connection in self._others.values():
            if not is_lost:
                with suppress(OSError):
                    connection.send_bytes(_LEAVES)
            shut(connection)
        self._reader.join()
        for connection in self._others.values():
            connection.close()

    @property
    def _ended(self) -> str | None:
        return self._lost or (CLOSED if self._is_closed else None)

    def _read(self) -> None:
        listening: dict[object, int] = {connection: number for number, connection in self._others.items()}
        while listening:
            for each in wait(list(listening)):  # type: ignore[arg-type]  # connections
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
                            self._lost = f"replica {number} {ended}, with which this one shares experts"
                    elif data == _FINISHED:
                        self._running.discard(number)
                    elif len(data) % _NUMBER.size:
                        self._said[number].append(data.removeprefix(_MEETS).decode().rstrip())
                    else:
                        self._shares[number].append(Share.unpack(data))
                    self._changed.notify_all()
                self._notify()


def _received(connection: Connection) -> bytes | None:
    """The message of a replica, None where it is gone."""
    try:
        return connection.recv_bytes()
    except (EOFError, OSError):
        return None
