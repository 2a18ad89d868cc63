"""The process that runs a command: start it, report readiness to the supervisor, pass on requests until it is stopped.

If the command ends, this process does too, so that the supervisor answers its requests with the cause and starts both
again. The supervisor's side is `supervisor.command_worker_slot`.

    start ──> STARTING ── ready ──> READY ── stop ──> STOPPING ──> exit 0
                 └───────> exit 1 <────┘

    state      event                                                   message        next
    STARTING   the server listens, and answers at its readiness path   ready          READY
               it is not ready for long                                waiting        STARTING, with a line in the log
               it is not ready within `start_timeout`                  failed         killed, exit 1
               the command ends                                        ended          exit 1
    READY      a probe fails                                           -              READY, with a line in the log
               silence for `SILENCE_S` and the timeout of the API      unresponsive   the supervisor kills both
               the command ends                                        ended          exit 1
               `stop`, or the last request of an orphan                -              STOPPING
    STOPPING   SIGTERM, after `STOP_S` SIGKILL; the command ends       -              exit 0
    any        this process is killed                                  -              the kernel kills the command
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from functools import partial
from pathlib import Path

import uvloop

from cortex.worker.channel import Channel
from cortex.worker.commands.command_process import CommandProcess
from cortex.worker.commands.readiness_probe import PROBE_S, SILENCE_S, probe, wait_until_ready
from cortex.worker.commands.server import FLUSH_S, CommandServer
from cortex.worker.commands.upstream import Address
from cortex.worker.monitoring.exchange_writer import open_exchange_writer
from cortex.worker.monitoring.request_log import write_log
from cortex.worker.monitoring.trace_export import open_tracing
from cortex.worker.orphan import Inheritance
from cortex.worker.request_worker import WorkerContext, connect_supervisor
from cortex.worker.shared_state import SharedConnectionState
from cortex.worker.spec import ReplicaSpec
from cortex.worker.worker_process import enter_project, open_metrics, report_failure


def run_command_worker(
    spec: ReplicaSpec,
    index: int,
    channel: Channel,
    shared_state: SharedConnectionState,
    inheritance: Inheritance,
) -> int:
    """Run the command as process `index` of a replica; return the exit code."""
    process: CommandProcess | None = None
    try:
        spec = enter_project(spec, index)
        loop = uvloop.new_event_loop()
        asyncio.set_event_loop(loop)
        process = CommandProcess(spec, index)
        process.start(loop)
        channel.send("command", pid=process.pid)
        waits = wait_until_ready(spec, process, lambda problem: channel.send("waiting", message=problem))
        address = loop.run_until_complete(waits)
    except BaseException as error:  # the edge of the process
        report_failure(channel, error)
        if process is not None:
            process.kill()
        return 1
    if address is None:
        process.kill()
        channel.send("ended", wait_status=process.wait_status)
        return 1
    file, tracing = open_metrics(spec, index), open_tracing(spec, index)
    context = WorkerContext(spec, channel, shared_state, inheritance, file, tracing)
    return _serve(context, process, address, loop)


def _serve(context: WorkerContext, process: CommandProcess, address: Address, loop: asyncio.AbstractEventLoop) -> int:
    spec, channel, file, tracing = context.spec, context.channel, context.file, context.tracing
    server = CommandServer(spec, process, address, loop, context.shared_state, file, tracing)
    exchanges = server.connections.exchanges = open_exchange_writer(spec, file)
    orphan = connect_supervisor(server, loop, context, partial(server.stop, loop.stop))
    tasks = [loop.create_task(_report_end(process, server, channel, loop))]
    if spec.readiness is not None:
        tasks.append(loop.create_task(_watch(spec, server, address, channel)))
    channel.send("ready", slots=spec.max_concurrency, shares_loop=True)
    loop.run_forever()
    process.kill()  # what the command has left behind
    with contextlib.suppress(OSError):  # the folder may be gone
        Path(process.socket_path).unlink(missing_ok=True)
    if exchanges is not None:
        exchanges.close()
    if tracing is not None:
        tracing.shutdown()
    orphan.finish()
    return 0 if server.is_stopping else 1


async def _report_end(
    process: CommandProcess, server: CommandServer, channel: Channel, loop: asyncio.AbstractEventLoop
) -> None:
    """End this process when the command ends by itself."""
    await process.ended()
    if not server.is_stopping:
        await asyncio.sleep(FLUSH_S)
        channel.send("ended", wait_status=process.wait_status)
        loop.stop()


async def _watch(spec: ReplicaSpec, server: CommandServer, address: Address, channel: Channel) -> None:
    """Report a server to the supervisor that has answered neither probes nor requests for long."""
    is_silent = False
    while not server.is_stopping:
        await asyncio.sleep(PROBE_S)
        result = await probe(address, spec.readiness)
        if result.is_ready:
            server.answered()
        silent_s = time.monotonic() - server.answered_at
        if silent_s > SILENCE_S + server.timeout_s:
            channel.send("unresponsive", message=f"{result.problem}; no request was answered for {silent_s:.0f} s")
        elif not result.is_ready and not is_silent and not server.is_stopping:
            write_log(f"the command does not answer: {result.problem}\n")
        is_silent = not result.is_ready
