"""The table of interface generations: the members that a user's file must and may define. Data only.

The table has one row per kind of API, generation, `type:` of the predictor, and presence of models in `cortex.yaml`.
Loaders, source checks and replicas read their row; no other module distinguishes generations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from cortex.lifecycle import ApiKind


@dataclass(frozen=True)
class Signature:
    """The arguments that a function of the user may declare, without `self`."""

    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    positional: bool = False  #: exactly `required`, in this order; otherwise passed by name, in any order
    refused: Mapping[str, str] = field(default_factory=dict)  #: known names that are not available here → the fix
    fills_defaults: bool = False  #: arguments with a default are filled from the query string

    @property
    def allowed(self) -> tuple[str, ...]:
        """Return all names that may be declared, the required ones first."""
        return self.required + self.optional


@dataclass(frozen=True)
class Generation:
    """One generation of the interface."""

    key: str
    class_name: str | None  #: None for functions at module level
    constructor: str
    constructor_signature: Signature
    constructor_required: bool
    methods: Mapping[str, str]  #: name of the serving method → HTTP verb, or what a kind without requests has instead
    method_signature: Signature
    yaml_form: str  #: the sections of cortex.yaml that select this generation, for error messages
    summary: str  #: the message of a response to GET
    fallback: str | None = None  #: the method that serves if the class defines none of `methods`
    kind: str = ApiKind.REALTIME
    type: str = "python"
    client: str | None = None  #: the constructor argument for the model client
    hooks: Mapping[str, Signature] = field(default_factory=dict)  #: optional methods that Cortex calls
    required_hooks: frozenset[str] = frozenset()
    after_hook: str | None = None  #: the hook that runs after each response
    inference_method: str | None = None  #: the hook that answers the Open Inference Protocol; it may be the only method
    returns_callback: bool = False  #: for `(result, callback)`, respond with `result`, then run `callback()`
    json_only: bool = False  #: the payload is JSON or None; str results are JSON strings
    json_over_forms: bool = False  #: a form whose body is JSON is a forgotten content type: the payload is the JSON
    logs_on_demand: bool = False  #: `?debug=true` logs the payload and the result
    is_typed: bool = False  #: payloads are validated against their annotations, which older generations ignore
    takes_routes: bool = False  #: methods may answer requests at paths below the endpoint, see `routes`
    is_grpc: bool = False  #: `methods` answer the rpcs of a service, and all of them are required
    has_application: bool = False  #: an ASGI or WSGI application answers, the attribute or method `app`; no `methods`

    def select_serving(self, is_defined: Callable[[str], bool]) -> dict[str, str]:
        """Return the serving methods that a class or module defines, with the verb of each."""
        found = {name: verb for name, verb in self.methods.items() if is_defined(name)}
        if not found and self.fallback is not None and is_defined(self.fallback):
            return {self.fallback: next(iter(self.methods.values()))}
        return found

    def is_inference_only(self, is_defined: Callable[[str], bool]) -> bool:
        """Return whether a class without serving methods answers the Open Inference Protocol."""
        return self.inference_method is not None and is_defined(self.inference_method)


#: Pseudo-verbs of methods that process batches, workloads and tasks instead of HTTP requests.
BATCH = "BATCH"
ASYNC = "ASYNC"
TASK = "TASK"

#: The module that protoc generates from the `.proto` file of a gRPC API. The original's code has the first name, its
#: documents have the second.
PROTO_MODULES = ("proto_module_pb2", "module_proto_pb2")
#: Arguments of gRPC APIs.
_OF_GRPC = dict.fromkeys(PROTO_MODULES, "it belongs to an API with `protobuf_path:`; remove the argument")
_CONTEXT = {"context": "it belongs to an API with `protobuf_path:`; give it a default, or remove it"}
_NO_REQUEST_IN_GRPC = {
    "query_params": "a message has none; remove the argument",
    "headers": "read the metadata of the call from `context.invocation_metadata()`",
}

#: The hook that loads a model from the files at a path.
LOAD_MODEL = "load_model"
#: The hook that answers requests of the Open Inference Protocol.
HANDLE_V2 = "handle_v2"
#: The hook that runs in each process that serves, after the class was constructed in it or in its fork server.
AFTER_FORK = "after_fork"
#: The hook that returns what the requests of one batch have in common.
BATCH_KEY = "batch_key"
#: The hook that runs once, after the last batch of a job.
ON_JOB_COMPLETE = "on_job_complete"

_REQUEST = ("payload", "query_params", "headers")
_CLIENTS_OF_TYPES = {
    "tensorflow_client": "it belongs to `type: tensorflow` with `models:`",
    "onnx_client": "it belongs to `type: onnx` with `models:`",
}
_NO_MODELS = (
    "cortex.yaml configures no models; add `multi_model_reloading:` with `path`, `paths` or `dir`, "
    "or remove the argument"
)
_NO_CLIENT = "APIs of this kind have no model client for Python; load the model in __init__, and remove the argument"
_OF_JOBS = dict.fromkeys(("job_spec", "batch_id"), "it belongs to `kind: BatchAPI`; remove the argument")
_OF_ASYNC = {"request_id": "it belongs to `kind: AsyncAPI`; give it a default, or remove it"}
_OF_REQUESTS = ("query_params", "headers")
_NO_REQUEST_IN_JOBS = dict.fromkeys(_OF_REQUESTS, "a batch is not an HTTP request; remove the argument")
_NO_REQUEST_IN_WORKLOADS = dict.fromkeys(
    _OF_REQUESTS, "a workload stores only the body of its request; remove the argument"
)
_METRICS = ("metrics_client",)
_OPTIONAL = ("api_spec", "job_spec", *_METRICS)
_WITH_BATCH_KEY = {BATCH_KEY: Signature(required=("payload",))}
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

#: Optional functions around a model, which cortex calls itself.
PRE_INFERENCE, POST_INFERENCE = "pre_inference", "post_inference"


def _request_handler(key: str, type_: str, yaml_form: str, *others: str) -> Generation:
    """Return the row of a request handler: two functions, each of a sample or prediction and `others`."""
    return Generation(
        key=key,
        class_name=None,
        constructor="",
        constructor_signature=Signature(),
        constructor_required=False,
        methods={},
        method_signature=Signature(),
        yaml_form=yaml_form,
        summary="make a prediction by sending a post request to this endpoint with a json sample",
        type=type_,
        hooks={
            PRE_INFERENCE: Signature(required=("sample", *others), positional=True),
            POST_INFERENCE: Signature(required=("prediction", *others), positional=True),
        },
        json_only=True,
        logs_on_demand=True,
    )


_REQUEST_HANDLERS = [
    _request_handler("request_handler", type_, f"`kind: api` with `{type_}:`", "signature", "metadata")
    for type_ in ("tensorflow", "onnx")
]
#: 0.8 and 0.9: the argument called `metadata` is the signature of the model.
_OLDER_REQUEST_HANDLERS = [
    _request_handler("older_request_handler", type_, "`kind: api` with `model:`", "metadata")
    for type_ in ("tensorflow", "onnx")
]

_PREDICTOR = Generation(
    key="predictor",
    class_name="PythonPredictor",
    constructor="__init__",
    constructor_signature=Signature(
        required=("config",),
        optional=_OPTIONAL,
        refused={**_OF_GRPC, **_CLIENTS_OF_TYPES, "python_client": _NO_MODELS},
    ),
    constructor_required=True,
    methods={"predict": "POST"},
    method_signature=Signature(optional=(*_REQUEST, "batch_id"), refused={**_OF_ASYNC, **_CONTEXT}),
    yaml_form="`kind: RealtimeAPI` with `predictor:`",
    summary="make a prediction by sending a post request to this endpoint",
    hooks={"post_predict": Signature(optional=("response", *_REQUEST)), **_WITH_BATCH_KEY},
    after_hook="post_predict",
    logs_on_demand=True,
    takes_routes=True,
)
_PREDICTOR_WITH_MODELS = replace(
    _PREDICTOR,
    client="python_client",
    constructor_signature=Signature(
        required=("config", "python_client"),
        optional=_OPTIONAL,
        refused={**_OF_GRPC, **_CLIENTS_OF_TYPES},
    ),
    hooks={**_PREDICTOR.hooks, **_WITH_LOAD_MODEL},
    required_hooks=frozenset(_WITH_LOAD_MODEL),
)
_TENSORFLOW_PREDICTOR = replace(
    _PREDICTOR,
    class_name="TensorFlowPredictor",
    type="tensorflow",
    client="tensorflow_client",
    constructor_signature=Signature(required=("tensorflow_client", "config"), optional=_OPTIONAL, refused=_OF_GRPC),
)
_ONNX_PREDICTOR = replace(
    _PREDICTOR,
    class_name="ONNXPredictor",
    type="onnx",
    client="onnx_client",
    constructor_signature=Signature(required=("onnx_client", "config"), optional=_OPTIONAL, refused=_OF_GRPC),
)

_HANDLER = Generation(
    key="handler",
    class_name="Handler",
    constructor="__init__",
    constructor_signature=Signature(
        required=("config",),
        optional=_METRICS,
        refused={**_OF_GRPC, **_CLIENTS_OF_TYPES, **_OF_JOBS, "model_client": _NO_MODELS},
    ),
    constructor_required=True,
    methods={f"handle_{verb}": verb.upper() for verb in ("post", "get", "put", "patch", "delete")},
    method_signature=Signature(optional=_REQUEST, refused={**_OF_JOBS, **_OF_ASYNC, **_CONTEXT}),
    yaml_form="`kind: RealtimeAPI` with `handler:`",
    summary="send a request to this endpoint",
    hooks={
        HANDLE_V2: Signature(required=("inputs",), optional=("parameters",)),
        AFTER_FORK: Signature(),
        **_WITH_BATCH_KEY,
    },
    inference_method=HANDLE_V2,
    returns_callback=True,
    json_over_forms=True,
    is_typed=True,
    takes_routes=True,
)
_HANDLER_WITH_MODELS = replace(
    _HANDLER,
    client="model_client",
    constructor_signature=Signature(
        required=("config", "model_client"),
        optional=_METRICS,
        refused={**_OF_GRPC, **_CLIENTS_OF_TYPES, **_OF_JOBS},
    ),
    hooks={**_HANDLER.hooks, **_WITH_LOAD_MODEL},
    required_hooks=frozenset(_WITH_LOAD_MODEL),
)
_TENSORFLOW_HANDLER = replace(
    _HANDLER,
    type="tensorflow",
    client="tensorflow_client",
    constructor_signature=Signature(
        required=("tensorflow_client", "config"), optional=_METRICS, refused={**_OF_GRPC, **_OF_JOBS}
    ),
)
#: The original dropped the ONNX type before it introduced handlers; here ONNX handlers work like ONNX predictors.
_ONNX_HANDLER = replace(
    _HANDLER,
    type="onnx",
    client="onnx_client",
    constructor_signature=Signature(
        required=("onnx_client", "config"), optional=_METRICS, refused={**_OF_GRPC, **_OF_JOBS}
    ),
)
#: Models of formats that are detected; they are served without code only.
_MODEL_HANDLER = replace(_HANDLER, type="model")

_ASGI_HANDLER = replace(
    _HANDLER,
    type="asgi",
    methods={},
    method_signature=Signature(),
    summary="an application answers below this endpoint",
    returns_callback=False,
    json_over_forms=False,
    is_typed=False,
    takes_routes=False,
    has_application=True,
)
_WSGI_HANDLER = replace(_ASGI_HANDLER, type="wsgi")

_TASK = Generation(
    key="handler",
    class_name="Task",
    constructor="__init__",
    constructor_signature=Signature(
        optional=_METRICS,
        refused={**_OF_GRPC, "config": "it is passed to __call__", "job_spec": _OF_JOBS["job_spec"]},
    ),
    constructor_required=False,
    methods={"__call__": TASK},
    method_signature=Signature(required=("config",)),
    yaml_form="`kind: TaskAPI` with `definition:`",
    summary="submit a job by sending a post request to this endpoint",
    kind=ApiKind.TASK,
)


def for_grpc(row: Generation, rpcs: Iterable[str]) -> Generation:
    """Derive the row of a gRPC API with these rpcs, each of which one method answers."""
    constructor = row.constructor_signature
    refused = {name: fix for name, fix in constructor.refused.items() if name not in PROTO_MODULES}
    is_predictor = row.key == "predictor"
    return replace(
        row,
        constructor_signature=replace(constructor, optional=(*constructor.optional, *PROTO_MODULES), refused=refused),
        methods={"predict" if is_predictor else rpc: rpc for rpc in rpcs},
        method_signature=Signature(
            optional=("payload", "context"), refused={**_NO_REQUEST_IN_GRPC, **_OF_JOBS, **_OF_ASYNC}
        ),
        summary="call the methods of the service over gRPC",
        hooks={name: hook for name, hook in row.hooks.items() if name in (*row.required_hooks, AFTER_FORK)},
        after_hook=None,
        inference_method=None,
        returns_callback=False,
        logs_on_demand=False,
        is_typed=False,
        takes_routes=False,
        is_grpc=True,
    )


def _for_kind(row: Generation, kind: ApiKind, verb: str) -> Generation:
    """Derive the row of a kind without HTTP requests from one for requests: no responses, so no `post_predict`."""
    signature = row.constructor_signature
    no_clients = dict.fromkeys(signature.refused.keys() & {"python_client", "model_client"}, _NO_CLIENT)
    of_requests = (row.after_hook, row.inference_method, AFTER_FORK, BATCH_KEY)
    hooks = {name: hook for name, hook in row.hooks.items() if name not in of_requests}
    return replace(
        row,
        kind=kind,
        constructor_signature=replace(signature, refused={**signature.refused, **no_clients}),
        methods={"predict": verb},
        yaml_form=row.yaml_form.replace(ApiKind.REALTIME, kind),
        hooks=hooks,
        after_hook=None,
        inference_method=None,
        returns_callback=False,
        logs_on_demand=False,
        takes_routes=False,
    )


def _for_jobs(row: Generation) -> Generation:
    row = _for_kind(row, ApiKind.BATCH, BATCH)
    signature = row.constructor_signature
    refused = {name: fix for name, fix in signature.refused.items() if name not in _OF_JOBS}
    return replace(
        row,
        constructor_signature=replace(signature, optional=_OPTIONAL, refused=refused),
        summary="submit a job by sending a post request to this endpoint",
        hooks={**row.hooks, ON_JOB_COMPLETE: Signature()},
    )


def _handler_for_jobs(row: Generation) -> Generation:
    refused = {**_NO_REQUEST_IN_JOBS, **_OF_ASYNC}
    signature = Signature(optional=("payload", "batch_id"), refused=refused)
    return replace(_for_jobs(row), methods={"handle_batch": BATCH}, fallback="handle_post", method_signature=signature)


def _for_async(row: Generation) -> Generation:
    signature = Signature(optional=(*_REQUEST, "request_id"), refused={"batch_id": _OF_JOBS["batch_id"]})
    return replace(
        _for_kind(row, ApiKind.ASYNC, ASYNC),
        method_signature=signature,
        summary="submit a workload by sending a post request to this endpoint",
    )


def _handler_for_async(row: Generation) -> Generation:
    refused = {**_NO_REQUEST_IN_WORKLOADS, "batch_id": _OF_JOBS["batch_id"]}
    signature = Signature(optional=("payload", "request_id"), refused=refused)
    return replace(_for_async(row), methods={"handle_async": ASYNC}, fallback="handle_post", method_signature=signature)


_REALTIME = {
    ("functions", "python", False): _FUNCTIONS,
    ("functions", "python", True): _FUNCTIONS,
    **{
        (row.key, row.type, has_models): row
        for row in (*_REQUEST_HANDLERS, *_OLDER_REQUEST_HANDLERS)
        for has_models in (False, True)
    },
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
    ("handler", "model", False): _MODEL_HANDLER,
    ("handler", "model", True): _MODEL_HANDLER,
    ("handler", "onnx", False): _ONNX_HANDLER,
    ("handler", "onnx", True): _ONNX_HANDLER,
}
#: For jobs and workloads: only predictors have a model client for Python, handlers have none.
_WITHOUT_REQUESTS = {**_REALTIME, ("handler", "python", True): _HANDLER}
_PREDICTORS = {key: row for key, row in _WITHOUT_REQUESTS.items() if key[0] == "predictor"}
_HANDLERS = {key: row for key, row in _WITHOUT_REQUESTS.items() if key[0] == "handler"}

#: By kind, interface, type, and presence of models. Rows that are independent of the last occur twice.
GENERATIONS: Mapping[tuple[str, str, str, bool], Generation] = {
    **{(ApiKind.REALTIME, *key): row for key, row in _REALTIME.items()},
    (ApiKind.REALTIME, "handler", "asgi", False): _ASGI_HANDLER,
    (ApiKind.REALTIME, "handler", "wsgi", False): _WSGI_HANDLER,
    **{(ApiKind.BATCH, *key): _for_jobs(row) for key, row in _PREDICTORS.items()},
    **{(ApiKind.BATCH, *key): _handler_for_jobs(row) for key, row in _HANDLERS.items()},
    **{(ApiKind.ASYNC, *key): _for_async(row) for key, row in _PREDICTORS.items()},
    **{(ApiKind.ASYNC, *key): _handler_for_async(row) for key, row in _HANDLERS.items()},
    (ApiKind.TASK, "handler", "python", False): _TASK,
}
