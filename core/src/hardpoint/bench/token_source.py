"""A stand-in for the engine's core, which reports tokens at a set rate and computes none: it measures HTTP alone."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable, Iterable
from functools import partial
from queue import Empty, SimpleQueue

from hardpoint.config import EngineConfig
from hardpoint.engine.client import CoreFacts, EngineStats, OwnedCore
from hardpoint.engine.locations import model_location, tokenizer_of
from hardpoint.engine.processes.calls import Answer, Call, Failure, Stop
from hardpoint.engine.remote.core_process import ProcessLink
from hardpoint.engine.remote.messages import Abort, Add, Advanced, Command, Ready, Report, StartFailed
from hardpoint.engine.remote.news import Reported, collect_news
from hardpoint.engine.remote.remote_core import RemoteCore
from hardpoint.engine.requests import RequestProgress
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


def _append_next(request: RequestProgress) -> None:
    """Give ``request`` its next token, which may be its last."""
    tokens = request.token_ids
    tokens.append(tokens[-request.num_prompt_tokens])
    if len(tokens) >= request.asked.max_total_tokens:
        request.finish_reason = "length"


class _Source:
    """Serves commands, and takes steps at their times."""

    def __init__(self, commands: SimpleQueue[Command], send: Callable[[Report | Answer], None], rate: float) -> None:
        self._commands, self._send, self._rate = commands, send, rate
        self._open: dict[int, Reported] = {}

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
            request = RequestProgress(pickle.loads(command.asked))
            self._open[command.number] = Reported(request, command.number, request.num_prompt_tokens)
        elif isinstance(command, Abort) and (aborted := self._open.get(command.number)) is not None:
            aborted.request.finish_reason = "abort"
            self._report([aborted])
        elif isinstance(command, Call):
            error = ConfigError("a stand-in for the engine cannot be controlled")
            self._send(Answer(command.number, failure=Failure.of(error)))

    def _step(self) -> None:
        for each in self._open.values():
            _append_next(each.request)
        self._report(self._open.values())

    def _report(self, advanced: Iterable[Reported]) -> None:
        """Report the news of these requests, and forget those that have ended."""
        news = collect_news(advanced)
        for delta in news.deltas:
            if delta.finish_reason is not None:
                del self._open[delta.number]
        self._send(Advanced(news, EngineStats(num_running=len(self._open))))
