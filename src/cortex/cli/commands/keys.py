"""`cortex keys`: what callers of APIs with `auth: api_key` show."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from cortex.cli.arguments import add_env, add_output
from cortex.cli.connect import client_of
from cortex.cli.context import Context
from cortex.client.client import Client

Action = Callable[[argparse.Namespace, Client, Context], None]


def configure(parser: argparse.ArgumentParser) -> None:
    """Say what the command takes."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    text = "make one, and show it this once"
    making = actions.add_parser("create", help=text, description=f"{text.capitalize()}.")
    making.add_argument("name", metavar="NAME", help="whose it is or what it is for; need not be unique")
    making.add_argument(
        "--api", metavar="API", action="append", default=[], help="an API that it opens, can be repeated; otherwise all"
    )
    listing = actions.add_parser("list", help="show all", description="Show all keys: not the keys themselves.")
    revoking = actions.add_parser("revoke", help="revoke one", description="Revoke a key: it opens nothing any more.")
    revoking.add_argument("id", metavar="ID", help="id of the key, as `cortex keys list` shows it")
    for action in (making, listing, revoking):
        add_env(action)
    for action in (making, listing):
        add_output(action)


def run(arguments: argparse.Namespace, context: Context) -> int:
    """Do what the action says."""
    _ACTIONS[arguments.action](arguments, client_of(context, arguments.env), context)
    return 0


def _create(arguments: argparse.Namespace, client: Client, context: Context) -> None:
    made = client.create_key(arguments.name, arguments.api)
    if arguments.output == "json":
        context.console.json(made)
    else:
        context.console.line(made["key"])
        context.console.note(f"this is the only time that the key is shown; its id is {made['id']}")
    deployed = {api["spec"]["name"] for api in client.list_apis()}
    for api in made["apis"]:
        if api not in deployed:
            context.console.note(f"note: no API {api} is deployed; the key opens it once it is")


def _list(arguments: argparse.Namespace, client: Client, context: Context) -> None:
    keys = client.list_keys()
    if arguments.output == "json":
        context.console.json(keys)
    else:
        rows = [[key["id"], key["name"], ", ".join(key["apis"]) or "all", key["created_at"][:19]] for key in keys]
        context.console.table(["id", "name", "apis", "created (UTC)"], rows)


def _revoke(arguments: argparse.Namespace, client: Client, context: Context) -> None:
    key = client.revoke_key(arguments.id)
    context.console.line(f"the key {key['id']} ({key['name']}) is revoked")


_ACTIONS: dict[str, Action] = {"create": _create, "list": _list, "revoke": _revoke}
