"""Rules between an API and the files of its project: code, dependencies, local models, JSON samples.

Model folders are only checked for existence; `operator/deploy` inspects their content.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from cortex.config.rules.violations import Violation
from cortex.config.schema import STORES, Api
from cortex.config.values import quote
from cortex.lifecycle import ApiKind
from cortex.projects.project import ProjectFiles
from cortex.spelling import nearest

_READINESS, _BASELINE = "readiness", "tracker.baseline"
_JSON = (".json",)
_MODELS = "handler.models"
#: With fewer predictions, drift is indistinguishable from chance.
MIN_BASELINE = 100


def project_violations(api: Api, project: ProjectFiles, named: frozenset[str]) -> Iterator[Violation]:
    """Check that the files of an API are in its project; `named` are the fields that the user wrote."""
    if api.kind is not ApiKind.SPLITTER:
        yield from _code_violations(api, project)
    python_path = api.handler.python_path
    if python_path is not None and not project.has_folder(python_path):
        message = f"{quote(python_path)}: path does not exist, or has been excluded from your project directory"
        folders = {f"{parent}/" for file in project.files for parent in PurePosixPath(file).parents if parent.name}
        near = nearest(python_path, folders)
        yield Violation(
            ("handler.python_path",), message, f"did you mean {quote(near)}?" if near else "correct the path"
        )
    for name in ("pip", "conda", "shell"):
        field, file = f"handler.dependencies.{name}", getattr(api.handler.dependencies, name)
        if field in named and not project.contains(file):
            yield Violation((field,), *describe_absent(file, project))
    yield from _program_violations(api, project)
    if (definition := api.handler.protobuf_path) is not None and not project.contains(definition):
        yield Violation(("handler.protobuf_path",), *describe_absent(definition, project, (".proto",)))
    yield from _model_file_violations(api, project)
    yield from _sample_violations(api, project)


def _code_violations(api: Api, project: ProjectFiles) -> Iterator[Violation]:
    path = api.handler.path
    if path is None or api.runs_command:
        return
    suffixes = (".py",) if api.handler.interface == "functions" else (".py", ".pickle")
    if not project.contains(path):
        yield Violation(("handler.path",), *describe_absent(path, project, suffixes))
    elif not path.endswith(suffixes):
        message = f"{quote(path)} must be a {' or '.join(suffixes)} file"
        yield Violation(("handler.path",), message, _closest_file(path, project, suffixes))


def _program_violations(api: Api, project: ProjectFiles) -> Iterator[Violation]:
    """Check that a command's program is in the project, if it is a path of the project."""
    program = (api.handler.command or [""])[0]
    if "/" not in program or program.startswith("/") or "$" in program:
        return
    if not project.contains(program):
        yield Violation(("handler.command",), *describe_absent(program, project))
    elif not os.access(project.root / program, os.X_OK):
        fix = f"run `chmod +x {program}`, or write the interpreter first"
        yield Violation(("handler.command",), f"{quote(program)}: file is not executable", fix)


def _model_file_violations(api: Api, project: ProjectFiles) -> Iterator[Violation]:
    """Check that local models exist, in the project or on this machine."""
    if api.handler.model is not None:
        yield from _location_violations("handler.model", api.handler.model, project)
    models = api.handler.models
    if models is None:
        return
    if models.path is not None:
        yield from _location_violations(f"{_MODELS}.path", models.path, project)
    for index, entry in enumerate(models.paths or ()):
        yield from _location_violations(f"{_MODELS}.paths.{index}.path", entry.path, project)
    if models.dir is not None:
        yield from _location_violations(f"{_MODELS}.dir", models.dir, project, folder=True)


def _location_violations(
    field: str, location: str, project: ProjectFiles, *, folder: bool = False
) -> Iterator[Violation]:
    if location.startswith(STORES):
        return
    if location.startswith("/"):
        is_there = _is_folder(Path(location))
        if not is_there and not _is_file(Path(location)):
            yield Violation((field,), f"{quote(location)}: path does not exist", "correct the path")
        elif folder and not is_there:
            yield _not_a_folder(field, location)
    elif project.contains(location):
        if folder:
            yield _not_a_folder(field, location)
    elif not project.has_folder(location):
        yield Violation((field,), *_absent_model(location, project))


