"""Load an estimator, or a model of any other format that `cortex.models.formats` detects, to run it without user code.

LoadRequest ── detect ──► Detection ── trust, requirements ──► the loader of its format ──► RunnableModel
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from cortex.payloads.signature import ModelSignature

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Arrays = Mapping[str, NDArray[Any]]


class RunnableModel(Protocol):
    """One loaded version of a model. Any number of threads use it at once."""

    @property
    def signature(self) -> ModelSignature:
        """Return its inputs and outputs; `description` says what was found in its files."""
        ...

    def infer(self, inputs: Arrays) -> Arrays:
        """Return all outputs by name.

        `inputs` has the names, datatypes and shapes of the signature. Elements of `BYTES` are bytes or str; those of
        outputs too. The first axis of all tensors is the batch.

        Raises: ValueError with a message for callers (400), ModelError if the model fails.
        """
        ...
