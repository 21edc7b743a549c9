"""Attention over pages: what a step's layers share (`StepLayout`, made once), and the product itself.

Rows with one position (decodes) are sorted by context and attend in groups of similar length, each as two batched
products over gathered pages; a prompt's chunk attends by itself. Gathering copies each row's pages once per layer,
and is cheap beside the products (docs/log.md). Groups only save time: what a row gets does not depend on them beyond
the rounding of sums.
`reference_attention` is the plain twin that the tests hold this against.

Shapes: T positions of the step, B rows of a group, H query heads, K key-value heads, G = H / K, D head_dim,
C context padded to whole pages, E = H * D.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from batchwright.serve.kv import PagedKV, slots
from batchwright.serve.rope import rotate, rotations

_GROUP_SPREAD = 1.5
"""A decode joins a group while its context is within this factor of the group's longest."""


class RowSpan(NamedTuple):
    """Positions `start .. start + num_positions` of one row, stored in the pages of `table`."""

    start: int
    num_positions: int
    table: tuple[int, ...]

    @property
    def context(self) -> int:
        return self.start + self.num_positions

    def begun_page(self, page_size: int) -> tuple[int, ...]:
        """The page, if any, that this span begins and does not fill: its tail holds what was there before."""
        index, num_filled = divmod(self.context, page_size)
        begins = num_filled and index * page_size >= self.start and index < len(self.table)
        return (self.table[index],) if begins else ()


class _DecodeGroup(NamedTuple):
    """Rows `first .. end - 1` of the step, one position each."""

    first: int
    end: int
    heads: Tensor  # page-heads to gather: keys then values, for each row and head
    mask_B11C: Tensor


class _PromptChunk(NamedTuple):
    """Positions `first .. end - 1` of the step, all of one row; `heads` is None where it sees only itself."""

    first: int
    end: int
    context: int
    heads: Tensor | None
    mask_TC: Tensor | None


