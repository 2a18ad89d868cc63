"""Routes of the Open Inference Protocol: `<endpoint>/v2/…`, which the gateway marks with `x-cortex-endpoint`.

    Connection ──▶ MethodServer ── accept ──▶ InferenceRoutes ──▶ health, lists: respond at once
                         │                    └──▶ the rest: a BoundMethod, whose call returns the encoded response
                         └── slot, deadline, thread: as for any other method ──▶ decode ─▶ InferenceModel ─▶ encode

Requests for a model pass through the slots, because its code may block. Errors are `{"error", "request_id"}`.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from inspect import isawaitable
from typing import TYPE_CHECKING, Any

import cortex
from cortex.payloads.inference_protocol import (
    JSON_LENGTH_HEADER,
    InferenceRoute,
    RequestHeader,
    V2Error,
    model_document,
    parse_json_length,
    parse_route,
    server_document,
    shorten,
)
from cortex.payloads.signature import BodySignature, MethodSignature, ModelSignature
from cortex.predictor.binding import BoundMethod, Kind
from cortex.predictor.inference.inference_model import MethodModel
from cortex.predictor.interface import HANDLE_V2
from cortex.worker.http.connection import Connection
from cortex.worker.http.responses import ValidHeaders
from cortex.worker.requests.payload import BYTES, JSON, Encoded, encode_json
from cortex.worker.spec import ReplicaSpec

if TYPE_CHECKING:
    from cortex.predictor.inference.inference_model import Arrays, InferenceModel
    from cortex.worker.monitoring.tracker import PredictionTracker

_SPLITTER_HEADER = b"x-cortex-splitter"
#: Of methods that run a model, and that describe one. OpenAPI documents describe models by their own signatures.
INFERENCE = MethodSignature("POST", "infer", BodySignature(), BodySignature())
_METADATA = MethodSignature("GET", "infer", BodySignature(), BodySignature())


@dataclass(frozen=True, slots=True)
class InferenceCall:
    """A decoded inference request."""

    connection: Connection
    route: InferenceRoute
    model: InferenceModel
    signature: ModelSignature
    header: RequestHeader
    inputs: Arrays

    def run(self, inputs: Arrays | None = None) -> Arrays | Awaitable[Arrays]:
        """Run the model with the inputs of this call, or with others: those of several calls. Raises: as the model."""
        given = self.inputs if inputs is None else inputs
        if isinstance(self.model, MethodModel):
            return self.model.call(given, self.header.parameters)
        return self.model.infer(given, self.route.version, () if inputs is not None else self.header.outputs)


class InferenceRoutes:
    """The models of one process, by route. Stateless; `accept` is for the event-loop thread."""

    def __init__(
        self,
        spec: ReplicaSpec,
        models: Mapping[str, InferenceModel],
        tracker: PredictionTracker | None,
    ) -> None:
        """Serve the models of an API."""
        self._api = spec.api
        self._tracks_key = spec.tracker_key is not None
        self._models = models
        self._tracker = tracker
        if models and "numpy" in sys.modules:
            import cortex.payloads.inference_tensors  # noqa: F401, PLC0415 - imports numpy, and delays the first request

    def accept(self, connection: Connection) -> BoundMethod | None:
        """Respond at once and return None, or return the method whose call answers."""
        try:
            return self._accept(connection)
        except V2Error as error:
            connection.respond_error(error.status, str(error))
            return None

    def _accept(self, connection: Connection) -> BoundMethod | None:
        route = _route(connection)
        verb = connection.method
        if verb != route.verb and (verb != "HEAD" or route.verb != "GET"):
            message = f"{verb} is not supported at this path; it answers {route.verb}"
            connection.respond_error(405, message, ValidHeaders(((b"allow", route.verb.encode()),)))
            return None
        splitter = _splitter(connection)
        if route.model:
            return self._method_for(connection, route, self._find(route.model, splitter))
        documents: dict[str, Callable[[], Any]] = {
            "server": lambda: server_document(cortex.__version__),
            "live": lambda: {"live": True},
            "ready": lambda: {"ready": True},
            "models": lambda: {"models": [splitter] if splitter and len(self._models) == 1 else list(self._models)},
        }
        encoded = _json(connection, documents[route.kind]())
        connection.respond(encoded.status, encoded.media_type, encoded.body)
        return None

    def _find(self, name: str, splitter: str) -> InferenceModel:
        """Return a model by its name; an only model also has the name of the API, and of the splitter called."""
        model = self._models.get(name)
        if model is None and len(self._models) == 1 and name in (self._api, splitter):
            model = next(iter(self._models.values()))
        if model is not None:
            return model
        if not self._models:
            fix = f"define {HANDLE_V2}(), or annotate the payload of handle_post() as an array"
            raise V2Error(404, f"the API {self._api} has no model of the Open Inference Protocol; {fix}")
        known = ", ".join(list(self._models)[:20])
        raise V2Error(404, f"the API {self._api} has no model {shorten(name)}; its models are {known}")

    def _method_for(self, connection: Connection, route: InferenceRoute, model: InferenceModel) -> BoundMethod:
        is_infer = route.kind == "infer"
        kind: Kind = model.kind if isinstance(model, MethodModel) and is_infer else "sync"
        call: Callable[..., Any] = self._infer if is_infer else self._describe
        return BoundMethod(
            name=model.name if isinstance(model, MethodModel) else "infer",
            arguments=(),
            needs_payload=False,
            needs_query_params=False,
            needs_headers=False,
            kind=kind,
            call=lambda *_: call(connection, route, model),
            signature=INFERENCE if is_infer else _METADATA,
        )

    # Calls, on any thread.

    def _describe(self, connection: Connection, route: InferenceRoute, model: InferenceModel) -> Encoded:
        signature = _signature(model, route)
        if route.kind == "model_ready":
            return _json(connection, {"name": route.model, "ready": True})
        return _json(connection, model_document(route.model, signature, model.versions()))

    def decode(self, connection: Connection) -> InferenceCall:
        """Return the inference that an accepted request asks for. Raises: V2Error."""
        route = _route(connection)
        return self._decode(connection, route, self._find(route.model, _splitter(connection)))

    def _infer(
        self, connection: Connection, route: InferenceRoute, model: InferenceModel
    ) -> Encoded | Awaitable[Encoded]:
        call = self._decode(connection, route, model)
        outputs = call.run()
        if not isawaitable(outputs):
            return self.encode(call, outputs)

        async def finish() -> Encoded:
            return self.encode(call, await outputs)

        return finish()

    def _decode(self, connection: Connection, route: InferenceRoute, model: InferenceModel) -> InferenceCall:
        from cortex.payloads.inference_tensors import decode_request  # noqa: PLC0415 - imports numpy

        signature = _signature(model, route)
        body = connection.body
        json_length = parse_json_length(_header(connection, JSON_LENGTH_HEADER) or None, len(body))
        header, inputs = decode_request(body, json_length, signature)
        return InferenceCall(connection, route, model, signature, header, inputs)

    def encode(self, call: InferenceCall, outputs: Arrays) -> Encoded:
        """Return the response with the outputs of a model. Raises: V2Error, UserError."""
        from cortex.payloads.inference_tensors import encode_response, rows  # noqa: PLC0415 - imports numpy

        version = call.route.version or next(reversed(call.model.versions()), None)
        body, json_length = encode_response(call.header, outputs, call.signature, call.route.model, version)
        if self._tracker is not None:
            for row in rows(outputs):
                only = next(iter(row.values())) if len(row) == 1 and not self._tracks_key else row
                self._tracker.track(only, call.connection.request_id, call.connection.is_copy)
        if json_length is None:
            return Encoded(200, JSON, body)
        # Pages of other origins can read only the headers that a response names.
        exposed = (b"access-control-expose-headers", b"Inference-Header-Content-Length")
        headers = ValidHeaders(((JSON_LENGTH_HEADER, b"%d" % json_length), exposed))
        return Encoded(200, BYTES, body, headers)


def inference_kinds(models: Mapping[str, InferenceModel]) -> set[Kind]:
    """Return the kinds of the methods of a class among the models."""
    return {model.kind for model in models.values() if isinstance(model, MethodModel)}


def _signature(model: InferenceModel, route: InferenceRoute) -> ModelSignature:
    try:
        return model.signature(route.version)
    except KeyError:
        versions = ", ".join(model.versions())
        has = f"its versions are {versions}" if versions else "it has no versions"
        message = f"the model {shorten(route.model)} has no version {shorten(route.version or '')}; {has}"
        raise V2Error(404, message) from None


def _route(connection: Connection) -> InferenceRoute:
    return parse_route(connection.path_below)


def _splitter(connection: Connection) -> str:
    return _header(connection, _SPLITTER_HEADER).decode("latin-1")


def _json(connection: Connection, document: Any) -> Encoded:
    return Encoded(200, JSON, b"" if connection.method == "HEAD" else encode_json(document))


def _header(connection: Connection, name: bytes) -> bytes:
    return next((value for key, value in connection.headers if key == name), b"")
