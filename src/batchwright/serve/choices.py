"""The choices of one request: `n` answers to one prompt.

To the scheduler each choice is a request of its own, with a seed of its own; equal prompts share pages. Their client
sees one request, whose outputs say which `choice` they are of. Where `best_of` exceeds `n`, nothing is handed out
before all have ended: then the `n` of highest log-probability per token, the best first, as OpenAI's API has it.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from hashlib import blake2b

from batchwright.serve.outputs import Output
from batchwright.serve.sampling.params import SamplingParams


class Choices:
    """What a client asked for under one id. `on_output` gets what is handed out; None: the caller of `step` does."""

    def __init__(self, request_id: str, params: SamplingParams, on_output: Callable[[Output], None] | None) -> None:
        self.id = request_id
        self.on_output = on_output
        self._num_asked = params.n
        self._num_open = self.num_computed = params.best_of or params.n
        self._shows_logprobs = params.logprobs is not None
        self._held: list[list[Output]] = [[] for _ in range(self.num_computed)]

    @property
    def has_ended(self) -> bool:
        """Whether every choice has."""
        return not self._num_open

    def params_of(self, params: SamplingParams, index: int) -> SamplingParams:
        """What choice `index` is sampled with; the first as if it were the only one."""
        assert params.seed is not None
        return replace(
            params,
            n=1,
            best_of=None,
            seed=_seed_of(params.seed, index),
            logprobs=params.logprobs or 0 if self._must_wait else params.logprobs,
            prompt_logprobs=None if index else params.prompt_logprobs,
        )

    def take(self, output: Output) -> list[Output]:
        """Note an output of a choice; what may be handed out now."""
        self._num_open -= output.finish_reason is not None
        if not self._must_wait:
            return [output]
        self._held[output.choice].append(output)
        return [] if self._num_open else self._best()

    @property
    def _must_wait(self) -> bool:
        return self.num_computed > self._num_asked

    def _best(self) -> list[Output]:
        """All outputs of the best choices, which are numbered anew; a prompt's scores go with the first."""
        ranked = sorted(self._held, key=_mean_logprob, reverse=True)[: self._num_asked]
        scores = next((output.prompt_logprobs for output in self._held[0] if output.prompt_logprobs), ())
        outputs = [output._replace(choice=i, prompt_logprobs=()) for i, kept in enumerate(ranked) for output in kept]
        outputs[0] = outputs[0]._replace(prompt_logprobs=scores)
        if self._shows_logprobs:
            return outputs
        return [output._replace(logprob=None, top_logprobs=()) for output in outputs]


def _mean_logprob(outputs: list[Output]) -> float:
    """Per token; a choice that failed, or has none, comes last."""
    logprobs = [output.logprob for output in outputs if output.logprob is not None]
    if outputs[-1].finish_reason not in ("stop", "length") or not logprobs:
        return -math.inf
    return sum(logprobs) / len(logprobs)


def _seed_of(seed: int, index: int) -> int:
    """A stream of its own for each choice but the first, which no neighbouring seed shares."""
    if not index:
        return seed
    return int.from_bytes(blake2b(f"{seed}#{index}".encode(), digest_size=8).digest())
