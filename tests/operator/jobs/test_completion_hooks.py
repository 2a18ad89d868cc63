"""Completion hooks: one process runs the hook, also across operators, until it ends or dies."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from cortex.errors import ConflictError
from cortex.jobs.batch_queue import LEASE_S
from cortex.jobs.lease_expiry import NO_RENEWAL
from cortex.jobs.spec import JobOptions, JobOrigin, NewBatch
from cortex.jobs.store import JobStore
from cortex.operator.jobs.dispatcher import CompletionHooks, HookLost, HookOutcome
from harness.jobs.job_store import open_job_store

ORIGIN = JobOrigin("sum", "api-id", "spec-id", "r1", "project", "{}")
WELL = HookOutcome()
Test = Callable[[JobStore, str], Awaitable[None]]


@contextlib.asynccontextmanager
async def scene(folder: Path) -> AsyncIterator[tuple[JobStore, str]]:
    async with open_job_store(folder) as store:
        job = await store.create(ORIGIN, JobOptions(workers=2), {}, [NewBatch(1, b"[1]")])
        yield store, job.id


async def begun(
    hooks: CompletionHooks, job: str, there: tuple[str, int] | None = None
) -> asyncio.Task[HookOutcome | HookLost]:
    """Start to wait for a hook; `there` is the only process that may still run it."""
    opened = asyncio.Event()
    task = asyncio.create_task(hooks.run(job, lambda worker, pid: (worker, pid) == there, opened.set))
    await asyncio.wait([task, asyncio.create_task(opened.wait())], return_when=asyncio.FIRST_COMPLETED)
    return task


async def test_the_next_operator_waits_for_the_process_that_runs_the_hook(tmp_path: Path) -> None:
    async with scene(tmp_path) as (store, job):
        first = CompletionHooks(store)
        killed = await begun(first, job)
        token = await first.acquire(job, "w1", 7) or ""
        killed.cancel()
        second = CompletionHooks(store)
        waiting = await begun(second, job, there=("w1", 7))
        assert second.renew("w1", 7, [token, "other"]) == {token}
        assert second.renew("w2", 7, [token]) == set()
        assert await second.acquire(job, "w2", 8) is None
        assert await second.acquire(job, "w1", 9) is None
        assert await second.acquire(job, "w1", 7) == token
        await second.done(job, "w1", 7, token, WELL)
        assert await waiting == WELL


async def test_a_stored_outcome_is_not_repeated_by_the_next_operator(tmp_path: Path) -> None:
    async with scene(tmp_path) as (store, job):
        first = CompletionHooks(store)
        killed = await begun(first, job)
        token = await first.acquire(job, "w1", 7) or ""
        killed.cancel()
        outcome = HookOutcome("ValueError: x", "File p.py")
        second = CompletionHooks(store)
        await second.done(job, "w1", 7, token, outcome)
        for hooks in (second, CompletionHooks(store)):
            assert await (await begun(hooks, job)) == outcome


async def test_a_hook_that_ends_while_the_next_operator_reads_its_holder_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scene(tmp_path) as (store, job):
        first = CompletionHooks(store)
        killed = await begun(first, job)
        token = await first.acquire(job, "w1", 7) or ""
        killed.cancel()
        has_read, may_go_on = asyncio.Event(), asyncio.Event()
        read = store.read

        async def late(query: Callable[..., object], *arguments: object) -> object:
            marks = await read(query, *arguments)
            if not has_read.is_set():
                has_read.set()
                await may_go_on.wait()
            return marks

        monkeypatch.setattr(store, "read", late)
        second = CompletionHooks(store)
        waiting = asyncio.create_task(second.run(job, lambda worker, pid: True, lambda: None))
        await has_read.wait()
        assert await second.acquire(job, "w2", 8) is None
        await second.done(job, "w1", 7, token, WELL)
        may_go_on.set()
        async with asyncio.timeout(10):
            assert await waiting == WELL


async def test_a_lost_process_releases_the_hook(tmp_path: Path) -> None:
    async with scene(tmp_path) as (store, job):
        first = CompletionHooks(store)
        killed = await begun(first, job)
        token = await first.acquire(job, "w1", 7) or ""
        killed.cancel()
        second = CompletionHooks(store)
        waiting = await begun(second, job, there=("w1", 8))
        other = await second.acquire(job, "w2", 3)
        assert other not in (None, token)
        with pytest.raises(ConflictError):
            await second.done(job, "w1", 7, token, WELL)
        second.release("w2", None, except_pid=3)
        second.release("w2", 4)
        assert not waiting.done()
        second.release("w2", 3)
        assert await waiting == HookLost()
        again = await begun(second, job, there=("w2", 3))
        assert await second.acquire(job, "w3", 1) is not None
        again.cancel()


async def test_a_process_without_heartbeats_releases_the_hook(tmp_path: Path) -> None:
    async with scene(tmp_path) as (store, job):
        now = 0.0
        hooks = CompletionHooks(store, lambda: now)
        waiting = await begun(hooks, job)
        hooks.expire()  # without a holder
        token = await hooks.acquire(job, "w1", 7) or ""
        now = LEASE_S
        hooks.renew("w1", 7, [token])
        now = 2 * LEASE_S
        hooks.expire()
        assert not waiting.done()
        now += 1
        hooks.expire()
        assert await waiting == HookLost(NO_RENEWAL)
        again = await begun(hooks, job)
        assert await hooks.acquire(job, "w2", 8)
        with pytest.raises(ConflictError):
            await hooks.done(job, "w1", 7, token, WELL)
        again.cancel()
