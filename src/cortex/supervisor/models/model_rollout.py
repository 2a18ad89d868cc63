"""Blue-green rollout of models: standbys load the newest models, then take over from the serving workers.

The model agent sends two catalogues: the confirmed one, and a candidate that its next listing may confirm. The rollout
compares them with the catalogue being served:

State                 Condition                                               Action of `tick`
-------------------   -----------------------------------------------------   -----------------------------------------
waiting               no confirmed catalogue yet                              workers wait, with the agent's error
starting              no worker is ready                                      start workers once a named model exists
serving               confirmed needs no new process                          send the catalogue to running workers
preparing             confirmed, or the candidate, needs new processes        one standby per worker loads it
prepared              every standby is ready and has loaded confirmed         standbys take over; workers retire
blamed                a standby died, or a worker died while it loaded        drop the standbys; avoid that content for
                                                                              300 s (5 s after a first death by signal)

Contents to avoid are left out of a catalogue (`servable`), so a bad version never replaces a good one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from cortex.lifecycle import DeathCause, ProcessState
from cortex.models.protocol import CatalogueUpdate
from cortex.models.spec import DEFAULT_MODEL, Catalogue, Model, ModelProblem, ModelSource, Version
from cortex.supervisor.models.worker_models import LoadedVersion, find_extra_versions
from cortex.supervisor.process_slot import ProcessSlot
from cortex.worker.spec import ModelsStatus, ServedVersion

if TYPE_CHECKING:
    from cortex.supervisor.supervisor import Supervisor

#: Retry interval of content that could not be loaded: a missing resource (memory, a service) may be available then.
RETRY_S = 300.0
#: Retry interval after the first death by a signal, which may have another cause.
SIGNAL_RETRY_S = 5.0
#: Slower loads are reported.
SLOW_LOAD_S = 60.0
#: Longer absences of the model agent are reported.
AGENT_AWAY_S = 10.0
_SHOWN_VERSIONS, _SHOWN_PROBLEMS = 300, 20
_KEPT_FILES = 3
#: Unloadable models in a row that are skipped at the start without a delay.
_MAX_FALL_BACKS = 10
#: Interval of full checks without a visible change.
_CHECK_S = 1.0

_SIGNALS = (DeathCause.KILLED, DeathCause.SIGNALLED, DeathCause.OUT_OF_MEMORY)


@dataclass
class _BadContent:
    problem: ModelProblem
    until: float  #: monotonic


class ModelRollout:
    """The models of one replica. `workers` is the supervisor's list of serving workers, by index."""

    def __init__(self, source: ModelSource, run_dir: Path, workers: list[ProcessSlot], supervisor: Supervisor) -> None:
        self.standbys: list[ProcessSlot] = []
        self._source = source
        self._run_dir = run_dir
        self._workers = workers
        self._supervisor = supervisor
        self._serving: Catalogue | None = None
        self._confirmed: Catalogue | None = None
        self._candidate: Catalogue | None = None
        self._error: str | None = None
        self._error_since = 0.0
        self._standby_since = math.inf
        self._bad: dict[tuple[str, str], _BadContent] = {}
        self._files = 0
        self._unwritten: ModelProblem | None = None
        self._fall_backs = 0
        self._seen: object = None
        self._check_at = 0.0
        self.status = ModelsStatus()  #: the served versions, and the problems of others
        self.using: set[str] = set()  #: contents that processes have loaded, or that their successors may load

    def on_catalogue(self, news: CatalogueUpdate) -> None:
        """Handle an update of the model agent.

        Raises: OSError, ValueError, KeyError, TypeError if its files are invalid.
        """
        if news.error != self._error:
            self._error, self._error_since = news.error, time.time()
        if not self._source.is_live and self._serving is not None:
            return  # from a restarted agent; a source that is not live is read once
        if news.confirmed:
            self._confirmed = Catalogue.from_json(Path(news.confirmed).read_bytes())
        self._candidate = Catalogue.from_json(Path(news.candidate).read_bytes()) if news.candidate else None

    # Time.

    def tick(self, now: float, agent_lost_since: float | None) -> None:
        """Take the next step towards the confirmed catalogue; nearly free while nothing changes."""
        away = agent_lost_since is not None and now - agent_lost_since > AGENT_AWAY_S
        if now < self._check_at and self._seen == self._signature(away):
            return
        self._check_at = now + _CHECK_S
        self._act(now, away)
        if self._unwritten is not None and self._serving is not None:
            self._write(self._serving)
        self._seen = self._signature(away)
        self.status = self._describe(away)
        self.using = {version.digest for worker in self._everyone() for version in worker.models.loaded}
        for worker in self._everyone():
            if worker.models.catalogue is not None:
                self.using |= {model.latest.digest for model in worker.models.catalogue.models}

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
            standbys, self.standbys = self.standbys, []
            for index, new in enumerate(standbys):
                old, self._workers[index] = self._workers[index], new
                self._supervisor.swap(old, new)
            self._serving = None
            self._adopt(target)
            return
        if not any(worker.state is ProcessState.READY for worker in self._workers):
            self._start_with(target)
            return
        self._fall_backs = 0
        if self._takes_new_process(target):
            self._prepare(target)
            return
        self._adopt(target)
        # What to serve if the next listing confirms the candidate is loaded in advance.
        speculative = servable(self._candidate, self._avoided(now), self._serving) if self._candidate else None
        if speculative is not None and self._takes_new_process(speculative):
            self._prepare(speculative)
        else:
            self._drop_standbys()

    def _takes_new_process(self, target: Catalogue) -> bool:
        assert self._serving is not None
        return not self._source.is_cached and needs_new_process(self._serving, target, _loaded_by(self._workers))

    def _is_prepared(self, target: Catalogue) -> bool:
        """Return whether the standbys are ready and have loaded `target`, or an equivalent."""
        if not self.standbys or any(worker.state is not ProcessState.READY for worker in self.standbys):
            return False
        present = self.standbys[0].models.catalogue
        return present is not None and not needs_new_process(present, target, _loaded_by(self.standbys))

    def _wait(self, reason: str | None) -> None:
        for worker in self._workers:
            if worker.pid is None:
                worker.wait(reason)

    def _start_with(self, target: Catalogue) -> None:
        """Start the workers while none is ready; a new catalogue may work where the last one failed."""
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
                self._supervisor.start(worker)

    def _adopt(self, target: Catalogue) -> None:
        """Make `target` the catalogue of the running processes and their successors."""
        if target == self._serving:
            return
        self._serving = target
        for worker in self._workers:
            worker.models.catalogue, worker.models.file = target, None
        self._write(target)

    def _write(self, catalogue: Catalogue) -> None:
        """Write the catalogue to a file, which the running processes receive."""
        file = self._run_dir / f"catalogue-{self._files + 1}.json"
        try:
            file.write_bytes(catalogue.to_json())
            (self._run_dir / f"catalogue-{self._files + 1 - _KEPT_FILES}.json").unlink(missing_ok=True)
        except OSError as error:  # a full disk must not end the serving processes
            text = f"changes of models that are not loaded are not noticed: {error}"
            self._unwritten = self._unwritten or ModelProblem("", None, text, time.time())
            return
        self._files += 1
        self._unwritten = None
        for worker in self._workers:
            worker.models.file = file

    # Standbys.

    def _prepare(self, target: Catalogue) -> None:
        """Start standbys that load `target`, unless they already load an equivalent."""
        if self.standbys:
            present = self.standbys[0].models.catalogue
            assert present is not None
            if not needs_new_process(present, target, _loaded_by(self.standbys)):
                return
            self._drop_standbys()
        asked = frozenset[tuple[str, str]]().union(*(worker.models.asked for worker in self._workers))
        extra_versions = find_extra_versions(asked, target)
        self._standby_since = time.time()
        for index in range(len(self._workers)):
            worker = self._supervisor.create_standby(index)
            worker.models.catalogue, worker.models.extra_versions = target, extra_versions
            self.standbys.append(worker)
            self._supervisor.start(worker)

    def _drop_standbys(self) -> None:
        for worker in self.standbys:
            worker.stop(time.monotonic(), 0)
        self.standbys = []

    def on_death(self, worker: ProcessSlot, was_starting: bool) -> None:
        """Handle the death of a process; blame the models that it was about to serve."""
        if worker in self.standbys:
            assert worker.models.catalogue is not None
            suspects = [worker.models.loading] if worker.models.loading else []
            for version in suspects or changed(self._serving, worker.models.catalogue):
                self._blame(version, worker)
            self._drop_standbys()
        elif was_starting and worker.models.loading is not None and self._confirmed is not None:
            self._fall_back(worker, worker.models.loading)

    def _fall_back(self, worker: ProcessSlot, version: LoadedVersion) -> None:
        """Repeat the start with the previous version, or without the model, if all named models remain."""
        assert self._confirmed is not None
        avoided = {*self._avoided(time.monotonic()), (version.model, version.digest)}
        target = servable(self._confirmed, avoided, None)
        wanted = {path.name for path in self._source.paths}
        if not target.models or not wanted <= target.by_name.keys() or self._fall_backs >= _MAX_FALL_BACKS:
            return  # the usual backoff: there is no alternative
        self._fall_backs += 1
        self._blame(version, worker)
        worker.forgive_start()

    def _blame(self, version: LoadedVersion, worker: ProcessSlot) -> None:
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
        self._bad[key] = _BadContent(problem, time.monotonic() + (SIGNAL_RETRY_S if is_first_signal else RETRY_S))

    def _avoided(self, now: float) -> set[tuple[str, str]]:
        return {key for key, bad in self._bad.items() if now < bad.until}

    # Status.

    def _everyone(self) -> Iterator[ProcessSlot]:
        yield from self._workers
        yield from self.standbys

    def _describe(self, away: bool) -> ModelsStatus:
        serving = self._serving or Catalogue(())
        loaded = _loaded_by(self._workers)
        versions = [
            ServedVersion(
                model.name,
                version.number,
                version.digest[:12],
                version.modified_at,
                version is model.latest,
                LoadedVersion(model.name, version.number, version.digest) in loaded,
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
        loaded = {(version.model, version.digest) for version in _loaded_by(self._workers)}
        candidate = self._candidate or Catalogue(())
        present = there | {(model.name, version.digest) for model, version in candidate.versions()}
        known = {key: bad for key, bad in self._bad.items() if key in present}
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


def _loaded_by(workers: list[ProcessSlot]) -> frozenset[LoadedVersion]:
    return frozenset().union(*(worker.models.loaded for worker in workers))


def servable(target: Catalogue, bad: Collection[tuple[str, str]], serving: Catalogue | None) -> Catalogue:
    """Return `target` without the contents in `bad`, pairs of (model, digest) that can't be loaded.

    A version whose content is bad keeps the content being served. If there is none, it is omitted, and the next lower
    version becomes the latest, unless the version was pinned. A model without usable versions stays as it is served, or
    is omitted.
    """
    before = serving.by_name if serving else {}
    models = []
    for model in target.models:
        old = before.get(model.name)
        versions = tuple(_usable(model, bad, old))
        if versions and model.pinned in (None, *(version.number for version in versions)):
            models.append(replace(model, versions=versions))
        elif old is not None and (old.name, old.latest.digest) not in bad:
            models.append(old)
    return Catalogue(tuple(models), target.problems)


def _usable(model: Model, bad: Collection[tuple[str, str]], old: Model | None) -> Iterable[Version]:
    contents = {version.number: version for version in old.versions} if old else {}
    for version in model.versions:
        if (model.name, version.digest) not in bad:
            yield version
            continue
        kept = contents.get(version.number)
        if kept is not None and (model.name, kept.digest) not in bad:
            yield kept


def needs_new_process(serving: Catalogue, target: Catalogue, loaded: Collection[LoadedVersion]) -> bool:
    """Return whether `target` changes a version that a process has loaded, or a latest version."""
    for model in target.models:
        before = serving.by_name.get(model.name)
        if before is None or _content(before.latest) != _content(model.latest):
            return True
        if before.signature_key != model.signature_key:
            return True
    for version in loaded:
        now = target.find(version.model, version.number)
        if now is not None and now.digest != version.digest:
            return True
    return False


def changed(serving: Catalogue | None, target: Catalogue) -> list[LoadedVersion]:
    """Return the latest versions in `target` that `serving` lacks: the suspects if `target` can't be loaded."""
    before = serving.by_name if serving else {}
    return [
        LoadedVersion(model.name, model.latest.number, model.latest.digest)
        for model in target.models
        if model.name not in before or _content(before[model.name].latest) != _content(model.latest)
    ]


def missing_model(target: Catalogue, names: Iterable[str]) -> str | None:
    """Return the reason why none of the named models, or of any without names, can be served yet; None if one can."""
    wanted = list(names)
    if any(name in target.by_name for name in wanted or target.by_name):
        return None
    problems = [problem.message for problem in target.problems if not wanted or problem.model in wanted]
    return "; ".join(problems[:_SHOWN_PROBLEMS]) or "the model path has no valid model"


def _content(version: Version) -> tuple[str, str]:
    return version.number, version.digest
