"""How far a job is, and how fast it goes, in one line. Pure: moments and statuses in, text out."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from cortex.cli.age import duration

#: The speed shown is that of the last seconds, so that it follows workers that come, go and warm up.
_WINDOW_S = 15.0
_BAR_CELLS = 20
_EIGHTHS = " ▏▎▍▌▋▊▉"

JobStatus = dict[str, Any]


@dataclass(frozen=True)
class Progress:
    """How many batches and items of a job are resolved, well or not."""

    batches: int
    total_batches: int
    items: int

    @classmethod
    def of(cls, status: JobStatus) -> Progress:
        """Read it from a `job_status`; a task has no batches."""
        if "batch_metrics" not in status:
            return cls(0, 0, 0)
        batches, items = status["batch_metrics"], status["items"]
        return cls(
            batches["succeeded"] + batches["failed"], status["total_batch_count"], items["succeeded"] + items["failed"]
        )

    @property
    def share(self) -> float:
        """The part that is resolved, from 0 to 1."""
        return min(1.0, self.batches / self.total_batches) if self.total_batches else 0.0


class Pace:
    """The speed of a job, from what was seen of it lately."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, Progress]] = deque()

    def observe(self, now_s: float, progress: Progress) -> None:
        """Take note of how far the job is at this moment of a monotonic clock."""
        self._seen.append((now_s, progress))
        while len(self._seen) > 2 and self._seen[1][0] <= now_s - _WINDOW_S:
            self._seen.popleft()

    @property
    def batches_per_s(self) -> float:
        """Batches per second; 0 while that is not known."""
        return self._per_second([progress.batches for _, progress in self._seen])

    @property
    def items_per_s(self) -> float:
        """Items per second; 0 while that is not known."""
        return self._per_second([progress.items for _, progress in self._seen])

    @property
    def left_s(self) -> float | None:
        """The seconds that are left at this speed; None while there is none."""
        if not self.batches_per_s:
            return None
        _, progress = self._seen[-1]
        return (progress.total_batches - progress.batches) / self.batches_per_s

    def _per_second(self, counts: list[int]) -> float:
        if len(counts) < 2 or self._seen[-1][0] <= self._seen[0][0]:
            return 0.0
        return max(0.0, (counts[-1] - counts[0]) / (self._seen[-1][0] - self._seen[0][0]))


def bar(share: float, cells: int = _BAR_CELLS, has_blocks: bool = True) -> str:
    """Draw a share from 0 to 1; without `has_blocks` in plain characters."""
    share = min(1.0, max(0.0, share))
    if not has_blocks:
        done = int(share * cells)
        return f"[{'#' * done}{'.' * (cells - done)}]"
    eighths = int(share * cells * 8)
    full, part = divmod(eighths, 8)
    return ("█" * full + (_EIGHTHS[part] if full < cells else "")).ljust(cells, "░").replace(" ", "░")


def progress_line(status: JobStatus, pace: Pace, drawn: str = "") -> str:
    """Say in one line how far a job is; `drawn` is its bar, where one is wanted."""
    progress = Progress.of(status)
    word, message = str(status["status_message"]), str(status["message"]).partition("\n")[0]
    if "batch_metrics" not in status:
        return _joined(word, [message])
    if status["status"] == "enqueuing":
        return _joined(word, [f"{progress.total_batches:,} batches so far" if progress.total_batches else ""])
    if status["status"] != "running":
        return _joined(word, [counted(progress.total_batches, "batch", "batches"), message])
    parts = [
        f"{progress.batches:,} of {progress.total_batches:,} batches",
        f"{short(pace.batches_per_s)} batches/s, {short(pace.items_per_s)} items/s" if pace.batches_per_s else "",
        _rest(progress, pace),
        counted(status["dead_letters"], "dead letter", "dead letters") if status["dead_letters"] else "",
        "" if progress.batches else message,
    ]
    # Cut, not rounded: what is not done does not look it.
    percent = progress.batches * 100 // max(1, progress.total_batches)
    return _joined(f"{word} {drawn}{' ' if drawn else ''}{percent} %", parts)


def short(number: float) -> str:
    """Return a number with two or three digits that matter: `0.25`, `3.4`, `812`, `81k`, `1.3M`."""
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f}{unit}" if number < 10 * size else f"{number / size:.0f}{unit}"
    if number >= 10:
        return f"{number:.0f}"
    return f"{number:.1f}" if number >= 1 else f"{number:.2g}"


def counted(number: int, one: str, many: str) -> str:
    """Return a number with the word for what it counts."""
    return f"{number:,} {one if number == 1 else many}"


def _rest(progress: Progress, pace: Pace) -> str:
    if progress.total_batches and progress.batches >= progress.total_batches:
        return "completing"
    return "" if pace.left_s is None else f"{duration(pace.left_s)} left"


def _joined(word: str, parts: list[str]) -> str:
    return ", ".join([word, *filter(None, parts)])
