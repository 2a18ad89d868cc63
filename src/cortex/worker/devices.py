"""Environment variables that assign GPUs and NeuronCores to the processes of a replica. Pure."""

from __future__ import annotations

from cortex.worker.spec import ReplicaSpec

NEURON_CORES_PER_CHIP = 4
#: Read by CUDA, and by the NVIDIA container tools.
CUDA_DEVICES = "CUDA_VISIBLE_DEVICES"
_CONTAINER_DEVICES = "NVIDIA_VISIBLE_DEVICES"


def gpu_environ(spec: ReplicaSpec, has_gpus: bool) -> dict[str, str]:
    """Return the variables of all processes of a replica, which show it the GPUs assigned to it and hide all others.

    A replica without `gpu` keeps the variable of its API's own `env`. `has_gpus` is whether the machine has any.
    """
    if spec.gpu_ids:
        return {CUDA_DEVICES: ",".join(spec.gpu_ids), _CONTAINER_DEVICES: ",".join(spec.gpu_ids)}
    if has_gpus and not spec.gpu and CUDA_DEVICES not in spec.env:
        return {CUDA_DEVICES: "", _CONTAINER_DEVICES: "void"}
    return {}


def process_environ(spec: ReplicaSpec, index: int) -> dict[str, str]:
    """Return the variables of process `index`, which assign it an exclusive share of the NeuronCores."""
    if not spec.inf_ids:
        return {}
    cores = [chip * NEURON_CORES_PER_CHIP + core for chip in spec.inf_ids for core in range(NEURON_CORES_PER_CHIP)]
    share = len(cores) // len(spec.sockets)
    mine = cores[index * share : (index + 1) * share]
    return {
        "NEURON_RT_VISIBLE_CORES": ",".join(map(str, mine)),
        "NEURON_RT_NUM_CORES": str(share),
        "NEURONCORE_GROUP_SIZES": str(share),  # for runtimes before 1.14
    }
