"""What each generation of files may say: one row per key, and where it lands in the current form.

Only data. `eras.py` picks the generation of a resource and moves its values; nothing else reads these tables.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

from cortex.config.schema import Interface

IGNORED = "ignored"  #: accepted, since its generation had it; means nothing here
NOT_YET = "not yet"  #: refused with the reason in `NOT_YET_KEYS`

# What this version does not serve yet: later work deletes from these two.
ONLY = "this version of cortex serves RealtimeAPIs only"
NOT_YET_KINDS = frozenset({"BatchAPI", "AsyncAPI", "TaskAPI", "TrafficSplitter"})
NOT_YET_KEYS = MappingProxyType(
    {  # what the key is about, and what to do instead
        "onnx": ("ONNX request handlers", 'write "predictor:" with "type: onnx" and "model"'),
        "pod": ("containers", "write a Python handler"),
        "protobuf_path": ("gRPC", "answer JSON over HTTP"),
        "server_side_batching": ("server-side batching", "remove it"),
        "tensorflow": ("TensorFlow request handlers", 'write "predictor:" with "type: tensorflow" and "model"'),
    }
)

#: Which types of code have their models in which section; files up to 0.24 had one for all.
MODEL_SECTIONS = MappingProxyType(
    {"models": frozenset({"tensorflow", "onnx"}), "multi_model_reloading": frozenset({"python"})}
)
#: What one of several models may say: each key as written → the current one; the older keys up to 0.24.
MODEL_KEYS = MappingProxyType({"name": "name", "path": "path", "signature_key": "signature_key"})
OLDER_MODEL_KEYS = MappingProxyType({"model": "path", "model_path": "path"})


@dataclass(frozen=True)
class Generation:
    """One form of a resource: `fields` maps each key as written to its place in the current form."""

    interface: Interface
    section: str  #: where the code is described
    fields: MappingProxyType[str, str]

    @cached_property
    def sections(self) -> frozenset[str]:
        """Collect the keys that hold maps of further rows."""
        return frozenset(written[:dot] for written in self.fields for dot in _dots(written))

    @cached_property
    def written(self) -> dict[str, str]:
        """Map each place of the current form to the key that this generation writes for it (the newest, of several)."""
        return {place: written for written, place in self.fields.items()}

    def keys_of(self, section: str) -> list[str]:
        """List the keys of use that may stand directly in a section ("" is the resource)."""
        prefix = f"{section}." if section else ""
        useful = [key for key, place in self.fields.items() if place not in (IGNORED, NOT_YET)]
        inside = [key.removeprefix(prefix) for key in useful if key.startswith(prefix)]
        return list(dict.fromkeys(key.split(".")[0] for key in inside))


def _dots(written: str) -> Iterable[int]:
    return (index for index, char in enumerate(written) if char == ".")


def _rows(section: str, keys: str, place: str | None = None) -> dict[str, str]:
    """Make rows for keys that keep their names; `place` is their section in the current form if it has another name."""
    return {
        f"{section}.{key}": place if place in (IGNORED, NOT_YET) else f"{place or section}.{key}"
        for key in keys.split()
    }


_NAMES = {"name": "name", "kind": "kind"}
_BOUNDS = {
    # Ours, in files of every generation.
    "networking.timeout": "networking.timeout_s",
    "networking.max_body_size": "networking.max_body_size",
    "compute.mem_limit": "compute.mem_limit",
}
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
_TRACKER = _rows("tracker", "key model_type")
_MONITORING = _rows("monitoring", "key model_type", "tracker")
_CLASS = "type path python_path config env"
_TENSORFLOW = "signature_key tensorflow_serving"
_PROCESSES = "processes_per_replica threads_per_process"
_LATE = "log_level dependencies.pip dependencies.conda dependencies.shell"
_LATE_NOT_YET = "server_side_batching protobuf_path"


def _models(section: str) -> dict[str, str]:
    keys = "path paths dir signature_key cache_size disk_cache_size cache_memory"
    return {
        **_rows(section, keys, "handler.models"),
        f"{section}.poll_interval": "handler.models.poll_interval_s",
    }


def _generation(interface: Interface, section: str, *rows: dict[str, str]) -> Generation:
    merged = {key: place for part in rows for key, place in part.items()}
    return Generation(interface, section, MappingProxyType(merged))


#: 0.10 and 0.11: `kind: api`, module functions
FUNCTIONS = _generation(
    "functions",
    "predictor",
    _NAMES,
    {"endpoint": "networking.endpoint", "tensorflow": NOT_YET, "onnx": NOT_YET},
    _rows("predictor", "path model python_path", "handler"),
    {"predictor.metadata": "handler.config"},
    _TRACKER,
    _REPLICAS_IN_COMPUTE,
    _COMPUTE,
    _BOUNDS,
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
)

#: 0.19 to 0.33: `kind: RealtimeAPI` with `predictor`
PREDICTOR = _generation(
    "predictor",
    "predictor",
    _NAMES,
    _rows("predictor", f"{_CLASS} {_TENSORFLOW} {_PROCESSES} {_LATE}", "handler"),
    _rows("predictor", "image tensorflow_serving_image shm_size", IGNORED),
    {"predictor.model_path": "handler.models.path"},
    _models("predictor.multi_model_reloading"),
    _models("predictor.models"),
    _rows("predictor", _LATE_NOT_YET, NOT_YET),
    _MONITORING,
    {"networking.endpoint": "networking.endpoint"},
    _rows("networking", "local_port api_gateway", IGNORED),
    _COMPUTE,
    _rows("compute", "inf"),
    _AUTOSCALING,
    _UPDATE_STRATEGY,
    _BOUNDS,
)

#: 0.34 and 0.35: `kind: RealtimeAPI` with `handler`, the current form
HANDLER = _generation(
    "handler",
    "handler",
    _NAMES,
    _rows("handler", f"{_CLASS} {_TENSORFLOW} {_PROCESSES} {_LATE}"),
    _rows("handler", "image tensorflow_serving_image shm_size", IGNORED),
    _models("handler.multi_model_reloading"),
    _models("handler.models"),
    _rows("handler", _LATE_NOT_YET, NOT_YET),
    {"networking.endpoint": "networking.endpoint", "pod": NOT_YET},
    _COMPUTE,
    _rows("compute", "inf node_groups"),
    _AUTOSCALING,
    _UPDATE_STRATEGY,
    _BOUNDS,
)

GENERATIONS = (FUNCTIONS, DEPLOYED_CLASS, KINDLESS, PREDICTOR, HANDLER)
