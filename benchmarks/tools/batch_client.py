"""Client for batch jobs: submit, query and fetch results over HTTP, with the standard library only."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

_LIMIT_S = 1800.0
_IN_PROGRESS = frozenset({"enqueuing", "pending", "running"})
#: Bytes of lines that are sent in one piece.
_PIECE = 1 << 18


class JobError(Exception):
    """A job was refused or failed."""


@dataclass(frozen=True)
class Jobs:
    """The jobs of one API."""

    gateway_port: int
    operator_port: int
    home: Path
    api: str

    def submit_lines(self, pieces: Iterable[bytes], **options: object) -> str:
        """Stream lines of JSON as the items of a job; return its id. Raises: JobError."""
        connection = HTTPConnection("127.0.0.1", self.gateway_port, timeout=_LIMIT_S)
        path = f"/{self.api}?{urlencode(options)}"
        try:
            headers = {"content-type": "application/x-ndjson"}
            connection.request("POST", path, pieces, headers, encode_chunked=True)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the answer says why
        return str(_answer(connection)["job_id"])

    def submit(self, body: dict[str, Any]) -> str:
        """Submit a job; return its id. Raises: JobError."""
        return str(self._ask("POST", f"/{self.api}", json.dumps(body).encode())["job_id"])

    def dry_run(self, body: dict[str, Any]) -> list[str]:
        """Return the lines of a dry run."""
        connection = HTTPConnection("127.0.0.1", self.gateway_port, timeout=_LIMIT_S)
        headers = {"content-type": "application/json"}
        connection.request("POST", f"/{self.api}?dryRun=true", json.dumps(body).encode(), headers)
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        if answer.status != 200:
            raise JobError(text)
        return text.splitlines()

    def status(self, job: str) -> dict[str, Any]:
        """Return the `job_status` of a job."""
        found: dict[str, Any] = self._ask("GET", f"/{self.api}?jobID={job}")["job_status"]
        return found

    def wait(
        self, job: str, every_s: float = 0.1, seen: Callable[[dict[str, Any]], object] = lambda _: None
    ) -> dict[str, Any]:
        """Wait for the end of a job and return its status; `seen` receives every polled status. Raises: JobError."""
        deadline = time.monotonic() + _LIMIT_S
        while True:
            status = self.status(job)
            seen(status)
            if status["status"] not in _IN_PROGRESS:
                return status
            if time.monotonic() > deadline:
                raise JobError(f"not over after {_LIMIT_S:g} s: {status}")
            time.sleep(every_s)

    def results(self, job: str) -> Iterator[dict[str, Any]]:
        """Yield the results of the batches."""
        return self._lines(job, "results")

    def dead_letters(self, job: str) -> Iterator[dict[str, Any]]:
        """Yield the dead letters."""
        return self._lines(job, "dead-letters")

    def _lines(self, job: str, what: str) -> Iterator[dict[str, Any]]:
        connection = HTTPConnection("127.0.0.1", self.operator_port, timeout=_LIMIT_S)
        token = (self.home / "token").read_text().strip()
        path = f"/v1/apis/{self.api}/jobs/{job}/{what}"
        connection.request("GET", path, headers={"authorization": f"Bearer {token}"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise JobError(f"{path}: {answer.status} {answer.read().decode(errors='replace')}")
        for line in answer:
            yield json.loads(line)
        connection.close()

    def _ask(self, method: str, path: str, body: bytes | None = None) -> Any:
        connection = HTTPConnection("127.0.0.1", self.gateway_port, timeout=_LIMIT_S)
        connection.request(method, path, body, {"content-type": "application/json"})
        return _answer(connection)


def lines(items: int) -> Iterator[bytes]:
    """Yield the integers from 0 as lines, in chunks; one chunk is in memory at a time."""
    step = _PIECE // 8
    for start in range(0, items, step):
        yield b"\n".join(map(b"%d".__mod__, range(start, min(start + step, items)))) + b"\n"


def _answer(connection: HTTPConnection) -> Any:
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    if answer.status != 200:
        raise JobError(f"{answer.status}: {body.decode(errors='replace')[:2000]}")
    return json.loads(body)
