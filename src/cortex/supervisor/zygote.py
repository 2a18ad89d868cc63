"""The zygote of an environment: has imported the modules of supervisors, and forks a supervisor for each request.

Run as `python -P -m cortex.supervisor.zygote`; its standard input is a socket of `engine/zygotes.py`. A forked
supervisor starts without the imports, and shares their memory with all others. The zygote is single-threaded, so that
forking is safe.

Each supervisor has a session of its own. It waits for permission until its identity is recorded, so that none runs
unrecorded if the engine or the zygote dies meanwhile. The zygote ends when its engine closes the socket, or dies;
supervisors continue.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from cortex.processes.jsonl import receive_line
from cortex.supervisor import supervisor

_PROC = Path("/proc/self")


def main() -> None:
    """Serve the socket at standard input; in a fork, run its supervisor."""
    gc.collect()
    gc.freeze()  # keeps these pages shared with the supervisors
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps supervisors
    request = _wait_for_request(socket.socket(fileno=sys.stdin.fileno()))
    if request is None or not _become_supervisor(*request):
        os._exit(0)
    supervisor.main()


def _wait_for_request(engine: socket.socket) -> list[int] | None:
    """Fork for each request; return its descriptors in the fork, and None in the zygote once it is to end."""
    with contextlib.suppress(OSError):  # the engine has ended, which recv_fds reports
        engine.send(b"i")  # the modules are imported
    while True:
        try:
            data, descriptors, _, _ = socket.recv_fds(engine, 1, 2)
        except OSError:
            return None
        if not data:
            return None
        with contextlib.suppress(OSError):  # no process is free: the engine reads the end of the connection
            if os.fork() == 0:
                engine.detach()  # standard input, which is replaced
                return descriptors
        for descriptor in descriptors:
            os.close(descriptor)


def _become_supervisor(connection: int, output: int) -> bool:
    """Set up a fork as the request says; return False if the engine closes the connection before it permits to run."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    null = os.open(os.devnull, os.O_RDWR)
    for source, target in (null, 0), (output, 1), (output, 2):
        os.dup2(source, target)
    os.close(null)
    os.close(output)
    with socket.socket(fileno=connection) as engine:
        line = receive_line(engine)
        if not line:
            return False
        request = json.loads(line)
        os.environ.clear()
        os.environ.update(request["env"])
        time.tzset()
        os.chdir(request["cwd"])
        sys.argv = request["command"][-2:]
        _set_title(request["command"])
        engine.sendall(b"%d\n" % os.getpid())
        return engine.recv(1) != b""


def _set_title(command: Sequence[str]) -> None:
    """Show `command` in the process list; nothing changes where /proc does not permit it.

    As setproctitle(3), this overwrites the memory of the arguments and that of the first environment variables behind
    it, which `os.environ` has replaced. The kernel then shows what is there up to the first null byte (proc(5)).
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = (_PROC / "stat").read_bytes().rpartition(b") ")[2].split()
        start, arguments_end, environment_end = int(fields[45]), int(fields[46]), int(fields[48])
        title = " ".join(command).encode().ljust(arguments_end - start)[: environment_end - start - 1]
        with (_PROC / "mem").open("r+b", buffering=0) as memory:
            memory.seek(start)
            memory.write(title + b"\0")


if __name__ == "__main__":
    main()
