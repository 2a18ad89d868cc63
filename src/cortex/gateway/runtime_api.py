"""Owns the conversation with a running HAProxy over its master socket; knows the commands, not the routing table."""

from __future__ import annotations

import asyncio
import csv
import errno
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cortex.errors import GatewayError
from cortex.gateway.backends import HOLD_SERVER

#: An idle worker answers within a millisecond and a saturated one within tens.
ANSWER_TIMEOUT_S = 2.0
RELOAD_TIMEOUT_S = 30.0
#: A machine may be away for so long, beside the checks that it failed, before requests inside it are given up.
LOST_S = 2
#: Commands sent in one connection; HAProxy reads them as they come.
_BATCH = 200
_SERVERS_AND_BACKENDS = "show stat -1 6 -1"
_COLUMNS = frozenset(
    {"pxname", "svname", "qcur", "scur", "slim", "stot", "status", "lastchg", "check_status", "qtime", "ctime", "rtime"}
    | {"hrsp_1xx", "hrsp_2xx", "hrsp_3xx", "hrsp_4xx", "hrsp_5xx", "hrsp_other"}
)
#: What we lack ourselves when we can't ask; it says nothing of HAProxy.
_OUR_LACKS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})
_NOT_PLAIN = re.compile(r"([^A-Za-z0-9_])")


class Unresponsive(GatewayError):
    """HAProxy did not answer its master socket, or not in time."""


@dataclass(frozen=True)
class Workers:
    """The worker processes behind one master: the current one, and those that a reload left to finish."""

    current: int | None
    old: tuple[int, ...]

    @property
    def all(self) -> tuple[int, ...]:
        """Every worker's pid, the current one first."""
        return ((self.current,) if self.current is not None else ()) + self.old


@dataclass(frozen=True)
class ServerState:
    """One server as one worker sees it."""

    in_flight: int
    queued: int
    capacity: int
    accepts: bool  #: gets new requests: neither draining nor in maintenance
    lost_s: int = 0  #: for how long it has been down because its machine answers nothing


@dataclass
class BackendState:
    """One backend as one worker sees it.

    `responses`: answers by class of status since the worker began, 1 to 5; 0 where a client went before its answer.
    """

    queued: int = 0
    average_ms: float = 0.0  #: until an answer begins, the wait in the queue included; of the latest answers
    requests: int = 0  #: everywhere in it: coming in, held, queued, in a server, going out
    responses: dict[int, int] = field(default_factory=dict)
    servers: dict[str, ServerState] = field(default_factory=dict)


class Runtime:
    """Sends commands to the master and, through it, to each worker."""

    def __init__(self, master_socket: Path) -> None:
        self._socket = master_socket

    async def workers(self) -> Workers:
        """List the worker processes."""
        return parse_workers(await self._ask("show proc\n"))

    async def structure(self, pid: int) -> str:
        """Return the digest of the configuration that a worker runs."""
        found = re.search(r"^description: (\S+)", await self._ask(f"@!{pid} show info\n"), re.MULTILINE | re.IGNORECASE)
        return found.group(1) if found else ""

    async def backends(self, pid: int) -> dict[str, BackendState]:
        """Return the state of every backend and server of a worker."""
        return parse_stat(await self._ask(f"@!{pid} {_SERVERS_AND_BACKENDS}\n"))

    async def all_backends(self, workers: Workers) -> dict[int, dict[str, BackendState]]:
        """Ask every worker, by its pid; an old one that leaves meanwhile has nothing to say."""
        seen = {}
        for pid in workers.all:
            try:
                seen[pid] = await self.backends(pid)
            except Unresponsive:
                if pid == workers.current:
                    raise
        return seen

    async def map(self, pid: int, name: str) -> dict[str, str]:
        """Return a map's entries as a worker has them."""
        return parse_map(await self._ask(f"@!{pid} show map {name}\n"))

    async def run(self, pid: int, commands: Sequence[str]) -> list[str]:
        """Send commands to a worker and return what it said, blank lines left out; most say nothing."""
        said: list[str] = []
        for start in range(0, len(commands), _BATCH):
            batch = "".join(f"@!{pid} {command}\n" for command in commands[start : start + _BATCH])
            said += [line for line in (await self._ask(batch)).splitlines() if line]
        return said

    async def reload(self) -> None:
        """Load the configuration file anew. Raises: GatewayError with HAProxy's words; then the old one goes on."""
        answer = await self._ask("reload\n", RELOAD_TIMEOUT_S)
        if not answer.startswith("Success=1"):
            raise GatewayError(f"HAProxy refused its new configuration: {answer.strip()[-2000:]}")

    async def _ask(self, text: str, timeout_s: float = ANSWER_TIMEOUT_S) -> str:
        try:
            async with asyncio.timeout(timeout_s):
                return await self._exchange(text)
        except OSError as error:  # TimeoutError is one
            if error.errno in _OUR_LACKS:
                raise GatewayError(f"HAProxy can't be asked: {error.strerror}") from error
            raise Unresponsive(f"HAProxy does not answer on {self._socket}: {error or 'timed out'}") from error

    async def _exchange(self, text: str) -> str:
        reader, writer = await asyncio.open_unix_connection(str(self._socket))
        try:
            writer.write(text.encode())
            writer.write_eof()
            return (await reader.read()).decode(errors="replace")
        finally:
            writer.close()


