# ruff: noqa: E501 - one mistake per line reads best

import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.predictor.checks.source_checks import check_source, find_undecodable_byte
from cortex.predictor.interface import GENERATIONS
from cortex.predictor.interface_rules import find_problems, from_function


def found(interface, text):
    return [
        (f"{d.line}:{d.column}", d.message, d.fix)
        for d in check_source(textwrap.dedent(text), "src/predictor.py", interface)
    ]


RIGHT = [
    ("functions", "def init(model_path, metadata): ...\ndef predict(sample, metadata): ..."),
    ("functions", "def predict(sample, metadata, top_k=3): ..."),
    ("functions", "async def predict(sample, metadata): yield sample"),
    ("functions", "from model import predict"),
    ("functions", "from model import *"),
    ("functions", "import model\npredict = model.predict"),
    ("functions", "try:\n    import a\nexcept ImportError:\n    def predict(x): ...\nelse:\n    def predict(y): ..."),
    ("functions", "@decorated\ndef predict(*args): ..."),
    ("functions", "globals()['predict'] = lambda sample, metadata: 1"),
    ("functions", "def __getattr__(name): ..."),
    ("predictor", "class PythonPredictor:\n def __init__(self, config): ...\n def predict(self, payload): ..."),
    ("predictor", "class PythonPredictor:\n def __init__(self, config, job_spec=None): ...\n def predict(self): ..."),
    ("predictor", "class PythonPredictor:\n def __init__(self, *, config, **rest): ...\n async def predict(self): ..."),
    ("predictor", "from model import Base\nclass PythonPredictor(Base): ..."),
    ("predictor", "from model import Base\nclass PythonPredictor(Base):\n def post_predcit(self, x): ..."),
    ("predictor", "class B:\n def __init__(self, config): ...\nclass PythonPredictor(B):\n def predict(self): ..."),
    ("predictor", "from model import Net as PythonPredictor"),
    ("predictor", "PythonPredictor = make()"),
    ("predictor", "class Base: ...\nPythonPredictor: type = Base"),
    ("predictor", "@dataclass\nclass PythonPredictor: ..."),
    ("predictor", "class PythonPredictor(metaclass=Meta): ..."),
    ("predictor", "if GPU:\n class PythonPredictor: ...\nelse:\n class PythonPredictor: ..."),
    ("predictor", "class PythonPredictor:\n def __init__(self, config): ...\n predict = run"),
    ("predictor", "class PythonPredictor:\n def __init__(self, config): ...\n @timed\n def predict(x, y, *z): ..."),
    ("handler", "class Handler:\n def __init__(self, config): ...\n @staticmethod\n def handle_get(headers): ..."),
    (
        "handler",
        "class Handler:\n def __init__(self, config): ...\n @classmethod\n def handle_get(klass, payload): ...",
    ),
    (
        "handler",
        "class Handler:\n def __init__(self, config): ...\n def handle_put(self): self.handle_path()\n"
        " def handle_path(self, path): ...",
    ),
]


@pytest.mark.parametrize(("interface", "text"), RIGHT)
def test_reports_nothing_for_correct_or_ambiguous_sources(interface, text):
    assert found(interface, text) == []


HEAD = "class PythonPredictor:\n    def __init__(self, config): ...\n    "
HANDLER = "class Handler:\n    def __init__(self, config): ...\n    "

