"""Twenty thousand steps of everything at once, on pools too small for the load, with two plans in flight."""

import pytest

from tests.policy.chaos import Chaos
from tests.policy.driver import AGED, MEMORIES, SCHEDULERS, Drive

NUM_STEPS = 20_000 // (len(SCHEDULERS) * len(MEMORIES)) + 1


@pytest.mark.parametrize("pool", MEMORIES)
@pytest.mark.parametrize("name", SCHEDULERS)
def test_nothing_is_lost_in_twenty_thousand_steps_of_chaos(name: str, pool: str) -> None:
    """All laws hold after every event; in the end every request has ended once and every page is back."""
    memory = MEMORIES[pool]
    drive = Drive(SCHEDULERS[name](memory, AGED), memory)
    chaos = Chaos(drive, seed=7)
    while len(drive.plans) < NUM_STEPS:
        chaos.event()
    drive.flush()
    drive.run(max_in_flight=2)
    assert len(drive.ended) == chaos.num_added
    assert {"finished", "aborted", "refused", "error", "exception"} <= set(drive.ended.values())
