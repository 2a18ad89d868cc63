"""Keeps a replica's workers on the newest models that work: a standby loads them beside, then takes over.

It decides by `model_plan` and acts on workers; sockets, forks and logs are the supervisor's.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from cortex.lifecycle import DeathCause, ProcessState
from cortex.models.protocol import CatalogueUpdate
from cortex.models.spec import DEFAULT_MODEL, Catalogue, ModelProblem, ModelSource
from cortex.replica.spec import ModelsStatus, ServedVersion
from cortex.supervisor.model_plan import (
    Loaded,
    also_loaded,
    changed,
    missing_model,
    needs_new_process,
    servable,
)
from cortex.supervisor.process_slot import Slot

#: Content that could not be loaded is tried again after so long: what it lacked (memory, a service) may be there then.
RETRY_S = 300.0
#: … but after the first death by a signal, which may have been anybody's, sooner.
SIGNAL_RETRY_S = 5.0
#: A load that takes longer is reported.
SLOW_LOAD_S = 60.0
#: How long the agent may be away before that is reported.
AGENT_AWAY_S = 10.0
_SHOWN_VERSIONS, _SHOWN_PROBLEMS = 300, 20
_KEPT_FILES = 3
#: So many models in a row may turn out to be unloadable at the start before the usual back-off sets in.
_MAX_FALL_BACKS = 10
#: How often everything is looked at though nothing seems to have changed.
_LOOK_S = 1.0

_SIGNALS = (DeathCause.KILLED, DeathCause.SIGNALLED, DeathCause.OUT_OF_MEMORY)


class Shop(Protocol):
    """What the supervisor does for us."""

    def create_standby(self, index: int) -> Slot:
        """Make a worker without connections for a slot, and do not start it yet."""

    def start(self, worker: Slot) -> None:
        """Fork its process."""

    def swap(self, old: Slot, new: Slot) -> None:
        """Let `new` take connections instead of `old`, which retires."""


@dataclass
class _Bad:
    problem: ModelProblem
    until: float  #: monotonic


class Reloading:
    """The models of one replica. `workers` is the supervisor's list of those that serve, by slot."""

    def __init__(self, source: ModelSource, run_dir: Path, workers: list[Slot], shop: Shop) -> None:
        self.standbys: list[Slot] = []
        self._source = source
        self._run_dir = run_dir
        self._workers = workers
        self._shop = shop
        self._serving: Catalogue | None = None
        self._confirmed: Catalogue | None = None
        self._candidate: Catalogue | None = None
        self._error: str | None = None
        self._error_since = 0.0
        self._standby_since = math.inf
        self._bad: dict[tuple[str, str], _Bad] = {}
        self._files = 0
        self._unwritten: ModelProblem | None = None
        self._fall_backs = 0
        self._seen: object = None
        self._look_at = 0.0
        self._status = ModelsStatus()
        self._using: set[str] = set()

    @property
    def status(self) -> ModelsStatus:
        """What is served, and why other things are not."""
        return self._status

    @property
    def using(self) -> set[str]:
        """The contents that processes have loaded, or that their successors may need."""
        return self._using

    def on_catalogue(self, news: CatalogueUpdate) -> None:
        """Take what the agent says. Raises: OSError, ValueError, KeyError, TypeError if its files can't be read."""
        if news.error != self._error:
            self._error, self._error_since = news.error, time.time()
        if not self._source.is_live and self._serving is not None:
            return  # another agent, which listed anew
        if news.confirmed:
            self._confirmed = Catalogue.from_json(Path(news.confirmed).read_bytes())
        self._candidate = Catalogue.from_json(Path(news.candidate).read_bytes()) if news.candidate else None

    # Time.

    def tick(self, now: float, agent_lost_since: float | None) -> None:
        """Bring the workers nearer to what they should serve; costs next to nothing while nothing changes."""
        away = agent_lost_since is not None and now - agent_lost_since > AGENT_AWAY_S
        if now < self._look_at and self._seen == self._signature(away):
            return
        self._look_at = now + _LOOK_S
        self._act(now, away)
        if self._unwritten is not None and self._serving is not None:
            self._write(self._serving)
        self._seen = self._signature(away)
        self._status = self._describe(away)
        self._using = self._find_used()

    def _signature(self, away: bool) -> object:
        workers = [(worker.state, worker.pid, id(worker.models.loaded)) for worker in self._everyone()]
        return workers, away, id(self._confirmed), id(self._candidate), self._error, len(self._bad)

    def _act(self, now: float, away: bool) -> None:
        if self._confirmed is None:
            reason = "the model agent can't be reached; the operator starts it" if away else self._error
            self._wait(reason)
            return
        target = servable(self._confirmed, self._avoided(now), self._serving)
        if self._is_prepared(target):
            self._swap(target)
            return
        if not any(worker.state is ProcessState.READY for worker in self._workers):
            self._start_with(target)
            return
        self._fall_backs = 0
        if self._takes_new_process(target):
            self._prepare(target)
            return
        self._adopt(target)
        speculative = self._speculative(now)
        if speculative is not None and self._takes_new_process(speculative):
            self._prepare(speculative)
        else:
            self._drop_standbys()

    def _takes_new_process(self, target: Catalogue) -> bool:
        assert self._serving is not None
        return not self._source.is_cached and needs_new_process(self._serving, target, self._loaded())

    def _is_prepared(self, target: Catalogue) -> bool:
        """Tell whether standbys wait that have loaded `target`, or something as good."""
        if not self.standbys or any(worker.state is not ProcessState.READY for worker in self.standbys):
            return False
        present = self.standbys[0].models.catalogue
        return present is not None and not needs_new_process(present, target, self._loaded_by(self.standbys))

    def _speculative(self, now: float) -> Catalogue | None:
        """Return what will be there if the newest change turns out to be complete: it is loaded meanwhile."""
        return servable(self._candidate, self._avoided(now), self._serving) if self._candidate else None

    def _wait(self, reason: str | None) -> None:
        for worker in self._workers:
            if worker.pid is None:
                worker.wait(reason)

    def _start_with(self, target: Catalogue) -> None:
        """Nothing serves yet, or nothing can be started: what is found newly may mend that."""
        if any(worker.pid is not None for worker in self._workers):
            return
        names = [path.name for path in self._source.paths]
        reason = missing_model(target, names)
        if reason is not None:
            self._wait(reason)
            return
        is_new = self._serving is None or target.models != self._serving.models
        self._adopt(target)
        if is_new:
            for worker in self._workers:
                self._shop.start(worker)

    def _adopt(self, target: Catalogue) -> None:
        """Make `target` what the present processes, and those that follow them, know."""
        if target == self._serving:
            return
        self._serving = target
        for worker in self._workers:
            worker.models.catalogue, worker.models.file = target, None
        self._write(target)

    def _write(self, catalogue: Catalogue) -> None:
        """Write what the present processes are to be told; they are told once that is possible."""
        file = self._run_dir / f"catalogue-{self._files + 1}.json"
        try:
            file.write_bytes(catalogue.to_json())
            (self._run_dir / f"catalogue-{self._files + 1 - _KEPT_FILES}.json").unlink(missing_ok=True)
        except OSError as error:  # a full disk must not end what serves
            text = f"changes of models that are not loaded are not noticed: {error}"
            self._unwritten = self._unwritten or ModelProblem("", None, text, time.time())
            return
        self._files += 1
        self._unwritten = None
        for worker in self._workers:
            worker.models.file = file

    # Standbys.

    def _prepare(self, target: Catalogue) -> None:
        """See to it that standbys load `target`, or something as good."""
        if self.standbys:
            present = self.standbys[0].models.catalogue
            assert present is not None
            if not needs_new_process(present, target, self._loaded_by(self.standbys)):
                return
            self._drop_standbys()
        asked = frozenset[tuple[str, str]]().union(*(worker.models.asked for worker in self._workers))
        also = also_loaded(asked, target)
        self._standby_since = time.time()
        for index in range(len(self._workers)):
            worker = self._shop.create_standby(index)
            worker.models.catalogue, worker.models.also = target, also
            self.standbys.append(worker)
            self._shop.start(worker)

    def _swap(self, target: Catalogue) -> None:
        standbys, self.standbys = self.standbys, []
        for index, new in enumerate(standbys):
            old, self._workers[index] = self._workers[index], new
            self._shop.swap(old, new)
        self._serving = None
        self._adopt(target)

    def _drop_standbys(self) -> None:
        for worker in self.standbys:
            worker.stop(time.monotonic(), 0)
        self.standbys = []

    def on_death(self, worker: Slot, was_starting: bool) -> None:
        """Learn that a process died; if it was about to serve other models, they are to blame."""
        if worker in self.standbys:
            assert worker.models.catalogue is not None
            suspects = [worker.models.loading] if worker.models.loading else []
            for version in suspects or changed(self._serving, worker.models.catalogue):
                self._blame(version, worker)
            self._drop_standbys()
        elif was_starting and worker.models.loading is not None and self._confirmed is not None:
            self._fall_back(worker, worker.models.loading)

    def _fall_back(self, worker: Slot, version: Loaded) -> None:
        """Start with the version before, or without the model, where that leaves what was asked for."""
        assert self._confirmed is not None
        avoided = {*self._avoided(time.monotonic()), (version.model, version.digest)}
        target = servable(self._confirmed, avoided, None)
        wanted = {path.name for path in self._source.paths}
        if not target.models or not wanted <= target.by_name.keys() or self._fall_backs >= _MAX_FALL_BACKS:
            return  # the usual back-off: there is nothing else to try
        self._fall_backs += 1
        self._blame(version, worker)
        worker.forgive_start()

    def _blame(self, version: Loaded, worker: Slot) -> None:
        status = worker.status
        message, detail = "the process ended while it loaded the model", ""
        if status.failure is not None:
            message, detail = status.failure.message, status.failure.traceback
        elif status.death is not None:
            message = f"the process ended: {status.death.message}"
        key = (version.model, version.digest)
        since = self._bad[key].problem.since if key in self._bad else time.time()
        problem = ModelProblem(version.model, version.number, message, since, detail)
        is_first_signal = status.death is not None and status.death.cause in _SIGNALS and key not in self._bad
        self._bad[key] = _Bad(problem, time.monotonic() + (SIGNAL_RETRY_S if is_first_signal else RETRY_S))

    def _avoided(self, now: float) -> set[tuple[str, str]]:
        return {key for key, bad in self._bad.items() if now < bad.until}

    # What there is.

    def _everyone(self) -> Iterator[Slot]:
        yield from self._workers
        yield from self.standbys

    def _loaded(self) -> frozenset[Loaded]:
        return self._loaded_by(self._workers)

    def _loaded_by(self, workers: list[Slot]) -> frozenset[Loaded]:
        return frozenset().union(*(worker.models.loaded for worker in workers))

    def _find_used(self) -> set[str]:
        digests = {version.digest for worker in self._everyone() for version in worker.models.loaded}
        for worker in self._everyone():
            if worker.models.catalogue is not None:
                digests |= {model.latest.digest for model in worker.models.catalogue.models}
        return digests

    def _describe(self, away: bool) -> ModelsStatus:
        serving = self._serving or Catalogue(())
        loaded = self._loaded()
        versions = [
            ServedVersion(
                model.name,
                version.number,
                version.digest[:12],
                version.modified_at,
                version is model.latest,
                Loaded(model.name, version.number, version.digest) in loaded,
            )
            for model, version in serving.versions()
        ]
        return ModelsStatus(
            tuple(versions[:_SHOWN_VERSIONS]),
            len(versions),
            tuple(self._problems(away)[:_SHOWN_PROBLEMS]),
            bool(self.standbys),
        )

    def _problems(self, away: bool) -> list[ModelProblem]:
        problems = []
        if away:
            problems.append(ModelProblem("", None, "the model agent is away: changes of models are not noticed", 0.0))
        if self._error is not None and self._serving is not None:
            problems.append(ModelProblem("", None, self._error, self._error_since))
        problems += [self._unwritten] if self._unwritten is not None else []
        confirmed = self._confirmed or Catalogue(())
        there = {(model.name, version.digest) for model, version in confirmed.versions()}
        loaded = {(version.model, version.digest) for version in self._loaded()}
        known = {key: bad for key, bad in self._bad.items() if key in there or self._is_candidate(key)}
        self._bad = {key: bad for key, bad in known.items() if key not in loaded}
        problems += [bad.problem for key, bad in self._bad.items() if key in there]
        if self.standbys and time.time() - self._standby_since > SLOW_LOAD_S:
            text = f"is being loaded for more than {SLOW_LOAD_S:g} s; what was served before is still served"
            catalogue = self.standbys[0].models.catalogue or confirmed
            problems += [
                ModelProblem(version.model, version.number, text, self._standby_since)
                for version in changed(self._serving, catalogue)
            ]
        problems += confirmed.problems
        for worker in self._workers:
            problems += worker.models.problems.values()
        shown = {(problem.model, problem.version, problem.message): problem for problem in problems}
        return [replace(problem, model="") if problem.model == DEFAULT_MODEL else problem for problem in shown.values()]

    def _is_candidate(self, key: tuple[str, str]) -> bool:
        model = self._candidate.by_name.get(key[0]) if self._candidate else None
        return model is not None and any(version.digest == key[1] for version in model.versions)
