"""A gateway and a server in two network namespaces, whose link is cut; run by `test_tcp_servers.py`."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Awaitable, Iterator
from pathlib import Path

from cortex.gateway.routes import Server
from cortex.home import Home
from harness.homes import temporary_home
from harness.servers.upstream import Answer, Upstream, World, ask, backend, eventually, run, table, world

NEAR, FAR = "10.77.0.1", "10.77.0.2"


@contextlib.contextmanager
def far_node() -> Iterator[tuple[int, int]]:
    """Run a server in a namespace of its own; yield its pid and port."""
    command = ["unshare", "-n", sys.executable, __file__, "serve"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "here\n"
            ip("link", "add", "near", "type", "veth", "peer", "name", "far")
            ip("link", "set", "far", "netns", str(process.pid))
            ip("addr", "add", f"{NEAR}/24", "dev", "near")
            ip("link", "set", "near", "up")
            process.stdin.write("go\n")
            process.stdin.flush()
            yield process.pid, int(process.stdout.readline())
        finally:
            process.kill()


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


async def serve() -> None:
    print("here", flush=True)
    sys.stdin.readline()
    ip("addr", "add", f"{FAR}/24", "dev", "far")
    ip("link", "set", "far", "up")
    ip("link", "set", "lo", "up")
    upstream = await Upstream(Path("far"), FAR).start()
    print(upstream.address.rpartition(":")[2], flush=True)
    await asyncio.to_thread(sys.stdin.read)


def vanish(pid: int) -> None:
    """Drop all packets from and to the far node silently."""
    subprocess.run(["nsenter", "-t", str(pid), "-n", "ip", "link", "set", "far", "down"], check=True)
    # Without a permanent ARP entry, the near side would notice at once that the link is down.
    ip("neigh", "replace", FAR, "lladdr", "02:00:00:00:00:01", "dev", "near", "nud", "permanent")


async def scenario(home: Home, pid: int, port: int, is_warm: bool) -> None:
    async with world(home) as made:
        near = await made.server("near", host="127.0.0.1")
        far = Server("far", f"{FAR}:{port}", 10)
        await made.gateway.startup(table(backend("both", near, far, timeout_s=120.0), gateway_secret="s"))
        if is_warm:  # open connections, to be reused
            await asyncio.gather(*(ask(made.port, "/both?sleep=0.3") for _ in range(10)))
        inside = [asyncio.create_task(ask(made.port, "/both?sleep=8")) for _ in range(2)]
        await eventually(lambda: _has_requests(made, "near", "far"))
        vanish(pid)
        failures = [await _ended(asyncio.create_task(ask(made.port, "/both")), made) for _ in range(20)]
        # Requests sent on an open connection may have reached user code, so they are not retried.
        assert len([failure for failure in failures if failure]) <= (1 if is_warm else 0), failures
        # Requests inside the far server end before their timeout of two minutes; those of the near server go on.
        ended = {await _ended(each, made) for each in inside}
        assert ended == {"", "lost"}, ended
        assert await _failure(ask(made.port, "/both")) == ""


async def _has_requests(made: World, *servers: str) -> bool:
    inside = await made.gateway.in_flight()
    return all(inside[server] for server in servers)


async def _failure(request: Awaitable[Answer]) -> str:
    try:
        answer = await asyncio.wait_for(request, 60)
    except (OSError, asyncio.IncompleteReadError) as error:
        return repr(error)
    return "" if answer.status == 200 else f"{answer.status} {answer.body!r}"


async def _ended(request: asyncio.Task[Answer], made: World) -> str:
    """Wait for a request while the gateway is kept running; return "lost" for a 502, 503 or closed connection."""
    while not (await asyncio.wait([request], timeout=0.5))[0]:
        await made.gateway.ensure_running()
    failure = await _failure(request)
    return "lost" if failure.startswith(("502", "503", "IncompleteReadError")) else failure


def main(is_warm: bool) -> None:
    ip("link", "set", "lo", "up")
    with far_node() as (pid, port), temporary_home() as home:
        run(scenario(home, pid, port, is_warm), timeout_s=120)


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        asyncio.run(serve())
    else:
        main(is_warm=sys.argv[1:] == ["warm"])
