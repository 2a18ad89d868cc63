"""Finds everything that can be known to be wrong before a deploy: the one code path of check and deploy.

Imports nothing of the operator, so that `cortex check` is quick, and never runs the user's code.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cortex.config.dotenv import read_dotenv
from cortex.config.project import ProjectFiles
from cortex.config.requirements import parse_requirements
from cortex.config.schema import Api, Handler
from cortex.config.validate import CheckedFile, check_file
from cortex.errors import ConfigError, Diagnostic
from cortex.predictor.source import inspect_source

if TYPE_CHECKING:
    from cortex.engine.devices import Inventory


@dataclass(frozen=True)
class Diagnosis:
    """A configuration and its project, with nothing wrong that could be found."""

    apis: tuple[Api, ...]
    project: ProjectFiles


@dataclass(frozen=True)
class Surroundings:
    """What the project is looked at in: whose credentials open its buckets, and which devices it would have."""

    environ: Mapping[str, str]
    devices: Inventory | None = None  #: None: not known, because it will run elsewhere


def diagnose(
    config_file: Path,
    display_name: str,
    deployed: Sequence[Api] | None = None,
    surroundings: Surroundings | None = None,
) -> Diagnosis:
    """Read a configuration and the project folder around it; diagnostics call the file `display_name`.

    `deployed` are the APIs that it comes beside; None: not known.
    Without `surroundings` nothing outside of the folder is looked at: no models, no devices. With them it may take
    half a minute, and no event loop may run in this thread.

    Raises: ConfigError with every mistake found; InputError if the folder can't be a project.
    """
    project = ProjectFiles.scan(config_file.parent, config_file.name)
    return diagnose_project(config_file, display_name, project, deployed, surroundings)


def diagnose_project(
    config_file: Path,
    display_name: str,
    project: ProjectFiles,
    deployed: Sequence[Api] | None = None,
    surroundings: Surroundings | None = None,
) -> Diagnosis:
    """Read a configuration that is for `project`, wherever the file itself is; otherwise as `diagnose`."""
    reading = check_file(config_file, display_name, project, deployed)
    found = [*reading.problems, *_project_problems(project, reading.readable), *_schedule_problems(reading)]
    if surroundings is not None:
        found += _outside_problems(project, reading, surroundings)
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
    forms = (
        (api.kind, h.path, h.interface, h.type, h.models is not None, _batches(h))
        for api in apis
        for h in (api.handler,)
    )
    for kind, path, interface, type_, has_models, batches in dict.fromkeys(forms):
        if path.endswith(".py") and project.contains(path):
            text = (project.root / path).read_text(errors="replace")
            yield from inspect_source(text, path, interface, type_, has_models, kind, batches)


def _batches(handler: Handler) -> bool:
    """Tell whether requests share calls; of TensorFlow models, runs are joined beneath calls of any method."""
    return handler.server_side_batching is not None and handler.type == "python"


def _schedule_problems(reading: CheckedFile) -> Iterator[Diagnostic]:
    scheduled = [checked for checked in reading.checked if checked.api.schedule is not None]
    if not scheduled:
        return
    # Loaded where it is needed: most files have none.
    schedule_checks: Any = importlib.import_module("cortex.operator.deploy.schedule_checks")
    for checked in scheduled:
        for violation in schedule_checks.submission_violations(checked.api):
            if (problem := checked.point_at(violation)) is not None:
                yield problem


def _outside_problems(project: ProjectFiles, reading: CheckedFile, surroundings: Surroundings) -> Iterator[Diagnostic]:
    said = {(problem.line, problem.column) for problem in reading.problems}
    violations = []
    if surroundings.devices is not None:
        # Loaded where it is needed, as the look at models is: most checks need neither.
        device_checks: Any = importlib.import_module("cortex.operator.deploy.device_checks")
        devices = surroundings.devices
        violations += [
            (api, item) for api in reading.readable for item in device_checks.device_violations(api, devices)
        ]
    if any(api.handler.models is not None for api in reading.readable):
        model_checks: Any = importlib.import_module("cortex.operator.deploy.model_checks")
        violations += model_checks.examine_models(reading.readable, project.root, surroundings.environ)
    for api, violation in violations:
        problem = reading.point_at(api, violation)
        if problem is not None and (problem.line, problem.column) not in said:
            yield problem
