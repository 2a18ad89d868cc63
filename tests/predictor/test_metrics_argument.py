"""Constructors of every generation and kind may ask for the client of metrics."""

from __future__ import annotations

import pytest

from cortex.predictor.batch import load_batch_code
from cortex.predictor.loader import load
from harness.models.user_project import Spec, UserProject

CLASS = """
    class {name}:
        def __init__(self, config, metrics_client):
            self.client = metrics_client

        def {method}(self, payload):
            return self.client
"""
TASK = """
    class Task:
        def __init__(self, metrics_client):
            self.client = metrics_client

        def __call__(self, config):
            return self.client
"""


@pytest.mark.parametrize(
    ("interface", "name", "method"),
    [("predictor", "PythonPredictor", "predict"), ("handler", "Handler", "handle_post")],
)
def test_classes_of_realtime_apis_are_given_it(project: UserProject, interface: str, name: str, method: str) -> None:
    project.write("predictor.py", CLASS.format(name=name, method=method))
    client = object()
    assert load(Spec(str(project.root), interface), metrics=client).methods["POST"].call(None, None, None) is client


@pytest.mark.parametrize(
    ("kind", "interface", "text"),
    [
        ("BatchAPI", "predictor", CLASS.format(name="PythonPredictor", method="predict")),
        ("BatchAPI", "handler", CLASS.format(name="Handler", method="handle_batch")),
        ("AsyncAPI", "predictor", CLASS.format(name="PythonPredictor", method="predict")),
        ("AsyncAPI", "handler", CLASS.format(name="Handler", method="handle_async")),
        ("TaskAPI", "handler", TASK),
    ],
)
def test_classes_that_run_in_workers_are_given_it(project: UserProject, kind: str, interface: str, text: str) -> None:
    project.write("predictor.py", text)
    client = object()
    code = load_batch_code(Spec(str(project.root), interface, kind=kind), metrics=client)
    assert code.construct({}, {}, {}).call(None, "id") is client
    code.close()
