"""Say what a class or method of another generation belongs to, for the loader and the source checker alike. Pure."""

from __future__ import annotations

from collections.abc import Container

from cortex.predictor.interface import GENERATIONS, Generation


def find_foreign_class(wanted: Generation, classes: Container[str]) -> tuple[str, str] | None:
    """Return one of `classes` that was written for something else than `wanted`, and a sentence that says for what."""
    for other in _others(wanted):
        name = other.class_name or ""
        if name in classes and name != wanted.class_name:
            is_alike = (other.key, other.kind) == (wanted.key, wanted.kind)
            form = f"`type: {other.type}`" if is_alike else other.yaml_form
            return name, f"class {name} belongs to {form}"
    return None


def find_method_of_kind(wanted: Generation, methods: Container[str]) -> tuple[str, str] | None:
    """Return one of `methods` that the same class has under another kind, and that kind."""
    same_class = (row for row in _others(wanted) if (row.key, row.class_name) == (wanted.key, wanted.class_name))
    of_kinds = {name: row.kind for row in same_class for name in row.methods}
    for name, kind in of_kinds.items():
        if name in methods and name not in wanted.methods:
            return name, kind
    return None


def find_foreign_method(wanted: Generation, methods: Container[str]) -> tuple[str, str] | None:
    """Return one of `methods` that only another generation serves, and a sentence that says which."""
    for other in _others(wanted):
        for name in other.methods:
            if other.class_name and name in methods and name not in wanted.methods:
                return name, f"{name} belongs to {other.yaml_form}"
    return None


def _others(wanted: Generation) -> list[Generation]:
    """List all rows, those of the same kind first: who has the wrong class rarely has the wrong kind as well."""
    return sorted(GENERATIONS.values(), key=lambda row: row.kind != wanted.kind)
