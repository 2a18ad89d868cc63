"""Owns the counts of answers over restarts of the operator and of HAProxy: asks the workers, and keeps a file."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Collection, Iterator
from pathlib import Path

from cortex.gateway.counters import Counts, ResponseCounters
from cortex.gateway.runtime_api import BackendState, Runtime
from cortex.gateway.worker_hold import Stay
from cortex.home import write_private
from cortex.processes.identity import Identity
from cortex.telemetry import Logger

Seen = dict[int, dict[str, BackendState]]


class Tally:
    """The totals of all workers that there are and were.

    A worker that was reloaded away ends with its last request, and would take along what it counted last. So it is kept
    until that has been read.
    """

    def __init__(self, runtime: Runtime, stats_socket: str, file: Path, logger: Logger) -> None:
        self._runtime = runtime
        self._stats_socket = stats_socket
        self._file = file
        self._logger = logger
        self._counters = ResponseCounters()
        self._loaded = False
        self._written = ""
        self._stays: dict[int, Stay] = {}
        self._lock = asyncio.Lock()

    async def count(self, apis: Collection[str]) -> tuple[Seen, Counts]:
        """Ask every worker; return what each has now, by its pid, and the totals of `apis`.

        Raises: Unresponsive.
        """
        async with self._lock:
            if not self._loaded:
                self._loaded = True
                self._load()
            workers = await self._runtime.workers()
            idle = [pid for pid in self._stays if pid in workers.old and await self._stays[pid].is_over()]
            seen = await self._runtime.all_backends(workers)
            self._counters.update({worker: seen.get(worker.pid) for worker in _identify(workers.all)})
            self._counters.forget(apis)
            self._write()
            for pid in [*idle, *(self._stays.keys() - set(workers.all))]:
                self._stays.pop(pid).close()
            return seen, self._counters.totals()

    async def keep(self, pid: int) -> None:
        """See to it that the current worker stays until it is counted, once it is reloaded away."""
        async with self._lock:
            if pid in self._stays and self._stays[pid].is_open:
                return
            stay = await Stay.begin(self._stats_socket, pid)
            if stay is not None:
                self._stays[pid] = stay

    def close(self) -> None:
        """Keep no worker any longer."""
        for stay in self._stays.values():
            stay.close()
        self._stays.clear()

    def _load(self) -> None:
        """Go on from where the last operator was."""
        try:
            text = self._file.read_text()
            self._counters.load(json.loads(text))
            self._written = text
        except FileNotFoundError:
            pass
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            self._logger.warning("the gateway's counts can't be read, they begin anew", error=error)

    def _write(self) -> None:
        text = json.dumps(self._counters.dump())
        if text != self._written:
            with contextlib.suppress(OSError):  # a full disk; it is tried again with the next counts
                write_private(self._file, text)
                self._written = text


def _identify(workers: Collection[int]) -> Iterator[Identity]:
    for pid in workers:
        with contextlib.suppress(ProcessLookupError):
            yield Identity.of(pid)
