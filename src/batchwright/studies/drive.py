"""Requests that arrive in real time: each is submitted to an engine at its time, whether or not a step is running then.

A request that arrives during a step is submitted when that step has ended, and is recorded at the time it arrived.
"""

from collections import deque
from collections.abc import Callable, Sequence

from batchwright.serve.engine import Engine
from batchwright.studies.workload import Work


def drive(engine: Engine, work: Sequence[Work], arrivals: Sequence[float], on_tokens: Callable[[int], None]) -> None:
    """Submit each of `work` at its arrival, and run until all have ended.

    `arrivals` are seconds from now, one for each request and in order. The engine is new, and its records count from
    now. `on_tokens` is told how many output tokens there are so far.
    """
    coming = deque(zip(arrivals, work, strict=True))
    origin, num_tokens = engine.recorder.restart(engine.now()), 0
    while coming or engine.num_live:
        while coming and origin + coming[0][0] <= engine.now():
            arrival, one = coming.popleft()
            engine.submit(one.prompt, one.params, request_id=one.id, arrival=origin + arrival)
            if not coming:
                engine.flush()
        outputs = engine.step()
        if outputs is None:
            engine.wait(origin + coming[0][0] if coming else None)
        else:
            num_tokens += sum(output.token is not None for output in outputs)
            on_tokens(num_tokens)
