"""A user's steps: deploy, call, inspect, update, delete; with the unchanged examples."""

from __future__ import annotations

from pathlib import Path

from harness.installations.example_cases import EXAMPLES
from harness.installations.installation import Installation, write_project
from harness.wait import wait_until

HANDLER = """
    import os
    from cortex_internal.lib.log import logger

    class Handler:
        def __init__(self, config):
            self.config = config

        def handle_post(self, payload, query_params, headers):
            logger.info("called")
            print("printed", flush=True)
            env = {name: os.environ.get(name) for name in ("A", "B", "CORTEX_TOKEN")}
            return {"payload": payload, "config": self.config, "query": dict(query_params), "env": env}

        def handle_get(self):
            return "got"
"""

CONFIG = """
    - name: echo
      kind: RealtimeAPI
      handler:
        type: python
        path: handler.py
        config: {greeting: hello}
        env: {A: from config}
"""


def test_examples_deployed_together_answer_their_samples(cortex: Installation) -> None:
    for example in EXAMPLES:
        cortex.cortex("deploy", example.folder, timeout_s=300)
    for example in EXAMPLES:
        reply = cortex.post(example.endpoint, body=example.sample_bytes, content_type=example.content_type)
        assert reply.status == 200, reply
        if isinstance(example.answer, str) and example.name != "iris-functions":
            assert reply.body.decode().startswith(example.answer)
        else:
            assert reply.json == example.answer


def test_deploy_call_inspect_update_and_delete(cortex: Installation, tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / ".env").write_text('B="from dotenv"\n')
    write_project(project, HANDLER, CONFIG)
    done = cortex.cortex("deploy", project)
    assert "creating echo (RealtimeAPI)" in done.stdout
    assert cortex.url("/echo") in done.stdout

    reply = cortex.post("/echo?q=1", {"x": [1, 2]})
    assert reply.json["payload"] == {"x": [1, 2]}
    assert reply.json["config"] == {"greeting": "hello"}
    assert reply.json["query"] == {"q": "1"}
    assert reply.json["env"] == {"A": "from config", "B": "from dotenv", "CORTEX_TOKEN": None}
    assert reply.headers["x-cortex-request-id"]
    assert cortex.post("/echo", method="GET").body == b"got"
    assert cortex.post("/echo/info", method="GET").json["methods"]
    assert cortex.post("/echo", method="DELETE").status == 405
    refused = cortex.post("/echo/info", {})
    assert (refused.status, refused.headers["allow"]) == (405, "GET")
    assert "POST is not supported at /info; it answers GET" in refused.json["error"]
    assert cortex.post("/echo", body=b"{").status == 400
    assert cortex.post("/nothing", {}).status == 404

    api = cortex.get("echo")
    assert api["status"]["status_code"] == "live"
    assert "echo" in cortex.cortex("get").stdout
    assert "printed" in wait_until(lambda: "printed" in (log := cortex.cortex("logs", "echo").stdout) and log)
    sample = tmp_path / "sample.json"
    sample.write_text('{"x": 5}')
    assert '"x": 5' in cortex.cortex("predict", "echo", sample).stdout.replace('"x":5', '"x": 5')

    assert "up to date" in cortex.cortex("deploy", project).stdout
    pids = cortex.pids("echo")
    (project / "cortex.yaml").write_text((project / "cortex.yaml").read_text() + "  networking: {endpoint: /moved}\n")
    cortex.cortex("deploy", project)
    assert cortex.post("/moved", {}).status == 200
    assert cortex.post("/echo", {}).status == 404
    assert cortex.pids("echo") == pids  # no running process depends on it

    cortex.cortex("delete", "echo", "-f")
    assert cortex.post("/moved", {}).status == 404
    assert cortex.cortex("get", "echo", check=False).returncode == 1
