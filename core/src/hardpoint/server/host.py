"""The engine behind a server: loading, serving, being built again, stopping or gone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from hardpoint.config import EngineConfig
from hardpoint.engine.async_engine import AsyncEngine, Connect, connect_own
from hardpoint.engine.remote.recovery import RecoveryState
from hardpoint.engine.sampling_params import SamplingParams
from hardpoint.parsers import Parsers
from hardpoint.server.errors import ApiError
from hardpoint.server.peers import Peers
from hardpoint_plugin_api import EngineDeadError, HardpointError, StructuredOutput

logger = logging.getLogger(__name__)

_WARM_TOKENS = 4
"""Tokens of each output that warms an engine up."""
State = Literal["loading", "ready", "restarting", "stopping", "dead"]


@dataclass(frozen=True)
class _Ways:
    """Facts about the model's output: parsers, special tokens, default parameters."""

    parsers: Parsers
    special_tokens: Mapping[str, int]
    default_params: SamplingParams


class EngineHost:
    """Builds one engine from ``config``, says how it is, and frees it. Lives in one event loop."""

    def __init__(self, config: EngineConfig, connect: Connect = connect_own) -> None:
        """``connect`` finds the engine's core."""
        self.config, self._connect = config, connect
        self._engine: AsyncEngine | None = None
        self._ways: _Ways | None = None
        self._stopping = self._are_all_loaded = False

    async def start(self, peers: Peers) -> None:
        """Load the model, in a thread, and be ready when all ``peers`` are. Raises what building an engine raises."""
        engine = await asyncio.to_thread(AsyncEngine.from_config, self.config, self._connect)
        try:
            ways = await asyncio.to_thread(_ways, engine)
        except BaseException:
            await engine.close()
            raise
        if not self._stopping:
            await _warm_up(engine)
        if self._stopping:
            await engine.close()
            return
        self._engine, self._ways = engine, ways
        await peers.all_loaded()  # another that says it is ready may count on this one
        self._are_all_loaded = True

    @property
    def parsers(self) -> Parsers:
        """The parsers of the model's output."""
        return self._loaded_ways.parsers

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """The tokenizer's special tokens: ids by text."""
        return self._loaded_ways.special_tokens

    @property
    def _loaded_ways(self) -> _Ways:
        assert self._ways is not None, "ask for the engine first"
        return self._ways

    @property
    def state(self) -> State:
        """How the engine is at this moment."""
        if self._stopping:
            return "stopping"
        if not self._are_all_loaded:
            return "loading"
        if self.why_dead is not None:
            return "dead"
        return "ready" if self.recovery.restarting is None else "restarting"

    @property
    def recovery(self) -> RecoveryState:
        """The state of recovery from the engine's failures."""
        return RecoveryState() if self._engine is None else self._engine.recovery

    @property
    def why_dead(self) -> str | None:
        """Why no request will be served any more; None while the engine lives or is loading."""
        if self._engine is None or self._stopping:
            return None
        try:
            self._engine.check_health()
        except HardpointError as error:
            return str(error)
        return None

    @property
    def engine(self) -> AsyncEngine:
        """The engine, for a request. One that is being built again takes them, and they wait.

        Raises ApiError 503 where there is none that takes requests.
        """
        if self._stopping:
            raise ApiError(503, "the server is shutting down", code="shutting_down")
        if self._engine is None:
            raise ApiError(503, "the model is still loading; try again when /ready answers with 200", code="not_ready")
        try:
            self._engine.check_health()
        except EngineDeadError as error:
            raise ApiError(503, f"the engine is gone: {error}", code="engine_dead") from None
        return self._engine

    def check_admits(self) -> None:
        """Raise ApiError 503 where no request is taken."""
        _ = self.engine

    @property
    def loaded(self) -> AsyncEngine | None:
        """The engine, whatever its state, or None before it is built."""
        return self._engine

    def default_params(self) -> SamplingParams:
        """The checkpoint's sampling parameters, for the fields that a request leaves out.

        A temperature of 1, the protocols' own default, where it asks for none: greedy is what a client says with 0.
        """
        return self._loaded_ways.default_params

    def stop_admission(self) -> None:
        """Take no more requests."""
        self._stopping = True

    async def stop(self, deadline: float) -> None:
        """Let open requests go on for ``deadline`` seconds, end the rest, free all. A second call may shorten it."""
        self._stopping = True
        if self._engine is not None:
            await self._engine.close(drain=deadline)


async def _warm_up(engine: AsyncEngine) -> None:
    """Have ``engine`` run a prompt, decode, draw and follow a grammar, so that no client waits for what that loads.

    An engine that cannot do one of these says so to the requests that ask for it.
    """
    drawn = SamplingParams(max_tokens=_WARM_TOKENS, seed=0, ignore_eos=True, top_p=0.9)
    for params in (drawn, replace(drawn, structured=StructuredOutput.json_object())):
        try:
            async with await engine.submit([0], params) as stream:
                async for _ in stream:
                    pass
        except HardpointError as error:
            logger.debug("the engine was not warmed up: %s", error)


def _ways(engine: AsyncEngine) -> _Ways:
    tokenizer = engine.tokenizer
    special = {tokenizer.decode([number], skip_special_tokens=False): number for number in tokenizer.special_ids}
    params = engine.default_sampling_params()
    drawn = replace(params, temperature=1.0) if params.temperature == 0 else params
    return _Ways(engine.choose_parsers(), special, drawn)
