"""The services that every gRPC API has: health checks, and reflection, by which tools find its methods and messages.

`grpc.health.v1.Health` answers `Check`; the gateway answers `Watch`, see `gateway.lua`. Reflection is answered in both
of its versions; a stream is ended when it has been idle for a moment, because it occupies a call slot. The few messages
are read and written here, without generated modules that could clash with those of user code.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
from google.protobuf import descriptor_pb2
from google.protobuf.descriptor import FileDescriptor

from cortex.predictor.protobuf import BoundRpc, BoundService
from cortex.worker.grpc.wire import SERVICES_HEADER, RpcError

_HEALTH = "grpc.health.v1.Health"
_HEALTH_FILE = "grpc/health/v1/health.proto"
_REFLECTION = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")
#: HealthCheckResponse with the status SERVING.
_SERVING = b"\x08\x01"
_IDLE_S = 0.2
#: Fields of ServerReflectionRequest.
_BY_FILENAME, _BY_SYMBOL, _BY_EXTENSION, _EXTENSIONS_OF, _LIST = 3, 4, 5, 6, 7
#: Fields of ServerReflectionResponse.
_HOST, _ORIGINAL, _FILES, _NUMBERS, _SERVICES, _ERROR = 1, 2, 4, 5, 6, 7


def built_in_rpcs(service: BoundService) -> dict[str, BoundRpc]:
    """Return the built-in rpcs by path."""
    reflection = _Reflection(service)

    async def check(payload: _Raw, context: Any) -> _Raw:
        name = payload.text(1)
        if name not in ("", service.name):
            raise RpcError(grpc.StatusCode.NOT_FOUND, f"there is no service {name} here, only {service.name}")
        return _Raw(_SERVING)

    found = {f"/{_HEALTH}/Check": BoundRpc("Check", "async", check, False, False, _Raw, _Raw)}
    for name in _REFLECTION:
        rpc = BoundRpc("ServerReflectionInfo", "async_generator", reflection.answer, True, True, _Raw, _Raw)
        found[f"/{name}/{rpc.name}"] = rpc
    return found


class _Raw:
    """A message whose fields are read and written by their numbers; all of them are texts, bytes or messages."""

    class DESCRIPTOR:
        """The part of a message's descriptor that calls use."""

        full_name = "a message of gRPC itself"

    def __init__(self, data: bytes = b"") -> None:
        self.data = data

    def ParseFromString(self, data: bytes) -> None:  # noqa: N802 - as messages of protobuf
        """Take the bytes of a message."""
        self.data = data

    def SerializeToString(self) -> bytes:  # noqa: N802 - as messages of protobuf
        """Return the bytes of the message."""
        return self.data

    def fields(self) -> Iterator[tuple[int, bytes]]:
        """Yield the fields that have a length. Raises: RpcError."""
        at = 0
        try:
            while at < len(self.data):
                key, at = _varint(self.data, at)
                value, at = _varint(self.data, at)
                if key & 7 == 2:
                    yield key >> 3, self.data[at : at + value]
                    at += value
        except IndexError as error:
            raise RpcError(grpc.StatusCode.INTERNAL, "the request is not a valid message") from error

    def text(self, number: int) -> str:
        """Return the last value of a field; "" if it is missing."""
        return next((value.decode(errors="replace") for key, value in self.fields() if key == number), "")


