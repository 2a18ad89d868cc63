"""HTTP client for the operator and for APIs; raises errors as the classes of `cortex.errors`.

Built on `http.client`, because importing httpx takes 250 ms, more than a third of the time of a whole `cortex deploy`.
Moreover, `http.client` ignores proxy settings, which must not apply to the loopback address.
"""

from __future__ import annotations

import getpass
import json
import select
import socket
import ssl
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection, IncompleteRead
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode, urlsplit

from cortex.errors import (
    ConfigError,
    CortexError,
    Diagnostic,
    InputError,
    OperatorUnavailableError,
    UserError,
)
from cortex.tls import fingerprint_of

if TYPE_CHECKING:
    from cortex.client.environments import Environment

REQUEST_TIMEOUT_S = 60.0
#: Applies to hosts that drop packets.
CONNECT_TIMEOUT_S = 10.0
#: Maximum time in which the operator stores a part of an upload, or responds after the last one.
UPLOAD_TIMEOUT_S = 300.0
_BLOCK_BYTES = 65536
#: Start of a gateway's response to the operator's routes.
_GATEWAY_NOT_FOUND = "no API has the path /v1/"
#: X509_V_ERR_CERT_HAS_EXPIRED; X509_V_ERR_HOSTNAME_MISMATCH and X509_V_ERR_IP_ADDRESS_MISMATCH of OpenSSL.
_EXPIRED, _NAME_MISMATCH = 10, (62, 64)


@dataclass(frozen=True)
class Trust:
    """Certificates that a client accepts, and the address of the server."""

    ca: str = ""  #: file of CA certificates; "": those of the system
    #: Returns the SHA-256 fingerprints of the only accepted certificates; neither names nor CAs are checked then.
    pins: Callable[[], Collection[str]] | None = None
    address: str = ""  #: connect to this address instead of the host of the URL

    def context(self) -> ssl.SSLContext:
        """Return the TLS context for connections. Raises: OSError if the file of certificates can't be read."""
        context = ssl.create_default_context(cafile=self.ca or None)
        if self.pins is not None:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE  # `check` verifies the fingerprint instead
        elif self.ca:
            # Accept each certificate in the file as a trust anchor, not only self-signed roots.
            context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        return context

    def check(self, sock: ssl.SSLSocket) -> None:
        """Verify the fingerprint of the server's certificate. Raises: ssl.SSLCertVerificationError."""
        if self.pins is not None and fingerprint_of(sock.getpeercert(binary_form=True) or b"") not in self.pins():
            raise _UnknownCertificateError


class _UnknownCertificateError(ssl.SSLCertVerificationError):
    """The server's certificate has none of the accepted fingerprints."""


SYSTEM_TRUST = Trust()


@dataclass(frozen=True)
class Answer:
    """Complete HTTP response."""

    status: int
    headers: dict[str, str]  #: names in lower case
    body: bytes

    def json(self) -> Any:
        """Return the decoded body. Raises: CortexError if it is not JSON."""
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError):
            raise CortexError(f"the response is not JSON (status {self.status}): {self.body[:200]!r}") from None


