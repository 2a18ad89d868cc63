"""Owns a connection to one worker's command socket; while it is open, the worker does not end."""

from __future__ import annotations

import asyncio
import csv
import re

from cortex.gateway.runtime_api import ANSWER_TIMEOUT_S

_PROMPT = b"\n> "
_ANSWER_MAX_BYTES = 16 * 1024 * 1024
_FAILURES = (OSError, EOFError, asyncio.LimitOverrunError)
_FRONTENDS = "show stat -1 1 -1"


class Stay:
    """Keeps a worker that was reloaded away alive, after its last request too."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def begin(cls, stats_socket: str, pid: int) -> Stay | None:
        """Connect to the worker that answers at `stats_socket` now, unless it is another than `pid`."""
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                reader, writer = await asyncio.open_unix_connection(stats_socket, limit=_ANSWER_MAX_BYTES)
        except OSError:  # TimeoutError is one
            return None
        stay = cls(reader, writer)
        if await stay._is_with(pid):
            return stay
        stay.close()
        return None

    @property
    def is_open(self) -> bool:
        """Tell whether the worker is still kept."""
        return not self._reader.at_eof() and not self._writer.is_closing()

    async def is_over(self) -> bool:
        """Tell whether the worker has no connection of a client left, and will get none."""
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                rows = csv.DictReader((await self._ask(_FRONTENDS)).lstrip("# \n").splitlines())
                return all(row["scur"] == "0" for row in rows if row["svname"] == "FRONTEND")
        except _FAILURES:
            return True

    def close(self) -> None:
        """Let the worker end."""
        self._writer.close()

    async def _is_with(self, pid: int) -> bool:
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                await self._ask("prompt")
                return re.search(rf"^Pid: {pid}$", await self._ask("show info"), re.MULTILINE) is not None
        except _FAILURES:
            return False

    async def _ask(self, command: str) -> str:
        self._writer.write(command.encode() + b"\n")
        return (await self._reader.readuntil(_PROMPT)).removesuffix(_PROMPT).decode(errors="replace")
