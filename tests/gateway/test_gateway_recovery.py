"""Adoption and recovery of the gateway's processes: killed, hung, out of descriptors or disk space."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import resource
import shutil
import signal
import socket
import threading
import time
from pathlib import Path

import psutil
import pytest

from cortex.errors import GatewayError
from cortex.gateway.config import CONFIG_FILE, GatewaySettings
from cortex.gateway.haproxy import HUNG_AFTER_PROBES, HaproxyGateway, find_binary, link
from cortex.gateway.maps import ROUTES_MAP
from cortex.gateway.runtime_api import ANSWER_TIMEOUT_S, RuntimeApi
from cortex.home import Home
from cortex.processes.identity import Identity
from harness.servers.upstream import Load, ask, backend, eventually, table, world
from harness.wait import has_ended

pytestmark = pytest.mark.processes


async def test_a_second_operator_adopts_the_running_gateway(home: Home) -> None:
    async with world(home) as w:
        first = table(backend("iris", await w.server("a")))
        await w.gateway.startup(first)
        workers = await RuntimeApi(home.sockets_dir / "gateway-master.sock").workers()
        async with Load(w.port, "/iris") as load:
            await w.gateway.shutdown()
            second = w.another_gateway()
            await second.startup(table(backend("iris", await w.server("a"), await w.server("b"))))
            await load.more()
            assert load.failures == []
        assert second.pid == w.gateway.pid
        assert await RuntimeApi(home.sockets_dir / "gateway-master.sock").workers() == workers
        assert w.upstreams["b"].served > 0


async def test_the_binary_of_another_version_replaces_that_of_the_running_gateway(home: Home, tmp_path: Path) -> None:
    old = Path(shutil.copytree(Path(find_binary()).parent, tmp_path / "old")) / Path(find_binary()).name
    async with world(home) as w:
        iris = table(backend("iris", await w.server("a")))
        await w.gateway.startup(iris)
        runtime = RuntimeApi(home.sockets_dir / "gateway-master.sock")
        await w.gateway.shutdown()
        link(home.run_dir / "gateway" / "haproxy", str(old))
        await runtime.reload()
        assert psutil.Process(w.gateway.pid).exe() == str(old)
        async with Load(w.port, "/iris") as load:
            second = w.another_gateway()
            await second.startup(iris)
            await load.more()
            assert load.failures == []
        assert second.pid == w.gateway.pid
        assert psutil.Process(second.pid).exe() == os.path.realpath(find_binary())
        workers = await runtime.workers()
        await second.shutdown()
        await w.another_gateway().startup(iris)
        assert (await runtime.workers()).current == workers.current, "the same binary needs no reload"


@pytest.mark.parametrize("text", [None, "", "{}"])
async def test_a_gateway_without_identity_file_is_adopted(home: Home, text: str | None) -> None:
    async with world(home) as w:
        await w.gateway.startup(table())
        await w.gateway.shutdown()
        identity = home.run_dir / "gateway" / "identity.json"
        identity.unlink()
        if text is not None:
            identity.write_text(text)
        second = w.another_gateway()
        await second.startup(table(backend("iris", await w.server("a"))))
        assert second.pid == w.gateway.pid == json.loads(identity.read_text())["pid"]
        assert (await ask(w.port, "/iris")).status == 200


async def test_a_change_of_the_clock_affects_neither_adoption_nor_totals(home: Home) -> None:
    async with world(home) as w:
        first = table(backend("iris", await w.server("a")))
        await w.gateway.startup(first)
        assert (await ask(w.port, "/iris")).status == 200
        assert (await w.gateway.stats())["iris"].responses[2] == 1
        await w.gateway.shutdown()
        # Equivalent to a change of the clock, from which this time is computed.
        files = [file for file in (home.run_dir / "gateway").glob("*.json") if "created_at" in file.read_text()]
        assert len(files) == 2
        for file in files:
            file.write_text(re.sub(r'"created_at": [0-9.]+', '"created_at": 1.0', file.read_text()))
        second = w.another_gateway()
        await second.startup(first)
        await second.ensure_running()
        assert second.pid == w.gateway.pid
        assert (await second.stats())["iris"].responses[2] == 1


async def test_the_identity_file_of_an_older_version_is_upgraded(home: Home) -> None:
    async with world(home) as w:
        await w.gateway.startup(table())
        await w.gateway.shutdown()
        assert w.gateway.pid is not None
        identity = home.run_dir / "gateway" / "identity.json"
        created = psutil.Process(w.gateway.pid).create_time()
        identity.write_text(json.dumps({"pid": w.gateway.pid, "create_time": created}))
        second = w.another_gateway()
        await second.startup(table())
        assert second.pid == w.gateway.pid
        assert Identity.read(identity) == Identity.of(w.gateway.pid)


async def test_another_process_with_the_same_pid_is_not_adopted(home: Home) -> None:
    async with world(home) as w:
        folder = home.run_dir / "gateway"
        folder.mkdir()
        created = psutil.Process().create_time()
        (folder / "identity.json").write_text(json.dumps({"pid": os.getpid(), "create_time": created}))
        await w.gateway.startup(table(backend("iris", await w.server("a"))))
        assert w.gateway.pid != os.getpid()
        assert (await ask(w.port, "/iris")).status == 200


@pytest.mark.parametrize("victim", ["master", "worker"])
async def test_a_killed_gateway_is_restarted_at_once(home: Home, victim: str) -> None:
    async with world(home) as w:
        await w.gateway.startup(table(backend("iris", await w.server("a"))))
        await w.gateway.apply(table(backend("iris", await w.server("a"), await w.server("b"))))
        workers = await RuntimeApi(home.sockets_dir / "gateway-master.sock").workers()
        master, worker = w.gateway.pid, workers.current
        assert master and worker
        os.kill(master if victim == "master" else worker, signal.SIGKILL)

        async def is_back() -> bool:
            return w.gateway.pid not in (None, master) and has_ended(worker)

        await eventually(is_back)
        await w.gateway.ensure_running()
        servers = {(await ask(w.port, "/iris")).json()["server"] for _ in range(4)}
        assert servers == {"a", "b"}


async def test_apply_starts_a_gateway_that_died_unwatched(home: Home) -> None:
    async with world(home) as w:
        await w.gateway.startup(table())
        await w.gateway.shutdown()
        assert w.gateway.pid
        os.kill(w.gateway.pid, signal.SIGKILL)
        await w.gateway.apply(table(backend("iris", await w.server("a"))))
        assert (await ask(w.port, "/iris")).status == 200


async def test_a_hung_worker_is_replaced(home: Home) -> None:
    async with world(home) as w:
        await w.gateway.startup(table(backend("iris", await w.server("a"))))
        worker = (await RuntimeApi(home.sockets_dir / "gateway-master.sock").workers()).current
        assert worker
        os.kill(worker, signal.SIGSTOP)

        async def replaced() -> bool:
            await w.gateway.ensure_running()
            return has_ended(worker)

        await eventually(replaced, timeout_s=20)
        assert (await ask(w.port, "/iris")).status == 200


async def test_a_master_that_reads_its_files_anew_does_not_count_as_hung(home: Home) -> None:
    async with world(home) as w:
        await w.gateway.startup(table())
        pid = w.gateway.pid
        assert pid

        def is_refused() -> bool:
            with socket.socket(socket.AF_UNIX) as client:
                return client.connect_ex(str(home.sockets_dir / "gateway-master.sock")) == errno.ECONNREFUSED

        async def reload_begins() -> bool:
            os.kill(pid, signal.SIGUSR2)
            ends = time.monotonic() + 1  # it is over so soon that a busy machine may miss it
            while not is_refused() and time.monotonic() < ends:
                await asyncio.sleep(0)
            return is_refused()

        for _ in range(HUNG_AFTER_PROBES):
            await eventually(reload_begins)
            await w.gateway.ensure_running()
        assert w.gateway.pid == pid
        await w.gateway.shutdown()
        await eventually(reload_begins)
        second = w.another_gateway()
        await second.startup(table())
        assert second.pid == pid


async def test_a_busy_operator_does_not_take_the_gateway_for_hung(home: Home) -> None:
    async with world(home) as w:
        await w.gateway.startup(table())
        query = asyncio.create_task(RuntimeApi(home.sockets_dir / "gateway-master.sock").workers())
        await asyncio.sleep(0)  # it begins
        threading.Event().wait(ANSWER_TIMEOUT_S + 0.5)  # blocks the event loop, like SIGSTOP
        assert (await query).current is not None


async def test_exhausted_descriptors_of_the_operator_do_not_restart_the_gateway(home: Home) -> None:
    async with world(home) as w:
        await w.gateway.startup(table(backend("iris", await w.server("a"))))
        pid = w.gateway.pid
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        try:
            for _ in range(HUNG_AFTER_PROBES + 1):
                with pytest.raises(GatewayError):
                    await w.gateway.ensure_running()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        await w.gateway.ensure_running()
        assert w.gateway.pid == pid
        assert (await ask(w.port, "/iris")).status == 200


async def test_a_full_disk_prevents_reloads_but_not_changes_of_servers(home: Home) -> None:
    async with world(home) as w:
        await w.gateway.startup(table(backend("iris", await w.server("a"))))
        blockers = [home.run_dir / "gateway" / f"{name}.new" for name in (CONFIG_FILE, ROUTES_MAP)]
        for blocker in blockers:
            blocker.mkdir()
        await w.gateway.apply(table(backend("iris", await w.server("b"))))
        await w.upstreams["a"].stop()
        assert (await ask(w.port, "/iris")).status == 200
        wanted = table(backend("iris", await w.server("b")), backend("rose", await w.server("c")))
        with pytest.raises(GatewayError, match="files can't be written"):
            await w.gateway.apply(wanted)
        assert (await ask(w.port, "/iris")).status == 200
        for blocker in blockers:
            blocker.rmdir()
        await w.gateway.apply(wanted)
        assert (await ask(w.port, "/rose")).status == 200


async def test_a_gateway_that_died_is_restarted_on_a_full_disk(home: Home) -> None:
    async with world(home) as w:
        await w.gateway.startup(table(backend("iris", await w.server("a"))))
        folder = home.run_dir / "gateway"
        for name in ("identity.json", CONFIG_FILE, ROUTES_MAP):
            (folder / f"{name}.new").mkdir()
        await w.gateway.apply(table(backend("iris", await w.server("b"))))  # by commands
        await w.upstreams["a"].stop()
        assert w.gateway.pid is not None
        for process in [*psutil.Process(w.gateway.pid).children(), psutil.Process(w.gateway.pid)]:
            process.kill()

        await eventually(lambda: answers(w.port, "/iris"))

        await w.gateway.shutdown()
        second = w.another_gateway()
        await second.startup(table(backend("iris", await w.server("b"))))
        assert second.pid == w.gateway.pid
        with pytest.raises(GatewayError, match="files can't be written"):
            await second.apply(table(backend("iris", await w.server("b")), backend("rose", await w.server("c"))))


async def test_full_shared_memory_prevents_reloads_but_ends_no_gateway(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(home) as w:
        iris, rose = backend("iris", await w.server("a")), backend("rose", await w.server("b"))
        await w.gateway.startup(table(iris))
        pid = w.gateway.pid
        assert pid is not None
        full = os.statvfs_result((4096, 4096, 16, 0, 0, 0, 0, 0, 0, 255))
        with monkeypatch.context() as patch:
            patch.setattr(os, "statvfs", lambda _: full)
            with pytest.raises(GatewayError, match="/dev/shm is full.*--shm-size"):
                await w.gateway.apply(table(iris, rose))
            assert (await ask(w.port, "/iris")).status == 200
            assert w.gateway.pid == pid
            os.kill(pid, signal.SIGKILL)  # what it had of the memory is free then
            await eventually(lambda: answers(w.port, "/rose"))


async def test_too_low_a_limit_on_open_files_is_named(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(home) as w:
        monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 256))
        with pytest.raises(GatewayError, match="open files, 256, is too low.*at least 320.*ulimit -n"):
            await w.gateway.startup(table())


async def answers(port: int, path: str) -> bool:
    try:
        return (await ask(port, path)).status == 200
    except (OSError, EOFError):  # nothing listens, or what listened was just killed
        return False


async def test_the_error_for_a_port_in_use_names_the_owner_and_the_flag(home: Home) -> None:
    with socket.socket() as owner:
        owner.bind(("127.0.0.1", 0))
        owner.listen()
        port = owner.getsockname()[1]
        gateway = HaproxyGateway(home, GatewaySettings(port=port))
        with pytest.raises(GatewayError) as caught:
            await gateway.startup(table())
        message = str(caught.value)
        assert f"127.0.0.1:{port}" in message and f"pid {os.getpid()}" in message and "--gateway-port" in message
        assert gateway.pid is None
        await gateway.stop()


async def test_files_are_private_and_stop_ends_all_processes(home: Home) -> None:
    async with world(home) as w:
        await w.gateway.startup(table(backend("iris", await w.server("a"))))
        private = [
            home.run_dir / "gateway" / "haproxy.cfg",
            home.run_dir / "gateway" / "unavailable.map",
            home.sockets_dir / "gateway.sock",
            home.sockets_dir / "gateway-master.sock",
        ]
        assert [oct(path.stat().st_mode & 0o777) for path in private] == ["0o600"] * 4
        assert w.gateway.pid
        family = [w.gateway.pid, *(child.pid for child in psutil.Process(w.gateway.pid).children())]
        await w.gateway.stop()
        assert all(map(has_ended, family))
