"""gRPC APIs behind the gateway, called by grpcio: all forms of calls, statuses, deaths, keys, splitters and updates."""

from __future__ import annotations

import contextlib
import gzip
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from harness.installations.installation import Installation, write_project
from harness.installations.number_chaos import read_metrics
from harness.servers.grpc_client import NUMBERS, NumbersClient, failure, numbers_client, stalled_call
from harness.wait import PATIENCE_S, wait_until

Code = grpc.StatusCode

ON_THREADS = """
    import os, threading, time
    import grpc
    class Handler:
        def __init__(self, config, proto_module_pb2):
            self.pb2 = proto_module_pb2
            self.version = config.get("version", 1)

        def Double(self, payload):
            return {"value": payload.value * 2, "ballast": ""}

        def Sum(self, payload):
            return self.pb2.Number(value=sum(number.value for number in payload))

        def Count(self, payload, context):
            for value in range(payload.value):
                yield self.pb2.Number(value=value, ballast=payload.ballast)

        def Echo(self, payload, context):
            for number in payload:
                if number.value < 0:
                    os._exit(3)
                yield number

        def Do(self, payload, context):
            what = payload.text
            if what == "abort":
                context.set_trailing_metadata([("reason", "gone"), ("data-bin", b"\\0\\xff")])
                context.abort(grpc.StatusCode.NOT_FOUND, "100 % gone: \\u00fc")
            elif what == "code":
                context.set_code(grpc.StatusCode.FAILED_PRECONDITION)
                context.set_details("not yet")
            elif what == "raise":
                raise ValueError("secret")
            elif what == "none":
                return None
            elif what == "type":
                return 5
            elif what == "metadata":
                context.send_initial_metadata([("first", "1")])
                own = sorted(pair for pair in context.invocation_metadata() if pair[0].startswith("own"))
                return {"text": repr(own)}
            elif what == "time":
                return {"text": str(context.time_remaining())}
            elif what.startswith("wait"):
                ended = threading.Event()
                context.add_callback(ended.set)
                print(what, "began", flush=True)
                ended.wait()
                print(what, "ended", context.is_active(), flush=True)
            elif what == "sleep":
                print("sleeping", flush=True)
                time.sleep(1000)
            elif what == "stub":
                import numbers_pb2_grpc
                return {"text": numbers_pb2_grpc.NumbersStub.__name__}
            elif what == "version":
                return {"text": str(self.version)}
            return self.pb2.Text(text=what)
"""
#: The same with coroutines.
ON_LOOP = """
    import asyncio
    import grpc

    class Handler:
        def __init__(self, config, module_proto_pb2):
            self.pb2 = module_proto_pb2

        async def Double(self, payload):
            return self.pb2.Number(value=payload.value * 2)

        async def Sum(self, payload, context):
            return self.pb2.Number(value=sum([number.value async for number in payload]))

        async def Count(self, payload):
            for value in range(payload.value):
                yield self.pb2.Number(value=value, ballast=payload.ballast)

        async def Echo(self, payload):
            async for number in payload:
                yield number

        async def Do(self, payload, context):
            if payload.text == "abort":
                await context.abort(grpc.StatusCode.ALREADY_EXISTS, "again")
            if payload.text == "wait":
                try:
                    await asyncio.sleep(1000)
                finally:
                    print("cancelled", flush=True)
            return payload
"""
CONFIG = """
    - name: numbers
      kind: RealtimeAPI
      handler: {type: python, path: handler.py, protobuf_path: numbers.proto, threads_per_process: 4}
      networking: {timeout: 60s}
    - name: loop
      kind: RealtimeAPI
      handler: {type: python, path: on_loop.py, protobuf_path: loop.proto}
      networking: {timeout: 5s}
      readiness: sample.json
"""


def write_numbers(folder: Path, config: str = CONFIG) -> Path:
    write_project(folder / "loop", ON_LOOP, CONFIG)
    write_project(folder, ON_THREADS, config)
    (folder / "loop" / "handler.py").rename(folder / "on_loop.py")
    (folder / "loop" / "cortex.yaml").unlink()
    sample = {
        "Double": {"value": 1},
        "Sum": [{"value": 1}],
        "Count": {"value": 2},
        "Echo": [],
        "Do": {"text": "sample"},
    }
    (folder / "sample.json").write_text(json.dumps(sample))
    for package in ("numbers", "loop"):
        (folder / f"{package}.proto").write_text(NUMBERS.replace("PACKAGE", package))
    return folder


