from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil
import pytest

from cortex import __version__
from cortex.engine import model_agent
from cortex.engine.model_agent import ModelAgent
from cortex.errors import EngineError
from cortex.home import Home
from cortex.telemetry import Logger
from harness.wait import PATIENCE_S, SLACK, has_ended

pytestmark = pytest.mark.processes


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for an agent that starts on a loaded machine."""
    monkeypatch.setattr(model_agent, "START_TIMEOUT_S", PATIENCE_S)


@contextlib.asynccontextmanager
async def new_agent(home: Home) -> AsyncIterator[ModelAgent]:
    agent = ModelAgent(home, {**os.environ, "CORTEX_TOKEN": "secret"}, Logger("test"))
    try:
        async with asyncio.timeout(60 * SLACK):
            yield agent
    finally:
        await agent.stop()


async def until(is_true: Callable[[], bool], timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s * SLACK):
        while not is_true():
            await asyncio.sleep(0.01)


async def test_runs_in_its_own_session_without_secrets_in_its_environment(home: Home) -> None:
    async with new_agent(home) as agent:
        await agent.ensure_running()
        assert agent.pid is not None
        assert os.getsid(agent.pid) == agent.pid
        assert "CORTEX_TOKEN" not in psutil.Process(agent.pid).environ()
        assert home.model_agent_socket.is_socket()


async def test_ensure_running_starts_one_agent_only(home: Home) -> None:
    async with new_agent(home) as agent:
        await agent.ensure_running()
        pid = agent.pid
        await asyncio.gather(*(agent.ensure_running() for _ in range(5)))
        assert agent.pid == pid


async def test_a_later_operator_adopts_the_running_agent(home: Home) -> None:
    async with new_agent(home) as agent:
        await agent.startup(lambda: True)
        pid = agent.pid
        await agent.shutdown()
        assert pid is not None and not has_ended(pid)
        later = ModelAgent(home, os.environ, Logger("test"))
        await later.startup(lambda: True)
        assert later.describe() == {"pid": pid, "version": __version__, "environment": sys.prefix}
        (home.run_dir / "model-agent.json").unlink()
        latest = ModelAgent(home, os.environ, Logger("test"))
        await latest.startup(lambda: True)
        assert latest.pid == pid
        await latest.stop()
        await until(lambda: has_ended(pid))


async def test_a_killed_agent_is_started_again(home: Home) -> None:
    async with new_agent(home) as agent:
        await agent.startup(lambda: True)
        task = asyncio.create_task(agent.run())
        first = agent.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await until(lambda: agent.pid not in (None, first))
        task.cancel()


async def test_starts_the_agent_once_it_is_needed(home: Home) -> None:
    async with new_agent(home) as agent:
        needed = False
        await agent.startup(lambda: needed)
        task = asyncio.create_task(agent.run())
        await asyncio.sleep(0)
        assert agent.pid is None
        needed = True
        await until(lambda: agent.pid is not None)
        task.cancel()


async def test_a_failed_start_reports_the_output(home: Home, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no such thing; exit 1\n")
    python.chmod(0o700)
    monkeypatch.setattr(model_agent.sys, "executable", str(python))
    async with new_agent(home) as agent:
        with pytest.raises(EngineError, match="ended during startup: no such thing"):
            await agent.ensure_running()
        await agent.startup(lambda: True)  # an operator goes on without
        assert agent.pid is None


async def test_the_deployed_apis_with_models_are_in_a_file_for_the_agent(home: Home) -> None:
    async with new_agent(home) as agent:
        apis = {"wine", "iris"}
        await agent.startup(lambda: False, lambda: apis)
        assert json.loads(home.apis_with_models_file.read_text()) == ["iris", "wine"]
        task = asyncio.create_task(agent.run())
        apis.clear()
        await until(lambda: json.loads(home.apis_with_models_file.read_text()) == [])
        task.cancel()
