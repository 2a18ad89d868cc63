"""Detection of GPUs and Inferentia chips, and their assignment to replicas. Never opens a device."""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from cortex.errors import ComputeUnavailableError
from cortex.processes.limits import usable_memory_bytes, usable_processors
from cortex.worker.devices import CUDA_DEVICES
from cortex.worker.spec import ReplicaSpec

DEVICE_DIR = Path("/dev")
_PROGRAM = "nvidia-smi"
#: A driver that initializes takes seconds per GPU.
_QUERY_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Inventory:
    """Resources for replicas: devices to assign, and cores and memory to share."""

    gpus: tuple[str, ...] = ()  #: ids in the form of CUDA_VISIBLE_DEVICES, independent of the order of devices
    chips: tuple[int, ...] = ()  #: Inferentia: N of /dev/neuronN
    why_no_gpus: str = ""  #: empty if there are GPUs
    cores: float = field(default=0.0, compare=False)
    memory_bytes: int = field(default=0, compare=False)

    def free(self, running: Iterable[ReplicaSpec]) -> Inventory:
        """Return the inventory without devices listed in the spec of a running replica."""
        held = [(spec.gpu_ids, spec.inf_ids) for spec in running]
        gpus = {gpu for ids, _ in held for gpu in ids}
        chips = {chip for _, ids in held for chip in ids}
        return replace(
            self,
            gpus=tuple(gpu for gpu in self.gpus if gpu not in gpus),
            chips=tuple(chip for chip in self.chips if chip not in chips),
        )


def assign(spec: ReplicaSpec, inventory: Inventory, running: Iterable[ReplicaSpec]) -> ReplicaSpec:
    """Assign free devices to a replica; GPUs already set in its spec are kept.

    Raises: ComputeUnavailableError if too few are free.
    """
    free = inventory.free(running)
    gpus = spec.gpu_ids or free.gpus[: spec.gpu]
    if spec.gpu > len(gpus):
        raise ComputeUnavailableError(f"{len(free.gpus)} of the {spec.gpu} GPUs that it requests are free")
    if spec.inf > len(free.chips):
        raise ComputeUnavailableError(f"{len(free.chips)} of the {spec.inf} Inferentia chips that it requests are free")
    return replace(spec, gpu_ids=gpus, inf_ids=free.chips[: spec.inf])


async def find_devices(environ: Mapping[str, str], device_dir: Path = DEVICE_DIR) -> Inventory:
    """Detect the resources of this machine, limited by `CUDA_VISIBLE_DEVICES` in `environ`. Never raises."""
    names = (re.fullmatch(r"neuron(\d+)", path.name) for path in device_dir.glob("neuron*"))
    inventory = Inventory(
        chips=tuple(sorted(int(match[1]) for match in names if match)),
        cores=usable_processors(),
        memory_bytes=usable_memory_bytes(psutil.virtual_memory().total),
    )
    try:
        found = parse_gpus(await query_gpus(environ, "index,uuid", _QUERY_TIMEOUT_S))
    except NoAnswerError as error:
        return replace(inventory, why_no_gpus=str(error))
    visible = visible_gpus(found, environ.get(CUDA_DEVICES))
    why = "" if visible else f"{CUDA_DEVICES} of the operator leaves none" if found else f"{_PROGRAM} lists none"
    return replace(inventory, gpus=visible, why_no_gpus=why)


def parse_gpus(text: str) -> dict[str, str]:
    """Parse `index, uuid` lines into a map."""
    found = (re.fullmatch(r"\s*(\d+)\s*,\s*(\S+)\s*", line) for line in text.splitlines())
    return {match[1]: match[2] for match in found if match}


def visible_gpus(found: Mapping[str, str], variable: str | None) -> tuple[str, ...]:
    """Apply `CUDA_VISIBLE_DEVICES` as CUDA does: indices or prefixes of ids; an invalid one ends the list."""
    if variable is None:
        return tuple(found.values())
    visible: list[str] = []
    for item in map(str.strip, variable.split(",")):
        gpu = found.get(item) or (item if item.startswith("MIG-") else _by_prefix(found.values(), item))
        if gpu is None:
            break
        visible.append(gpu)
    return tuple(dict.fromkeys(visible))


def _by_prefix(ids: Iterable[str], prefix: str) -> str | None:
    matches = [gpu for gpu in ids if prefix.startswith("GPU-") and gpu.startswith(prefix)]
    return matches[0] if len(matches) == 1 else None


class NoAnswerError(Exception):
    """The GPUs can't be listed."""


async def query_gpus(environ: Mapping[str, str], fields: str, timeout_s: float) -> str:
    """Return the fields of each GPU, one line per GPU, numbers without units. Raises: NoAnswerError."""
    program = shutil.which(_PROGRAM, path=environ.get("PATH"))
    if program is None:
        raise NoAnswerError(f"{_PROGRAM} is not on PATH")
    command = [program, f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    pipe, null, stdout = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL, asyncio.subprocess.STDOUT
    try:
        process = await asyncio.create_subprocess_exec(
            *command, env=dict(environ), stdin=null, stdout=pipe, stderr=stdout
        )
        async with asyncio.timeout(timeout_s):
            output = (await process.communicate())[0].decode(errors="replace")
    except TimeoutError:
        process.kill()  # without waiting for its end, which a hanging driver prevents
        raise NoAnswerError(f"{_PROGRAM} did not answer within {timeout_s:.0f} s") from None
    except OSError as error:
        raise NoAnswerError(f"{_PROGRAM} can't be run: {error.strerror or error}") from None
    if process.returncode:
        message = next(iter(output.split("\n")), "").strip() or f"it ended with exit code {process.returncode}"
        raise NoAnswerError(f"{_PROGRAM} failed: {message}")
    return output
