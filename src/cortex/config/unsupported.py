"""The keys that a kind of API has not, although its generation of files has them for others: what to do instead.

Only data, and how it is looked up.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from cortex.lifecycle import ApiKind

_REMOVE = "remove it"
_WORKERS = 'remove it: a submission says how many "workers" its job has'
_LOADED = "remove it: jobs have all models loaded"
_ONE_CALL = 'remove it: each process works on one workload; "autoscaling" says how many there are'
_ONE_WORKER = "remove it: a task runs once, on one worker"
_DEFINITION = 'write "definition:" with "path"'
_OF_TARGETS = "say it of the APIs that it names"

#: By kind: a key, wherever it stands, or one with its section → what to do instead.
UNSUPPORTED_KEYS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        ApiKind.REALTIME: {
            "local_paths": _REMOVE,
            "networking.max_batch_size": _REMOVE,
            "schedule": "remove it: jobs of a BatchAPI or a TaskAPI can be run by the clock",
        },
        ApiKind.ASYNC: {
            "cache_memory": "remove it: all models are loaded",
            "cache_size": "remove it: all models are loaded",
            "disk_cache_size": "remove it: all models are loaded",
            "local_paths": _REMOVE,
            "monitoring": _REMOVE,
            "multi_model_reloading": "remove it, and load the model in __init__",
            "networking.max_batch_size": _REMOVE,
            "poll_interval": "remove it: models are loaded when a process starts; `cortex refresh` takes new versions",
            "protobuf_path": _REMOVE,
            "readiness": _REMOVE,
            "schedule": "remove it: jobs of a BatchAPI or a TaskAPI can be run by the clock",
            "server_side_batching": _ONE_CALL,
            "tracker": _REMOVE,
        },
        ApiKind.BATCH: {
            "autoscaling": _WORKERS,
            "cache_memory": _LOADED,
            "cache_size": _LOADED,
            "disk_cache_size": _LOADED,
            "monitoring": _REMOVE,
            "multi_model_reloading": "remove it, and load the model in __init__",
            "poll_interval": "remove it: the models of a job are not reloaded",
            "protobuf_path": _REMOVE,
            "readiness": _REMOVE,
            "server_side_batching": 'remove it: a submission says the "batch_size" of its job',
            "timeout": 'remove it: a submission says the "timeout" of its job',
            "tracker": _REMOVE,
            "update_strategy": _REMOVE,
        },
        ApiKind.TASK: {
            "autoscaling": _ONE_WORKER,
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
            "timeout": 'remove it: a submission says the "timeout" of its job',
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


def instead_of(kind: str, written: str) -> str | None:
    """Say what to do instead of a key, `written` with its sections; None if the kind has it."""
    table = UNSUPPORTED_KEYS[kind]
    return table.get(written.rpartition(".")[2]) or table.get(".".join(written.split(".")[-2:]))


def is_within_unsupported(kind: str, written: str) -> bool:
    """Tell whether the kind has not a key, or a section that it is in."""
    parts = written.split(".")
    return any(instead_of(kind, ".".join(parts[: end + 1])) is not None for end in range(len(parts)))
