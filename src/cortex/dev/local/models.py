"""The models of an API without a model agent: listed once, read where they are, downloaded if they are remote."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from cortex.dev.local.project import run_in_thread
from cortex.errors import ModelError, StorageError
from cortex.models.agent.layout import check_listing, source_entries
from cortex.models.agent.listing import download_version, list_models
from cortex.models.spec import Catalogue, Model, ModelProblem, ModelSource, Version
from cortex.storage.client import is_remote


def list_catalogue(source: ModelSource, environ: Mapping[str, str]) -> Catalogue:
    """List the models of a source. Blocks. Raises: StorageError."""
    return run_in_thread(_list(source, environ))


async def _list(source: ModelSource, environ: Mapping[str, str]) -> Catalogue:
    models: list[Model] = []
    problems: list[ModelProblem] = []
    for prefix, name, key in source_entries(source):
        checked = check_listing(source.layout, name, key, await list_models(prefix, environ), time.time())
        models += checked.models
        problems += checked.problems
    return Catalogue(tuple(sorted(models, key=lambda model: model.name)), tuple(problems))


class LocalFetcher:
    """Provides the files of models to this process. Thread-safe; downloads stay until the process ends."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._folder = tempfile.TemporaryDirectory(prefix="cortex-models-", ignore_cleanup_errors=True)

    def fetch(self, model: str, version: Version) -> Path:
        """Return the folder with the files of a version. Blocks. Raises: ModelError."""
        if not is_remote(version.url) and Path(version.url).is_dir():
            return Path(version.url)
        target = Path(self._folder.name) / version.digest
        if target.is_dir():
            return target
        if not is_remote(version.url):  # a model that is one file
            target.mkdir()
            file = target / Path(version.url).name
            try:
                file.hardlink_to(version.url)  # loaders refuse symbolic links out of the folder
            except OSError:  # another file system
                shutil.copyfile(version.url, file)
            return target
        try:
            run_in_thread(download_version(version.url, version.digest, target, self._environ))
        except StorageError as error:
            raise ModelError(f"{model}, version {version.number}, can't be fetched: {error}") from error
        return target

    def release(self, version: Version) -> None:
        """Keep the files: there is room for the models of one process."""

    def close(self) -> None:
        """Delete the downloads."""
        self._folder.cleanup()
