from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.errors import ConfigError, InputError
from cortex.projects import project as project_module
from cortex.projects.archive import archive_hash, unpack
from cortex.projects.project import ProjectFiles, content_hash, pack


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    return folder


def write(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"content of {name}")


def files(root: Path, config_name: str = "cortex.yaml") -> list[str]:
    return list(ProjectFiles.scan(root, config_name).files)


def problems(root: Path) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        ProjectFiles.scan(root, "cortex.yaml")
    return [str(item) for item in caught.value.diagnostics]


@pytest.mark.parametrize(
    ("name", "is_included"),
    [
        ("handler.py", True),
        ("a/b/c.txt", True),
        ("requirements.txt", True),
        ("cortex.yaml", False),
        ("sub/cortex.yaml", True),
        ("other.yaml", True),
        ("sub/other.yaml", True),
        (".hidden", False),
        (".git/config", False),
        ("sub/.hidden/x", False),
        (".env", True),
        ("sub/.env", False),
        (".env.local", False),
        (".cortexignore", False),
        ("x.pyc", False),
        ("x.pyo", False),
        ("sub/x.pyd", False),
        ("x.pyx", True),
        ("__pycache__/x.txt", False),
        ("sub/__pycache__/x.py", False),
        ("cortex-debug-20260101/x", False),
        ("cortex-debug-x.zip", False),
        ("cortex-debug", True),
        ("with space/ünï 日本.txt", True),
    ],
)
def test_lists_the_files_of_a_project(root: Path, name: str, is_included: bool) -> None:
    write(root, name)
    if name == ".cortexignore":
        (root / name).write_text("")
    assert files(root) == ([name] if is_included else [])


def test_excludes_the_configuration_file_under_any_name(root: Path) -> None:
    write(root, "apis.yaml", "sub/apis.yaml", "cortex.yaml")
    assert files(root, "apis.yaml") == ["cortex.yaml", "sub/apis.yaml"]
    assert files(root, "cortex.yaml") == ["apis.yaml", "sub/apis.yaml"]


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        ("*.csv", ["data/keep.txt", "data/sub/z.txt", "main.py"]),
        ("data/", ["a.csv", "main.py"]),
        ("/data/*\n!/data/keep.txt\n", ["a.csv", "data/keep.txt", "main.py"]),
        ("# data/\n\n", ["a.csv", "data/b.csv", "data/keep.txt", "data/sub/z.txt", "main.py"]),
        ("data/**/z.txt", ["a.csv", "data/b.csv", "data/keep.txt", "main.py"]),
        ("data/\n!data/keep.txt", ["a.csv", "main.py"]),
        ("*\n!main.py", ["main.py"]),
        ("!.hidden\n!x.pyc", ["a.csv", "data/b.csv", "data/keep.txt", "data/sub/z.txt", "main.py"]),
    ],
)
def test_the_ignore_file_uses_gitignore_syntax(root: Path, patterns: str, expected: list[str]) -> None:
    write(root, "a.csv", "main.py", "data/b.csv", "data/keep.txt", "data/sub/z.txt", ".hidden", "x.pyc")
    (root / ".cortexignore").write_text(patterns)
    assert files(root) == expected


def test_only_the_ignore_file_at_the_root_counts(root: Path) -> None:
    write(root, "sub/a.csv")
    (root / "sub" / ".cortexignore").write_text("*.csv")
    assert files(root) == ["sub/a.csv"]


def test_includes_dotenv_even_if_it_is_ignored(root: Path) -> None:
    write(root, ".env", "x")
    (root / ".cortexignore").write_text("*\n.env\n")
    assert files(root) == [".env"]


def test_excludes_a_folder_named_dot_env(root: Path) -> None:
    write(root, ".env/bin/python", "x")
    assert files(root) == ["x"]


def test_reports_a_bad_pattern_with_its_line(root: Path) -> None:
    (root / ".cortexignore").write_text("*.csv\n!\n")
    assert problems(root) == [".cortexignore:2:1: '!' matches no file: the pattern is empty"]


