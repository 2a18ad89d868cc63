"""Results as JSON lines and as files in a job's output: complete, in order and reproducible."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from cortex.errors import StorageError
from cortex.jobs import output
from cortex.jobs.output import dead_letter_line, result_line, write_results
from cortex.jobs.queries import read_dead_letters, read_results
from cortex.jobs.records import put_mark, read_marks
from cortex.jobs.spec import BatchResult, DeadLetter, JobCounts, JobOptions, JobOrigin, JobRecord, batch_id
from cortex.jobs.store import JobStore
from cortex.lifecycle import JobStatus
from cortex.storage.client import list_objects, read
from harness.servers.buckets import RemoteBucket
from harness.servers.s3 import SwiftServer

pytestmark = pytest.mark.processes

JOB = "6a1f3b7c00000000"


@dataclass
class FakeStore(JobStore):
    """Results in memory, read in pages like from the database."""

    kept: list[BatchResult] = field(default_factory=list)
    letters: list[DeadLetter] = field(default_factory=list)
    marked: dict[str, str] = field(default_factory=dict)
    fails_after: int | None = None  #: number of results after which reading raises

    async def read(self, query: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        fakes = {read_results: self._results, read_dead_letters: self._dead_letters, read_marks: self._marks}
        return fakes[query](*args)

    async def write(self, change: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        assert change is put_mark
        _, name, value = args
        self.marked[name] = value

    def _results(self, job_id: str, after: int = -1) -> list[BatchResult]:
        if self.fails_after is not None and after >= self.fails_after:
            raise ConnectionError
        return [result for result in self.kept if result.seq > after][:7]

    def _dead_letters(self, job_id: str, after: int = -1, limit: int = 1000) -> list[DeadLetter]:
        return [letter for letter in self.letters if letter.seq > after][:limit]

    def _marks(self, job_id: str) -> dict[str, str]:
        return dict(self.marked)


def result(seq: int, size_bytes: int = 5) -> BatchResult:
    return BatchResult(seq, seq * 10, 10, json.dumps("x" * size_bytes).encode())


def letter(seq: int) -> DeadLetter:
    return DeadLetter(seq, seq * 10, 2, 3, "ValueError: no", "Traceback …\n  here", 1763690000.5, b'[1,"\\u00e9"]')


def job(place: str | None, failed: int = 0) -> JobRecord:
    origin = JobOrigin("api", "id", "spec", "revision", "hash", "{}")
    counts = JobCounts(batches=20, items=200, succeeded=20 - failed, failed=failed, results=20)
    return JobRecord(JOB, 1, origin, JobOptions(1, output=place), {}, JobStatus.COMPLETING, 0.0, counts=counts)


def read_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / JOB).iterdir()}


def run(store: FakeStore, record: JobRecord, environ: Mapping[str, str] | None = None) -> int:
    return asyncio.run(write_results(store, record, environ or {}))


@pytest.fixture
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "PART_BYTES", 500)


@pytest.fixture(scope="module")
def bucket(swift: SwiftServer) -> RemoteBucket:
    return RemoteBucket("s3://models", swift)


def test_a_result_is_one_line_with_its_item_positions() -> None:
    line = result_line(JOB, BatchResult(3, 30, 10, b'{"a":[1.5,null]}'))
    assert line.endswith(b"\n") and line.count(b"\n") == 1
    assert json.loads(line) == {
        "batch_id": batch_id(JOB, 3),
        "seq": 3,
        "first_item": 30,
        "items": 10,
        "result": {"a": [1.5, None]},
    }


def test_a_dead_letter_is_one_line_with_its_items_and_error() -> None:
    line = dead_letter_line(JOB, letter(4))
    assert line.count(b"\n") == 1
    assert json.loads(line) == {
        "batch_id": batch_id(JOB, 4),
        "seq": 4,
        "first_item": 40,
        "items": 2,
        "attempts": 3,
        "error": "ValueError: no",
        "traceback": "Traceback …\n  here",
        "failed_at": "2025-11-21T01:53:20.500+00:00",
        "payload": [1, "é"],
    }


def test_a_job_without_an_output_writes_nothing(tmp_path: Path) -> None:
    assert run(FakeStore([result(0)]), job(None)) == 0


@pytest.mark.usefixtures("_small_parts")
def test_parts_contain_all_results_in_order_and_the_success_file_the_counts(tmp_path: Path) -> None:
    store = FakeStore([result(seq) for seq in range(20)], [letter(20), letter(21)])
    assert run(store, job(f"{tmp_path}/", failed=2)) == 20
    files = read_files(tmp_path)
    parts = sorted(name for name in files if name.startswith("part"))
    assert parts == [f"part-{number:05}.ndjson" for number in range(len(parts))]
    assert len(parts) > 3
    assert b"".join(files[name] for name in parts) == b"".join(result_line(JOB, each) for each in store.kept)
    assert files["dead-letters.ndjson"] == b"".join(dead_letter_line(JOB, each) for each in store.letters)
    assert json.loads(files["_SUCCESS"]) == {
        "job_id": JOB,
        "api_name": "api",
        "batches": 20,
        "succeeded": 18,
        "failed": 2,
        "items": 200,
        "succeeded_items": 0,
        "failed_items": 0,
        "results": 20,
        "parts": len(parts),
    }


@pytest.mark.usefixtures("_small_parts")
def test_writing_again_after_a_crash_gives_the_same_files(tmp_path: Path) -> None:
    whole = FakeStore([result(seq) for seq in range(20)], [letter(20)])
    run(whole, job(str(tmp_path / "whole"), failed=1))
    for fails_after in (0, 6, 13, 19):
        place = tmp_path / f"{fails_after}"
        store = replace(whole, marked={}, fails_after=fails_after)
        with pytest.raises(ConnectionError):
            run(store, job(str(place), failed=1))
        assert not (place / JOB / "_SUCCESS").exists()
        store.fails_after = None
        assert run(store, job(str(place), failed=1)) == 20
        assert read_files(place) == read_files(tmp_path / "whole")
    # A second complete run replaces the files.
    whole.marked.clear()
    assert run(whole, job(str(tmp_path / "0"), failed=1)) == 20
    assert read_files(tmp_path / "0") == read_files(tmp_path / "whole")


@pytest.mark.usefixtures("_small_parts")
def test_a_result_larger_than_a_part_gets_its_own_part(tmp_path: Path) -> None:
    run(FakeStore([result(0, 2000), result(1, 2000)]), job(str(tmp_path)))
    assert {name for name in read_files(tmp_path) if name.startswith("part")} == {
        "part-00000.ndjson",
        "part-00001.ndjson",
    }


def test_a_job_without_results_writes_only_the_success_file(tmp_path: Path) -> None:
    run(FakeStore(), job(str(tmp_path)))
    assert set(read_files(tmp_path)) == {"_SUCCESS"}


def test_an_unwritable_output_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match=str(tmp_path / "file")):
        run(FakeStore([result(0)]), job(str(tmp_path / "file")))


@pytest.mark.usefixtures("_small_parts")
def test_a_bucket_contains_the_same_files(bucket: RemoteBucket, tmp_path: Path) -> None:
    store = FakeStore([result(seq) for seq in range(20)], [letter(20)])
    run(store, job(str(tmp_path), failed=1))
    store.marked.clear()
    place = f"{bucket.url}/results/of é"
    environ = bucket.environ
    run(store, job(place, failed=1), environ)

    async def content() -> dict[str, bytes]:
        found = await list_objects(f"{place}/{JOB}", environ)
        return {item.name: await read(f"{place}/{JOB}/{item.name}", environ) for item in found}

    assert asyncio.run(content()) == read_files(tmp_path)
