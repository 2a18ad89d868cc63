"""HAProxy's runtime API: commands to the workers over the master socket, and the changes of servers, maps and keys.

Commands bring the current worker to the routing table without a reload. States of a server in a worker:

```text
             add server                           not in the table
 (absent) ───────────────▶ DOWN/MAINT ──enable──▶ ready ─────────────▶ DRAIN ──no request inside──▶ MAINT ──▶ deleted
                                                    ▲                    │
                                                    └──── in the table ──┘
```

HAProxy executes no commands for the servers of an old worker, which a reload replaced; see `config` for what it does
with new requests. Its maps can still be changed.
"""

from __future__ import annotations

import asyncio
import csv
import errno
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cortex.errors import GatewayError
from cortex.gateway.backends import HOLD_SERVER
from cortex.gateway.maps import CANARY_SUFFIX, KEYS_MAP, keys_map, live_maps
from cortex.gateway.protocols import GRPC_BACKEND, KEYED_BACKEND, PROBES_BACKEND, REFUSALS_SERVER
from cortex.gateway.routes import ApiKey, RoutingTable

#: An idle worker answers within a millisecond and a saturated one within tens.
ANSWER_TIMEOUT_S = 2.0
RELOAD_TIMEOUT_S = 30.0
#: A timer that fires this much late shows that this process was stopped or busy; HAProxy then gets its time again.
_LATE_S = 0.1
_MAX_TIMEOUTS = 10
#: Time after failed checks after which requests to a machine that vanished are ended.
LOST_S = 2
#: Commands sent per connection. HAProxy executes them as they arrive.
_BATCH = 200
_SERVERS_AND_BACKENDS = "show stat -1 6 -1"
_COLUMNS = frozenset(
    {"pxname", "svname", "qcur", "scur", "slim", "stot", "status", "lastchg", "check_status", "qtime", "ctime", "rtime"}
    | {"hrsp_1xx", "hrsp_2xx", "hrsp_3xx", "hrsp_4xx", "hrsp_5xx", "hrsp_other"}
)
#: Errors caused by limits of this process. They don't mean that HAProxy hangs.
_OWN_LIMITS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})
_FAILED_CALLS = re.compile(r" key=(\S+) .* gpc0=(\d+) gpc1=(\d+)")
_PROBES = re.compile(r" key=(\S+) .* gpc0=(\d+)")
_KEYED = re.compile(r" key=(\S+)/(\d+) use=[1-9]")
_SESSIONS = re.compile(r"^(0x[0-9a-f]+): .* id=(\d+) ", re.MULTILINE)
_NOT_PLAIN = re.compile(r"([^A-Za-z0-9_])")


class Unresponsive(GatewayError):
    """HAProxy did not answer on its master socket in time."""


@dataclass(frozen=True)
class HaproxyWorkers:
    """The worker processes of one master: the current one, and old ones that finish their requests after a reload."""

    current: int | None
    old: tuple[int, ...]

    @property
    def all(self) -> tuple[int, ...]:
        """The pids of all workers, the current one first."""
        return ((self.current,) if self.current is not None else ()) + self.old


@dataclass(frozen=True)
class ServerState:
    """State of one server in one worker."""

    in_flight: int
    queued: int
    capacity: int
    accepts: bool  #: receives new requests: neither draining nor in maintenance
    lost_s: int = 0  #: seconds since it went down because connections to its machine time out; else 0


@dataclass
class BackendState:
    """State of one backend in one worker.

    `responses` are the responses since the worker started, by class of status: 1 to 5, and 0 for clients that
    disconnected before the response.
    """

    queued: int = 0
    average_ms: float = 0.0  #: of the latest requests, until the response starts; includes the time in the queue
    requests: int = 0  #: all open ones: being received, held, queued, in a server, being sent
    responses: dict[int, int] = field(default_factory=dict)
    servers: dict[str, ServerState] = field(default_factory=dict)


