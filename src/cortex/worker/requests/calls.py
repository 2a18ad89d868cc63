"""One call of a user's method: parse its arguments from the request, call it, encode the result. Runs on any thread."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from reprlib import Repr
from typing import TYPE_CHECKING, Any

from cortex.errors import ModelError, UserError, type_name
from cortex.payloads.content_type import FORM, media_type_of
from cortex.payloads.inference_protocol import V2Error
from cortex.payloads.json_bodies import parse_json
from cortex.payloads.validation import BadBody, PayloadError
from cortex.predictor.binding import Bodies, BoundMethod, Kind, result_kind, split_callback
from cortex.predictor.loader import BoundPredictor
from cortex.predictor.tracebacks import describe, format_user_traceback
from cortex.predictor.user_forks import end_if_forked, process_id
from cortex.worker.http.connection import Connection
from cortex.worker.http.responses import NO_HEADERS, ValidHeaders, validate_head
from cortex.worker.monitoring.request_log import write_log
from cortex.worker.requests.http_exceptions import as_http_exception, describe_http_exception
from cortex.worker.requests.payload import (
    CONTENT_TYPE,
    JSON,
    Encoded,
    encode,
    encode_json,
    json_or,
    make_headers,
    make_query_params,
    parse,
    parse_typed,
)
from cortex.worker.spec import DEV_VARIABLE, TERMINAL_HINT, TEST_VARIABLE

if TYPE_CHECKING:
    from cortex.worker.monitoring.tracker import PredictionTracker

#: Limits of a logged value: items of each list and dict on each level, and characters in total.
MAX_ITEMS = 10
MAX_CHARACTERS = 500
_SHOWN_TYPE = 60
_PHRASES = {status.value: status.phrase for status in HTTPStatus}

_PLAIN = frozenset({dict, list, str, bytes, int, float, bool, tuple, type(None)})

#: Payload, query parameters and headers of a request; None where the user's method has no such parameter.
Arguments = tuple[Any, Any, Any]


@dataclass(slots=True)
class FailedCall:
    """A call whose response is an error."""

    status: int
    message: str
    headers: ValidHeaders = NO_HEADERS
    fields: Mapping[str, Any] = field(default_factory=dict)  #: of the JSON body, in addition to the message


@dataclass(slots=True)
class CompletedCall:
    """A call whose result is complete and encoded."""

    encoded: Encoded
    background: Callable[[], Any] | None = None  #: runs after the response


@dataclass(slots=True)
class UnfinishedCall:
    """A call that returned an awaitable, a generator or an async generator, which has yet to run."""

    kind: Kind
    value: Any
    method: BoundMethod
    arguments: Arguments


Outcome = FailedCall | CompletedCall | UnfinishedCall


class Caller:
    """Calls the methods of one predictor. Stateless and thread-safe."""

    def __init__(self, api: str, predictor: BoundPredictor, tracker: PredictionTracker | None = None) -> None:
        self._api = api
        self._json_only = predictor.generation.json_only
        self._logs_on_demand = predictor.generation.logs_on_demand
        self._generation = predictor.generation
        self._tracker = tracker
        self._pid = process_id()
        #: The user's functions around a model, of which a failed call names the one that raised.
        self._functions = tuple(predictor.generation.hooks) if predictor.request_handler is not None else ()

    def call(self, connection: Connection, method: BoundMethod) -> Outcome:
        """Parse the arguments, call the method and encode its result. Never raises."""
        connection.enter(method.name)
        try:
            arguments = self.parse_arguments(connection, method)
            if method.traced is not None and _requests_logging(connection):
                result = method.traced(arguments[0], partial(_log_value, connection))
            else:
                result = method.call(*arguments)
            kind = method.kind
            if kind != "sync" or (type(result) not in _PLAIN and (kind := result_kind(result)) != "sync"):
                end_if_forked(self._pid)
                return UnfinishedCall(kind, result, method, arguments)
            connection.returned_ns = time.monotonic_ns()
            return self.complete(connection, method, result, arguments)
        except BaseException as error:  # the edge of the user's code: its exceptions end the request, not the process
            return self.fail(connection, method, error)

    def parse_arguments(self, connection: Connection, method: BoundMethod) -> Arguments:
        """Return the arguments that the method has parameters for. Raises: BadBody, PayloadError."""
        payload = query_params = headers = None
        if method.needs_payload:
            payload_type = method.payload_type
            if payload_type is None:
                payload = parse(connection.content_type, connection.body, method.bodies)
            else:
                payload = parse_typed(payload_type, connection.content_type, connection.body)
        if method.needs_query_params:
            query_params = make_query_params(connection.url.partition(b"?")[2])
        if method.needs_headers:
            headers = make_headers(connection.headers)
        if self._logs_on_demand and _requests_logging(connection):
            _log_value(connection, "sample", payload)
        return payload, query_params, headers

    def finish(self, connection: Connection, unfinished: UnfinishedCall, result: Any) -> Outcome:
        """Return the outcome of an unfinished call whose awaitable returned `result`. Never raises."""
        try:
            kind = result_kind(result)
            if kind != "sync":
                return UnfinishedCall(kind, result, unfinished.method, unfinished.arguments)
            connection.returned_ns = time.monotonic_ns()
            return self.complete(connection, unfinished.method, result, unfinished.arguments)
        except BaseException as error:  # as in `call`
            return self.fail(connection, unfinished.method, error)

    def complete(self, connection: Connection, method: BoundMethod, result: Any, arguments: Arguments) -> CompletedCall:
        """Encode and track a result. Raises: UserError if it cannot be encoded."""
        result, background = split_callback(result, self._generation)
        if self._logs_on_demand and method.traced is None and _requests_logging(connection):
            _log_value(connection, "prediction", result)
        if method.after is not None:
            background = partial(method.after, result, *arguments)
        encoded = encode(result, self._json_only)
        end_if_forked(self._pid)
        if self._tracker is not None and connection.endpoint is None:  # V2 routes track for themselves
            self._tracker.track(result, connection.request_id, connection.is_copy)
        if encoded.background is not None:
            background = (
                encoded.background if background is None else partial(_run_both, background, encoded.background)
            )
        return CompletedCall(encoded, background)

    def fail(self, connection: Connection, failed: BoundMethod | str, error: BaseException) -> FailedCall:
        """Return the outcome for an exception of a method, or of what has the name `failed`.

        The traceback is logged, not sent to the caller.
        """
        end_if_forked(self._pid)
        try:
            if isinstance(error, BadBody):
                return FailedCall(error.status, str(error), ValidHeaders(error.headers))
            if isinstance(error, V2Error):
                return FailedCall(error.status, str(error))
            if isinstance(error, PayloadError):
                detail = error.as_openai_detail if connection.has_openai_errors else error.detail
                return FailedCall(422, str(error), fields={"detail": detail})
            refused = self.refuse_or_log(connection, error)
            if refused is not None:
                return refused
            if isinstance(error, UserError):  # a result that can't be encoded, or an unknown model: callers see it
                return FailedCall(500, f"internal server error: {error}")
            name = failed if isinstance(failed, str) else failed.name
            hint = "" if isinstance(failed, str) else _content_type_hint(connection, failed)
            what = f"{type_name(error)} in {_failed_function(error, self._functions) or name}()"
            return FailedCall(500, f"internal server error: {what}{logs_hint(self._api)}{hint}")
        except BaseException as problem:  # attributes of an exception may be user code
            what = f"{type(error).__name__}, which can't be described: {type(problem).__name__}"
            write_log(f"request {_id(connection)} failed: {what}\n")
            return FailedCall(500, f"internal server error: {what}{logs_hint(self._api)}")

    def refuse_or_log(self, connection: Connection, error: BaseException) -> FailedCall | None:
        """Return the response that an `HTTPException` of starlette or FastAPI asks for.

        Of other exceptions, log the frames of the user's code, or the message of an error about the result; record them
        in the span, and return None.
        """
        exception = as_http_exception(error)
        if exception is None:
            span = connection.span
            if span is not None:
                span.fail(error)
            has_frames = isinstance(error, ModelError) or not isinstance(error, UserError)
            text = format_user_traceback(error) if has_frames else f"{error}\n"
            write_log(f"request {_id(connection)} failed:\n{text}")
            return None
        try:
            headers = [(name.encode(), value.encode("latin-1")) for name, value in (exception.headers or {}).items()]
            valid = validate_head(exception.status_code, headers)
            kept = ValidHeaders(tuple(header for header in valid if header[0] != CONTENT_TYPE))
            status = int(exception.status_code)
            detail = parse_json(encode_json(exception.detail))
        except Exception as invalid:  # statuses, headers and details of the user may be anything
            write_log(f"request {_id(connection)} failed: its HTTPException is invalid: {describe(invalid)}\n")
            return FailedCall(500, f"internal server error: invalid HTTPException{logs_hint(self._api)}")
        write_log(f"request {_id(connection)} was refused: {describe_http_exception(exception)}\n")
        message = detail if isinstance(detail, str) else _PHRASES.get(status, f"status {status}")
        return FailedCall(status, message, kept, {"detail": detail})


def logs_hint(api: str) -> str:
    """Return the end of the message of a failed call, which says where its traceback is."""
    if TEST_VARIABLE in os.environ:
        return "; the output of the test shows the traceback"
    return TERMINAL_HINT if DEV_VARIABLE in os.environ else f"; `cortex logs {api}` shows the traceback"


def _failed_function(error: BaseException, names: tuple[str, ...]) -> str:
    """Return the first of these functions in the traceback of an error; "" if there is none."""
    frames = traceback.walk_tb(error.__traceback__) if names else ()
    return next((frame.f_code.co_name for frame, _ in frames if frame.f_code.co_name in names), "")


def _content_type_hint(connection: Connection, method: BoundMethod) -> str:
    """Return a hint for the caller of a failed call whose body is JSON, but was passed on as something else."""
    if not method.needs_payload or method.payload_type is not None:  # these need no content type
        return ""
    content_type, body = connection.content_type, connection.body
    kind = media_type_of(content_type or b"")
    is_parsed = kind == JSON or (kind == FORM and method.bodies is Bodies.JSON_OVER_FORMS)
    if is_parsed or not isinstance(json_or(body, None), dict | list):
        return ""
    sent = f"the content type {content_type.decode('latin-1')[:_SHOWN_TYPE]}" if content_type else "no content type"
    return f"; the body is JSON, but was sent with {sent}: send the header `content-type: application/json`"


def short_repr(value: Any) -> str:
    """Return the repr of a value, truncated to one line of `MAX_CHARACTERS`. Never raises."""
    try:
        text = _REPR.repr(value).replace("\n", "\\n")
    except BaseException as error:  # `__repr__` may be user code, which may call sys.exit()
        text = f"<{type_name(value)}, whose repr raises {type_name(error)}>"
    return _truncate(text, is_longer=False)


class _ShortRepr(Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = self.maxfrozenset = self.maxdeque = MAX_ITEMS
        self.maxstring = self.maxother = self.maxlong = MAX_CHARACTERS

    def repr_bytes(self, value: bytes, level: int) -> str:
        # The inherited method formats the whole value first, which takes four times the memory of the body.
        return _truncate(repr(value[:MAX_CHARACTERS]), is_longer=len(value) > MAX_CHARACTERS)

    repr_bytearray = repr_bytes


_REPR = _ShortRepr()


def _truncate(text: str, is_longer: bool) -> str:
    return f"{text[: MAX_CHARACTERS - 1]}…" if is_longer or len(text) > MAX_CHARACTERS else text


def _id(connection: Connection) -> str:
    return connection.request_id.decode("latin-1")


def _requests_logging(connection: Connection) -> bool:
    query = connection.url.partition(b"?")[2]
    return b"debug=" in query and make_query_params(query).get("debug", "").lower() == "true"


def _log_value(connection: Connection, name: str, value: Any) -> None:
    """Log a truncated value; any caller can request this, and must not be able to fill the log."""
    write_log(f"request {_id(connection)} {name}: {short_repr(value)}\n")


async def _run_both(first: Callable[[], Any], second: Callable[[], Any]) -> None:
    first()
    await second()
