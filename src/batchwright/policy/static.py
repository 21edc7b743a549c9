"""Static batching: requests leave in groups of a fixed size, in order of arrival, and a group runs to its end.

A group waits until it is full, or until `flush` says that nothing more is coming. One by one is a group of one.
"""

from batchwright.errors import ConfigError
from batchwright.policy.grouped import Grouped, Release
from batchwright.policy.order import Queueing, RankedQueue
from batchwright.policy.pages import Memory
from batchwright.policy.progress import Progress


def static(memory: Memory, batch_size: int, queueing: Queueing | None = None) -> Grouped:
    """The scheduler of fixed groups of `batch_size`."""
    if batch_size < 1:
        raise ConfigError(f"form batches of {batch_size}", "a batch holds at least 1 request", "raise batch_size")
    return Grouped(memory, FixedSize(batch_size), queueing)


def one_by_one(memory: Memory, queueing: Queueing | None = None) -> Grouped:
    """The scheduler that runs every request alone."""
    return static(memory, 1, queueing)


class FixedSize:
    """Releases `batch_size` requests at a time, fewer only after a flush."""

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size

    def release(self, waiting: RankedQueue[Progress], now: float) -> Release | None:
        if len(waiting) >= self._batch_size:
            return Release(self._batch_size, "full")
        return Release(len(waiting), "flush") if any(progress.flushed for progress in waiting) else None

    def wakeup(self, waiting: RankedQueue[Progress]) -> float | None:
        return None

    def padded_size(self, num_rows: int) -> int:
        return num_rows