class RuntimeApi:
    """Client of the master process, which forwards commands to each worker."""

    def __init__(self, master_socket: Path) -> None:
        self._socket = master_socket

    async def workers(self) -> HaproxyWorkers:
        """List the worker processes."""
        return parse_workers(await self._read_table("show proc\n"))

    async def structure(self, pid: int) -> str:
        """Return the digest `structure` of the configuration that a worker runs."""
        found = re.search(
            r"^description: (\S+)", await self._send_command(f"@!{pid} show info\n"), re.MULTILINE | re.IGNORECASE
        )
        return found.group(1) if found else ""

    async def backends(self, pid: int) -> dict[str, BackendState]:
        """Return the state of every backend and server of a worker."""
        found = parse_stat(await self._read_table(f"@!{pid} {_SERVERS_AND_BACKENDS}\n"))
        if GRPC_BACKEND in found:
            _subtract_failed_calls(found, await self._read_table(f"@!{pid} show table {GRPC_BACKEND}\n"))
        if PROBES_BACKEND in found:
            _subtract_probes(found, await self._read_table(f"@!{pid} show table {PROBES_BACKEND}\n"))
        return found

    async def all_backends(self, workers: HaproxyWorkers) -> dict[int, dict[str, BackendState]]:
        """Return the state of each worker by pid, without old ones that end meanwhile."""
        seen = {}
        for pid in workers.all:
            try:
                seen[pid] = await self.backends(pid)
            except Unresponsive:
                if pid == workers.current:
                    raise
        return seen

    async def refused_connections(self, pid: int, frontend: str) -> int:
        """Return how many connections, and requests of HTTP/2, the limit of one address has refused in a worker."""
        table = await self._read_table(f"@!{pid} show stat {frontend} 1 -1\n")
        row = next(csv.DictReader(table.lstrip("# ").splitlines()), None)
        if row is None:
            raise Unresponsive(f"HAProxy's statistics lack the frontend {frontend}")
        return int(row["dcon"]) + int(row["dreq"])  # no other rule of the frontend denies requests

    async def end_keyed(self, pid: int, keys: Collection[str]) -> None:
        """End the open requests of a worker that have a key whose id is not in `keys`."""
        table = await self._read_table(f"@!{pid} show table {KEYED_BACKEND}\n")
        revoked = {number for key, number in _KEYED.findall(table) if key not in keys}
        if revoked:
            sessions = _SESSIONS.findall(await self._send_command(f"@!{pid} show sess all\n"))
            await self.run(pid, [f"shutdown session {session}" for session, number in sessions if number in revoked])

    async def map(self, pid: int, name: str) -> dict[str, str]:
        """Return the entries of a map in a worker."""
        return parse_map(await self._send_command(f"@!{pid} show map {name}\n"))

    async def run(self, pid: int, commands: Sequence[str]) -> list[str]:
        """Send commands to a worker; return its output without blank lines. Most commands print nothing."""
        output: list[str] = []
        for start in range(0, len(commands), _BATCH):
            batch = "".join(f"@!{pid} {command}\n" for command in commands[start : start + _BATCH])
            output += [line for line in (await self._send_command(batch)).splitlines() if line]
        return output

    async def reload(self) -> None:
        """Reload the configuration file. Raises: GatewayError with HAProxy's message; the old worker then goes on."""
        answer = await self._send_command("reload\n", RELOAD_TIMEOUT_S)
        if not answer.startswith("Success=1"):
            raise GatewayError(f"HAProxy rejected its new configuration: {answer.strip()[-2000:]}")

    async def _read_table(self, command: str) -> str:
        """Return the complete table that a command prints.

        While the master starts anew for a reload, or a worker is ending, they may close the connection without an
        answer. An empty table would mean that there are no workers or no backends.
        """
        answer = await self._send_command(command)
        if not (answer.startswith("#") and answer.endswith("\n\n")):
            raise Unresponsive(f"HAProxy's answer to {command.strip()!r} is not complete: {answer.strip()[:200]!r}")
        return answer

    async def _send_command(self, text: str, timeout_s: float = ANSWER_TIMEOUT_S) -> str:
        exchange = asyncio.create_task(self._exchange(text))
        try:
            if not await _ends_in_time(exchange, timeout_s):
                raise Unresponsive(f"HAProxy does not answer on {self._socket}: timed out")
            return exchange.result()
        except OSError as error:
            if error.errno in _OWN_LIMITS:
                raise GatewayError(f"HAProxy can't be queried: {error.strerror}") from error
            raise Unresponsive(f"HAProxy does not answer on {self._socket}: {error}") from error
        finally:
            exchange.cancel()

    async def _exchange(self, text: str) -> str:
        reader, writer = await asyncio.open_unix_connection(str(self._socket))
        try:
            writer.write(text.encode())
            writer.write_eof()
            return (await reader.read()).decode(errors="replace")
        finally:
            writer.close()


