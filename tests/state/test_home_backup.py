from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import stat
import threading
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import Connection, Select, delete, insert, select, update

from cortex.errors import ConflictError, CortexError, InputError, NotFoundError
from cortex.home import Home
from cortex.installation import Installation
from cortex.state.database import JOB_MIGRATIONS, MIGRATIONS, open_jobs_sqlite, open_sqlite
from cortex.state.home_backup import restore_backup, write_backup
from cortex.state.tables import facts, job_inputs, jobs, schema_version, serving_revisions
from harness.wait import wait_until

pytestmark = pytest.mark.usefixtures("real_databases")

HASH = "a" * 64


def new_home(folder: Path) -> Home:
    home = Home(folder)
    for path in (home.projects_dir, home.models_dir):
        path.mkdir(parents=True)
    return home


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """A home with everything in it."""
    home = new_home(tmp_path / "home")
    open_sqlite(home.database_file).dispose()
    open_jobs_sqlite(home.jobs_database_file).dispose()
    Installation(gateway_port=9999).write(home)
    for name, text in {
        "token": "secret",
        "cli.json": "{}",
        f"projects/{HASH}/code/run.sh": "exit",
        f"projects/{HASH}/cortex.yaml": "[]",
        "projects/.tmp-1/x": "",
        "predictions/iris/1": "5",
        "recordings/iris/1.jsonl": "{}",
        "models/abc/weights": "1 2 3",
        "logs/operator.log": "",
        "environments/abc/pip": "",
        "run/operator.json": "{}",
    }.items():
        file = home.path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (home.projects_dir / HASH / "code/run.sh").chmod(0o755)
    (home.projects_dir / HASH / "link").symlink_to("/etc/passwd")
    return home


@pytest.fixture
def backup(home: Home, tmp_path: Path) -> Path:
    write_backup(home, tmp_path / "backup.zip", "1.2.3")
    return tmp_path / "backup.zip"


def files_of(home: Home) -> list[str]:
    return sorted(str(path.relative_to(home.path)) for path in home.path.rglob("*") if not path.is_dir())


NEEDED = [
    "cli.json",
    "installation.json",
    "jobs.db",
    "predictions/iris/1",
    f"projects/{HASH}/code/run.sh",
    f"projects/{HASH}/cortex.yaml",
    "state.db",
    "token",
]


def test_what_is_needed_is_restored_while_the_databases_are_written(home: Home, tmp_path: Path) -> None:
    engine = open_sqlite(home.database_file)
    with engine.begin() as connection:
        connection.execute(insert(facts).values(name="color", value="red"))
    with engine.begin() as connection:
        connection.execute(insert(facts).values(name="later", value=""))
        write_backup(home, tmp_path / "backup.zip", "1.2.3")
    engine.dispose()
    backup = tmp_path / "backup.zip"
    assert stat.S_IMODE(backup.stat().st_mode) == 0o600
    assert json.loads(zipfile.ZipFile(backup).read("manifest.json"))["version"] == "1.2.3"
    other = new_home(tmp_path / "other")
    restore_backup(backup, other)
    assert files_of(other) == NEEDED
    other.check()
    assert Installation.read(other).gateway_port == 9999
    assert os.access(other.projects_dir / HASH / "code/run.sh", os.X_OK)
    assert stat.S_IMODE(other.token_file.stat().st_mode) == 0o600
    restored = open_sqlite(other.database_file)
    with restored.connect() as connection:
        assert connection.execute(select(facts.c.name)).scalars().all() == ["color"]
    restored.dispose()


def test_recordings_and_models_are_included_on_request(home: Home, tmp_path: Path) -> None:
    write_backup(home, tmp_path / "backup.zip", "1.2.3", ["recordings", "models"])
    other = new_home(tmp_path / "other")
    restore_backup(tmp_path / "backup.zip", other)
    assert files_of(other) == sorted([*NEEDED, "recordings/iris/1.jsonl", "models/abc/weights"])


def test_with_postgresql_the_file_has_no_databases(home: Home, tmp_path: Path) -> None:
    Installation(database="postgresql://cortex@db/cortex").write(home)
    write_backup(home, tmp_path / "backup.zip", "1.2.3")
    other = new_home(tmp_path / "other")
    restore_backup(tmp_path / "backup.zip", other)
    assert files_of(other) == [name for name in NEEDED if not name.endswith(".db")]


def run_revision(connection: Connection, project: str) -> None:
    connection.execute(delete(serving_revisions))
    row = {"api": "iris", "revision": "", "spec": "", "project_hash": project}
    connection.execute(insert(serving_revisions).values(row))


def run_job(connection: Connection, project: str) -> None:
    """Store a job, after the end of the one before."""
    connection.execute(update(jobs).values(ended_at=5.0))
    row = {"id": project, "api": "sums", "presence": "here", "status": "running", "created_at": 1.0}
    stored = connection.execute(insert(jobs).values(row | {"max_attempts": 1, "isolate_failures": False}))
    origin = json.dumps({"project_hash": project})
    row = {"number": stored.inserted_primary_key[0], "origin": origin, "options": "{}", "source": "{}"}
    connection.execute(insert(job_inputs).values(row))


