"""A span of OpenTelemetry for each generation, sent by OTLP over HTTP. Imported only where an endpoint is given."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

from opentelemetry import context, propagate
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, StatusCode

from hardpoint import __version__
from hardpoint.server.request_metrics import EndedRequest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_FLUSH_MILLISECONDS = 5000


class Traces:
    """Sends spans to ``endpoint``, the whole URL, from a thread of its own. Spans that cannot be sent are dropped.

    Settings of the exporter that are no endpoint, such as headers, come from OpenTelemetry's environment variables.
    """

    def __init__(self, endpoint: str) -> None:
        resource = Resource.create({SERVICE_NAME: "hardpoint", SERVICE_VERSION: __version__})
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
        self._tracer = self._provider.get_tracer("hardpoint.server", __version__)

    def following(self, headers: Mapping[str, str]) -> AbstractContextManager[None]:
        """Within it, spans belong to the trace that a request's ``headers`` name (W3C's ``traceparent``), if any."""
        return _attached(propagate.extract(headers))

    def ended(self, model: str, request_id: str, request: EndedRequest) -> None:
        """Send the span of a generation that ends now, in the trace of the current context.

        Attributes have the names of OpenTelemetry's conventions for generative AI, and events the times of the first
        step and the first token.
        """
        end = time.time_ns()
        begin = end - _nanoseconds(request.seconds)
        attributes: dict[str, str | int | float | list[str]] = {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.provider.name": "hardpoint",
            "gen_ai.request.model": model,
            "gen_ai.request.choice.count": request.num_completions,
            "gen_ai.response.finish_reasons": list(request.reasons),
            "gen_ai.usage.input_tokens": request.prompt_tokens,
            "gen_ai.usage.output_tokens": request.completion_tokens,
            "hardpoint.request_id": request_id,
        }
        if request.max_tokens is not None:
            attributes["gen_ai.request.max_tokens"] = request.max_tokens
        name = f"text_completion {model}"
        span = self._tracer.start_span(name, kind=SpanKind.SERVER, attributes=attributes, start_time=begin)
        for event, seconds in (("first step", request.started), ("first token", request.first_token)):
            if seconds is not None:
                span.add_event(event, timestamp=begin + _nanoseconds(seconds))
        if "abort" in request.reasons:
            span.set_status(StatusCode.ERROR, "the request was cut off")
        span.end(end)

    def close(self) -> None:
        """Send what is left, for some seconds."""
        self._provider.force_flush(_FLUSH_MILLISECONDS)
        self._provider.shutdown()


@contextmanager
def _attached(found: context.Context) -> Iterator[None]:
    token = context.attach(found)
    try:
        yield
    finally:
        context.detach(token)


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
