"""Requests at paths below an endpoint, of APIs whose class has routes. Other APIs do not import this module.

    RoutedConnection ──▶ MethodServer ── accept ──▶ RouteRequests ──▶ a BoundMethod with the values of the path
                                                        ├──▶ no route: 404, or 405 with the verbs of the path
                                                        └──▶ /v2/…: InferenceRoutes

Routes are matched by the rules of `RouteTable`. Their calls run like those of other methods, without batching.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from functools import partial

from cortex.payloads.path_template import PathTemplate, canonical_path
from cortex.predictor.binding import BoundMethod
from cortex.predictor.bound_routes import BoundRoute
from cortex.worker.http.connection import CLIENT_CLOSED_REQUEST, Connection
from cortex.worker.http.connection_pool import ConnectionPool, GatewayClock
from cortex.worker.http.responses import NO_HEADERS, ValidHeaders, response_head
from cortex.worker.monitoring.metrics import MetricFile
from cortex.worker.monitoring.route_metrics import MAX_ROUTES, OTHER, RouteRecorder
from cortex.worker.requests.inference_routes import InferenceRoutes

_INFERENCE_PATH = b"/v2"
_SHOWN_PATH = 200


class RouteTable:
    """The routes of a class by path and verb.

    Of the routes that match a path, the more specific one answers, in whatever order they are defined; one that also
    answers the verb comes before one that does not.
    """

    def __init__(self, routes: Sequence[BoundRoute]) -> None:
        by_shape: dict[str, dict[str, BoundRoute]] = {}
        for each in sorted(routes, key=lambda each: each.route.template.rank):
            by_shape.setdefault(each.route.template.shape, {})[each.route.verb] = each
        #: Paths without parameters, and the others in the order of their precedence.
        self._fixed: dict[str, dict[str, BoundRoute]] = {}
        self._patterns: list[tuple[PathTemplate, dict[str, BoundRoute]]] = []
        for shape, by_verb in by_shape.items():
            template = next(iter(by_verb.values())).route.template
            if template.parameters:
                self._patterns.append((template, by_verb))
            else:
                self._fixed[shape] = self._fixed[f"{shape}/"] = by_verb

    def find(self, verb: str, path: str) -> tuple[BoundRoute, tuple[str, ...]] | frozenset[str]:
        """Return the route of a request and the values in its path; otherwise the verbs that this path has.

        HEAD has the routes of GET.
        """
        path = canonical_path(path)
        wanted = "GET" if verb == "HEAD" else verb
        verbs: set[str] = set()
        by_verb = self._fixed.get(path)
        if by_verb is not None:
            if wanted in by_verb:
                return by_verb[wanted], ()
            verbs.update(by_verb)
        for template, by_verb in self._patterns:
            values = template.match(path)
            if values is not None:
                if wanted in by_verb:
                    return by_verb[wanted], values
                verbs.update(by_verb)
        return frozenset({*verbs, "HEAD"} if "GET" in verbs else verbs)


class RouteRequests:
    """Finds the method of a request at a path below the endpoint. Stateless; for the event-loop thread."""

    def __init__(self, routes: Sequence[BoundRoute], inference: InferenceRoutes) -> None:
        self._table = RouteTable(routes)
        self._inference = inference

    def accept(self, connection: Connection) -> BoundMethod | None:
        """Respond at once and return None, or return the method whose call answers."""
        assert isinstance(connection, RoutedConnection)
        path = connection.path_below
        if path == _INFERENCE_PATH or path.startswith(_INFERENCE_PATH + b"/"):
            return self._inference.accept(connection)
        found = self._table.find(connection.method, path.decode("latin-1"))
        if not isinstance(found, frozenset):
            bound, values = found
            connection.route = bound.route.template.plain
            if connection.span is not None:
                endpoint = (connection.endpoint or b"").rstrip(b"/").decode("latin-1")
                connection.span.set_route(endpoint + connection.route)
            return bound.with_values(values)
        if found:
            allowed = ", ".join(sorted(found))
            message = f"{connection.method} is not supported at this path; it answers {allowed}"
            connection.respond_error(405, message, ValidHeaders(((b"allow", allowed.encode()),)))
        else:
            shown = path[:_SHOWN_PATH].decode("latin-1")
            endpoint = (connection.endpoint or b"").rstrip(b"/").decode("latin-1")
            connection.respond_error(404, f"this API has no route {shown}; GET {endpoint}/info lists its routes")
        return None


class RoutedConnection(Connection):
    """A connection from the gateway for the requests of an API with routes.

    It counts requests by route, answers HEAD like GET without the body, and has errors in OpenAI's form below `/v1`.
    """

    __slots__ = ("_recorder_of_routes", "_status", "route")
    may_have_openai_errors = True

    def __init__(
        self,
        recorder: RouteRecorder,
        sock: socket.socket,
        index: int,
        pool: ConnectionPool,
        clock: GatewayClock | None,
        on_close: Callable[[Connection], None],
    ) -> None:
        self._recorder_of_routes = recorder
        super().__init__(sock, index, pool, clock, on_close)

    def respond(self, status: int, media_type: bytes | None, body: bytes, headers: ValidHeaders = NO_HEADERS) -> None:
        """Write a complete response; the connection is then ready for the next request."""
        if self.method != "HEAD":
            super().respond(status, media_type, body, headers)
        elif self.open:
            head = response_head(status, media_type, headers)
            self._send(b"%b%bcontent-length: %d\r\n\r\n" % (head, self._last_headers(status), len(body)))
            self._finish_response()

    def start_stream(
        self, status: int, media_type: bytes | None, headers: ValidHeaders = NO_HEADERS, chunk: bytes = b""
    ) -> None:
        """Begin a response of unknown length; that to HEAD is complete then, and its call is cancelled."""
        if self.method != "HEAD":
            super().start_stream(status, media_type, headers, chunk)
        elif self.open:
            self._close_after = True
            self._send(response_head(status, media_type, headers) + self._last_headers(status) + b"\r\n")
            self.close()

    def close(self) -> None:
        """Close immediately, by a shutdown that the peer sees although the supervisor has a duplicate."""
        self._record()
        super().close()

    def _last_headers(self, status: int) -> bytes:
        self._status = status
        return super()._last_headers(status)

    def _finish_response(self) -> None:
        self._record()
        super()._finish_response()

    def _record(self) -> None:
        """Count a request that was passed to the application, once. Copies do not count."""
        if self.arrived_ns and not self.is_copy:
            route = self.route or ("/" if self.endpoint is None else OTHER)
            seconds = (time.monotonic_ns() - self.arrived_ns) / 1e9
            self._recorder_of_routes.record(self.method, route, self._status or CLIENT_CLOSED_REQUEST, seconds)
            self.arrived_ns = 0

    def _reset(self) -> None:
        super()._reset()
        self.route = ""  #: the template of the route that matched; "": none
        self._status = 0


def routed_connections(routes: Sequence[BoundRoute], file: MetricFile | None) -> Callable[..., Connection]:
    """Return what a pool creates connections with."""
    recorder = RouteRecorder(file)
    for each in routes[:MAX_ROUTES]:
        recorder.add(each.route.verb, each.route.template.plain)
    return partial(RoutedConnection, recorder)
