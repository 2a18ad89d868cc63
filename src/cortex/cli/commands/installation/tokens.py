"""`cortex tokens`: create, list and revoke operator tokens, which limit what their owners can do."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from cortex.cli.arguments import add_env, add_output, seconds_of
from cortex.cli.session import Session
from cortex.client.client import Client
from cortex.lifecycle import TokenScope

Action = Callable[[argparse.Namespace, Client, Session], None]

_SCOPES = tuple(map(str, TokenScope))


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    text = "create an operator token and print it, which is possible only once"
    creating = actions.add_parser("create", help=text, description=f"{text[0].upper()}{text[1:]}.")
    creating.add_argument(
        "name", metavar="NAME", nargs="?", help="unique name, for the audit log; default: the scope and the API"
    )
    creating.add_argument(
        "--scope",
        choices=_SCOPES,
        required=True,
        help="what the token permits; each scope includes those before it: metrics, read, deploy, admin",
    )
    creating.add_argument(
        "--api", metavar="API", help="limit a token with the scope read or deploy to this API; default: all APIs"
    )
    creating.add_argument(
        "--expires", metavar="DURATION", help="validity, such as 30d, 12h or 90m; default: until revoked"
    )
    listing = actions.add_parser(
        "list", help="list operator tokens", description="List operator tokens, without the secret tokens."
    )
    revoking = actions.add_parser("revoke", help="revoke an operator token", description="Revoke an operator token.")
    revoking.add_argument("token", metavar="TOKEN", help="id or name of the token; `cortex tokens list` shows both")
    for action in (creating, listing, revoking):
        add_env(action)
    for action in (creating, listing):
        add_output(action)


def run(arguments: argparse.Namespace, session: Session) -> int:
    """Run the action."""
    _ACTIONS[arguments.action](arguments, session.client(arguments.env), session)
    return 0


def _create(arguments: argparse.Namespace, client: Client, session: Session) -> None:
    expires_in_s = None if arguments.expires is None else seconds_of("--expires", arguments.expires)
    created = client.create_token(arguments.scope, arguments.name, arguments.api, expires_in_s)
    if arguments.output == "json":
        session.console.json(created)
        return
    session.console.line(created["token"])
    session.console.note(f"the token is shown only once; its name is {created['name']}, its id {created['id']}")


def _list(arguments: argparse.Namespace, client: Client, session: Session) -> None:
    tokens = client.list_tokens()
    if arguments.output == "json":
        session.console.json(tokens)
        return
    rows = [
        [
            token["id"],
            token["name"],
            token["scope"],
            token["api"] or "all",
            token["created_at"][:19],
            "expired" if token["is_expired"] else (token["expires_at"] or "never")[:19],
        ]
        for token in tokens
    ]
    session.console.table(["id", "name", "scope", "apis", "created (UTC)", "expires (UTC)"], rows)


def _revoke(arguments: argparse.Namespace, client: Client, session: Session) -> None:
    token = client.revoke_token(arguments.token)
    session.console.line(f"revoked the token {token['id']} ({token['name']})")


_ACTIONS: dict[str, Action] = {"create": _create, "list": _list, "revoke": _revoke}
