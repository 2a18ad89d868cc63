"""Finds everything that can be known to be wrong before a deploy: the one code path of check and deploy.

Imports nothing of the operator, so that `cortex check` is quick, and never runs the user's code.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cortex.config.project import ProjectFiles, read_dotenv
from cortex.config.requirements import parse_requirements
from cortex.config.schema import Api
from cortex.config.validate import examine
from cortex.errors import ConfigError, Diagnostic
from cortex.predictor.source import inspect_source


@dataclass(frozen=True)
class Diagnosis:
    """A configuration and its project, with nothing wrong that could be found."""

    apis: tuple[Api, ...]
    project: ProjectFiles


def diagnose(config_file: Path, display_name: str, deployed: Sequence[Api] = ()) -> Diagnosis:
    """Read a configuration and the project folder around it; diagnostics call the file `display_name`.

    Raises: ConfigError with every mistake found; InputError if the folder can't be a project.
    """
    return diagnose_project(
        config_file, display_name, ProjectFiles.scan(config_file.parent, config_file.name), deployed
    )


def diagnose_project(
    config_file: Path, display_name: str, project: ProjectFiles, deployed: Sequence[Api] = ()
) -> Diagnosis:
    """Read a configuration that is for `project`, wherever the file itself is. Raises: ConfigError."""
    reading = examine(config_file, display_name, project, deployed)
    found = [*reading.problems, *_project_problems(project, reading.readable)]
    if found:
        raise ConfigError(list(dict.fromkeys(found)))
    return Diagnosis(reading.apis, project)


def _project_problems(project: ProjectFiles, apis: Sequence[Api]) -> Iterator[Diagnostic]:
    try:
        read_dotenv(project.root)
    except ConfigError as error:
        yield from error.diagnostics
    for path in dict.fromkeys(["requirements.txt", *(api.handler.dependencies.pip for api in apis)]):
        if project.contains(path):
            yield from parse_requirements((project.root / path).read_text(errors="replace"), path)
    forms = ((h.path, h.interface, h.type, h.models is not None) for h in (api.handler for api in apis))
    for path, interface, type_, has_models in dict.fromkeys(forms):
        if path.endswith(".py") and project.contains(path):
            text = (project.root / path).read_text(errors="replace")
            yield from inspect_source(text, path, interface, type_, has_models)
