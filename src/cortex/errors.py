"""Every error that users see, with its code, HTTP status and exit code.

CortexError
├── InputError                    invalid input: exit 2, HTTP 4xx
│   ├── ConfigError               invalid cortex.yaml or project; carries every diagnostic
│   ├── SubmissionError           invalid submission of a job
│   ├── NotFoundError             no such API, job, key or environment
│   ├── ConflictError             valid, but not in the present state (API is updating, kind changed)
│   ├── TooLargeError             the request exceeds a size limit
│   ├── UnsupportedMediaTypeError the character set or the coding of a body is not supported
│   ├── UnauthorizedError         the operator's token is missing or wrong
│   ├── ForbiddenError            the operator's token does not permit the request
│   ├── MethodNotAllowedError     a path does not support the method
│   ├── WorkerMessageError        a job worker's message is invalid
│   ├── CertificateError          a certificate or its key cannot be served
│   ├── DatabaseAddressError      the address, password or configuration of a database is wrong
│   └── UsageError                invalid arguments of a command
├── EnvironmentBuildError         a project's dependencies cannot be installed
├── ImageBuildError               an image cannot be built from an exported project
├── StorageError                  an object store or a local path cannot be read or written
├── UserError                     the user's code raised; carries the user's frames only
│   └── ModelError                a model does not exist, or cannot be fetched, loaded or run
│       ├── ModelFormatError      its files are unknown, damaged or unsafe, or need other libraries
│       └── ModelInputError       it cannot be run on this input
├── EngineError                   a replica cannot be started, reached or stopped
│   └── ComputeUnavailableError   the required devices are in use
├── GatewayError                  HAProxy cannot be started, reloaded or reached
├── OperatorUnavailableError      the operator does not answer
├── DatabaseUnavailableError      a database cannot be used at the moment
│   ├── DatabaseUnreachableError  its connection broke or cannot be made
│   └── SupersededError           another operator leads now
├── BusyError                     the operator is at its limit of concurrent requests
├── DatabaseVersionError          a newer version, or another program, wrote the database
├── UnknownWorkloadError          an AsyncAPI has no workload with that id
├── WebhookError                  a webhook could not be sent
└── TokenError                    Ray requires a token that this process does not have

An error that one module raises and its caller handles, such as `PeerError` or `NoRoomError`, is in the module that
raises it.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

_KIB = 1024
_MAX_TYPE_NAME = 100
_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


class CortexError(Exception):
    """Base of all errors shown to users; `str(error)` states what happened, where, and what to do."""

    code: ClassVar[str] = "internal"
    http_status: ClassVar[int] = 500
    exit_code: ClassVar[int] = 1


class InputError(CortexError):
    """The input or the request is invalid."""

    code = "bad_input"
    http_status = 400
    exit_code = 2


@dataclass(frozen=True, order=True)
class Diagnostic:
    """One mistake in a user's file. Sorts by file, line, column.

    `line` and `column` count from 1; both are 0 for the whole file. `path` is the path in the document
    (`iris.handler.path`), `fix` the suggested correction.
    """

    file: str
    line: int
    column: int
    path: str
    message: str
    fix: str = ""

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}:{self.column}" if self.line else self.file
        place = f"{self.path}: " if self.path else ""
        return f"{where}: {place}{self.message}" + (f" ({self.fix})" if self.fix else "")


class ConfigError(InputError):
    """A configuration or project is invalid; `diagnostics` holds every mistake, sorted."""

    code = "bad_config"

    def __init__(self, diagnostics: Sequence[Diagnostic]) -> None:
        self.diagnostics = tuple(sorted(diagnostics))
        super().__init__("\n".join(map(str, self.diagnostics)))


class SubmissionError(InputError):
    """A submission is invalid; the message lists every invalid field with its fix."""

    code = "bad_submission"


class NotFoundError(InputError):
    """The named API, job, key or environment does not exist."""

    code = "not_found"
    http_status = 404
    exit_code = 1


class ConflictError(InputError):
    """The request is valid but conflicts with the present state."""

    code = "conflict"
    http_status = 409
    exit_code = 1


class TooLargeError(InputError):
    """The request exceeds a size limit."""

    code = "too_large"
    http_status = 413


class UnsupportedMediaTypeError(InputError):
    """A body has a character set or a content coding that is not supported; `accepted` are the codings that are."""

    code = "unsupported_media_type"
    http_status = 415

    def __init__(self, message: str, accepted: str = "") -> None:
        super().__init__(message)
        self.accepted = accepted


class UnauthorizedError(InputError):
    """The operator's token is missing or wrong."""

    code = "unauthorized"
    http_status = 401
    exit_code = 1


class ForbiddenError(InputError):
    """The operator's token does not permit the request, or a page of another site sent it."""

    code = "forbidden"
    http_status = 403
    exit_code = 1


class MethodNotAllowedError(InputError):
    """A path does not support a method; `allowed` lists the methods that it supports."""

    code = "method_not_allowed"
    http_status = 405

    def __init__(self, message: str, allowed: str = "") -> None:
        super().__init__(message)
        self.allowed = allowed

    @classmethod
    def of(cls, method: str, allowed: str, hint: str = "") -> MethodNotAllowedError:
        """Return the error of a request; `hint` follows the list of `allowed` methods."""
        return cls(f"{method} is not a method of this path, which has {allowed}{hint}", allowed)


class WorkerMessageError(InputError):
    """A message of a worker route is invalid."""

    code = "bad_wire"


