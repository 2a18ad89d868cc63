"""Time from a saved file to the first response of the new code: `cortex dev`, and `uvicorn --reload` beside it.

    python -m benchmarks.live_reload

The model takes 2 s to load. A method changes, then the constructor, each several times. `fastapi dev` is
`uvicorn --reload` with the same reloader; it has watchfiles if that is installed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

MODEL_S = 2.0
METHOD_CHANGES = 10
CONSTRUCTOR_CHANGES = 3
#: Between two changes of the constructor, as a person saves files.
PAUSE_S = 6.0
_TIMEOUT_S = 120.0

_CONFIG = "- name: bench\n  kind: RealtimeAPI\n  handler: {type: python, path: app.py}\n"
_HANDLER = f"""
import threading
import time

class Handler:
    def __init__(self, config):
        self.constructed = 0
        time.sleep({MODEL_S})  # load the model

    def handle_get(self):
        return [self.constructed, 0]
"""
_FASTAPI = f"""
import threading
import time
from fastapi import FastAPI

constructed = 0
time.sleep({MODEL_S})  # load the model
app = FastAPI()

@app.get("/bench")
def bench():
    return [constructed, 0]
"""


def main() -> None:
    """Measure both, and print a table."""
    watcher = "watchfiles" if importlib.util.find_spec("watchfiles") else "stat every 0.25 s"
    print(f"save to answer, median and maximum, model of {MODEL_S:g} s")
    print(f"{'':34}  {'method':>18}  {'constructor':>18}")
    for name, serve, code, constructor in (
        ("cortex dev", _cortex_dev, _HANDLER, "self.constructed = "),
        (f"uvicorn --reload ({watcher})", _uvicorn, _FASTAPI, "constructed = "),
    ):
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "app.py"
            file.write_text(code)
            with serve(Path(folder)) as url:
                _wait(url, [0, 0])
                methods = [_change(file, url, f"{constructor}0", 0, each) for each in range(1, METHOD_CHANGES + 1)]
                begins = [
                    _change(file, url, constructor, each, METHOD_CHANGES) for each in range(1, CONSTRUCTOR_CHANGES + 1)
                ]
        print(f"{name:34}  {_shown(methods):>18}  {_shown(begins):>18}")


def _change(file: Path, url: str, constructor: str, constructed: int, answer: int) -> float:
    """Save new numbers; return the time to the first response that has them."""
    time.sleep(PAUSE_S if constructed else 0)
    text = file.read_text()
    name = constructor.partition(" = ")[0]
    text = re.sub(rf"(?<![.\w]){re.escape(name)} = \d+", f"{name} = {constructed}", text)
    text = re.sub(r"constructed, \d+\]", f"constructed, {answer}]", text)
    started = time.perf_counter()
    file.write_text(text)
    _wait(url, [constructed, answer])
    return time.perf_counter() - started


def _wait(url: str, expected: list[int]) -> None:
    deadline = time.monotonic() + _TIMEOUT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=_TIMEOUT_S) as response:
            if response.read().decode().replace(" ", "") == str(expected).replace(" ", ""):
                return
        time.sleep(0.002)
    raise TimeoutError(f"{url} does not answer {expected}")


@contextlib.contextmanager
def _cortex_dev(folder: Path) -> Iterator[str]:
    (folder / "cortex.yaml").write_text(_CONFIG)
    command = [sys.executable, "-m", "cortex.cli.main", "dev", str(folder), "--port", "0"]
    with _running(command, folder, r"http://127\.0\.0\.1:\d+/bench") as url:
        yield url


@contextlib.contextmanager
def _uvicorn(folder: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "uvicorn", "app:app", "--reload", "--port", "0"]
    with _running(command, folder, r"http://127\.0\.0\.1:\d+") as url:
        yield f"{url}/bench"


@contextlib.contextmanager
def _running(command: list[str], folder: Path, pattern: str) -> Iterator[str]:
    process = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if found := re.search(pattern, line):
                break
        else:
            raise RuntimeError(f"{command} did not start")
        stderr = process.stderr

        threading.Thread(target=lambda: [None for _ in stderr], daemon=True).start()
        yield found[0]
    finally:
        process.terminate()
        process.wait()


def _shown(seconds: list[float]) -> str:
    return f"{statistics.median(seconds) * 1000:.0f} / {max(seconds) * 1000:.0f} ms"


if __name__ == "__main__":
    main()
