"""Statistics of each API at the gateway, and totals of its responses that never decrease.

| count | source | scope |
|---|---|---|
| in flight, queued, requests, servers | gauges of all HAProxy workers | now |
| average duration | HAProxy's average over the last 1024 responses of a worker, weighted by worker | now |
| responses by class of status | counters of all HAProxy workers, present and past | since the home was created |

Each HAProxy worker counts responses from 0, and a reload replaces the worker. The total is therefore the sum over
the running workers plus the last counts of ended ones; it is saved to a file after each change, for the next operator.
An old worker exits after its last request, and its last counts would be lost. `WorkerHold` keeps it alive until they
have been read: a connection to a worker's command socket that stays open delays its exit.

```text
                   reload                 no client connected,              hold closed
 current, held ─────────────▶ old, held ──────────────────────▶ counts read ────────────▶ exited
      ▲                                    then read counts
      └─ `hold` before each reload, and every second
```
"""

from __future__ import annotations

import asyncio
import contextlib
import csv
import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from cortex.gateway.maps import api_of
from cortex.gateway.runtime_api import ANSWER_TIMEOUT_S, BackendState, RuntimeApi
from cortex.home import write_private
from cortex.processes.codec import decode
from cortex.processes.identity import Identity
from cortex.telemetry import Logger

#: Number of requests over which HAProxy averages their times.
_AVERAGED = 1024
_REPORT_EVERY_S = 60.0

#: Responses of each API by class of status: 1 to 5, and 0 for clients that disconnected before the response.
Counts = dict[str, dict[int, int]]

K = TypeVar("K", str, int)


@dataclass(frozen=True)
class BackendStats:
    """Statistics of one API, over all HAProxy workers of one gateway or of several."""

    in_flight: int  #: requests inside replicas
    queued: int  #: requests waiting for a free replica
    requests: int = 0  #: all open requests: being received, held, queued, inside, being sent
    servers: Mapping[str, int] = field(default_factory=dict)  #: in flight by server, including draining ones
    responses: Mapping[int, int] = field(default_factory=dict)  #: total by class of status, 1 to 5; never decreases
    average_ms: float | None = None  #: duration of the latest requests


def backend_stats(states: Sequence[BackendState], responses: Mapping[int, int]) -> BackendStats:
    """Return the statistics of one API from its state in each HAProxy worker."""
    servers = in_flight_by_server(states)
    return BackendStats(
        in_flight=sum(servers.values()),
        queued=sum(state.queued + sum(server.queued for server in state.servers.values()) for state in states),
        requests=max(0, sum(state.requests for state in states)),
        servers=servers,
        responses=responses,
        average_ms=average_ms(states),
    )


def in_flight_by_server(states: Iterable[BackendState]) -> dict[str, int]:
    """Return the number of requests inside each server."""
    return _sum_counts({name: server.in_flight for name, server in state.servers.items()} for state in states)


def average_ms(states: Iterable[BackendState]) -> float | None:
    """Return the average duration of a backend's latest requests over all workers; None without any."""
    weights = [(min(sum(state.responses.values()), _AVERAGED), state.average_ms) for state in states]
    total = sum(weight for weight, _ in weights)
    return sum(weight * average for weight, average in weights) / total if total else None


def sum_stats(stats: Sequence[BackendStats]) -> BackendStats:
    """Return the sum over several gateways; durations are weighted by responses."""
    timed = [(sum(each.responses.values()) or 1, each.average_ms) for each in stats if each.average_ms is not None]
    weight = sum(responses for responses, _ in timed)
    return BackendStats(
        in_flight=sum(each.in_flight for each in stats),
        queued=sum(each.queued for each in stats),
        requests=sum(each.requests for each in stats),
        servers=_sum_counts(each.servers for each in stats),
        responses=_sum_counts(each.responses for each in stats),
        average_ms=sum(responses * average for responses, average in timed) / weight if timed else None,
    )


def _sum_counts(counts: Iterable[Mapping[K, int]]) -> dict[K, int]:
    total: dict[K, int] = {}
    for each in counts:
        for key, count in each.items():
            total[key] = total.get(key, 0) + count
    return total


