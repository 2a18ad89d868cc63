"""Validate submissions to BatchAPIs and TaskAPIs. One error lists every wrong field, each with its fix.

Nothing here reads storage. Unknown keys are errors, except in submissions that an older version accepted and stored.
"""

from __future__ import annotations

import json
import math
import posixpath
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar
from urllib.parse import urlsplit

import orjson
from pydantic_core import PydanticCustomError

from cortex.config import values
from cortex.config.values import problem, quote
from cortex.errors import SubmissionError
from cortex.jobs.intake.globs import GlobError, Globs, to_regex
from cortex.jobs.intake.json_stream import reason, shown
from cortex.jobs.spec import (
    MAX_ATTEMPTS,
    DelimitedFiles,
    FilePathLister,
    ItemList,
    JobOptions,
    Source,
    Submission,
    TaskCall,
    Upload,
)
from cortex.payloads.json_bodies import parse_json
from cortex.spelling import nearest

T = TypeVar("T")

#: Maximum nesting of maps stored with a job, far below Python's recursion limit.
MAX_DEPTH = 100
#: Maximum size of a map as JSON: every worker of the job gets it, and every query of the job parses it.
MAX_MAP_BYTES = 1024 * 1024
#: Maximum number of wrong elements of a list, or unknown keys of a map, that an error names.
_SHOWN_ELEMENTS = 10
#: Longest unknown key that is compared with known ones, which is slow.
_COMPARED_LENGTH = 100


class SubmissionFields:
    """The fields of one map. Reading a wrong field adds to `problems` and returns None.

    `name` is the path of the map (`item_list`), empty for the whole body. A field that is null is missing.
    """

    def __init__(
        self, data: Mapping[str, object], problems: list[str], name: str = "", *, ignores_unknown: bool = False
    ) -> None:
        self.data = data
        self.problems = problems
        self._name = name
        self._ignores_unknown = ignores_unknown

    def __contains__(self, key: str) -> bool:
        return self.data.get(key) is not None

    def read(self, key: str, reader: Callable[[object], T], fix: str) -> T | None:
        """Return a field's value, None if it is missing; `fix` tells how to correct a wrong one."""
        value = self.data.get(key)
        if value is None:
            return None
        try:
            return reader(value)
        except PydanticCustomError as error:
            context = error.context or {}
            for one in context.get("elements", [context]):
                self.add(f"{key}{one.get('place', '')}", str(one.get("text")), str(one.get("fix") or fix))
            return None

    def require(self, key: str, reader: Callable[[object], T], fix: str) -> T | None:
        """Return the value of a required field."""
        if key not in self:
            self.add(key, "cannot be null" if key in self.data else "must be defined", fix)
            return None
        return self.read(key, reader, fix)

    def section(
        self, key: str, fix: str, reader: Callable[[object], dict[str, Any]] | None = None
    ) -> SubmissionFields | None:
        """Return the fields of a map inside this one."""
        found = self.read(key, reader or a_map, fix)
        if found is None:
            return None
        return SubmissionFields(found, self.problems, self.path(key), ignores_unknown=self._ignores_unknown)

    def add(self, key: str, message: str, fix: str) -> None:
        """Add a problem."""
        self.problems.append(f"{self.path(key)}: {message}; {fix}")

    def path(self, key: str) -> str:
        """Return the full name of a field."""
        return f"{self._name}.{key}" if self._name else key

    def refuse_unknown(self, known: Sequence[str], nested: Mapping[str, str] = MappingProxyType({})) -> None:
        """Add a problem for each unknown key, with the known key that it resembles; `nested`: key → its section."""
        unknown = [] if self._ignores_unknown else [key for key in self.data if key not in known]
        where = f"{self._name}: " if self._name else ""
        for key in unknown[:_SHOWN_ELEMENTS]:
            meant = nearest(key, (*known, *nested)) if len(key) <= _COMPARED_LENGTH else None
            fix = f"did you mean {quote(meant)}?" if meant else f"remove it; supported keys: {', '.join(known)}"
            if meant is not None and meant in nested:
                fix = f"move it to {quote(nested[meant])}" + ("" if key == meant else f" as {quote(meant)}")
            self.problems.append(f"{where}key {quote(key)} is not supported; {fix}")


