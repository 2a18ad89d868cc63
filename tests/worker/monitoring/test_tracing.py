"""Spans of request workers, received by a real collector."""

from __future__ import annotations

import os
import signal
import socket
import time

import pytest

from harness.replicas.applications import ask, websocket
from harness.replicas.replicas import new_request_id, running_replica
from harness.servers.collector import Collector, Span, collector
from harness.wait import PATIENCE_S, wait_until

pytestmark = pytest.mark.processes

TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACED = {"traceparent": f"00-{TRACE}-{CALLER}-01"}
HANDLER = """
    import asyncio, os, time
    import cortex
    from opentelemetry import trace

    tracer = trace.get_tracer("of the user")

    class Handler:
        def __init__(self, config):
            pass

        def handle_post(self, payload):
            with tracer.start_as_current_span("inside"):
                time.sleep(payload.get("s", 0))
            if payload.get("fails"):
                raise ValueError("bad")
            return payload

        async def handle_put(self, payload):
            await asyncio.sleep(60 if payload == "leave" else 0.01)
            with tracer.start_as_current_span(f"inside {payload}"):
                return payload

        @cortex.route("GET", "/items/{number}")
        def item(self, number):
            return number

        def handle_get(self):
            yield "a"
            with tracer.start_as_current_span("inside stream"):
                yield "b"
"""


def exporting(patch: pytest.MonkeyPatch, to: Collector, **variables: str) -> None:
    for name, value in {**to.environ, **variables}.items():
        patch.setenv(name, value)


def of(service: str) -> object:
    return lambda span: span.service == service


def hops(spans: Collector, name: str) -> tuple[Span, Span]:
    """Return the spans of the gateway and of the worker for the one request of this name."""
    found = spans.wait_for(lambda span: span.name == name, 2)
    (gateway,) = (span for span in found if span.service == "cortex-gateway")
    (worker,) = (span for span in found if span.service != "cortex-gateway")
    return gateway, worker


def test_each_hop_of_a_request_has_a_span_and_user_code_a_child(monkeypatch: pytest.MonkeyPatch) -> None:
    with collector() as spans, running_replica(HANDLER) as silent:
        silent.wait_ready()
        exporting(monkeypatch, spans)
        with running_replica(HANDLER) as replica:
            replica.wait_ready()
            id_ = new_request_id(ago_s=2)
            answer = replica.request(
                {"s": 0.01}, path="/iris?secret=1", headers={**TRACED, "user-agent": "curl/8"}, request_id=id_
            )
            assert answer.status == 200
            assert silent.request({}, path="/silent", headers=TRACED).status == 200
            gateway, worker = hops(spans, "POST /iris")
            (inside,) = spans.wait_for(lambda span: span.name == "inside")
            assert {span.trace_id for span in (gateway, worker, inside)} == {TRACE}
            assert [gateway.parent_id, worker.parent_id] == [CALLER, gateway.span_id]
            assert (inside.parent_id, inside.service) == (worker.span_id, "api")
            assert 2e9 <= worker.start_ns - gateway.start_ns < 60e9
            assert worker.start_ns <= inside.start_ns <= inside.end_ns <= worker.end_ns <= gateway.end_ns
            http = {
                "http.request.method": "POST", "http.route": "/iris", "url.path": "/iris",
                "http.response.status_code": 200, "user_agent.original": "curl/8", "cortex.request_id": id_,
            }  # fmt: skip
            assert http.items() <= worker.attributes.items()
            assert {**http, "cortex.api": "api"}.items() <= gateway.attributes.items()
            assert worker.attributes["code.function.name"] == "handle_post"
            assert worker.attributes["cortex.queue_ms"] >= 2000
            assert worker.attributes["cortex.handler_ms"] >= 10
            assert not worker.is_error and worker.kind == gateway.kind == 2  # SERVER
            resource = {
                "service.name": "api", "service.version": "00000000", "cortex.api": "api", "cortex.process": 0,
                "cortex.revision": "00000000", "cortex.replica": "api-00000000-000001",
            }  # fmt: skip
            assert resource.items() <= worker.resource.items()
            assert worker.resource["service.instance.id"] == "api-00000000-000001/0"
            below = {"x-cortex-endpoint": "/iris"}
            assert replica.request(method="GET", path="/iris/v2/models/unknown", headers=below).status == 404
            _, worker = hops(spans, "GET /iris")
            assert worker.attributes["http.route"] == "/iris"
            assert worker.attributes["url.path"] == "/iris/v2/models/unknown"
            assert replica.request(method="GET", path="/iris/items/7", headers=below).body == b"7"
            _, worker = hops(spans, "GET /iris/items/{number}")
            assert worker.attributes["http.route"] == "/iris/items/{number}"
        assert "secret" not in repr(spans.spans)
        assert not [span for span in spans.spans if "silent" in span.name]


