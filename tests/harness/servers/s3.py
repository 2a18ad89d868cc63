"""A real S3 endpoint for tests: OpenStack Swift with its s3api middleware, from Debian's packages.

Everything is in one folder and on free loopback ports; ends with the test run. `scripts/test-services` installs it.
"""

from __future__ import annotations

import ctypes
import os
import pwd
import shutil
import signal
import socket
import subprocess
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import ProxyHandler, Request, build_opener

from harness.ports import free_port
from harness.wait import wait_until

SECRET_KEY = "testing"
#: Number of accounts, `test0` and so on.
ACCOUNTS = 200
#: Most keys in a page of a listing: with the 1000 of S3, several pages would take long to create.
PAGE_KEYS = 100
SERVICES = ("object", "container", "account")
PROGRAMS = (
    "swift-proxy-server",
    "swift-ring-builder",
    "memcached",
    *(f"swift-{service}-server" for service in SERVICES),
)

PIPELINE = (
    "catch_errors gatekeeper healthcheck cache listing_formats bulk s3api tempauth copy slo dlo versioned_writes "
    "symlink proxy-server"
)
#: With the usual timeouts, a busy machine answers PUT before the object is listed, or refuses it.
COMMON = """
[DEFAULT]
bind_ip = 127.0.0.1
bind_port = {port}
swift_dir = {folder}
devices = {folder}/devices
mount_check = false
disable_fallocate = true
workers = 0
user = {user}
log_address = {folder}/no-syslog
conn_timeout = 60
node_timeout = 60
container_update_timeout = 60
"""
STORAGE = """
[pipeline:main]
pipeline = {service}-server
[app:{service}-server]
use = egg:swift#{service}
"""
#: Arguments: service=port.
BUILD_RINGS = """
import sys
from swift.common.ring import RingBuilder

for argument in sys.argv[1:]:
    service, port = argument.split("=")
    builder = RingBuilder(4, 1, 0)
    device = {"id": 0, "region": 1, "zone": 1, "ip": "127.0.0.1", "port": int(port), "device": "d1", "weight": 1.0}
    builder.add_dev({**device, "replication_ip": "127.0.0.1", "replication_port": int(port)})
    builder.rebalance()
    builder.get_ring().save(f"{service}.ring.gz")
"""


def is_installed() -> bool:
    """Return whether all programs are installed."""
    return all(shutil.which(program) for program in PROGRAMS)