WRONG = [
    # Syntax.
    ("predictor", "x = (1,\n", "1:5", "SyntaxError: '(' was never closed", ""),
    ("predictor", "class PythonPredictor: // later\n", "1:24", "SyntaxError: invalid syntax", ""),
    ("functions", "def f():\n    pass\nreturn 3\n", "3:1", "'return' outside function", ""),
    ("functions", "x = 1\ny = '\0'\n", "2:1", "NUL byte", ""),
    # The class.
    ("predictor", "", "0:0", "class PythonPredictor is not defined", "top level"),
    ("predictor", "# é\nclass PythonPredictr: ...", "2:7", "class PythonPredictor is not", 'to "PythonPredictor"'),
    ("predictor", "class Iris:\n def predict(self): ...", "1:7", "PythonPredictor is not defined", 'rename "Iris"'),
    ("predictor", "class Handler: ...", "1:7", "PythonPredictor is not defined", "RealtimeAPI` with `handler:`"),
    ("handler", "from fastapi import FastAPI\nweb = FastAPI()", "2:1", "Handler is not defined", '"app: web"'),
    ("handler", "import fastapi\napi: fastapi.FastAPI = fastapi.FastAPI()", "2:1", "Handler is not", '"app: api"'),
    ("handler", "import fastapi\ndef make(): return fastapi.FastAPI()", "2:5", "Handler is not defined",
     'write "type: asgi" and "app: make" in cortex.yaml to serve make of this file'),
    ("handler", "from flask import Flask\ndef make(config, *, name='a'):\n app: Flask = Flask(name)\n if 1:\n  return app", "2:5",
     "Handler is not defined", 'write "type: wsgi" and "app: make"'),
    ("handler", "from flask import Flask\ndef make(name): return Flask(name)", "0:0", "Handler is not", "top level"),
    ("handler", "import flask\napp = flask.Flask('a')", "2:1", "Handler is not defined", 'write "type: wsgi"'),
    ("handler", "class PythonPredictor: ...", "1:7", "Handler is not defined", "RealtimeAPI` with `predictor:`"),
    ("predictor", "def predict(sample, metadata): ...", "1:5", "is not defined", "`kind: api` with `predictor:`"),
    ("handler", "def predict(x): ...", "1:5", "Handler is not defined", "define it with handle_post(self, payload); "
     "functions of the module belong to `kind: api` with `predictor:`, an older form"),
    ("handler", "import bentoml\n@bentoml.service(workers=2)\nclass Iris:\n @bentoml.api(batchable=True)\n def classify(self, x): ...",
     "3:7", "Handler is not defined", 'rename "Iris" to "Handler", and remove @bentoml.service; classify belongs to BentoML: '
     "name it handle_post, and remove @bentoml.api"),
    ("handler", "from bentoml import service as served\n@served\nclass Iris:\n def help(self): ...", "3:7",
     "Handler is not defined", 'rename "Iris" to "Handler", and remove @served'),
    ("handler", "import bentoml\n@bentoml.service\nclass Iris:\n @bentoml.api\n def predict(self, x): ...", "3:7",
     "Handler is not defined", "predict belongs to BentoML: name it handle_post, and remove @bentoml.api"),
    ("handler", "def service(x): ...\n@service\nclass Iris: ...", "0:0", "Handler is not defined", "top level"),
    ("predictor", "class TensorFlowPredictor: ...", "1:7", "is not defined", "belongs to `type: tensorflow`"),
    ("predictor", HEAD + "def predict(self): ...\nclass PythonPredictor: ...", "4:7", "defined twice, first on line 1", ""),
    # Its methods.
    ("predictor", "class PythonPredictor:\n def predict(self): ...", "1:7", "__init__(self, config) is not", "add it"),
    ("predictor", "class PythonPredictor:\n def __int__(self, config): ...\n def predict(self): ...", "2:6",
     "__init__(self, config) is not defined", 'rename "__int__" to "__init__"'),
    ("predictor", HEAD + "def predcit(self, payload): ...", "3:9", "predict(self, payload) is not", 'to "predict"'),
    ("predictor", HEAD + "def handle_post(self, payload): ...", "3:9", "predict(self, payload) is not", "name it predict"),
    ("predictor", HEAD + "x = 1", "1:7", "class PythonPredictor: predict(self, payload) is not defined", "add it"),
    ("predictor", HEAD + "def predict(self): ...\n    def predict(self): ...", "4:9", "method predict is defined twice", ""),
    ("predictor", HEAD + "def predict(self): ...\n    def post_predcit(self): ...", "4:9", "post_predcit is never",
     'to "post_predict"'),
    ("handler", HANDLER + "def handle_psot(self, payload): ...", "3:9", "is not defined", 'to "handle_post"'),
    ("handler", HANDLER + "async def handle_psot(self, payload): ...", "3:15", "is not defined", 'to "handle_post"'),
    ("handler", HANDLER + "def handle_get(self): ...\n    def handle_psot(self): ...", "4:9", "never called", "handle_post"),
    ("handler", HANDLER + "def handle_POST(self): ...", "3:9", "is not defined", 'to "handle_post"'),
    ("handler", HANDLER + "def handel_post(self): ...", "3:9", "is not defined", 'to "handle_post"'),
    ("handler", HANDLER + "def handle_async(self, payload): ...", "3:9", "is not defined", "`kind: AsyncAPI`"),
    ("handler", HANDLER + "def predict(self, payload): ...", "3:9", "is not defined", "name it handle_post"),
    ("handler", "class Handler:\n async def __init__(self, config): ...\n def handle_post(self): ...", "2:12",
     "class Handler: __init__() is async", "write `def __init__`"),
    # Their signatures.
    ("predictor", HEAD + "def predict(payload): ...", "3:17", '"self" must be the first', ""),
    ("predictor", HEAD + "def predict(): ...", "3:9", '"self" must be the first', ""),
    ("predictor", HEAD + "def predict(self, paylod): ...", "3:23", '"paylod" is not a supported', '"payload"?'),
    ("predictor", HEAD + "def predict(self, payload, foo): ...", "3:32", '"foo" is not a supported', "query_params"),
    ("predictor", HEAD + "def predict(self, *args): ...", "3:24", '"*args" is not supported', "payload"),
    ("predictor", HEAD + "def predict(self, payload, /): ...", "3:23", "can't be passed by name", 'remove the "/"'),
    ("predictor", HEAD + "def predict(self, *, x='é', foo): ...", "3:33", '"foo" is not a supported', ""),
    ("predictor", "class PythonPredictor:\n def __init__(self): ...\n def predict(self): ...", "2:6",
     '"config" is a required argument, but was not provided', 'add "config"'),
    ("predictor", "class PythonPredictor:\n def __init__(self, confg): ...\n def predict(self): ...", "2:21",
     '"confg" is not a supported argument', '"config"?'),
    ("predictor", "class PythonPredictor:\n def __init__(self, config, python_client): ...\n def predict(self): ...", "2:29",
     '"python_client" is not available', "multi_model_reloading"),
    ("predictor", "class B:\n def predict(self, x): ...\nclass PythonPredictor(B):\n def __init__(self, config): ...", "2:20",
     '"x" is not a supported argument', ""),
    # Routes.
    ("handler", "import cortex\n" + HANDLER + "@cortex.route('/a')\n    def a(self): ...", "4:19",
     "@cortex.route has no verb", 'write @cortex.route("GET", "/a")'),
    ("handler", "import cortex\n" + HANDLER + "@cortex.route('POST')\n    def a(self): ...", "4:19",
     "@cortex.route has no path", 'write @cortex.route("GET", "/path")'),
    # Names of our package.
    ("handler", "import cortex\n" + HANDLER + "@cortex.routes('GET', '/a')\n    def a(self): ...", "4:6",
     "the package cortex has no name routes", 'did you mean "route"?'),
    ("handler", "from cortex import Route\n" + HANDLER + "@Route('GET', '/a')\n    def a(self): ...", "1:1",
     "the package cortex has no name Route", 'did you mean "route"?'),
    ("functions", "import cortex as c\ndef predict(sample, metadata):\n  return c.xyz", "3:10", "no name xyz", "its names are"),
    # Functions.
    ("functions", "", "0:0", "function predict(sample, metadata) is not defined", "top level"),
    ("functions", "def predictt(sample, metadata): ...", "1:5", "function predict(sample", 'to "predict"'),
    ("functions", "class PythonPredictor: ...", "1:7", "function predict(sample", "PythonPredictor belongs to"),
    ("functions", "def predict(metadata, sample): ...", "1:13", "must be in the order sample, metadata", ""),
    ("functions", "def predict(sample): ...", "1:5", '"metadata" is a required argument', 'add "metadata"'),
    ("functions", "def predict(sampel, metadata): ...", "1:13", '"sampel" is not a supported', '"sample"?'),
    ("functions", "def predict(sample, metadata, k): ...", "1:31", '"k" is not a supported', "write (sample, metadata)"),
    ("functions", "def predict(*args): ...", "1:14", '"*args" is not supported', "write (sample, metadata)"),
    ("functions", "def inti(model_path, metadata): ...\ndef predict(sample, metadata): ...", "1:5", "inti is never", '"init"'),
    ("functions", "def init(path, metadata): ...\ndef predict(sample, metadata): ...", "1:10", '"path" is not', "model_path"),
    ("functions", "async def init(model_path, metadata): ...\ndef predict(sample, metadata): ...", "1:11", "init() is async", ""),
    ("functions", "def predict(sample, metadata): ...\ndef predict(sample, metadata): ...", "2:5", "defined twice", ""),
]  # fmt: skip


