"""Brings the maps of HAProxy's workers to the routing table while they run; knows the maps, not what they mean."""

from __future__ import annotations

from collections.abc import Mapping

from cortex.errors import GatewayError
from cortex.gateway.maps import KEYS_MAP, keys_map, live_maps
from cortex.gateway.routes import ApiKey, RoutingTable
from cortex.gateway.runtime_api import Runtime, Unresponsive, Workers, add_map, del_map, set_map


class LiveMaps:
    """What is changed in maps without a reload."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._keys: dict[int, tuple[ApiKey, ...]] = {}  # that a worker has, by its pid

    async def sync(self, pid: int, table: RoutingTable) -> None:
        """Give the current worker the values of the table. Raises: Unresponsive."""
        commands = []
        for name, wanted in live_maps(table).items():
            if wanted:
                entries = await self._runtime.map(pid, name)
                commands += [
                    set_map(name, key, value) for key, value in wanted.items() if entries.get(key, value) != value
                ]
        await self._runtime.run(pid, commands)

    async def sync_keys(self, workers: Workers, table: RoutingTable) -> None:
        """Give every worker the keys of the table, and take those from it that are there no more.

        Old ones too: one may have a request before its check that came in when it was current. Raises: Unresponsive,
        GatewayError if the current worker keeps what it should not, or lacks what it should have.
        """
        self._keys = {pid: keys for pid, keys in self._keys.items() if pid in workers.all}
        if not table.asks_for_keys:
            self._keys.clear()  # no worker's configuration names the map
            return
        wanted = keys_map(table)
        for pid in workers.all:
            if self._keys.get(pid) == table.keys:
                continue
            try:
                await self._set_keys(pid, wanted)
            except (Unresponsive, GatewayError):
                if pid == workers.current:
                    raise
                continue  # it ends, or its configuration asks for no keys
            self._keys[pid] = table.keys

    async def _set_keys(self, pid: int, wanted: Mapping[str, str]) -> None:
        there = await self._runtime.map(pid, KEYS_MAP)
        # What is revoked goes first: a worker that dies of the rest has at least done that.
        gone = [del_map(KEYS_MAP, key) for key in there.keys() - wanted.keys()]
        new = [add_map(KEYS_MAP, key, value) for key, value in wanted.items() if key not in there]
        if gone or new:
            said = await self._runtime.run(pid, gone + new)
            if (await self._runtime.map(pid, KEYS_MAP)).keys() != wanted.keys():
                raise GatewayError(f"HAProxy did not take its keys: {' '.join(said)[-1000:]}")
