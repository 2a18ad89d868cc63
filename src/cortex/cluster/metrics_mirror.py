"""Copies of the files in which replicas on nodes count, where those of this machine would lie.

So whoever adds numbers up reads folders, wherever the replicas run. A copy is some seconds old at most while its node
answers; what a node counted since then is lost with the node.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from weakref import WeakValueDictionary

from cortex.cluster.framing import store
from cortex.cluster.node_client import NodeLink
from cortex.cluster.transport import WireError

REFRESH_S = 2.0
#: Replicas whose numbers are asked for at the same time.
_AT_ONCE = 16


class Mirror:
    """The folders of one operator."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def startup(self, led: Path, epoch: int) -> None:
        """Drop all copies, unless they are of whoever led last: who led since has taken in what ended.

        `led` is a file of this home that remembers when this operator led.
        """
        with contextlib.suppress(OSError, ValueError):
            if int(led.read_text()) not in (epoch - 1, epoch):
                for name in self.names():
                    shutil.rmtree(self._folder / name, ignore_errors=True)
        led.write_text(str(epoch))

    def names(self) -> set[str]:
        """Return the replicas of which there are copies."""
        try:
            return {folder.name for folder in self._folder.iterdir()}
        except OSError:
            return set()

    async def refresh(self, replicas: Mapping[str, NodeLink]) -> None:
        """Copy what each of these replicas has counted."""
        limit = asyncio.Semaphore(_AT_ONCE)

        async def one(name: str, link: NodeLink) -> None:
            async with limit:
                with contextlib.suppress(WireError, OSError):  # the node is away; its silence is told elsewhere
                    async with self.held(name):
                        if name in link.replicas:  # what is over is taken in whole, once
                            await self.fetch(name, link)

        await asyncio.gather(*(one(name, link) for name, link in replicas.items()))

    def held(self, name: str) -> asyncio.Lock:
        """Return the lock of one replica's folder."""
        return self._locks.setdefault(name, asyncio.Lock())

    async def fetch(self, name: str, link: NodeLink) -> None:
        """Copy what one replica has counted. Raises: WireError, OSError."""
        await asyncio.to_thread(store, self._folder / name, await link.fetch_metrics(name))
