"""The state that every handler needs, and the one way in which handlers get it."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, cast

from fastapi import Depends, Request

from hardpoint.engine.lora import Adapter
from hardpoint.engine.sampling_params import SamplingParams
from hardpoint.server.errors import ApiError
from hardpoint.server.event_log import EventLog
from hardpoint.server.host import EngineHost
from hardpoint.server.metrics import ServerMetrics
from hardpoint.server.peers import Alone, OpenRequests, Peers, Question, T
from hardpoint.server.response_store import ResponseStore
from hardpoint.server.settings import ServerSettings
from hardpoint.server.vllm_fields import ANSWERS
from hardpoint_plugin_api import ConfigError

if TYPE_CHECKING:
    from hardpoint.server.traces import Traces

logger = logging.getLogger(__name__)

_NUMBERS = re.compile(r"\[\d+\]")
_MAX_LOGGED = 256
"""Names of ignored fields that a server logs: clients may invent any number of them."""


@dataclass
class Service:
    """One server's engine, settings and metrics."""

    host: EngineHost
    settings: ServerSettings
    metrics: ServerMetrics = field(init=False)
    created: int = field(default_factory=lambda: int(time.time()))
    open: OpenRequests = field(default_factory=OpenRequests)
    peers: Peers = field(default_factory=Alone)
    traces: Traces | None = None
    """The sender of a span for each generation, if spans are wanted."""
    store: ResponseStore | None = None
    """The responses that are kept, if any are."""
    background: dict[tuple[str, str], asyncio.Task[None]] = field(default_factory=dict)
    """The tasks that make responses in the background, by owner and id."""
    event_logs: dict[tuple[str, str], EventLog] = field(default_factory=dict)
    """The events of those among them that are streamed, too."""
    _logged: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        """Raise ConfigError for an adapter that nobody could ask for: its name is one of the model's."""
        for name, path in self.host.config.lora_paths.items():
            if name in self.model_names:
                raise ConfigError(
                    f"--lora-modules {name}={path}: the model itself is served as {name!r}; give the adapter another "
                    "name, or the model one with --served-model-name"
                )
        models = (self.model_names[0], *self.host.config.lora_paths)
        self.metrics = ServerMetrics(models, vllm_names=self.settings.metrics_names == "vllm")

    async def close(self) -> None:
        """End what is made in the background, and close the store."""
        tasks = set(self.background.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if self.store is not None:
            self.store.close()
        if self.traces is not None:
            await asyncio.to_thread(self.traces.close)

    async def ask(self, question: Question[T]) -> list[T]:
        """The answers of all processes of the server, this one's first."""
        return await self.peers.ask(question, self)

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names that clients may use for the model; answers carry the first."""
        return self.settings.served_model_names or (self.host.config.model,)

    @property
    def adapters(self) -> Mapping[str, Adapter]:
        """The LoRA adapters that are loaded, by name: names of models, too."""
        engine = self.host.loaded
        return {} if engine is None else {adapter.name: adapter for adapter in engine.adapters}

    def adapter(self, model: str) -> str:
        """The adapter that the model ``model`` is; an empty name where it is none."""
        return model if model not in self.model_names and model in self.adapters else ""

    def check_model(self, name: str | None) -> str:
        """The name for the answer. None is the model served. Raises ApiError 404 for another."""
        if name is None:
            return self.model_names[0]
        if name not in self.model_names and name not in self.adapters:
            known = ", ".join(map(repr, (*self.model_names, *self.adapters)))
            raise ApiError(
                404, f"model {name!r:.200} is not served here; there is {known}", param="model", code="model_not_found"
            )
        return name

    def log_ignored(self, path: str, name: str) -> None:
        """Log that the field ``name`` of requests to ``path`` is ignored, once for each field."""
        plain = _NUMBERS.sub("[]", name)[:80]
        if plain not in self._logged and len(self._logged) < _MAX_LOGGED:
            self._logged.add(plain)
            why = ANSWERS.get(plain, "it is unknown")
            logger.warning("%s: the field %r is ignored: %s (--strict-fields refuses it)", path, plain, why)

    def params(self, **own: Any) -> SamplingParams:
        """The model's own sampling with what a request says. Raises RequestError for a value out of range."""
        return replace(self.host.default_params(), **own)


async def _service(request: Request) -> Service:  # async: FastAPI calls a plain function in another thread
    return cast(Service, request.app.state.service)


ServiceOf = Annotated[Service, Depends(_service)]
"""The type of a handler's parameter that is given the service."""
