"""Real model agents for tests, and a client with the messages of a supervisor."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import psutil

from cortex.home import Home
from cortex.models.protocol import (
    CatalogueUpdate,
    Fetch,
    Fetched,
    FetchFailed,
    Request,
    Using,
    Watch,
    read_answer,
    write,
)
from cortex.models.spec import DEFAULT_MODEL, Catalogue, ModelPath, ModelSource
from harness.wait import wait_until

POLL_S = 0.5
_PROGRAM = """
import asyncio, os, sys
from pathlib import Path
from cortex.home import Home
from cortex.models.agent import agent
from cortex.telemetry import Logger, configure
home = Home(Path(sys.argv[1]))
configure(home.logs_dir / "models.log")
limits = agent.AgentLimits(**{name: float(value) for name, value in (item.split("=") for item in sys.argv[2:])})
with agent.only_one(home):
    asyncio.run(agent.ModelAgentServer(home, os.environ, limits, Logger("cortex.models")).run())
"""


@dataclass
class RunningAgent:
    """A model agent that can be killed and started again."""

    home: Home
    environ: dict[str, str] = field(default_factory=dict)
    limits: dict[str, float] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None

    @property
    def socket(self) -> str:
        return str(self.home.model_agent_socket)

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def start(self) -> Self:
        """Start the agent; return once it listens."""
        self.home.create()
        limits = [f"{name}={value}" for name, value in self.limits.items()]
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", _PROGRAM, str(self.home.path), *limits],
            env={**os.environ, **self.environ},
            start_new_session=True,
        )
        wait_until(self.answers, 20, "the model agent listens")
        return self

    def answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as client:
            return client.connect_ex(self.socket) == 0

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(5)
            self.kill()
        shutil.rmtree(self.home.metrics_dir, ignore_errors=True)  # it may be outside of the home

    def log(self) -> str:
        return (self.home.logs_dir / "models.log").read_text()

    def contents(self) -> list[str]:
        """Return the digests of the contents on disk."""
        folder = self.home.models_dir / "content"
        return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []

    def pss_bytes(self) -> int:
        return int(psutil.Process(self.pid).memory_full_info().pss)

    def cpu_s(self) -> float:
        times = psutil.Process(self.pid).cpu_times()
        return float(times.user + times.system)


class AgentClient:
    """One connection to an agent."""

    def __init__(self, path: str) -> None:
        self.heard: list[CatalogueUpdate] = []
        self.fetched: dict[int, Fetched | FetchFailed] = {}
        self._sock = socket.socket(socket.AF_UNIX)
        self._sock.connect(path)
        self._sock.setblocking(False)
        self._unread = b""
        self.is_lost = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def say(self, request: Request) -> None:
        self._sock.setblocking(True)
        self._sock.sendall(write(request))
        self._sock.setblocking(False)

    def say_bytes(self, data: bytes) -> None:
        self._sock.setblocking(True)
        self._sock.sendall(data)
        self._sock.setblocking(False)

    def watch(self, source: ModelSource, api: str = "iris") -> Self:
        self.say(Watch(api, source))
        return self

    def use(self, digests: Iterable[str]) -> None:
        self.say(Using(frozenset(digests)))

    def fetch(self, source: ModelSource, model: str, number: str, digest: str, number_of_fetch: int = 1) -> None:
        self.say(Fetch(number_of_fetch, "iris", source, model, number, digest))

    def listen(self) -> None:
        """Process received messages."""
        with contextlib.suppress(BlockingIOError, ConnectionResetError):
            while data := self._sock.recv(65536):
                self._unread += data
            self.is_lost = True
        *lines, self._unread = self._unread.split(b"\n")
        for line in lines:
            answer = read_answer(line)
            if isinstance(answer, CatalogueUpdate):
                self.heard.append(answer)
            elif answer is not None:
                self.fetched[answer.id] = answer

    def news(self) -> CatalogueUpdate | None:
        self.listen()
        return self.heard[-1] if self.heard else None

    def confirmed(self) -> Catalogue | None:
        """Return the newest confirmed catalogue."""
        news = self.news()
        return _read(news.confirmed) if news else None

    def candidate(self) -> Catalogue | None:
        news = self.news()
        return _read(news.candidate) if news else None

    def error(self) -> str | None:
        news = self.news()
        return news.error if news else None

    def answer(self, number: int = 1) -> Fetched | FetchFailed:
        """Wait for the reply to a fetch and return it."""

        def has_come() -> bool:
            self.listen()
            return number in self.fetched

        wait_until(has_come, 30, f"fetch {number} is answered")
        return self.fetched[number]

    def close(self) -> None:
        self._sock.close()


def _read(file: str | None) -> Catalogue | None:
    return Catalogue.from_json(Path(file).read_bytes()) if file else None


def put(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def of_dir(url: Path | str, **fields: object) -> ModelSource:
    return ModelSource("python", dir=str(url), **{"poll_interval_s": POLL_S, **fields})  # type: ignore[arg-type]


def of_path(url: Path | str, **fields: object) -> ModelSource:
    path = (ModelPath(DEFAULT_MODEL, str(url)),)
    return ModelSource("python", paths=path, **{"poll_interval_s": POLL_S, **fields})  # type: ignore[arg-type]


def latest(catalogue: Catalogue | None) -> dict[str, str]:
    """Return the latest version of each model."""
    return {model.name: model.latest.number for model in catalogue.models} if catalogue else {}


def read_latest(client: AgentClient, model: str = DEFAULT_MODEL, name: str = "model.pkl") -> bytes:
    catalogue = client.confirmed()
    assert catalogue is not None
    path = catalogue.by_name[model].latest.path
    assert path is not None
    return (Path(path) / name).read_bytes()
