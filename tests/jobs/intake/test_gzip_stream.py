"""Gzip is decompressed completely in pieces of any size."""

from __future__ import annotations

import gzip

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.errors import SubmissionError
from cortex.jobs.intake.files import GzipStream


def unpacked(*pieces: bytes) -> bytes:
    unpacker = GzipStream("s3://b/x.json.gz")
    return b"".join(plain for piece in pieces for plain in unpacker.feed(piece)) + b"".join(unpacker.end())


@given(
    content=st.lists(st.binary(max_size=2000), min_size=1, max_size=3),
    is_gzip=st.booleans(),
    size=st.integers(1, 300),
    zeros=st.integers(0, 3),
)
def test_gzip_members_in_pieces_of_any_size_are_decompressed(
    content: list[bytes], is_gzip: bool, size: int, zeros: int
) -> None:
    plain = b"".join(content)
    data = b"".join(map(gzip.compress, content)) + b"\0" * zeros if is_gzip else b"[" + plain
    pieces = [data[start : start + size] for start in range(0, len(data), size)]
    assert unpacked(*pieces) == (plain if is_gzip else data)


@pytest.mark.parametrize("data", [b"", b"\x1f", b"1", b"{}\n"])
def test_short_files_pass_as_they_are(data: bytes) -> None:
    assert unpacked(data) == data


def test_little_that_stands_for_much_comes_a_piece_at_a_time() -> None:
    pieces = list(GzipStream("x").feed(gzip.compress(b"0" * 50_000_000)))
    assert sum(map(len, pieces)) == 50_000_000
    assert max(map(len, pieces)) <= 1024 * 1024


def test_what_is_cut_off_or_damaged_is_named() -> None:
    packed = gzip.compress(b"1\n" * 1000)
    with pytest.raises(SubmissionError, match="s3://b/x.json.gz: its gzip is cut off"):
        unpacked(packed[:-9])
    with pytest.raises(SubmissionError, match="s3://b/x.json.gz: its gzip is damaged"):
        unpacked(packed[:-8] + b"\0" * 8)
