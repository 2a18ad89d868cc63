from __future__ import annotations

import os
from dataclasses import replace

import pytest

from cortex.processes.limits import thread_share
from cortex.worker.devices import gpu_environ, process_environ
from cortex.worker.worker_process import set_environment
from harness.replicas.specs import replica_spec

SPEC = replica_spec()


def test_a_replica_sees_only_its_own_gpus() -> None:
    spec = replace(SPEC, gpu=2, gpu_ids=("GPU-a", "GPU-b"), env={"CUDA_VISIBLE_DEVICES": "7"})
    assert gpu_environ(spec, has_gpus=True)["CUDA_VISIBLE_DEVICES"] == "GPU-a,GPU-b"


def test_a_replica_without_gpus_sees_none() -> None:
    assert gpu_environ(SPEC, has_gpus=True)["CUDA_VISIBLE_DEVICES"] == ""


def test_nothing_is_set_on_a_machine_without_gpus() -> None:
    assert gpu_environ(SPEC, has_gpus=False) == {}


def test_an_api_can_choose_gpus_itself() -> None:
    assert gpu_environ(replace(SPEC, env={"CUDA_VISIBLE_DEVICES": "0"}), has_gpus=True) == {}


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_processes_share_the_cores_of_their_chip(processes: int) -> None:
    spec = replace(SPEC, inf=1, inf_ids=(2,), sockets=tuple(f"/s-{index}" for index in range(processes)))
    environs = [process_environ(spec, index) for index in range(processes)]
    cores = [core for environ in environs for core in environ["NEURON_RT_VISIBLE_CORES"].split(",")]
    assert cores == ["8", "9", "10", "11"]
    assert {environ["NEURON_RT_NUM_CORES"] for environ in environs} == {str(4 // processes)}
    assert {environ["NEURONCORE_GROUP_SIZES"] for environ in environs} == {str(4 // processes)}


def test_no_cores_are_set_without_inferentia() -> None:
    assert process_environ(SPEC, 0) == {}


def test_several_processes_share_the_processors_for_their_computations(monkeypatch) -> None:
    one, two = SPEC, replace(SPEC, sockets=("/s-0", "/s-1"))
    for spec, before, expected in [
        (one, {}, None),
        (two, {}, str(thread_share(2))),
        (two, {"OMP_NUM_THREADS": "7"}, "7"),
    ]:
        monkeypatch.setattr("os.environ", dict(before))
        set_environment(spec, 0)
        assert os.environ.get("OMP_NUM_THREADS") == expected
