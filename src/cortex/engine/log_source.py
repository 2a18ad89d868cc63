"""The logs of one machine as a stream, wherever who reads it is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Protocol

from cortex.engine.log_files import LogLine, replicas
from cortex.engine.logs import LogFollower, read_logs
from cortex.errors import InputError

_FOLLOW_POLL_S = 0.2


class LogSource(Protocol):
    """Where lines of logs come from."""

    def logs(
        self, folder: str, replica: str | None, tail: int | None, follow: bool
    ) -> AsyncGenerator[list[LogLine], None]:
        """Go through the lines of a folder of logs, some at a time, the oldest first.

        `replica` is an id, or the short one that lines show; `tail` limits the lines already there. With `follow`,
        there are others until nobody listens, and an empty list says that just now there are no more.
        """


class LocalLogs:
    """The logs below one folder."""

    def __init__(self, logs_dir: Path) -> None:
        self._logs_dir = logs_dir

    async def logs(
        self, folder: str, replica: str | None, tail: int | None, follow: bool
    ) -> AsyncGenerator[list[LogLine], None]:
        """Go through lines; see `LogSource`. Raises: InputError for what is no folder of logs."""
        place = (self._logs_dir / folder).resolve()
        if not place.is_relative_to(self._logs_dir.resolve()):
            raise InputError(f"{folder!r} is no folder of logs")
        name = _full_id(place, replica)
        if not follow:
            yield await asyncio.to_thread(lambda: list(read_logs(place, name, tail=tail)))
            return
        follower = LogFollower(place, name, tail or 0)
        try:
            while True:
                lines = await asyncio.to_thread(follower.poll)
                yield lines
                if not lines:
                    await asyncio.sleep(_FOLLOW_POLL_S)
        finally:
            follower.close()


def _full_id(folder: Path, replica: str | None) -> str | None:
    """Complete the short id that log lines show."""
    if replica is None or "-" in replica:
        return replica
    return next((name for name in replicas(folder, None) if name.endswith(f"-{replica}")), replica)