async def _ends_in_time(task: asyncio.Task[str], timeout_s: float) -> bool:
    """Wait for a task; return False if it does not end within a time in which this process was able to run it."""
    loop = asyncio.get_running_loop()
    for _ in range(_MAX_TIMEOUTS):
        started = loop.time()
        if (await asyncio.wait({task}, timeout=timeout_s))[0]:
            return True
        if loop.time() - started < timeout_s + _LATE_S:
            break
    return False


def parse_workers(text: str) -> HaproxyWorkers:
    """Parse the output of `show proc`."""
    current: list[int] = []
    old: list[int] = []
    group: list[int] = []
    for line in text.splitlines():
        if line.startswith("#"):
            group = {"# workers": current, "# old workers": old}.get(line.strip(), [])
        elif (fields := line.split()) and fields[0].isdigit():
            group.append(int(fields[0]))
    return HaproxyWorkers(current[0] if current else None, tuple(old))


def parse_stat(text: str) -> dict[str, BackendState]:
    """Parse the output of `show stat` for backends and servers."""
    backends: dict[str, BackendState] = {}
    held: dict[str, Mapping[str, str]] = {}
    for row in _rows(text):
        name, server = row["pxname"], row["svname"]
        backend = backends.setdefault(name, BackendState())
        if server == "BACKEND":
            backend.queued = int(row["qcur"])
            backend.requests += int(row["scur"])
            backend.average_ms = sum(float(row[name] or 0) for name in ("qtime", "ctime", "rtime"))
            backend.responses = _responses(row)
        elif server == HOLD_SERVER:
            held[name] = row
        elif server == REFUSALS_SERVER:
            backend.requests -= int(row["scur"])  # has its response, and waits for nothing
        else:
            backend.servers[server] = ServerState(
                in_flight=int(row["scur"]),
                queued=int(row["qcur"]),
                capacity=int(row["slim"] or 0),
                accepts=not row["status"].startswith(("DRAIN", "MAINT")),
                lost_s=_lost_s(row),
            )
    for name, held_row in held.items():
        _subtract_held(backends[name], held_row)
    return backends


def _rows(text: str) -> Iterator[dict[str, str]]:
    """Parse the needed columns, a tenth, of a CSV table. This runs for thousands of lines per second."""
    header, _, lines = text.lstrip("# \n").partition("\n")
    columns = [(name, number) for number, name in enumerate(header.split(",")) if name in _COLUMNS]
    for line in lines.splitlines():
        fields = next(csv.reader([line])) if '"' in line else line.split(",")
        if fields[0]:
            yield {name: fields[number] for name, number in columns}


def _lost_s(row: Mapping[str, str]) -> int:
    is_lost = row["status"].startswith("DOWN") and row["check_status"].endswith("L4TOUT")
    return int(row["lastchg"] or 0) if is_lost else 0


def _subtract_held(backend: BackendState, held: Mapping[str, str]) -> None:
    """Subtract the requests that went to the hold server: the backend counts each of them twice."""
    backend.requests -= int(held["scur"])
    responses = _responses(held)
    # Of clients that disconnected, the second pass counts 400 or nothing, depending on which pass noticed it first.
    aborted = max(0, int(held["stot"]) - int(held["scur"]) - sum(responses.values()))
    responses[0] += min(aborted, backend.responses[0])
    responses[4] += max(0, aborted - backend.responses[0])
    backend.responses = {kind: max(0, count - responses[kind]) for kind, count in backend.responses.items()}


