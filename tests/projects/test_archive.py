from __future__ import annotations

import contextlib
import io
import os
import random
import stat
import struct
import threading
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cortex.errors import InputError
from cortex.projects import archive as archive_module
from cortex.projects.archive import archive_hash, unpack


def packed(*entries: tuple[str, bytes] | tuple[str, bytes, int], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # duplicate names
        for name, data, *mode in entries:
            info = zipfile.ZipInfo(name)
            info.filename = name  # the constructor would change it
            info.external_attr = (mode[0] if mode else stat.S_IFREG | 0o644) << 16
            info.compress_type = method
            file.writestr(info, data)
    return buffer.getvalue()


def patched(data: bytes, old: bytes, new: bytes) -> bytes:
    assert old in data and len(old) == len(new)
    return data.replace(old, new)


def directory_field(data: bytes, offset: int, form: str, value: int) -> bytes:
    """Change a field of the first entry in the central directory."""
    start = data.index(b"PK\1\2") + offset
    return data[:start] + struct.pack(form, value) + data[start + struct.calcsize(form) :]


BOMB = packed(("zeros", b"\0" * 5_000_000))
HOSTILE: list[tuple[str, bytes, str]] = [
    ("absolute", packed(("/etc/passwd", b"x")), "not a plain relative path"),
    ("parent", packed(("../x", b"x")), "not a plain relative path"),
    ("parent inside", packed(("a/../../x", b"x")), "not a plain relative path"),
    ("dot", packed(("a/./x", b"x")), "not a plain relative path"),
    ("empty part", packed(("a//x", b"x")), "not a plain relative path"),
    ("backslashes", packed(("..\\x", b"x")), "backslash"),
    ("newline", packed(("a\nb", b"x")), "control character"),
    ("nul", patched(packed(("a_b", b"x")), b"a_b", b"a\0b"), "control character"),
    ("long part", packed(("x" * 300, b"x")), "too long"),
    ("long path", packed(("/".join(["x" * 200] * 6), b"x")), "too long"),
    ("link", packed(("link", b"/etc/passwd", stat.S_IFLNK | 0o777)), "link or a special file"),
    ("device", packed(("dev", b"", stat.S_IFCHR | 0o666)), "link or a special file"),
    ("fifo", packed(("fifo", b"", stat.S_IFIFO | 0o666)), "link or a special file"),
    ("twice", packed(("a", b"1"), ("a", b"2")), "twice"),
    ("file and folder", packed(("a", b"1"), ("a/b", b"2")), "both a file and a folder"),
    ("file and deep folder", packed(("a/b/c/d", b"1"), ("a/b", b"2")), "both a file and a folder"),
    ("folder outside", packed(("../dir/", b"", stat.S_IFDIR | 0o755)), "not a plain relative path"),
    ("folder with content", packed(("dir/", b"x", stat.S_IFREG | 0o755)), "not a plain relative path"),
    ("deep", packed(("d/" * 500 + "a", b"1")), "is in more than 100 nested folders"),
    ("deep folder", packed(("d/" * 500, b"", stat.S_IFDIR | 0o755)), "in the project's archive is"),
    ("other method", packed(("a", b"x" * 99), method=zipfile.ZIP_BZIP2), "unsupported compression method"),
    ("encrypted", directory_field(packed(("a", b"x")), 8, "<H", 1), "encrypted"),
    ("ratio", directory_field(packed(("a", b"x" * 99)), 24, "<L", 300_000_000), "impossible compression ratio"),
    ("declared size", directory_field(packed(("a", b"x" * 99)), 24, "<L", 600_000_000), "more than 512 MiB"),
    ("overlap", directory_field(packed(("a", b"x" * 99)), 20, "<L", 4000), "overlapping"),
    ("bad sum", directory_field(packed(("a", b"x" * 99)), 16, "<L", 1), "damaged"),
    ("not a zip", b"hello", "not a plain zip"),
    ("empty", b"", "not a plain zip"),
    ("comment", packed(("a", b"x"))[:-2] + b"\2\0hi", "not a plain zip"),
    ("cut off", packed(("a", b"x"))[20:], "is truncated"),
    ("huge directory", packed(("a", b"x"))[:-10] + struct.pack("<L", 1 << 30) + packed(("a", b"x"))[-6:], "more than"),
]


@pytest.mark.parametrize(("data", "message"), [case[1:] for case in HOSTILE], ids=[case[0] for case in HOSTILE])
@pytest.mark.parametrize("door", [lambda data, folder: unpack(data, folder), lambda data, folder: archive_hash(data)])
def test_rejects_a_malicious_archive_and_leaves_no_files(
    tmp_path: Path, data: bytes, message: str, door: Callable[[bytes, Path], None]
) -> None:
    inside = tmp_path / "projects" / "x"
    with pytest.raises(InputError, match=message):
        door(data, inside)
    assert [path for path in tmp_path.rglob("*") if path != inside.parent] == []


def test_rejects_an_archive_with_false_sizes(tmp_path: Path) -> None:
    small = directory_field(BOMB, 24, "<L", 10)
    with pytest.raises(InputError, match="damaged"):
        unpack(small, tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


def test_accepts_highly_compressible_files(tmp_path: Path) -> None:
    unpack(BOMB, tmp_path / "x")
    assert (tmp_path / "x/zeros").stat().st_size == 5_000_000


def test_rejects_too_many_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive_module, "MAX_PROJECT_FILES", 3)
    with pytest.raises(InputError, match="more than 3 files"):
        unpack(packed(*((str(number), b"") for number in range(4))), tmp_path / "x")


def test_accepts_archives_of_other_programs(tmp_path: Path) -> None:
    data = packed(("dir/", b"", stat.S_IFDIR | 0o755), ("dir/run.sh", b"hi", stat.S_IFREG | 0o700), ("b", b"", 0))
    unpack(data, tmp_path / "new" / "x")
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == [
        "new",
        "new/x",
        "new/x/b",
        "new/x/dir",
        "new/x/dir/run.sh",
    ]
    assert os.access(tmp_path / "new/x/dir/run.sh", os.X_OK) and not os.access(tmp_path / "new/x/b", os.X_OK)


def test_only_execute_permissions_are_restored(tmp_path: Path) -> None:
    unpack(packed(("a", b"x", stat.S_IFREG | 0o6777)), tmp_path / "x")
    assert (tmp_path / "x/a").stat().st_mode & 0o7022 == 0


def test_an_existing_folder_is_left_unchanged(tmp_path: Path) -> None:
    unpack(packed(("a", b"one")), tmp_path / "x")
    unpack(packed(("a", b"two")), tmp_path / "x")
    assert (tmp_path / "x/a").read_bytes() == b"one"
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_concurrent_unpacking_of_the_same_archive_succeeds(tmp_path: Path) -> None:
    data = packed(*((f"{number}.txt", random.Random(number).randbytes(2000)) for number in range(50)))
    failures: list[BaseException] = []

    def work() -> None:
        try:
            unpack(data, tmp_path / "x")
            assert len(list((tmp_path / "x").iterdir())) == 50
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


@settings(max_examples=2 * settings().max_examples)
@given(name=st.text(st.sampled_from("./\\a\0é:~ "), min_size=1, max_size=8), directory=st.booleans())
def test_no_name_escapes_the_destination(tmp_path_factory: pytest.TempPathFactory, name: str, directory: bool) -> None:
    folder = tmp_path_factory.mktemp("door")
    suffix = "/" if directory else ""
    with contextlib.suppress(InputError):
        unpack(packed((name + suffix, b"x")), folder / "in" / "x")
    written = [path for path in folder.rglob("*") if path.is_file()]
    assert all(path.is_relative_to(folder / "in" / "x") for path in written)


@settings(max_examples=3 * settings().max_examples)
@given(data=st.data())
def test_damaged_archives_are_rejected_or_unpacked_without_a_crash(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    good = bytearray(packed(("a/b.txt", b"hello " * 20), ("c", b"")))
    for _ in range(data.draw(st.integers(1, 4))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    folder = tmp_path_factory.mktemp("door")
    try:
        unpack(bytes(good), folder / "in" / "x")
    except InputError:
        assert [path for path in folder.rglob("*") if path.is_file()] == []
    assert all(path.is_relative_to(folder / "in") for path in folder.rglob("*"))
