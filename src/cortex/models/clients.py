"""One client's connection to the model agent: lines in, lines out, and nothing that a bad client does harms others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from cortex.models.protocol import MAX_LINE_BYTES, Answer, CatalogueUpdate, Request, read_request, write
from cortex.telemetry import Logger


class Client(asyncio.Protocol):
    """Calls `asked` with each request. A client that does not read is not read from; it misses all but the newest
    catalogue.
    """

    def __init__(
        self,
        joined: Callable[[Client], None],
        asked: Callable[[Client, Request], None],
        left: Callable[[Client], None],
        logger: Logger,
    ) -> None:
        self._joined = joined
        self._asked = asked
        self._left = left
        self._logger = logger
        self._transport: asyncio.Transport | None = None
        self._unread = bytearray()
        self._is_full = False
        self._is_held = False
        self._news: CatalogueUpdate | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self._transport = cast(asyncio.Transport, transport)
        self._joined(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        self._transport = None
        self._left(self)

    def data_received(self, data: bytes) -> None:
        """Take requests; whoever sends anything else is hung up on."""
        self._unread += data
        if b"\n" in data:
            *lines, rest = self._unread.split(b"\n")
            self._unread = rest
            for line in lines:
                if self._transport is None or self._transport.is_closing():
                    return
                self._take(bytes(line))
        if len(self._unread) > MAX_LINE_BYTES:
            self._refuse(f"a line of more than {MAX_LINE_BYTES} bytes")

    def pause_writing(self) -> None:
        """Wait for a client that does not read: it gets no more to say, so what we owe it is bounded."""
        self._is_full = True
        self._read_or_wait()

    def resume_writing(self) -> None:
        """Go on."""
        self._is_full = False
        self._read_or_wait()
        if self._news is not None:
            self.tell(self._news)

    def hold(self, is_held: bool) -> None:
        """Read no more requests while the client has asked for too much at once."""
        self._is_held = is_held
        self._read_or_wait()

    def _read_or_wait(self) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        if self._is_full or self._is_held:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def tell(self, news: CatalogueUpdate) -> None:
        """Send a catalogue, or keep it while the client does not read; only the newest counts."""
        self._news = news if self._is_full else None
        if not self._is_full:
            self.send(news)

    def send(self, answer: Answer) -> None:
        """Send an answer."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(write(answer))

    def close(self) -> None:
        """Hang up."""
        if self._transport is not None:
            self._transport.abort()

    def _take(self, line: bytes) -> None:
        try:
            self._asked(self, read_request(line))
        except ValueError as error:
            self._refuse(str(error))

    def _refuse(self, reason: str) -> None:
        self._logger.warning("model agent hung up on a client", reason=reason[:500])
        self.close()
