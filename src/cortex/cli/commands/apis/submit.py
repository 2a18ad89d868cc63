"""`cortex submit`: submit a job, with items from a file or pipe, and watch it until it ends."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from cortex.cli.arguments import add_api, add_env, add_output, unreadable
from cortex.cli.output import format_count, format_number
from cortex.cli.progress import exit_code, report_outcome, watch
from cortex.cli.session import Session
from cortex.client.client import Client
from cortex.errors import InputError, UsageError
from cortex.lifecycle import ApiKind

_STDIN = "-"
#: Interval of updates of the progress line.
_PROGRESS_S = 0.2
_MIB = 1024 * 1024
#: Of a file of items, that is read to find out whether it is one array; items are rarely larger.
_HEAD_BYTES = _MIB

Job = dict[str, Any]


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_api(parser)
    parser.add_argument(
        "job",
        metavar="JOB.json",
        nargs="?",
        help="file with the submission, optional for a TaskAPI; `-` is standard input",
    )
    add_env(parser)
    parser.add_argument("--items", metavar="FILE", help="upload items from a file of JSON lines; `-` is stdin")
    parser.add_argument("--workers", metavar="N", type=int, help="number of workers; overrides that of the submission")
    parser.add_argument("--batch-size", metavar="N", type=int, help="number of items per batch; requires --items")
    parser.add_argument(
        "--retry-failed",
        metavar="JOB",
        help="submit the dead letters of a job, or a failed task, as a new job",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="only check the submission and list the files that the job would read"
    )
    parser.add_argument("-w", "--watch", action="store_true", help="show the job's progress until it ends")
    add_output(parser)


def run(arguments: argparse.Namespace, session: Session) -> int:
    """Submit the job. With `--watch`, return 0 if the job succeeds."""
    _check(arguments)
    client = session.client(arguments.env)
    if not (arguments.retry_failed or arguments.job or arguments.items):
        _require_task(client, arguments.api)
    if arguments.retry_failed:
        submitted = client.retry_failed(arguments.api, arguments.retry_failed, arguments.workers)
    else:
        spec = _submission(arguments)
        if arguments.dry_run:
            return _dry_run(client, spec, arguments, session)
        with _items(arguments.items, session) as items:
            submitted = client.submit_job(arguments.api, spec, items)
        session.console.clear_progress()
    as_json = arguments.output == "json"
    if not as_json:
        _report(submitted, arguments, session)
    if not arguments.watch:
        if as_json:
            session.console.json(submitted)
        return 0
    job = watch(client, arguments.api, submitted["job_id"], session)
    if as_json:
        session.console.json(job)
    else:
        report_outcome(client, arguments.api, job, session)
    return exit_code(job)


def _check(arguments: argparse.Namespace) -> None:
    if arguments.retry_failed and (arguments.job or arguments.items or arguments.dry_run or arguments.batch_size):
        raise UsageError("--retry-failed can be combined only with --workers and --watch")
    if arguments.retry_failed:
        return
    if arguments.job == _STDIN and arguments.items == _STDIN:
        raise UsageError("standard input can't contain both the submission and the items")
    if arguments.batch_size is not None and not arguments.items:
        raise UsageError("--batch-size requires --items; without it, set batch_size in the submission")


def _require_task(client: Client, api: str) -> None:
    """Check that the API accepts jobs without a submission. Raises: UsageError."""
    if client.get_api(api)["spec"].get("kind") == ApiKind.BATCH:
        raise UsageError("a submission is required: JOB.json, `-`, --items FILE, or --retry-failed JOB")


def _submission(arguments: argparse.Namespace) -> Job:
    """Return the submission with the values of the options. Raises: InputError."""
    spec = _read(arguments.job) if arguments.job else {}
    for name in ("workers", "batch_size"):
        if (value := getattr(arguments, name)) is not None:
            spec[name] = value
    return spec


def _read(name: str) -> Job:
    shown = "standard input" if name == _STDIN else name
    try:
        text = (_stdin().read() if name == _STDIN else Path(name).read_bytes()).decode("utf-8-sig")
        spec = json.loads(text)
    except OSError as error:
        raise unreadable(shown, error) from None
    except json.JSONDecodeError as error:
        raise InputError(f"{shown}:{error.lineno}:{error.colno}: not JSON: {_lower(error.msg)}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{shown}: not JSON: byte {error.start + 1} is not UTF-8") from None
    except RecursionError:
        raise InputError(f"{shown}: nested too deeply") from None
    if not isinstance(spec, dict):
        raise InputError(f'{shown}: a submission must be a JSON object such as {{"workers": 1, "item_list": {{…}}}}')
    return spec


def _stdin() -> BinaryIO:
    if sys.stdin is None:
        raise InputError("standard input is closed")
    return sys.stdin.buffer


@contextmanager
def _items(name: str | None, session: Session) -> Iterator[_UploadFile | None]:
    """Open the file of items. Raises: InputError."""
    if name is None:
        yield None
        return
    try:
        stream = _stdin() if name == _STDIN else Path(name).open("rb")  # noqa: SIM115 - closed below, stdin is not
    except OSError as error:
        raise unreadable(name, error) from None
    try:
        file = _UploadFile(stream, "standard input" if name == _STDIN else name, session)
        yield file
        if length := file.array_length():
            session.console.note(
                f"{file.name} holds one array of {format_count(length, 'element', 'elements')}, which is one item;"
                " for one item per element, write each into a line of its own, as `jq -c '.[]'` does"
            )
    except KeyboardInterrupt:
        session.console.note("the upload was interrupted; no job was submitted")
        raise
    finally:
        if name != _STDIN:
            stream.close()


class _UploadFile:
    """File of items that shows the progress of its upload."""

    def __init__(self, stream: BinaryIO, name: str, session: Session) -> None:
        self.name = name
        self._stream = stream
        self._console = session.console
        self._size = _size(stream)
        self._began = time.monotonic()
        self._shown = 0.0
        self._bytes = 0
        self._lines = 0
        self._head = b""

    def read(self, size: int, /) -> bytes:
        """Read like `io.BufferedReader.read1`."""
        block: bytes = self._stream.read1(size)  # type: ignore[attr-defined]
        self._bytes += len(block)
        if self._bytes <= _HEAD_BYTES:
            self._head += block
        if self._console.err_is_terminal:
            self._lines += block.count(b"\n")
            self._show()
        return block

    def array_length(self) -> int:
        """Return the number of elements if what was read is one JSON array; else 0."""
        value = None
        if self._bytes == len(self._head):
            with suppress(ValueError, RecursionError):
                value = json.loads(self._head)
        return len(value) if isinstance(value, list) else 0

    def _show(self) -> None:
        now = time.monotonic()
        if now - self._shown < _PROGRESS_S:
            return
        self._shown = now
        rate = self._lines / max(now - self._began, 1e-9)
        of = f" of {self._size / _MIB:,.0f}" if self._size else ""
        share = f" ({int(self._bytes / self._size * 100)} %)" if self._size else ""
        self._console.progress(
            f"uploading: {self._bytes / _MIB:,.0f}{of} MiB{share}, {self._lines:,} items, {format_number(rate)} items/s"
        )


def _size(stream: BinaryIO) -> int:
    """Return the size of a file; 0 for a pipe."""
    try:
        return os.fstat(stream.fileno()).st_size
    except OSError:
        return 0


def _dry_run(client: Client, spec: Job, arguments: argparse.Namespace, session: Session) -> int:
    with _items(arguments.items, session) as items:
        lines = client.dry_run_job(arguments.api, spec, items)
        if arguments.output == "json":
            session.console.json({"lines": list(lines)})
            return 0
        for line in lines:
            session.console.line(line)
    return 0


def _report(job: Job, arguments: argparse.Namespace, session: Session) -> None:
    console, job_id = session.console, job["job_id"]
    total = job.get("total_batch_count")
    size = f" ({format_count(total, 'batch', 'batches')})" if total else ""
    console.line(f"submitted job {job_id} to {arguments.api}{size}")
    if not arguments.watch:
        console.line(f"  cortex get {arguments.api} {job_id} --watch")
    console.flush()


def _lower(message: str) -> str:
    return message[:1].lower() + message[1:]
