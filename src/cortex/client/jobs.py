"""Methods of the client for jobs, and the upload of their items as JSON lines."""

from __future__ import annotations

import importlib
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, cast

from cortex.client.transport import Answer, OperatorClient, api_path, path_segment
from cortex.errors import InputError, OperatorUnavailableError
from cortex.lifecycle import JobStatus
from cortex.terminal import print_line

#: Last line of a dry run that found no error.
PASSED = "validations passed"
#: How long clients that wait for a job tolerate an operator that does not answer: it may be restarting.
OPERATOR_RESTART_TIMEOUT_S = 60.0
_LINES = "application/x-ndjson"
#: Sections of a submission that contain the items or their location.
_SOURCES = ("item_list", "file_path_lister", "delimited_files")
_FIRST_POLL_S = 0.1
_LAST_POLL_S = 1.0
BLOCK_BYTES = 256 * 1024
#: Number of items that are encoded together. More is no faster, and large items would use much memory.
_ITEM_GROUP = 128

Job = dict[str, Any]


class Readable(Protocol):
    """Binary file."""

    def read(self, size: int, /) -> bytes:
        """Read up to `size` bytes; return none at the end."""


Items = Iterable[Any] | Readable | str | os.PathLike[str]


class JobClient(OperatorClient):
    """Base class of `Client` with the methods for jobs."""

    def submit_job(
        self, api: str, job_spec: Mapping[str, Any], items: Items | None = None, dry_run: bool = False
    ) -> Job:
        """Submit a job and return it, including its `job_id`.

        `items` are uploaded as JSON lines, with no limit on their number: an iterable of objects, the path of a file of
        JSON lines, or such a file opened in binary mode. `job_spec` then contains only options, including
        `batch_size`. With `dry_run`, nothing is stored and the result is `lines`, those of `dry_run_job`.
        """
        if dry_run:
            return {"lines": list(self.dry_run_job(api, job_spec, items))}
        if items is not None:
            answer: Job = self._upload(api, job_spec, items, None).json()
            return answer
        return self._object("POST", _jobs_path(api), body=_dumped(job_spec))

    def dry_run_job(self, api: str, job_spec: Mapping[str, Any], items: Items | None = None) -> Iterator[str]:
        """Yield the path of each file that the job would read, then `validations passed`. Raises: InputError."""
        if items is not None:
            return _checked_lines(
                iter(self._upload(api, job_spec, items, True).body.decode(errors="replace").splitlines())
            )
        transport = self.environment.connect()
        return _checked_lines(transport.lines(_jobs_path(api), {"dryRun": True}, "POST", _dumped(job_spec)))

    def get_job(self, api: str, job: str) -> Job:
        """Return `job_status`, `endpoint` and `api_spec` of a job. Raises: NotFoundError."""
        return self._object("GET", _job_path(api, job))

    def list_jobs(self, api: str, limit: int = 10) -> list[Job]:
        """Return the latest jobs of an API, each in the form of `get_job`, newest first."""
        return self._objects("GET", _jobs_path(api), query={"limit": limit})

    def wait_job(self, api: str, job: str, timeout_s: float | None = None) -> Job:
        """Wait until a job has ended, at most `timeout_s`; return it in the form of `get_job`.

        A restart of the operator in the meantime is tolerated.
        """
        began = seen = time.monotonic()
        pause_s = _FIRST_POLL_S
        while True:
            try:
                found: Job | None = self.get_job(api, job)
                seen = time.monotonic()
            except OperatorUnavailableError:
                if time.monotonic() - seen > OPERATOR_RESTART_TIMEOUT_S:
                    raise
                found = None
            left_s = pause_s if timeout_s is None else began + timeout_s - time.monotonic()
            if found and (is_over(found["job_status"]) or left_s <= 0):
                return found
            time.sleep(max(0.0, min(pause_s, left_s)))
            pause_s = min(_LAST_POLL_S, 1.5 * pause_s)

    def stop_job(self, api: str, job: str, keep_cache: bool = False) -> dict[str, Any]:
        """Stop a job. Its status and results remain available, with or without `keep_cache`."""
        return self._object("DELETE", _job_path(api, job))

    def retry_failed(self, api: str, job: str, workers: int | None = None) -> Job:
        """Submit the dead letters of a job that has ended as a new job, and return the new job.

        A task is run again unless it succeeded. Raises: ConflictError.
        """
        return self._object("POST", f"{_job_path(api, job)}/retry", query={"workers": workers})

    # Results and logs.

    def job_results(self, api: str, job: str) -> Iterator[dict[str, Any]]:
        """Yield the results of batches in the order of `seq`: `batch_id`, `seq`, `first_item`, `items`, `result`."""
        return map(json.loads, self._lines(f"{_job_path(api, job)}/results"))

    def dead_letters(self, api: str, job: str) -> Iterator[dict[str, Any]]:
        """Yield the batches that failed for good: as results, with `attempts`, `error`, `traceback`, `payload`."""
        return map(json.loads, self._lines(f"{_job_path(api, job)}/dead-letters"))

    def raw_job_results(self, api: str, job: str) -> Iterator[bytes]:
        """Yield the JSON lines of `job_results` as blocks of bytes."""
        return self.environment.connect().blocks(f"{_job_path(api, job)}/results")

    def raw_dead_letters(self, api: str, job: str) -> Iterator[bytes]:
        """Yield the JSON lines of `dead_letters` as blocks of bytes."""
        return self.environment.connect().blocks(f"{_job_path(api, job)}/dead-letters")

    def job_logs(
        self,
        api: str,
        job: str,
        follow: bool = False,
        replica: str | None = None,
        tail: int | None = None,
        *,
        as_json: bool = False,
    ) -> Iterator[str]:
        """Yield log lines of all workers of a job, or of one. With `follow`, also yield new lines until the job ends.

        With `as_json`, each line is a JSON object.
        """
        query = {"follow": follow, "replica": replica, "tail": tail, "json": as_json or None}
        return self.environment.connect().lines(f"{_job_path(api, job)}/logs", query)

    def stream_job_logs(self, api: str, job: str) -> None:
        """Print a job's log lines as they are written."""
        for line in self.job_logs(api, job, follow=True):
            print_line(line)

    def _lines(self, path: str) -> Iterator[bytes]:
        return (line for line in self.environment.connect().raw_lines(path) if line)

    def _upload(self, api: str, job_spec: Mapping[str, Any], items: Items, dry_run: bool | None) -> Answer:
        query = {**_options(job_spec), "dryRun": dry_run}
        with item_blocks(items) as blocks:
            return self.environment.connect().upload("POST", _jobs_path(api), blocks, query=query, content_type=_LINES)


