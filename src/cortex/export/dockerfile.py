"""Dockerfile, compose.yaml and README of an image. Pure.

Nothing of the user's is a word of these files: folders of the context have fixed names, so that paths of the project
occur in none of them. The exception is the name of the configuration file, in a JSON array (the exec form), in which
neither the builder nor a shell substitutes anything.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from cortex.errors import InputError
from cortex.export.plan import ImagePlan

#: First words of the Dockerfile: only a folder that has one of ours is overwritten.
MARK = "# Written by `cortex export`, which overwrites it."
USER_ID = 10001
HOME = "/var/lib/cortex"
PROJECT = "/srv/project"
GATEWAY_PORT, OPERATOR_PORT = 8888, 8889
#: Asks the gateway whether all APIs are ready. Images of Python have bash, but no program for HTTP.
READINESS_CHECK = (
    "bash",
    "-c",
    f"exec 3<>/dev/tcp/127.0.0.1/{GATEWAY_PORT}; printf 'GET /readyz HTTP/1.0\\r\\n\\r\\n' >&3; "
    'read -r _ status _ <&3; [ "$status" = 200 ]',
)
#: The drain time and the time that the processes then have, see docs/howto/containers.md.
STOP_S = 40
SHARED_MEMORY = "1g"

_REFERENCE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,254}")
_EXTRA = re.compile(r"[a-z][a-z-]{0,39}")


@dataclass(frozen=True)
class ImageOptions:
    """Choices of the user, and the version of cortex in the image."""

    tag: str
    base: str
    version: str
    extras: tuple[str, ...] = ()
    has_wheel: bool = False  #: cortex is installed from a file of the context

    def __post_init__(self) -> None:
        for option, reference in (("--tag", self.tag), ("--base", self.base)):
            if not _REFERENCE.fullmatch(reference):
                raise InputError(
                    f"{option} {reference!r}: is not the name of an image, such as registry.example.com/a:1"
                )
        for extra in self.extras:
            if not _EXTRA.fullmatch(extra):
                raise InputError(f"--extra {extra!r}: is not an extra of cortex-serving, such as onnx")


def dockerfile(plan: ImagePlan, options: ImageOptions) -> str:
    """Return the Dockerfile."""
    requirement = f"cortex-serving{'[' + ','.join(options.extras) + ']' if options.extras else ''}=={options.version}"
    links = " --find-links /opt/cortex/wheels" if options.has_wheel else ""
    config = json.dumps(f"{PROJECT}/{plan.config_name}")
    parts = [
        f"""\
{MARK}
# Layers that rarely change come first: a change of the code rebuilds, pushes and pulls only the last one.
FROM {options.base}
# Only one user is in the container, whoever owns the volume of the home.
ENV PATH=/opt/cortex/venv/bin:$PATH CORTEX_HOME={HOME} CORTEX_TRUST_HOME=1

# Nothing runs as root. The number is also in the manifest for Kubernetes.
RUN groupadd --gid {USER_ID} cortex && \\
    useradd --uid {USER_ID} --gid cortex --home-dir {HOME} --no-create-home --no-log-init cortex && \\
    install --directory --owner cortex --group cortex --mode 0700 {HOME}

# cortex. constraints.txt has the versions of its packages on the machine that exported.
COPY cortex/ /opt/cortex/
RUN --mount=type=cache,target=/root/.cache \\
    python -m venv /opt/cortex/venv && \\
    pip install{links} --constraint /opt/cortex/constraints.txt "{requirement}"
"""
    ]
    for number, _ in enumerate(plan.environments, 1):
        parts.append(f"""
# Packages of the project, installed as by `cortex deploy`. constraints.txt has their locked versions.
COPY environments/{number}/ /opt/cortex/dependencies/{number}/
RUN --mount=type=cache,target=/root/.cache \\
    python -m cortex.export.environment /opt/cortex/dependencies/{number}
""")
    for number, model in enumerate(plan.models, 1):
        target = "/" if model.is_absolute else f"{PROJECT}/"
        parts.append(f"\n# Model {number}.\nCOPY models/{number}/ {target}\n")
    if plan.large_files:
        parts.append(f"\n# Large files of the project.\nCOPY large-files/ {PROJECT}/\n")
    parts.append(f"""
# Code and configuration. The files belong to root, so that the APIs can't change them.
COPY project/ {PROJECT}/

VOLUME {HOME}
EXPOSE {GATEWAY_PORT} {OPERATOR_PORT}
USER {USER_ID}:{USER_ID}
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s CMD {json.dumps(READINESS_CHECK)}
# At SIGTERM, requests in progress finish.
CMD ["cortex", "up", "--foreground", "--stop-all", "--log-format", "json", "--host", "0.0.0.0", "--deploy", {config}]
""")
    return "".join(parts)


def compose_file(plan: ImagePlan, options: ImageOptions) -> str:
    """Return compose.yaml."""
    dotenv = """
    # Of the project; copy it here. In this form, it needs Docker Compose 2.24 or newer.
    env_file:
      - path: .env
        required: false
"""
    return f"""\
# Written by `cortex export`, which overwrites it. `docker compose up --build` builds the image and starts it.
name: {plan.name}
services:
  {plan.name}:
    build: .
    image: "{options.tag}"
    # Only this machine can reach the port; remove the address to publish it.
    ports: ["127.0.0.1:{GATEWAY_PORT}:{GATEWAY_PORT}"]{dotenv if plan.has_dotenv else chr(10)}\
    volumes: ["home:{HOME}"]
    shm_size: {SHARED_MEMORY}
    stop_grace_period: {STOP_S}s
    restart: unless-stopped
    read_only: true
    tmpfs: [/tmp]
    cap_drop: [ALL]
    security_opt: ["no-new-privileges:true"]
volumes:
  home: {{}}
"""


def readme(plan: ImagePlan, options: ImageOptions) -> str:
    """Return README.md."""
    port = f"--publish 127.0.0.1:{GATEWAY_PORT}:{GATEWAY_PORT}"
    dotenv = " --env-file .env" if plan.has_dotenv else ""
    return f"""\
# {plan.name}

The build context of a container image, written by `cortex export`. Edit the project, not this folder, and export again.

```sh
docker build --tag {options.tag} .
docker run {port} --shm-size {SHARED_MEMORY} --stop-timeout {STOP_S}{dotenv} {options.tag}
```
"""
