"""Checks what a job's submission says: one error names every field that is wrong, each with its fix. Reads no storage.

Keys that nobody knows are ignored, as they always were, but named where one of them may be the key that is missing.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import orjson

from cortex.config.values import problem, quote
from cortex.errors import SubmissionError
from cortex.jobs.intake.fields import Fields, a_flat_map, a_list, boolean, from_text, integer, seconds, text
from cortex.jobs.intake.globs import GlobError, Globs, to_regex
from cortex.jobs.intake.json_stream import reason, shown
from cortex.jobs.intake.sources import source_from_json, source_to_json
from cortex.jobs.spec import MAX_ATTEMPTS, DelimitedFiles, FilePathLister, ItemList, Options, Source, Submission, Upload

__all__ = [
    "SubmissionError",
    "SubmissionLimits",
    "load",
    "parse_submission",
    "parse_upload",
    "source_from_json",
    "source_to_json",
    "timeout_of",
    "webhook_of",
]

_SOURCES = ("item_list", "file_path_lister", "delimited_files")
_OPTIONS = (
    "workers",
    "config",
    "timeout",
    "batch_timeout",
    "max_attempts",
    "isolate_failures",
    "output",
    "webhook",
    "sqs_dead_letter_queue",
)
_FILE_FIELDS = ("s3_paths", "paths", "includes", "excludes", "batch_size")
#: Options of an upload that are text; all others are JSON.
_TEXTS = frozenset({"output", "webhook"})
_WORKERS = integer(1, 10_000), 'write "workers": 1'
_MAX_BATCH_SIZE = 2**31 - 1
#: Of SQS, which is where `max_receive_count` comes from.
_MAX_ATTEMPTS = 1000
_MAX_SECONDS = 100 * 365 * 24 * 3600
_MAX_PATHS = 10_000
_EXAMPLE = '{"workers": 1, "item_list": {"items": [1, 2], "batch_size": 1}}'
_REMOTE = re.compile(r"(?:s3|gs)://[A-Za-z0-9][A-Za-z0-9._-]*(?:/.*)?", re.DOTALL)


@dataclass(frozen=True)
class SubmissionLimits:
    """How large a submission may be; an API's `networking` says so."""

    max_body_bytes: int = 10 * 1024 * 1024
    max_batch_bytes: int = 256_000
    is_task: bool = False  #: it is one of a TaskAPI, which has no items


def parse_submission(data: bytes | Mapping[str, Any], limits: SubmissionLimits) -> Submission:
    """Read the body of a submission. Raises: SubmissionError."""
    body = Fields(load(data, limits, _EXAMPLE) if isinstance(data, bytes) else data, [])
    options = _options(body)
    source = _source(body)
    return _finish(body, options, source)


def parse_upload(query: Mapping[str, str], limits: SubmissionLimits) -> Submission:
    """Read the options of a submission whose items follow as lines of JSON. Raises: SubmissionError."""
    given = {key: value if key in _TEXTS else from_text(value) for key, value in query.items()}
    body = Fields(given, [])
    options = _options(body)
    batch_size = _batch_size(body)
    return _finish(body, options, Upload(batch_size), (*_OPTIONS, "batch_size"))


def check_workers(workers: int) -> None:
    """Check the workers of a job that is run again. Raises: SubmissionError for what a submission can't have."""
    body = Fields({"workers": workers}, [])
    body.read("workers", *_WORKERS)
    if body.problems:
        raise SubmissionError("\n".join(body.problems))


def _finish(
    body: Fields, options: Options, source: Source | None, known: tuple[str, ...] = (*_OPTIONS, *_SOURCES)
) -> Submission:
    if body.lacks_something:
        body.name_misspelt(known)
    if body.problems or source is None:
        raise SubmissionError("\n".join(body.problems))
    return Submission(source, options)


