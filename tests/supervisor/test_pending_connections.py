"""Admission of TCP connections with real sockets and an event loop of the test."""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cortex.processes.sockets import accept_one, address_of, listen_over_tcp
from cortex.supervisor import pending_connections as module
from cortex.supervisor.pending_connections import HEAD_LIMIT_S, HEAD_MAX_BYTES, PendingConnections, Verdict, check_head

SECRET = "5ec2e7"
HEAD = b"POST /x?y=1 HTTP/1.1\r\nhost: gateway\r\nx-cortex-gateway: 5ec2e7\r\ncontent-length: 3\r\n\r\n"
BARE = HEAD.replace(b"x-cortex-gateway: 5ec2e7\r\n", b"")
PATIENCE_S = 20.0


@dataclass
class Acceptor:
    """A listener, its pending connections and a loop like that of the supervisor."""

    limit: int = 256
    admitted: list[socket.socket] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.listener = listen_over_tcp("127.0.0.1")
        self.selector = selectors.DefaultSelector()
        self.pending = PendingConnections(
            SECRET, self.admitted.append, self._watch, self.selector.unregister, self.limit
        )
        self._watch(self.listener.fileno(), self._accept)
        self.clients: list[socket.socket] = []

    def _watch(self, fd: int, callback: Callable[[], object]) -> None:
        self.selector.register(fd, selectors.EVENT_READ, callback)

    def _accept(self) -> None:
        while (sock := accept_one(self.listener)) is not None:
            sock.setblocking(False)
            self.pending.add(sock)

    def connect(self, data: bytes = b"") -> socket.socket:
        client = socket.create_connection(self.listener.getsockname())
        client.settimeout(PATIENCE_S)
        self.clients.append(client)
        client.sendall(data)
        return client

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline
            self.poll_once()

    def poll_once(self) -> None:
        for key, _ in self.selector.select(0.01):
            key.data()
        self.pending.tick(time.monotonic())

    def pass_time(self, seconds: float) -> None:
        self.pending.tick(time.monotonic() + seconds)

    def close(self) -> None:
        self.pending.close()
        for sock in (*self.admitted, *self.clients, self.listener):
            sock.close()
        self.selector.close()


@contextlib.contextmanager
def open_acceptor(limit: int = 256) -> Iterator[Acceptor]:
    made = Acceptor(limit)
    try:
        yield made
    finally:
        made.close()


def has_data(sock: socket.socket) -> bool:
    return bool(select.select([sock], [], [], 0)[0])


def read_all(sock: socket.socket) -> bytes:
    received = b""
    while data := sock.recv(65536):
        received += data
    return received


@pytest.mark.parametrize(
    ("data", "verdict"),
    [
        (HEAD, Verdict.ADMITTED),
        (HEAD + b"abc" + HEAD, Verdict.ADMITTED),
        (HEAD.replace(b"x-cortex-gateway: ", b"X-Cortex-Gateway:  "), Verdict.ADMITTED),
        (HEAD[:-1], Verdict.INCOMPLETE),
        (b"P", Verdict.INCOMPLETE),
        (b"POST /x HTTP/1.1\r", Verdict.INCOMPLETE),
        (BARE, Verdict.NO_SECRET),
        (BARE + HEAD, Verdict.NO_SECRET),
        (HEAD.replace(b"5ec2e7", b"5ec2e8"), Verdict.NO_SECRET),
        (HEAD.replace(b"5ec2e7", b""), Verdict.NO_SECRET),
        (HEAD.replace(b"5ec2e7", b"5ec2e7, 5ec2e7"), Verdict.NO_SECRET),
        (HEAD.replace(b"5ec2e7", b"\xff\xfe"), Verdict.NO_SECRET),
        (HEAD.replace(b"host: gateway", b"x-cortex-gateway: 5ec2e7"), Verdict.NO_SECRET),
        (HEAD.replace(b"host: gateway", b"x-cortex-gateway: wrong"), Verdict.NO_SECRET),
        (BARE.replace(b"/x?y=1", b"/x-cortex-gateway:5ec2e7"), Verdict.NO_SECRET),
        (b"\r\n" + HEAD, Verdict.NOT_HTTP),
        (b"hello\r\n\r\n", Verdict.NOT_HTTP),
        (b"POST  HTTP/1.1\r\n", Verdict.NOT_HTTP),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", Verdict.NOT_HTTP),
        (b"\x16\x03\x01\x02\x00", Verdict.NOT_HTTP),
        (b"A" * 33, Verdict.NOT_HTTP),
        (b"GET /" + b"x" * HEAD_MAX_BYTES, Verdict.TOO_LONG),
    ],
    ids=range(22),
)
def test_a_head_must_contain_the_secret_exactly_once(data: bytes, verdict: Verdict) -> None:
    assert check_head(data, SECRET.encode()) is verdict


def test_any_complete_head_is_admitted_without_a_secret() -> None:
    assert check_head(BARE, b"") is Verdict.ADMITTED
    assert check_head(BARE[:-1], b"") is Verdict.INCOMPLETE


