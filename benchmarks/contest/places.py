"""Where things lie: what is in the repository, and what is made on demand in a folder that git ignores."""

from pathlib import Path

HERE = Path(__file__).parents[1]
PEERS = HERE / "peers"
RESULTS = HERE / "results"
WORKLOAD = HERE.parent / "tests" / "data" / "workload64.json"

CACHE = HERE / ".cache"
"""Environments, converted weights and logs. Deleting it, or a part of it, costs only the time to make it again."""

ENVIRONMENTS = CACHE / "environments"
MODELS = CACHE / "models"
LOGS = CACHE / "logs"


class Absent(Exception):
    """A contestant cannot take part, or has to leave; the message says why."""
