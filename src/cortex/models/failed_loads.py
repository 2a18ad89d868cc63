"""Why a version could not be fetched or loaded, said again to all who ask until it is worth another try."""

from __future__ import annotations

import traceback
from dataclasses import dataclass, field

from cortex.errors import ModelError, UserError
from cortex.models.loading import Key

#: A model that doesn't load is tried again after so long, then after twice that, and so on up to the limit.
FIRST_RETRY_S, MAX_RETRY_S = 2.0, 60.0
_MESSAGE_CHARACTERS = 1000


@dataclass(frozen=True)
class Failure:
    """One attempt that failed."""

    message: str
    detail: str = ""
    cause: BaseException | None = None
    is_lasting: bool = True  #: False: another call may have more luck

    def error(self) -> ModelError:
        """Return an error to raise `from` the cause: one for each caller, as raising adds to it."""
        return ModelError(self.message, self.detail)


@dataclass
class _Remembered:
    failure: Failure
    digest: str
    retry_s: float
    retry_at: float


@dataclass
class Failures:
    """Remembers the last failure of each version; times are of a monotonic clock, in seconds."""

    _by_key: dict[Key, _Remembered] = field(default_factory=dict)

    def find(self, key: Key, digest: str, now: float) -> Failure | None:
        """Return why this content failed, if it is too early to try again."""
        known = self._by_key.get(key)
        return known.failure if known is not None and known.digest == digest and now < known.retry_at else None

    def retry_at(self, key: Key, digest: str) -> float | None:
        """Return when a content that failed may be tried again."""
        known = self._by_key.get(key)
        return known.retry_at if known is not None and known.digest == digest else None

    def add(self, key: Key, digest: str, failure: Failure, now: float) -> None:
        """Remember a failure."""
        known = self._by_key.get(key)
        retry_s = min(known.retry_s * 2, MAX_RETRY_S) if known and known.digest == digest else FIRST_RETRY_S
        self._by_key[key] = _Remembered(failure, digest, retry_s, now + retry_s)

    def forget(self, key: Key) -> None:
        """Take it that a version is well again, or gone."""
        self._by_key.pop(key, None)

    def forget_all_but(self, keys: set[Key]) -> None:
        """Forget the versions that there are no more."""
        for key in self._by_key.keys() - keys:
            del self._by_key[key]


def describe(name: str, number: str, cause: BaseException) -> Failure:
    """Say that a version can't be loaded because of `cause`, whose frames let go of what they hold: half a model."""
    if isinstance(cause, UserError):
        reason, detail = str(cause), cause.traceback
    else:
        lines = [line.strip() for line in _text(cause).splitlines() if line.strip()]
        reason = ": ".join([type(cause).__name__, *lines[:1]])[:_MESSAGE_CHARACTERS]
        detail = "".join(traceback.format_exception(cause))
    seen: set[int] = set()
    linked: BaseException | None = cause
    while linked is not None and id(linked) not in seen:
        seen.add(id(linked))
        traceback.clear_frames(linked.__traceback__)
        linked = linked.__cause__ or linked.__context__
    return Failure(f"failed (re-)loading model {name} of version {number}: {reason}", detail, cause)


def _text(cause: BaseException) -> str:
    try:
        return str(cause)
    except Exception:  # a broken `__str__` of the user's must not hide that something was raised
        return ""
