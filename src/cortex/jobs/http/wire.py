"""Message format of the worker routes: encode and parse requests and replies, for the operator and for workers.

The first line of a body is a JSON object. Results and payloads follow as raw lines, so that nothing parses them on the
way. Workers import this module, so it imports nothing heavier than orjson.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import orjson

from cortex.errors import WorkerMessageError
from cortex.jobs.spec import (
    Assignment,
    BatchFailure,
    ExchangeReply,
    Lease,
    LeasedBatch,
    RenewalReply,
    Report,
    StopSignal,
)

#: A longer body is rejected with 413: a worker splits its reports.
MAX_BODY_BYTES = 64 * 1024 * 1024
#: No batch number, pid or size is as large; not all databases can store larger numbers.
_MAX_INT = 2**53

_T = TypeVar("_T")


@dataclass(frozen=True)
class ExchangeRequest:
    """A worker's reports, and the size of the lease it requests."""

    pid: int
    job_id: str
    reports: tuple[Report, ...] = ()
    max_batches: int = 0  #: 0: report only
    max_bytes: int = 0
    wait_s: float = 0.0  #: how long to wait if there is nothing to lease


@dataclass(frozen=True)
class RenewalRequest:
    """The leases that a worker still works on, to be renewed."""

    pid: int
    tokens: tuple[str, ...]
    is_all: bool = False  #: the process holds no other lease: replies with others were lost


@dataclass(frozen=True)
class HookReport:
    """Outcome of `on_job_complete`."""

    pid: int
    job_id: str
    token: str
    error: str | None = None
    traceback: str = ""


def write_join(pid: int) -> bytes:
    """Encode a request for a job."""
    return orjson.dumps({"pid": pid})


def parse_join(body: bytes) -> int:
    """Return the pid of the requesting process. Raises: WorkerMessageError, as do all parsers here."""
    return _integer(_object(body), "pid")


def write_joined(answer: Assignment | StopSignal | None) -> bytes:
    """Encode the reply: a job, a stop, or None, after which the worker requests again."""
    if answer is None:
        return b"{}"
    if isinstance(answer, StopSignal):
        return b'{"stop":true}'
    # Unlike orjson, json keeps everything that a configuration may contain: NaN, integers of more than 64 bits.
    return json.dumps({"job": asdict(answer)}).encode()