class CertificateError(InputError):
    """A certificate or its key cannot be served."""

    code = "bad_certificate"


class DatabaseAddressError(InputError):
    """A database can't be opened: its address, the password or the configuration of the server is wrong."""

    code = "database_address"


class UsageError(InputError):
    """Invalid arguments of a command."""

    code = "usage"


class EnvironmentBuildError(CortexError):
    """A project's dependencies cannot be installed; the message ends with the installer's output."""

    code = "environment_build_failed"
    http_status = 400


class ImageBuildError(CortexError):
    """A container image cannot be built; the output of the builder precedes the message."""

    code = "image_build_failed"


class StorageError(CortexError):
    """An object store or a local path cannot be read or written."""

    code = "storage"
    http_status = 400


class UserError(CortexError):
    """The user's code raised; `traceback` contains only the user's frames."""

    code = "user_error"

    def __init__(self, message: str, traceback: str = "") -> None:
        super().__init__(message)
        self.traceback = traceback

    def in_full(self) -> str:
        """Return the traceback, followed by the message unless the traceback contains it."""
        shown = self.traceback.rstrip()
        return "\n".join(text for text in (shown, "" if str(self) in shown else str(self)) if text)


class ModelError(UserError):
    """A model that the user's code requested does not exist, or cannot be fetched, loaded or run."""

    code = "model"


class ModelFormatError(ModelError):
    """A model that cortex itself should load is in no known format, damaged or unsafe, or needs other libraries."""

    code = "model_format"
    http_status = 400
    exit_code = 2


class ModelInputError(ModelError):
    """A model cannot be run on this input: names, types or shapes differ, or the model itself rejects it."""

    code = "model_input"
    http_status = 400


class EngineError(CortexError):
    """A replica cannot be started, reached or stopped."""

    code = "engine"


class ComputeUnavailableError(EngineError):
    """A replica requires devices of this machine that other replicas use."""

    code = "compute_unavailable"
    http_status = 503


class GatewayError(CortexError):
    """HAProxy cannot be started, reloaded or reached."""

    code = "gateway"


class OperatorUnavailableError(CortexError):
    """The operator does not answer."""

    code = "operator_unavailable"
    http_status = 503


class DatabaseUnavailableError(CortexError):
    """A database cannot be used now: the server is unreachable, the disk is full, or another program holds a lock."""

    code = "database_unavailable"
    http_status = 503


class DatabaseUnreachableError(DatabaseUnavailableError):
    """A database connection broke or cannot be made; a commit in progress may or may not have happened."""


class SupersededError(DatabaseUnavailableError):
    """Another operator is the leader now; writes of this one are rejected."""


class BusyError(CortexError):
    """The operator is at its limit of concurrent requests."""

    code = "busy"
    http_status = 503


class DatabaseVersionError(CortexError):
    """The database was written by a newer version of cortex, or is not a database of cortex."""

    code = "database_version"


class UnknownWorkloadError(CortexError):
    """There is no workload with that id, or it has expired."""

    code = "not_found"
    http_status = 404

    def __init__(self, name: str) -> None:
        super().__init__(f"id {name} not found")


class IdempotencyError(ConflictError):
    """An idempotency key was used before, for another body."""

    def __init__(self) -> None:
        super().__init__("the Idempotency-Key was used before for another body or content type; send a new key")


class WebhookError(CortexError):
    """A webhook could not be sent; the message contains only its host, since the rest of the URL may be a secret."""

    code = "webhook"


class TokenError(CortexError):
    """Ray requires a token that this process does not have."""


def type_name(value: object) -> str:
    """Return the name of a value's type for messages, the beginning of a long one: code may make types of any name."""
    name = type(value).__name__
    return name if len(name) <= _MAX_TYPE_NAME else f"{name[: _MAX_TYPE_NAME - 1]}…"


def with_article(noun: str) -> str:
    """Return a noun with its indefinite article, for messages: `an AsyncAPI`, `a list`."""
    return f"{'an' if noun.lower().startswith(tuple('aeiou')) else 'a'} {noun}"


def format_size(size_bytes: int) -> str:
    """Return a size for messages, with three digits: `512 bytes`, `100 MiB`, `4.88 TiB`."""
    if size_bytes < _KIB:
        return f"{size_bytes} bytes"
    size, unit = float(size_bytes), 0
    while size >= _KIB - 0.5 and unit < len(_UNITS):  # 1023.9 KiB is 1 MiB
        size, unit = size / _KIB, unit + 1
    digits = 0 if size >= 100 else 1 if size >= 10 else 2
    number = f"{size:.{digits}f}"
    return f"{number.rstrip('0').rstrip('.') if digits else number} {_UNITS[unit - 1]}"


def linked_exceptions(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception, its causes and contexts, and the members of groups, each once: a chain may be cyclic."""
    waiting, seen = [error], set[int]()
    while waiting:
        linked = waiting.pop()
        if linked is None or id(linked) in seen:
            continue
        seen.add(id(linked))
        yield linked
        waiting += [linked.__context__, linked.__cause__]
        waiting += linked.exceptions if isinstance(linked, BaseExceptionGroup) else ()


def is_disk_full(error: BaseException | None) -> bool:
    """Return True if a full disk, or an exceeded quota, is among the causes of an error."""
    return any(
        isinstance(each, OSError) and each.errno in (errno.ENOSPC, errno.EDQUOT) for each in linked_exceptions(error)
    )
