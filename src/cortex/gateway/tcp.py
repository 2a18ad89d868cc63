"""Owns what HAProxy is told for replicas that are reached over TCP, on this machine or another; does no I/O."""

from __future__ import annotations

#: A machine that vanished answers nothing at all. Until checks notice it, a request that needs a new connection to it
#: loses this long, and goes to another replica.
CONNECT_TIMEOUT_MS = 1000
#: At the first connection that fails, a replica is left until a check finds it again.
CHECK = "check inter 1s fastinter 500ms fall 2 rise 1 observe layer4 error-limit 1 on-error mark-down"
#: A longer path and query would not fit into the head that a replica looks at before it lets a connection in.
URL_MAX_BYTES = 64 * 1024


def section_rules(secret: str, too_long: str) -> str:
    """Write the lines of an API's section; `too_long` is the content of the answer to a URL that is too long.

    Clients can't send the header themselves: the frontend drops all of that beginning.
    """
    header = f"  http-request set-header x-cortex-gateway {secret}\n" if secret else ""
    # Idle connections to a machine that vanished would be used again otherwise.
    return f"""\
  timeout connect {CONNECT_TIMEOUT_MS}ms
  option srvtcpka
  srvtcpka-idle 2s
  srvtcpka-intvl 1s
  srvtcpka-cnt 6
  http-request return status 414 {too_long} if {{ url_len gt {URL_MAX_BYTES} }}
{header}"""
