"""The table of interface generations: what a user's file must and may define, one row per generation, data only.

Nobody else knows that there is more than one: the loader, the source checker and the replica read their row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Signature:
    """The arguments that a function of the user's may declare, `self` not counted."""

    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    positional: bool = False  #: exactly `required`, in this order, whatever is passed; else any order, by name

    @property
    def allowed(self) -> tuple[str, ...]:
        """Return every name that may be declared, the required ones first."""
        return self.required + self.optional


@dataclass(frozen=True)
class Generation:
    """One generation of the interface."""

    key: str
    class_name: str | None  #: None: plain functions at module level
    constructor: str
    constructor_signature: Signature
    constructor_required: bool
    methods: Mapping[str, str]  #: name of the serving method → HTTP verb
    method_signature: Signature
    yaml_form: str  #: how a cortex.yaml asks for this generation, for error messages
    summary: str  #: what a GET is told
    hooks: Mapping[str, Signature] = field(default_factory=dict)  #: optional methods that are called
    after_hook: str | None = None  #: the hook that runs after each answer
    returns_callback: bool = False  #: `(result, callback)` answers with `result`, then runs `callback()`
    json_only: bool = False  #: the payload is JSON or None; str results are JSON strings
    logs_on_demand: bool = False  #: `?debug=true` has the payload and the result logged


#: Names that a signature may declare, but that need what this version does not have yet.
UNAVAILABLE_ARGUMENTS: Mapping[str, str] = {
    "python_client": "this version does not serve model folders; load the model in the constructor",
    "model_client": "this version does not serve model folders; load the model in the constructor",
    "tensorflow_client": "this version does not serve exported TensorFlow models; load the model in the constructor",
    "onnx_client": "this version does not serve exported ONNX models; load the model in the constructor",
    "metrics_client": "this version does not collect metrics of user code; remove the argument",
    "proto_module_pb2": "this version does not serve gRPC; answer over HTTP",
}

#: Classes of other predictor types, with what to write instead; and methods of other kinds of APIs.
FOREIGN_CLASSES: Mapping[str, str] = {
    "TensorFlowPredictor": "`type: tensorflow` is not available in this version; load the model in a PythonPredictor",
    "ONNXPredictor": "`type: onnx` is not available in this version; load the model in a PythonPredictor",
    "Task": "a Task belongs to `kind: TaskAPI`, which is not available in this version",
}
FOREIGN_METHODS: Mapping[str, str] = {"handle_batch": "BatchAPI", "handle_async": "AsyncAPI"}

_REQUEST = ("payload", "query_params", "headers")

GENERATIONS: Mapping[str, Generation] = {
    "functions": Generation(
        key="functions",
        class_name=None,
        constructor="init",
        constructor_signature=Signature(required=("model_path", "metadata"), positional=True),
        constructor_required=False,
        methods={"predict": "POST"},
        method_signature=Signature(required=("sample", "metadata"), positional=True),
        yaml_form="`kind: api` with `predictor:`",
        summary="make a prediction by sending a post request to this endpoint with a json sample",
        json_only=True,
        logs_on_demand=True,
    ),
    "predictor": Generation(
        key="predictor",
        class_name="PythonPredictor",
        constructor="__init__",
        constructor_signature=Signature(
            required=("config",), optional=("api_spec", "job_spec", "python_client", "metrics_client")
        ),
        constructor_required=True,
        methods={"predict": "POST"},
        method_signature=Signature(optional=(*_REQUEST, "batch_id")),
        yaml_form="`kind: RealtimeAPI` with `predictor:`",
        summary="make a prediction by sending a post request to this endpoint",
        hooks={"post_predict": Signature(optional=("response", *_REQUEST))},
        after_hook="post_predict",
    ),
    "handler": Generation(
        key="handler",
        class_name="Handler",
        constructor="__init__",
        constructor_signature=Signature(
            required=("config",), optional=("model_client", "metrics_client", "proto_module_pb2")
        ),
        constructor_required=True,
        methods={f"handle_{verb}": verb.upper() for verb in ("post", "get", "put", "patch", "delete")},
        method_signature=Signature(optional=_REQUEST),
        yaml_form="`kind: RealtimeAPI` with `handler:`",
        summary="send a request to this endpoint",
        returns_callback=True,
    ),
}
