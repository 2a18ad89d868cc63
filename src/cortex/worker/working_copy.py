"""Private working copies: each process of a replica changes its own copy of the project, never the stored files.

A supervisor chooses a strategy once, the cheapest that this machine permits:

strategy   how                                                        cost of a start        requires
--------   --------------------------------------------------------   --------------------   -------------------------
overlay    a mount namespace of the process, in which overlayfs       1 ms, at any size      Linux; as root
           covers the project's own path                                                     CAP_SYS_ADMIN, otherwise
                                                                                             user namespaces (5.11)
reflink    files share their blocks until one is written (FICLONE)    30 µs per file         Btrfs, XFS, bcachefs
copy       every file is copied                                       1 ms per file or MB    nothing

Hard links are no strategy: who writes to one changes the stored file. With `overlay`, the project keeps its path.

Sources: Documentation/filesystems/overlayfs.rst of the kernel; unshare(2), user_namespaces(7), ioctl_ficlone(2).
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import os
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from cortex.errors import UserError
from cortex.worker.monitoring.request_log import write_log
from cortex.worker.spec import ReplicaSpec

#: Name of a strategy, for the operator's environment: skips the choice.
STRATEGY_VARIABLE = "CORTEX_WORKING_COPIES"

_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000
_MS_REC, _MS_SLAVE = 0x4000, 0x80000
_MNT_DETACH = 2
_CAPABILITY_VERSION_3 = 0x20080522
_FICLONE = 0x40049409
_IDENTITY_MAP = ["0", "0", "4294967295"]
#: Slower copies are logged.
_NOTICEABLE_S = 0.1
_ALL_RIGHTS = 0o700

_libc = ctypes.CDLL(None, use_errno=True)


class Strategy(enum.StrEnum):
    """Ways to create working copies, the most capable first."""

    OVERLAY = "overlay"
    REFLINK = "reflink"
    COPY = "copy"


class StrategyTest:
    """A test of the strategies for copies of `project` below `folder`, where it leaves files.

    It tests `overlay` in a fork, since a process can't leave a namespace, and while the caller does other things.
    The caller must be single-threaded, and reaps the fork: its end takes 10 ms.
    """

    def __init__(self, project: Path, folder: Path) -> None:
        self.pid: int | None = None  #: the fork
        self._project = project
        self._folder = folder
        self._result: int | None = None

    def start(self) -> None:
        """Start the test."""
        if _configured_strategy() is None:
            with contextlib.suppress(OSError):
                self._result = self._fork()

    def finish(self) -> Strategy:
        """Wait for the result; return the best strategy that works."""
        if (strategy := _configured_strategy()) is not None:
            return strategy
        if self._result is not None:
            with open(self._result, "rb") as result:  # noqa: PTH123 - a descriptor
                if result.read(1):
                    return Strategy.OVERLAY
        with contextlib.suppress(OSError):
            _test_reflink(self._project, self._folder / "test-reflink")
            return Strategy.REFLINK
        return Strategy.COPY

    def _fork(self) -> int:
        folder = self._folder / "test-overlay"
        folder.mkdir(parents=True)
        read, write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                _mount_overlay(self._project, folder)
                name = f".cortex-{os.getpid()}"
                (self._project / name).touch()
                if (folder / "upper" / name).exists():
                    os.write(write, b"1")
            finally:
                os._exit(0)
        os.close(write)
        return read


def _configured_strategy() -> Strategy | None:
    try:
        return Strategy(os.environ[STRATEGY_VARIABLE])
    except (KeyError, ValueError):
        return None


def ignored_strategy() -> str | None:
    """Return why the strategy that the environment names is ignored; None if it is not."""
    name = os.environ.get(STRATEGY_VARIABLE)
    if not name or name in list(Strategy):
        return None
    return f"{STRATEGY_VARIABLE}={name} is ignored: it is not one of {', '.join(Strategy)}"


@dataclass
class WorkingCopy:
    """The working copy of this process, in `folder`, which nothing else uses."""

    project: Path
    folder: Path
    strategy: Strategy
    _is_entered: bool = False
    _is_privileged: bool = False  #: it has capabilities in a user namespace of its own

    def enter(self) -> Path:
        """Create the copy and make it the working directory; return its path. Raises: UserError.

        Call `drop_privileges` before user code runs.
        """
        try:
            self.folder.mkdir(parents=True)
            if self.strategy is Strategy.OVERLAY:
                self._is_privileged |= _mount_overlay(self.project, self.folder)
                path = self.project
            else:
                path = self.folder / self.project.name
                _copy_project(self.project, path, _clone if self.strategy is Strategy.REFLINK else _copy)
            os.chdir(path)
        except OSError as error:
            raise UserError(f"can't create a working copy of the project in {self.folder}: {error}") from error
        self._is_entered = True
        return path

    def enter_another(self, folder: Path) -> Path:
        """Leave this copy, if it was entered, for a fresh one in `folder`; return its path. Raises: OSError, UserError.

        Call it in a fork of the process that entered this copy, which keeps it.
        """
        if self._is_entered and self.strategy is Strategy.OVERLAY:
            os.chdir("/")
            _call("unshare", _CLONE_NEWNS)  # before the unmount: the parent keeps its mount
            _call("umount2", os.fsencode(self.project), _MNT_DETACH)
        self.folder = folder
        return self.enter()

    def drop_privileges(self) -> None:
        """Give up the capabilities that an overlay required; root keeps those that it had."""
        if self._is_privileged:
            _call("capset", _capability_header(), (ctypes.c_uint32 * 6)())
            self._is_privileged = False


def copies_folder(run_dir: str, pid: int) -> Path:
    """Return the folder for the working copies of a worker process; its supervisor removes it."""
    return Path(run_dir) / "copies" / str(pid)


def working_copy(spec: ReplicaSpec) -> WorkingCopy:
    """Return the working copy of this worker process, which has not entered it yet."""
    folder = copies_folder(spec.run_dir, os.getpid())
    return WorkingCopy(Path(spec.project_dir), folder, Strategy(spec.working_copies))


def with_paths(spec: ReplicaSpec, path: Path) -> ReplicaSpec:
    """Return a spec whose project is at `path`."""
    model_path = spec.model_path
    if model_path is not None and Path(model_path).is_relative_to(spec.project_dir):
        model_path = str(path / Path(model_path).relative_to(spec.project_dir))
    return replace(spec, project_dir=str(path), model_path=model_path)


def remove_tree(folder: Path) -> None:
    """Delete a folder, with folders in it that have no permissions; skip what cannot be deleted."""
    import shutil  # noqa: PLC0415 - processes that copy nothing start faster

    for parent, names, _ in os.walk(folder):  # `names` are visited after this iteration
        for name in names:
            with contextlib.suppress(OSError):
                path = os.path.join(parent, name)  # noqa: PTH118 - many names
                mode = os.lstat(path).st_mode
                if stat.S_ISDIR(mode) and mode & _ALL_RIGHTS != _ALL_RIGHTS:
                    os.chmod(path, _ALL_RIGHTS)  # noqa: PTH101 - as above
    shutil.rmtree(folder, ignore_errors=True)


# Overlay.


def _mount_overlay(project: Path, folder: Path) -> bool:
    """Cover `project` with a writable layer in `folder`, visible to this process and its descendants. Raises: OSError.

    Return whether this required a user namespace. Changes the working directory.
    """
    sets = (ctypes.c_uint32 * 6)()
    _call("capget", _capability_header(), sets)
    needs_user_namespace = os.geteuid() != 0 and not sets[0]
    if needs_user_namespace:
        own = (os.geteuid(), os.getegid())
        for path in (project, folder):
            status = path.stat()
            if (status.st_uid, status.st_gid) != own:  # overlayfs can't copy files of others
                raise PermissionError(f"{path} belongs to another user or group")
        _enter_user_namespace()
    else:
        _call("unshare", _CLONE_NEWNS)
    _call("mount", None, b"/", None, _MS_REC | _MS_SLAVE, None)
    # Elsewhere than in the initial namespace, overlayfs keeps its marks in attributes that users may set.
    is_initial = Path("/proc/self/uid_map").read_text().split() == _IDENTITY_MAP
    options = "volatile" if is_initial else "volatile,userxattr"  # volatile: no sync of the disk at the end
    for name in ("upper", "work"):
        (folder / name).mkdir()
    os.setxattr(folder / "upper", "trusted.overlay.test" if is_initial else "user.overlay.test", b"")
    os.chdir(folder)  # relative paths, and a descriptor: commas and colons in them would need quotes
    lower = os.open(project, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        layers = f"lowerdir=/proc/self/fd/{lower},upperdir=upper,workdir=work,{options}"
        _call("mount", b"overlay", os.fsencode(project), b"overlay", 0, layers.encode())
    finally:
        os.close(lower)
    return needs_user_namespace


def _enter_user_namespace() -> None:
    """Get the capabilities for mounts in a user namespace in which this user and group keep their ids."""
    _create_gpu_device()
    uid, gid = os.geteuid(), os.getegid()
    _call("unshare", _CLONE_NEWUSER | _CLONE_NEWNS)
    Path("/proc/self/setgroups").write_text("deny")  # required before gid_map
    Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")


def _create_gpu_device() -> None:
    """Create the device that CUDA needs: it would start a setuid program, which has no effect in a user namespace."""
    if os.path.exists("/dev/nvidiactl") and not os.path.exists("/dev/nvidia-uvm"):  # noqa: PTH110 - each start
        with contextlib.suppress(OSError):
            os.waitpid(os.posix_spawnp("nvidia-modprobe", ["nvidia-modprobe", "-c", "0", "-u"], os.environ), 0)


def _capability_header() -> ctypes.Array[ctypes.c_uint32]:
    return (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)


def _call(name: str, *arguments: object) -> None:
    if getattr(_libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


# Reflinks and copies.


def _test_reflink(project: Path, folder: Path) -> None:
    """Raise OSError unless files of the project can be cloned into `folder`."""
    folder.mkdir(parents=True)
    file = next((path for path in project.rglob("*") if path.is_file() and path.stat().st_size), None)
    if file is None:
        raise FileNotFoundError(project)
    _clone(str(file), str(folder / "file"))


def _copy_project(project: Path, target: Path, copy_file: Callable[[str, str], object]) -> None:
    import shutil  # noqa: PLC0415 - as above

    started = time.monotonic()
    try:
        shutil.copytree(project, target, symlinks=True, copy_function=copy_file)
    except shutil.Error as error:
        failures: list[tuple[str, str, str]] = error.args[0]  # one for each file
        file, _, reason = failures[0]
        others = f", and {len(failures) - 1:,} other files too" if len(failures) > 1 else ""
        raise OSError(f"{file}: {reason}{others}") from None
    seconds = time.monotonic() - started
    if seconds > _NOTICEABLE_S:
        size_mb = sum(file.lstat().st_size for file in target.rglob("*")) / 1e6
        write_log(f"copied the project of this process, {size_mb:.0f} MB, in {seconds:.2f} s\n")


def _copy(source: str, target: str) -> None:
    import shutil  # noqa: PLC0415 - as above

    shutil.copy2(source, target)


def _clone(source: str, target: str) -> None:
    import fcntl  # noqa: PLC0415 - as above
    import shutil  # noqa: PLC0415 - as above

    with open(source, "rb") as read, open(target, "wb") as write:  # noqa: PTH123 - many names
        fcntl.ioctl(write, _FICLONE, read.fileno())
    shutil.copystat(source, target)