class ResponseCounters:
    """Totals of responses that don't decrease when HAProxy workers start and end. Does no I/O."""

    def __init__(self) -> None:
        self._ended: Counts = {}
        self._living: dict[Identity, Counts] = {}
        self._reported: Counts = {}

    def update(self, seen: Mapping[Identity, Mapping[str, BackendState] | None]) -> None:
        """Set the counts of each living worker, None if it did not respond. Workers not in `seen` have ended.

        A worker has the same APIs for as long as it lives, so the counts of an API that was forgotten do not come back.
        """
        living: dict[Identity, Counts] = {}
        for worker, backends in seen.items():
            known = next((each for each in self._living if each.is_same(worker)), None)
            before = self._living.pop(known) if known is not None else None
            counts = None if backends is None else _counts_by_api(backends)
            if before is not None:
                living[worker] = {api: (counts or {}).get(api, last) for api, last in before.items()}
            elif counts is not None:
                living[worker] = counts
        for ended in self._living.values():
            _add(self._ended, ended)
        self._living = living

    def forget(self, apis: Collection[str]) -> None:
        """Drop the totals of all APIs except `apis`. Call it only once no worker accepts requests for them."""
        for counts in (self._ended, self._reported, *self._living.values()):
            for name in counts.keys() - set(apis):
                del counts[name]

    def totals(self) -> Counts:
        """Return the totals by API. HAProxy may count a response in another class for a moment; totals hide that."""
        totals: Counts = {}
        for counts in (self._ended, *self._living.values()):
            _add(totals, counts)
        for api, responses in totals.items():
            reported = self._reported.setdefault(api, {})
            for kind, count in responses.items():
                responses[kind] = reported[kind] = max(count, reported.get(kind, 0))
        return totals

    def dump(self) -> dict[str, Any]:
        """Return the JSON form."""
        living = [{**worker.as_json(), "responses": counts} for worker, counts in self._living.items()]
        return {"ended": self._ended, "living": living}

    def load(self, data: Any) -> None:
        """Load the JSON form. Raises: ValueError, TypeError, KeyError, AttributeError for anything else."""
        ended = decode(Counts, data["ended"])
        living = {Identity.from_json(each): decode(Counts, each["responses"]) for each in data["living"]}
        self._ended, self._living, self._reported = ended, living, {}


def _counts_by_api(backends: Mapping[str, BackendState]) -> Counts:
    counts: Counts = {}
    for name, state in backends.items():
        api = api_of(name)
        if api is not None:
            _add(counts, {api: state.responses})
    return counts


def _add(totals: Counts, counts: Mapping[str, Mapping[int, int]]) -> None:
    for api, responses in counts.items():
        total = totals.setdefault(api, {})
        for kind, count in responses.items():
            total[kind] = total.get(kind, 0) + count


class RefusedConnections:
    """Connections that a gateway refused, and which of them a warning must report. Does no I/O."""

    def __init__(self) -> None:
        self.total = 0
        self._reported = 0
        self._reported_at = -math.inf
        self._last: tuple[int, int] | None = None

    def add(self, worker: int, count: int, now: float) -> int:
        """Add those of a worker, which counts from its start. Return the number to report now, once a minute."""
        last = self._last
        self._last = worker, count
        if last is not None:  # a gateway that was adopted may have counted for days
            self.total += count - last[1] if last[0] == worker else count
        new = self.total - self._reported
        if not new or now - self._reported_at < _REPORT_EVERY_S:
            return 0
        self._reported, self._reported_at = self.total, now
        return new


