"""Our kernels compute what their torch twin computes, and what a row gets depends on that row alone."""

import ctypes
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchwright.errors import ConfigError
from batchwright.facts.shape import ModelShape
from batchwright.policy.pages import Memory
from batchwright.serve.decoders import native
from batchwright.serve.decoders.attention import LayerAttention, RowSpan, layout_order
from batchwright.serve.decoders.backend import Quantization
from batchwright.serve.decoders.native import NativeOps
from batchwright.serve.decoders.ops import Activation, Ops, TorchOps
from batchwright.serve.engine import Engine
from batchwright.serve.kernels import build, calls
from batchwright.serve.kv import PagedKV
from batchwright.serve.loading import weights
from tests.serve.conftest import MakeCheckpoint
from tests.serve.scripted import forced

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # of values of size 1; one rounding to bfloat16 is 4e-3
NORMED = [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)]
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)
PLAIN = ("-march=x86-64-v3", "-march=x86-64")

pytestmark = pytest.mark.skipif(
    bool(native.why_not(torch.float32, CPU)), reason=f"no kernels here: {native.why_not(torch.float32, CPU)}"
)


@pytest.fixture(params=["this CPU", *PLAIN])
def target(request: pytest.FixtureRequest) -> Iterator[str]:
    """The kernels as compiled for this CPU, then for ones without AVX-512, which take the same source's other way."""
    if request.param == "this CPU":
        yield request.param
        return
    compiler = shutil.which("g++")
    if compiler is None or platform.machine() != "x86_64":
        pytest.skip("only g++ on x86-64 is asked to compile for lesser CPUs")
    library = ctypes.CDLL(str(build.compiled(compiler, request.param)))
    patch = pytest.MonkeyPatch()
    calls._call.cache_clear()
    patch.setattr(calls, "built", lambda: build.Built(library, ""))
    yield request.param
    patch.undo()
    calls._call.cache_clear()