def test_rejects_the_home_folder_and_the_root_as_projects(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(root))
    (tmp_path / "link").symlink_to(root)
    for folder, words in [(root, "home folder"), (tmp_path / "link", "home folder"), (Path("/"), "file system")]:
        with pytest.raises(InputError, match=words):
            ProjectFiles.scan(folder, "cortex.yaml")
    with pytest.raises(InputError, match="not a folder"):
        ProjectFiles.scan(root / "none", "cortex.yaml")


def test_links_inside_the_project_are_followed(root: Path, tmp_path: Path) -> None:
    write(root, "data/a.txt")
    (root / "link.txt").symlink_to("data/a.txt")
    (root / "folder").symlink_to(root / "data")
    project = ProjectFiles.scan(root, "cortex.yaml")
    assert project.files == ("data/a.txt", "folder/a.txt", "link.txt")
    unpack(pack(project), tmp_path / "out")
    assert (tmp_path / "out/link.txt").read_text() == "content of data/a.txt"
    assert not (tmp_path / "out/link.txt").is_symlink()


def test_rejects_external_circular_and_broken_links(root: Path, tmp_path: Path) -> None:
    write(tmp_path, "outside/secret")
    (root / "a").symlink_to("/etc/passwd")
    (root / "b").symlink_to("../outside")
    (root / "c").symlink_to("nowhere")
    (root / "sub").mkdir()
    (root / "sub/d").symlink_to("..")
    (root / "e").symlink_to("e")
    (root / ".env").symlink_to(tmp_path / "outside/secret")
    leaves, nowhere = "is a link that leaves the project folder", "is a link to a file that does not exist"
    for problem, start in zip(
        problems(root),
        [
            f".env: {leaves}",
            f"a: {leaves}",
            f"b: {leaves}",
            f"c: {nowhere}",
            f"e: {nowhere}",
            "sub/d: is a link to one of its parent f",
        ],
        strict=True,
    ):
        assert problem.startswith(start)


def test_links_that_are_ignored_do_not_matter(root: Path) -> None:
    (root / "a").symlink_to("/etc/passwd")
    (root / ".b").symlink_to("/etc")
    (root / ".cortexignore").write_text("a\n")
    assert files(root) == []


def test_rejects_special_files(root: Path) -> None:
    os.mkfifo(root / "fifo")
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(root / "sock"))
        assert [problem.partition(" (")[0] for problem in problems(root)] == [
            "fifo: is neither a file nor a folder",
            "sock: is neither a file nor a folder",
        ]


@pytest.mark.skipif(os.getuid() == 0, reason="root may read everything")
def test_reports_unreadable_files_and_folders(root: Path) -> None:
    write(root, "a", "b/c")
    (root / "a").chmod(0)
    (root / "b").chmod(0)
    assert [problem.partition(" (")[0] for problem in problems(root)] == [
        "a: can't be read: Permission denied",
        "b: can't be read: Permission denied",
    ]
    (root / "b").chmod(0o700)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (b"new\nline", "new�line: has a control character in its name (rename or move it)"),
        (b"caf\xe9.txt", "caf�.txt: has a name that is not UTF-8 (rename or move it)"),
        (b"back\\slash", "back\\slash: has a backslash in its name (rename or move it)"),
    ],
)
def test_rejects_invalid_names(root: Path, name: bytes, message: str) -> None:
    (root / os.fsdecode(name)).write_text("x")
    assert problems(root) == [message]


def test_rejects_folders_that_are_nested_too_deeply(root: Path) -> None:
    write(root, "d/" * 100 + "a", "cortex.yaml")
    unpack(pack(ProjectFiles.scan(root, "cortex.yaml")), root.parent / "copy")
    assert (root.parent / "copy" / ("d/" * 100 + "a")).exists()
    write(root, "d/" * 500 + "a")
    (problem,) = problems(root)
    assert problem.endswith("d: is in more than 100 nested folders (rename or move it)")


