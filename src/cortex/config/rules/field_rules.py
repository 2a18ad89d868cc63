"""Rules between the fields of one API. Pure: no rule reads a file.

Each rule examines a validated `Api` and yields violations by field of the current form; `violations.py` locates the
field in the user's file.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

from cortex.config.rules.violations import Violation
from cortex.config.schema import (
    ANY_MODEL,
    APPLICATION_TYPES,
    COMMAND,
    LOCAL_SERVING,
    MAX_CORES,
    MAX_NAME_LENGTH,
    MIN_CORES,
    MIN_MEMORY_BYTES,
    PYTHON,
    REQUEST_HANDLERS,
    START_S,
    STORES,
    WEBSOCKET_IDLE_S,
    Api,
    ModelsConfig,
)
from cortex.config.values import fraction, quote
from cortex.lifecycle import ApiKind

_MODELS = "handler.models"
_FORMS = ("path", "paths", "dir")
_BATCHING = "handler.server_side_batching"
_DISAGREEMENT = "update_strategy.canary.max_disagreement"


def field_violations(api: Api) -> Iterator[Violation]:
    """Check the fields of one API against each other and against the limits of its generation."""
    yield from _kind_violations(api)
    yield from _replica_violations(api)
    yield from _concurrency_violations(api)
    yield from _compute_violations(api)
    yield from _model_violations(api)
    yield from _batching_violations(api)
    yield from _application_violations(api)
    yield from _command_violations(api)
    yield from _grpc_violations(api)
    yield from _preload_violations(api)
    yield from _splitter_violations(api)
    yield from _schedule_violations(api)
    if api.networking.on_disconnect == "kill" and api.handler.server_side_batching is not None:
        message = "kill cannot be used with server_side_batching: a call serves several clients"
        yield Violation(("networking.on_disconnect", _BATCHING), message, 'write "cancel" or "finish"')
    if api.networking.record is not None and api.is_grpc:
        message = "record cannot be used with protobuf_path: calls over gRPC are not recorded"
        yield Violation(("networking.record", "handler.protobuf_path"), message, "remove it")
    cors = api.networking.cors
    if cors is not None and cors.credentials and "*" in cors.origins:
        message = 'with credentials, origins cannot be "*": browsers reject such responses'
        yield Violation(("networking.cors.origins",), message, 'list each origin, such as "https://example.com"')
    strategy = api.update_strategy
    if {strategy.max_surge.rstrip("%"), strategy.max_unavailable.rstrip("%")} == {"0"}:
        fields = ("update_strategy.max_unavailable", "update_strategy.max_surge")
        yield Violation(fields, "max_surge and max_unavailable cannot both be 0", "raise one of them")
    yield from _canary_violations(api)
    if api.deployment is None and len(api.name) > MAX_NAME_LENGTH:
        yield Violation(
            ("name",), f"cannot be longer than {MAX_NAME_LENGTH} characters (got {len(api.name)})", "shorten it"
        )
    if api.handler.interface == "handler" and api.name.startswith("b-"):
        yield Violation(("name",), f'{quote(api.name)} cannot start with "b-"', "rename the API")


def _kind_violations(api: Api) -> Iterator[Violation]:
    if api.kind is ApiKind.ASYNC:
        fix = 'remove it: "autoscaling" sets how many workloads run concurrently'
    elif api.kind.runs_jobs:
        fix = 'remove it: a submission sets the number of "workers" of its job'
    else:
        return
    for key in ("processes_per_replica", "threads_per_process"):
        if getattr(api.handler, key) > 1:
            message = f"{key} key is not supported for {api.kind} kind"
            yield Violation((f"handler.{key}",), message, fix)


def _disagreement(api: Api) -> str | None:
    canary = api.update_strategy.canary
    return canary.max_disagreement if canary is not None else None


def _canary_violations(api: Api) -> Iterator[Violation]:
    canary = api.update_strategy.canary
    if canary is None:
        return
    if api.kind is not ApiKind.REALTIME:
        message = f"canary key is not supported for {api.kind} kind"
        yield Violation(("update_strategy.canary",), message, "remove it: jobs keep the revision that they began with")
    if any(fraction(step) >= fraction(after) for step, after in pairwise(canary.steps)):
        yield Violation(("update_strategy.canary.steps",), "the steps must grow", "write them in order: [1%, 10%, 50%]")
    if api.networking.sticky:
        message = "canary cannot be used with sticky: a client would change between the old and the new revision"
        yield Violation(("update_strategy.canary", "networking.sticky"), message, "remove one of them")
    if canary.max_prediction_shift is not None and (api.tracker is None or api.tracker.model_type != "classification"):
        message = "max_prediction_shift needs a tracker of classes"
        fix = 'add "tracker: {model_type: classification}", or remove it'
        yield Violation(("update_strategy.canary.max_prediction_shift",), message, fix)
    if canary.shadow and api.is_grpc:
        message = "gRPC calls can't be copied to a shadow"
        yield Violation(("update_strategy.canary.shadow",), message, "remove it: the steps work with gRPC")
    if canary.max_disagreement is not None and not canary.shadow:
        message, fix = "max_disagreement needs shadow", 'add "shadow: true" to canary, or remove it'
        yield Violation((_DISAGREEMENT,), message, fix)


def _replica_violations(api: Api) -> Iterator[Violation]:
    low, high, first = api.autoscaling.min_replicas, api.autoscaling.max_replicas, api.autoscaling.init_replicas
    minimum, maximum, initial = "autoscaling.min_replicas", "autoscaling.max_replicas", "autoscaling.init_replicas"
    if low > high:
        message = f"min_replicas cannot be greater than max_replicas ({low} > {high})"
        yield Violation((minimum, maximum), message, f"set max_replicas to at least {low}")
    elif first > high:
        message = f"init_replicas cannot be greater than max_replicas ({first} > {high})"
        yield Violation((initial, maximum, minimum), message, f"set init_replicas to at most {high}")
    elif first < low:
        message = f"init_replicas cannot be less than min_replicas ({first} < {low})"
        yield Violation((initial, minimum), message, f"set init_replicas to at least {low}")
    target = api.autoscaling.target_cpu_utilization
    # Later generations measured utilization relative to the CPU request, so values above 100 % were valid.
    if target is not None and target > 100 and api.handler.interface == "functions":
        yield Violation(
            ("autoscaling.target_cpu_utilization",),
            f"must be less than or equal to 100 (got {target})",
            "write 100 or less",
        )


def _concurrency_violations(api: Api) -> Iterator[Violation]:
    target, most = api.target_concurrency, api.autoscaling.max_replica_concurrency
    if target > most:
        message = f"target_replica_concurrency cannot be greater than max_replica_concurrency ({target:g} > {most})"
        fields = ("autoscaling.target_replica_concurrency", "autoscaling.max_replica_concurrency")
        others = ("handler.processes_per_replica", "handler.threads_per_process", f"{_BATCHING}.max_batch_size")
        yield Violation((*fields, *others), message, f"set max_replica_concurrency to at least {target:g}")


def _compute_violations(api: Api) -> Iterator[Violation]:
    compute = api.compute
    if compute.cpu is not None and compute.cpu > MAX_CORES:
        message = f"must be less than or equal to {MAX_CORES} (got {{got}})"
        yield Violation(("compute.cpu",), message, 'write something like "500m" or 2')
    if api.deployment is None:
        if compute.cpu is not None and compute.cpu < MIN_CORES:
            yield Violation(
                ("compute.cpu",), "must be greater than or equal to 20m (got {got})", 'write something like "200m" or 1'
            )
        for name, size in (("mem", compute.mem), ("mem_limit", compute.mem_limit)):
            if size is not None and size < MIN_MEMORY_BYTES:
                fix = 'write something like "512Mi" or "2Gi"'
                yield Violation((f"compute.{name}",), "must be greater than or equal to 20Mi (got {got})", fix)
    if compute.mem is not None and compute.mem_limit is not None and compute.mem_limit < compute.mem:
        yield Violation(("compute.mem_limit", "compute.mem"), "mem_limit cannot be less than mem", "raise mem_limit")
    if compute.inf and api.handler.type == "onnx":
        yield Violation(("compute.inf", "handler.type"), "inf cannot be used with type onnx", "remove inf")
    if compute.inf and compute.gpu:
        yield Violation(("compute.inf", "compute.gpu"), "inf and gpu cannot be used together", "remove one of them")
    processes = api.handler.processes_per_replica
    if compute.inf and (compute.inf * 4) % processes:
        message = f"{processes} processes cannot share {compute.inf * 4} NeuronCores evenly"
        yield Violation(("handler.processes_per_replica", "compute.inf"), message, "use 1, 2 or 4")


def _model_violations(api: Api) -> Iterator[Violation]:
    """Check the fields of models; `project_rules.py` checks that local models exist."""
    handler = api.handler
    if handler.models is not None:
        yield from _form_violations(handler.models)
        if handler.models.trust is not None and handler.type != ANY_MODEL:
            message = f"cannot be used with type {handler.type}, only with {ANY_MODEL}"
            yield Violation((f"{_MODELS}.trust", "handler.type"), message, "remove it")
        yield from _cache_violations(api, handler.models)
        if handler.models.canary:
            yield from _model_canary_violations(api, handler.models)
        if handler.path is None and api.kind is not ApiKind.REALTIME and handler.models.path is None:
            fields = tuple(f"{_MODELS}.{form}" for form in ("paths", "dir"))
            message = f"without code, {api.kind} has one model: jobs and workloads cannot choose another"
            yield Violation(fields, message, 'write "path" with the model, or write a class')
    elif handler.interface in REQUEST_HANDLERS:
        yield Violation((f"{_MODELS}.path",), "must be defined", 'write "model: s3://bucket/path"')
    elif handler.type not in (PYTHON, COMMAND, *APPLICATION_TYPES):
        message = f"must be defined with type {handler.type}"
        yield Violation((_MODELS,), message, 'write "models:" with "path: s3://bucket/path"')
    if handler.type == ANY_MODEL and handler.interface != "handler":
        yield Violation(("handler.type",), f'"{ANY_MODEL}" belongs to "handler:"', 'rename the section to "handler"')
    if handler.type == ANY_MODEL and handler.path is not None:
        fix = f'remove it, or write "type: {PYTHON}" and load the model in the class'
        yield Violation(("handler.path", "handler.type"), f"cannot be used with type {ANY_MODEL}", fix)
    if handler.path is None and handler.tensorflow_serving not in (None, LOCAL_SERVING):
        message = "must be local without code: an external server answers requests itself"
        fix = f'write "{LOCAL_SERVING}", or remove the key'
        yield Violation(("handler.tensorflow_serving",), message, fix)
    if handler.type == PYTHON and handler.interface in REQUEST_HANDLERS:
        yield Violation(("handler.type",), 'must be "tensorflow" or "onnx"', "write one of them")
    elif handler.type != "tensorflow":
        for field in _tensorflow_fields(api):
            message = f"cannot be used with type {handler.type}, only with tensorflow"
            yield Violation((field, "handler.type"), message, "remove it")


def _form_violations(models: ModelsConfig) -> Iterator[Violation]:
    given = [f"{_MODELS}.{form}" for form in _FORMS if getattr(models, form) is not None]
    every = tuple(f"{_MODELS}.{form}" for form in _FORMS)
    if not given:
        message = "must have one of path, paths and dir"
        yield Violation((_MODELS, *every), message, 'write "path: s3://bucket/path" in it')
    elif len(given) > 1:
        # Report the later ones: the first is most likely intended.
        for field in given[1:]:
            yield Violation((field, given[0]), f"cannot be used together with {{{given[0]}}}", "remove one of them")
    names = Counter(entry.name for entry in models.paths or ())
    seen: set[str] = set()
    for index, entry in enumerate(models.paths or ()):
        if names[entry.name] > 1 and entry.name in seen:
            field = f"{_MODELS}.paths.{index}.name"
            yield Violation((field,), f"{quote(entry.name)} is the name of another model", "rename one")
        seen.add(entry.name)


def _cache_violations(api: Api, models: ModelsConfig) -> Iterator[Violation]:
    size, on_disk, memory = (f"{_MODELS}.{key}" for key in ("cache_size", "disk_cache_size", "cache_memory"))
    if models.cache_size is not None and models.disk_cache_size is None:
        fix = f'add "disk_cache_size: {models.cache_size}" or more'
        yield Violation((size, on_disk), "requires disk_cache_size", fix)
    elif models.cache_size is None and models.disk_cache_size is not None:
        fix = f'add "cache_size: {models.disk_cache_size}" or less'
        yield Violation((on_disk, size), "requires cache_size", fix)
    elif (models.cache_size or 0) > (models.disk_cache_size or 0):
        message = f"cache_size cannot be greater than disk_cache_size ({models.cache_size} > {models.disk_cache_size})"
        yield Violation((size, on_disk), message, f"set disk_cache_size to at least {models.cache_size}")
    limit = api.compute.mem_limit
    if models.cache_memory is not None and limit is not None and models.cache_memory >= limit:
        fields = (memory, "compute.mem_limit")
        yield Violation(fields, "cache_memory must be less than mem_limit", "lower cache_memory, or raise mem_limit")
    if not models.is_cached:
        return
    caches = (size, memory) if models.cache_size is not None else (memory,)
    if api.handler.processes_per_replica > 1:
        message = f"must be 1 when models are cached (got {api.handler.processes_per_replica})"
        fix = 'remove it; "threads_per_process" and the number of replicas may be larger'
        yield Violation(("handler.processes_per_replica", *caches), message, fix)
    if api.handler.tensorflow_serving not in (None, LOCAL_SERVING):
        message = "must be local when models are cached: an external server manages its own models"
        fix = f'write "{LOCAL_SERVING}", or remove the limits on models'
        yield Violation(("handler.tensorflow_serving", *caches), message, fix)


def _model_canary_violations(api: Api, models: ModelsConfig) -> Iterator[Violation]:
    canary = f"{_MODELS}.canary"
    if api.kind is not ApiKind.REALTIME:
        yield Violation((canary,), f"canary key is not supported for {api.kind} kind", "remove it")
        return
    if api.update_strategy.canary is None:
        fix = 'add "canary: {}" to "update_strategy"'
        yield Violation((canary,), "requires update_strategy.canary, whose steps and limits it uses", fix)
    if models.dir is not None:
        message = "cannot be used with dir, whose models come and go"
        yield Violation((canary, f"{_MODELS}.dir"), message, 'name the models in "paths", or remove it')
    if models.is_cached:
        size = f"{_MODELS}.cache_size" if models.cache_size is not None else f"{_MODELS}.cache_memory"
        message = "cannot be used when models are cached: their old versions do not stay on the disk"
        yield Violation((canary, size), message, "remove one of them")
    locations = {f"{_MODELS}.path": models.path}
    locations |= {f"{_MODELS}.paths.{index}.path": entry.path for index, entry in enumerate(models.paths or ())}
    for field, location in locations.items():
        if location is not None and not location.startswith(("/", *STORES)):
            message = "models of the project change only with a deploy, which update_strategy.canary tries"
            yield Violation((canary, field), message, "remove it")
            return
    if api.handler.tensorflow_serving not in (None, LOCAL_SERVING):
        message = "cannot be used with an external TensorFlow Serving, which loads its models itself"
        yield Violation((canary, "handler.tensorflow_serving"), message, "remove it")


def _tensorflow_fields(api: Api) -> Iterator[str]:
    handler = api.handler
    if handler.signature_key is not None:
        yield "handler.signature_key"
    if handler.tensorflow_serving is not None:
        yield "handler.tensorflow_serving"
    if handler.models is None:
        return
    if handler.models.signature_key is not None:
        yield f"{_MODELS}.signature_key"
    for index, entry in enumerate(handler.models.paths or ()):
        if entry.signature_key is not None:
            yield f"{_MODELS}.paths.{index}.signature_key"


def _batching_violations(api: Api) -> Iterator[Violation]:
    """Check that the handler supports batches of requests."""
    handler = api.handler
    if (batching := handler.server_side_batching) is None:
        return
    if handler.path is None:
        return
    if handler.type == "onnx":
        message = "cannot be used with type onnx"
        fix = "remove it, or run the session from Python code"
        yield Violation((_BATCHING, "handler.type"), message, fix)
    if handler.type != "tensorflow":
        return
    # With TensorFlow each request keeps its own call; runs of the model are joined across calls, one per thread.
    calls = handler.processes_per_replica * handler.threads_per_process
    if batching.max_batch_size > calls:
        size = f"{_BATCHING}.max_batch_size"
        message = (
            "max_batch_size cannot be greater than processes_per_replica times threads_per_process "
            f"({batching.max_batch_size} > {calls})"
        )
        threads = math.ceil(batching.max_batch_size / handler.processes_per_replica)
        fields = (size, "handler.threads_per_process", "handler.processes_per_replica")
        yield Violation(fields, message, f"set threads_per_process to at least {threads}")
    if handler.tensorflow_serving not in (None, LOCAL_SERVING):
        message = "cannot be used with an external server, which has its own batching settings"
        yield Violation((_BATCHING, "handler.tensorflow_serving"), message, "remove one of them")


def _application_violations(api: Api) -> Iterator[Violation]:
    """Check the fields that applications do not support, and those that only they have."""
    handler = api.handler
    if handler.type not in ("asgi", COMMAND) and api.networking.websocket_idle_timeout_s != WEBSOCKET_IDLE_S:
        message = f"cannot be used with type {handler.type}, only with asgi and command"
        yield Violation(("networking.websocket_idle_timeout_s", "handler.type"), message, "remove it")
    if not api.is_application:
        if handler.app is not None and handler.type != COMMAND:
            message = f"cannot be used with type {handler.type}, only with asgi and wsgi"
            yield Violation(("handler.app", "handler.type"), message, 'write "type: asgi", or remove it')
        return
    if handler.interface != "handler" or api.kind is not ApiKind.REALTIME:
        message = f"type {handler.type} requires `kind: RealtimeAPI` with `handler:`"
        yield Violation(("handler.type",), message, 'write "kind: RealtimeAPI" and "handler:"')
        return
    if api.networking.on_disconnect == "kill" and handler.type == "asgi":
        message = "cannot be kill with type asgi: its calls share one process"
        yield Violation(("networking.on_disconnect", "handler.type"), message, 'write "cancel" or "finish"')
    in_startup = "remove it, and call the model once when the application starts"
    load = "remove it, and load the model in the class, or when the application starts"
    unsupported = (
        (_BATCHING, handler.server_side_batching, "remove it: the application receives each request by itself"),
        (_MODELS, handler.models, load),
        ("tracker", api.tracker, "remove it: the responses of an application are not inspected"),
        (_DISAGREEMENT, _disagreement(api), "remove it: the responses of an application are not inspected"),
        ("readiness", api.readiness, in_startup),
    )
    for field, value, fix in unsupported:
        if value is not None:
            yield Violation((field, "handler.type"), f"cannot be used with type {handler.type}", fix)
    if handler.type == "asgi" and handler.threads_per_process > 1:
        message = "cannot be used with type asgi: its calls share one event loop"
        fix = 'remove it; "autoscaling.max_replica_concurrency" limits concurrent requests'
        yield Violation(("handler.threads_per_process", "handler.type"), message, fix)


def _command_violations(api: Api) -> Iterator[Violation]:
    """Check the fields that commands do not support, and those that only they have."""
    handler = api.handler
    if handler.type != COMMAND:
        only_commands = (
            ("command", handler.command is not None),
            ("strip_prefix", not handler.strip_prefix),
            ("start_timeout_s", handler.start_timeout_s != START_S),
        )
        for name, is_set in only_commands:
            if is_set:
                message = f"cannot be used with type {handler.type}, only with {COMMAND}"
                yield Violation((f"handler.{name}", "handler.type"), message, f'write "type: {COMMAND}", or remove it')
        if (api.readiness or "").startswith("/"):
            message = f"{quote(api.readiness)} must be relative to the project folder"
            yield Violation(("readiness",), message, "write a path inside the project folder")
        return
    if handler.interface != "handler" or api.kind is not ApiKind.REALTIME:
        message = f"type {COMMAND} requires `kind: RealtimeAPI` with `handler:`"
        yield Violation(("handler.type",), message, 'write "kind: RealtimeAPI" and "handler:"')
        return
    if handler.command is None:
        fix = 'write "command: [vllm, serve, my-model, --uds, $CORTEX_SOCKET]"'
        yield Violation(("handler.command",), f"must be defined with type {COMMAND}", fix)
    if api.readiness is not None and not api.readiness.startswith("/"):
        message = f"{quote(api.readiness)}: with type {COMMAND}, it is the path of a GET request"
        yield Violation(("readiness", "handler.type"), message, 'write a path such as "/health"')
    if api.networking.on_disconnect == "kill":
        message = f"cannot be kill with type {COMMAND}: its requests share one process"
        yield Violation(("networking.on_disconnect", "handler.type"), message, 'write "cancel" or "finish"')
    if "PORT" in handler.env:
        message = f"PORT is set by cortex with type {COMMAND}: each process has a port of its own"
        yield Violation(("handler.env", "handler.type"), message, "remove it, and use $PORT in command")
    no_python = "remove it: cortex does not import code of a command"
    unsupported = (
        ("handler.path", handler.path, "remove it, and write the program in command"),
        ("handler.config", handler.config or None, "remove it, and pass arguments in command, or variables in env"),
        (_BATCHING, handler.server_side_batching, "remove it: the server receives each request by itself"),
        (_MODELS, handler.models, "remove it: the server loads its models itself"),
        ("tracker", api.tracker, "remove it: the responses of a command are not inspected"),
        (_DISAGREEMENT, _disagreement(api), "remove it: the responses of a command are not inspected"),
        ("handler.app", handler.app, no_python),
    )
    for field, value, fix in unsupported:
        if value is not None:
            yield Violation((field, "handler.type"), f"cannot be used with type {COMMAND}", fix)
    if handler.threads_per_process > 1:
        message = f"cannot be used with type {COMMAND}: the server has threads of its own"
        fix = 'remove it; "autoscaling.max_replica_concurrency" limits concurrent requests'
        yield Violation(("handler.threads_per_process", "handler.type"), message, fix)


def _grpc_violations(api: Api) -> Iterator[Violation]:
    """Check the fields that APIs with a `.proto` file do not support."""
    handler = api.handler
    if not api.is_grpc:
        return
    field = "handler.protobuf_path"
    if handler.path is None or handler.type in (*APPLICATION_TYPES, ANY_MODEL):
        message = f"cannot be used with type {handler.type}" + ("" if handler.path else " and without code")
        yield Violation((field, "handler.type"), message, f'write a class, with "type: {PYTHON}" and "path"')
    unsupported = (
        (_BATCHING, handler.server_side_batching, "remove one of them"),
        ("tracker", api.tracker, "remove it: the messages of a service are not inspected"),
        ("networking.cors", api.networking.cors, "remove it: pages of browsers cannot call gRPC"),
    )
    for other, value, fix in unsupported:
        if value is not None:
            yield Violation((other, field), "cannot be used together with protobuf_path", fix)


def _preload_violations(api: Api) -> Iterator[Violation]:
    """Check that there is a class to construct before the fork, and that what it holds can survive one."""
    handler, field = api.handler, "handler.preload"
    if not handler.preload or api.kind is not ApiKind.REALTIME:
        return
    if handler.type == COMMAND:
        message = f"cannot be used with type {COMMAND}: cortex constructs no class that processes could share"
        yield Violation((field, "handler.type"), message, "remove it")
    elif handler.models is not None or handler.type not in (PYTHON, *APPLICATION_TYPES):
        message = "cannot be used with models that cortex loads: each process loads and reloads its own"
        fix = "remove it, or load the model in __init__ of a class"
        yield Violation((field, _MODELS, "handler.type"), message, fix)
    if api.compute.inf:
        message = "cannot be used with inf: the Neuron runtime of a process does not survive a fork"
        yield Violation((field, "compute.inf"), message, "remove one of them")


def _splitter_violations(api: Api) -> Iterator[Violation]:
    """Check the targets and weights of a splitter."""
    if api.kind is not ApiKind.SPLITTER:
        return
    if not api.apis:
        yield Violation(("apis",), "must be defined", 'write "apis:" with "- name: my-api" and "weight: 100" below it')
        return
    seen: set[str] = set()
    shadows = 0
    for index, traffic in enumerate(api.apis):
        field = f"apis.{index}"
        if traffic.name in seen:
            yield Violation((f"{field}.name",), f"{quote(traffic.name)} is already in the list", "remove one of them")
        seen.add(traffic.name)
        shadows += traffic.shadow
        if traffic.shadow and shadows > 1:
            yield Violation((f"{field}.shadow",), "only one API can be the shadow", "remove it, or this API")
    total = sum(traffic.weight for traffic in api.apis if not traffic.shadow)
    if total != 100:
        at = [f"apis.{index}.weight" for index, traffic in enumerate(api.apis) if not traffic.shadow]
        fields = (at[-1],) if at else ("apis",)
        message = f"the weights of all APIs except the shadow must add up to 100 (got {total})"
        yield Violation(fields, message, "change the weights" if at else "add an API that is not a shadow")


def _schedule_violations(api: Api) -> Iterator[Violation]:
    """Check that a schedule has a submission, if the kind needs one."""
    if api.schedule is not None and api.kind is ApiKind.BATCH and not api.schedule.submission:
        message = "must be defined: a job of a BatchAPI needs input"
        fix = 'write "submission:" with the body of the request, such as "workers" and "delimited_files"'
        yield Violation(("schedule.submission",), message, fix)
