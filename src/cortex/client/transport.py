"""HTTP to the operator and to APIs: one request, its answer, its errors as the classes of `cortex.errors`.

On `http.client`, because importing httpx takes a quarter of a second: more than a third of what a whole
`cortex deploy` may take. It also keeps proxies of the environment away from the loopback address.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import urlencode, urlsplit

from cortex.errors import (
    ConfigError,
    CortexError,
    Diagnostic,
    InputError,
    OperatorUnavailableError,
    UserError,
)

REQUEST_TIMEOUT_S = 60.0
#: Connecting to a machine that drops packets.
CONNECT_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Answer:
    """A whole HTTP answer."""

    status: int
    headers: dict[str, str]  #: names in lower case
    body: bytes

    def json(self) -> Any:
        """Return the decoded body. Raises: CortexError if it is not JSON."""
        try:
            return json.loads(self.body)
        except ValueError:
            raise CortexError(f"the answer is not JSON (status {self.status}): {self.body[:200]!r}") from None


@dataclass(frozen=True)
class Transport:
    """Requests to one operator; each has a connection of its own, so that threads can share it."""

    url: str
    token: str = ""
    hint: str = "start it with `cortex up`"  #: what to do when the operator does not answer

    def call(
        self,
        method: str,
        path: str,
        *,
        query: dict[str, Any] | None = None,
        body: bytes | None = None,
        content_type: str = "application/json",
        timeout_s: float = REQUEST_TIMEOUT_S,
    ) -> Any:
        """Return the JSON of the operator's answer. Raises: the error that it named; OperatorUnavailableError."""
        headers = self._headers(body, content_type)
        try:
            answer = send(method, self.url + path + encode_query(query), body, headers, timeout_s)
        except (OSError, HTTPException) as error:
            raise self._unavailable(error) from None
        if answer.status >= 400:
            raise error_of(answer)
        return answer.json() if answer.body else None

    def lines(self, path: str, query: dict[str, Any] | None = None) -> Iterator[str]:
        """Yield the lines of a text answer as they come, without their ends. Raises: as `call`."""
        try:
            connection, response = open_response(
                "GET", self.url + path + encode_query(query), None, self._headers(None, ""), timeout_s=None
            )
        except (OSError, HTTPException) as error:
            raise self._unavailable(error) from None
        try:
            if response.status >= 400:
                raise error_of(read(response))
            while line := response.readline():
                yield line.decode(errors="replace").rstrip("\r\n")
        except (OSError, HTTPException) as error:
            raise OperatorUnavailableError(f"the operator at {self.url} went away ({reason(error)})") from None
        finally:
            connection.close()

    def _headers(self, body: bytes | None, content_type: str) -> dict[str, str]:
        headers = {"authorization": f"Bearer {self.token}"}
        return headers | ({"content-type": content_type} if body is not None else {})

    def _unavailable(self, error: Exception) -> OperatorUnavailableError:
        return OperatorUnavailableError(f"the operator at {self.url} does not answer ({reason(error)}); {self.hint}")


def send(method: str, url: str, body: bytes | None, headers: dict[str, str], timeout_s: float) -> Answer:
    """Send one request and read the whole answer. Raises: OSError, HTTPException."""
    connection, response = open_response(method, url, body, headers, timeout_s)
    try:
        return read(response)
    finally:
        connection.close()


def open_response(
    method: str, url: str, body: bytes | None, headers: dict[str, str], timeout_s: float | None
) -> tuple[HTTPConnection, HTTPResponse]:
    """Send one request and return its connection, to be closed by the caller, and its answer as it begins to come.

    Without `timeout_s` the answer may take for ever. Raises: OSError, HTTPException.
    """
    parts = urlsplit(url)
    kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=CONNECT_TIMEOUT_S)
    try:
        connection.connect()
        connection.sock.settimeout(timeout_s)
        # A follower of logs on a machine that vanished would otherwise wait for ever.
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        try:
            connection.request(method, target, body, {"connection": "close", **headers})
        except (BrokenPipeError, ConnectionResetError):
            # Refused before the whole body was read, as for one that is too large: the answer says why.
            return connection, connection.getresponse()
        return connection, connection.getresponse()
    except BaseException:
        connection.close()
        raise


def read(response: HTTPResponse) -> Answer:
    """Read the rest of an answer. Raises: OSError, HTTPException."""
    return Answer(response.status, {name.lower(): value for name, value in response.getheaders()}, response.read())


def encode_query(query: dict[str, Any] | None) -> str:
    """Return `?a=b&c=true`; None values are left out."""
    pairs = {key: _query_value(value) for key, value in (query or {}).items() if value is not None}
    return f"?{urlencode(pairs)}" if pairs else ""


def error_of(answer: Answer) -> CortexError:
    """Return the error that an answer of the operator names."""
    try:
        data = json.loads(answer.body)
    except ValueError:
        data = {}
    if not isinstance(data, dict):
        data = {}
    message = str(data.get("error") or data.get("detail") or f"the operator answered with status {answer.status}")
    code = data.get("code")
    if code == ConfigError.code and data.get("diagnostics"):
        return ConfigError([_diagnostic(item) for item in data["diagnostics"]])
    for kind in _classes(CortexError):
        if kind is not ConfigError and kind.code == code:
            traceback = str(data.get("traceback") or "")
            return kind(message, traceback) if issubclass(kind, UserError) else kind(message)
    return _by_status(answer.status)(message)


def reason(error: Exception) -> str:
    """Return the few words that name a network error."""
    if isinstance(error, TimeoutError):
        return "timed out"
    if isinstance(error, HTTPException):
        return str(error) or type(error).__name__
    return (getattr(error, "strerror", None) or str(error) or type(error).__name__).lower()


def _query_value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _diagnostic(data: dict[str, Any]) -> Diagnostic:
    return Diagnostic(
        str(data.get("file", "")),
        int(data.get("line", 0)),
        int(data.get("column", 0)),
        str(data.get("path", "")),
        str(data.get("message", "")),
        str(data.get("fix", "")),
    )


def _classes(base: type[CortexError]) -> Iterator[type[CortexError]]:
    yield base
    for kind in base.__subclasses__():
        yield from _classes(kind)


def _by_status(status: int) -> type[CortexError]:
    """Return the class for an answer without a known code: one from a proxy, or from another version."""
    for kind in _classes(InputError):
        if kind is not ConfigError and kind.http_status == status and status != InputError.http_status:
            return kind
    return InputError if status < 500 else CortexError
