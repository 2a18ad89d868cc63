"""Start the operator of this machine in the background and wait until it is ready."""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPException
from itertools import combinations
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from cortex.client.environments import local_trust
from cortex.client.transport import send
from cortex.errors import CertificateError, ConflictError, InputError, OperatorUnavailableError
from cortex.home import Home
from cortex.installation import Installation, OperatorIdentity, last_operator, read_operator
from cortex.processes.daemon import start_detached
from cortex.processes.filelock import hold_lock
from cortex.tls import CertificateFiles

_START_TIMEOUT_S = 60.0
_ANSWER_TIMEOUT_S = 5.0
#: Operators with a shared database need a moment to find the leader if they do not lead themselves.
_LEADER_TIMEOUT_S = 5.0
_PAUSE_S = 0.005
#: Time after which an operator that was told to stop does not answer any more.
_STOP_S = 2.0
_LOG_TAIL_LINES = 20
#: An operator needs more free space to write its databases and its log.
_MIN_FREE_BYTES = 1024 * 1024
#: Option of the operator: do nothing before a line arrives on standard input.
_WAIT = "--wait-for-input"
#: Prefix of the last line that an operator logs after an error of its user.
_ERROR = "error: "


@dataclass(frozen=True)
class ListenOptions:
    """Addresses and certificate of operator and gateway. None: as on the last start, or else the default."""

    gateway_port: int | None = None
    operator_port: int | None = None
    host: str | None = None
    tls: CertificateFiles | None = None  #: served by both
    is_plain: bool = False  #: serve plain HTTP, even if a certificate was served on the last start

    def command(self, home: Home) -> list[str]:
        """Return the command that runs an operator with these options. Raises: InputError."""
        # An operator that was killed leaves a gateway behind, which its successor adopts on the same address and port.
        # After `cortex down`, only the installation has the options of the last start.
        last, kept = last_operator(home), Installation.read(home)
        host = self.host or (last and last.host) or kept.host
        gateway, operator = self._ports(last, kept)
        ports = ["--gateway-port", str(gateway), "--operator-port", str(operator)]
        certificate = self._certificate(last or kept)
        return [sys.executable, "-P", "-m", "cortex.operator.main", *ports, "--host", host, *certificate]

    def check_ports(self, home: Home, installation: Installation) -> None:
        """Check that no two ports are equal. Raises: InputError."""
        gateway, operator = self._ports(last_operator(home), installation)
        ports = {"--gateway-port": gateway, "--operator-port": operator}
        if installation.engine == "ray":
            ports["--node-port"] = installation.node_port
        for one, other in combinations(ports, 2):
            if ports[one] == ports[other]:
                raise InputError(f"{one} and {other} are both {ports[one]}; choose different ports")

    def _ports(self, last: OperatorIdentity | None, kept: Installation) -> tuple[int, int]:
        """Return the ports of gateway and operator."""
        gateway = self.gateway_port or (last and urlsplit(last.gateway_url).port) or kept.gateway_port
        return gateway, self.operator_port or (last and urlsplit(last.url).port) or kept.operator_port

    def _certificate(self, before: OperatorIdentity | Installation) -> list[str]:
        """Return the command-line options for TLS. Raises: CertificateError."""
        # A command that restarts the operator must not downgrade it to plain HTTP.
        tls = self.tls
        if tls is None and not self.is_plain and before.tls_cert and before.tls_key:
            tls = CertificateFiles(Path(before.tls_cert), Path(before.tls_key))
        if tls is None:
            return []
        try:
            tls.load()
        except CertificateError as error:
            if tls == self.tls:
                raise
            raise CertificateError(
                f"{error}; it was served before: choose others with `cortex up --tls-cert FILE --tls-key FILE`, "
                "or go back to plain HTTP with `cortex up --no-tls`"
            ) from None
        return ["--tls-cert", str(tls.certificate), "--tls-key", str(tls.key)]

    def check(self, running: OperatorIdentity) -> None:
        """Compare with a running operator. Raises: ConflictError if these options differ from its own."""
        for port, url, what in (
            (self.gateway_port, running.gateway_url, "gateway"),
            (self.operator_port, running.url, "operator"),
        ):
            if port and port != urlsplit(url).port:
                raise ConflictError(f"the {what} is already running at {url}; to move it, run `cortex down` first")
        if self.host and running.host and self.host != running.host:
            raise ConflictError(
                f"the operator is already running at {running.host}; to move it, run `cortex down` first"
            )
        if self.tls and (str(self.tls.certificate), str(self.tls.key)) != (running.tls_cert, running.tls_key):
            now = f"with the certificate {running.tls_cert}" if running.tls_cert else "without TLS"
            raise ConflictError(f"the operator is already running {now}; to change that, run `cortex down` first")
        if self.is_plain and running.tls_cert:
            raise ConflictError(
                f"the operator is already running with the certificate {running.tls_cert}; "
                "to change that, run `cortex down` first"
            )


def log_file(home: Home) -> Path:
    """Return the log file of the operator."""
    return home.logs_dir / "operator.log"


