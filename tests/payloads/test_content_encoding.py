"""Content codings of bodies: what is decoded, and what is refused before it takes memory."""

from __future__ import annotations

import gzip
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.payloads.content_encoding import BodyDecoder, content_coding, decode_body
from cortex.payloads.validation import BadBody

LIMIT = 100 * 1024**2


def packed(data: bytes) -> bytes:
    return gzip.compress(data, mtime=0)


def bare_deflate(data: bytes) -> bytes:
    compressor = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return compressor.compress(data) + compressor.flush()


@pytest.mark.parametrize(
    ("header", "coding"),
    [(b"", ""), (b"identity", ""), (b"GZip", "gzip"), (b"x-gzip", "x-gzip"), (b"identity, deflate", "deflate")],
)
def test_the_header_names_one_coding(header: bytes, coding: str) -> None:
    assert content_coding(header) == coding


@pytest.mark.parametrize("header", [b"br", b"zstd", b"gzip, gzip", b"gzip,deflate", b"compress", b"\xff", b"gzip;q=1"])
def test_other_codings_are_unsupported_media_types(header: bytes) -> None:
    with pytest.raises(
        BadBody, match=r"the content encoding '.*' is not supported; use gzip, deflate or none"
    ) as caught:
        content_coding(header)
    assert (caught.value.status, caught.value.headers) == (415, ((b"accept-encoding", b"gzip, deflate"),))


@pytest.mark.parametrize(
    ("coding", "body"),
    [
        ("gzip", packed(b"hello")),
        ("x-gzip", packed(b"hello")),
        ("gzip", packed(b"hel") + packed(b"") + packed(b"lo")),
        ("deflate", zlib.compress(b"hello")),
        ("deflate", bare_deflate(b"hello")),
    ],
)
def test_bodies_are_decoded(coding: str, body: bytes) -> None:
    assert decode_body(body, coding, 5) == b"hello"
    decoder = BodyDecoder(coding)
    pieces = [piece for byte in body for piece in decoder.feed(bytes([byte]))]
    decoder.end()
    assert b"".join(pieces) == b"hello"


@pytest.mark.parametrize(
    ("coding", "body", "status", "message"),
    [
        ("gzip", b"hello", 400, "the body is not valid gzip"),
        ("gzip", b"", 400, "it is incomplete"),
        ("gzip", packed(b"hello")[:-9], 400, "it is incomplete"),
        ("gzip", packed(b"hello") + packed(b"x")[:-1], 400, "it is incomplete"),
        ("gzip", packed(b"hello")[:-8] + bytes(8), 400, "incorrect data check"),
        ("gzip", packed(b"hello") + b"x", 400, "bytes follow its end"),
        ("gzip", packed(b"") * 10_001, 400, "it has more than 10000 members"),
        ("deflate", b"", 400, "it is incomplete"),
        ("deflate", zlib.compress(b"x") + zlib.compress(b"x"), 400, "bytes follow its end"),
        ("deflate", zlib.compress(b"\0" * 1_000_000), 413, "the decompressed body is larger than 100 bytes"),
    ],
)
def test_damaged_and_oversized_bodies_are_refused(coding: str, body: bytes, status: int, message: str) -> None:
    with pytest.raises(BadBody, match=message) as caught:
        decode_body(body, coding, 100)
    assert caught.value.status == status


@given(st.binary(max_size=50), st.sampled_from(["gzip", "deflate"]))
def test_any_body_is_bounded_or_refused(body: bytes, coding: str) -> None:
    try:
        assert len(decode_body(body, coding, 100)) <= 100
    except BadBody as error:
        assert error.status in (400, 413)


@given(st.binary(max_size=2000), st.integers(1, 500))
def test_pieces_of_any_size_are_decoded_to_the_same(data: bytes, size: int) -> None:
    body = packed(data)
    decoder = BodyDecoder("gzip")
    pieces = [piece for at in range(0, len(body), size) for piece in decoder.feed(body[at : at + size])]
    decoder.end()
    assert b"".join(pieces) == data


def test_a_few_bytes_do_not_grow_to_millions_of_objects() -> None:
    bomb = packed(b"[" + b"{}," * 4_000_000 + b"{}]")
    with pytest.raises(BadBody, match="larger than 100 times the compressed one; send it uncompressed") as caught:
        decode_body(bomb, "gzip", LIMIT)
    assert caught.value.status == 413
    with pytest.raises(BadBody):
        decode_body(bomb, "gzip", LIMIT, json_length=12_000_000)
    with pytest.raises(BadBody):
        decode_body(bomb, "gzip", LIMIT, json_length=10**18)
    assert len(decode_body(packed(b"{}" + bytes(20_000_000)), "gzip", LIMIT, json_length=2)) == 20_000_002
    assert len(decode_body(packed(b"[" + b"0," * 2_000_000 + b"0]"), "gzip", LIMIT)) == 4_000_003
