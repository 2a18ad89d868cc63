"""Jobs and workloads in this process: parsed, run and recorded as by a job worker, in memory, without retries."""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cortex.config.schema import Api, Networking
from cortex.dev.local.api import LocalModels, load_jobs_class
from cortex.dev.local.project import LOCAL_REVISION, run_in_thread
from cortex.errors import ConflictError, UserError
from cortex.home import Home
from cortex.jobs.intake.files import located_batches
from cortex.jobs.intake.items import split_items
from cortex.jobs.intake.submission import SubmissionLimits, parse_body
from cortex.jobs.spec import (
    HOOK_SEQ,
    KEY_BYTES,
    TASK_BATCH,
    Assignment,
    BatchFailure,
    ItemList,
    JobCounts,
    JobOrigin,
    JobRecord,
    Lease,
    LeasedBatch,
    NewBatch,
    Source,
    Submission,
    TaskCall,
    Workload,
    WorkloadView,
    job_id_at,
    source_to_json,
)
from cortex.lifecycle import ApiKind, JobStatus, WorkloadStatus
from cortex.operator.jobs.service import check_places, checked_lines
from cortex.operator.jobs.workers import job_assignment
from cortex.payloads.signature import ApiSignature
from cortex.predictor.batch import BatchCode
from cortex.predictor.tracebacks import describe, format_user_traceback
from cortex.worker.jobs.job_run import JobRun, WorkloadRun, parse_workload
from cortex.worker.jobs.shared_state import SharedJobState
from cortex.worker.jobs.unacknowledged_reports import ActiveLease, BatchOutcome
from cortex.worker.monitoring.request_log import write_log
from cortex.worker.spec import ReplicaSpec


@dataclass
class LocalJob:
    """A job and its outcome."""

    record: JobRecord
    batches: list[NewBatch]
    outcomes: list[BatchOutcome] = field(default_factory=list)
    hook_error: str = ""  #: why `on_job_complete` failed
    is_stopped: bool = False

    def stop(self) -> None:
        """Mark the job as stopped; its batch that runs is the last. Raises: ConflictError if it is over."""
        if self.record.status.is_over:
            what = "has already been stopped" if self.is_stopped else "cannot be stopped: it is not in progress"
            raise ConflictError(f"{self.record.origin.kind} job {what}")
        self.is_stopped = True
        self.record = replace(
            self.record, status=JobStatus.STOPPED, ended_at=time.time(), message="stopped by its user"
        )

    @property
    def failures(self) -> list[BatchFailure]:
        """Return the batches that raised an exception."""
        return [each.failure for each in self.outcomes if each.failure is not None]

    @property
    def results(self) -> list[Any]:
        """Return the result of each batch in order; None for one that returned nothing, or failed."""
        return [None if each.result is None else json.loads(each.result) for each in self.outcomes]