def parse_joined(body: bytes) -> Assignment | StopSignal | None:
    """Parse the reply to `write_join`."""
    try:
        data = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise WorkerMessageError(f"the body is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise WorkerMessageError("the body is not a JSON object")
    if data.get("stop"):
        return StopSignal()
    if "job" not in data:
        return None
    job = _get(data, "job", dict)
    return Assignment(
        job_id=_get(job, "job_id", str),
        config=_get(job, "config", dict),
        job_spec=_get(job, "job_spec", dict),
        api_spec=_get(job, "api_spec", dict),
        log_path=_get(job, "log_path", str),
        lease_s=_number(job, "lease_s"),
        batch_timeout_s=None if job.get("batch_timeout_s") is None else _number(job, "batch_timeout_s"),
        traceparent=str(job.get("traceparent", "")),
    )


def write_exchange(exchange: ExchangeRequest) -> bytes:
    """Encode reports with the request for the next lease."""
    head = {
        "pid": exchange.pid,
        "job": exchange.job_id,
        "reports": [_report_head(report) for report in exchange.reports],
        "max_batches": exchange.max_batches,
        "max_bytes": exchange.max_bytes,
        "wait_s": exchange.wait_s,
    }
    lines = [_dumps(head)]
    lines += [b"%d %b" % (seq, _line(value)) for report in exchange.reports for seq, value in report.results]
    return b"\n".join(lines)


def parse_exchange(body: bytes) -> ExchangeRequest:
    """Parse the request of `write_exchange`."""
    first, *rest = body.split(b"\n")
    head = _object(first)
    heads = _objects(head, "reports")
    announced = sum(_integer(item, "results") for item in heads)
    if announced != len(rest):
        raise WorkerMessageError(f"the reports announce {announced} lines of results, but the body has {len(rest)}")
    lines = iter(rest)
    reports = tuple(_report(item, lines) for item in heads)
    return ExchangeRequest(
        pid=_integer(head, "pid"),
        job_id=_get(head, "job", str),
        reports=reports,
        max_batches=_integer(head, "max_batches"),
        max_bytes=_integer(head, "max_bytes"),
        wait_s=_number(head, "wait_s"),
    )


def write_exchanged(answer: ExchangeReply) -> bytes:
    """Encode the reply to reports."""
    batches = answer.lease.batches if answer.lease else ()
    head = {
        "lease": {"token": answer.lease.token, "seqs": [batch.seq for batch in batches]} if answer.lease else None,
        "lost": answer.lost,
        "done": answer.is_done,
        "hook": answer.hook,
        "stop": answer.stop,
    }
    return b"\n".join([orjson.dumps(head), *(_line(batch.payload) for batch in batches)])


def parse_exchanged(body: bytes) -> ExchangeReply:
    """Parse the reply to `write_exchange`."""
    first, *payloads = body.split(b"\n")
    head = _object(first)
    hook = head.get("hook")
    return ExchangeReply(
        lease=None if head.get("lease") is None else _lease(_get(head, "lease", dict), payloads),
        lost=_strings(head, "lost"),
        is_done=_get(head, "done", bool),
        hook=None if hook is None else _get(head, "hook", str),
        stop=_get(head, "stop", bool),
    )


def write_renew(renewal: RenewalRequest) -> bytes:
    """Encode a renewal."""
    return orjson.dumps({"pid": renewal.pid, "tokens": renewal.tokens, "all": renewal.is_all})


def parse_renew(body: bytes) -> RenewalRequest:
    """Parse the request of `write_renew`."""
    data = _object(body)
    return RenewalRequest(_integer(data, "pid"), _strings(data, "tokens"), data.get("all") is True)


def write_renewed(answer: RenewalReply) -> bytes:
    """Encode the reply to a renewal."""
    return orjson.dumps({"lost": answer.lost, "stop": answer.stop})


def parse_renewed(body: bytes) -> RenewalReply:
    """Parse the reply to `write_renew`."""
    data = _object(body)
    return RenewalReply(_strings(data, "lost"), _get(data, "stop", bool))


def write_hook(done: HookReport) -> bytes:
    """Encode the outcome of `on_job_complete`."""
    data = {"pid": done.pid, "job": done.job_id, "token": done.token}
    if done.error is not None:
        data |= {"error": done.error, "traceback": done.traceback}
    return _dumps(data)


def parse_hook(body: bytes) -> HookReport:
    """Parse the request of `write_hook`."""
    data = _object(body)
    error = None if data.get("error") is None else _get(data, "error", str)
    traceback = "" if data.get("traceback") is None else _get(data, "traceback", str)
    return HookReport(_integer(data, "pid"), _get(data, "job", str), _get(data, "token", str), error, traceback)


def _report_head(report: Report) -> dict[str, Any]:
    return {
        "token": report.token,
        "upto": report.upto,
        "failures": [asdict(failure) for failure in report.failures],
        "seconds": report.seconds,
        "results": len(report.results),
    }


def _report(head: dict[str, Any], lines: Iterator[bytes]) -> Report:
    upto = _integer(head, "upto")
    failures = tuple(
        BatchFailure(_integer(item, "seq"), _get(item, "error", str), _get(item, "traceback", str))
        for item in _objects(head, "failures")
    )
    results = tuple(map(_result, itertools.islice(lines, head["results"])))
    _require_ascending([failure.seq for failure in failures], upto)
    _require_ascending([seq for seq, _ in results], upto)
    return Report(_get(head, "token", str), upto, failures, results, _number(head, "seconds"))


def _result(line: bytes) -> tuple[int, bytes]:
    seq, space, value = line.partition(b" ")
    if not (space and value and seq.isdigit() and len(seq) <= 16):
        raise WorkerMessageError("a line of results must be `<seq> <json>`")
    return int(seq), value


def _require_ascending(seqs: Sequence[int], upto: int) -> None:
    if any(later <= earlier for earlier, later in zip(seqs, seqs[1:], strict=False)) or (seqs and seqs[-1] > upto):
        raise WorkerMessageError(f"the batches of a report must ascend up to {upto}")


def _lease(data: dict[str, Any], payloads: Sequence[bytes]) -> Lease:
    seqs = _get(data, "seqs", list)
    if len(seqs) != len(payloads):
        raise WorkerMessageError(f"a lease of {len(seqs)} batches has {len(payloads)} payloads")
    for seq in seqs:
        _require_integer("seqs", seq)
    return Lease(_get(data, "token", str), tuple(map(LeasedBatch, seqs, payloads)))


def _line(value: bytes) -> bytes:
    if b"\n" in value:
        raise WorkerMessageError("a payload or result contains a line break")
    return value


def _dumps(value: Any) -> bytes:
    try:
        return orjson.dumps(value)
    except TypeError:  # an error message with an unpaired surrogate, which could not be stored either
        return orjson.dumps(_plain(value))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value.encode(errors="replace").decode() if isinstance(value, str) else value


def _object(body: bytes) -> dict[str, Any]:
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise WorkerMessageError(f"the body is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise WorkerMessageError("the body is not a JSON object")
    return data


def _get(data: dict[str, Any], key: str, kind: type[_T]) -> _T:
    value = data.get(key)
    if not isinstance(value, kind):
        raise WorkerMessageError(f"{key}: {kind.__name__} expected, got {type(value).__name__}")
    return value


def _integer(data: dict[str, Any], key: str) -> int:
    return _require_integer(key, data.get(key))


def _require_integer(key: str, value: Any) -> int:
    if type(value) is not int or not 0 <= value < _MAX_INT:  # a bool is an int
        raise WorkerMessageError(f"{key}: a non-negative integer expected, got {str(value)[:50]}")
    return value


def _number(data: dict[str, Any], key: str) -> float:
    value: Any = data.get(key)
    if type(value) not in (int, float) or not 0 <= value < _MAX_INT:
        raise WorkerMessageError(f"{key}: a number of seconds expected, got {str(value)[:50]}")
    return float(value)


def _strings(data: dict[str, Any], key: str) -> tuple[str, ...]:
    values = _get(data, key, list)
    if not all(isinstance(value, str) for value in values):
        raise WorkerMessageError(f"{key}: strings expected")
    return tuple(values)


def _objects(data: dict[str, Any], key: str) -> list[dict[str, Any]]:
    values = _get(data, key, list)
    if not all(isinstance(value, dict) for value in values):
        raise WorkerMessageError(f"{key}: objects expected")
    return values
