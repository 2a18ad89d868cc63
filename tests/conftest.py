"""Fixtures shared by all tests."""

from __future__ import annotations

import asyncio
import functools
import gc
import inspect
import itertools
import os
import random
import re
import shutil
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop
from hypothesis import settings

from cortex.home import Home
from cortex.processes.sockets import allow_descriptors
from harness.guard import start_guard
from harness.servers.buckets import swift, swift_server
from harness.servers.databases import postgres, postgresql_url, quick_databases, real_databases, where

__all__ = [
    "home",
    "postgres",
    "postgresql_url",
    "quick_databases",
    "real_databases",
    "swift",
    "swift_server",
    "where",
]

# A shell makes background commands ignore interrupts, and with them every process that a test starts and interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests with a thousand clients need more open files than the usual limit of an ordinary user, 1,024.
allow_descriptors(8192)

#: Projects of users, some with files that are no text.
collect_ignore = ["fixtures"]

#: Folders whose tests all start processes; elsewhere, a module or a test has `pytest.mark.processes`.
_PROCESS_FOLDERS = {"e2e", "reports"}
_WHOLE_MODULE = re.compile(r"^pytestmark = .*\bmark\.processes\b", re.MULTILINE)
#: Modules with one of these words run in the same process of `make test`.
_SLOW_TO_START = ("SwiftServer", "tensorflow_model(", "EmbeddedTensorFlow(")
_PROCESS_EVENTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn"}

#: Time for a test that is `async def`.
_ASYNC_TEST_S = 240.0

# Thousands of tests are collected, and none of them becomes garbage.
gc.disable()


def pytest_configure(config: pytest.Config) -> None:
    """In the fast loop, fail each test that starts a process, and try fewer examples; in others, end what is left."""
    if _is_fast(config):
        sys.addaudithook(_refuse_processes)
    else:
        start_guard()
    if not config.getoption("--hypothesis-profile"):
        settings.load_profile("fast" if _is_fast(config) else "main")


def _is_fast(config: pytest.Config) -> bool:
    return "not processes" in config.option.markexpr


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """In the fast loop, leave out modules that start processes before they are imported, which takes seconds of CPU."""
    if not _is_fast(config):
        return None
    if collection_path.is_dir():
        return collection_path.name in _PROCESS_FOLDERS or None
    return (collection_path.suffix == ".py" and _WHOLE_MODULE.search(collection_path.read_text()) is not None) or None


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Let each process of a run import the modules in another order.

    pytest compiles a module on its first import, which takes longer than all else at the start. In the same order, all
    processes would compile each module at the same time; in different ones, most find what another one has compiled.
    """
    report = yield
    if isinstance(collector, pytest.Directory) and (worker := os.environ.get("PYTEST_XDIST_WORKER")):
        random.Random(worker).shuffle(report.result)
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests of folders, and order modules.

    Modules that take long come first: the processes of `make test` get whole modules, and short ones fill the end.
    """
    for item in items:
        if _PROCESS_FOLDERS & set(item.path.parts):
            item.add_marker(pytest.mark.processes)
    slow = {item.path for item in items if {"processes", "heavy"} & {mark.name for mark in item.iter_markers()}}
    items.sort(key=lambda item: (item.path not in slow, item.path.parent.name != "e2e", item.path))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is `async def`: with a gateway, on the loop that the operator uses."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    run = uvloop.run if "gateway" in pyfuncitem.nodeid.partition("::")[0] else asyncio.run
    run(asyncio.wait_for(pyfuncitem.obj(**arguments), _ASYNC_TEST_S))
    return True


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object | None:
    """Give whole modules to the processes of `make test`; those that use Swift, or TensorFlow, share one process."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Modules(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return _process_of(config.rootpath / nodeid.partition("::")[0])

    return Modules(config, log)


@functools.cache
def _process_of(module: Path) -> str:
    text = module.read_text()
    return next((name for name in _SLOW_TO_START if name in text), str(module))


def _refuse_processes(event: str, _: tuple[object, ...]) -> None:
    if event in _PROCESS_EVENTS and os.environ.get("PYTEST_CURRENT_TEST"):
        raise AssertionError("this test starts a process: mark it with @pytest.mark.processes")


def pytest_collection_finish() -> None:
    """Keep collected tests out of every later garbage collection; some tests collect hundreds of times."""
    gc.freeze()
    gc.enable()


# The duration of one example depends on the machine.
# Each run tries the same examples, so that a change fails by its own mistakes only; "explore" tries new ones.
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.register_profile("main", deadline=None, max_examples=100, derandomize=True)
settings.register_profile("fast", deadline=None, max_examples=20, derandomize=True)


_numbers = itertools.count()


@pytest.fixture
def tmp_path(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A folder of the test's own. pytest's lists all others to find its name, milliseconds after thousands of tests."""
    name = re.sub(r"\W", "_", request.node.name)[:30]
    folder = tmp_path_factory.getbasetemp() / f"{name}{next(_numbers)}"
    folder.mkdir(mode=0o700)
    return folder


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    """A CORTEX_HOME of the test's own."""
    home = Home(tmp_path / "home")
    home.create()
    yield home
    shutil.rmtree(home.metrics_dir, ignore_errors=True)  # it may be outside of the home
