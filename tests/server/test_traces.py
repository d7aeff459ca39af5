"""Spans that a server sends, taken by a receiver that reads OpenTelemetry's own messages."""

from __future__ import annotations

import gzip
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.support.serving import running_server

CHAT: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}


class Receiver(BaseHTTPRequestHandler):
    """Takes spans as a collector of OpenTelemetry does."""

    spans: ClassVar[list[Span]] = []

    def do_POST(self) -> None:  # the library's name
        assert self.path == "/v1/traces"
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        request = ExportTraceServiceRequest.FromString(body)
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self.spans.extend(scope.spans)
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_traces() -> None:
    """A span for each generation, in the trace that the client names; the last ones are sent as the server ends."""
    receiver = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    threading.Thread(target=receiver.serve_forever, daemon=True).start()
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    try:
        with running_server("--otlp-traces-endpoint", f"http://127.0.0.1:{receiver.server_port}/v1/traces") as server:
            Receiver.spans.clear()
            headers = {"traceparent": f"00-{trace}-{parent}-01", "x-request-id": "seven"}
            assert server.post("/v1/chat/completions", {**CHAT, "stream": True}, headers=headers).status_code == 200
            assert server.post("/v1/completions", {"prompt": "The whale", "max_tokens": 3}).status_code == 200
            assert server.stop() == 0
    finally:
        receiver.shutdown()
        receiver.server_close()
    of_client, own = sorted(Receiver.spans, key=lambda span: span.start_time_unix_nano)
    assert (of_client.trace_id.hex(), of_client.parent_span_id.hex()) == (trace, parent)
    assert own.parent_span_id == b""
    assert own.trace_id.hex() != trace
    told = {each.key: each.value for each in of_client.attributes}
    assert told["gen_ai.request.model"].string_value == "demo"
    assert told["gen_ai.usage.output_tokens"].int_value == told["gen_ai.request.max_tokens"].int_value == 4
    assert told["hardpoint.request_id"].string_value == "seven"
    times = [of_client.start_time_unix_nano, *(event.time_unix_nano for event in of_client.events)]
    assert [event.name for event in of_client.events] == ["first step", "first token"]
    assert sorted(times) == times
    assert times[-1] < of_client.end_time_unix_nano
