"""``/v1/models``."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from hardpoint.server.errors import JsonResponse
from hardpoint.server.service import Service, ServiceOf

router = APIRouter(tags=["OpenAI"])


@router.get("/v1/models")
async def models(service: ServiceOf) -> JsonResponse:
    """The model, under each of its names, and the LoRA adapters, with the model as their parent."""
    names = dict.fromkeys((*service.model_names, *service.adapters))
    return JsonResponse({"object": "list", "data": [_model(service, name) for name in names]})


@router.get("/v1/models/{name:path}")
async def model(name: str, service: ServiceOf) -> JsonResponse:
    """One model of the list."""
    return JsonResponse(_model(service, service.check_model(name)))


def _model(service: Service, name: str) -> dict[str, Any]:
    adapter = service.adapter(name)
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "hardpoint",
        "root": service.adapters[adapter].path if adapter else service.host.config.model,
        "parent": service.model_names[0] if adapter else None,
        "max_model_len": service.host.engine.max_model_len,
    }
