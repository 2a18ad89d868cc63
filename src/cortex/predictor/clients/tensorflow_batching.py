"""Server-side batching of TensorFlow models: concurrent runs of several threads are combined into one.

Runs that arrive while one is in progress wait and form the next batch, so no run waits for others to arrive. There is
no batching thread: the thread whose run is the oldest leads its batch, then hands the lead to the next in the queue.
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
from cortex.payloads.arrays import Array
from cortex.predictor.clients.tensorflow import Servable, SignatureInfo, TensorFlowBackend

S = TypeVar("S", bound=Servable)

#: Signature key, and the name, type and row shape of each input: only equal ones can be combined.
_BatchKey = tuple[str, tuple[tuple[str, str, tuple[int, ...]], ...]]


@dataclass
class _Run:
    """The run of one thread."""

    inputs: Mapping[str, Array]
    rows: int
    outputs: Mapping[str, Array] | None = None
    error: BaseException | None = None
    leads: bool = False  #: this thread must run the next batch
    woken: threading.Event = field(default_factory=threading.Event)


@dataclass
class _Queue:
    """The waiting runs of one key, the oldest first."""

    waiting: deque[_Run] = field(default_factory=deque)
    is_busy: bool = False


class BatchingServable(Generic[S]):
    """A `Servable` that combines concurrent runs of another."""

    def __init__(self, servable: S, max_rows: int, isolates_failures: bool) -> None:
        self.servable = servable
        self._max_rows = max_rows
        self._isolates_failures = isolates_failures
        self._queues: dict[_BatchKey, _Queue] = {}
        # Signatures whose outputs can't be split by rows, by declaration or as observed.
        self._unbatchable = {key for key, signature in servable.signatures.items() if not _has_rows(signature)}
        self._lock = threading.Lock()

    @property
    def signatures(self) -> Mapping[str, SignatureInfo]:
        """Return the signatures of the model."""
        return self.servable.signatures

    def run(self, signature_key: str, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        """Run a signature, possibly in a batch with other threads. Raises: ModelError, for these inputs only."""
        key = _batch_key(signature_key, inputs)
        if key is None or signature_key in self._unbatchable:
            return self.servable.run(signature_key, inputs)
        run = _Run(inputs, len(next(iter(inputs.values()))))
        with self._lock:
            queue = self._queues.setdefault(key, _Queue())
            queue.waiting.append(run)
            run.leads = not queue.is_busy
            queue.is_busy = True
        if not run.leads:
            run.woken.wait()
        if run.leads:
            self._lead(key, queue)
        if run.error is not None:
            raise run.error
        assert run.outputs is not None
        return run.outputs

    def _lead(self, key: _BatchKey, queue: _Queue) -> None:
        """Run the oldest waiting runs as a batch, including the caller's, and hand the lead to the next run."""
        with self._lock:
            runs = [queue.waiting.popleft()]
            rows = runs[0].rows
            is_batchable = key[0] not in self._unbatchable
            while is_batchable and queue.waiting and rows + queue.waiting[0].rows <= self._max_rows:
                rows += queue.waiting[0].rows
                runs.append(queue.waiting.popleft())
        try:
            self._run_batch(key[0], runs)
        finally:
            with self._lock:
                successor = queue.waiting[0] if queue.waiting else None
                queue.is_busy = successor is not None
                if successor is None:
                    self._queues.pop(key, None)
                else:
                    successor.leads = True
            for run in (*runs, *([successor] if successor else [])):
                run.woken.set()

    def _run_batch(self, signature_key: str, runs: Sequence[_Run]) -> None:
        try:
            inputs = runs[0].inputs
            if len(runs) > 1:
                inputs = {name: np.concatenate([run.inputs[name] for run in runs]) for name in inputs}
            outputs = self.servable.run(signature_key, inputs)
        except BaseException as error:  # raised in each thread; only a ModelError can be the fault of one input
            if len(runs) > 1 and isinstance(error, ModelError) and self._isolates_failures:
                middle = len(runs) // 2
                self._run_batch(signature_key, runs[:middle])
                self._run_batch(signature_key, runs[middle:])
                return
            for run in runs:
                run.error = error
            return
        self._split_outputs(signature_key, runs, outputs)

    def _split_outputs(self, signature_key: str, runs: Sequence[_Run], outputs: Mapping[str, Array]) -> None:
        rows = sum(run.rows for run in runs)
        if any(array.ndim == 0 or len(array) != rows for array in outputs.values()):
            self._unbatchable.add(signature_key)
        if len(runs) == 1:
            runs[0].outputs = outputs
            return
        if signature_key in self._unbatchable:
            for run in runs:
                self._run_batch(signature_key, [run])
            return
        start = 0
        for run in runs:
            run.outputs = {name: array[start : start + run.rows] for name, array in outputs.items()}
            start += run.rows


class BatchingBackend(Generic[S]):
    """A backend whose models join concurrent runs."""

    def __init__(self, backend: TensorFlowBackend[S], max_rows: int, isolates_failures: bool) -> None:
        self._backend = backend
        self._max_rows = max_rows
        self._isolates_failures = isolates_failures

    def load(self, request: LoadRequest) -> BatchingServable[S]:
        """Load a model. Raises: ModelError."""
        return BatchingServable(self._backend.load(request), self._max_rows, self._isolates_failures)

    def unload(self, servable: BatchingServable[S]) -> None:
        """Release all resources of a model."""
        self._backend.unload(servable.servable)

    def close(self) -> None:
        """Stop the processes of the backend."""
        self._backend.close()


def _has_rows(signature: SignatureInfo) -> bool:
    """Return whether the number of rows of all inputs and outputs is unspecified, so that runs can be combined."""
    specs = (*signature.inputs.values(), *signature.outputs.values())
    return all(spec.shape is None or (spec.shape != () and spec.shape[0] is None) for spec in specs)


def _batch_key(signature_key: str, inputs: Mapping[str, Array]) -> _BatchKey | None:
    """Return the key of inputs that can be combined; None if they have no common number of rows."""
    if not inputs or any(array.ndim == 0 for array in inputs.values()):
        return None
    if len({len(array) for array in inputs.values()}) != 1:
        return None
    return signature_key, tuple((name, array.dtype.str, array.shape[1:]) for name, array in sorted(inputs.items()))
