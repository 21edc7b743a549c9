"""Useful output tokens per second on 64 requests with forced lengths, all there at once: ourselves and transformers.

The workload is tests/data/workload64.json: prompts of 15 to 477 tokens, outputs of 7 to 203. Everyone runs the same
model (SmolLM2-135M, dequantised from its Q4_1 file) in the same dtype with the same threads, in turn, once per
repeat, after a warm-up that is not counted. Tokens that a static batch makes beyond a request's length are not
useful. Needs transformers and accelerate (the dev extra). Prints a table and writes a dated file to results/.

    python benchmarks/offline.py [--repeats 3] [--dtype bfloat16] [--only ours-continuous transformers-static-32]
"""

import argparse
import json
import os
import platform
import statistics
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, NamedTuple

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig, GgufConfig, PreTrainedModel

import batchwright
from batchwright import Engine, SamplingParams
from batchwright.bench.summary import summarize
from batchwright.policy.continuous import Continuous, ContinuousSettings
from batchwright.policy.static import one_by_one, static
from batchwright.serve.engine import Policy
from batchwright.serve.weights import LoadedModel, default_path, load
from batchwright.studies.roofline import measure_hardware

WORKLOAD = Path(__file__).parents[1] / "tests" / "data" / "workload64.json"
RESULTS = Path(__file__).parent / "results"
STATIC_SIZE = 32
NO_EOS = -1


class Job(NamedTuple):
    """One request: token ids, and how many to make."""

    prompt: list[int]
    num_output: int


Contestant = Callable[[Sequence[Job], str], dict[str, float]]
"""Runs the jobs in a dtype; returns other figures than its time."""


def ours(policy: Policy) -> Contestant:
    """Our engine under `policy`."""

    def run(jobs: Sequence[Job], dtype: str) -> dict[str, float]:
        engine = Engine(our_model(dtype), policy)
        params = [SamplingParams(max_tokens=job.num_output, ignore_eos=True) for job in jobs]
        completions = engine.generate([job.prompt for job in jobs], params)
        assert [len(completion.tokens) for completion in completions] == [job.num_output for job in jobs]
        summary = summarize(engine.recorder.requests, engine.recorder.steps)
        figures = {"kv_waste": summary.kv_waste, "steps": summary.num_steps, "in_steps": summary.time_in_steps}
        return {name: value for name, value in figures.items() if value is not None}

    return run


