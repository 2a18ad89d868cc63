"""A workload, which is what was sent to an AsyncAPI: how it is written as a batch, and read by the worker that gets it.

Workers import this, so it imports nothing but the standard library.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass

from cortex.lifecycle import WorkloadStatus

#: A batch travels as one line. In it a line break is `ESC n`, and ESC itself `ESC e`.
_ESCAPE, _ESCAPED_ESCAPE, _ESCAPED_BREAK = b"\x1b", b"\x1be", b"\x1bn"


@dataclass(frozen=True)
class Workload:
    """What was sent, as it came."""

    id: uuid.UUID
    content_type: str
    body: bytes

    def to_line(self) -> bytes:
        """Return bytes without a line break; `from_line` is the inverse."""
        whole = b"\0".join((str(self.id).encode(), self.content_type.encode(errors="replace"), self.body))
        return whole.replace(_ESCAPE, _ESCAPED_ESCAPE).replace(b"\n", _ESCAPED_BREAK)

    @classmethod
    def from_line(cls, line: bytes) -> Workload:
        """Read what `to_line` wrote. Raises: ValueError."""
        whole = line.replace(_ESCAPED_BREAK, b"\n").replace(_ESCAPED_ESCAPE, _ESCAPE)
        name, content_type, body = whole.split(b"\0", 2)
        return cls(uuid.UUID(name.decode()), content_type.decode(), body)


@dataclass(frozen=True)
class WorkloadView:
    """How a workload is."""

    id: uuid.UUID
    key: int  #: of its batch
    status: WorkloadStatus
    created_at: float  #: UNIX seconds
    ended_at: float | None = None
    value: bytes = b""  #: the result as JSON, or the words of the error
