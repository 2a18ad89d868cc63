from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.engine import devices
from cortex.engine.devices import Inventory, assign, find_devices, parse_gpus, visible_gpus
from cortex.errors import ComputeUnavailableError
from cortex.worker.spec import ReplicaSpec
from harness.replicas.specs import replica_spec

pytestmark = pytest.mark.processes

TWO = "0, GPU-aaaa\n1, GPU-bbbb\n"


def spec_with(gpu: int = 0, inf: int = 0) -> ReplicaSpec:
    return replica_spec(
        gpu=gpu,
        inf=inf,
    )


def fake_nvidia_smi(folder: Path, script: str) -> dict[str, str]:
    """Create a fake `nvidia-smi`; return an environment with it on the PATH."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return {"PATH": f"{folder}:/usr/bin:/bin"}


def found(environ: dict[str, str], folder: Path) -> Inventory:
    return asyncio.run(find_devices(environ, folder))


def test_a_machine_without_devices_reports_why(tmp_path: Path) -> None:
    assert found({"PATH": str(tmp_path)}, tmp_path) == Inventory(why_no_gpus="nvidia-smi is not on PATH")


def test_gpus_are_named_by_their_ids_and_chips_by_their_numbers(tmp_path: Path) -> None:
    for name in ("neuron10", "neuron2", "neuron_other", "null"):
        (tmp_path / name).touch()
    environ = fake_nvidia_smi(tmp_path, f"[ \"$1\" = --query-gpu=index,uuid ] && printf '{TWO}'")
    assert found(environ, tmp_path) == Inventory(("GPU-aaaa", "GPU-bbbb"), (2, 10))


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ('echo "couldn\'t talk to the driver"; exit 9', "nvidia-smi failed: couldn't talk to the driver"),
        ("exit 3", "nvidia-smi failed: it ended with exit code 3"),
        ("true", "nvidia-smi lists none"),
    ],
)
def test_a_failure_of_the_tool_is_quoted(tmp_path: Path, script: str, why: str) -> None:
    assert found(fake_nvidia_smi(tmp_path, script), tmp_path).why_no_gpus == why


def test_a_tool_that_hangs_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_QUERY_TIMEOUT_S", 0.1)
    assert "did not answer" in found(fake_nvidia_smi(tmp_path, "exec sleep 60"), tmp_path).why_no_gpus


def test_gpus_hidden_from_the_operator_are_not_assigned(tmp_path: Path) -> None:
    environ = fake_nvidia_smi(tmp_path, f"printf '{TWO}'")
    assert found({**environ, "CUDA_VISIBLE_DEVICES": "1"}, tmp_path).gpus == ("GPU-bbbb",)
    none = found({**environ, "CUDA_VISIBLE_DEVICES": ""}, tmp_path)
    assert (none.gpus, none.why_no_gpus) == ((), "CUDA_VISIBLE_DEVICES of the operator leaves none")


@pytest.mark.parametrize(
    ("variable", "visible"),
    [
        (None, ("GPU-aaaa", "GPU-abbb")),
        ("1,0", ("GPU-abbb", "GPU-aaaa")),
        ("GPU-aa", ("GPU-aaaa",)),
        ("GPU-a", ()),
        ("0,-1,1", ("GPU-aaaa",)),
        ("0,0", ("GPU-aaaa",)),
        ("MIG-1,7,0", ("MIG-1",)),
    ],
)
def test_cuda_visible_devices_is_interpreted_as_cuda_does(variable: str | None, visible: tuple[str, ...]) -> None:
    assert visible_gpus({"0": "GPU-aaaa", "1": "GPU-abbb"}, variable) == visible


def test_gpus_already_set_in_the_spec_are_kept() -> None:
    chosen = replace(spec_with(gpu=2), gpu_ids=("0", "3"))
    assert assign(chosen, Inventory(("GPU-aaaa",)), []).gpu_ids == ("0", "3")


@given(st.text())
def test_any_output_of_the_tool_is_parsed_without_an_error(text: str) -> None:
    assert all(key.isdigit() for key in parse_gpus(text))


def test_too_few_free_devices_are_an_error_with_their_number() -> None:
    with pytest.raises(ComputeUnavailableError, match="1 of the 2 GPUs that it requests are free"):
        assign(spec_with(gpu=2), Inventory(("a", "b")), [assign(spec_with(gpu=1), Inventory(("a", "b")), [])])
    with pytest.raises(ComputeUnavailableError, match="0 of the 1 Inferentia chips"):
        assign(spec_with(inf=1), Inventory(), [])


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1)), max_size=12),
    st.lists(st.integers(0, 11), max_size=6),
    st.integers(0, 6),
)
def test_no_device_is_assigned_twice_and_each_is_released(
    wants: list[tuple[int, int]], ends: list[int], gpus: int
) -> None:
    inventory = Inventory(tuple(f"GPU-{number}" for number in range(gpus)), (0, 3))
    running: list[ReplicaSpec] = []
    for number, (gpu, inf) in enumerate(wants):
        spec = spec_with(gpu, inf)
        free = inventory.free(running)
        if gpu <= len(free.gpus) and inf <= len(free.chips):
            running.append(assign(spec, inventory, running))
            assert (len(running[-1].gpu_ids), len(running[-1].inf_ids)) == (gpu, inf)
        else:
            with pytest.raises(ComputeUnavailableError):
                assign(spec, inventory, running)
        if number in ends and running:
            running.pop(0)
        held = [gpu for spec in running for gpu in spec.gpu_ids]
        assert len(held) == len(set(held))
        assert sorted([*held, *inventory.free(running).gpus]) == sorted(inventory.gpus)