@pytest.fixture(scope="module")
def project(cortex: Installation, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_numbers(tmp_path_factory.mktemp("a project"))
    cortex.cortex("deploy", folder)
    return folder


@pytest.fixture(params=["numbers", "loop"])
def either(request: Any, cortex: Installation, project: Path, tmp_path: Path) -> Iterator[NumbersClient]:
    """A client of methods on threads, then one of coroutines."""
    with client(cortex, tmp_path, request.param) as found:
        yield found


def client(cortex: Installation, folder: Path, package: str = "numbers", **options: Any) -> Any:
    return numbers_client(f"{cortex.host}:{cortex.gateway_port}", folder, package, **options)


def log(cortex: Installation, api: str) -> str:
    return "\n".join(cortex.client.api_logs(api, tail=200))


def test_calls_of_all_four_forms_and_large_messages(either: NumbersClient) -> None:
    assert either.Double(either.number(21)).value == 42
    assert either.Sum(either.number(value) for value in range(1000)).value == 499500
    assert [number.value for number in either.Count(either.number(1000))] == list(range(1000))
    sent: list[int] = []

    def numbers() -> Iterator[Any]:
        for value in range(3):
            sent.append(value)
            yield either.number(value)
            wait_until(lambda value=value: received[value:], PATIENCE_S)  # type: ignore[misc]

    received: list[int] = []
    for number in either.Echo(numbers()):
        received.append(number.value)  # each is answered before the next is sent
    assert received == sent == [0, 1, 2]
    large = either.number(3, bytes(8 * 1024 * 1024))
    assert sum(len(number.ballast) for number in either.Count(large)) == 3 * 8 * 1024 * 1024
    assert [len(number.ballast) for number in either.Echo(iter([large, large]))] == [8 * 1024 * 1024] * 2
    compressed = either.Double.with_call(either.number(4, bytes(10_000)), compression=grpc.Compression.Gzip)[0]
    assert compressed.value == 8


def test_statuses_and_metadata_of_user_code(cortex: Installation, project: Path, tmp_path: Path) -> None:
    with client(cortex, tmp_path) as numbers:
        error = failure(lambda: numbers.do("abort"))
        assert (error.code(), error.details()) == (Code.NOT_FOUND, "100 % gone: ü")
        assert {"reason": "gone", "data-bin": b"\0\xff"}.items() <= dict(error.trailing_metadata()).items()
        error = failure(lambda: numbers.do("code"))
        assert (error.code(), error.details()) == (Code.FAILED_PRECONDITION, "not yet")
        for what in ("raise", "type", "none"):
            error = failure(lambda what=what: numbers.do(what))  # type: ignore[misc]
            assert error.code() is Code.INTERNAL
            assert "secret" not in error.details()
            request_id = dict(error.initial_metadata())["x-cortex-request-id"]
            assert "cortex logs numbers" in error.details()
            wait_until(lambda request_id=request_id: request_id in log(cortex, "numbers"))  # type: ignore[misc]
        wait_until(lambda: "ValueError: secret" in log(cortex, "numbers"))
        own = (("own-text", "a"), ("own-data-bin", b"\0\1"))
        text, call = numbers.Do.with_call(numbers.messages.module.Text(text="metadata"), metadata=own)
        assert text.text == repr(sorted(own))
        assert dict(call.initial_metadata())["first"] == "1"
        assert 10 < float(numbers.do("time", timeout=PATIENCE_S)) < PATIENCE_S + 1
        assert numbers.do("time", timeout=None) == "None"
        assert numbers.do("stub") == "NumbersStub"
        unknown = numbers.channel.unary_unary("/numbers.Numbers/Triple")
        assert failure(lambda: unknown(b"")).code() is Code.UNIMPLEMENTED
        invalid = numbers.channel.unary_unary("/numbers.Numbers/Double")
        assert failure(lambda: invalid(b"\xff")).code() is Code.INTERNAL
        elsewhere = failure(lambda: numbers.channel.unary_unary("/other.Service/Call")(b""))
        assert elsewhere.code() is Code.UNIMPLEMENTED
        assert "no API has the path /other.Service/Call" in elsewhere.details()
    with client(cortex, tmp_path, "loop") as loop:
        assert failure(lambda: loop.do("abort")).code() is Code.ALREADY_EXISTS
        assert failure(lambda: loop.do("wait", timeout=None)).details() == "timed out after 5 s"


def test_a_call_ends_with_its_deadline_or_when_its_client_cancels_it(
    cortex: Installation, project: Path, tmp_path: Path
) -> None:
    with client(cortex, tmp_path) as numbers:

        def has_begun() -> bool:
            """Wait for the deadline of a call; on a loaded machine, it may pass before the call has arrived."""
            assert failure(lambda: numbers.do("wait 1", timeout=0.3)).code() is Code.DEADLINE_EXCEEDED
            return "wait 1 began" in log(cortex, "numbers")

        wait_until(has_begun)
        wait_until(lambda: "wait 1 ended False" in log(cortex, "numbers"))
        stream = numbers.Echo(iter([numbers.number(1)]))
        assert next(stream).value == 1
        waiting = numbers.Do.future(numbers.messages.module.Text(text="wait 2"))
        wait_until(lambda: "wait 2 began" in log(cortex, "numbers"))
        waiting.cancel()
        wait_until(lambda: "wait 2 ended False" in log(cortex, "numbers"))
    with client(cortex, tmp_path, "loop") as loop:
        waiting = loop.Do.future(loop.messages.module.Text(text="wait"))
        before = log(cortex, "loop").count("cancelled")
        assert failure(lambda: loop.do("wait", timeout=0.3)).code() is Code.DEADLINE_EXCEEDED
        wait_until(lambda: log(cortex, "loop").count("cancelled") > before)
        waiting.cancel()


def test_the_death_of_a_process_is_unavailable_also_in_the_middle_of_a_stream(
    cortex: Installation, project: Path, tmp_path: Path
) -> None:
    with client(cortex, tmp_path) as numbers:
        go = threading.Event()

        def until_it_dies() -> Iterator[Any]:
            yield numbers.number(1)
            go.wait()
            yield numbers.number(-1)

        stream = numbers.Echo(until_it_dies())
        assert next(stream).value == 1
        sleeping = numbers.Do.future(numbers.messages.module.Text(text="sleep"))
        wait_until(lambda: "sleeping" in log(cortex, "numbers"))
        go.set()
        error = failure(lambda: next(stream))
        assert (error.code(), "exited with code 3" in error.details()) == (Code.UNAVAILABLE, True), error
        assert failure(sleeping.result).code() is Code.UNAVAILABLE
        assert wait_until(lambda: _double(numbers)) == 42


def _double(numbers: NumbersClient) -> int:
    try:
        return int(numbers.Double(numbers.number(21)).value)
    except grpc.RpcError as error:
        assert error.code() is Code.UNAVAILABLE, error
        return 0


def test_clients_that_never_complete_their_message_occupy_no_thread(
    cortex: Installation, project: Path, tmp_path: Path
) -> None:
    with client(cortex, tmp_path) as numbers, contextlib.ExitStack() as stack:
        for _ in range(10):  # the API has 4 threads
            stack.enter_context(stalled_call((cortex.host, cortex.gateway_port), "/numbers.Numbers/Double"))
        for value in range(10):
            assert numbers.Double(numbers.number(value), timeout=30).value == 2 * value  # less than the API's timeout


def test_health_checks_and_reflection(cortex: Installation, project: Path, tmp_path: Path) -> None:
    from google.protobuf.descriptor_pool import DescriptorPool
    from grpc_health.v1 import health_pb2, health_pb2_grpc
    from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

    with client(cortex, tmp_path) as numbers:
        health = health_pb2_grpc.HealthStub(numbers.channel)
        for service in ("", "numbers.Numbers", "loop.Numbers"):
            assert health.Check(health_pb2.HealthCheckRequest(service=service)).status == 1
        unknown = health_pb2.HealthCheckRequest(service="other.Service")
        assert failure(lambda: health.Check(unknown)).code() is Code.NOT_FOUND
        database = ProtoReflectionDescriptorDatabase(numbers.channel)
        assert {"loop.Numbers", "numbers.Numbers"} <= set(database.get_services())
        pool = DescriptorPool(database)
        for package in ("loop", "numbers"):
            service = pool.FindServiceByName(f"{package}.Numbers")
            assert [rpc.name for rpc in service.methods] == ["Double", "Sum", "Count", "Echo", "Do"]
        health_service = pool.FindServiceByName("grpc.health.v1.Health")
        assert [(rpc.name, rpc.server_streaming) for rpc in health_service.methods] == [
            ("Check", False),
            ("Watch", True),
        ]
        statuses = pool.FindMessageTypeByName("grpc.health.v1.HealthCheckResponse").fields_by_name["status"].enum_type
        assert statuses.values_by_number[3].name == "SERVICE_UNKNOWN"
        assert pool.FindMessageTypeByName("loop.Number").fields_by_name["ballast"].number == 2


def test_a_watch_of_the_health_sends_each_status_without_occupying_a_replica(
    cortex: Installation, project: Path, tmp_path: Path
) -> None:
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with client(cortex, tmp_path, "loop") as loop:
        health = health_pb2_grpc.HealthStub(loop.channel)
        known, unknown, every = (
            health.Watch(health_pb2.HealthCheckRequest(service=name)) for name in ("loop.Numbers", "other.Service", "")
        )
        assert [next(watch).status for watch in (known, unknown, every)] == [1, 3, 1]
        more = [health.Watch(health_pb2.HealthCheckRequest(service="loop.Numbers")) for _ in range(200)]
        assert [next(watch).status for watch in more] == [1] * 200
        assert loop.do("x") == "x"
        for watch in (known, unknown, every, *more):
            watch.cancel()


def test_refused_calls_do_not_break_those_of_others(cortex: Installation, project: Path, tmp_path: Path) -> None:
    with client(cortex, tmp_path) as numbers, client(cortex, tmp_path) as others:
        unknown = numbers.channel.unary_unary("/numbers.Numbers/Triple")
        for _ in range(100):
            refused = unknown.future(b"")
            assert others.do("x") == "x"
            assert refused.code() is Code.UNIMPLEMENTED
            assert numbers.do("y") == "y"


def test_calls_count_by_their_status(cortex: Installation, project: Path, tmp_path: Path) -> None:
    def counts() -> dict[str, int]:
        found = cortex.client.get_api("numbers")["metrics"]["requests"]
        return {name: found[name] for name in ("2xx", "4xx", "5xx")}

    before = counts()
    with client(cortex, tmp_path) as numbers:
        for what in ("abort", "code", "raise"):
            failure(lambda what=what: numbers.do(what))  # type: ignore[misc]
        last = failure(lambda: numbers.channel.unary_unary("/numbers.Numbers/Triple")(b""))
        assert numbers.do("x") == "x"
    expected = {"2xx": before["2xx"] + 1, "4xx": before["4xx"] + 2, "5xx": before["5xx"] + 2}
    wait_until(lambda: counts() == expected)
    page = read_metrics(cortex)
    for code in ("OK", "NOT_FOUND", "FAILED_PRECONDITION", "INTERNAL"):
        assert f'cortex_grpc_calls_total{{api="numbers",code="{code}",rpc="Do"}}' in page
    request_id = dict(last.initial_metadata())["x-cortex-request-id"]
    assert last.code() is Code.UNIMPLEMENTED
    assert request_id


def test_a_version_whose_sample_fails_does_not_serve(cortex: Installation, project: Path, tmp_path: Path) -> None:
    sampled = CONFIG.partition("- name: loop")[0] + "  readiness: sample.json\n"
    folder = write_numbers(tmp_path / "failing", sampled.replace("numbers", "failing"))
    (folder / "failing.proto").write_text(NUMBERS.replace("PACKAGE", "failing"))
    for sample, reason in (
        ({"Do": {"text": "abort"}}, "Do ended with the status NOT_FOUND: 100 % gone: ü"),
        ({"Do": {"text": "type"}}, "Do returned int, not failing.Text"),
        ({"Count": {"valu": 1}}, "the request is not a valid failing.Number: "),
        ({"Other": {}}, "it must be an object with the request of one or more of Double, Sum, Count, Echo, Do"),
    ):
        (folder / "sample.json").write_text(json.dumps(sample))
        failed = cortex.cortex("deploy", folder, check=False)
        assert failed.returncode == 1
        assert f"the readiness sample sample.json failed: {reason}" in failed.stderr
    cortex.cortex("delete", "failing")


def test_calls_in_json(cortex: Installation, project: Path, tmp_path: Path) -> None:
    assert cortex.post("/numbers.Numbers/Double", {"value": 21}).json == {"value": "42"}
    assert cortex.post("/loop.Numbers/Sum", [{"value": 1}, {"value": 2}]).json == {"value": "3"}
    documented = cortex.post("/numbers.Numbers/openapi.json", method="GET").json["paths"]
    assert set(documented) == {f"/numbers.Numbers/{name}" for name in ("Double", "Sum", "Count", "Echo", "Do")}
    lines = cortex.post("/numbers.Numbers/Count", {"value": 2}).body.splitlines()
    assert [line.replace(b" ", b"") for line in lines] == [b"{}", b'{"value":"1"}']
    wrong = cortex.post("/numbers.Numbers/Double", {"valu": 21})
    assert (wrong.status, wrong.json["code"]) == (400, "INVALID_ARGUMENT")
    aborted = cortex.post("/numbers.Numbers/Do", {"text": "abort"})
    assert (aborted.status, aborted.json["error"]) == (404, "100 % gone: ü")
    assert cortex.post("/numbers.Numbers", {}).status == 404
    for service in ("numbers", "loop"):  # the first one reads its stream on a thread
        single = cortex.post(f"/{service}.Numbers/Sum", {"value": 1})
        assert (single.status, single.json["code"]) == (400, "INVALID_ARGUMENT")
        assert "must be a JSON array" in single.json["error"]
    assert cortex.post("/numbers.Numbers/Double", body=b'{"value": "\xff"}').status == 400
    for path, body, value in (("/numbers.Numbers/Double", b'{"value": 21}', "42"), ("/loop.Numbers/Sum", b"[{}]", "0")):
        for sent, coding, status in (
            (gzip.compress(body), "gzip", 200),
            (body, "gzip", 400),
            (body, "br", 415),
            (gzip.compress(bytes(50_000_000)), "gzip", 413),
        ):
            answer = cortex.post(path, body=sent, content_encoding=coding)
            assert answer.status == status, (path, coding, answer.body)
            assert status != 200 or answer.json.get("value", "0") == value
            assert ("accept-encoding" in answer.headers) == (status == 415)
        assert cortex.post(path, body=body, content_type="application/json; charset=punycode").status == 415
        in_utf16 = body.decode().encode("utf-16")
        assert cortex.post(path, body=in_utf16, content_type="application/json; charset=utf-16").status == 200
    sample = tmp_path / "sample.json"
    sample.write_text('{"value": 3}')
    assert '"value": "6"' in cortex.cortex("predict", "numbers", sample, "--method", "Double").stdout
    assert "/numbers.Numbers/Double, " in cortex.cortex("predict", "numbers", sample, check=False).stdout


@contextlib.contextmanager
def silence() -> Iterator[Any]:
    """Yield a function that sends one number, and nothing more until the end of the context."""
    over = threading.Event()

    def numbers_that_stop(numbers: NumbersClient) -> Iterator[Any]:
        yield numbers.number(1)
        over.wait(PATIENCE_S)

    try:
        yield numbers_that_stop
    finally:
        over.set()


@pytest.mark.long
def test_keys_are_metadata(cortex: Installation, project: Path, tmp_path: Path) -> None:
    config = """
        - name: keyed
          kind: RealtimeAPI
          handler: {type: python, path: handler.py, protobuf_path: protos/keyed.proto}
          networking: {auth: api_key, timeout: 5s}
    """
    folder = write_numbers(tmp_path / "keyed", config)
    (folder / "protos").mkdir()
    (folder / "protos" / "keyed.proto").write_text(NUMBERS.replace("PACKAGE", "keyed"))
    cortex.cortex("deploy", folder)
    key = cortex.client.create_key("mine", ["keyed"])["key"]
    other = cortex.client.create_key("other", ["numbers"])["key"]
    with client(cortex, tmp_path, "keyed") as keyed:
        error = failure(lambda: keyed.do("x"))
        assert (error.code(), "this API needs a key" in error.details()) == (Code.UNAUTHENTICATED, True)
        for metadata in ([("authorization", f"Bearer {key}")], [("x-api-key", key)]):
            assert keyed.do("x", metadata=metadata) == "x"
        wrong = [("x-api-key", other)]
        assert failure(lambda: keyed.do("x", metadata=wrong)).code() is Code.PERMISSION_DENIED
        assert list(keyed.Count(keyed.number(2), metadata=metadata))
        with silence() as numbers_that_stop:
            late = failure(lambda: keyed.Sum(numbers_that_stop(keyed), timeout=None, metadata=metadata))
        assert (late.code(), late.details()) == (Code.DEADLINE_EXCEEDED, "timed out after 5 s")
        assert keyed.do("x", metadata=metadata) == "x"
        assert "died" not in cortex.cortex("logs", "keyed").stdout  # a wait for the client is no code that is late
        late = failure(lambda: keyed.do("sleep", timeout=None, metadata=metadata))
        assert (late.code(), late.details()) == (Code.DEADLINE_EXCEEDED, "timed out after 5 s")


@pytest.mark.long
def test_a_splitter_divides_the_calls_of_a_service(cortex: Installation, project: Path, tmp_path: Path) -> None:
    config = """
        - name: one
          kind: RealtimeAPI
          handler: {type: python, path: handler.py, protobuf_path: numbers.proto, config: {version: 1}}
        - name: two
          kind: RealtimeAPI
          handler: {type: python, path: handler.py, protobuf_path: numbers.proto, config: {version: 2}}
        - name: both
          kind: TrafficSplitter
          networking: {endpoint: /split.Numbers}
          apis: [{name: one, weight: 50}, {name: two, weight: 50}]
    """
    folder = write_numbers(tmp_path / "split", config)
    (folder / "numbers.proto").write_text(NUMBERS.replace("PACKAGE", "split"))
    cortex.cortex("deploy", folder)
    with client(cortex, tmp_path, "split") as split:
        assert wait_until(lambda: {split.do("version") for _ in range(20)} == {"1", "2"})
        for api, version in (("one", "1"), ("two", "2")):
            assert {split.do("version", metadata=[("x-cortex-api", api)]) for _ in range(10)} == {version}
        assert split.Sum(split.number(value) for value in range(10)).value == 45
    (folder / "cortex.yaml").write_text((folder / "cortex.yaml").read_text().partition("- name: both")[0])
    clash = cortex.cortex("check", folder / "cortex.yaml", check=False).stderr
    assert '"/split.Numbers" is the endpoint of "one"' in clash


def test_an_update_loses_no_call(cortex: Installation, project: Path, tmp_path: Path) -> None:
    with client(cortex, tmp_path) as numbers:
        go, failures, versions = threading.Event(), list[Any](), set[str]()

        def held() -> Iterator[Any]:
            yield numbers.number(1)
            go.wait()
            yield numbers.number(2)

        stream = numbers.Echo(held())
        assert next(stream).value == 1

        def call() -> None:
            while not go.is_set():
                try:
                    versions.add(numbers.do("version"))
                except grpc.RpcError as error:
                    failures.append(error)

        caller = threading.Thread(target=call)
        caller.start()
        changed = CONFIG.replace("numbers.proto, threads", "numbers.proto, config: {version: 2}, threads")
        cortex.cortex("deploy", write_numbers(project, changed), "--no-wait")
        wait_until(lambda: "2" in versions, PATIENCE_S)
        go.set()
        assert [number.value for number in stream] == [2]
        caller.join()
        assert not failures
