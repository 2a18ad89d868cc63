"""What a supervisor knows of the connections that it holds for one process: which are slow, which go unread."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass

from cortex.replica.shared_state import Cells, ConnectionState

#: A request whose row says so has a deadline.
DEADLINE_STATES = (ConnectionState.RUNNING, ConnectionState.ANSWERING, ConnectionState.QUEUED)
_HEARING_S = 0.5


@dataclass
class Held:
    """The supervisor's duplicate of one connection."""

    sock: socket.socket
    was_slow: bool = False  #: at the last tick, only its client was slow
    slow: bool = False  #: … and at the tick before as well: the call slot is lent


def has_unread(sock: socket.socket) -> bool | None:
    """Tell whether something was sent that nobody has read; None once the peer has gone and left nothing."""
    try:
        return bool(sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)) or None
    except BlockingIOError:
        return False
    except OSError:
        return None


class Hearing:
    """Notices a process that runs no call and reads no request: the user's code blocks its event loop."""

    def __init__(self) -> None:
        self._next_look = 0.0
        self._deaf_since: float | None = None

    def deaf_for_s(self, now: float, held: Mapping[int, Held], cells: Cells) -> float:
        """Return for how long it has been so; looks every half second at most."""
        if now >= self._next_look:
            self._next_look = now + _HEARING_S
            states = {index: cells.state(index) for index in held}
            is_deaf = not any(state in DEADLINE_STATES for state in states.values()) and any(
                state is ConnectionState.IDLE and has_unread(held[index].sock) for index, state in states.items()
            )
            self._deaf_since = (self._deaf_since or now) if is_deaf else None
        return now - self._deaf_since if self._deaf_since is not None else 0.0
