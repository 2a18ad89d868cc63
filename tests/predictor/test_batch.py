"""The user's code as jobs run it: what is loaded once, what once per job, and what a call returns."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cortex.errors import ModelError, UserError
from cortex.models.spec import DEFAULT_MODEL, Catalogue
from cortex.payloads.signature import BodySignature
from cortex.predictor.batch import BatchCode, BoundBatch, load_batch_code
from cortex.predictor.interface import GENERATIONS
from cortex.predictor.tracebacks import format_user_traceback
from harness.models.catalogues import source_of, write_models
from harness.models.model_makers import onnx_model, python_model, tensorflow_model
from harness.models.user_project import Spec, UserProject

JOB = {"job_id": "0a1b", "workers": 2}
API = {"name": "iris", "kind": "BatchAPI"}
PREDICTOR = """
    imports = []
    imports.append(1)

    class PythonPredictor:
        def __init__(self, config, api_spec, job_spec):
            self.given = [config, api_spec, job_spec]

        def predict(self, payload, batch_id, query_params, headers):
            assert query_params is None and headers is None
            return [payload, batch_id, self.given, imports]

        def on_job_complete(self):
            return "completed"

        def post_predict(self, this_is, never_called):
            raise AssertionError
"""
HANDLER = """
    class Handler:
        def __init__(self, config, job_spec):
            self.given = [config, job_spec]

        def handle_batch(self, payload, batch_id):
            return [payload, batch_id, self.given]

        def handle_post(self, payload):
            raise AssertionError
"""

Load = Callable[..., BatchCode]


@pytest.fixture
def load(project: UserProject) -> Iterator[Load]:
    """Load code for jobs, and unload it after the test."""
    loaded: list[BatchCode] = []

    def load(interface: str, text: str, catalogue: Catalogue | None = None, **fields: Any) -> BatchCode:
        project.write("predictor.py", text)
        loaded.append(load_batch_code(Spec(str(project.root), interface, kind="BatchAPI", **fields), catalogue))
        return loaded[-1]

    yield load
    for code in loaded:
        code.close()


def bound(code: BatchCode, config: dict[str, Any] | None = None) -> BoundBatch:
    return code.construct(config or {}, JOB, API)


def written(body: str, init: str = "pass") -> str:
    """Write a class whose `predict` and hook are given."""
    return f"class PythonPredictor:\n    def __init__(self, config):\n        {init}\n\n{body}"


def test_a_predictor_gets_the_job_and_each_batch(load: Load) -> None:
    batch = bound(load("predictor", PREDICTOR), {"a": 1})
    assert batch.call([1, 2], "id-1") == [[1, 2], "id-1", [{"a": 1}, API, JOB], [1]]
    assert batch.on_job_complete is not None
    assert batch.on_job_complete() == "completed"


def test_the_current_event_loop_of_the_constructor_stays_that_of_plain_code(load: Load) -> None:
    text = """
    import asyncio

    class PythonPredictor:
        def __init__(self, config):
            self.loop = asyncio.get_event_loop_policy().new_event_loop()
            asyncio.set_event_loop(self.loop)

        async def predict(self, payload):
            return asyncio.get_running_loop() is not self.loop

        def on_job_complete(self):
            return asyncio.get_event_loop() is self.loop
    """
    batch = bound(load("predictor", text))
    assert batch.call([1], "id-1") is True
    assert batch.on_job_complete is not None
    assert batch.on_job_complete() is True


def test_a_handler_has_a_method_of_its_own_for_batches(load: Load) -> None:
    batch = bound(load("handler", HANDLER), {"a": 1})
    assert batch.call(["x"], "id-1") == [["x"], "id-1", [{"a": 1}, JOB]]
    (method,) = batch.signature.methods
    assert (method.verb, method.name, method.payload) == ("POST", "handle_batch", BodySignature())
    assert batch.on_job_complete is None


@pytest.mark.parametrize(
    ("method", "item"),
    [
        ("handle_batch(self, payload: list[Point])", {"$ref": "#/$defs/Point"}),
        ("handle_post(self, payload: Point)", {"$ref": "#/$defs/Point"}),
        ("handle_batch(self, payload: numpy.ndarray)", {}),
        ("handle_batch(self, payload: dict)", {"type": "object", "additionalProperties": True}),
        ("handle_batch(self, payload)", {}),
    ],
)
def test_the_items_of_a_batch_have_the_annotated_type(load: Load, method: str, item: dict[str, Any]) -> None:
    text = f"""
    import dataclasses, numpy

    @dataclasses.dataclass
    class Point:
        x: float

    class Handler:
        def __init__(self, config):
            pass

        def {method}:
            return len(payload)
    """
    batch = bound(load("handler", text))
    (signature,) = batch.signature.methods
    assert signature.payload is not None
    assert {key: value for key, value in signature.payload.schema.items() if key != "$defs"} == item
    if "Point" in method:
        assert batch.payload_type is not None
        assert batch.payload_type.from_json(None, b'[{"x": 1}, {"x": 2}]')[1].x == 2.0
    assert (batch.payload_type is None) == (method == "handle_batch(self, payload)")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("self", {}),
        ("self, payload", {"payload": [1]}),
        ("self, batch_id", {"batch_id": "id"}),
        ("self, *, batch_id, payload, more=3", {"batch_id": "id", "payload": [1], "more": 3}),
        ("self, headers, payload", {"headers": None, "payload": [1]}),
        ("self, query_params", {"query_params": None}),
    ],
)
def test_a_method_is_passed_what_it_names(load: Load, arguments: str, expected: dict[str, Any]) -> None:
    body = f"    def predict({arguments}):\n        return {{k: v for k, v in locals().items() if k != 'self'}}\n"
    assert bound(load("predictor", written(body))).call([1], "id") == expected


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("    def predict(self, payload):\n        pass\n", None),
        ("    def predict(self, payload):\n        yield from payload\n", [1, 2]),
        ("    async def predict(self, payload):\n        return sum(payload)\n", 3),
        ("    async def predict(self, payload):\n        for item in payload:\n            yield item\n", [1, 2]),
        ("    async def predict(self, payload):\n        return (item for item in payload)\n", [1, 2]),
        ("    predict = staticmethod(lambda payload: (x + 1 for x in payload))\n", [2, 3]),
    ],
)
def test_a_call_returns_once_all_is_done(load: Load, body: str, expected: Any) -> None:
    assert bound(load("predictor", written(body))).call([1, 2], "id") == expected


def test_coroutines_of_all_batches_share_a_loop(load: Load) -> None:
    body = """
    async def predict(self):
        loop = asyncio.get_running_loop()
        self.loops = {*getattr(self, "loops", ()), loop}
        return len(self.loops)

    async def on_job_complete(self):
        return asyncio.get_running_loop() in self.loops
