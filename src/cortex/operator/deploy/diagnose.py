"""Diagnosis of a configuration and its project: every mistake that can be found before a deploy.

`cortex check` and the deployer share this code. It never runs the user's code. `cortex check` must start fast, so
imports that only some configurations need happen inside the functions that use them.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from cortex.config.rules.project_rules import describe_absent
from cortex.config.rules.protobuf_rules import read_service
from cortex.config.rules.violations import Violation
from cortex.config.schema import ANY_MODEL, Api, Handler
from cortex.config.validate import CheckedFile, check_file
from cortex.config.values import quote
from cortex.errors import ConfigError, Diagnostic, SubmissionError
from cortex.lifecycle import ApiKind
from cortex.predictor.applications import imports_gradio
from cortex.predictor.checks.annotation_checks import check_annotations
from cortex.predictor.checks.source_checks import (
    MAX_SOURCE_LENGTH,
    check_source,
    find_missing_application,
    find_undecodable_byte,
    is_parsable,
)
from cortex.projects.dotenv import check_dotenv
from cortex.projects.project import ProjectFiles
from cortex.projects.protobuf_file import TOOLS
from cortex.projects.requirements import included_files, parse_requirements, requirement_lines

if TYPE_CHECKING:
    from cortex.engine.devices import Inventory
    from cortex.operator.deploy.model_checks import ModelInspection


_GIB = 1024**3
_PROGRAM_FIELD = "handler.command"


@dataclass(frozen=True)
class Diagnosis:
    """A configuration and its project, without any mistake found."""

    apis: tuple[Api, ...]
    project: ProjectFiles
    warnings: tuple[Diagnostic, ...] = ()  #: what works, but probably not as intended
    #: Packages that follow from the models of each API, and that are not installed on this machine.
    installs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Machine:
    """The machine to check models and devices against."""

    environ: Mapping[str, str]  #: has the credentials for buckets
    devices: Inventory | None = None  #: None: unknown, because the APIs will run elsewhere


def diagnose(
    config_file: Path,
    display_name: str,
    deployed: Sequence[Api] | None = None,
    machine: Machine | None = None,
) -> Diagnosis:
    """Check a configuration and the project folder around it; diagnostics call the file `display_name`.

    `deployed` are the APIs that exist already; None: unknown.
    With `machine`, models and devices are checked, too; that may take 30 s, and no event loop may run in this thread.

    Raises: ConfigError with every mistake found; InputError if the folder can't be a project.
    """
    project = ProjectFiles.scan(config_file.parent, config_file.name)
    return diagnose_project(config_file, display_name, project, deployed, machine)


def diagnose_project(
    config_file: Path,
    display_name: str,
    project: ProjectFiles,
    deployed: Sequence[Api] | None = None,
    machine: Machine | None = None,
) -> Diagnosis:
    """Check a configuration file against a project in another folder; otherwise like `diagnose`."""
    checked = check_file(config_file, display_name, project, deployed)
    problems = [*checked.problems, *_project_problems(project, checked.readable), *_schedule_problems(checked)]
    problems += _application_problems(checked, project)
    packages: dict[str, dict[str, str]] = {}
    if machine is not None:
        inspection = _inspect_models(project, checked.readable, machine)
        problems += _machine_problems(project, checked, machine, inspection)
        packages, conflicts = _model_packages(project, checked, inspection)
        problems += conflicts
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    apis = tuple(
        with_model_packages(_with_stickiness(api, project), packages.get(api.name, {}) | _grpc_packages(api, project))
        for api in checked.apis
    )
    return Diagnosis(apis, project, tuple(_warnings(project, apis)), dict(_installs(project, apis)))


def _with_stickiness(api: Api, project: ProjectFiles) -> Api:
    """Return the API with `networking.sticky` on if it is an application made with Gradio, unless its file sets it."""
    networking = api.networking
    if not api.is_application or "sticky" in networking.model_fields_set:
        return api
    is_sticky = any(imports_gradio(text) for _, _, text in _sources(project, [api]))
    return api.model_copy(update={"networking": networking.model_copy(update={"sticky": is_sticky})})


def _project_problems(project: ProjectFiles, apis: Sequence[Api]) -> Iterator[Diagnostic]:
    try:
        check_dotenv(project.root)
    except ConfigError as error:
        yield from error.diagnostics
    for path in dict.fromkeys(["requirements.txt", *(api.handler.dependencies.pip for api in apis)]):
        yield from parse_requirements(project.text(path), path)
        yield from _absent_requirements(project, path, apis)
    for api, path, text in _sources(project, apis):
        data = (project.root / path).read_bytes()
        if (undecodable := find_undecodable_byte(data, path)) and not is_parsable(data):
            yield undecodable
            continue
        h = api.handler
        batches, has_models = _has_batching(h), h.models is not None
        has_application, rpcs = _app_of(api) is not None, _rpcs_of(api, project)
        yield from check_source(text, path, h.interface, h.type, has_models, api.kind, batches, has_application, rpcs)
        yield from check_annotations(text, path, h.interface, h.type, has_models, api.kind)


def _absent_requirements(project: ProjectFiles, path: str, apis: Sequence[Api]) -> Iterator[Diagnostic]:
    """Report files that a requirements file includes and that the project lacks."""
    if any(project.contains(api.handler.dependencies.shell) for api in apis):
        return  # the script runs first, and may write them
    for line, column, name in included_files(project.text(path)):
        file = os.path.normpath(PurePosixPath(path).parent / name)
        if file.startswith(".."):
            problem = f"{quote(file)} must be inside the project folder", "move it into the project folder"
            yield Diagnostic(path, line, column, "", *problem)
        elif not project.contains(file):
            yield Diagnostic(path, line, column, "", *describe_absent(file, project))


def _warnings(project: ProjectFiles, apis: Sequence[Api]) -> Iterator[Diagnostic]:
    found: list[Diagnostic] = []
    for _, path, text in _sources(project, apis):
        if len(text) > MAX_SOURCE_LENGTH:
            message = f"is longer than {MAX_SOURCE_LENGTH} characters: it is not checked before a replica starts"
            found.append(Diagnostic(path, 0, 0, "", message, "move its data to another file"))
        if undecodable := find_undecodable_byte((project.root / path).read_bytes(), path):
            found.append(undecodable)  # a comment, which other versions of Python refuse
    return iter(dict.fromkeys(found))


def _sources(project: ProjectFiles, apis: Sequence[Api]) -> Iterator[tuple[Api, str, str]]:
    """Yield each API with its Python file, the path and the text."""
    for api in apis:
        path = api.handler.path
        is_code = path is not None and path.endswith(".py") and api.handler.type != ANY_MODEL
        if path is not None and is_code and project.contains(path):
            yield api, path, (project.root / path).read_text(errors="replace")


def _has_batching(handler: Handler) -> bool:
    """Return True if the handler gets batches; TensorFlow models are batched beneath the handler."""
    return handler.server_side_batching is not None and handler.type == "python"


def _app_of(api: Api) -> str | None:
    return api.handler.app if api.is_application else None


def _rpcs_of(api: Api, project: ProjectFiles) -> list[str] | None:
    """Return the names of a gRPC API's methods; None for other APIs."""
    if not api.is_grpc:
        return None
    service = read_service(api, project)[0]
    return [rpc.name for rpc in service.services[0].rpcs] if service else []


