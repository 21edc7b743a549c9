"""Dynamic batching: queued requests leave together when they are enough, or when the oldest has waited enough.

The rules are those of Triton's dynamic batcher (model_config.proto, ModelDynamicBatching): a batch leaves at once
when it is full or reaches a preferred size (the largest that can be formed); when the next request would carry it
beyond the largest preferred size, what is there leaves; otherwise it leaves when its oldest request has waited
`max_queue_delay`. Requests are never split. `allowed_sizes` pads up, as TensorFlow Serving's allowed_batch_sizes.
"""

from dataclasses import dataclass, field

from batchwright.errors import ConfigError
from batchwright.policy.grouped import Grouped, Release
from batchwright.policy.order import Queueing, RankedQueue, by_strict_priority
from batchwright.policy.pages import Memory
from batchwright.policy.progress import Progress


@dataclass(frozen=True, slots=True)
class DynamicSettings:
    """`max_batch_size` rows at most; `max_queue_delay` in seconds; preferred and allowed sizes in rows.

    `preferred_sizes` default to `max_batch_size` alone; the largest of `allowed_sizes`, if given, is `max_batch_size`.
    """

    max_batch_size: int
    max_queue_delay: float = 0.0
    preferred_sizes: tuple[int, ...] = ()
    allowed_sizes: tuple[int, ...] = ()
    queueing: Queueing = field(default_factory=lambda: Queueing(order=by_strict_priority))

    def __post_init__(self) -> None:
        largest = self.max_batch_size
        if largest < 1:
            raise ConfigError(f"form batches of {largest}", "a batch holds at least 1 row", "raise max_batch_size")
        if not self.max_queue_delay >= 0:
            raise ConfigError(f"wait {self.max_queue_delay} s", "a delay is not negative", "use 0 or more")
        for size in (*self.preferred_sizes, *self.allowed_sizes):
            if not 1 <= size <= largest:
                raise ConfigError(f"form batches of {size}", f"sizes are 1 to max_batch_size={largest}", "correct it")
        if self.allowed_sizes and max(self.allowed_sizes) != largest:
            raise ConfigError(
                f"allow only sizes {self.allowed_sizes}",
                f"the largest must be max_batch_size={largest}",
                "add it, or lower max_batch_size",
            )


def dynamic(memory: Memory, settings: DynamicSettings) -> Grouped:
    """The dynamic batching scheduler."""
    return Grouped(memory, DelayedSize(settings), settings.queueing, max_rows_per_request=settings.max_batch_size)


class DelayedSize:
    """Releases by size or by the delay of the oldest."""

    def __init__(self, settings: DynamicSettings) -> None:
        self._settings = settings
        self._preferred = frozenset(settings.preferred_sizes or (settings.max_batch_size,))

    def release(self, waiting: RankedQueue[Progress], now: float) -> Release | None:
        preferred, num_requests, num_rows, overflows = 0, 0, 0, False
        for progress in waiting:
            if num_rows + progress.request.num_rows > self._ceiling(num_rows):
                overflows = True
                break
            num_requests += 1
            num_rows += progress.request.num_rows
            if num_rows in self._preferred:
                preferred = num_requests
        if num_rows == self._settings.max_batch_size:
            return Release(num_requests, "full")
        if preferred:
            return Release(preferred, "preferred")
        if overflows:
            return Release(num_requests, "full")
        if now >= self._due(waiting):
            return Release(num_requests, "deadline" if self._settings.max_queue_delay else "idle")
        return Release(num_requests, "flush") if any(progress.flushed for progress in waiting) else None

    def wakeup(self, waiting: RankedQueue[Progress]) -> float | None:
        return self._due(waiting)

    def padded_size(self, num_rows: int) -> int:
        return min((size for size in self._settings.allowed_sizes if size >= num_rows), default=num_rows)

    def _ceiling(self, num_rows: int) -> int:
        """Rows up to which a batch may grow: the largest preferred size, unless its first request is beyond that."""
        return max(self._preferred) if num_rows else self._settings.max_batch_size

    def _due(self, waiting: RankedQueue[Progress]) -> float:
        return min(progress.arrival for progress in waiting) + self._settings.max_queue_delay
