"""The gRPC service of an API: generate its modules from the `.proto` file, and bind the user's methods to its rpcs.

protoc runs in a process of its own: in one that has imported TensorFlow, which has another version of the same C++
library, it crashes. The generated modules are in `sys.modules` only: their files are deleted at once.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from cortex.errors import UserError
from cortex.models.loaded_models import with_call_scope
from cortex.payloads.json_object import Json
from cortex.payloads.signature import ApiSignature, BodySignature, RouteSignature
from cortex.predictor.binding import Kind, MethodTypes, call_kind, method_signature
from cortex.predictor.interface import Generation
from cortex.predictor.interface_rules import declared_names

_WELL_KNOWN = "google/protobuf/"


@dataclass(frozen=True)
class Definition:
    """The compiled `.proto` file of an API."""

    module: ModuleType  #: `<name>_pb2`
    service: Any  #: the `ServiceDescriptor`

    @property
    def rpcs(self) -> list[str]:
        """The names of the methods of the service."""
        return [rpc.name for rpc in self.service.methods]


@dataclass(frozen=True, slots=True)
class BoundRpc:
    """One rpc, and the user's method that answers it."""

    name: str
    kind: Kind
    call: Callable[[Any, Any], Any]  #: (message or iterator of messages, context) → what the method returns
    request_streams: bool
    response_streams: bool
    request_class: Any
    response_class: Any

    @property
    def is_async(self) -> bool:
        """Return whether the method runs on the event loop."""
        return self.kind in ("async", "async_generator")


@dataclass(frozen=True)
class BoundService:
    """The service of an API with the user's methods."""

    name: str  #: with its package, such as `iris_classifier.Handler`
    rpcs: Mapping[str, BoundRpc]
    descriptor: Any  #: the `ServiceDescriptor`
    signature: ApiSignature  #: the methods as routes, for calls in JSON


def load_definition(project: Path, path: str) -> Definition:
    """Compile a `.proto` file of the project and its imports, and import the modules. Raises: UserError."""
    tools = importlib.util.find_spec("grpc_tools")
    if tools is None or tools.origin is None:
        raise UserError(f"{path}: grpc_tools is not installed; add grpcio-tools to requirements.txt")
    from google.protobuf.descriptor_pb2 import FileDescriptorSet  # noqa: PLC0415 - comes with protoc

    with tempfile.TemporaryDirectory(prefix="cortex-protobuf-") as folder:
        roots = [f"--proto_path={project}", f"--proto_path={Path(tools.origin).parent / '_proto'}"]
        outputs = [f"--python_out={folder}", f"--grpc_python_out={folder}"]
        compiled = Path(folder) / "descriptors"
        _run_protoc(path, [*roots, *outputs, f"--descriptor_set_out={compiled}", "--include_imports", path])
        files = [file.name for file in FileDescriptorSet.FromString(compiled.read_bytes()).file]
        files = [file for file in files if not file.startswith(_WELL_KNOWN)]
        if imported := [file for file in files if file != path]:
            _run_protoc(path, [*roots, *outputs, *imported])
        sys.path.insert(0, str(project))  # the folders of definitions are packages of the project
        try:
            for suffix in ("_pb2", "_pb2_grpc"):
                _import(Path(folder), files, suffix)
        finally:
            sys.path.remove(str(project))
    module = sys.modules[_module_name(path, "_pb2")]
    descriptor: Any = module.DESCRIPTOR
    return Definition(module, next(iter(descriptor.services_by_name.values())))


def bind_service(definition: Definition, instance: object, generation: Generation, in_scope: bool) -> BoundService:
    """Bind the methods of the user's object; with `in_scope`, their calls keep the models that they use loaded."""
    rpcs, routes = {}, []
    for name, rpc_name in generation.methods.items():
        rpc = definition.service.methods_by_name[rpc_name]
        method = getattr(instance, name)
        call = _with_declared(method, declared_names(method, generation.method_signature))
        rpcs[rpc_name] = BoundRpc(
            rpc_name,
            call_kind(method),
            with_call_scope(call) if in_scope else call,
            rpc.client_streaming,
            rpc.server_streaming,
            _message_class(rpc.input_type),
            _message_class(rpc.output_type),
        )
        routes.append(_json_route(rpc, method))
    return BoundService(definition.service.full_name, rpcs, definition.service, ApiSignature(routes=tuple(routes)))


def _json_route(rpc: Any, method: Any) -> RouteSignature:
    """Return the signature of an rpc whose messages are JSON: a stream is an array, or lines."""
    request = _json_schema(rpc.input_type)
    body = BodySignature(
        {"type": "array", "items": request} if rpc.client_streaming else request, is_typed=True, is_required=False
    )
    media_type = "application/x-ndjson" if rpc.server_streaming else "application/json"
    result = BodySignature(_json_schema(rpc.output_type), media_type, is_typed=True)
    signature = method_signature(method, rpc.name, "POST", (), MethodTypes(result=result))
    return RouteSignature(f"/{rpc.name}", (), replace(signature, payload=body, streams=rpc.server_streaming))


def _json_schema(message: Any) -> Json:
    schema = {"description": f"{message.full_name} in JSON"}
    return {"type": "object", **schema} if is_json_object(message) else schema


def is_json_object(message: Any) -> bool:
    """Return whether the JSON of a message is an object: that of some of protobuf itself, such as `Value`, may not."""
    return not message.full_name.startswith("google.protobuf.")


def _with_declared(method: Any, names: Iterable[str]) -> Callable[[Any, Any], Any]:
    match tuple(sorted(names)):
        case ():
            return lambda payload, context: method()
        case ("context",):
            return lambda payload, context: method(context=context)
        case ("payload",):
            return lambda payload, context: method(payload=payload)
    return lambda payload, context: method(payload=payload, context=context)


def _message_class(descriptor: Any) -> Any:
    from google.protobuf import message_factory  # noqa: PLC0415 - only in environments of gRPC APIs

    return message_factory.GetMessageClass(descriptor)


def _run_protoc(path: str, arguments: list[str]) -> None:
    command = [sys.executable, "-P", "-m", "grpc_tools.protoc", *arguments]
    if subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode:
        raise UserError(f"{path}: protoc can't compile it; its messages are in the log")


def _module_name(path: str, suffix: str) -> str:
    return path.removesuffix(".proto").replace("-", "_").replace("/", ".") + suffix


def _import(folder: Path, files: Iterable[str], suffix: str) -> None:
    """Import the generated modules, each after those that it imports."""
    for file in files:
        name = _module_name(file, suffix)
        spec = importlib.util.spec_from_file_location(name, folder / f"{name.replace('.', '/')}.py")
        if spec is None or spec.loader is None:
            continue
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except Exception as error:  # of the generated code, such as a version of protobuf that is too old
            raise UserError(f"{file}: {type(error).__name__}: {error}") from error