@dataclass(frozen=True)
class Transport:
    """HTTP requests to one operator. Thread-safe: each request opens its own connection."""

    url: str
    token: str = ""
    hint: str = "start it with `cortex up`"  #: advice of the error when the operator does not answer
    trust: Trust = SYSTEM_TRUST

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
        """Return the JSON of the operator's response. Raises: the error in the response; OperatorUnavailableError."""
        headers = self._headers(body, content_type)
        try:
            answer = send(method, self.url + path + encode_query(query), body, headers, timeout_s, self.trust)
        except (OSError, HTTPException) as error:
            raise self._unavailable(error) from None
        self._check(answer)
        try:
            return json.loads(answer.body) if answer.body else None
        except (ValueError, RecursionError):
            raise self._not_an_operator(f"its response is not JSON: {answer.body[:100]!r}") from None

    def upload(
        self, method: str, path: str, chunks: Iterable[bytes], *, query: dict[str, Any] | None = None, content_type: str
    ) -> Answer:
        """Stream a body of any length and return the response, which the operator may send before the end of the body.

        If `chunks` raises, the connection is closed without a final chunk, so the operator discards the request.
        Raises: like `call`.
        """
        url = self.url + path + encode_query(query)
        with self._connection_errors():
            connection = open_connection(url, UPLOAD_TIMEOUT_S, self.trust)
        try:
            with self._connection_errors():
                _begin_upload(connection, method, url, self._headers(b"", content_type))
            for chunk in chunks:  # outside of `_connection_errors`: errors of `chunks` pass unchanged
                with self._connection_errors():
                    if chunk and not _send(connection, b"%x\r\n%b\r\n" % (len(chunk), chunk)):
                        break
            else:
                with self._connection_errors():
                    _send(connection, b"0\r\n\r\n")
            with self._connection_errors():
                answer = read(connection.getresponse())
        finally:
            connection.close()
        self._check(answer)
        return answer

    def blocks(
        self, path: str, query: dict[str, Any] | None = None, method: str = "GET", body: bytes | None = None
    ) -> Iterator[bytes]:
        """Yield the body of a response in blocks of bounded size as they arrive. Raises: like `call`."""
        try:
            headers = self._headers(body, "application/json")
            url = self.url + path + encode_query(query)
            connection, response = open_response(method, url, body, headers, None, self.trust)
        except (OSError, HTTPException) as error:
            raise self._unavailable(error) from None
        try:
            if response.status >= 300:
                self._check(read(response))
            elif _is_html(response.headers.get("content-type", "")):
                raise self._not_an_operator("it answered with HTML")
            while block := response.read1(_BLOCK_BYTES):
                yield block
        except (OSError, HTTPException) as error:
            raise OperatorUnavailableError(
                f"the operator at {self.url} closed the connection ({describe_error(error)})"
            ) from None
        finally:
            connection.close()

    def raw_lines(
        self, path: str, query: dict[str, Any] | None = None, method: str = "GET", body: bytes | None = None
    ) -> Iterator[bytes]:
        """Yield the lines of a response as they arrive, without line ends. Raises: like `call`."""
        partial: list[bytes] = []  # parts of a line whose end has not arrived
        for block in self.blocks(path, query, method, body):
            first, *others = block.split(b"\n")
            partial.append(first)
            if others:
                yield b"".join(partial)
                yield from others[:-1]
                partial = [others[-1]]
        if last := b"".join(partial):
            yield last

    def lines(
        self, path: str, query: dict[str, Any] | None = None, method: str = "GET", body: bytes | None = None
    ) -> Iterator[str]:
        """Like `raw_lines`, as text."""
        for line in self.raw_lines(path, query, method, body):
            yield line.decode(errors="replace").rstrip("\r")

    @contextmanager
    def _connection_errors(self) -> Iterator[None]:
        try:
            yield
        except (OSError, HTTPException) as error:
            raise self._unavailable(error) from None

    def _headers(self, body: bytes | None, content_type: str) -> dict[str, str]:
        headers = {"authorization": f"Bearer {self.token}", "x-cortex-user": _user()}
        return headers | ({"content-type": content_type} if body is not None else {})

    def _check(self, answer: Answer) -> None:
        """Raises: the error in the response; InputError if no operator sends such a response."""
        if answer.status >= 400:
            raise self._error(answer)
        if answer.status >= 300:
            where = answer.headers.get("location")
            raise self._not_an_operator(f"it answered with status {answer.status}{f' to {where}' if where else ''}")

    def _not_an_operator(self, what: str) -> InputError:
        return InputError(f"{self.url} is not a cortex operator: {what}; {self.hint}")

    def _error(self, answer: Answer) -> CortexError:
        if answer.status < 500 and _is_html(answer.headers.get("content-type", "")):
            return self._not_an_operator(f"it answered with status {answer.status} and HTML")
        error = error_of(answer)
        if answer.status == 404 and str(error).startswith(_GATEWAY_NOT_FOUND):
            return InputError(f"{self.url} is the address of a gateway; use the address of its operator; {self.hint}")
        return error

    def _unavailable(self, error: Exception) -> OperatorUnavailableError:
        if isinstance(error, ssl.SSLError):
            return OperatorUnavailableError(f"the operator at {self.url}: {describe_tls_error(error)}")
        hint = self.hint
        if self.url.startswith("http://") and isinstance(error, ConnectionResetError):
            hint += "; if it uses TLS, its address begins with https://"
        return OperatorUnavailableError(f"the operator at {self.url} does not answer ({describe_error(error)}); {hint}")


