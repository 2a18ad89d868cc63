from __future__ import annotations

import os
import socket

from cortex.processes.sockets import peer_of


def test_reports_the_process_at_the_other_end() -> None:
    here, there = socket.socketpair(socket.AF_UNIX)
    with here, there:
        assert peer_of(here) == (os.getpid(), os.geteuid(), os.getegid())
