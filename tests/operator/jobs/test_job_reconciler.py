"""The job reconciler with real stores and a scripted engine. The test plays the workers; it also sets the time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from cortex.config.schema import Api
from cortex.engine.environment import Prepared
from cortex.errors import (
    BusyError,
    ConflictError,
    CortexError,
    EnvironmentBuildError,
    InputError,
    SubmissionError,
    TooLargeError,
)
from cortex.home import Home
from cortex.jobs.spec import (
    HOOK_SEQ,
    Assignment,
    BatchFailure,
    DelimitedFiles,
    ExchangeReply,
    FilePathLister,
    ItemList,
    JobOptions,
    JobRecord,
    Report,
    Submission,
    Upload,
    batch_id,
)
from cortex.jobs.store import JobStore
from cortex.lifecycle import DeathCause, JobStatus
from cortex.operator.jobs.completion import JobLog
from cortex.operator.jobs.dispatcher import Dispatcher
from cortex.operator.jobs.reconciler import JobReconciler
from cortex.operator.jobs.service import JobService
from cortex.operator.jobs.workers import JobWorkers
from cortex.operator.revisions.preparations import Preparations
from cortex.state.database import open_jobs_sqlite, open_sqlite
from cortex.state.queries.apis import ApiChange, ApiStore
from cortex.state.revision import Revision
from cortex.telemetry import Logger
from cortex.worker.spec import Death
from harness.replicas.scripted import ScriptedEngine, until
from harness.wait import PATIENCE_S


def batch_api(name: str = "sum", **networking: Any) -> Api:
    handler = {"interface": "predictor", "type": "python", "path": "batch.py"}
    values = {"name": name, "kind": "BatchAPI", "handler": handler, "compute": {"cpu": 1}, "networking": networking}
    return Api.model_validate(values)


class Scene:
    """A job reconciler with everything that it is constructed from, and the service in front of it."""

    def __init__(self, home: Home) -> None:
        self.now = 1_000_000.0
        self.home = home
        self._databases = open_sqlite(self.home.database_file), open_jobs_sqlite(self.home.jobs_database_file)
        self.apis = ApiStore(self._databases[0], now=lambda: datetime.fromtimestamp(self.now, UTC))
        self.engine = ScriptedEngine()
        self.prepare_errors: list[Exception] = []
        self.preparations = Preparations(self._prepare, self._wake, self._clock, Logger("test"))
        self.engine.on_change = self._wake
        self.replace_operator()

    def replace_operator(self) -> None:
        """Construct the store, the reconciler and the service anew, over the same databases and engine."""
        self.store = JobStore(self._databases[1], self._clock)
        dispatcher = Dispatcher(self.store, asyncio.Event(), self._clock)
        logger, log, token = Logger("test"), JobLog(self.home).line, "token-of-{}".format
        self.workers = JobWorkers(self.engine, self.store, dispatcher, token, log, logger, self._clock)
        self.reconciler = JobReconciler(
            self.home, self.apis, self.store, self.workers, self.preparations, {}, logger, self._clock
        )
        self.service = JobService(self.apis, self.store, self.reconciler, {}, lambda api: api.networking.endpoint)

    def deploy(self, revision: str = "r1", **networking: Any) -> None:
        self.apis.write([ApiChange(Revision(revision, batch_api(**networking), "project"), "nonce", "spec")])

    async def submit(self, *items: int, **options: int) -> JobRecord:
        submission = Submission(ItemList(list(items) or [1], 1), JobOptions(**{"workers": 1, **options}))
        return await self.service.submit("sum", submission)

    async def worker(self, count: int = 1) -> str:
        """Wait until the engine runs `count` workers; make the newest one ready and return its id."""
        await until(lambda: len(self.engine.ids()) == count)
        worker = self.engine.ids()[-1]
        self.engine.make_ready(worker)
        return worker

    async def exchange(
        self, worker: str, job: JobRecord, *reports: Report, pid: int = 1, batches: int = 10, wait_s: float = 0.0
    ) -> ExchangeReply:
        return await self.reconciler.dispatcher.exchange(worker, pid, job.id, reports, batches, 10_000, wait_s)

    async def complete(self, worker: str, job: JobRecord, pid: int = 1) -> None:
        """Play the worker that calls `on_job_complete`, which succeeds."""
        asked = await self.exchange(worker, job, pid=pid, wait_s=PATIENCE_S)
        assert asked.lease is not None and asked.lease.is_hook
        assert (await self.exchange(worker, job, Report(asked.lease.token, HOOK_SEQ), pid=pid)).is_done

    async def over(self, job: JobRecord) -> JobRecord:
        """Wait until a job is over."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                record = await self.store.get(job.id)
                assert record is not None
                if record.status.is_over:
                    return record

    def log(self, job: JobRecord) -> str:
        return (self.reconciler.log.folder("sum", job.id) / "job.log").read_text()

    def advance(self, seconds: float) -> None:
        """Move the clock, and run a pass."""
        self.now += seconds
        self.reconciler.wake()

    def dispose(self) -> None:
        for database in self._databases:
            database.dispose()

    async def _prepare(self, target: Revision) -> Prepared:
        if self.prepare_errors:
            raise self.prepare_errors.pop(0)
        return Prepared("python", {})

    def _clock(self) -> float:
        return self.now

    def _wake(self) -> None:
        self.reconciler.wake()


