"""Cancellation of calls that nobody waits for any more.

Synchronous user code asks for it by `cortex.cancelled()`. Asynchronous code is cancelled, and once more if its clean-up
takes longer than a call may take.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING

from cortex.worker.monitoring.request_log import write_log

if TYPE_CHECKING:
    from cortex.worker.http.connection import Connection

#: The connections of the requests of the current call. Calls set it and never reset it, as `request_log.REQUEST`.
CLIENTS: ContextVar[tuple[Connection, ...]] = ContextVar("cortex_clients", default=())


def cancelled() -> bool:
    """Return whether the client of the current call has disconnected, so that the call may end without a result.

    In a batch: whether all clients have. Always False with `on_disconnect: finish`, in a job, and outside of calls.
    A thread that user code starts is outside, unless it runs in a copy of the call's context.
    """
    clients = CLIENTS.get()
    return bool(clients) and all(connection.is_cancelled() for connection in clients)


def log_late_cleanup(request_id: str, timeout_s: float) -> None:
    """Log that user code is cancelled for the second time."""
    write_log(f"request {request_id} was cancelled, and its code still ran {timeout_s:g} s later: cancelled it again\n")