def random(*dims: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(dims, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(ours: Tensor, theirs: Tensor, dtype: torch.dtype) -> bool:
    """Every value, relative to its size or to 1."""
    limit = TOLERANCE[dtype] * theirs.float().abs().clamp(min=1)
    return bool(((ours.float() - theirs.float()).abs() <= limit).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 2, 11, 12, 13, 95, 97, 200])
def test_products_of_any_number_of_rows(num_rows: int, dtype: torch.dtype, target: str) -> None:
    """Stored, added, in float32, gated; with biases; outputs that do not fill a panel; inputs beyond one chain."""
    x_MK = random(num_rows, 400, dtype=dtype)
    weight_NK, bias_N = random(75, 400, dtype=dtype, seed=1) / 20, random(75, dtype=dtype, seed=2)
    up_NK = random(75, 400, dtype=dtype, seed=3) / 20
    ours, theirs = NativeOps(), TorchOps()
    for bias in (None, bias_N):
        pair = ours.linear(weight_NK, bias), theirs.linear(weight_NK, bias)
        y_MN = random(num_rows, 75, dtype=dtype, seed=4)
        assert close(pair[0](x_MK), pair[1](x_MK), dtype)
        assert close(pair[0].add_to(y_MN.clone(), x_MK), pair[1].add_to(y_MN.clone(), x_MK), dtype)
        assert close(pair[0].floats(x_MK), pair[1].floats(x_MK), dtype)
        assert pair[0].floats(x_MK).dtype == torch.float32
        biases = None if bias is None else [bias, bias]
        for activation in ACTIVATIONS:
            gated = [ops.gated([weight_NK, up_NK], biases, activation) for ops in (ours, theirs)]
            assert close(gated[0](x_MK), gated[1](x_MK), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gates_of_any_size(activation: Activation, dtype: torch.dtype, target: str) -> None:
    """Also where a power of e has no end: held against the formula in float64, through weights that change nothing."""
    x_MK = torch.linspace(-12, 12, 64 * 64).view(64, 64).to(dtype)
    x_MK[0, :6] = torch.tensor([-1e4, -300, -60, 60, 300, 1e4])
    one_KK = torch.eye(64, dtype=dtype)
    gate_MK = x_MK.double()
    active_MK = F.silu(gate_MK) if activation == "silu" else F.gelu(gate_MK, approximate="tanh")
    assert close(NativeOps().gated([one_KK, one_KK], None, activation)(x_MK), active_MK * gate_MK, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_added_to_gates_and_ups_is_added_before_they_are_rounded(dtype: torch.dtype, target: str) -> None:
    """So the kernel is held against its twin in float32."""
    x_MK, added_MA = random(30, 400, dtype=dtype), random(30, 150, dtype=dtype, seed=1)
    weights_IK = [random(75, 400, dtype=dtype, seed=seed) / 20 for seed in (2, 3)]
    exact_MI = TorchOps().gated([weight_IK.float() for weight_IK in weights_IK])(x_MK.float(), added_MA.float())
    assert close(NativeOps().gated(weights_IK)(x_MK, added_MA), exact_MI, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_what_is_added_to_gates_and_ups_is_of_its_own_row(dtype: torch.dtype, quantization: str | None) -> None:
    """A row to which zeros are added keeps its bits, and one with an addend has the same bits in any company."""
    gated = NativeOps(quantization).gated([random(75, 400, dtype=dtype), random(75, 400, dtype=dtype, seed=1)])
    x_MK, added_MA = random(30, 400, dtype=dtype, seed=2), random(30, 150, dtype=dtype, seed=3)
    added_MA[::2] = 0
    y_MI = gated(x_MK, added_MA)
    assert torch.equal(y_MI[::2], gated(x_MK)[::2])
    for row in (0, 1, 29):
        assert torch.equal(y_MI[row : row + 1], gated(x_MK[row : row + 1], added_MA[row : row + 1]))
    assert not torch.equal(y_MI[1::2], gated(x_MK)[1::2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_products_are_those_of_the_same_integers(dtype: torch.dtype, target: str) -> None:
    """Kernel and twin quantise alike and add exactly, so they differ by the rounding of scales alone."""
    x_MK, weight_NK = random(13, 400, dtype=dtype), random(75, 400, dtype=dtype, seed=1) / 20
    ours, theirs = (ops("int8").linear(weight_NK).floats(x_MK) for ops in (NativeOps, TorchOps))
    assert (ours - theirs).abs().max() < 2e-2  # a value halfway between two steps may go either way
    exact_MN = x_MK.float() @ weight_NK.float().T
    assert (ours - exact_MN).norm() < 0.02 * exact_MN.norm()
    for activation in ACTIVATIONS:
        gated = (ops("int8").gated([weight_NK, weight_NK], None, activation)(x_MK) for ops in (NativeOps, TorchOps))
        mine, its = (y_MI.float() for y_MI in gated)
        assert (mine - its).norm() < 0.01 * its.norm()


@pytest.mark.parametrize("ops", [NativeOps("int8"), TorchOps("int8")], ids=["native", "torch"])
def test_int8_of_nothing_and_of_no_number(ops: Ops) -> None:
    """A row of zeros gives zeros, and a row with a NaN or an infinity gives NaN, alone."""
    x_MK = random(4, 64, dtype=torch.float32)
    x_MK[1], x_MK[2, 5], x_MK[3, 7] = 0, torch.nan, torch.inf
    y_MN = ops.linear(random(32, 64, dtype=torch.float32, seed=1)).floats(x_MK)
    assert y_MN[0].isfinite().all()
    assert (y_MN[1] == 0).all()
    assert y_MN[2:].isnan().all()


@pytest.mark.parametrize(("dtype", "weight_dtype"), NORMED)
@pytest.mark.parametrize("width", [16, 40, 576])
def test_norms(width: int, dtype: torch.dtype, weight_dtype: torch.dtype, target: str) -> None:
    """Of a width that fills no whole number of vectors too; rounded once, and to what is nearest in float64."""
    x_TE, weight_E = random(7, width, dtype=dtype), random(width, dtype=weight_dtype, seed=1)
    ours, theirs = (ops.norm(x_TE, weight_E, 1e-5) for ops in (NativeOps(), TorchOps()))
    assert ours.dtype == dtype
    assert close(ours, theirs, dtype)
    exact_TE = F.rms_norm(x_TE.double(), (width,), weight_E.double(), 1e-5)
    half_a_step = torch.finfo(dtype).eps / 2 if dtype == torch.bfloat16 else 1e-6
    assert ((ours - exact_TE).abs() <= 1.001 * half_a_step * exact_TE.abs()).all()


@pytest.mark.parametrize(("dtype", "weight_dtype"), NORMED)
@pytest.mark.parametrize("head_dim", [16, 40, 112])
def test_norms_of_heads(head_dim: int, dtype: torch.dtype, weight_dtype: torch.dtype, target: str) -> None:
    """Queries by one weight, keys by another, values as they were; a row gets the same bits alone."""
    qkv_TF = random(9, 10 * head_dim, dtype=dtype)
    q_D, k_D = (random(head_dim, dtype=weight_dtype, seed=seed) for seed in (1, 2))

    def normed(ops: Ops, some_TF: Tensor) -> Tensor:
        some_TF = some_TF.clone()
        ops.norm_heads(some_TF, q_D, k_D, 6, 2, 1e-5)
        return some_TF

    ours = normed(NativeOps(), qkv_TF)
    assert close(ours, normed(TorchOps(), qkv_TF), dtype)
    assert torch.equal(ours[:, 8 * head_dim :], qkv_TF[:, 8 * head_dim :])
    assert torch.equal(ours[3:4], normed(NativeOps(), qkv_TF[3:4]))


def shape_of(num_heads: int, num_kv_heads: int, head_dim: int) -> ModelShape:
    return ModelShape(
        family="llama", num_layers=2, hidden=96, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim,
        intermediate=64, vocab=32, context=4096,
    )  # fmt: skip


@pytest.mark.parametrize("width", [1, 15, 16, 1000, 1024, 1040, 5000])
def test_the_likeliest_token_of_each_row(width: int, target: str) -> None:
    """The first of equals; NaN counts as highest, wherever it is; -inf everywhere is a tie."""
    x_BV = random(40, width, dtype=torch.float32)
    x_BV[3], x_BV[5] = -torch.inf, 7
    x_BV[7, width // 2], x_BV[9, width - 1], x_BV[11, width // 2 :] = torch.nan, torch.inf, 9
    x_BV[13, 0], x_BV[13, width - 1] = torch.nan, torch.inf
    peak_B, token_B = calls.likeliest(x_BV)
    assert torch.equal(peak_B.nan_to_num(100), x_BV.amax(-1).nan_to_num(100))
    assert torch.equal(token_B, x_BV.argmax(-1))


SHAPE = shape_of(6, 2, 16)


def doing(shape: ModelShape, **changes: Any) -> LayerAttention:
    """What Llama's layers do, but for `changes`."""
    freq_C = 1 / 100 ** torch.linspace(0, 1, shape.head_dim // 2)
    return LayerAttention(shape.num_heads, shape.head_dim**-0.5, freq_C=freq_C)._replace(**changes)


def attended(
    ops: Ops, kv: PagedKV, does: LayerAttention, past: Sequence[RowSpan], rows: Sequence[RowSpan], layer: int = 1
) -> Tensor:
    """o_TE' of `rows`, after the rows' pasts were stored by an earlier step."""
    dtype, num_values = kv.pages_LPMSD.dtype, (does.num_heads + 2 * kv.num_heads) * kv.pages_LPMSD.shape[-1]
    if past:
        num_past = sum(row.num_positions for row in past)
        ops.layout(past, kv, [does, does]).attend(layer, random(num_past, num_values, dtype=dtype))
    num_now = sum(row.num_positions for row in rows)
    return ops.layout(rows, kv, [does, does]).attend(layer, random(num_now, num_values, dtype=dtype, seed=1))


NUM_STORED = 1600  # positions, in pages of any size


@st.composite
def steps(draw: st.DrawFn) -> tuple[int, list[RowSpan]]:
    """A page size, and rows with disjoint, shuffled tables."""
    size, starts = draw(st.sampled_from([2, 8, 16, 24, 32])), st.integers(0, 150) | st.integers(290, 390)
    free = list(range(NUM_STORED // size))
    Random(draw(st.integers(0, 99))).shuffle(free)
    rows = []
    for start, num_positions in draw(
        st.lists(st.tuples(starts, st.sampled_from([1, 1, 1, 2, 5, 40])), min_size=1, max_size=6)
    ):
        num_pages = -(-(start + num_positions) // size)
        if num_pages <= len(free):
            rows.append(RowSpan(start, num_positions, tuple(free[:num_pages])))
            free = free[num_pages:]
    return size, [rows[index] for index in layout_order(rows)]


@st.composite
def layers(draw: st.DrawFn) -> tuple[ModelShape, LayerAttention]:
    """What a layer of some family might do."""
    num_kv_heads, head_dim = draw(st.integers(1, 2)), draw(st.sampled_from([16, 64, 80, 96, 112, 128, 256]))
    shape = shape_of(num_kv_heads * draw(st.sampled_from([1, 3, 4, 7, 8])), num_kv_heads, head_dim)
    does = doing(
        shape,
        scale=head_dim**-0.5 * draw(st.sampled_from([1, 0.7])),
        window=draw(st.sampled_from([None, 1, 7, 64, 65, 300])),
        cap=draw(st.sampled_from([None, 0.5, 30.0, 1e4])),
    )
    return shape, does if draw(st.booleans()) else does._replace(freq_C=None)


def worst(dtype: torch.dtype, shape: ModelShape, does: LayerAttention, size: int, rows: Sequence[RowSpan]) -> float:
    """The largest difference between the kernel and its twin; pages nobody wrote hold NaN."""
    past = [RowSpan(0, row.start, row.table) for row in rows if row.start]
    past = [past[index] for index in layout_order(past)]
    outputs = []
    for ops in (NativeOps(), TorchOps()):
        kv = PagedKV(shape, Memory(NUM_STORED // size, size, 4096), dtype, CPU)
        kv.pages_LPMSD.fill_(torch.nan)
        outputs.append(attended(ops, kv, does, past, rows).float())
    return float((outputs[0] - outputs[1]).abs().max())


@settings(max_examples=60)
@given(steps(), layers())
def test_attention_over_any_pages(step: tuple[int, list[RowSpan]], layer: tuple[ModelShape, LayerAttention]) -> None:
    """Any mix of decodes and chunks, pages of any even size in any order: within 1e-5 of the twin in float32."""
    assert worst(torch.float32, *layer, *step) < 1e-5
    assert worst(torch.bfloat16, *layer, *step) < 0.06


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "changes", [{}, {"window": 65, "cap": 0.5}, {"window": 7, "freq_C": None}, {"cap": 1e4}], ids=str
)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"), [(9, 3, 64), (8, 1, 32), (4, 4, 128), (2, 2, 80), (7, 1, 256)]
)
def test_attention_of_other_shapes(
    num_heads: int, num_kv_heads: int, head_dim: int, changes: dict[str, Any], dtype: torch.dtype, target: str
) -> None:
    """More queries to a head than meet its keys at once, one each, and heads that are no multiple of 64."""
    shape = shape_of(num_heads, num_kv_heads, head_dim)
    rows = [RowSpan(130, 1, tuple(range(9))), RowSpan(63, 1, (20, 22, 21, 23)), RowSpan(20, 30, (30, 33, 31, 32))]
    assert worst(dtype, shape, doing(shape, **changes), 16, rows) < (1e-5 if dtype == torch.float32 else 0.06)


def test_a_window_of_a_thousand() -> None:
    """That decodes have left behind, by one key too, and that a chunk grows out of."""
    for start, num_positions in ((1400, 1), (1000, 1), (990, 40)):
        row = RowSpan(start, num_positions, tuple(range(90, 0, -1)))
        assert worst(torch.float32, SHAPE, doing(SHAPE, window=1000), 16, [row]) < 1e-5


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_cap_far_above_all_scores_loses_none_of_their_digits(dtype: torch.dtype) -> None:
    """tanh is exact to a float's digits near zero too, where e^x - 1 would cancel."""
    kv = PagedKV(SHAPE, Memory(20, 16, 4096), dtype, CPU)
    past, rows = [RowSpan(0, 200, tuple(range(13)))], [RowSpan(200, 1, tuple(range(13)))]
    plain, capped = (attended(NativeOps(), kv, doing(SHAPE, cap=cap), past, rows) for cap in (None, 1e6))
    assert close(capped, plain, dtype)


def test_layers_may_differ_in_all_that_they_do() -> None:
    """Each of a step's layers has its own rotations, window and cap, also beyond the positions that were seen first."""
    slow = doing(SHAPE, window=20, cap=2.0)
    does = [slow, doing(SHAPE, freq_C=7 * slow.freq_C), doing(SHAPE, freq_C=None)]
    ours = NativeOps()
    for rows in ([RowSpan(0, 30, (1, 2))], [RowSpan(0, 90, (5, 6, 7, 8, 9, 10))]):
        for layer in range(3):
            qkv_TF = random(rows[0].num_positions, 160, dtype=torch.float32)
            shape = replace(SHAPE, num_layers=3)
            kvs = [PagedKV(shape, Memory(20, 16, 4096), torch.float32, CPU) for _ in range(2)]
            mine, its = (
                ops.layout(rows, kv, does).attend(layer, qkv_TF.clone())
                for ops, kv in zip((ours, TorchOps()), kvs, strict=True)
            )
            assert close(mine, its, torch.float32)


def test_what_a_window_has_left_a_span_behind_is_not_read() -> None:
    """So its pages may hold anything; a position's output does not change by a bit."""
    does, table = doing(SHAPE, window=64), tuple(range(13))

    def output(unseen: float | None) -> Tensor:
        kv = PagedKV(SHAPE, Memory(20, 16, 4096), torch.float32, CPU)
        attended(NativeOps(), kv, does, [], [RowSpan(0, 200, table)])
        if unseen is not None:
            kv.pages_LPMSD[:, :8] = unseen  # position 200 sees 137 and up, and the span that this is in begins at 128
        return attended(NativeOps(), kv, does, [], [RowSpan(200, 1, table)])

    assert torch.equal(output(torch.nan), output(None))


def test_rows_without_pages_harm_nobody() -> None:
    """Fillers read and write the scratch page, whatever is in it."""
    kv = PagedKV(SHAPE, Memory(160, 16, 4096), torch.float32, CPU)
    alive = RowSpan(6, 1, (3,))
    does = doing(SHAPE)
    alone = attended(NativeOps(), kv, does, [RowSpan(0, 6, (3,))], [alive])
    kv.pages_LPMSD[:, kv.scratch] = torch.nan
    qkv_TF = torch.cat([random(1, 160, dtype=torch.float32, seed=1), torch.randn(10, 160)])
    rows = [alive, RowSpan(30, 1, ()), RowSpan(0, 9, ())]
    beside = NativeOps().layout(rows, kv, [does, does]).attend(1, qkv_TF)
    assert torch.equal(beside[0], alone[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_a_row_of_a_product_is_the_same_bits_in_any_company(dtype: torch.dtype, quantization: str | None) -> None:
    """Alone, first or last of up to 300 rows."""
    linear = NativeOps(quantization).linear(random(200, 592, dtype=dtype))
    x_MK = random(300, 592, dtype=dtype, seed=1)
    alone = linear(x_MK[7:8])
    for first, end in [(7, 8), (0, 8), (7, 9), (5, 30), (0, 300), (7, 103)]:
        assert torch.equal(linear(x_MK[first:end])[7 - first], alone[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "changes",
    [{}, {"window": 1}, {"window": 7}, {"window": 64}, {"window": 65, "cap": 0.5}, {"cap": 9.0, "freq_C": None}],
    ids=str,
)
def test_a_prompts_outputs_are_the_same_bits_however_it_is_cut(changes: dict[str, Any], dtype: torch.dtype) -> None:
    """At once, in chunks, token by token; also beside others, whose contexts may be longer."""
    prompt, does = random(150, 160, dtype=dtype), doing(SHAPE, **changes)

    def run(sizes: Sequence[int], company: int = 0) -> Tensor:
        kv = PagedKV(SHAPE, Memory(160, 16, 4096), dtype, CPU)
        outputs, start = [], 0
        for part_TF in prompt.split(list(sizes)):
            rows = [RowSpan(start, len(part_TF), tuple(range(10)))]
            rows += [RowSpan(70 * i, 3, tuple(range(20 + 20 * i, 40 + 20 * i))) for i in range(company)]
            beside_TF = random(3 * company, 160, dtype=dtype, seed=start)
            both_TF = torch.cat([part_TF, beside_TF])
            outputs.append(NativeOps().layout(rows, kv, [does]).attend(0, both_TF)[: len(part_TF)])
            start += len(part_TF)
        return torch.cat(outputs)

    at_once = run([150])
    for sizes in ([1] * 150, [64, 64, 22], [17, 100, 33]):
        assert torch.equal(run(sizes), at_once)
    assert torch.equal(run([50, 100], company=5), at_once)
    assert torch.equal(run([3] * 50, company=5), at_once)


@pytest.mark.parametrize(
    ("changes", "number"),
    [
        ({"head_dim": 24}, "24"),
        ({"hidden": 98}, "98"),
        ({"intermediate": 66}, "66"),
        ({"num_experts": 4, "num_experts_per_token": 2, "moe_intermediate": 30}, "30"),
    ],
)
def test_a_model_they_do_not_take_is_named_with_the_number(changes: dict[str, Any], number: str) -> None:
    assert number in native.why_not(torch.float32, CPU, replace(SHAPE, **changes))


def test_a_width_that_no_layer_has_is_no_obstacle() -> None:
    """A config of experts may carry the width of a dense MLP that it does not use."""
    sparse = replace(SHAPE, intermediate=66, num_experts=4, num_experts_per_token=2, moe_intermediate=32)
    assert not native.why_not(torch.float32, CPU, sparse)
    assert "66" in native.why_not(torch.float32, CPU, replace(sparse, dense_layers=frozenset({1})))


def test_weights_load_onto_them_where_asked(make_checkpoint: MakeCheckpoint) -> None:
    """By name, or refused with the reason."""
    path = make_checkpoint(head_dim=16)
    assert weights.load(path, torch.float32, backend="native").decoder.ops.name == "native"
    assert weights.load(path, torch.float32, backend="torch").decoder.ops.name == "torch"
    with pytest.raises(ConfigError, match="multiple of 16"):
        weights.load(make_checkpoint("odd", head_dim=24), torch.float32, backend="native")
    assert weights.load(make_checkpoint("odd", head_dim=24), torch.float32).decoder.ops.name == "torch"


def test_a_page_of_an_odd_number_of_tokens_is_refused(make_checkpoint: MakeCheckpoint) -> None:
    """The kernels store them in pairs; torch's operators take any."""
    path = make_checkpoint(head_dim=16)
    with pytest.raises(ConfigError, match=r"pages of 5 tokens.*even page_size"):
        Engine(path, memory=Memory(9, 5, 256), backend="native")
    assert Engine(path, memory=Memory(9, 5, 256), backend="torch").generate([[1, 2]], forced(3))[0].tokens


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_torchs_defaults_change_nothing(quantization: Quantization | None, make_checkpoint: MakeCheckpoint) -> None:
    """Memory for the kernels has their dtype, whatever torch would give by default."""
    path = make_checkpoint(head_dim=16)

    def tokens() -> tuple[int, ...]:
        engine = Engine(path, backend="native", quantization=quantization, dtype=torch.float32)
        return engine.generate([[1, 2, 3]], forced(9, logprobs=2))[0].tokens

    expected = tokens()
    for dtype in (torch.bfloat16, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            assert tokens() == expected
        finally:
            torch.set_default_dtype(torch.float32)


def test_the_compiler_has_nothing_to_say() -> None:
    """All warnings on, but for those that its own vector headers raise."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("only g++'s warnings are known, and there is none")
    quiet = ["-fopenmp", "-Wno-psabi", "-Wno-uninitialized", "-Wno-maybe-uninitialized"]
    folder = Path(build.__file__).parent
    for file in sorted(folder.glob("*.cpp")):
        command = [compiler, "-std=c++17", "-O1", "-march=native", "-Wall", "-Wextra", "-Werror", *quiet]
        done = subprocess.run([*command, "-fsyntax-only", str(file)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def in_a_new_process(code: str, **environment: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, env=os.environ | environment
    ).stdout


BUILT = "from batchwright.serve.kernels.build import built; print(built().why_not or 'built')"


def test_without_a_compiler_there_are_none_and_the_reason_is_said(tmp_path: Path) -> None:
    """No compiler on the path, one that fails, or the switch."""
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "no C++ compiler" in in_a_new_process(BUILT, PATH=str(empty), CXX="")
    assert "could not build" in in_a_new_process(BUILT, CXX="false", XDG_CACHE_HOME=str(tmp_path))
    assert "BATCHWRIGHT_KERNELS is off" in in_a_new_process(BUILT, BATCHWRIGHT_KERNELS="off")


def test_a_cache_that_others_can_write_to_is_not_used(tmp_path: Path) -> None:
    """A library from such a folder could be anybody's code."""
    folder = tmp_path / "batchwright" / "kernels"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    assert in_a_new_process(BUILT, XDG_CACHE_HOME=str(tmp_path)).strip() == "built"
    assert not list(folder.iterdir())