@dataclass
class SwiftServer:
    """Object storage with signature checks, multipart uploads, ranges and ETags."""

    folder: Path
    account: str = "test0"
    ports: dict[str, int] = field(default_factory=dict)
    _processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _others: count[int] = field(default_factory=lambda: count(1))
    _token: str = ""

    @property
    def url(self) -> str:
        """The S3 endpoint."""
        return f"http://127.0.0.1:{self.ports['proxy']}"

    @property
    def environ(self) -> dict[str, str]:
        """The environment variables with which any S3 client uses it."""
        return {
            "AWS_ENDPOINT_URL_S3": self.url,
            "AWS_ACCESS_KEY_ID": f"{self.account}:tester",
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_REGION": "us-east-1",
            "HOME": str(self.folder),
            "NO_PROXY": "127.0.0.1",
        }

    def start(self) -> None:
        """Build the rings and start the servers; returns once requests are answered."""
        (self.folder / "devices" / "d1").mkdir(parents=True)
        self.ports = {name: free_port() for name in ("proxy", "memcached", *SERVICES)}
        user = pwd.getpwuid(os.getuid()).pw_name
        self._run(
            "memcached", "memcached", "-l", "127.0.0.1", "-p", str(self.ports["memcached"]), "-u", user, "-m", "16"
        )
        self._build_rings()
        for service in SERVICES:
            common = COMMON.format(port=self.ports[service], folder=self.folder, user=user)
            self._serve(service, common + STORAGE.format(service=service))
        self._serve("proxy", COMMON.format(port=self.ports["proxy"], folder=self.folder, user=user) + self._pipeline())
        for name in self.ports:
            wait_until(lambda name=name: self._answers(name), 30, f"{name} of Swift listens, see {self.folder}")

    def stop(self) -> None:
        """End the servers."""
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def other_account(self) -> SwiftServer:
        """Return the same servers with an empty account; starts them if they are down."""
        if not self._answers("proxy"):
            self.come_back()
        number = next(self._others)
        assert number < ACCOUNTS
        return replace(self, account=f"test{number}", _token="")

    def create_bucket(self, name: str) -> None:
        """Create a bucket by Swift's own API, so that no test of a client depends on that client."""
        self._send("PUT", name)

    def put(self, bucket: str, key: str, data: bytes) -> None:
        """Create or replace an object."""
        self._send("PUT", f"{bucket}/{quote(key)}", data)

    def delete(self, bucket: str, key: str) -> None:
        """Remove an object, if it is there."""
        try:
            self._send("DELETE", f"{bucket}/{quote(key)}")
        except HTTPError as error:
            if error.code != 404:
                raise

    def go_down(self) -> None:
        """Refuse connections until `come_back`; what is stored stays."""
        process = self._processes["proxy"]
        process.kill()
        process.wait()

    def come_back(self) -> None:
        """Answer again, on the same port."""
        self._run("proxy", "swift-proxy-server", str(self.folder / "proxy-server.conf"))
        wait_until(lambda: self._answers("proxy"), 30, "the proxy of Swift listens again")

    def _send(self, method: str, path: str, data: bytes | None = None) -> None:
        direct = build_opener(ProxyHandler({}))
        if not self._token:
            login = {"X-Storage-User": f"{self.account}:tester", "X-Storage-Pass": SECRET_KEY}
            with direct.open(Request(f"{self.url}/auth/v1.0", headers=login)) as answer:
                self._token = answer.headers["X-Auth-Token"]
        headers = {"X-Auth-Token": self._token, "content-type": "application/octet-stream"}
        request = Request(f"{self.url}/v1/AUTH_{self.account}/{path}", data, headers, method=method)
        direct.open(request, timeout=60).close()

    def _build_rings(self) -> None:
        # In one process of the interpreter that Swift is installed for: its own program would take nine.
        builder = shutil.which("swift-ring-builder") or ""
        interpreter = Path(builder).read_text().partition("\n")[0].removeprefix("#!").split()[0]
        ports = [f"{service}={self.ports[service]}" for service in SERVICES]
        subprocess.run([interpreter, "-c", BUILD_RINGS, *ports], check=True, cwd=self.folder, capture_output=True)

    def _pipeline(self) -> str:
        users = "\n".join(f"user_test{number}_tester = {SECRET_KEY} .admin" for number in range(ACCOUNTS))
        filters = {
            "cache": f"egg:swift#memcache\nmemcache_servers = 127.0.0.1:{self.ports['memcached']}",
            "s3api": f"egg:swift#s3api\nmax_bucket_listing = {PAGE_KEYS}",
            "tempauth": f"egg:swift#tempauth\n{users}",
            "proxy-server": "egg:swift#proxy\naccount_autocreate = true",
        }
        parts = [f"[pipeline:main]\npipeline = {PIPELINE}"]
        for name in PIPELINE.split():
            kind = "app" if name == "proxy-server" else "filter"
            parts.append(f"[{kind}:{name}]\nuse = {filters.get(name, f'egg:swift#{name}')}")
        return "\n".join(parts) + "\n"

    def _serve(self, service: str, configuration: str) -> None:
        file = self.folder / f"{service}-server.conf"
        file.write_text(configuration)
        self._run(service, f"swift-{service}-server", str(file))

    def _run(self, name: str, *command: str) -> None:
        with (self.folder / "servers.log").open("ab") as log:
            # They are killed with the test run.
            process = subprocess.Popen(
                command, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=_die_with_parent
            )
        self._processes[name] = process

    def _answers(self, name: str) -> bool:
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", self.ports[name])) == 0


def _die_with_parent() -> None:
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