class _LocalLeases:
    """All batches of a job and its completion hook, as one lease."""

    def __init__(
        self,
        payloads: list[bytes],
        outcomes: list[BatchOutcome],
        has_hook: bool,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        batches = tuple(LeasedBatch(seq, payload) for seq, payload in enumerate(payloads))
        hook = (LeasedBatch(HOOK_SEQ, b""),) if has_hook else ()
        self._leases = deque([ActiveLease(Lease("local", batches + hook))])
        self._outcomes = outcomes
        self._is_stopped = is_stopped
        self.hook_error = ""

    @property
    def is_ending(self) -> bool:
        return self._is_stopped()

    def next_lease(self) -> ActiveLease | None:
        return self._leases.popleft() if self._leases and not self.is_ending else None

    def done(self, outcome: BatchOutcome, /) -> None:
        if outcome.seq != HOOK_SEQ:
            self._outcomes.append(outcome)
        elif outcome.failure is not None:
            self.hook_error = outcome.failure.error

    def work_done(self, batches: int, seconds: float) -> None:
        """Size no further lease."""


class JobsApi:
    """A BatchAPI or TaskAPI, each of whose jobs has an object of its own. Not thread-safe, except for `submit`."""

    signature = None  #: known once a job has an object

    def __init__(self, spec: ReplicaSpec, api: Api, environ: Mapping[str, str]) -> None:
        self._spec = spec
        self._api = api
        self._environ = environ
        self._models = LocalModels(spec)
        self._numbers = 0
        self.code: BatchCode

    def load(self) -> None:
        """Import the user's code. Raises: UserError, StorageError."""
        self.code = load_jobs_class(self._spec, self._models)

    @property
    def class_name(self) -> str | None:
        """Return the name of the user's class."""
        return self.code.class_name

    @property
    def networking(self) -> Networking:
        """Return the settings of the endpoint."""
        return self._api.networking

    def check_places(self, submission: Submission) -> None:
        """Check that a submission may name its places. Raises: SubmissionError."""
        check_places(submission, self._api)

    def checked_lines(self, submission: Submission) -> AsyncIterator[str]:
        """Yield the files that a submission would read, and that it is valid. Raises: SubmissionError, StorageError."""
        return checked_lines(submission, self.networking, self._environ)

    @property
    def limits(self) -> SubmissionLimits:
        """Return the limits of a submission."""
        return SubmissionLimits(
            self.networking.max_body_size, self.networking.max_batch_size, self._api.kind is ApiKind.TASK
        )

    def submit(self, body: Mapping[str, Any]) -> LocalJob:
        """Validate a submission and cut its input into batches. Raises: SubmissionError, StorageError."""
        submission = parse_body(body, self.limits)
        return self.create(submission, self.batches(submission.source))

    def create(self, submission: Submission, batches: list[NewBatch]) -> LocalJob:
        """Return a new job."""
        self._numbers += 1
        api = self._api
        origin = JobOrigin(
            api.name, LOCAL_REVISION, LOCAL_REVISION, LOCAL_REVISION, "", api.model_dump_json(), api.kind.value
        )
        counts = JobCounts(batches=len(batches), items=sum(batch.items for batch in batches))
        now = time.time()
        record = JobRecord(
            job_id_at(time.time_ns()),
            self._numbers,
            origin,
            submission.options,
            source_to_json(submission.source),
            JobStatus.PENDING,
            now,
            counts=counts,
        )
        return LocalJob(record, batches)

    def run(self, job: LocalJob) -> None:
        """Construct the user's object for a job and run its batches. Never raises: the job records what failed."""
        if job.is_stopped:
            return
        job.record = replace(job.record, status=JobStatus.RUNNING, started_at=time.time())
        assignment = job_assignment(job.record, self._spec.id, Home(Path("/")))
        try:
            bound = self.code.construct(assignment.config, assignment.job_spec, assignment.api_spec)
        except (Exception, SystemExit) as error:  # the edge of the user's code
            message, text = str(error) if isinstance(error, UserError) else describe(error), _traceback(error)
            write_log(f"{text}\n" if text else f"{message}\n")
            if job.is_stopped:
                self._end(job, JobStatus.STOPPED, job.record.message)
            else:
                self._end(job, JobStatus.WORKER_ERROR, message, text)
            return
        payloads, has_hook = [batch.payload for batch in job.batches], bound.on_job_complete is not None
        leases = _LocalLeases(payloads, job.outcomes, has_hook, lambda: job.is_stopped)
        JobRun(replace(assignment, batch_timeout_s=None), bound, SharedJobState(), leases).run()
        job.hook_error = leases.hook_error
        if job.is_stopped:
            self._end(job, JobStatus.STOPPED, job.record.message)
        elif job.hook_error:
            self._end(job, JobStatus.WORKER_ERROR, job.hook_error)
        elif failures := job.failures:
            is_task = job.record.origin.is_task
            status = JobStatus.WORKER_ERROR if is_task else JobStatus.COMPLETED_WITH_FAILURES
            self._end(job, status, failures[0].error, failures[0].traceback)
        else:
            self._end(job, JobStatus.SUCCEEDED)

    def close(self) -> None:
        """Unload the models."""
        self.code.close()
        self._models.close()

    def batches(self, source: Source) -> list[NewBatch]:
        """Return the batches of a source that is no upload. Blocks. Raises: SubmissionError, StorageError."""
        max_bytes, folders = self.networking.max_batch_size, self.networking.local_paths or ()
        if isinstance(source, TaskCall):
            return [TASK_BATCH]
        if isinstance(source, ItemList):
            return list(split_items(source.items, source.batch_size, max_bytes))

        async def read() -> list[NewBatch]:
            found: list[NewBatch] = []
            listed = located_batches(source, self._environ, max_bytes, folders)  # type: ignore[arg-type]
            async with aclosing(listed) as located:
                async for _, batches in located:
                    found += batches
            return found

        return run_in_thread(read())

    def _end(self, job: LocalJob, status: JobStatus, message: str = "", text: str = "") -> None:
        failed = {failure.seq for failure in job.failures}
        items = [batch.items for batch in job.batches]
        done = [each for each in job.outcomes if each.seq not in failed]
        counts = replace(
            job.record.counts,
            succeeded=len(done),
            succeeded_items=sum(items[each.seq] for each in done),
            failed=len(failed),
            failed_items=sum(items[seq] for seq in failed),
            failed_attempts=len(failed),
            results=sum(each.result is not None for each in job.outcomes),
            seconds=sum(each.seconds for each in done),
            workers=1,
        )
        job.record = replace(
            job.record, status=status, ended_at=time.time(), message=message, traceback=text, counts=counts
        )


def _traceback(error: BaseException) -> str:
    return error.traceback if isinstance(error, UserError) else format_user_traceback(error)


class AsyncApi:
    """An AsyncAPI: one object for all workloads. `submit` and `get` are for any thread, `run` is for one."""

    def __init__(self, spec: ReplicaSpec) -> None:
        self._spec = spec
        self._models = LocalModels(spec)
        self._views: dict[uuid.UUID, WorkloadView] = {}
        self._changed = threading.Condition()
        self.code: BatchCode
        self._run: WorkloadRun
        self._outcomes: list[BatchOutcome] = []

    def load(self) -> None:
        """Construct the user's class. Raises: UserError, StorageError."""
        self.code = load_jobs_class(self._spec, self._models)
        spec = self._spec
        self._bound = self.code.construct(spec.config, {}, spec.api_spec)

    @property
    def class_name(self) -> str | None:
        """Return the name of the user's class."""
        return self.code.class_name

    @property
    def signature(self) -> ApiSignature:
        """Return what its method takes and returns."""
        return self._bound.signature

    @property
    def is_of_older_file(self) -> bool:
        """Return whether its file is of an older generation."""
        return self._spec.interface != "handler"

    def check_body(self, api: str, content_type: str, body: bytes) -> None:
        """Validate the body of a workload. Raises: BadBody, PayloadError."""
        parse_workload(content_type, body, self._bound)

    def submit(self, content_type: str, body: bytes) -> Workload:
        """Store a new workload."""
        workload = Workload(uuid.uuid4(), content_type, body)
        self.add(workload)
        return workload

    def add(self, workload: Workload) -> None:
        """Store a workload."""
        with self._changed:
            self._views[workload.id] = WorkloadView(workload.id, len(self._views), WorkloadStatus.IN_QUEUE, time.time())

    def find_key(self, name: uuid.UUID) -> uuid.UUID | None:
        """Return the id of the workload with the same idempotency key as the one of this id, None if there is none."""
        with self._changed:
            return next((each for each in self._views if each.bytes[:KEY_BYTES] == name.bytes[:KEY_BYTES]), None)

    def run(self, workload: Workload) -> WorkloadView:
        """Call the user's method; record its result, or why it failed."""
        self._set(replace(self._views[workload.id], status=WorkloadStatus.IN_PROGRESS))
        outcomes: list[BatchOutcome] = []
        leases = _LocalLeases([workload.to_line()], outcomes, has_hook=False)
        assignment = Assignment(LOCAL_REVISION, self._spec.config, {}, self._spec.api_spec, "", 0.0)
        WorkloadRun(assignment, self._bound, SharedJobState(), leases).run()
        (outcome,) = outcomes
        failure = outcome.failure
        status = WorkloadStatus.FAILED if failure else WorkloadStatus.COMPLETED
        value = failure.error.encode() if failure else outcome.result or b""
        view = replace(self._views[workload.id], status=status, value=value, ended_at=time.time())
        self._set(view)
        return view

    def get(self, name: uuid.UUID, wait_s: float = 0.0) -> WorkloadView | None:
        """Return a workload, None if there is none; wait up to `wait_s` for its end."""
        with self._changed:
            self._changed.wait_for(lambda: name not in self._views or self._views[name].status.is_over, wait_s)
            return self._views.get(name)

    def close(self) -> None:
        """Unload the models."""
        self.code.close()
        self._models.close()

    def _set(self, view: WorkloadView) -> None:
        with self._changed:
            self._views[view.id] = view
            self._changed.notify_all()
