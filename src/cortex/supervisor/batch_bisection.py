"""Bisection of batches that killed their process: finds the guilty request.

The requests of a batch that was running when its process died run again in the next process, in groups. Groups run one
after the other, so the next death names the guilty group. That group is split in halves until the guilty request is
alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence

#: A request id has up to 48 bytes, and a message to a process has room for about two thousand ids.
_IDS_PER_MESSAGE = 1000


class BatchBisection:
    """The group of each request under suspicion. Requests of one group run only with each other."""

    def __init__(self) -> None:
        self._groups: dict[str, int] = {}
        self._last_group = 0
        self.has_new = False  #: a process died because of them since the reader last reset this

    @property
    def groups(self) -> dict[str, int]:
        """The group of each request id."""
        return dict(self._groups)

    def messages(self) -> Iterator[dict[str, int]]:
        """Yield the groups in parts that fit into one message to a process."""
        items = iter(self._groups.items())
        while part := dict(itertools.islice(items, _IDS_PER_MESSAGE)):
            yield part

    def blame(self, batches: Sequence[Sequence[str]]) -> None:
        """Group the batches that were running at a death: split a single one, or make each of several a group."""
        self.has_new = True
        if len(batches) == 1:
            middle = (len(batches[0]) + 1) // 2
            batches = [batches[0][:middle], batches[0][middle:]]
        for batch in batches:
            self._last_group += 1
            for request_id in batch:
                self._groups[request_id] = self._last_group

    def keep(self, request_ids: Collection[str]) -> None:
        """Remove all other requests: they have been answered."""
        self._groups = {name: group for name, group in self._groups.items() if name in request_ids}
