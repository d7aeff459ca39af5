"""Paths for operators: health, readiness, metrics, and the implementations that serve."""

from __future__ import annotations

import asyncio
import logging

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from starlette.responses import Response

from hardpoint import __version__
from hardpoint.metrics import MetricsSnapshot
from hardpoint.server.errors import JsonResponse
from hardpoint.server.peers import ReadCounts
from hardpoint.server.service import Service, ServiceOf
from hardpoint_plugin_api import HardpointError

logger = logging.getLogger(__name__)
router = APIRouter(tags=["operations"])

_METRICS_SECONDS = 5.0
"""How long the engine, which answers between two steps, may take to say what it counted."""


@router.api_route("/health", methods=["GET", "HEAD"])
async def health(service: ServiceOf) -> JsonResponse:
    """200 unless the engine is gone, or being built again: what loads or stops is well."""
    host = service.host
    state = host.state
    if state in ("dead", "restarting"):
        why = host.why_dead if state == "dead" else host.recovery.restarting
        return JsonResponse({"status": state, "why": why}, 503)
    return JsonResponse({"status": state})


@router.api_route("/ping", methods=["GET", "POST"])
async def ping(service: ServiceOf) -> JsonResponse:
    """Health check for SageMaker; answers as ``/health`` does."""
    return await health(service)


@router.get("/load")
async def load(service: ServiceOf) -> JsonResponse:
    """The number of POST requests that are being answered."""
    return JsonResponse({"server_load": service.open.total})


@router.api_route("/ready", methods=["GET", "HEAD"])
async def ready(service: ServiceOf) -> JsonResponse:
    """200 while requests are served; while the engine is being built again they are taken, and wait."""
    state = service.host.state
    return JsonResponse({"status": state}, 200 if state == "ready" else 503)


@router.get("/version")
async def version() -> JsonResponse:
    """The server's version."""
    return JsonResponse({"version": __version__})


@router.get("/metrics")
async def metrics(service: ServiceOf) -> Response:
    """Metrics for Prometheus: the server's, and its engine's where that answers."""
    engine = service.host.loaded
    text = service.metrics.to_prometheus(
        MetricsSnapshot.total_of(await service.ask(ReadCounts())),
        await _of_engine(service),
        None if engine is None else engine.table,
        service.host.recovery,
        alive=service.host.state == "ready",
    )
    return Response(text, media_type=CONTENT_TYPE_PLAIN_0_0_4)


@router.get("/tokenizer_info")
async def tokenizer_info(service: ServiceOf) -> JsonResponse:
    """The checkpoint's tokenizer_config.json, with the chat template: for clients that tokenize themselves."""
    return JsonResponse(await asyncio.to_thread(service.host.engine.tokenizer_config))


@router.get("/v1/hardpoint/explain")
async def explain(service: ServiceOf) -> JsonResponse:
    """Which implementation serves what, by which rule, and every reason against the others; what was found to fail."""
    host = service.host
    recovery = host.recovery
    failures = {
        "restarts": recovery.num_restarts,
        "last_failure": recovery.last_cause,
        "denied": [culprit.to_json() for culprit in recovery.denied],
        "blames_ops": recovery.blames_ops,
    }
    return JsonResponse({**host.engine.table.to_json(), **failures})


async def _of_engine(service: Service) -> MetricsSnapshot | None:
    engine = service.host.loaded
    if engine is None or service.host.state != "ready":
        return None
    try:
        return await asyncio.wait_for(engine.metrics(), _METRICS_SECONDS)
    except (HardpointError, TimeoutError) as error:
        logger.warning("the engine did not say what it counted: %s", error or "no answer")
        return None
