"""Export of traces, if the standard variables of OpenTelemetry request it. Nothing is imported for it otherwise.

The variables are those of the specification (https://opentelemetry.io/docs/specs/otel/protocol/exporter/), in the
environment of the operator, or in `env:` or `.env` of an API. `spans` has what needs the library.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from cortex.worker.monitoring.request_log import write_log

if TYPE_CHECKING:
    from cortex.worker.monitoring.spans import Tracing
    from cortex.worker.spec import ReplicaSpec

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_EXPORTERS = "OTEL_TRACES_EXPORTER"
_PROTOCOL = "http/protobuf"
_MODULES = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http")


def is_requested(environ: Mapping[str, str]) -> bool:
    """Return whether traces are to be exported: an endpoint is set, or OTLP is selected as the exporter."""
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    exporters = environ.get(_EXPORTERS, "").strip()
    if exporters:
        return "otlp" in exporters.split(",")
    return any(environ.get(name) for name in _ENDPOINTS)


def find_problem(environ: Mapping[str, str]) -> str | None:
    """Return why requested traces can't be exported, and what to do; None if they can be, or are not requested."""
    if not is_requested(environ):
        return None
    name = next((name for name in _PROTOCOLS if environ.get(name)), None)
    if name is not None and environ[name] != _PROTOCOL:
        return f"{name} is {environ[name]}, but only {_PROTOCOL} is supported: set it, or remove the variable"
    if not all(map(_is_installed, _MODULES)):
        cause = next(name for name in (*_ENDPOINTS, _EXPORTERS) if environ.get(name))
        return (
            f"{cause} is set, but OpenTelemetry is not installed: `pip install 'cortex-serving[opentelemetry]'`, in a"
            " clone `pip install '.[opentelemetry]'`, and deploy again"
        )
    return None


def open_tracing(spec: ReplicaSpec, index: int) -> Tracing | None:
    """Return the exporter of the spans of process `index`; None if it is not requested or not possible.

    Call it in the process itself, because its thread does not survive a fork. The reason why it is not possible is
    logged; requests are served nevertheless.
    """
    if not is_requested(os.environ):
        return None
    try:
        problem = find_problem(os.environ)
        if problem is None:
            from cortex.worker.monitoring.spans import Tracing  # noqa: PLC0415 - optional, and slow to import

            return Tracing(spec, index)
    except Exception as error:  # the libraries of the project, and variables that they reject
        problem = f"{type(error).__name__}: {error}"
    write_log(f"traces are not exported: {problem}\n")
    return None


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:  # of the package that contains it
        return False
