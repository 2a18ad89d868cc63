"""Probes of a command's server: it is ready while it listens, and answers at its readiness path.

A server that is busy answers late, if at all: silence is a failure only if no request explains it. An answer that is no
success is a failure, and so is a refused connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from cortex.errors import UserError
from cortex.worker.commands.command_process import CommandProcess
from cortex.worker.commands.upstream import Address
from cortex.worker.monitoring.request_log import write_log
from cortex.worker.spec import ReplicaSpec

#: Intervals of probes until the server is ready: short at first, because most servers start quickly.
_FIRST_INTERVAL_S, _INTERVAL_S = 0.02, 0.25
#: Interval of probes of a server that is ready, and the time for one answer; interval of those after a failure.
PROBE_S, FAILING_S = 5.0, 1.0
#: A process gets no requests after so many failures in a row, until a probe succeeds.
MAX_FAILURES = 3
#: Interval of log lines about a server that is not ready.
_NOTICE_S = 10.0
#: Time after which a server that listens elsewhere is noticed, or another one that listens at its port.
_MISTAKE_S = 2.0


@dataclass(frozen=True)
class ProbeResult:
    """The answer to one probe."""

    problem: str  #: "" if the server is ready
    is_silent: bool = False  #: there was no answer, which may be one of a server that is busy

    @property
    def is_ready(self) -> bool:
        """Return whether the server is ready."""
        return not self.problem


@dataclass
class Readiness:
    """The readiness of a process that has been ready, by the probes since then."""

    failures: int = 0  #: in a row
    failing_since: float = 0.0  #: monotonic; the first of them
    problem: str = ""  #: of the last one

    @property
    def is_ready(self) -> bool:
        """Return whether the process may get requests."""
        return self.failures < MAX_FAILURES

    def observe(self, result: ProbeResult, is_busy: bool, now: float) -> None:
        """Count a probe. `is_busy`: requests explain that there was no answer."""
        if result.is_silent and is_busy:
            return
        if not self.failures:
            self.failing_since = now
        self.failures = 0 if result.is_ready else self.failures + 1
        self.problem = result.problem


async def wait_until_ready(
    spec: ReplicaSpec, process: CommandProcess, report: Callable[[str], object]
) -> Address | None:
    """Wait until the server is ready, and return its address; None if its process has ended.

    `report` receives why it is not ready yet. Raises: UserError if it takes longer than `start_timeout_s`.
    """
    began = time.monotonic()
    notice_at = began + _NOTICE_S
    mistake_at = began + _MISTAKE_S
    interval_s = _FIRST_INTERVAL_S
    while process.wait_status is None:
        address = process.find_address()
        if address is None:
            problem = process.no_address
        else:
            result = await probe(address, spec.readiness, process.still_listens_at)
            if result.is_ready and process.wait_status is None:
                return address
            problem = result.problem
        now = time.monotonic()
        is_late = now - began > spec.start_timeout_s
        if now > notice_at or is_late or (address is None and now > mistake_at):
            mistake = process.find_mistake() if address is None else ""
            mistake_at = math.inf
            problem += mistake
            if is_late:
                raise UserError(f"the command was not ready within {spec.start_timeout_s:g} s: {problem}")
            if now > notice_at or mistake:
                write_log(f"the command is not ready after {now - began:.0f} s: {problem}\n")
                report(f"the command is not ready: {problem}")
                notice_at = now + _NOTICE_S
        with contextlib.suppress(TimeoutError):  # not longer than the process runs
            async with asyncio.timeout(interval_s):
                await process.ended()
        interval_s = min(interval_s * 1.5, _INTERVAL_S)
    return None


async def probe(address: Address, path: str | None, is_of_command: Callable[[Address], bool]) -> ProbeResult:
    """Request the readiness path; any status from 200 to 399 is ready. Without a path, accepting connections is.

    `is_of_command` returns whether a connection that was just made to an address is one to the command.
    """
    if path is None:
        return ProbeResult("")
    silence = ProbeResult(f"GET {path} had no answer within {PROBE_S:g} s", is_silent=True)
    try:
        async with asyncio.timeout(PROBE_S):
            status = await _get(address, path, is_of_command)
    except (TimeoutError, BlockingIOError):  # the latter of a unix socket whose backlog is full
        return silence
    except (OSError, ValueError) as error:
        return ProbeResult(f"GET {path} failed: {error or type(error).__name__}")
    return ProbeResult("" if 200 <= status < 400 else f"GET {path} answered {status}")


async def _get(address: Address, path: str, is_of_command: Callable[[Address], bool]) -> int:
    if isinstance(address, str):
        reader, writer = await asyncio.open_unix_connection(address)
    else:
        reader, writer = await asyncio.open_connection(*address)
    try:
        if not is_of_command(address):
            raise ValueError("another program listens at the port")
        writer.write(
            f"GET {path} HTTP/1.1\r\nhost: localhost\r\nuser-agent: cortex\r\nconnection: close\r\n\r\n".encode()
        )
        line = await reader.readline()
        if not line.startswith(b"HTTP/1."):
            raise ValueError("the answer is not HTTP" if line else "the connection was closed without an answer")
        return int(line.split()[1])
    finally:
        writer.close()