@contextlib.asynccontextmanager
async def reconciling(made: Scene):  # type: ignore[no-untyped-def]
    """Run the reconciler, which first adopts the jobs and workers of a previous one."""
    await made.reconciler.startup()
    running = asyncio.create_task(made.reconciler.run())
    try:
        yield
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


@contextlib.asynccontextmanager
async def scene(home: Home) -> AsyncIterator[Scene]:
    made = Scene(home)
    made.deploy()
    try:
        async with reconciling(made), asyncio.timeout(PATIENCE_S):
            yield made
    finally:
        await made.store.shutdown()
        made.dispose()


async def test_a_job_that_ends_while_the_operator_stops_has_its_end_in_the_log(home: Home) -> None:
    made = Scene(home)
    made.deploy()
    try:
        async with asyncio.timeout(PATIENCE_S):
            async with reconciling(made):
                job = await made.submit(1)
                await made.worker()
            await made.store.change(job.id, JobStatus.STOPPED, "")
            await made.reconciler.log_ends()
        assert made.log(job).endswith(" stopped: 0 of 1 batches succeeded, 0 failed\n")
    finally:
        await made.store.shutdown()
        made.dispose()


async def test_a_job_gets_a_worker_that_leases_its_batches_and_completes_it(home: Home) -> None:
    async with scene(home) as made:
        job = await made.submit(1, 2)
        worker = await made.worker()
        spec = made.engine.spec(worker)
        assert (spec.is_job_worker, spec.jobs_token) == (True, f"token-of-{worker}")
        assignment = await made.reconciler.dispatcher.join(worker, 1, PATIENCE_S)
        assert isinstance(assignment, Assignment) and assignment.job_id == job.id
        lease = (await made.exchange(worker, job)).lease
        assert lease is not None and [batch.payload for batch in lease.batches] == [b"[1]", b"[2]"]
        await made.exchange(worker, job, Report(lease.token, 1), batches=0)
        await made.complete(worker, job)
        assert (await made.over(job)).status is JobStatus.SUCCEEDED
        await until(lambda: worker in made.engine.stopped)
        assert "2 of 2 batches succeeded" in made.log(job)


async def test_a_batch_inside_a_process_that_died_is_leased_to_the_next_process(home: Home) -> None:
    async with scene(home) as made:
        job = await made.submit(1)
        worker = await made.worker()
        first = (await made.exchange(worker, job, pid=1)).lease
        assert first is not None
        death = Death(DeathCause.SEGMENTATION_FAULT, "segmentation fault", made.now, pid=1, inside=f"{job.id}:0")
        made.engine.kill_process(worker, death, new_pid=2)
        await until(
            lambda: (made.reconciler.log.folder("sum", job.id) / "job.log").exists() and "died" in made.log(job)
        )
        assert f"process 1 died in batch {batch_id(job.id, 0)}: segmentation fault" in made.log(job)
        await made.reconciler.dispatcher.join(worker, 2, PATIENCE_S)
        with pytest.raises(ConflictError):
            await made.exchange(worker, job, pid=1)
        made.advance(60)  # the backoff of the retry
        second = (await made.exchange(worker, job, pid=2, wait_s=PATIENCE_S)).lease
        assert second is not None and second.token != first.token
        await made.exchange(worker, job, Report(second.token, 0), pid=2, batches=0)
        await made.complete(worker, job, pid=2)
        assert (await made.over(job)).status is JobStatus.SUCCEEDED


