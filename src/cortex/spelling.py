"""Suggestions for misspelt names, in messages about mistakes.

Every replica and the command line import this module, so it imports little.
"""

from __future__ import annotations

from collections.abc import Iterable

_SIMILAR = 0.65


def nearest(word: str, candidates: Iterable[str], cutoff: float = _SIMILAR) -> str | None:
    """Return the candidate most similar to `word`, ignoring case; None if none is similar enough.

    `cutoff` is the least similarity, from 0 to 1.
    """
    import difflib  # noqa: PLC0415 - only mistakes need it, and it is slow to import

    by_lower = {candidate.lower(): candidate for candidate in sorted(candidates)}
    found = difflib.get_close_matches(word.lower(), list(by_lower), n=1, cutoff=cutoff)
    return by_lower[found[0]] if found else None
