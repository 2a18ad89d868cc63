"""Starts the local operator, for the command line and for whoever else wants one on this machine."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPException
from itertools import combinations
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from cortex.client.operator_info import OperatorIdentity, last_operator, local_trust, read_operator
from cortex.client.transport import send
from cortex.errors import ConflictError, InputError, OperatorUnavailableError
from cortex.home import Home
from cortex.installation import Installation
from cortex.processes.daemon import start_detached
from cortex.processes.filelock import hold_lock
from cortex.tls import CertificateError, CertificateFiles

_START_TIMEOUT_S = 60.0
_ANSWER_TIMEOUT_S = 5.0
#: Of operators on one database: one that comes to lead knows that at once; who leads instead, a moment later.
_LEADER_TIMEOUT_S = 5.0
_PAUSE_S = 0.005
_LOG_TAIL_LINES = 20
#: What begins the line with which an operator ends whose user did something wrong.
_ERROR = "error: "


@dataclass(frozen=True)
class Settings:
    """Where operator and gateway are to listen; what is None is as it was the last time, or the default."""

    gateway_port: int | None = None
    operator_port: int | None = None
    host: str | None = None
    tls: CertificateFiles | None = None  #: what both serve; None: as the last time
    is_plain: bool = False  #: plain HTTP, though the last time it was otherwise

    def command(self, home: Home) -> list[str]:
        """Return the command of an operator with these settings. Raises: InputError if it could not start."""
        # An operator that was killed left a gateway, which its successor adopts: on the same address and port. What
        # `cortex down` ended is in the installation alone.
        last, kept = last_operator(home), Installation.read(home)
        host = self.host or (last and last.host) or kept.host
        gateway, operator = self._ports(last, kept)
        ports = ["--gateway-port", str(gateway), "--operator-port", str(operator)]
        certificate = self._certificate(last or kept)
        return [sys.executable, "-P", "-m", "cortex.operator.main", *ports, "--host", host, *certificate]

    def check_ports(self, home: Home, made: Installation) -> None:
        """Make sure that nothing of this machine has the port of something else. Raises: InputError."""
        gateway, operator = self._ports(last_operator(home), made)
        ports = {"--gateway-port": gateway, "--operator-port": operator}
        if made.engine == "ray":
            ports["--node-port"] = made.node_port
        for one, other in combinations(ports, 2):
            if ports[one] == ports[other]:
                raise InputError(f"{one} and {other} are both {ports[one]}; choose another for one of them")

    def _ports(self, last: OperatorIdentity | None, kept: Installation) -> tuple[int, int]:
        """Return those of gateway and operator."""
        gateway = self.gateway_port or (last and urlsplit(last.gateway_url).port) or kept.gateway_port
        return gateway, self.operator_port or (last and urlsplit(last.url).port) or kept.operator_port

    def _certificate(self, before: OperatorIdentity | Installation) -> list[str]:
        """Return the options for what is served. Raises: CertificateError if it can't be."""
        # As with the ports: commands that start an operator again must not make it speak plain HTTP.
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
                f"{error}; it was served before: name others with `cortex up --tls-cert FILE --tls-key FILE`, "
                "or go back to plain HTTP with `cortex up --no-tls`"
            ) from None
        return ["--tls-cert", str(tls.certificate), "--tls-key", str(tls.key)]

    def check(self, running: OperatorIdentity) -> None:
        """Compare with what runs. Raises: ConflictError if another address, port or certificate was asked for."""
        for asked, url, what in (
            (self.gateway_port, running.gateway_url, "gateway"),
            (self.operator_port, running.url, "operator"),
        ):
            if asked and asked != urlsplit(url).port:
                raise ConflictError(f"the {what} already runs at {url}; `cortex down` first to move it")
        if self.host and running.host and self.host != running.host:
            raise ConflictError(f"the operator already runs at {running.host}; `cortex down` first to move it")
        if self.tls and (str(self.tls.certificate), str(self.tls.key)) != (running.tls_cert, running.tls_key):
            now = f"with the certificate {running.tls_cert}" if running.tls_cert else "without TLS"
            raise ConflictError(f"the operator already runs {now}; `cortex down` first to change that")
        if self.is_plain and running.tls_cert:
            raise ConflictError(
                f"the operator already runs with the certificate {running.tls_cert}; `cortex down` first to change that"
            )


def log_file(home: Home) -> Path:
    """Return the file that takes the operator's output."""
    return home.logs_dir / "operator.log"