def test_rejects_large_projects_early_and_names_the_largest_part(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(root, "a.py", "z.py")
    (root / "weights").mkdir()
    with (root / "weights/big.bin").open("wb") as file:
        file.truncate(600 * 1024 * 1024)
    with pytest.raises(InputError, match="more than 512 MiB; most of it is in weights"):
        ProjectFiles.scan(root, "cortex.yaml")
    (root / ".cortexignore").write_text("weights/")
    assert files(root) == ["a.py", "z.py"]
    monkeypatch.setattr(project_module, "MAX_PROJECT_FILES", 1)
    with pytest.raises(InputError, match=r"files; most of them are in a\.py; list what is not needed in"):
        ProjectFiles.scan(root, "cortex.yaml")


def test_contains_and_has_folder_find_files_and_folders(root: Path) -> None:
    write(root, "main.py", "src/app/x.py", "src-old/y.py")
    project = ProjectFiles.scan(root, "cortex.yaml")
    assert [project.contains(path) for path in ("main.py", "./main.py", "src/app/x.py", "src/app/../app/x.py")] == [
        True
    ] * 4
    assert not any(project.contains(path) for path in ("src", "none.py", "../project/main.py", "/main.py", "", "."))
    assert all(project.has_folder(path) for path in ("src", "src/", "src/app", "./src", "."))
    assert not any(project.has_folder(path) for path in ("main.py", "sr", "..", "/", "none"))


def test_equal_projects_have_equal_archives_and_hashes(tmp_path: Path) -> None:
    projects = []
    for number, folder in enumerate(("one", "two")):
        write(tmp_path / folder, *(["b", "a/x"] if number else ["a/x", "b"]))
        os.utime(tmp_path / folder / "b", (number, number))
        (tmp_path / folder / "b").chmod(0o644 if number else 0o600)
        projects.append(ProjectFiles.scan(tmp_path / folder, "cortex.yaml"))
    one, two = projects
    assert pack(one) == pack(two)
    assert content_hash(one) == content_hash(two) == archive_hash(pack(one))


@pytest.mark.parametrize("change", ["content", "name", "mode", "split"])
def test_any_difference_changes_the_hash(root: Path, change: str) -> None:
    write(root, "a", "b")
    before = content_hash(ProjectFiles.scan(root, "cortex.yaml"))
    if change == "content":
        (root / "a").write_text("other")
    elif change == "name":
        (root / "a").rename(root / "c")
    elif change == "mode":
        (root / "a").chmod(0o755)
    else:
        (root / "a").rename(root / "t")
        (root / "b").rename(root / "a")
        (root / "t").rename(root / "b")
    assert content_hash(ProjectFiles.scan(root, "cortex.yaml")) != before


def test_reports_a_file_that_was_removed_after_the_scan(root: Path) -> None:
    write(root, "a")
    project = ProjectFiles.scan(root, "cortex.yaml")
    (root / "a").unlink()
    for action in (pack, content_hash):
        with pytest.raises(InputError, match="a: can't be read: No such file"):
            action(project)


names = st.text(
    st.characters(exclude_categories=("Cs", "Cc"), exclude_characters="/\\"), min_size=1, max_size=12
).filter(lambda name: name not in (".", "..", "cortex.yaml"))


@given(
    st.dictionaries(
        st.lists(names, min_size=1, max_size=3).map("/".join), st.tuples(st.binary(max_size=300), st.booleans())
    )
)
def test_unpacking_an_archive_restores_the_project(
    tmp_path_factory: pytest.TempPathFactory, contents: dict[str, tuple[bytes, bool]]
) -> None:
    folder = tmp_path_factory.mktemp("projects")
    (folder / "in").mkdir()
    for name, (data, executable) in contents.items():
        path = folder / "in" / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        except (FileExistsError, IsADirectoryError, NotADirectoryError):
            continue
        path.chmod(0o755 if executable else 0o644)
    project = ProjectFiles.scan(folder / "in", "cortex.yaml")
    data = pack(project)
    unpack(data, folder / "out")
    again = ProjectFiles.scan(folder / "out", "cortex.yaml")
    assert again.files == project.files
    for name in project.files:
        assert (folder / "out" / name).read_bytes() == (folder / "in" / name).read_bytes()
        assert os.access(folder / "out" / name, os.X_OK) == bool((folder / "in" / name).stat().st_mode & 0o100)
    assert content_hash(again) == content_hash(project) == archive_hash(data)
    assert pack(again) == data
