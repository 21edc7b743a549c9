"""Attention over pages: what a step's layers share (`StepLayout`, made once), and the product itself.

Rows with one position (decodes) are sorted by context and attend in groups of similar length, each as two batched
products over gathered pages; a prompt's chunk attends by itself. Gathering copies each row's pages once per layer,
but for those that lie wholly before its window, and is cheap beside the products (docs/log.md). Groups only save time:
what a row gets does not depend on them beyond the rounding of sums.
`reference_attention` is the plain twin that the tests hold this against.

Shapes: T positions of the step, B rows of a group, H query heads, K key-value heads, G = H / K, D head_dim,
C context padded to whole pages, E = H * D.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from batchwright.serve.decoders.rope import rotate, rotations
from batchwright.serve.kv import PagedKV, slots

_GROUP_SPREAD = 1.5
"""A decode joins a group while its context is within this factor of the group's longest."""


class LayerAttention(NamedTuple):
    """What one layer's attention does. Layers that do the same share one object.

    `scale`: scores are q.k * scale. `window`: positions a query sees, itself included; None is all up to itself.
    `cap`: scores become cap * tanh(score / cap) before they are masked. `freq_C`: radians per position of each
    rotated pair; None where nothing is rotated.
    """

    num_heads: int
    scale: float
    window: int | None = None
    cap: float | None = None
    freq_C: Tensor | None = None


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
    """Positions `first .. end - 1` of the step, all of one row, which see `num_keys` up to the last of them.

    `heads` is None where these are its own; `mask_TC` is None where each sees all of them that are not after it.
    """

    first: int
    end: int
    num_keys: int
    heads: Tensor | None
    mask_TC: Tensor | None


class _Sight(NamedTuple):
    """What the step's positions see in the layers with one window."""

    groups: Sequence[_DecodeGroup]
    chunks: Sequence[_PromptChunk]


