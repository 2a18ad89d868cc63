"""Files are stored as a job's batches, replacing earlier ones; invalid files end the job."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from cortex.jobs.intake.files import enqueue_files
from cortex.jobs.spec import DelimitedFiles, FilePathLister, JobRecord, NewBatch, source_from_json, source_to_json
from cortex.jobs.store import JobStore
from cortex.lifecycle import JobStatus
from cortex.state.database import open_jobs_sqlite
from cortex.state.tables import batches
from harness.jobs.job_checks import ORIGIN, options
from harness.jobs.job_store import open_job_store

LIMIT = 256_000


async def stored_items(folder: Path, job: JobRecord) -> list[object]:
    engine = open_jobs_sqlite(folder / "jobs.db")
    with engine.begin() as connection:
        payloads = connection.execute(batches.select().order_by(batches.c.key)).all()
    engine.dispose()
    return [item for row in payloads for item in json.loads(row.payload)]


async def enqueue(store: JobStore, source: FilePathLister) -> tuple[JobRecord, list[str]]:
    """Submit a job of files and enqueue it; return the job and the log."""
    job = await store.create(ORIGIN, options(), source_to_json(source), None)
    log: list[str] = []
    await enqueue_files(store, job, source, {}, LIMIT, log.append)
    found = await store.get(job.id)
    assert found is not None
    return found, log


@pytest.fixture
def files(tmp_path: Path) -> str:
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(3):
        (folder / f"{number}.json").write_bytes(
            b"".join(b"%d\n" % n for n in range(number * 5000, number * 5000 + 5000))
        )
    return f"{folder}/"


async def test_stores_all_values_of_all_files_in_order(tmp_path: Path, files: str) -> None:
    async with open_job_store(tmp_path) as store:
        job, log = await enqueue(store, DelimitedFiles((files,), 7))
        assert (job.status, job.counts.items, job.counts.batches) == (JobStatus.PENDING, 15_000, 2143)
        assert await stored_items(tmp_path, job) == list(range(15_000))
        assert log[-1] == "enqueued 2,143 batches"


async def test_restarts_enqueuing_after_a_crash(tmp_path: Path, files: str) -> None:
    async with open_job_store(tmp_path) as store:
        source = FilePathLister((files,), 2, ("**.json",))
        job = await store.create(ORIGIN, options(), source_to_json(source), None)
        await store.add_batches(job.id, [NewBatch(1, b'["left over"]')])
    async with open_job_store(tmp_path) as store:
        [job] = await store.active()
        again = source_from_json(job.source)
        assert isinstance(again, FilePathLister)
        await enqueue_files(store, job, again, {}, LIMIT, print)
        assert await stored_items(tmp_path, job) == [f"{files}{number}.json" for number in range(3)]
        found = await store.get(job.id)
        assert found is not None and found.counts.batches == 2


async def test_an_invalid_file_fails_the_job(tmp_path: Path, files: str) -> None:
    (Path(files) / "9.json").write_bytes(b"1\noops\n")
    async with open_job_store(tmp_path) as store:
        job, log = await enqueue(store, DelimitedFiles((files,), 1))
        assert job.status is JobStatus.ENQUEUE_FAILED
        assert job.message.startswith(f"{files}9.json: invalid JSON at byte 2 (1 oops ): ")
        assert log[-1] == f"enqueuing failed: {job.message}"  # perhaps after lines of progress


async def test_missing_files_and_empty_files_fail_the_job(tmp_path: Path, files: str) -> None:
    (tmp_path / "blank").write_bytes(b"\n")
    async with open_job_store(tmp_path) as store:
        job, _ = await enqueue(store, DelimitedFiles((f"{files}absent",), 1))
        assert job.status is JobStatus.ENQUEUE_FAILED
        assert job.message.startswith("no files match search criteria")
        job, log = await enqueue(store, DelimitedFiles((f"{tmp_path}/blank",), 1))
        assert job.status is JobStatus.ENQUEUE_FAILED
        assert log == ["enqueuing failed: unable to enqueue batches because no data was found"]


async def test_a_job_stopped_during_enqueuing_stays_stopped(tmp_path: Path, files: str) -> None:
    async with open_job_store(tmp_path) as store:
        source = DelimitedFiles((files,), 1)
        job = await store.create(ORIGIN, options(), source_to_json(source), None)
        await store.change(job.id, JobStatus.STOPPED)
        log: list[str] = []
        await enqueue_files(store, job, source, {}, LIMIT, log.append)
        found = await store.get(job.id)
        assert found is not None and found.status is JobStatus.STOPPED
        assert log[0].startswith("enqueuing ended early: ")


@dataclass
class RecordingStore(JobStore):
    """A store that only records the sizes of added batches."""

    sizes: list[tuple[int, int]] = field(default_factory=list)

    async def reset_batches(self, job_id: str) -> None: ...

    async def add_batches(self, job_id: str, batches: Sequence[NewBatch]) -> None:
        self.sizes.append((len(batches), sum(len(batch.payload) for batch in batches)))

    async def finish_enqueuing(self, job_id: str) -> JobRecord:
        raise AssertionError("enqueuing ended")

    async def change(self, job_id: str, status: JobStatus, message: str = "", traceback: str = "") -> bool: ...


def test_batches_are_stored_in_portions_limited_in_number_and_bytes(tmp_path: Path) -> None:
    (tmp_path / "small").write_bytes(b"1\n" * 5000)
    (tmp_path / "large").write_bytes((b'"' + b"x" * 200_000 + b'"\n') * 100)

    async def scenario(name: str) -> list[tuple[int, int]]:
        async with open_job_store(tmp_path) as store:
            job = await store.create(ORIGIN, options(), {}, None)
            recording = RecordingStore()
            with pytest.raises(AssertionError):
                await enqueue_files(recording, job, DelimitedFiles((f"{tmp_path}/{name}",), 1), {}, LIMIT, print)
            return recording.sizes

    assert [count for count, _ in asyncio.run(scenario("small"))] == [1000] * 5
    sizes = asyncio.run(scenario("large"))
    assert sum(count for count, _ in sizes) == 100
    assert max(size for _, size in sizes) < 5_000_000
