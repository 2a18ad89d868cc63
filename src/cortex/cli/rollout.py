"""Show an update of an API: what it changes, its progress, and why it failed."""

from __future__ import annotations

import time
from dataclasses import dataclass

from cortex.cli.session import Session
from cortex.cli.tables.apis import previous_version_note
from cortex.client.client import Client
from cortex.errors import NotFoundError
from cortex.payloads.json_object import Json

#: Long polls are short on a terminal, where each updates the progress line, and longer elsewhere.
_PROGRESS_S = 0.5
_POLL_S = 5.0
#: A progress line names the logs after this time: what a process waits for is there.
_LOGS_AFTER_S = 10.0


@dataclass(frozen=True)
class UpdateOutcome:
    """End of an update: the API as in `cortex get -o json`, and whether it is live."""

    api: Json
    is_live: bool
    seconds: float


def show_result(result: Json, session: Session) -> None:
    """Print the message or the error of a deploy's result, and its changes."""
    if result["error"]:
        session.console.error(f"{result['api']}: {result['error']}")
        return
    session.console.line(result["message"])
    for line in result.get("changes", ()):  # older operators send none
        session.console.line(f"  {line}")
    if installs := result.get("installs"):
        session.console.line(f"  also installs: {', '.join(installs)}")
    session.console.flush()


def show_docs(api: Json, session: Session) -> None:
    """Print the address of the documentation page of an API, if it has one."""
    if docs := api.get("docs"):  # operators of an older version have none
        session.console.line(f"  docs: {docs}")


def wait(client: Client, name: str, session: Session, began: float | None = None) -> UpdateOutcome | None:
    """Show the progress of an API until it is live or has failed; return None if it was deleted in the meantime.

    `began` is the time of the update by `time.monotonic`, now by default: of several APIs, all are updated at once.
    """
    began = time.monotonic() if began is None else began
    poll_s = _PROGRESS_S if session.console.err_is_terminal else _POLL_S
    waits_for = ""
    while True:
        try:
            api = client.wait_api(name, poll_s)
        except NotFoundError:
            return None
        code, seconds = api["status"]["status_code"], time.monotonic() - began
        if code != "updating":
            return UpdateOutcome(api, code == "live", seconds)
        if (reason := api["status"].get("waits_for", "")) and reason != waits_for:
            session.console.note(f"{name}: {reason}")
            waits_for = reason
        session.console.progress(progress_line(name, api["status"], seconds))


def report_failure(api: Json, session: Session) -> str:
    """Print why an API did not become live; return the reason."""
    name, status = api["spec"]["name"], api["status"]
    failure = status.get("failure") or {}
    if failure.get("traceback"):
        session.console.note(failure["traceback"].rstrip())
    reason = str(failure.get("message") or status["message"])
    session.console.error(f"{name} failed to become live: {reason}")
    if note := previous_version_note(api):
        session.console.note(note)
    session.console.note(f"`cortex logs {name}` shows its logs; correct the error and deploy again")
    return reason


def progress_line(name: str, status: Json, seconds: float) -> str:
    """Return the progress of an update."""
    counts = status["replica_counts"]
    ready = f", {counts['updated']['ready']} of {counts['requested']} ready" if counts["requested"] else ""
    logs = f"; `cortex logs {name}` shows its output" if seconds >= _LOGS_AFTER_S else ""
    return f"{name}: {status['message']}{ready}, {seconds:.0f} s{logs}"
