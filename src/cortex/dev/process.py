"""The process of one API in `cortex dev`: load the user's code, serve, and replace functions while it runs.

    cortex dev ── connections, "swap", "stop" ──▶ this process ── "ready", "swapped", "new_process" ──▶ cortex dev

User code runs on the main thread, the event loop of synchronous methods on another, and messages arrive on a third, so
that a debugger stops none of them. If `cortex dev` ends, so does this process.
"""

from __future__ import annotations

import asyncio
import faulthandler
import io
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cortex.dev import debugger
from cortex.dev.link import CONNECTION, Link
from cortex.dev.local.api import ApplicationApi, LocalApi, RequestApi, enter_environment
from cortex.dev.reload.hot_swap import SwapError
from cortex.dev.reload.project_sources import ProjectSources
from cortex.dev.reload.source_changes import NewProcess
from cortex.errors import CortexError, UserError
from cortex.lifecycle import ApiKind
from cortex.predictor.applications import APPLICATION_TYPES
from cortex.predictor.preloading import find_leading_imports, run_imports
from cortex.predictor.tracebacks import describe, format_user_traceback
from cortex.predictor.user_forks import end_forks_of_threads
from cortex.worker.http.connection import Connection
from cortex.worker.spec import ReplicaSpec
from cortex.worker.worker_process import run_exit_hooks, signature_text

Messages = Iterator[tuple[dict[str, Any], socket.socket | None]]