def test_errors_streams_and_disconnects_end_their_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    with collector() as spans:
        exporting(monkeypatch, spans, OTEL_SERVICE_NAME="mine", OTEL_RESOURCE_ATTRIBUTES="deployment.environment=test")
        with running_replica(HANDLER, timeout_s=20.0) as replica:
            replica.wait_ready()
            assert replica.request({"fails": True}, path="/failing").status == 500
            gateway, failing = hops(spans, "POST /failing")
            assert gateway.parent_id == "" and failing.trace_id == gateway.trace_id
            assert failing.is_error and gateway.is_error
            assert failing.attributes["error.type"] == "ValueError"
            assert (failing.service, gateway.resource["deployment.environment"]) == ("mine", "test")
            assert failing.events[0]["exception.message"] == "bad"
            assert replica.request(method="DELETE", path="/refused").status == 405
            assert not hops(spans, "DELETE /refused")[1].is_error
            assert replica.request(method="GET", path="/streaming").body == b"ab"
            _, streaming = hops(spans, "GET /streaming")
            (inside,) = spans.wait_for(lambda span: span.name == "inside stream")
            assert inside.parent_id == streaming.span_id
            for number in range(3):
                assert replica.request(number, method="PUT", path=f"/{number}").status == 200
                (child,) = spans.wait_for(lambda span, number=number: span.name == f"inside {number}")
                assert child.parent_id == hops(spans, f"PUT /{number}")[1].span_id
            with socket.socket(socket.AF_UNIX) as gone:
                gone.connect(replica.spec.sockets[0])
                head = b"PUT /gone HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: 7\r\n\r\n"
                gone.sendall(head + b'"leave"')
            gone_span = hops(spans, "PUT /gone")[1]
            assert gone_span.is_error and gone_span.attributes["error.type"] == "connection_closed"


APPLICATION = """
    from fastapi import FastAPI, WebSocket
    from opentelemetry import trace

    app = FastAPI()

    def note(name):
        with trace.get_tracer("of the user").start_as_current_span(name):
            pass

    @app.get("/items/{number}")
    def item(number: int):
        note("inside thread")
        return number

    @app.get("/fail")
    async def fail():
        raise ValueError("bad")

    @app.websocket("/echo/{room}")
    async def echo(socket: WebSocket):
        await socket.accept()
        await socket.receive_text()
        note("inside socket")
        await socket.send_text("done")
"""


def is_below(spans: Collector, span: Span, ancestor: Span) -> bool:
    """Return whether a span is below another one, directly or through those that FastAPI creates itself."""
    while span.parent_id != ancestor.span_id:
        parents = [each for each in spans.spans if each.span_id == span.parent_id]
        if not parents:
            return False
        span = parents[0]
    return True


def test_calls_and_websockets_of_applications_have_spans_by_route(monkeypatch: pytest.MonkeyPatch) -> None:
    def hops(path: str) -> tuple[Span, Span]:
        own = spans.wait_for(
            lambda each: each.attributes.get("url.path") == path and "cortex.request_id" in each.attributes, 2
        )
        (gateway,) = (each for each in own if each.service == "cortex-gateway")
        (worker,) = (each for each in own if each.service == "api")
        assert worker.parent_id == gateway.span_id
        return gateway, worker

    with collector() as spans:
        exporting(monkeypatch, spans)
        with running_replica(APPLICATION, type="asgi", app="app") as replica:
            replica.wait_ready()
            assert ask(replica, "/items/7", **TRACED).status == 200
            gateway, worker = hops("/app/items/7")
            assert (gateway.parent_id, gateway.trace_id) == (CALLER, TRACE)
            assert gateway.name == worker.name == "GET /app/items/{number}"
            assert worker.attributes["http.route"] == "/app/items/{number}"
            assert worker.attributes["http.response.status_code"] == 200
            (inside,) = spans.wait_for(lambda each: each.name == "inside thread")
            wait_until(lambda: is_below(spans, inside, worker))
            wait_until(lambda: [each.trace_id for each in spans.spans if each.parent_id == CALLER] == [TRACE])

            assert ask(replica, "/fail").status == 500
            failing = hops("/app/fail")[1]
            assert failing.is_error and failing.attributes["error.type"] == "ValueError"
            assert failing.events[0]["exception.message"] == "bad"
            assert ask(replica, "/none").status == 404
            assert hops("/app/none")[1].name == "GET /app"

            with websocket(replica, "/echo/a") as client:
                client.send("now")
                assert client.receive() == "done"
                assert client.closed() == (1000, "")
            socket_span = hops("/app/echo/a")[1]
            (inside,) = spans.wait_for(lambda each: each.name == "inside socket")
            wait_until(lambda: is_below(spans, inside, socket_span))
            assert socket_span.name == "GET /app/echo/{room}"
            assert socket_span.attributes["http.response.status_code"] == 101 and not socket_span.is_error
            with websocket(replica, "/echo/b") as client:
                pass
            assert {each.attributes["error.type"] for each in hops("/app/echo/b")} == {"connection_closed"}


