"""Traces from a real gateway, replicas and job workers, received by a real collector."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from harness.installations.installation import Installation, installation, write_project
from harness.servers.collector import Collector, Span, collector
from harness.wait import wait_until

SOURCE = """
    from opentelemetry import trace

    def note(name):
        with trace.get_tracer("of the user").start_as_current_span(name):
            pass

    class Handler:
        def __init__(self, config):
            pass

        def handle_post(self, payload):
            note("during the call")
            return payload

        def handle_async(self, payload):
            note("during the workload")
            return payload

        def handle_batch(self, payload):
            note("during the batch")
            if payload == [2]:
                raise ValueError("two")
"""
CONFIG = """
    - {name: live, kind: RealtimeAPI, handler: {type: python, path: handler.py}}
    - {name: later, kind: AsyncAPI, handler: {type: python, path: handler.py}}
    - {name: many, kind: BatchAPI, handler: {type: python, path: handler.py}}
"""
CALLER = "00f067aa0ba902b7"


def traced(number: int) -> tuple[str, str]:
    """Return an id of a trace and the header of a span in it."""
    trace = f"{number:032x}"
    return trace, f"00-{trace}-{CALLER}-01"


@pytest.fixture(scope="module")
def spans() -> Iterator[Collector]:
    with collector() as made:
        yield made


@pytest.fixture(scope="module")
def cortex(spans: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    with installation(spans.environ) as made:
        made.cortex("deploy", "-y", write_project(tmp_path_factory.mktemp("traced"), SOURCE, CONFIG))
        yield made


def test_a_workload_continues_the_trace_of_its_request(cortex: Installation, spans: Collector) -> None:
    trace, header = traced(2)
    name = cortex.post("/later", {"a": 1}, traceparent=header).json["id"]
    assert cortex.post(f"/later/{name}?wait=20", method="GET").json["result"] == {"a": 1}
    found = spans.wait_for(lambda span: span.trace_id == trace, 2)
    (workload,) = (span for span in found if span.name == "workload")
    (call,) = (span for span in found if span.name == "during the workload")
    assert (workload.parent_id, call.parent_id) == (CALLER, workload.span_id)
    assert (workload.attributes["cortex.workload_id"], workload.service) == (name, "later")


def test_the_batches_of_a_job_continue_the_trace_of_its_submission(cortex: Installation, spans: Collector) -> None:
    trace, header = traced(3)
    job = cortex.post("/many", {"workers": 1, "item_list": {"items": [1, 2], "batch_size": 1}}, traceparent=header)
    for number, error in ((0, None), (1, "ValueError")):

        def is_batch(span: Span, number: int = number) -> bool:
            return (span.name, span.trace_id, span.attributes.get("cortex.batch")) == ("batch", trace, number)

        batch = spans.wait_for(is_batch)[0]
        assert (batch.parent_id, batch.attributes["cortex.job_id"]) == (CALLER, job.json["job_id"])
        assert (batch.is_error, batch.attributes.get("error.type")) == (error is not None, error)
        assert spans.wait_for(lambda span, batch=batch: span.parent_id == batch.span_id)[0].name == "during the batch"


def test_a_call_of_grpc_is_traced_by_its_method_and_status(
    cortex: Installation, spans: Collector, tmp_path: Path
) -> None:
    source = """
        class Handler:
            def __init__(self, config, proto_module_pb2):
                pass

            def Do(self, payload, context):
                raise ValueError(dict(context.invocation_metadata())["traceparent"])
    """
    config = """
        - {name: calls, kind: RealtimeAPI, handler: {type: python, path: handler.py, protobuf_path: calls.proto}}
    """
    folder = write_project(tmp_path, source, config)
    (folder / "calls.proto").write_text(
        'syntax = "proto3"; package calls; message Text {} service Calls { rpc Do (Text) returns (Text); }'
    )
    cortex.cortex("deploy", "-y", folder)
    trace, header = traced(4)
    with grpc.insecure_channel(f"{cortex.host}:{cortex.gateway_port}") as channel, pytest.raises(grpc.RpcError):
        channel.unary_unary("/calls.Calls/Do")(b"", metadata=[("traceparent", header)])
    found = {span.service: span for span in spans.wait_for(lambda span: span.trace_id == trace, 2)}
    gateway, worker = found["cortex-gateway"], found["calls"]
    assert [gateway.parent_id, worker.parent_id] == [CALLER, gateway.span_id]
    for span, error in ((gateway, "INTERNAL"), (worker, "ValueError")):
        assert (span.name, span.is_error) == ("calls.Calls/Do", True)
        assert span.attributes["rpc.grpc.status_code"] == 13
        assert span.attributes["error.type"] == error
    wait_until(lambda: worker.span_id in "\n".join(cortex.client.api_logs("calls", tail=50)))