def main() -> None:
    """Run the process; its arguments are the descriptors of the link and of the terminal's token."""
    link = Link(socket.socket(fileno=int(sys.argv[1])))
    token = debugger.TerminalToken(int(sys.argv[2]), int(sys.argv[3]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for `cortex dev`, which stops its processes
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # `ApiProcess.start` blocked it
    faulthandler.enable()
    messages = link.receive()
    for message, _ in messages:
        if message["kind"] == "preload":
            _preload(ReplicaSpec.from_json(message["spec"]))
        elif message["kind"] == "load":
            _DevProcess(link, token, message).run(messages)
            break
        elif message["kind"] == "stop":  # it was prepared for a restart that did not come
            break
    _flush()
    os._exit(0)


def _preload(spec: ReplicaSpec) -> None:
    """Import the libraries of the user's code, so that a later start takes less time."""
    os.chdir(spec.project_dir)
    if spec.path:
        run_imports(find_leading_imports(Path(spec.project_dir), spec.path, spec.python_path))


def _create_server(spec: ReplicaSpec, api: str, loop: asyncio.AbstractEventLoop) -> LocalApi:
    """Return the server of an API, whose configuration is `api`, as JSON. Raises: UserError."""
    if spec.command:
        if not hasattr(os, "pidfd_open"):
            raise UserError("type: command needs Linux; start its server itself")
        from cortex.dev.local.command import CommandApi  # noqa: PLC0415 - other APIs start faster

        return CommandApi(spec, loop)
    if spec.protobuf_path is not None:
        raise UserError("gRPC is not served here; deploy the API to call it")
    if spec.kind != ApiKind.REALTIME:
        from cortex.config.schema import Api  # noqa: PLC0415 - processes that serve requests start faster
        from cortex.dev.job_server import JobServer  # noqa: PLC0415 - likewise
        from cortex.dev.local.jobs import AsyncApi, JobsApi  # noqa: PLC0415 - likewise

        is_async = spec.kind == ApiKind.ASYNC
        served = AsyncApi(spec) if is_async else JobsApi(spec, Api.read_stored(api), os.environ)
        return JobServer(spec, served, loop)
    return (ApplicationApi if spec.type in APPLICATION_TYPES else RequestApi)(spec, loop)


class _DevProcess:
    """The process after the message `load`."""

    def __init__(self, link: Link, token: debugger.TerminalToken, message: dict[str, Any]) -> None:
        self._link = link
        self._token = token
        self._spec = ReplicaSpec.from_json(message["spec"])
        self._api: str = message["api"]
        self._prefix: str = message["prefix"]
        self._debug_port: int | None = message["debug_port"]
        self._loop = asyncio.new_event_loop()
        end_forks_of_threads(self._loop)
        self._sources = ProjectSources(self._spec.project_dir)

    def run(self, messages: Messages) -> None:
        """Load the API, and serve it until `stop` arrives."""
        if self._prefix:
            prefix_output(self._prefix)
        os.chdir(self._spec.project_dir)
        debugger.install(self._token, lambda is_active: self._link.send("debugging", is_active=is_active))
        enter_environment(self._spec)
        sys.dont_write_bytecode = True  # the project is the user's own folder
        try:
            if self._debug_port is not None and (problem := debugger.listen(self._debug_port)):
                raise UserError(problem)
            server = _create_server(self._spec, self._api, self._loop)
            with self._sources.recording():
                server.load()
        except BaseException as error:  # the edge of the user's code
            self._report_failure(error)
            return
        self._sources.update()
        self._report_ready("ready", server)
        threading.Thread(target=self._receive, args=(messages, server), name="cortex-link", daemon=True).start()
        server.run()
        run_exit_hooks()

    def _report_failure(self, error: BaseException) -> None:
        text = error.traceback if isinstance(error, UserError) else ""
        message = str(error) if isinstance(error, CortexError) else describe(error)
        if not isinstance(error, CortexError):
            text = format_user_traceback(error)
        self._sources.update()
        self._link.send("failed", message=message, traceback=text, **self._sources.describe())

    def _report_ready(self, kind: str, server: LocalApi, **fields: Any) -> None:
        signature = signature_text(lambda: server.signature)
        self._link.send(kind, signature=signature, **fields, **self._sources.describe())

    def _receive(self, messages: Messages, server: LocalApi) -> None:
        """Handle messages, on a thread of its own."""
        for message, connection in messages:
            if message["kind"] == CONNECTION and connection is not None:
                self._loop.call_soon_threadsafe(server.add, connection, self._on_closed)
            elif message["kind"] == "swap":
                self._loop.call_soon_threadsafe(self._swap, server)
            elif message["kind"] == "stop":
                server.stop()
        os._exit(1)  # `cortex dev` has ended

    # Event-loop thread only.

    def _on_closed(self, connection: Connection) -> None:
        """Report the modules that a request has imported."""
        if self._sources.update():
            self._link.send("files", **self._sources.describe())

    def _swap(self, server: LocalApi) -> None:
        """Replace the functions that have changed, if that suffices."""
        try:
            found = self._sources.swap(server.class_name)
            if isinstance(found, NewProcess):
                self._link.send("new_process", reason=found.reason)
                return
            names, changes_signatures = found
            if changes_signatures and not server.rebind():
                self._link.send("new_process", reason=f"the arguments of {', '.join(names)} changed")
                return
        except BaseException as error:  # the edge of the user's code: what imports and annotations raise
            is_ours = isinstance(error, SwapError | CortexError)
            self._link.send("new_process", reason=str(error) if is_ours else describe(error))
            return
        self._report_ready("swapped", server, names=names)


class PrefixedStream(io.TextIOWrapper):
    """Standard output or error of a process, each line with the name of its API."""

    _is_at_start = True

    def __init__(self, stream: io.TextIOWrapper, prefix: str) -> None:
        fresh = open(stream.fileno(), "wb", buffering=0, closefd=False)  # noqa: PTH123, SIM115 - for as long as the process
        super().__init__(fresh, stream.encoding, stream.errors, newline="\n", line_buffering=True)
        self._line_prefix = prefix
        self._lock = threading.RLock()

    def write(self, text: str) -> int:
        """Write text, and the prefix before each of its lines."""
        if not text:
            return 0
        with self._lock:
            is_complete = text.endswith("\n")
            lines = (text[:-1] if is_complete else text).replace("\n", f"\n{self._line_prefix}")
            before = self._line_prefix if self._is_at_start else ""
            super().write(f"{before}{lines}{chr(10) if is_complete else ''}")
            self._is_at_start = is_complete
            if not is_complete:
                self.flush()
        return len(text)


def prefix_output(prefix: str) -> None:
    """Write a prefix before each line that this process prints."""
    for name in ("stdout", "stderr"):
        setattr(sys, name, PrefixedStream(getattr(sys, name), prefix))


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue


if __name__ == "__main__":
    main()