def load(data: bytes, limits: SubmissionLimits, example: str) -> Mapping[str, Any]:
    """Read a body as the map that it must be, `example` being one. Raises: SubmissionError."""
    if len(data) > limits.max_body_bytes:
        lines = ", or send the items as lines of JSON with the content type application/x-ndjson"
        raise SubmissionError(
            f"the body has {len(data):,} bytes, and may have {limits.max_body_bytes:,}; raise networking.max_body_size"
            f" of the API{'' if limits.is_task else lines}"
        )
    if not data.strip():
        raise SubmissionError(f"the body is empty; send something like {example}")
    try:
        found = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        near = shown(error.doc.encode(errors="replace") if error.doc else data, error.pos)
        fix = f"send something like {example}"
        if not limits.is_task and _is_json(data.lstrip().partition(b"\n")[0]):
            fix = "items as lines of JSON are sent with the content type application/x-ndjson and options in the query"
        raise SubmissionError(f"the body is invalid JSON at {place} ({near}): {reason(error)}; {fix}") from None
    if not isinstance(found, dict):
        raise SubmissionError(f"the body must be a map (got {quote(found)}); send something like {example}")
    return found


def _is_json(line: bytes) -> bool:
    try:
        orjson.loads(line)
    except orjson.JSONDecodeError:
        return False
    return True


def _options(body: Fields) -> Options:
    """Read how a job is run; what is wrong is in `body.problems` then, and something else in the result."""
    workers = body.require("workers", *_WORKERS)
    queue_fix = 'write "sqs_dead_letter_queue": {"arn": "…", "max_receive_count": 3}'
    queue = body.section("sqs_dead_letter_queue", queue_fix, a_flat_map)
    receive_count = None
    if queue is not None:
        queue.require("arn", text, 'write "arn": "…", or leave sqs_dead_letter_queue out')
        count_fix = 'write "max_receive_count": 3'
        receive_count = queue.require("max_receive_count", integer(1, _MAX_ATTEMPTS), count_fix)
        body.lacks_something |= queue.lacks_something
        if queue.lacks_something:
            queue.name_misspelt(("arn", "max_receive_count"))
    attempts = body.read("max_attempts", integer(1, _MAX_ATTEMPTS), 'write "max_attempts": 3')
    return Options(
        workers=workers or 1,
        config=body.read("config", a_flat_map, 'write "config": {"key": "value"}'),
        timeout_s=timeout_of(body),
        batch_timeout_s=body.read("batch_timeout", seconds, 'write a number of seconds, such as "batch_timeout": 60'),
        max_attempts=attempts or receive_count or MAX_ATTEMPTS,
        isolate_failures=body.read("isolate_failures", boolean, 'write "isolate_failures": true') or False,
        output=body.read("output", _output, 'write "output": "s3://bucket/folder"'),
        webhook=webhook_of(body),
        dead_letter_queue=dict(queue.data) if queue is not None else None,
    )


def timeout_of(body: Fields) -> int | None:
    """Read how long the whole job may take, in seconds."""
    return body.read("timeout", integer(1, _MAX_SECONDS), 'write a number of seconds, such as "timeout": 3600')


def webhook_of(body: Fields) -> str | None:
    """Read the address that is told when the job is over."""
    return body.read("webhook", _webhook, 'write "webhook": "https://host/path"')


def _source(body: Fields) -> Source | None:
    given = [key for key in _SOURCES if key in body]
    if not given:
        body.lacks_something = True
        body.problems.append(
            f"specify exactly one of the following keys: {', '.join(_SOURCES)}; write something like"
            ' "item_list": {"items": [1, 2], "batch_size": 1}'
        )
        return None
    if len(given) > 1:
        names = f"{', '.join(given[:-1])} or {given[-1]}"
        body.problems.append(
            f"please specify either the {names} field (but not more than one at the same time); remove all but one"
        )
    found = [_item_list(body) if key == "item_list" else _files(body, key) for key in given]
    return found[0] if len(found) == 1 else None


