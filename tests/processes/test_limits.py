"""Limits of a container, read from folders laid out as cgroups(7) describes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cortex.processes.limits import (
    NoProcessorsError,
    processors_of,
    thread_share,
    usable_memory_bytes,
    usable_processors,
)

GIB = 2**30
OWN = float(len(os.sched_getaffinity(0)))


@pytest.fixture
def groups(tmp_path: Path) -> Path:
    return tmp_path / "cgroup"


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def member(tmp_path: Path, text: str) -> Path:
    (tmp_path / "membership").write_text(text)
    return tmp_path / "membership"


def test_the_quota_of_version_2_limits_the_processors(tmp_path, groups):
    write(groups / "cpu.max", "50000 100000\n")
    assert usable_processors(groups, member(tmp_path, "0::/\n")) == 0.5


def test_the_tightest_limit_of_all_enclosing_groups_applies(tmp_path, groups):
    write(groups / "pods" / "cpu.max", "30000 100000\n")
    write(groups / "pods" / "one" / "cpu.max", "max 100000\n")
    write(groups / "pods" / "memory.max", f"{2 * GIB}\n")
    write(groups / "pods" / "one" / "memory.max", f"{4 * GIB}\n")
    membership = member(tmp_path, "0::/pods/one\n")
    assert usable_processors(groups, membership) == 0.3
    assert usable_memory_bytes(16 * GIB, groups, membership) == 2 * GIB


def test_a_container_whose_group_is_named_as_on_the_host_has_its_own_limits(tmp_path, groups):
    write(groups / "cpu.max", "40000 100000\n")
    assert usable_processors(groups, member(tmp_path, "0::/kubepods/pod7/container\n")) == 0.4


def test_version_1_has_a_folder_for_each_controller(tmp_path, groups):
    write(groups / "cpu,cpuacct" / "job" / "cpu.cfs_quota_us", "20000\n")
    write(groups / "cpu,cpuacct" / "job" / "cpu.cfs_period_us", "100000\n")
    (groups / "cpu").symlink_to("cpu,cpuacct")
    write(groups / "memory" / "job" / "memory.limit_in_bytes", f"{GIB}\n")
    membership = member(tmp_path, "5:memory:/job\n4:cpu,cpuacct:/job\n1:name=systemd:/\n0::/\n")
    assert usable_processors(groups, membership) == 0.2
    assert usable_memory_bytes(16 * GIB, groups, membership) == GIB


@pytest.mark.parametrize("text", ["max 100000\n", "-1 100000\n", "", "fast\n", "100000 0\n", "1 2 3\n"])
def test_without_a_readable_limit_the_machine_is_the_limit(tmp_path, groups, text):
    write(groups / "cpu.max", text)
    write(groups / "memory.max", text)
    membership = member(tmp_path, "0::/\n")
    assert usable_processors(groups, membership) == OWN
    assert usable_memory_bytes(16 * GIB, groups, membership) == 16 * GIB


def test_a_system_without_control_groups_is_the_limit_itself(tmp_path, groups):
    assert usable_processors(groups, tmp_path / "missing") == OWN
    assert usable_memory_bytes(GIB, groups, tmp_path / "missing") == GIB


def test_each_process_has_at_least_one_thread():
    assert thread_share(1) == max(1, int(usable_processors()))
    assert thread_share(10_000) == thread_share(0) // thread_share(0) == 1


def topology_of(folder: Path, cores: list[tuple[int, int]]) -> Path:
    """Create the folders of processors, each on a socket and a core."""
    for number, (socket, core) in enumerate(cores):
        (folder / f"cpu{number}" / "topology").mkdir(parents=True)
        (folder / f"cpu{number}" / "topology" / "physical_package_id").write_text(f"{socket}\n")
        (folder / f"cpu{number}" / "topology" / "core_id").write_text(f"{core}\n")
    return folder


def test_processes_have_whole_cores_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    # As Linux numbers them: first each core of both sockets, then its second processor.
    topology = topology_of(tmp_path, [(0, 0), (0, 1), (1, 0), (1, 1)] * 2)
    without_quota = {"groups": tmp_path, "membership": tmp_path / "missing"}
    assert [processors_of(index, 2, topology, **without_quota) for index in (0, 1)] == [{0, 4, 1, 5}, {2, 6, 3, 7}]
    assert [processors_of(index, 3, topology, **without_quota) for index in range(3)] == [{0, 4}, {1, 5}, {2, 6}]
    assert processors_of(1, 2, tmp_path / "unknown", **without_quota) == {4, 5, 6, 7}


def test_more_processes_than_processors_cannot_have_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 3})
    with pytest.raises(NoProcessorsError, match="3 processes cannot have processors of their own: 2 can be used here"):
        processors_of(0, 3, groups=tmp_path, membership=tmp_path / "missing")


def test_a_quota_assigns_no_processors(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    (tmp_path / "cpu.max").write_text("250000 100000\n")
    (tmp_path / "membership").write_text("0::/\n")
    with pytest.raises(NoProcessorsError, match=r"the CPU time of 2\.5 processors"):
        processors_of(0, 2, groups=tmp_path, membership=tmp_path / "membership")
