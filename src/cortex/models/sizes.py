"""How much memory models take: measured where they were loaded before, else judged by those that were. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

_MIB = 1024 * 1024
#: From this size on a model's memory is taken to be in proportion to its files.
_LARGE_BYTES = 4 * _MIB
_REMEMBERED = 16
#: Before any model was loaded. A pickle that is read whole, then decoded, takes twice its size for a moment.
_FIRST_RATIO, _FIRST_PEAK_RATIO = 1.25, 2.0
_CREDIBLE_RATIO, _MAX_RATIO = 0.5, 8.0
_FIRST_EXTRA_BYTES = _MIB
_MAX_EXTRA_BYTES = 32 * _MIB


@dataclass(frozen=True)
class Expected:
    """What loading a version should take."""

    kept_bytes: int  #: for as long as it is loaded
    peak_bytes: int  #: while it is being loaded, at most


class Sizes:
    """Remembers what was measured, by content."""

    def __init__(self) -> None:
        self._measured: dict[str, int] = {}
        self._ratios: deque[float] = deque(maxlen=_REMEMBERED)
        self._peak_ratios: deque[float] = deque(maxlen=_REMEMBERED)
        self._extras: deque[int] = deque(maxlen=_REMEMBERED)
        self._least_ratio: float | None = None  #: that models were seen to need, of their files

    def measured(self, digest: str) -> int | None:
        """Return what a content took when it was last loaded."""
        return self._measured.get(digest)

    def forget_all_but(self, digests: set[str]) -> None:
        """Forget the contents that there are no more."""
        for digest in self._measured.keys() - digests:
            del self._measured[digest]

    def expect(self, digest: str, files_bytes: int) -> Expected:
        """Say what a content should take, rather too much than too little."""
        extra = max(self._extras, default=_FIRST_EXTRA_BYTES)
        ratio = max(self._ratios, default=_FIRST_RATIO)
        peak_ratio = max(self._peak_ratios, default=_FIRST_PEAK_RATIO)
        kept = self._measured.get(digest) or int(files_bytes * ratio) + extra
        return Expected(kept, max(kept, int(files_bytes * peak_ratio) + extra))

    def learn(
        self, digest: str, files_bytes: int, grown_bytes: int, peak_bytes: int | None, is_pure: bool = False
    ) -> int:
        """Take note of what loading a content took, and return what it is taken to need from now on.

        `grown_bytes` is by how much the process grew; requests that ran meanwhile are in it, so it may be anything.
        `peak_bytes` is by how much it had grown at most; None if that is not known. `is_pure` says that there were no
        holes from earlier models to fill: only then a model may be found to need less than its files.
        """
        ratio = grown_bytes / files_bytes if files_bytes else 1.0
        # Below half of its files they are mapped and not read yet, or others freed memory meanwhile.
        if is_pure and files_bytes >= _LARGE_BYTES and ratio >= _CREDIBLE_RATIO:
            self._least_ratio = min(max(self._least_ratio or 0.0, ratio), 1.0)
        least = self._least_ratio or 1.0
        kept = max(grown_bytes, int(files_bytes * least))
        self._measured[digest] = kept
        if files_bytes >= _LARGE_BYTES:
            self._ratios.append(min(kept / files_bytes, _MAX_RATIO))
            if peak_bytes is not None:
                self._peak_ratios.append(min(max(peak_bytes, kept) / files_bytes, _MAX_RATIO))
        else:
            self._extras.append(min(kept, _MAX_EXTRA_BYTES))
        return kept
