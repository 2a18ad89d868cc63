"""The file layout of one installation, below CORTEX_HOME."""

from __future__ import annotations

import errno
import grp
import hashlib
import os
import pwd
import re
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

from cortex.errors import EngineError, InputError

#: Maximum bytes in the path of a unix socket (104 on macOS, 108 on Linux), minus room for a file name.
SOCKET_DIR_MAX_LENGTH = 70
#: Class of a regular expression: characters that have a meaning in HAProxy's configuration, on its command line or in
#: its runtime commands, and those that are not UTF-8.
SPECIAL_CHARACTERS = r"\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff'\"\\$#,;"
SHARED_MEMORY = Path("/dev/shm")
#: Set if every user who can write the home is trusted, such as in a container.
TRUST_VARIABLE = "CORTEX_TRUST_HOME"


@dataclass(frozen=True)
class Home:
    """The folder of one installation. Several homes on one machine are independent."""

    path: Path

    @classmethod
    def from_environ(cls, environ: dict[str, str] | os._Environ[str]) -> Home:
        """Return the home at `CORTEX_HOME`, by default `~/.cortex`."""
        value = environ.get("CORTEX_HOME")
        return cls(Path(value).expanduser().absolute() if value else Path.home() / ".cortex")

    @property
    def token_file(self) -> Path:
        """The operator's token, mode 0600."""
        return self.path / "token"

    @property
    def database_file(self) -> Path:
        """The SQLite database."""
        return self.path / "state.db"

    @property
    def jobs_database_file(self) -> Path:
        """The SQLite database of jobs; separate, so that writes of jobs never wait for those of deployments."""
        return self.path / "jobs.db"

    @property
    def projects_dir(self) -> Path:
        """Unpacked project folders, one per content hash."""
        return self.path / "projects"

    @property
    def environments_dir(self) -> Path:
        """Virtual environments, one per distinct requirements."""
        return self.path / "environments"

    @property
    def models_dir(self) -> Path:
        """Downloaded models."""
        return self.path / "models"

    @property
    def model_agent_socket(self) -> Path:
        """Unix socket of this machine's model agent."""
        return self.sockets_dir / "models"

    @property
    def apis_with_models_file(self) -> Path:
        """Names of the deployed APIs with models, from the operator to the model agent."""
        return self.models_dir / "apis.json"

    @property
    def jobs_socket(self) -> Path:
        """Unix socket on which the operator accepts submissions from the gateway and leases batches to job workers."""
        return self.sockets_dir / "jobs"

    @property
    def fingerprints_file(self) -> Path:
        """Fingerprints of the certificates of operator and gateway, newest first; exists only with TLS."""
        return self.run_dir / "fingerprints"

    @property
    def logs_dir(self) -> Path:
        """Logs: `logs/<api>/<replica id>.log`, `logs/operator.log`, `logs/gateway.log`, `logs/access.log`."""
        return self.path / "logs"

    @property
    def recordings_dir(self) -> Path:
        """Recordings of requests."""
        return self.path / "recordings"

    @property
    def run_dir(self) -> Path:
        """Identities of running processes: `run/operator.json`, `run/gateway/`, `run/replicas/<replica id>/`."""
        return self.path / "run"

    @property
    def replicas_dir(self) -> Path:
        """One folder per running replica."""
        return self.run_dir / "replicas"

    @property
    def sockets_dir(self) -> Path:
        """Unix sockets; in a private temporary folder if the path of the home is unsuitable for sockets of HAProxy."""
        inside = self.run_dir / "s"
        if len(os.fsencode(inside)) <= SOCKET_DIR_MAX_LENGTH and not re.search(f"[{SPECIAL_CHARACTERS}]", str(inside)):
            return inside
        return Path(tempfile.gettempdir()) / self._unique_name

    @property
    def metrics_dir(self) -> Path:
        """Metrics of running processes, in shared memory if possible, so that writes never wait for a disk."""
        folder = SHARED_MEMORY / self._unique_name
        is_ours = os.access(SHARED_MEMORY, os.W_OK) and (_is_own_folder(folder) or not os.path.lexists(folder))
        return folder if is_ours else self.run_dir / "metrics"

    @property
    def _unique_name(self) -> str:
        return f"cortex-{os.getuid()}-{hashlib.sha256(os.fsencode(self.path)).hexdigest()[:12]}"

    @property
    def operator_lock(self) -> Path:
        """The file that the operator locks while it runs; it contains its pid."""
        return self.run_dir / "operator.lock"

    def create(self) -> None:
        """Create every folder, private to its owner. Idempotent."""
        for folder in (
            self.path,
            self.projects_dir,
            self.environments_dir,
            self.models_dir,
            self.logs_dir,
            self.run_dir,
            self.replicas_dir,
            self.sockets_dir,
            self.metrics_dir,
        ):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _require_private(self.sockets_dir)
        _require_private(self.metrics_dir)

    def prepare(self) -> None:
        """Create the home for a command. Raises: InputError if it can't be created, written or trusted; EngineError."""
        self.check()
        try:
            self.create()
            if not os.access(self.path, os.W_OK):  # the home may exist on a file system that is now read-only
                raise PermissionError(errno.EACCES, "it can't be written", str(self.path))
        except OSError as error:
            raise self.unusable(error) from None

    def check(self) -> None:
        """Check that only its user and root can write the home, if it exists, and what is directly in it.

        Other users could replace the token, or projects, whose code runs as this user. As for the files of sshd, this
        includes root in the home of somebody else. Deeper files could only be theirs if these were. Raises: InputError.
        """
        try:
            status = os.stat(f"{self.path}/.")  # noqa: PTH116 - `Path` drops the dot, which fails for a file
            reason = "" if os.environ.get(TRUST_VARIABLE) else self._distrust(status)
        except FileNotFoundError:
            return
        except OSError as error:
            raise self.unusable(error) from None
        if reason:
            raise InputError(
                f"CORTEX_HOME={self.path} can't be used: {reason}. If all users of this machine are trusted, such as "
                f"in a container, set {TRUST_VARIABLE}=1"
            )

    def _distrust(self, status: os.stat_result) -> str:
        """Return why other users could change what is in the home; empty if only its user and root can."""
        fix = "set it to a folder of your own, or run cortex as that user"
        trusted = (os.geteuid(), 0)
        if status.st_uid not in trusted:
            return f"it belongs to the user {_user_name(status.st_uid)}; {fix}"
        if _others(status, "w") and not status.st_mode & stat.S_ISVTX:
            return f'other users can write into it; look for files of theirs, and run "chmod go-w {self.path}"'
        with os.scandir(self.path) as entries:
            for entry in entries:
                inner = entry.stat(follow_symlinks=False)
                if inner.st_uid not in trusted:
                    return f"{entry.name} in it belongs to the user {_user_name(inner.st_uid)}; {fix}"
                if not _others(status, "x") or entry.is_symlink():  # which has no mode of its own
                    continue
                if _others(inner, "w"):
                    return f'other users can change {entry.name} in it; check it, and run "chmod go-w {entry.path}"'
                if entry.name == self.token_file.name and _others(inner, "r"):
                    return f'other users can read {entry.name} in it; run "chmod go-r {entry.path}"'
        return ""

    def unusable(self, error: OSError) -> InputError:
        """Return the error for a CORTEX_HOME that cannot be read or written."""
        reason = f"{error.filename or self.path}: {(error.strerror or str(error)).lower()}"
        if isinstance(error, FileExistsError | NotADirectoryError):
            files = (path for path in (self.path, *self.path.parents) if path.exists() and not path.is_dir())
            reason = next((f"{path} is not a folder" for path in files), reason)
        return InputError(f"CORTEX_HOME={self.path} can't be used: {reason}; set it to a folder that you can write")


