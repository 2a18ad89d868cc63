"""The same method has the same outcome in each kind of API, deployed, in `cortex dev` and in `cortex.testing`.

What differs on purpose is in the table, and in docs/reference/interfaces.md.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from harness.dev_terminal import DevTerminal
from harness.installations.installation import Installation
from harness.installations.parity import PROJECT, WAYS, Outcome, outcomes_by_http

_TESTS = Path(__file__).parents[1]


@dataclass(frozen=True)
class Row:
    """The outcomes of a method of the project, as `(status, value)`."""

    name: str
    realtime: Outcome
    workload: Outcome
    batch: Outcome
    differs: Mapping[str, Outcome] = field(default_factory=dict)  #: by way of calling it

    def outcome(self, way: str) -> Outcome:
        """Return the right outcome of a way of calling the method."""
        if way in self.differs:
            return self.differs[way]
        if way == "task":
            return ("worker_error" if self.batch[0] == "failed" else self.batch[0]), self.batch[1]
        return {"workloads": self.workload, "batches": self.batch}.get(way, self.realtime)


def returned(name: str, value: Any, type_: str = "", **differs: Outcome) -> Row:
    """A method whose result is sent or stored; a workload accepts only results that are objects in JSON."""
    workload = ("failed", _not_a_dict(type_)) if type_ else ("completed", value)
    return Row(name, (200, value), workload, ("succeeded", value), differs)


def raised(name: str, error: str, **differs: Outcome) -> Row:
    """A method that raises: callers of requests get the type only, those of jobs and workloads the text, too."""
    type_ = error.partition(":")[0]
    return Row(name, (500, f"{type_} in the method"), ("failed", error), ("failed", error), differs)


def not_json(name: str, message: str, type_: str = "", **differs: Outcome) -> Row:
    """A method whose result JSON can't hold: jobs drop it, with a line in their log."""
    workload = _not_a_dict(type_) if type_ else message
    return Row(name, (500, message), ("failed", workload), ("succeeded", None), differs)


def _not_a_dict(type_: str) -> str:
    return f"the result of a workload must be a dict, but it is {type_}"


def _no_json(type_: str, fix: str = "return numbers, strings, lists and dicts") -> str:
    return f"result: {type_} is not JSON serializable; {fix}"


_FOUND = {"found": 5}
ROWS = [
    returned("get_event_loop", _FOUND),
    returned("run_until_complete", _FOUND),
    returned("asyncio.run", _FOUND),
    # A batch returns one result per item, and is awaited as a whole.
    returned("coroutine", _FOUND, batching=(500, _no_json("coroutine"))),
    returned("dict", {"a": 1}),
    returned("text", "text", "a str"),
    Row("bytes", (200, "\x00\xff"), ("failed", _not_a_dict("a bytes")), ("succeeded", None)),
    returned("None", None, "a NoneType"),
    returned("int", 7, "an int"),
    returned("list", [1, "a"], "a list"),
    returned("tuple", [1, 2], "a tuple"),
    Row("response", (201, "made"), ("failed", _not_a_dict("a Response")), ("succeeded", None)),
    returned("dataclass", {"x": 1}),
    returned("model", {"x": 1}),
    raised("ValueError", "ValueError: bad"),
    raised("custom exception", "CustomError: own"),
    raised("exit code", "SystemExit: 3"),
    raised("sys.exit", "SystemExit", task=("succeeded", None)),  # as in a script
    raised("KeyboardInterrupt", "KeyboardInterrupt"),
    raised("CancelledError", "CancelledError"),
    raised("StopIteration", "StopIteration: x"),
    raised("MemoryError", "MemoryError: much"),
    Row("HTTPException", (418, "teapot"), ("failed", "418: teapot"), ("failed", "418: teapot")),
    raised("exception that can't be pickled", "LockedError: locked"),
    raised("exception without text", "SilentError"),
    raised("endless recursion", "RecursionError: maximum recursion depth exceeded"),
    Row(
        "generator",
        (200, "1\n2\n"),  # streamed
        ("failed", _not_a_dict("a list")),
        ("succeeded", [1, 2]),
        {"batching": (500, _no_json("generator"))},
    ),
    Row(
        "generator that fails",
        ("broken", "1\n"),
        ("failed", "ValueError: bad"),
        ("failed", "ValueError: bad"),
        {"batching": (500, _no_json("generator"))},
    ),
    not_json("iterator", _no_json("list_iterator"), "a list_iterator"),
    returned("sleep", {"slept": True}),
    returned("subprocess", {"output": "hi\n"}),
    returned("fork", {"text": "child"}),
    returned("pool of processes", {"doubled": [2, 4]}),
    returned("threads", {"found": [0, 1, 2]}),
    returned("files", {"read": "abc"}),
    returned("print", {"printed": True}),
    returned("signals", {"found": ["signal"]}),
    returned("NaN", {"x": [None, None]}),
    returned("numpy numbers", {"x": [0.5, 3, True]}),
    returned("numpy array", [0, 1, 2], "a ndarray"),
    returned("date and decimal", {"x": ["2026-01-02", "1.5"]}),
    not_json("set", _no_json("set", "return a list: list(value)"), "a set"),
    not_json("object", _no_json("methods.Plain"), "a Plain"),
    returned("huge int", {"x": 10**30}),
    not_json("recursive dict", "result['self'] contains itself, which JSON cannot represent"),
    not_json("bytes in a dict", "result['b']: bytes is not JSON serializable; decode it, or encode it with base64"),
    returned("keys that are numbers", {"1": 2}),
    not_json(
        "keys that are tuples", "result has a key that is not valid in JSON: (1, 2) (tuple); use str(key)"
    ),
    returned("surrogate", {"text": "\ud800"}),
]  # fmt: skip
NAMES = [row.name for row in ROWS]
#: Each deployed task takes a worker of its own.
TASKS = ["dict", "ValueError", "sys.exit", "HTTPException", "set"]


def right(way: str, names: list[str]) -> dict[str, Outcome]:
    return {row.name: row.outcome(way) for row in ROWS if row.name in names}


@pytest.fixture(scope="module")
def deployed(cortex: Installation, tmp_path_factory: pytest.TempPathFactory) -> Installation:
    cortex.cortex("deploy", shutil.copytree(PROJECT, tmp_path_factory.mktemp("parity") / "project"))
    return cortex


@pytest.mark.parametrize("way", WAYS)
def test_a_deployed_method_has_the_outcome_of_the_table(way: str, deployed: Installation) -> None:
    names = TASKS if way == "task" else NAMES
    assert outcomes_by_http(deployed.url(""), way, names, deployed.client) == right(way, names)


@pytest.fixture(scope="module")
def tested() -> Mapping[str, Any]:
    environ = {**os.environ, "PYTHONPATH": str(_TESTS)}
    command = [sys.executable, "-m", "harness.installations.parity", *NAMES]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found: Mapping[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("way", WAYS)
def test_a_method_called_by_a_test_has_the_outcome_of_the_table(way: str, tested: Mapping[str, Any]) -> None:
    assert {name: tuple(outcome) for name, outcome in tested[way].items()} == right(way, NAMES)


@pytest.fixture(scope="module")
def developed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = shutil.copytree(PROJECT, tmp_path_factory.mktemp("parity") / "project")
    with DevTerminal(folder) as terminal:
        yield terminal.url


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
def test_a_method_of_cortex_dev_has_the_outcome_of_the_table(way: str, developed: str) -> None:
    assert outcomes_by_http(developed, way, NAMES) == right(way, NAMES)
