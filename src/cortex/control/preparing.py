"""Prepares a revision: its environment is built, its model found, its environment variables read."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

from cortex.config.project import read_dotenv
from cortex.control.preparations import Prepared
from cortex.engine.environment import prepare
from cortex.engine.local import replica_environ
from cortex.engine.logs import STDOUT, LogWriter
from cortex.errors import StorageError
from cortex.home import Home
from cortex.state.apis import Target
from cortex.storage import fetch, is_remote


async def prepare_revision(home: Home, environ: Mapping[str, str], target: Target) -> Prepared:
    """Return what a replica of `target` is started with; what installers say goes to the API's logs.

    Raises: EnvironmentBuildError, StorageError, ConfigError.
    """
    api = target.spec
    inherited = replica_environ(environ)
    project = home.projects_dir / target.project_hash
    # `.env` is read last and wins, as it did where a shell sourced it after the container's own variables.
    dotenv = await asyncio.to_thread(read_dotenv, project, {**inherited, **api.handler.env})
    variables = {**api.handler.env, **dotenv}
    log = LogWriter(home.logs_dir / api.name / f"{api.name}-{target.revision[:8]}-install.log")
    try:
        environment = await prepare(
            home,
            project,
            api.handler.dependencies,
            inherited,
            variables,
            lambda line: log.line(0, STDOUT, line),
        )
    finally:
        log.close()
    model = api.handler.model
    model_path = str(await _model(home, project, model, inherited)) if model else None
    return Prepared(environment.python, {**environment.variables(inherited), **variables}, model_path)


async def _model(home: Home, project: Path, model: str, environ: Mapping[str, str]) -> Path:
    if is_remote(model):
        return await fetch(model, home.models_dir, environ)
    path = project / Path(model).expanduser()
    if not path.exists():
        raise StorageError(f"model {model}: no such file or folder")
    return path
