"""Sleep, wake-up, prefix cache and profile, at vLLM's paths. An operator's: off unless the server is told otherwise."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query

from hardpoint.server.errors import ApiError, JsonResponse, control_errors
from hardpoint.server.service import Service, ServiceOf

router = APIRouter(tags=["operations"])


async def _service(service: ServiceOf) -> Service:
    """The service of a server whose engine clients may control. Raises ApiError 403."""
    if not service.settings.allow_engine_control:
        raise ApiError(403, "clients do not control the engine of this server; start it with --allow-engine-control")
    return service


Controlled = Annotated[Service, Depends(_service)]
Tags = Annotated[list[str] | None, Query()]


@router.post("/sleep")
async def sleep(service: Controlled, level: int = 1, tags: Tags = None) -> JsonResponse:
    """Give the engine's memory back, by ``level`` or ``tags``; see LLM.sleep."""
    with control_errors():
        await service.host.engine.sleep(level, tags)
    return JsonResponse({})


@router.post("/wake_up")
async def wake_up(service: Controlled, tags: Tags = None) -> JsonResponse:
    """Take the memory again: all of it, or ``tags``."""
    with control_errors():
        await service.host.engine.wake_up(tags)
    return JsonResponse({})


@router.get("/is_sleeping")
async def is_sleeping(service: Controlled) -> JsonResponse:
    """Whether some of the engine's memory is given back."""
    return JsonResponse({"is_sleeping": service.host.engine.is_sleeping})


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(service: Controlled) -> JsonResponse:
    """Forget every cached prefix."""
    with control_errors():
        await service.host.engine.reset_prefix_cache()
    return JsonResponse({})