class StepLayout:
    """Where a step's positions are, are stored and look. `rows` are in the order of the step's positions.

    Decodes must come first, longest context first (`layout_order`). Queries and keys come in pair order (`rope`).
    """

    def __init__(self, rows: Sequence[RowSpan], kv: PagedKV, num_heads: int, freq_C: Tensor) -> None:
        self._kv, self._num_heads = kv, num_heads
        kv.clear(page for row in rows for page in row.begun_page(kv.page_size))
        device = kv.pages_LPMSD.device
        num_decodes = sum(row.num_positions == 1 for row in rows)
        assert all(row.num_positions == 1 for row in rows[:num_decodes]), "decodes come first"
        positions_T = torch.tensor([p for row in rows for p in range(row.start, row.context)], device=device)
        self._turn_T1C = rotations(positions_T, freq_C)
        stored = [
            slot for row in rows for slot in slots(row.table, kv.page_size, row.start, row.num_positions, kv.scratch)
        ]
        self._key_slots, self._value_slots = self._head_slots(torch.tensor(stored, device=device))
        self._groups = [self._decode_group(rows[first:last], first) for first, last in _similar(rows[:num_decodes])]
        self._chunks = []
        first = num_decodes
        for row in rows[num_decodes:]:
            self._chunks.append(self._prompt_chunk(row, first))
            first += row.num_positions

    def attend(self, layer: int, qkv_TF: Tensor) -> Tensor:
        """Stores the keys and values of all positions in `layer`'s pages, then o_TE for all of them."""
        q_THD, k_TKD, v_TKD = rotated(qkv_TF, self._turn_T1C, self._num_heads, self._kv.num_heads)
        pages_PMSD = self._kv.pages_LPMSD[layer]
        flat = pages_PMSD.view(-1, pages_PMSD.shape[-1])
        flat.index_copy_(0, self._key_slots, k_TKD.flatten(0, 1))
        flat.index_copy_(0, self._value_slots, v_TKD.flatten(0, 1))
        by_head = pages_PMSD.view(flat.shape[0] // self._kv.page_size, -1)
        parts = [self._attend_group(group, q_THD, by_head) for group in self._groups]
        parts += [self._attend_chunk(chunk, q_THD, k_TKD, v_TKD, by_head) for chunk in self._chunks]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    # ---- decodes

    def _decode_group(self, rows: Sequence[RowSpan], first: int) -> _DecodeGroup:
        page_size, device = self._kv.page_size, self._turn_T1C.device
        num_pages = -(-rows[0].context // page_size)
        tables = torch.tensor([self._padded_table(row, num_pages) for row in rows], device=device)
        contexts = torch.tensor([row.context for row in rows], device=device)
        hidden = torch.arange(num_pages * page_size, device=device) >= contexts[:, None]
        mask = torch.zeros(hidden.shape, device=device).masked_fill_(hidden, float("-inf"))
        return _DecodeGroup(first, first + len(rows), self._page_heads(tables), mask[:, None, None, :])

    def _attend_group(self, group: _DecodeGroup, q_THD: Tensor, by_head: Tensor) -> Tensor:
        num_rows, num_heads, head_dim = group.end - group.first, self._kv.num_heads, q_THD.shape[-1]
        gathered = by_head.index_select(0, group.heads).view(2, num_rows * num_heads, -1, head_dim)
        keys, values = gathered[0], gathered[1]
        queries = q_THD[group.first : group.end].reshape(num_rows * num_heads, -1, head_dim)
        scores = torch.bmm(queries, keys.transpose(1, 2)).view(num_rows, num_heads, queries.shape[1], -1)
        weights = torch.add(group.mask_B11C, scores, alpha=head_dim**-0.5).softmax(-1).to(values.dtype)
        return torch.bmm(weights.view(num_rows * num_heads, queries.shape[1], -1), values).view(num_rows, -1)

    # ---- chunks of prompts

    def _prompt_chunk(self, row: RowSpan, first: int) -> _PromptChunk:
        end = first + row.num_positions
        if row.start == 0:
            return _PromptChunk(first, end, row.context, None, None)
        device = self._turn_T1C.device
        table = torch.tensor([self._padded_table(row, -(-row.context // self._kv.page_size))], device=device)
        seen = torch.arange(row.context, device=device) <= torch.arange(row.start, row.context, device=device)[:, None]
        return _PromptChunk(first, end, row.context, self._page_heads(table), seen)

    def _attend_chunk(
        self, chunk: _PromptChunk, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, by_head: Tensor
    ) -> Tensor:
        here = slice(chunk.first, chunk.end)
        queries = q_THD[here].transpose(0, 1)[None]
        if chunk.heads is None:
            keys, values = k_TKD[here].transpose(0, 1)[None], v_TKD[here].transpose(0, 1)[None]
        else:
            gathered = by_head.index_select(0, chunk.heads).view(2, 1, self._kv.num_heads, -1, q_THD.shape[-1])
            keys, values = gathered[0][:, :, : chunk.context], gathered[1][:, :, : chunk.context]
        out = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=chunk.mask_TC, is_causal=chunk.mask_TC is None, enable_gqa=True
        )
        return out[0].transpose(0, 1).flatten(1)

    # ---- indices

    def _padded_table(self, row: RowSpan, num_pages: int) -> list[int]:
        """Its pages, then its last one again: what lies beyond its context is masked, and must be finite."""
        table = row.table[: -(-row.context // self._kv.page_size)] or (self._kv.scratch,)
        return [*table, *(table[-1],) * (num_pages - len(table))]

    def _page_heads(self, tables_BP: Tensor) -> Tensor:
        """Flat index of (keys/values, row, head, page) into pages seen head by head."""
        num_heads = self._kv.num_heads
        heads = torch.arange(2 * num_heads, device=tables_BP.device).view(2, 1, num_heads, 1)
        return (tables_BP[None, :, None, :] * (2 * num_heads) + heads).flatten()

    def _head_slots(self, slots_T: Tensor) -> tuple[Tensor, Tensor]:
        """Where each position's keys and values go, in a layer's pages seen as one list of head vectors."""
        num_heads, page_size = self._kv.num_heads, self._kv.page_size
        page = torch.div(slots_T, page_size, rounding_mode="floor")
        base = page * (2 * num_heads * page_size) + slots_T % page_size
        keys = base[:, None] + torch.arange(num_heads, device=slots_T.device) * page_size
        return keys.flatten(), (keys + num_heads * page_size).flatten()


def rotated(qkv_TF: Tensor, turn_T1C: Tensor, num_heads: int, num_kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """q_THD and k_TKD, rotated, and v_TKD, of queries, keys and values side by side; views with strided rows."""
    qkv_TGD = qkv_TF.view(len(qkv_TF), num_heads + 2 * num_kv_heads, -1)
    qk_TGD = rotate(qkv_TGD[:, : num_heads + num_kv_heads], turn_T1C)
    return qk_TGD[:, :num_heads], qk_TGD[:, num_heads:], qkv_TGD[:, num_heads + num_kv_heads :]


def layout_order(rows: Sequence[RowSpan]) -> list[int]:
    """The order in which a step's rows must be laid out: decodes by context, longest first, then chunks."""
    return sorted(range(len(rows)), key=lambda i: (rows[i].num_positions > 1, -rows[i].context))


def _similar(rows: Sequence[RowSpan]) -> list[tuple[int, int]]:
    """Cuts rows, longest first, into runs of similar context."""
    runs: list[tuple[int, int]] = []
    first = 0
    for index in range(1, len(rows) + 1):
        if index == len(rows) or rows[index].context * _GROUP_SPREAD < rows[first].context:
            runs.append((first, index))
            first = index
    return runs


def reference_attention(q_THD: Tensor, keys_CKD: Tensor, values_CKD: Tensor, start: int) -> Tensor:
    """o_TE of one row's positions `start ..`, which see themselves and all before; in float32, as it is written."""
    num_groups = q_THD.shape[1] // keys_CKD.shape[1]
    keys, values = (x.float().repeat_interleave(num_groups, 1) for x in (keys_CKD, values_CKD))
    scores_HTC = torch.einsum("thd,chd->htc", q_THD.float(), keys) * q_THD.shape[-1] ** -0.5
    seen = torch.arange(keys.shape[0], device=keys.device) <= (
        torch.arange(q_THD.shape[0], device=keys.device)[:, None] + start
    )
    weights = scores_HTC.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("htc,chd->thd", weights, values).flatten(1).to(q_THD.dtype)