async def test_a_job_whose_worker_can_not_start_fails_with_the_reason(home: Home) -> None:
    async with scene(home) as made:
        job = await made.submit(1)
        await until(made.engine.ids)
        (worker,) = made.engine.ids()
        for _ in range(3):
            made.engine.fail_to_start(worker, "ValueError: bad weights")
        record = await made.over(job)
        assert (record.status, record.message) == (JobStatus.WORKER_ERROR, "no worker can run: ValueError: bad weights")


async def test_a_job_whose_environment_can_not_be_built_fails_after_three_attempts(home: Home) -> None:
    async with scene(home) as made:
        made.prepare_errors = [EnvironmentBuildError("no such package")] * 3
        job = await made.submit(1)
        for left in (2, 1, 0):
            await until(lambda left=left: len(made.prepare_errors) == left)  # type: ignore[misc]
            made.advance(300)
        record = await made.over(job)
        assert record.status is JobStatus.WORKER_ERROR
        assert record.message == "its environment can't be built: no such package"


async def test_the_jobs_of_a_deleted_api_are_stopped(home: Home) -> None:
    async with scene(home) as made:
        job = await made.submit(1)
        await made.worker()
        made.apis.write([], ["sum"])
        made.reconciler.wake()
        record = await made.over(job)
        assert (record.status, record.message) == (JobStatus.STOPPED, "its API was deleted")


async def test_an_api_that_runs_no_jobs_says_what_to_do(home: Home) -> None:
    async with scene(home) as made:
        handler = {"interface": "handler", "type": "python", "path": "handler.py"}
        for kind in ("RealtimeAPI", "AsyncAPI"):
            api = Api.model_validate({"name": kind.lower(), "kind": kind, "handler": handler, "networking": {}})
            made.apis.write([ApiChange(Revision("r1", api, "project"), "nonce", "spec")])
        with pytest.raises(InputError, match="a RealtimeAPI, which runs no jobs; deploy it with `kind: BatchAPI`"):
            await made.service.get("realtimeapi", "7fff")
        with pytest.raises(InputError, match="an AsyncAPI, which runs no jobs; GET /asyncapi/ID returns a workload"):
            await made.service.stop("asyncapi", "7fff")


def test_the_next_operator_adopts_jobs_workers_and_leases(home: Home) -> None:
    async def run() -> None:
        made = Scene(home)
        made.deploy()
        async with reconciling(made):
            job = await made.submit(1, 2)
            worker = await made.worker()
            lease = (await made.exchange(worker, job)).lease
            assert lease is not None
        await made.store.shutdown()
        made.replace_operator()
        async with reconciling(made):
            assert made.reconciler.revisions()[0].hash == "r1"
            await made.exchange(worker, job, Report(lease.token, 1), batches=0)
            await made.complete(worker, job)
            assert (await made.over(job)).status is JobStatus.SUCCEEDED
            assert made.engine.ids() == [worker]
        await made.store.shutdown()
        made.dispose()

    asyncio.run(asyncio.wait_for(run(), PATIENCE_S))


@pytest.mark.parametrize(
    "submission",
    [
        Submission(DelimitedFiles(("/etc/passwd",), 1), JobOptions(1)),
        Submission(FilePathLister(("s3://private/",), 1), JobOptions(1)),
        Submission(ItemList([1], 1), JobOptions(1, webhook="http://169.254.169.254/")),
        Submission(Upload(1), JobOptions(1, webhook="http://127.0.0.1/")),
    ],
    ids=["local path", "bucket", "webhook", "upload"],
)
async def test_only_trusted_callers_may_name_any_place(home: Home, submission: Submission) -> None:
    async def lines() -> AsyncIterator[bytes]:
        yield b"1"

    async with scene(home) as made:
        with pytest.raises(SubmissionError, match="not open to this endpoint"):
            await made.service.submit("sum", submission, lines())
        with pytest.raises(SubmissionError, match="not open to this endpoint"):
            _ = [line async for line in made.service.dry_run("sum", submission)]
        accepted = await made.service.submit("sum", submission, lines(), is_trusted=True)  # read in the background
        assert accepted.origin.api == "sum"
        assert "from_endpoint" not in accepted.source


