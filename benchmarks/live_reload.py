"""Time from a saved file to the first response of the new code: `cortex dev`, `fastapi dev`, `bentoml serve --reload`.

    python -m benchmarks.live_reload

The model takes 2 s to load. A method changes, then the constructor, each several times.
"""

from __future__ import annotations

import contextlib
import http.client
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.tools import environments
from benchmarks.tools.endpoint import Endpoint, free_ports
from benchmarks.tools.processes import adopt_orphans, started
from benchmarks.tools.systems import environ_of

MODEL_S = 2.0
METHOD_CHANGES = 5
CONSTRUCTOR_CHANGES = 3
#: Between two changes of the constructor, as a person saves files.
PAUSE_S = 3.0
_TIMEOUT_S = 60.0

_CORTEX = f"""
import time

class Handler:
    def __init__(self, config):
        self.constructed = 0
        time.sleep({MODEL_S})  # load the model

    def handle_post(self):
        return [self.constructed, 0]
"""
_FASTAPI = f"""
import time
from fastapi import FastAPI

constructed = 0
time.sleep({MODEL_S})  # load the model
app = FastAPI()

@app.post("/bench")
def bench():
    return [constructed, 0]
"""
_BENTOML = f"""
import time
import bentoml

@bentoml.service(workers=1)
class Bench:
    def __init__(self):
        self.constructed = 0
        time.sleep({MODEL_S})  # load the model

    @bentoml.api
    def bench(self) -> list[int]:
        return [self.constructed, 0]
"""
_CONFIG = "- name: bench\n  kind: RealtimeAPI\n  handler: {type: python, path: app.py}\n"


@dataclass(frozen=True)
class Tool:
    """A development server: its command without the port, and the code in its `app.py`."""

    name: str
    command: tuple[str, ...]
    code: str


def main() -> None:
    """Measure all, and print a table."""
    adopt_orphans()
    fastapi, bentoml = (str(environments.prepare(peer)) for peer in ("fastapi", "bentoml"))
    tools = (
        Tool("cortex dev", (sys.executable, "-m", "cortex.cli.main", "dev"), _CORTEX),
        Tool("fastapi dev", (fastapi, "-m", "fastapi", "dev", "app.py"), _FASTAPI),
        Tool("bentoml serve --reload", (bentoml, "-m", "bentoml", "serve", "app:Bench", "--reload"), _BENTOML),
    )
    print(f"save to answer, median and maximum, model of {MODEL_S:g} s")
    print(f"{'':24}  {'method':>18}  {'constructor':>18}")
    for tool in tools:
        with _serving(tool) as (file, endpoint):
            methods = [_change(file, endpoint, 0, each) for each in range(1, METHOD_CHANGES + 1)]
            constructors = []
            for each in range(1, CONSTRUCTOR_CHANGES + 1):
                time.sleep(PAUSE_S)
                constructors.append(_change(file, endpoint, each, METHOD_CHANGES))
        print(f"{tool.name:24}  {_shown(methods):>18}  {_shown(constructors):>18}", flush=True)


@contextlib.contextmanager
def _serving(tool: Tool) -> Iterator[tuple[Path, Endpoint]]:
    """Run a development server; yield its `app.py` and the address of the API."""
    # The log is elsewhere: BentoML restarts whenever any file of its folder changes.
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as log:
        file = Path(folder) / "app.py"
        file.write_text(tool.code)
        (Path(folder) / "cortex.yaml").write_text(_CONFIG)
        endpoint = Endpoint(free_ports(1)[0], "/bench")
        command = [*tool.command, "--port", str(endpoint.port)]
        environ = environ_of(BENTOML_DO_NOT_TRACK="True")
        with started(command, environ, Path(folder), Path(log) / "log"):
            try:
                _wait(endpoint, [0, 0])
                yield file, endpoint
            except TimeoutError:
                print((Path(log) / "log").read_text(), file=sys.stderr)
                raise


def _change(file: Path, endpoint: Endpoint, constructed: int, answer: int) -> float:
    """Save new numbers; return the time to the first response that has them."""
    text = re.sub(r"constructed = \d+", f"constructed = {constructed}", file.read_text())
    text = re.sub(r"constructed, \d+\]", f"constructed, {answer}]", text)
    begin = time.perf_counter()
    file.write_text(text)
    _wait(endpoint, [constructed, answer])
    return time.perf_counter() - begin


def _wait(endpoint: Endpoint, expected: list[int]) -> None:
    deadline = time.monotonic() + _TIMEOUT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection(endpoint.host, endpoint.port, timeout=_TIMEOUT_S)
            with contextlib.closing(connection):
                connection.request("POST", endpoint.path, b"{}", {"Content-Type": "application/json"})
                if connection.getresponse().read().decode().replace(" ", "") == str(expected).replace(" ", ""):
                    return
        time.sleep(0.002)
    raise TimeoutError(f"{endpoint.url} does not answer {expected}")


def _shown(seconds: list[float]) -> str:
    return f"{statistics.median(seconds) * 1000:.0f} / {max(seconds) * 1000:.0f} ms"


if __name__ == "__main__":
    main()
