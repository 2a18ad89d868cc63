"""Rules between a gRPC API and its `.proto` file, which determines the endpoint."""

from __future__ import annotations

from collections.abc import Iterator

from cortex.config.rules.violations import CheckedApi, Violation
from cortex.config.schema import Api
from cortex.config.values import quote
from cortex.errors import ConfigError, Diagnostic, InputError
from cortex.projects.project import ProjectFiles
from cortex.projects.protobuf_file import ProtobufFile, read_protobuf_file

_FIELD, _ENDPOINT = "handler.protobuf_path", "networking.endpoint"
#: The only rpc of files with `predictor:`.
_PREDICT = "Predict"


def service_endpoint(file: ProtobufFile) -> str:
    """Return the path before all methods of the file's service."""
    return f"/{file.package}.{file.services[0].name}"


def read_service(api: Api, project: ProjectFiles) -> tuple[ProtobufFile | None, list[Diagnostic], list[Violation]]:
    """Return the definition of a gRPC API, or the problems of its file or of the key that names it."""
    name = api.handler.protobuf_path
    if name is None or not project.contains(name):
        return None, [], []  # a missing file is a problem of the project
    try:
        file = read_protobuf_file(project, name)
    except ConfigError as error:
        return None, list(error.diagnostics), []
    except InputError as error:
        return None, [], [Violation((_FIELD,), str(error))]
    problems = list(_service_problems(api, name, file))
    violations = [] if problems else list(_violations(api, file))
    return (None if problems else file), problems, violations


def with_endpoint(result: CheckedApi, file: ProtobufFile) -> Api:
    """Return the API with the endpoint of its service."""
    networking = result.api.networking.model_copy(update={"endpoint": service_endpoint(file)})
    return result.api.model_copy(update={"networking": networking})


def _service_problems(api: Api, name: str, file: ProtobufFile) -> Iterator[Diagnostic]:
    if not file.package:
        fix = f'add "package {api.name.replace("-", "_")};" after the syntax'
        yield Diagnostic(name, 0, 0, "", "has no package", fix)
    if len(file.services) != 1:
        at = file.services[1] if file.services else None
        message = f"must define one service, but defines {len(file.services)}"
        line, column = (at.line, at.column) if at else (0, 0)
        yield Diagnostic(name, line, column, "", message, "define each service in a file of its own")
        return
    service = file.services[0]
    if not service.rpcs:
        yield Diagnostic(name, service.line, service.column, "", f"service {service.name} has no methods", "add one")
    if api.handler.interface == "predictor":
        for rpc in service.rpcs:
            if rpc.name != _PREDICT:
                message = f"{rpc.name}: with `predictor:`, the only method of a service is {_PREDICT}"
                fix = f'name it "{_PREDICT}", or use `handler:`'
                yield Diagnostic(name, rpc.line, rpc.column, "", message, fix)


def _violations(api: Api, file: ProtobufFile) -> Iterator[Violation]:
    endpoint = service_endpoint(file)
    if api.networking.endpoint not in (endpoint, f"{endpoint}/{_PREDICT}", f"/{api.name}"):
        message = f"the service of {quote(api.handler.protobuf_path)} has the path {quote(endpoint)}"
        yield Violation((_ENDPOINT,), message, f"remove it, or write {quote(endpoint)}")
