"""Machines for tests: network, process and mount namespaces on a bridge of this machine, which reaches all of them.

A machine is one process, the first of its namespaces: killing it ends all that runs in it, and the kernel removes its
network, as if somebody had pulled the plug. Needs root and `ip`, `unshare`, `nsenter`. Nothing outlives the process
that made it, except for names in the kernel should that be killed; the next one removes them.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import ipaddress
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from harness.requirements import skip
from harness.wait import wait_until

_BRIDGE_PREFIX = "cxb"
_PROGRAMS = ("ip", "unshare", "nsenter", "mount")
_LOCK = Path(tempfile.gettempdir()) / "cortex-test-networks.lock"
#: What holds a machine together: makes its folders its own, says that it is there, and reaps what ends in it.
_FIRST_PROCESS = """
set -e
mount -t tmpfs -o size=512m tmpfs /dev/shm
if [ -n "$2" ]; then mount --bind "$1" "$2"; fi
echo up
while :; do sleep 86400 & wait; done
"""


def require_machines() -> None:
    """Skip the test if namespaces can't be created; fail if CI is set."""
    missing = [program for program in _PROGRAMS if shutil.which(program) is None]
    if os.geteuid() != 0:
        problem = "tests with several machines make network namespaces and need root"
    elif missing:
        problem = f"tests with several machines need {', '.join(missing)}; install with scripts/test-services"
    else:
        tried = subprocess.run(["unshare", "--pid", "--net", "--mount", "--fork", "true"], capture_output=True)
        if tried.returncode == 0:
            return
        problem = f"no namespaces can be made here: {tried.stderr.decode().strip()}"
    skip(problem)