@given(st.binary(max_size=2000) | st.binary(max_size=500).map(lambda data: b"GET / HTTP/1.1\r\n" + data + b"\r\n\r\n"))
@settings(max_examples=5 * settings().max_examples)
def test_no_other_data_is_admitted(data: bytes) -> None:
    assert check_head(data, SECRET.encode()) is not Verdict.ADMITTED or b"5ec2e7" in data


def test_an_admitted_socket_is_unread_and_has_default_options() -> None:
    with open_acceptor() as made:
        made.connect(HEAD + b"abc")
        made.until(lambda: made.admitted)
        sock = made.admitted[0]
        assert sock.recv(65536) == HEAD + b"abc"
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == 1
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) < 60
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000
        assert len(made.pending) == 0


@pytest.mark.parametrize("size", [1, 7, 40])
def test_a_head_in_pieces_is_admitted_once_it_is_complete(size: int) -> None:
    with open_acceptor() as made:
        client = made.connect()
        for start in range(0, len(HEAD), size):
            assert not made.admitted
            client.sendall(HEAD[start : start + size])
            made.poll_once()
        made.until(lambda: made.admitted)
        assert made.admitted[0].recv(65536) == HEAD


def test_a_head_that_fills_the_buffers_is_admitted() -> None:
    long = HEAD.replace(b"/x", b"/" + b"x" * (HEAD_MAX_BYTES - 1024))
    with open_acceptor() as made:
        client = made.connect()
        client.setblocking(False)
        sent = 0

        def send() -> bool:
            nonlocal sent
            with contextlib.suppress(BlockingIOError):
                sent += client.send(long[sent:])
            return bool(made.admitted)

        made.until(send)
        assert len(made.admitted) == 1


@pytest.mark.parametrize(
    ("data", "status"),
    [(BARE, 401), (HEAD.replace(b"5ec2e7", b"no"), 401), (b"\x16\x03\x01", 400), (os.urandom(16) + b"\n", 400)],
    ids=["no secret", "another secret", "TLS", "noise"],
)
def test_a_refused_client_gets_a_response_and_is_closed(data: bytes, status: int) -> None:
    with open_acceptor() as made:
        client = made.connect(data)
        made.until(lambda: has_data(client))
        answer = read_all(client)
        assert answer.startswith(b"HTTP/1.1 %d " % status)
        assert b"connection: close" in answer
        assert b'{"error": "' in answer
        made.pass_time(HEAD_LIMIT_S)
        assert not len(made.pending)
        assert not made.admitted


def test_a_tls_client_fails_at_once() -> None:
    with open_acceptor() as made:
        context = ssl.create_default_context()
        tls = context.wrap_bio(incoming := ssl.MemoryBIO(), outgoing := ssl.MemoryBIO(), server_hostname="replica")
        with pytest.raises(ssl.SSLWantReadError):
            tls.do_handshake()
        client = made.connect(outgoing.read())
        made.until(lambda: has_data(client))
        incoming.write(read_all(client))
        with pytest.raises(ssl.SSLError):
            tls.do_handshake()


def test_a_connection_without_a_head_is_closed_after_the_time_limit() -> None:
    with open_acceptor() as made:
        silent, slow = made.connect(), made.connect(HEAD[:20])
        made.until(lambda: len(made.pending) == 2)
        made.pass_time(HEAD_LIMIT_S - 5)
        assert len(made.pending) == 2
        made.pass_time(HEAD_LIMIT_S)
        assert not len(made.pending)
        assert silent.recv(1) == b""
        with contextlib.suppress(ConnectionResetError):  # the data was not read
            assert slow.recv(1) == b""


def test_a_connection_closed_by_its_client_is_removed() -> None:
    with open_acceptor() as made:
        made.connect().close()
        half_open = made.connect(HEAD[:20])
        made.until(lambda: len(made.pending) == 1)
        half_open.shutdown(socket.SHUT_WR)
        made.until(lambda: not len(made.pending))


def test_beyond_the_limit_the_oldest_connection_is_closed() -> None:
    with open_acceptor(limit=3) as made:
        clients = [made.connect() for _ in range(3)]
        made.until(lambda: len(made.pending) == 3)
        made.connect(HEAD)
        made.until(lambda: made.admitted)
        assert clients[0].recv(1) == b""
        made.until(lambda: len(made.pending) == 2)


def test_waiting_for_the_rest_of_a_head_uses_no_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[bytes] = []

    def counting(data: bytes, secret: bytes) -> Verdict:
        looks.append(data)
        return check_head(data, secret)

    monkeypatch.setattr(module, "check_head", counting)
    with open_acceptor() as made:
        client = made.connect(HEAD[:20])
        made.until(lambda: len(made.pending))
        for _ in range(20):
            made.poll_once()
        assert len(looks) == 1
        client.sendall(HEAD[20:])
        made.until(lambda: made.admitted)
        assert len(looks) == 2


def test_addresses_include_their_port() -> None:
    for host in ("127.0.0.1", "::1"):
        with listen_over_tcp(host) as listener:
            port = listener.getsockname()[1]
            assert address_of(listener) == (f"[{host}]:{port}" if ":" in host else f"{host}:{port}")


def test_rejects_listening_on_an_address_of_another_machine() -> None:
    with pytest.raises(OSError, match="assign"):
        listen_over_tcp("192.0.2.1")