def is_over(status: Mapping[str, Any]) -> bool:
    """Return whether a job with this `job_status` has ended."""
    try:
        return JobStatus(status["status"]).is_over
    except ValueError:  # a status of a newer operator
        return status.get("end_time") is not None


def _options(job_spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return the query parameters of an upload. Raises: InputError if the submission also contains items."""
    options = dict(job_spec)
    listed = options.pop("item_list", None) or {}
    if "items" in listed or (named := [key for key in _SOURCES[1:] if options.get(key) is not None]):
        key = "item_list.items" if "items" in listed else named[0]
        raise InputError(f"{key} can't be combined with uploaded items; omit one of the two")
    return {
        key: json.dumps(value) if isinstance(value, dict | list) else value
        for key, value in {**listed, **options}.items()
    }


def _dumped(job_spec: Mapping[str, Any]) -> bytes:
    if not isinstance(job_spec, Mapping):
        raise ValueError(f"`job_spec` must be a dictionary (got {type(job_spec).__name__})")
    try:
        return json.dumps(job_spec).encode()
    except (TypeError, ValueError) as error:
        raise InputError(f"`job_spec` can't be written as JSON: {error}") from None


def _checked_lines(lines: Iterator[str]) -> Iterator[str]:
    """Yield the lines of a dry run, the last of which is its outcome. Raises: InputError if it failed."""
    last = ""
    for line in lines:
        if last:
            yield last
        last = line
    if last != PASSED:
        raise InputError(last or "the dry run ended without an outcome")
    yield last


def _jobs_path(api: str) -> str:
    return f"{api_path(api)}/jobs"


def _job_path(api: str, job: str) -> str:
    return f"{_jobs_path(api)}/{path_segment(job, 'id of the job')}"


@contextmanager
def item_blocks(items: Items) -> Iterator[Iterator[bytes]]:
    """Return an iterator of blocks of JSON lines: encoded from Python objects, or the unchanged content of a file.

    Raises: InputError, also while iterating, if the file can't be read or an object can't be encoded as JSON.
    """
    if isinstance(items, str | os.PathLike):
        with _open_items(Path(items)) as file:
            yield _read_blocks(file, str(items))
    elif hasattr(items, "read"):
        stream = cast(Readable, items)
        yield _read_blocks(stream, str(getattr(stream, "name", "the items")))
    elif isinstance(items, bytes | bytearray | Mapping) or not isinstance(items, Iterable):
        raise ValueError(f"`items` must be an iterable of items, a path or a file (got {type(items).__name__})")
    else:
        yield _encode_items(items)


@contextmanager
def _open_items(path: Path) -> Iterator[Readable]:
    try:
        stream = path.open("rb", buffering=0)
    except OSError as error:
        raise _unreadable(str(path), error) from None
    with stream:
        yield stream


def _read_blocks(stream: Readable, name: str) -> Iterator[bytes]:
    # `read1` returns what a pipe contains now, without waiting for a full block.
    read = getattr(stream, "read1", stream.read)
    while True:
        try:
            block = read(BLOCK_BYTES)
        except OSError as error:
            raise _unreadable(name, error) from None
        if not block:
            return
        yield block.encode() if isinstance(block, str) else block


def _encode_items(items: Iterable[Any]) -> Iterator[bytes]:
    # Imported here, because most commands import this module but do not encode items.
    orjson: Any = importlib.import_module("orjson")
    dumps = partial(orjson.dumps, option=orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY)
    remaining = iter(items)
    count = size = 0
    parts: list[bytes] = []
    while group := list(islice(remaining, _ITEM_GROUP)):
        lines: list[bytes] = []
        try:
            lines.extend(map(dumps, group))
        except TypeError as error:
            raise InputError(f"item {count + len(lines) + 1} can't be written as JSON: {error}") from None
        parts.append(b"\n".join(lines) + b"\n")
        count += len(group)
        size += len(parts[-1])
        if size >= BLOCK_BYTES:
            yield b"".join(parts)
            parts, size = [], 0
    if parts:
        yield b"".join(parts)


def _unreadable(name: str, error: OSError) -> InputError:
    return InputError(f"{name}: can't be read: {(error.strerror or str(error)).lower()}")
