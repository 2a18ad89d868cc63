"""A project on this machine that is not deployed: its APIs, and the specs of processes that run in its own folder."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from cortex.config.schema import Api
from cortex.engine.environment import Prepared, prepare_setup, setup_of
from cortex.errors import InputError
from cortex.home import Home
from cortex.operator.deploy.diagnose import Diagnosis, Machine, diagnose
from cortex.operator.revisions.replica_specs import replica_spec
from cortex.projects.dotenv import DOTENV_NAME
from cortex.state.revision import Revision
from cortex.worker.spec import ReplicaSpec, Setup

T = TypeVar("T")

#: Revision in the specs of processes that no operator knows.
LOCAL_REVISION = "local"


@dataclass(frozen=True)
class LocalProject:
    """A configuration file with its folder, without any mistake found."""

    config_file: Path
    diagnosis: Diagnosis

    @classmethod
    def read(cls, config_file: Path, environ: Mapping[str, str]) -> LocalProject:
        """Read and check a project, as `cortex check` does. Blocks. Raises: ConfigError, InputError."""
        file = config_file.resolve()
        return cls(file, diagnose(file, file.name, machine=Machine(environ)))

    @property
    def folder(self) -> Path:
        """Return the folder of the project, which is the working directory of its processes."""
        return self.config_file.parent

    def dependency_files(self, api: Api) -> tuple[Path, ...]:
        """Return the files from which the environment of an API is built; any of them may be missing."""
        files = api.handler.dependencies
        return tuple(self.folder / name for name in (files.pip, files.conda, files.shell))

    def environment_files(self, api: Api) -> tuple[Path, ...]:
        """Return the files whose changes may change the environment of an API or its variables."""
        return (self.config_file, self.folder / DOTENV_NAME, *self.dependency_files(api))

    def settings_files(self, api: Api) -> tuple[Path, ...]:
        """Return the files whose changes require a new process: what is read before or beside the user's code."""
        paths = [self.folder / DOTENV_NAME]
        if api.readiness is not None:
            paths.append(self.folder / api.readiness)
        if api.handler.models is not None:
            models = api.handler.models
            written = (models.path, models.dir, *(entry.path for entry in models.paths or ()))
            paths += [self.folder / path for path in written if path is not None and "://" not in path]
        return tuple(paths)


@dataclass(frozen=True)
class _ProjectHome(Home):
    """The user's home, except that the folder of projects is the one with the user's own project."""

    projects: Path

    @property
    def projects_dir(self) -> Path:
        return self.projects


async def prepare(
    project: LocalProject, api: Api, home: Home, environ: Mapping[str, str], on_line: Callable[[str], None]
) -> ReplicaSpec:
    """Build the environment of an API, and return the spec of its process; `on_line` gets the output of installers.

    Raises: EnvironmentBuildError, StorageError, ConfigError.
    """
    revision = _revision(project, api)
    return await _spec(project, revision, setup_of(revision), home, environ, on_line)


def spec_for_this_process(project: LocalProject, api: Api, home: Home, environ: Mapping[str, str]) -> ReplicaSpec:
    """Return the spec of an API that runs in this process, with the packages of this interpreter.

    Raises: StorageError, ConfigError.
    """
    revision = _revision(project, api)
    setup = replace(setup_of(revision), pip="", conda="", shell="", model_packages={})
    return run_in_thread(_spec(project, revision, setup, home, environ, lambda line: None))


def _revision(project: LocalProject, api: Api) -> Revision:
    if api.is_grpc:
        raise InputError(f"{api.name} serves gRPC, which needs the gateway: run it with cortex deploy")
    return Revision(LOCAL_REVISION, api, project.folder.name)


async def _spec(
    project: LocalProject,
    revision: Revision,
    setup: Setup,
    home: Home,
    environ: Mapping[str, str],
    on_line: Callable[[str], None],
) -> ReplicaSpec:
    local_home = _ProjectHome(home.path, project.folder.parent)
    prepared = await prepare_setup(local_home, environ, setup, on_line)
    if prepared.python == sys.executable:  # nothing to put on PATH
        path = environ.get("PATH")
        env = {**prepared.env, "PATH": path} if path is not None else dict(prepared.env)
        prepared = Prepared(prepared.python, env, prepared.model_path)
    spec = replica_spec(local_home, revision, prepared)
    return replace(
        spec,
        id=f"{revision.spec.name}-{LOCAL_REVISION}",
        run_dir="",
        sockets=("",),
        control_socket="",
        log_path="",
        metrics_dir="",
        model_agent_socket=None,
        setup=None,
    )


def run_in_thread(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end on a thread of its own: an event loop may run on this one."""
    return call_in_thread(lambda: asyncio.run(coroutine))


def call_in_thread(call: Callable[[], T]) -> T:
    """Call a function on a thread of its own; return its result, or raise its exception."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="cortex-local")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
