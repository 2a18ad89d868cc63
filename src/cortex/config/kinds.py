"""Determine the kind and the file generation of a resource, from its `kind` key or else from its sections.

`conversion.py` reads the remaining keys.
"""

from __future__ import annotations

from typing import NamedTuple

from cortex.config.document import Document, Node
from cortex.config.generations import (
    DEPLOYED_CLASS,
    FUNCTIONS,
    GENERATIONS,
    HANDLER,
    KINDLESS,
    PREDICTOR,
    SPLITTER,
    TASK,
    FileGeneration,
)
from cortex.config.values import nearest, quote
from cortex.errors import Diagnostic
from cortex.lifecycle import ApiKind

_KINDS = frozenset(ApiKind)
_WRITTEN = frozenset({*(kind.value for kind in ApiKind), "SyncAPI", "api"})
#: Sections that determine the generation of a resource.
_SHAPES = (("handler", HANDLER), ("predictor", PREDICTOR), ("definition", TASK), ("apis", SPLITTER))
_TOP_KEYS = frozenset(name for generation in GENERATIONS for name in generation.keys_of(""))


class Choice(NamedTuple):
    """The kind and generation chosen for a resource, and the problem with its `kind` key, if any."""

    generation: FileGeneration | None  #: None if the resource cannot be read further
    kind: ApiKind = ApiKind.REALTIME
    problem: Diagnostic | None = None


def find_key(item: Node, key: str) -> Node | None:
    """Return the node of a top-level key, or of a likely misspelling of it."""
    assert isinstance(item.value, dict)
    if key in item.value:
        return item.value[key]
    for written, node in item.value.items():
        if written not in _TOP_KEYS and nearest(written, _TOP_KEYS) == key:
            return node
    return None


def choose(document: Document, item: Node, kind: Node | None, *, in_deployment: bool) -> Choice:
    """Choose the kind and the generation of a resource; `kind` is the node of its `kind` key."""
    by_shape = _by_shape(item)
    if kind is None:
        if in_deployment:
            return Choice(_api_generation(item), problem=_missing_kind(document, item, "api"))
        if by_shape is PREDICTOR:
            return Choice(KINDLESS)
        likely = _kind_of(by_shape)
        return Choice(by_shape or HANDLER, likely, _missing_kind(document, item, likely))
    if not isinstance(kind.value, str):
        likely = _kind_of(by_shape)
        return Choice(by_shape, likely, document.wrong_type(kind, "a string", f'write "{likely}"'))
    meant = kind.value if kind.value in _WRITTEN else _nearest_kind(item, kind.value)
    generation = _generation_of(item, meant)
    served = ApiKind(meant) if meant in _KINDS else _kind_of(generation)
    if kind.value == meant:
        return Choice(generation, served)
    fix = f"write {quote(meant or served)}"
    return Choice(generation, served, document.at_value(kind, f"unknown kind {quote(kind.value)}", fix))


def _nearest_kind(item: Node, written: str) -> str | None:
    return nearest(written, {*_WRITTEN, *(() if _by_shape(item) else ("deployment",))})


def _generation_of(item: Node, kind: str | None) -> FileGeneration | None:
    if kind == "api":
        return _api_generation(item)
    if kind == "SyncAPI":
        return KINDLESS
    if kind in (ApiKind.TASK, ApiKind.SPLITTER):
        return TASK if kind == ApiKind.TASK else SPLITTER
    by_shape = _by_shape(item)
    if kind not in _WRITTEN:
        return by_shape
    return PREDICTOR if by_shape is PREDICTOR else HANDLER


def _kind_of(generation: FileGeneration | None) -> ApiKind:
    """Return the usual kind of a file generation."""
    if generation is TASK:
        return ApiKind.TASK
    return ApiKind.SPLITTER if generation is SPLITTER else ApiKind.REALTIME


def _missing_kind(document: Document, item: Node, kind: str) -> Diagnostic:
    return document.diagnostic(item.line, item.column, (*item.path, "kind"), "must be defined", f'write "kind: {kind}"')


def _by_shape(item: Node) -> FileGeneration | None:
    return next((generation for section, generation in _SHAPES if find_key(item, section) is not None), None)


def _api_generation(item: Node) -> FileGeneration:
    predictor = find_key(item, "predictor")
    keys = predictor.value if predictor is not None and isinstance(predictor.value, dict) else {}
    return DEPLOYED_CLASS if any(key in keys for key in ("type", "config", "env")) else FUNCTIONS
