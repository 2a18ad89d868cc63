"""Running the batches of a job: parse each, call the user's code, record its result or exception. Main thread."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import orjson

from cortex.errors import ModelError, UserError, type_name, with_article
from cortex.jobs.spec import HOOK_SEQ, Assignment, BatchFailure, Workload, batch_id
from cortex.lifecycle import ApiKind
from cortex.payloads.content_type import FORM, is_json, media_type_of, to_utf8
from cortex.payloads.json_bodies import parse_json
from cortex.payloads.payload_type import PayloadType
from cortex.payloads.validation import BadBody, PayloadError
from cortex.predictor.batch import BoundBatch
from cortex.predictor.binding import Bodies
from cortex.predictor.tracebacks import describe, format_user_traceback
from cortex.predictor.user_forks import end_if_forked, process_id
from cortex.worker.channel import replace_surrogates
from cortex.worker.jobs.shared_state import SharedJobState
from cortex.worker.jobs.unacknowledged_reports import ActiveLease, BatchOutcome
from cortex.worker.monitoring.request_log import REQUEST, write_log
from cortex.worker.requests.http_exceptions import as_http_exception, describe_http_exception
from cortex.worker.requests.payload import encode_json, json_or, parse, parse_typed

if TYPE_CHECKING:
    from cortex.worker.monitoring.spans import BatchSpan, Tracing

#: Larger results cannot be reported.
MAX_RESULT_BYTES = 32 * 1024 * 1024
#: Longer messages and tracebacks of exceptions are cut.
_MAX_CHARS = 16 * 1024


class LeaseSource(Protocol):
    """The leases of a job: those of the operator (`LeaseClient`), or those of a job without one (`dev.local.jobs`)."""

    @property
    def is_ending(self) -> bool:
        """Return whether the process ends, and begins no further batch."""

    def next_lease(self) -> ActiveLease | None:
        """Wait for the next lease; return None if there is no more work."""

    def done(self, outcome: BatchOutcome, /) -> None:
        """Report the outcome of a batch."""

    def work_done(self, batches: int, seconds: float) -> None:
        """Report that a lease has been worked through."""


class JobRun:
    """Runs the batches of one job."""

    def __init__(
        self,
        job: Assignment,
        bound: BoundBatch,
        shared_state: SharedJobState,
        leases: LeaseSource,
        tracing: Tracing | None = None,
    ) -> None:
        self._job = job
        self._bound = bound
        self._shared_state = shared_state
        self._leases = leases
        self._tracing = tracing
        self._span: BatchSpan | None = None  #: of the current batch
        self._traceparent = job.traceparent  #: of what submitted the current batch
        self._timeout_ns = int((job.batch_timeout_s or 0) * 1e9)
        self._needs_results = bool(job.job_spec.get("output"))
        self._has_warned = False
        self._pid = process_id()

    def run(self) -> None:
        """Run leases until the job has no more batches."""
        while (work := self._leases.next_lease()) is not None:
            started = time.perf_counter()
            count = 0
            for batch in work.lease.batches:
                if work.is_lost or self._leases.is_ending:
                    break
                is_hook = batch.seq == HOOK_SEQ
                outcome = self._run_hook(work) if is_hook else self._run_batch(work, batch.seq, batch.payload)
                self._leases.done(outcome)
                count += 1
            self._leases.work_done(count, time.perf_counter() - started)

    def _run_batch(self, work: ActiveLease, seq: int, payload: bytes) -> BatchOutcome:
        timeout_ns = self._timeout_ns
        self._shared_state.begin(seq, time.monotonic_ns() + timeout_ns if timeout_ns else 0, timeout_ns)
        try:
            name, read = self._receive(seq, payload)
            REQUEST.set(name.encode())  # lines printed from here on belong to the batch
            if self._tracing is not None:
                self._span = self._start_span(self._tracing, name, seq)
            try:
                value = read()
                started = time.perf_counter()
                result = self._bound.call(value, name)
                seconds = time.perf_counter() - started
                return BatchOutcome(work, seq, seconds, None, self._encode(result))
            except BaseException as error:  # the edge of the user's code: its exceptions end the batch, not the process
                return BatchOutcome(work, seq, 0.0, self._failure(seq, self._what(name), error))
        finally:
            self._end_batch()

    def _run_hook(self, work: ActiveLease) -> BatchOutcome:
        failure = None
        if self._bound.on_job_complete is not None:
            self._shared_state.begin(HOOK_SEQ)
            if self._tracing is not None:
                self._span = self._tracing.start_batch("on_job_complete", self._traceparent, self._span_attributes())
            try:
                self._bound.on_job_complete()
            except BaseException as error:  # as above
                failure = self._failure(HOOK_SEQ, "on_job_complete", error)
            finally:
                self._end_batch()
        return BatchOutcome(work, HOOK_SEQ, 0.0, failure)

    def _end_batch(self) -> None:
        """Mark the batch as finished."""
        end_if_forked(self._pid)
        REQUEST.set(b"")
        if self._span is not None:
            self._span.end()
            self._span = None
        self._shared_state.end()

    def _failure(self, seq: int, what: str, error: BaseException) -> BatchFailure:
        """Log an exception with the frames of user code, and return it for the report."""
        end_if_forked(self._pid)
        try:
            if self._span is not None:
                self._span.fail(error)
            exception = as_http_exception(error)
            is_ours = isinstance(error, UserError) or exception is not None
            message = describe_http_exception(exception) if exception else str(error) if is_ours else describe(error)
            has_frames = isinstance(error, ModelError) or not is_ours
            text = format_user_traceback(error) if has_frames else f"{message}\n"
        except BaseException:  # an exception that cannot be described is still a failure
            message, text = type_name(error), ""
        write_log(replace_surrogates(f"{what} failed:\n{text or message}"))
        message, traceback = message[:_MAX_CHARS], text[-_MAX_CHARS:]
        return BatchFailure(seq, replace_surrogates(message), replace_surrogates(traceback))

    def _start_span(self, tracing: Tracing, name: str, seq: int) -> BatchSpan:
        what = "task" if self._job.job_spec.get("kind") == ApiKind.TASK else "batch"
        attributes = {**self._span_attributes(), "cortex.batch_id": name, "cortex.batch": seq}
        return tracing.start_batch(what, self._traceparent, attributes)

    def _span_attributes(self) -> dict[str, str | int]:
        return {"cortex.job_id": self._job.job_id}

    def _what(self, name: str) -> str:
        return "the task" if self._job.job_spec.get("kind") == ApiKind.TASK else f"batch {name}"

    def _receive(self, seq: int, payload: bytes) -> tuple[str, Callable[[], Any]]:
        """Return the id of a batch for user code, and a function that parses its payload."""
        return batch_id(self._job.job_id, seq), lambda: _parse(payload, self._bound.payload_type)

    def _encode(self, result: Any) -> bytes | None:
        """Encode a result for the report; None if there is none, or if nobody has asked for one that JSON can't hold.

        The original ignored results, so its classes return anything. Raises: what `encode_line` does, for jobs with an
        `output`.
        """
        if result is None:
            return None
        try:
            return encode_line(result)
        except Exception as error:
            if self._needs_results:
                raise
            if not self._has_warned:
                self._has_warned = True
                reason = str(error) if isinstance(error, UserError) else describe(error)
                write_log(f"the result of a batch is dropped, and so are similar ones of this job: {reason}\n")
            return None


def encode_line(result: Any) -> bytes:
    """Return a result as JSON on one line. Raises: UserError if JSON can't hold it, or it is too large."""
    data = encode_json(result)
    if len(data) > MAX_RESULT_BYTES:
        raise UserError(f"the result takes {len(data)} bytes, more than {MAX_RESULT_BYTES}")
    return data.replace(b"\n", b" ")  # in JSON, line breaks only occur between values