def integer(at_least: int, at_most: int) -> Callable[[object], int]:
    """Return a reader of an integer in a range."""

    def read(value: object) -> int:
        if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
            raise problem(f"must be an integer (got {value!r})", f"write {int(value)}")
        if isinstance(value, bool) or not isinstance(value, int):
            digits = isinstance(value, str) and re.fullmatch(r"[0-9]{1,9}", value)
            raise problem(f"must be an integer (got {quote(value)})", f"write {value} without quotes" if digits else "")
        if not at_least <= value <= at_most:
            bound = f"at least {at_least:,}" if value < at_least else f"at most {at_most:,}"
            raise problem(f"must be {bound} (got {value})")
        return value

    return read


def seconds(value: object) -> float:
    """Read a time above 0, in seconds or as `30s` or `5m`."""
    found = values.duration_s(above=0)(value)
    if not math.isfinite(found):
        raise problem(f"must be finite (got {quote(value)})")
    return found


def boolean(value: object) -> bool:
    """Read true or false."""
    if not isinstance(value, bool):
        raise problem(f"must be true or false (got {quote(value)})")
    return value


def a_map(value: object) -> dict[str, Any]:
    """Read a map."""
    if not isinstance(value, dict):
        raise problem(f"must be a map (got {quote(value)})")
    return value


def a_flat_map(value: object) -> dict[str, Any]:
    """Read a map of bounded depth and size."""
    found = a_map(value)
    level: list[Any] = [found]
    for _ in range(MAX_DEPTH):
        maps = [each for each in level if isinstance(each, dict)]
        level = [item for each in level if isinstance(each, list) for item in each]
        level += [item for each in maps for item in each.values()]
    if any(isinstance(each, dict | list) for each in level):
        raise problem(f"is nested deeper than {MAX_DEPTH} levels", "make it flatter, or send it as a string of JSON")
    size = len(json.dumps(found))
    if size > MAX_MAP_BYTES:
        fix = "put it in a file or a bucket, and its path here"
        raise problem(f"has {size:,} bytes as JSON, more than {MAX_MAP_BYTES:,}", fix)
    return found


def text(value: object) -> str:
    """Read a non-empty string without characters that are invalid in paths and URLs."""
    if not isinstance(value, str):
        raise problem(f"must be a string (got {quote(value)})")
    if not value.strip():
        raise problem("cannot be empty")
    if "\0" in value or re.search(r"[\ud800-\udfff]", value):
        raise problem("has a character in it that no path or address can have", "remove it")
    return value


def a_list(of: Callable[[object], T], least: int = 0) -> Callable[[object], list[T]]:
    """Return a reader of a list; problems name the positions of the first wrong elements."""

    def read(value: object) -> list[T]:
        if not isinstance(value, list):
            raise problem(f"must be a list (got {quote(value)})")
        if len(value) < least:
            raise problem("cannot be empty")
        found: list[T] = []
        wrong: list[dict[str, Any]] = []
        for index, item in enumerate(value):
            try:
                found.append(of(item))
            except PydanticCustomError as error:
                wrong.append({**(error.context or {}), "place": f"[{index}]"})
                if len(wrong) == _SHOWN_ELEMENTS:
                    break
        if wrong:
            raise PydanticCustomError("value", "{text}", {**wrong[0], "elements": wrong})
        return found

    return read


