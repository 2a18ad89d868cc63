"""The client's methods for jobs. Knows their routes; nothing of how they are run."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from typing import Any

from cortex.client.environments import Environment
from cortex.client.items import Items, as_blocks
from cortex.client.routes import job_path, jobs_path
from cortex.errors import InputError, OperatorUnavailableError
from cortex.lifecycle import JobStatus

#: The last line of a dry run without a mistake.
PASSED = "validations passed"
#: An operator that is started anew is away for a second or two; its jobs wait for it, and so do those who watch them.
PATIENCE_S = 60.0
_LINES = "application/x-ndjson"
#: Sections of a submission that hold items, or say where they are.
_SOURCES = ("item_list", "file_path_lister", "delimited_files")
_FIRST_POLL_S = 0.1
_LAST_POLL_S = 1.0

Job = dict[str, Any]


class JobClient:
    """The part of `Client` that is about jobs."""

    environment: Environment

    def submit_job(
        self, api: str, job_spec: Mapping[str, Any], items: Items | None = None, dry_run: bool = False
    ) -> Job:
        """Submit a job and return it, its `job_id` among the rest.

        With `items` they are uploaded one line each, however many there are: an iterable of objects, the path of a
        file of JSON lines, or such a file opened as binary. `job_spec` then has the options only, with `batch_size`
        among them. With `dry_run` nothing is stored and the answer is what `dry_run_job` yields, as `lines`.
        """
        if dry_run:
            return {"lines": list(self.dry_run_job(api, job_spec, items))}
        if items is not None:
            return _object(self._upload(api, job_spec, items, None))
        return _object(self._call("POST", jobs_path(api), body=_dumped(job_spec)))

    def dry_run_job(self, api: str, job_spec: Mapping[str, Any], items: Items | None = None) -> Iterator[str]:
        """Yield the path of each file that the job would read, then `validations passed`. Raises: InputError."""
        if items is not None:
            return _passing(iter(self._upload(api, job_spec, items, True).body.decode(errors="replace").splitlines()))
        transport = self.environment.connect()
        return _passing(transport.lines(jobs_path(api), {"dryRun": True}, "POST", _dumped(job_spec)))

    def get_job(self, api: str, job: str) -> Job:
        """Return `job_status`, `endpoint` and `api_spec` of a job. Raises: NotFoundError."""
        return _object(self._call("GET", job_path(api, job)))

    def list_jobs(self, api: str, limit: int = 10) -> list[Job]:
        """Return the latest jobs of an API, each as `get_job` does, the newest first."""
        answer: list[Job] = self._call("GET", jobs_path(api), query={"limit": limit})
        return answer

    def wait_job(self, api: str, job: str, timeout_s: float | None = None) -> Job:
        """Return a job, as `get_job` does, once it is over; or as it is when `timeout_s` is.

        An operator that is started anew meanwhile is waited for.
        """
        began = seen = time.monotonic()
        pause_s = _FIRST_POLL_S
        while True:
            try:
                found: Job | None = self.get_job(api, job)
                seen = time.monotonic()
            except OperatorUnavailableError:
                if time.monotonic() - seen > PATIENCE_S:
                    raise
                found = None
            left_s = pause_s if timeout_s is None else began + timeout_s - time.monotonic()
            if found and (is_over(found["job_status"]) or left_s <= 0):
                return found
            time.sleep(max(0.0, min(pause_s, left_s)))
            pause_s = min(_LAST_POLL_S, 1.5 * pause_s)

    def stop_job(self, api: str, job: str, keep_cache: bool = False) -> dict[str, Any]:
        """Stop a job. What it was and what became of it stays to be seen, with or without `keep_cache`."""
        return _object(self._call("DELETE", job_path(api, job)))

    def retry_failed(self, api: str, job: str, workers: int | None = None) -> Job:
        """Submit the dead letters of a job that is over as a new job, and return that.

        A task is run again whatever ended it, unless it succeeded. Raises: ConflictError.
        """
        return _object(self._call("POST", f"{job_path(api, job)}/retry", query={"workers": workers}))

    # What came of it.

    def job_results(self, api: str, job: str) -> Iterator[dict[str, Any]]:
        """Yield what the batches returned: `batch_id`, `seq`, `first_item`, `items`, `result`; by `seq`."""
        return map(json.loads, self._lines(f"{job_path(api, job)}/results"))

    def dead_letters(self, api: str, job: str) -> Iterator[dict[str, Any]]:
        """Yield the batches that were given up: as results, with `attempts`, `error`, `traceback`, `payload`."""
        return map(json.loads, self._lines(f"{job_path(api, job)}/dead-letters"))

    def raw_job_results(self, api: str, job: str) -> Iterator[bytes]:
        """Yield blocks of the lines of JSON that `job_results` reads."""
        return self.environment.connect().blocks(f"{job_path(api, job)}/results")

    def raw_dead_letters(self, api: str, job: str) -> Iterator[bytes]:
        """Yield blocks of the lines of JSON that `dead_letters` reads."""
        return self.environment.connect().blocks(f"{job_path(api, job)}/dead-letters")

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
        """Yield log lines of all workers of a job, or of one; with `follow`, go on with what will be written.

        `as_json` makes each line an object.
        """
        query = {"follow": follow, "replica": replica, "tail": tail, "json": as_json or None}
        return self.environment.connect().lines(f"{job_path(api, job)}/logs", query)

    def stream_job_logs(self, api: str, job: str) -> None:
        """Print a job's log lines as they are written."""
        for line in self.job_logs(api, job, follow=True):
            print(line, flush=True)

    def _call(self, method: str, path: str, **options: Any) -> Any:
        return self.environment.connect().call(method, path, **options)

    def _lines(self, path: str) -> Iterator[bytes]:
        return (line for line in self.environment.connect().raw_lines(path) if line)

    def _upload(self, api: str, job_spec: Mapping[str, Any], items: Items, dry_run: bool | None) -> Any:
        query = {**_options(job_spec), "dryRun": dry_run}
        with as_blocks(items) as blocks:
            return self.environment.connect().upload("POST", jobs_path(api), blocks, query=query, content_type=_LINES)


def is_over(status: Mapping[str, Any]) -> bool:
    """Tell whether nothing will change any more in a job of this `job_status`."""
    try:
        return JobStatus(status["status"]).is_over
    except ValueError:  # of a newer operator
        return status.get("end_time") is not None


def _options(job_spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an upload says in its query. Raises: InputError if the submission has items of its own."""
    options = dict(job_spec)
    listed = options.pop("item_list", None) or {}
    if "items" in listed or (named := [key for key in _SOURCES[1:] if options.get(key) is not None]):
        key = "item_list.items" if "items" in listed else named[0]
        raise InputError(f"{key}: the items can't come from there and be uploaded too; leave one of them out")
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


def _object(answer: Any) -> dict[str, Any]:
    found: dict[str, Any] = answer if isinstance(answer, dict) else answer.json()
    return found


def _passing(lines: Iterator[str]) -> Iterator[str]:
    """Yield the lines of a dry run; the last one says whether it went well. Raises: InputError."""
    last = ""
    for line in lines:
        if last:
            yield last
        last = line
    if last != PASSED:
        raise InputError(last or "the dry run ended without a word")
    yield last
