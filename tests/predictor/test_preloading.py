"""Selection of the imports that run before the user's code."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from cortex.predictor.preloading import find_leading_imports, run_imports


def found(project: Path, files: dict[str, str], python_path: str | None = None) -> list[str]:
    for name, text in files.items():
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(text)
    return [ast.unparse(statement) for statement in find_leading_imports(project, "handler.py", python_path)]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('"""Words."""\nfrom __future__ import annotations\nimport os, torch as t\n', "annotations|os|t"),
        ("import a1\nSIZES = [1, {2: None}]\ndef f(): ...\nclass C: ...\nimport b1\n", "a1|b1"),
        ('import os\nos.environ["OMP_NUM_THREADS"] = "1"\nimport torch\n', "os"),
        ("import a1\nload_dotenv()\nimport b1\n", "a1"),
        ("import a1\nlogger = logging.getLogger()\nimport b1\n", "a1"),
        ("import a1\ntry:\n    import b1\nexcept ImportError:\n    pass\nimport c1\n", "a1"),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import a1\nimport b1\n", "TYPE_CHECKING|b1"),
        ("def f():\n    import a1\n", ""),
        ("import a1\nthis is no Python\n", ""),
    ],
)
def test_imports_before_any_other_code_are_found(tmp_path: Path, source: str, expected: str) -> None:
    imports = [line.split()[-1] for line in found(tmp_path, {"handler.py": source})]
    assert "|".join(imports) == expected


def test_modules_of_the_project_are_followed_and_not_imported(tmp_path: Path) -> None:
    files = {
        "handler.py": "import a1\nimport helpers.images\nfrom more import one, two\nimport z1\n",
        "helpers/__init__.py": "import b1\nfrom . import common\n",
        "helpers/common.py": "import c1\nimport handler\n",
        "helpers/images.py": "from .common import f\nimport d1\n",
        "lib/more/__init__.py": "",
        "lib/more/two.py": "import e1\n",
    }
    expected = [f"import {name}1" for name in "abcdez"]
    assert found(tmp_path, files, python_path="lib") == expected


def test_other_code_of_a_module_ends_the_search_in_all_of_them(tmp_path: Path) -> None:
    files = {"handler.py": "import a1\nimport helpers\nimport z1\n", "helpers.py": "import b1\nprint()\nimport c1\n"}
    assert found(tmp_path, files) == ["import a1", "import b1"]


def test_compiled_modules_and_pickles_of_the_project_are_not_imported(tmp_path: Path) -> None:
    (tmp_path / "fast.cpython-311-x86_64-linux-gnu.so").touch()
    assert found(tmp_path, {"handler.py": "import fast\nimport a1\n"}) == []
    assert find_leading_imports(tmp_path, "handler.pickle", None) == []


def test_a_failing_import_ends_the_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for name, text in {"first1": "", "exits1": "import sys\nsys.exit()\n", "last1": ""}.items():
        (tmp_path / f"{name}.py").write_text(text)
    run_imports(ast.parse("import first1\nimport exits1\nimport last1\n").body)
    assert "first1" in sys.modules
    assert not {"exits1", "last1"} & set(sys.modules)
    del sys.modules["first1"]
