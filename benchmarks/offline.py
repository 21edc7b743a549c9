"""Useful output tokens per second on 64 requests with forced lengths, all there at once: ourselves and our peers.

The workload is tests/data/workload64.json: prompts of 15 to 477 tokens, outputs of 7 to 203. Everyone runs the same
model (SmolLM2-135M, dequantised from its Q4_1 file) greedily, in the same dtype with the same threads, in a process
of its own that loads once and warms up; then all run in turn, once per repeat, one at a time. Each peer has its own
virtual environment, made on demand in a folder that git ignores; one that cannot be installed or run is reported
absent. Prints a table and writes a dated file to results/. contest/contestants.py is the table of who takes part.

    python benchmarks/offline.py --list
    python benchmarks/offline.py [--repeats 3] [--dtype bfloat16] [--only ours-continuous llama-cpp] [--nll]
"""

import argparse
import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import torch
from contest.contestants import CONTESTANTS, Contestant
from contest.environments import is_made
from contest.places import RESULTS, WORKLOAD
from contest.race import Job, Race, race
from contest.score import scores
from contest.table import table

import batchwright
from batchwright.serve.loading.weights import load
from batchwright.studies.roofline import measure_hardware


def main() -> None:
    """Measure, print, write."""
    arguments = parsed()
    contestants = {name: CONTESTANTS[name] for name in arguments.only}
    if arguments.list:
        print("\n".join(described(name, contestant) for name, contestant in contestants.items()))
        return
    torch.set_num_threads(arguments.threads)
    requests = json.loads(WORKLOAD.read_text())["requests"][: arguments.requests]
    jobs = [(request["prompt"], request["out"]) for request in requests]
    facts = machine(jobs, arguments)
    outcome = race(contestants, jobs, dtype=arguments.dtype, threads=arguments.threads, repeats=arguments.repeats)
    result = facts | described_race(contestants, outcome)
    if arguments.nll:
        result["nll"] = scores(jobs, outcome.outputs, arguments.threads) if outcome.outputs else {}
    print("", *table(result), sep="\n")
    if not arguments.no_file:
        write(result, arguments.dtype)


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=CONTESTANTS, metavar="NAME")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of every contestant")
    parser.add_argument("--requests", type=int, help="only the first so many of the workload, to see that all runs")
    parser.add_argument("--nll", action="store_true", help="score everyone's outputs in float32")
    parser.add_argument("--no-file", action="store_true", help="write no result")
    parser.add_argument("--list", action="store_true", help="say who takes part, and run nothing")
    arguments = parser.parse_args()
    able = [name for name, contestant in CONTESTANTS.items() if arguments.dtype in contestant.dtypes]
    arguments.only = arguments.only or able
    if unable := [name for name in arguments.only if name not in able]:
        parser.error(f"{', '.join(unable)} cannot run in {arguments.dtype}: leave it out, or choose another --dtype")
    return arguments


def described(name: str, contestant: Contestant) -> str:
    """One line of --list."""
    place = contestant.environment or "this Python"
    state = "" if is_made(contestant.environment) else " (not made yet)"
    return f"{name:26}{contestant.worker:28}{contestant.form:16}{place}{state}  {contestant.note}".rstrip()


def machine(jobs: Sequence[Job], arguments: argparse.Namespace) -> dict[str, Any]:
    """What the numbers are held against, measured before anyone else is there."""
    hardware = measure_hardware("cpu", arguments.dtype)
    shape = load(dtype=arguments.dtype).decoder.shape
    assert hardware.bandwidth
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "command": shlex.join(["python", "benchmarks/offline.py", *sys.argv[1:]]),
        "hardware": hardware.name,
        "peak_flops": hardware.peak(arguments.dtype),
        "bandwidth": hardware.bandwidth.value,
        "load_average": os.getloadavg()[0],
        "threads": arguments.threads,
        "versions": {
            "batchwright": batchwright.__version__,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        },
        "num_requests": len(jobs),
        "useful_output_tokens": sum(num_output for _, num_output in jobs),
        "useful_flops": sum(shape.request_flops(len(prompt), num_output) for prompt, num_output in jobs),
        "weight_bytes": shape.weight_bytes(getattr(torch, arguments.dtype).itemsize),
    }


def described_race(contestants: Mapping[str, Contestant], outcome: Race) -> dict[str, Any]:
    """The race as it is kept: every run, and what each contestant ran with."""
    present = {name: contestants[name] for name in outcome.runs}
    plain = [
        name for name, contestant in present.items() if not contestant.tries[0].get("load", {}).get("quantization")
    ]
    return {
        "contestants": outcome.entries,
        "notes": {name: contestant.note for name, contestant in present.items() if contestant.note},
        "reads_plain_weights": plain,
        "absent": outcome.absent,
        "runs": outcome.runs,
    }


def write(result: Mapping[str, Any], dtype: str) -> None:
    """The dated file."""
    RESULTS.mkdir(exist_ok=True)
    file = RESULTS / f"{result['date']}-offline-{dtype}.json"
    file.write_text(json.dumps(result, indent=1) + "\n")
    print(f"\nwritten to {file.relative_to(RESULTS.parent)}")


if __name__ == "__main__":
    main()