def _subtract_failed_calls(backends: Mapping[str, BackendState], table: str) -> None:
    """Count calls of gRPC that failed, of which `table` has those of each backend, as 4xx and 5xx instead of 2xx."""
    for name, refused, failed in _FAILED_CALLS.findall(table):
        if name in backends:
            responses = backends[name].responses
            responses[4] += int(refused)
            responses[5] += int(failed)
            responses[2] = max(0, responses[2] - int(refused) - int(failed))


def _subtract_probes(backends: Mapping[str, BackendState], table: str) -> None:
    """Don't count readiness probes that were answered with 503, of which `table` has those of each backend."""
    for name, probes in _PROBES.findall(table):
        if name in backends:
            responses = backends[name].responses
            responses[5] = max(0, responses[5] - int(probes))


def _responses(row: Mapping[str, str]) -> dict[int, int]:
    return {0: int(row["hrsp_other"] or 0)} | {kind: int(row[f"hrsp_{kind}xx"] or 0) for kind in range(1, 6)}


def parse_map(text: str) -> dict[str, str]:
    """Parse the output of `show map`: lines of address, key and value."""
    entries: dict[str, str] = {}
    for line in text.splitlines():
        fields = line.split(" ", 2)
        if len(fields) == 3 and fields[0].startswith("0x"):
            entries[fields[1]] = fields[2]
    return entries


def set_map(name: str, key: str, value: str) -> str:
    """Return the command that changes an entry of a map."""
    return f"set map {name} {escape(key)} {escape(value)}"


def add_map(name: str, key: str, value: str) -> str:
    """Return the command that adds an entry to a map. The map must not contain the key."""
    return f"add map {name} {escape(key)} {escape(value)}"


def del_map(name: str, key: str) -> str:
    """Return the command that deletes an entry of a map."""
    return f"del map {name} {escape(key)}"


def escape(value: str) -> str:
    """Escape a value for a command: put a backslash before each special character."""
    return _NOT_PLAIN.sub(r"\\\1", value)


@dataclass(frozen=True)
class WantedServer:
    """Required options and capacity of a server."""

    options: str
    capacity: int


def server_commands(
    observed: Mapping[str, BackendState], wanted: Mapping[str, Mapping[str, WantedServer]], prefix: str
) -> list[str]:
    """Return the commands that bring a worker from its observed servers to the wanted ones.

    Only backends that the worker has and whose name starts with `prefix` are changed. A removed server is drained, and
    deleted once it has no request: call this again until it returns no commands. The last server of a canary is kept
    while requests wait for it, as there is no other that they could go to.
    """
    commands: list[str] = []
    for backend, state in observed.items():
        if backend.startswith(prefix):
            want = wanted.get(backend, {})
            for name in want:
                commands += _keep(f"{backend}/{name}", state.servers.get(name), want[name])
            if not want and state.queued and backend.endswith(CANARY_SUFFIX):
                continue
            for name in state.servers.keys() - want.keys():
                commands += _remove(f"{backend}/{name}", state.servers[name])
    return commands


def cut_off_commands(observed: Mapping[str, BackendState]) -> list[str]:
    """Return the commands that end the requests inside servers whose machines vanished without closing connections."""
    return [
        f"shutdown sessions server {backend}/{name}"
        for backend, state in observed.items()
        for name, server in state.servers.items()
        if server.in_flight and server.lost_s >= LOST_S
    ]


def lacks_servers(observed: Mapping[str, BackendState], wanted: Mapping[str, Mapping[str, WantedServer]]) -> bool:
    """Return whether a wanted server is missing in a worker, or receives no new requests."""
    return any(
        name not in state.servers or not state.servers[name].accepts
        for backend, state in observed.items()
        for name in wanted.get(backend, {})
    )


