"""Trials: the newest revision of an API gets a part of its requests until it is promoted or rolled back.

```text
                 every step was passed, or `cortex promote`
    TRYING ─────────────────────────────────────────────────▶ PROMOTED: it replaces the old one by a rolling update
      │  │
      │  └── `give_up_after` is over ──▶ as `on_no_decision` says: HELD, PROMOTED or ROLLED_BACK
      │
      └── a property is worse ─────────▶ ROLLED_BACK: the old revision is deployed again
```

With `shadow`, a trial begins with copies of all requests, whose responses are discarded; its first step follows.
A HELD trial keeps its share of the requests, and is still promoted or rolled back by the evidence or by a person. A
revision that was live before is not tried again, so that a rollback takes effect at once. One whose trial ended without
that is tried anew if it is deployed again, because what it failed for may have been mended elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum

from cortex.config.schema import CanaryConfig
from cortex.errors import ConflictError
from cortex.gateway.routes import COPIES_OF_ALL
from cortex.lifecycle import ApiKind
from cortex.operator.canary.judge import Finding, Judge, PropertyFinding, overall
from cortex.operator.deploy.history import version_changes
from cortex.operator.deploy.model_pins import pins_of, with_pins
from cortex.payloads.json_object import Json
from cortex.state.queries.apis import ApiRecord, ApiStore
from cortex.state.queries.key_values import KeyValueStore

#: Of the names under which trials are stored.
_PREFIX = "canary/"


class TrialOutcome(StrEnum):
    """State of a trial."""

    TRYING = "trying"
    HELD = "held"
    PROMOTED = "promoted"
    ROLLED_BACK = "rolled back"


@dataclass(frozen=True)
class Trial:
    """A trial without its evidence, which is in a `Judge`."""

    revision: str
    number: int  #: of the revision in the API's history
    old_revision: str
    old_number: int | None
    step: int = 0
    is_shadow: bool = False  #: before the first step: gets copies of all requests, and responds to none
    step_requests: int = 0  #: of the new revision, since the step began
    began_at: float | None = None  #: UNIX time of its first response
    outcome: TrialOutcome = TrialOutcome.TRYING
    reason: str = ""  #: of the outcome
    models: str = ""  #: versions of models that differ; empty: none

    @property
    def is_open(self) -> bool:
        """Return whether the new revision gets a part of the requests."""
        return self.outcome in (TrialOutcome.TRYING, TrialOutcome.HELD)


def advance(trial: Trial, config: CanaryConfig, findings: Iterable[PropertyFinding], age_s: float) -> Trial:
    """Return the trial after a window. `age_s` is the time since the revision was deployed."""
    findings = list(findings)
    match overall(findings):
        case Finding.WORSE:
            return replace(trial, outcome=TrialOutcome.ROLLED_BACK, reason=_why(findings, Finding.WORSE))
        case Finding.NOT_WORSE if trial.step_requests >= config.min_requests:
            if trial.is_shadow:
                return replace(trial, is_shadow=False, step_requests=0)
            if trial.step + 1 < len(config.steps):
                return replace(trial, step=trial.step + 1, step_requests=0)
            return replace(trial, outcome=TrialOutcome.PROMOTED, reason=_why(findings, Finding.NOT_WORSE))
    if trial.outcome is TrialOutcome.TRYING and age_s >= config.give_up_after_s:
        reason = f"no decision within give_up_after: {_why(findings, Finding.UNKNOWN)}"
        outcomes = {"hold": TrialOutcome.HELD, "promote": TrialOutcome.PROMOTED, "roll_back": TrialOutcome.ROLLED_BACK}
        return replace(trial, outcome=outcomes[config.on_no_decision], reason=reason)
    return trial


def is_of_models(record: ApiRecord) -> bool:
    """Return whether the newest revision differs from the one that serves only by the versions of its models."""
    serving, pins = record.serving, pins_of(record.spec)
    if serving is None or not (pins and pins_of(serving.spec)):
        return False
    return replace(serving, hash=record.revision, spec=with_pins(serving.spec, pins)) == record.target


def _why(findings: Iterable[PropertyFinding], finding: Finding) -> str:
    return "; ".join(f"{each.name}: {_comparison(each)}" for each in findings if each.finding is finding)


def _comparison(found: PropertyFinding) -> str:
    if found.new is None:
        return "not compared yet"
    other = f"instead of {found.old:.2%}" if found.old is not None else f"tolerated: {found.margin:.2%}"
    return f"{found.new:.2%}{' ' if found.old is not None else ', '}{other}"


class Trials:
    """The trials of all APIs. Stored, so that an operator continues those of the one before."""

    def __init__(self, apis: ApiStore, store: KeyValueStore) -> None:
        self._apis = apis
        self._store = store
        self._known: dict[str, tuple[Trial, Judge]] = {}  #: by API; the trial of its newest revision
        self._ended: dict[str, Json] = {}  #: by API; what is stored, empty if nothing is

    def of(self, record: ApiRecord) -> tuple[Trial, Judge] | None:
        """Return the trial of an API's newest revision, whether open or not; None if it needs none."""
        config, serving = record.spec.update_strategy.canary, record.serving
        if config is None or record.spec.kind is not ApiKind.REALTIME:
            return None
        if serving is None or serving.hash == record.revision:
            return None
        known = self._known.get(record.name)
        if known is None or not self._is_about(record, known[0].revision, known[0].number, known[0].outcome):
            known = self._known[record.name] = self._load(record) or self._begin(record)
        if known[0].number != record.number:  # patched
            known = self._known[record.name] = replace(known[0], number=record.number), known[1]
        if not known[1].judges_by(config):  # patched
            known = self._known[record.name] = known[0], Judge(record.spec)
        return known

    def percents(self, records: Iterable[ApiRecord]) -> dict[str, int]:
        """Return the share of the newest revision of each API with an open trial, or one being rolled back.

        `COPIES_OF_ALL` stands for copies of all requests.
        """
        found: dict[str, int] = {}
        for record in records:
            if (trial := self.of(record)) is not None and (percent := _share(record, trial[0])) is not None:
                found[record.name] = percent
        return found

    def put(self, record: ApiRecord, trial: Trial) -> None:
        """Store a changed trial together with its evidence. It is stored before it takes effect."""
        _, judge = self._known[record.name]
        description = _description(record, trial, judge)
        data = {**asdict(trial), "judge": judge.dump(), "description": description}
        self._store.put(_key(record.name), json.dumps(data))
        self._known[record.name] = trial, judge
        self._ended[record.name] = data

    def promote(self, record: ApiRecord, by: str) -> None:
        """End the trial of an API in favour of its newest revision. Raises: ConflictError if none is open."""
        known = self.of(record)
        if known is None or not known[0].is_open:
            raise ConflictError(f"{record.name} has no canary; `cortex history {record.name}` shows its revisions")
        reason = f"promoted by {by}" if by else "promoted"
        self.put(record, replace(known[0], outcome=TrialOutcome.PROMOTED, reason=reason))

    def keep_only(self, apis: Iterable[str]) -> None:
        """Delete the trials of all other APIs."""
        kept = set(apis)
        self._store.delete_others(_PREFIX, [_key(api) for api in kept])
        for known in (self._known, self._ended):
            for api in known.keys() - kept:
                del known[api]

    def describe(self, record: ApiRecord) -> Json | None:
        """Return the JSON of the newest revision's trial, or of the one that ended with a return to it."""
        if (found := self.of(record)) is not None:
            return _description(record, *found)
        if record.name not in self._ended:
            self._ended[record.name] = self._stored(record.name)
        ended = self._ended[record.name]
        if ended.get("outcome") != TrialOutcome.ROLLED_BACK or ended["old_revision"] != record.revision:
            return None
        description: Json = ended["description"]
        return description

    def _stored(self, api: str) -> Json:
        text = self._store.get(_key(api))
        data: Json = json.loads(text) if text else {}
        return data

    def _load(self, record: ApiRecord) -> tuple[Trial, Judge] | None:
        data = self._stored(record.name)
        if not self._is_about(record, data.get("revision"), data.get("number", 0), data.get("outcome")):
            return None
        judge = Judge(record.spec)
        values = {each.name: data[each.name] for each in fields(Trial) if each.name in data}
        try:
            judge.load(data["judge"])
            return Trial(**{**values, "outcome": TrialOutcome(data["outcome"])}), judge
        except (KeyError, TypeError, ValueError):
            return None  # another version of cortex stored it; the trial starts over

    def _is_about(self, record: ApiRecord, revision: str | None, number: int, outcome: str | None) -> bool:
        """Return whether a trial is that of the newest deploy.

        Patches continue a trial. It has ended if another revision was deployed since then, or if it was rolled back.
        """
        if revision != record.revision or number == record.number:
            return revision == record.revision
        since = {entry.revision for entry in self._apis.history(record.name) if entry.number > number}
        return outcome != TrialOutcome.ROLLED_BACK and since == {revision}

    def _begin(self, record: ApiRecord) -> tuple[Trial, Judge]:
        serving = record.serving
        assert serving is not None
        config = record.spec.update_strategy.canary
        is_shadow = config is not None and config.shadow
        models = "; ".join(change.describe() for change in version_changes(serving.spec, record.spec))
        trial = Trial(
            record.revision, record.number, serving.hash, record.live_number, is_shadow=is_shadow, models=models
        )
        is_restart = serving.spec == record.spec and serving.project_hash == record.target.project_hash
        was_live = any(
            entry.revision == record.revision and entry.live_at is not None for entry in self._apis.history(record.name)
        )
        if is_restart or was_live:
            trial = replace(trial, outcome=TrialOutcome.PROMOTED, reason="it was live before")
        return trial, Judge(record.spec)


