"""`cortex dev`: the processes of a project's APIs, and what a change of its files does to them.

file_watcher ── changed files ──▶ DevSession: check the project; if that fails, the old code goes on serving
                                    │ requests are held
                                    ├─▶ DevApi.reload: swap functions in the process, or
                                    └─▶ DevApi.restart: a new process beside the old, which takes over when it is ready
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Coroutine, Iterator, Mapping
from dataclasses import dataclass, replace
from http.client import HTTPException
from pathlib import Path

from cortex.config.schema import Api
from cortex.dev.api_process import DebugSettings, LoadResult, environment_of_processes
from cortex.dev.debugger import TerminalToken
from cortex.dev.dev_api import DevApi
from cortex.dev.http_gateway import TIMEOUT_S, DevGateway
from cortex.dev.local.project import LocalProject, prepare
from cortex.dev.reload.file_usage import FileUsage
from cortex.dev.reload.file_watcher import FileWatcher
from cortex.dev.sample_request import SampleRequest, curl_command
from cortex.dev.terminal import Terminal, format_ms
from cortex.errors import ConfigError, CortexError, Diagnostic, InputError
from cortex.home import Home
from cortex.lifecycle import ApiKind
from cortex.projects.archive import IGNORE_NAME
from cortex.worker.spec import ReplicaSpec

#: Streams that continue after a reload are cut after this time.
STREAM_S = 1.0
#: A start that takes longer is reported before it ends.
_SLOW_START_S = 1.0
_PORTS_TRIED = 20
#: The longest time that a request waits until a change is noticed: about 40 ms, and more on a busy machine.
_NOTICE_S = 2.0
_NOTICE_POLL_S = 0.005


@dataclass(frozen=True)
class SessionSettings:
    """The arguments of `cortex dev`."""

    config_file: Path
    home: Home
    environ: Mapping[str, str]
    host: str = "127.0.0.1"
    port: int | None = None  #: None: the first free one from 8888 on
    debug_port: int | None = None
    sample: tuple[bytes, str] | None = None  #: body and content type


class DevSession:
    """All APIs of a project in one terminal, until Ctrl-C."""

    def __init__(self, settings: SessionSettings, terminal: Terminal) -> None:
        self.terminal = terminal
        self.environ = environment_of_processes(settings.environ)
        self._settings = settings
        self._apis: dict[str, DevApi] = {}
        self._gateway = DevGateway(terminal.request, self.notice_changes)
        self._port = 0
        self._project: LocalProject
        self._noticed: set[Path] = set()  #: files of changes that are not applied yet
        self._has_noticed = asyncio.Event()
        self._unapplied: set[Path] = set()  #: files of a change that failed: they are applied with the next one
        self._stopped = asyncio.Event()
        self._reloading = asyncio.Lock()
        self._has_failed = False
        self._is_installing = False
        #: Names of APIs, and files because of which their restarts wait, or have waited.
        self._postponed: set[tuple[str, str]] = set()
        self._due: set[tuple[str, str]] = set()

    async def run(self) -> None:
        """Serve until SIGINT, SIGTERM or SIGHUP. Raises: ConfigError, InputError, CortexError."""
        loop = asyncio.get_running_loop()
        self._project = await asyncio.to_thread(LocalProject.read, self._settings.config_file, self._settings.environ)
        self._print_warnings(self._project)
        token = TerminalToken.create()
        self._debug = DebugSettings(token, self._settings.debug_port)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._stopped.set)
        self._port = await self._listen()
        self._watcher = FileWatcher(loop, self._on_change)
        work = asyncio.create_task(self._work())
        stopping = asyncio.create_task(self._stopped.wait())
        try:
            await asyncio.wait([work, stopping], return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                await work  # raises what failed
        finally:
            self._watcher.stop()
            work.cancel()
            stopping.cancel()
            await asyncio.gather(work, stopping, return_exceptions=True)
            await self._gateway.stop()
            await asyncio.gather(*(each.stop() for each in self._apis.values()))
            token.close()

    @property
    def _files(self) -> FileUsage:
        return FileUsage(self._project, [*self._apis.values()])

    def prefix_of(self, api: Api) -> str:
        """Return what precedes each line that the processes of an API print: nothing if there is just one API."""
        return f"{api.name} | " if len(self._apis) > 1 else ""

    def watch(self) -> None:
        """Watch the files that the project and its processes use at present."""
        self._watcher.watch(self._files.watched(self._has_failed))

    async def notice_changes(self) -> None:
        """Wait until files that have changed are noticed, and the requests that they concern are held."""
        deadline = time.monotonic() + _NOTICE_S
        while self._watcher.is_behind() and time.monotonic() < deadline:
            await asyncio.sleep(_NOTICE_POLL_S)
        await asyncio.sleep(0)  # `_on_change` may be the next callback

    async def restart_after_exit(self, each: DevApi) -> None:
        """Start the process of an API again after it has ended on its own."""
        async with self._reloading:
            if not each.is_serving:
                await self._start_process(each, time.perf_counter(), "started again")
            elif not each.is_outdated:
                self._release(each)

    # Start.

    async def _listen(self) -> int:
        settings = self._settings
        first = settings.port if settings.port is not None else 8888
        count = 1 if settings.port is not None else _PORTS_TRIED
        for port in range(first, first + count):
            try:
                return await self._gateway.start(settings.host, port)
            except OSError as error:
                # asyncio writes the address into the message, too.
                reason = os.strerror(error.errno).lower() if error.errno and error.errno > 0 else str(error)
        where = f"port {first}" if count == 1 else f"none of the ports {first} to {port}"
        raise InputError(f"{where} of {settings.host} can't be used: {reason}; choose another with --port")

    async def _work(self) -> None:
        for api in self._project.diagnosis.apis:
            await self._add(api)
        self._gateway.upstreams = [*self._apis.values()]
        self.watch()
        self._watcher.start()
        served = [each for each in self._apis.values() if each.api.kind is not ApiKind.SPLITTER]
        await asyncio.gather(*(self._start(each) for each in served))
        for each in self._apis.values():
            self._print_api(each)
        self.terminal.raw(self.terminal.styled("save a file to reload it; Ctrl-C ends", "dim"))
        samples = asyncio.create_task(self._send_samples())
        while True:
            try:
                await self._has_noticed.wait()
            finally:
                samples.cancel()  # a change does not wait for the response of older code
            if await self._handle_changes():
                samples = asyncio.create_task(self._send_samples())

    async def _add(self, api: Api) -> DevApi:
        spec = await self._prepare(self._project, api)
        each = self._apis[api.name] = DevApi(api, spec, self, self._debug_of(len(self._apis)))
        if api.kind is ApiKind.SPLITTER:
            each.release()
        return each

    def _debug_of(self, number: int) -> DebugSettings:
        """Return the settings of an API; each has a port of its own for editors."""
        port = self._debug.port
        return replace(self._debug, port=port + number) if port is not None else self._debug

    async def _prepare(self, project: LocalProject, api: Api) -> ReplicaSpec:
        """Build the environment of an API, and show the output of installers. Raises: CortexError."""
        spec = await prepare(project, api, self._settings.home, self._settings.environ, self._show_installer)
        return replace(spec, timeout_s=TIMEOUT_S)

    def _show_installer(self, line: str) -> None:
        self.terminal.raw(self.terminal.styled(f"  {line}", "dim"))

    async def _start(self, each: DevApi) -> None:
        await self._start_process(each, time.perf_counter(), "ready")
        self.watch()

    def _print_api(self, each: DevApi) -> None:
        api, url = each.api, self._url(each.api)
        self.terminal.raw(f"{self.terminal.styled(api.name, 'bold')}  {url}")
        if not each.is_serving and api.kind is not ApiKind.SPLITTER:
            return  # its commands follow once it serves
        each.is_shown = True
        if api.kind is not ApiKind.SPLITTER:
            self.terminal.raw(f"  {curl_command(api, url, each.signature, self._project.folder)}")
        if api.has_docs:
            self.terminal.raw(f"  {url.rstrip('/')}/docs")

    def _url(self, api: Api) -> str:
        host = self._settings.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self._port}{api.networking.endpoint}"

    # Changes.

    def _on_change(self, changed: set[Path]) -> None:
        for each, file in self._files.concerned(changed).items():
            if not self._is_installing:  # the old code serves while packages are installed
                each.hold()
            each.abandon_start(file)
        if self._project.config_file in changed and not self._is_installing:
            self._gateway.paths_known.clear()
        self._noticed |= changed
        self._has_noticed.set()

    def _release(self, each: DevApi) -> None:
        """Forward the requests of an API again, unless a change that concerns it is still to be applied."""
        if each not in self._files.concerned(self._noticed):
            each.release()

    async def _handle_changes(self) -> bool:
        """Apply the changes of files, and return whether that succeeded; requests are held meanwhile."""
        is_applied = False
        started = time.perf_counter()
        async with self._reloading:
            changed, self._noticed = self._noticed | self._unapplied, set()
            self._has_noticed.clear()
            self._gateway.paths_known.clear()
            for each in self._apis.values():
                each.hold()
            try:
                await self._apply(changed, started)
                is_applied = True
                self._unapplied = set()
            except (CortexError, OSError) as error:  # OSError: files that are being replaced
                await self.notice_changes()
                of_environments = self._files.of_environments
                if self._noticed & of_environments:  # the next change may have corrected it
                    self._unapplied = changed
                else:
                    self._unapplied = changed - of_environments  # not installed again at each save
                    self._report_error(error)
            finally:
                for each in self._apis.values():
                    self._release(each)
                self._gateway.paths_known.set()
        self.watch()
        for each in self._apis.values():
            if not each.is_shown and (each.is_serving or each.api.kind is ApiKind.SPLITTER):
                self._print_api(each)
        return is_applied

    async def _apply(self, changed: set[Path], started: float) -> None:
        project = await asyncio.to_thread(LocalProject.read, self._settings.config_file, self._settings.environ)
        self._print_warnings(project)
        names = {self._files.relative(path) for path in changed}
        before, self._project = self._project, project
        wanted = {api.name: api for api in project.diagnosis.apis}
        for name in self._apis.keys() - wanted.keys():
            removed = self._apis.pop(name)
            self._gateway.upstreams = [*self._apis.values()]
            await removed.stop()
            self.terminal.line(f"{name}  removed")
        pending: list[Coroutine[None, None, None]] = []
        for name, api in wanted.items():
            if name not in self._apis:
                each = await self._add(api)
                if api.kind is not ApiKind.SPLITTER:
                    pending.append(self._restart(each, started, "added"))
                continue
            each = self._apis[name]
            dependencies = changed & {*project.dependency_files(api)}
            if dependencies:
                each.release()
                self._gateway.paths_known.set()
                for path in sorted(dependencies):
                    what = "building the environment of {}" if path.exists() else "building the environment without {}"
                    self.terminal.line(f"{name}  {what.format(self._files.relative(path))}")
            may_differ = changed & {*project.environment_files(api)}
            self._is_installing = bool(dependencies)
            try:
                spec = await self._prepare(project, api) if may_differ else each.spec
            finally:
                self._is_installing = False
            each.hold()
            reason = self._restart_reason(each, api, spec, names)
            has_changed = self._files.has_changed(each, api, names, before)
            if api.networking.endpoint != each.api.networking.endpoint:
                each.is_shown = False
            each.api, each.spec = api, spec
            if api.kind is ApiKind.SPLITTER:
                continue
            if reason:
                pending.append(self._restart(each, started, reason))
            elif has_changed:
                pending.append(self._reload(each, started, names))
            else:
                self._release(each)
                if dependencies:
                    self.terminal.line(f"{name}  the environment is the same as before; its process goes on")
        self._gateway.upstreams = [*self._apis.values()]
        self._gateway.paths_known.set()
        await asyncio.gather(*pending)

    def _restart_reason(self, each: DevApi, api: Api, spec: ReplicaSpec, changed: set[str]) -> str:
        """Return why an API needs a new process whatever has changed in its code; "" if it does not."""
        if each.is_outdated:
            return each.outdated_reason
        if spec.python != each.spec.python:
            return "the environment was rebuilt"
        if spec.env != each.spec.env:
            return "environment variables changed"
        if spec != each.spec or api != each.api:
            return f"the configuration of {api.name} changed"
        if api.runs_command and (files := sorted(changed & {*self._project.diagnosis.project.files})):
            file = next((name for name in files if name != each.last_changed), files[0])
            return "" if self._is_postponed(each, file) else f"{file} changed"
        for name in sorted(changed):
            if name in each.data or self._files.is_setting(api, name):
                return f"{name} changed"
        return ""

    def _is_postponed(self, each: DevApi, file: str) -> bool:
        """Return whether the restart of a command waits, because the same file has caused the last ones."""
        key = each.api.name, file
        if key in self._due:
            self._due.remove(key)
            return False
        if key in self._postponed:
            return True
        delay_s = each.repeat_delay_s(file)
        if not delay_s:
            return False
        self._postponed.add(key)
        asyncio.get_running_loop().call_later(delay_s, self._resume, key)
        what = f"{file} has changed after each of the last starts; the next one follows in {delay_s:g} s"
        self.terminal.line(f"{each.api.name}  {what}. Unless you edit it, list it in {IGNORE_NAME}")
        return True

    def _resume(self, key: tuple[str, str]) -> None:
        self._postponed.remove(key)
        self._due.add(key)
        self._on_change({self._project.folder / key[1]})

    async def _reload(self, each: DevApi, started: float, changed: set[str]) -> None:
        """Swap functions, or start a new process if that does not suffice."""
        result = await each.swap()
        if result.kind != "swapped":
            await self._restart(each, started, result.message)
            return
        self._release(each)
        files = ", ".join(sorted(changed & each.modules))
        if not result.names:
            self.terminal.line(f"{each.api.name}  {files}: nothing that runs has changed")
            return
        what = f"swapped {', '.join(result.names)} in {self._elapsed(started)}"
        self.terminal.line(f"{each.api.name}  {files}: {what}; the object and its models stay")
        self._cut_streams(each)

    async def _restart(self, each: DevApi, started: float, reason: str) -> None:
        if await self._start_process(each, started, f"new process ({reason}), ready", reason):
            self._cut_streams(each)

    def _cut_streams(self, each: DevApi) -> None:
        """Cut the streams that began with the old code, after a second."""
        before = time.perf_counter()
        asyncio.get_running_loop().call_later(STREAM_S, self._cut, each, before)

    def _cut(self, each: DevApi, before: float) -> None:
        if count := self._gateway.cut_streams(each, before):
            self.terminal.line(f"{each.api.name}  cut {count} stream{'s' if count != 1 else ''} of the old code")

    async def _start_process(self, each: DevApi, started: float, what: str, reason: str = "") -> bool:
        """Start a process, report how that ended, and return whether it is ready.

        Requests are forwarded then, unless the start was abandoned.
        """
        because = f" ({reason})" if reason else ""
        text = f"{each.api.name}  a process loads{because}; requests wait for it"
        slow_start = asyncio.get_running_loop().call_later(_SLOW_START_S, self.terminal.line, text)
        try:
            result = await each.restart()
        finally:
            slow_start.cancel()
        if not each.is_outdated:
            self._release(each)
        self._report_start(each, result, started, what)
        return result.kind == "ready"

    def _report_start(self, each: DevApi, result: LoadResult, started: float, what: str) -> None:
        name = each.api.name
        self._has_failed = result.kind != "ready"
        if result.kind == "outdated":
            return
        if result.kind == "ready":
            self.terminal.line(f"{name}  {what} in {self._elapsed(started)}")
            return
        self.terminal.line(f"{name}  {self.terminal.styled('failed to start', 'red')}: {result.message}")
        for line in result.traceback.rstrip().splitlines():
            self.terminal.raw(f"  {line}")
        if each.is_serving:
            self.terminal.line(f"{name}  the old code goes on serving")

    def _report_error(self, error: CortexError | OSError) -> None:
        self._has_failed = True
        if isinstance(error, ConfigError):
            for diagnostic in error.diagnostics:
                self.terminal.raw(str(self._located(diagnostic)))
            count = len(error.diagnostics)
            what = f"{count} mistake{'s' if count != 1 else ''} found"
        else:
            what = str(error)
        self.terminal.line(f"{self.terminal.styled('not reloaded', 'red')}: {what}; the old code goes on serving")

    def _print_warnings(self, project: LocalProject) -> None:
        for warning in project.diagnosis.warnings:
            self.terminal.raw(f"warning: {self._located(warning)}")

    def _located(self, diagnostic: Diagnostic) -> Diagnostic:
        return replace(diagnostic, file=str(self._settings.config_file.parent / diagnostic.file))

    def _elapsed(self, started: float) -> str:
        return format_ms(time.perf_counter() - started)

    # Samples.

    async def _send_samples(self) -> None:
        """Send the sample of the command line to each API, one after the other."""
        if self._settings.sample is not None:
            for each in [*self._apis.values()]:
                await self._send_sample(each, *self._settings.sample)

    async def _send_sample(self, each: DevApi, body: bytes, content_type: str) -> None:
        """Send a sample, and show how the response differs from the last one."""
        if not each.is_serving:
            return
        try:
            sample = SampleRequest(self._settings.host, self._port, body, content_type)
            shown = await asyncio.to_thread(sample.response, each.api)
        except (OSError, HTTPException, ValueError) as error:
            self.terminal.line(f"{each.api.name}  the sample has no response: {error}")
            return
        if not each.last_sample:
            for line in shown.splitlines():
                self.terminal.raw(f"  {line}")
        elif shown == each.last_sample:
            self.terminal.raw("  the response to the sample is the same")
        else:
            self.terminal.difference(each.last_sample, shown)
        each.last_sample = shown


def run_session(settings: SessionSettings, terminal: Terminal) -> None:
    """Run `cortex dev`; the mode of the terminal is restored at the end. Raises: CortexError."""
    with _terminal_mode():
        asyncio.run(DevSession(settings, terminal).run())


@contextlib.contextmanager
def _terminal_mode() -> Iterator[None]:
    """Restore the mode of the terminal: a debugger that is killed leaves it without echo."""
    try:
        import termios  # noqa: PLC0415

        saved = termios.tcgetattr(sys.stdin.fileno())
    except (ImportError, OSError, ValueError, AttributeError):
        yield
        return
    except Exception:  # termios.error
        yield
        return
    try:
        yield
    finally:
        with contextlib.suppress(Exception):
            termios.tcsetattr(sys.stdin.fileno(), termios.TCSADRAIN, saved)