class _Reflection:
    """Answers which services there are, and which files define them."""

    def __init__(self, service: BoundService) -> None:
        self._service = service
        self._files: dict[str, FileDescriptor] = {}
        self._symbols: dict[str, FileDescriptor] = {}
        self._add(service.descriptor.file)

    async def answer(self, payload: AsyncIterator[_Raw], context: Any) -> AsyncIterator[_Raw]:
        """Answer each request of a stream."""
        services = dict(context.invocation_metadata()).get(SERVICES_HEADER.decode(), self._service.name)
        while True:
            try:
                request = await asyncio.wait_for(anext(payload), _IDLE_S)
            except (StopAsyncIteration, TimeoutError):
                return
            head = _field(_HOST, request.text(_HOST).encode()) + _field(_ORIGINAL, request.data)
            yield _Raw(head + self._response(request, str(services)))

    def _response(self, request: _Raw, services: str) -> bytes:
        asked = [(key, value.decode(errors="replace")) for key, value in request.fields() if key != _HOST]
        number, name = asked[-1] if asked else (_LIST, "")
        if number == _LIST:
            names = sorted({*services.split(), _HEALTH, *_REFLECTION})
            return _field(_SERVICES, b"".join(_field(1, _field(1, each.encode())) for each in names))
        if (number == _BY_FILENAME and name == _HEALTH_FILE) or (number == _BY_SYMBOL and name.startswith(_HEALTH)):
            return _field(_FILES, _field(1, _health_file()))
        file = self._files.get(name) if number == _BY_FILENAME else self._symbol(name)
        if number in (_BY_FILENAME, _BY_SYMBOL) and file is not None:
            found = [file, *_imports(file)]
            return _field(_FILES, b"".join(_field(1, each.serialized_pb) for each in found))
        message = f"{name} is not found" if number != _EXTENSIONS_OF else f"{name} has no extensions"
        return _field(_ERROR, b"\x08" + bytes((grpc.StatusCode.NOT_FOUND.value[0],)) + _field(2, message.encode()))

    def _symbol(self, name: str) -> FileDescriptor | None:
        """Return the file that defines a symbol; those of a method or of a field are in the file of their parent."""
        while name:
            if name in self._symbols:
                return self._symbols[name]
            name = name.rpartition(".")[0]
        return None

    def _add(self, file: Any) -> None:
        if file.name in self._files:
            return
        self._files[file.name] = file
        named = (file.services_by_name, file.message_types_by_name, file.enum_types_by_name, file.extensions_by_name)
        for symbols in named:
            self._symbols |= {symbol.full_name: file for symbol in symbols.values()}
        for imported in file.dependencies:
            self._add(imported)


def _health_file() -> bytes:
    """Return the definition of the health service. It is in no pool, where it could clash with that of user code."""
    file = descriptor_pb2.FileDescriptorProto(name=_HEALTH_FILE, package=_HEALTH.rpartition(".")[0], syntax="proto3")
    request, response = (file.message_type.add(name=f"HealthCheck{kind}") for kind in ("Request", "Response"))
    optional = descriptor_pb2.FieldDescriptorProto.LABEL_OPTIONAL
    text, enum = descriptor_pb2.FieldDescriptorProto.TYPE_STRING, descriptor_pb2.FieldDescriptorProto.TYPE_ENUM
    request.field.add(name="service", number=1, label=optional, type=text, json_name="service")
    status = f".{file.package}.{response.name}.ServingStatus"
    response.field.add(name="status", number=1, label=optional, type=enum, type_name=status, json_name="status")
    statuses = response.enum_type.add(name="ServingStatus")
    for number, name in enumerate(("UNKNOWN", "SERVING", "NOT_SERVING", "SERVICE_UNKNOWN")):
        statuses.value.add(name=name, number=number)
    service = file.service.add(name="Health")
    messages = {
        f"{end}_type": f".{file.package}.{each.name}" for end, each in (("input", request), ("output", response))
    }
    service.method.add(name="Check", **messages)
    service.method.add(name="Watch", server_streaming=True, **messages)
    data: bytes = file.SerializeToString()
    return data


def _imports(file: Any) -> list[Any]:
    """Return the files that a file imports, and those that they import, each once."""
    found: dict[str, Any] = {}
    pending = list(file.dependencies)
    while pending:
        imported = pending.pop(0)
        if imported.name not in found:
            found[imported.name] = imported
            pending += imported.dependencies
    return list(found.values())


def _field(number: int, value: bytes) -> bytes:
    return _encoded(number << 3 | 2) + _encoded(len(value)) + value


def _encoded(value: int) -> bytes:
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
