"""`cortex.testing`: an API in the process of a test."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import textwrap
from pathlib import Path

import pytest

import cortex.testing
from cortex.errors import ConfigError, InputError, SubmissionError, UserError

ROOT = Path(__file__).parent.parent

#: The begin of a class whose constructor does nothing.
CLASS = "class Handler:\n    def __init__(self, config): pass\n"


def write(folder: Path, code: str, kind: str = "RealtimeAPI", handler: str = "", more: str = "") -> Path:
    file = folder / "cortex.yaml"
    section = "definition" if kind == "TaskAPI" else "handler"
    typed = "" if kind == "TaskAPI" or "type:" in handler else "type: python, "
    file.write_text(f"- name: api\n  kind: {kind}\n  {section}: {{{typed}path: handler.py{handler}}}\n{more}")
    (folder / "handler.py").write_text(textwrap.dedent(code))
    return file


def test_a_request_is_answered_as_by_a_replica(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        """
        class Handler:
            def __init__(self, config):
                self.factor = config["factor"]

            def handle_post(self, payload, query_params, headers):
                return [payload["x"] * self.factor, dict(query_params), headers["x-color"]]

            def handle_get(self):
                return "text"
        """,
        handler=", config: {factor: 2}",
    )
    with cortex.testing.load(file) as api:
        response = api.post({"x": 3}, params={"a": "b"}, headers={"X-Color": "red"})
        assert (response.status, response.json()) == (200, [6, {"a": "b"}, "red"])
        assert response.headers["content-type"] == "application/json"
        assert api.get().text == "text"
        assert api.delete().status == 405
        assert api.handler.factor == 2
        assert api.name == "api"


def test_an_exception_is_a_response_and_its_traceback_is_in_the_output(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = write(
        tmp_path,
        CLASS + "    def handle_post(self, payload):\n        return payload['x']\n",
    )
    with cortex.testing.load(file) as api:
        response = api.post({})
    assert response.status == 500
    assert response.json()["error"].endswith("KeyError in handle_post(); the output of the test shows the traceback")
    assert 'File "handler.py", line 4, in handle_post' in capfd.readouterr().err


def test_requests_have_a_path_a_body_or_both(tmp_path: Path) -> None:
    code = f"""
import cortex
{CLASS}
    def handle_post(self, payload):
        return payload

    @cortex.route("POST", "/items/{{name}}")
    def add(self, name, payload):
        return [name, payload]

    @cortex.route("DELETE", "/items/{{name}}")
    def remove(self, name):
        return name
"""
    with cortex.testing.load(write(tmp_path, code)) as api:
        assert api.post({"x": 1}).json() == api.post(json={"x": 1}).json() == {"x": 1}
        wanted = ["a", {"x": 1}]
        assert api.post("/items/a", json={"x": 1}).json() == wanted
        assert api.post("/items/a", {"x": 1}).json() == wanted
        assert api.post({"x": 1}, path="/items/a").json() == wanted
        assert api.post("items/a", data=b'{"x": 1}', headers={"content-type": "application/json"}).json() == wanted
        assert api.delete("/items/a").text == "a"
        assert api.post("text").text == "text"
        assert [each["path"] for each in api.get("/info").json()["routes"]] == ["/items/{name}", "/items/{name}"]
        with pytest.raises(InputError, match=r"post\('/items/a'\): write post\(path='/items/a'\) for a path"):
            api.post("/items/a")
        with pytest.raises(InputError, match=r"post\('/a', 1, 2\) has too many arguments; write post\(json\)"):
            api.post("/a", 1, 2)
        with pytest.raises(InputError, match="the path must be text such as /items, not {'x': 1}"):
            api.post({"x": 1}, json=2)


def test_a_payload_that_is_not_of_its_type_is_refused(tmp_path: Path) -> None:
    code = CLASS + "    def handle_post(self, payload: dict[str, int]):\n        return payload\n"
    with cortex.testing.load(write(tmp_path, code)) as api:
        assert api.post({"x": 1}).json() == {"x": 1}
        assert api.post({"x": "a"}).status == 422


def test_async_methods_streams_and_tasks_after_the_response_run_to_their_end(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        """
        import asyncio

        class Handler:
            def __init__(self, config):
                pass

            async def handle_post(self, payload):
                await asyncio.sleep(0)
                return payload

            def handle_get(self):
                yield "a"
                yield "b"
        """,
    )
    with cortex.testing.load(file) as api:
        assert api.post(1).json() == 1
        assert api.get().text == "ab"


def test_a_stream_that_breaks_off_raises_what_was_sent(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code = (
        CLASS
        + """
    def handle_post(self, payload):
        yield "one\\n"
        raise ValueError("two")

    async def handle_get(self):
        from starlette.responses import StreamingResponse
        return StreamingResponse(self.items(), media_type="text/event-stream")

    async def items(self):
        yield "data: one\\n\\n"
        raise ValueError("two")