def start(
    home: Home, options: ListenOptions, check: Callable[[], None] = lambda: None
) -> tuple[OperatorIdentity, bool]:
    """Start the operator unless it is running; return it once it answers, and whether it was started by this call.

    Its process imports its modules while `check` runs, and does nothing else before; if `check` raises, it ends.
    Concurrent calls start one operator. Raises: ConflictError; OperatorUnavailableError, with the end of the log, if
    the operator does not start.
    """
    home.prepare()
    with hold_lock(_start_lock_file(home), timeout_s=math.inf):
        running = read_operator(home)
        if running and _wait_until_answering(home, running):
            options.check(running)
            return running, False
        offset = log_file(home).stat().st_size if log_file(home).exists() else 0
        process = spawn(home, [*options.command(home), _WAIT], input_=subprocess.PIPE)
        try:
            check()
        except BaseException:
            process.kill()
            process.wait()
            raise
        assert process.stdin is not None
        with suppress(BrokenPipeError), process.stdin:  # if it has ended, the next line reports why
            process.stdin.write(b"\n")
        try:
            return _wait_until_started(home, process, offset), True
        except OperatorUnavailableError:
            # Another one was starting: that of `cortex up --foreground`, or of a command that was killed.
            if (other := _wait_for_other(home)) is None:
                raise
            options.check(other)
            return other, False


def replace_operator(
    home: Home, old: OperatorIdentity, hand_over: Callable[[], None], undo: Callable[[], None]
) -> OperatorIdentity:
    """Start an operator of this version in place of `old`, with its options and environment variables.

    `hand_over` must stop the old one; the process of the new one has its modules by then, and waits. If that or the
    start fails, the old version is started again, after `undo` unless the new operator was up for a moment.

    Raises: ConflictError if `old` does not run any more; OperatorUnavailableError, with the reason and what runs now.
    """
    command, environ = [word for word in old.command if word != _WAIT], old.environ
    is_stopped = False  #: or being stopped
    ours, theirs = socket.socketpair()
    with hold_lock(_start_lock_file(home), timeout_s=math.inf), ours:
        offset = log_file(home).stat().st_size if log_file(home).exists() else 0
        new = [*ListenOptions().command(home), _WAIT]
        with theirs:
            if not old.is_running():
                raise ConflictError(
                    f"the operator that was checked (pid {old.pid}) does not run any more: another command has stopped "
                    "or replaced it; run `cortex upgrade` again"
                )
            process = spawn(home, new, theirs.fileno(), environ=successor_environ(environ, command[0]))
        try:
            ours.settimeout(_START_TIMEOUT_S)
            if ours.recv(1):  # otherwise it has ended, and `_wait_until_started` reports why
                is_stopped = True
                hand_over()
                ours.sendall(b"\n")
            return _wait_until_started(home, process, offset)
        except BaseException as error:
            process.kill()
            process.wait()
            if _stays(home, old) if is_stopped else old.is_running():
                raise
            last = last_operator(home)
            if last is None or last.pid != process.pid:
                undo()
            offset = log_file(home).stat().st_size
            again = spawn(home, command, environ=environ)
            try:
                _wait_until_started(home, again, offset)
            except OperatorUnavailableError as failure:
                raise OperatorUnavailableError(
                    f"{error}\nversion {old.version} does not start again either: {failure}\nthe gateway and the "
                    "replicas continue to serve; correct the cause, and run `cortex up`"
                ) from error
            if not isinstance(error, Exception):
                raise
            raise OperatorUnavailableError(f"{error}\nversion {old.version} runs again") from error


def _stays(home: Home, operator: OperatorIdentity) -> bool:
    """Return whether an operator runs on that may have been told to stop, which takes it a moment."""
    began = time.monotonic()
    while operator.is_running():
        waited_s = time.monotonic() - began
        if waited_s > _START_TIMEOUT_S or (waited_s > _STOP_S and _answers(home, operator)):
            return True
        time.sleep(_PAUSE_S)
    return False


def successor_environ(environ: Mapping[str, str], python: str) -> dict[str, str]:
    """Return the environment variables for an operator of this Python environment instead of that of `python`."""
    made = dict(environ)
    folders = {str(Path(python).parent): str(Path(sys.executable).parent)}
    if "PATH" in made:
        made["PATH"] = os.pathsep.join(folders.get(each, each) for each in made["PATH"].split(os.pathsep))
    if "VIRTUAL_ENV" in made:
        made["VIRTUAL_ENV"] = sys.prefix
    return made


def _start_lock_file(home: Home) -> Path:
    return home.run_dir / "start.lock"


