"""A collector of OpenTelemetry: a small HTTP server that decodes the spans sent to it over OTLP/HTTP."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from harness.servers.answering import Server
from harness.wait import wait_until


@dataclass(frozen=True)
class Span:
    """A received span; `resource` and `attributes` are plain maps."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str  #: empty without a parent
    kind: int
    start_ns: int
    end_ns: int
    is_error: bool
    attributes: dict[str, Any]
    resource: dict[str, Any]
    events: tuple[dict[str, Any], ...]

    @property
    def service(self) -> str:
        return str(self.resource["service.name"])


class Collector(Server):
    """A running collector. `answering` changes its responses."""

    @property
    def environ(self) -> dict[str, str]:
        """The variables that make an exporter use it."""
        return {"OTEL_EXPORTER_OTLP_ENDPOINT": self.url, "OTEL_BSP_SCHEDULE_DELAY": "50"}

    @property
    def spans(self) -> list[Span]:
        return [span for _, path, _, body in list(self.requests) if path == "/v1/traces" for span in _decode(body)]

    def wait_for(self, select: Callable[[Span], bool], count: int = 1) -> Sequence[Span]:
        """Wait until `count` selected spans have arrived."""

        def found() -> list[Span] | None:
            selected = [span for span in self.spans if select(span)]
            return selected if len(selected) >= count else None

        return wait_until(found, message=f"{count} spans arrive") or []


@contextlib.contextmanager
def collector() -> Iterator[Collector]:
    """Run a collector."""
    server = Collector()
    try:
        yield server
    finally:
        server.close()


def _decode(body: bytes) -> Iterator[Span]:
    for group in ExportTraceServiceRequest.FromString(body).resource_spans:
        resource = _plain(group.resource.attributes)
        for span in (span for scope in group.scope_spans for span in scope.spans):
            yield Span(
                name=span.name,
                trace_id=span.trace_id.hex(),
                span_id=span.span_id.hex(),
                parent_id=span.parent_span_id.hex(),
                kind=span.kind,
                start_ns=span.start_time_unix_nano,
                end_ns=span.end_time_unix_nano,
                is_error=span.status.code == span.status.STATUS_CODE_ERROR,
                attributes=_plain(span.attributes),
                resource=resource,
                events=tuple(_plain(event.attributes) for event in span.events),
            )


def _plain(attributes: Any) -> dict[str, Any]:
    return {item.key: getattr(item.value, item.value.WhichOneof("value")) for item in attributes}
