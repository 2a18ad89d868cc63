"""An operator that shares its database with another: it answers that it stands by until it leads."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import ssl
import sys
from typing import NoReturn

from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from cortex.operator.http.server import create_server
from cortex.operator.leader_election import Leadership

_RETRY_AFTER_S = "2"
#: Set for the process that goes on in the place of one that led.
_ANEW = "CORTEX_BEGUN_ANEW"


class Standby:
    """What clients of an operator are told that stands by."""

    def __init__(self, leadership: Leadership) -> None:
        self._leadership = leadership

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            return
        leader = self._leadership.leader
        if scope["path"] == "/livez":
            # One that has just come to lead is soon another server: to whoever waits for that, nobody leads yet.
            other = None if leader is None or self._leadership.has_lead else leader.url
            content = {"ok": True, "leads": False, "leader": other}
            await JSONResponse(content)(scope, receive, send)
            return
        who = f"{leader} leads" if leader else self._leadership.problem or "it is not known yet which one leads"
        content = {
            "error": f"this operator stands by: {who}",
            "code": "standby",
            "leader": leader.url if leader else None,
        }
        await JSONResponse(content, 503, {"retry-after": _RETRY_AFTER_S})(scope, receive, send)


async def wait_for_lead(
    leadership: Leadership, listener: socket.socket, tls: ssl.SSLContext | None, is_patient: bool
) -> int | None:
    """Answer at `listener` until this operator leads; return the epoch of its lead, or None if it is told to end.

    `is_patient`: a database that can't be reached is waited for, too. Raises: DatabaseAddressError.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    server = create_server(Standby(leadership), tls)
    serving = asyncio.create_task(server.serve(sockets=[listener.dup()]), name="serve while standing by")
    acquiring = asyncio.create_task(leadership.acquire(is_patient), name="wait for the lead")
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([acquiring, stopping], return_when=asyncio.FIRST_COMPLETED)
        return acquiring.result() if acquiring.done() else None
    finally:
        server.should_exit = True
        for task in (acquiring, stopping):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving


def has_begun_anew() -> bool:
    """Tell whether this process goes on for an operator that was up; the first to ask is told."""
    return os.environ.pop(_ANEW, None) is not None


def begin_anew() -> NoReturn:
    """Become an operator that has just been started: what was in memory is of a lead that is over.

    What runs is found again; the gateway and the replicas notice nothing.
    """
    os.environ[_ANEW] = "1"
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-P", "-m", "cortex.operator.main", *sys.argv[1:]])
