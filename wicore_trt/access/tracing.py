"""Sends a span for each generation call by OpenTelemetry's exporter (extra `otel`), by its GenAI conventions.

On where the environment names a collector (OTEL_EXPORTER_OTLP_ENDPOINT, or ..._TRACES_ENDPOINT); sampler, headers and
resource are its standard variables too. A span is made from a call's books after its end, so a call costs nothing
before. Must not know transports. Invariants: no prompt, answer or key is in a span; nothing waits for a collector.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from importlib import import_module
from typing import Any

from wicore_trt.access import calls
from wicore_trt.access.calls import Call

log = logging.getLogger(__name__)

CLOSE_S = 2.0
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_FAULTS = frozenset(("INTERNAL", "UNAVAILABLE", "DEADLINE_EXCEEDED", "FAILED_PRECONDITION"))
"""Codes of errors that are the server's fault; others leave a span's status unset."""
_ASKED = ("max_tokens", "temperature", "top_p", "top_k", "seed", "presence_penalty", "frequency_penalty")
_TOLD = {"prompt": "input_tokens", "tokens": "output_tokens", "cached": "cache_read.input_tokens"}

_spans: _Spans | None = None


def start_tracing() -> None:
    """Start where the environment says so. Call it in the process that answers calls, as it starts a thread."""
    global _spans
    env = os.environ
    off = env.get("OTEL_SDK_DISABLED", "").lower() == "true" or env.get("OTEL_TRACES_EXPORTER") == "none"
    if off or not any(env.get(name) for name in _ENDPOINTS):
        return
    try:
        _spans = _Spans(next((env[name] for name in _PROTOCOLS if env.get(name)), "http/protobuf"))
        calls.span_sender = _spans.send
    except ImportError as error:
        log.warning("no traces are sent: %s is not installed (extra otel)", error.name)


def stop_tracing() -> None:
    """Send queued spans, for CLOSE_S seconds at most."""
    if _spans is not None:
        ending = threading.Thread(target=_spans.provider.shutdown, daemon=True)
        ending.start()
        ending.join(CLOSE_S)


class _Spans:
    def __init__(self, protocol: str) -> None:
        from opentelemetry import trace
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        kind = "grpc" if protocol == "grpc" else "http"
        exporter = import_module(f"opentelemetry.exporter.otlp.proto.{kind}.trace_exporter").OTLPSpanExporter()
        if "service.name=" not in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", ""):
            os.environ.setdefault("OTEL_SERVICE_NAME", "wicore-trt")
        self.provider = TracerProvider(resource=Resource.create())
        self.provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self.provider.get_tracer("wicore_trt")
        self._trace, self._propagator = trace, TraceContextTextMapPropagator()

    def send(self, call: Call) -> None:
        ended, facts = time.time_ns(), call.facts
        began = ended - round((time.monotonic() - call.started) * 1e9)
        model, operation = call.model, "chat" if call.chat else "text_completion"
        span = self._tracer.start_span(
            f"{operation} {model}".rstrip(), self._propagator.extract(call.parent), kind=self._trace.SpanKind.SERVER,
            attributes=_attributes(call) | {"gen_ai.operation.name": operation}, start_time=began,
        )  # fmt: skip
        first, prefill = facts.get("ttft_ms"), facts.get("prefill_ms")
        if isinstance(first, float):
            if isinstance(prefill, float):
                span.add_event("wicore.scheduled", timestamp=began + round((first - prefill) * 1e6))
            span.add_event("wicore.first_token", timestamp=began + round(first * 1e6))
        if call.error is not None:
            span.set_attribute("error.type", call.error.__name__)
            if call.error.grpc_code in _FAULTS:
                span.set_status(self._trace.StatusCode.ERROR)
        facts["trace_id"] = f"{span.get_span_context().trace_id:032x}"
        span.end(ended)


def _attributes(call: Call) -> dict[str, Any]:
    facts = call.facts
    found: dict[str, Any] = {"gen_ai.provider.name": "wicore-trt", "gen_ai.request.model": call.model}
    found |= {"gen_ai.response.model": call.model, "wicore.method": call.method, "wicore.status": call.code}
    found |= {"wicore.request_id": call.call_id, "wicore.tenant": call.who.tenant or None}
    if call.params is not None:
        found |= {f"gen_ai.request.{name}": getattr(call.params, name) for name in _ASKED}
        found["gen_ai.request.choice.count"] = call.params.n
    found |= {f"gen_ai.usage.{name}": facts.get(fact) for fact, name in _TOLD.items()}
    first, queued, reasons = facts.get("ttft_ms"), facts.get("queue_ms"), facts.get("finish")
    found["gen_ai.response.time_to_first_chunk"] = first / 1e3 if isinstance(first, float) else None
    found["wicore.queue_time"] = queued / 1e3 if isinstance(queued, float) else None
    found["gen_ai.response.finish_reasons"] = reasons.split(",") if isinstance(reasons, str) and reasons else None
    return {name: value for name, value in found.items() if value is not None}
