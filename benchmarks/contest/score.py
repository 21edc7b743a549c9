"""How likely everyone's outputs are, so that fast but wrong shows; peers/judge.py says how.

Greedy outputs of the same weights in the same dtype differ by hundredths of a nat per token; a broken cache, mask or
quantisation by far more.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from .environments import interpreter
from .models import model
from .places import PEERS
from .worker import Worker


def scores(jobs: Sequence[Any], outputs: Mapping[str, Sequence[Any]], threads: int) -> dict[str, float]:
    """Nats per output token under the reference, of each contestant's worst run. Raises Absent."""
    runs = {f"{name}/{index}": made for name, all_made in outputs.items() for index, made in enumerate(all_made)}
    judge = Worker("judge", [str(interpreter("transformers")), str(PEERS / "judge.py")], threads)
    try:
        asked = {"jobs": jobs, "model": str(model("checkpoint", "float32")), "threads": threads, "outputs": runs}
        nll = judge.ask(asked)
    finally:
        judge.close()
    return {name: max(nll[f"{name}/{index}"] for index in range(len(made))) for name, made in outputs.items()}
