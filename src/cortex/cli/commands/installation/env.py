"""`cortex env`: list, add, change, rename and delete environments, and choose the default."""

from __future__ import annotations

import argparse
import getpass
import sys
from collections.abc import Callable

from cortex.cli.arguments import add_output
from cortex.cli.session import Session
from cortex.client.environments import Environments
from cortex.errors import InputError

Action = Callable[[argparse.Namespace, Environments, Session], None]


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="list environments", description="List environments.")
    add_output(listing)
    adding = actions.add_parser(
        "configure", help="add or change an environment", description="Add or change an environment."
    )
    adding.add_argument("name", metavar="NAME", help="name of the environment")
    adding.add_argument(
        "--operator-endpoint",
        "--operator",
        metavar="URL",
        help="address of its operator, or of several with commas between; prompted for if omitted",
    )
    adding.add_argument(
        "--token", metavar="TOKEN", help="token of its operator; prompted for if omitted, `-` reads it from stdin"
    )
    adding.add_argument("--ca", metavar="FILE", help="CA certificates (PEM) to trust instead of those of the system")
    adding.add_argument(
        "--gateway-host", metavar="HOST", default="", help="host of its APIs, if it is not that of the operator"
    )
    for name, text in (("default", "show or set the default environment"), ("delete", "delete an environment")):
        action = actions.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        optional = "?" if name == "default" else None
        action.add_argument("name", metavar="NAME", nargs=optional, help="name of the environment")
    renaming = actions.add_parser("rename", help="rename an environment", description="Rename an environment.")
    renaming.add_argument("name", metavar="OLD", help="current name")
    renaming.add_argument("new_name", metavar="NEW", help="new name")


def run(arguments: argparse.Namespace, session: Session) -> int:
    """Run the action."""
    _ACTIONS[arguments.action](arguments, session.environments, session)
    return 0


def _list(arguments: argparse.Namespace, environments: Environments, session: Session) -> None:
    default = environments.default
    known = [{**item.describe(), "default": item.name == default} for item in environments.known()]
    if arguments.output == "json":
        session.console.json(known)
    else:
        rows = [[str(e["name"]), str(e["operator_endpoint"] or "not running"), "*" * bool(e["default"])] for e in known]
        session.console.table(["env", "operator", "default"], rows)


def _configure(arguments: argparse.Namespace, environments: Environments, session: Session) -> None:
    endpoint, token = arguments.operator_endpoint, arguments.token
    is_known = arguments.name in [each.name for each in environments.known()]
    keeps = is_known and endpoint is None and bool(arguments.ca or arguments.gateway_host or token)
    if endpoint is None and not keeps:
        endpoint = _ask("operator endpoint: ", "--operator-endpoint", session)
    if token == "-":
        token = sys.stdin.readline().strip()
    elif token is None and not keeps:
        _require_terminal("--token")
        token = getpass.getpass("token: ").strip()
    environment = environments.configure(arguments.name, endpoint, token, arguments.ca, arguments.gateway_host)
    session.console.line(f"the environment {environment.name} is {environment.operator_endpoint}")


def _default(arguments: argparse.Namespace, environments: Environments, session: Session) -> None:
    if arguments.name:
        environments.set_default(arguments.name)
    session.console.line(f"the default environment is {environments.default}")


def _rename(arguments: argparse.Namespace, environments: Environments, session: Session) -> None:
    environments.rename(arguments.name, arguments.new_name)
    session.console.line(f"renamed the environment {arguments.name} to {arguments.new_name}")


def _delete(arguments: argparse.Namespace, environments: Environments, session: Session) -> None:
    environments.delete(arguments.name)
    session.console.line(f"deleted the environment {arguments.name}")


def _ask(question: str, option: str, session: Session) -> str:
    _require_terminal(option)
    session.console.ask(question)
    return sys.stdin.readline().strip()


def _require_terminal(option: str) -> None:
    if not sys.stdin or not sys.stdin.isatty():
        raise InputError(f"{option} is required because there is no terminal to prompt on")


_ACTIONS: dict[str, Action] = {
    "list": _list,
    "configure": _configure,
    "default": _default,
    "rename": _rename,
    "delete": _delete,
}