def _item_list(body: Fields) -> ItemList | None:
    section = body.section("item_list", 'write "item_list": {"items": [1, 2], "batch_size": 1}')
    if section is None:
        return None
    items = section.require("items", a_list(lambda item: item, least=1), 'write "items": [1, 2] with at least one item')
    batch_size = _batch_size(section)
    if section.lacks_something:
        section.name_misspelt(("items", "batch_size"))
    return None if items is None else ItemList(items, batch_size)


def _files(body: Fields, key: str) -> FilePathLister | None:
    section = body.section(key, f'write "{key}": {{"s3_paths": ["s3://bucket/folder/"], "batch_size": 1}}')
    if section is None:
        return None
    example = '["s3://bucket/folder/"]'
    if "s3_paths" in section and "paths" in section:
        section.problems.append(
            f"{key}: please specify either the s3_paths or paths field (but not more than one at the same time);"
            " put all in one of them"
        )
    name = "paths" if "paths" in section else "s3_paths"
    paths = section.require(name, a_list(_path, least=1), f'write "{name}": {example}')
    globs = {name: _globs(section, name) for name in ("includes", "excludes")}
    batch_size = _batch_size(section)
    if section.lacks_something:
        section.name_misspelt(_FILE_FIELDS)
    kind = DelimitedFiles if key == "delimited_files" else FilePathLister
    if paths is None:
        return None
    if len(paths) > _MAX_PATHS:
        section.add(name, f"may have {_MAX_PATHS:,} (got {len(paths):,})", "name the folders that the files are in")
    return kind(tuple(paths), batch_size, globs["includes"], globs["excludes"])


def _batch_size(section: Fields) -> int:
    return section.read("batch_size", integer(1, _MAX_BATCH_SIZE), 'write "batch_size": 1') or 1


def _globs(section: Fields, key: str) -> tuple[str, ...]:
    found = section.read(key, a_list(_glob), f'write a list of globs, such as "{key}": ["**.json"]') or []
    try:
        Globs(found)
    except GlobError as error:
        section.add(key, str(error), "use fewer or shorter ones")
    return tuple(found)


def _glob(value: object) -> str:
    pattern = text(value)
    try:
        to_regex(pattern)
    except GlobError as error:
        raise problem(f"{quote(pattern)} is no glob", str(error)) from None
    return pattern


def _path(value: object) -> str:
    """Read a prefix: `s3://…`, `gs://…`, or an absolute local path, which comes back without `..` and the like."""
    path = text(value)
    if path.startswith("/"):
        normal = posixpath.normpath(path).strip("/")
        if not normal:
            raise problem(f"{quote(path)} is the whole file system", "write the folder that is meant")
        return f"/{normal}{'/' if path.endswith('/') else ''}"
    if _REMOTE.fullmatch(path):
        return path
    scheme, separator, rest = path.partition("://")
    if not separator:
        raise problem(
            f"{quote(path)} is not a valid path", 'write "s3://bucket/folder/", or an absolute path such as "/data/"'
        )
    if scheme == "file" and rest.startswith("/"):
        raise problem(f"{quote(path)} is not a valid path", f"write {quote(rest)}")
    if scheme in ("s3", "gs"):
        what = "has a bucket that none can be named" if rest.strip("/") else "names no bucket"
        raise problem(f"{quote(path)} {what}", f'write "{scheme}://bucket/folder/"')
    raise problem(f"{quote(path)}: {scheme}:// is not supported", "use s3://, gs:// or an absolute local path")


def _output(value: object) -> str:
    return _path(value)


def _webhook(value: object) -> str:
    """Read an address. It may hold a secret, so no message shows it."""
    url = text(value)
    fix = 'write "webhook": "https://host/path"'
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address or re.search(r"[\x00-\x20\x7f]", url):
        raise problem("must be an http:// or https:// address", fix)
    return url
