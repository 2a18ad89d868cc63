"""Images without a Docker daemon: buildah with a storage of its own, on a base image that mmdebstrap makes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from harness.wait import PATIENCE_S, wait_until

#: As in Debian 12, whose packages the base image has: the default of `cortex export` names the Python that runs it.
BASE = "docker.io/library/python:3.11-slim"
_PACKAGES = "python3.11,python3-venv,python-is-python3,ca-certificates"
_CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"


def require_programs() -> None:
    """Fail if images can't be built here, and say what to do."""
    missing = [name for name in ("buildah", "mmdebstrap") if shutil.which(name) is None]
    assert not missing, f"{' and '.join(missing)} are not installed: run `sh scripts/test-services long` as root"
    assert os.geteuid() == 0, "buildah without a daemon needs root here: run the long tests as root"


@dataclass(frozen=True)
class Buildah:
    """One storage of images and containers."""

    folder: Path

    @property
    def environ(self) -> dict[str, str]:
        """Variables with which any call of buildah uses this storage."""
        return {
            **os.environ,
            "BUILDAH_ISOLATION": "chroot",
            "CONTAINERS_STORAGE_CONF": str(self.folder / "storage.conf"),
            "CONTAINERS_CONF": str(self.folder / "containers.conf"),
            "TMPDIR": str(self.folder),  # of the cache mounts, too
        }

    def prepare(self) -> None:
        """Write the settings, with the first driver that works here."""
        folders = [
            value for name in ("PIP_FIND_LINKS", "UV_FIND_LINKS") if Path(value := os.environ.get(name, "")).is_dir()
        ]
        volumes = [f"{folder}:{folder}:ro" for folder in folders if folder]
        (self.folder / "containers.conf").write_text(f"[containers]\nvolumes = {json.dumps(volumes)}\n")
        for driver in ("overlay", "vfs"):
            places = f'runroot = "{self.folder}/run"\ngraphroot = "{self.folder}/storage"\n'
            (self.folder / "storage.conf").write_text(f'[storage]\ndriver = "{driver}"\n{places}')
            if self.call("from", "scratch", check=False).returncode == 0:
                return
        raise AssertionError("buildah can't use any storage driver here")

    def make_base(self) -> None:
        """Make the image that stands for python:3.11-slim, with the package index of this machine."""
        context = self.folder / "base"
        context.mkdir()
        subprocess.run(
            [
                "mmdebstrap",
                "--quiet",
                "--variant=minbase",
                f"--include={_PACKAGES}",
                "bookworm",
                str(context / "root.tar"),
            ],
            check=True,
        )
        shutil.copyfile(_CERTIFICATES, context / "certificates.crt")
        settings = {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "UV_"))}
        lines = [f"ENV {name}={json.dumps(value)}\n" for name, value in settings.items()]
        copy = f"FROM scratch\nADD root.tar /\nCOPY certificates.crt {_CERTIFICATES}\n"
        (context / "Dockerfile").write_text(copy + "".join(lines))
        self.call("build", "--format", "docker", "--tag", BASE, str(context))

    def call(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(["buildah", *arguments], env=self.environ, capture_output=True, text=True)
        assert not check or done.returncode == 0, f"buildah {arguments}: {done.stdout}\n{done.stderr}"
        return done

    def image(self, tag: str) -> dict[str, Any]:
        """Return the configuration of an image, and the digests of its `layers`."""
        found = json.loads(self.call("inspect", "--type", "image", tag).stdout)
        layers = json.loads(found["Manifest"])["layers"]
        return {**found["Docker"]["config"], "layers": [(layer["digest"], layer["size"]) for layer in layers]}

    def container(self, tag: str) -> Container:
        return Container(self, self.call("from", tag).stdout.strip())

    def remove(self) -> None:
        """Remove all containers and images; the storage may have mounts."""
        self.call("rm", "--all", check=False)
        self.call("rmi", "--all", "--force", check=False)


@dataclass(frozen=True)
class Container:
    """A container, whose processes use the network of this machine."""

    buildah: Buildah
    name: str

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end, as the user of the image."""
        return self.buildah.call("run", self.name, "--", *command, check=False)

    @contextmanager
    def running(self, command: list[str], output: Path, environ: Mapping[str, str]) -> Iterator[Running]:
        """Run a command meanwhile; end it if the test did not."""
        variables = [word for name, value in environ.items() for word in ("--env", f"{name}={value}")]
        with output.open("wb") as file:
            process = subprocess.Popen(
                ["buildah", "run", *variables, self.name, "--", *command],
                env=self.buildah.environ,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        found = Running(process, output)
        try:
            yield found
        finally:
            if process.poll() is None:
                for child in psutil.Process(process.pid).children(recursive=True):
                    with suppress(psutil.Error):
                        child.terminate()
                process.wait(PATIENCE_S)


@dataclass(frozen=True)
class Running:
    """The command of a container."""

    process: subprocess.Popen[bytes]
    output: Path

    def first_process(self, word: str) -> psutil.Process:
        """Return the process that a container engine would send signals to: the outermost one that runs `word`."""

        def find() -> psutil.Process | None:
            assert self.process.poll() is None, self.output.read_text()
            for child in psutil.Process(self.process.pid).children(recursive=True):
                with suppress(psutil.Error):  # it has just ended
                    words = child.cmdline()
                    if any(each.endswith(f"/{word}") for each in words) and "chroot" not in words[0]:
                        return child
            return None

        found = wait_until(find, message=f"{word} runs in the container")
        assert found is not None
        return found

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.output.read_text().splitlines()]