@dataclass
class Machine:
    """One machine: `start`, then `kill` or, for a while, `partition`. The same object is started again after a kill."""

    name: str
    host: str
    folder: Path
    shared_path: Path | None
    _link: str
    _network: Network
    _holder: subprocess.Popen[bytes] | None = None
    _first: int = 0

    @property
    def is_up(self) -> bool:
        """Return whether it was started and not killed."""
        return self._holder is not None and self._holder.poll() is None

    def start(self) -> None:
        """Start the machine, without any of our processes."""
        own = self.folder / "own"
        own.mkdir(parents=True, exist_ok=True)
        target = ""
        if self.shared_path is not None:
            self.shared_path.mkdir(parents=True, exist_ok=True)
            target = str(self.shared_path)
        namespaces = ["unshare", "--pid", "--net", "--mount", "--fork", "--kill-child", "--mount-proc"]
        log = self.folder / "machine.log"
        with log.open("wb") as output:
            self._holder = subprocess.Popen(
                [*namespaces, "sh", "-c", _FIRST_PROCESS, "machine", str(own), target],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=output,
                preexec_fn=_die_with_parent,
            )
        assert self._holder.stdout is not None
        if self._holder.stdout.readline() != b"up\n":
            raise RuntimeError(f"{self.name} could not be started: {log.read_text()}")
        holder = self._holder.pid
        self._first = int(Path(f"/proc/{holder}/task/{holder}/children").read_text().split()[0])
        self._connect()

    def kill(self) -> None:
        """Kill all processes at once and unplug its network first, so that no peer sees an end."""
        if self._holder is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._first, signal.SIGKILL)
            self._holder.wait()
            assert self._holder.stdout is not None
            self._holder.stdout.close()
            self._holder = None
        # The kernel removes the link a moment after the last process: a machine that starts again needs its name.
        subprocess.run(["ip", "link", "delete", self._link], capture_output=True)

    def partition(self) -> None:
        """Unplug its network: packets are lost both ways, and no connection ends."""
        _ip("link", "set", self._link, "nomaster")

    def heal(self) -> None:
        """Plug its network in again."""
        _ip("link", "set", self._link, "master", self._network.bridge)

    def run(
        self, argv: Sequence[str], environ: Mapping[str, str] | None = None, timeout_s: float = 60, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in it and return its output. Raises: AssertionError with the output if it failed."""
        ended = subprocess.run(
            self.command(argv), capture_output=True, text=True, timeout=timeout_s, env=self._environ(environ)
        )
        if check and ended.returncode != 0:
            raise AssertionError(f"{' '.join(argv)} on {self.name}:\n{ended.stdout}{ended.stderr}")
        return ended

    def command(self, argv: Sequence[str]) -> list[str]:
        """Return the command that runs `argv` in it."""
        return ["nsenter", f"--target={self._first}", "--pid", "--net", "--mount", "--", *argv]

    def pids(self) -> list[int]:
        """Return its processes except the first, by their pids outside."""
        namespace = Path(f"/proc/{self._first}/ns/pid").readlink()
        found = []
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if folder.name.isdigit() and (folder / "ns" / "pid").readlink() == namespace:
                    found.append(int(folder.name))
        return [pid for pid in found if pid != self._first]

    def _connect(self) -> None:
        inside = ["nsenter", f"--target={self._first}", "--net", "ip"]
        # The same each time it is started, as that of a real card: others would look for the old one for a minute.
        hardware = ":".join(f"{byte:02x}" for byte in (2, 0, *ipaddress.IPv4Address(self.host).packed))
        peer = ["peer", "name", "eth0", "address", hardware, "netns", str(self._first)]
        _ip("link", "add", self._link, "type", "veth", *peer)
        _ip("link", "set", self._link, "master", self._network.bridge, "up")
        for command in (
            ["link", "set", "lo", "up"],
            ["addr", "add", f"{self.host}/{self._network.subnet.prefixlen}", "dev", "eth0"],
            ["link", "set", "eth0", "up"],
            ["route", "add", "default", "via", self._network.host],
        ):
            subprocess.run([*inside, *command], check=True, capture_output=True)

    def _environ(self, environ: Mapping[str, str] | None) -> dict[str, str]:
        return {**os.environ, **(environ or {})}


@dataclass
class Network:
    """A bridge with an address of this machine, and the machines plugged into it."""

    bridge: str
    subnet: ipaddress.IPv4Network
    machines: list[Machine] = field(default_factory=list)

    @property
    def host(self) -> str:
        """The address at which machines reach this one."""
        return str(self.subnet[1])

    def add(self, name: str, folder: Path, shared_path: Path | None = None) -> Machine:
        """Add a machine, not yet started, that keeps its files in `folder`.

        At `shared_path` each machine sees files of its own: a path that is the same on all of them, as on real ones.
        """
        number = len(self.machines) + 2
        link = f"{self.bridge.replace(_BRIDGE_PREFIX, 'cxv')}n{number}"
        machine = Machine(name, str(self.subnet[number]), folder, shared_path, link, self)
        self.machines.append(machine)
        return machine


@contextlib.contextmanager
def network() -> Iterator[Network]:
    """Create a network that does not clash with others on this machine; remove it with its machines afterwards."""
    with _locked():
        _remove_leftovers()
        number = next(number for number in range(10) if f"{_BRIDGE_PREFIX}{os.getpid()}x{number}" not in _links())
        made = Network(f"{_BRIDGE_PREFIX}{os.getpid()}x{number}", _free_subnet())
        _ip("link", "add", made.bridge, "type", "bridge")
        _ip("addr", "add", f"{made.host}/{made.subnet.prefixlen}", "dev", made.bridge)
        _ip("link", "set", made.bridge, "up")
    try:
        yield made
    finally:
        for machine in made.machines:
            machine.kill()
        _ip("link", "delete", made.bridge)


@contextlib.contextmanager
def _locked() -> Iterator[None]:
    with _LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _free_subnet() -> ipaddress.IPv4Network:
    """Choose a subnet by our pid that this machine has no route to."""
    taken = []
    for route in json.loads(_ip("-json", "-4", "route", "show", "table", "all")):
        with contextlib.suppress(ValueError):
            taken.append(ipaddress.IPv4Network(route["dst"], strict=False))
    for attempt in range(4096):
        number = (os.getpid() * 7 + attempt) % 16384
        subnet = ipaddress.IPv4Network(f"10.{192 + number // 256}.{number % 256}.0/24")
        if not any(subnet.overlaps(other) for other in taken):
            return subnet
    raise RuntimeError("no subnet of 10.192.0.0/10 is free")


def _remove_leftovers() -> None:
    for name in _links():
        # Links as well: connections that were open keep a dead machine's for some minutes.
        owner = re.fullmatch(r"cx[bv](\d+)x\d(n\d+)?", name)
        if owner and not Path(f"/proc/{owner[1]}").exists():
            subprocess.run(["ip", "link", "delete", name], capture_output=True)


def _links() -> list[str]:
    return [link["ifname"] for link in json.loads(_ip("-json", "link", "show"))]


def _ip(*arguments: str) -> str:
    ended = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if ended.returncode != 0:
        raise RuntimeError(f"ip {' '.join(arguments)}: {ended.stderr.strip()}")
    return ended.stdout


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def wait_for_port(host: str, port: int, timeout_s: float = 30) -> None:
    """Wait until a port accepts connections."""

    def listens() -> bool:
        with socket.socket() as client:
            client.settimeout(1)
            return client.connect_ex((host, port)) == 0

    wait_until(listens, timeout_s, f"{host}:{port} listens")