@pytest.mark.parametrize(("interface", "text", "where", "message", "fix"), WRONG)
def test_a_mistake_is_reported_once_with_its_place_and_fix(interface, text, where, message, fix):
    reported = found(interface, text)
    assert len(reported) == 1, reported
    assert reported[0][0] == where
    assert message in reported[0][1]
    assert fix in reported[0][2]
    assert reported[0][2]


INIT = "class PythonPredictor:\n    def __init__(self, config, python_client): ...\n"
PREDICT = "    def predict(self): ...\n"
LOAD = "    def load_model(self, model_path): ...\n"
ONNX = "class ONNXPredictor:\n    def __init__(self, onnx_client, config): ...\n"

RIGHT_WITH_MODELS = [
    ("predictor", "python", INIT + PREDICT + LOAD),
    ("predictor", "python", INIT + PREDICT + "    load_model = joblib.load\n"),
    ("predictor", "python", INIT + PREDICT + "    @staticmethod\n    def load_model(model_path): ...\n"),
    ("predictor", "python", "from b import Base\nclass PythonPredictor(Base):\n" + PREDICT),
    ("predictor", "onnx", ONNX + PREDICT),
    ("predictor", "tensorflow", ONNX.replace("ONNX", "TensorFlow").replace("onnx", "tensorflow") + PREDICT),
    ("handler", "tensorflow", HANDLER.replace("config", "config, tensorflow_client") + "def handle_post(self): ..."),
    ("handler", "onnx", HANDLER.replace("config", "config, onnx_client") + "def handle_post(self): ..."),
]


