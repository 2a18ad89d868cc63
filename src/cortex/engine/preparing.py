"""Prepares what a replica is started from: its environment is built, its model found, its variables read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from cortex.config.dotenv import read_dotenv
from cortex.engine.environment import prepare
from cortex.engine.local import replica_environ
from cortex.engine.log_writer import STDOUT, LogWriter
from cortex.errors import StorageError
from cortex.home import Home
from cortex.replica.spec import Setup
from cortex.state.apis import Target
from cortex.storage.client import fetch, is_remote


@dataclass(frozen=True)
class Prepared:
    """What a replica of a revision is started with."""

    python: str
    env: Mapping[str, str]
    model_path: str | None = None


async def prepare_revision(home: Home, environ: Mapping[str, str], target: Target) -> Prepared:
    """Return what a replica of `target` is started with; what installers say goes to the API's logs.

    Raises: EnvironmentBuildError, StorageError, ConfigError.
    """
    log = LogWriter(install_log(home, target.spec.name, target.revision))
    try:
        return await prepare_setup(home, environ, setup_of(target), lambda line: log.line(0, STDOUT, line))
    finally:
        log.close()


async def prepare_setup(
    home: Home, environ: Mapping[str, str], setup: Setup, on_line: Callable[[str], None]
) -> Prepared:
    """As `prepare_revision`; `on_line` is given what installers say. The project must have been unpacked."""
    inherited = replica_environ(environ)
    project = home.projects_dir / setup.project_hash
    # `.env` is read last and wins, as it did where a shell sourced it after the container's own variables.
    dotenv = await asyncio.to_thread(read_dotenv, project, {**inherited, **setup.env})
    variables = {**setup.env, **dotenv}
    environment = await prepare(home, project, setup, inherited, variables, on_line)
    model_path = str(await _model(home, project, setup.model, inherited)) if setup.model else None
    return Prepared(environment.python, {**environment.variables(inherited), **variables}, model_path)


def setup_of(target: Target) -> Setup:
    """Say what has to be there for a revision, wherever its replicas run."""
    handler = target.spec.handler
    files = handler.dependencies
    return Setup(target.project_hash, files.pip, files.conda, files.shell, handler.env, handler.model)


def install_log(home: Home, api: str, revision: str) -> Path:
    """Return the file for what installers say, among the logs of the API."""
    return home.logs_dir / api / f"{api}-{revision[:8]}-install.log"


async def _model(home: Home, project: Path, model: str, environ: Mapping[str, str]) -> Path:
    if is_remote(model):
        return await fetch(model, home.models_dir, environ)
    path = project / Path(model).expanduser()
    if not path.exists():
        raise StorageError(f"model {model}: no such file or folder")
    return path