@pytest.mark.parametrize(
    ("file", "run", "needed"),
    [
        ("state.db", run_revision, select(serving_revisions.c.project_hash)),
        ("jobs.db", run_job, select(jobs.c.id).where(jobs.c.ended_at.is_(None))),
    ],
)
def test_a_project_that_is_deleted_after_the_databases_were_copied_is_not_needed(
    home: Home, tmp_path: Path, file: str, run: Callable[[Connection, str], None], needed: Select[tuple[str]]
) -> None:
    engine = open_sqlite(home.path / file, MIGRATIONS if file == "state.db" else JOB_MIGRATIONS, pragmas=())

    def deploy(name: str) -> None:
        (home.projects_dir / name).mkdir()
        (home.projects_dir / name / "cortex.yaml").write_text(name)
        with engine.begin() as connection:
            run(connection, name)

    def replace() -> None:
        wait_until(lambda: list(tmp_path.glob(".cortex-backup-*/databases-0")))
        deploy("new")
        shutil.rmtree((home.projects_dir / "old").rename(home.projects_dir / ".tmp-old"))

    deploy("old")
    for number in range(1000):  # added before the others: the replacement comes meanwhile
        (home.projects_dir / HASH / f"{number}.txt").touch()
    with ThreadPoolExecutor() as pool:
        replaced = pool.submit(replace)
        write_backup(home, tmp_path / "backup.zip", "1.2.3")
        replaced.result()
    engine.dispose()
    other = new_home(tmp_path / "other")
    restore_backup(tmp_path / "backup.zip", other)
    with closing(sqlite3.connect(other.path / file)) as restored:
        (name,) = restored.execute(str(needed)).fetchone()
    assert (other.projects_dir / name / "cortex.yaml").read_text() == name


def test_a_project_that_was_missing_before_does_not_prevent_a_backup(home: Home, tmp_path: Path) -> None:
    engine = open_sqlite(home.database_file, pragmas=())
    with engine.begin() as connection:
        row = {"api": "iris", "revision": "", "spec": "", "project_hash": "gone"}
        connection.execute(insert(serving_revisions).values(row))
    engine.dispose()
    write_backup(home, tmp_path / "backup.zip", "1.2.3")
    restore_backup(tmp_path / "backup.zip", new_home(tmp_path / "other"))


def test_a_backup_that_fails_leaves_nothing(home: Home, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "there").write_text("mine")
    with pytest.raises(ConflictError, match="there exists; choose another name"):
        write_backup(home, folder / "there", "1.2.3")
    with pytest.raises(CortexError, match="No such file or directory"):
        write_backup(home, folder / "missing/file", "1.2.3")
    with pytest.raises(NotFoundError, match="has no installation to back up"):
        write_backup(new_home(tmp_path / "empty"), folder / "file", "1.2.3")
    size = home.database_file.stat().st_size
    with home.database_file.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * (size - 4096))
    with pytest.raises(CortexError, match=r"state\.db is damaged"):
        write_backup(home, folder / "file", "1.2.3")
    assert [path.name for path in folder.iterdir()] == ["there"]


def test_a_truncated_or_changed_file_restores_nothing(backup: Path, tmp_path: Path) -> None:
    data = backup.read_bytes()
    other = new_home(tmp_path / "other")
    bad = tmp_path / "bad.zip"
    variants = [data[: len(data) * part // 10] for part in range(10)] + [data[:-1]]
    with zipfile.ZipFile(backup) as archive:
        extra_bytes = 20  # of the header, for sizes of 64 bits
        variants += [
            data[:place] + bytes([data[place] ^ 0x40]) + data[place + 1 :]
            for entry in archive.infolist()
            if entry.compress_size > 40  # in a short one, the bit may be a filler
            for place in (entry.header_offset + 30 + len(entry.filename) + extra_bytes + entry.compress_size // 2,)
        ]
    for number, variant in enumerate(variants):
        bad.write_bytes(variant)
        with pytest.raises(InputError, match="is not a complete backup"):
            restore_backup(bad, other)
            pytest.fail(f"variant {number} was restored")
        assert files_of(other) == [], number
    restore_backup(backup, other)


def rewritten(backup: Path, change: Callable[[dict[str, bytes], dict[str, object]], None]) -> Path:
    """Return another file with changed entries, whose manifest may be changed too."""
    with zipfile.ZipFile(backup) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    manifest = json.loads(entries.pop("manifest.json"))
    change(entries, manifest)
    target = backup.with_name("rewritten.zip")
    with zipfile.ZipFile(target, "w") as archive:
        for name, content in (entries | {"manifest.json": json.dumps(manifest).encode()}).items():
            archive.writestr(name, content)
    return target


@pytest.mark.parametrize(
    "name",
    [
        "../outside",
        "/tmp/outside",
        "projects/../../outside",
        "projects//x",
        "projects",
        "run/operator.json",
        "state.db/x",
        "state.db-wal",
        "projects/a\\b",
        "other/x",
    ],
)
def test_a_name_that_does_not_belong_to_a_home_is_refused(backup: Path, tmp_path: Path, name: str) -> None:
    def change(entries: dict[str, bytes], manifest: dict[str, object]) -> None:
        entries[name] = b""
        manifest["files"][name] = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"  # type: ignore[index]

    other = new_home(tmp_path / "other")
    with pytest.raises(InputError, match="does not belong to a home"):
        restore_backup(rewritten(backup, change), other)
    assert files_of(other) == []
    assert not (tmp_path / "outside").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda entries, _: entries.update(more=b""), "its entries are not those of its manifest"),
        (lambda entries, _: entries.pop("token"), "its entries are not those of its manifest"),
        (lambda entries, _: entries.update(token=b"other"), "token has changed"),
        (lambda _, manifest: manifest.update(format=2, version="9"), "written by version 9: restore it with that"),
        (lambda _, manifest: manifest.pop("files"), "is not a complete backup: 'files'"),
        (lambda _, manifest: manifest.update(files=5), "is not a complete backup"),
    ],
)
def test_a_manifest_that_does_not_match_is_refused(
    backup: Path, tmp_path: Path, change: Callable[[dict[str, bytes], dict[str, object]], None], message: str
) -> None:
    other = new_home(tmp_path / "other")
    with pytest.raises(InputError, match=message):
        restore_backup(rewritten(backup, change), other)
    assert files_of(other) == []


