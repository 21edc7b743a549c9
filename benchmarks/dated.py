"""The dated file that a benchmark leaves in results/: what was measured, on what, how, and every repeat."""

import json
import os
import platform
import statistics
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import batchwright

RESULTS = Path(__file__).parent / "results"


def write(name: str, what: str, results: Mapping[str, Any], **conditions: Any) -> Path:
    """Write `results` and the conditions under which they were measured; the path, as people would type it."""
    now = datetime.now(UTC)
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{now:%Y-%m-%d}-{name}.json"
    record = {
        "what": what,
        "date": now.isoformat(timespec="seconds"),
        "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "hardware": processor(),
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,  # others were at work beside it
        "python": f"{platform.python_implementation()} {platform.python_version()} on {sys.platform}",
        "batchwright": batchwright.__version__,
        **conditions,
        "results": results,
    }
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path.relative_to(RESULTS.parent.parent)


def spread(unit: str, values: Sequence[float]) -> dict[str, Any]:
    """Median, lowest, highest and all repeats of one figure."""
    return {
        f"median_{unit}": round(statistics.median(values), 4),
        f"min_{unit}": round(min(values), 4),
        f"max_{unit}": round(max(values), 4),
        f"repeats_{unit}": [round(value, 4) for value in values],
    }


def spreads(unit: str, results: Mapping[str, Mapping[int, Sequence[float]]]) -> dict[str, Any]:
    """The same of every way and size."""
    return {way: {str(num): spread(unit, times) for num, times in by_size.items()} for way, by_size in results.items()}


def processor() -> str:
    """The CPU's name where the system tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if "model name" in line]
    return f"{len(names)} x {names[0]}" if names else platform.processor() or platform.machine()
