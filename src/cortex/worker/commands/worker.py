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
               `MAX_FAILURES` in a row fail                            unready        READY, without new requests
               a probe succeeds after that                             recovered      READY
               it has been without for long, and answers no request    unresponsive   the supervisor kills both
               the command ends                                        ended          exit 1
               `stop`                                                  -              STOPPING
    STOPPING   SIGTERM, after `STOP_S` SIGKILL; the command ends       -              exit 0
    READY      the supervisor dies: requests are answered              -              killed, exit 1
    any        this process is killed                                  -              the kernel kills the command
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path

import uvloop

from cortex.worker.channel import Channel
from cortex.worker.commands.command_process import CommandProcess
from cortex.worker.commands.command_server import FLUSH_S, CommandServer
from cortex.worker.commands.readiness_probe import FAILING_S, PROBE_S, Readiness, wait_until_ready
from cortex.worker.monitoring.request_log import write_log
from cortex.worker.monitoring.trace_export import open_tracing
from cortex.worker.request_server import WorkerContext
from cortex.worker.request_worker import SupervisorChannel, recording
from cortex.worker.shared_state import SharedConnectionState
from cortex.worker.spec import ReplicaSpec
from cortex.worker.worker_process import enter_project, open_metrics, report_failure


def run_command_worker(
    spec: ReplicaSpec,
    index: int,
    channel: Channel,
    shared_state: SharedConnectionState,
    max_failing_s: float,
) -> int:
    """Run the command as process `index` of a replica; return the exit code.

    It is ended once its probes have failed for `max_failing_s`.
    """
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
    tracing = open_tracing(spec, index)
    context = WorkerContext(spec, loop, shared_state, open_metrics(spec, index), tracing)
    server = CommandServer(context, process, address)
    with recording(context, server):
        SupervisorChannel(server, channel, on_orphaned=loop.stop).start()
        tasks = [  # noqa: F841 - the loop keeps no reference to them
            loop.create_task(_report_end(process, server, channel, loop)),
            loop.create_task(_watch(server, channel, max_failing_s)),
        ]
        channel.send("ready", slots=server.slots, shares_loop=server.shares_loop)
        server.run()
        process.kill()  # what the command has left behind
    with contextlib.suppress(OSError):  # the folder may be gone
        Path(process.socket_path).unlink(missing_ok=True)
    if tracing is not None:
        tracing.shutdown()
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


async def _watch(server: CommandServer, channel: Channel, max_failing_s: float) -> None:
    """Probe the server, and report to the supervisor when its readiness changes, and when it should be restarted."""
    readiness = Readiness()
    is_reported = False  #: to be not ready
    while not server.is_stopping:
        await asyncio.sleep(FAILING_S if readiness.failures else PROBE_S)
        began_at = time.monotonic()
        result = await server.probe()
        now = time.monotonic()
        if server.is_stopping:
            return
        failures = readiness.failures
        readiness.observe(result, server.is_busy(began_at), now)
        if readiness.failures > failures == 0:
            write_log(f"the command does not answer: {result.problem}\n")
        if not readiness.is_ready:
            is_reported = channel.send("unready", message=readiness.problem) or is_reported
            failing_s = now - readiness.failing_since
            if failing_s > max_failing_s and not server.is_busy(now):
                channel.send("unresponsive", message=f"it was not ready for {failing_s:.0f} s: {readiness.problem}")
        elif is_reported and channel.send("recovered"):
            is_reported = False
            write_log("the command is ready again\n")