def parse_workers(text: str) -> Workers:
    """Read `show proc`."""
    current: list[int] = []
    old: list[int] = []
    into: list[int] = []
    for line in text.splitlines():
        if line.startswith("#"):
            into = {"# workers": current, "# old workers": old}.get(line.strip(), [])
        elif (fields := line.split()) and fields[0].isdigit():
            into.append(int(fields[0]))
    return Workers(current[0] if current else None, tuple(old))


def parse_stat(text: str) -> dict[str, BackendState]:
    """Read `show stat` of backends and servers."""
    backends: dict[str, BackendState] = {}
    held: dict[str, Mapping[str, str]] = {}
    for row in _rows(text):
        name, server = row["pxname"], row["svname"]
        backend = backends.setdefault(name, BackendState())
        if server == "BACKEND":
            backend.queued = int(row["qcur"])
            backend.requests = int(row["scur"])
            backend.average_ms = sum(float(row[name] or 0) for name in ("qtime", "ctime", "rtime"))
            backend.responses = _responses(row)
        elif server == HOLD_SERVER:
            held[name] = row
        else:
            backend.servers[server] = ServerState(
                in_flight=int(row["scur"]),
                queued=int(row["qcur"]),
                capacity=int(row["slim"] or 0),
                accepts=not row["status"].startswith(("DRAIN", "MAINT")),
                lost_s=_lost_s(row),
            )
    for name, held_row in held.items():
        _leave_out(backends[name], held_row)
    return backends


def _rows(text: str) -> Iterator[dict[str, str]]:
    """Read what we need of a table in CSV, of which that is a tenth; thousands of lines are read per second."""
    header, _, lines = text.lstrip("# \n").partition("\n")
    columns = [(name, number) for number, name in enumerate(header.split(",")) if name in _COLUMNS]
    for line in lines.splitlines():
        fields = next(csv.reader([line])) if '"' in line else line.split(",")
        if fields[0]:
            yield {name: fields[number] for name, number in columns}


def _lost_s(row: Mapping[str, str]) -> int:
    is_lost = row["status"].startswith("DOWN") and row["check_status"].endswith("L4TOUT")
    return int(row["lastchg"] or 0) if is_lost else 0


def _leave_out(backend: BackendState, held: Mapping[str, str]) -> None:
    """Forget those that are, or were, behind the server that holds: they are, or were, in the backend once more."""
    backend.requests -= int(held["scur"])
    responses = _responses(held)
    # A client that went before its answer is counted as 400 or as nothing, as HAProxy noticed it here or there.
    aborted = max(0, int(held["stot"]) - int(held["scur"]) - sum(responses.values()))
    responses[0] += min(aborted, backend.responses[0])
    responses[4] += max(0, aborted - backend.responses[0])
    backend.responses = {kind: max(0, count - responses[kind]) for kind, count in backend.responses.items()}


