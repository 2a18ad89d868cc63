"""Measure the overhead of model clients over direct library calls: `python -m benchmarks.model_clients`.

Direct and client calls alternate in short rounds, in one process with real registries. The report shows the fastest
tenth of the rounds, because other processes only add to the time.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from shutil import copy
from types import SimpleNamespace
from typing import Any

from benchmarks.tools import machine, results, tensorflow_clients
from benchmarks.tools.paths import USER_CODE
from cortex.models.loaded_models import with_call_scope
from cortex.models.spec import DEFAULT_MODEL, Catalogue, Layout, Model, ModelPath, ModelSource, Version
from cortex.predictor.clients.builder import Clients, build_clients

ROW = [5.1, 3.5, 1.4, 0.2]


@dataclass(frozen=True)
class Case:
    """A call of a client and the corresponding direct call."""

    name: str
    bare: Callable[[], Any]  #: the library, given what it wants
    client: Callable[[], Any]


@dataclass(frozen=True)
class Result:
    """Durations in µs per call."""

    name: str
    bare_us: float
    client_us: float

    @property
    def overhead_us(self) -> float:
        """The overhead of the client."""
        return self.client_us - self.bare_us


def open_clients(type_: Layout, folder: Path, serving: str | None = None, **fields: Any) -> Clients:
    """Return the clients of an API with one model, in `folder`."""
    source = ModelSource(type_, (ModelPath(DEFAULT_MODEL, str(folder)),), **fields)
    catalogue = Catalogue((Model(DEFAULT_MODEL, (Version("1", "digest", 1, 0.0, str(folder)),)),))
    spec = SimpleNamespace(type=type_, models=source, sockets=("s",), tensorflow_serving=serving, gpu_ids=())
    clients = build_clients(spec, catalogue)
    assert clients is not None and clients.registry is not None
    return clients


def python_cases(folder: Path) -> Iterator[Case]:
    """Compare `get_model()` with reading an attribute."""
    holder = SimpleNamespace(model=object(), load_model=lambda model_path: object())
    for name, fields in (("no caching", {}), ("caching", {"cache_size": 2, "disk_cache_size": 2})):
        clients = open_clients("python", folder, **fields)
        assert clients.bind is not None and clients.registry is not None
        clients.bind(holder)
        clients.registry.load_latest()
        get_model = clients.client.get_model  # type: ignore[attr-defined]
        call = with_call_scope(get_model) if fields else get_model
        yield Case(f"python: get_model(), {name}", lambda: holder.model, call)


def onnx_cases(folder: Path) -> Iterator[Case]:
    """Compare `predict` with `session.run` on arrays of the right type."""
    import numpy as np

    copy(USER_CODE / "iris.onnx", folder / "model.onnx")
    clients = open_clients("onnx", folder)
    assert clients.registry is not None
    clients.registry.load_latest()
    predict, model = clients.client.predict, clients.client.get_model()  # type: ignore[attr-defined]
    session, (given,) = model["session"], model["signatures"]
    for rows in (1, 64):
        array = np.array([ROW] * rows, np.float32)
        lists = array.tolist()
        feed = {given.name: array}

        def bare(feed: dict[str, Any] = feed) -> Any:
            return session.run(None, feed)

        def by_hand(lists: list[Any] = lists) -> Any:
            return session.run(None, {given.name: np.array(lists, np.float32)})

        passed = {
            "array": array,
            "dict of array": feed,
            "float64 array": array.astype(np.float64),
            "lists": lists,
        }
        for name, value in passed.items():
            yield Case(f"onnx iris, {rows} rows: {name}", bare, lambda value=value: predict(value))
        yield Case(f"onnx iris, {rows} rows: lists, against np.array by hand", by_hand, lambda v=lists: predict(v))
    yield Case("onnx iris: one flat row", bare_of(session, {given.name: array[:1]}), lambda: predict(ROW))
    assert np.array_equal(predict(lists)[1], session.run(None, feed)[1])


def bare_of(session: Any, feed: dict[str, Any]) -> Callable[[], Any]:
    """Return the direct call on a feed."""
    return lambda: session.run(None, feed)


def tensorflow_cases(folder: Path) -> Iterator[Case]:
    """Compare `predict` with a signature's call in this process, and with the official stub on a server."""
    command = [sys.executable, "tests/harness/models/tensorflow_models.py", str(folder / "models")]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "PYTHONPATH": "tests"})
    model = folder / "models" / "iris"

    def open_(serving: str | None) -> Clients:
        return open_clients("tensorflow", model, serving)

    def prepend_path(bin_: str) -> None:
        os.environ["PATH"] = f"{bin_}{os.pathsep}{os.environ['PATH']}"

    for row in tensorflow_clients.embedded(model, open_):
        yield Case(*row)
    for row in tensorflow_clients.on_server(model, folder, open_, prepend_path):
        yield Case(*row)


PARTS: dict[str, Callable[[Path], Iterator[Case]]] = {
    "python": python_cases,
    "onnx": onnx_cases,
    "tensorflow": tensorflow_cases,
}


def measure(case: Case, rounds: int, round_s: float) -> Result:
    """Measure both in turn; the order alternates."""
    calls = (case.bare, case.client)
    counts = [_calls_in(call, round_s) for call in calls]
    taken: tuple[list[float], list[float]] = ([], [])
    for turn in range(rounds):
        for index in (0, 1) if turn % 2 else (1, 0):
            taken[index].append(_time(calls[index], counts[index]) * 1e6)
    return Result(case.name, *(statistics.quantiles(each, n=10)[0] for each in taken))


def _calls_in(call: Callable[[], Any], seconds: float) -> int:
    _time(call, 50)
    return max(10, int(seconds / _time(call, 50)))


def _time(call: Callable[[], Any], count: int) -> float:
    begun = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - begun) / count


def main() -> None:
    """Measure, and write the report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.model_clients", description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=sorted(PARTS), default=sorted(PARTS))
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--round-s", type=float, default=0.02)
    arguments = parser.parse_args()
    measured = []
    for part in arguments.parts:
        with tempfile.TemporaryDirectory() as folder:
            for case in PARTS[part](Path(folder)):
                measured.append(measure(case, arguments.rounds, arguments.round_s))
    facts = machine.facts()
    lines = ["| call | bare, µs | client, µs | overhead, µs |", "|---|--:|--:|--:|"]
    for each in measured:
        lines.append(f"| {each.name} | {each.bare_us:.2f} | {each.client_us:.2f} | {each.overhead_us:.2f} |")
    text = "\n".join([*(f"- {name}: {value}" for name, value in facts.items()), "", *lines, ""])
    results.write("model-clients", text, {"facts": facts, "results": [asdict(each) for each in measured]})


if __name__ == "__main__":
    main()
