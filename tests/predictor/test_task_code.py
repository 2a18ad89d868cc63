"""A task's class: constructed and called once, by one call, with the config of the job."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import cortex
from cortex.errors import UserError
from cortex.predictor.batch import BatchCode, load_batch_code
from cortex.predictor.tracebacks import format_user_traceback
from harness.models.user_project import Spec, UserProject

Run = Callable[..., Any]


@pytest.fixture
def run(project: UserProject) -> Iterator[Run]:
    """Load a task, run it for a job, and unload it after the test."""
    loaded: list[BatchCode] = []

    def run(text: str, config: dict[str, Any] | None = None, times: int = 1) -> Any:
        project.write("task.py", text)
        spec = Spec(str(project.root), "handler", path="task.py", kind="TaskAPI")
        loaded.append(load_batch_code(spec, metrics="the client"))
        bound = loaded[-1].construct(config or {}, {}, {})
        assert bound.on_job_complete is None
        return [bound.call(None, "id") for _ in range(times)][-1]

    yield run
    for code in loaded:
        code.close()


def test_a_task_is_called_with_the_config_and_what_it_returns_is_kept(run: Run) -> None:
    assert run("class Task:\n    def __call__(self, config):\n        return [config, 1]\n", {"a": 1}) == [{"a": 1}, 1]


def test_its_constructor_may_ask_for_the_client_of_metrics(run: Run) -> None:
    text = """
    class Task:
        def __init__(self, metrics_client):
            self.metrics = metrics_client
        async def __call__(self, config):
            return self.metrics
    """
    assert run(text) == "the client"


def test_another_attempt_begins_with_a_new_object_and_the_same_config(run: Run) -> None:
    text = """
    class Task:
        def __init__(self):
            self.calls = 0
        def __call__(self, config):
            self.calls += 1
            config["seen"].append(1)
            return [self.calls, config]
    """
    assert run(text, {"seen": []}, times=2) == [1, {"seen": [1]}]


@pytest.mark.parametrize("where", ["__init__(self)", "__call__(self, config)"])
def test_what_it_raises_is_raised_by_the_call_with_its_own_frames(run: Run, where: str) -> None:
    other = "def __call__(self, config): pass" if "init" in where else ""
    text = f"class Task:\n    def {where}:\n        raise ValueError('bad')\n    {other}\n"
    with pytest.raises(ValueError, match="bad") as raised:
        run(text)
    shown = format_user_traceback(raised.value)
    assert f'File "task.py", line 3, in {where.partition("(")[0]}' in shown
    assert str(Path(cortex.__file__).parent) not in shown, "no frame is ours"


@pytest.mark.parametrize("code", ["", "0", "None"])
def test_a_task_may_end_like_a_script(run: Run, code: str) -> None:
    assert run(f"import sys\nclass Task:\n    def __call__(self, config):\n        sys.exit({code})\n") is None


def test_an_exit_code_fails_a_task(run: Run) -> None:
    with pytest.raises(SystemExit):
        run("import sys\nclass Task:\n    def __call__(self, config):\n        sys.exit(3)\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("class Task:\n    pass\n", r"class Task: __call__\(\) is not defined"),
        ("class Job:\n    def __call__(self, config): pass\n", "class Task is not defined"),
        ("class Task:\n    def __call__(self, payload): pass\n", "payload"),
        ("class Task:\n    def __init__(self, config): pass\n    def __call__(self, config): pass\n", "__call__"),
    ],
)
def test_code_that_is_no_task_is_refused_before_any_job_runs_it(run: Run, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        run(text)
