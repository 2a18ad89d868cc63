"""How a worker runs batches: each is read, given to the user's code, and what that returns or raises is noted.

It runs on the main thread, and must not know where batches come from.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from typing import Any

import orjson

from cortex.errors import ModelError, UserError
from cortex.jobs.spec import Assignment, BatchFailure, batch_id
from cortex.lifecycle import ApiKind
from cortex.predictor.batch import BoundBatch
from cortex.predictor.tracebacks import describe, format_user_traceback
from cortex.replica.channel import replace_surrogates
from cortex.replica.jobs.lease_client import Hook, JobLink
from cortex.replica.jobs.shared_state import HOOK, JobCells
from cortex.replica.jobs.unacknowledged_reports import Done, Work
from cortex.replica.payload import encode_json
from cortex.replica.request_log import REQUEST, write_log

#: A larger result can't be reported.
MAX_RESULT_BYTES = 32 * 1024 * 1024
_MAX_TRACEBACK_CHARS = 16 * 1024
_NS_PER_S = 1_000_000_000


class JobRun:
    """The batches of one job."""

    def __init__(self, job: Assignment, bound: BoundBatch, cells: JobCells, link: JobLink) -> None:
        self._job = job
        self._bound = bound
        self._cells = cells
        self._link = link
        self._timeout_ns = int((job.batch_timeout_s or 0) * _NS_PER_S)
        self._told_of_results = False
        self._pid = os.getpid()

    def run(self) -> None:
        """Do what there is to do."""
        while (task := self._link.next_task()) is not None:
            if isinstance(task, Hook):
                self._complete(task)
            else:
                self._work_through(task)

    def _work_through(self, work: Work) -> None:
        started = time.perf_counter()
        count = 0
        for batch in work.lease.batches:
            if work.is_lost or self._link.is_ending:
                break
            self._link.done(self._run_batch(work, batch.seq, batch.payload))
            count += 1
        self._link.work_done(count, time.perf_counter() - started)

    def _run_batch(self, work: Work, seq: int, payload: bytes) -> Done:
        timeout_ns = self._timeout_ns
        self._cells.begin(seq, time.monotonic_ns() + timeout_ns if timeout_ns else 0, timeout_ns)
        try:
            name, read = self._receive(seq, payload)
            REQUEST.set(name.encode())  # what is printed from here on is the batch's
            try:
                value = read()
                started = time.perf_counter()
                result = self._bound.call(value, name)
                seconds = time.perf_counter() - started
                return Done(work, seq, seconds, None, self._encode(result))
            except BaseException as error:  # the edge of the user's code: what it raises ends the batch, not us
                return Done(work, seq, 0.0, self._failure(seq, self._what(name), error))
        finally:
            self._leave()

    def _complete(self, hook: Hook) -> None:
        failure = None
        if self._bound.on_job_complete is not None:
            self._cells.begin(HOOK)
            try:
                self._bound.on_job_complete()
            except BaseException as error:  # as above
                failure = self._failure(HOOK, "on_job_complete", error)
            finally:
                self._leave()
        self._link.hook_done(hook, failure.error if failure else None, failure.traceback if failure else "")

    def _leave(self) -> None:
        """Come back from the user's code; a process that it forked must not go on as if it were the worker."""
        if os.getpid() != self._pid:
            os._exit(0)
        REQUEST.set(b"")
        self._cells.end()

    def _failure(self, seq: int, what: str, error: BaseException) -> BatchFailure:
        """Log what was raised with the user's frames, and return it to be reported."""
        try:
            is_ours = isinstance(error, UserError)
            message = str(error) if is_ours else describe(error)
            has_frames = isinstance(error, ModelError) or not is_ours
            text = format_user_traceback(error) if has_frames else f"{error}\n"
        except Exception:  # an exception that can't even be looked at must not hide that it was raised
            message, text = type(error).__name__, ""
        write_log(replace_surrogates(f"{what} failed:\n{text or message}"))
        return BatchFailure(seq, replace_surrogates(message), replace_surrogates(text[-_MAX_TRACEBACK_CHARS:]))

    def _what(self, name: str) -> str:
        return "the task" if self._job.job_spec.get("kind") == ApiKind.TASK else f"batch {name}"

    def _receive(self, seq: int, payload: bytes) -> tuple[str, Callable[[], Any]]:
        """Return what the user's code knows a batch by, and what reads its payload."""
        return batch_id(self._job.job_id, seq), lambda: _parse(payload)

    def _encode(self, result: Any) -> bytes | None:
        """Return a result as it is reported, None for none."""
        if result is None:
            return None
        try:
            return encode_line(result)
        except Exception as error:
            if not self._told_of_results:
                self._told_of_results = True
                reason = str(error) if isinstance(error, UserError) else describe(error)
                write_log(f"what a batch returned is not kept, nor are others like it in this job: {reason}\n")
            return None


def encode_line(result: Any) -> bytes:
    """Return a result as JSON on one line. Raises: UserError if JSON can't hold it, or it is too large."""
    data = encode_json(result)
    if len(data) > MAX_RESULT_BYTES:
        raise UserError(f"the result takes {len(data)} bytes, more than {MAX_RESULT_BYTES}")
    return data.replace(b"\n", b" ")  # in JSON a line break can only stand between values


def _parse(payload: bytes) -> Any:
    try:
        return orjson.loads(payload)
    except orjson.JSONDecodeError:
        return json.loads(payload)  # NaN, say
