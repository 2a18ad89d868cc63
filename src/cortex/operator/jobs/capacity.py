"""Counts what the machine has left for workers of jobs: cores, memory and devices. Pure.

Replicas that serve come first: what they asked for is not there for jobs, except that the only worker may share
their cores. They are rarely all busy, and a job that waits for ever does nobody any good.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from cortex.config.schema import Compute
from cortex.engine.devices import Inventory
from cortex.operator.replicas.capacity import Room
from cortex.replica.spec import ReplicaSpec

_GIB = 1024**3
#: Sums of fractions of cores are compared with this much tolerance.
_EPSILON = 1e-6


@dataclass(frozen=True)
class JobRoom:
    """What one more worker can still be given, and all that there is."""

    cores: float
    memory_bytes: int
    devices: Room = Room()  # noqa: RUF009 - it is frozen
    all_cores: float = 0.0
    all_memory_bytes: int = 0
    served_cores: float = 0.0  #: what replicas of APIs hold
    served_memory_bytes: int = 0

    @classmethod
    def of(cls, inventory: Inventory, running: Iterable[ReplicaSpec]) -> JobRoom:
        """Count what is free besides all that runs, what is being stopped included."""
        held = list(running)
        serving = [spec for spec in held if not spec.is_job_worker]
        return cls(
            inventory.cores - sum(spec.cpu for spec in held),
            inventory.memory_bytes - sum(spec.mem_bytes for spec in held),
            Room.of(inventory, held),
            inventory.cores,
            inventory.memory_bytes,
            sum(spec.cpu for spec in serving),
            sum(spec.mem_bytes for spec in serving),
        )

    def fits(self, compute: Compute) -> bool:
        """Tell whether one worker more finds what it wants."""
        return not self.lack(compute)

    @property
    def shared(self) -> JobRoom:
        """Return what the only worker may take: replicas lend it their cores."""
        return replace(self, cores=self.all_cores)

    def take(self, compute: Compute) -> JobRoom:
        """Return what is left beside one worker more."""
        return replace(
            self,
            cores=self.cores - (compute.cpu or 0.0),
            memory_bytes=self.memory_bytes - (compute.mem or 0),
            devices=self.devices.take(compute),
        )

    def give_back(self, spec: ReplicaSpec) -> JobRoom:
        """Return what there is once a worker has ended."""
        return replace(
            self,
            cores=self.cores + spec.cpu,
            memory_bytes=self.memory_bytes + spec.mem_bytes,
            devices=self.devices.give_back(spec),
        )

    def lack(self, compute: Compute) -> str:
        """Say what one worker more is short of; empty if it fits."""
        cpu, mem = compute.cpu or 0.0, compute.mem or 0
        if cpu > self.cores + _EPSILON and cpu:
            free = max(round(self.cores, 3), 0)  # without what adding fractions leaves
            message = _lack(f"{cpu:g} cores", f"{free:.3g}", f"{self.all_cores:g}", cpu > self.all_cores)
            is_served = self.all_cores >= cpu > self.all_cores - self.served_cores + _EPSILON
            return message + (_advice(f"{self.served_cores:.3g} cores", "compute.cpu") if is_served else "")
        if mem > self.memory_bytes and mem:
            left, there = max(self.memory_bytes, 0) / _GIB, self.all_memory_bytes / _GIB
            message = _lack(f"{mem / _GIB:.3g} GiB", f"{left:.3g}", f"{there:.3g}", mem > self.all_memory_bytes)
            is_served = self.all_memory_bytes >= mem > self.all_memory_bytes - self.served_memory_bytes
            return message + (_advice(f"{self.served_memory_bytes / _GIB:.3g} GiB", "compute.mem") if is_served else "")
        return self.devices.lack(compute).replace("a replica", "a worker")


def _lack(wanted: str, free: str, there: str, is_hopeless: bool) -> str:
    if is_hopeless:
        return f"a worker wants {wanted}, and this machine has {there}; lower its `compute`"
    return f"a worker wants {wanted}, and {free} of this machine's {there} are free; it starts once there is room"


def _advice(held: str, field: str) -> str:
    return f" (replicas of APIs hold {held}: delete some, or lower their {field})"
