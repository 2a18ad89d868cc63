"""Say what a class of another generation belongs to, for the loader and the source checker alike. Pure."""

from __future__ import annotations

from collections.abc import Container

from cortex.predictor.interface import FOREIGN_CLASSES, GENERATIONS, Generation


def find_foreign_class(wanted: Generation, classes: Container[str]) -> tuple[str, str] | None:
    """Return one of `classes` that was written for something else than `wanted`, and a sentence that says for what."""
    for name, reason in FOREIGN_CLASSES.items():
        if name in classes:
            return name, reason
    for other in GENERATIONS.values():
        name = other.class_name or ""
        if name in classes and name != wanted.class_name:
            form = f"`type: {other.type}`" if other.key == wanted.key else other.yaml_form
            return name, f"class {name} belongs to {form}"
    return None


def find_foreign_method(wanted: Generation, methods: Container[str]) -> tuple[str, str] | None:
    """Return one of `methods` that only another generation serves, and a sentence that says which."""
    for other in GENERATIONS.values():
        for name in other.methods:
            if other.class_name and name in methods and name not in wanted.methods:
                return name, f"{name} belongs to {other.yaml_form}"
    return None
