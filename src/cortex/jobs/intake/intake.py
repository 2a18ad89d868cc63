"""Brings the items of a job's files into the store, from the beginning, in portions that keep nobody waiting."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Protocol

from cortex.errors import ConflictError, InputError, NotFoundError, StorageError
from cortex.jobs.intake.files import located_batches
from cortex.jobs.spec import FilePathLister, JobRecord, NewBatch
from cortex.lifecycle import JobStatus

_PORTION = 1000
_PORTION_BYTES = 2 * 1024 * 1024
_LOG_EVERY_S = 5.0


class BatchStore(Protocol):
    """What takes batches."""

    async def reset_batches(self, job_id: str) -> None: ...

    async def add_batches(self, job_id: str, batches: Sequence[NewBatch]) -> None: ...

    async def finish_enqueuing(self, job_id: str) -> JobRecord: ...

    async def change(self, job_id: str, status: JobStatus, message: str = "", traceback: str = "") -> bool: ...


async def enqueue(
    store: BatchStore,
    job: JobRecord,
    source: FilePathLister,
    environ: Mapping[str, str],
    max_batch_bytes: int,
    log: Callable[[str], None],
) -> None:
    """Store the batches of a job's files, whatever of them is there already, and open it to workers.

    What is wrong with the files ends the job as `enqueue_failed`; that it was ended meanwhile ends this, too.
    """
    try:
        await store.reset_batches(job.id)
        count = await _add(store, job.id, source, environ, max_batch_bytes, log)
        finished = await store.finish_enqueuing(job.id)
        log(f"enqueued {count:,} batches" if count else f"enqueuing failed: {finished.message}")
    except (ConflictError, NotFoundError) as error:
        log(f"enqueuing ended early: {error}")
    except (StorageError, InputError) as error:
        await store.change(job.id, JobStatus.ENQUEUE_FAILED, str(error))
        log(f"enqueuing failed: {error}")


async def _add(
    store: BatchStore,
    job_id: str,
    source: FilePathLister,
    environ: Mapping[str, str],
    max_bytes: int,
    log: Callable[[str], None],
) -> int:
    waiting: list[NewBatch] = []
    size_bytes = count = 0
    told_at = time.monotonic()
    storing: asyncio.Task[None] | None = None
    try:
        async with aclosing(located_batches(source, environ, max_bytes)) as found:
            async for path, batches in found:
                for batch in batches:
                    waiting.append(batch)
                    size_bytes += len(batch.payload)
                    if len(waiting) >= _PORTION or size_bytes >= _PORTION_BYTES:
                        if storing is not None:
                            await storing
                        # Stored while more is being read.
                        storing = asyncio.create_task(store.add_batches(job_id, waiting))
                        count += len(waiting)
                        waiting, size_bytes = [], 0
                if count and time.monotonic() - told_at >= _LOG_EVERY_S:
                    told_at = time.monotonic()
                    log(f"enqueued {count:,} batches so far ({path})")
        if storing is not None:
            await storing
        if waiting:
            await store.add_batches(job_id, waiting)
        return count + len(waiting)
    finally:
        if storing is not None:
            # Nothing of this is under way any more once it is over.
            await asyncio.gather(storing, return_exceptions=True)