def lock_start(home: Home) -> int:
    """Wait until no other command starts an operator, and keep others from it; return the descriptor of the lock.

    Whoever starts the operator passes it to it with `start_lock_arguments`, and closes its own.
    """
    home.prepare()
    descriptor = os.open(_start_lock_file(home), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor


def start_lock_arguments(descriptor: int) -> list[str]:
    """Return the arguments with which an operator releases the lock of `lock_start` once it has that of the home."""
    return ["--start-lock", str(descriptor)]


def foreground_command(home: Home, options: ListenOptions) -> list[str]:
    """Return the command that runs the operator in the foreground. Raises: ConflictError if one is running."""
    home.prepare()
    running = read_operator(home)
    if running and _answers(home, running):
        raise ConflictError(
            f"an operator is already running at {running.url} (pid {running.pid}); `cortex down` stops it"
        )
    return options.command(home)


def spawn(
    home: Home,
    command: Sequence[str],
    input_: int = subprocess.DEVNULL,
    pass_fds: Sequence[int] = (),
    environ: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start an operator as a detached process that writes to its log file. Raises: OSError."""
    environ = {**(environ or os.environ), "CORTEX_HOME": str(home.path)}
    with open(log_file(home), "ab", opener=lambda path, flags: os.open(path, flags, 0o600)) as log:  # noqa: PTH123
        return start_detached(command, output=log, input_=input_, cwd=home.path, env=environ, pass_fds=pass_fds)


def _wait_until_started(home: Home, process: subprocess.Popen[bytes], log_offset: int) -> OperatorIdentity:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline:
        code = process.poll()
        if code is not None:
            raise OperatorUnavailableError(_start_failure(home, log_offset, code))
        operator = last_operator(home)
        if operator and operator.pid == process.pid and _answers(home, operator):
            _wait_for_leader(home, operator, process)
            if process.poll() is None:
                return operator
        time.sleep(_PAUSE_S)
    raise OperatorUnavailableError(
        f"the operator (pid {process.pid}) does not answer after {_START_TIMEOUT_S:.0f} s{_log_tail(home, log_offset)}"
    )


def _wait_for_other(home: Home) -> OperatorIdentity | None:
    """Return the operator that has the lock of the home, once it answers; None if there is none, or it has ended."""
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline:
        running = read_operator(home)
        if running and _wait_until_answering(home, running):
            return running
        try:
            os.kill(int(home.operator_lock.read_text()), 0)
        except (OSError, ValueError):
            return None
        time.sleep(_PAUSE_S)
    return None


def _wait_until_answering(home: Home, operator: OperatorIdentity) -> bool:
    """Wait until an operator that another process started answers. Return False if its process ends."""
    deadline = time.monotonic() + _START_TIMEOUT_S
    while operator.is_running():
        operator.check_not_stopped()
        if _answers(home, operator):
            return True
        if time.monotonic() > deadline:
            raise OperatorUnavailableError(
                f"the operator (pid {operator.pid}) does not answer at {operator.url}; `cortex down` stops it"
            )
        time.sleep(_PAUSE_S)
    return False


def _wait_for_leader(home: Home, operator: OperatorIdentity, process: subprocess.Popen[bytes]) -> None:
    """Wait until an operator with a shared database leads or has found the leader, for a limited time.

    An operator that can't reach the database answers at first and then exits, so its process is checked repeatedly.
    """
    deadline = time.monotonic() + _LEADER_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline:
        status = _livez(home, operator)
        if status is not None and (status.get("leads", True) or status.get("leader")):
            return
        time.sleep(_PAUSE_S)


def leader_url(home: Home, operator: OperatorIdentity) -> str | None:
    """Return the URL of the leader if this operator is on standby; None if it leads or the leader is unknown."""
    status = _livez(home, operator) or {}
    return None if status.get("leads", True) else status.get("leader")


def _answers(home: Home, operator: OperatorIdentity) -> bool:
    return _livez(home, operator) is not None


def _livez(home: Home, operator: OperatorIdentity) -> dict[str, Any] | None:
    """Return the response of `/livez`; None if the operator does not answer."""
    try:
        trust = local_trust(home, operator)
        answer = send("GET", f"{operator.url}/livez", None, {}, _ANSWER_TIMEOUT_S, trust)
        status = json.loads(answer.body)
    except (OSError, HTTPException, ValueError):
        return None
    return status if answer.status == 200 and isinstance(status, dict) else None


def _start_failure(home: Home, log_offset: int, code: int) -> str:
    """Return the operator's last log line if it is an error for users; otherwise the end of its log."""
    *_, last = _last_lines(home, log_offset) or [""]
    if last.startswith(_ERROR):
        return f"the operator did not start: {last.removeprefix(_ERROR)}"
    if shutil.disk_usage(home.path).free < _MIN_FREE_BYTES:  # its log has no reason then
        return f"the operator did not start: the disk of CORTEX_HOME={home.path} is full; free some space on it"
    return f"the operator did not start (exit code {code}){_log_tail(home, log_offset)}"


def _log_tail(home: Home, offset: int) -> str:
    if lines := _last_lines(home, offset):
        return "; the end of its log:\n" + "\n".join(f"  {line}" for line in lines)
    return f"; {log_file(home)} may contain the reason"


def _last_lines(home: Home, offset: int) -> list[str]:
    with suppress(OSError), log_file(home).open("rb") as stream:
        stream.seek(offset)
        return stream.read().decode(errors="replace").strip().splitlines()[-_LOG_TAIL_LINES:]
    return []
