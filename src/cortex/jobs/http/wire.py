"""Message format of the worker routes: encode and parse requests and replies, for the operator and for workers.

The first line of a body is a JSON object. Results and payloads follow as raw lines, so that nothing parses them on the
way. Workers import this module, so it imports nothing heavier than orjson.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import orjson

from cortex.errors import WorkerMessageError
from cortex.jobs.spec import (
    HOOK_SEQ,
    Assignment,
    BatchFailure,
    ExchangeReply,
    Lease,
    LeasedBatch,
    Report,
    StopSignal,
)
from cortex.processes.codec import decode, encode

#: A longer body is rejected with 413: a worker splits its reports.
MAX_BODY_BYTES = 64 * 1024 * 1024
#: No batch number, pid or size is as large; not all databases can store larger numbers.
_MAX_INT = 2**53

_T = TypeVar("_T")
_Number = TypeVar("_Number", int, float)


def _check_number(number: _Number) -> _Number:
    if not 0 <= number < _MAX_INT:
        raise ValueError(f"a number from 0 to 2^53 expected, got {number}")
    return number


Count = Annotated[int, _check_number]
Seconds = Annotated[float, _check_number]


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
class JoinRequest:
    """A process's request for a job."""

    pid: Count


@dataclass(frozen=True)
class RenewalRequest:
    """The leases that a worker still works on, to be renewed."""

    pid: Count
    tokens: tuple[str, ...]
    all: bool = False  #: the process holds no other lease: replies with others were lost


@dataclass(frozen=True)
class HookReport:
    """Outcome of `on_job_complete`, as workers of older versions report it."""

    pid: Count
    job: str
    token: str
    error: str | None = None
    traceback: str = ""


# First lines of bodies.


@dataclass(frozen=True)
class _Joined:
    job: Assignment | None = None
    stop: bool = False


@dataclass(frozen=True)
class _ReportHead:
    token: str
    upto: Count
    failures: tuple[BatchFailure, ...]
    seconds: Seconds
    results: Count


@dataclass(frozen=True)
class _ExchangeHead:
    pid: Count
    job: str
    reports: tuple[_ReportHead, ...]
    max_batches: Count
    max_bytes: Count
    wait_s: Seconds


@dataclass(frozen=True)
class _LeaseHead:
    token: str
    seqs: tuple[Count, ...]


@dataclass(frozen=True)
class _ReplyHead:
    lease: _LeaseHead | None
    lost: tuple[str, ...]
    done: bool
    hook: str | None  #: token of a lease of the completion hook: workers of older versions know no other form of it
    stop: bool


def write(message: Any) -> bytes:
    """Encode a message that is one object, or the first line of another one."""
    try:
        return orjson.dumps(message)
    except TypeError:  # an error message with an unpaired surrogate, which could not be stored either
        return orjson.dumps(_plain(encode(message)))


def parse(kind: type[_T], body: bytes, loads: Callable[[bytes], Any] = orjson.loads) -> _T:
    """Parse the result of `write`. Raises: WorkerMessageError, as do all parsers here."""
    try:
        data = loads(body)
    except (ValueError, RecursionError) as error:
        raise WorkerMessageError(f"the body is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise WorkerMessageError("the body is not a JSON object")
    try:
        return decode(kind, data)
    except ValueError as error:
        raise WorkerMessageError(str(error)) from None


def write_joined(answer: Assignment | StopSignal | None) -> bytes:
    """Encode the reply: a job, a stop, or None, after which the worker requests again."""
    if answer is None:
        return b"{}"
    if isinstance(answer, StopSignal):
        return b'{"stop":true}'
    # Unlike orjson, json keeps everything that a configuration may contain: NaN, integers of more than 64 bits.
    return json.dumps({"job": encode(answer)}).encode()


def parse_joined(body: bytes) -> Assignment | StopSignal | None:
    """Parse the reply to a request for a job."""
    joined = parse(_Joined, body, json.loads)
    return StopSignal() if joined.stop else joined.job


def write_exchange(exchange: ExchangeRequest) -> bytes:
    """Encode reports with the request for the next lease."""
    reports = exchange.reports
    heads = tuple(
        _ReportHead(each.token, each.upto, each.failures, each.seconds, len(each.results)) for each in reports
    )
    limits = exchange.max_batches, exchange.max_bytes, exchange.wait_s
    lines = [write(_ExchangeHead(exchange.pid, exchange.job_id, tuple(heads), *limits))]
    lines += [b"%d %b" % (seq, _line(value)) for report in reports for seq, value in report.results]
    return b"\n".join(lines)


def parse_exchange(body: bytes) -> ExchangeRequest:
    """Parse the request of `write_exchange`."""
    first, *rest = body.split(b"\n")
    head = parse(_ExchangeHead, first)
    announced = sum(report.results for report in head.reports)
    if announced != len(rest):
        raise WorkerMessageError(f"the reports announce {announced} lines of results, but the body has {len(rest)}")
    lines = iter(rest)
    reports = tuple(_report(each, lines) for each in head.reports)
    return ExchangeRequest(head.pid, head.job, reports, head.max_batches, head.max_bytes, head.wait_s)


def write_exchanged(answer: ExchangeReply) -> bytes:
    """Encode the reply to reports."""
    leased = answer.lease
    if leased is not None and leased.is_hook:
        return write(_ReplyHead(None, answer.lost, answer.is_done, leased.token, answer.stop))
    batches = leased.batches if leased else ()
    lease = _LeaseHead(leased.token, tuple(batch.seq for batch in batches)) if leased else None
    head = _ReplyHead(lease, answer.lost, answer.is_done, None, answer.stop)
    return b"\n".join([write(head), *(_line(batch.payload) for batch in batches)])


def parse_exchanged(body: bytes) -> ExchangeReply:
    """Parse the reply to `write_exchange`."""
    first, *payloads = body.split(b"\n")
    head = parse(_ReplyHead, first)
    lease = None if head.lease is None else _lease(head.lease, payloads)
    if head.hook is not None:
        lease = Lease(head.hook, (LeasedBatch(HOOK_SEQ, b""),))
    return ExchangeReply(lease, head.lost, head.done, head.stop)


def _report(head: _ReportHead, lines: Iterator[bytes]) -> Report:
    results = tuple(map(_result, itertools.islice(lines, head.results)))
    _require_ascending([failure.seq for failure in head.failures], head.upto)
    _require_ascending([seq for seq, _ in results], head.upto)
    return Report(head.token, head.upto, head.failures, results, head.seconds)


def _result(line: bytes) -> tuple[int, bytes]:
    seq, space, value = line.partition(b" ")
    if not (space and value and seq.isdigit() and len(seq) <= 16):
        raise WorkerMessageError("a line of results must be `<seq> <json>`")
    return int(seq), value


def _require_ascending(seqs: Sequence[int], upto: int) -> None:
    if any(later <= earlier for earlier, later in zip(seqs, seqs[1:], strict=False)) or (
        seqs and not 0 <= seqs[0] <= seqs[-1] <= upto
    ):
        raise WorkerMessageError(f"the batches of a report must ascend up to {upto}")


def _lease(head: _LeaseHead, payloads: Sequence[bytes]) -> Lease:
    if len(head.seqs) != len(payloads):
        raise WorkerMessageError(f"a lease of {len(head.seqs)} batches has {len(payloads)} payloads")
    return Lease(head.token, tuple(map(LeasedBatch, head.seqs, payloads)))


def _line(value: bytes) -> bytes:
    if b"\n" in value:
        raise WorkerMessageError("a payload or result contains a line break")
    return value


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value.encode(errors="replace").decode() if isinstance(value, str) else value
