"""Malformed requests: pure, from a random generator to bytes; independent of the server."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

_METHODS = (
    "GET",
    "POST",
    "PUT",
    "DELETE",
    "HEAD",
    "OPTIONS",
    "TRACE",
    "CONNECT",
    "PATCH",
    "get",
    "P\x00ST",
    "X" * 300,
    "",
)
_VERSIONS = ("HTTP/1.1", "HTTP/1.0", "HTTP/0.9", "HTTP/2.0", "HTTP/1.1.1", "HTTP/", "", "HTTP/99999999999.1")
_CONTENT_TYPES = (
    "application/json",
    "application/json; charset=utf-16",
    "application/json; charset=nonsense",
    "text/plain",
    "text/plain; charset=\xff",
    "multipart/form-data",
    "multipart/form-data; boundary=",
    "multipart/form-data; boundary=edge",
    "application/x-www-form-urlencoded",
    "application/octet-stream",
    "/",
    ";;;",
    "",
)
_LENGTHS = ("-1", "0", "1", "99999999999999999999", "0x10", "1e3", "1, 2", " 8 ", "+8", "", "8\x00", "٨")
_CHUNK_SIZES = (b"-1", b"zz", b"ffffffffffffffffff", b"", b"5;ext=" + b"x" * 3000, b"0x5", b" 5", b"5 ")
_HEADERS = (
    "Expect: 100-continue",
    "Expect: nonsense",
    "Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAMAAABkAAQAAP__",
    "Upgrade: websocket\r\nConnection: Upgrade",
    "Connection: close",
    "Connection: keep-alive, close, content-length",
    "Transfer-Encoding: chunked",
    "Transfer-Encoding: gzip, chunked",
    "Transfer-Encoding: identity",
    "Transfer-Encoding : chunked",
    "Content-Encoding: gzip",
    "Host: a\r\nHost: b",
    "no colon here",
    ": no name",
    "Folded: one\r\n two",
    "X-Null: \x00",
    "X-Long: " + "a" * 9000,
    "x-cortex-request-id: forged",
    "x-cortex-deadline: 0",
    "\r\n".join(f"X-Many-{index}: {index}" for index in range(150)),
)


def request(rng: random.Random, path: str) -> bytes:
    """Return bytes to send on one connection: a request that is wrong, or right but odd."""
    kinds: tuple[Callable[[random.Random, str], bytes], ...] = (
        _odd_body,
        _odd_body,
        _odd_head,
        _odd_head,
        _mutated,
        _mutated,
        _chunked,
        _truncated,
        _pipelined,
        _noise,
    )
    return rng.choice(kinds)(rng, path)


def _message(head: list[str], body: bytes) -> bytes:
    return ("\r\n".join(head) + "\r\n\r\n").encode("utf-8", "surrogateescape") + body


def _odd_body(rng: random.Random, path: str) -> bytes:
    """A well-formed request with an unexpected body."""
    body = rng.choice(_BODIES)(rng)
    head = [f"POST {path}{rng.choice(_QUERIES)} HTTP/1.1", "Host: x"]
    head += [f"Content-Type: {rng.choice(_CONTENT_TYPES)}", f"Content-Length: {len(body)}"]
    return _message(head, body)


def _odd_head(rng: random.Random, path: str) -> bytes:
    """A request line, headers and lengths that contradict each other or the standard."""
    targets = (
        path,
        "",
        "*",
        "//" + path,
        path + "/../../etc/passwd",
        "http://other" + path,
        "/" + "a" * 20_000,
        path + "\x00",
    )
    head = [f"{rng.choice(_METHODS)} {rng.choice(targets)} {rng.choice(_VERSIONS)}"]
    head += rng.sample(_HEADERS, rng.randint(0, 4))
    head += [f"Content-Length: {rng.choice(_LENGTHS)}" for _ in range(rng.randint(0, 2))]
    rng.shuffle(head[1:])
    return _message(head, b'{"x": 1}')


def _mutated(rng: random.Random, path: str) -> bytes:
    """A good request with some bytes changed, lost, doubled or put in."""
    data = bytearray(_good(path))
    for _ in range(rng.randint(1, 8)):
        at = rng.randrange(len(data))
        action = rng.randrange(4)
        if action == 0:
            data[at] = rng.randrange(256)
        elif action == 1:
            del data[at : at + rng.randint(1, 4)]
        elif action == 2:
            data[at:at] = data[at : at + rng.randint(1, 20)]
        else:
            data[at:at] = rng.choice((b"\r", b"\n", b"\r\n", b"\x00", b" ", b"\t", b"\xff\xfe"))
        if not data:
            return b"\r\n"
    return bytes(data)


def _chunked(rng: random.Random, path: str) -> bytes:
    """A chunked body that breaks off, lies about sizes, or comes with a length too."""
    head = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", "Transfer-Encoding: chunked"]
    if rng.random() < 0.3:
        head.append("Content-Length: 5")
    body = b""
    for _ in range(rng.randint(0, 4)):
        data = rng.randbytes(rng.randint(0, 40))
        size = rng.choice(_CHUNK_SIZES) if rng.random() < 0.3 else b"%x" % len(data)
        body += size + b"\r\n" + data + rng.choice((b"\r\n", b"\r\n", b"\n", b""))
    return _message(head, body + rng.choice((b"0\r\n\r\n", b"0\r\nTrailer: x\r\n\r\n", b"0\r\n", b"")))


def _truncated(rng: random.Random, path: str) -> bytes:
    data = _good(path)
    return data[: rng.randint(1, len(data) - 1)]


def _pipelined(rng: random.Random, path: str) -> bytes:
    """Several requests at once, some of them bad."""
    others = (_odd_head, _mutated, _chunked)
    return b"".join(
        _good(path) if rng.random() < 0.6 else rng.choice(others)(rng, path) for _ in range(rng.randint(2, 6))
    )


def _noise(rng: random.Random, path: str) -> bytes:
    """Not HTTP at all, or of another version."""
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    tls = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"
    return rng.choice((b"", preface, tls, b"\r\n" * 50, b"\x00" * 100)) + rng.randbytes(rng.randint(0, 400))


def _good(path: str) -> bytes:
    return _message(
        [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", "Content-Length: 8"], b'{"x": 1}'
    )


_QUERIES = ("", "", "?", "?a=1&a=2", "?%zz=%", "?" + "q" * 5000, "?%00", "?a=%ff%fe", "?=&&=")
_BODIES: tuple[Callable[[random.Random], bytes], ...] = (
    lambda rng: rng.randbytes(rng.randint(0, 2000)),
    lambda rng: b"[" * rng.randint(1, 50_000),
    lambda rng: b"[" * 2000 + b"]" * 2000,
    lambda rng: b'{"x": ' + b"9" * rng.randint(1, 5000) + b"}",
    lambda rng: rng.choice(
        (b"NaN", b"null", b"true", b'""', b"{}", b"[]", b"1e999", b'"\\ud800"', b'{"x"', b"\xef\xbb\xbf{}")
    ),
    lambda rng: b'{"x": "' + bytes(rng.choices(range(0x80, 0x100), k=20)) + b'"}',
    lambda rng: json.dumps({"x": "\x00" * rng.randint(0, 50)}).encode(),
    lambda rng: b'--edge\r\nContent-Disposition: form-data; name="f"; filename="../../x"\r\n\r\n' + rng.randbytes(50),
    lambda rng: b"--edge--\r\n" * rng.randint(0, 5),
    lambda rng: b"a=%zz&=&&b" + b"&c=d" * rng.randint(0, 2000),
)
