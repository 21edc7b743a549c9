"""What guessing by prompt lookup brings: tokens per second beside the same engine without it, and how many are right.

Repetitive text: the answer copies what the prompt holds (a passage, to be repeated word for word). Other text: real
prompts, answered at temperature 1, so that nothing comes back often. Both ways run in turn, in pairs; their answers are
asserted to be equal. Prints a table and writes a dated file to results/.

    python benchmarks/speculation.py [--repeats 5] [--rows 1 4 16] [--no-file]
"""

import argparse
import statistics
from collections.abc import Sequence
from functools import partial
from pydoc_data.topics import topics
from time import perf_counter
from typing import Any, NamedTuple

import dated

from batchwright.policy.continuous import Continuous, ContinuousSettings
from batchwright.policy.speculation import Speculation
from batchwright.records import Recorder
from batchwright.serve.engine import Engine
from batchwright.serve.loading.weights import LoadedModel, load
from batchwright.serve.sampling.params import SamplingParams

NUM_TOKENS = 160
PASSAGES = ("assert", "break", "continue", "del", "global", "in", "nonlocal", "pass", "if", "while", "with", "yield",
            "import", "return", "lambda", "raise")  # fmt: skip


class Run(NamedTuple):
    """One way through all requests of a text: seconds, tokens, guesses, right guesses, steps."""

    seconds: float
    answers: list[tuple[int, ...]]
    num_drafts: int
    num_right: int
    num_steps: int


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--no-file", action="store_true")
    arguments = parser.parse_args()
    model = load()
    results = {
        f"{text}, {num_rows} at once": compared(model, text, num_rows, arguments.repeats)
        for text in ("repetitive", "other")
        for num_rows in arguments.rows
    }
    print(f"{'':28}{'speed-up':>22}{'tok/s with':>12}{'right':>8}{'tokens/row/step':>17}")
    for name, result in results.items():
        ratios = result["speed_up"]
        cell = f"{ratios['median_ratio']:.2f} ({ratios['min_ratio']:.2f}..{ratios['max_ratio']:.2f})"
        right = f"{100 * result['share_right']:.0f}%"
        print(f"{name:28}{cell:>22}{result['tokens_per_second']:12.0f}{right:>8}{result['tokens_per_row']:17.2f}")
    if not arguments.no_file:
        what = "tokens per second with guesses over those without, by pairs; share of guesses that were right"
        print(f"\nwritten to {dated.write('speculation', what, results, repeats=arguments.repeats)}")


def compared(model: LoadedModel, text: str, num_rows: int, repeats: int) -> dict[str, Any]:
    """Both ways in turn, after a warm-up; answers must be equal."""
    prompts, params = requests(model, text, max(4, num_rows))
    runs: list[tuple[Run, Run]] = []
    for _ in range(repeats + 1):
        plain = run(model, num_rows, None, prompts, params)
        guessed = run(model, num_rows, Speculation(), prompts, params)
        assert plain.answers == guessed.answers, "guesses changed an answer"
        runs.append((plain, guessed))
    pairs = runs[1:]
    last = pairs[-1][1]
    num_tokens = sum(map(len, last.answers))
    return {
        "speed_up": dated.spread("ratio", [plain.seconds / guessed.seconds for plain, guessed in pairs]),
        "tokens_per_second": round(statistics.median(num_tokens / guessed.seconds for _, guessed in pairs), 1),
        "tokens_per_second_without": round(statistics.median(num_tokens / plain.seconds for plain, _ in pairs), 1),
        "num_drafts": last.num_drafts,
        "share_right": round(last.num_right / max(1, last.num_drafts), 4),
        "tokens_per_row": round(num_tokens / (num_tokens - last.num_right), 4),
        "steps": last.num_steps,
        "steps_without": pairs[-1][0].num_steps,
    }


def requests(model: LoadedModel, text: str, num: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """So many prompts of some 200 tokens, and what is asked of them."""
    assert model.tokenizer
    passages = [model.tokenizer.encode(topics[name].replace("*", ""))[:180] for name in PASSAGES[:num]]
    order = "Repeat this text word for word" if text == "repetitive" else "Tell a story about this text"
    prompts = []
    for passage in passages:
        message = {"role": "user", "content": f"{order}:\n\n{model.tokenizer.decode(passage)}"}
        prompts.append(model.tokenizer.encode(model.tokenizer.apply_chat_template([message]), add_special_tokens=False))
    temperature = 0.0 if text == "repetitive" else 1.0
    return prompts, [
        SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, temperature=temperature, seed=row)
        for row in range(len(prompts))
    ]


def run(
    model: LoadedModel, num_rows: int, speculation: Speculation | None, prompts: list[list[int]],
    params: Sequence[SamplingParams],
) -> Run:  # fmt: skip
    """All requests through an engine that runs at most `num_rows` at once."""
    settings = ContinuousSettings(max_rows=num_rows, speculation=speculation)
    engine = Engine(model, partial(Continuous, settings=settings), recorder=partial(Recorder, "speculation"))
    started = perf_counter()
    completions = engine.generate(prompts, params)
    seconds = perf_counter() - started
    steps = engine.recorder.complete()[1]
    drafts, right = sum(step.num_drafts for step in steps), sum(step.num_right for step in steps)
    return Run(seconds, [completion.tokens for completion in completions], drafts, right, len(steps))


if __name__ == "__main__":
    main()