"""
    batch = bound(load("predictor", "import asyncio\n" + written(body)))
    assert [batch.call([], "a"), batch.call([], "b")] == [1, 1]
    assert batch.on_job_complete is not None
    assert batch.on_job_complete() is True


def test_a_failing_batch_leaves_the_next_one_alone(load: Load) -> None:
    body = """
    async def predict(self, payload):
        return 1 / payload[0]
"""
    batch = bound(load("predictor", written(body)))
    with pytest.raises(ZeroDivisionError):
        batch.call([0], "a")
    assert batch.call([2], "b") == 0.5


def test_what_a_coroutine_raises_shows_the_users_frames_only(load: Load) -> None:
    body = """
    async def predict(self, payload):
        await asyncio.wait_for(self.divide(payload[0]), 5)

    async def divide(self, number):
        return 1 / number
"""
    batch = bound(load("predictor", "import asyncio\n" + written(body)))
    with pytest.raises(ZeroDivisionError) as raised:
        batch.call([0], "a")
    without_this_test = raised.value.with_traceback(raised.tb.tb_next)
    files = re.findall(r'File "([^"]*)"', format_user_traceback(without_this_test))
    assert (files[0], files[-1]) == ("predictor.py", "predictor.py")
    assert any(name.endswith("asyncio/tasks.py") for name in files)  # what the user's code called stays


def test_each_job_has_an_object_and_a_config_of_its_own(load: Load) -> None:
    text = written(
        "    def predict(self):\n        return self.config\n", "config['seen'] = True; self.config = config"
    )
    code = load("predictor", text)
    config = {"a": [1]}
    first, second = bound(code, config), bound(code, {"a": [2]})
    assert config == {"a": [1]}
    assert first.call([], "") == {"a": [1], "seen": True}
    assert second.call([], "") == {"a": [2], "seen": True}


def test_the_file_is_imported_once_for_all_jobs(load: Load) -> None:
    code = load("predictor", PREDICTOR)
    bound(code)
    assert bound(code).call([], "")[3] == [1]


def test_a_constructor_that_fails_shows_the_users_frames_and_spoils_no_other_job(load: Load) -> None:
    code = load("predictor", written("    def predict(self):\n        return 1\n", "self.depth = config['depth']"))
    with pytest.raises(UserError, match="KeyError: 'depth'") as raised:
        bound(code)
    assert "predictor.py" in raised.value.traceback
    assert "predictor/batch.py" not in raised.value.traceback
    assert bound(code, {"depth": 1}).call([], "") == 1


@pytest.mark.parametrize(
    ("interface", "text", "message"),
    [
        ("handler", HANDLER.replace("handle_batch", "other").replace("handle_post", "handle_get"),
         r"handle_batch\(\) is not defined; handle_get\(\) belongs to `kind: RealtimeAPI`"),
        ("handler", PREDICTOR, "class PythonPredictor belongs to `kind: BatchAPI` with `predictor:`"),
        ("predictor", HANDLER, "class Handler belongs to `kind: BatchAPI` with `handler:`"),
        ("handler", HANDLER.replace("payload, batch_id", "payload, headers"), '"headers" is not available; a batch'),
        ("handler", HANDLER.replace("config, job_spec", "config, model_client"), '"model_client" is not available'),
        ("predictor", PREDICTOR.replace("complete(self)", "complete(self, job)"), '"job" is not a supported argument'),
    ],
)  # fmt: skip
def test_rejects_classes_that_can_not_process_batches(load: Load, interface: str, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load(interface, text)


def test_a_handler_of_requests_serves_jobs_with_handle_post(load: Load) -> None:
    text = HANDLER.replace("handle_batch", "other").replace("raise AssertionError", "return len(payload)")
    assert bound(load("handler", text)).call([1, 2], "id") == 2


def test_a_class_for_jobs_is_refused_where_requests_come(project: UserProject) -> None:
    text = HANDLER.replace("handle_post", "post").replace(", job_spec", "").replace("config, job_spec", "config")
    with pytest.raises(UserError, match=r"handle_batch\(\) belongs to `kind: BatchAPI`"):
        project.load("handler", text)


def test_a_class_may_serve_both_kinds(project: UserProject, load: Load) -> None:
    text = HANDLER.replace(", job_spec", "").replace("raise AssertionError", "return 'answer'")
    assert bound(load("handler", text)).call([1], "id") == [[1], "id", [{}]]
    assert project.load("handler", text).methods["POST"].call(1, None, None) == "answer"


def test_rows_of_jobs_call_no_hook_of_requests() -> None:
    for (kind, *_), row in GENERATIONS.items():
        assert ("on_job_complete" in row.hooks) == (kind == "BatchAPI")
        assert not (kind == "BatchAPI" and (row.after_hook or row.returns_callback))


# Models.

ONNX = """
    class ONNXPredictor:
        def __init__(self, onnx_client, config, job_spec):
            self.client, self.config = onnx_client, config

        def predict(self, payload, batch_id):
            return self.client.predict(payload, "a")[0].tolist()
