"""How a replica of an AsyncAPI works: a batch is a workload, whose result must be a dict."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cortex.errors import UserError
from cortex.jobs.spec import Workload
from cortex.replica.jobs.job_run import JobRun, encode_line
from cortex.replica.payload import BadBody, parse

_PARSED = ("application/json", "text/plain")


class WorkloadRun(JobRun):
    """The workloads of one API, for as long as the process lives."""

    def _what(self, name: str) -> str:
        return f"workload {name}"

    def _receive(self, seq: int, payload: bytes) -> tuple[str, Callable[[], Any]]:
        workload = Workload.from_line(payload)
        self._cells.call_it(str(workload.id))
        return str(workload.id), lambda: _parse(workload)

    def _encode(self, result: Any) -> bytes | None:
        if not isinstance(result, dict):
            raise UserError(f"the result of a workload must be a dict, but it is a {type(result).__name__}")
        return encode_line(result)


def _parse(workload: Workload) -> Any:
    """Return JSON, text, or bytes: forms stay as they are."""
    if workload.content_type.partition(";")[0].strip().lower() not in _PARSED:
        return workload.body
    try:
        return parse(workload.content_type.encode(errors="replace"), workload.body)
    except BadBody as error:
        raise UserError(str(error)) from None