def _grpc_packages(api: Api, project: ProjectFiles) -> dict[str, str]:
    """Return the package that a gRPC API needs, unless its files install it."""
    files = api.handler.dependencies
    is_own = project.text(files.shell).strip() or project.text(files.conda).strip()
    if not api.is_grpc or is_own or TOOLS in requirement_lines(project.text(files.pip)):
        return {}
    return {TOOLS: ""}


def _application_problems(checked: CheckedFile, project: ProjectFiles) -> Iterator[Diagnostic]:
    for entry in checked.checked:
        name = _app_of(entry.api)
        if name is None:
            continue
        for _, path, text in _sources(project, [entry.api]):
            missing = find_missing_application(text, path, name)
            problem = missing and entry.point_at(Violation(("handler.app",), *missing))
            if problem:
                yield problem


def _schedule_problems(checked: CheckedFile) -> Iterator[Diagnostic]:
    for entry in checked.checked:
        if entry.api.schedule is not None and entry.api.schedule.submission:
            for violation in _submission_violations(entry.api, entry.api.schedule.submission):
                if (problem := entry.point_at(violation)) is not None:
                    yield problem


def _submission_violations(api: Api, submission: dict[str, Any]) -> Iterator[Violation]:
    """Check a schedule's submission as it will be checked when it is due."""
    # Imported here: see the module's docstring.
    from cortex.jobs.intake.submission import SubmissionLimits, parse_body  # noqa: PLC0415

    networking = api.networking
    limits = SubmissionLimits(networking.max_body_size, networking.max_batch_size, api.kind is ApiKind.TASK)
    try:
        parse_body(submission, limits)
    except SubmissionError as error:
        for line in str(error).splitlines():
            message, _, fix = line.partition("; ")
            yield Violation(("schedule.submission",), message, fix)


def _inspect_models(project: ProjectFiles, apis: Sequence[Api], machine: Machine) -> ModelInspection | None:
    """Inspect the models of APIs; None if they have none."""
    if not any(api.handler.models is not None or api.handler.model is not None for api in apis):
        return None
    from cortex.operator.deploy.model_checks import inspect_models  # noqa: PLC0415 - see the module's docstring

    return inspect_models(apis, project.root, machine.environ)


