"""Whether Ray lets this process in: its own library would try for half a minute, and say only that it failed.

One question, sent as Ray's library sends its own. Imports Ray, so only `ray_bridge.py` may use it.
"""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import urlsplit

import grpc
import ray.exceptions

from cortex.errors import CortexError

_TIMEOUT_S = 3.0
#: Questions that Ray's head and its client server answer only to who shows the token. They change nothing.
_OF_HEAD, _OF_CLIENT_SERVER = "/ray.rpc.NodeInfoGcsService/CheckAlive", "/ray.rpc.RayletDriver/ClusterInfo"


class TokenError(CortexError):
    """Ray asks for a token that this process does not have."""


def check_token(address: str) -> None:
    """Ask Ray at `HOST:PORT`, or its client server at `ray://HOST:PORT`. Raises: TokenError.

    Whatever else is wrong is left to Ray's library, which says what.
    """
    is_client = address.startswith("ray://")
    try:
        with _channel(urlsplit(address).netloc if is_client else address) as channel:
            channel.unary_unary(_OF_CLIENT_SERVER if is_client else _OF_HEAD)(b"", timeout=_TIMEOUT_S)
    except ImportError:
        return  # a version of Ray that knows no tokens
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.UNAUTHENTICATED:
            raise TokenError(_advice()) from None
    except ray.exceptions.AuthenticationError:
        raise TokenError(
            "RAY_AUTH_MODE=token is set and there is no token: "
            "`cortex up` wants RAY_AUTH_TOKEN, or RAY_AUTH_TOKEN_PATH, in its environment, or ~/.ray/auth_token"
        ) from None


def _channel(target: str) -> Any:
    """Connect with the token and the certificates that Ray's library would use."""
    from ray._private.grpc_utils import init_grpc_channel  # noqa: PLC0415  Ray's own, which it may move

    make: Any = init_grpc_channel
    return make(target)


def _advice() -> str:
    if os.environ.get("RAY_AUTH_MODE", "").lower() != "token":
        return (
            "it asks for a token: `cortex up` wants RAY_AUTH_MODE=token, and the token of Ray's head in "
            "RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token"
        )
    shown = next((name for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH") if os.environ.get(name)), "")
    whose = f"of {shown}" if shown else "in ~/.ray/auth_token"
    return f"it does not take the token {whose}: `cortex up` wants the one that `ray start` had on the head"
