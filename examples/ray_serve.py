"""A deployment of Ray Serve: each replica is an actor with an engine of its own, and streams text as it is made.

    pip install 'hardpoint-core[ray]' 'ray[serve]'
    serve run --app-dir examples ray_serve:app
    curl --no-buffer localhost:8000 --json '{"prompt": "It is a truth"}'

``num_replicas`` and autoscaling are Ray Serve's; ``ray_actor_options={"num_gpus": 1}`` gives each engine a GPU. Clients
of OpenAI's protocol want ``hardpoint serve`` instead, which runs on a Ray cluster by ``--executor ray``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from ray import serve
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from hardpoint import AsyncEngine, SamplingParams
from hardpoint_plugin_api import EngineDeadError, RequestError


class Continue:
    """Continues the ``prompt`` of each request."""

    async def __init__(self, model: str, **settings: Any) -> None:  # type: ignore[misc]  # Ray Serve awaits it
        self.engine = await asyncio.to_thread(AsyncEngine, model, **settings)  # the event loop answers Ray meanwhile

    def check_health(self) -> None:
        """Have Ray replace an actor whose engine is gone."""
        self.engine.check_health()

    async def __call__(self, request: Request) -> Response:
        asked = await request.json()
        if not isinstance(asked.get("prompt"), str):
            return JSONResponse({"error": 'the body needs a text "prompt"'}, status_code=400)
        params = SamplingParams(temperature=0, max_tokens=int(asked.get("max_tokens", 12)))
        try:
            stream = self.engine.generate(asked["prompt"], params)
            first = await anext(stream)
        except RequestError as error:
            return JSONResponse({"error": str(error)}, status_code=400)
        except EngineDeadError as error:
            return JSONResponse({"error": str(error)}, status_code=503)
        return StreamingResponse(_new_text(first, stream), media_type="text/plain")


async def _new_text(first: Any, stream: AsyncIterator[Any]) -> AsyncIterator[str]:
    """The text that each output adds to the one before. A client that is gone ends the stream, and so the request."""
    sent = first.outputs[0].text
    yield sent
    async for output in stream:
        text = output.outputs[0].text
        yield text[len(sent) :]
        sent = text


app = serve.deployment(num_replicas=1, ray_actor_options={"num_cpus": 1})(Continue).bind("demo")
