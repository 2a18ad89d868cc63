"""Rules between the APIs of one file, and between those and the deployed APIs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cortex.config.conversion import Draft
from cortex.config.document import Node
from cortex.config.schema import Api, Traffic
from cortex.config.values import nearest, quote
from cortex.config.violations import CheckedApi, Violation
from cortex.errors import Diagnostic
from cortex.lifecycle import ApiKind


def clashes_between(checked: Sequence[CheckedApi]) -> list[Diagnostic]:
    """Report names and endpoints that two APIs of the file share."""
    problems: list[Diagnostic] = []
    names: dict[str, CheckedApi] = {}
    endpoints: dict[str, CheckedApi] = {}
    for result in checked:
        name, endpoint = result.api.name, result.api.networking.endpoint
        if "name" in result.invalid_fields:
            continue
        if name in names:
            line = _line(names[name], "name")
            violation = Violation(("name",), f"{quote(name)} is the name of another API (on line {line})", "rename one")
            problems += [found] if (found := result.point_at(violation)) else []
            continue
        names[name] = result
        if "networking.endpoint" in result.invalid_fields:
            continue
        if endpoint in endpoints:
            other = endpoints[endpoint]
            message = f"{quote(endpoint)} is the endpoint of {quote(other.api.name)} (on line {_line(other, 'name')})"
            problems += _endpoint_clash(result, message, "choose another endpoint")
        endpoints.setdefault(endpoint, result)
    return problems


def clashes_with_deployed(
    checked: Sequence[CheckedApi], deployed: Sequence[Api], deployment: str | None
) -> list[Diagnostic]:
    """Report changes of an API's kind, and endpoints that other deployed APIs use."""
    problems: list[Diagnostic] = []
    by_name = {api.name: api for api in deployed}
    names = {result.api.name for result in checked}
    # APIs of the same deployment that are no longer in the file will be deleted, so their endpoints are free.
    staying = [
        api for api in deployed if api.name not in names and (deployment is None or api.deployment != deployment)
    ]
    owners = {api.networking.endpoint: api for api in staying}
    for result in checked:
        if "name" in result.invalid_fields:
            continue
        before, owner = by_name.get(result.api.name), owners.get(result.api.networking.endpoint)
        if before is not None and before.kind != result.api.kind:
            message = f"cannot change the kind of {quote(before.name)} from {before.kind} to {result.api.kind}"
            node = _kind_or_item(result.draft)
            fix = f'run "cortex delete {before.name}" and deploy again'
            problems.append(result.draft.document.at_value(node, message, fix))
        if owner is not None and "networking.endpoint" not in result.invalid_fields:
            message = f"{quote(owner.networking.endpoint)} is the endpoint of {quote(owner.name)}, which is deployed"
            fix = f'choose another endpoint, or run "cortex delete {owner.name}"'
            problems += _endpoint_clash(result, message, fix)
    return problems


def splitter_problems(checked: Sequence[CheckedApi], deployed: Sequence[Api] | None) -> list[Diagnostic]:
    """Report invalid targets of splitters; if `deployed` is None, only those within the file."""
    kinds = {api.name: api.kind for api in deployed or ()}
    kinds |= {result.api.name: result.api.kind for result in checked if "name" not in result.invalid_fields}
    # An API with an invalid name may be the intended target.
    is_all_known = deployed is not None and not any("name" in result.invalid_fields for result in checked)
    problems: list[Diagnostic] = []
    for result in checked:
        for index, traffic in enumerate(result.api.apis or ()):
            if wrong := _target_problem(traffic, kinds, is_all_known):
                found = result.point_at(Violation((f"apis.{index}.name",), *wrong))
                problems += [found] if found else []
    return problems


def _target_problem(traffic: Traffic, kinds: Mapping[str, ApiKind], is_all_known: bool) -> tuple[str, str] | None:
    kind = kinds.get(traffic.name)
    if kind is ApiKind.REALTIME or (kind is None and not is_all_known):
        return None
    if kind is not None:
        return f"{quote(traffic.name)} is of kind {kind}, not a RealtimeAPI", "use the name of a RealtimeAPI"
    near = nearest(traffic.name, [name for name, other in kinds.items() if other is ApiKind.REALTIME])
    fix = f"did you mean {quote(near)}?" if near else "deploy it first, or in the same file"
    return f"{quote(traffic.name)} is neither in this file nor deployed", fix


def _endpoint_clash(result: CheckedApi, message: str, fix: str) -> list[Diagnostic]:
    found = result.point_at(Violation(("networking.endpoint", "name"), message, fix))
    return [found] if found else []


def _kind_or_item(draft: Draft) -> Node:
    return draft.item.at("kind") or draft.item


def _line(result: CheckedApi, field: str) -> int:
    node = result.draft.find(field)
    return node.line if node else result.draft.item.line
