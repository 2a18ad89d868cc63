"""Free capacity of the machine or cluster: devices for replicas; cores, memory and devices for job workers. Pure.

The engine assigns concrete devices (`engine/devices.py`); this module only counts them.

Replicas have precedence over job workers: what a replica reserves is not available to jobs. The exception is the only
job worker, which may share the replicas' cores. Replicas are rarely all busy, and without the exception a job could
wait forever.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from cortex.config.schema import Compute
from cortex.engine.devices import Inventory
from cortex.errors import format_size
from cortex.worker.spec import ReplicaSpec

#: Tolerance for comparing sums of fractions of cores.
_EPSILON = 1e-6


@dataclass(frozen=True)
class DeviceCapacity:
    """Devices that no remaining replica holds. Devices of a replica that is being stopped count as free."""

    gpus: int = 0
    chips: int = 0
    total_gpus: int = 0
    total_chips: int = 0

    @classmethod
    def of(cls, devices: Inventory, running: Iterable[ReplicaSpec]) -> DeviceCapacity:
        """Count the devices that `running` leaves free."""
        free = devices.free(running)
        return cls(len(free.gpus), len(free.chips), len(devices.gpus), len(devices.chips))

    def fits(self, compute: Compute) -> bool:
        """Return whether one more replica fits."""
        return not any(self.lacking(compute))

    def lacking(self, compute: Compute) -> tuple[bool, bool]:
        """Return whether one more replica would lack GPUs, and whether it would lack chips."""
        return compute.gpu > max(self.gpus, 0), compute.inf > max(self.chips, 0)

    def reserve(self, compute: Compute) -> DeviceCapacity:
        """Return the capacity after one more replica starts."""
        return replace(self, gpus=self.gpus - compute.gpu, chips=self.chips - compute.inf)

    def release(self, *specs: ReplicaSpec) -> DeviceCapacity:
        """Return the capacity after replicas end."""
        gpus, chips = sum(len(spec.gpu_ids) for spec in specs), sum(len(spec.inf_ids) for spec in specs)
        return replace(self, gpus=self.gpus + gpus, chips=self.chips + chips)

    def shortage(self, compute: Compute) -> str:
        """Describe the devices that one more replica would lack; empty if it fits."""
        gpus, chips = self.lacking(compute)
        if gpus:
            return _device_shortage("GPU", compute.gpu, self.gpus, self.total_gpus)
        if chips:
            return _device_shortage("Inferentia chip", compute.inf, self.chips, self.total_chips)
        return ""


@dataclass(frozen=True)
class MachineCapacity:
    """Free cores, memory and devices, and the totals."""

    cores: float
    memory_bytes: int
    devices: DeviceCapacity = DeviceCapacity()  # noqa: RUF009 - it is frozen
    total_cores: float = 0.0
    total_memory_bytes: int = 0
    replica_cores: float = 0.0  #: held by replicas of APIs
    replica_memory_bytes: int = 0

    @classmethod
    def of(cls, inventory: Inventory, running: Iterable[ReplicaSpec]) -> MachineCapacity:
        """Count what `running`, including processes that are being stopped, leaves free."""
        held = list(running)
        replicas = [spec for spec in held if not spec.is_job_worker]
        return cls(
            inventory.cores - sum(spec.cpu for spec in held),
            inventory.memory_bytes - sum(spec.mem_bytes for spec in held),
            DeviceCapacity.of(inventory, held),
            inventory.cores,
            inventory.memory_bytes,
            sum(spec.cpu for spec in replicas),
            sum(spec.mem_bytes for spec in replicas),
        )

    @property
    def with_shared_cores(self) -> MachineCapacity:
        """The capacity for the only job worker, which may share cores with replicas."""
        return replace(self, cores=self.total_cores)

    def fits(self, compute: Compute) -> bool:
        """Return whether one more job worker fits."""
        return not any(self.lacking(compute))

    def lacking(self, compute: Compute) -> tuple[bool, ...]:
        """Return whether one more job worker would lack cores, memory, GPUs and chips, in this order."""
        cpu, mem = compute.cpu or 0.0, compute.mem or 0
        devices = self.devices.lacking(compute)
        return cpu > 0 and cpu > self.cores + _EPSILON, mem > 0 and mem > self.memory_bytes, *devices

    def gains(self, compute: Compute, spec: ReplicaSpec) -> bool:
        """Return whether a job worker that ends releases some of what one more job worker lacks."""
        held = spec.cpu, spec.mem_bytes, len(spec.gpu_ids), len(spec.inf_ids)
        return any(lacks and amount for lacks, amount in zip(self.lacking(compute), held, strict=True))

    def reserve(self, compute: Compute) -> MachineCapacity:
        """Return the capacity after one more job worker starts."""
        return replace(
            self,
            cores=self.cores - (compute.cpu or 0.0),
            memory_bytes=self.memory_bytes - (compute.mem or 0),
            devices=self.devices.reserve(compute),
        )

    def release(self, *specs: ReplicaSpec) -> MachineCapacity:
        """Return the capacity after job workers end."""
        return replace(
            self,
            cores=self.cores + sum(spec.cpu for spec in specs),
            memory_bytes=self.memory_bytes + sum(spec.mem_bytes for spec in specs),
            devices=self.devices.release(*specs),
        )

    def shortage(self, compute: Compute) -> str:
        """Describe what one more job worker would lack; empty if it fits."""
        cores, memory, *_ = self.lacking(compute)
        if cores:
            cpu = compute.cpu or 0.0
            free = max(0, round(self.cores, 3))  # rounded: sums of fractions leave residues; 0 before: never "-0"
            if cpu > self.total_cores:
                return _hopeless(_cores(f"{cpu:g}"), f"{self.total_cores:g}")
            is_held = cpu > self.total_cores - self.replica_cores + _EPSILON
            held = _advice(_cores(f"{self.replica_cores:.3g}"), "compute.cpu") if is_held else ""
            needs = _needs(_cores(f"{cpu:g}"), f"{free:.3g}", f"{self.total_cores:g}")
            return f"{needs}; it starts once {'no other worker runs' if is_held else 'there is capacity'}{held}"
        if memory:
            mem, total = compute.mem or 0, format_size(self.total_memory_bytes)
            if mem > self.total_memory_bytes:
                return _hopeless(format_size(mem), total)
            is_held = mem > self.total_memory_bytes - self.replica_memory_bytes
            held = _advice(format_size(self.replica_memory_bytes), "compute.mem") if is_held else ""
            needs = _needs(format_size(mem), format_size(max(self.memory_bytes, 0)), total)
            return f"{needs}; it starts once there is capacity{held}"
        return self.devices.shortage(compute).replace("a replica", "a worker")


def needs_devices(compute: Compute) -> bool:
    """Return whether a replica needs GPUs or Inferentia chips, which are limited in number."""
    return bool(compute.gpu or compute.inf)


def _device_shortage(name: str, wanted: int, free: int, total: int) -> str:
    needs = f"a replica needs {wanted} {name}{'s' if wanted > 1 else ''}"
    if wanted > total:
        return f"{needs}, but this machine has {total or 'none'}"
    return f"{needs}, but {max(free, 0) or 'none'} of this machine's {total} is free; it starts once there is capacity"


def _cores(number: str) -> str:
    return f"{number} core" if number == "1" else f"{number} cores"


def _hopeless(wanted: str, total: str) -> str:
    return f"a worker needs {wanted}, but this machine has {total}; lower its `compute`"


def _needs(wanted: str, free: str, total: str) -> str:
    return f"a worker needs {wanted}, but {free} of this machine's {total} {'is' if free == '1' else 'are'} free"


def _advice(held: str, field: str) -> str:
    return f" (replicas of APIs hold {held}: delete some, or lower their {field})"
