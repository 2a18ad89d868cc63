"""Requests to replicas of applications, as the gateway sends them, and a client of their WebSockets."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from harness.replicas.replicas import Answer, Replica
from harness.wait import PATIENCE_S

if TYPE_CHECKING:
    from wsproto.events import Event

ENDPOINT = "/app"
FROM_GATEWAY = {
    "host": "example.com",
    "x-cortex-endpoint": ENDPOINT,
    "x-forwarded-proto": "https",
    "x-forwarded-host": "example.com",
    "x-forwarded-for": "192.0.2.7",
}


def ask(replica: Replica, path: str, method: str = "GET", body: bytes = b"", **headers: str) -> Answer:
    """Send a request below the endpoint."""
    return replica.request(method=method, path=ENDPOINT + path, body=body, headers=FROM_GATEWAY | headers)


class WebSocket:
    """A client of one WebSocket, over a connected socket."""

    def __init__(self, sock: socket.socket, path: str, host: str = "example.com", **headers: str) -> None:
        from wsproto import ConnectionType, WSConnection, events

        self._sock = sock
        self._of = events
        self._protocol = WSConnection(ConnectionType.CLIENT)
        self._events: list[Event] = []
        extra = [(name.encode(), value.encode()) for name, value in headers.items()]
        self._sock.sendall(self._protocol.send(self._of.Request(host=host, target=path, extra_headers=extra)))
        self.answer = self.next()  #: AcceptConnection, or RejectConnection

    @property
    def is_open(self) -> bool:
        return isinstance(self.answer, self._of.AcceptConnection)

    def refusal(self) -> tuple[int, bytes]:
        """Return the status and the body of the response that refused the WebSocket."""
        assert isinstance(self.answer, self._of.RejectConnection), self.answer
        body = b""
        while isinstance(event := self.next(), self._of.RejectData):
            body += event.data
            if event.body_finished:
                break
        return self.answer.status_code, body

    def send(self, data: str | bytes) -> None:
        event = self._of.TextMessage(data) if isinstance(data, str) else self._of.BytesMessage(data)
        self._sock.sendall(self._protocol.send(event))

    def receive(self) -> str | bytes:
        """Return the next message."""
        received: list[Any] = []
        while True:
            event = self.next()
            assert isinstance(event, self._of.TextMessage | self._of.BytesMessage), event
            received.append(event.data)
            if event.message_finished:
                return received[0][:0].join(received)  # type: ignore[no-any-return]

    def close(self, code: int = 1000) -> None:
        self._sock.sendall(self._protocol.send(self._of.CloseConnection(code)))

    def closed(self) -> tuple[int, str]:
        """Wait for the close frame; return its code and its reason, and reply to it."""
        event = self.next()
        assert isinstance(event, self._of.CloseConnection), event
        if self._protocol.state.name == "REMOTE_CLOSING":
            with contextlib.suppress(OSError):  # the server may not wait for it
                self._sock.sendall(self._protocol.send(event.response()))
        return event.code, event.reason or ""

    def next(self) -> Event:
        """Return the next event; pings are answered."""
        while True:
            while not self._events:
                data = self._sock.recv(65536)
                assert data, "the connection was closed without a close frame"
                self._protocol.receive_data(data)
                self._events += self._protocol.events()
            event = self._events.pop(0)
            if not isinstance(event, self._of.Ping):
                return event
            self._sock.sendall(self._protocol.send(event.response()))


@contextlib.contextmanager
def websocket(replica: Replica, path: str) -> Iterator[WebSocket]:
    """Open a WebSocket of a replica, without a gateway."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(PATIENCE_S)
        sock.connect(replica.spec.sockets[0])
        forwarded = {name: value for name, value in FROM_GATEWAY.items() if name != "host"}
        yield WebSocket(sock, ENDPOINT + path, **forwarded)