@pytest.mark.parametrize(("interface", "type_", "text"), RIGHT_WITH_MODELS)
def test_reports_nothing_for_correct_sources_with_models(interface, type_, text):
    assert check_source(text, "p.py", interface, type_, has_models=True) == []


def test_methods_of_other_systems_are_no_methods_of_applications():
    (problem,) = check_source("class Iris:\n def predict(self, x): ...", "h.py", "handler", "asgi")
    assert (problem.message, problem.fix) == ("class Handler is not defined", "define it at the top level of the file")


def test_ignores_load_model_without_models():
    assert found("predictor", HEAD + "def predict(self): ...\n    def load_model(self, a, b): ...") == []


WRONG_WITH_MODELS = [
    ("predictor", "python", INIT + PREDICT, "1:7", "load_model(self, model_path) is not defined", "add it"),
    ("predictor", "python", INIT + PREDICT + LOAD.replace("load_model", "load_modle"), "4:9",
     "load_model(self, model_path) is not defined", 'rename "load_modle" to "load_model"'),
    ("predictor", "python", INIT + PREDICT + LOAD.replace("model_path", "path, more"), "4:9",
     '"model_path" is a required argument', "add"),
    ("predictor", "python", HEAD + PREDICT[4:] + LOAD, "2:9", '"python_client" is a required argument', "add"),
    ("handler", "python", HANDLER + "def handle_post(self): ...\n" + LOAD, "2:9", '"model_client" is a required', "add"),
    ("handler", "python", HANDLER.replace("config", "config, modl_client") + "def handle_post(self): ...\n" + LOAD, "2:32",
     '"modl_client" is not a supported argument', '"model_client"?'),
    ("predictor", "onnx", INIT + PREDICT, "1:7", "class ONNXPredictor is not defined", "PythonPredictor belongs to `type: python`"),
    ("predictor", "onnx", "class ONNXPredictor:\n" + PREDICT, "1:7", "__init__(self, onnx_client, config) is not", "add it"),
    ("predictor", "tensorflow", ONNX + PREDICT, "1:7", "class TensorFlowPredictor is not", "belongs to `type: onnx`"),
    ("handler", "tensorflow", HANDLER + "def handle_post(self): ...", "2:9", '"tensorflow_client" is a required', "add"),
    ("predictor", "python", INIT.replace("python_client", "python_client, onnx_client") + PREDICT + LOAD, "2:47",
     '"onnx_client" is not available', "`type: onnx`"),
]  # fmt: skip


@pytest.mark.parametrize(("interface", "type_", "text", "where", "message", "fix"), WRONG_WITH_MODELS)
def test_a_mistake_with_models_is_reported_with_its_place_and_fix(interface, type_, text, where, message, fix):
    first, *_ = check_source(text, "p.py", interface, type_, has_models=True)
    assert f"{first.line}:{first.column}" == where
    assert message in first.message
    assert fix in first.fix


def test_every_mistake_is_reported_in_order():
    reported = found("handler", "class Handler:\n def __init__(self): ...\n def handle_post(self, a, b): ...")
    assert [where for where, _, _ in reported] == ["2:6", "3:24", "3:27"]


def test_columns_count_characters():
    text = HEAD + "def predict(self, *, ü='é', payload, foo): ..."
    ((where, _, _),) = found("predictor", text)
    assert where == f"3:{text.splitlines()[2].index('foo') + 1}"


