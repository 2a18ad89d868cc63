from __future__ import annotations

import stat
import tempfile
from pathlib import Path

import pytest

from cortex.errors import EngineError
from cortex.home import Home


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    """A home whose path is too long for sockets inside it."""
    shared = tmp_path / "tmp"
    shared.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(shared))
    home = Home(tmp_path / ("long" * 20))
    assert home.sockets_dir.parent == shared
    return home


def test_sockets_outside_the_home_are_in_a_private_folder(home: Home) -> None:
    home.create()
    home.create()
    assert stat.S_IMODE(home.sockets_dir.stat().st_mode) == 0o700


def test_a_folder_for_sockets_that_others_may_enter_is_closed_to_them(home: Home) -> None:
    home.sockets_dir.mkdir()
    home.sockets_dir.chmod(0o777)
    home.create()
    assert stat.S_IMODE(home.sockets_dir.stat().st_mode) == 0o700


def test_a_folder_for_sockets_that_somebody_planted_is_refused(home: Home, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    home.sockets_dir.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(EngineError, match="not a folder of yours"):
        home.create()
