"""Content types of bodies (RFC 9110, 8.3): which of them are JSON, and the character set of those that are text.

A caller chooses the character set, so it is one of a closed list. Python has other codecs, too: `punycode` needs hours
for a body of megabytes, and `hex` yields another text than the body has.
"""

from __future__ import annotations

import re
from encodings import normalize_encoding
from encodings.aliases import aliases
from typing import Final

from cortex.payloads.validation import BadBody

UTF8: Final = "utf_8"
#: Sent by `curl -d` and by Python's urllib unless the caller sets another content type.
FORM: Final = b"application/x-www-form-urlencoded"
_JSON_TYPES = frozenset((b"application/json", b"text/json"))
#: Python's codecs that are character sets of the web, all of which take time in proportion to the body.
_CODECS = (
    "ascii", UTF8, "utf_8_sig", "utf_16", "utf_16_be", "utf_16_le", "utf_32", "utf_32_be", "utf_32_le", "latin_1",
    *(f"iso8859_{part}" for part in range(2, 17) if part != 12), *(f"cp{number}" for number in range(1250, 1259)),
    "cp874", "tis_620", "koi8_r", "koi8_t", "koi8_u", "big5", "big5hkscs", "cp950", "gb2312", "gbk", "gb18030",
    "euc_jp", "euc_jis_2004", "shift_jis", "shift_jis_2004", "cp932", "iso2022_jp", "euc_kr", "cp949", "johab",
)  # fmt: skip
#: By every name that Python has for them, and by those of the web that it lacks.
_CODEC_OF = {
    **{alias: codec for alias, codec in aliases.items() if codec in _CODECS},
    **{codec: codec for codec in _CODECS},
    "iso_8859_1": "latin_1",
    "windows_874": "cp874",
    "windows_31j": "cp932",
}
_PARAMETER = re.compile(rb';\s*([^\s;=]+)\s*=\s*("(?:[^"\\]|\\.)*"|[^;]*)')
_SHOWN_CHARACTERS = 40


def is_json(media_type: bytes) -> bool:
    """Return whether a media type, in lower case and without parameters, is JSON, also by its suffix (RFC 6839)."""
    return media_type in _JSON_TYPES or media_type.endswith(b"+json")


def is_text(media_type: bytes) -> bool:
    """Return whether a media type, as above, is text in some character set, so that a parameter may name it."""
    return is_json(media_type) or media_type.startswith(b"text/") or media_type == FORM


def media_type_of(content_type: bytes) -> bytes:
    """Return a content type in lower case without its parameters."""
    return content_type.partition(b";")[0].strip().lower()


def charset_of(content_type: bytes) -> str:
    """Return Python's name of the character set of a text; UTF-8 if the content type names none.

    Raises: BadBody with the status 415 for one that is not of the list.
    """
    if b"=" not in content_type:
        return UTF8
    for name, value in _PARAMETER.findall(content_type):
        if name.lower() == b"charset":
            given = value.strip().strip(b"\"'").decode("latin-1")
            codec = _CODEC_OF.get(normalize_encoding(given).lower()) if given.isascii() else None
            if codec is None:
                raise BadBody(f"the character set {given[:_SHOWN_CHARACTERS]!r} is not supported; send UTF-8", 415)
            return codec
    return UTF8


def decode_text(body: bytes, content_type: bytes) -> str:
    """Return a body as text. Raises: BadBody."""
    codec = charset_of(content_type)
    try:
        return body.decode(codec)
    except ValueError:
        name = codec.replace("_", "-")
        raise BadBody(f"the body is not {name!r} text; the content type must name its character set") from None


def to_utf8(body: bytes, content_type: bytes) -> bytes:
    """Return a body in UTF-8; unchanged if it is no text, or in no other character set. Raises: BadBody."""
    if b"=" not in content_type or not is_text(media_type_of(content_type)) or charset_of(content_type) == UTF8:
        return body
    return decode_text(body, content_type).encode()