def test_a_byte_order_mark_and_odd_line_ends_shift_nothing():
    text = (
        "\ufeff# \x0c \u2028 \r\nclass PythonPredictor:\r def __init__(self, config): ...\r def predict(self, x): ..."
    )
    ((where, _, _),) = found("predictor", text)
    assert where == "4:20"


def test_a_deeply_nested_source_is_an_error_not_a_crash():
    assert check_source("x = " + "(" * 5000 + ")" * 5000, "p.py", "handler")
    assert check_source("x = " + "-" * 100_000 + "1", "p.py", "handler")


@given(st.text(), st.sampled_from(sorted(GENERATIONS)))
def test_any_text_is_checked_without_an_exception(text, row):
    kind, *form = row
    for diagnostic in check_source(text, "p.py", *form, kind=kind):
        assert diagnostic.line <= text.count("\n") + text.count("\r") + 2
        assert (diagnostic.column >= 1) == (diagnostic.line >= 1)


NAMES = st.lists(
    st.sampled_from(["self", "payload", "headers", "batch_id", "x", "sample", "metadata"]), unique=True
).map(lambda names: ["self", *(name for name in names if name != "self")])


@given(NAMES, st.sampled_from(["", "*, ", "/, "]))
def test_source_checks_and_the_loader_agree_on_signatures(names, marker):
    declared = f"self, {'' if marker == '/, ' else marker}{', '.join(names[1:])}".strip(" ,*")
    text = f"class PythonPredictor:\n def __init__(self, config): ...\n def predict({declared}): ..."
    namespace = {}
    exec(text, namespace)
    signature = GENERATIONS["RealtimeAPI", "predictor", "python", False].method_signature
    problems = find_problems(signature, from_function(namespace["PythonPredictor"].predict), takes_self=True)
    assert [p.message for p in problems] == [message.partition('": ')[2] for _, message, _ in found("predictor", text)]


ROUTED = """import cortex
from cortex import route as at
class Handler:
    def __init__(self, config): ...
    {}
"""


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("@cortex.route('GET', '/a/{x}/')\n    def a(self, x, payload=None, headers): ...".replace("=None", ""), []),
        ("@at('get', '/a')\n    @at(verb='GET', path='/b')\n    @staticmethod\n    def a(): ...", []),
        ("@at(VERB, '/' + NAME)\n    def a(self, anything): ...", []),
        ("@at('GET', '/a/{x}')\n    @traced\n    def a(self): ...", []),
        ("@other.route('GET', 'a')\n    def handle_get(self, x): ...", []),
        ("@at('GET', '/a')\n    def handle_psot(self): ...", []),
        ("@at('FETCH', '/a')\n    def a(self): ...",
         [("5:9", 'class Handler: "FETCH" is not a verb of routes: GET, POST, PUT, PATCH, DELETE',
           'write @cortex.route("GET", "/path")')]),
        ("@at(['GET'], '/a')\n    def a(self): ...",
         [("5:9", "class Handler: the first argument is not a verb of routes: GET, POST, PUT, PATCH, DELETE",
           'write @cortex.route("GET", "/path")')]),
        ("@at(['GET'])\n    def a(self): ...",
         [("5:9", "class Handler: @cortex.route has no path", 'write @cortex.route("GET", "/path")')]),
        ("@at('GET', ('/a', '/b'))\n    def a(self): ...",
         [("5:16", "class Handler: the path is not a text", 'write @cortex.route("GET", "/path")')]),
        ("@property\n    @at('GET', '/a')\n    def a(self): ...",
         [("5:6", "class Handler: a property can't be a route, because it is not called", "remove @property")]),
        ("@at('GET', '/a')\n    @functools.cached_property\n    def a(self): ...",
         [("6:6", "class Handler: a property can't be a route, because it is not called",
           "remove @functools.cached_property")]),
        ("@at('GET', path='/v2/a')\n    def a(self): ...",
         [("5:21", 'class Handler: the path "/v2/a" is reserved for the Open Inference Protocol',
           "choose another path")]),
        ("@at('GET', '/readyz/')\n    def a(self): ...",
         [("5:16", 'class Handler: the path "/readyz" is reserved for the readiness of the API', "choose another path")]),
        ("@at\n    def a(self): ...",
         [("5:6", "class Handler: @cortex.route has no verb and path", 'write @cortex.route("GET", "/path")')]),
        ("@at('GET', '/a/{x}')\n    def a(self, y): ...",
         [("6:17", 'class Handler: invalid signature for method "a(self, y)": "y" is not a supported argument',
           "supported: x, payload, query_params, headers; any other needs a default"),
          ("6:9", 'class Handler: invalid signature for method "a(self, y)": "x" is a required argument, '
           "but was not provided", 'add "x"')][::-1]),
        ("@at('GET', '/a/{x}')\n    def a(self, x): ...\n    @at('GET', '/a/{y}/')\n    def b(self, y): ...",
         [("7:6", "class Handler: GET /a/{y} is the route of a on line 6, too", "change one of the two")]),
    ],
)  # fmt: skip
def test_reports_mistakes_in_routes(method, expected):
    assert (
        found(
            "handler", ROUTED.format(method.replace("{", "{{").replace("}", "}}")).replace("{{", "{").replace("}}", "}")
        )
        == expected
    )


