"""Decides from successive listings of a source which models are served: pure, one state in, the next one out.

A version counts once two listings in a row saw the same content; a removal, once two in a row didn't see it. Until
then, what was confirmed before stays. What only the newest listing saw is the candidate: others may prepare for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from cortex.models.layout import Judged, judge, parts
from cortex.models.listing import Listing, Prefix, newest_file
from cortex.models.spec import Catalogue, Model, ModelProblem, ModelSource, Version

#: A model's name and the number of a version.
Key = tuple[str, str]

#: Content that is older than so many poll intervals when first seen is taken for complete.
_OLD_INTERVALS = 2
#: After so many candidates in a row that never came to be, nobody prepares for a version until it rests.
_MAX_INVALIDATED = 3
_QUICK_S = 1.0

_STILL_CHANGING = "its files still change; it counts once two listings in a row find the same"


@dataclass(frozen=True)
class Part:
    """What is known of one prefix of a source."""

    taken_at: float  #: of the newest listing
    is_confirmed: bool  #: False: new content that no second listing has seen yet
    confirmed: Mapping[Key, Version]
    newest: Mapping[Key, Version]  #: valid ones in the newest listing
    held: frozenset[Key]  #: neither valid nor gone in the newest listing
    changes: Mapping[Key, int]  #: for how many listings in a row, up to the newest, each of these was another
    problems: tuple[ModelProblem, ...]

    def mark(self, key: Key) -> str | None:
        """Return what differs between two listings if this version does; None: it isn't there."""
        if key in self.held:
            return "held"
        version = self.newest.get(key)
        return version.digest if version else None

    def expected(self) -> dict[Key, Version]:
        """Return what will be confirmed if the next listing is like the newest."""
        stays = {key for key, count in self.changes.items() if count > _MAX_INVALIDATED} | self.held
        found = {key: version for key, version in self.newest.items() if key not in stays}
        return found | {key: self.confirmed[key] for key in stays if key in self.confirmed}


@dataclass(frozen=True)
class Settling:
    """What is known of a source; begins empty."""

    parts: Mapping[str, Part] = field(default_factory=dict)  #: by model; of a dir: by ""
    confirmed: Catalogue | None = None  #: None: not yet known
    candidate: Catalogue | None = None  #: None: like `confirmed`, or not yet known


def settle(state: Settling, source: ModelSource, listings: Mapping[Prefix, Listing]) -> Settling:
    """Take listings in. A prefix without one, or with the same one as before, stays as it was.

    Nothing is confirmed before each prefix was listed: a model must not go because its bucket can't be reached
    just now. Versions have no `path`.
    """
    found: dict[str, Part] = {}
    for prefix, name, signature_key in parts(source):
        before, listing = state.parts.get(name), listings.get(prefix)
        if listing is None or (before is not None and listing.taken_at == before.taken_at):
            if before is not None:
                found[name] = before
            continue
        judged = judge(source.layout, name, signature_key, listing, listing.taken_at)
        if before is None:
            found[name] = _first(judged, listing, source.poll_interval_s)
        else:
            found[name] = _next(before, judged, listing)
    return _combined(found, source)


def quick_interval_s(state: Settling, source: ModelSource) -> float | None:
    """Tell after how many seconds to list once more, sooner than planned, to know what to serve; None: not at all."""
    if all(part.is_confirmed for part in state.parts.values()):
        return None
    return min(_QUICK_S, source.poll_interval_s)


def _first(judged: Judged, listing: Listing, poll_interval_s: float) -> Part:
    newest = _by_key(judged.models)
    is_old = newest_file(listing) < listing.taken_at - _OLD_INTERVALS * poll_interval_s
    confirmed = newest if is_old else {}
    return Part(listing.taken_at, is_old, confirmed, newest, frozenset(), {}, judged.problems)


def _next(before: Part, judged: Judged, listing: Listing) -> Part:
    newest = _by_key(judged.models)
    known = before.confirmed.keys() | before.newest.keys()
    held = frozenset(key for key in known - newest.keys() if _is_held(key, judged))
    part = Part(listing.taken_at, True, {}, newest, held, {}, judged.problems)
    confirmed: dict[Key, Version] = {}
    changes: dict[Key, int] = {}
    for key in known | newest.keys():
        mark = part.mark(key)
        is_same = mark == before.mark(key)
        if not is_same:
            changes[key] = before.changes.get(key, 0) + 1
        if is_same and key in newest:
            confirmed[key] = newest[key]
        elif key in before.confirmed and (key in held or not is_same):
            confirmed[key] = before.confirmed[key]
    # At the start, better to wait a moment longer than to serve nothing.
    is_confirmed = before.is_confirmed or bool(confirmed) or not newest
    problems = _since_first(before.problems, (*judged.problems, *_restless(changes, listing.taken_at)))
    return replace(part, is_confirmed=is_confirmed, confirmed=confirmed, changes=changes, problems=problems)


def _is_held(key: Key, judged: Judged) -> bool:
    """Tell whether a version that isn't valid now is still there, for all we know."""
    name, number = key
    return judged.is_cut or (name, None) in judged.invalid or (name, number) in judged.invalid


def _restless(changes: Mapping[Key, int], now: float) -> list[ModelProblem]:
    return [
        ModelProblem(name, number, _STILL_CHANGING, now)
        for (name, number), times in sorted(changes.items())
        if times > 1
    ]


def _since_first(before: Iterable[ModelProblem], problems: Iterable[ModelProblem]) -> tuple[ModelProblem, ...]:
    """Return the problems, those that were there before with the time at which they began."""
    since = {(each.model, each.version, each.message): each.since for each in before}
    return tuple(
        replace(each, since=since.get((each.model, each.version, each.message), each.since)) for each in problems
    )


def _combined(found: Mapping[str, Part], source: ModelSource) -> Settling:
    if len(found) < len(parts(source)):
        return Settling(found)
    problems = tuple(problem for part in found.values() for problem in part.problems)
    candidate = _catalogue(found, source, problems, Part.expected)
    if not all(part.is_confirmed for part in found.values()):
        return Settling(found, None, candidate)
    confirmed = _catalogue(found, source, problems, lambda part: part.confirmed)
    return Settling(found, confirmed, candidate if _contents(candidate) != _contents(confirmed) else None)


def _catalogue(
    found: Mapping[str, Part],
    source: ModelSource,
    problems: tuple[ModelProblem, ...],
    choose: Callable[[Part], Mapping[Key, Version]],
) -> Catalogue:
    signature_keys = {path.name: path.signature_key for path in source.paths}
    versions: dict[str, list[Version]] = {}
    for part in found.values():
        for (name, _), version in choose(part).items():
            versions.setdefault(name, []).append(version)
    models = tuple(
        Model(
            name, tuple(sorted(of_model, key=lambda each: each.order)), signature_keys.get(name, source.signature_key)
        )
        for name, of_model in sorted(versions.items())
    )
    return Catalogue(models, problems)


def _contents(catalogue: Catalogue) -> dict[Key, str]:
    return {(model.name, version.number): version.digest for model, version in catalogue.versions()}


def _by_key(models: Iterable[Model]) -> dict[Key, Version]:
    return {(model.name, version.number): version for model in models for version in model.versions}
