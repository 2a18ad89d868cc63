import asyncio
import itertools
import pathlib
import sys

import dill
import pytest

from cortex.payloads.signature import BodySignature, parse_signature
from cortex.predictor.binding import result_kind, split_callback
from cortex.predictor.interface import GENERATIONS
from cortex.predictor.tracebacks import format_user_traceback

FUNCTIONS = """
    import numpy as np

    labels = ["setosa", "versicolor", "virginica"]
    weights = None

    def init(model_path, metadata):
        global weights
        weights = np.array(metadata["weights"])

    def predict(sample, metadata):
        return labels[int(np.argmax(weights * sample["x"]))]
"""
PREDICTOR = """
    import numpy as np

    labels = ["setosa", "versicolor", "virginica"]

    class PythonPredictor:
        def __init__(self, config, api_spec, job_spec):
            self.weights = np.array(config["weights"])
            assert api_spec == {"name": "iris"} and job_spec is None

        def predict(self, payload, batch_id):
            assert batch_id is None
            return labels[int(np.argmax(self.weights * payload["x"]))]

        def on_job_complete(self):
            pass
"""
HANDLER = """
    import numpy as np

    labels = ["setosa", "versicolor", "virginica"]

    class Handler:
        def __init__(self, config):
            self.weights = np.array(config["weights"])

        def handle_post(self, payload):
            return labels[int(np.argmax(self.weights * payload["x"]))]

        def handle_get(self):
            return {"labels": labels}
"""
CONFIG = {"weights": [0.1, 0.7, 0.2]}


@pytest.mark.parametrize(
    ("interface", "text"), [("functions", FUNCTIONS), ("predictor", PREDICTOR), ("handler", HANDLER)]
)
def test_every_generation_loads_and_answers(project, interface, text):
    bound = project.load(interface, text, config=CONFIG, api_spec={"name": "iris"})
    method = bound.methods["POST"]
    assert method.kind == "sync"
    assert method.needs_payload
    assert not method.needs_query_params
    assert not method.needs_headers
    assert method.call({"x": 2.0}, None, None) == "versicolor"
    assert bound.describe()["methods"]["POST"]["arguments"][0] in ("payload", "sample")


def test_the_signature_lists_the_methods_with_their_docstrings(project):
    bound = project.load(
        "handler",
        """
        class Handler:
            def __init__(self, config):
                pass

            def handle_post(self, payload, headers):
                '''Classify a flower.

                Expects four lengths.
                '''

            def handle_get(self, query_params):
                pass
        """,
    )
    post, get = bound.signature.methods
    assert (post.verb, post.name, post.summary, post.description) == (
        "POST", "handle_post", "Classify a flower.", "Expects four lengths.",
    )  # fmt: skip
    assert post.payload == post.result == BodySignature()
    assert (post.headers, post.query_params) == (True, False)
    assert (get.verb, get.payload, get.summary, get.headers, get.query_params) == ("GET", None, "", False, True)
    assert parse_signature(bound.signature.to_json()) == bound.signature


def test_the_signature_has_the_media_types_of_forms_and_defaults_of_empty_bodies(project):
    bound = project.load(
        "handler",
        """
        import pandas as pd
        from starlette.datastructures import FormData

        class Handler:
            def __init__(self, config):
                pass

            def handle_post(self, payload: FormData): ...

            def handle_put(self, payload: list[float] = [1.0]): ...

            def handle_patch(self, payload: pd.DataFrame): ...
        """,
    )
    post, put, patch = (each.payload for each in bound.signature.methods)
    assert [each.media_type for each in (post, *post.alternatives)] == [
        "multipart/form-data", "application/x-www-form-urlencoded"
    ]  # fmt: skip
    assert [each.is_required for each in (post, put, patch)] == [True, False, True]
    assert parse_signature(bound.signature.to_json()) == bound.signature


def test_only_handlers_answer_other_verbs(project):
    bound = project.load("handler", HANDLER, config=CONFIG)
    assert set(bound.methods) == {"POST", "GET"}
    assert bound.methods["GET"].call(None, None, None) == {"labels": ["setosa", "versicolor", "virginica"]}
    assert not bound.methods["GET"].needs_payload