def test_a_link_becomes_a_plain_file(backup: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(backup) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    target = tmp_path / "links.zip"
    with zipfile.ZipFile(target, "w") as archive:
        for name, content in entries.items():
            entry = zipfile.ZipInfo(name)
            entry.external_attr = (stat.S_IFLNK | 0o6777) << 16
            archive.writestr(entry, content)
    other = new_home(tmp_path / "other")
    restore_backup(target, other)
    modes = {stat.S_IFMT(path.lstat().st_mode) | path.lstat().st_mode & 0o7077 for path in other.path.rglob("*")}
    assert modes <= {stat.S_IFREG, stat.S_IFDIR | 0o055, stat.S_IFDIR}


def test_a_newer_schema_is_refused(home: Home, tmp_path: Path) -> None:
    engine = open_sqlite(home.database_file)
    with engine.begin() as connection:
        connection.execute(schema_version.update().values(version=len(MIGRATIONS) + 1))
    engine.dispose()
    write_backup(home, tmp_path / "backup.zip", "9")
    other = new_home(tmp_path / "other")
    with pytest.raises(CortexError, match="it was used by a newer version; upgrade cortex"):
        restore_backup(tmp_path / "backup.zip", other)
    assert files_of(other) == []


@pytest.mark.parametrize("name", ["state.db", "jobs.db-wal", "token", "cli.json", "projects/x"])
def test_nothing_in_a_home_is_replaced(backup: Path, tmp_path: Path, name: str) -> None:
    other = new_home(tmp_path / "other")
    (other.path / name).write_text("mine")
    with pytest.raises(ConflictError, match=f"already has {name.split('/')[0]}: restore into another, empty folder"):
        restore_backup(backup, other)
    assert files_of(other) == [name]


@pytest.mark.processes
def test_a_restore_that_is_killed_is_nothing_or_is_completed_by_the_next(home: Home, tmp_path: Path) -> None:
    for number in range(100):
        (home.projects_dir / HASH / f"{number}.txt").write_text("1")
    backup = tmp_path / "backup.zip"
    write_backup(home, backup, "1.2.3")
    for number in range(8):
        other = new_home(tmp_path / f"other-{number}")
        child = os.fork()
        if child == 0:
            try:
                restore_backup(backup, other)
            finally:
                os._exit(0)
        threading.Event().wait(0.01 * number)  # only varies where it is killed
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        if (other.path / "restored").exists():
            with pytest.raises(InputError, match="was interrupted; run `cortex restore` again"):
                Installation.read(other)
        elif other.database_file.exists():
            with pytest.raises(ConflictError):
                restore_backup(backup, other)
            assert len(files_of(other)) == len(NEEDED) + 100
            continue
        restore_backup(backup, other)
        assert len(files_of(other)) == len(NEEDED) + 100


def test_a_restore_that_was_interrupted_between_two_files_is_completed(backup: Path, tmp_path: Path) -> None:
    other = new_home(tmp_path / "other")
    restore_backup(backup, other)
    restored = other.path / "restored"
    restored.mkdir()  # as if it were the verified folder
    for name in ("jobs.db", "projects", "token"):
        (other.path / name).rename(restored / name)
    other.projects_dir.mkdir()  # by another command
    with pytest.raises(InputError, match="was interrupted"):
        Installation.read(other)
    restore_backup(backup, other)
    assert files_of(other) == NEEDED
    assert Installation.read(other).gateway_port == 9999
