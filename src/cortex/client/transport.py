"""HTTP to the operator and to APIs: one request, its answer, its errors as the classes of `cortex.errors`.

On `http.client`, because importing httpx takes a quarter of a second: more than a third of what a whole
`cortex deploy` may take. It also keeps proxies of the environment away from the loopback address.
"""

from __future__ import annotations

import json
import select
import socket
import ssl
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection, IncompleteRead
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
from cortex.tls import fingerprint_of

REQUEST_TIMEOUT_S = 60.0
#: Connecting to a machine that drops packets.
CONNECT_TIMEOUT_S = 10.0
#: A part of an upload may wait this long until the operator has stored what came before; so may the last answer.
UPLOAD_TIMEOUT_S = 300.0
_BLOCK_BYTES = 65536
#: How a gateway answers to the operator's routes.
_SAID_BY_GATEWAY = "no API has the path /v1/"
#: What OpenSSL says of a certificate (X509_V_ERR_…): its time is over; its names, or addresses, are others.
_EXPIRED, _OTHER_NAME = 10, (62, 64)


@dataclass(frozen=True)
class Trust:
    """Whose certificates are believed, and where their servers are found."""

    ca: str = ""  #: file of certificates; "": those that the system trusts
    #: Certificates, by their SHA-256, that alone are believed, whatever they say of themselves; read when one is shown.
    pins: Callable[[], Collection[str]] | None = None
    address: str = ""  #: where to connect to instead of where the name of a URL leads

    def context(self) -> ssl.SSLContext:
        """Return what connections are made with. Raises: OSError if the file of certificates can't be read."""
        context = ssl.create_default_context(cafile=self.ca or None)
        if self.pins is not None:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE  # `check` does it
        elif self.ca:
            # A certificate in the file is believed itself, not only as the last of a chain.
            context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        return context

    def check(self, sock: ssl.SSLSocket) -> None:
        """Believe the other side's certificate, or not. Raises: ssl.SSLCertVerificationError."""
        if self.pins is not None and fingerprint_of(sock.getpeercert(binary_form=True) or b"") not in self.pins():
            raise _OtherCertificateError


class _OtherCertificateError(ssl.SSLCertVerificationError):
    """The certificate is none of those that alone are believed."""


SYSTEM = Trust()


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
    trust: Trust = SYSTEM

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
            answer = send(method, self.url + path + encode_query(query), body, headers, timeout_s, self.trust)
        except (OSError, HTTPException) as error:
            raise self._unavailable(error) from None
        if answer.status >= 400:
            raise self._refused(answer)
        return answer.json() if answer.body else None

    def upload(
        self, method: str, path: str, chunks: Iterable[bytes], *, query: dict[str, Any] | None = None, content_type: str
    ) -> Answer:
        """Send a body of any length as it comes and return the answer, which may be given before its end.

        What `chunks` raises ends the request, whose body is then known to be incomplete. Raises: as `call`.
        """
        url = self.url + path + encode_query(query)
        with self._reached():
            connection = _connect(url, UPLOAD_TIMEOUT_S, self.trust)
        try:
            with self._reached():
                _begin_upload(connection, method, url, self._headers(b"", content_type))
            for chunk in chunks:  # what these raise is no trouble with the operator
                with self._reached():
                    if chunk and not _send(connection, b"%x\r\n%b\r\n" % (len(chunk), chunk)):
                        break
            else:
                with self._reached():
                    _send(connection, b"0\r\n\r\n")
            with self._reached():
                answer = read(connection.getresponse())
        finally:
            connection.close()
        if answer.status >= 400:
            raise self._refused(answer)
        return answer

    def blocks(
        self, path: str, query: dict[str, Any] | None = None, method: str = "GET", body: bytes | None = None
    ) -> Iterator[bytes]:
        """Yield an answer's body as it comes, in blocks of bounded size. Raises: as `call`."""
        try:
            headers = self._headers(body, "application/json")
            url = self.url + path + encode_query(query)
            connection, response = open_response(method, url, body, headers, None, self.trust)
        except (OSError, HTTPException) as error:
            raise self._unavailable(error) from None
        try:
            if response.status >= 400:
                raise self._refused(read(response))
            while block := response.read1(_BLOCK_BYTES):
                yield block
        except (OSError, HTTPException) as error:
            raise OperatorUnavailableError(f"the operator at {self.url} went away ({reason(error)})") from None
        finally:
            connection.close()

    def raw_lines(
        self, path: str, query: dict[str, Any] | None = None, method: str = "GET", body: bytes | None = None
    ) -> Iterator[bytes]:
        """Yield the lines of an answer as they come, without their ends. Raises: as `call`."""
        begun: list[bytes] = []  # what came of the line that is not at its end
        for block in self.blocks(path, query, method, body):
            first, *others = block.split(b"\n")
            begun.append(first)
            if others:
                yield b"".join(begun)
                yield from others[:-1]
                begun = [others[-1]]
        if last := b"".join(begun):
            yield last

    def lines(
        self, path: str, query: dict[str, Any] | None = None, method: str = "GET", body: bytes | None = None
    ) -> Iterator[str]:
        """As `raw_lines`, of text."""
        for line in self.raw_lines(path, query, method, body):
            yield line.decode(errors="replace").rstrip("\r")

    @contextmanager
    def _reached(self) -> Iterator[None]:
        try:
            yield
        except (OSError, HTTPException) as error:
            raise self._unavailable(error) from None

    def _headers(self, body: bytes | None, content_type: str) -> dict[str, str]:
        headers = {"authorization": f"Bearer {self.token}"}
        return headers | ({"content-type": content_type} if body is not None else {})

    def _refused(self, answer: Answer) -> CortexError:
        error = error_of(answer)
        if answer.status == 404 and str(error).startswith(_SAID_BY_GATEWAY):
            return InputError(f"{self.url} is the address of a gateway, give that of its operator; {self.hint}")
        return error

    def _unavailable(self, error: Exception) -> OperatorUnavailableError:
        if isinstance(error, ssl.SSLError):
            return OperatorUnavailableError(f"the operator at {self.url}: {distrust(error)}")
        hint = self.hint
        if self.url.startswith("http://") and isinstance(error, ConnectionResetError):
            hint += "; if it speaks TLS, write its address with https://"
        return OperatorUnavailableError(f"the operator at {self.url} does not answer ({reason(error)}); {hint}")