class OperatorClient:
    """Base class of the parts of `Client`: calls of the operator's routes."""

    environment: Environment

    def _call(self, method: str, path: str, **options: Any) -> Any:
        return self.environment.connect().call(method, path, **options)

    def _object(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        found = self._call(method, path, **options)
        if not isinstance(found, dict):
            raise self._unreadable()
        return found

    def _objects(self, method: str, path: str, **options: Any) -> list[dict[str, Any]]:
        found = self._call(method, path, **options)
        if not (isinstance(found, list) and all(isinstance(item, dict) for item in found)):
            raise self._unreadable()
        return found

    def _unreadable(self) -> InputError:
        return InputError(unreadable(self.environment.operator_endpoint))


def unreadable(url: str) -> str:
    """Return the message about a server whose answers have another form than those of this version's operator."""
    return f"{url} is not a cortex operator, or one of another version: its answer has another form"


def send(
    method: str, url: str, body: bytes | None, headers: dict[str, str], timeout_s: float, trust: Trust = SYSTEM_TRUST
) -> Answer:
    """Send one request and read the whole response. Raises: OSError, HTTPException."""
    connection, response = open_response(method, url, body, headers, timeout_s, trust)
    try:
        return read(response)
    finally:
        connection.close()


def open_response(
    method: str,
    url: str,
    body: bytes | None,
    headers: dict[str, str],
    timeout_s: float | None,
    trust: Trust = SYSTEM_TRUST,
) -> tuple[HTTPConnection, HTTPResponse]:
    """Send one request; return the connection, which the caller must close, and the response before its body.

    Without `timeout_s`, there is no timeout. Raises: OSError, HTTPException.
    """
    connection = open_connection(url, timeout_s, trust)
    try:
        try:
            connection.request(method, _target(url), body, {"connection": "close", **headers})
        except (BrokenPipeError, ConnectionResetError):
            # The server rejected the request before it read the whole body, because it is too large, for example.
            return connection, connection.getresponse()
        return connection, connection.getresponse()
    except BaseException:
        connection.close()
        raise


def read(response: HTTPResponse) -> Answer:
    """Read the body of a response. Raises: OSError, HTTPException."""
    return Answer(response.status, {name.lower(): value for name, value in response.getheaders()}, response.read())


def api_path(api: str) -> str:
    """Return the path of an API's routes. Raises: InputError."""
    return f"/v1/apis/{path_segment(api, 'name of the API')}"


def path_segment(name: str, what: str) -> str:
    """Return a name as a segment of a path. Raises: InputError for one that proxies could take for another path."""
    if not name:
        raise InputError(f"the {what} is empty")
    if not {".", ".."}.isdisjoint(name.split("/")):
        raise InputError(f"{name} can't be the {what}")
    return quote(name, safe="")


def encode_query(query: dict[str, Any] | None) -> str:
    """Return a query string such as `?a=b&c=true`; None values are omitted."""
    pairs = {key: _query_value(value) for key, value in (query or {}).items() if value is not None}
    return f"?{urlencode(pairs)}" if pairs else ""


def error_of(answer: Answer) -> CortexError:
    """Return the error that a response of the operator contains."""
    try:
        data = json.loads(answer.body)
    except (ValueError, RecursionError):
        data = {}
    if not isinstance(data, dict):
        data = {}
    text = data.get("error") or data.get("detail") or _plain_text(answer)
    message = str(text or f"the operator answered with status {answer.status}")
    code = data.get("code")
    if code == ConfigError.code and data.get("diagnostics"):
        with suppress(ValueError, TypeError, AttributeError):  # no operator sends others
            return ConfigError([_diagnostic(item) for item in data["diagnostics"]])
    for kind in _classes(CortexError):
        if kind is not ConfigError and kind.code == code:
            traceback = str(data.get("traceback") or "")
            return kind(message, traceback) if issubclass(kind, UserError) else kind(message)
    return _by_status(answer.status)(message)


def describe_error(error: Exception) -> str:
    """Return a short description of a network error."""
    if isinstance(error, TimeoutError):
        return "timed out"
    if isinstance(error, IncompleteRead):
        return "incomplete response"
    if isinstance(error, HTTPException):
        return str(error) or type(error).__name__
    return (getattr(error, "strerror", None) or str(error) or type(error).__name__).lower()


def describe_tls_error(error: ssl.SSLError) -> str:
    """Describe a TLS error and how to correct it."""
    if isinstance(error, ssl.SSLCertVerificationError):
        if isinstance(error, _UnknownCertificateError):
            return "its certificate is not that of this machine's operator; run `cortex down`, then `cortex up`"
        fix = (
            "if it is self-signed or signed by a private CA, configure the certificate file with"
            " `cortex env configure ENV --ca FILE`"
        )
        if error.verify_code == _EXPIRED:
            fix = "renew it on the machine of the operator"
        elif error.verify_code in _NAME_MISMATCH:
            fix = "use an address that the certificate is valid for"
        return f"its certificate is not trusted ({error.verify_message}); {fix}"
    if error.reason == "WRONG_VERSION_NUMBER":
        return "it does not use TLS; its address begins with http://"
    return f"the TLS handshake failed ({describe_error(error)})"


@cache
def _user() -> str:
    """Return the name of the user for the operator's history, percent-encoded; empty if it is unknown."""
    try:
        return quote(getpass.getuser())
    except (KeyError, OSError):  # a container's user id without a name
        return ""


def open_connection(url: str, timeout_s: float | None, trust: Trust) -> HTTPConnection:
    """Connect to the host of a URL. Raises: OSError, ssl.SSLError."""
    parts = urlsplit(url)
    is_secure = parts.scheme == "https"
    host = parts.hostname or ""
    connection = (HTTPSConnection if is_secure else HTTPConnection)(host, parts.port, timeout=CONNECT_TIMEOUT_S)
    try:
        sock = socket.create_connection((trust.address or host, connection.port), CONNECT_TIMEOUT_S)
        connection.sock = sock
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if is_secure:
            connection.sock = secured = trust.context().wrap_socket(sock, server_hostname=host)
            trust.check(secured)
        connection.sock.settimeout(timeout_s)
        # Without keepalive, following logs would hang forever if the other machine disappeared.
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    except BaseException:
        connection.close()
        raise
    return connection


def _target(url: str) -> str:
    parts = urlsplit(url)
    return (parts.path or "/") + (f"?{parts.query}" if parts.query else "")


def _begin_upload(connection: HTTPConnection, method: str, url: str, headers: dict[str, str]) -> None:
    connection.putrequest(method, _target(url))
    for name, value in {"connection": "close", "transfer-encoding": "chunked", **headers}.items():
        connection.putheader(name, value)
    connection.endheaders()


def _send(connection: HTTPConnection, data: bytes) -> bool:
    """Send a part of a body; return whether the server still reads it. Raises: OSError."""
    # A response before the end of the body is an error response. With TLS, readable bytes may be protocol messages.
    if not isinstance(connection, HTTPSConnection):
        readable = select.poll()
        readable.register(connection.sock, select.POLLIN)
        if readable.poll(0):
            return False
    try:
        connection.sock.sendall(data)
    except (BrokenPipeError, ConnectionResetError):
        return False
    return True


def _is_html(content_type: str) -> bool:
    return content_type.lower().startswith(("text/html", "application/xhtml"))


def _plain_text(answer: Answer) -> str:
    is_text = answer.headers.get("content-type", "").startswith("text/plain")
    return answer.body.decode(errors="replace").strip() if is_text else ""


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
    """Return a class of `cortex.errors` and those that extend it; other modules' need more than a message."""
    yield base
    for kind in base.__subclasses__():
        if kind.__module__ == base.__module__:
            yield from _classes(kind)


def _by_status(status: int) -> type[CortexError]:
    """Return the error class for a response without a known code, from a proxy or another version."""
    for kind in _classes(InputError):
        if kind is not ConfigError and kind.http_status == status and status != InputError.http_status:
            return kind
    return InputError if status < 500 else CortexError
