"""Deploy the iris example into an installation of its own under build/demo or $DEMO_HOME, and ask it for a prediction.

Knows cortex only as a user does: by its command and by HTTP. What it starts keeps running, and a second run uses it;
`--stop` ends it.
"""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
HOME = ROOT / os.environ.get("DEMO_HOME", "build/demo")
CORTEX = Path(sys.executable).with_name("cortex")
EXAMPLE = Path("examples/iris-classifier")
GATEWAY_PORT, OPERATOR_PORT = 8888, 8889


def main() -> int:
    os.chdir(ROOT)
    try:
        if sys.argv[1:] == ["--stop"]:
            cortex("down")
            return 0
        demonstrate()
    except subprocess.CalledProcessError as error:
        return int(error.returncode)
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def demonstrate() -> None:
    """Start, deploy, call, and say how to go on."""
    if not status()["operator"]:
        cortex("up", "--gateway-port", str(free_port(GATEWAY_PORT)), "--operator-port", str(free_port(OPERATOR_PORT)))
    cortex("deploy", str(EXAMPLE))
    running = status()
    url = f"{running['gateway']['url']}/iris-classifier"
    sample = (EXAMPLE / "sample.json").read_text().strip()
    print(f"\nan iris flower  {sample}")
    print(f"its prediction  {predict(url, sample)}")
    print("\nThe API goes on running. Call it yourself:")
    print(f"  curl {url} -H 'content-type: application/json' -d @{EXAMPLE}/sample.json")
    print("\nSee what runs, and what it logs:")
    home, cortex_command = (shlex.quote(os.path.relpath(path, ROOT)) for path in (HOME, CORTEX))
    for command in ("get", "logs iris-classifier", "status"):
        print(f"  CORTEX_HOME={home} {cortex_command} {command}")
    print(f"\ngateway   {running['gateway']['url']}   your APIs")
    print(f"operator  {running['operator']['url']}   the control plane")
    print("\nStop it:\n  make demo-stop")


def cortex(*arguments: str) -> None:
    """Run a command for the user to see. Raises: CalledProcessError."""
    print(f"$ cortex {shlex.join(arguments)}", flush=True)
    subprocess.run([CORTEX, *arguments], check=True, env=environment())


def status() -> Any:
    output = subprocess.run(
        [CORTEX, "status", "-o", "json"], check=True, env=environment(), stdout=subprocess.PIPE, text=True
    ).stdout
    return json.loads(output)


def environment() -> dict[str, str]:
    return {**os.environ, "CORTEX_HOME": str(HOME)}


def free_port(preferred: int) -> int:
    """Take the usual port where nothing else listens there, else any."""
    for port in (preferred, 0):
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
            return int(listener.getsockname()[1])
    raise OSError("no free port on 127.0.0.1")


def predict(url: str, sample: str) -> str:
    request = urllib.request.Request(url, data=sample.encode(), headers={"content-type": "application/json"})
    # A proxy that the environment names must not be asked for this machine's own address.
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=30) as response:
        return str(response.read().decode())


if __name__ == "__main__":
    sys.exit(main())
