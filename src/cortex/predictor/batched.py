"""Whether a class has something that server-side batching can call with several requests. Pure."""

from __future__ import annotations

from cortex.predictor.interface import Generation

_OR_REMOVE = 'or remove "server_side_batching" from the configuration'


def batched_name(generation: Generation) -> str:
    """Return the name of the method that gets batches: the one that answers POST."""
    return next(name for name, verb in generation.methods.items() if verb == "POST")


def batching_problem(name: str, is_defined: bool, streams: bool) -> tuple[str, str] | None:
    """Say why `server_side_batching` has no effect with a method of this name, and what to do; None if it has."""
    if not is_defined:
        return (
            f"server_side_batching makes one call of several to {name}(), which is not defined",
            f"add it, {_OR_REMOVE}",
        )
    if streams:
        fix = f"return a list with one result for each request, {_OR_REMOVE}"
        return f"server_side_batching can't join calls of {name}(), which streams its answers", fix
    return None
