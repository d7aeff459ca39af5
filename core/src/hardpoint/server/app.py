"""The application: every endpoint, around one Service."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from hardpoint import __version__
from hardpoint.server import adapters, control, operations, page, tokens
from hardpoint.server.anthropic import messages
from hardpoint.server.errors import add_error_handlers
from hardpoint.server.gate import Gate
from hardpoint.server.openai import chat, completions, kept_responses, models, responses
from hardpoint.server.root_path import RootPath
from hardpoint.server.service import Service
from hardpoint_plugin_api import ConfigError


def create_app(service: Service) -> ASGIApp:
    """The ASGI application of one server. It has no documentation pages: they would fetch scripts from elsewhere."""
    prefix = service.settings.root_path
    servers = [{"url": prefix}] if prefix else None
    app = FastAPI(title="Hardpoint", version=__version__, docs_url=None, redoc_url=None, servers=servers)
    app.state.service = service
    add_error_handlers(app)
    openai_api = (models, completions, chat, responses, kept_responses)
    for part in (*openai_api, messages, tokens, adapters, control, operations, page):
        app.include_router(part.router)
    _check_root_path(prefix, app)
    gated: ASGIApp = Gate(app, service)
    origins = service.settings.cors_origins
    if origins:
        gated = CORSMiddleware(
            gated,
            allow_origins=origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["*"],
        )
    return RootPath(gated, prefix) if prefix else gated


def _check_root_path(prefix: str, app: FastAPI) -> None:
    """Raise ConfigError where the proxy's path cannot be told from one of the server's own."""
    for path in app.openapi()["paths"] if prefix else ():
        if f"{path}/".startswith(f"{prefix}/"):
            raise ConfigError(f"--root-path {prefix}: {path} is a path of the server itself; choose another")