def _parse(payload: bytes, payload_type: PayloadType | None) -> Any:
    """Return the payload of a batch. Raises: UserError if it is not of the type that the user's method annotates."""
    try:
        value = parse_json(payload)
    except orjson.JSONDecodeError:
        value = json.loads(payload)  # NaN, say
    if payload_type is None:
        return value
    try:
        return payload_type.from_json(value, payload)
    except PayloadError as error:
        raise UserError(str(error)) from None


class WorkloadRun(JobRun):
    """Runs the workloads of an AsyncAPI: a batch is a workload, whose result must be a dict."""

    def _start_span(self, tracing: Tracing, name: str, seq: int) -> BatchSpan:
        return tracing.start_batch("workload", self._traceparent, {"cortex.workload_id": name})

    def _what(self, name: str) -> str:
        return f"workload {name}"

    def _receive(self, seq: int, payload: bytes) -> tuple[str, Callable[[], Any]]:
        workload = Workload.from_line(payload)
        self._shared_state.set_name(str(workload.id))
        self._traceparent = workload.traceparent

        def read() -> Any:
            try:
                return parse_workload(workload.content_type, workload.body, self._bound)
            except (BadBody, PayloadError) as error:
                raise UserError(str(error)) from None

        return str(workload.id), read

    def _encode(self, result: Any) -> bytes | None:
        # JSON encodes a dataclass or a pydantic model as an object.
        is_record = dataclasses.is_dataclass(result) or hasattr(type(result), "__pydantic_fields__")
        if not isinstance(result, dict) and not is_record:
            raise UserError(f"the result of a workload must be a dict, but it is {with_article(type_name(result))}")
        return encode_line(result)


def parse_workload(given: str, body: bytes, bound: BoundBatch) -> Any:
    """Return what the user's method annotates, or else JSON, text or bytes: then forms are not parsed.

    `given` is the content type. Raises: BadBody, PayloadError.
    """
    content_type = given.encode("latin-1", "replace")
    kind = media_type_of(content_type)
    if bound.payload_type is not None:
        return parse_typed(bound.payload_type, content_type, body)
    if kind == FORM:
        return json_or(to_utf8(body, content_type), body) if bound.bodies is Bodies.JSON_OVER_FORMS else body
    return parse(content_type, body, bound.bodies) if kind == b"text/plain" or is_json(kind) else body
