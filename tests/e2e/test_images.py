"""Images by `cortex export` and of `deploy/docker`, built and run by buildah."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cortex.export.dockerfile import READINESS_CHECK
from harness.buildah import BASE, Buildah, require_programs
from harness.connections import KeptConnection
from harness.installations.command_line import CORTEX
from harness.ports import free_port
from harness.wait import PATIENCE_S, wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]
ROOT = Path(__file__).parent.parent.parent
#: Nothing of these names may be lost or interpreted on the way into the image.
FOLDER, CONFIG_NAME, MODEL = 'my "shop" $HOME', 'it\'s a "$config" #1.yaml', "models/a 'b' $PATH"
CONFIG = f"""
- name: shop
  kind: RealtimeAPI
  handler:
    type: python
    path: handler.py
    config: {{odd: "$(id) \\"x\\""}}
    multi_model_reloading: {{path: {json.dumps(MODEL)}}}
  compute: {{cpu: 100m}}
"""
SOURCE = """
import os, time
import idna

VERSION = 1

class Handler:
    def __init__(self, model_client, config):
        self.client, self.config = model_client, config

    def load_model(self, model_path):
        with open(os.path.join(model_path, "weights.txt")) as file:
            return file.read()

    def handle_post(self, payload):
        time.sleep(payload.get("s", 0.02))
        return {
            "version": VERSION, "idna": idna.__version__, "model": self.client.get_model(), "odd": self.config["odd"],
            "token": os.environ.get("SHOP_TOKEN"), "user": os.getuid(),
        }
"""


@pytest.fixture(scope="module")
def buildah() -> Iterator[Buildah]:
    require_programs()
    with tempfile.TemporaryDirectory(prefix="cortex-images-", ignore_cleanup_errors=True) as folder:
        made = Buildah(Path(folder))
        made.prepare()
        made.make_base()
        yield made
        made.remove()


@pytest.fixture(scope="module")
def wheel(buildah: Buildah) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--wheel-dir",
        str(buildah.folder),
        str(ROOT),
    ]
    subprocess.run(command, check=True)
    [made] = buildah.folder.glob("*.whl")
    return made


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / FOLDER
    (folder / MODEL / "1").mkdir(parents=True)
    (folder / MODEL / "1/weights.txt").write_text("0.5")
    (folder / "handler.py").write_text(SOURCE)
    (folder / CONFIG_NAME).write_text(CONFIG)
    (folder / "requirements.txt").write_text("idna>=3,<3.8\n")
    (folder / ".env").write_text("SHOP_TOKEN=hunter2\n")
    return folder


def export(buildah: Buildah, wheel: Path, project: Path) -> None:
    """Export and build the image `shop`. Docker may be here, but buildah has the base."""
    programs = project.parent / "programs"
    programs.mkdir(exist_ok=True)
    if not (programs / "buildah").exists():
        (programs / "buildah").symlink_to(shutil.which("buildah") or "")
    words = ["export", str(project / CONFIG_NAME), "--out", str(project.parent / "out"), "--wheel", str(wheel)]
    done = subprocess.run(
        [*CORTEX, *words, "--tag", "shop:1", "--base", BASE, "--build"],
        env={**buildah.environ, "PATH": str(programs), "CORTEX_HOME": str(project.parent / "home")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "built shop:1 with buildah" in done.stdout


def post(port: int, payload: dict[str, float]) -> dict[str, object]:
    client = KeptConnection(port, "/shop", **payload)
    status, body = client.send()
    assert status == 200, body
    return dict(json.loads(body))


def test_an_exported_image_serves_drains_and_is_rebuilt_quickly(
    buildah: Buildah, wheel: Path, project: Path, tmp_path: Path
) -> None:
    export(buildah, wheel, project)
    image = buildah.image("shop:1")
    assert image["User"] == "10001:10001"
    assert image["Healthcheck"]["Test"] == ["CMD", *READINESS_CHECK]
    assert image["Cmd"][-1] == f"/srv/project/{CONFIG_NAME}"

    # The ports of the image are those of this machine, so the container gets others, and only the loopback address.
    gateway, operator = free_port(), free_port()
    ports = ["--gateway-port", str(gateway), "--operator-port", str(operator), "--host", "127.0.0.1"]
    container = buildah.container("shop:1")
    with container.running([*image["Cmd"], *ports], tmp_path / "output", {"SHOP_TOKEN": "from outside"}) as running:
        first = running.first_process("cortex")
        wait_until(
            lambda: container.run("cortex", "status", "--ready").returncode == 0, 60, message="the APIs are ready"
        )
        assert post(gateway, {}) == {
            "version": 1,
            "idna": "3.7",
            "model": "0.5",
            "odd": '$(id) "x"',
            "token": "from outside",
            "user": 10001,
        }
        # Packages are those of the image, and the project belongs to root.
        assert container.run("ls", "/var/lib/cortex/environments").stdout == ""
        assert container.run("touch", "/srv/project/handler.py").returncode != 0
        assert container.run("cat", "/srv/project/.env").returncode != 0

        clients = [KeptConnection(gateway, "/shop") for _ in range(4)] + [KeptConnection(gateway, "/shop", s=1.5)]
        for client in clients:
            client.start()
        wait_until(lambda: all(client.answers for client in clients), message="every client got a response")
        first.send_signal(signal.SIGTERM)
        for client in clients:
            client.join(PATIENCE_S)
        assert [client.failure for client in clients] == [None] * len(clients)
        assert {status for client in clients for status, _ in client.answers} == {200}
        assert running.process.wait(PATIENCE_S) == 0
        assert {line["source"] for line in running.lines()} >= {"operator", "gateway", "up"}  # each line is JSON

    # A change of one line replaces the last layer only.
    handler = project / "handler.py"
    handler.write_text(SOURCE.replace("VERSION = 1", "VERSION = 2"))
    export(buildah, wheel, project)
    changed = buildah.image("shop:1")
    assert changed["layers"][:-1] == image["layers"][:-1]
    assert changed["layers"][-1] != image["layers"][-1]
    assert changed["layers"][-1][1] < 100_000
    assert "VERSION = 2" in buildah.container("shop:1").run("cat", "/srv/project/handler.py").stdout


def test_the_image_of_the_platform_has_what_a_ray_cluster_needs(buildah: Buildah) -> None:
    dockerfile = str(ROOT / "deploy/docker/Dockerfile")
    words = [
        "--file",
        dockerfile,
        "--build-arg",
        "VERSION=9.8.7",
        "--tag",
        "cortex:1",
        "--layers",
        "--format",
        "docker",
    ]
    buildah.call("build", *words, str(ROOT))

    container = buildah.container("cortex:1")

    assert container.run("cortex", "version").stdout == "9.8.7\n"
    assert container.run("id", "--user").stdout == "10001\n"
    assert container.run("ray", "--version").stdout.startswith("ray, version ")
    assert container.run("python", "-c", "import psycopg").returncode == 0
    assert container.run("wget", "--version").returncode == 0
    assert container.run("test", "-w", "/var/lib/cortex").returncode == 0
