"""Dockerfile, compose.yaml and README: order of the layers, and no word of the user's in them."""

from __future__ import annotations

import json
import re
import subprocess
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from cortex.errors import InputError
from cortex.export.dockerfile import GATEWAY_PORT, READINESS_CHECK, ImageOptions, compose_file, dockerfile, readme
from cortex.export.kubernetes import manifest
from cortex.export.plan import ImageEnvironment, ImagePlan, ModelLayer, PodResources, image_name

OPTIONS = ImageOptions(tag="registry.example.com/shop:1", base="python:3.12-slim", version="0.1.0")
TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)


def plan(name: str = "shop", **changes: Any) -> ImagePlan:
    empty = ImagePlan(
        name=name,
        config_name="cortex.yaml",
        environments=(),
        models=(),
        large_files=(),
        code=("cortex.yaml", "handler.py"),
        resources=PodResources(0.7, 768, 0),
        has_dotenv=False,
        keeps_state=False,
    )
    return replace(empty, **changes)


def instructions(text: str) -> list[str]:
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return re.split(r"\n(?! )", "\n".join(lines))


def test_layers_that_rarely_change_come_first() -> None:
    everything = plan(
        environments=(ImageEnvironment("requirements.txt", "c", "s", {}, {}, ("requirements.txt",)),) * 2,
        models=(ModelLayer("models/a", False, ("models/a/1",)), ModelLayer("/data/b", True)),
        large_files=("weights.bin",),
    )

    copied = [line for line in instructions(dockerfile(everything, OPTIONS)) if line.startswith(("FROM", "COPY"))]

    assert copied == [
        "FROM python:3.12-slim",
        "COPY cortex/ /opt/cortex/",
        "COPY environments/1/ /opt/cortex/dependencies/1/",
        "COPY environments/2/ /opt/cortex/dependencies/2/",
        "COPY models/1/ /srv/project/",
        "COPY models/2/ /",
        "COPY large-files/ /srv/project/",
        "COPY project/ /srv/project/",
    ]


def test_the_image_runs_as_an_ordinary_user_and_reports_whether_its_apis_are_ready() -> None:
    *_, user, health, command = instructions(dockerfile(plan(), OPTIONS))

    assert user == "USER 10001:10001"
    assert health.endswith(f"CMD {json.dumps(READINESS_CHECK)}")
    words = json.loads(command.removeprefix("CMD "))
    assert words[:4] == ["cortex", "up", "--foreground", "--stop-all"]
    assert words[-2:] == ["--deploy", "/srv/project/cortex.yaml"]


@pytest.mark.processes
@pytest.mark.parametrize("status", [200, 503, None])
def test_the_health_check_of_the_image_is_a_request_to_the_gateway(status: int | None) -> None:
    asked: list[str] = []

    class Gateway(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(status or 0)
            self.end_headers()

    with HTTPServer(("127.0.0.1", 0), Gateway) as gateway:
        command = [each.replace(str(GATEWAY_PORT), str(gateway.server_port)) for each in READINESS_CHECK]
        if status is None:
            gateway.server_close()
        else:
            threading.Thread(target=gateway.handle_request).start()
        done = subprocess.run(command, capture_output=True)
    assert (done.returncode == 0, asked) == (status == 200, [] if status is None else ["/readyz"])


def test_cortex_is_installed_in_the_version_that_exports() -> None:
    options = replace(OPTIONS, extras=("onnx", "grpc"), has_wheel=True)

    [install] = [line for line in instructions(dockerfile(plan(), options)) if "pip install" in line]

    assert '"cortex-serving[onnx,grpc]==0.1.0"' in install
    assert "--find-links /opt/cortex/wheels" in install
    assert "--find-links" not in dockerfile(plan(), OPTIONS)


@given(folder=TEXT, config_name=TEXT, path=TEXT, value=TEXT)
def test_no_text_of_the_user_is_a_word_of_the_files(folder: str, config_name: str, path: str, value: str) -> None:
    odd = plan(
        name=image_name(folder),
        config_name=config_name,
        environments=(ImageEnvironment(path, path, path, {value: value}, {"A": value}, (path,)),),
        models=(ModelLayer(path, False, (path,)), ModelLayer(f"/{path}", True)),
        large_files=(path,),
        code=(config_name, path),
        has_dotenv=True,
    )
    plain = replace(odd, config_name="cortex.yaml")

    *same, command = dockerfile(odd, OPTIONS).splitlines()
    assert same == dockerfile(plain, OPTIONS).splitlines()[:-1]
    # A builder takes the rest of the line as JSON: it must be one line, and the text in it nothing else.
    assert command.isascii() and command.isprintable()
    assert json.loads(command.removeprefix("CMD "))[-1] == f"/srv/project/{config_name}"
    assert re.fullmatch("[a-z][a-z0-9-]*", odd.name)
    for text in (compose_file(odd, OPTIONS), readme(odd, OPTIONS), manifest(odd, OPTIONS.tag)):
        known = plan(odd.name, has_dotenv=True)
        assert text in (compose_file(known, OPTIONS), readme(known, OPTIONS), manifest(known, OPTIONS.tag))


@pytest.mark.parametrize("tag", ["", "a b", "a;b", "$(id)", '"', "a\nb", "-t", "x" * 256])
def test_names_of_images_are_checked(tag: str) -> None:
    with pytest.raises(InputError, match="--tag"):
        replace(OPTIONS, tag=tag)
    with pytest.raises(InputError, match="--base"):
        replace(OPTIONS, base=tag)
    with pytest.raises(InputError, match="--extra"):
        replace(OPTIONS, extras=(tag,))


def test_the_base_can_be_pinned_by_its_digest() -> None:
    digest = f"python@sha256:{'0' * 64}"

    assert f"\nFROM {digest}\n" in dockerfile(plan(), replace(OPTIONS, base=digest))


@pytest.mark.parametrize("has_dotenv", [True, False])
def test_compose_starts_one_container_with_a_volume_and_time_to_stop(has_dotenv: bool) -> None:
    document = yaml.safe_load(compose_file(plan(has_dotenv=has_dotenv), OPTIONS))

    [service] = document["services"].values()
    assert service["image"] == OPTIONS.tag
    assert service["ports"] == ["127.0.0.1:8888:8888"]
    assert service["stop_grace_period"] == "40s"
    assert service["volumes"] == [f"{volume}:/var/lib/cortex" for volume in document["volumes"]]
    assert service.get("env_file") == ([{"path": ".env", "required": False}] if has_dotenv else None)
