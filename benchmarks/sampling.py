"""Milliseconds that choosing the tokens of a step takes, by what its requests ask for.

Rows are logits that the embedded model gave in the middle of chats, one each for as many different requests. Every
setting is measured in turn, repeat after repeat. Prints a table and writes a dated file to results/; `--profile` prints
where the time of one setting goes instead.

    OMP_NUM_THREADS=2 python benchmarks/sampling.py [--repeats 10] [--no-file] [--profile SETTING]
"""

import argparse
import cProfile
import pstats
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from types import MappingProxyType
from typing import Any

import dated
import torch
from torch import Tensor

from batchwright.serve.engine import Engine
from batchwright.serve.loading.weights import load
from batchwright.serve.sampling.params import SamplingParams
from batchwright.serve.sampling.sampler import Row, Sampler

NUM_ROWS = 32
NUM_STEPS = 30
NUM_TOKENS_BEFORE = 400
QUESTIONS = (
    "Tell me a story about a dog.",
    "What is the capital of France?",
    "Write a poem about the sea.",
    "Explain gravity to a child.",
    "List five fruits.",
    "Write a Python function that sorts a list.",
    "Who was Napoleon?",
    "How do I cook rice?",
)
SETTINGS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "greedy": {},
        "temperature 1": {"temperature": 1.0},
        "temperature 0.8": {"temperature": 0.8},
        "temperature 0.8, top-p 0.95": {"temperature": 0.8, "top_p": 0.95},
        "temperature 1, top-p 0.95": {"temperature": 1.0, "top_p": 0.95},
        "temperature 0.8, top-k 50": {"temperature": 0.8, "top_k": 50},
        "temperature 0.8, top-k 50, top-p 0.95": {"temperature": 0.8, "top_k": 50, "top_p": 0.95},
        "temperature 0.8, min-p 0.05": {"temperature": 0.8, "min_p": 0.05},
        "temperature 0.8, typical 0.9": {"temperature": 0.8, "typical_p": 0.9},
        "greedy, repetition 1.1": {"repetition_penalty": 1.1},
        "greedy, presence and frequency": {"presence_penalty": 0.5, "frequency_penalty": 0.5},
        "greedy, 300 biases": {"logit_bias": dict.fromkeys(range(1000, 1300), 1.0)},
        "greedy, 128 bad words": {"bad_words": tuple((i, i + 1, i + 2) for i in range(1000, 1128))},
        "greedy, mask of half the tokens": {},
        "greedy, logprobs": {"logprobs": 0},
        "greedy, logprobs and 5 alternatives": {"logprobs": 5},
    }
)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--no-file", action="store_true")
    parser.add_argument("--profile", choices=SETTINGS, metavar="SETTING")
    arguments = parser.parse_args()
    logits_BV = logits()
    steps = {name: step(name, logits_BV) for name in SETTINGS}
    if arguments.profile:
        profile(steps[arguments.profile])
        return
    results: dict[str, list[float]] = {name: [] for name in SETTINGS}
    for _ in range(arguments.repeats):
        for name, run in steps.items():
            results[name].append(1e3 * statistics.median(times(run)))
    print_table(results)
    if not arguments.no_file:
        print(f"\nwritten to {write(results, arguments.repeats)}")


def logits() -> Tensor:
    """logits_BV of the last step in which 32 drawn answers were all in the making."""
    engine = Engine(load())
    prompts = [engine.chat_prompt([{"role": "user", "content": question}]) for question in QUESTIONS]
    seen: list[Tensor] = []
    original = Sampler.sample

    def watched(sampler: Sampler, logits_BV: Tensor, *others: Any) -> Any:
        seen.append(logits_BV.clone())
        return original(sampler, logits_BV, *others)

    Sampler.sample = watched  # type: ignore[method-assign, assignment]
    params = [SamplingParams(max_tokens=40, temperature=0.8, seed=seed, ignore_eos=True) for seed in range(NUM_ROWS)]
    engine.generate([prompts[seed % len(prompts)] for seed in range(NUM_ROWS)], params)
    Sampler.sample = original  # type: ignore[method-assign]
    return next(logits_BV for logits_BV in reversed(seen) if len(logits_BV) == NUM_ROWS)


def step(name: str, logits_BV: Tensor) -> Callable[[], object]:
    """A step of rows that all ask for this, each after 400 tokens of which half are prompt."""
    sampler, num_tokens = Sampler(logits_BV.shape[1], logits_BV.device), logits_BV.shape[1]
    rows = []
    for seed in range(NUM_ROWS):
        tokens = torch.randint(num_tokens, (NUM_TOKENS_BEFORE,), generator=torch.Generator().manual_seed(seed)).tolist()
        slot = sampler.add(SamplingParams(seed=seed, **SETTINGS[name]), tokens[: NUM_TOKENS_BEFORE // 2])
        rows.append(Row(slot, tokens, NUM_TOKENS_BEFORE))
    half = torch.full((NUM_ROWS, -(-num_tokens // 32)), 0x55555555, dtype=torch.int32) if "mask" in name else None
    return torch.inference_mode()(lambda: sampler.sample(logits_BV, rows, half))


def times(run: Callable[[], object]) -> list[float]:
    """Seconds of each of 30 steps, after two that don't count."""
    seconds = []
    for _ in range(NUM_STEPS + 2):
        started = perf_counter()
        run()
        seconds.append(perf_counter() - started)
    return seconds[2:]


def profile(run: Callable[[], object]) -> None:
    """Functions in the order of their own time."""
    profiler = cProfile.Profile()
    run()
    profiler.runcall(times, run)
    pstats.Stats(profiler).sort_stats("tottime").print_stats(30)


def print_table(results: Mapping[str, Sequence[float]]) -> None:
    """Medians over the repeats, lowest and highest beside them."""
    print(f"{f'choosing {NUM_ROWS} tokens, ms per step':42}{'':>24}")
    for name, ms in results.items():
        print(f"{name:42}" + f"{f'{statistics.median(ms):.3f} ({min(ms):.3f}..{max(ms):.3f})':>24}")


def write(results: Mapping[str, Sequence[float]], repeats: int) -> Path:
    """The dated file."""
    return dated.write(
        "sampling",
        f"milliseconds to choose {NUM_ROWS} tokens: median step of every repeat",
        {name: dated.spread("ms", ms) for name, ms in results.items()},
        torch=torch.__version__,
        threads=torch.get_num_threads(),
        repeats=repeats,
        steps_per_repeat=NUM_STEPS,
    )


if __name__ == "__main__":
    main()