@pytest.mark.parametrize(
    ("interface", "fields", "message", "fix"),
    [
        ("handler", {"kind": "AsyncAPI"}, "class Handler: @cortex.route is not supported by `kind: AsyncAPI`",
         "remove it, or use `kind: RealtimeAPI`"),
        ("handler", {"rpcs": ["handle_async"]}, "class Handler: @cortex.route is not supported by APIs with protobuf_path",
         "remove it: clients call rpcs"),
        ("handler", {"type_": "asgi"}, "class Handler: @cortex.route is not supported by `type: asgi`",
         "add the route to the application"),
        ("functions", {}, "@cortex.route is only for methods of a class",
         "define class Handler, and configure `handler:`"),
    ],
)  # fmt: skip
def test_only_classes_of_realtime_apis_have_routes(interface, fields, message, fix):
    text = """
        import cortex
        class Handler:
            def __init__(self, config): self.app = None
            def handle_async(self, payload): ...
            @cortex.route("GET", "/a")
            def a(self): ...
        @cortex.route("GET", "/a")
        def predict(sample, metadata): ...
    """
    diagnostics = check_source(textwrap.dedent(text), "handler.py", interface, **fields)
    line = 8 if interface == "functions" else 6
    assert [(d.line, d.message, d.fix) for d in diagnostics] == [(line, message, fix)]


def test_a_batch_key_is_checked():
    head = "class Handler:\n def __init__(self, config): ...\n def handle_post(self, payload): ...\n"
    wrong = [
        (" async def batch_key(self, payload): ...", "batch_key() runs on the event loop and must return a key"),
        (" def batch_key(self, payload): yield 1", "batch_key() runs on the event loop and must return a key"),
        (" def batch_keys(self, payload): ...", "method batch_keys is never called"),
    ]
    for method, message in wrong:
        (problem,) = check_source(head + method, "handler.py", "handler", batches=True)
        assert (problem.line, message in problem.message) == (4, True), problem
        assert check_source(head + method, "handler.py", "handler") == []
    for batches in (False, True):
        (problem,) = check_source(f"{head} def batch_key(self): ...", "handler.py", "handler", batches=batches)
        assert "payload" in problem.message
        assert check_source(f"{head} def batch_key(self, payload): ...", "handler.py", "handler", batches=batches) == []


def test_a_file_that_is_long_with_data_is_not_parsed():
    data = "x = [\n" + "1,\n" * 90_000
    assert check_source(data, "handler.py", "handler") == []
    (mistake,) = check_source("x = [", "handler.py", "handler")
    assert "never closed" in mistake.message


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ("# é\nx = 'é'\n".encode(), None),
        ("x = 1\r\ny = 'a'  # é\n".encode("latin-1"), (2, 12, "is not UTF-8 text (byte 0xe9)")),
        ("# -*- coding: latin-1 -*-\nx = 'é'\n".encode("latin-1"), None),
        ("# é\n# vim: set fileencoding=latin-1 :\n".encode("latin-1"), None),
        ("# coding: ascii\nx = 'é'\n".encode(), (2, 6, "is not ASCII text (byte 0xc3)")),
        *((f"# coding: {name}\nx = '\xe9'\n".encode("latin-1"), None) for name in ("unknown", "rot13")),
    ],
)
def test_a_byte_that_is_not_text_is_found(data: bytes, expected: tuple[int, int, str] | None) -> None:
    found = find_undecodable_byte(data, "handler.py")
    assert (found and (found.line, found.column, found.message)) == expected


@given(st.binary())
def test_any_bytes_are_text_or_not(data: bytes) -> None:
    find_undecodable_byte(data, "handler.py")