def has_others(
    observed: Mapping[str, BackendState], wanted: Mapping[str, Mapping[str, WantedServer]], prefix: str
) -> bool:
    """Return whether a worker still has a server that is not wanted."""
    return any(
        state.servers.keys() - wanted.get(backend, {}).keys()
        for backend, state in observed.items()
        if backend.startswith(prefix)
    )


def may_use(old: bool, backends: Mapping[str, BackendState], server: str) -> bool:
    """Return whether a request is inside a server of a worker, or may still get there.

    Servers of an old worker can't be drained. But no new request enters its backends, so only their open requests can
    reach the server.
    """
    for state in backends.values():
        if server in state.servers:
            elsewhere = state.requests - sum(other.in_flight for other in state.servers.values())
            return not old or state.servers[server].in_flight > 0 or elsewhere > 0
    return False


def _keep(path: str, state: ServerState | None, want: WantedServer) -> Iterable[str]:
    if state is None:
        yield f"add server {path} {want.options}"
        yield f"enable health {path}"
        yield f"enable server {path}"
        return
    if state.capacity != want.capacity:
        yield f"set maxconn server {path} {want.capacity}"
    if not state.accepts:
        yield f"set server {path} state ready"


def _remove(path: str, state: ServerState) -> Iterable[str]:
    if state.in_flight or state.queued:
        if state.accepts:
            yield f"set server {path} state drain"
        return
    # Drain first: maintenance alone leaves idle connections, and HAProxy then refuses the deletion forever. It also
    # refuses it, until a later attempt, if a request arrives between these commands.
    yield f"set server {path} state drain"
    yield f"set server {path} state maint"
    yield f"del server {path}"


class LiveMaps:
    """Applies the routing table to the maps of HAProxy's workers by commands."""

    def __init__(self, runtime: RuntimeApi) -> None:
        self._runtime = runtime
        self._keys: dict[int, tuple[ApiKey, ...]] = {}  # keys that each worker has, by pid

    async def sync(self, pid: int, table: RoutingTable) -> None:
        """Set the entries of all live maps in the current worker. Raises: Unresponsive."""
        commands = []
        for name, wanted in live_maps(table).items():
            if wanted:
                entries = await self._runtime.map(pid, name)
                commands += [del_map(name, key) for key in entries.keys() - wanted.keys()]
                for key, value in wanted.items():
                    if key not in entries:
                        commands.append(add_map(name, key, value))
                    elif entries[key] != value:
                        commands.append(set_map(name, key, value))
        await self._runtime.run(pid, commands)

    async def sync_keys(self, workers: HaproxyWorkers, table: RoutingTable) -> None:
        """Add new keys to every worker, and delete revoked ones.

        This includes old workers: one may hold a request that it received before the reload and has not checked yet.
        Raises: Unresponsive; GatewayError if the current worker does not have exactly the wanted keys afterwards.
        """
        self._keys = {pid: keys for pid, keys in self._keys.items() if pid in workers.all}
        if not table.requires_keys:
            self._keys.clear()  # no worker's configuration refers to the map
            return
        wanted = keys_map(table)
        for pid in workers.all:
            if self._keys.get(pid) == table.keys:
                continue
            try:
                await self._set_keys(pid, wanted)
            except GatewayError:
                if pid == workers.current:
                    raise
                continue  # it ends, or its configuration requires no keys
            self._keys[pid] = table.keys

    async def _set_keys(self, pid: int, wanted: Mapping[str, str]) -> None:
        there = await self._runtime.map(pid, KEYS_MAP)
        # Delete revoked keys first, in case a worker dies meanwhile.
        revoked = [del_map(KEYS_MAP, key) for key in there.keys() - wanted.keys()]
        new = [add_map(KEYS_MAP, key, value) for key, value in wanted.items() if key not in there]
        if revoked or new:
            output = await self._runtime.run(pid, revoked + new)
            if (await self._runtime.map(pid, KEYS_MAP)).keys() != wanted.keys():
                raise GatewayError(f"HAProxy rejected a change of API keys: {' '.join(output)[-1000:]}")
