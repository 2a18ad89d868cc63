"""Construct the user's class, or initialize the user's module, with what the generation hands it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cortex.predictor.interface import Generation
from cortex.predictor.source_checks import declared_names
from cortex.predictor.tracebacks import user_code


def initialize(module: Any, generation: Generation, model_path: str | None, metadata: dict[str, Any]) -> None:
    """Call the module's constructing function, if it has one. Raises: UserError."""
    init = getattr(module, generation.constructor, None)
    if init is not None:
        with user_code(f"by {generation.constructor}()"):
            init(model_path, metadata)


def construct(
    target: type,
    generation: Generation,
    values: Mapping[str, Any],
    before_init: Callable[[object], None] | None = None,
) -> object:
    """Make the user's object; `before_init` gets it before its `__init__` runs, to bind what that may call.

    Raises: UserError.
    """
    declared = declared_names(target.__init__, generation.constructor_signature)  # type: ignore[misc]
    chosen = {name: values[name] for name in declared if name in values}
    with user_code(f"by {target.__name__}.__init__()"):
        if before_init is None:
            return target(**chosen)
        # What calling the class does, with one step between.
        new: Any = target.__new__
        instance = new(target, **({} if new is object.__new__ else chosen))
        before_init(instance)
        instance.__init__(**chosen)
    return instance
