"""The argument `context` of user code: the interface of grpcio's `ServicerContext`, for a call that cortex serves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterable
from typing import TYPE_CHECKING, Any, NoReturn

import grpc

from cortex.worker.grpc.wire import Metadata, headers_of
from cortex.worker.http.responses import NO_HEADERS

if TYPE_CHECKING:
    from cortex.worker.grpc.call import Call


class AbortedError(Exception):
    """User code ended the call by `context.abort`."""


class Context:
    """Metadata, deadline and status of one call. User code may use it on any thread.

    `abort` and `send_initial_metadata` may also be awaited, as `async def` methods expect it.
    """

    def __init__(self, call: Call | None, metadata: Metadata, peer: str, deadline_ns: int | None) -> None:
        """Create the context of a call that its client abandons at `deadline_ns` (monotonic); None: a sample call."""
        self.aborted = False  #: the status is final, even if user code catches the exception
        self.head = self.trailing = NO_HEADERS
        self._call = call
        self._metadata = metadata
        self._peer = peer
        self._deadline_ns = deadline_ns
        self._code: grpc.StatusCode | None = None
        self._details = ""
        self._trailing: Metadata = ()
        self._is_active = True
        self._callbacks: list[Callable[[], Any]] = []
        self._lock = threading.Lock()

    def end(self) -> list[Callable[[], Any]]:
        """Mark the call as ended; return the callbacks to run."""
        with self._lock:
            self._is_active = False
            callbacks, self._callbacks = self._callbacks, []
        return callbacks

    # Of `grpc.RpcContext`.

    def is_active(self) -> bool:
        """Return whether the client still waits for the call."""
        return self._is_active

    def time_remaining(self) -> float | None:
        """Return the seconds until the deadline of the client; None if it set none."""
        if self._deadline_ns is None:
            return None
        return max(0.0, (self._deadline_ns - time.monotonic_ns()) / 1e9)

    def cancel(self) -> None:
        """Cancel the call."""
        if self._call is not None:
            self._call.cancel()

    def cancelled(self) -> bool:
        """Return whether the call has ended before the method has returned."""
        return not self._is_active

    def done(self) -> bool:
        """Return whether the call has ended."""
        return not self._is_active

    def add_callback(self, callback: Callable[[], Any]) -> bool:
        """Call `callback` when the call ends; return False if it has ended."""
        with self._lock:
            if self._is_active:
                self._callbacks.append(callback)
            return self._is_active

    def add_done_callback(self, callback: Callable[[Any], Any]) -> None:
        """Call `callback` with this context when the call ends."""
        self.add_callback(lambda: callback(self))

    # Of `grpc.ServicerContext`.

    def invocation_metadata(self) -> Metadata:
        """Return the metadata that the client sent; keys that end in `-bin` have bytes."""
        return self._metadata

    def peer(self) -> str:
        """Return the address of the client."""
        return self._peer

    def peer_identities(self) -> None:
        """Return None: the gateway authenticates clients."""

    def peer_identity_key(self) -> None:
        """Return None: the gateway authenticates clients."""

    def auth_context(self) -> dict[str, Any]:
        """Return no properties: the gateway ends TLS."""
        return {}

    def set_compression(self, compression: Any) -> None:
        """Ignore it: responses are not compressed."""

    def disable_next_message_compression(self) -> None:
        """Do nothing: responses are not compressed."""

    def send_initial_metadata(self, initial_metadata: Iterable[tuple[str, str | bytes]]) -> _Done:
        """Send the metadata of the response before its first message. Raises: ValueError."""
        self.head = headers_of(initial_metadata)
        if self._call is not None:
            self._call.send_head(self.head)
        return _Done()

    def set_trailing_metadata(self, trailing_metadata: Iterable[tuple[str, str | bytes]]) -> None:
        """Set the metadata that follows the last message. Raises: ValueError."""
        self._trailing = tuple((key, value) for key, value in trailing_metadata)
        self.trailing = headers_of(self._trailing)

    def trailing_metadata(self) -> Metadata:
        """Return the metadata that follows the last message."""
        return self._trailing

    def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: Iterable[tuple[str, str | bytes]] = ()
    ) -> NoReturn:
        """End the call with a status. Raises: AbortedError."""
        if code is grpc.StatusCode.OK:
            code, details = grpc.StatusCode.UNKNOWN, f"abort() was called with the status OK: {details}"
        self._code, self._details, self.aborted = code, details, True
        if trailing_metadata := tuple(trailing_metadata):
            self.set_trailing_metadata(trailing_metadata)
        raise AbortedError(details)

    def abort_with_status(self, status: Any) -> NoReturn:
        """End the call with a `grpc.Status`. Raises: AbortedError."""
        self.abort(status.code, status.details, status.trailing_metadata or ())

    def set_code(self, code: grpc.StatusCode) -> None:
        """Set the status with which the call will end."""
        self._code = code

    def set_details(self, details: str) -> None:
        """Set the message of the status."""
        self._details = details

    def code(self) -> grpc.StatusCode | None:
        """Return the status that user code has set."""
        return self._code

    def details(self) -> str:
        """Return the message of the status that user code has set."""
        return self._details


class _Done:
    """An awaitable that has nothing to wait for."""

    def __await__(self) -> Generator[None, None, None]:
        return
        yield


grpc.ServicerContext.register(Context)
