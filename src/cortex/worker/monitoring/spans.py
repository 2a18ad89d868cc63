"""Spans of one process, exported with OpenTelemetry. Only this module imports the library.

    caller's span (header `traceparent`)
      └─ gateway: from the arrival of the request until the worker has written its response
           └─ worker: from the receipt of the request until then
                └─ spans that user code creates

HAProxy exports nothing. The id of a request has the time at which it arrived there, and the gateway forwards a response
as it is written, so the worker exports the span of the gateway together with its own. Batches of jobs and workloads are
children of the span that submitted them.

Spans wait in a queue of limited length for a thread that sends them, so the collector delays no request. The names of
attributes are those of the semantic conventions for HTTP, if these have one:
https://opentelemetry.io/docs/specs/semconv/http/http-spans/.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from opentelemetry import propagate, trace
from opentelemetry.context import Context, attach
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, StatusCode

from cortex.predictor.tracebacks import describe, format_user_traceback
from cortex.worker.spec import ReplicaSpec

if TYPE_CHECKING:
    from cortex.worker.http.connection import Connection
    from cortex.worker.http.responses import Header

#: Service of the gateway's spans.
GATEWAY_SERVICE = "cortex-gateway"
#: Time for the last spans at the end of the process.
_FLUSH_S = 1.0
#: A collector that does not answer is logged once in this time.
_LOG_INTERVAL_S = 60.0
_EXPORT_LOGGER = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
_MAX_TEXT = 1024
_METHODS = frozenset({"CONNECT", "DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", "TRACE"})
_NS_PER_MS = 1_000_000

Attributes = Mapping[str, str | int]


class Tracing:
    """Creates and exports the spans of this process."""

    def __init__(self, spec: ReplicaSpec, index: int) -> None:
        """Start the exporter. Raises: ValueError and others of the library, for variables that it rejects."""
        self._api: Attributes = {"cortex.api": spec.api, "cortex.revision": spec.revision}
        own = {SERVICE_NAME: spec.api, "service.version": spec.revision, "service.instance.id": f"{spec.id}/{index}"}
        of_user = OTELResourceDetector().detect().attributes  # of OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES
        resource = Resource.create({**own, "cortex.replica": spec.id, "cortex.process": index, **self._api, **of_user})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        gateway = TracerProvider(
            resource=Resource.create({**of_user, SERVICE_NAME: GATEWAY_SERVICE}), shutdown_on_exit=False
        )
        self._processor = BatchSpanProcessor(OTLPSpanExporter())
        for provider in (self._provider, gateway):
            provider.add_span_processor(self._processor)
        self._tracer = self._provider.get_tracer("cortex")
        self._gateway_tracer = gateway.get_tracer("cortex")
        logging.getLogger(_EXPORT_LOGGER).addFilter(_RateLimit())

    def serve_user_code(self) -> None:
        """Export the spans of user code as well, unless it has configured OpenTelemetry itself."""
        if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
            trace.set_tracer_provider(self._provider)

    def start_request(self, connection: Connection, now_ns: int) -> RequestSpan:
        """Start the spans of a request that was received at `now_ns` (monotonic)."""
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in connection.headers}
        context = propagate.extract(headers)
        path = connection.url.partition(b"?")[0].decode("latin-1")[:_MAX_TEXT]
        route = path if connection.endpoint is None else connection.endpoint.decode("latin-1")[:_MAX_TEXT]
        method = connection.method
        known = method if method in _METHODS else "_OTHER"
        attributes: dict[str, str | int] = {
            "http.request.method": known,
            "http.route": route,  # the endpoint: what follows it may be anything
            "url.path": path,
            "cortex.request_id": connection.request_id.decode("latin-1"),
        }
        if known != method:
            attributes["http.request.method_original"] = method[:_MAX_TEXT]
        if "user-agent" in headers:
            attributes["user_agent.original"] = headers["user-agent"][:_MAX_TEXT]
        name = f"{'HTTP' if known == '_OTHER' else method} {route}"
        received_ns = time.time_ns() - (time.monotonic_ns() - now_ns)
        gateway = self._gateway_tracer.start_span(
            name,
            context,
            SpanKind.SERVER,
            {**attributes, **self._api},
            start_time=received_ns - (now_ns - connection.arrived_ns),
        )
        context = trace.set_span_in_context(gateway, context)
        attributes["url.scheme"] = "http"  # of the gateway's connections to workers
        worker = self._tracer.start_span(name, context, SpanKind.SERVER, attributes, start_time=received_ns)
        return RequestSpan(name.partition(" ")[0], gateway, worker, trace.set_span_in_context(worker, context))

    def start_batch(self, name: str, traceparent: str, attributes: Attributes) -> BatchSpan:
        """Start the span of a batch or workload as that of the current context.

        `traceparent` is the header of the submission; without one, the span begins a trace.
        """
        context = propagate.extract({"traceparent": traceparent})
        span = self._tracer.start_span(name, context, SpanKind.CONSUMER, attributes)
        attach(trace.set_span_in_context(span, context))
        return BatchSpan(span)

    def shutdown(self) -> None:
        """Send the last spans, for a limited time: an unreachable collector must not delay the end of the process."""
        flush = threading.Thread(target=self._processor.shutdown, name="cortex-traces", daemon=True)
        flush.start()
        flush.join(_FLUSH_S)


class RequestSpan:
    """The spans of one request: of the gateway, and of this process."""

    __slots__ = ("_context", "_gateway", "_has_error", "_is_failure", "_method", "_worker", "is_over")

    def __init__(self, method: str, gateway: Span, worker: Span, context: Context) -> None:
        self.is_over = False  #: both spans have ended
        self._method = method
        self._gateway = gateway
        self._worker = worker
        self._context = context
        self._has_error = False  #: of user code
        self._is_failure = False

    def enter(self, function: str = "") -> None:
        """Make this the parent of the spans that user code creates in this context, by calling `function`."""
        attach(self._context)
        if function:
            self._worker.set_attribute("code.function.name", function)

    def propagate(self, headers: list[Header]) -> list[Header]:
        """Return the headers of the request with this span as its caller, for frameworks that create spans."""
        carrier: dict[str, str] = {}
        propagate.inject(carrier, self._context)
        own = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in carrier.items()]
        names = {name for name, _ in own}
        return [*(header for header in headers if header[0] not in names), *own]

    def leave(self) -> None:
        """Detach this context from the span, so that later spans of user code have no parent."""
        attach(Context())

    def fail(self, error: BaseException) -> None:
        """Record an exception of user code."""
        _record(self._worker, error)
        self._has_error = True

    def set_route(self, route: str) -> None:
        """Name the spans by the route that responds, of an application or a class, with its endpoint."""
        for span in (self._worker, self._gateway):
            span.update_name(f"{self._method} {route}")
            span.set_attribute("http.route", route)

    def set_rpc(self, path: str) -> None:
        """Name the spans of a gRPC call by its path, `/<package>.<Service>/<method>`, as the conventions for it do."""
        service, _, method = path.strip("/").partition("/")
        for span in (self._worker, self._gateway):
            span.update_name(path.strip("/"))
            span.set_attribute("rpc.system", "grpc")
            span.set_attribute("rpc.service", service)
            span.set_attribute("rpc.method", method)

    def set_rpc_status(self, number: int, name: str) -> None:
        """Record the status of a gRPC call, after `respond` with the HTTP status that belongs to it."""
        for span in (self._worker, self._gateway):
            span.set_attribute("rpc.grpc.status_code", number)
            if self._is_failure and not (span is self._worker and self._has_error):
                span.set_attribute("error.type", name)

    def respond(self, status: int, durations_ns: Mapping[str, int]) -> None:
        """Record the response; `durations_ns` are the parts of `Server-Timing`."""
        for name, duration_ns in durations_ns.items():
            self._worker.set_attribute(f"cortex.{name}_ms", duration_ns / _NS_PER_MS)
        for span in (self._worker, self._gateway):
            span.set_attribute("http.response.status_code", status)
            self._is_failure = status >= 500
            if self._is_failure:
                span.set_status(StatusCode.ERROR)
                if span is self._gateway or not self._has_error:
                    span.set_attribute("error.type", str(status))

    def end(self, error_type: str = "") -> None:
        """End both spans; `error_type` says why the response is incomplete."""
        self.is_over = True
        now_ns = time.time_ns()
        for span in (self._worker, self._gateway):
            if error_type:
                span.set_attribute("error.type", error_type)
                span.set_status(StatusCode.ERROR, "the connection closed before the response was complete")
            span.end(now_ns)


class BatchSpan:
    """The span of a batch or workload."""

    __slots__ = ("_span",)

    def __init__(self, span: Span) -> None:
        self._span = span

    def fail(self, error: BaseException) -> None:
        """Record the exception that ends the batch."""
        _record(self._span, error)

    def end(self) -> None:
        """End the span; spans of user code have no parent from here on."""
        self._span.end()
        attach(Context())


def _record(span: Span, error: BaseException) -> None:
    # As `record_exception`, which formats the whole chain of exceptions, and runs user code without a guard.
    kind = type(error)
    attributes = {
        "exception.type": kind.__qualname__
        if kind.__module__ == "builtins"
        else f"{kind.__module__}.{kind.__qualname__}",
        "exception.message": describe(error).partition(": ")[2],
        "exception.stacktrace": format_user_traceback(error),
    }
    span.add_event("exception", attributes)
    span.set_attribute("error.type", kind.__qualname__)
    span.set_status(StatusCode.ERROR)


class _RateLimit(logging.Filter):
    """Lets one record per interval pass."""

    _next = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record is logged."""
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + _LOG_INTERVAL_S
        return True
