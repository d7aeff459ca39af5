"""A stand-in for the engine's core, which reports tokens at a set rate and computes none: it measures HTTP alone."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue

from hardpoint.config import EngineConfig
from hardpoint.engine.client import CoreFacts, EngineStats, OwnedCore
from hardpoint.engine.locations import model_location, tokenizer_of
from hardpoint.engine.processes.calls import Answer, Call, Failure, Stop
from hardpoint.engine.remote.core_process import ProcessLink
from hardpoint.engine.remote.messages import Abort, Add, Advanced, Command, Ready, Report, StartFailed
from hardpoint.engine.remote.remote_core import RemoteCore
from hardpoint.engine.requests import AdmittedRequest, Delta
from hardpoint.selection.table import SelectionTable
from hardpoint.tokenizer import Tokenizer
from hardpoint_plugin_api import ConfigError

_MAX_MODEL_LEN = 2**17
"""Tokens of a sequence, where no flag limits it."""
_MOST_LATE = 0.02
"""Seconds by which steps that come late are made up for."""


def start_token_source(config: EngineConfig, *, own_process: bool, rate: float) -> OwnedCore:
    """A stand-in with ``rate`` tokens a second, in a process of its own whatever ``own_process`` says."""
    return RemoteCore(partial(ProcessLink, run=partial(serve_tokens, rate=rate)), config)


def serve_tokens(
    config: EngineConfig, commands: SimpleQueue[Command], send: Callable[[Report | Answer], None], *, rate: float
) -> None:
    """Report one token of each open request in each step, with ``rate`` tokens a second in all, until Stop comes.

    The token at position i of an output is that of the prompt, repeated.
    """
    try:
        tokenizer = Tokenizer.load(tokenizer_of(config, model_location(config)))
    except Exception as error:
        send(StartFailed(Failure.of(error)))
        return
    most = config.max_model_len or _MAX_MODEL_LEN
    facts = CoreFacts(config, SelectionTable(()), most, tokenizer.backend.get_vocab_size(), os.getpid())
    send(Ready(facts, EngineStats()))
    _Source(commands, send, rate).run()


@dataclass
class _Open:
    """A request, and how many tokens it has."""

    asked: AdmittedRequest
    num_tokens: int = 0

    def next_token(self) -> Delta:
        """The request's next token, which may be its last."""
        asked = self.asked
        token = asked.prompt_token_ids[self.num_tokens % len(asked.prompt_token_ids)]
        self.num_tokens += 1
        is_last = self.num_tokens + len(asked.prompt_token_ids) >= asked.max_total_tokens
        return Delta(asked.number, (token,), "length" if is_last else None, None, 0, 0)


class _Source:
    """Serves commands, and takes steps at their times."""

    def __init__(self, commands: SimpleQueue[Command], send: Callable[[Report | Answer], None], rate: float) -> None:
        self._commands, self._send, self._rate = commands, send, rate
        self._open: dict[int, _Open] = {}

    def run(self) -> None:
        """Serve until Stop comes. Time that was lost is not made up for."""
        due = 0.0
        while True:
            left = due - time.monotonic()
            if self._open and left <= 0:
                due = max(due, time.monotonic() - _MOST_LATE) + len(self._open) / self._rate
                self._step()
                left = due - time.monotonic()
            try:
                command = self._commands.get(timeout=max(left, 0.0) if self._open else None)
            except Empty:
                continue
            if isinstance(command, Stop):
                return
            self._take(command)

    def _take(self, command: Command) -> None:
        if isinstance(command, Add):
            self._open[command.number] = _Open(pickle.loads(command.asked))
        elif isinstance(command, Abort) and self._open.pop(command.number, None) is not None:
            self._report(Delta(command.number, (), "abort", None, 0, 0))
        elif isinstance(command, Call):
            error = ConfigError("a stand-in for the engine cannot be controlled")
            self._send(Answer(command.number, failure=Failure.of(error)))

    def _step(self) -> None:
        deltas = [request.next_token() for request in self._open.values()]
        for delta in deltas:
            if delta.finish_reason is not None:
                del self._open[delta.number]
        self._report(*deltas)

    def _report(self, *deltas: Delta) -> None:
        self._send(Advanced(deltas, EngineStats(num_running=len(self._open))))