def test_a_batch_of_several_requests_has_no_current_span(monkeypatch: pytest.MonkeyPatch) -> None:
    source = """
        from opentelemetry import trace

        class Handler:
            def __init__(self, config):
                pass

            def handle_post(self, payload):
                with trace.get_tracer("x").start_as_current_span(f"batch of {len(payload)}"):
                    return payload
    """
    with collector() as spans:
        exporting(monkeypatch, spans)
        with running_replica(source, max_batch_size=2, batch_interval_s=30.0) as replica:
            replica.wait_ready()
            connections = [replica.connection() for _ in range(4)]
            for connection in connections:
                connection.request("POST", "/shared", b"{}", {"content-type": "application/json", **TRACED})
            assert [connection.getresponse().read() for connection in connections] == [b"{}"] * 4
            shared = spans.wait_for(lambda span: span.name == "POST /shared", 8)
            assert {span.trace_id for span in shared} == {TRACE}
            batches = spans.wait_for(lambda span: span.name.startswith("batch of"))
            workers = {span.span_id for span in shared}
            assert all((span.name == "batch of 1") == (span.parent_id in workers) for span in batches)


def test_a_collector_that_is_slow_or_away_delays_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with collector() as spans:
        exporting(monkeypatch, spans, OTEL_BSP_MAX_QUEUE_SIZE="8", OTEL_BSP_MAX_EXPORT_BATCH_SIZE="4")
        held: list[object] = []
        spans.answering = lambda handler: (held.append(handler), time.sleep(60))
        with running_replica(HANDLER) as replica:
            replica.wait_ready()
            seconds = [replica.request({}).seconds for _ in range(100)]
            wait_until(lambda: held)
            assert max(seconds) < 30  # the collector holds each batch for a minute
            monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
            with running_replica(HANDLER) as other:
                other.wait_ready()
                assert max(other.request({}).seconds for _ in range(20)) < 30
                wait_until(lambda: "Connection refused" in other.log(), message=other.log())
                began = time.monotonic()
                for each in (replica, other):
                    each.command(command="stop", drain_s=5.0)
                    each.process.wait(PATIENCE_S)
                assert time.monotonic() - began < 45
                assert "killed" not in other.log() + replica.log()


def test_spans_of_a_process_are_sent_at_its_end_and_after_a_death_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    with collector() as spans:
        exporting(monkeypatch, spans, OTEL_BSP_SCHEDULE_DELAY="3600000")
        with running_replica(HANDLER) as replica:
            pid = replica.wait_ready().processes[0].pid
            assert replica.request({}, path="/lost").status == 200
            os.kill(pid or 0, signal.SIGKILL)
            wait_until(lambda: (status := replica.wait_ready()) and status.processes[0].pid != pid)
            assert replica.request({}, path="/last").status == 200
            replica.command(command="stop", drain_s=5.0)
            replica.process.wait(30)
            assert len(spans.wait_for(lambda span: span.name == "POST /last", 2)) == 2
            assert not [span for span in spans.spans if span.name == "POST /lost"]


def test_unsampled_requests_are_not_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    with collector() as spans:
        exporting(monkeypatch, spans, OTEL_TRACES_SAMPLER="parentbased_always_off")
        with running_replica(HANDLER) as replica:
            replica.wait_ready()
            assert replica.request({}, path="/unsampled").status == 200
            assert replica.request({}, path="/sampled", headers=TRACED).status == 200
            hops(spans, "POST /sampled")
            assert {span.trace_id for span in spans.spans} == {TRACE}


def test_user_code_that_configures_opentelemetry_itself_keeps_its_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    source = """
        from opentelemetry import trace
        from opentelemetry.sdk.trace import TracerProvider

        mine = TracerProvider()
        trace.set_tracer_provider(mine)

        class Handler:
            def __init__(self, config):
                pass

            def handle_get(self):
                span = trace.get_current_span()
                return {"mine": trace.get_tracer_provider() is mine, "span": f"{span.get_span_context().span_id:016x}"}
    """
    with collector() as spans:
        exporting(monkeypatch, spans)
        with running_replica(source) as replica:
            replica.wait_ready()
            answer = replica.request(method="GET", path="/own").json
            assert answer == {"mine": True, "span": hops(spans, "GET /own")[1].span_id}
            assert "Overriding" not in replica.log()


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "OTEL_EXPORTER_OTLP_PROTOCOL is grpc, but only http/protobuf"),
        ({"OTEL_PROPAGATORS": "smoke"}, "Propagator smoke not found"),
    ],
)
def test_a_configuration_that_cannot_work_is_logged_and_requests_are_served(
    variables: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with collector() as spans:
        exporting(monkeypatch, spans, **variables)
        with running_replica(HANDLER) as replica:
            replica.wait_ready()
            assert replica.request({}).status == 200
            wait_until(lambda: "traces are not exported: " in replica.log())
            wait_until(lambda: message in replica.log())