def test_init_gets_the_model_path_and_shares_the_metadata(project):
    text = """
        def init(model_path, metadata):
            metadata["seen"] = model_path

        def predict(sample, metadata):
            return [sample, metadata]
    """
    config = {"a": {"b": 1}}
    bound = project.load("functions", text, config=config, model_path="/mnt/model/m.onnx")
    assert bound.methods["POST"].call(5, None, None) == [5, {"a": {"b": 1}, "seen": "/mnt/model/m.onnx"}]
    assert config == {"a": {"b": 1}}


def test_init_is_optional(project):
    bound = project.load("functions", "def predict(sample, metadata): return sample")
    assert bound.methods["POST"].call([1], None, None) == [1]


def test_the_config_is_a_copy(project):
    config = {"a": [1]}
    project.load(
        "predictor",
        """
        class PythonPredictor:
            def __init__(self, config):
                config["a"].append(2)
            def predict(self):
                return 1
        """,
        config=config,
    )
    assert config == {"a": [1]}


REQUEST = {"payload": "P", "query_params": "Q", "headers": "H"}


@pytest.mark.parametrize(
    "names", [names for count in range(4) for names in itertools.permutations(REQUEST, count)], ids="-".join
)
def test_a_method_gets_the_arguments_that_it_declares_in_any_order(project, names):
    text = f"""
        class Handler:
            def __init__(self, config): pass
            def handle_put(self, {", ".join(names)}):
                return dict({", ".join(f"{name}={name}" for name in names)})
    """
    method = project.load("handler", text).methods["PUT"]
    assert method.call("P", "Q", "H") == {name: REQUEST[name] for name in names}
    assert method.arguments == names
    assert (method.needs_payload, method.needs_query_params, method.needs_headers) == tuple(n in names for n in REQUEST)


def test_arguments_of_the_users_own_keep_their_defaults(project):
    text = """
        class Handler:
            def __init__(self, config, size=3, *, model_client=None, **rest):
                self.size = (size, model_client, rest)
            def handle_post(self, payload, threshold=0.5, *, headers, **rest):
                return [payload, threshold, headers, self.size]
    """
    method = project.load("handler", text).methods["POST"]
    assert method.call(1, None, {"a": "b"}) == [1, 0.5, {"a": "b"}, (3, None, {})]


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ("def handle_post(self, payload): return 1", "sync"),
        ("async def handle_post(self, payload): return 1", "async"),
        ("def handle_post(self, payload): yield 1", "generator"),
        ("async def handle_post(self, payload): yield 1", "async_generator"),
        ("@staticmethod\n            async def handle_post(payload): return 1", "async"),
        ("@classmethod\n            def handle_post(cls, payload): yield 1", "generator"),
        ("handle_post = Model()", "async"),
        ("handle_post = functools.partial(run, top_k=3)", "async"),
    ],
)
def test_the_kind_is_the_functions_nature(project, body, kind):
    text = f"""
        import functools
        class Model:
            async def __call__(self, payload): return 1
        async def run(payload, top_k): return 1
        class Handler:
            def __init__(self, config): pass
            {body}
    """
    assert project.load("handler", text).methods["POST"].kind == kind


def test_a_decorated_method_keeps_its_arguments(project):
    text = """
        import functools
        def timed(function):
            @functools.wraps(function)
            def inner(*args, **kwargs):
                return ["timed", function(*args, **kwargs)]
            return inner
        class Handler:
            @timed
            def __init__(self, config): pass
            __init__ = __init__.__wrapped__
            @timed
            def handle_post(self, payload): return payload
    """
    assert project.load("handler", text).methods["POST"].call(3, None, None) == ["timed", 3]


def test_post_predict_gets_the_request_and_the_response(project):
    text = """
        class PythonPredictor:
            def __init__(self, config): self.seen = []
            def predict(self, query_params): return self.seen
            def post_predict(self, response, headers, payload): response.append((payload, headers))
    """
    method = project.load("predictor", text).methods["POST"]
    assert (method.needs_payload, method.needs_query_params, method.needs_headers) == (True, True, True)
    seen = method.call("P", "Q", "H")
    method.after(seen, "P", "Q", "H")
    assert seen == [("P", "H")]


def test_only_handlers_return_callbacks():
    callback = print
    assert split_callback((1, callback), GENERATIONS["RealtimeAPI", "handler", "python", False]) == (1, callback)
    assert split_callback((1, callback), GENERATIONS["RealtimeAPI", "predictor", "python", False]) == (
        (1, callback),
        None,
    )
    assert split_callback((1, 2), GENERATIONS["RealtimeAPI", "handler", "python", False]) == ((1, 2), None)
    assert split_callback([1, callback], GENERATIONS["RealtimeAPI", "handler", "python", False]) == (
        [1, callback],
        None,
    )


