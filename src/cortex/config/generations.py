"""The keys of each file generation and kind, as data.

A generation maps each key as written to a field of the current form, named by its dotted path in `schema.Api`
("handler.path"). `UNSUPPORTED_KEYS` lists the keys that a kind does not have although its generation has them for other
kinds. `conversion.py` chooses the generation of a resource and moves the values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

from cortex.config.schema import Interface
from cortex.lifecycle import ApiKind

IGNORED = "ignored"  #: accepted for compatibility, without effect
NOT_YET = "not yet"  #: rejected with the reason in `NOT_YET_KEYS`

#: Subject of each rejected key, and the alternative.
NOT_YET_KEYS = MappingProxyType(
    {
        "pod": ("containers", "write a Python handler"),
    }
)
#: Sections that may be written as a single value → the field that it sets.
SHORT_FORMS = MappingProxyType({"schedule": "schedule.cron"})

#: Sections that may be null → their fields.
OPTIONAL_SECTIONS = MappingProxyType(
    {
        "canary": "update_strategy.canary",
        "cors": "networking.cors",
        "monitoring": "tracker",
        "schedule": "schedule",
        "server_side_batching": "handler.server_side_batching",
        "tracker": "tracker",
    }
)

#: Sections for models → handler types that use them; files up to 0.24 had one section for all types.
MODEL_SECTIONS = MappingProxyType(
    {"models": frozenset({"tensorflow", "onnx", "model"}), "multi_model_reloading": frozenset({"python"})}
)
#: Keys of one entry of `paths`: as written → current; the older keys up to 0.24.
MODEL_KEYS = MappingProxyType({"name": "name", "path": "path", "signature_key": "signature_key"})
OLDER_MODEL_KEYS = MappingProxyType({"model": "path", "model_path": "path"})


@dataclass(frozen=True)
class FileGeneration:
    """One form of a resource: `fields` maps each key as written to its field in the current form."""

    interface: Interface
    section: str  #: the section that describes the code
    fields: MappingProxyType[str, str]

    @cached_property
    def sections(self) -> frozenset[str]:
        """The keys whose values are maps."""
        return frozenset(written[:dot] for written in self.fields for dot, char in enumerate(written) if char == ".")

    @cached_property
    def written(self) -> dict[str, str]:
        """The key of this generation for each field of the current form; the newest one if there are several."""
        return {field: written for written, field in self.fields.items()}

    def keys_of(self, section: str) -> list[str]:
        """List the supported keys directly in a section ("" is the resource itself)."""
        prefix = f"{section}." if section else ""
        useful = [key for key, field in self.fields.items() if field not in (IGNORED, NOT_YET)]
        inside = [key.removeprefix(prefix) for key in useful if key.startswith(prefix)]
        return list(dict.fromkeys(key.split(".")[0] for key in inside))


def _rows(section: str, keys: str, field: str | None = None) -> dict[str, str]:
    """Map keys that keep their names; `field` is their section in the current form, if it differs."""
    return {
        f"{section}.{key}": field if field in (IGNORED, NOT_YET) else f"{field or section}.{key}"
        for key in keys.split()
    }


_NAMES = {"name": "name", "kind": "kind"}
_BOUNDS = {
    # Extensions of this project, in files of every generation.
    "networking.timeout": "networking.timeout_s",
    "networking.max_body_size": "networking.max_body_size",
    "networking.access_log": "networking.access_log",
    "networking.auth": "networking.auth",
    "networking.docs": "networking.docs",
    "compute.mem_limit": "compute.mem_limit",
}
_CORS = _rows("networking.cors", "origins headers credentials")  # extension
_RECORD = _rows("networking.record", "share max_cpu max_size redact to")  # extension
_BATCHES = _rows("networking", "max_batch_size max_stored_size local_paths buckets webhook_hosts")  # extensions
_COMPUTE = _rows("compute", "cpu mem gpu")
_REPLICAS_IN_COMPUTE = _rows("compute", "min_replicas max_replicas init_replicas target_cpu_utilization", "autoscaling")
_AUTOSCALING = {
    **_rows(
        "autoscaling", "min_replicas max_replicas init_replicas target_replica_concurrency max_replica_concurrency"
    ),
    "autoscaling.window": "autoscaling.window_s",
    "autoscaling.downscale_stabilization_period": "autoscaling.downscale_stabilization_period_s",
    "autoscaling.upscale_stabilization_period": "autoscaling.upscale_stabilization_period_s",
    **_rows("autoscaling", "max_downscale_factor max_upscale_factor downscale_tolerance upscale_tolerance"),
}
_UPDATE_STRATEGY = _rows("update_strategy", "max_surge max_unavailable")
_CANARY = {  # extension
    **_rows(
        "update_strategy.canary",
        "shadow steps min_requests max_error_increase max_latency_increase max_prediction_shift max_disagreement "
        "confidence on_no_decision",
    ),
    "update_strategy.canary.give_up_after": "update_strategy.canary.give_up_after_s",
}
_TRACKED = "key model_type baseline window false_alarm_rate"  # the last three are extensions
_TRACKER = _rows("tracker", _TRACKED)
_MONITORING = _rows("monitoring", _TRACKED, "tracker")
_READINESS = {"readiness": "readiness"}  # extension
_SCHEDULE = _rows("schedule", "cron timezone submission overlap")  # extension
_CLASS = "type path python_path config env"
_TENSORFLOW = "signature_key tensorflow_serving"
_PROCESSES = "processes_per_replica threads_per_process"
_LATE = "log_level dependencies.pip dependencies.conda dependencies.shell"
_DEFINITION = f"path python_path config env {_LATE}"


def _models(section: str) -> dict[str, str]:
    keys = "path paths dir signature_key cache_size disk_cache_size cache_memory trust canary"  # canary: extension
    return {
        **_rows(section, keys, "handler.models"),
        f"{section}.poll_interval": "handler.models.poll_interval_s",
    }


def _batching(section: str) -> dict[str, str]:
    return {
        f"{section}.max_batch_size": "handler.server_side_batching.max_batch_size",
        f"{section}.batch_interval": "handler.server_side_batching.batch_interval_s",
        f"{section}.isolate_failures": "handler.server_side_batching.isolate_failures",  # extension
    }


def _generation(interface: Interface, section: str, *rows: dict[str, str]) -> FileGeneration:
    merged = {key: field for part in rows for key, field in part.items()}
    return FileGeneration(interface, section, MappingProxyType(merged))


#: 0.10 and 0.11: `kind: api`, module functions
FUNCTIONS = _generation(
    "functions",
    "predictor",
    _NAMES,
    {"endpoint": "networking.endpoint"},
    _rows("predictor", "path model python_path", "handler"),
    {"predictor.metadata": "handler.config"},
    _TRACKER,
    _REPLICAS_IN_COMPUTE,
    _COMPUTE,
    _BOUNDS,
    _READINESS,
)


def _request_handler(section: str, *rows: dict[str, str]) -> FileGeneration:
    """Return the generation of a model of one type, with functions that prepare its inputs and outputs."""
    return _generation(
        "request_handler",
        section,
        _NAMES,
        {"endpoint": "networking.endpoint"},
        {f"{section}.model": "handler.models.path", f"{section}.request_handler": "handler.path"},
        _rows(section, "python_path", "handler"),
        {f"{section}.metadata": "handler.config"},
        *rows,
        _TRACKER,
        _REPLICAS_IN_COMPUTE,
        _COMPUTE,
        _BOUNDS,
        _READINESS,
    )


#: 0.10 and 0.11: `kind: api`, an exported model with an optional request handler
ONNX_MODEL = _request_handler("onnx")
TENSORFLOW_MODEL = _request_handler("tensorflow", _rows("tensorflow", "signature_key", "handler"))

#: 0.8 and 0.9: the same, without a section
MODEL = _generation(
    "older_request_handler",
    "model",
    _NAMES,
    {
        "model": "handler.models.path",
        "model_format": "handler.type",
        "request_handler": "handler.path",
        "tf_signature_key": "handler.signature_key",
        "tags": IGNORED,
    },
    _TRACKER,
    _REPLICAS_IN_COMPUTE,
    _COMPUTE,
    _BOUNDS,
    _READINESS,
)

#: 0.12: `kind: api`, classes
DEPLOYED_CLASS = _generation(
    "predictor",
    "predictor",
    _NAMES,
    {"endpoint": "networking.endpoint"},
    _rows("predictor", f"{_CLASS} {_TENSORFLOW}", "handler"),
    {"predictor.model": "handler.models.path"},
    _models("predictor.models"),
    _TRACKER,
    _REPLICAS_IN_COMPUTE,
    _COMPUTE,
    _BOUNDS,
    _READINESS,
)

#: 0.13 to 0.18: no `kind`, or `kind: SyncAPI`
KINDLESS = _generation(
    "predictor",
    "predictor",
    _NAMES,
    {"endpoint": "networking.endpoint", "local_port": IGNORED},
    _rows("predictor", f"{_CLASS} {_TENSORFLOW}", "handler"),
    _rows("predictor", "image tensorflow_serving_image", IGNORED),
    {
        "autoscaling.workers_per_replica": "handler.processes_per_replica",
        "autoscaling.threads_per_worker": "handler.threads_per_process",
    },
    _rows("predictor", _PROCESSES, "handler"),
    {"predictor.model_path": "handler.models.path", "predictor.model": "handler.models.path"},
    _models("predictor.models"),
    _TRACKER,
    _MONITORING,
    _REPLICAS_IN_COMPUTE,
    _COMPUTE,
    _rows("compute", "inf"),
    _AUTOSCALING,
    _UPDATE_STRATEGY,
    {"networking.endpoint": "networking.endpoint"},
    _rows("networking", "local_port api_gateway", IGNORED),
    _BOUNDS,
    _READINESS,
)

#: 0.19 to 0.33: `kind: RealtimeAPI`, `BatchAPI` or `AsyncAPI` with `predictor`
PREDICTOR = _generation(
    "predictor",
    "predictor",
    _NAMES,
    _rows("predictor", f"{_CLASS} {_TENSORFLOW} {_PROCESSES} {_LATE}", "handler"),
    _rows("predictor", "image tensorflow_serving_image shm_size", IGNORED),
    {"predictor.model_path": "handler.models.path"},
    _models("predictor.multi_model_reloading"),
    _models("predictor.models"),
    _batching("predictor.server_side_batching"),
    _rows("predictor", "protobuf_path", "handler"),
    _MONITORING,
    {"networking.endpoint": "networking.endpoint"},
    _rows("networking", "local_port api_gateway", IGNORED),
    _COMPUTE,
    _rows("compute", "inf"),
    _AUTOSCALING,
    _UPDATE_STRATEGY,
    _BOUNDS,
    _BATCHES,
    _READINESS,
    _SCHEDULE,
)

#: 0.34 and 0.35: `kind: RealtimeAPI`, `BatchAPI` or `AsyncAPI` with `handler`, the current form
HANDLER = _generation(
    "handler",
    "handler",
    _NAMES,
    _rows("handler", f"{_CLASS} app command strip_prefix {_TENSORFLOW} {_PROCESSES} pin_processes preload {_LATE}"),
    {"handler.start_timeout": "handler.start_timeout_s"},
    _rows("handler", "image tensorflow_serving_image shm_size", IGNORED),
    _models("handler.multi_model_reloading"),
    _models("handler.models"),
    _batching("handler.server_side_batching"),
    _rows("handler", "protobuf_path"),
    _TRACKER,
    {"networking.endpoint": "networking.endpoint", "pod": NOT_YET},
    _COMPUTE,
    _rows("compute", "inf node_groups"),
    _AUTOSCALING,
    _UPDATE_STRATEGY,
    _CANARY,
    _BOUNDS,
    _rows("networking", "on_disconnect sticky"),  # extensions
    {"networking.websocket_idle_timeout": "networking.websocket_idle_timeout_s"},
    _CORS,
    _RECORD,
    _BATCHES,
    _READINESS,
    _SCHEDULE,
)

#: 0.27 to 0.35: `kind: TaskAPI`
TASK = _generation(
    "handler",
    "definition",
    _NAMES,
    _rows("definition", _DEFINITION, "handler"),
    _rows("definition", "image shm_size", IGNORED),
    _rows("networking", "endpoint max_body_size max_stored_size webhook_hosts access_log auth docs"),
    _CORS,
    _COMPUTE,
    _rows("compute", "inf node_groups mem_limit"),
    _SCHEDULE,
)

#: 0.19 to 0.35: `kind: TrafficSplitter`
SPLITTER = _generation("handler", "apis", _NAMES, {"apis": "apis"}, _rows("networking", "endpoint auth docs"), _CORS)

GENERATIONS = (
    MODEL,
    FUNCTIONS,
    ONNX_MODEL,
    TENSORFLOW_MODEL,
    DEPLOYED_CLASS,
    KINDLESS,
    PREDICTOR,
    HANDLER,
    TASK,
    SPLITTER,
)
#: Keys of KServe, BentoML, Ray Serve and Seldon Core, in lower case without separators → the field or section here;
#: "": there is none.
KEYS_OF_OTHER_SYSTEMS = {
    **dict.fromkeys(("min", "minreplicas", "minscale", "replicas", "numreplicas"), "autoscaling.min_replicas"),
    **dict.fromkeys(("max", "maxreplicas", "maxscale"), "autoscaling.max_replicas"),
    **dict.fromkeys(("scaletarget", "targetongoingrequests"), "autoscaling.target_replica_concurrency"),
    **dict.fromkeys(
        ("concurrency", "containerconcurrency", "maxconcurrency", "maxongoingrequests"),
        "autoscaling.max_replica_concurrency",
    ),
    "autoscalingconfig": "autoscaling",
    **dict.fromkeys(("workers", "numworkers"), "handler.processes_per_replica"),
    **dict.fromkeys(("envs", "envvars", "environment"), "handler.env"),
    **dict.fromkeys(("storageuri", "modeluri"), "handler.models.path"),
    **dict.fromkeys(("resources", "requests", "limits", "rayactoroptions"), "compute"),
    **dict.fromkeys(("cores", "numcpus", "vcpu", "vcpus"), "compute.cpu"),
    **dict.fromkeys(("memory", "ram"), "compute.mem"),
    "numgpus": "compute.gpu",
    **dict.fromkeys(("readinessprobe", "healthcheck"), "readiness"),
    "routeprefix": "networking.endpoint",
    "timeoutseconds": "networking.timeout_s",
    "importpath": "",
}
#: The generations of files with `kind: deployment`.
DEPLOYED = (MODEL, FUNCTIONS, ONNX_MODEL, TENSORFLOW_MODEL, DEPLOYED_CLASS)


_REMOVE = "remove it"
_WORKERS = 'remove it: a submission sets the number of "workers" of its job'
_LOADED = "remove it: a job loads all models"
_ONE_CALL = 'remove it: each process runs one workload at a time; "autoscaling" sets the number of replicas'
_ONE_WORKER = "remove it: a task is one call in one worker"
_DEFINITION = 'write "definition:" with "path"'
_APPLICATION = "remove it: only a RealtimeAPI can have an application"
_COMMAND = "remove it: only a RealtimeAPI can have a command"
_NO_PROCESSES = "remove it: its requests are stored, and any process may run them"
_NOT_RECORDED = "remove it: only requests of a RealtimeAPI are recorded"
_OF_TARGETS = "set it for the APIs that the splitter names"

#: By kind: a key in any section, or a key with its section → the fix.
UNSUPPORTED_KEYS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        ApiKind.REALTIME: {
            "buckets": _REMOVE,
            "local_paths": _REMOVE,
            "max_stored_size": _REMOVE,
            "networking.max_batch_size": _REMOVE,
            "schedule": "remove it: only a BatchAPI or a TaskAPI can have a schedule",
            "webhook_hosts": _REMOVE,
        },
        ApiKind.ASYNC: {
            "app": _APPLICATION,
            "command": _COMMAND,
            "start_timeout": _COMMAND,
            "strip_prefix": _COMMAND,
            "sticky": _NO_PROCESSES,
            "websocket_idle_timeout": _APPLICATION,
            "buckets": _REMOVE,
            "cache_memory": "remove it: all models are loaded",
            "cache_size": "remove it: all models are loaded",
            "disk_cache_size": "remove it: all models are loaded",
            "local_paths": _REMOVE,
            "monitoring": _REMOVE,
            "multi_model_reloading": "remove it, and load the model in __init__",
            "networking.max_batch_size": _REMOVE,
            "on_disconnect": _REMOVE,
            "pin_processes": "remove it: each replica of an AsyncAPI has one process",
            "preload": "remove it: each replica of an AsyncAPI has one process",
            "poll_interval": "remove it: models are loaded when a process starts; `cortex refresh` loads new versions",
            "protobuf_path": _REMOVE,
            "readiness": _REMOVE,
            "record": _NOT_RECORDED,
            "schedule": "remove it: only a BatchAPI or a TaskAPI can have a schedule",
            "server_side_batching": _ONE_CALL,
            "tracker": _REMOVE,
            "webhook_hosts": _REMOVE,
        },
        ApiKind.BATCH: {
            "app": _APPLICATION,
            "command": _COMMAND,
            "start_timeout": _COMMAND,
            "strip_prefix": _COMMAND,
            "sticky": _NO_PROCESSES,
            "websocket_idle_timeout": _APPLICATION,
            "autoscaling": _WORKERS,
            "cache_memory": _LOADED,
            "cache_size": _LOADED,
            "disk_cache_size": _LOADED,
            "monitoring": _REMOVE,
            "multi_model_reloading": "remove it, and load the model in __init__",
            "on_disconnect": _REMOVE,
            "pin_processes": "remove it: each worker of a job has one process",
            "preload": "remove it: each job constructs the class in a process of its own",
            "poll_interval": "remove it: the models of a job are not reloaded",
            "protobuf_path": _REMOVE,
            "readiness": _REMOVE,
            "record": _NOT_RECORDED,
            "server_side_batching": 'remove it: a submission sets the "batch_size" of its job',
            "timeout": 'remove it: a submission sets the "timeout" of its job',
            "tracker": _REMOVE,
            "update_strategy": _REMOVE,
        },
        ApiKind.TASK: {
            "autoscaling": _ONE_WORKER,
            "buckets": _REMOVE,
            "handler": _DEFINITION,
            "local_paths": _REMOVE,
            "models": "remove it, and load the model in the class",
            "monitoring": _REMOVE,
            "multi_model_reloading": "remove it, and load the model in the class",
            "networking.max_batch_size": _REMOVE,
            "predictor": _DEFINITION,
            "processes_per_replica": _ONE_WORKER,
            "readiness": _REMOVE,
            "server_side_batching": _REMOVE,
            "threads_per_process": _ONE_WORKER,
            "timeout": 'remove it: a submission sets the "timeout" of its job',
            "tracker": _REMOVE,
            "type": "remove it: a task is Python",
            "update_strategy": _REMOVE,
        },
        ApiKind.SPLITTER: {
            "access_log": _OF_TARGETS,
            "autoscaling": _OF_TARGETS,
            "compute": _OF_TARGETS,
            "definition": _OF_TARGETS,
            "handler": _OF_TARGETS,
            "max_body_size": _OF_TARGETS,
            "monitoring": _OF_TARGETS,
            "predictor": _OF_TARGETS,
            "readiness": _OF_TARGETS,
            "schedule": _REMOVE,
            "timeout": _OF_TARGETS,
            "tracker": _OF_TARGETS,
            "update_strategy": _OF_TARGETS,
        },
    }
)


def unsupported_key_fix(kind: str, written: str) -> str | None:
    """Return the fix for a key (with its sections) that the kind does not support; None if it does."""
    table = UNSUPPORTED_KEYS[kind]
    return table.get(written.rpartition(".")[2]) or table.get(".".join(written.split(".")[-2:]))


def is_within_unsupported(kind: str, written: str) -> bool:
    """Return True if the kind does not support the key or a section around it."""
    parts = written.split(".")
    return any(unsupported_key_fix(kind, ".".join(parts[: end + 1])) is not None for end in range(len(parts)))
