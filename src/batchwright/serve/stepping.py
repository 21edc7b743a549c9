"""Takes plans through the executor; where that overlaps, the next step is planned while one runs.

    executor   | step N ................. | step N+1 ............... |
    here        plan N+1 . wait for N . start N+1 . commit N . plan N+2 . wait for N+1

What a step brought is looked at only after the next one has begun. So that one may hold rows of requests that have
just ended, which are computed for nothing; and when a step fails, the one planned behind it, which counts on its
tokens, is not run: it is void. Every plan is committed once. Wherever an interrupt strikes, the next call goes on from
there; the step that it cut short, if any, is void too.
"""

from collections import deque
from collections.abc import Callable, Sequence

import torch

from batchwright.policy.types import Failure, StepPlan
from batchwright.serve.executor import Executor, Pending
from batchwright.serve.interrupts import uninterrupted
from batchwright.serve.live import LiveRequest
from batchwright.serve.sequences import RowResult


class Step:
    """A plan on its way: made, started, and ended, with its `results` or `failed` for the reason in `message`.

    `rows`: the requests that it computes something for, in the order of its chunks. `started` and `finished` are times,
    None until then.
    """

    def __init__(self, plan: StepPlan, rows: Sequence[LiveRequest], clock: Callable[[], float]) -> None:
        self.plan = plan
        self.rows = rows
        self.started: float | None = None
        self.finished: float | None = None
        self.results: Sequence[RowResult] | None = None
        self.expert_tokens: tuple[tuple[int, ...], ...] = ()
        self.failed: Failure | None = None
        self.message = ""
        self._clock = clock
        self._pending: Pending | None = None

    @property
    def has_ended(self) -> bool:
        return self.results is not None or self.failed is not None

    def start(self, executor: Executor, began: "Callable[[Step], None]") -> None:
        """Begin, and tell `began`; unless it has begun or ended."""
        if self.started is None and not self.has_ended:
            self.started = self._clock()
            began(self)
            self._attempt(lambda: self._begin(executor))

    def land(self) -> None:
        """Wait for its end, unless it has ended. It is void if an interrupt has cut it short before."""
        if self.has_ended:
            return
        if self._pending is None:
            self.void()
        else:
            self._attempt(self._take_results)
        self.finished = self._clock()

    def void(self) -> None:
        """Nothing of it counts, through no fault of its rows."""
        self.failed, self.message = "void", "it was not run to its end"

    def _begin(self, executor: Executor) -> None:
        self._pending = executor.start(self.plan)

    def _take_results(self) -> None:
        assert self._pending is not None
        pending, self._pending = self._pending, None
        self.results = pending.result()
        self.expert_tokens = pending.expert_tokens

    def _attempt(self, action: Callable[[], None]) -> None:
        """The one place where what an executor may raise becomes an outcome; a bug in it is also the caller's."""
        try:
            action()
        except (torch.OutOfMemoryError, MemoryError) as error:
            self._fail("oom", str(error) or "out of memory")
        except RuntimeError as error:
            is_memory = "can't allocate memory" in str(error)
            self._fail("oom" if is_memory else "exception", str(error))
        except Exception as error:
            self._fail("exception", repr(error))
            raise

    def _fail(self, how: Failure, message: str) -> None:
        self.failed, self.message = how, message
        self.finished = self._clock()


class Stepper:
    """Runs the steps that `plan` makes. `began` is told of each that starts; `commit` is given each that has ended.

    `plan` and `commit` are never interrupted half-way. Not to be called from two threads at once.
    """

    def __init__(
        self,
        executor: Executor,
        plan: Callable[[], Step | None],
        began: Callable[[Step], None],
        commit: Callable[[Step], None],
    ) -> None:
        self._executor = executor
        self._plan = plan
        self._began = began
        self._commit = commit
        self._open: deque[Step] = deque()  # not committed: at most the one that runs, and the one behind it

    def advance(self) -> bool:
        """Take one step to its end, and where the executor overlaps begin the next; False if there is none to run."""
        if not self._open and not self._plan_one():
            return False
        step = self._open[0]
        was_left = step.has_ended  # by an interrupt: whom the step behind it names may be gone since
        step.start(self._executor, self._began)
        if self._executor.overlaps and not step.has_ended and len(self._open) == 1:
            self._plan_one()
        step.land()
        for following in list(self._open)[1:]:
            if step.failed or was_left:
                following.void()
            else:
                following.start(self._executor, self._began)
        self._close()
        return True

    def finish(self) -> None:
        """Take what runs to its end, and begin nothing more."""
        for step in list(self._open):
            if step.started is None:
                step.void()
            step.land()
        self._close()

    def _plan_one(self) -> bool:
        with uninterrupted():
            step = self._plan()
            if step is None:
                return False
            self._open.append(step)
        return True

    def _close(self) -> None:
        """Commit what has ended, in order."""
        while self._open and self._open[0].has_ended:
            with uninterrupted():
                self._commit(self._open.popleft())