def _model_packages(
    project: ProjectFiles, checked: CheckedFile, inspection: ModelInspection | None
) -> tuple[dict[str, dict[str, str]], list[Diagnostic]]:
    """Return the packages that follow from the models of each API, and their conflicts with the user's."""
    packages: dict[str, dict[str, str]] = {}
    problems: list[Diagnostic] = []
    for api in checked.readable:
        if inspection is not None and (detections := inspection.detections.get(api.name)):
            from cortex.operator.deploy.model_checks import packages_of  # noqa: PLC0415 - see the module's docstring

            packages[api.name], conflicts = packages_of(api, detections, project)
            for conflict in conflicts:
                if conflict.written is not None:
                    line, column = conflict.written.line, conflict.written.column
                    where = api.handler.dependencies.pip, line, column, ""
                    problems.append(Diagnostic(*where, conflict.message, conflict.fix))
                elif found := checked.point_at(api, Violation(("handler.models",), conflict.message, conflict.fix)):
                    problems.append(found)
    return packages, problems


def with_model_packages(api: Api, packages: Mapping[str, str]) -> Api:
    """Return an API with the packages that its models need."""
    dependencies = api.handler.dependencies.model_copy(update={"model_packages": dict(packages)})
    return api.model_copy(update={"handler": api.handler.model_copy(update={"dependencies": dependencies})})


def _installs(project: ProjectFiles, apis: Sequence[Api]) -> Iterator[tuple[str, tuple[str, ...]]]:
    for api in apis:
        if packages := api.handler.dependencies.model_packages:
            from cortex.models.formats.packages import packages_to_install  # noqa: PLC0415 - see the module's docstring

            yield api.name, packages_to_install(packages, project.text(api.handler.dependencies.pip))


def _machine_problems(
    project: ProjectFiles, checked: CheckedFile, machine: Machine, inspection: ModelInspection | None
) -> Iterator[Diagnostic]:
    apis = checked.readable
    violations = list(inspection.violations) if inspection is not None else []
    if machine.devices is not None:
        violations += [(api, violation) for api in apis for violation in _compute_violations(api, machine.devices)]
    commands = [api for api in apis if api.handler.command is not None]
    if commands and (machine.devices is None or machine.devices.cores):  # else a cluster runs it
        found = [(api, _program_violation(api, project, machine.environ)) for api in commands]
        violations += [(api, violation) for api, violation in found if violation is not None]
    reported = {(problem.line, problem.column) for problem in checked.problems}
    for api, violation in violations:
        problem = checked.point_at(api, violation)
        if problem is not None and (problem.line, problem.column) not in reported:
            yield problem


def _compute_violations(api: Api, devices: Inventory) -> Iterator[Violation]:
    """Report resources that the machine has too few of, even when all are free."""
    gpu, inf = api.compute.gpu, api.compute.inf
    cpu, mem = api.compute.cpu or 0.0, api.compute.mem or 0
    fix = "lower it, or deploy to another machine"
    if devices.cores and cpu > devices.cores:
        yield Violation(("compute.cpu",), f"{cpu:g}: this machine has {_count(devices.cores, 'core')}", fix)
    if devices.memory_bytes and mem > devices.memory_bytes:
        has = f"{devices.memory_bytes / _GIB:.1f} GiB of memory"
        yield Violation(("compute.mem",), f"{mem / _GIB:.1f} GiB: this machine has {has}", fix)
    if gpu > len(devices.gpus):
        has = _count(len(devices.gpus), "GPU") if devices.gpus else f"no NVIDIA GPU ({devices.why_no_gpus})"
        yield Violation(("compute.gpu",), f"{gpu}: this machine has {has}", "remove it, or deploy to another machine")
    if inf > len(devices.chips):
        has = _count(len(devices.chips), "Inferentia chip") if devices.chips else "no Inferentia chip (no /dev/neuron0)"
        yield Violation(("compute.inf",), f"{inf}: this machine has {has}", "remove it, or deploy to another machine")


def _count(number: float, name: str) -> str:
    return f"{number:g} {name}{'s' if number != 1 else ''}"


def _program_violation(api: Api, project: ProjectFiles, environ: Mapping[str, str]) -> Violation | None:
    """Return the violation of a program that this machine lacks, or can't execute; None if it may be there.

    Programs of the project itself are checked with its files. What the project installs is not known yet.
    """
    program = (api.handler.command or [""])[0]
    if not program or "$" in program:
        return None
    if program.startswith("/"):
        if not Path(program).is_file():
            return Violation(
                (_PROGRAM_FIELD,), f"{quote(program)}: file does not exist on this machine", "correct the path"
            )
        if not os.access(program, os.X_OK):
            fix = f"run `chmod +x {program}`, or write the interpreter first"
            return Violation((_PROGRAM_FIELD,), f"{quote(program)}: file is not executable", fix)
        return None
    dependencies = api.handler.dependencies
    installs = any(project.contains(file) for file in (dependencies.pip, dependencies.conda, dependencies.shell))
    path = os.pathsep.join([str(Path(sys.executable).parent), environ.get("PATH", os.defpath)])
    if "/" in program or installs or shutil.which(program, path=path) is not None:
        return None
    fix = "install it on this machine, or list the package that has it in requirements.txt"
    return Violation((_PROGRAM_FIELD,), f"{quote(program)} was not found on the PATH", fix)
