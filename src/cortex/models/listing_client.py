"""Asks the operator's model agent for listings, on a node of a cluster; its other side is `shared_listings`.

Who does not answer for a while is away: then whoever asks lists by himself. Knows nothing of when listings are due.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from asyncio import StreamReader, StreamWriter
from collections.abc import Mapping
from pathlib import Path

from cortex.errors import StorageError
from cortex.models.listing import Folder, Prefix
from cortex.models.listing_codec import (
    MAX_LINE_BYTES,
    List,
    Listed,
    Unlisted,
    Wait,
    read_answer,
    read_models,
    write,
)
from cortex.models.poller import Asked
from cortex.telemetry import Logger

#: Who took longer than `_QUICK_S` to be found away isn't asked again for so long: each time would cost that wait.
_AWAY_S = 30.0
_QUICK_S = 0.5
_CHUNK_BYTES = 1024 * 1024
_MAX_IDLE = 16


class Asker:
    """Asks over `socket`, one question at a time on each connection; for one event loop."""

    def __init__(self, socket: Path, silence_s: float, logger: Logger) -> None:
        self._socket = socket
        self._silence_s = silence_s
        self._logger = logger
        self._idle: list[tuple[StreamReader, StreamWriter]] = []
        self._is_away = False
        self._away_until = 0.0

    async def ask(self, prefix: Prefix, max_age_s: float, newer_than_s: float, before: Asked | None) -> Asked | None:
        """Do what `lister.Ask` says."""
        started_at = time.monotonic()
        if started_at < self._away_until:
            return None
        try:
            known = before.state if before else ""
            answer, data = await self._exchange(List(prefix, max_age_s, newer_than_s, known))
            asked = None if isinstance(answer, Unlisted) else await _asked(prefix, answer, data, before)
        except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as error:
            if time.monotonic() - started_at > _QUICK_S:
                self._away_until = time.monotonic() + _AWAY_S
            self._note(f"{type(error).__name__}: {error}")
            return None
        self._note(None)
        if isinstance(answer, Unlisted):
            raise StorageError(answer.message)
        return asked

    async def _exchange(self, request: List) -> tuple[Listed | Unlisted, bytes]:
        while True:
            is_reused = bool(self._idle)
            reader, writer = self._idle.pop() if is_reused else await self._connect()
            try:
                writer.write(write(request))
                answer = await self._answer(reader)
                data = await self._read(reader, answer.size) if isinstance(answer, Listed) else b""
            except BaseException as error:
                writer.close()
                is_broken = isinstance(error, OSError | EOFError) and not isinstance(error, TimeoutError)
                if is_reused and is_broken:
                    continue  # the other side was started again since it was used
                raise
            if len(self._idle) < _MAX_IDLE:
                self._idle.append((reader, writer))
            else:
                writer.close()
            return answer, data

    async def _connect(self) -> tuple[StreamReader, StreamWriter]:
        async with asyncio.timeout(self._silence_s):
            return await asyncio.open_unix_connection(str(self._socket), limit=MAX_LINE_BYTES)

    async def _answer(self, reader: StreamReader) -> Listed | Unlisted:
        while True:
            async with asyncio.timeout(self._silence_s):
                answer = read_answer(await reader.readuntil())
            if not isinstance(answer, Wait):
                return answer

    async def _read(self, reader: StreamReader, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            async with asyncio.timeout(self._silence_s):
                chunk = await reader.read(min(size - len(data), _CHUNK_BYTES))
            if not chunk:
                raise EOFError("the connection ended in the middle of a listing")
            data += chunk
        return bytes(data)

    def _note(self, reason: str | None) -> None:
        """Say once that the operator is away, and once that it is back."""
        if reason is not None and not self._is_away:
            self._logger.warning("operator lists no models for this node, listing here", reason=reason)
        elif reason is None and self._is_away:
            self._logger.info("operator lists models for this node again")
        self._is_away = reason is not None

    def close(self) -> None:
        """Hang up."""
        for _, writer in self._idle:
            with contextlib.suppress(RuntimeError):
                writer.close()


async def _asked(prefix: Prefix, answer: Listed, data: bytes, before: Asked | None) -> Asked:
    """Put together what came. Raises: ValueError if it makes no sense."""
    begun_at = time.monotonic() - answer.age_s
    models: Mapping[str, Folder]
    if answer.size:
        models = await asyncio.to_thread(read_models, data)  # of 100,000 models this takes a second
    elif before is not None and before.state == answer.state:
        models = before.listing.models
    else:
        raise ValueError("a listing without models")
    return Asked(answer.listing(prefix, models), begun_at, answer.state)