def _responses(row: Mapping[str, str]) -> dict[int, int]:
    return {0: int(row["hrsp_other"] or 0)} | {kind: int(row[f"hrsp_{kind}xx"] or 0) for kind in range(1, 6)}


def parse_map(text: str) -> dict[str, str]:
    """Read `show map`: an address, the key and the value in each line."""
    entries: dict[str, str] = {}
    for line in text.splitlines():
        fields = line.split(" ", 2)
        if len(fields) == 3 and fields[0].startswith("0x"):
            entries[fields[1]] = fields[2]
    return entries


def set_map(name: str, key: str, value: str) -> str:
    """Write the command that changes a map's entry."""
    return f"set map {name} {escape(key)} {escape(value)}"


def add_map(name: str, key: str, value: str) -> str:
    """Write the command that adds an entry to a map, which must not have it."""
    return f"add map {name} {escape(key)} {escape(value)}"


def del_map(name: str, key: str) -> str:
    """Write the command that takes an entry from a map."""
    return f"del map {name} {escape(key)}"


def escape(value: str) -> str:
    """Quote a value for the command line of HAProxy: a backslash before all that is not plain."""
    return _NOT_PLAIN.sub(r"\\\1", value)


@dataclass(frozen=True)
class WantedServer:
    """A server as it should be in every worker."""

    options: str
    capacity: int


def server_commands(
    observed: Mapping[str, BackendState], wanted: Mapping[str, Mapping[str, WantedServer]], prefix: str
) -> list[str]:
    """Decide how a worker gets from the servers it has to those it should have.

    Backends that a worker does not know, or that are not called `prefix…`, are left alone. A server that goes is
    drained, and deleted once nothing is in it: call again until nothing is left to say.
    """
    commands: list[str] = []
    for backend, state in observed.items():
        if backend.startswith(prefix):
            want = wanted.get(backend, {})
            for name in want:
                commands += _keep(f"{backend}/{name}", state.servers.get(name), want[name])
            for name in state.servers.keys() - want.keys():
                commands += _remove(f"{backend}/{name}", state.servers[name])
    return commands


def cut_off_commands(observed: Mapping[str, BackendState]) -> list[str]:
    """Decide which servers have their requests ended: nothing comes from their machines any more, no error either."""
    return [
        f"shutdown sessions server {backend}/{name}"
        for backend, state in observed.items()
        for name, server in state.servers.items()
        if server.in_flight and server.lost_s >= LOST_S
    ]


def lacks_servers(observed: Mapping[str, BackendState], wanted: Mapping[str, Mapping[str, WantedServer]]) -> bool:
    """Say whether a worker misses a server, or keeps one from new requests, that it should send requests to."""
    return any(
        name not in state.servers or not state.servers[name].accepts
        for backend, state in observed.items()
        for name in wanted.get(backend, {})
    )


def has_others(
    observed: Mapping[str, BackendState], wanted: Mapping[str, Mapping[str, WantedServer]], prefix: str
) -> bool:
    """Say whether a worker still has a server that it should not."""
    return any(
        state.servers.keys() - wanted.get(backend, {}).keys()
        for backend, state in observed.items()
        if backend.startswith(prefix)
    )


def may_use(old: bool, backends: Mapping[str, BackendState], server: str) -> bool:
    """Say whether a request is, or can get, into a server of a worker.

    In an old worker no server can be drained, but no request enters a backend any more either: those that it has are
    all that can reach the server.
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
    # Draining comes first, as maintenance alone leaves idle connections for which the deletion is refused for ever. A
    # request that comes between these lines goes on: then, too, the deletion is refused, and tried again later.
    yield f"set server {path} state drain"
    yield f"set server {path} state maint"
    yield f"del server {path}"
