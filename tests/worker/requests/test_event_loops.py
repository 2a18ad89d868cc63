"""Plain user code sees no event loop of cortex, whatever calls it, and however quick the calls of a process are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from harness.replicas.replicas import Replica, running_replica
from harness.wait import PATIENCE_S, SLACK, wait_until

pytestmark = pytest.mark.processes

REFUSED = {"error": "RuntimeError"}
#: What plain user code does with event loops, and the right result.
ATTEMPTS = {
    "run": 1,
    "run_until_complete": 1,
    "loop of __init__": True,
    "get_event_loop": 1,
    "get_running_loop": REFUSED,
    "current_task": REFUSED,
    "uvloop": 1,
    "nested loops": 1,
}

PRELUDE = """
    import asyncio, threading, uvloop

    async def one():
        await asyncio.sleep(0)
        return 1

    async def runs_on_a_thread():
        return await asyncio.to_thread(asyncio.run, one())

    OWN = asyncio.new_event_loop()
    CURRENT = asyncio.get_event_loop()
    ATTEMPTS = {
        "run": lambda: asyncio.Runner(loop_factory=asyncio.new_event_loop).run(one()),
        "run_until_complete": lambda: OWN.run_until_complete(one()),
        "loop of __init__": lambda: asyncio.get_event_loop() is CURRENT,
        "get_event_loop": lambda: asyncio.get_event_loop().run_until_complete(one()),
        "get_running_loop": lambda: str(asyncio.get_running_loop()),
        "current_task": lambda: str(asyncio.current_task()),
        "uvloop": lambda: asyncio.Runner(loop_factory=uvloop.new_event_loop).run(one()),
        "nested loops": lambda: OWN.run_until_complete(runs_on_a_thread()),
    }

    def attempt(name):
        try:
            return ATTEMPTS[name]()
        except Exception as error:
            return {"error": type(error).__name__}

    def is_inline():
        return "event-loop" not in [thread.name for thread in threading.enumerate()]
"""
#: Methods for a path each; payloads are converted, and results encoded, by user code.
METHODS = """
    import cortex
    from pydantic import BaseModel, field_serializer, field_validator

    class Attempt(BaseModel):
        name: str
        found: object = None

        @field_validator("name")
        def convert(cls, name):
            return f"{name}={attempt(name)}"

        @field_serializer("found")
        def encode(self, name):
            return attempt(name)

    class Handler:
        def __init__(self, config):
            pass

        def handle_get(self):
            return is_inline()

        def handle_post(self, payload):
            return attempt(payload)

        def handle_v2(self, inputs, parameters):
            return {"found": inputs["x"] * (str(attempt(parameters["name"])) == parameters["right"])}

        @cortex.route("POST", "/routes/{name}")
        def route(self, name):
            return attempt(name)

        @cortex.route("POST", "/conversions")
        def conversion(self, payload: Attempt):
            name, _, found = payload.name.partition("=")
            assert found == str(attempt(name)), found
            return Attempt(name=name, found=name)
"""
BATCHED = """
    class Handler:
        def __init__(self, config):
            pass

        def handle_get(self):
            return is_inline()

        def batch_key(self, payload):
            # The thread of the event loop has no current loop while calls run on others.
            name = "get_running_loop" if "loop" in payload else payload
            self.key = name, attempt(name)
            return 1

        def handle_post(self, payload):
            name, found = self.key
            assert found == attempt(name), self.key
            return [attempt(payload[0])]
"""


def post(replica: Replica, name: str) -> Any:
    return replica.request(name).json


def route(replica: Replica, name: str) -> Any:
    return replica.request(path=f"/t/routes/{name.replace(' ', '%20')}", headers={"x-cortex-endpoint": "/t"}).json


def convert(replica: Replica, name: str) -> Any:
    return replica.request({"name": name}, path="/t/conversions", headers={"x-cortex-endpoint": "/t"}).json["found"]


def infer(replica: Replica, name: str) -> Any:
    x = {"name": "x", "shape": [1], "datatype": "INT64", "data": [1]}
    request = {"inputs": [x], "parameters": {"name": name, "right": str(ATTEMPTS[name])}}
    answer = replica.request(request, path="/t/v2/models/api/infer", headers={"x-cortex-endpoint": "/t"})
    return ATTEMPTS[name] if answer.json["outputs"][0]["data"] == [1] else answer.json


def attempt_all(replica: Replica, calls: list[Callable[[Replica, str], Any]]) -> dict[str, dict[str, Any]]:
    return {call.__name__: {name: call(replica, name) for name in ATTEMPTS} for call in calls}


@pytest.mark.parametrize(
    ("source", "calls", "fields"),
    [
        (METHODS, [post, route, convert, infer], {}),
        (BATCHED, [post], {"max_batch_size": 4, "batch_interval_s": 0.01}),
    ],
    ids=["methods", "batches"],
)
def test_plain_code_may_start_event_loops_on_a_thread_and_inline(
    source: str, calls: list[Callable[[Replica, str], Any]], fields: dict[str, Any]
) -> None:
    right = {call.__name__: ATTEMPTS for call in calls}
    with running_replica(PRELUDE + source, **fields) as replica:
        replica.wait_ready()
        assert replica.request(method="GET").json is False
        assert attempt_all(replica, calls) == right, replica.log()
        wait_until(lambda: replica.request(method="GET").json, PATIENCE_S / SLACK)  # calls are inline now
        assert attempt_all(replica, calls) == right, replica.log()


def test_every_thread_has_a_current_loop_whatever_runs_the_call() -> None:
    with running_replica(PRELUDE + METHODS, threads=2) as replica:
        replica.wait_ready()
        found = [[post(replica, "get_event_loop") for _ in range(20)]]
        assert replica.request(method="GET").json is False
        wait_until(lambda: replica.request(method="GET").json, PATIENCE_S / SLACK)  # calls are inline now
        found.append([post(replica, "get_event_loop") for _ in range(20)])
        assert found == [[1] * 20] * 2
