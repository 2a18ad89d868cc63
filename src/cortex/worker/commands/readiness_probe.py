"""Probes of a command's server: it is ready once it listens and answers at its readiness path, and has to stay so."""

from __future__ import annotations

import asyncio
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
#: Interval of probes of a server that is ready, and the time for one answer.
PROBE_S = 5.0
#: Interval of log lines about a server that is not ready.
_NOTICE_S = 10.0
#: Time after which a server that listens elsewhere is noticed, which is probably a mistake.
_ELSEWHERE_S = 2.0
#: A server that answers neither a probe nor a request for this long, in addition to the timeout of the API, is ended.
SILENCE_S = 30.0


@dataclass(frozen=True)
class ProbeResult:
    """The answer to one probe."""

    is_ready: bool
    problem: str  #: "" if it is ready


async def wait_until_ready(
    spec: ReplicaSpec, process: CommandProcess, report: Callable[[str], object]
) -> Address | None:
    """Wait until the server is ready, and return its address; None if its process has ended.

    `report` receives why it is not ready yet. Raises: UserError if it takes longer than `start_timeout_s`.
    """
    began = time.monotonic()
    notice_at = began + _NOTICE_S
    elsewhere_at = began + _ELSEWHERE_S
    interval_s = _FIRST_INTERVAL_S
    while process.wait_status is None:
        address = process.find_address()
        problem = f"it listens neither at the port $PORT ({process.port}) nor at the unix socket $CORTEX_SOCKET"
        if address is not None:
            result = await probe(address, spec.readiness)
            if result.is_ready and process.wait_status is None:
                return address
            problem = result.problem
        now = time.monotonic()
        is_late = now - began > spec.start_timeout_s
        if now > notice_at or is_late or (address is None and now > elsewhere_at):
            elsewhere = _listens_elsewhere(process) if address is None else ""
            elsewhere_at = math.inf
            problem += elsewhere
            if is_late:
                raise UserError(f"the command was not ready within {spec.start_timeout_s:g} s: {problem}")
            if now > notice_at or elsewhere:
                write_log(f"the command is not ready after {now - began:.0f} s: {problem}\n")
                report(f"the command is not ready: {problem}")
                notice_at = now + _NOTICE_S
        await _sleep(process, interval_s)
        interval_s = min(interval_s * 1.5, _INTERVAL_S)
    return None


async def _sleep(process: CommandProcess, seconds: float) -> None:
    """Sleep, but not longer than the process runs."""
    try:
        async with asyncio.timeout(seconds):
            await process.ended()
    except TimeoutError:
        pass


def _listens_elsewhere(process: CommandProcess) -> str:
    others = process.find_other_ports()
    return f"; it listens at {', '.join(others)}: pass it the port, such as --port $PORT" if others else ""


async def probe(address: Address, path: str | None) -> ProbeResult:
    """Request the readiness path; any status from 200 to 399 is ready. Without a path, accepting connections is."""
    if path is None:
        return ProbeResult(True, "")
    try:
        async with asyncio.timeout(PROBE_S):
            status = await _get(address, path)
    except TimeoutError:
        return ProbeResult(False, f"GET {path} had no answer within {PROBE_S:g} s")
    except (OSError, ValueError) as error:
        return ProbeResult(False, f"GET {path} failed: {error or type(error).__name__}")
    return ProbeResult(200 <= status < 400, "" if 200 <= status < 400 else f"GET {path} answered {status}")


async def _get(address: Address, path: str) -> int:
    if isinstance(address, str):
        reader, writer = await asyncio.open_unix_connection(address)
    else:
        reader, writer = await asyncio.open_connection(*address)
    try:
        writer.write(
            f"GET {path} HTTP/1.1\r\nhost: localhost\r\nuser-agent: cortex\r\nconnection: close\r\n\r\n".encode()
        )
        line = await reader.readline()
        if not line.startswith(b"HTTP/1."):
            raise ValueError("the answer is not HTTP" if line else "the connection was closed without an answer")
        return int(line.split()[1])
    finally:
        writer.close()
