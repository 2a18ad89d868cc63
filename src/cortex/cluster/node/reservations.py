"""Which replicas of a node hold a reservation: each of Ray's actors keeps a connection open for as long as it lives.

Once the replica is over, the actor is told so, and ends. Where the connection just breaks, the agent has ended: the
actor starts it again.
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
    """Listens for actors. `describe` says what they are told of the node, `on_change` learns whose replica it is."""

    def __init__(self, socket: Path, describe: Callable[[], dict[str, Any]], on_change: Callable[[str], None]) -> None:
        self._socket = socket
        self._describe = describe
        self._on_change = on_change
        self._held: dict[str, StreamWriter] = {}
        self._gpus: dict[str, tuple[str, ...]] = {}
        self._server: asyncio.Server | None = None

    async def startup(self) -> None:
        """Listen."""
        self._socket.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._serve, str(self._socket))
        self._socket.chmod(0o600)

    async def shutdown(self) -> None:
        """Stop listening, and give up all that is reserved: this process is to end."""
        if self._server is not None:
            self._server.close()
        for name in list(self._held):
            self.release(name)

    def has(self, replica_id: str) -> bool:
        """Tell whether a replica's resources are reserved."""
        return replica_id in self._held

    def gpus(self, replica_id: str) -> tuple[str, ...]:
        """Return the GPUs that were reserved for a replica, as CUDA_VISIBLE_DEVICES names them."""
        return self._gpus.get(replica_id, ())

    def release(self, replica_id: str) -> None:
        """End a reservation: its replica is over."""
        writer = self._held.pop(replica_id, None)
        self._gpus.pop(replica_id, None)
        if writer is not None:
            writer.write(OVER)
            writer.close()

    async def _serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        name = ""
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                said = json.loads(await reader.readline())
                name, gpus = str(said["reserve"]), tuple(map(str, said.get("gpus", ())))
            self.release(name)  # of an actor before, if there was one
            self._held[name], self._gpus[name] = writer, gpus
            writer.write(json.dumps({"ok": True, **self._describe()}).encode() + b"\n")
            self._on_change(name)
            while await reader.read(1024):
                pass
        except (OSError, ValueError, KeyError, TypeError, TimeoutError):
            pass
        finally:
            with contextlib.suppress(OSError):
                writer.close()
            if name and self._held.get(name) is writer:
                del self._held[name], self._gpus[name]
                self._on_change(name)
