"""Requests whose chunks share steps over shuffled pages, and the logits that each gets: for every kind of decoder."""

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from batchwright.policy.pages import Memory
from batchwright.serve.decoders.adapters import Adapter, StepAdapters
from batchwright.serve.decoders.attention import RowSpan, layout_order
from batchwright.serve.kv import PagedKV

PAGE, NUM_STEPS = 8, 4
PAGES_EACH = 7


class Job(NamedTuple):
    """A request: its tokens, and the chunks in which they are computed, one per step."""

    tokens: list[int]
    sizes: list[int]
    adapter: Adapter | None = None


def random_jobs(seed: int, adapters: Sequence[Adapter | None], vocab: int = 97) -> list[Job]:
    """One for each of `adapters`, of up to 51 tokens; prompts cut into chunks, decodes, and both in turn."""
    draw = random.Random(seed)
    jobs = []
    for adapter in adapters:
        sizes = [draw.choice([1, 5, 30]), *draw.choices([1, 1, 1, 7], k=NUM_STEPS - 1)]
        jobs.append(Job([draw.randrange(vocab) for _ in range(sum(sizes))], sizes, adapter))
    return jobs


def logits_of(decoder: Any, jobs: Sequence[Job]) -> list[Tensor]:
    """logits_SV of each job, after the last position of each of its S chunks. Pages hold NaN before."""
    num_pages = PAGES_EACH * len(jobs)
    kv = PagedKV(decoder.shape, Memory(num_pages, PAGE, PAGE * PAGES_EACH), decoder.dtype, decoder.device)
    kv.pages_LPMSD.fill_(torch.nan)
    shuffled = random.Random(0).sample(range(num_pages), num_pages)
    tables = [tuple(shuffled[first : first + PAGES_EACH]) for first in range(0, num_pages, PAGES_EACH)]
    starts, found = [0] * len(jobs), [[] for _ in jobs]
    for sizes in zip(*(job.sizes for job in jobs), strict=True):
        spans = [RowSpan(*row) for row in zip(starts, sizes, tables, strict=True)]
        order = layout_order(spans)
        for i, logits_V in zip(order, _step(decoder, kv, jobs, spans, order), strict=True):
            found[i].append(logits_V)
        starts = [span.context for span in spans]
    return [torch.stack(logits) for logits in found]


def _step(decoder: Any, kv: PagedKV, jobs: Sequence[Job], spans: Sequence[RowSpan], order: Sequence[int]) -> Tensor:
    rows = [spans[i] for i in order]
    tokens = [token for i in order for token in jobs[i].tokens[spans[i].start : spans[i].context]]
    ends_B = torch.tensor([span.num_positions for span in rows]).cumsum(0) - 1
    adapters_T = [jobs[i].adapter for i in order for _ in range(spans[i].num_positions)]
    adapters = StepAdapters.of(adapters_T, ends_B.tolist(), decoder.device)
    layout = decoder.ops.layout(rows, kv, decoder.attention)
    return decoder.forward(torch.tensor(tokens), layout.attend, ends_B, adapters=adapters)
