"""Starts the local operator, for the command line and for whoever else wants one on this machine."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from urllib.parse import urlsplit

from cortex.client.running import OperatorIdentity, is_running, last_operator, read_operator
from cortex.client.transport import send
from cortex.errors import ConflictError, OperatorUnavailableError
from cortex.home import Home

GATEWAY_PORT = 8888
OPERATOR_PORT = 8889
HOST = "127.0.0.1"

_START_TIMEOUT_S = 60.0
_ANSWER_TIMEOUT_S = 5.0
_PAUSE_S = 0.005
_LOG_TAIL_LINES = 20


@dataclass(frozen=True)
class Settings:
    """Where operator and gateway are to listen; what is None is taken from the last time, or the default."""

    gateway_port: int | None = None
    operator_port: int | None = None
    host: str | None = None

    def command(self, home: Home) -> list[str]:
        """Return the command of an operator with these settings."""
        last = last_operator(home)
        # An operator that was killed left a gateway, which its successor adopts: on the same port.
        gateway = self.gateway_port or (last and urlsplit(last.gateway_url).port) or GATEWAY_PORT
        operator = self.operator_port or (last and urlsplit(last.url).port) or OPERATOR_PORT
        ports = ["--gateway-port", str(gateway), "--operator-port", str(operator)]
        return [sys.executable, "-P", "-m", "cortex.control.main", *ports, "--host", self.host or HOST]

    def check(self, running: OperatorIdentity) -> None:
        """Compare with what runs. Raises: ConflictError if another port was asked for."""
        for asked, url, what in (
            (self.gateway_port, running.gateway_url, "gateway"),
            (self.operator_port, running.url, "operator"),
        ):
            if asked and asked != urlsplit(url).port:
                raise ConflictError(f"the {what} already runs at {url}; `cortex down` first to move it")


def log_file(home: Home) -> Path:
    """Return the file that takes the operator's output."""
    return home.logs_dir / "operator.log"


def start(home: Home, settings: Settings) -> tuple[OperatorIdentity, bool]:
    """Start the operator unless it runs; return it once it answers, and whether it was started now.

    Two that start at the same time get the same one. Raises: ConflictError; OperatorUnavailableError with the end of
    the log if it does not come up.
    """
    home.create()
    with _starting(home):
        running = read_operator(home)
        if running and _wait_until_answering(running):
            settings.check(running)
            return running, False
        offset = log_file(home).stat().st_size if log_file(home).exists() else 0
        process = _spawn(home, settings)
        return _wait_until_started(home, process, offset), True


def foreground_command(home: Home, settings: Settings) -> list[str]:
    """Return the command that becomes the operator. Raises: ConflictError if one runs."""
    home.create()
    running = read_operator(home)
    if running and _answers(running):
        raise ConflictError(f"an operator already runs at {running.url} (pid {running.pid}); `cortex down` stops it")
    return settings.command(home)


@contextmanager
def _starting(home: Home) -> Iterator[None]:
    with (home.run_dir / "start.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _spawn(home: Home, settings: Settings) -> subprocess.Popen[bytes]:
    descriptor = os.open(log_file(home), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        return subprocess.Popen(
            settings.command(home),
            cwd=home.path,
            env={**os.environ, "CORTEX_HOME": str(home.path)},
            stdin=subprocess.DEVNULL,
            stdout=descriptor,
            stderr=descriptor,
            start_new_session=True,
        )
    finally:
        os.close(descriptor)


def _wait_until_started(home: Home, process: subprocess.Popen[bytes], log_offset: int) -> OperatorIdentity:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline:
        code = process.poll()
        if code is not None:
            raise OperatorUnavailableError(
                f"the operator did not start (exit code {code}){_log_tail(home, log_offset)}"
            )
        operator = last_operator(home)
        if operator and operator.pid == process.pid and _answers(operator):
            return operator
        time.sleep(_PAUSE_S)
    raise OperatorUnavailableError(
        f"the operator (pid {process.pid}) does not answer after {_START_TIMEOUT_S:.0f} s{_log_tail(home, log_offset)}"
    )


def _wait_until_answering(operator: OperatorIdentity) -> bool:
    """Wait for an operator that somebody else started. Returns False once its process is gone."""
    deadline = time.monotonic() + _START_TIMEOUT_S
    while is_running(operator.pid, operator.create_time):
        if _answers(operator):
            return True
        if time.monotonic() > deadline:
            raise OperatorUnavailableError(
                f"the operator (pid {operator.pid}) does not answer at {operator.url}; `cortex down` ends it"
            )
        time.sleep(_PAUSE_S)
    return False


def _answers(operator: OperatorIdentity) -> bool:
    try:
        return send("GET", f"{operator.url}/livez", None, {}, timeout_s=_ANSWER_TIMEOUT_S).status == 200
    except (OSError, HTTPException):
        return False


def _log_tail(home: Home, offset: int) -> str:
    with suppress(OSError), log_file(home).open("rb") as stream:
        stream.seek(offset)
        lines = stream.read().decode(errors="replace").strip().splitlines()[-_LOG_TAIL_LINES:]
        if lines:
            return "; the end of its log:\n" + "\n".join(f"  {line}" for line in lines)
    return f"; {log_file(home)} may say why"
