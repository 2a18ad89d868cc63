"""Several calls of a model as one: inputs are joined along the first axis, and outputs split again. Imports numpy."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cortex.payloads.signature import ModelSignature

Arrays = Mapping[str, NDArray[Any]]


def joining_key(signature: ModelSignature, inputs: Arrays) -> Hashable | None:
    """Return what calls of one model must have in common to be joined: names, datatypes and all axes but the first.

    None: the call can't be joined, because the model takes a fixed number of rows, its axes are not known, or the
    inputs differ in their rows or have none.
    """
    given = [tensor for tensor in signature.inputs if tensor.name in inputs]
    has_open_rows = all(tensor.shape[:1] in ((-1,), ()) for tensor in (*given, *signature.outputs))
    rows = {array.shape[:1] for array in inputs.values()}
    if not has_open_rows or any(tensor.any_shape for tensor in given) or len(rows) != 1 or rows & {(), (0,)}:
        return None
    return tuple((name, array.dtype.str, array.shape[1:]) for name, array in sorted(inputs.items()))


def join(calls: Sequence[Arrays]) -> Arrays:
    """Return the inputs of one call for several calls with the same key."""
    return {name: np.concatenate([inputs[name] for inputs in calls]) for name in calls[0]}


def split(outputs: Any, calls: Sequence[Arrays]) -> list[Arrays] | None:
    """Return the outputs of each call; None if they do not have one row for each row of the inputs."""
    sizes = [next(iter(inputs.values())).shape[0] for inputs in calls]
    arrays = {name: np.asarray(value) for name, value in outputs.items()}
    if not arrays or any(array.shape[:1] != (sum(sizes),) for array in arrays.values()):
        return None
    ends = np.cumsum(sizes)[:-1]
    parts = {name: np.split(array, ends) for name, array in arrays.items()}
    return [{name: rows[index] for name, rows in parts.items()} for index in range(len(calls))]
