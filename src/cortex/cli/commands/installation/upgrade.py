"""`cortex upgrade`: let the version that runs this command take over the installation, while it serves."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType

from cortex import __version__
from cortex.cli import rollout
from cortex.cli.session import Session
from cortex.cli.tables.canary import is_tried
from cortex.cli.upgrade_plan import UpgradeFacts, manager_of, problem, steps
from cortex.client.cleanup import stop_operator
from cortex.client.environments import LOCAL
from cortex.client.held_connections import HeldConnections
from cortex.client.local_operator import ListenOptions, leader_url, replace_operator
from cortex.errors import ConflictError, CortexError, OperatorUnavailableError
from cortex.home import Home
from cortex.installation import Installation, OperatorIdentity, read_operator
from cortex.payloads.json_object import Json

_CHECK_TIMEOUT_S = 30.0
_AGENT_TIMEOUT_S = 30.0
#: Time in which forwarded submissions are answered. Those that wait for something longer lose their connection.
_HELD_TIMEOUT_S = 10.0
_POLL_S = 0.1


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("--dry-run", action="store_true", help="only check, and print the steps")


def run(arguments: argparse.Namespace, session: Session) -> int:
    """Check, replace the operator, then replicas and model agent. Return 1 if replicas could not be replaced."""
    began = time.monotonic()
    home = session.home
    home.check()
    old = read_operator(home)
    if old is None:
        raise OperatorUnavailableError("no operator runs on this machine; `cortex up` starts one of this version")
    installation = Installation.read(home)
    facts = _facts(session, old, installation)
    if reason := problem(facts):
        raise ConflictError(reason)
    if not facts.is_replaced:
        session.console.begin(f"checking whether version {__version__} can take over")
        check(home, installation)
    backup = home.path / "backups" / f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{old.version}"
    plan = steps(facts, str(backup))
    if not plan:
        session.console.line(f"version {__version__} runs already; nothing to replace")
        if not (arguments.dry_run or facts.is_standby):
            _report_rest(session, facts)
        return 0
    if arguments.dry_run:
        for number, step in enumerate(plan, start=1):
            session.console.line(f"{number}. {step}")
        return 0
    held: HeldConnections | None = None
    if not facts.is_replaced:
        held = _replace_operator(session, old, facts, backup)
        operator = read_operator(home)
        if operator and (leader := leader_url(home, operator)):
            session.console.line(f"it is on standby: upgrade the leader, {leader}, if it runs an older version")
            return 0
    failed = [name for name in facts.apis if not _replace_replicas(session, name)]
    if facts.has_model_agent:
        _replace_model_agent(session)
    if held is not None:
        held.wait(_HELD_TIMEOUT_S)
    _report_rest(session, facts)
    if failed:
        session.console.error(f"not replaced: {', '.join(failed)}; their old replicas serve on")
        return 1
    session.console.line(f"version {__version__} has taken over ({time.monotonic() - began:.1f} s)")
    return 0


def _facts(session: Session, old: OperatorIdentity, installation: Installation) -> UpgradeFacts:
    home, is_standby = session.home, leader_url(session.home, old) is not None
    status: Json = {} if is_standby else session.client(LOCAL).operator_status()
    apis = [] if is_standby else session.client(LOCAL).list_apis()
    is_replaced = old.version == __version__ and old.command[:1] == [sys.executable]
    serving = [replica for replica in status.get("replicas", ()) if replica["state"] not in ("stopping", "stopped")]
    replaceable = {replica["api"] for replica in serving if not (is_replaced and _runs_this_version(replica))}
    models = status.get("models")
    return UpgradeFacts(
        old=old.version or "(unknown)",
        new=__version__,
        pid=old.pid,
        is_replaced=is_replaced,
        manager=manager_of(old.pid, old.command, old.environ),
        database_bytes=sum(file.stat().st_size for file in _databases(home) if file.exists()),
        free_bytes=shutil.disk_usage(home.path).free,
        has_postgresql=installation.database is not None,
        is_standby=is_standby,
        apis=[
            api["spec"]["name"]
            for api in apis
            if api["spec"]["name"] in replaceable
            and sum(api["status"]["replica_counts"][age]["ready"] for age in ("updated", "stale"))
        ],
        has_model_agent=models is not None and not (is_replaced and _runs_this_version(models)),
    )


def _runs_this_version(process: Json) -> bool:
    """Return whether a process runs the cortex of this command; those of older versions report nothing."""
    is_here = process.get("node") or process.get("environment") == sys.prefix  # nodes have environments of their own
    return bool(is_here) and process.get("version") == __version__


def _databases(home: Home) -> tuple[Path, Path]:
    return home.database_file, home.jobs_database_file


def check(home: Home, installation: Installation) -> None:
    """Check what an operator of this version needs, while the old one runs. Raises: CortexError."""
    try:
        _check(home, installation)
    except CortexError:
        raise
    except Exception as error:  # of any kind: modules of this version are imported
        is_described = isinstance(error, OSError | subprocess.TimeoutExpired)
        reason = str(error) if is_described else f"{type(error).__name__}: {error}"
        raise CortexError(f"version {__version__} can't take over: {reason}") from None


def _check(home: Home, installation: Installation) -> None:
    # Only this command needs these modules: those of the operator.
    import cortex.operator.main  # noqa: F401, PLC0415
    from cortex.gateway.config import CONFIG_FILE  # noqa: PLC0415
    from cortex.gateway.haproxy import find_binary  # noqa: PLC0415
    from cortex.state.database import check_address, check_version  # noqa: PLC0415
    from cortex.state.database_copies import try_migrations  # noqa: PLC0415

    options = ListenOptions()
    options.command(home)
    options.check_ports(home, installation)
    installation.check_modules()
    command = [find_binary(), "-c", "-q", "-f", CONFIG_FILE]
    done = subprocess.run(
        command, cwd=home.run_dir / "gateway", capture_output=True, text=True, timeout=_CHECK_TIMEOUT_S, check=False
    )
    if done.returncode:
        raise CortexError(f"{command[0]} refuses the configuration of the gateway: {done.stderr.strip()}")
    if installation.database is None:
        try_migrations(*_databases(home))
    else:
        check_address(installation.database)
        check_version(installation.database)


def _replace_operator(session: Session, old: OperatorIdentity, facts: UpgradeFacts, backup: Path) -> HeldConnections:
    from cortex.state.database_copies import back_up, restore  # noqa: PLC0415 - only for this step

    held = HeldConnections(session.home.jobs_socket)
    stack = contextlib.ExitStack()

    def hand_over() -> None:
        session.console.line(f"stopping the operator {facts.old} (pid {old.pid})")
        session.console.flush()
        stack.enter_context(held)
        stop_operator(session.home)
        if not facts.has_postgresql:
            back_up(_databases(session.home), backup)
            session.console.line(f"backed up the databases in {backup}")

    def undo() -> None:
        if backup.exists():
            try:
                restore(_databases(session.home), backup)
            except CortexError as error:  # the old version may know the schema
                session.console.error(str(error))

    try:
        with raise_at_signals(), stack:
            operator = replace_operator(session.home, old, hand_over, undo)
    except OSError as error:
        raise CortexError(f"the operator can't be replaced: {error}") from None
    session.console.line(f"started the operator {operator.version} (pid {operator.pid})")
    session.console.flush()
    return held


@contextlib.contextmanager
def raise_at_signals() -> Iterator[None]:
    """Raise SystemExit at the first SIGTERM or SIGHUP in the block, so that what was begun is undone, as for SIGINT."""

    def end(number: int, frame: FrameType | None) -> None:
        for each in before:
            signal.signal(each, lambda *_: None)  # not SIG_IGN, which the operator would inherit
        raise SystemExit(128 + number)

    # `nohup` ignores SIGHUP.
    numbers = [each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) is not signal.SIG_IGN]
    before = {each: signal.signal(each, end) for each in numbers}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _replace_replicas(session: Session, name: str) -> bool:
    """Replace the replicas of an API as an update; return False if those of the new version did not become ready."""
    client = session.client(LOCAL)
    try:
        if is_tried(client.get_api(name)):
            raise ConflictError("its newest revision is tried as a canary")
        client.refresh(name)
    except CortexError as error:
        session.console.note(f"{name} was left as it is: {error}; run `cortex upgrade` again afterwards")
        return True
    outcome = rollout.wait(client, name, session)
    if outcome is None:  # it was deleted
        return True
    if outcome.is_live:
        session.console.line(f"replaced the replicas of {name} ({outcome.seconds:.1f} s)")
        session.console.flush()
    else:
        rollout.report_failure(outcome.api, session)
    return outcome.is_live


def _replace_model_agent(session: Session) -> None:
    client = session.client(LOCAL)
    if not (before := client.operator_status()["models"]):
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(before["pid"], signal.SIGTERM)  # the operator starts one of its version
    deadline = time.monotonic() + _AGENT_TIMEOUT_S
    while (client.operator_status()["models"] or before) == before:
        if time.monotonic() > deadline:
            session.console.note("warning: the operator has not started the new model agent yet")
            return
        time.sleep(_POLL_S)
    session.console.line("replaced the model agent")


def _report_rest(session: Session, facts: UpgradeFacts) -> None:
    """Print which processes of other versions go on, and so need their environments."""
    import psutil  # noqa: PLC0415 - only for this step

    from cortex.gateway.haproxy import find_binary  # noqa: PLC0415

    status = session.client(LOCAL).operator_status()
    gateway = status["gateway"]["pid"]
    with contextlib.suppress(psutil.Error):
        if gateway and (binary := psutil.Process(gateway).exe()) != os.path.realpath(find_binary()):
            session.console.note(
                f"HAProxy continues to run {binary}: keep this file until the next `cortex down`, or reloads fail"
            )
    needed = defaultdict(set)
    for replica in status["replicas"]:
        # Old replicas of the APIs that were replaced may still finish requests.
        if replica["api"] not in facts.apis and not replica["node"]:
            environment = replica.get("environment") or "an environment of an earlier version"
            if environment != sys.prefix:
                needed[environment].add(replica["api"])
    for environment, apis in sorted(needed.items()):
        session.console.note(
            f"job workers, or replicas that finish requests, of {', '.join(sorted(apis))} run on with {environment}: "
            "keep this environment until they have ended"
        )
