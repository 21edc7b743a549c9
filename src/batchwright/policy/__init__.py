"""The batching decisions: which requests run in the next step. Pure: no torch, clock, randomness, files or threads.

Choose a scheduler (`Continuous`, `dynamic`, `static`, `one_by_one`), give it the `Memory` that it plans for, and say
how requests wait (`Queueing`). `types` has the protocol that they all implement, and the plans that they make.
The names `dynamic` and `static` are the functions here, not the modules that hold them.
"""

from batchwright.policy.continuous import Continuous, ContinuousSettings
from batchwright.policy.dynamic import DynamicSettings, dynamic
from batchwright.policy.order import Queueing, by_aged_priority, by_arrival, by_strict_priority
from batchwright.policy.pages import Memory
from batchwright.policy.speculation import Speculation
from batchwright.policy.static import one_by_one, static

__all__ = [
    "Continuous",
    "ContinuousSettings",
    "DynamicSettings",
    "Memory",
    "Queueing",
    "Speculation",
    "by_aged_priority",
    "by_arrival",
    "by_strict_priority",
    "dynamic",
    "one_by_one",
    "static",
]
