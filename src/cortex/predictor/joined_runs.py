"""Server-side batching of TensorFlow models: runs that threads ask for at the same time are one run of the model.

While a run goes on, those that come wait and are joined for the next: nobody ever waits for others to come. It must not
know requests, nor what runs the models.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np

from cortex.errors import ModelError
from cortex.models.loader import LoadRequest
from cortex.predictor.clients.servable import Backend, Servable, SignatureInfo
from cortex.predictor.clients.tensors import Array

S = TypeVar("S", bound=Servable)

#: A signature, and of each input its type and the shape of one row: only what has the same can be joined.
_Kind = tuple[str, tuple[tuple[str, str, tuple[int, ...]], ...]]


@dataclass
class _Run:
    """What one thread asked for."""

    inputs: Mapping[str, Array]
    rows: int
    outputs: Mapping[str, Array] | None = None
    error: BaseException | None = None
    leads: bool = False  #: the runs that wait are this thread's to make
    woken: threading.Event = field(default_factory=threading.Event)


@dataclass
class _Line:
    """The runs of one kind that wait, the oldest first."""

    waiting: deque[_Run] = field(default_factory=deque)
    is_busy: bool = False


class JoinedRuns(Generic[S]):
    """A loaded model whose runs are joined; itself a `Servable`."""

    def __init__(self, servable: S, max_rows: int, isolates_failures: bool) -> None:
        self.servable = servable
        self._max_rows = max_rows
        self._isolates_failures = isolates_failures
        self._lines: dict[_Kind, _Line] = {}
        # Signatures whose outputs can't be told apart by rows: some say so, of others a run shows it.
        self._fixed = {key for key, signature in servable.signatures.items() if not _has_rows(signature)}
        self._turn = threading.Lock()

    @property
    def signatures(self) -> Mapping[str, SignatureInfo]:
        """Those of the model."""
        return self.servable.signatures

    def run(self, signature_key: str, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        """Run a signature, perhaps with what other threads ask for. Raises: ModelError, for these inputs only."""
        kind = _kind(signature_key, inputs)
        if kind is None or signature_key in self._fixed:
            return self.servable.run(signature_key, inputs)
        run = _Run(inputs, len(next(iter(inputs.values()))))
        with self._turn:
            line = self._lines.setdefault(kind, _Line())
            line.waiting.append(run)
            run.leads = not line.is_busy
            line.is_busy = True
        if not run.leads:
            run.woken.wait()
        if run.leads:
            self._lead(kind, line)
        if run.error is not None:
            raise run.error
        assert run.outputs is not None
        return run.outputs

    def _lead(self, kind: _Kind, line: _Line) -> None:
        """Make one run of the oldest that wait, the caller's among them, and leave the rest to the next of them."""
        with self._turn:
            runs = [line.waiting.popleft()]
            rows = runs[0].rows
            may_join = kind[0] not in self._fixed
            while may_join and line.waiting and rows + line.waiting[0].rows <= self._max_rows:
                rows += line.waiting[0].rows
                runs.append(line.waiting.popleft())
        try:
            self._run_joined(kind[0], runs)
        finally:
            with self._turn:
                heir = line.waiting[0] if line.waiting else None
                line.is_busy = heir is not None
                if heir is None:
                    self._lines.pop(kind, None)
                else:
                    heir.leads = True
            for run in (*runs, *([heir] if heir else [])):
                run.woken.set()

    def _run_joined(self, signature_key: str, runs: Sequence[_Run]) -> None:
        try:
            inputs = runs[0].inputs
            if len(runs) > 1:
                inputs = {name: np.concatenate([run.inputs[name] for run in runs]) for name in inputs}
            outputs = self.servable.run(signature_key, inputs)
        except BaseException as error:  # each thread is told; what is no fault of the inputs would come again
            if len(runs) > 1 and isinstance(error, ModelError) and self._isolates_failures:
                middle = len(runs) // 2
                self._run_joined(signature_key, runs[:middle])
                self._run_joined(signature_key, runs[middle:])
                return
            for run in runs:
                run.error = error
            return
        self._share_out(signature_key, runs, outputs)

    def _share_out(self, signature_key: str, runs: Sequence[_Run], outputs: Mapping[str, Array]) -> None:
        rows = sum(run.rows for run in runs)
        if any(array.ndim == 0 or len(array) != rows for array in outputs.values()):
            self._fixed.add(signature_key)
        if len(runs) == 1:
            runs[0].outputs = outputs
            return
        if signature_key in self._fixed:
            for run in runs:
                self._run_joined(signature_key, [run])
            return
        start = 0
        for run in runs:
            run.outputs = {name: array[start : start + run.rows] for name, array in outputs.items()}
            start += run.rows


class JoiningBackend(Generic[S]):
    """A backend whose models join their runs."""

    def __init__(self, backend: Backend[S], max_rows: int, isolates_failures: bool) -> None:
        self._backend = backend
        self._max_rows = max_rows
        self._isolates_failures = isolates_failures

    def load(self, request: LoadRequest) -> JoinedRuns[S]:
        """Load a model. Raises: ModelError."""
        return JoinedRuns(self._backend.load(request), self._max_rows, self._isolates_failures)

    def unload(self, servable: JoinedRuns[S]) -> None:
        """Release all that the model took."""
        self._backend.unload(servable.servable)

    def close(self) -> None:
        """End what the backend started."""
        self._backend.close()


def _has_rows(signature: SignatureInfo) -> bool:
    """Tell whether a signature leaves open how many rows its inputs and outputs have: else it takes no more of them."""
    specs = (*signature.inputs.values(), *signature.outputs.values())
    return all(spec.shape is None or (spec.shape != () and spec.shape[0] is None) for spec in specs)


def _kind(signature_key: str, inputs: Mapping[str, Array]) -> _Kind | None:
    """Tell what these inputs can be joined with; None if they have no rows."""
    if not inputs or any(array.ndim == 0 for array in inputs.values()):
        return None
    if len({len(array) for array in inputs.values()}) != 1:
        return None
    return signature_key, tuple((name, array.dtype.str, array.shape[1:]) for name, array in sorted(inputs.items()))