"""
    )
    with cortex.testing.load(write(tmp_path, code)) as api:
        for call, sent in ((lambda: api.post({}), "one\n"), (api.get, "data: one\n\n")):
            with pytest.raises(cortex.testing.IncompleteResponseError, match="broke off after") as caught:
                call()
            assert (caught.value.response.status, caught.value.response.text) == (200, sent)
    assert capfd.readouterr().err.count("ValueError: two") == 2


def test_a_test_with_an_event_loop_can_send_requests(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        CLASS + "    async def handle_post(self, payload):\n        return payload\n",
    )

    async def run() -> int:
        with cortex.testing.load(file) as api:
            return int(api.post(7).json())

    assert asyncio.run(run()) == 7


def test_plain_code_may_start_an_event_loop_in_a_test_with_one(tmp_path: Path) -> None:
    code = """
import asyncio

class Handler:
    def __init__(self, config):
        self.loaded = asyncio.run(asyncio.sleep(0, "loaded"))

    def handle_post(self, payload):
        return [self.loaded, asyncio.run(asyncio.sleep(0, payload))]
"""

    async def run() -> tuple[object, bool]:
        with cortex.testing.load(write(tmp_path, code)) as api:
            return api.post(7).json(), asyncio.get_running_loop().is_running()

    assert asyncio.run(run()) == (["loaded", 7], True)


def test_the_process_is_as_before_after_a_test(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        "import os\nimport helper_of_test\n"
        + CLASS
        + "    def handle_get(self):\n        return [os.environ['COLOR'], os.getcwd()]\n",
        handler=", env: {COLOR: red}",
    )
    (tmp_path / "helper_of_test.py").write_text("")
    before = dict(os.environ), list(sys.path), Path.cwd()
    with cortex.testing.load(file) as api:
        assert api.get().json() == ["red", str(tmp_path)]
    assert (dict(os.environ), list(sys.path), Path.cwd()) == before
    assert "helper_of_test" not in sys.modules


def test_an_application_answers_paths_below_its_endpoint(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        """
        from contextlib import asynccontextmanager
        from fastapi import FastAPI

        @asynccontextmanager
        async def lifespan(app):
            app.state.factor = 3
            yield

        app = FastAPI(lifespan=lifespan)

        @app.get("/times/{number}")
        def times(number: int):
            return number * app.state.factor
        """,
        handler=", type: asgi, app: app",
    )
    with cortex.testing.load(file) as api:
        assert api.get("/times/7").json() == 21
        assert api.get("/nothing").status == 404


@pytest.mark.heavy  # scikit-learn takes seconds to import
def test_a_model_without_code_answers(tmp_path: Path) -> None:
    joblib, linear = pytest.importorskip("joblib"), pytest.importorskip("sklearn.linear_model")
    joblib.dump(linear.LinearRegression().fit([[0.0], [1.0]], [0.0, 2.0]), tmp_path / "model.joblib")
    file = tmp_path / "cortex.yaml"
    file.write_text("- name: line\n  kind: RealtimeAPI\n  handler: {type: model, models: {path: model.joblib}}\n")
    with cortex.testing.load(file) as api:
        assert api.post({"instances": [[3.0]]}).json()["predictions"] == pytest.approx([6.0])


def test_a_batch_job_runs_to_its_end(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        """
        class Handler:
            def __init__(self, config, job_spec):
                self.add = config["add"]
                self.sums = []
                self.job_id = job_spec["job_id"]

            def handle_batch(self, payload, batch_id):
                if "bad" in payload:
                    raise ValueError("a bad item")
                self.sums.append(sum(payload) + self.add)
                return self.sums[-1]

            def on_job_complete(self):
                print("sums of", self.job_id, self.sums)
        """,
        kind="BatchAPI",
        handler=", config: {add: 1}",
    )
    with cortex.testing.load(file) as api:
        outcome = api.run_batch([1, 2, 3], batch_size=2, config={"add": 10})
        assert (outcome.status, outcome.results, outcome.errors) == ("succeeded", [13, 13], [])
        outcome = api.run_batch([1, "bad"], batch_size=1)
        assert (outcome.status, outcome.results) == ("completed_with_failures", [2, None])
        assert outcome.errors == ["ValueError: a bad item"]
        with pytest.raises(InputError, match="use run_batch"):
            api.post({})


def test_items_that_are_no_list_and_calls_of_a_closed_api_are_refused(tmp_path: Path) -> None:
    file = write(tmp_path, f"{CLASS}    def handle_batch(self, payload): return payload\n", kind="BatchAPI")
    with cortex.testing.load(file) as api:
        with pytest.raises(InputError, match="items: pass a list of items, not a dict"):
            api.run_batch({"n": 1})  # type: ignore[arg-type]
        with pytest.raises(SubmissionError, match="batch_size"):
            api.run_batch([1], batch_size=0)
    with pytest.raises(InputError, match=r"api is closed; call it before `close`"):
        api.run_batch([1])
    api.close()


def test_a_task_and_a_workload_return_their_results(tmp_path: Path) -> None:
    task = tmp_path / "task"
    task.mkdir()
    write(task, "class Task:\n    def __call__(self, config):\n        return config['x']\n", kind="TaskAPI")
    with cortex.testing.load(task) as api:
        assert api.run_task({"x": 1}).result == 1
        failed = api.run_task()
        assert (failed.status, failed.errors) == ("worker_error", ["KeyError: 'x'"])
    counts = tmp_path / "async"
    counts.mkdir()
    code = CLASS + "    def handle_async(self, payload):\n        return {'words': len(payload.split())}\n"
    write(counts, code, kind="AsyncAPI")
    with cortex.testing.load(counts) as api:
        outcome = api.run_async(data="a b", content_type="text/plain")
        assert (outcome.status, outcome.result) == ("completed", {"words": 2})
        assert api.run_async({"x": 1}).error.startswith("AttributeError")


def test_mistakes_and_failures_of_the_constructor_are_raised(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="handler.py: class Handler is not defined"):
        cortex.testing.load(write(tmp_path, "class Other: pass"))
    write(tmp_path, "class Handler:\n    def __init__(self, config):\n        1 / 0\n    def handle_get(self): pass\n")
    with pytest.raises(UserError, match="ZeroDivisionError") as caught:
        cortex.testing.load(tmp_path)
    assert "line 3, in __init__" in caught.value.traceback


def test_one_of_several_apis_must_be_named(tmp_path: Path) -> None:
    code = CLASS + "    def handle_get(self):\n        return 1\n"
    file = write(tmp_path, code)
    file.write_text(file.read_text() + file.read_text().replace("name: api", "name: other"))
    with pytest.raises(InputError, match="name one of them: api, other"):
        cortex.testing.load(file)
    with pytest.raises(InputError, match="has no API third"):
        cortex.testing.load(file, "third")
    with cortex.testing.load(file, "other") as api:
        assert api.get().json() == 1


@pytest.mark.parametrize("example", ["iris-classifier", "text-stream", "iris-functions"])
def test_examples_answer_their_samples(example: str) -> None:
    folder = ROOT / "examples" / example
    with cortex.testing.load(folder) as api:
        assert api.post(json.loads((folder / "sample.json").read_text())).status == 200


def test_an_api_that_is_no_class_or_application_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "cortex.yaml"
    file.write_text("- name: own\n  kind: RealtimeAPI\n  handler: {type: command, command: [python3, server.py]}\n")
    with pytest.raises(InputError, match="own has type: command"):
        cortex.testing.load(file)


def test_packages_of_models_are_not_installed_for_a_test(tmp_path: Path) -> None:
    file = tmp_path / "cortex.yaml"
    file.write_text("- name: tree\n  kind: RealtimeAPI\n  handler: {type: model, models: {path: tree.json}}\n")
    (tmp_path / "tree.json").write_text('{"learner":{},"version":[9,8,7]}')
    with pytest.raises(UserError, match="write into requirements.txt: xgboost==9.8.7"), cortex.testing.load(file):
        pass
