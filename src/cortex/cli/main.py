"""The `cortex` command: import and run the module of a command, and report errors with their exit codes.

Uses argparse and imports one command module per call, because importing typer takes 90 ms, longer than the whole
`cortex version`.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from types import ModuleType

from cortex.cli.arguments import Parser
from cortex.cli.output import Console, report_bug, report_error
from cortex.cli.session import Session
from cortex.errors import CortexError, NotFoundError, UsageError
from cortex.home import Home
from cortex.spelling import nearest

#: Packages of `cli/commands`, whose modules have the names of their commands. "" is `cli/commands` itself.
_PACKAGES = {
    "projects": {
        "init": "write a new project",
        "dev": "serve a project in this terminal, and reload it when its files change",
        "deploy": "deploy the APIs of a configuration file and wait until they are live",
        "serve": "serve a model without code: detect its format and deploy it",
        "check": "find all mistakes in a project before deploying it",
        "export": "write a project as the build context of a container image, or print its manifest for Kubernetes",
        "simulate": "simulate the autoscaling of an API under recorded or synthetic traffic",
    },
    "apis": {
        "get": "show all APIs, one API with its jobs, or one job",
        "logs": "show the logs of an API's replicas or of a job's workers",
        "predict": "send one request to an API",
        "replay": "send the requests of a recording again, and compare the answers",
        "feedback": "send the true values of predictions that an API made",
        "submit": "submit a job to an API",
        "refresh": "replace all replicas of an API by new ones",
        "history": "list the revisions of an API",
        "promote": "let an API's newest revision replace the old one before its trial as a canary ends",
        "rollback": "deploy an earlier revision of an API again",
        "patch": "change the configuration of deployed APIs without changing their code",
        "delete": "delete an API, or stop a job",
    },
    "installation": {
        "up": "start the operator and the gateway of this machine",
        "down": "stop the operator, the gateway and all replicas of this machine",
        "upgrade": "let the version of this command take over the installation, while it serves",
        "backup": "write databases, projects, keys and settings of this machine to a file, while it serves",
        "restore": "restore a backup into an empty CORTEX_HOME",
        "dashboard": "open the dashboard of an operator in a browser",
        "status": "show the running processes of this machine",
        "keys": "create, list and revoke API keys",
        "tokens": "create, list and revoke operator tokens",
        "audit": "show who changed what, and when",
        "env": "manage environments: names for operators",
    },
    "": {
        "schema": "print the JSON Schema of cortex.yaml for editors",
        "version": "show the version",
        "completion": "print a completion script for a shell",
    },
}
COMMANDS = {name: text for commands in _PACKAGES.values() for name, text in commands.items()}

#: Names of commands in other tools.
_OTHER_NAMES = {
    **dict.fromkeys(("list", "ls", "ps", "describe"), "get"),
    **dict.fromkeys(("new", "create"), "init"),
    **dict.fromkeys(("apply", "run"), "deploy"),
    **dict.fromkeys(("remove", "rm", "undeploy"), "delete"),
    **dict.fromkeys(("validate", "lint"), "check"),
    **dict.fromkeys(("undo", "revert"), "rollback"),
    **dict.fromkeys(("build", "dockerize", "containerize"), "export"),
    "curl": "predict",
    "start": "up",
}
#: Commands that end what runs: suggested for a word that is almost the same only.
_DESTRUCTIVE = {"delete", "down"}
_SIMILAR_IF_DESTRUCTIVE = 0.75
#: What code raises that reads JSON of another form than expected.
_BAD_FORM = (KeyError, IndexError, TypeError, AttributeError, ValueError)
_INTERRUPTED = 130
_BROKEN_PIPE = 141
_PROLOGUE = "Serve Python classes as HTTP APIs."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    console = Console.of(os.environ)
    try:
        code = _run(list(sys.argv[1:] if arguments is None else arguments), console)
        console.flush()
        return code
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        console.abandon()
        return _BROKEN_PIPE
    except OSError as error:  # for example, a full disk; `_run` handles all other errors
        console.abandon()
        console.error(f"the output can't be written: {error.strerror or error}")
        return 1


def command_parser(name: str) -> Parser:
    """Return the argument parser of a command."""
    return _parser(name, load_command(name))


def _run(words: list[str], console: Console) -> int:
    home = Home.from_environ(os.environ)
    cause = "internal error"
    try:
        if words[:1] == ["help"] and len(words) > 1:
            words = [*words[1:], "--help"]
        if not words or words[0] in ("-h", "--help", "help"):
            console.line(_overview())
            return 0
        name = "version" if words[0] in ("-v", "--version") else words[0]
        if name not in COMMANDS:
            raise UsageError(_unknown(name, words[1:]))
        module = load_command(name)
        parsed = _parser(name, module).parse_args(words[1:])
        session = Session(home, os.environ, console)
        try:
            code: int = module.run(parsed, session)
        except NotFoundError as error:
            if guess := _similar_api(parsed, session):
                raise NotFoundError(f"{error}; did you mean {guess}?") from None
            raise
        except _BAD_FORM:
            cause = _remote_cause(parsed, session) or cause
            raise
        return code
    except CortexError as error:
        report_error(error, console)
        return error.exit_code
    except (KeyboardInterrupt, BrokenPipeError):
        raise
    except Exception as error:
        report_bug(error, home, console, cause)
        return 1
    finally:
        console.clear_progress()


def load_command(name: str) -> ModuleType:
    """Import the module of a command."""
    package = next(package for package, commands in _PACKAGES.items() if name in commands)
    return importlib.import_module(".".join(filter(None, ("cortex.cli.commands", package, name))))


def _parser(name: str, module: ModuleType) -> Parser:
    parser = Parser(prog=f"cortex {name}", description=_sentence(COMMANDS[name]))
    module.configure(parser)
    return parser


def _overview() -> str:
    from cortex import __version__  # noqa: PLC0415 - its import takes 20 ms, which other commands save

    width = max(map(len, COMMANDS))
    rows = [f"  {name:{width}}  {text}" for name, text in COMMANDS.items()]
    usage = ["usage: cortex COMMAND [ARGUMENTS]", "", _PROLOGUE, "", *rows, ""]
    return "\n".join(
        [*usage, f"`cortex COMMAND --help` shows the arguments of a command. This is version {__version__}."]
    )


def _unknown(name: str, words: Sequence[str]) -> str:
    if name.startswith("-"):
        return f"{name}: no such option; `cortex --help` lists the commands"
    if name == "stop":
        named = "`cortex delete API` deletes an API, and `cortex delete API JOB` stops a job"
        hint = "" if any(not word.startswith("-") for word in words) else "`cortex down` stops the installation; "
        return f"{name}: no such command; {hint}{named}"
    guess = _OTHER_NAMES.get(name) or nearest(name, COMMANDS.keys() - _DESTRUCTIVE)
    guess = nearest(name, _DESTRUCTIVE, _SIMILAR_IF_DESTRUCTIVE) or guess
    hint = f"did you mean `cortex {guess}`?" if guess else "`cortex --help` lists the commands"
    return f"{name}: no such command; {hint}"


def _similar_api(arguments: argparse.Namespace, session: Session) -> str | None:
    """Return a deployed API whose name is similar to the given one; None if that is deployed, or none is similar."""
    written = getattr(arguments, "api", None)
    if not isinstance(written, str):
        return None
    try:
        names = [api["spec"]["name"] for api in session.client(arguments.env).list_apis()]
    except CortexError:
        return None
    return None if written in names else nearest(written, names)


def _remote_cause(arguments: argparse.Namespace, session: Session) -> str:
    """Return why an answer of another machine's operator can't be read; "" if a command has called none."""
    from cortex.client.environments import LOCAL  # noqa: PLC0415 - only for such an error
    from cortex.client.transport import unreadable  # noqa: PLC0415

    try:
        environment = session.environments.get(arguments.env)
    except (AttributeError, CortexError):
        return ""
    return "" if environment.name == LOCAL else unreadable(environment.operator_endpoint)


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."


if __name__ == "__main__":
    sys.exit(main())