async def test_a_retried_job_from_the_endpoint_is_still_from_the_endpoint(home: Home) -> None:
    async with scene(home) as made:
        options = JobOptions(1, webhook="http://10.0.0.1/", max_attempts=1)
        made.deploy("r1", webhook_hosts=["10.0.0.1"])
        job = await made.service.submit("sum", Submission(ItemList([1], 1), options))
        worker = await made.worker()
        lease = (await made.exchange(worker, job)).lease
        assert lease is not None
        await made.exchange(worker, job, Report(lease.token, 0, (BatchFailure(0, "ValueError"),)), batches=0)
        await made.complete(worker, job)
        assert (await made.over(job)).source["from_endpoint"] is True
        assert (await made.service.retry_failed("sum", job.id)).source["from_endpoint"] is True
        made.deploy("r2")
        with pytest.raises(SubmissionError, match=r'the host "10\.0\.0\.1" is not public'):
            await made.service.retry_failed("sum", job.id)


async def test_callers_of_the_endpoint_store_a_limited_size(home: Home, tmp_path: Path) -> None:
    async def lines() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield (b'"' + b"x" * 997 + b'"\n') * 100

    (tmp_path / "items.json").write_text('"x"\n' + '"' + "x" * 200_000 + '"')
    async with scene(home) as made:
        made.deploy("r1", max_stored_size=200_000, local_paths=[str(tmp_path)])
        items, upload = ItemList(["x" * 60_000] * 2, 1), Submission(Upload(1), JobOptions(1))
        large = Submission(ItemList(["x" * 60_000] * 4, 1), JobOptions(1))
        files = Submission(DelimitedFiles((f"{tmp_path}/items",), 1), JobOptions(1))
        refused = "raise networking.max_stored_size of the API"
        with pytest.raises(TooLargeError, match=refused):
            await made.service.submit("sum", large)
        with pytest.raises(TooLargeError, match=refused):
            await made.service.submit("sum", upload, lines())
        assert await made.service.list("sum") == []
        made.advance(2)
        failed = await made.over(await made.service.submit("sum", files))
        assert (failed.status, refused in failed.message) == (JobStatus.ENQUEUE_FAILED, True)
        made.advance(2)
        first = await made.service.submit("sum", Submission(items, JobOptions(1)))
        with pytest.raises(BusyError, match=refused):
            await made.service.submit("sum", Submission(items, JobOptions(1)))
        for submission, body in ((large, None), (upload, lines())):  # with the operator's token
            await made.service.submit("sum", submission, body, is_trusted=True)
        await made.service.stop("sum", first.id)
        made.advance(2)
        with pytest.raises(BusyError, match=refused):
            await made.service.submit("sum", Submission(items, JobOptions(1)))
        async with asyncio.timeout(10):
            while first.id in [view.record.id for view in await made.service.list("sum")]:
                await asyncio.sleep(0.01)  # room is made in the background
        unwritable = Submission(items, JobOptions(1, output=f"{tmp_path}/items.json/out"))
        for _ in range(10):  # their bytes don't count
            with pytest.raises(CortexError, match="items.json"):
                await made.service.submit("sum", unwritable)
        await made.service.submit("sum", Submission(items, JobOptions(1)))


async def test_a_batch_of_a_worker_that_its_cluster_stopped_counts_no_failed_attempt(home: Home) -> None:
    async with scene(home) as made:
        job = await made.submit(1, max_attempts=1)
        worker = await made.worker()
        assert (await made.exchange(worker, job)).lease is not None
        await made.engine.stop(worker, 0)  # not requested by the reconciler: its node lost the reservation
        await made.workers.note_deaths()
        made.engine.end(worker)
        await until(lambda: made.engine.ids() not in ([], [worker]))
        made.engine.make_ready(other := made.engine.ids()[-1])
        again = (await made.exchange(other, job, wait_s=PATIENCE_S)).lease
        assert again is not None
        await made.exchange(other, job, Report(again.token, 0), batches=0)
        await made.complete(other, job)
        assert (await made.over(job)).status is JobStatus.SUCCEEDED
