"""The documentation says what is there: every field, command, error and status, and no link that leads nowhere."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, get_args, get_origin

import pytest
import yaml
from pydantic import BaseModel, TypeAdapter
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from cortex import errors
from cortex.config.schema import Api
from cortex.lifecycle import ApiStatus, DeathCause, JobStatus, ProcessState

ROOT = Path(__file__).parent.parent
REFERENCE = ROOT / "docs" / "reference"

#: Fields that are set by which form a file has, not by a key.
IMPLIED = {"handler.interface", "handler.dependencies.model_packages", "handler.models.pinned", "as_written"}


def load_script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"script_{name}", ROOT / "scripts" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


docs = load_script("docs")
PAGES: list[Path] = list(docs.pages())


def test_links_lead_somewhere() -> None:
    assert [(page, list(docs.broken_links(page))) for page in PAGES if any(docs.broken_links(page))] == []


def test_code_blocks_can_be_read() -> None:
    for page in PAGES:
        for language, code in code_blocks(page):
            if language == "python":
                ast.parse(code, page)
            elif language in ("yaml", "json"):
                yaml.safe_load(code)


def test_every_page_is_in_the_table_of_contents() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    pages = [page.relative_to(ROOT / "docs").as_posix() for page in PAGES if page.is_relative_to(ROOT / "docs")]
    assert [page for page in pages if page != "README.md" and f"({page})" not in index] == []


def code_blocks(page: Path) -> Iterator[tuple[str, str]]:
    yield from re.findall(r"^```(\w+)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


# Configuration.


def documented_fields() -> dict[str, str]:
    """Return the default column of every field in the configuration reference, by the field's path."""
    section, rows = "", {}
    for line in (REFERENCE / "configuration.md").read_text().splitlines():
        if heading := re.match(r"#+ (.+)", line):
            section = heading[1] if re.fullmatch(r"[a-z_.]+", heading[1]) else ""
        elif row := re.match(r"\| `([a-z_]+)` \| .*? \| (.*?) \|", line):
            rows[f"{section}.{row[1]}".strip(".")] = row[2]
    return rows


def schema_fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, type[BaseModel], str]]:
    """Yield each field's path as written in a file, its model, and its name there."""
    for name, field in model.model_fields.items():
        inner = section_of(field)
        if inner:
            yield from schema_fields(inner, f"{prefix}{name}.")
        else:
            yield prefix + name.removesuffix("_s"), model, name


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """Find the model that a field holds, also in a list, also if it may be absent."""
    pending: list[Any] = [field.annotation]
    while pending:
        kind = pending.pop()
        if get_args(kind):
            pending += [] if get_origin(kind) is dict else get_args(kind)
        elif isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def test_every_field_is_documented_and_no_other() -> None:
    assert set(documented_fields()) == {path for path, _, _ in schema_fields(Api)} - IMPLIED


FIELDS = {path: (model, name) for path, model, name in schema_fields(Api) if path not in IMPLIED}


def test_documented_defaults_are_the_real_ones() -> None:
    cells = documented_fields()
    for path, (model, name) in FIELDS.items():
        field: Any = model.model_fields[name]
        cell = cells[path]
        written = re.fullmatch(r"`([^`<]+)`", cell)
        if path == "kind":
            assert cell == "required"  # of the file; the model's own default is for those that never had the key
        elif written is None or field.default_factory is not None or path == "networking.endpoint":
            words = {"required": PydanticUndefined, "none": None}
            assert cell not in words or field.default is words[cell], path
        else:
            reader = TypeAdapter(field.rebuild_annotation())
            assert reader.validate_python(yaml.safe_load(written[1])) == field.default, path


# Commands, errors, statuses.


def test_every_command_is_documented_and_the_schema_is_current() -> None:
    for file, wanted in docs.generated().items():
        assert file.read_text() == wanted, "run `make docs`"


def test_every_error_is_documented_with_its_codes() -> None:
    page = (REFERENCE / "errors.md").read_text()
    classes = [
        kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.CortexError)
    ]
    for kind in classes:
        assert f"| `{kind.__name__}` | `{kind.code}` | {kind.http_status} | {kind.exit_code} |" in page


def test_every_status_is_documented() -> None:
    page = (REFERENCE / "errors.md").read_text()
    assert [each for each in (*ApiStatus, *JobStatus, *ProcessState, *DeathCause) if f"`{each}`" not in page] == []


# The code.


def test_architecture_names_what_is_there() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    source = ROOT / "src" / "cortex"
    named = re.findall(r"`([a-z_]+(?:/[a-z_]+)*/)`", page) + re.findall(r"[a-z_]+(?:/[a-z_]+)*\.py", page)
    missing = [name for name in named if not (source / name).exists() and not (ROOT / name).exists()]
    assert missing == []
    folders = [path.name for path in source.iterdir() if any(path.glob("*.py"))]
    assert [folder for folder in folders if f"`{folder}/`" not in page] == []


@pytest.mark.parametrize(
    "page",
    [ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs" / "explanation").glob("*.md"))],
    ids=lambda page: page.name,
)
def test_other_pages_name_existing_modules(page: Path) -> None:
    named = re.findall(r"`((?:[a-z_]+/)*[a-z_]+\.(?:py|lua))`", page.read_text())
    assert [
        name for name in named if not (ROOT / "src" / "cortex" / name).exists() and not (ROOT / name).exists()
    ] == []


def test_the_walkthrough_names_existing_functions() -> None:
    page = (ROOT / "docs" / "explanation" / "walkthrough.md").read_text()
    named = re.findall(r"`([\w/]+\.py)::([\w.]+)`", page)
    assert len(named) > 20
    assert [(path, name) for path, name in named if name not in functions(ROOT / "src" / "cortex" / path)] == []


def functions(module: Path) -> set[str]:
    """Return the names of a module's functions, and those of methods with their class."""
    body = ast.parse(module.read_text()).body
    methods = {f"{each.name}.{item}" for each in body if isinstance(each, ast.ClassDef) for item in defined(each.body)}
    return methods | defined(body)


def defined(body: list[ast.stmt]) -> set[str]:
    return {each.name for each in body if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef))}