def _absent_model(location: str, project: ProjectFiles) -> tuple[str, str]:
    if _is_folder(project.root / location):
        return f"{quote(location)}: has no files, or has been excluded from your project directory", "see .cortexignore"
    if _is_file(project.root / location):
        return describe_absent(location, project)
    folders = {str(parent) for file in project.files for parent in PurePosixPath(file).parents if parent.name}
    near = nearest(location.removeprefix("./").rstrip("/"), folders.union(project.files))
    fix = f"did you mean {quote(near)}?" if near else "create it, or correct the path"
    return f"{quote(location)}: path does not exist", fix


def _not_a_folder(field: str, location: str) -> Violation:
    return Violation(
        (field,), f"{quote(location)}: is a file, not a folder", "write the folder that contains the models"
    )


def _sample_violations(api: Api, project: ProjectFiles) -> Iterator[Violation]:
    """Check the readiness sample and the tracker's baseline."""
    if api.readiness_sample is not None and not api.readiness_sample.startswith("/"):
        _, wrong = _read(api.readiness_sample, project)
        if wrong:
            yield Violation((_READINESS,), *wrong)
    if api.tracker is not None and api.tracker.baseline is not None:
        file = api.tracker.baseline
        data, wrong = _read(file, project)
        if wrong := wrong or _baseline_problem(file, data, api.tracker.model_type):
            yield Violation((_BASELINE, "tracker.model_type"), *wrong)


def _read(file: str, project: ProjectFiles) -> tuple[Any, tuple[str, str] | None]:
    """Return the parsed JSON of a file, or a message and a fix."""
    if not project.contains(file):
        return None, describe_absent(file, project, _JSON)
    try:
        return json.loads((project.root / file).read_bytes()), None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        return None, (f"{quote(file)} is not JSON: {error.msg} ({where})", "correct the file")
    except (ValueError, RecursionError):  # not UTF-8, or nested too deeply
        return None, (f"{quote(file)} is not JSON", "correct the file")


def _baseline_problem(file: str, data: Any, model_type: str) -> tuple[str, str] | None:
    if model_type == "regression":
        if isinstance(data, list) and data and all(map(_is_number, data)):
            return _too_few(file, len(data))
        return (
            f"{quote(file)} must contain a list of numbers",
            "write the predictions for your training data, as [1.5, 2]",
        )
    if isinstance(data, list) and data and all(map(_is_class, data)):
        return _too_few(file, len(data))
    if isinstance(data, dict) and all(map(_is_count, data.values())) and any(data.values()):
        return _too_few(file, sum(data.values()))
    message = f"{quote(file)} must contain a list of classes, or a map from class to count"
    return message, 'write something like {"cat": 700, "dog": 300}'


def _too_few(file: str, known: int) -> tuple[str, str] | None:
    if known >= MIN_BASELINE:
        return None
    return f"{quote(file)} has {known} predictions; at least {MIN_BASELINE} are needed", "add more, or remove the key"


def _is_number(value: object) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer larger than any float
        return False


def _is_class(value: object) -> bool:
    return isinstance(value, str | int) and not isinstance(value, bool)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_folder(path: Path) -> bool:
    """Return True if the folder exists; False for names that no file can have."""
    return os.path.isdir(path)  # noqa: PTH112 - Path.is_dir raises for names that are too long


def _is_file(path: Path) -> bool:
    """Return True if the file exists; False for names that no file can have."""
    return os.path.isfile(path)  # noqa: PTH113


def describe_absent(file: str, project: ProjectFiles, suffixes: tuple[str, ...] = ()) -> tuple[str, str]:
    """Return the message and the fix for a missing file."""
    if _is_folder(project.root / file):
        return f"{quote(file)}: is a folder, not a file", _closest_file(file, project, suffixes)
    if _is_file(project.root / file):
        return f"{quote(file)}: has been excluded from your project directory", "see .cortexignore, or rename the file"
    return f"{quote(file)}: file does not exist", _closest_file(file, project, suffixes)


def _closest_file(file: str, project: ProjectFiles, suffixes: tuple[str, ...]) -> str:
    """Return a fix that suggests the project file with the closest name."""
    candidates = [name for name in project.files if not suffixes or name.endswith(suffixes)]
    same_name = [name for name in candidates if PurePosixPath(name).name == PurePosixPath(file).name]
    inside = [name for name in candidates if suffixes and name.startswith(f"{file}/")]
    found = (same_name or inside or [""])[0] or nearest(file, candidates)
    if found is None and len(candidates) == 1 and suffixes:
        found = candidates[0]
    return f"did you mean {quote(found)}?" if found else "create it, or correct the path"
