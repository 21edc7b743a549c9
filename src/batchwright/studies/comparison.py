"""What `compare` is asked and what it answers: plain data, without torch, for the command line and the report."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

import msgspec

from batchwright.bench.summary import Summary
from batchwright.errors import ConfigError
from batchwright.facts.hardware import Hardware
from batchwright.records import RequestRecord, StepRecord

Strategy = Literal["one-by-one", "static", "dynamic", "continuous"]
STRATEGIES: tuple[Strategy, ...] = ("one-by-one", "static", "dynamic", "continuous")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareSettings:
    """What to compare, on which requests. Lengths are tokens, times seconds."""

    model: str = "smollm2"
    """smollm2 (embedded), a directory with config.json and safetensors, a .gguf file, or org/name on Hugging Face."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of weights and KV cache."""
    device: str = "cpu"
    """cpu, cuda or cuda:N."""
    strategies: tuple[Strategy, ...] = STRATEGIES
    """Which to run, in this order."""
    requests: Path | None = None
    """JSON lines with prompt (or ids), max_tokens, arrival (s), ignore_eos. Default: made of Python's help texts."""
    trace: Path | None = None
    """A recorded trace (Azure's CSV, Mooncake's JSON lines), replayed with text of ours."""
    num_requests: int = 24
    """How many to make, or to take from the trace."""
    mean_prompt: int = 80
    """Mean length of made prompts."""
    mean_output: int = 32
    """Mean length of made outputs."""
    scale_lengths: bool = False
    """Shrink a trace's lengths until its longest request fits 1,024 tokens, or the model's context if shorter."""
    rate: float | None = None
    """Requests/s in the second scene: Poisson, or the source's own arrivals stretched evenly."""
    load: float | None = None
    """The same, as a share of the capacity measured in the first scene. Default 0.7, or arrivals as recorded."""
    batch_size: int = 8
    """Of static and dynamic batches."""
    max_queue_delay: float = 0.25
    """Seconds that a dynamic batch waits for company."""
    max_rows: int = 16
    """Requests that continuous batching runs at once."""
    token_budget: int = 512
    """Tokens per step of continuous batching."""
    page_size: int = 16
    """Tokens per page of KV cache."""
    num_pages: int | None = None
    """Pages of KV cache. Default: 1 GiB of them."""
    seed: int = 0
    """Of lengths, passages and arrivals."""

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_choices()
        default = {field.name: field.default for field in fields(self)}
        for name, why in self._without_effect():
            if getattr(self, name) != default[name]:
                raise ConfigError(f"use {name}={getattr(self, name)}", f"{why}, so it has no effect", "leave it out")

    def _check_numbers(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"compare with {name}={value}", "it must be at least 1", f"raise {name}")
        for name in ("rate", "load"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"compare with {name}={value}", "it must be above 0 and finite", "change it")
        if not 0 <= self.max_queue_delay < float("inf"):
            asked = f"compare with max_queue_delay={self.max_queue_delay}"
            raise ConfigError(asked, "it must be 0 or more, and finite", "change max_queue_delay")

    def _check_choices(self) -> None:
        if not self.strategies:
            raise ConfigError("compare no strategies", f"there are {', '.join(STRATEGIES)}", "name at least one")
        if unknown := [name for name in self.strategies if name not in STRATEGIES]:
            raise ConfigError(f"compare {unknown[0]}", f"there are {', '.join(STRATEGIES)}", "name some of these")
        if len(set(self.strategies)) < len(self.strategies):
            raise ConfigError(f"compare {', '.join(self.strategies)}", "one is named twice", "name each once")
        for one, other, what in (("requests", "trace", "what to run"), ("rate", "load", "how fast it comes")):
            if getattr(self, one) is not None and getattr(self, other) is not None:
                asked = f"use both {one}={getattr(self, one)} and {other}={getattr(self, other)}"
                raise ConfigError(asked, f"each says {what}", "give one of them")
        if self.scale_lengths and self.trace is None:
            raise ConfigError("scale lengths", "only a trace's lengths are scaled", "give a trace, or leave it out")

    def _without_effect(self) -> Iterator[tuple[str, str]]:
        """Settings that the others make void, and why."""
        if self.requests is not None:
            yield "num_requests", "all requests of the file are run"
        if self.requests is not None or self.trace is not None:
            yield from ((name, "lengths come from the file") for name in ("mean_prompt", "mean_output"))
        for name, users in _USERS.items():
            if not users & set(self.strategies):
                yield name, f"only {' and '.join(sorted(users))} batching uses it"


_USERS: dict[str, set[Strategy]] = {
    "batch_size": {"static", "dynamic"},
    "max_queue_delay": {"dynamic"},
    "max_rows": {"continuous"},
    "token_budget": {"continuous"},
}
_COUNTS = (
    *("num_requests", "mean_prompt", "mean_output", "batch_size"),
    *("max_rows", "token_budget", "page_size", "num_pages"),
)


class StrategyRun(msgspec.Struct, frozen=True, kw_only=True):
    """One strategy in one scene. `roofline_share`: useful FLOPs / (peak FLOP/s x makespan)."""

    strategy: str
    note: str
    summary: Summary
    useful_flops: int
    roofline_share: float | None

    @property
    def capacity(self) -> float | None:
        """Requests/s that it managed."""
        return self.summary.num_requests / self.summary.makespan if self.summary.makespan else None


class SceneResult(msgspec.Struct, frozen=True, kw_only=True):
    """All strategies over the same arrivals.

    `rate`: requests/s offered, None when all come at the same time. `load`: the same as a share of what continuous
    batching, else the fastest strategy, managed in the first scene. `offered`: both in words, and why that rate.
    """

    title: str
    what: str
    rate: float | None
    load: float | None
    offered: str
    runs: tuple[StrategyRun, ...]


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """The result of `compare`. `settings` as given; `versions` of what computed it; `date` (UTC) on which it ended.

    `source`: where the requests came from, in words. `num_output_tokens` were produced by every strategy if
    `are_outputs_forced`, else they are the most that may be. Lengths are tokens.
    """

    settings: dict[str, object]
    hardware: Hardware
    model: str
    dtype: Literal["bfloat16", "float32"]
    source: str
    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int
    longest_prompt: int
    longest_output: int
    are_outputs_forced: bool
    versions: dict[str, str]
    date: str
    seconds: float
    scenes: tuple[SceneResult, ...]


@dataclass(frozen=True, slots=True)
class Recorded:
    """The records of one strategy in one scene; `run` is their `run_name`."""

    run: str
    requests: Sequence[RequestRecord]
    steps: Sequence[StepRecord]


def run_name(scene: str, strategy: str) -> str:
    """What the records of a strategy in the scene of that title are called."""
    return f"{scene}/{strategy}"
