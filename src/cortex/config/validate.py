"""Validate a configuration file: return its APIs, or every mistake with position and fix, sorted.

The steps, in order: parse YAML (`document.py`), convert older forms (`conversion.py`), validate each API's fields
(`schema.py`), then the rules (`rules/`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from cortex.config.api_spec import complete
from cortex.config.conversion import Draft, convert
from cortex.config.document import Document, parse
from cortex.config.generations import TASK
from cortex.config.rules.cross_api_rules import clashes_between, clashes_with_deployed, splitter_problems
from cortex.config.rules.endpoint_rules import endpoint_violations
from cortex.config.rules.field_rules import field_violations
from cortex.config.rules.project_rules import project_violations
from cortex.config.rules.protobuf_rules import read_service, with_endpoint
from cortex.config.rules.violations import CheckedApi, Violation
from cortex.config.schema import Api, needs_code
from cortex.config.values import NULL
from cortex.errors import ConfigError, Diagnostic
from cortex.projects.project import ProjectFiles

#: Examples for missing required fields.
_EXAMPLES = MappingProxyType(
    {
        "name": "name: my-api",
        "handler": "{key}:",
        "tracker": "{key}:",
        "handler.type": "type: {type}",
        "handler.path": "path: {section}.py",
        "handler.models.path": "path: s3://bucket/path",
        "handler.models.paths.name": "name: my-model",
        "handler.models.paths.path": "path: s3://bucket/path",
        "handler.server_side_batching.max_batch_size": "max_batch_size: 32",
        "handler.server_side_batching.batch_interval_s": "batch_interval: 10ms",
        "networking.cors.origins": 'origins: ["https://example.com"]',
        "apis.name": "name: my-api",
        "apis.weight": "weight: 100",
        "schedule": "{key}:",
        "schedule.cron": 'cron: "0 3 * * *"',
        "tracker.model_type": "model_type: classification",
    }
)
#: Stand-ins for missing or invalid fields without a default, so that the rules between fields can still run.
_STAND_INS = MappingProxyType(
    {
        "name": "unnamed",
        "handler.type": "python",
        "handler.path": "unknown.py",
        "handler.server_side_batching.max_batch_size": 2,
        "handler.server_side_batching.batch_interval_s": 1,
        "networking.cors.origins": ["https://example.com"],
        "tracker.model_type": "classification",
        "schedule.cron": "0 0 * * *",
    }
)


@dataclass(frozen=True)
class CheckedFile:
    """The APIs of a file and all its mistakes.

    `readable` are the APIs whose code can be located, so that its mistakes can be reported in the same run.
    """

    apis: tuple[Api, ...]
    readable: tuple[Api, ...]
    problems: tuple[Diagnostic, ...]
    checked: tuple[CheckedApi, ...] = ()

    def point_at(self, api: Api, violation: Violation) -> Diagnostic | None:
        """Return the diagnostic of a violation by one of these APIs; None if a field of it is already invalid."""
        return next((checked.point_at(violation) for checked in self.checked if checked.api is api), None)


def check_file(
    config_file: Path, display_name: str, project: ProjectFiles, deployed: Sequence[Api] | None = None
) -> CheckedFile:
    """Parse and validate a configuration file, which diagnostics call `display_name`. Never raises ConfigError.

    `deployed` are the existing APIs, None if they are unknown. The file updates those of the same name or deployment;
    the others keep their endpoints.
    """
    try:
        document = parse(_read(config_file, display_name), display_name)
    except ConfigError as error:
        return CheckedFile((), (), error.diagnostics)
    conversion = convert(document)
    problems = [*document.problems, *conversion.problems]
    checked: list[CheckedApi] = []
    for draft in conversion.drafts:
        result, draft_problems = _check(draft)
        service, protobuf_problems, protobuf_violations = read_service(result.api, project)
        if service is not None:
            result = result.with_api(with_endpoint(result, service))
        checked.append(result)
        problems += [*draft_problems, *protobuf_problems]
        violations = [
            *field_violations(result.api),
            *endpoint_violations(result.api),
            *project_violations(result.api, project, frozenset(draft.fields)),
            *protobuf_violations,
        ]
        problems += [found for violation in violations if (found := result.point_at(violation))]
    problems += clashes_between(checked)
    problems += clashes_with_deployed(checked, deployed or (), conversion.deployment)
    problems += splitter_problems(checked, deployed)
    readable = tuple(result.api for result in checked if result.is_readable)
    apis = () if problems else tuple(result.api for result in checked)
    return CheckedFile(apis, readable, tuple(sorted(_without_echoes(document, problems))), tuple(checked))


def _read(config_file: Path, display_name: str) -> bytes:
    try:
        return config_file.read_bytes()
    except OSError as error:
        reason = "file does not exist" if isinstance(error, FileNotFoundError) else str(error.strerror)
        raise ConfigError(
            [Diagnostic(display_name, 0, 0, "", reason, "correct the path or the permissions of the file")]
        ) from None


def _without_echoes(document: Document, problems: Iterable[Diagnostic]) -> list[Diagnostic]:
    """Drop duplicates, and problems that follow from values that failed to parse."""
    first = set(document.problems)
    fields = {(problem.line, problem.column) for problem in first}
    return [
        problem
        for problem in dict.fromkeys(problems)
        if problem in first or (problem.line, problem.column) not in fields
    ]


def _check(draft: Draft) -> tuple[CheckedApi, list[Diagnostic]]:
    """Validate one API; report and replace invalid fields, so that the rules can check the others."""
    data = draft.data()
    problems: list[Diagnostic] = []
    wrong: set[str] = set(draft.rejected)
    for _ in range(3):  # replacing a value can reveal errors in the defaults of its section
        try:
            api = Api.model_validate(data)
            if not draft.problems and not problems:
                api = api.model_copy(update={"as_written": complete(draft, api)})
            return CheckedApi(draft, api, frozenset(wrong)), problems
        except ValidationError as error:
            before = frozenset(wrong)
            for detail in error.errors(include_url=False, include_input=False):
                field = _field_of(draft, detail["loc"])
                # The type decides whether a path is required; an invalid one is reported itself.
                is_open = (field == "handler.path" and "handler.type" in wrong) and (
                    "handler.models" in draft.section_nodes or not needs_code(draft.type)
                )
                if not is_open and field not in before and (found := _diagnose(draft, detail, field)):
                    problems.append(found)
                wrong.add(field)
                _replace(data, field)
    raise AssertionError(f"stand-ins do not satisfy the schema: {sorted(wrong)}")


def _field_of(draft: Draft, location: tuple[int | str, ...]) -> str:
    """Return the field of an error; an error inside `config` or `env` concerns the whole field."""
    for length in range(len(location), 0, -1):
        field = ".".join(map(str, location[:length]))
        if field in draft.fields:
            return field
    return ".".join(map(str, location))


def _replace(data: dict[str, Any], field: str) -> None:
    *parents, leaf = field.split(".")
    inner = data
    for parent in parents:
        inner = inner.setdefault(parent, {})
    if field in _STAND_INS:
        inner[leaf] = _STAND_INS[field]
    else:
        inner.pop(leaf, None)


def _diagnose(draft: Draft, detail: ErrorDetails, field: str) -> Diagnostic | None:
    if detail["type"] == "default_factory_not_called":  # the value it derives from is invalid, and reported itself
        return None
    if detail["type"] == "missing" and field not in draft.fields:
        return _diagnose_missing(draft, field)
    if detail["type"] == "missing" and detail["loc"][-1] != field.rpartition(".")[2]:
        return _missing_inside(draft, detail["loc"])
    at_key = detail["loc"][-1] == "[key]"
    node = draft.find(*(detail["loc"][:-1] if at_key else detail["loc"]))
    if node is None:  # a default derived from another, invalid value
        return None
    context = detail.get("ctx", {})
    message, fix = str(context.get("text", detail["msg"])), str(context.get("fix", ""))
    if node.text and "expected" in context and not at_key:
        message = f"{node.text}: invalid type (expected {context['expected']})"
        fix = context["fix_of"](node.text) if context["fix_of"] else fix
    if detail["type"] == "missing":  # null, where the field is required
        message, fix = NULL
    if message == NULL[0] and field in _EXAMPLES:  # a required field has no default value to use
        fix = f'write "{_example(draft, field, draft.last_key(field))}"'
    return draft.document.at_key(node, message, fix) if at_key else draft.document.at_value(node, message, fix)


def _missing_inside(draft: Draft, location: tuple[int | str, ...]) -> Diagnostic | None:
    """Report a missing key in an item of a list."""
    item = draft.find(*location[:-1])
    if item is None:
        return None
    field = ".".join(part for part in location if isinstance(part, str))
    path = (*item.path, location[-1])
    return draft.document.diagnostic(item.line, item.column, path, "must be defined", f'write "{_EXAMPLES[field]}"')


def _diagnose_missing(draft: Draft, field: str) -> Diagnostic | None:
    if field in ("networking", "networking.endpoint"):  # the endpoint is derived from the name
        return None
    written = draft.written_key(field)
    if any(written == key or written.startswith(f"{key}.") for key in draft.rejected):
        return None
    holder, path = draft.missing(field)
    is_section = len(path) - 1 < len(written.split("."))
    example = _example(draft, field.split(".")[0] if is_section and len(path) == 2 else field, str(path[-1]))
    if is_section and not example:  # only misplaced keys name the section, and these are reported themselves
        return None
    fix = f'write "{example}"' if example else ""
    return draft.document.diagnostic(holder.key_line, holder.key_column, path, "must be defined", fix)


def _example(draft: Draft, field: str, key: str) -> str:
    section = "task" if draft.generation is TASK else draft.generation.section
    return _EXAMPLES.get(field, "").format(section=section, key=key, type=draft.type)
