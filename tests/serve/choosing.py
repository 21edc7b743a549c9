"""What tests of sampling share: random logits, requests in slots, and the processors of transformers in their order."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from batchwright.serve.sampling.filters import Scored, kept, most_typical
from batchwright.serve.sampling.params import SamplingParams
from batchwright.serve.sampling.ranking import likeliest
from batchwright.serve.sampling.sampler import Row, Sampled, Sampler, _Way

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Asked:
    """One row: its params, the text before it, how much of that is prompt, and what would end it."""

    params: SamplingParams
    tokens: Sequence[int] = ()
    num_prompt: int = 0
    end_ids: Collection[int] = ()

    def row(self, sampler: Sampler, end: int | None = None) -> Row:
        """In a slot of its own."""
        slot = sampler.add(self.params, self.tokens[: self.num_prompt], self.end_ids)
        return Row(slot, list(self.tokens), len(self.tokens) if end is None else end)


def make_logits(num_rows: int, num_tokens: int, seed: int = 0, spread: float = 3.0, *, rounded: bool = False) -> Tensor:
    logits_BV = torch.randn(num_rows, num_tokens, generator=torch.Generator().manual_seed(seed)) * spread
    return logits_BV.bfloat16().float() if rounded else logits_BV


def choose(logits_BV: Tensor, asked: Sequence[Asked], mask_BW: Tensor | None = None) -> list[Sampled]:
    """What a new sampler chooses."""
    sampler = Sampler(logits_BV.shape[1], CPU)
    return sampler.sample(logits_BV, [one.row(sampler) for one in asked], mask_BW)


def choose_at(logits_BV: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> list[Sampled]:
    """The same, where no text matters but its length."""
    return choose(logits_BV, [Asked(one, [0] * end) for one, end in zip(params, positions, strict=True)])


def seeded(params: SamplingParams, num: int) -> list[SamplingParams]:
    return [replace(params, seed=seed) for seed in range(num)]


def distribution(logits_BV: Tensor, asked: Sequence[Asked]) -> Tensor:
    """probability_BV of each token, in float64, as a sampler makes it of rows that are drawn."""
    sampler = Sampler(logits_BV.shape[1], CPU)
    rows = [one.row(sampler) for one in asked]
    processed_BV = sampler._processed(logits_BV, rows, None)
    settings_BP = torch.from_numpy(sampler._settings_SP[[row.slot.index for row in rows]])
    rate_B, limits_BL = settings_BP[:, 0].float(), settings_BP[:, 1:]
    scored = Scored(processed_BV, likeliest(processed_BV)[0], rate_B)
    scores_BV, room_BV = sampler._room.of(len(rows))
    groups = kept(scored, scored.all(scores_BV).softmax(-1), limits_BL)
    if all(row.slot.way is _Way.TYPICAL for row in rows):
        groups = most_typical(scores_BV, limits_BL[:, -1], room_BV)
    weight_BV = torch.zeros_like(scores_BV, dtype=torch.float64)
    for row_G, id_GC, weight_GC in groups:
        weight_BV[row_G[:, None], id_GC] = weight_GC
    weight_BV = weight_BV[:, : logits_BV.shape[1]]
    return weight_BV / weight_BV.sum(-1, keepdim=True)


def transformers_distribution(logits_1V: Tensor, asked: Asked) -> Tensor:
    """The same by transformers, in float64."""
    scores_1V = transformers_processed(logits_1V.double(), asked)
    for warper in _warpers(asked.params):
        scores_1V = warper(None, scores_1V)
    return scores_1V.softmax(-1)[0]


def transformers_processed(logits_1V: Tensor, asked: Asked) -> Tensor:
    """Logits after all that also a greedy row is subject to; presence and frequency by OpenAI's formula."""
    tokens = torch.tensor([list(asked.tokens)], dtype=torch.int64)
    for processor in _processors(asked):
        logits_1V = processor(tokens, logits_1V)
    return logits_1V


def _processors(asked: Asked) -> Iterator[LogitsProcessor]:
    params = asked.params
    if params.logit_bias:
        yield SequenceBiasLogitsProcessor({(token,): float(bias) for token, bias in params.logit_bias})
    if params.repetition_penalty != 1:
        yield RepetitionPenaltyLogitsProcessor(float(params.repetition_penalty))
    yield _OpenAIPenalties(params.presence_penalty, params.frequency_penalty, asked.num_prompt)
    if params.bad_words:
        yield NoBadWordsLogitsProcessor([list(word) for word in params.bad_words])
    if params.min_tokens and asked.end_ids:
        yield MinNewTokensLengthLogitsProcessor(asked.num_prompt, params.min_tokens, list(asked.end_ids))


class _OpenAIPenalties(LogitsProcessor):
    """mu[j] - c[j] * frequency - (c[j] > 0) * presence, one token of the output after the other."""

    def __init__(self, presence: float, frequency: float, num_prompt: int) -> None:
        self.presence, self.frequency, self.num_prompt = presence, frequency, num_prompt

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores, output = scores.clone(), input_ids[0, self.num_prompt :].tolist()
        for token in set(output):
            scores[0, token] -= scores.new_tensor(self.frequency) * output.count(token)
            scores[0, token] -= scores.new_tensor(self.presence)
        return scores


def _warpers(params: SamplingParams) -> Iterator[LogitsProcessor]:
    yield TemperatureLogitsWarper(float(params.temperature))
    if params.top_k:
        yield TopKLogitsWarper(params.top_k)
    if params.top_p < 1:
        yield TopPLogitsWarper(params.top_p)
    if params.min_p:
        yield MinPLogitsWarper(params.min_p)
    if params.typical_p < 1:
        yield TypicalLogitsWarper(params.typical_p)