class StepLayout:
    """Where a step's positions are, are stored and look. `rows` are in the order of the step's positions.

    Decodes must come first, longest context first (`layout_order`). Queries and keys come in pair order (`rope`).
    """

    def __init__(self, rows: Sequence[RowSpan], kv: PagedKV, layers: Sequence[LayerAttention]) -> None:
        self._rows, self._kv, self._layers = rows, kv, layers
        kv.clear(page for row in rows for page in row.begun_page(kv.page_size))
        self._device = kv.pages_LPMSD.device
        self._num_decodes = sum(row.num_positions == 1 for row in rows)
        assert all(row.num_positions == 1 for row in rows[: self._num_decodes]), "decodes come first"
        stored = [
            slot for row in rows for slot in slots(row.table, kv.page_size, row.start, row.num_positions, kv.scratch)
        ]
        self._key_slots, self._value_slots = self._head_slots(torch.tensor(stored, device=self._device))
        positions = [position for row in rows for position in range(row.start, row.context)]
        positions_T = torch.tensor(positions, device=self._device)
        frequencies = {id(does.freq_C): does.freq_C for does in layers}
        self._turns = {key: None if f_C is None else rotations(positions_T, f_C) for key, f_C in frequencies.items()}
        self._sights = {window: self._sight(window) for window in {does.window for does in layers}}

    def attend(self, layer: int, qkv_TF: Tensor) -> Tensor:
        """Stores the keys and values of all positions in `layer`'s pages, then o_TE for all of them."""
        does = self._layers[layer]
        q_THD, k_TKD, v_TKD = rotated(qkv_TF, self._turns[id(does.freq_C)], does.num_heads, self._kv.num_heads)
        pages_PMSD = self._kv.pages_LPMSD[layer]
        flat = pages_PMSD.view(-1, pages_PMSD.shape[-1])
        flat.index_copy_(0, self._key_slots, k_TKD.flatten(0, 1))
        flat.index_copy_(0, self._value_slots, v_TKD.flatten(0, 1))
        by_head = pages_PMSD.view(flat.shape[0] // self._kv.page_size, -1)
        sight = self._sights[does.window]
        parts = [self._attend_group(group, does, q_THD, by_head) for group in sight.groups]
        parts += [self._attend_chunk(chunk, does, q_THD, k_TKD, v_TKD, by_head) for chunk in sight.chunks]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _sight(self, window: int | None) -> _Sight:
        decodes, chunks = self._rows[: self._num_decodes], []
        groups = [self._decode_group(decodes[first:end], first, window) for first, end in _similar(decodes, window)]
        first = self._num_decodes
        for row in self._rows[self._num_decodes :]:
            chunks.append(self._prompt_chunk(row, first, window))
            first += row.num_positions
        return _Sight(groups, chunks)

    # ---- decodes

    def _decode_group(self, rows: Sequence[RowSpan], first: int, window: int | None) -> _DecodeGroup:
        page_size = self._kv.page_size
        begins = [self._first_page(row, window) for row in rows]
        num_pages = max(-(-row.context // page_size) - begin for row, begin in zip(rows, begins, strict=True))
        tables = [self._padded_table(row, begin, num_pages) for row, begin in zip(rows, begins, strict=True)]
        begins_B1 = torch.tensor(begins, device=self._device)[:, None]
        keys_BC = begins_B1 * page_size + torch.arange(num_pages * page_size, device=self._device)
        last_B1 = torch.tensor([row.start for row in rows], device=self._device)[:, None]
        hidden = ~_seen(last_B1, keys_BC, window)
        mask = torch.zeros(hidden.shape, device=self._device).masked_fill_(hidden, float("-inf"))
        heads = self._page_heads(torch.tensor(tables, device=self._device))
        return _DecodeGroup(first, first + len(rows), heads, mask[:, None, None, :])

    def _attend_group(self, group: _DecodeGroup, does: LayerAttention, q_THD: Tensor, by_head: Tensor) -> Tensor:
        num_rows, num_heads, head_dim = group.end - group.first, self._kv.num_heads, q_THD.shape[-1]
        gathered = by_head.index_select(0, group.heads).view(2, num_rows * num_heads, -1, head_dim)
        keys, values = gathered[0], gathered[1]
        queries = q_THD[group.first : group.end].reshape(num_rows * num_heads, -1, head_dim)
        scores = torch.bmm(queries, keys.transpose(1, 2)).view(num_rows, num_heads, queries.shape[1], -1)
        weights = _weights(scores, does, group.mask_B11C).to(values.dtype)
        return torch.bmm(weights.view(num_rows * num_heads, queries.shape[1], -1), values).view(num_rows, -1)

    # ---- chunks of prompts

    def _prompt_chunk(self, row: RowSpan, first: int, window: int | None) -> _PromptChunk:
        end, page_size = first + row.num_positions, self._kv.page_size
        if row.start == 0 and (window is None or row.context <= window):
            return _PromptChunk(first, end, row.context, None, None)
        begin = self._first_page(row, window) if row.start else 0
        keys_C = torch.arange(begin * page_size, row.context, device=self._device)
        seen_TC = _seen(torch.arange(row.start, row.context, device=self._device)[:, None], keys_C, window)
        if row.start == 0:
            return _PromptChunk(first, end, row.context, None, seen_TC)
        table = self._padded_table(row, begin, -(-row.context // page_size) - begin)
        return _PromptChunk(
            first, end, len(keys_C), self._page_heads(torch.tensor([table], device=self._device)), seen_TC
        )

    def _attend_chunk(
        self, chunk: _PromptChunk, does: LayerAttention, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, by_head: Tensor
    ) -> Tensor:
        here = slice(chunk.first, chunk.end)
        queries = q_THD[here].transpose(0, 1)[None]
        if chunk.heads is None:
            keys, values = k_TKD[here].transpose(0, 1)[None], v_TKD[here].transpose(0, 1)[None]
        else:
            gathered = by_head.index_select(0, chunk.heads).view(2, 1, self._kv.num_heads, -1, q_THD.shape[-1])
            keys, values = gathered[0][:, :, : chunk.num_keys], gathered[1][:, :, : chunk.num_keys]
        if does.cap is not None:
            return _attend_capped(queries[0], keys[0], values[0], does, chunk.mask_TC)
        out = F.scaled_dot_product_attention(
            queries, keys, values, chunk.mask_TC, is_causal=chunk.mask_TC is None, scale=does.scale, enable_gqa=True
        )
        return out[0].transpose(0, 1).flatten(1)

    # ---- indices

    def _first_page(self, row: RowSpan, window: int | None) -> int:
        """Of its pages, the first that a position of its span sees."""
        return 0 if window is None else max(0, row.start + 1 - window) // self._kv.page_size

    def _padded_table(self, row: RowSpan, begin: int, num_pages: int) -> list[int]:
        """Its pages from `begin`, then its last one again: what its context does not reach is masked, but finite."""
        table = row.table[begin : -(-row.context // self._kv.page_size)] or (self._kv.scratch,)
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


def rotated(
    qkv_TF: Tensor, turn_T1C: Tensor | None, num_heads: int, num_kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """q_THD and k_TKD, rotated, and v_TKD, of queries, keys and values side by side; views with strided rows."""
    qkv_TGD = qkv_TF.view(len(qkv_TF), num_heads + 2 * num_kv_heads, -1)
    qk_TGD = qkv_TGD[:, : num_heads + num_kv_heads]
    if turn_T1C is not None:
        qk_TGD = rotate(qk_TGD, turn_T1C)
    return qk_TGD[:, :num_heads], qk_TGD[:, num_heads:], qkv_TGD[:, num_heads + num_kv_heads :]


def layout_order(rows: Sequence[RowSpan]) -> list[int]:
    """The order in which a step's rows must be laid out: decodes by context, longest first, then chunks."""
    return sorted(range(len(rows)), key=lambda i: (rows[i].num_positions > 1, -rows[i].context))


def _similar(rows: Sequence[RowSpan], window: int | None) -> list[tuple[int, int]]:
    """Cuts rows, longest first, into runs that see about as much."""
    sees = [row.context if window is None else min(row.context, window) for row in rows]
    runs: list[tuple[int, int]] = []
    first = 0
    for index in range(1, len(rows) + 1):
        if index == len(rows) or sees[index] * _GROUP_SPREAD < sees[first]:
            runs.append((first, index))
            first = index
    return runs


def _seen(queries: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """Whether the query at one position sees the key at another."""
    seen = keys <= queries
    return seen if window is None else seen & (keys > queries - window)


def _weights(scores: Tensor, does: LayerAttention, mask: Tensor) -> Tensor:
    """Softmax, in float32, of what becomes of the raw `scores`, which may be changed."""
    if does.cap is None:
        return torch.add(mask, scores, alpha=does.scale).softmax(-1)
    capped = scores.float().mul_(does.scale / does.cap).tanh_().mul_(does.cap)
    return capped.add_(mask).softmax(-1)


def _attend_capped(q_HTD: Tensor, k_KCD: Tensor, v_KCD: Tensor, does: LayerAttention, mask_TC: Tensor | None) -> Tensor:
    """o_TE; torch's fused attention knows no caps."""
    num_positions, num_kv_heads = q_HTD.shape[1], len(k_KCD)
    if mask_TC is None:
        mask_TC = torch.ones(num_positions, k_KCD.shape[1], dtype=torch.bool, device=q_HTD.device).tril()
    mask_TC = torch.zeros(mask_TC.shape, device=q_HTD.device).masked_fill_(~mask_TC, float("-inf"))
    scores_KGTC = q_HTD.unflatten(0, (num_kv_heads, -1)) @ k_KCD[:, None].transpose(2, 3)
    o_KGTD = _weights(scores_KGTC, does, mask_TC).to(v_KCD.dtype) @ v_KCD[:, None]
    return o_KGTD.flatten(0, 1).transpose(0, 1).flatten(1)


def reference_attention(
    q_THD: Tensor, keys_CKD: Tensor, values_CKD: Tensor, start: int, does: LayerAttention
) -> Tensor:
    """o_TE of one row's positions `start ..`, as `does` says but for its rotation; in float32, as it is written."""
    num_groups = q_THD.shape[1] // keys_CKD.shape[1]
    keys, values = (x.float().repeat_interleave(num_groups, 1) for x in (keys_CKD, values_CKD))
    scores_HTC = torch.einsum("thd,chd->htc", q_THD.float(), keys) * does.scale
    if does.cap is not None:
        scores_HTC = does.cap * (scores_HTC / does.cap).tanh()
    behind_TC = torch.arange(start, start + len(q_THD), device=keys.device)[:, None] - torch.arange(
        len(keys), device=keys.device
    )
    hidden_TC = behind_TC < 0 if does.window is None else (behind_TC < 0) | (behind_TC >= does.window)
    weights = scores_HTC.masked_fill(hidden_TC, float("-inf")).softmax(-1)
    return torch.einsum("htc,chd->thd", weights, values).flatten(1).to(q_THD.dtype)
