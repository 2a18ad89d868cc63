"""Diagnoses a configuration that comes without a project: each API is checked against the project it runs with."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from cortex.config.document import parse
from cortex.config.project import ProjectFiles
from cortex.config.schema import Api
from cortex.errors import ConfigError, Diagnostic, NotFoundError
from cortex.operator.deploy.diagnose import Surroundings, diagnose_project
from cortex.operator.deploy.projects import ProjectFolders
from cortex.state.apis import ApiRecord

_CONFIG_NAME = "cortex.yaml"


def diagnose_patch(
    config: bytes,
    records: Mapping[str, ApiRecord],
    projects: ProjectFolders,
    surroundings: Surroundings | None = None,
) -> list[Api]:
    """Return the APIs in `config`, all of which are deployed; `surroundings` are as in `diagnose`.

    Raises: ConfigError with every mistake; NotFoundError if one of them is not deployed.
    """
    names = _names(config)
    for name in names:
        if name not in records:
            raise NotFoundError(f"{name} is not deployed")
    hashes = dict.fromkeys(records[name].target.project_hash for name in names)
    deployed = [record.spec for record in records.values()]
    with tempfile.TemporaryDirectory(prefix="cortex-patch-") as folder:
        file = Path(folder) / _CONFIG_NAME
        file.write_bytes(config)
        if not hashes:
            return list(diagnose_project(file, _CONFIG_NAME, ProjectFiles(Path(folder), ()), deployed).apis)
        found: list[Diagnostic] = []
        apis: list[Api] = []
        for project_hash in hashes:
            project = ProjectFiles.scan(projects.path(project_hash), _CONFIG_NAME)
            mine = {name for name in names if records[name].target.project_hash == project_hash}
            try:
                diagnosis = diagnose_project(file, _CONFIG_NAME, project, deployed, surroundings)
                apis += [api for api in diagnosis.apis if api.name in mine]
            except ConfigError as error:
                found += [problem for problem in error.diagnostics if _owner(problem, names) in (None, *mine)]
        if found:
            raise ConfigError(list(dict.fromkeys(found)))
    return sorted(apis, key=lambda api: names.index(api.name))


def _names(config: bytes) -> list[str]:
    """Name the APIs of a configuration, in its order. Raises: ConfigError if it is no YAML list of maps."""
    names = []
    for item in parse(config, _CONFIG_NAME).items:
        name, kind = item.at("name"), item.at("kind")
        if name and isinstance(name.value, str) and not (kind and kind.value == "deployment"):
            names.append(name.value)
    return list(dict.fromkeys(names))


def _owner(problem: Diagnostic, names: Sequence[str]) -> str | None:
    """Name the API that a diagnostic is about, None if it is about the file or the project."""
    first = problem.path.split(".")[0].split(":")[0]
    return first if first in names else None
