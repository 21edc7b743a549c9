"""Batchwright sizes, forms, schedules and runs batches for PyTorch, and backs every choice with a measurement.

    from batchwright import Engine, SamplingParams

    engine = Engine("smollm2")
    print(engine.generate(["The capital of France is"], SamplingParams(max_tokens=8))[0].text)

Names that need torch are imported when first used, so that everything else works without it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from batchwright.errors import BatchwrightError, MissingDependency

if TYPE_CHECKING:
    from batchwright.serve.constraints.constraint import Constraint
    from batchwright.serve.engine import Engine
    from batchwright.serve.outputs import Completion, Output
    from batchwright.serve.sampling.params import SamplingParams

__version__ = "0.1.0"

__all__ = ["BatchwrightError", "Completion", "Constraint", "Engine", "Output", "SamplingParams", "__version__"]

_HOMES = {
    "Completion": "batchwright.serve.outputs",
    "Constraint": "batchwright.serve.constraints.constraint",
    "Engine": "batchwright.serve.engine",
    "Output": "batchwright.serve.outputs",
    "SamplingParams": "batchwright.serve.sampling.params",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'batchwright' has no attribute {name!r}")
    try:
        return getattr(import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        fact = f"it needs {error.name}, which is not installed"
        raise MissingDependency(f"use batchwright.{name}", fact, "pip install 'batchwright[serve]'") from error
