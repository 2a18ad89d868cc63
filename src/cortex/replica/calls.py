"""One call of the user's method: arguments from the request, the result as an outcome. It runs on any thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from cortex.errors import ModelError, UserError
from cortex.predictor.loader import BoundMethod, BoundPredictor, Kind, result_kind, split_callback
from cortex.predictor.tracebacks import format_user_traceback
from cortex.replica.errors import write_log
from cortex.replica.http import Connection
from cortex.replica.payload import BadBody, Encoded, encode, make_headers, make_query_params, parse
from cortex.replica.request_log import REQUEST
from cortex.replica.short_repr import shortened

_PLAIN = frozenset({dict, list, str, bytes, int, float, bool, tuple, type(None)})


#: Payload, query parameters and headers of a request, each None where the user's method does not ask for it.
Arguments = tuple[Any, Any, Any]


class Tracks(Protocol):
    """What is told each result that is sent."""

    def track(self, result: Any, request_id: bytes) -> None:
        """Count a prediction; on any thread. Never raises."""


@dataclass(slots=True)
class Failed:
    """The answer is an error."""

    status: int
    message: str


@dataclass(slots=True)
class Answered:
    """The answer is there, whole."""

    encoded: Encoded
    after: Callable[[], Any] | None = None


@dataclass(slots=True)
class Unfinished:
    """The user's method returned something that has yet to run: to be awaited or iterated."""

    kind: Kind
    value: Any
    method: BoundMethod
    arguments: Arguments


Outcome = Failed | Answered | Unfinished


class Caller:
    """Calls the methods of one predictor; stateless, so that threads may share it."""

    def __init__(self, api: str, predictor: BoundPredictor, tracker: Tracks | None = None) -> None:
        self._api = api
        self._json_only = predictor.generation.json_only
        self._logs_on_demand = predictor.generation.logs_on_demand
        self._generation = predictor.generation
        self._tracker = tracker

    def call(self, connection: Connection, method: BoundMethod) -> Outcome:
        """Parse, call, encode. Never raises."""
        REQUEST.set(connection.request_id)
        try:
            arguments = self.arguments(connection, method)
            result = method.call(*arguments)
            if method.kind != "sync":
                return Unfinished(method.kind, result, method, arguments)
            if type(result) not in _PLAIN and (kind := result_kind(result)) != "sync":
                return Unfinished(kind, result, method, arguments)
            connection.returned_ns = time.monotonic_ns()
            return self.answered(connection, method, result, arguments)
        except BaseException as error:  # the edge of the user's code: what it raises ends the request, not us
            return self.failed(connection, method.name, error)

    def arguments(self, connection: Connection, method: BoundMethod) -> Arguments:
        """Return what the method asks for. Raises: BadBody."""
        payload = query_params = headers = None
        if method.needs_payload:
            payload = parse(connection.content_type, connection.body, self._json_only)
        if method.needs_query_params:
            query_params = make_query_params(connection.url.partition(b"?")[2])
        if method.needs_headers:
            headers = make_headers(connection.headers)
        if self._logs_on_demand and _asks_for_log(connection):
            _log_value(connection, "sample", payload)
        return payload, query_params, headers

    def finished(self, connection: Connection, unfinished: Unfinished, result: Any) -> Outcome:
        """Return the outcome for what awaiting `unfinished` gave. Never raises."""
        try:
            kind = result_kind(result)
            if kind != "sync":
                return Unfinished(kind, result, unfinished.method, unfinished.arguments)
            connection.returned_ns = time.monotonic_ns()
            return self.answered(connection, unfinished.method, result, unfinished.arguments)
        except BaseException as error:  # as in call
            return self.failed(connection, unfinished.method.name, error)

    def failed(self, connection: Connection, name: str, error: BaseException) -> Failed:
        """Return the answer for an exception; the traceback goes to the log, not to the caller."""
        if isinstance(error, BadBody):
            return Failed(400, str(error))
        self.log(connection, error)
        if isinstance(error, UserError):  # a result that can't be sent, or no such model: the message is for the caller
            return Failed(500, f"internal server error: {error}")
        what = f"{type(error).__name__} in {name}()"
        return Failed(500, f"internal server error: {what}; `cortex logs {self._api}` shows the traceback")

    def log(self, connection: Connection, error: BaseException) -> None:
        """Write the user's frames to the log, or what is wrong with the result."""
        has_frames = isinstance(error, ModelError) or not isinstance(error, UserError)
        text = format_user_traceback(error) if has_frames else f"{error}\n"
        write_log(f"request {_id(connection)} failed:\n{text}")

    def answered(self, connection: Connection, method: BoundMethod, result: Any, arguments: Arguments) -> Answered:
        """Return the answer for a result. Raises: UserError if it can't be sent."""
        result, after = split_callback(result, self._generation)
        if self._logs_on_demand and _asks_for_log(connection):
            _log_value(connection, "prediction", result)
        if method.after is not None:
            after = partial(method.after, result, *arguments)
        encoded = encode(result, self._json_only)
        if self._tracker is not None:
            self._tracker.track(result, connection.request_id)
        if encoded.background is not None:
            after = encoded.background if after is None else partial(_both, after, encoded.background)
        return Answered(encoded, after)


def _id(connection: Connection) -> str:
    return connection.request_id.decode("latin-1")


def _asks_for_log(connection: Connection) -> bool:
    query = connection.url.partition(b"?")[2]
    return b"debug=" in query and make_query_params(query).get("debug", "").lower() == "true"


def _log_value(connection: Connection, name: str, value: Any) -> None:
    """Log a value shortened: a caller can ask for this, and must not be able to fill the log."""
    write_log(f"request {_id(connection)} {name}: {shortened(value)}\n")


async def _both(after: Callable[[], Any], background: Callable[[], Any]) -> None:
    after()
    await background()
