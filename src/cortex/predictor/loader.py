"""Construct the user's class for a realtime API, or initialize the user's module, and bind its methods.

It runs in every replica: standard library only at import. It must not know HTTP, nor parse or encode anything.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cortex.errors import UserError
from cortex.models.spec import Catalogue
from cortex.predictor.batched import batched_name, batching_problem
from cortex.predictor.binding import (
    BoundMethod,
    Kind,
    bind_function,
    bind_method,
    call_kind,
    result_kind,
    split_callback,
)
from cortex.predictor.code import LoadSpec, UserCode, build_clients, import_code
from cortex.predictor.construct import initialize
from cortex.predictor.interface import Generation
from cortex.predictor.tracebacks import format_user_traceback

if TYPE_CHECKING:
    from cortex.models.loader import LoadEvents, ModelFetcher
    from cortex.models.registry import Registry
    from cortex.predictor.clients.python import Clients

__all__ = [
    "BoundMethod",
    "BoundPredictor",
    "Kind",
    "LoadSpec",
    "format_user_traceback",
    "load",
    "result_kind",
    "split_callback",
]


@dataclass(frozen=True, slots=True)
class BoundPredictor:
    """The user's object, constructed; `methods` by HTTP verb in upper case."""

    generation: Generation
    file: str
    methods: Mapping[str, BoundMethod]
    clients: Clients | None = None  #: None if the API has no models

    @property
    def registry(self) -> Registry[Any] | None:
        """Return the API's models; None if it has none, or they are a server's elsewhere."""
        return self.clients.registry if self.clients else None

    def close(self) -> None:
        """Unload the models and end what runs them; nothing may be called any more."""
        if self.clients is not None:
            self.clients.close()

    def describe(self) -> dict[str, Any]:
        """Say how to call it and which models it has, as JSON for a GET that no method answers."""
        described: dict[str, Any] = {
            "message": self.generation.summary,
            "interface": self.generation.key,
            "methods": {
                verb: {"name": method.name, "arguments": list(method.arguments)}
                for verb, method in self.methods.items()
            },
        }
        return described if self.clients is None else {**described, "model_metadata": self.clients.describe()}


def load(
    spec: LoadSpec,
    catalogue: Catalogue | None = None,
    fetcher: ModelFetcher | None = None,
    events: LoadEvents | None = None,
    also: Sequence[tuple[str, str]] = (),
    metrics: object = None,
) -> BoundPredictor:
    """Import and construct the user's code, and load its models; the caller has made the project the working directory.

    `catalogue` says which models there are; the latest version of each is loaded, and `also` (model, version) those
    that a process before this one had loaded; with caching, none is loaded before it is asked for. `metrics` is what a
    constructor gets that declares `metrics_client`.

    Raises: UserError with the user's frames, or with `file:line`, what is wrong with a signature and its fix.
    """
    code = import_code(spec)
    config = copy.deepcopy(spec.config)
    if code.generation.class_name is None:
        initialize(code.target, code.generation, spec.model_path, config)
        functions = {verb: bind_function(getattr(code.target, name), name, config) for name, verb in code.found.items()}
        return BoundPredictor(code.generation, spec.path, functions)
    if spec.max_batch_size and spec.type == "python":
        _check_batched(code, spec.path)
    clients = build_clients(spec, catalogue, fetcher, events)
    try:
        return _construct(spec, code, config, clients, also, metrics)
    except BaseException:
        if clients is not None:
            clients.close()
        raise


def _check_batched(code: UserCode, file: str) -> None:
    """Check that there is a method that can be given several requests. Raises: UserError."""
    name = batched_name(code.generation)
    is_defined = name in code.found
    streams = is_defined and call_kind(getattr(code.target, name)) in ("generator", "async_generator")
    if problem := batching_problem(name, is_defined, streams):
        raise UserError(f"{file}: class {code.generation.class_name}: {problem[0]}; {problem[1]}")


def _construct(
    spec: LoadSpec,
    code: UserCode,
    config: dict[str, Any],
    clients: Clients | None,
    also: Sequence[tuple[str, str]],
    metrics: object,
) -> BoundPredictor:
    section = {"type": spec.type, "path": spec.path, "python_path": spec.python_path, "config": config}
    api_spec = {"name": spec.api, "kind": spec.kind, "predictor": section}
    values = {"config": config, "api_spec": api_spec, "job_spec": None, "metrics_client": metrics}
    instance = code.make(values, clients)
    methods = {verb: bind_method(instance, name, code.generation) for name, verb in code.found.items()}
    if clients is None:
        return BoundPredictor(code.generation, spec.path, methods)
    if clients.registry is not None:
        clients.registry.load_latest(also)
    if spec.models is not None and spec.models.is_cached:  # what is in use must not be unloaded
        methods = {verb: method.in_scope() for verb, method in methods.items()}
    return BoundPredictor(code.generation, spec.path, methods, clients)
