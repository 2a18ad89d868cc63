"""What a connection needs of the application that answers its requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from cortex.replica.http import Connection


class Application(Protocol):
    """What a connection needs of the application."""

    max_body_bytes: int

    def handle(self, connection: Connection) -> None:
        """Answer the request that `connection` holds, now or later."""

    def too_large(self, connection: Connection) -> None:
        """Answer a request whose body exceeds `max_body_bytes`; the connection closes after it."""

    def malformed(self, connection: Connection) -> None:
        """Answer bytes that are not HTTP; the connection closes after it."""

    def idle(self, connection: Connection) -> None:
        """Learn that the connection is ready for its next request."""

    def gone(self, connection: Connection) -> None:
        """Learn that the connection closed; its request, if it has one, has nobody waiting any more."""
