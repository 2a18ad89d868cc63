"""Runs a real operator for a test and talks to it over HTTP."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPException
from typing import Any

import psutil

from cortex.home import Home
from harness.ports import free_port
from harness.wait import PATIENCE_S, wait_until

HANDLER = """
import os, time
class Handler:
    def __init__(self, config):
        self.answer = config.get("answer", "one")
    def handle_post(self, payload):
        if payload.get("sleep"):
            time.sleep(payload["sleep"])
        return {"answer": self.answer, "pid": os.getpid()}
"""
#: Between two requests of a thread of `Load`: they must not take the cores from what the test waits for.
_LOAD_PAUSE_S = 0.005
BROKEN_HANDLER = HANDLER.replace("        self.answer", "        raise ValueError('bad weights')\n        self.answer")


def config(name: str = "iris", replicas: int = 1, answer: str = "one", extra: str = "") -> str:
    return f"""
- name: {name}
  kind: RealtimeAPI
  handler:
    type: python
    path: handler.py
    config: {{answer: {answer}}}
  autoscaling: {{min_replicas: {replicas}}}
{extra}
"""


def project(yaml: str, handler: str = HANDLER, **files: str) -> bytes:
    """Pack an upload: a handler, its configuration, other files."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, text in {"cortex.yaml": yaml, "handler.py": handler, **files}.items():
            packed.writestr(name, text)
    return buffer.getvalue()


class RunningOperator:
    """One operator process and its gateway."""

    def __init__(self, home: Home, *options: str) -> None:
        self.home = home
        self._options = options
        self.port = free_port()
        self.gateway_port = free_port()
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it answers."""
        self.process = self.spawn()
        wait_until(self._answers, message="operator answers")

    def spawn(self, *options: str) -> subprocess.Popen[bytes]:
        ports = ["--operator-port", str(self.port), "--gateway-port", str(self.gateway_port)]
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "cortex.operator.main", *ports, *self._options, *options],
            env={**os.environ, "CORTEX_HOME": str(self.home.path)},
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    def end(self, number: int = signal.SIGTERM) -> None:
        """Send a signal and wait for the end."""
        assert self.process is not None
        self.process.send_signal(number)
        self.process.wait(PATIENCE_S)

    def clear(self) -> None:
        """Delete all APIs, and start it if it has ended: the next test uses it too."""
        if self.process is None or self.process.poll() is not None:
            self.start()
        for each in self.call("GET", "/v1/apis")[1]:
            self.call("DELETE", f"/v1/apis/{each['spec']['name']}?force=true")
        wait_until(lambda: not self.replicas() and not self.call("GET", "/v1/apis")[1], message="all APIs deleted")

    @property
    def token(self) -> str:
        return self.home.token_file.read_text().strip()

    def call(self, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, Any]:
        """Return status and JSON of one request to the operator."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=2 * PATIENCE_S)
        try:
            connection.request(method, path, body, {"authorization": f"Bearer {self.token}", **headers})
            response = connection.getresponse()
            return response.status, json.loads(response.read() or b"null")
        finally:
            connection.close()

    def deploy(self, yaml: str, handler: str = HANDLER, force: bool = False) -> list[dict[str, str]]:
        status, results = self.call("POST", f"/v1/deploy?force={str(force).lower()}", project(yaml, handler))
        assert status == 200, results
        return results

    def wait(self, api: str = "iris") -> dict[str, Any]:
        """Return an API once it is not `updating` any more."""
        status, answer = self.call("GET", f"/v1/apis/{api}/wait?timeout=60")
        assert status == 200, answer
        return answer

    def api(self, api: str = "iris") -> dict[str, Any]:
        return self.call("GET", f"/v1/apis/{api}")[1]

    def replicas(self) -> list[dict[str, Any]]:
        return self.call("GET", "/v1/status")[1]["replicas"]

    def predict(self, payload: dict[str, Any], path: str = "/iris") -> tuple[int, Any]:
        """Return status and JSON of one request to an API."""
        connection = HTTPConnection("127.0.0.1", self.gateway_port, timeout=60)
        try:
            connection.request("POST", path, json.dumps(payload), {"content-type": "application/json"})
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()

    def _answers(self) -> bool:
        assert self.process is not None
        if self.process.poll() is not None:
            stderr = self.process.stderr.read().decode() if self.process.stderr else ""
            raise AssertionError(f"operator ended with {self.process.returncode}: {stderr}")
        try:
            return self.call("GET", "/livez")[0] == 200
        except (OSError, HTTPException):
            return False


@contextmanager
def running_operator(home: Home, *options: str) -> Iterator[RunningOperator]:
    """Run an operator; at the end stop it, its gateway and its replicas, even those of operators that died."""
    operator = RunningOperator(home, *options)
    operator.start()
    try:
        yield operator
    finally:
        try:
            if operator.process is None or operator.process.poll() is not None:
                operator.start()
            operator.call("POST", "/v1/shutdown?all=true")
            operator.process.wait(PATIENCE_S)
        finally:
            end_leftovers(home)


def end_leftovers(home: Home) -> None:
    mark = str(home.path)
    for process in psutil.process_iter(["cmdline"]):
        if any(mark in part for part in process.info["cmdline"] or []):
            with suppress(psutil.NoSuchProcess):  # it has just ended
                process.kill()


class Load:
    """Requests from a few threads, each on a connection of its own, until stopped; keeps all failures."""

    def __init__(self, operator: RunningOperator, threads: int = 4) -> None:
        self._operator = operator
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(threads)]
        self.answers: list[Any] = []
        self.failures: list[str] = []

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        connection = HTTPConnection("127.0.0.1", self._operator.gateway_port, timeout=PATIENCE_S)
        while not self._stop.wait(_LOAD_PAUSE_S):
            try:
                connection.request("POST", "/iris", "{}", {"content-type": "application/json"})
                response = connection.getresponse()
                body = response.read()
                if response.status == 200:
                    self.answers.append(json.loads(body)["answer"])
                else:
                    self.failures.append(f"{response.status} {body.decode()}")
            except (OSError, HTTPException) as error:
                self.failures.append(repr(error))
                connection.close()
        connection.close()