class ResponseTotals:
    """Response totals of one home, over restarts of the operator and of HAProxy. Owns a file."""

    def __init__(self, runtime: RuntimeApi, stats_socket: str, file: Path, logger: Logger) -> None:
        self._runtime = runtime
        self._stats_socket = stats_socket
        self._file = file
        self._logger = logger
        self._counters = ResponseCounters()
        self._loaded = False
        self._written = ""
        self._holds: dict[int, WorkerHold] = {}
        self._lock = asyncio.Lock()

    async def count(self) -> tuple[dict[int, dict[str, BackendState]], Counts]:
        """Query every worker; return its state by pid, and the totals by API. Raises: Unresponsive."""
        async with self._lock:
            self._load()
            workers = await self._runtime.workers()
            # In this order: counts read after the last client disconnected are final.
            idle = [pid for pid in self._holds if pid in workers.old and await self._holds[pid].is_idle()]
            seen = await self._runtime.all_backends(workers)
            self._counters.update({worker: seen.get(worker.pid) for worker in _identities(workers.all)})
            self._save()
            for pid in [*(seen.keys() & idle), *(self._holds.keys() - set(workers.all))]:
                self._holds.pop(pid).close()
            return seen, self._counters.totals()

    async def forget(self, apis: Collection[str]) -> None:
        """Drop the totals of all APIs except `apis`, once the current worker has only these."""
        async with self._lock:
            self._load()
            self._counters.forget(apis)
            self._save()

    async def hold(self, pid: int) -> None:
        """Keep the current worker alive after a reload until its last responses are counted; idempotent."""
        async with self._lock:
            if pid in self._holds and self._holds[pid].is_open:
                return
            hold = await WorkerHold.open(self._stats_socket, pid)
            if hold is not None:
                self._holds[pid] = hold

    def close(self) -> None:
        """Release all workers."""
        for hold in self._holds.values():
            hold.close()
        self._holds.clear()

    def _load(self) -> None:
        """Load the totals that the last operator saved, once."""
        if self._loaded:
            return
        self._loaded = True
        try:
            text = self._file.read_text()
            self._counters.load(json.loads(text))
            self._written = text
        except FileNotFoundError:
            pass
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            self._logger.warning("the gateway's response totals can't be read; counting starts from 0", error=error)

    def _save(self) -> None:
        text = json.dumps(self._counters.dump())
        if text != self._written:
            with contextlib.suppress(OSError):  # a full disk; the next count tries again
                write_private(self._file, text)
                self._written = text


def _identities(workers: Collection[int]) -> Iterator[Identity]:
    for pid in workers:
        with contextlib.suppress(ProcessLookupError):
            yield Identity.of(pid)


class WorkerHold:
    """Open connection to the command socket of one HAProxy worker, which does not exit before it is closed."""

    _PROMPT = b"\n> "
    _ANSWER_MAX_BYTES = 16 * 1024 * 1024
    _FAILURES = (OSError, EOFError, asyncio.LimitOverrunError)
    _SHOW_FRONTENDS = "show stat -1 1 -1"

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, stats_socket: str, pid: int) -> WorkerHold | None:
        """Connect to the current worker; return None if it is not the process `pid`, or does not answer."""
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                reader, writer = await asyncio.open_unix_connection(stats_socket, limit=cls._ANSWER_MAX_BYTES)
        except OSError:  # includes TimeoutError
            return None
        hold = cls(reader, writer)
        if await hold._is_with(pid):
            return hold
        hold.close()
        return None

    @property
    def is_open(self) -> bool:
        """Return whether the connection is open."""
        return not self._reader.at_eof() and not self._writer.is_closing()

    async def is_idle(self) -> bool:
        """Return whether no client is connected to the old worker; final, because it accepts no connections.

        A connection that failed holds nothing, so the worker then counts as idle.
        """
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                rows = csv.DictReader((await self._send_command(self._SHOW_FRONTENDS)).lstrip("# \n").splitlines())
                return all(row["scur"] == "0" for row in rows if row["svname"] == "FRONTEND")
        except TimeoutError:  # a later call reads the late answer
            return False
        except self._FAILURES:
            return True

    def close(self) -> None:
        """Close the connection, so that the worker can exit."""
        self._writer.close()

    async def _is_with(self, pid: int) -> bool:
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                await self._send_command("prompt")
                return re.search(rf"^Pid: {pid}$", await self._send_command("show info"), re.MULTILINE) is not None
        except self._FAILURES:
            return False

    async def _send_command(self, command: str) -> str:
        self._writer.write(command.encode() + b"\n")
        return (await self._reader.readuntil(self._PROMPT)).removesuffix(self._PROMPT).decode(errors="replace")
