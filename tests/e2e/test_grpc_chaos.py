"""gRPC streams through the deaths of workers, supervisors, gateways and operators; calls over TLS; old projects."""

from __future__ import annotations

import json
import os
import signal
import textwrap
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from harness.installations.installation import Installation, installation, write_project
from harness.servers.certificates import write_pair
from harness.servers.grpc_client import NUMBERS, NumbersClient, failure, numbers_client
from harness.wait import PATIENCE_S, wait_until

pytestmark = pytest.mark.long

Code = grpc.StatusCode
SOURCE = """
    class Handler:
        def __init__(self, config, proto_module_pb2):
            pass

        def Double(self, payload):
            return {"value": payload.value * 2}

        def Sum(self, payload):
            return {"value": sum(number.value for number in payload)}

        def Count(self, payload):
            yield from ({"value": value} for value in range(payload.value))

        async def Echo(self, payload):
            async for number in payload:
                yield number

        def Do(self, payload):
            return payload
"""
CONFIG = """
    - name: numbers
      kind: RealtimeAPI
      handler: {type: python, path: handler.py, protobuf_path: numbers.proto}
"""


@pytest.fixture
def numbers(cortex: Installation, tmp_path: Path) -> Iterator[NumbersClient]:
    (tmp_path / "numbers.proto").write_text(NUMBERS.replace("PACKAGE", "numbers"))
    cortex.cortex("deploy", write_project(tmp_path, SOURCE, CONFIG))
    with numbers_client(f"{cortex.host}:{cortex.gateway_port}", tmp_path, "numbers") as client:
        yield client


@contextmanager
def stream(client: NumbersClient) -> Iterator[tuple[Any, threading.Event]]:
    """Begin a call that echoes a number at once, and another one after the event."""
    go = threading.Event()

    def requests() -> Iterator[Any]:
        yield client.number(1)
        go.wait(PATIENCE_S)
        yield client.number(2)

    call = client.Echo(requests())
    assert next(call).value == 1
    yield call, go
    go.set()


def works_again(client: NumbersClient) -> bool:
    try:
        return bool(client.Double(client.number(1), timeout=PATIENCE_S).value == 2)
    except grpc.RpcError as error:
        assert error.code() is Code.UNAVAILABLE, error
        return False


def test_a_killed_operator_ends_no_stream_and_a_killed_supervisor_says_so(
    cortex: Installation, numbers: NumbersClient
) -> None:
    with stream(numbers) as (call, go):
        os.kill(cortex.status()["operator"]["pid"], signal.SIGKILL)
        assert works_again(numbers)
        cortex.up()
        go.set()
        assert next(call).value == 2
    with stream(numbers) as (call, _):
        worker = psutil.Process(next(iter(cortex.pids("numbers"))))
        os.kill(worker.ppid(), signal.SIGKILL)
        error = failure(lambda: next(call))
        assert (error.code(), error.details()) == (Code.UNAVAILABLE, "the supervisor of its replica died")
    assert wait_until(lambda: works_again(numbers))


def test_a_killed_gateway_ends_streams_as_unavailable(cortex: Installation, numbers: NumbersClient) -> None:
    with stream(numbers) as (call, _):
        gateway = psutil.Process(cortex.status()["gateway"]["pid"])
        for process in (gateway, *gateway.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):  # workers end with their master
                process.send_signal(signal.SIGKILL)
        assert failure(lambda: next(call)).code() is Code.UNAVAILABLE
    assert wait_until(lambda: works_again(numbers))


def test_a_reload_of_the_gateway_loses_no_call(cortex: Installation, numbers: NumbersClient) -> None:
    with stream(numbers) as (call, go):
        gateway = cortex.status()["gateway"]["pid"]
        for _ in range(5):
            workers = {child.pid for child in psutil.Process(gateway).children()}
            os.kill(gateway, signal.SIGUSR2)
            wait_until(lambda seen=workers: {c.pid for c in psutil.Process(gateway).children()} - seen)  # type: ignore[misc]
            for _ in range(50):
                assert numbers.Double(numbers.number(1), timeout=PATIENCE_S).value == 2
        go.set()
        assert [number.value for number in call] == [2]


def test_calls_over_tls(tmp_path: Path) -> None:
    certificate, key = write_pair(tmp_path, "localhost")
    with installation(flags=("--tls-cert", str(certificate), "--tls-key", str(key))) as secured:
        project = write_project(tmp_path / "project", SOURCE, CONFIG)
        (project / "numbers.proto").write_text(NUMBERS.replace("PACKAGE", "numbers"))
        secured.cortex("deploy", project)
        credentials = grpc.ssl_channel_credentials(certificate.read_bytes())
        with numbers_client(f"localhost:{secured.gateway_port}", tmp_path, "numbers", credentials) as client:
            assert client.Sum(client.number(value) for value in range(100)).value == 4950
            assert [number.value for number in client.Count(client.number(3))] == [0, 1, 2]


#: As the documents of 0.32 have it, where the only method is Predict, and the class calls it `predict`.
OLD_DEFINITION = """
    syntax = "proto3";

    package prime_generator;

    service Generator {
        rpc Predict (Input) returns (stream Output);
    }

    message Input {
        int64 prime_numbers_to_generate = 1;
    }

    message Output {
        int64 prime_number = 1;
    }
"""
OLD_SOURCE = """
    class PythonPredictor:
        def __init__(self, config, proto_module_pb2):
            self.proto_module_pb2 = proto_module_pb2

        def predict(self, payload):
            found = []
            number = 2
            while len(found) < payload.prime_numbers_to_generate:
                if all(number % prime for prime in found):
                    found.append(number)
                    yield self.proto_module_pb2.Output(prime_number=number)
                number += 1
"""
OLD_CONFIG = """
    - name: prime-generator
      kind: RealtimeAPI
      predictor:
        type: python
        path: handler.py
        protobuf_path: generator.proto
"""


def test_a_project_of_the_first_generation(cortex: Installation, tmp_path: Path) -> None:
    write_project(tmp_path, OLD_SOURCE, OLD_CONFIG)
    (tmp_path / "generator.proto").write_text(textwrap.dedent(OLD_DEFINITION))
    cortex.cortex("deploy", tmp_path)
    lines = cortex.post("/prime_generator.Generator/Predict", {"prime_numbers_to_generate": 4}).body.splitlines()
    assert [json.loads(line) for line in lines] == [{"primeNumber": prime} for prime in ("2", "3", "5", "7")]
