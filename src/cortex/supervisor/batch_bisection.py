"""The requests that were inside when a batch killed its process: they come again, and are then called in groups.

One group after the other: so the next death tells which one is guilty, and that is split in halves, until the guilty
request is alone. It knows nothing of connections and processes.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence

#: An id has up to 48 bytes, and a message to a process has room for about two thousand of them.
_TOLD_AT_ONCE = 1000


class Suspects:
    """Request ids by the group in which they may be called: never with a request of no group, or of another."""

    def __init__(self) -> None:
        self._groups: dict[str, int] = {}
        self._last = 0
        self.has_new = False  #: a process died of them since somebody last looked; theirs to set back

    @property
    def groups(self) -> dict[str, int]:
        """Return the group of each."""
        return dict(self._groups)

    def told(self) -> Iterator[dict[str, int]]:
        """Go through the groups in parts that a message to a process has room for."""
        items = iter(self._groups.items())
        while part := dict(itertools.islice(items, _TOLD_AT_ONCE)):
            yield part

    def blame(self, batches: Sequence[Sequence[str]]) -> None:
        """Take the batches that were inside: a single one is split, of several each is a group."""
        self.has_new = True
        if len(batches) == 1:
            middle = (len(batches[0]) + 1) // 2
            batches = [batches[0][:middle], batches[0][middle:]]
        for batch in batches:
            self._last += 1
            for request_id in batch:
                self._groups[request_id] = self._last

    def keep(self, request_ids: Collection[str]) -> None:
        """Forget all others: they were answered."""
        self._groups = {name: group for name, group in self._groups.items() if name in request_ids}