def start(home: Home, settings: Settings) -> tuple[OperatorIdentity, bool]:
    """Start the operator unless it runs; return it once it answers, and whether it was started now.

    Two that start at the same time get the same one. Raises: ConflictError; OperatorUnavailableError with the end of
    the log if it does not come up.
    """
    home.prepare()
    with hold_lock(home.run_dir / "start.lock", timeout_s=math.inf):
        running = read_operator(home)
        if running and _wait_until_answering(home, running):
            settings.check(running)
            return running, False
        offset = log_file(home).stat().st_size if log_file(home).exists() else 0
        process = _spawn(home, settings)
        return _wait_until_started(home, process, offset), True


def foreground_command(home: Home, settings: Settings) -> list[str]:
    """Return the command that becomes the operator. Raises: ConflictError if one runs."""
    home.prepare()
    running = read_operator(home)
    if running and _answers(home, running):
        raise ConflictError(f"an operator already runs at {running.url} (pid {running.pid}); `cortex down` stops it")
    return settings.command(home)


def _spawn(home: Home, settings: Settings) -> subprocess.Popen[bytes]:
    environ = {**os.environ, "CORTEX_HOME": str(home.path)}
    with open(log_file(home), "ab", opener=lambda path, flags: os.open(path, flags, 0o600)) as log:  # noqa: PTH123
        return start_detached(settings.command(home), output=log, cwd=home.path, env=environ)


def _wait_until_started(home: Home, process: subprocess.Popen[bytes], log_offset: int) -> OperatorIdentity:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline:
        code = process.poll()
        if code is not None:
            raise OperatorUnavailableError(_why_not_started(home, log_offset, code))
        operator = last_operator(home)
        if operator and operator.pid == process.pid and _answers(home, operator):
            _wait_for_leader(home, operator, process)
            if process.poll() is None:
                return operator
        time.sleep(_PAUSE_S)
    raise OperatorUnavailableError(
        f"the operator (pid {process.pid}) does not answer after {_START_TIMEOUT_S:.0f} s{_log_tail(home, log_offset)}"
    )


def _wait_until_answering(home: Home, operator: OperatorIdentity) -> bool:
    """Wait for an operator that somebody else started. Returns False once its process is gone."""
    deadline = time.monotonic() + _START_TIMEOUT_S
    while operator.is_running():
        if _answers(home, operator):
            return True
        if time.monotonic() > deadline:
            raise OperatorUnavailableError(
                f"the operator (pid {operator.pid}) does not answer at {operator.url}; `cortex down` ends it"
            )
        time.sleep(_PAUSE_S)
    return False


def _wait_for_leader(home: Home, operator: OperatorIdentity, process: subprocess.Popen[bytes]) -> None:
    """Wait a moment for an operator that shares its database to find out whether it leads or who does.

    One that can't reach the database answers at first, and ends: what does not answer is looked at again.
    """
    deadline = time.monotonic() + _LEADER_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline:
        told = _alive(home, operator)
        if told is not None and (told.get("leads", True) or told.get("leader")):
            return
        time.sleep(_PAUSE_S)


def leader_instead(home: Home, operator: OperatorIdentity) -> str | None:
    """Return the URL of the operator that leads while this one stands by; None if none is known, or this one leads."""
    told = _alive(home, operator) or {}
    return None if told.get("leads", True) else told.get("leader")


def _answers(home: Home, operator: OperatorIdentity) -> bool:
    return _alive(home, operator) is not None


def _alive(home: Home, operator: OperatorIdentity) -> dict[str, Any] | None:
    """Return what an operator says of itself; None if it does not answer."""
    try:
        trust = local_trust(home, operator)
        answer = send("GET", f"{operator.url}/livez", None, {}, _ANSWER_TIMEOUT_S, trust)
        told = json.loads(answer.body)
    except (OSError, HTTPException, ValueError):
        return None
    return told if answer.status == 200 and isinstance(told, dict) else None


def _why_not_started(home: Home, log_offset: int, code: int) -> str:
    """Return what the operator said at last, where that is an error for users; else the end of its log."""
    *_, last = _last_lines(home, log_offset) or [""]
    if last.startswith(_ERROR):
        return f"the operator did not start: {last.removeprefix(_ERROR)}"
    return f"the operator did not start (exit code {code}){_log_tail(home, log_offset)}"


def _log_tail(home: Home, offset: int) -> str:
    if lines := _last_lines(home, offset):
        return "; the end of its log:\n" + "\n".join(f"  {line}" for line in lines)
    return f"; {log_file(home)} may say why"


def _last_lines(home: Home, offset: int) -> list[str]:
    with suppress(OSError), log_file(home).open("rb") as stream:
        stream.seek(offset)
        return stream.read().decode(errors="replace").strip().splitlines()[-_LOG_TAIL_LINES:]
    return []
