"""Content types: which are JSON, and the character sets of text, of which only a closed list is accepted."""

from __future__ import annotations

import pytest

from cortex.payloads.content_type import charset_of, decode_text, is_json, to_utf8
from cortex.payloads.validation import BadBody


@pytest.mark.parametrize(
    ("charset", "codec"),
    [
        (b"UTF-8", "utf_8"),
        (b"utf8", "utf_8"),
        (b'"utf-16le"', "utf_16_le"),
        (b"UTF-32", "utf_32"),
        (b"us-ascii", "ascii"),
        (b"ISO-8859-1", "latin_1"),
        (b"latin1", "latin_1"),
        (b"ISO_8859-15", "iso8859_15"),
        (b"windows-1252", "cp1252"),
        (b"windows-874", "cp874"),
        (b"KOI8-R", "koi8_r"),
        (b"Shift_JIS", "shift_jis"),
        (b"windows-31j", "cp932"),
        (b"EUC-KR", "euc_kr"),
        (b"Big5-HKSCS", "big5hkscs"),
        (b"GB18030", "gb18030"),
        (b"ISO-2022-JP", "iso2022_jp"),
    ],
)
def test_character_sets_of_the_web_are_accepted(charset: bytes, codec: str) -> None:
    assert charset_of(b"text/plain; charset=" + charset) == codec
    assert decode_text("A1 ".encode(codec), b"text/plain;CharSet=" + charset) == "A1 "


@pytest.mark.parametrize(
    "charset",
    ["punycode", "idna", "hex", "base64", "bz2", "zlib", "uu", "quopri", "rot13", "unicode_escape", "undefined"]
    + ["raw-unicode-escape", "utf-7", "mbcs", "nope", "", "a\0b", "ütf-8", "os", "x" * 1000, "../utf_8"],
)
def test_other_codecs_and_unknown_names_are_unsupported_media_types(charset: str) -> None:
    with pytest.raises(BadBody, match="the character set '.*' is not supported; send UTF-8") as caught:
        charset_of(b"text/plain; charset=" + charset.encode())
    assert caught.value.status == 415
    assert len(str(caught.value)) < 200
    with pytest.raises(BadBody):
        to_utf8(b"[1]", b"application/json; charset=" + charset.encode())


@pytest.mark.parametrize(
    ("content_type", "codec"),
    [
        (b"", "utf_8"),
        (b"text/plain", "utf_8"),
        (b"text/plain; x=y", "utf_8"),
        (b'text/plain; x="; charset=hex"; charset=latin1', "latin_1"),
        (b"text/plain; charset=latin1; charset=hex", "latin_1"),
        (b"text/plain ; charset = latin1 ", "latin_1"),
    ],
)
def test_the_first_parameter_of_the_name_counts(content_type: bytes, codec: str) -> None:
    assert charset_of(content_type) == codec


@pytest.mark.parametrize("media_type", [b"application/json", b"text/json", b"text/csv", b"application/x+json"])
def test_text_of_any_media_type_becomes_utf8(media_type: bytes) -> None:
    assert to_utf8("é".encode("utf-16"), media_type + b"; charset=utf-16") == "é".encode()
    assert to_utf8(b"\xff", media_type + b"; charset=utf-8") == b"\xff", "what reads it, refuses it"
    with pytest.raises(BadBody, match="the body is not 'ascii' text") as caught:
        to_utf8(b"\xff", media_type + b"; charset=us-ascii")
    assert caught.value.status == 400


@pytest.mark.parametrize("content_type", [b"image/png; charset=binary", b"application/octet-stream; charset=hex"])
def test_the_character_set_of_what_is_no_text_means_nothing(content_type: bytes) -> None:
    assert to_utf8(b"\xff", content_type) == b"\xff"


def test_json_has_several_media_types() -> None:
    assert all(map(is_json, [b"application/json", b"text/json", b"application/problem+json", b"a/b+json"]))
    assert not any(map(is_json, [b"", b"application/xml", b"json", b"application/json5", b"application/jsonl"]))