def test_results_that_have_yet_to_run_are_recognized():
    async def coroutine():
        return 1

    async def stream():
        yield 1

    pending = coroutine()
    assert result_kind(pending) == "async"
    assert result_kind(stream()) == "async_generator"
    assert result_kind(iter([1])) == "sync"
    assert result_kind(x for x in "ab") == "generator"
    assert asyncio.run(pending) == 1


# Importing.


def test_the_project_is_found_by_imports_and_relative_imports(project):
    project.write("src/__init__.py", "")
    project.write("src/labels.py", "LABELS = ['a']")
    project.write("shared.py", "TOP = 1")
    text = """
        import dataclasses
        from shared import TOP
        from .labels import LABELS
        @dataclasses.dataclass
        class Answer:
            label: "str"
        class Handler:
            def __init__(self, config): pass
            def handle_post(self): return (Answer(LABELS[0]), TOP)
    """
    answer, _ = project.load("handler", text, path="src/handler.py").methods["POST"].call(None, None, None)
    assert answer.label == "a"
    assert type(answer).__module__ == "src.handler"
    assert sys.modules["src.handler"].Answer is type(answer)


def test_python_path_is_searched_after_the_project(project):
    project.write("lib/helper.py", "WHERE = 'lib'")
    project.write("lib/both.py", "WHERE = 'lib'")
    project.write("both.py", "WHERE = 'project'")
    text = """
        import both, helper
        def predict(sample, metadata): return [both.WHERE, helper.WHERE]
    """
    bound = project.load("functions", text, path="lib/handler.py", python_path="lib")
    assert bound.methods["POST"].call(None, None, None) == ["project", "lib"]


@pytest.mark.parametrize("path", ["json.py", "my-api/predictor.py", "numpy.py"])
def test_a_file_whose_name_is_taken_or_impossible_still_loads(project, path):
    import numpy  # noqa: F401 - so that the name is taken

    bound = project.load("functions", "def predict(sample, metadata): return __name__", path=path)
    assert bound.methods["POST"].call(None, None, None).startswith("cortex_user_")


def test_pickles_of_a_class_and_of_functions_load(project):
    namespace = {}
    exec(
        "class Handler:\n def __init__(self, config): self.c = config\n def handle_post(self): return self.c", namespace
    )
    (project.root / "handler.pickle").write_bytes(dill.dumps(namespace["Handler"], recurse=True))
    functions = {"predict": lambda sample, metadata: [sample, metadata]}
    (project.root / "functions.pickle").write_bytes(dill.dumps(functions))
    assert project.load("handler", path="handler.pickle", config={"a": 1}).methods["POST"].call(0, 0, 0) == {"a": 1}
    assert project.load("functions", path="functions.pickle").methods["POST"].call(2, 0, 0) == [2, {}]


# Mistakes.


def test_a_traceback_of_a_call_survives_a_broken_str_and_cyclic_causes(project):
    text = """
        class Odd(Exception):
            def __str__(self): raise RuntimeError
        def predict(sample, metadata):
            first, second = Odd(), ValueError("b")
            first.__cause__, second.__cause__ = second, first
            raise first
    """
    method = project.load("functions", text).methods["POST"]
    with pytest.raises(Exception) as caught:  # noqa: B017
        method.call(1, None, None)
    shown = format_user_traceback(caught.value)
    assert 'File "predictor.py", line 7, in predict' in shown
    assert "ValueError: b" in shown
    assert "predictor/loader.py" not in shown


def test_a_traceback_is_formatted_in_a_folder_that_was_removed(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "removed"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    with pytest.raises(ZeroDivisionError) as caught:
        _ = 1 / 0
    assert f'File "{__file__}"' in format_user_traceback(caught.value)
    monkeypatch.undo()


def test_paths_in_a_traceback_are_relative_although_user_code_changed_the_working_directory(
    project, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = """
    import os

    def predict(sample, metadata):
        os.chdir(sample)
        raise ValueError("bad")
    """
    method = project.load("functions", text).methods["POST"]
    with pytest.raises(ValueError, match="bad") as caught:
        method.call("/", None, None)
    assert 'File "predictor.py", line 6, in predict' in format_user_traceback(caught.value)
