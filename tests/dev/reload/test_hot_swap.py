"""Functions of running code are replaced in place."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from cortex.dev.reload.hot_swap import ModuleSource, SwapError, swap
from cortex.dev.reload.project_sources import ProjectSources
from cortex.dev.reload.source_changes import NewProcess, decide
from cortex.predictor.importing import import_user_file

CODE = """
import functools

def double(x):
    return x * 2

def wrapped(f):
    @functools.wraps(f)
    def inner(*args):
        return f(*args)
    return inner

class Base:
    def name(self):
        return "base"

class Handler(Base):
    def __init__(self, start):
        self.start = start

    def handle_post(self, x, by=1):
        return self.start + double(x) * by

    def name(self):
        return "handler"

    @wraps_of_contextlib
    def scope(self):
        yield 1

    @classmethod
    def of(cls):
        return cls(1).start
""".replace("wraps_of_contextlib", "contextmanager").replace(
    "import functools", "import functools\nfrom contextlib import contextmanager"
)


@pytest.fixture
def module(tmp_path: Path) -> Iterator[ModuleType]:
    (tmp_path / "swapped_handler.py").write_text(CODE)
    before = list(sys.path)
    yield import_user_file(tmp_path, "swapped_handler.py", None)
    sys.path[:] = before
    del sys.modules["swapped_handler"]


def edit(module: ModuleType, *edits: tuple[str, str], old: str = CODE) -> str:
    new = old
    for before, after in edits:
        assert before in new
        new = new.replace(before, after)
    assert module.__file__
    Path(module.__file__).write_text(new)
    changes = decide({"h.py": old}, {"h.py": new}, "Handler")
    assert not isinstance(changes, NewProcess), changes
    swap({"h.py": ModuleSource(module, module.__file__, old, new)}, changes)
    return new


def test_methods_of_a_living_object_are_replaced_wherever_they_are_referred_to(module: ModuleType) -> None:
    handler: Any = module.Handler(10)
    bound, function = handler.handle_post, module.double
    new = edit(module, ("x * 2", "x * 3"), ("self.start + ", "self.start - "))
    assert (bound(1), handler.handle_post(1), function(1)) == (7, 7, 3)
    edit(module, ("x * 3", "x * 4"), old=new)
    assert bound(1) == 6


def test_arguments_and_defaults_are_replaced(module: ModuleType) -> None:
    handler: Any = module.Handler(0)
    edit(module, ("handle_post(self, x, by=1)", "handle_post(self, x: int, by=5, *, more=1)"), ("* by", "* by + more"))
    assert handler.handle_post(1) == 11
    assert module.Handler.handle_post.__annotations__ == {"x": int}


def test_annotations_stay_text_where_the_module_says_so(tmp_path: Path) -> None:
    text = "from __future__ import annotations\nclass A:\n    @property\n    def x(self) -> int: return 1\n"
    with loaded(tmp_path, "lazy_module", text.encode()) as (module, sources):
        (tmp_path / "lazy_module.py").write_text(text + "    def f(self, y: B = (1,)): return y\n")
        assert sources.swap(None) == (["A.f()"], True)
        assert (module.A().f(), module.A.f.__annotations__) == ((1,), {"y": "B"})


def test_methods_and_functions_are_added_and_removed(module: ModuleType) -> None:
    handler: Any = module.Handler(4)
    edit(
        module,
        (
            "    @classmethod\n",
            "    def root(self):\n        return math.sqrt(self.start), super().name()\n\n    @classmethod\n",
        ),
        ("import functools", "import functools\nimport math"),
        ('    def name(self):\n        return "handler"\n', ""),
    )
    assert handler.root() == (2.0, "base")
    assert handler.name() == "base"


def test_functions_inside_of_decorators_are_replaced(module: ModuleType) -> None:
    handler: Any = module.Handler(4)
    edit(module, ("yield 1", "yield 2"), ("return cls(1).start", "return cls(2).start"))
    with handler.scope() as value:
        assert value == 2
    assert handler.of() == 2


def test_tracebacks_have_the_lines_of_the_new_file(module: ModuleType) -> None:
    handler: Any = module.Handler(4)
    edit(
        module,
        ("import functools", "import functools\n# one\n# two"),
        ("return self.start + double(x) * by", "return 1 / 0"),
    )
    with pytest.raises(ZeroDivisionError) as caught:
        handler.handle_post(1)
    assert caught.traceback[-1].lineno + 1 == 25
    assert module.Handler.name.__code__.co_firstlineno == 27


def test_nothing_changes_if_a_method_needs_another_closure(module: ModuleType) -> None:
    handler: Any = module.Handler(4)
    with pytest.raises(SwapError, match="super"):
        edit(module, ("x * 2", "x * 3"), ('return "handler"', "return super().name()"))
    assert module.double(1) == 2
    assert handler.name() == "handler"


def test_a_file_that_changes_while_it_loads_is_swapped_later(tmp_path: Path) -> None:
    file = tmp_path / "changing_handler.py"
    load_model = f"import pathlib\npathlib.Path({str(file)!r}).write_text(NEW)\n"
    text = "def predict():\n    return {}\n"
    file.write_text(f"NEW = {text.format(2)!r}\n{load_model}{text.format(1)}")
    sources = ProjectSources(str(tmp_path))
    before = list(sys.path)
    try:
        module = import_user_file(tmp_path, "changing_handler.py", None)
        sources.update()
        assert module.predict() == 1
        found = sources.swap(None)
    finally:
        sys.path[:] = before
        del sys.modules["changing_handler"]
    assert isinstance(found, NewProcess)
    assert "changing_handler.py" in found.reason


CAFE = "def predict():\n    return {}  # caf\u00e9\n"


def test_a_comment_that_python_accepts_although_it_is_not_utf_8_does_not_prevent_a_swap(tmp_path: Path) -> None:
    try:
        ast.parse(CAFE.format(1).encode("latin-1"))
    except SyntaxError:
        pytest.skip("this Python refuses the module, too")
    with loaded(tmp_path, "cafe_comment", CAFE.format(1).encode("latin-1")) as (module, sources):
        (tmp_path / "cafe_comment.py").write_bytes(CAFE.format(2).encode("latin-1"))
        assert sources.swap(None) == (["predict()"], False)
        assert module.predict() == 2


def test_a_swap_decodes_a_file_as_its_coding_line_says(tmp_path: Path) -> None:
    text = "# -*- coding: latin-1 -*-\n" + CAFE
    with loaded(tmp_path, "cafe_latin", text.format(1).encode("latin-1")) as (module, sources):
        (tmp_path / "cafe_latin.py").write_bytes(text.format("'\u00e9'").encode("latin-1"))
        sources.swap(None)
        assert module.predict() == "\u00e9"


def test_a_string_that_is_not_utf_8_is_a_syntax_error_in_its_file_and_the_old_code_goes_on(tmp_path: Path) -> None:
    with loaded(tmp_path, "cafe_string", CAFE.format(1).encode()) as (module, sources):
        (tmp_path / "cafe_string.py").write_bytes(CAFE.format("'\u00e9'").encode("latin-1"))
        with pytest.raises(SyntaxError) as caught:
            sources.swap(None)
        assert "cafe_string.py" in str(caught.value)
        assert module.predict() == 1


def test_a_module_that_was_removed_is_the_reason_for_a_new_process(tmp_path: Path) -> None:
    with loaded(tmp_path, "renamed_module", b"def predict():\n    return 1\n") as (_, sources):
        (tmp_path / "renamed_module.py").rename(tmp_path / "other_module.py")
        assert sources.swap(None) == NewProcess("renamed_module.py was removed")


@contextmanager
def loaded(folder: Path, name: str, source: bytes) -> Iterator[tuple[ModuleType, ProjectSources]]:
    (folder / f"{name}.py").write_bytes(source)
    sources = ProjectSources(str(folder))
    before = list(sys.path)
    try:
        module = import_user_file(folder, f"{name}.py", None)
        sources.update()
        yield module, sources
    finally:
        sys.path[:] = before
        del sys.modules[name]
