"""Runs models on TensorFlow Serving over gRPC: one connection, and the models of a server that manages its own.

It must not know users' values, only arrays, nor how a server is started.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError

from cortex.errors import ModelError
from cortex.models.loader import LoadRequest
from cortex.models.registry import check_version, format_names
from cortex.models.spec import DEFAULT_MODEL, LATEST, ModelSource
from cortex.predictor.clients.servable import SignatureInfo, TensorFlowModel, named, plain
from cortex.predictor.clients.serving_messages import (
    MESSAGES,
    METHODS,
    metadata_request,
    predict_request,
    read_signatures,
    read_tensor,
)
from cortex.predictor.clients.tensors import Array

#: Where nothing else ends a call: a request has a time-out of its own.
CALL_TIMEOUT_S = 300.0
#: A model's metadata holds its signatures only, but there may be thousands of inputs; inputs may be images.
_UNLIMITED = -1
_RECONNECT_MS = 1000


class UnreachableError(ModelError):
    """No server answers."""


class Connection:
    """A channel to one server, with its methods. It connects on first use, and again after each loss."""

    def __init__(self, target: str) -> None:
        """Take `host:port`, or `unix:` and a path."""
        os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # of its logs, what users can act on
        self.target = target
        options = [
            ("grpc.max_send_message_length", _UNLIMITED),
            ("grpc.max_receive_message_length", _UNLIMITED),
            # By default the pause between two attempts grows to two minutes.
            ("grpc.initial_reconnect_backoff_ms", _RECONNECT_MS // 10),
            ("grpc.min_reconnect_backoff_ms", _RECONNECT_MS // 10),
            ("grpc.max_reconnect_backoff_ms", _RECONNECT_MS),
            # Connections are shared among channels of the same options; a server that comes back would then be
            # found by one and held for lost by another.
            ("grpc.use_local_subchannel_pool", 1),
        ]
        self._channel = grpc.insecure_channel(target, options=options)
        self._calls = {
            name: self._channel.unary_unary(
                f"/{service}/{name}",
                request_serializer=MESSAGES[request].SerializeToString,
                response_deserializer=MESSAGES[response].FromString,
            )
            for service, methods in METHODS.items()
            for name, (request, response) in methods.items()
        }

    def call(self, method: str, request: Any, timeout_s: float | None = CALL_TIMEOUT_S) -> Any:
        """Call a method and return its response. Raises: grpc.RpcError, which is a grpc.Call."""
        return self._calls[method](request, timeout=timeout_s)

    def close(self) -> None:
        """End the connection; calls inside fail."""
        self._channel.close()


class ServedModel:
    """A model that a server has loaded."""

    def __init__(
        self,
        connection: Connection,
        name: str,
        version: str | None,
        request: LoadRequest,
        metadata: Any,
    ) -> None:
        """Take the server's name for it, and its answer to `metadata_request`. Raises: ModelError."""
        try:
            self.signatures: Mapping[str, SignatureInfo] = read_signatures(metadata)
        except (KeyError, DecodeError):
            raise ModelError(f"{named(request)}: {connection.target} does not tell its signatures") from None
        self.name = name
        #: Set once the server was seen to serve another version than the one whose signatures we have.
        self.is_outdated = False
        self._connection = connection
        self._asked = version
        self._served: int = metadata.model_spec.version.value
        self._request = request

    def run(self, signature_key: str, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        """Run a signature on the server. Raises: ModelError with the server's words."""
        specs = self.signatures[signature_key].inputs
        try:
            request = predict_request(self.name, self._asked, signature_key, inputs, specs)
            response = self._connection.call("Predict", request)
        except grpc.RpcError as error:
            self.is_outdated = True
            fail(error, self._connection.target, self._request)
        except ValueError as error:  # protobuf: over 2 GiB
            raise ModelError(f"input of {named(self._request)} can't be sent: {error}") from None
        if self._asked is None and response.model_spec.version.value != self._served:
            self.is_outdated = True
        try:
            return {name: read_tensor(response.outputs[name]) for name in sorted(response.outputs)}
        except ValueError as error:
            raise ModelError(f"the answer of {named(self._request)} can't be read: {error}") from None


class ExternalModels:
    """The models of a server that manages its own: nothing is fetched, loaded or chosen here but the signature."""

    def __init__(self, address: str, source: ModelSource) -> None:
        self._source = source
        self._connection = Connection(address)
        self._known: dict[tuple[str, str], TensorFlowModel[ServedModel]] = {}
        self._turn = threading.Lock()

    def get(self, name: str | None = None, version: str = LATEST) -> TensorFlowModel[ServedModel]:
        """Return a model by the server's name for it; its signatures are asked for once. Raises: ModelError."""
        number = check_version(version)
        asked, signature_key = self._find(name)
        known = self._known.get((asked, number))
        if known is not None and not known.servable.is_outdated:
            return known
        # Two threads may both ask: the same is learnt twice.
        request = LoadRequest(asked, number, "", "", 0, signature_key)
        model = TensorFlowModel(request, self._open(request))
        with self._turn:
            self._known[asked, number] = model
        return model

    def describe(self) -> dict[str, dict[str, Any]]:
        """Return what has been asked for so far; what else there is, only the server knows."""
        with self._turn:
            found: dict[str, dict[str, Any]] = {}
            for name, version in sorted(self._known):
                entry = found.setdefault(name, {"versions": [], "timestamps": []})
                entry["versions"].append(version)
                entry["timestamps"].append(0)
            return found

    def loaded(self) -> list[TensorFlowModel[ServedModel]]:
        """List the models that have been asked for."""
        with self._turn:
            return list(self._known.values())

    def close(self) -> None:
        """End the connection."""
        self._connection.close()

    def _open(self, request: LoadRequest) -> ServedModel:
        version = None if request.version == LATEST else request.version
        try:
            metadata = self._connection.call("GetModelMetadata", metadata_request(request.model, version))
        except grpc.RpcError as error:
            fail(error, self._connection.target, request)
        return ServedModel(self._connection, request.model, version, request, metadata)

    def _find(self, name: str | None) -> tuple[str, str | None]:
        """Return the server's name for a model, and its signature's key. Raises: ModelError."""
        source = self._source
        if source.form == "path":
            return source.paths[0].url.rstrip("/").rpartition("/")[2], source.paths[0].signature_key
        names = [path.name for path in source.paths]
        if name is None:
            choose = f", choose one of the following: {format_names(sorted(names))}" if names else ""
            raise ModelError(f"model_name was not specified{choose}")
        if not isinstance(name, str):
            raise ModelError(f"model_name must be str, not {type(name).__name__}")
        if source.form == "dir":
            return name, source.signature_key
        for path in source.paths:
            if path.name == name:
                return name, path.signature_key
        raise ModelError(f"'{name}' model wasn't found in the list of available models: {format_names(sorted(names))}")


def fail(error: Any, target: str, request: LoadRequest) -> NoReturn:
    """Raise a ModelError for a call that failed; it keeps the server's words."""
    code, told = error.code(), plain(error.details())
    server = f"TensorFlow Serving at {target}"
    if code is grpc.StatusCode.UNAVAILABLE:
        raise UnreachableError(f"{server} can't be reached: {told}") from None
    if code is grpc.StatusCode.NOT_FOUND:
        if request.version == LATEST or request.model == DEFAULT_MODEL:
            message = f"'{request.model}' model wasn't found in the list of available models of {server}: {told}"
        else:
            message = f"model {request.model} of version {request.version} wasn't found on {server}: {told}"
    elif code is grpc.StatusCode.DEADLINE_EXCEEDED:
        message = f"{server} gave no answer for {named(request)} within {CALL_TIMEOUT_S:.0f} s"
    elif code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        message = f"{server} has no room for a request to {named(request)}: {told}"
    elif code is grpc.StatusCode.INVALID_ARGUMENT:
        message = f"{named(request)} failed: {told}"
    else:
        message = f"{server} failed to run {named(request)}: {code.name}: {told}"
    raise ModelError(message) from None
