"""What a gateway does at this moment, by API; of one gateway or of several together. Pure data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

K = TypeVar("K", str, int)


@dataclass(frozen=True)
class BackendStats:
    """What one API's gateway side does at this moment, over all workers."""

    in_flight: int  #: requests inside its replicas
    queued: int  #: requests that wait for a free replica
    requests: int = 0  #: all of them: coming in, held while there is no replica, queued, inside, going out
    servers: Mapping[str, int] = field(default_factory=dict)  #: in flight by server, draining ones included
    responses: Mapping[int, int] = field(default_factory=dict)  #: answers by class, 1 to 5; never goes back
    average_ms: float | None = None  #: duration of the latest requests

    def to_json(self) -> dict[str, Any]:
        """Return what `from_json` takes."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> BackendStats:
        """Return what `to_json` told of. Raises: KeyError, TypeError, ValueError for anything else."""
        return cls(
            in_flight=int(data["in_flight"]),
            queued=int(data["queued"]),
            requests=int(data["requests"]),
            servers={str(name): int(count) for name, count in data["servers"].items()},
            responses={int(kind): int(count) for kind, count in data["responses"].items()},
            average_ms=None if data["average_ms"] is None else float(data["average_ms"]),
        )


def summed(stats: Sequence[BackendStats]) -> BackendStats:
    """Return what several gateways do together; their times weigh by their answers."""
    timed = [(sum(each.responses.values()) or 1, each.average_ms) for each in stats if each.average_ms is not None]
    weight = sum(answers for answers, _ in timed)
    return BackendStats(
        in_flight=sum(each.in_flight for each in stats),
        queued=sum(each.queued for each in stats),
        requests=sum(each.requests for each in stats),
        servers=_added(each.servers for each in stats),
        responses=_added(each.responses for each in stats),
        average_ms=sum(answers * average for answers, average in timed) / weight if timed else None,
    )


def _added(counts: Iterable[Mapping[K, int]]) -> dict[K, int]:
    total: dict[K, int] = {}
    for each in counts:
        for key, count in each.items():
            total[key] = total.get(key, 0) + count
    return total
