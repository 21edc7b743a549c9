"""Attention over pages equals attention as it is written, whatever the tables and whoever else is in the step."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchwright.facts.shape import ModelShape
from batchwright.policy.pages import Memory
from batchwright.serve.decoders.attention import (
    LayerAttention,
    RowSpan,
    StepLayout,
    layout_order,
    reference_attention,
    rotated,
)
from batchwright.serve.decoders.rope import rotations
from batchwright.serve.kv import PagedKV, slots
from tests.serve.scripted import tiny

NUM_PAGES, PAGE_SIZE = 64, 4


def shape() -> ModelShape:
    return tiny().decoder.shape


def random(*dims: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(dims).to(dtype)


class Pages:
    """A pool in which each row's past lies where its table says, and NaN everywhere else."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.kv = PagedKV(shape(), Memory(NUM_PAGES, PAGE_SIZE, 512), dtype, torch.device("cpu"))
        self.kv.pages_LPMSD.fill_(torch.nan)

    def past(self, row: RowSpan, layer: int) -> tuple[Tensor, Tensor]:
        """Random keys and values of the row's positions before its span, written to its pages."""
        num_heads, dim, dtype = self.kv.num_heads, shape().head_dim, self.kv.pages_LPMSD.dtype
        pages = self.kv.pages_LPMSD[layer]
        pages[list(row.table)[: -(-row.start // PAGE_SIZE)]] = 0  # begun pages are cleared before they are filled
        keys, values = random(row.start, num_heads, dim, dtype=dtype), random(row.start, num_heads, dim, dtype=dtype)
        for position, slot in enumerate(slots(row.table, PAGE_SIZE, 0, row.start, self.kv.scratch)):
            pages[slot // PAGE_SIZE, :num_heads, slot % PAGE_SIZE] = keys[position]
            pages[slot // PAGE_SIZE, num_heads:, slot % PAGE_SIZE] = values[position]
        return keys, values


def attended(rows: Sequence[RowSpan], kv: PagedKV, layer: int, does: LayerAttention, *qkv: Tensor) -> Tensor:
    qkv_TF = torch.cat([part.flatten(1) for part in qkv], 1)
    return StepLayout(rows, kv, [does] * shape().num_layers).attend(layer, qkv_TF)


PLAIN = LayerAttention(6, 8**-0.5)


def worst(
    spans: Sequence[RowSpan], layer: int = 1, dtype: torch.dtype = torch.float32, does: LayerAttention = PLAIN
) -> float:
    """The largest difference to the reference over a step of `spans`."""
    pages = Pages(dtype)
    rows = [spans[index] for index in layout_order(spans)]
    pasts = [pages.past(row, layer) for row in rows]
    num_positions = sum(row.num_positions for row in rows)
    q_THD = random(num_positions, shape().num_heads, shape().head_dim, dtype=dtype)
    k_TKD, v_TKD = (random(num_positions, pages.kv.num_heads, shape().head_dim, dtype=dtype) for _ in "kv")
    o_TE = attended(rows, pages.kv, layer, does, q_THD, k_TKD, v_TKD)
    expected, first = [], 0
    for row, (keys, values) in zip(rows, pasts, strict=True):
        here = slice(first, first := first + row.num_positions)
        expected.append(
            reference_attention(
                q_THD[here], torch.cat([keys, k_TKD[here]]), torch.cat([values, v_TKD[here]]), row.start, does
            )
        )
    return float((o_TE.float() - torch.cat(expected).float()).abs().max())


@st.composite
def steps(draw: st.DrawFn) -> list[RowSpan]:
    """Rows with disjoint, shuffled tables: decodes and chunks, of any context that fits."""
    free = draw(st.permutations(range(NUM_PAGES)))
    rows = []
    for start, num_positions in draw(
        st.lists(st.tuples(st.integers(0, 60), st.sampled_from([1, 1, 1, 2, 5, 17])), min_size=1, max_size=9)
    ):
        num_pages = -(-(start + num_positions) // PAGE_SIZE)
        if num_pages <= len(free):
            rows.append(RowSpan(start, num_positions, tuple(free[:num_pages])))
            free = free[num_pages:]
    return rows


@given(steps())
def test_any_mix_of_rows_attends_as_each_would_alone(rows: list[RowSpan]) -> None:
    """Decodes and chunks of any contexts, pages in any order, NaN in every page that nobody wrote: within 1e-5."""
    assert worst(rows) < 1e-5


rules = st.builds(
    LayerAttention,
    num_heads=st.just(6),
    scale=st.floats(0.05, 2),
    window=st.none() | st.integers(1, 70),
    cap=st.none() | st.floats(0.5, 5),
    freq_C=st.none(),
)


@settings(max_examples=200)
@given(steps(), rules)
def test_any_window_cap_and_scale_does_what_it_says(rows: list[RowSpan], does: LayerAttention) -> None:
    """The same, whatever a layer's attention does; contexts within the window, about it, and far beyond."""
    assert worst(rows, does=does) < 1e-5


@pytest.mark.parametrize("window", [1, 16, 17, 18])
@pytest.mark.parametrize("start", [0, 1])
def test_a_chunk_may_be_as_long_as_its_window(start: int, window: int) -> None:
    """One more position, and the last no longer sees the first."""
    assert worst([RowSpan(start, 17, tuple(range(5)))], does=PLAIN._replace(window=window)) < 1e-5


@settings(max_examples=20)
@given(steps())
def test_bfloat16_attends_nearly_the_same(rows: list[RowSpan]) -> None:
    """Scores are summed in float32 and only weights and outputs rounded: within 0.05 of values of size 1."""
    assert worst(rows, dtype=torch.bfloat16) < 0.05


@settings(max_examples=20)
@given(steps(), st.integers(1, 70), st.floats(1, 5))
def test_bfloat16_attends_nearly_the_same_in_windows_under_caps(rows: list[RowSpan], window: int, cap: float) -> None:
    """Also where torch's fused attention cannot be taken."""
    assert worst(rows, dtype=torch.bfloat16, does=PLAIN._replace(window=window, cap=cap)) < 0.05


@pytest.mark.parametrize("row", [RowSpan(58, 1, tuple(range(15))), RowSpan(50, 9, tuple(range(15)))])
def test_pages_that_lie_before_the_window_are_not_read(row: RowSpan) -> None:
    """Decodes and chunks gather from the first page that any of their positions sees."""
    pages, does = Pages(), PLAIN._replace(window=6)
    pages.past(row, 0)
    qkv = [random(row.num_positions, heads, shape().head_dim) for heads in (6, 2, 2)]
    expected = attended([row], pages.kv, 0, does, *qkv)
    first_seen = (row.start - 5) // PAGE_SIZE
    pages.kv.pages_LPMSD[0, :first_seen] = torch.nan
    assert torch.equal(attended([row], pages.kv, 0, does, *qkv), expected)
    assert attended([row], pages.kv, 0, PLAIN._replace(window=20), *qkv).isnan().any()


def test_layers_of_one_step_may_differ() -> None:
    """Each layer attends and rotates by its own rule, over the same rows."""
    freq_C = torch.linspace(1, 0.01, shape().head_dim // 2)
    layers = [PLAIN._replace(window=3), PLAIN._replace(freq_C=freq_C), PLAIN._replace(freq_C=freq_C / 2, cap=1.0)]
    rows = [RowSpan(0, 20, tuple(range(5)))]
    q_THD, k_TKD, v_TKD = (random(20, heads, shape().head_dim) for heads in (6, 2, 2))
    layout = StepLayout(rows, Pages().kv, layers)
    for layer, does in enumerate(layers):
        turn_T1C = None if does.freq_C is None else rotations(torch.arange(20), does.freq_C)
        qkv_TF = torch.cat([part.flatten(1) for part in (q_THD, k_TKD, v_TKD)], 1)
        expected = reference_attention(*rotated(qkv_TF.clone(), turn_T1C, 6, 2), 0, does)
        torch.testing.assert_close(layout.attend(layer, qkv_TF), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("layer", range(3))
def test_every_layer_has_its_own_pages(layer: int) -> None:
    """A step in one layer reads and writes that layer only."""
    assert worst([RowSpan(9, 1, (5, 3, 8)), RowSpan(0, 6, (1, 2)), RowSpan(3, 6, (9, 0, 4))], layer) < 1e-5


def test_rows_without_pages_compute_and_harm_nobody() -> None:
    """Fillers read and write the scratch page; the rows beside them get what they would get alone."""
    pages = Pages()
    alive = RowSpan(6, 1, (3, 7))
    keys, values = pages.past(alive, 0)
    rows = [RowSpan(30, 1, ()), alive, RowSpan(0, 9, ())]
    q_THD, k_TKD, v_TKD = (random(11, heads, shape().head_dim) for heads in (6, 2, 2))
    o_TE = attended(rows, pages.kv, 0, PLAIN, q_THD, k_TKD, v_TKD)
    expected = reference_attention(q_THD[1:2], torch.cat([keys, k_TKD[1:2]]), torch.cat([values, v_TKD[1:2]]), 6, PLAIN)
    assert (o_TE[1] - expected[0]).abs().max() < 1e-5


def test_decodes_come_first_with_the_longest_context_in_front() -> None:
    """The order in which a step lays out its rows; a prompt of one token is a decode like any other."""
    rows = [RowSpan(0, 7, ()), RowSpan(4, 1, ()), RowSpan(0, 1, ()), RowSpan(90, 2, ()), RowSpan(30, 1, ())]
    assert layout_order(rows) == [4, 1, 2, 3, 0]


def test_a_page_is_begun_where_a_span_enters_it_and_does_not_fill_it() -> None:
    """Only its tail could show what was there before."""
    table = (10, 11, 12)
    assert RowSpan(0, 3, table).begun_page(4) == (10,)
    assert RowSpan(3, 1, table).begun_page(4) == ()
    assert RowSpan(0, 8, table).begun_page(4) == ()
    assert RowSpan(4, 1, table).begun_page(4) == (11,)
    assert RowSpan(5, 1, table).begun_page(4) == ()
    assert RowSpan(3, 7, table).begun_page(4) == (12,)
    assert RowSpan(12, 1, table).begun_page(4) == ()  # beyond its table, in scratch
