"""Errors, in each protocol's own JSON.

Everything that a handler raises becomes an ``ApiError`` here, and that a body: no answer of the server is without one.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.responses import Response

from hardpoint.engine.scheduling.admission import ContextLengthError
from hardpoint_plugin_api import (
    CapacityError,
    CheckpointError,
    ConfigError,
    EngineDeadError,
    EngineError,
    HardpointError,
    RequestError,
)

logger = logging.getLogger(__name__)

_OPENAI_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    501: "not_implemented_error",
    503: "service_unavailable_error",
}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
RETRY_AFTER_SECONDS = 1
CONTEXT_LENGTH = "context_length_exceeded"
_PROMPT_FIELDS = {"/v1/completions": "prompt", "/v1/responses": "input", "/tokenize": "prompt"}
"""OpenAI's code for a prompt that is too long: clients shorten the conversation when they see it."""


class ApiError(HTTPException):
    """An answer that is an error. ``param`` is the field of the request that is at fault, ``code`` a word for it.

    FastAPI lets an HTTPException through that is raised while a body is read, and hides everything else.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(status, message)
        self.status, self.message, self.param, self.code = status, message, param, code


def as_api_error(error: BaseException) -> ApiError:
    """The error that a client gets for ``error``. An unforeseen one is logged, and not described to the client."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ContextLengthError):
        return ApiError(400, str(error), code=CONTEXT_LENGTH)
    if isinstance(error, RequestError | CapacityError):
        return ApiError(400, str(error), param=_named_first(str(error)))
    if isinstance(error, EngineDeadError):
        return ApiError(503, str(error), code="engine_dead")
    if isinstance(error, HardpointError):
        return ApiError(500, str(error))
    if isinstance(error, RequestValidationError):
        return _of_validation(error)
    if isinstance(error, StarletteHTTPException):
        return ApiError(error.status_code, _of_http(error))
    logger.error("a request failed unexpectedly", exc_info=error)
    return ApiError(500, f"the server failed: {type(error).__name__}; its log says more")


def error_body(path: str, error: ApiError) -> dict[str, Any]:
    """The error as the protocol of ``path`` writes it."""
    if path.startswith("/v1/messages"):
        kind = _ANTHROPIC_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
        words = "prompt is too long: " if error.code == CONTEXT_LENGTH else ""  # Anthropic's, which clients look for
        return {"type": "error", "error": {"type": kind, "message": words + error.message}}
    kind = _OPENAI_TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    param = error.param
    if error.code == CONTEXT_LENGTH:
        param = next((field for end, field in _PROMPT_FIELDS.items() if path.endswith(end)), "messages")
    return {"error": {"message": error.message, "type": kind, "param": param, "code": error.code}}


def error_headers(error: ApiError) -> dict[str, str]:
    """The headers of an error's answer."""
    if error.status == 401:
        return {"www-authenticate": "Bearer"}
    if error.status in (408, 413):  # the rest of the body is not waited for
        return {"connection": "close"}
    return {"retry-after": str(RETRY_AFTER_SECONDS)} if error.status in (429, 503) else {}


@contextmanager
def control_errors(*, checkpoint_field: str | None = None) -> Iterator[None]:
    """Answer 400 for what a call that controls the engine asks wrongly, 409 where requests are in its way.

    ``checkpoint_field`` is the field that names a folder.
    """
    try:
        yield
    except CheckpointError as error:
        raise ApiError(400, str(error), param=checkpoint_field) from error
    except ConfigError as error:
        raise ApiError(400, str(error)) from error
    except EngineDeadError:
        raise
    except EngineError as error:
        raise ApiError(409, str(error)) from error


class JsonResponse(Response):
    """JSON in ASCII: texts of models and clients may hold what UTF-8 cannot, such as half a surrogate pair."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json.dumps(content, separators=(",", ":")).encode("ascii")


def error_response(path: str, error: BaseException) -> JsonResponse:
    """The answer to a request on ``path`` that failed."""
    known = as_api_error(error)
    return JsonResponse(error_body(path, known), known.status, error_headers(known))


def add_error_handlers(app: FastAPI) -> None:
    """Have ``app`` answer whatever its handlers raise."""

    async def handle(request: Request, error: Exception) -> Response:
        response = error_response(request.url.path, error)
        if isinstance(error, StarletteHTTPException) and error.headers:
            response.headers.update(error.headers)
        return response

    for kind in (ApiError, HardpointError, RequestValidationError, StarletteHTTPException, Exception):
        app.add_exception_handler(kind, handle)


def _of_http(error: StarletteHTTPException) -> str:
    if error.status_code == 404:
        return "there is nothing at this path; /openapi.json lists what there is"
    if error.status_code == 405:
        return "this path does not take that method; /openapi.json lists what it takes"
    return str(error.detail)


def _of_validation(error: RequestValidationError) -> ApiError:
    """The first thing that is wrong with a body; with a union, what is wrong with the form that fits it best."""
    found = error.errors()
    best = max(found, key=lambda each: len(each["loc"])) if len(found) > 1 else found[0]
    name = field_name(best["loc"])
    if not name:
        message = "the body must be a JSON object, sent with the header Content-Type: application/json"
    elif best["type"] == "missing":
        message = f"{name} is missing"
    else:
        said = str(best["msg"])
        message = f"{name}: {said[:1].lower()}{said[1:]}" + _shown(best.get("input"))
    return ApiError(400, message, param=name or None)


def field_name(place: Sequence[int | str]) -> str:
    """``messages[0].content`` of ``("body", "messages", 0, "user", "content", "str")``: names of types are left out."""
    name = ""
    for part in place[1:] if place and place[0] in ("body", "query", "path", "header") else place:
        if isinstance(part, int):
            name += f"[{part}]"
        elif name.rpartition(".")[2] == part:
            continue  # the name of a union's form, before the field of that name: json_schema
        elif part.isidentifier() and part not in _TYPE_NAMES and part[:1].islower():
            name += f".{part}" if name else part
    return name


_TYPE_NAMES = {"str", "int", "float", "bool", "list", "dict", "none", "nullable"}


def _shown(value: object) -> str:
    if isinstance(value, str | int | float | bool) or value is None:
        return f", got {json.dumps(value)[:80]}"
    return ""


def _named_first(message: str) -> str | None:
    """The field that a message about a request begins with: ``temperature must be ...``."""
    word = message.split(" ", 1)[0].rstrip(":")
    return word if (word.replace("_", "").isalnum() and "_" in word) or word in _PLAIN_FIELDS else None


_PLAIN_FIELDS: frozenset[str] = frozenset(
    {"n", "temperature", "seed", "stop", "logprobs", "messages", "priority", "timeout"}
)
