"""What a client gets: an `Output` for each token, and for each end without one; or a `Completion` of all."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from batchwright.records import FinishReason
from batchwright.serve.sampling.scoring import Score


class Output(NamedTuple):
    """One token of one request. The last one of each choice has `finish_reason`; `token` is None if it brought none.

    `choice`: which of the answers it is of, where `SamplingParams.n` asks for several. `prompt_logprobs` comes once,
    with the first choice's first token. A NamedTuple, because a step makes one per row (decision 0002).
    """

    request_id: str
    token: int | None
    text: str
    finish_reason: FinishReason | None = None
    error: str | None = None
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    choice: int = 0
    prompt_logprobs: tuple[Score | None, ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """All that a request got. `logprobs[i]`: of token i and of the likeliest alternatives, if asked for.

    `prompt_logprobs[i]`: of prompt token i, if asked for; the first token's is None, for nothing comes before it.
    `alternatives`: the other choices, if `n` asked for several.
    """

    request_id: str
    tokens: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    error: str | None = None
    logprobs: tuple[Score, ...] = ()
    prompt_logprobs: tuple[Score | None, ...] = ()
    alternatives: tuple["Completion", ...] = ()


def completed(outputs: Sequence[Output]) -> Completion:
    """All that one request got; the last of each choice's `outputs` has the reason of its end."""
    by_choice: dict[int, list[Output]] = {}
    for output in outputs:
        by_choice.setdefault(output.choice, []).append(output)
    first, *others = (_choice(by_choice[choice]) for choice in sorted(by_choice))
    return replace(first, alternatives=tuple(others))


def _choice(outputs: Sequence[Output]) -> Completion:
    last = outputs[-1]
    assert last.finish_reason is not None
    tokens = [output for output in outputs if output.token is not None]
    return Completion(
        request_id=last.request_id,
        tokens=tuple(output.token for output in tokens if output.token is not None),
        text="".join(output.text for output in outputs),
        finish_reason=last.finish_reason,
        error=last.error,
        logprobs=tuple((output.logprob, output.top_logprobs) for output in tokens if output.logprob is not None),
        prompt_logprobs=next((output.prompt_logprobs for output in outputs if output.prompt_logprobs), ()),
    )
