"""A configuration file → checked APIs, or every mistake in it at once, sorted, each with its line and a fix.

Owns the order of checks and the rules between APIs; fields are `schema.py`'s, older forms are `eras.py`'s.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from cortex.config.document import Document, Node, parse
from cortex.config.eras import Draft, translate
from cortex.config.project import ProjectFiles
from cortex.config.rules import field_violations, project_violations
from cortex.config.schema import Api
from cortex.config.values import quote
from cortex.config.violations import Violation
from cortex.errors import ConfigError, Diagnostic

#: What to write where something required is missing, by place in the current form.
_EXAMPLES = MappingProxyType(
    {
        "name": "name: my-api",
        "handler": "{key}:",
        "tracker": "{key}:",
        "handler.type": "type: python",
        "handler.path": "path: {section}.py",
        "handler.models.path": "path: s3://bucket/path",
        "handler.models.paths.name": "name: my-model",
        "handler.models.paths.path": "path: s3://bucket/path",
        "tracker.model_type": "model_type: classification",
    }
)
#: Stand in for what is missing or wrong and has no default, so that the rules between fields still run.
_STAND_INS = MappingProxyType(
    {"name": "unnamed", "handler.type": "python", "handler.path": "unknown.py", "tracker.model_type": "classification"}
)


#: A place in the message of a broken rule.
_PLACE = re.compile(r"\{(handler(?:\.[a-z_]+)+)\}")

#: Places whose mistakes leave no doubt about which code is meant.
_BESIDE_THE_CODE = frozenset(
    {
        "handler.python_path",
        "handler.config",
        "handler.env",
        "handler.model",
        "handler.models",
        "handler.signature_key",
        "handler.tensorflow_serving",
        "handler.processes_per_replica",
        "handler.threads_per_process",
        "handler.log_level",
    }
)


@dataclass(frozen=True)
class _Checked:
    """An API with the places that are wrong in it; those hold defaults and stand-ins."""

    draft: Draft
    api: Api
    wrong: frozenset[str]

    @property
    def is_readable(self) -> bool:
        """Tell whether the user's code can be found and its interface is known."""
        aside = tuple(f"{place}." for place in _BESIDE_THE_CODE)
        return not any(place.startswith("handler") and not f"{place}.".startswith(aside) for place in self.wrong)

    def point_at(self, violation: Violation) -> Diagnostic | None:
        """Locate a broken rule; None if one of the values it is about is wrong in itself."""
        if self.wrong.intersection(violation.places):
            return None
        draft = self.draft
        for place in violation.places:
            if node := draft.find(*place.split(".")):
                message = re.sub(_PLACE, lambda found: draft.key(found[1]), violation.message)
                message = message.replace("{got}", str(node.plain()))
                # A section is where its key is; its value starts on the next line.
                at = draft.document.at_key if isinstance(node.value, dict) else draft.document.at_value
                return at(node, message, violation.fix)
        holder, path = draft.missing(violation.places[0])
        return draft.document.diagnostic(holder.key_line, holder.key_column, path, violation.message, violation.fix)


@dataclass(frozen=True)
class Reading:
    """What a file says, and everything that is wrong with it.

    `readable` are the APIs whose code is named rightly, whatever else is wrong with them: their sources can be
    inspected too, so that one run tells all.
    """

    apis: tuple[Api, ...]
    readable: tuple[Api, ...]
    problems: tuple[Diagnostic, ...]
    checked: tuple[_Checked, ...] = ()

    def point_at(self, api: Api, violation: Violation) -> Diagnostic | None:
        """Locate what is wrong with one of these APIs; None if the value is wrong already, for another reason."""
        return next((checked.point_at(violation) for checked in self.checked if checked.api is api), None)


def read_apis(config_file: Path, display_name: str, project: ProjectFiles, deployed: Sequence[Api] = ()) -> list[Api]:
    """Read and check a configuration file; diagnostics call it `display_name`.

    `deployed` are the APIs that exist already: one of the same name, or of the same deployment, is what the file
    updates; any other keeps its endpoint.

    Raises: ConfigError with every mistake in the file.
    """
    reading = examine(config_file, display_name, project, deployed)
    if reading.problems:
        raise ConfigError(reading.problems)
    return list(reading.apis)


