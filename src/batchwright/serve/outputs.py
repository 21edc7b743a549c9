"""What a client gets: an `Output` for each step that brought its request something, or a `Completion` of all."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from batchwright.records import FinishReason


class Output(NamedTuple):
    """What one step gave one request. The last one has `finish_reason`; `token` is None if it brought none.

    A NamedTuple, because a step makes one per row (decision 0002).
    """

    request_id: str
    token: int | None
    text: str
    finish_reason: FinishReason | None = None
    error: str | None = None
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """All that a request got. `logprobs[i]`: of token i and of the likeliest alternatives, if asked for."""

    request_id: str
    tokens: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    error: str | None = None
    logprobs: tuple[tuple[float, tuple[tuple[int, float], ...]], ...] = ()


def completed(outputs: Sequence[Output]) -> Completion:
    """All that one request got; the last of its `outputs` has the reason of its end."""
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
    )