def _description(record: ApiRecord, trial: Trial, judge: Judge) -> Json:
    config = record.spec.update_strategy.canary
    return {
        "revision_number": trial.number,
        "old_revision_number": trial.old_number,
        "outcome": trial.outcome.value,
        "reason": trial.reason,
        "models": trial.models,
        "percent": 0 if trial.is_shadow else _share(record, trial) or 0,
        "shadow": trial.is_shadow,
        "step": trial.step + 1,
        "steps": [int(step.rstrip("%")) for step in _steps(record)],
        "step_requests": trial.step_requests,
        "max_latency_increase": config.max_latency_increase if config is not None else None,
        "findings": [finding.to_json() for finding in judge.findings()],
    }


def _share(record: ApiRecord, trial: Trial) -> int | None:
    if trial.outcome is TrialOutcome.PROMOTED:
        return None
    if trial.is_open and trial.is_shadow:
        return COPIES_OF_ALL
    steps = _steps(record)
    return int(steps[min(trial.step, len(steps) - 1)].rstrip("%")) if trial.is_open and steps else 0


def _steps(record: ApiRecord) -> list[str]:
    config = record.spec.update_strategy.canary
    return config.steps if config is not None else []


def _key(api: str) -> str:
    return f"{_PREFIX}{api}"