def examine(config_file: Path, display_name: str, project: ProjectFiles, deployed: Sequence[Api] = ()) -> Reading:
    """Do as `read_apis`, but return the mistakes along with what could be read. Never raises ConfigError."""
    try:
        document = parse(_read(config_file, display_name), display_name)
    except ConfigError as error:
        return Reading((), (), error.diagnostics)
    translation = translate(document)
    problems = [*document.problems, *translation.problems]
    checked: list[_Checked] = []
    for draft in translation.drafts:
        result, draft_problems = _check(draft)
        checked.append(result)
        problems += draft_problems
        violations = [
            *field_violations(result.api),
            *project_violations(result.api, project, frozenset(draft.fields)),
        ]
        problems += [found for violation in violations if (found := result.point_at(violation))]
    problems += _between_apis(checked)
    problems += _against_deployed(checked, deployed, translation.deployment)
    readable = tuple(result.api for result in checked if result.is_readable)
    apis = () if problems else tuple(result.api for result in checked)
    return Reading(apis, readable, tuple(sorted(_without_echoes(document, problems))), tuple(checked))


def _read(config_file: Path, display_name: str) -> bytes:
    try:
        return config_file.read_bytes()
    except OSError as error:
        reason = "file does not exist" if isinstance(error, FileNotFoundError) else str(error.strerror)
        raise ConfigError([Diagnostic(display_name, 0, 0, "", reason, "name a file that can be read")]) from None


def _without_echoes(document: Document, problems: Iterable[Diagnostic]) -> list[Diagnostic]:
    """Drop what follows from a value that YAML itself could not give us, and what was said already."""
    first = set(document.problems)
    places = {(problem.line, problem.column) for problem in first}
    return [
        problem
        for problem in dict.fromkeys(problems)
        if problem in first or (problem.line, problem.column) not in places
    ]


def _check(draft: Draft) -> tuple[_Checked, list[Diagnostic]]:
    """Validate one API; what is wrong is reported, then replaced, so that the rest can be checked further."""
    data = draft.data()
    problems: list[Diagnostic] = []
    wrong: set[str] = set(draft.broken)
    for _ in range(3):  # a replaced value can uncover what only its section's defaults bring up
        try:
            return _Checked(draft, Api.model_validate(data), frozenset(wrong)), problems
        except ValidationError as error:
            before = frozenset(wrong)
            for detail in error.errors(include_url=False, include_input=False):
                place = _place_of(draft, detail["loc"])
                if place not in before and (found := _diagnose(draft, detail, place)):
                    problems.append(found)
                wrong.add(place)
                _replace(data, place)
    raise AssertionError(f"stand-ins do not satisfy the schema: {sorted(wrong)}")


def _place_of(draft: Draft, location: tuple[int | str, ...]) -> str:
    """Find the field that an error is about; an error inside `config` or `env` is about the whole of it."""
    for length in range(len(location), 0, -1):
        place = ".".join(map(str, location[:length]))
        if place in draft.fields:
            return place
    return ".".join(map(str, location))


def _replace(data: dict[str, Any], place: str) -> None:
    *parents, leaf = place.split(".")
    inner = data
    for parent in parents:
        inner = inner.setdefault(parent, {})
    if place in _STAND_INS:
        inner[leaf] = _STAND_INS[place]
    else:
        inner.pop(leaf, None)


def _diagnose(draft: Draft, detail: ErrorDetails, place: str) -> Diagnostic | None:
    if detail["type"] == "missing":
        return _diagnose_missing(draft, place) if place not in draft.fields else _missing_inside(draft, detail["loc"])
    at_key = detail["loc"][-1] == "[key]"
    node = draft.find(*(detail["loc"][:-1] if at_key else detail["loc"]))
    if node is None:  # a default that follows from another value, which is wrong
        return None
    context = detail.get("ctx", {})
    message, fix = str(context.get("text", detail["msg"])), str(context.get("fix", ""))
    return draft.document.at_key(node, message, fix) if at_key else draft.document.at_value(node, message, fix)


