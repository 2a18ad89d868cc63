"""Every error that crosses a module boundary, with the code, HTTP status and exit code it becomes.

CortexError
├── InputError                    the user gave us something wrong: exit 2, HTTP 4xx
│   ├── ConfigError               cortex.yaml or the project is wrong; carries every diagnostic
│   ├── SubmissionError           a job can't be run as it was submitted
│   ├── NotFoundError             no such API, job, key, environment
│   ├── ConflictError             right, but not now (API is updating, kind changed)
│   ├── TooLargeError             what was sent is larger than is taken
│   └── UnauthorizedError         the operator's token is missing or wrong
├── EnvironmentBuildError         a project's dependencies can't be installed
├── StorageError                  s3://, gs:// or a local path can't be read
├── UserError                     the user's code raised; carries the user's frames only
│   └── ModelError                no such model or version, or it can't be fetched, loaded or run
├── EngineError                   a replica can't be started, reached or stopped
│   └── ComputeUnavailableError   the devices it wants are taken; it starts once they are free
├── GatewayError                  HAProxy can't be started, reloaded or reached
├── OperatorUnavailableError      the operator does not answer
└── BusyError                     the operator has too much at hand to take more now
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar


class CortexError(Exception):
    """Base of all errors that are shown to users; `str(error)` says what, where and what to do."""

    code: ClassVar[str] = "internal"
    http_status: ClassVar[int] = 500
    exit_code: ClassVar[int] = 1


class InputError(CortexError):
    """The caller asked for something that can't be done as asked."""

    code = "bad_input"
    http_status = 400
    exit_code = 2


@dataclass(frozen=True, order=True)
class Diagnostic:
    """One mistake in a user's file. Sorts by file, line, column.

    `line` and `column` count from 1; both are 0 when the whole file is meant. `path` is the place in the
    document (`iris.handler.path`), `fix` what to do about it.
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
    """A configuration or project is wrong; `diagnostics` holds every mistake found, sorted."""

    code = "bad_config"

    def __init__(self, diagnostics: Sequence[Diagnostic]) -> None:
        self.diagnostics = tuple(sorted(diagnostics))
        super().__init__("\n".join(map(str, self.diagnostics)))


class SubmissionError(InputError):
    """A job can't be run as it was submitted; the message names every field that is wrong, each with its fix."""

    code = "bad_submission"


class NotFoundError(InputError):
    """The thing named does not exist."""

    code = "not_found"
    http_status = 404
    exit_code = 1


class ConflictError(InputError):
    """The request is right but clashes with the present state."""

    code = "conflict"
    http_status = 409
    exit_code = 1


class TooLargeError(InputError):
    """What was sent is larger than is taken."""

    code = "too_large"
    http_status = 413


class UnauthorizedError(InputError):
    """The operator's token is missing or wrong."""

    code = "unauthorized"
    http_status = 401
    exit_code = 1


class EnvironmentBuildError(CortexError):
    """A project's dependencies can't be installed; the message ends with the installer's own words."""

    code = "environment_build_failed"
    http_status = 400


class StorageError(CortexError):
    """An object store or a local path can't be read."""

    code = "storage"
    http_status = 400


class UserError(CortexError):
    """The user's code raised; `traceback` holds the user's frames, none of ours."""

    code = "user_error"

    def __init__(self, message: str, traceback: str = "") -> None:
        super().__init__(message)
        self.traceback = traceback

    def in_full(self) -> str:
        """Return the traceback, and the message where that says more: what to do, or what nothing has raised."""
        told = self.traceback.rstrip()
        return "\n".join(text for text in (told, "" if str(self) in told else str(self)) if text)


class ModelError(UserError):
    """A model that the user's code asked for does not exist, or can't be fetched, loaded or run as asked."""

    code = "model"


class EngineError(CortexError):
    """A replica can't be started, reached or stopped."""

    code = "engine"


class ComputeUnavailableError(EngineError):
    """A replica wants devices of this machine that others hold."""

    code = "compute_unavailable"
    http_status = 503


class GatewayError(CortexError):
    """HAProxy can't be started, reloaded or reached."""

    code = "gateway"


class OperatorUnavailableError(CortexError):
    """The operator does not answer."""

    code = "operator_unavailable"
    http_status = 503


class DatabaseUnavailableError(CortexError):
    """A database can't be used at this moment: its server is away, its disk is full, or another program locks it."""

    code = "database_unavailable"
    http_status = 503


class BusyError(CortexError):
    """The operator has too much at hand to take more now."""

    code = "busy"
    http_status = 503
