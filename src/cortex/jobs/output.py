"""Results of a job as lines of JSON, streamed over HTTP or written to files under the job's `output`.

`<output>/<job id>/part-00000.ndjson` and following contain the results in the order of the input,
`dead-letters.ndjson` the dead letters, and `_SUCCESS`, which is written last, the counts.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime

import orjson

from cortex.jobs.queries import read_dead_letters, read_results
from cortex.jobs.records import put_mark, read_marks
from cortex.jobs.spec import BatchResult, DeadLetter, JobRecord, batch_id, root_of
from cortex.jobs.store import JobStore

#: Minimum size of a part, which is in memory while it is written.
PART_BYTES = 32 * 1024 * 1024
#: Mark of a job with the progress of its output.
MARK = "output"


@dataclass(frozen=True)
class OutputProgress:
    """Progress of a job's output."""

    parts: int = 0
    results: int = 0
    after: int = -1  #: the last batch whose result is in a part


async def write_results(
    store: JobStore, job: JobRecord, environ: Mapping[str, str], folders: Sequence[str] = ()
) -> int:
    """Write the results of a resolved job below its `output`; return their number. For `folders` see `root_of`.

    After a crash it continues with the part that was being written. Names and content of the files depend only on the
    results, so a part that is written twice is the same. Raises: StorageError.
    """
    if job.options.output is None:
        return 0
    from cortex.storage.client import write  # noqa: PLC0415 - obstore takes 6 MB, which few operators need
    from cortex.storage.streams import upload  # noqa: PLC0415 - as above

    folder = f"{job.options.output.rstrip('/')}/{job.id}"
    root = root_of(folder, folders)
    done = await _write_parts(store, job, folder, environ, root)
    if job.counts.failed:
        await upload(f"{folder}/dead-letters.ndjson", _chunks(dead_letter_lines(store, job.id)), environ, root)
    await write(f"{folder}/_SUCCESS", _summary(job, done), environ, root)
    return done.results


async def result_lines(store: JobStore, job_id: str, after: int = -1) -> AsyncIterator[list[bytes]]:
    """Yield the results of a job by seq, as lines, in groups of a few megabytes."""
    while found := await store.read(read_results, job_id, after):
        yield [result_line(job_id, each) for each in found]
        after = found[-1].seq


async def dead_letter_lines(store: JobStore, job_id: str, after: int = -1) -> AsyncIterator[list[bytes]]:
    """Yield the dead letters of a job by seq, as lines, in groups."""
    while found := await store.read(read_dead_letters, job_id, after, _DEAD_LETTERS_AT_ONCE):
        yield [dead_letter_line(job_id, each) for each in found]
        after = found[-1].seq


def result_line(job_id: str, result: BatchResult) -> bytes:
    """Return a result as one line of JSON with its line break."""
    return _line(
        {
            "batch_id": batch_id(job_id, result.seq),
            "seq": result.seq,
            "first_item": result.first_item,
            "items": result.items,
            "result": orjson.Fragment(result.value),
        }
    )


def dead_letter_line(job_id: str, letter: DeadLetter) -> bytes:
    """Return a dead letter as one line of JSON with its line break."""
    return _line(
        {
            "batch_id": batch_id(job_id, letter.seq),
            "seq": letter.seq,
            "first_item": letter.first_item,
            "items": letter.items,
            "attempts": letter.attempts,
            "error": letter.error,
            "traceback": letter.traceback,
            "failed_at": datetime.fromtimestamp(letter.failed_at, UTC).isoformat(timespec="milliseconds"),
            "payload": orjson.Fragment(letter.payload),
        }
    )


#: With the largest payloads that the defaults allow, this is 25 MB.
_DEAD_LETTERS_AT_ONCE = 100


def _line(values: Mapping[str, object]) -> bytes:
    return orjson.dumps(values, option=orjson.OPT_APPEND_NEWLINE)


async def _write_parts(
    store: JobStore, job: JobRecord, folder: str, environ: Mapping[str, str], root: str | None
) -> OutputProgress:
    done = _progress(await store.read(read_marks, job.id))
    lines: list[bytes] = []
    size_bytes, after = 0, done.after
    while found := await store.read(read_results, job.id, after):
        for result in found:
            lines.append(result_line(job.id, result))
            size_bytes, after = size_bytes + len(lines[-1]), result.seq
            if size_bytes >= PART_BYTES:
                done = await _write_part(store, job.id, folder, lines, replace(done, after=after), environ, root)
                lines, size_bytes = [], 0
    if lines:
        done = await _write_part(store, job.id, folder, lines, replace(done, after=after), environ, root)
    return done


async def _write_part(
    store: JobStore,
    job_id: str,
    folder: str,
    lines: list[bytes],
    done: OutputProgress,
    environ: Mapping[str, str],
    root: str | None,
) -> OutputProgress:
    from cortex.storage.client import write  # noqa: PLC0415 - as above

    await write(f"{folder}/part-{done.parts:05}.ndjson", b"".join(lines), environ, root)
    done = replace(done, parts=done.parts + 1, results=done.results + len(lines))
    await store.write(put_mark, job_id, MARK, orjson.dumps(asdict(done)).decode())
    return done


def _progress(marks: Mapping[str, str]) -> OutputProgress:
    return OutputProgress(**orjson.loads(marks[MARK])) if MARK in marks else OutputProgress()


async def _chunks(groups: AsyncIterator[list[bytes]]) -> AsyncIterator[bytes]:
    async for lines in groups:
        yield b"".join(lines)


def _summary(job: JobRecord, done: OutputProgress) -> bytes:
    counts = job.counts
    values = {
        "job_id": job.id,
        "api_name": job.origin.api,
        "batches": counts.batches,
        "succeeded": counts.succeeded,
        "failed": counts.failed,
        "items": counts.items,
        "succeeded_items": counts.succeeded_items,
        "failed_items": counts.failed_items,
        "results": done.results,
        "parts": done.parts,
    }
    return orjson.dumps(values, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