def _require_private(folder: Path) -> None:
    """Check that a folder belongs to this user and is private: outside the home, others could have created it.

    Raises: EngineError.
    """
    if not _is_own_folder(folder):
        raise EngineError(
            f"{folder} is not a folder that you own; remove it, or choose a CORTEX_HOME with a shorter path"
        )
    if stat.S_IMODE(folder.lstat().st_mode) & 0o077:
        folder.chmod(0o700)


def _is_own_folder(path: Path) -> bool:
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()


def _others(status: os.stat_result, right: str) -> bool:
    """Return whether others than the owner of a file, root and this user have a right, "r", "w" or "x"."""
    bit = {"r": stat.S_IROTH, "w": stat.S_IWOTH, "x": stat.S_IXOTH}[right]
    return bool(status.st_mode & (bit if _is_private_group(status) else bit | bit << 3))


def _is_private_group(status: os.stat_result) -> bool:
    """Return whether nobody but the owner of a file, root and this user is in its group.

    Such a group has the name of one of them. Or it has no name and this process is in it, as in a container.
    """
    try:
        group = grp.getgrgid(status.st_gid)
    except KeyError:
        return status.st_gid in (os.getegid(), *os.getgroups())
    names = {_user_name(number) for number in (status.st_uid, os.geteuid(), 0)}
    return group.gr_name in names and set(group.gr_mem) <= {group.gr_name}


def _user_name(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def write_private(path: Path, text: str) -> None:
    """Replace a file atomically, readable only by its owner."""
    temporary = path.with_name(path.name + ".new")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    temporary.replace(path)
