"""One method called in each kind of API: deployed, in `cortex dev` and in `cortex.testing`, with comparable outcomes.

An outcome is `(status, value)`; for a response that breaks off, the status is "broken". Texts that name the method or a
log, which differ between kinds, are left out.

As a program, it prints the outcomes of `cortex.testing` for the project in the working directory:
`python -m harness.installations.parity`.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection, IncompleteRead
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from cortex.client.client import Client
from harness.wait import PATIENCE_S, wait_until

PROJECT = Path(__file__).parents[2] / "fixtures" / "parity"
Outcome = tuple[Any, Any]
#: Path of each realtime way.
HTTP_WAYS = {"realtime": "/realtime", "route": "/realtime/route", "batching": "/batching"}
WAYS = (*HTTP_WAYS, "workloads", "batches", "task")

_HINT = re.compile(r"; [^;]* shows the traceback")


def outcomes_by_http(url: str, way: str, names: Iterable[str], client: Client | None = None) -> dict[str, Outcome]:
    """Call each method in one way at a gateway, or at `cortex dev` without a `client`; return the outcomes."""
    names = [*names]
    match way:
        case "workloads":
            ids = {name: _send(url, "/workloads", {"name": name})[1]["id"] for name in names}
            return {name: _workload(_ended_workload(url, each)) for name, each in ids.items()}
        case "batches":
            items = {"items": [{"name": name} for name in names], "batch_size": 1}
            job = _send(url, "/batches", {"workers": 1, "max_attempts": 1, "item_list": items})[1]["job_id"]
            found = _ended_job(url, "batches", job)
            failures = client.dead_letters("batches", job) if client else found["failures"]
            errors = {each.get("first_item", each.get("batch")): ("failed", each["error"]) for each in failures}
            results = _results(client, "batches", job, found)
            return {name: errors.get(at, ("succeeded", results.get(at))) for at, name in enumerate(names)}
        case "task":
            with ThreadPoolExecutor(2) as clients:
                return dict(zip(names, clients.map(lambda name: _task(url, name, client), names), strict=True))
    return {name: _response(*_send(url, HTTP_WAYS[way], {"name": name})) for name in names}


def outcomes_in_test(way: str, names: Iterable[str]) -> dict[str, Outcome]:
    """Call each method with `cortex.testing`."""
    import cortex.testing  # noqa: PLC0415 - in a process of its own only

    names = [*names]
    with cortex.testing.load(
        PROJECT, api=way if way in ("workloads", "batches", "task") else way.replace("route", "realtime")
    ) as api:
        match way:
            case "workloads":
                ended = {name: api.run_async({"name": name}) for name in names}
                return {name: (each.status, each.result or each.error or None) for name, each in ended.items()}
            case "batches":
                done = {name: api.run_batch([{"name": name}]) for name in names}
                return {
                    name: ("failed", each.errors[0]) if each.errors else ("succeeded", each.result)
                    for name, each in done.items()
                }
            case "task":
                done = {name: api.run_task({"name": name}) for name in names}
                return {name: _job(each.status, each.result, each.errors) for name, each in done.items()}
        return {name: _in_test(api, "/route" if way == "route" else "", name) for name in names}


def _in_test(api: Any, path: str, name: str) -> Outcome:
    from cortex.testing import IncompleteResponseError  # noqa: PLC0415 - likewise

    try:
        response = api.post(path, {"name": name})
    except IncompleteResponseError as error:
        return "broken", error.response.text
    kind = response.headers.get("content-type", "")
    return _response(response.status, _value(kind, response.body))


def _send(url: str, path: str, payload: Any, method: str = "POST") -> Outcome:
    host = urlsplit(url)
    connection = HTTPConnection(host.hostname or "", host.port, timeout=PATIENCE_S)
    try:
        body = None if payload is None else json.dumps(payload)
        connection.request(method, path, body, {"content-type": "application/json"})
        response = connection.getresponse()
        return response.status, _value(response.getheader("content-type", ""), response.read())
    except IncompleteRead as error:
        return "broken", error.partial.decode()
    finally:
        connection.close()


def _value(content_type: str, body: bytes) -> Any:
    return json.loads(body) if content_type == "application/json" else body.decode("latin-1")


def _response(status: Any, value: Any) -> Outcome:
    if isinstance(value, dict) and "error" in value:
        return status, _plain(str(value["error"]))
    return status, value


def _plain(error: str) -> str:
    error = _HINT.sub("", error.removeprefix("internal server error: "))
    return re.sub(r" in (handle_post|routed)\(\)$", " in the method", error)


def _ended_workload(url: str, workload: str) -> Any:
    def over() -> Any:
        found = _send(url, f"/workloads/{workload}?wait=5", None, "GET")[1]
        return found if found["status"] in ("completed", "failed") else None

    return wait_until(over, PATIENCE_S)


def _workload(found: Mapping[str, Any]) -> Outcome:
    return found["status"], found.get("result", found.get("error"))


def _ended_job(url: str, api: str, job: str) -> Any:
    def over() -> Any:
        found = _send(url, f"/{api}/{job}", None, "GET")[1]
        return found if found["job_status"]["end_time"] else None

    return wait_until(over, PATIENCE_S)


def _task(url: str, name: str, client: Client | None) -> Outcome:
    job = _send(url, "/task", {"config": {"name": name}})[1]["job_id"]
    found = _ended_job(url, "task", job)
    status = found["job_status"]
    return _job(status["status"], _results(client, "task", job, found).get(0), [status["message"]])


def _results(client: Client | None, api: str, job: str, found: Mapping[str, Any]) -> dict[int, Any]:
    """Return the results of a job by the position of their first item."""
    if client is None:
        return dict(enumerate(found["results"]))
    return {each["first_item"]: each["result"] for each in client.job_results(api, job)}


def _job(status: str, result: Any, errors: list[str]) -> Outcome:
    is_well = status == "succeeded"
    return status, result if is_well else errors[0]


if __name__ == "__main__":
    # The methods write to standard output, too.
    _output = os.dup(1)
    os.dup2(2, 1)
    _found = {way: outcomes_in_test(way, sys.argv[1:]) for way in WAYS}
    os.write(_output, json.dumps(_found).encode())
