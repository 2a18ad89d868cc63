"""`cortex env`: names for operators, and which one is the default."""

from __future__ import annotations

import argparse
import getpass
import sys
from collections.abc import Callable

from cortex.cli.arguments import add_output
from cortex.cli.connect import environments_of
from cortex.cli.context import Context
from cortex.client.environments import Environments
from cortex.errors import InputError

Action = Callable[[argparse.Namespace, Environments, Context], None]


def configure(parser: argparse.ArgumentParser) -> None:
    """Say what the command takes."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="show all environments", description="Show all environments.")
    add_output(listing)
    adding = actions.add_parser("configure", help="add or change one", description="Add or change an environment.")
    adding.add_argument("name", metavar="NAME", help="name of the environment")
    adding.add_argument(
        "--operator-endpoint", "--operator", metavar="URL", help="address of its operator; asked for if left out"
    )
    adding.add_argument("--token", metavar="TOKEN", help="its operator's token; asked for if left out, `-` is stdin")
    adding.add_argument("--ca", metavar="FILE", help="certificates to trust instead of the system's (PEM)")
    for name, text in (("default", "show or choose the default one"), ("delete", "forget one")):
        action = actions.add_parser(name, help=text, description=f"{text.capitalize()}.")
        optional = "?" if name == "default" else None
        action.add_argument("name", metavar="NAME", nargs=optional, help="name of the environment")
    renaming = actions.add_parser("rename", help="rename one", description="Rename an environment.")
    renaming.add_argument("name", metavar="OLD", help="name of the environment")
    renaming.add_argument("new_name", metavar="NEW", help="its new name")


def run(arguments: argparse.Namespace, context: Context) -> int:
    """Do what the action says."""
    _ACTIONS[arguments.action](arguments, environments_of(context), context)
    return 0


def _list(arguments: argparse.Namespace, environments: Environments, context: Context) -> None:
    default = environments.default
    known = [{**item.describe(), "default": item.name == default} for item in environments.known()]
    if arguments.output == "json":
        context.console.json(known)
    else:
        rows = [[str(e["name"]), str(e["operator_endpoint"] or "not running"), "*" * bool(e["default"])] for e in known]
        context.console.table(["env", "operator", "default"], rows)


def _configure(arguments: argparse.Namespace, environments: Environments, context: Context) -> None:
    endpoint = arguments.operator_endpoint or _ask("operator endpoint: ", "--operator-endpoint", context)
    if arguments.token == "-":
        token = sys.stdin.readline().strip()
    elif arguments.token is None:
        _require_terminal("--token")
        token = getpass.getpass("token: ").strip()
    else:
        token = arguments.token
    environment = environments.configure(arguments.name, endpoint, token, arguments.ca)
    context.console.line(f"{environment.name} is {environment.operator_endpoint}")


def _default(arguments: argparse.Namespace, environments: Environments, context: Context) -> None:
    if arguments.name:
        environments.set_default(arguments.name)
    context.console.line(f"the default environment is {environments.default}")


def _rename(arguments: argparse.Namespace, environments: Environments, context: Context) -> None:
    environments.rename(arguments.name, arguments.new_name)
    context.console.line(f"{arguments.name} is now {arguments.new_name}")


def _delete(arguments: argparse.Namespace, environments: Environments, context: Context) -> None:
    environments.delete(arguments.name)
    context.console.line(f"{arguments.name} is forgotten")


def _ask(question: str, option: str, context: Context) -> str:
    _require_terminal(option)
    context.console.err.write(question)
    context.console.err.flush()
    return sys.stdin.readline().strip()


def _require_terminal(option: str) -> None:
    if not sys.stdin or not sys.stdin.isatty():
        raise InputError(f"{option} must be given: there is no terminal to ask on")


_ACTIONS: dict[str, Action] = {
    "list": _list,
    "configure": _configure,
    "default": _default,
    "rename": _rename,
    "delete": _delete,
}
