"""`cortex keys`: create, list and revoke API keys for APIs with `auth: api_key`."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from cortex.cli.arguments import add_env, add_output
from cortex.cli.session import Session
from cortex.client.client import Client

Action = Callable[[argparse.Namespace, Client, Session], None]


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    text = "create an API key and print it, which is possible only once"
    creating = actions.add_parser("create", help=text, description=f"{text[0].upper()}{text[1:]}.")
    creating.add_argument(
        "name", metavar="NAME", help="description of the key, such as its owner or purpose; need not be unique"
    )
    creating.add_argument(
        "--api",
        metavar="API",
        action="append",
        default=[],
        help="API that the key grants access to; can be repeated; default: all APIs",
    )
    listing = actions.add_parser(
        "list", help="list API keys", description="List API keys with their ids and names, without the secret keys."
    )
    revoking = actions.add_parser("revoke", help="revoke an API key", description="Revoke an API key.")
    revoking.add_argument("id", metavar="ID", help="id of the key; `cortex keys list` shows it")
    for action in (creating, listing, revoking):
        add_env(action)
    for action in (creating, listing):
        add_output(action)


def run(arguments: argparse.Namespace, session: Session) -> int:
    """Run the action."""
    _ACTIONS[arguments.action](arguments, session.client(arguments.env), session)
    return 0


def _create(arguments: argparse.Namespace, client: Client, session: Session) -> None:
    created = client.create_key(arguments.name, arguments.api)
    if arguments.output == "json":
        session.console.json(created)
    else:
        session.console.line(created["key"])
        session.console.note(f"the key is shown only once; its id is {created['id']}")
    deployed = {api["spec"]["name"] for api in client.list_apis()}
    for api in created["apis"]:
        if api not in deployed:
            session.console.note(f"note: no API {api} is deployed; the key will be valid once it is")


def _list(arguments: argparse.Namespace, client: Client, session: Session) -> None:
    keys = client.list_keys()
    if arguments.output == "json":
        session.console.json(keys)
    else:
        rows = [[key["id"], key["name"], ", ".join(key["apis"]) or "all", key["created_at"][:19]] for key in keys]
        session.console.table(["id", "name", "apis", "created (UTC)"], rows)


def _revoke(arguments: argparse.Namespace, client: Client, session: Session) -> None:
    key = client.revoke_key(arguments.id)
    session.console.line(f"revoked the key {key['id']} ({key['name']})")


_ACTIONS: dict[str, Action] = {"create": _create, "list": _list, "revoke": _revoke}
