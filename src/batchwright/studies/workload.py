"""The requests that a study runs: from a file, from a recorded trace, or made of text that ships with Python.

Whatever their source, they become token ids with a limit and, where the source has them, arrival times. Made and
replayed requests have a forced length (`ignore_eos`), so that every strategy does exactly the same work.
"""

from codecs import BOM_UTF8
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from pydoc_data.topics import topics
from zlib import crc32

import msgspec

from batchwright.errors import ConfigError, InputError, RequestError
from batchwright.serve.loading.weights import LoadedModel
from batchwright.serve.sampling.params import SamplingParams
from batchwright.traffic import TrafficRequest, limit, lognormal_lengths, read_trace, scale_lengths

MAX_LINE_BYTES = 8 << 20
MAX_PROMPT = 4_000_000
VARIATION = 0.9
"""Coefficient of variation of the lengths of made requests."""


@dataclass(frozen=True, slots=True)
class Work:
    """One request to run."""

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in order of arrival. `arrivals`: of each, in seconds from the first; None if the source has none."""

    work: Sequence[Work]
    arrivals: Sequence[float] | None = None


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    """A line of a requests file: `prompt` (text) or `ids` (tokens)."""

    prompt: str | None = None
    ids: list[int] | None = None
    max_tokens: int = 128
    arrival: float | None = None
    ignore_eos: bool = False


def read_requests(path: Path, model: LoadedModel) -> Workload:
    """The requests of a JSON lines file, by arrival: prompt or ids, max_tokens, arrival (s), ignore_eos.

    Arrivals may be on any clock. Raises InputError, with the line number.
    """
    work, arrivals = [], []
    try:
        for number, line in enumerate(_lines(path), start=1):
            if line.strip():
                one, arrival = _parsed(line, f"read {path}, line {number}", f"line-{number}", model)
                work.append(one)
                arrivals += [] if arrival is None else [arrival]
    except OSError as error:
        raise InputError(
            f"read requests from {path}", str(error.strerror), "give a readable JSON lines file"
        ) from error
    if not work:
        raise InputError(f"read requests from {path}", "it holds none", "give at least one line")
    if not arrivals:
        return Workload(work)
    if len(arrivals) < len(work):
        fact = f"{len(arrivals)} of {len(work)} lines have an arrival"
        raise InputError(f"read requests from {path}", fact, "give all of them one, or none")
    return _by_arrival(work, arrivals)


def replay_trace(path: Path, model: LoadedModel, num_requests: int, *, max_context: int | None, seed: int) -> Workload:
    """The first requests of an Azure or Mooncake trace, which has lengths, with text of ours.

    Equal block keys (Mooncake's) get equal text. `max_context` scales all lengths, so that the longest request fits.
    """
    recorded = list(limit(read_trace(path), num_requests))
    if not recorded:
        raise InputError(f"read a trace from {path}", "it holds no requests", "give one with at least one")
    if max_context is not None:
        recorded = scale_lengths(recorded, max_context)
    _check_lengths(recorded)
    text, place = _text(model), 7919 * seed
    work = []
    for request in recorded:
        blocks = [_passage(text, _place_of(key), request.key_block) for key in request.keys]
        shared = [token for block in blocks for token in block][: request.num_prompt]
        own = _passage(text, place, request.num_prompt - len(shared))
        place += len(own)
        work.append(Work(f"line-{request.id}", (*shared, *own), _forced(request.num_output)))
    return _by_arrival(work, [request.arrival for request in recorded])


def _check_lengths(recorded: Sequence[TrafficRequest]) -> None:
    """Raises InputError for a prompt that would fill the memory before anybody could refuse it."""
    for request in recorded:
        if request.num_prompt > MAX_PROMPT:
            fact = f"it has {request.num_prompt:,} tokens, the limit is {MAX_PROMPT:,}"
            raise InputError(f"make the prompt of line {request.id}", fact, "scale the trace's lengths (scale_lengths)")


def make_requests(model: LoadedModel, num_requests: int, mean_prompt: int, mean_output: int, seed: int) -> list[Work]:
    """A seeded mix: prompts from Python's own help texts, lognormal lengths (`VARIATION`).

    Raises ConfigError for means beyond half the model's context, which is also the longest that is made.
    """
    longest = model.decoder.shape.context // 2
    for name, mean in (("mean_prompt", mean_prompt), ("mean_output", mean_output)):
        if mean > longest:
            fact = f"{model.name} has a context of {model.decoder.shape.context}, and each gets half of it"
            raise ConfigError(f"make requests with {name}={mean}", fact, f"use at most {longest}")
    prompts = lognormal_lengths(mean_prompt, VARIATION, min(4, mean_prompt), longest, seed)
    outputs = lognormal_lengths(mean_output, VARIATION, min(4, mean_output), longest, seed + 1)
    text, place = _text(model), 7919 * seed
    work = []
    for index, num_prompt, num_output in zip(range(num_requests), prompts, outputs, strict=False):
        work.append(Work(f"{index}", _passage(text, place, num_prompt), _forced(num_output)))
        place += num_prompt
    return work


def _by_arrival(work: Sequence[Work], arrivals: Sequence[float]) -> Workload:
    """`work` in order of arrival, on a clock that starts with the first."""
    ordered = sorted(zip(arrivals, work, strict=True), key=itemgetter(0))
    first = ordered[0][0]
    return Workload([one for _, one in ordered], [arrival - first for arrival, _ in ordered])


def _forced(num_output: int) -> SamplingParams:
    return SamplingParams(max_tokens=max(1, num_output), ignore_eos=True)


def _lines(path: Path) -> Iterator[bytes]:
    """The lines of a file, never more than one too long of each in memory."""
    with path.open("rb") as file:
        first = file.readline(MAX_LINE_BYTES + 1).removeprefix(BOM_UTF8)
        yield first
        while line := file.readline(MAX_LINE_BYTES + 1):
            yield line


def _parsed(line: bytes, asked: str, work_id: str, model: LoadedModel) -> tuple[Work, float | None]:
    """The request of a line, and its arrival if it has one."""
    if len(line) > MAX_LINE_BYTES:
        raise InputError(asked, f"it is longer than {MAX_LINE_BYTES:,} bytes", "give a shorter prompt")
    try:
        fields = msgspec.json.decode(line, type=_Line)
        params = SamplingParams(max_tokens=fields.max_tokens, ignore_eos=fields.ignore_eos)
    except (msgspec.MsgspecError, RequestError) as error:
        raise InputError(asked, str(error), "give prompt or ids, max_tokens, arrival, ignore_eos") from error
    if (fields.prompt is None) == (fields.ids is None):
        raise InputError(asked, "it needs exactly one of prompt and ids", "give one")
    if not (fields.prompt or fields.ids):
        raise InputError(asked, "its prompt is empty", "give at least one token")
    if fields.arrival is not None and not 0 <= fields.arrival < float("inf"):
        raise InputError(asked, f"its arrival is {fields.arrival}", "give seconds from the start, 0 or more")
    ids = fields.ids if fields.prompt is None else _encoded(fields.prompt, model, asked)
    return Work(work_id, tuple(ids or ()), params), fields.arrival


def _encoded(text: str, model: LoadedModel, asked: str) -> list[int]:
    if model.tokenizer is None:
        raise InputError(asked, f"{model.name} has no tokenizer: {model.no_tokenizer}", "give ids instead of a prompt")
    return model.tokenizer.encode(text)


def _text(model: LoadedModel) -> list[int]:
    """Python's own help texts as tokens; for a model without a tokenizer, its vocabulary in a scrambled order."""
    if model.tokenizer is not None:
        return model.tokenizer.encode("\n".join(topics[name] for name in sorted(topics)))
    vocabulary = model.decoder.shape.vocab
    return [7919 * index % vocabulary for index in range(vocabulary)]


def _passage(text: Sequence[int], place: int, length: int) -> tuple[int, ...]:
    """`length` tokens of `text` from `place`, which wraps around."""
    first = place % len(text)
    passage = tuple(text[first : first + length])
    while len(passage) < length:
        passage += tuple(text[: length - len(passage)])
    return passage


def _place_of(key: Hashable) -> int:
    """Where the passage that a trace's block key stands for begins: the same for equal keys."""
    return crc32(repr(key).encode())
