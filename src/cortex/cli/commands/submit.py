"""`cortex submit`: a job for an API, its items from a file or a pipe where there are many, and its end if wanted."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from cortex.cli.arguments import UsageError, add_api, add_env, add_output
from cortex.cli.connect import client_of
from cortex.cli.context import Context
from cortex.cli.job_progress import counted, short
from cortex.cli.watch import exit_code, tell_end, watch
from cortex.client.client import Client
from cortex.errors import InputError
from cortex.lifecycle import ApiKind

_STDIN = "-"
#: How often the line of progress is written anew.
_PROGRESS_S = 0.2
_MIB = 1024 * 1024

Job = dict[str, Any]


def configure(parser: argparse.ArgumentParser) -> None:
    """Say what the command takes."""
    add_api(parser)
    parser.add_argument(
        "job",
        metavar="JOB.json",
        nargs="?",
        help="file with the submission, which a task may do without; `-` is standard input",
    )
    add_env(parser)
    parser.add_argument("--items", metavar="FILE", help="upload the items from a file of JSON lines; `-` is stdin")
    parser.add_argument("--workers", metavar="N", type=int, help="number of workers, instead of that of the submission")
    parser.add_argument("--batch-size", metavar="N", type=int, help="with --items: how many items are a batch")
    parser.add_argument(
        "--retry-failed",
        metavar="JOB",
        help="submit the dead letters of a job, or a task that did not succeed, as a new job",
    )
    parser.add_argument("--dry-run", action="store_true", help="check only, and list the files that would be read")
    parser.add_argument("-w", "--watch", action="store_true", help="show the job's progress until it is over")
    add_output(parser)


def run(arguments: argparse.Namespace, context: Context) -> int:
    """Submit; with `--watch` the exit code tells whether the job succeeded."""
    _check(arguments)
    client = client_of(context, arguments.env)
    if not (arguments.retry_failed or arguments.job or arguments.items):
        _require_task(client, arguments.api)
    if arguments.retry_failed:
        submitted = client.retry_failed(arguments.api, arguments.retry_failed, arguments.workers)
    else:
        spec = _submission(arguments)
        if arguments.dry_run:
            return _dry_run(client, spec, arguments, context)
        with _items(arguments.items, context) as items:
            submitted = client.submit_job(arguments.api, spec, items)
        context.console.clear_progress()
    as_json = arguments.output == "json"
    if not as_json:
        _tell(submitted, arguments, context)
    if not arguments.watch:
        if as_json:
            context.console.json(submitted)
        return 0
    job = watch(client, arguments.api, submitted["job_id"], context)
    if as_json:
        context.console.json(job)
    else:
        tell_end(client, arguments.api, job, context)
    return exit_code(job)


def _check(arguments: argparse.Namespace) -> None:
    if arguments.retry_failed and (arguments.job or arguments.items or arguments.dry_run or arguments.batch_size):
        raise UsageError("--retry-failed takes the batches of the old job; only --workers and --watch go with it")
    if arguments.retry_failed:
        return
    if arguments.job == _STDIN and arguments.items == _STDIN:
        raise UsageError("standard input can't be both the submission and the items")
    if arguments.batch_size is not None and not arguments.items:
        raise UsageError("--batch-size belongs to --items; otherwise write batch_size into the submission")


def _require_task(client: Client, api: str) -> None:
    """Only a task needs no input. Raises: UsageError."""
    if client.get_api(api)["spec"].get("kind") == ApiKind.BATCH:
        raise UsageError("a submission must be given: JOB.json, `-`, --items FILE, or --retry-failed JOB")


def _submission(arguments: argparse.Namespace) -> Job:
    """Return the submission, with what the options say instead. Raises: InputError."""
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
        raise InputError(f"{shown}: can't be read: {(error.strerror or str(error)).lower()}") from None
    except json.JSONDecodeError as error:
        raise InputError(f"{shown}:{error.lineno}:{error.colno}: not JSON: {_lower(error.msg)}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{shown}: not JSON: byte {error.start + 1} is not UTF-8") from None
    except RecursionError:
        raise InputError(f"{shown}: nested too deeply") from None
    if not isinstance(spec, dict):
        raise InputError(f'{shown}: a submission is a JSON object, like {{"workers": 1, "item_list": {{…}}}}')
    return spec


def _stdin() -> BinaryIO:
    if sys.stdin is None:
        raise InputError("standard input is closed")
    return sys.stdin.buffer


@contextmanager
def _items(name: str | None, context: Context) -> Iterator[_Counted | None]:
    """Open the items. Raises: InputError."""
    if name is None:
        yield None
        return
    try:
        stream = _stdin() if name == _STDIN else Path(name).open("rb")  # noqa: SIM115 - closed below, stdin is not
    except OSError as error:
        raise InputError(f"{name}: can't be read: {(error.strerror or str(error)).lower()}") from None
    try:
        yield _Counted(stream, "standard input" if name == _STDIN else name, context)
    except KeyboardInterrupt:
        context.console.note("the upload was broken off; nothing was submitted")
        raise
    finally:
        if name != _STDIN:
            stream.close()


class _Counted:
    """A file of items that shows how much of it has been read."""

    def __init__(self, stream: BinaryIO, name: str, context: Context) -> None:
        self.name = name
        self._stream = stream
        self._console = context.console
        self._size = _size(stream)
        self._began = time.monotonic()
        self._shown = 0.0
        self._bytes = 0
        self._lines = 0

    def read(self, size: int, /) -> bytes:
        """Read as `io.BufferedReader.read1` does."""
        block: bytes = self._stream.read1(size)  # type: ignore[attr-defined]
        self._bytes += len(block)
        if self._console.err_is_terminal:
            self._lines += block.count(b"\n")
            self._show()
        return block

    def _show(self) -> None:
        now = time.monotonic()
        if now - self._shown < _PROGRESS_S:
            return
        self._shown = now
        rate = self._lines / max(now - self._began, 1e-9)
        of = f" of {self._size / _MIB:,.0f}" if self._size else ""
        share = f" ({int(self._bytes / self._size * 100)} %)" if self._size else ""
        self._console.progress(
            f"uploading: {self._bytes / _MIB:,.0f}{of} MiB{share}, {self._lines:,} items, {short(rate)} items/s"
        )


def _size(stream: BinaryIO) -> int:
    """Return the size of a file; 0 for a pipe, which has none."""
    try:
        return os.fstat(stream.fileno()).st_size
    except OSError:
        return 0


def _dry_run(client: Client, spec: Job, arguments: argparse.Namespace, context: Context) -> int:
    with _items(arguments.items, context) as items:
        lines = client.dry_run_job(arguments.api, spec, items)
        if arguments.output == "json":
            context.console.json({"lines": list(lines)})
            return 0
        for line in lines:
            context.console.line(line)
    return 0


def _tell(job: Job, arguments: argparse.Namespace, context: Context) -> None:
    console, job_id = context.console, job["job_id"]
    total = job.get("total_batch_count")
    size = f" ({counted(total, 'batch', 'batches')})" if total else ""
    console.line(f"submitted job {job_id} to {arguments.api}{size}")
    if not arguments.watch:
        console.line(f"  cortex get {arguments.api} {job_id} --watch")
    console.flush()


def _lower(message: str) -> str:
    return message[:1].lower() + message[1:]