def transformers_static(jobs: Sequence[Job], dtype: str) -> dict[str, float]:
    """`generate` on left-padded batches, in order of arrival, each as long as its longest request."""
    model = their_model(dtype, "static")
    for first in range(0, len(jobs), STATIC_SIZE):
        batch = jobs[first : first + STATIC_SIZE]
        width, length = max(len(job.prompt) for job in batch), max(job.num_output for job in batch)
        ids = torch.tensor([[0] * (width - len(job.prompt)) + job.prompt for job in batch])
        mask = torch.tensor([[0] * (width - len(job.prompt)) + [1] * len(job.prompt) for job in batch])
        config = GenerationConfig(
            max_new_tokens=length, min_new_tokens=length, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        made = model.generate(ids, attention_mask=mask, generation_config=config)
        assert made.shape[1] == width + length
    return {}


def transformers_continuous(jobs: Sequence[Job], dtype: str) -> dict[str, float]:
    """The peer's own continuous batching, with its defaults."""
    model = their_model(dtype, "continuous")
    config = GenerationConfig(do_sample=False, eos_token_id=NO_EOS, pad_token_id=0, max_new_tokens=256)
    with model.continuous_batching_context_manager(generation_config=config, block=True, timeout=60) as manager:
        for job in jobs:
            manager.add_request(job.prompt, max_new_tokens=job.num_output, eos_token_id=NO_EOS)
        finished: dict[str, int] = {}
        while len(finished) < len(jobs):
            result = manager.get_result(timeout=60)
            assert result is not None, "transformers' continuous batching stopped answering"
            if result.is_finished():
                finished[result.request_id] = len(result.generated_tokens)
    assert sum(finished.values()) == sum(job.num_output for job in jobs)
    return {}


CONTESTANTS: dict[str, Contestant] = {
    "ours-continuous": ours(Continuous),
    "ours-continuous-32": ours(lambda memory: Continuous(memory, ContinuousSettings(max_rows=32))),
    "ours-static-8": ours(lambda memory: static(memory, 8)),
    "ours-static-32": ours(lambda memory: static(memory, 32)),
    "ours-one-by-one": ours(one_by_one),
    "transformers-static-32": transformers_static,
    "transformers-continuous": transformers_continuous,
}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--only", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS))
    parser.add_argument("--no-file", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    jobs = [Job(job["prompt"], job["out"]) for job in json.loads(WORKLOAD.read_text())["requests"]]
    result = measure(jobs, arguments)
    print_table(result)
    if not arguments.no_file:
        RESULTS.mkdir(exist_ok=True)
        file = RESULTS / f"{datetime.now(UTC):%Y-%m-%d}-offline-{arguments.dtype}.json"
        file.write_text(json.dumps(result, indent=2) + "\n")
        print(f"\nwritten to {file.relative_to(RESULTS.parent)}")


def measure(jobs: Sequence[Job], arguments: argparse.Namespace) -> dict[str, Any]:
    """Every contestant in turn, `repeats` times over."""
    num_tokens = sum(job.num_output for job in jobs)
    hardware = measure_hardware("cpu", arguments.dtype)
    flops = sum(our_model(arguments.dtype).decoder.shape.request_flops(len(job.prompt), job.num_output) for job in jobs)
    for name in arguments.only:
        CONTESTANTS[name](jobs[:4], arguments.dtype)
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in arguments.only}
    for repeat in range(arguments.repeats):
        for name in arguments.only:
            began = perf_counter()
            figures = CONTESTANTS[name](jobs, arguments.dtype)
            seconds = perf_counter() - began
            runs[name].append({"seconds": seconds, "tokens_per_second": num_tokens / seconds, **figures})
            print(f"repeat {repeat + 1}, {name}: {num_tokens / seconds:.1f} tok/s", flush=True)
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "command": f"python benchmarks/offline.py --repeats {arguments.repeats} --dtype {arguments.dtype}",
        "hardware": hardware.name,
        "peak_flops": hardware.peak(arguments.dtype),
        "threads": arguments.threads,
        "versions": {
            "batchwright": batchwright.__version__,
            "torch": str(torch.__version__),
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "useful_output_tokens": num_tokens,
        "useful_flops": flops,
        "runs": runs,
    }


def print_table(result: dict[str, Any]) -> None:
    """Median and spread of each, ratios to transformers' static batches pair by pair, and the share of the roofline."""
    runs = result["runs"]
    base = [run["seconds"] for run in runs.get("transformers-static-32", [])]
    print(f"\n{'':26}{'tok/s median':>13}{'min':>8}{'max':>8}{'x static-32':>13}{'roofline':>10}{'kv waste':>10}")
    for name, its_runs in runs.items():
        speeds = [run["tokens_per_second"] for run in its_runs]
        seconds = [run["seconds"] for run in its_runs]
        ratio = f"{statistics.median(a / b for a, b in zip(base, seconds, strict=True)):.2f}" if base else "-"
        share = result["useful_flops"] / result["peak_flops"] / statistics.median(seconds)
        waste = f"{its_runs[0]['kv_waste']:.2%}" if "kv_waste" in its_runs[0] else "-"
        print(
            f"{name:26}{statistics.median(speeds):13.1f}{min(speeds):8.1f}{max(speeds):8.1f}"
            f"{ratio:>13}{share:10.1%}{waste:>10}"
        )


@cache
def our_model(dtype: str) -> LoadedModel:
    """The embedded model."""
    return load("smollm2", getattr(torch, dtype))


@cache
def their_model(dtype: str, contestant: str) -> PreTrainedModel:
    """An ordinary dense checkpoint: read straight from GGUF, transformers keeps the weights packed and is slow.

    Each contestant has its own, because continuous batching changes a model's attention for good.
    """
    assert contestant
    path = default_path()
    packed = GgufConfig(gguf_file=path.name, dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=getattr(torch, dtype), quantization_config=packed
    )
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()


if __name__ == "__main__":
    main()
