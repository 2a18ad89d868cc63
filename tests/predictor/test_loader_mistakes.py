"""Projects that can't be loaded: each mistake is named, with the user's frames only."""

import sys

import pytest

from cortex.errors import UserError


def failure(project, interface, text, **fields):
    with pytest.raises(UserError) as caught:
        project.load(interface, text, **fields)
    return caught.value


CLASS = "class PythonPredictor:\n    def __init__(self, config): pass\n    "


@pytest.mark.parametrize(
    ("interface", "text", "words"),
    [
        ("predictor", "x = 1", ["predictor.py: class PythonPredictor is not defined"]),
        ("predictor", "class PythonPredictr: pass", ['rename it to "PythonPredictor"']),
        ("predictor", "class Handler: pass", ["Handler belongs to `kind: RealtimeAPI` with `handler:`"]),
        ("predictor", "class ONNXPredictor: pass", ["class ONNXPredictor belongs to `type: onnx`"]),
        ("predictor", "PythonPredictor = 3", ["must be a class, but is an int"]),
        ("predictor", CLASS, ["predict() is not defined"]),
        ("predictor", "class PythonPredictor:\n  def predict(self): pass", ["__init__(self, config) is not defined"]),
        ("predictor", CLASS + "def predict(self, paylod): pass",
         ['predictor.py:3: class PythonPredictor: invalid signature for method "predict(self, paylod)"',
          '"paylod" is not a supported argument; did you mean "payload"?']),
        ("predictor", CLASS + "def predict(payload): pass", ['"self" must be the first argument']),
        ("predictor", CLASS + "def predict(self, *args): pass", ['"*args" is not supported']),
        ("predictor", CLASS + "def predict(self, payload, /): pass", ['"payload" can\'t be passed by name']),
        ("predictor", CLASS + "def predict(self): pass\n    def post_predict(self, x): pass", ['"x" is not a']),
        ("predictor", "class PythonPredictor:\n  def __init__(self): pass\n  def predict(self): pass",
         ['"config" is a required argument, but was not provided']),
        ("predictor", "class PythonPredictor:\n  def __init__(self, config, python_client): 0\n  def predict(self): 0",
         ['"python_client" is not available; cortex.yaml configures no models; add `multi_model_reloading:`']),
        ("handler", "class Handler:\n  def __init__(self, config): pass\n  def handle_batch(self, payload): pass",
         ["handle_batch() belongs to `kind: BatchAPI`"]),
        ("functions", "def predict(metadata, sample): pass", ["must be in the order sample, metadata"]),
        ("functions", "def predict(sample): pass", ['"metadata" is a required argument']),
        ("functions", "def init(): pass\ndef predict(sample, metadata): pass", ['"model_path" is a required argument']),
    ],
)  # fmt: skip
def test_a_mistake_is_reported_with_its_fix(project, interface, text, words):
    error = failure(project, interface, text)
    for word in words:
        assert word in str(error)
    assert error.traceback == ""


def test_an_exception_in_the_constructor_shows_the_users_frames_only(project):
    text = """
        def read(path):
            raise ValueError("bad weights")

        class PythonPredictor:
            def __init__(self, config):
                try:
                    config["path"]
                except KeyError:
                    read("x")
            def predict(self): pass
    """
    error = failure(project, "predictor", text)
    assert str(error) == "ValueError: bad weights"
    assert 'File "predictor.py", line 10, in __init__\n    read("x")' in error.traceback
    assert "KeyError" in error.traceback
    assert "loader.py" not in error.traceback
    assert "frames.py" not in error.traceback


def test_an_exception_while_importing_hides_the_import_machinery(project):
    project.write("helper.py", "1 / 0")
    error = failure(project, "predictor", "import helper")
    assert str(error) == "ZeroDivisionError: division by zero"
    assert error.traceback.splitlines()[0] == "Traceback (most recent call last):"
    files = [line.strip() for line in error.traceback.splitlines() if line.startswith("  File")]
    assert files == ['File "predictor.py", line 1, in <module>', 'File "helper.py", line 1, in <module>']


def test_a_syntax_error_keeps_its_line_and_caret(project):
    error = failure(project, "predictor", "class PythonPredictor:\n    def __init__(self config): pass\n")
    assert str(error).startswith("SyntaxError: ")
    assert 'File "predictor.py", line 2' in error.traceback
    assert "^" in error.traceback
    assert "Traceback" not in error.traceback


def test_a_missing_import_has_a_hint_what_to_install(project):
    error = failure(project, "predictor", "import no_such_module_anywhere.sub")
    assert str(error).startswith("ModuleNotFoundError: No module named 'no_such_module_anywhere'; ")
    assert "requirements.txt" in str(error)


def test_a_missing_import_of_the_users_package_is_not_hidden(project):
    project.write("pkg/__init__.py", "import no_such_module_anywhere")
    error = failure(project, "handler", "class Handler: pass", path="pkg/handler.py")
    assert "No module named 'no_such_module_anywhere'" in str(error)


@pytest.mark.parametrize(
    ("interface", "text", "where"),
    [
        ("functions", "import sys; sys.exit(2)", "while predictor.py was being imported"),
        (
            "functions",
            "def init(model_path, metadata): raise SystemExit(2)\ndef predict(sample, metadata): 0",
            "by init()",
        ),
        (
            "predictor",
            "class PythonPredictor:\n  def __init__(self, config): exit(2)\n  def predict(self): 0",
            "by Python",
        ),
    ],
)
def test_exiting_while_starting_is_an_error(project, interface, text, where):
    error = failure(project, interface, text)
    assert str(error).startswith("sys.exit(2) was called")
    assert where in str(error)


def test_a_missing_file_is_named(project):
    assert str(failure(project, "predictor", None, path="gone.py")) == "gone.py: file does not exist in the project"


def test_a_failed_import_leaves_no_half_module(project):
    failure(project, "functions", "1 / 0", path="half-done.py")
    assert not [name for name in sys.modules if "half_done" in name]