def _missing_inside(draft: Draft, location: tuple[int | str, ...]) -> Diagnostic | None:
    """Say that an item of a list lacks a key."""
    item = draft.find(*location[:-1])
    if item is None:
        return None
    place = ".".join(part for part in location if isinstance(part, str))
    path = (*item.path, location[-1])
    return draft.document.diagnostic(item.line, item.column, path, "must be defined", f'write "{_EXAMPLES[place]}"')


def _diagnose_missing(draft: Draft, place: str) -> Diagnostic | None:
    if place.startswith("networking"):  # the endpoint follows from the name
        return None
    written = draft.written(place)
    if any(written == key or written.startswith(f"{key}.") for key in draft.broken):
        return None
    holder, path = draft.missing(place)
    section = draft.generation.section
    is_section = len(path) - 1 < len(written.split("."))
    example = _EXAMPLES.get(place.split(".")[0] if is_section and len(path) == 2 else place, "").format(
        section=section, key=path[-1]
    )
    fix = f'write "{example}"' if example else ""
    return draft.document.diagnostic(holder.key_line, holder.key_column, path, "must be defined", fix)


def _between_apis(checked: Sequence[_Checked]) -> list[Diagnostic]:
    problems: list[Diagnostic] = []
    names: dict[str, _Checked] = {}
    endpoints: dict[str, _Checked] = {}
    for result in checked:
        name, endpoint = result.api.name, result.api.networking.endpoint
        if "name" in result.wrong:
            continue
        if name in names:
            line = _line(names[name], "name")
            violation = Violation(("name",), f"{quote(name)} is the name of another API (on line {line})", "rename one")
            problems += [found] if (found := result.point_at(violation)) else []
            continue
        names[name] = result
        if "networking.endpoint" in result.wrong:
            continue
        if endpoint in endpoints:
            other = endpoints[endpoint]
            message = f"{quote(endpoint)} is the endpoint of {quote(other.api.name)} (on line {_line(other, 'name')})"
            problems += _endpoint_clash(result, message, "choose another endpoint")
        endpoints.setdefault(endpoint, result)
    return problems


def _against_deployed(checked: Sequence[_Checked], deployed: Sequence[Api], deployment: str | None) -> list[Diagnostic]:
    problems: list[Diagnostic] = []
    by_name = {api.name: api for api in deployed}
    names = {result.api.name for result in checked}
    # An API of this file's deployment that the file no longer has is about to be deleted: its endpoint is free.
    staying = [
        api for api in deployed if api.name not in names and (deployment is None or api.deployment != deployment)
    ]
    owners = {api.networking.endpoint: api for api in staying}
    for result in checked:
        if "name" in result.wrong:
            continue
        before, owner = by_name.get(result.api.name), owners.get(result.api.networking.endpoint)
        if before is not None and before.kind != result.api.kind:
            message = f"cannot change the kind of {quote(before.name)} from {before.kind} to {result.api.kind}"
            node = _kind_or_item(result.draft)
            fix = f'run "cortex delete {before.name}" and deploy again'
            problems.append(result.draft.document.at_value(node, message, fix))
        if owner is not None and "networking.endpoint" not in result.wrong:
            message = f"{quote(owner.networking.endpoint)} is the endpoint of {quote(owner.name)}, which is deployed"
            fix = f'choose another endpoint, or run "cortex delete {owner.name}"'
            problems += _endpoint_clash(result, message, fix)
    return problems


def _endpoint_clash(result: _Checked, message: str, fix: str) -> list[Diagnostic]:
    found = result.point_at(Violation(("networking.endpoint", "name"), message, fix))
    return [found] if found else []


def _kind_or_item(draft: Draft) -> Node:
    return draft.item.at("kind") or draft.item


def _line(result: _Checked, place: str) -> int:
    node = result.draft.find(place)
    return node.line if node else result.draft.item.line
