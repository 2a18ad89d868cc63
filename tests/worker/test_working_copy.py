"""Working copies: one suite that every strategy passes, as root and as an ordinary user."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import shutil
import stat
import subprocess
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cortex.errors import UserError
from cortex.worker import working_copy
from cortex.worker.working_copy import (
    STRATEGY_VARIABLE,
    Strategy,
    StrategyTest,
    WorkingCopy,
    ignored_strategy,
    remove_tree,
    with_paths,
)
from harness.forks import in_forks
from harness.replicas.specs import replica_spec

pytestmark = pytest.mark.processes

_NOBODY = 65534
_USERS = ["this user", *(["nobody"] if os.geteuid() == 0 else [])]
_PR_SET_DUMPABLE = 4


@pytest.fixture(params=_USERS)
def user(request: pytest.FixtureRequest) -> int | None:
    """The id of the user that the process changes to; None: it changes to none."""
    return None if request.param == "this user" else _NOBODY


@pytest.fixture
def root(user: int | None) -> Iterator[Path]:
    """A folder whose name needs quotes in mount options, with a project of this user."""
    with tempfile.TemporaryDirectory(prefix="copies of, a:b ") as name:
        root = Path(name)
        project = root / "project"
        (project / "folder" / "below").mkdir(parents=True)
        (project / "model.bin").write_bytes(b"stored" * 1000)
        (project / "run.sh").write_text("#!/bin/sh\n")
        (project / "run.sh").chmod(0o755)
        (project / "empty").touch()
        (project / "folder" / "values.json").write_text("[1]")
        (project / "folder" / "below" / "more.txt").write_text("more")
        (project / "link").symlink_to("model.bin")
        for path in [*project.rglob("*"), project]:
            os.utime(path, (1e9, 1e9), follow_symlinks=False)
        if user is not None:
            subprocess.run(["chown", "-R", f"{user}:{user}", str(root)], check=True)
        yield root
        remove_tree(root)


@pytest.fixture(params=list(Strategy))
def strategy(request: pytest.FixtureRequest, root: Path, user: int | None) -> Strategy:
    strategy: Strategy = request.param
    if strategy is not Strategy.COPY and not _is_possible(strategy, root, user):
        pytest.skip(f"this kernel or file system has no {strategy.value}")
    return strategy


def _is_possible(strategy: Strategy, root: Path, user: int | None) -> bool:
    def work() -> None:
        WorkingCopy(root / "project", root / "trial", strategy).enter()

    possible = _run(user, work, is_quiet=True)
    remove_tree(root / "trial")
    return possible


def _run(user: int | None, *works: Callable[[], object], is_quiet: bool = False) -> bool:
    """Run each function in a process of `user`, one after the other; return whether all succeeded."""

    def child(work: Callable[[], object]) -> None:
        try:
            if user is not None:
                os.setgroups([])
                os.setgid(user)
                os.setuid(user)
                ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 1)  # as after an exec by this user
            work()
        except BaseException:
            if not is_quiet:
                traceback.print_exc()
            raise

    return all(in_forks(1, lambda work=work: child(work)) == [0] for work in works)  # type: ignore[misc]


def _listing(folder: Path) -> dict[str, tuple[int, int, bytes | str]]:
    """Return mode, time and content of everything in a folder."""
    found: dict[str, tuple[int, int, bytes | str]] = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        content: bytes | str = b""
        if path.is_symlink():
            content = str(path.readlink())
        elif path.is_file():
            content = path.read_bytes()
        modified = 0 if path.is_dir() else int(status.st_mtime)
        found[str(path.relative_to(folder))] = (status.st_mode, modified, content)
    return found


def _write(path: Path) -> None:
    path.write_text("changed")


def _open_in_c(path: Path) -> None:
    libc = ctypes.CDLL(None)
    descriptor = libc.open(os.fsencode(path), os.O_WRONLY | os.O_TRUNC)
    assert descriptor >= 0
    assert libc.write(descriptor, b"changed", 7) == 7


def _stream_in_c(path: Path) -> None:
    libc = ctypes.CDLL(None)
    libc.fopen.restype = ctypes.c_void_p
    stream = ctypes.c_void_p(libc.fopen(os.fsencode(path), b"r+"))
    assert stream
    assert libc.fputs(b"changed", stream) >= 0
    assert libc.fclose(stream) == 0


def _map(path: Path) -> None:
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        memory[:7] = b"changed"


def _through_link(path: Path) -> None:
    (path.parent / "link").write_text("changed")


def _replace(path: Path) -> None:
    other = path.with_name("other")
    other.write_text("changed")
    other.replace(path)


def _replace_folder(path: Path) -> None:
    shutil.rmtree(path.parent / "folder")
    (path.parent / "folder").mkdir()
    assert not any((path.parent / "folder").iterdir())


_CHANGES: list[Callable[[Path], object]] = [
    _write,
    _open_in_c,
    _stream_in_c,
    _map,
    _through_link,
    _replace,
    _replace_folder,
    lambda path: os.truncate(path, 3),
    lambda path: path.chmod(0o600),
    lambda path: os.utime(path, (1, 1)),
    lambda path: path.unlink(),
    lambda path: (path.parent / "new" / "folder").mkdir(parents=True),
    lambda path: path.with_name("hard link").hardlink_to(path) or path.with_name("hard link").write_text("changed"),
]


def test_a_copy_has_the_files_of_the_project(strategy: Strategy, root: Path, user: int | None) -> None:
    expected = _listing(root / "project")

    def work() -> None:
        path = WorkingCopy(root / "project", root / "copy", strategy).enter()
        assert Path.cwd() == path
        assert path.name == "project"
        assert _listing(path) == expected
        assert stat.S_IMODE((path / "run.sh").stat().st_mode) == 0o755

    assert _run(user, work)


def test_no_change_in_a_copy_reaches_the_project_or_another_copy(
    strategy: Strategy, root: Path, user: int | None
) -> None:
    expected = _listing(root / "project")

    def work(number: int, change: Callable[[Path], object]) -> None:
        path = WorkingCopy(root / "project", root / f"copy-{number}", strategy).enter()
        assert _listing(path) == expected
        change(path / "model.bin")
        assert _listing(path) != expected

    for number, change in enumerate(_CHANGES):
        assert _run(user, lambda number=number, change=change: work(number, change)), number  # type: ignore[misc]
        assert _listing(root / "project") == expected, number


def test_a_fork_enters_a_fresh_copy(strategy: Strategy, root: Path, user: int | None) -> None:
    expected = _listing(root / "project")

    def work() -> None:
        first = WorkingCopy(root / "project", root / "copy", strategy)
        path = first.enter()
        (path / "model.bin").write_text("of the parent")

        def in_next_copy(number: int) -> None:
            first.enter_another(root / f"copy-{number}")
            first.drop_privileges()
            assert _listing(Path.cwd()) == expected
            Path("model.bin").write_text("of the fork")

        for number in (1, 2):
            assert in_forks(1, lambda number=number: in_next_copy(number)) == [0]  # type: ignore[misc]
        assert (path / "model.bin").read_text() == "of the parent"

    assert _run(user, work)
    assert _listing(root / "project") == expected


def test_a_copy_adds_no_privileges(strategy: Strategy, root: Path, user: int | None) -> None:
    def privileges() -> list[str]:
        lines = Path("/proc/self/status").read_text().splitlines()
        return [line for line in lines if line.startswith(("Cap", "Uid", "Gid", "NoNewPrivs")) and "CapBnd" not in line]

    def work() -> None:
        before = privileges()
        copy = WorkingCopy(root / "project", root / "copy", strategy)
        copy.enter()
        copy.drop_privileges()
        assert privileges() == before

    assert _run(user, work)


def test_a_copy_is_deleted_completely(strategy: Strategy, root: Path, user: int | None) -> None:
    copy = WorkingCopy(root / "project", root / "copy", strategy)

    def work() -> None:
        path = copy.enter()
        (path / "closed" / "below").mkdir(parents=True)
        (path / "closed" / "below" / "file").touch()
        (path / "closed" / "below").chmod(0o500)
        (path / "closed").chmod(0)

    assert _run(user, work, lambda: remove_tree(root / "copy"))
    assert not (root / "copy").exists()


def chosen(root: Path) -> Strategy:
    test = StrategyTest(root / "project", root / "copies")
    test.start()
    strategy = test.finish()
    if test.pid is not None:
        os.waitpid(test.pid, 0)
    return strategy


def test_the_chosen_strategy_works(root: Path, user: int | None) -> None:
    def work() -> None:
        strategy = chosen(root)
        assert WorkingCopy(root / "project", root / "copies" / "1", strategy).enter().is_dir()

    assert _run(user, work)
    assert not list((root / "project").glob(".cortex*"))


def test_the_environment_can_name_the_strategy(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STRATEGY_VARIABLE, "copy")
    assert chosen(root) is Strategy.COPY


def test_a_name_of_no_strategy_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("", "copy"):
        monkeypatch.setenv(STRATEGY_VARIABLE, name)
        assert ignored_strategy() is None
    monkeypatch.setenv(STRATEGY_VARIABLE, "hardlink")
    assert ignored_strategy() == "CORTEX_WORKING_COPIES=hardlink is ignored: it is not one of overlay, reflink, copy"


def test_a_failed_copy_names_one_file(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def clone(source: str, target: str) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(working_copy, "_clone", clone)
    (root / "project" / "other.txt").touch()
    files = [path for path in (root / "project").rglob("*") if path.is_file() and not path.is_symlink()]
    with pytest.raises(UserError, match="Operation not supported, and [0-9]+ other files too$") as caught:
        WorkingCopy(root / "project", root / "copies" / "1", Strategy.REFLINK).enter()
    assert f"and {len(files) - 1} other" in str(caught.value)
    assert sum(str(path) in str(caught.value) for path in files) == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="requires root, to create the files of another user")
def test_an_ordinary_user_has_no_overlay_of_the_files_of_others(root: Path) -> None:
    os.chown(root / "project", 0, 0)
    (root / "project").chmod(0o755)

    def work() -> None:
        (root / "copies").mkdir(exist_ok=True)
        assert chosen(root) is not Strategy.OVERLAY

    root.chmod(0o777)
    assert _run(_NOBODY, work)


def test_paths_in_the_project_become_paths_in_the_copy() -> None:
    spec = replica_spec(project_dir="/home/projects/1", model_path="/home/projects/1/m/1")
    moved = with_paths(spec, Path("/run/copies/2/1"))
    assert (moved.project_dir, moved.model_path) == ("/run/copies/2/1", "/run/copies/2/1/m/1")
