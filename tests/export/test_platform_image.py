"""`deploy/docker`: the image of the platform agrees with the rest of the repository."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from cortex.export.dockerfile import GATEWAY_PORT, HOME, SHARED_MEMORY, STOP_S, USER_ID

ROOT = Path(__file__).parent.parent.parent
DOCKERFILE = (ROOT / "deploy/docker/Dockerfile").read_text()
COMPOSE = yaml.safe_load((ROOT / "deploy/docker/compose.yaml").read_text())


def test_everything_that_the_image_copies_is_in_the_repository() -> None:
    copied = re.findall(r"^COPY (?!--from)(.*) \S+$", DOCKERFILE, re.MULTILINE)

    assert copied
    for source in " ".join(copied).split():
        assert (ROOT / source).exists(), source


def test_it_has_the_user_the_home_and_the_port_of_exported_images() -> None:
    assert f"USER {USER_ID}:{USER_ID}\n" in DOCKERFILE
    assert f"VOLUME {HOME}\n" in DOCKERFILE
    assert f"EXPOSE {GATEWAY_PORT} " in DOCKERFILE


def test_compose_builds_this_file_and_gives_it_time_to_stop() -> None:
    service = COMPOSE["services"]["cortex"]
    context = ROOT / "deploy/docker" / service["build"]["context"]

    assert (context / service["build"]["dockerfile"]).resolve() == ROOT / "deploy/docker/Dockerfile"
    assert (service["stop_grace_period"], service["shm_size"]) == (f"{STOP_S}s", SHARED_MEMORY)
    assert service["volumes"] == [f"home:{HOME}"]
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
