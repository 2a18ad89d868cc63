"""Import the user's file, match it with its generation's row, construct it and bind its methods.

It runs in every replica: standard library only at import. It must not know HTTP, nor parse or encode anything.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from cortex.models.scope import call_scope
from cortex.models.spec import Catalogue, ModelSource
from cortex.predictor.binding import BoundMethod, Kind, bind_function, bind_method, result_kind, split_callback
from cortex.predictor.checking import check_members, find_class
from cortex.predictor.construct import construct, constructor_values, initialize
from cortex.predictor.frames import format_user_traceback, user_code
from cortex.predictor.importing import import_user_file
from cortex.predictor.interface import GENERATIONS, Generation

if TYPE_CHECKING:
    from cortex.models.loading import Events, Fetcher
    from cortex.models.registry import Registry
    from cortex.predictor.clients import Clients

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


class LoadSpec(Protocol):
    """What the loader reads of a replica's spec."""

    @property
    def api(self) -> str: ...
    @property
    def interface(self) -> str: ...
    @property
    def project_dir(self) -> str: ...
    @property
    def path(self) -> str: ...
    @property
    def python_path(self) -> str | None: ...
    @property
    def config(self) -> dict[str, Any]: ...
    @property
    def model_path(self) -> str | None: ...
    @property
    def type(self) -> str: ...
    @property
    def models(self) -> ModelSource | None: ...
    @property
    def tensorflow_serving(self) -> str | None: ...
    @property
    def gpu_ids(self) -> tuple[str, ...]: ...
    @property
    def sockets(self) -> tuple[str, ...]: ...


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
    fetcher: Fetcher | None = None,
    events: Events | None = None,
    also: Sequence[tuple[str, str]] = (),
) -> BoundPredictor:
    """Import and construct the user's code, and load its models; the caller has made the project the working directory.

    `catalogue` says which models there are; the latest version of each is loaded, and `also` (model, version) those
    that a process before this one had loaded; with caching, none is loaded before it is asked for.

    Raises: UserError with the user's frames, or with `file:line`, what is wrong with a signature and its fix.
    """
    generation = GENERATIONS[spec.interface, spec.type, spec.models is not None]
    with user_code(f"while {spec.path} was being imported"):
        module = import_user_file(Path(spec.project_dir), spec.path, spec.python_path)
    target: Any = module if generation.class_name is None else find_class(module, generation, spec.path)
    found = {name: verb for name, verb in generation.methods.items() if callable(getattr(target, name, None))}
    check_members(target, generation, found, spec.path)
    config = copy.deepcopy(spec.config)
    if generation.class_name is None:
        initialize(target, generation, spec.model_path, config)
        functions = {verb: bind_function(getattr(target, name), name, config) for name, verb in found.items()}
        return BoundPredictor(generation, spec.path, functions)
    clients = _build_clients(spec, catalogue, fetcher, events)
    try:
        return _construct(spec, generation, target, found, config, clients, also)
    except BaseException:
        if clients is not None:
            clients.close()
        raise


def _build_clients(
    spec: LoadSpec, catalogue: Catalogue | None, fetcher: Fetcher | None, events: Events | None
) -> Clients | None:
    if spec.models is None:
        return None
    from cortex.predictor.clients import build_clients  # noqa: PLC0415 - others start sooner without

    return build_clients(spec, catalogue, fetcher, events)


def _construct(
    spec: LoadSpec,
    generation: Generation,
    target: type,
    found: Mapping[str, str],
    config: dict[str, Any],
    clients: Clients | None,
    also: Sequence[tuple[str, str]],
) -> BoundPredictor:
    section = {"type": spec.type, "path": spec.path, "python_path": spec.python_path}
    client = clients.client if clients else None
    values = constructor_values(spec.api, section, config, generation, client)
    with call_scope():
        instance = construct(target, generation, values, clients.bind if clients else None)
    methods = {verb: bind_method(instance, name, generation) for name, verb in found.items()}
    if clients is None:
        return BoundPredictor(generation, spec.path, methods)
    if clients.registry is not None:
        clients.registry.load_latest(also)
    if spec.models is not None and spec.models.is_cached:  # what is in use must not be unloaded
        methods = {verb: method.in_scope() for verb, method in methods.items()}
    return BoundPredictor(generation, spec.path, methods, clients)