def from_text(value: str) -> object:
    """Return the value of a query parameter: parsed if it is JSON, otherwise the text itself."""
    try:
        return json.loads(value, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return value


def _refuse_constant(name: str) -> object:
    raise ValueError(name)


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
_TASK_FIELDS = ("config", "timeout", "max_attempts", "webhook", "workers")
#: Query parameter of a submission that is only validated.
DRY_RUN = "dryRun"
#: Options of an upload that are text; the others are JSON.
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
    """Limits of a submission, from the API's `networking`."""

    max_body_bytes: int = 10 * 1024 * 1024
    max_batch_bytes: int = 256_000
    is_task: bool = False  #: the API is a TaskAPI, whose jobs have no items


def parse_submission(
    data: bytes | Mapping[str, Any], limits: SubmissionLimits, *, ignores_unknown: bool = False
) -> Submission:
    """Parse the body of a submission to a BatchAPI. Raises: SubmissionError."""
    fields = load(data, limits, _EXAMPLE) if isinstance(data, bytes) else data
    body = SubmissionFields(fields, [], ignores_unknown=ignores_unknown)
    options = _options(body)
    source = _source(body)
    section = next((key for key in _SOURCES if key in body), _SOURCES[0])
    body.refuse_unknown((*_OPTIONS, *_SOURCES), {"batch_size": section})
    return _finish(body, options, source)


def parse_upload(query: Mapping[str, str], limits: SubmissionLimits) -> Submission:
    """Parse the options of an upload, whose items follow as lines of JSON. Raises: SubmissionError."""
    given = {key: value if key in _TEXTS else from_text(value) for key, value in query.items()}
    body = SubmissionFields(given, [])
    options = _options(body)
    batch_size = _batch_size(body)
    body.refuse_unknown((*_OPTIONS, "batch_size", DRY_RUN))
    return _finish(body, options, Upload(batch_size))


def check_query(query: Mapping[str, str], known: tuple[str, ...] = (DRY_RUN,)) -> None:
    """Refuse parameters of a submission's or retry's query other than `known`. Raises: SubmissionError."""
    parameters = SubmissionFields(query, [])
    parameters.refuse_unknown(known)
    if parameters.problems:
        raise SubmissionError("\n".join(f"query: {problem}" for problem in parameters.problems))


def check_workers(workers: int) -> None:
    """Validate the number of workers of a retried job. Raises: SubmissionError."""
    body = SubmissionFields({"workers": workers}, [])
    body.read("workers", *_WORKERS)
    if body.problems:
        raise SubmissionError("\n".join(body.problems))


def _finish(body: SubmissionFields, options: JobOptions, source: Source | None) -> Submission:
    if body.problems or source is None:
        raise SubmissionError("\n".join(body.problems))
    return Submission(source, options)


def load(data: bytes, limits: SubmissionLimits, example: str) -> Mapping[str, Any]:
    """Parse a body that must be a map such as `example`. Raises: SubmissionError."""
    if len(data) > limits.max_body_bytes:
        lines = ", or send the items as lines of JSON with the content type application/x-ndjson"
        raise SubmissionError(
            f"the body has {len(data):,} bytes, and may have {limits.max_body_bytes:,}; raise networking.max_body_size"
            f" of the API{'' if limits.is_task else lines}"
        )
    if not data.strip():
        raise SubmissionError(f"the body is empty; send something like {example}")
    try:
        found = parse_json(data)
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


def _options(body: SubmissionFields) -> JobOptions:
    """Read the options. Wrong ones are added to `body.problems` and replaced by a default."""
    workers = body.require("workers", *_WORKERS)
    queue_fix = 'write "sqs_dead_letter_queue": {"arn": "…", "max_receive_count": 3}'
    queue = body.section("sqs_dead_letter_queue", queue_fix, a_flat_map)
    receive_count = None
    if queue is not None:
        queue.require("arn", text, 'write "arn": "…", or leave sqs_dead_letter_queue out')
        count_fix = 'write "max_receive_count": 3'
        receive_count = queue.require("max_receive_count", integer(1, _MAX_ATTEMPTS), count_fix)
        queue.refuse_unknown(("arn", "max_receive_count"))
    attempts = body.read("max_attempts", integer(1, _MAX_ATTEMPTS), 'write "max_attempts": 3')
    return JobOptions(
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


def timeout_of(body: SubmissionFields) -> int | None:
    """Read the timeout of the whole job, in seconds."""
    return body.read("timeout", integer(1, _MAX_SECONDS), 'write a number of seconds, such as "timeout": 3600')


def webhook_of(body: SubmissionFields) -> str | None:
    """Read the URL of the webhook."""
    return body.read("webhook", _webhook, 'write "webhook": "https://host/path"')


def _source(body: SubmissionFields) -> Source | None:
    given = [key for key in _SOURCES if key in body]
    if not given:
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


def _item_list(body: SubmissionFields) -> ItemList | None:
    section = body.section("item_list", 'write "item_list": {"items": [1, 2], "batch_size": 1}')
    if section is None:
        return None
    items = section.require("items", a_list(lambda item: item, least=1), 'write "items": [1, 2] with at least one item')
    batch_size = _batch_size(section)
    section.refuse_unknown(("items", "batch_size"))
    return None if items is None else ItemList(items, batch_size)


def _files(body: SubmissionFields, key: str) -> FilePathLister | None:
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
    section.refuse_unknown(_FILE_FIELDS)
    kind = DelimitedFiles if key == "delimited_files" else FilePathLister
    if paths is None:
        return None
    if len(paths) > _MAX_PATHS:
        section.add(name, f"may have {_MAX_PATHS:,} (got {len(paths):,})", "name the folders that the files are in")
    return kind(tuple(paths), batch_size, globs["includes"], globs["excludes"])


def _batch_size(section: SubmissionFields) -> int:
    return section.read("batch_size", integer(1, _MAX_BATCH_SIZE), 'write "batch_size": 1') or 1


def _globs(section: SubmissionFields, key: str) -> tuple[str, ...]:
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
        raise problem(f"{quote(pattern)} is not a valid glob", str(error)) from None
    return pattern


def _path(value: object) -> str:
    """Read a prefix: `s3://…`, `gs://…`, or an absolute local path, which is normalized."""
    path = text(value)
    if path.startswith("/"):
        normal = posixpath.normpath(path).strip("/")
        if not normal:
            raise problem(f"{quote(path)} is the whole file system", "write the path of a folder")
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
        what = "has an invalid bucket name" if rest.strip("/") else "has no bucket"
        raise problem(f"{quote(path)} {what}", f'write "{scheme}://bucket/folder/"')
    raise problem(f"{quote(path)}: {scheme}:// is not supported", "use s3://, gs:// or an absolute local path")


def _output(value: object) -> str:
    return _path(value)


def _webhook(value: object) -> str:
    """Read a URL, which no message contains, since it may be a secret."""
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


_TASK_EXAMPLE = '{"config": {"key": "value"}, "timeout": 3600}'


def parse_body(
    data: bytes | Mapping[str, Any], limits: SubmissionLimits, *, ignores_unknown: bool = False
) -> Submission:
    """Parse a submission to a BatchAPI or TaskAPI. Raises: SubmissionError."""
    parse = parse_task if limits.is_task else parse_submission
    return parse(data, limits, ignores_unknown=ignores_unknown)


def parse_task(
    data: bytes | Mapping[str, Any], limits: SubmissionLimits, *, ignores_unknown: bool = False
) -> Submission:
    """Parse a submission to a TaskAPI; an empty body means the options of `cortex.yaml`. Raises: SubmissionError."""
    if isinstance(data, bytes):
        data = load(data, limits, _TASK_EXAMPLE) if data.strip() else {}
    body = SubmissionFields(data, [], ignores_unknown=ignores_unknown)
    body.read("workers", integer(1, 1), 'write "workers": 1, or leave it out: a task runs on one worker')
    options = JobOptions(
        workers=1,
        config=body.read("config", a_flat_map, 'write "config": {"key": "value"}'),
        timeout_s=timeout_of(body),
        # Once by default: only the user can decide if a task that failed halfway may run again.
        max_attempts=body.read("max_attempts", integer(1, _MAX_ATTEMPTS), 'write "max_attempts": 1') or 1,
        webhook=webhook_of(body),
    )
    body.refuse_unknown(_TASK_FIELDS)
    return _finish(body, options, TaskCall())
