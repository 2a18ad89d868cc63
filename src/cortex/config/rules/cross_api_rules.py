"""Rules between the APIs of one file, and between those and the deployed APIs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from cortex.config.rules.violations import CheckedApi, Violation
from cortex.config.schema import Api, Traffic
from cortex.config.values import quote
from cortex.errors import Diagnostic
from cortex.lifecycle import ApiKind
from cortex.spelling import nearest


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
        other = endpoints.get(endpoint)
        if other is not None and not is_split([each.api for each in checked], endpoint, (result.api, other.api)):
            message = f"{quote(endpoint)} is the endpoint of {quote(other.api.name)} (on line {_line(other, 'name')})"
            problems += _endpoint_clash(result, message, _clash_fix(result.api, "choose another endpoint"))
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
            node = result.draft.item.at("kind") or result.draft.item
            fix = f'run "cortex delete {before.name}" and deploy again'
            problems.append(result.draft.document.at_value(node, message, fix))
        known = [*staying, *(each.api for each in checked)]
        if owner is not None and is_split(known, owner.networking.endpoint, (result.api, owner)):
            continue
        if owner is not None and "networking.endpoint" not in result.invalid_fields:
            message = f"{quote(owner.networking.endpoint)} is the endpoint of {quote(owner.name)}, which is deployed"
            fix = f'choose another endpoint, or run "cortex delete {owner.name}"'
            problems += _endpoint_clash(result, message, _clash_fix(result.api, fix))
    return problems


def _clash_fix(api: Api, otherwise: str) -> str:
    if not api.is_grpc:
        return otherwise
    return "add a TrafficSplitter of both with this endpoint, or change the package in the definition"


def is_split(apis: Iterable[Api], endpoint: str, sharing: Iterable[Api]) -> bool:
    """Return whether a splitter has the path of the gRPC service that these APIs share, and divides its calls."""
    return any(
        splitter.kind is ApiKind.SPLITTER
        and splitter.networking.endpoint == endpoint
        and all(api is splitter or (api.is_grpc and _is_target(api.name, splitter)) for api in sharing)
        for splitter in apis
    )


def _is_target(name: str, splitter: Api) -> bool:
    return any(traffic.name == name for traffic in splitter.apis or ())


def splitter_problems(checked: Sequence[CheckedApi], deployed: Sequence[Api] | None) -> list[Diagnostic]:
    """Report invalid targets of splitters; if `deployed` is None, only those within the file."""
    apis = {api.name: api for api in deployed or ()}
    apis |= {result.api.name: result.api for result in checked if "name" not in result.invalid_fields}
    kinds = {name: api.kind for name, api in apis.items()}
    # An API with an invalid name may be the intended target.
    is_all_known = deployed is not None and not any("name" in result.invalid_fields for result in checked)
    problems: list[Diagnostic] = []
    for result in checked:
        for index, traffic in enumerate(result.api.apis or ()):
            if wrong := _target_problem(traffic, kinds, is_all_known):
                found = result.point_at(Violation((f"apis.{index}.name",), *wrong))
                problems += [found] if found else []
        if result.api.kind is ApiKind.SPLITTER:
            problems += _grpc_problems(result, apis)
    return problems


def _grpc_problems(result: CheckedApi, apis: Mapping[str, Api]) -> list[Diagnostic]:
    """Report what a splitter of gRPC APIs can't do: all of them serve its path, and calls are not copied."""
    splitter = result.api
    services = {traffic.name: apis[traffic.name] for traffic in splitter.apis or () if traffic.name in apis}
    if not any(api.is_grpc for api in services.values()):
        return []
    violations = []
    endpoint = next(api.networking.endpoint for api in services.values() if api.is_grpc)
    for index, traffic in enumerate(splitter.apis or ()):
        api = services.get(traffic.name)
        if api is not None and (not api.is_grpc or api.networking.endpoint != endpoint):
            what = f"has the service {api.networking.endpoint[1:]}" if api.is_grpc else "does not serve gRPC"
            message = f"{quote(traffic.name)} {what}, but others serve {endpoint[1:]}"
            violations.append(Violation((f"apis.{index}.name",), message, "use APIs with the same service"))
        if traffic.shadow:
            message = "gRPC calls can't be copied to a shadow"
            violations.append(Violation((f"apis.{index}.shadow",), message, "remove it"))
    if splitter.networking.endpoint != endpoint:
        message = f"its APIs serve gRPC at {quote(endpoint)}"
        violations.append(Violation(("networking.endpoint", "name"), message, f'write "endpoint: {endpoint}"'))
    return [found for violation in violations if (found := result.point_at(violation))]


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


def _line(result: CheckedApi, field: str) -> int:
    node = result.draft.find(field)
    return node.line if node else result.draft.item.line
