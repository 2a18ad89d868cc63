"""Exponential backoff with jitter."""

from __future__ import annotations

from dataclasses import dataclass

#: Larger exponents would overflow a float; no delay grows for that long.
_MAX_EXPONENT = 60


@dataclass(frozen=True)
class Backoff:
    """Delays between retries: `first_s`, then `factor` times the previous delay, at most `max_s`."""

    first_s: float
    max_s: float
    factor: float = 2.0
    jitter: float = 0.0  #: each delay is randomized by up to this share, up or down

    def delay_s(self, failures: int) -> float:
        """Return the delay after `failures` failures in a row; the first one counts as 1."""
        exponent = min(max(failures - 1, 0), _MAX_EXPONENT)
        delay_s = min(self.first_s * self.factor**exponent, self.max_s)
        if self.jitter:
            import random  # noqa: PLC0415 - slow to import, and supervisors use no jitter

            delay_s *= random.uniform(1 - self.jitter, 1 + self.jitter)
        return delay_s
