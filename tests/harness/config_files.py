"""Projects for the tests of the configuration: a folder with a cortex.yaml and the files that it names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from jsonschema import Draft7Validator

from cortex.config.conversion import convert
from cortex.config.document import parse
from cortex.config.generations import FUNCTIONS
from cortex.config.json_schema import FORMS, json_schema
from cortex.config.schema import Api
from cortex.config.validate import CheckedFile, check_file
from cortex.projects.project import ProjectFiles

FILES = ("predictor.py", "handler.py", "requirements.txt", "conda-packages.txt", "dependencies.sh", "src/model.py")


def examine_text(
    folder: Path, text: str, deployed: Sequence[Api] = (), files: Mapping[str, str] | Sequence[str] = FILES
) -> CheckedFile:
    """Write a project and read its configuration."""
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("")
    config = folder / "cortex.yaml"
    config.write_text(text)
    found = check_file(config, "cortex.yaml", ProjectFiles.scan(folder, "cortex.yaml"), deployed)
    if not found.problems:
        assert editor_problems(config.read_bytes()) == []
    return found


def editor_problems(config: bytes) -> list[str]:
    """Return what an editor reports about a configuration that cortex can read, each API by the schema of its form."""
    document = parse(config, "cortex.yaml")
    forms = [draft.generation for draft in convert(document).drafts]
    problems: list[str] = []
    for item in document.items:
        kind = item.at("kind")
        form = FUNCTIONS if kind is not None and kind.value == "deployment" else forms.pop(0)
        name = next(name for name in reversed(FORMS) if form in FORMS[name])
        problems += [error.message for error in editor_schema(name).iter_errors([item.plain()])]
    return problems


@cache
def editor_schema(generation: str) -> Draft7Validator:
    """Return the JSON Schema of a generation, ready to validate."""
    schema = json_schema(generation)
    Draft7Validator.check_schema(schema)
    return Draft7Validator(schema)


def lines_of(reading: CheckedFile) -> list[str]:
    """Return the problems without their fixes."""
    return [f"{p.line}:{p.column}: {p.path}: {p.message}" for p in reading.problems]
