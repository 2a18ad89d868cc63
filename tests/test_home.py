from __future__ import annotations

import contextlib
import grp
import os
import pwd
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cortex.errors import EngineError, InputError
from cortex.gateway.addresses import is_path
from cortex.home import Home


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Home]:
    """A home whose path is too long for sockets inside it."""
    shared = tmp_path / "tmp"
    shared.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(shared))
    home = Home(tmp_path / ("long" * 20))
    assert home.sockets_dir.parent == shared
    yield home
    shutil.rmtree(home.metrics_dir, ignore_errors=True)


def test_sockets_outside_the_home_are_in_a_private_folder(home: Home) -> None:
    home.create()
    home.create()
    assert stat.S_IMODE(home.sockets_dir.stat().st_mode) == 0o700


def test_makes_an_accessible_socket_folder_private(home: Home) -> None:
    home.sockets_dir.mkdir()
    home.sockets_dir.chmod(0o777)
    home.create()
    assert stat.S_IMODE(home.sockets_dir.stat().st_mode) == 0o700


def test_rejects_a_socket_folder_of_another_user(home: Home, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    home.sockets_dir.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(EngineError, match="not a folder that you own"):
        home.create()


@pytest.mark.parametrize("below", ["", "below", "far/below"])
def test_rejects_a_home_that_is_a_file_or_below_one(tmp_path: Path, below: str) -> None:
    file = tmp_path / "file"
    file.touch()
    wrong = Home(file / below)
    for use in (wrong.check, wrong.prepare):
        with pytest.raises(InputError, match=rf"^CORTEX_HOME={wrong.path} can't be used: {file} is not a folder; "):
            use()


def test_rejects_a_home_that_cannot_be_created() -> None:
    nowhere = Home(Path("/proc/cortex/home"))
    nowhere.check()
    with pytest.raises(InputError, match=r"^CORTEX_HOME=/proc/cortex/home can't be used: /proc/cortex: no such file"):
        nowhere.prepare()


def test_rejects_a_home_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cortex.home.SHARED_MEMORY", tmp_path)
    home = Home(tmp_path / "home")
    home.prepare()
    monkeypatch.setattr("os.access", lambda path, mode: path != home.path)
    with pytest.raises(InputError, match=f"{home.path}: it can't be written; set it to a folder that you can write"):
        home.prepare()


@pytest.mark.parametrize("mode", [0o777, 0o702, 0o2777])
def test_rejects_a_home_that_other_users_can_write(tmp_path: Path, mode: int, monkeypatch: pytest.MonkeyPatch) -> None:
    home = Home(tmp_path / "home")
    home.create()
    home.path.chmod(mode)
    for use in (home.check, home.prepare):
        with pytest.raises(
            InputError, match=f"{home.path} can't be used: other users can write into it; look for files"
        ):
            use()
    monkeypatch.setenv("CORTEX_TRUST_HOME", "1")
    home.prepare()


def test_accepts_a_home_of_the_private_group_of_its_owner(tmp_path: Path) -> None:
    user = pwd.getpwuid(os.geteuid())
    if grp.getgrgid(user.pw_gid).gr_name != user.pw_name:
        pytest.skip("this user has no private group")
    home = Home(tmp_path / "home")
    home.create()
    os.chown(home.path, -1, user.pw_gid)
    home.path.chmod(0o775)
    home.prepare()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_rejects_a_home_of_another_user_or_with_files_of_another_user(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.create()
    home.path.chmod(0o1777)
    home.prepare()  # nobody can replace a file of somebody else in it
    home.token_file.write_text("planted")
    os.chown(home.token_file, 65533, -1)
    with pytest.raises(InputError, match=r"token in it belongs to the user 65533; set it to a folder of your own"):
        home.check()
    os.chown(home.path, 65533, -1)
    home.path.chmod(0o700)
    link = tmp_path / "link"
    link.symlink_to(home.path)
    for foreign in (home, Home(link)):
        with pytest.raises(InputError, match="can't be used: it belongs to the user 65533; set it to a folder of your"):
            foreign.prepare()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize(
    ("owner", "group", "mode", "is_accepted"),
    [
        (0, 0, 0o775, True),  # OpenShift: a user without a name in the group root
        (0, 64_001, 0o2775, True),  # Kubernetes' fsGroup
        (0, 64_002, 0o2775, False),  # a group that this process is not in
        (0, 0, 0o777, False),
        (64_003, 0, 0o775, False),
    ],
)
def test_accepts_a_volume_of_root_that_only_a_group_of_the_container_can_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: int, group: int, mode: int, is_accepted: bool
) -> None:
    home = Home(tmp_path / "home")
    home.create()
    home.token_file.touch(0o660)
    for path in (home.token_file, home.run_dir, home.path):
        os.chown(path, owner, group)
        path.chmod(mode if path == home.path else 0o660 | mode & 0o2000)
    monkeypatch.setattr("os.geteuid", lambda: 64_000)
    monkeypatch.setattr("os.getgroups", lambda: [64_001])
    with contextlib.nullcontext() if is_accepted else pytest.raises(InputError):
        home.check()


@pytest.mark.parametrize(
    ("name", "mode", "problem"),
    [
        ("run", 0o777, "other users can change run in it"),
        ("projects", 0o702, "other users can change projects in it"),
        ("state.db", 0o666, "other users can change state.db in it"),
        ("token", 0o604, "other users can read token in it"),
        ("state.db", 0o644, ""),
    ],
)
def test_rejects_what_others_could_change_in_a_home_that_they_can_enter(
    tmp_path: Path, name: str, mode: int, problem: str
) -> None:
    home = Home(tmp_path / "home")
    home.create()
    path = home.path / name
    if not path.exists():
        path.touch()
    path.chmod(mode)
    home.check()  # nobody else can enter it
    home.path.chmod(0o755)
    with pytest.raises(InputError, match=problem) if problem else contextlib.nullcontext():
        home.check()


@pytest.mark.parametrize("kind", ["link", "file", "foreign"])
def test_metrics_are_in_the_home_if_somebody_else_has_their_folder_in_shared_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr("cortex.home.SHARED_MEMORY", tmp_path)
    home = Home(tmp_path / "home")
    taken = home.metrics_dir
    assert taken.parent == tmp_path
    if kind == "link":
        (tmp_path / "theirs").mkdir()
        taken.symlink_to(tmp_path / "theirs")
    elif kind == "file":
        taken.touch()
    elif os.geteuid() == 0:
        taken.mkdir()
        os.chown(taken, 65533, -1)
    else:
        pytest.skip("only root can give files away")
    home.prepare()
    assert home.metrics_dir == home.run_dir / "metrics"
    assert home.metrics_dir.is_dir()


UNUSUAL_NAMES = ["it's", 'a"b', "a\\b", "a,b", "a#b", "a;b", "a\nb", "日本" * 20, os.fsdecode(b"\xff" * 80)]


@pytest.mark.parametrize("name", UNUSUAL_NAMES)
def test_sockets_of_a_home_whose_name_haproxy_can_not_have_are_in_a_temporary_folder(name: str) -> None:
    sockets = Home(Path("/home") / name).sockets_dir
    assert sockets.parent == Path(tempfile.gettempdir())
    assert is_path(str(sockets / "gateway.sock"))


def test_sockets_are_in_the_home_if_its_name_is_plain_and_short() -> None:
    assert Home(Path("/home/J. Müller")).sockets_dir == Path("/home/J. Müller/run/s")
