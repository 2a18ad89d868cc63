"""The user's code as its file has it, imported and checked, and how an object is made of it: what all loaders share.

It runs in every replica: standard library only at import. It must not know requests, nor jobs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from cortex.models.loaded_models import call_scope
from cortex.models.spec import Catalogue, ModelSource
from cortex.predictor.construct import construct
from cortex.predictor.importing import import_user_file
from cortex.predictor.interface import GENERATIONS, Generation
from cortex.predictor.source_checks import check_members, find_class, is_defined
from cortex.predictor.tracebacks import user_code

if TYPE_CHECKING:
    from cortex.models.loader import LoadEvents, ModelFetcher
    from cortex.predictor.clients.python import Clients


class LoadSpec(Protocol):
    """What a loader reads of a replica's spec."""

    @property
    def api(self) -> str: ...
    @property
    def kind(self) -> str: ...
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
    def max_batch_size(self) -> int: ...
    @property
    def isolates_failures(self) -> bool: ...
    @property
    def sockets(self) -> tuple[str, ...]: ...


@dataclass(frozen=True, slots=True)
class UserCode:
    """The class, or the module, that a generation wants; `found` are its serving methods, with what each answers."""

    generation: Generation
    target: Any
    found: Mapping[str, str]

    def make(self, values: Mapping[str, Any], clients: Clients | None) -> object:
        """Construct an object of the class, with those of `values` that it asks for. Raises: UserError."""
        given = dict(values)
        if clients is not None and self.generation.client is not None:
            given[self.generation.client] = clients.client
        with call_scope():
            return construct(self.target, self.generation, given, clients.bind if clients else None)


def import_code(spec: LoadSpec) -> UserCode:
    """Import the user's file and check what it defines. Raises: UserError."""
    generation = GENERATIONS[spec.kind, spec.interface, spec.type, spec.models is not None]
    with user_code(f"while {spec.path} was being imported"):
        module = import_user_file(Path(spec.project_dir), spec.path, spec.python_path)
    target: Any = module if generation.class_name is None else find_class(module, generation, spec.path)
    found = generation.serving(lambda name: is_defined(target, name))
    check_members(target, generation, found, spec.path)
    return UserCode(generation, target, found)


def build_clients(
    spec: LoadSpec, catalogue: Catalogue | None, fetcher: ModelFetcher | None, events: LoadEvents | None
) -> Clients | None:
    """Build what the constructor gets at its models with; None without models. Raises: UserError."""
    if spec.models is None:
        return None
    from cortex.predictor.clients import python  # noqa: PLC0415 - others start sooner without

    return python.build_clients(spec, catalogue, fetcher, events)
