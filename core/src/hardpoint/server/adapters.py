"""Loading and unloading LoRA adapters, at vLLM's paths. An operator's: off unless the server is told otherwise."""

from __future__ import annotations

from fastapi import APIRouter
from pydantic import Field
from starlette.responses import PlainTextResponse

from hardpoint.engine.control import LoadAdapter, UnloadAdapter
from hardpoint.server.errors import ApiError, control_errors
from hardpoint.server.fields import ProtocolModel
from hardpoint.server.requests import JsonRoute
from hardpoint.server.service import Service, ServiceOf

router = APIRouter(route_class=JsonRoute, tags=["operations"])


class LoadBody(ProtocolModel):
    """An adapter's name, which becomes that of a model, and its folder on the server, or hub id."""

    lora_name: str = Field(min_length=1, max_length=256)
    lora_path: str = Field(min_length=1, max_length=4096)


class UnloadBody(ProtocolModel):
    """The adapter's name. ``lora_int_id`` is not needed."""

    lora_name: str
    lora_int_id: int | None = None


@router.post("/v1/load_lora_adapter")
async def load(body: LoadBody, service: ServiceOf) -> PlainTextResponse:
    """Load an adapter between two steps."""
    _check_allowed(service)
    name = body.lora_name
    if name in (*service.model_names, *service.adapters):
        raise ApiError(400, f"lora_name: a model {name!r} is served already; choose another name", param="lora_name")
    with control_errors(checkpoint_field="lora_path"):
        await service.host.engine.control(LoadAdapter(name, body.lora_path))
    return PlainTextResponse(f"Success: LoRA adapter {name!r} added successfully.")


@router.post("/v1/unload_lora_adapter")
async def unload(body: UnloadBody, service: ServiceOf) -> PlainTextResponse:
    """Unload an adapter that no request uses."""
    _check_allowed(service)
    name = body.lora_name
    if name not in service.adapters:
        known = ", ".join(map(repr, service.adapters)) or "none"
        raise ApiError(404, f"no adapter {name!r:.200} is loaded; loaded: {known}", param="lora_name")
    with control_errors():
        await service.host.engine.control(UnloadAdapter(name))
    return PlainTextResponse(f"Success: LoRA adapter {name!r} removed successfully.")


def _check_allowed(service: Service) -> None:
    if not service.settings.allow_lora_updating:
        raise ApiError(
            403,
            "this server loads and unloads no adapters for clients; start it with --allow-lora-updating, or with "
            "--lora-modules",
        )
