"""Replicas of a class whose models change in tests: the text of a model determines how it loads."""

from __future__ import annotations

from contextlib import AbstractContextManager

from cortex.models.spec import DEFAULT_MODEL, ModelPath, ModelSource
from harness.models.scripted_agents import ScriptedAgent
from harness.replicas.replicas import Replica, running_replica

SOURCE = """
    import ctypes, os, time

    class Handler:
        def __init__(self, config, model_client):
            self.client = model_client

        def load_model(self, model_path):
            text = open(os.path.join(model_path, "model.txt")).read()
            if text == "raise":
                raise ValueError("bad weights")
            if text == "surrogate":
                raise ValueError(chr(0xD800))
            if text == "crash":
                ctypes.string_at(0)
            if text == "hang":
                time.sleep(1000)
            while text.startswith("/") and not os.path.exists(text):
                time.sleep(0.01)
            return text

        def handle_post(self, payload):
            before = self.client.get_model(model_version=payload.get("version", "latest"))
            if "wait_for" in payload:
                open(payload["wait_for"] + ".inside", "w").close()
                while not os.path.exists(payload["wait_for"]):
                    time.sleep(0.01)
            after = self.client.get_model(model_version=payload.get("version", "latest"))
            return {"model": before, "same": before == after, "pid": os.getpid()}
"""
PATH_SOURCE = ModelSource("python", (ModelPath(DEFAULT_MODEL, "/nowhere"),))


def replica(
    agent: ScriptedAgent, source: ModelSource = PATH_SOURCE, **fields: object
) -> AbstractContextManager[Replica]:
    return running_replica(SOURCE, models=source, model_agent_socket=agent.socket, **fields)


def model_of(replica: Replica, **payload: object) -> str:
    answer = replica.request(payload)
    assert answer.status == 200, answer.body
    assert answer.json["same"]
    return str(answer.json["model"])


def problems(replica: Replica) -> dict[str | None, str]:
    models = replica.status().models
    return {problem.version: problem.message for problem in models.problems} if models else {}