"""


def test_models_are_loaded_once_for_all_jobs(load: Load, tmp_path: Path) -> None:
    catalogue = write_models(tmp_path / "content", {"a": {"1": onnx_model(1)}})
    code = load("predictor", ONNX, catalogue, type="onnx", models=source_of("onnx", "a"))
    for file in (tmp_path / "content").rglob("*.onnx"):
        file.unlink()  # what is not in memory already can't be had any more
    first = bound(code).call([1.0, 2.0], "id")
    assert bound(code).call([1.0, 2.0], "id") == first != []


@pytest.mark.heavy  # TensorFlow takes seconds to import
def test_a_handler_gets_its_tensorflow_client(load: Load, tmp_path: Path) -> None:
    pytest.importorskip("tensorflow")
    catalogue = write_models(tmp_path / "content", {DEFAULT_MODEL: {"1": tensorflow_model(1)}})
    text = """
        class Handler:
            def __init__(self, tensorflow_client, config, job_spec):
                self.client = tensorflow_client

            def handle_batch(self, payload, batch_id):
                return self.client.predict({"x": payload})["y"]
    """
    code = load("handler", text, catalogue, type="tensorflow", models=source_of("tensorflow"))
    assert bound(code).call([1, 2], "id") == [2, 3]


def test_a_model_that_cannot_be_loaded_is_said_before_any_job(load: Load, tmp_path: Path) -> None:
    catalogue = write_models(tmp_path / "content", {"a": {"1": {"model.onnx": b"none"}}})
    with pytest.raises(ModelError, match='"a"|model a'):
        load("predictor", ONNX, catalogue, type="onnx", models=source_of("onnx", "a"))


def test_models_that_the_users_code_makes_are_made_with_the_config_of_the_job(load: Load, tmp_path: Path) -> None:
    catalogue = write_models(tmp_path / "content", {DEFAULT_MODEL: {"1": python_model(7)}})
    text = """
        import json
        from pathlib import Path

        class PythonPredictor:
            def __init__(self, config, python_client):
                self.client, self.factor = python_client, config["factor"]

            def load_model(self, model_path):
                return json.loads((Path(model_path) / "first.json").read_text())["number"] * self.factor

            def predict(self):
                return self.client.get_model()
    """
    for factor in (1, 10):
        code = load("predictor", text, catalogue, models=source_of("python"))
        assert bound(code, {"factor": factor}).call([], "") == 7 * factor
