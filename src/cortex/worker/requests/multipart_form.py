"""Multipart forms (RFC 7578), by Starlette's parser, which would lose parts of some of them silently.

Imported for the first such form only, because it imports starlette.
"""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncGenerator
from urllib.parse import unquote_to_bytes

from python_multipart.multipart import parse_options_header
from starlette.datastructures import FormData, Headers
from starlette.formparsers import MultiPartException, MultiPartParser

from cortex.payloads.content_type import decode_text

# Its warnings repeat the errors that callers get, in the log of the API.
logging.getLogger("python_multipart").setLevel(logging.ERROR)

_CHARSET = re.compile(rb";\s*charset\s*=", re.IGNORECASE)
#: The name of a file in the form of RFC 5987, which some clients send alone: `filename*=UTF-8''caf%C3%A9.png`.
_EXTENDED_NAME = re.compile(rb";\s*filename\*\s*=\s*\"?([\w-]+)'[^']*'([^;\s\"]*)\"?", re.IGNORECASE)
_PLAIN_NAME = re.compile(rb";\s*filename\s*=", re.IGNORECASE)


class MultiPartFormParser(MultiPartParser):
    """Reads a whole form in memory. `parse` raises BadBody and MultiPartException."""

    def __init__(self, content_type: bytes, body: bytes, max_parts: int) -> None:
        # The body is bounded already, so a size limit per part or spooling to disk would gain nothing.
        size = len(body) + 1
        headers = Headers(raw=[(b"content-type", content_type)])
        chunks = _from_first_boundary(content_type, body)
        super().__init__(headers, chunks, max_files=max_parts, max_fields=max_parts, max_part_size=size)
        self.spool_max_size = size
        self._content_type = content_type
        self._is_complete = False

    async def parse(self) -> FormData:
        """Return the form."""
        form = await super().parse()
        if not self._is_complete:  # RFC 2046, 5.1: without it, the last part may lack its end
            raise MultiPartException("the closing boundary is missing, so the body is incomplete")
        return form

    def on_end(self) -> None:
        """Note the closing boundary."""
        self._is_complete = True

    def on_headers_finished(self) -> None:
        """Begin a part; it is a file if it has a name of either form."""
        part = self._current_part
        disposition = part.content_disposition or b""
        found = _EXTENDED_NAME.search(disposition)
        if found and not _PLAIN_NAME.search(disposition):
            name = decode_text(unquote_to_bytes(found[2]), b"; charset=" + found[1]).encode(self._charset, "replace")
            escaped = name.replace(b"\\", b"\\\\").replace(b'"', b'\\"')
            part.content_disposition = disposition + b'; filename="' + escaped + b'"'
        super().on_headers_finished()

    def on_part_end(self) -> None:
        """End a part; a text is decoded by the character set that it, or the form, names."""
        part = self._current_part
        if part.file is None:
            own = next((value for name, value in part.item_headers if name == b"content-type"), b"")
            content_type = own if _CHARSET.search(own) else self._content_type
            if _CHARSET.search(content_type):
                self.items.append((part.field_name, decode_text(bytes(part.data), content_type)))
                return
        super().on_part_end()


async def _from_first_boundary(content_type: bytes, body: bytes) -> AsyncGenerator[bytes, None]:
    """Yield the body without what precedes the first boundary, which RFC 2046 permits."""
    _, parameters = parse_options_header(content_type)
    boundary = re.escape(parameters.get(b"boundary", b""))
    found = re.search(rb"(?:\A|\r\n)(?=--%b(?:--)?[ \t]*\r\n)" % boundary, body)
    yield body[found.end() :] if found and found.end() else body
