"""The classes of kinds without requests: found, checked and made by the row of their kind."""

from __future__ import annotations

from typing import Any

import pytest

from cortex.errors import UserError
from cortex.predictor.checks.source_checks import check_source
from cortex.predictor.interface import ASYNC, TASK
from cortex.predictor.loader import UserCode, import_code
from harness.models.user_project import Spec, UserProject

TASK_CLASS = """
    class Task:
        def __call__(self, config):
            return config
"""
HANDLER = """
    class Handler:
        def __init__(self, config, metrics_client):
            self.config = config

        def handle_async(self, payload, request_id):
            return {"id": request_id}
"""


def code_of(project: UserProject, text: str, kind: str, interface: str = "handler", **fields: Any) -> UserCode:
    project.write("predictor.py", text)
    return import_code(Spec(str(project.root), interface, kind=kind, **fields))


def mistakes(project: UserProject, text: str, kind: str, interface: str = "handler") -> list[str]:
    """Say what reading the file tells; importing it must fail just when there is something."""
    file = project.write("predictor.py", text)
    found = check_source(file.read_text(), "predictor.py", interface, kind=kind)
    if found:
        with pytest.raises(UserError):
            import_code(Spec(str(project.root), interface, kind=kind))
    else:
        import_code(Spec(str(project.root), interface, kind=kind))
    return [f"{problem.message} ({problem.fix})" for problem in found]


def test_a_task_needs_no_constructor(project: UserProject) -> None:
    code = code_of(project, TASK_CLASS, "TaskAPI")
    assert code.serving_methods == {"__call__": TASK}
    task: Any = code.construct({"metrics_client": object()}, None)
    assert task(config={"a": 1}) == {"a": 1}
    assert mistakes(project, TASK_CLASS, "TaskAPI") == []


def test_a_task_is_given_its_metrics_client(project: UserProject) -> None:
    text = TASK_CLASS + "\n        def __init__(self, metrics_client):\n            self.client = metrics_client\n"
    client = object()
    task: Any = code_of(project, text, "TaskAPI").construct({"metrics_client": client}, None)
    assert task.client is client


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (TASK_CLASS.replace("__call__", "run"), ["class Task: __call__(self, config) is not defined (add it)"]),
        (TASK_CLASS.replace("(self, config)", "(self)"),
         ['class Task: invalid signature for method "__call__(self)": "config" is a required argument, but was not '
          'provided (add "config")']),
        (TASK_CLASS.replace("class Task", "class Handler"),
         ["class Task is not defined (class Handler belongs to `kind: RealtimeAPI` with `handler:`)"]),
        (TASK_CLASS.replace("__call__(self, config)", "__init__(self, config)"),
         ["class Task: __call__(self, config) is not defined (add it)",
          'class Task: invalid signature for method "__init__(self, config)": "config" is not available (it is passed '
          "to __call__)"]),
    ],
)  # fmt: skip
def test_mistakes_in_a_task(project: UserProject, text: str, expected: list[str]) -> None:
    assert sorted(mistakes(project, text, "TaskAPI")) == sorted(expected)


def test_a_handler_of_workloads(project: UserProject) -> None:
    assert code_of(project, HANDLER, "AsyncAPI").serving_methods == {"handle_async": ASYNC}
    assert mistakes(project, HANDLER, "AsyncAPI") == []
    assert mistakes(project, HANDLER, "RealtimeAPI") == [
        "class Handler: handle_post(self, payload) or handle_get(self, payload) is not defined "
        "(handle_async belongs to `kind: AsyncAPI`)"
    ]


def test_one_class_serves_by_its_kind(project: UserProject) -> None:
    text = """
        class Handler:
            def __init__(self, config):
                pass

            def handle_post(self, payload, request_id=None):
                return {"ok": payload}
    """
    for kind in ("RealtimeAPI", "AsyncAPI", "BatchAPI"):
        assert list(code_of(project, text, kind).serving_methods) == ["handle_post"]
        assert mistakes(project, text, kind) == []


def test_a_predictor_of_workloads(project: UserProject) -> None:
    text = """
        class PythonPredictor:
            def __init__(self, config, metrics_client):
                pass

            def predict(self, payload, query_params, request_id):
                return {}
    """
    assert code_of(project, text, "AsyncAPI", "predictor").serving_methods == {"predict": ASYNC}
    assert mistakes(project, text, "AsyncAPI", "predictor") == []
    (said,) = mistakes(project, text, "RealtimeAPI", "predictor")
    assert '"request_id" is not available (it belongs to `kind: AsyncAPI`' in said


def test_a_workload_has_no_headers(project: UserProject) -> None:
    (said,) = mistakes(project, HANDLER.replace("request_id)", "headers)"), "AsyncAPI")
    assert '"headers" is not available (a workload stores only the body of its request' in said
