"""Assignments and leases of the dispatcher."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cortex.errors import ConflictError, NotFoundError
from cortex.jobs.batch_queue import add_hook
from cortex.jobs.spec import (
    HOOK_SEQ,
    Assignment,
    BatchFailure,
    ExchangeReply,
    JobOptions,
    JobOrigin,
    JobRecord,
    NewBatch,
    Report,
    StopSignal,
    Workload,
)
from cortex.jobs.store import JobStore
from cortex.operator.jobs.dispatcher import Dispatcher
from harness.jobs.job_store import open_job_store
from harness.wait import PATIENCE_S

ORIGIN = JobOrigin("sum", "api-id", "spec-id", "r1", "project", "{}")


class Scene:
    """A job with batches, and a dispatcher with a real store."""

    def __init__(self, store: JobStore, job: JobRecord) -> None:
        self.store = store
        self.job = job
        self.dispatcher = Dispatcher(store, asyncio.Event())

    def assign(self, worker: str) -> None:
        self.dispatcher.assign(worker, Assignment(self.job.id, {}, {}, {}, "/log", 30.0))

    async def lease(self, worker: str, *reports: Report, wait_s: float = 0.0, batches: int = 1):  # type: ignore[no-untyped-def]
        return await self.dispatcher.exchange(worker, 1, self.job.id, reports, batches, 10_000, wait_s)

    async def resolve_all(self, worker: str) -> None:
        while lease := (await self.lease(worker, batches=100)).lease:
            await self.lease(worker, Report(lease.token, lease.batches[-1].seq), batches=0)


@contextlib.asynccontextmanager
async def open_scene(folder: Path, batches: int = 2) -> AsyncIterator[Scene]:
    async with open_job_store(folder) as store:
        job = await store.create(ORIGIN, JobOptions(workers=2), {}, [NewBatch(1, b"[1]")] * batches)
        yield Scene(store, job)


async def test_a_worker_that_joins_waits_for_its_job(tmp_path: Path) -> None:
    async with open_scene(tmp_path) as scene:
        scene.dispatcher.assign("w", None)
        assert await scene.dispatcher.join("w", 1, 0.01) is None
        joining = asyncio.create_task(scene.dispatcher.join("w", 1, PATIENCE_S))
        await asyncio.sleep(0)
        scene.assign("w")
        answer = await joining
        assert isinstance(answer, Assignment)
        assert answer.job_id == scene.job.id


async def test_a_worker_that_joins_a_stopping_session_gets_a_stop_signal(tmp_path: Path) -> None:
    async with open_scene(tmp_path) as scene:
        scene.dispatcher.assign("w", None)
        joining = asyncio.create_task(scene.dispatcher.join("w", 1, PATIENCE_S))
        await asyncio.sleep(0)
        scene.dispatcher.stop("w")
        assert await joining == StopSignal()
        assert (await scene.dispatcher.renew("w", 1, ())).stop


async def test_rejects_unknown_workers_and_older_processes(tmp_path: Path) -> None:
    async with open_scene(tmp_path) as scene:
        with pytest.raises(NotFoundError):
            await scene.dispatcher.join("stranger", 1, 0)
        scene.assign("w")
        await scene.dispatcher.join("w", 2, 0)
        with pytest.raises(ConflictError):
            await scene.lease("w")


async def test_a_worker_of_a_previous_operator_continues_without_joining(tmp_path: Path) -> None:
    async with open_scene(tmp_path) as scene:
        scene.assign("w")
        assert (await scene.lease("w")).lease.batches[0].payload == b"[1]"


async def test_a_polling_worker_gets_a_released_batch(tmp_path: Path) -> None:
    async with open_scene(tmp_path) as scene:
        scene.assign("w1")
        scene.assign("w2")
        assert (await scene.lease("w1", batches=2)).lease
        waiting = asyncio.create_task(scene.lease("w2", wait_s=PATIENCE_S))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await scene.store.release("w1", 1)
        scene.dispatcher.wake()
        assert (await waiting).lease.batches[0].seq == 0


async def test_a_polling_worker_gets_a_retry_when_its_backoff_ends(tmp_path: Path) -> None:
    async with open_scene(tmp_path, batches=1) as scene:
        scene.assign("w")
        lease = (await scene.lease("w")).lease
        report = Report(lease.token, 0, (BatchFailure(0, "ValueError"),))
        assert (await scene.lease("w", report)).lease is None
        assert (await scene.lease("w", wait_s=PATIENCE_S)).lease.batches[0].seq == 0


async def test_a_poll_without_work_ends_after_its_timeout(tmp_path: Path) -> None:
    async with open_scene(tmp_path) as scene:
        scene.assign("w1")
        scene.assign("w2")
        await scene.lease("w1", batches=2)
        answer = await scene.lease("w2", wait_s=0.05)
        assert (answer.lease, answer.is_done, answer.stop) == (None, False, False)


async def test_an_operator_that_stops_answers_all_polls(tmp_path: Path) -> None:
    async with open_scene(tmp_path, batches=1) as scene:
        scene.assign("w1")
        scene.assign("w2")
        scene.dispatcher.assign("idle", None)
        lease = (await scene.lease("w1")).lease
        joining = asyncio.create_task(scene.dispatcher.join("idle", 1, PATIENCE_S))
        waiting = asyncio.create_task(scene.lease("w2", wait_s=PATIENCE_S))
        await asyncio.sleep(0.05)
        scene.dispatcher.end_polls()
        async with asyncio.timeout(PATIENCE_S / 2):
            assert await joining is None
            assert await waiting == ExchangeReply()
        assert not (await scene.lease("w1", Report(lease.token, 0), wait_s=PATIENCE_S)).lost


async def test_a_reassigned_worker_can_report_but_gets_no_lease(tmp_path: Path) -> None:
    async with open_scene(tmp_path) as scene:
        scene.assign("w")
        lease = (await scene.lease("w")).lease
        scene.dispatcher.assign("w", None)
        answer = await scene.lease("w", Report(lease.token, 0))
        assert answer.is_done
        assert answer.lease is None
        stored = await scene.store.get(scene.job.id)
        assert stored is not None
        assert stored.counts.succeeded == 1


async def test_one_worker_gets_the_completion_hook_and_has_then_left_the_job(tmp_path: Path) -> None:
    async with open_scene(tmp_path) as scene:
        scene.assign("w1")
        scene.assign("w2")
        await scene.resolve_all("w1")
        assert scene.dispatcher.awake.is_set()
        waiting = asyncio.create_task(scene.lease("w1", wait_s=PATIENCE_S))
        await asyncio.sleep(0)
        await scene.store.write(add_hook, scene.job.id)
        scene.dispatcher.wake(scene.job.id)
        hook = (await waiting).lease
        assert hook.is_hook
        assert (await scene.lease("w2", wait_s=0.05)).lease is None
        stolen = await scene.lease("w2", Report(hook.token, HOOK_SEQ))
        assert (stolen.lost, stolen.is_done) == ((hook.token,), False)
        scene.dispatcher.awake.clear()
        failed = BatchFailure(HOOK_SEQ, "ValueError: x", "File p.py")
        assert (await scene.lease("w1", Report(hook.token, HOOK_SEQ, (failed,)))).is_done
        assert scene.dispatcher.awake.is_set()
        assert await scene.dispatcher.join("w1", 1, 0.01) is None, "its next process waits for another job"
        stored = await scene.store.get(scene.job.id)
        assert stored is not None
        assert (stored.message, stored.traceback) == ("on_job_complete raised ValueError: x", "File p.py")


async def test_counts_the_workers_that_have_constructed_the_class(tmp_path: Path) -> None:
    async def workers(scene: Scene) -> int:
        stored = await scene.store.get(scene.job.id)
        assert stored is not None
        [active] = await scene.store.active()
        assert active.counts == stored.counts
        return stored.counts.workers

    async with open_scene(tmp_path) as scene:
        scene.assign("w1")
        scene.assign("w2")
        await scene.dispatcher.join("w2", 1, 0)
        assert await workers(scene) == 0
        await scene.lease("w1", batches=1)
        await scene.lease("w1", batches=1)
        assert await workers(scene) == 1
        await scene.lease("w2", batches=1)  # it finds no batch
        assert await workers(scene) == 2


async def test_a_lease_whose_response_was_lost_is_released_at_once(tmp_path: Path) -> None:
    async with open_scene(tmp_path) as scene:
        scene.assign("w1")
        scene.assign("w2")
        held = (await scene.lease("w1")).lease
        await scene.lease("w1")  # the response is lost
        waiting = asyncio.create_task(scene.lease("w2", wait_s=PATIENCE_S))
        await asyncio.sleep(0)
        assert (await scene.dispatcher.renew("w1", 1, (held.token,), is_all=True)).lost == ()
        assert (await waiting).lease.batches[0].seq == 1


async def test_offer_wakes_one_worker_per_batch(tmp_path: Path) -> None:
    async with open_scene(tmp_path) as scene:
        dispatcher = scene.dispatcher
        await scene.store.workloads.startup(dispatcher.offer)
        queue = await scene.store.workloads.open("greet")
        for worker in ("a", "b", "c"):
            dispatcher.assign(worker, Assignment(queue.job_id, {}, {}, {}, "/log", 30.0))
        asking = {
            asyncio.create_task(dispatcher.exchange(worker, 1, queue.job_id, [], 8, 10_000, PATIENCE_S), name=worker)
            for worker in ("a", "b", "c")
        }
        for left in (2, 1, 0):
            await scene.store.workloads.add("greet", Workload(uuid.uuid4(), "text/plain", b"hello"))
            done, asking = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
            (answer,) = [task.result() for task in done]
            assert answer.lease is not None and len(answer.lease.batches) == 1
            assert len(asking) == left


async def test_a_cancelled_poll_passes_its_wake_up_on(tmp_path: Path) -> None:
    async with open_scene(tmp_path) as scene:
        queue, dispatcher = await scene.store.workloads.open("greet"), scene.dispatcher
        for worker in ("a", "b"):
            dispatcher.assign(worker, Assignment(queue.job_id, {}, {}, {}, "/log", 30.0))
        first, second = (
            asyncio.create_task(dispatcher.exchange(worker, 1, queue.job_id, [], 8, 10_000, PATIENCE_S))
            for worker in ("a", "b")
        )
        dispatcher.assign("c", Assignment(queue.job_id, {}, {}, {}, "/log", 30.0))
        # The store works in order: the others have found nothing and wait once this one, which does not wait, returns.
        assert (await dispatcher.exchange("c", 1, queue.job_id, [], 8, 10_000, 0)).lease is None
        await scene.store.workloads.add("greet", Workload(uuid.uuid4(), "text/plain", b"hello"))
        dispatcher.offer(queue.job_id, 1)
        first.cancel()
        answer = await second
        assert answer.lease is not None
