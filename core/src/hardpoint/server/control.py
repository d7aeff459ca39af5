"""Sleep, wake-up, prefix cache, profile and settings, at vLLM's paths.

An operator's: off unless the server is told otherwise.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query

from hardpoint import __version__
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


@router.post("/start_profile")
async def start_profile(service: Controlled) -> JsonResponse:
    """Record what the engine does, until ``/stop_profile``."""
    folder = service.settings.profile_folder
    if folder is None:
        raise ApiError(403, "this server takes no profiles; start it with --profile-folder FOLDER")
    with control_errors():
        await service.host.engine.start_profile(folder)
    return JsonResponse({})


@router.post("/stop_profile")
async def stop_profile(service: Controlled) -> JsonResponse:
    """Write the profile into the folder that the server was started with."""
    with control_errors():
        await service.host.engine.stop_profile()
    return JsonResponse({})


@router.get("/server_info")
async def server_info(service: Controlled) -> JsonResponse:
    """The settings of the engine, and how it was built."""
    engine = service.host.engine
    return JsonResponse(
        {
            "version": __version__,
            "config": service.host.config.model_dump(mode="json"),
            "model_names": list(service.model_names),
            "max_model_len": engine.max_model_len,
            "selection_table": engine.table.digest,
        }
    )
