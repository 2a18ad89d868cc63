"""The server behind a proxy: that of a command, or a process of `cortex dev`."""

from __future__ import annotations

from collections.abc import Sequence

from cortex.worker.commands.upstream import Upstream, UpstreamConnection
from cortex.worker.spec import RequestLimits


class ProxiedServer:
    """A server to which requests are passed on, as their calls see it."""

    upstream: Upstream
    limits: RequestLimits
    strips_prefix = False
    is_stopping = False  #: the supervisor answers the requests that it does not finish

    def find_holders(self, connection: UpstreamConnection) -> list[int]:
        """Return the processes that hold the other end of a connection; none if they are not known."""
        return []

    def has_died(self, holders: Sequence[int]) -> bool:
        """Return whether the end of a connection is that of its process, or of the server."""
        return False

    def answered(self) -> None:
        """Note that it has answered."""
