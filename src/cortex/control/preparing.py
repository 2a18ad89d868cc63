"""Prepares a revision: its environment is built, its model fetched, its environment variables read."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from pathlib import Path

from cortex.config.project import read_dotenv
from cortex.control.preparations import Prepared
from cortex.errors import StorageError
from cortex.home import Home
from cortex.state.apis import Target


async def prepare_revision(home: Home, environ: Mapping[str, str], target: Target) -> Prepared:
    """Return what a replica of `target` is started with. Raises: EnvironmentBuildError, StorageError, ConfigError."""
    handler = target.spec.handler
    project = home.projects_dir / target.project_hash
    # `.env` is read last and wins, as it did where a shell sourced it after the container's own variables.
    dotenv = await asyncio.to_thread(read_dotenv, project, {**environ, **handler.env})
    model_path = _local_model(project, handler.model) if handler.model else None
    return Prepared(sys.executable, {**handler.env, **dotenv}, model_path)


def _local_model(project: Path, model: str) -> str:
    path = project / Path(model).expanduser()
    if not path.exists():
        raise StorageError(f"model {model}: no such file or folder")
    return str(path)
