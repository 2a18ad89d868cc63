"""A real installation for end-to-end tests: its own CORTEX_HOME and ports, driven by the real command line."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cortex.client.cleanup import inspect_processes
from cortex.client.client import Client
from cortex.client.environments import LOCAL, Environments
from cortex.errors import OperatorUnavailableError, UnauthorizedError
from cortex.home import Home
from harness.ports import free_port
from harness.replicas.replicas import Answer
from harness.wait import PATIENCE_S, wait_until

ROOT = Path(__file__).resolve().parents[3]
CORTEX = [sys.executable, "-m", "cortex.cli.main"]
#: A project that answers what it is sent.
ECHO_SOURCE = """
    class Handler:
        def __init__(self, config):
            pass

        def handle_post(self, payload):
            return payload
"""
ECHO_CONFIG = """
    - name: echo
      kind: RealtimeAPI
      handler: {type: python, path: handler.py}
"""


@dataclass
class Installation:
    """An operator and a gateway of the test's own."""

    home: Path
    gateway_port: int
    operator_port: int
    variables: Mapping[str, str] = field(default_factory=dict)  #: of the operator, beside those of the test run
    host: str = "127.0.0.1"  #: where operator and gateway are reached
    prefix: tuple[str, ...] = ()  #: in front of each command: runs it on another machine
    environment: str = LOCAL  #: with which the Python client reaches the operator from this machine
    flags: tuple[str, ...] = ()  #: of `cortex up`
    program: tuple[str, ...] = tuple(CORTEX)  #: the command line; another one is that of another version

    @property
    def environ(self) -> dict[str, str]:
        return {**os.environ, **self.variables, "CORTEX_HOME": str(self.home), "NO_COLOR": "1"}

    def cortex(
        self, *arguments: str | Path, check: bool = True, timeout_s: float = 90
    ) -> subprocess.CompletedProcess[str]:
        """Run the command line."""
        done = subprocess.run(
            [*self.prefix, *self.program, *map(str, arguments)],
            env=self.environ,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        if check and done.returncode:
            raise AssertionError(
                f"cortex {arguments}: exit {done.returncode}\n{done.stdout}\n{done.stderr}\n{self.log()}"
            )
        return done

    def up(self) -> None:
        ports = ["--gateway-port", str(self.gateway_port), "--operator-port", str(self.operator_port)]
        self.cortex("up", "--no-wait", *ports, *self.flags)

    def down(self) -> None:
        self.cortex("down", check=False)

    def clear(self) -> None:
        """Delete all APIs, and start the operator if a test left it stopped: the next module uses it too."""
        try:
            apis = self.client.list_apis()
        except OperatorUnavailableError:
            self.up()
            apis = self.client.list_apis()
        # An API that a splitter sends requests to can't be deleted.
        for api in sorted(apis, key=lambda api: str(api["spec"]["kind"]) != "TrafficSplitter"):
            self.client.delete(api["spec"]["name"])
        wait_until(lambda: not self.status()["replicas"], PATIENCE_S, "all replicas have ended")

    @property
    def client(self) -> Client:
        """The Python client of this installation."""
        return Client(Environments.from_environ(self.environ).get(self.environment))

    def status(self) -> Any:
        """Return what `cortex status -o json` prints; without a command, because tests poll it."""
        try:
            return self.client.operator_status()
        except (OperatorUnavailableError, UnauthorizedError):
            # Operators with one database have one token: one that took over has that of the other, in its home.
            if self.prefix:
                return json.loads(self.cortex("status", "-o", "json").stdout)
            return inspect_processes(Home(self.home))

    def get(self, api: str) -> Any:
        return self.client.get_api(api)

    def pids(self, api: str) -> set[int]:
        """Return the processes of an API's replicas; one that starts may have none yet."""
        return {replica["pid"] for replica in self.status()["replicas"] if replica["api"] == api} - {None}

    def url(self, path: str) -> str:
        return f"http://{self.host}:{self.gateway_port}{path}"

    def post(
        self, path: str, payload: Any = None, *, body: bytes | None = None, method: str = "POST", **headers: str
    ) -> Answer:
        """Send one request to the gateway."""
        data = body if body is not None else json.dumps(payload).encode()
        sent = {"content-type": "application/json", **{k.replace("_", "-"): v for k, v in headers.items()}}
        request = urllib.request.Request(self.url(path), data if method != "GET" else None, sent, method=method)
        started = time.monotonic()
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
                return Answer(answer.status, _lower(answer.headers), answer.read(), time.monotonic() - started)
        except urllib.error.HTTPError as error:
            return Answer(error.code, _lower(error.headers), error.read(), time.monotonic() - started)

    def log(self) -> str:
        path = self.home / "logs" / "operator.log"
        return path.read_text()[-4000:] if path.exists() else ""

    @contextlib.contextmanager
    def load(self, path: str, rate: float, connections: int = 16) -> Iterator[dict[str, Any]]:
        """Send a constant load while the block runs; the dict is filled with its summary afterwards.

        The block begins after the first response.
        """
        command = [
            sys.executable,
            str(Path(__file__).with_name("load.py")),
            self.url(path),
            str(rate),
            str(connections),
        ]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        summary: dict[str, Any] = {}
        try:
            assert process.stdout is not None
            process.stdout.readline()
            yield summary
        finally:
            try:
                output, _ = process.communicate(timeout=60)
                summary.update(json.loads(output))
            finally:
                process.kill()


def _lower(headers: Any) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}


@contextlib.contextmanager
def installation(variables: Mapping[str, str] | None = None, flags: tuple[str, ...] = ()) -> Iterator[Installation]:
    """Start an installation; everything of it is gone afterwards. `flags` are those of `cortex up`."""
    home = Path(tempfile.mkdtemp(prefix="cx-"))
    made = Installation(home, free_port(), free_port(), variables or {}, flags=flags)
    try:
        made.up()
        yield made
    finally:
        made.down()
        shutil.rmtree(Home(home).metrics_dir, ignore_errors=True)  # without an operator, `cortex down` keeps them
        shutil.rmtree(home, ignore_errors=True)


def write_project(folder: Path, source: str, config: str) -> Path:
    """Write a project of one Python file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "handler.py").write_text(textwrap.dedent(source))
    (folder / "cortex.yaml").write_text(textwrap.dedent(config))
    return folder


def served(installation: Installation, path: str, payload: Any) -> Answer:
    """Return the first answer that is not an error of a gateway without replicas."""
    return wait_until(lambda: (reply := installation.post(path, payload)).status != 503 and reply)
