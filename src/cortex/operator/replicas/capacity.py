"""Counts the devices of the machine that replicas can still be given. Pure; which ones they get is the engine's."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from cortex.config.schema import Compute
from cortex.engine.devices import Inventory
from cortex.replica.spec import ReplicaSpec


@dataclass(frozen=True)
class Room:
    """What no replica holds that stays: what is held by one that is being stopped is as good as free."""

    gpus: int = 0
    chips: int = 0
    all_gpus: int = 0
    all_chips: int = 0

    @classmethod
    def of(cls, devices: Inventory, staying: Iterable[ReplicaSpec]) -> Room:
        """Count what is free besides the replicas that stay."""
        free = devices.free(staying)
        return cls(len(free.gpus), len(free.chips), len(devices.gpus), len(devices.chips))

    def fits(self, compute: Compute) -> bool:
        """Tell whether one replica more finds what it wants."""
        return compute.gpu <= max(self.gpus, 0) and compute.inf <= max(self.chips, 0)

    def take(self, compute: Compute) -> Room:
        """Return what is left beside one replica more."""
        return replace(self, gpus=self.gpus - compute.gpu, chips=self.chips - compute.inf)

    def give_back(self, spec: ReplicaSpec) -> Room:
        """Return what there is once a replica has ended."""
        return replace(self, gpus=self.gpus + len(spec.gpu_ids), chips=self.chips + len(spec.inf_ids))

    def lack(self, compute: Compute) -> str:
        """Say what one replica more is short of; empty if it fits."""
        if compute.gpu > self.gpus:
            return _lack("GPU", compute.gpu, self.gpus, self.all_gpus)
        return _lack("Inferentia chip", compute.inf, self.chips, self.all_chips) if compute.inf > self.chips else ""


def wants_devices(compute: Compute) -> bool:
    """Tell whether replicas need something that there are only so many of."""
    return bool(compute.gpu or compute.inf)


def _lack(name: str, wanted: int, free: int, there: int) -> str:
    wants = f"a replica wants {wanted} {name}{'s' if wanted > 1 else ''}"
    if wanted > there:
        return f"{wants}, and this machine has {there or 'none'}"
    return f"{wants}, and {free or 'none'} of this machine's {there} is free; it starts once there is room"
