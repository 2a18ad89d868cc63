"""Compares the devices that an API asks for with those of the machine that is to run it. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from cortex.config.schema import Api
from cortex.config.violations import Violation
from cortex.engine.devices import Inventory


def device_violations(api: Api, devices: Inventory) -> Iterator[Violation]:
    """Say what this machine will never have enough of, however long a replica waits."""
    gpu, inf = api.compute.gpu, api.compute.inf
    if gpu > len(devices.gpus):
        has = _count(len(devices.gpus), "GPU") if devices.gpus else f"no NVIDIA GPU ({devices.why_no_gpus})"
        yield Violation(("compute.gpu",), f"{gpu}: this machine has {has}", "remove it, or deploy to another machine")
    if inf > len(devices.chips):
        has = _count(len(devices.chips), "Inferentia chip") if devices.chips else "no Inferentia chip (no /dev/neuron0)"
        yield Violation(("compute.inf",), f"{inf}: this machine has {has}", "remove it, or deploy to another machine")


def _count(number: int, name: str) -> str:
    return f"{number} {name}{'s' if number != 1 else ''}"
