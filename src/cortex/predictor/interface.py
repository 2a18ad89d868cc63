"""The table of interface generations: what a user's file must and may define, data only.

One row per generation, `type:` of the predictor, and whether `cortex.yaml` names models. Nobody else knows that there
is more than one: the loader, the source checker and the replica read their row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Signature:
    """The arguments that a function of the user's may declare, `self` not counted."""

    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    positional: bool = False  #: exactly `required`, in this order, whatever is passed; else any order, by name
    refused: Mapping[str, str] = field(default_factory=dict)  #: known names that can't be passed → what to do instead

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
    type: str = "python"
    client: str | None = None  #: the constructor's argument through which the user's code gets at its models
    hooks: Mapping[str, Signature] = field(default_factory=dict)  #: other methods that are called
    required_hooks: frozenset[str] = frozenset()
    after_hook: str | None = None  #: the hook that runs after each answer
    returns_callback: bool = False  #: `(result, callback)` answers with `result`, then runs `callback()`
    json_only: bool = False  #: the payload is JSON or None; str results are JSON strings
    logs_on_demand: bool = False  #: `?debug=true` has the payload and the result logged


#: Names that a signature may declare, but that need what this version does not have yet.
UNAVAILABLE_ARGUMENTS: Mapping[str, str] = {
    "metrics_client": "this version does not collect metrics of user code; remove the argument",
    "proto_module_pb2": "this version does not serve gRPC; answer over HTTP",
}

#: Classes of other kinds of APIs, with what they belong to; and methods of other kinds.
FOREIGN_CLASSES: Mapping[str, str] = {
    "Task": "a Task belongs to `kind: TaskAPI`, which is not available in this version",
}
FOREIGN_METHODS: Mapping[str, str] = {"handle_batch": "BatchAPI", "handle_async": "AsyncAPI"}

#: The hook that makes a model of the files at a path.
LOAD_MODEL = "load_model"

_REQUEST = ("payload", "query_params", "headers")
_CLIENTS_OF_TYPES = {
    "tensorflow_client": "it belongs to `type: tensorflow` with `models:`",
    "onnx_client": "it belongs to `type: onnx` with `models:`",
}
_NO_MODELS = (
    "cortex.yaml names no models; add `multi_model_reloading:` with `path`, `paths` or `dir`, or remove the argument"
)
_WITH_LOAD_MODEL = {LOAD_MODEL: Signature(required=("model_path",))}

_FUNCTIONS = Generation(
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
)

_PREDICTOR = Generation(
    key="predictor",
    class_name="PythonPredictor",
    constructor="__init__",
    constructor_signature=Signature(
        required=("config",),
        optional=("api_spec", "job_spec"),
        refused={**UNAVAILABLE_ARGUMENTS, **_CLIENTS_OF_TYPES, "python_client": _NO_MODELS},
    ),
    constructor_required=True,
    methods={"predict": "POST"},
    method_signature=Signature(optional=(*_REQUEST, "batch_id")),
    yaml_form="`kind: RealtimeAPI` with `predictor:`",
    summary="make a prediction by sending a post request to this endpoint",
    hooks={"post_predict": Signature(optional=("response", *_REQUEST))},
    after_hook="post_predict",
)
_PREDICTOR_WITH_MODELS = replace(
    _PREDICTOR,
    client="python_client",
    constructor_signature=Signature(
        required=("config", "python_client"),
        optional=("api_spec", "job_spec"),
        refused={**UNAVAILABLE_ARGUMENTS, **_CLIENTS_OF_TYPES},
    ),
    hooks={**_PREDICTOR.hooks, **_WITH_LOAD_MODEL},
    required_hooks=frozenset(_WITH_LOAD_MODEL),
)
_TENSORFLOW_PREDICTOR = replace(
    _PREDICTOR,
    class_name="TensorFlowPredictor",
    type="tensorflow",
    client="tensorflow_client",
    constructor_signature=Signature(
        required=("tensorflow_client", "config"), optional=("api_spec", "job_spec"), refused=UNAVAILABLE_ARGUMENTS
    ),
)
_ONNX_PREDICTOR = replace(
    _PREDICTOR,
    class_name="ONNXPredictor",
    type="onnx",
    client="onnx_client",
    constructor_signature=Signature(
        required=("onnx_client", "config"), optional=("api_spec", "job_spec"), refused=UNAVAILABLE_ARGUMENTS
    ),
)

_HANDLER = Generation(
    key="handler",
    class_name="Handler",
    constructor="__init__",
    constructor_signature=Signature(
        required=("config",), refused={**UNAVAILABLE_ARGUMENTS, **_CLIENTS_OF_TYPES, "model_client": _NO_MODELS}
    ),
    constructor_required=True,
    methods={f"handle_{verb}": verb.upper() for verb in ("post", "get", "put", "patch", "delete")},
    method_signature=Signature(optional=_REQUEST),
    yaml_form="`kind: RealtimeAPI` with `handler:`",
    summary="send a request to this endpoint",
    returns_callback=True,
)
_HANDLER_WITH_MODELS = replace(
    _HANDLER,
    client="model_client",
    constructor_signature=Signature(
        required=("config", "model_client"), refused={**UNAVAILABLE_ARGUMENTS, **_CLIENTS_OF_TYPES}
    ),
    hooks=_WITH_LOAD_MODEL,
    required_hooks=frozenset(_WITH_LOAD_MODEL),
)
_TENSORFLOW_HANDLER = replace(
    _HANDLER,
    type="tensorflow",
    client="tensorflow_client",
    constructor_signature=Signature(required=("tensorflow_client", "config"), refused=UNAVAILABLE_ARGUMENTS),
)
#: The original had no ONNX type left when handlers came; here both are served alike.
_ONNX_HANDLER = replace(
    _HANDLER,
    type="onnx",
    client="onnx_client",
    constructor_signature=Signature(required=("onnx_client", "config"), refused=UNAVAILABLE_ARGUMENTS),
)

#: By interface, type and whether models are configured. Rows that don't care about the last stand twice.
GENERATIONS: Mapping[tuple[str, str, bool], Generation] = {
    ("functions", "python", False): _FUNCTIONS,
    ("functions", "python", True): _FUNCTIONS,
    ("predictor", "python", False): _PREDICTOR,
    ("predictor", "python", True): _PREDICTOR_WITH_MODELS,
    ("predictor", "tensorflow", False): _TENSORFLOW_PREDICTOR,
    ("predictor", "tensorflow", True): _TENSORFLOW_PREDICTOR,
    ("predictor", "onnx", False): _ONNX_PREDICTOR,
    ("predictor", "onnx", True): _ONNX_PREDICTOR,
    ("handler", "python", False): _HANDLER,
    ("handler", "python", True): _HANDLER_WITH_MODELS,
    ("handler", "tensorflow", False): _TENSORFLOW_HANDLER,
    ("handler", "tensorflow", True): _TENSORFLOW_HANDLER,
    ("handler", "onnx", False): _ONNX_HANDLER,
    ("handler", "onnx", True): _ONNX_HANDLER,
}
