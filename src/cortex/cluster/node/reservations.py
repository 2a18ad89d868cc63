"""Reservations of a node's resources, one per replica: each of Ray's actors keeps a connection open while it lives.

When a replica ends, the agent sends `OVER` and closes the connection, and the actor ends. If the connection breaks
without that, the agent has ended, and the actor starts it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cortex.cluster.node.start import OVER

_TIMEOUT_S = 10.0


class Reservations:
    """Server for actors. `describe` returns the agent's description; `on_change` gets the id of a changed replica."""

    def __init__(self, socket: Path, describe: Callable[[], dict[str, Any]], on_change: Callable[[str], None]) -> None:
        self._socket = socket
        self._describe = describe
        self._on_change = on_change
        self._writers: dict[str, StreamWriter] = {}
        self._gpus: dict[str, tuple[str, ...]] = {}
        self._server: asyncio.Server | None = None

    async def startup(self) -> None:
        """Start to listen."""
        self._socket.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._serve, str(self._socket))
        self._socket.chmod(0o600)

    async def shutdown(self) -> None:
        """Stop listening, and release all reservations."""
        if self._server is not None:
            self._server.close()
        for name in list(self._writers):
            self.release(name)

    def has(self, replica_id: str) -> bool:
        """Return whether a replica's resources are reserved."""
        return replica_id in self._writers

    def gpus(self, replica_id: str) -> tuple[str, ...]:
        """Return the GPUs that are reserved for a replica, as for CUDA_VISIBLE_DEVICES."""
        return self._gpus.get(replica_id, ())

    def release(self, replica_id: str) -> None:
        """Release the reservation of a replica that ended."""
        writer = self._writers.pop(replica_id, None)
        self._gpus.pop(replica_id, None)
        if writer is not None:
            writer.write(OVER)
            writer.close()

    async def _serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        name = ""
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                request = json.loads(await reader.readline())
                name, gpus = str(request["reserve"]), tuple(map(str, request.get("gpus", ())))
            self.release(name)  # of an earlier actor
            self._writers[name], self._gpus[name] = writer, gpus
            writer.write(json.dumps({"ok": True, **self._describe()}).encode() + b"\n")
            self._on_change(name)
            while await reader.read(1024):
                pass
        except (OSError, ValueError, KeyError, TypeError, TimeoutError):
            pass
        finally:
            with contextlib.suppress(OSError):
                writer.close()
            if name and self._writers.get(name) is writer:
                del self._writers[name], self._gpus[name]
                self._on_change(name)