def send(
    method: str, url: str, body: bytes | None, headers: dict[str, str], timeout_s: float, trust: Trust = SYSTEM
) -> Answer:
    """Send one request and read the whole answer. Raises: OSError, HTTPException."""
    connection, response = open_response(method, url, body, headers, timeout_s, trust)
    try:
        return read(response)
    finally:
        connection.close()


def open_response(
    method: str, url: str, body: bytes | None, headers: dict[str, str], timeout_s: float | None, trust: Trust = SYSTEM
) -> tuple[HTTPConnection, HTTPResponse]:
    """Send one request and return its connection, to be closed by the caller, and its answer as it begins to come.

    Without `timeout_s` the answer may take for ever. Raises: OSError, HTTPException.
    """
    connection = _connect(url, timeout_s, trust)
    try:
        try:
            connection.request(method, _target(url), body, {"connection": "close", **headers})
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
    said = data.get("error") or data.get("detail") or _plain_text(answer)
    message = str(said or f"the operator answered with status {answer.status}")
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
    if isinstance(error, IncompleteRead):
        return "the connection broke"
    if isinstance(error, HTTPException):
        return str(error) or type(error).__name__
    return (getattr(error, "strerror", None) or str(error) or type(error).__name__).lower()


def distrust(error: ssl.SSLError) -> str:
    """Say why the other side is not spoken to, and what to do about it."""
    if isinstance(error, ssl.SSLCertVerificationError):
        if isinstance(error, _OtherCertificateError):
            return "its certificate is not that of this machine's operator; `cortex down`, then `cortex up`"
        fix = (
            "if it is signed by an authority of your own, or by itself, name the file of that certificate with"
            " `cortex env configure ENV --ca FILE`"
        )
        if error.verify_code == _EXPIRED:
            fix = "it must be renewed where the operator runs"
        elif error.verify_code in _OTHER_NAME:
            fix = "use an address that the certificate names"
        return f"its certificate is not to be trusted ({error.verify_message}); {fix}"
    if error.reason == "WRONG_VERSION_NUMBER":
        return "it does not speak TLS; write its address with http://"
    return f"TLS with it fails ({reason(error)})"


def _connect(url: str, timeout_s: float | None, trust: Trust) -> HTTPConnection:
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
        # A follower of logs on a machine that vanished would otherwise wait for ever.
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
    """Send a part of a body; return whether the other side still reads it. Raises: OSError."""
    # An answer before the end is a refusal. Of what is encrypted, readable bytes need not be an answer.
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
    yield base
    for kind in base.__subclasses__():
        yield from _classes(kind)


def _by_status(status: int) -> type[CortexError]:
    """Return the class for an answer without a known code: one from a proxy, or from another version."""
    for kind in _classes(InputError):
        if kind is not ConfigError and kind.http_status == status and status != InputError.http_status:
            return kind
    return InputError if status < 500 else CortexError
