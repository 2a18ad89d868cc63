"""Classes passed as objects: the saved source loads elsewhere and runs nothing of the script but the class."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from cortex.client.source import extract, save_class

pytestmark = pytest.mark.processes

SCRIPT = '''\
"""A script."""
from __future__ import annotations

import json
import os as operating_system
import unused_and_not_installed

raise_if_run = print("ran!")
FACTOR = 3
TABLE = {"factor": FACTOR}

def scale(value):
    return value * TABLE["factor"]

def unused():
    unused_and_not_installed.go()

class Base:
    def name(self): return operating_system.sep

@staticmethod
def decorator(cls):
    return cls

@decorator.__func__
class Handler(Base):
    def handle_post(self, payload: "Later"):
        return json.dumps(scale(payload))

class Later: pass

if __name__ == "__main__":
    raise SystemExit("ran!")
'''


def test_the_saved_source_contains_only_what_the_class_needs() -> None:
    text = extract(SCRIPT, "Handler")

    kept = [line.strip() for line in text.splitlines() if line.strip()]
    for needed in ("import json", "FACTOR = 3", "def scale(value):", "class Base:", "class Later: pass"):
        assert needed in kept
    assert "ran!" not in text
    assert "unused" not in text
    original = SCRIPT.splitlines()
    for number, line in enumerate(text.splitlines()):
        assert line in ("", original[number])


def test_the_saved_source_runs() -> None:
    namespace: dict[str, object] = {"__name__": "elsewhere"}
    exec(compile(extract(SCRIPT, "Handler"), "handler.py", "exec"), namespace)  # noqa: S102 - it is ours

    assert namespace["Handler"]().handle_post(2) == "6"  # type: ignore[operator]


def run_script(folder: Path, script: str, name: str = "script.py") -> subprocess.CompletedProcess[str]:
    (folder / name).write_text(textwrap.dedent(script))
    return subprocess.run([sys.executable, name], cwd=folder, capture_output=True, text=True, check=True, timeout=60)


SAVE = """
from pathlib import Path
from cortex.client.source import save_class
Path("out").mkdir()
print(save_class({name}, Path("out"), "Handler"))
"""


def test_a_class_of_a_script_is_saved_without_the_deploy_around_it(tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("import second\n")
    (tmp_path / "second.py").write_text("VALUE = 7\n")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "unrelated.py").write_text("")
    script = """
import neighbour, package
class Mine:
    def handle_post(self): return neighbour.second.VALUE, package.__name__
""" + SAVE.format(name="Mine")

    run_script(tmp_path, script)

    out = tmp_path / "out"
    assert {file.name for file in out.iterdir()} == {"script.py", "neighbour.py", "second.py", "package"}
    done = subprocess.run(
        [sys.executable, "-c", "import script; print(script.Handler().handle_post())"],
        cwd=out,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "(7, 'package')\n"


def test_an_imported_class_is_saved_with_its_whole_file(tmp_path: Path) -> None:
    source = "import os\nos.environ.setdefault('A', 'B')\nclass Handler:\n    pass\n"
    (tmp_path / "mine.py").write_text(source)

    run_script(tmp_path, "import mine\n" + SAVE.format(name="mine.Handler"))

    assert (tmp_path / "out" / "mine.py").read_text() == source


def test_a_class_without_a_file_is_pickled(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    code = "class Mine:\n    def handle_post(self): return 5\n" + SAVE.format(name="Mine").replace(
        "mkdir()", "exists()"
    )

    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60
    )

    assert "dill==" in done.stdout
    loaded = "import dill; print(dill.load(open('out/handler.pickle', 'rb'))().handle_post())"
    assert subprocess.check_output([sys.executable, "-c", loaded], cwd=tmp_path, text=True) == "5\n"


def test_rejects_a_class_inside_a_function(tmp_path: Path) -> None:
    class Inner:
        pass

    with pytest.raises(ValueError, match="top level"):
        save_class(Inner, tmp_path, "Handler")
