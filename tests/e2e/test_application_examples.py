"""The examples with applications, deployed: FastAPI with everything that it offers, and Gradio with its own client."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from cortex.home import Home
from harness.installations.example_cases import EXAMPLES_DIR, with_what_is_installed
from harness.installations.installation import Installation
from harness.replicas.applications import WebSocket
from harness.wait import PATIENCE_S

GRADIO_CLIENT = """
import json, sys
from gradio_client import Client

url = sys.argv[1]
clients = [Client(url, verbose=False) for _ in range(4)]
parts = list(clients[0].submit("one two three", api_name="/chat"))
counts = [[client.predict(api_name="/count") for _ in range(5)] for client in clients]
print(json.dumps({"parts": parts, "counts": counts}))
"""


def get(cortex: Installation, path: str) -> str:
    answer = cortex.post(path, method="GET")
    assert answer.status == 200, answer
    return answer.body.decode()


def test_the_fastapi_example_has_docs_static_files_a_sub_application_events_and_a_websocket(
    cortex: Installation, tmp_path: Path
) -> None:
    shutil.copytree(EXAMPLES_DIR / "fastapi-app", project := tmp_path / "fastapi-app")
    cortex.cortex("deploy", with_what_is_installed(project))
    readme = (project / "README.md").read_text()
    predicted = cortex.post("/fastapi-app/predict", {"text": "the old pier"})
    assert predicted.body.decode() in readme
    for path in ("", "/", "/static/index.html"):
        assert "<h1>FastAPI behind cortex</h1>" in get(cortex, f"/fastapi-app{path}")
    assert "EventSource" in get(cortex, "/fastapi-app/static/page.js")
    for place in ("/fastapi-app", "/fastapi-app/admin"):
        assert f"{place}/openapi.json" in get(cortex, f"{place}/docs")
        assert json.loads(get(cortex, f"{place}/openapi.json"))["servers"] == [{"url": place}]
    assert json.loads(get(cortex, "/fastapi-app/admin/settings"))["this"] == cortex.url("/fastapi-app/admin/settings")
    assert get(cortex, "/fastapi-app/events?count=2") == "data: 0\n\ndata: 1\n\n"
    with socket.create_connection((cortex.host, cortex.gateway_port), PATIENCE_S) as sock:
        client = WebSocket(sock, "/fastapi-app/echo")
        client.send("hello")
        assert client.receive() == "hello"


@pytest.mark.long  # installs 370 MB
@pytest.mark.timeout(900)
def test_sessions_of_the_gradio_example_stay_in_their_process(cortex: Installation) -> None:
    cortex.cortex("deploy", EXAMPLES_DIR / "gradio-chat", timeout_s=600)
    assert len(cortex.pids("gradio-chat")) == 2
    (spec,) = Home(cortex.home).replicas_dir.glob("gradio-chat-*/spec.json")
    python = json.loads(spec.read_text())["python"]
    done = subprocess.run(
        [python, "-c", GRADIO_CLIENT, cortex.url("/gradio-chat/")], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["parts"] == ["three", "three two", "three two one"]
    assert answer["counts"] == [[1, 2, 3, 4, 5]] * 4
