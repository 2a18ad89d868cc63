"""Which changes of source code take effect in a running process."""

from __future__ import annotations

import pytest

from cortex.dev.reload.source_changes import NewProcess, decide

BASE = '''
import numpy
from helpers import prepare

SIZES = [1, 2]

def load_weights(path):
    return read(path)

def read(path):
    return open(path).read()

def scale(x, by=2):
    return x * by

class Handler:
    """A handler."""

    KIND = "a"

    def __init__(self, config):
        self.weights = load_weights(config["path"])

    def handle_post(self, payload):
        return scale(payload["x"])

    @property
    def name(self):
        return "a"

    @app.get("/a")
    def route(self):
        return 1

    @lru_cache
    def cached(self):
        return 1
'''


def change(*edits: tuple[str, str]) -> str:
    text = BASE
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    return text


@pytest.mark.parametrize(
    ("edit", "changed", "changes_signatures"),
    [
        (("return scale(payload", "return 1 + scale(payload"), ["Handler.handle_post()"], False),
        (("return x * by", "return x + by"), ["scale()"], False),
        (('return "a"', 'return "b"'), ["Handler.name()"], False),
        (("by=2", "by=3"), ["scale()"], True),
        (("handle_post(self, payload)", "handle_post(self, payload: dict, headers)"), ["Handler.handle_post()"], True),
        (("        return 1\n\n    @lru", "        return 2\n\n    @lru"), ["Handler.route()"], False),
        (("return x * by", "return x * by  # a comment"), [], False),
        (('"""A handler."""', '"""A better handler."""'), [], False),
        (("import numpy", "import numpy\nimport re"), [], False),
        (
            ("    @property", "    def handle_get(self):\n        return 1\n\n    @property"),
            ["Handler.handle_get()"],
            True,
        ),
        (("class Handler", "def more(x=1):\n    return x\n\nclass Handler"), ["more()"], True),
    ],
    ids=lambda value: value[1].strip()[:40] if isinstance(value, tuple) else None,
)
def test_changes_of_functions_take_effect_in_place(
    edit: tuple[str, str], changed: list[str], changes_signatures: bool
) -> None:
    found = decide({"handler.py": BASE}, {"handler.py": change(edit)}, "Handler")
    assert not isinstance(found, NewProcess), found
    assert found["handler.py"].names == changed
    assert found["handler.py"].changes_signatures is changes_signatures


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (('config["path"]', 'config["file"]'), "handler.py:21: Handler.__init__() runs while the process loads"),
        (("return read(path)", "return read(path)[1:]"), "load_weights() runs while the process loads"),
        (("open(path).read()", "open(path).read(9)"), "read() runs while the process loads"),
        (("SIZES = [1, 2]", "SIZES = [1, 3]"), "handler.py:5: module-level code changed"),
        (("SIZES = [1, 2]", ""), "handler.py: module-level code was removed"),
        (('KIND = "a"', 'KIND = "b"'), "class Handler changed"),
        (("class Handler:", "class Handler(Base):"), "class Handler changed"),
        (("from helpers import prepare", ""), "module-level code was removed"),
        (
            ("        return 1\n\n    @lru", "        return 1\n\n    @other\n    @lru"),
            "decorators of Handler.cached()",
        ),
        (("cached(self):\n        return 1", "cached(self):\n        return 2"), "is decorated by lru_cache"),
        (("def route(self)", "def route(self, q)"), "the arguments of Handler.route() changed"),
        (("by=2", "by=SIZES[0]"), "is not a literal"),
        (("def scale(x, by=2):\n    return x * by", ""), "scale() was removed"),
        (
            ("    @property", "    @lru_cache\n    def new(self): ...\n\n    @property"),
            "which was added, has a decorator",
        ),
        (("    @property", "    def __new(self): ...\n\n    @property"), "Handler.__new() was added"),
        (
            ("    @property", "    if KIND:\n        def of_kind(self): ...\n\n    @property"),
            "class Handler changed",
        ),
        (("class Handler", "def prepare(x):\n    return x\n\ndef load_weights(p): ...\n\nclass Handler"), "was added"),
    ],
    ids=lambda value: value[1].strip()[:40] if isinstance(value, tuple) else None,
)
def test_changes_of_what_ran_at_the_start_need_a_new_process(edit: tuple[str, str], reason: str) -> None:
    found = decide({"handler.py": BASE}, {"handler.py": change(edit)}, "Handler")
    assert isinstance(found, NewProcess)
    assert reason in found.reason


def test_a_function_of_another_module_that_the_constructor_calls_needs_a_new_process() -> None:
    main = "from helpers import Model\nclass Handler:\n    def __init__(self, config):\n        self.model = Model()\n"
    helpers = (
        "class Model:\n    def __init__(self):\n        self.x = 1\n    def predict(self):\n        return self.x\n"
        "class Other:\n    def __init__(self):\n        self.x = 1\n"
    )
    old = {"handler.py": main, "helpers.py": helpers}
    for edit, is_kept in [
        (("return self.x", "return self.x + 1"), True),
        (("self.x = 1\n    def", "self.x = 2\n    def"), False),
        (
            (
                "class Other:\n    def __init__(self):\n        self.x = 1",
                "class Other:\n    def __init__(self):\n        self.x = 2",
            ),
            True,
        ),
    ]:
        new = {"handler.py": main, "helpers.py": helpers.replace(*edit)}
        assert isinstance(decide(old, new, "Handler"), dict) is is_kept


def test_methods_may_be_removed_if_nothing_ran_them() -> None:
    new = change(('    def handle_post(self, payload):\n        return scale(payload["x"])\n', ""))
    found = decide({"handler.py": BASE}, {"handler.py": new}, "Handler")
    assert isinstance(found, dict)
    assert found["handler.py"].names == ["Handler.handle_post()"]


def test_a_syntax_error_is_raised() -> None:
    with pytest.raises(SyntaxError):
        decide({"handler.py": BASE}, {"handler.py": BASE + "\ndef ("}, "Handler")
