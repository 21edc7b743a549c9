"""Our kernels compute what their torch twin computes, and what a row gets depends on that row alone."""

import ctypes
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchwright.errors import ConfigError
from batchwright.facts.shape import ModelShape
from batchwright.policy.pages import Memory
from batchwright.serve import native, weights
from batchwright.serve.attention import LayerAttention, RowSpan, layout_order
from batchwright.serve.backend import Quantization
from batchwright.serve.engine import Engine
from batchwright.serve.kernels import build, calls
from batchwright.serve.kv import PagedKV
from batchwright.serve.native import NativeOps
from batchwright.serve.ops import Ops, TorchOps
from tests.serve.conftest import MakeCheckpoint
from tests.serve.scripted import forced

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # of values of size 1; one rounding to bfloat16 is 4e-3
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
        gated = ours.gated([weight_NK, up_NK], biases), theirs.gated([weight_NK, up_NK], biases)
        assert close(gated[0](x_MK), gated[1](x_MK), dtype)


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


@pytest.mark.parametrize("ops", [NativeOps("int8"), TorchOps("int8")], ids=["native", "torch"])
def test_int8_of_nothing_and_of_no_number(ops: Ops) -> None:
    """A row of zeros gives zeros, and a row with a NaN or an infinity gives NaN, alone."""
    x_MK = random(4, 64, dtype=torch.float32)
    x_MK[1], x_MK[2, 5], x_MK[3, 7] = 0, torch.nan, torch.inf
    y_MN = ops.linear(random(32, 64, dtype=torch.float32, seed=1)).floats(x_MK)
    assert y_MN[0].isfinite().all()
    assert (y_MN[1] == 0).all()
    assert y_MN[2:].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [16, 40, 576])
def test_norms(width: int, dtype: torch.dtype, target: str) -> None:
    """Also of a width that fills no whole number of vectors."""
    x_TE, weight_E = random(7, width, dtype=dtype), random(width, dtype=dtype, seed=1)
    ours, theirs = (ops.norm(x_TE, weight_E, 1e-5) for ops in (NativeOps(), TorchOps()))
    assert close(ours, theirs, dtype)


def plain(shape: ModelShape, freq_C: Tensor) -> list[LayerAttention]:
    return [LayerAttention(shape.num_heads, shape.head_dim**-0.5, freq_C=freq_C)] * shape.num_layers


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


def attended(
    ops: Ops, kv: PagedKV, shape: ModelShape, past: list[RowSpan], rows: Sequence[RowSpan], layer: int = 1
) -> Tensor:
    """o_TE' of `rows`, after the rows' pasts were stored by an earlier step."""
    freq_C = 1 / 100 ** torch.linspace(0, 1, shape.head_dim // 2)
    num_values = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    if past:
        ordered = [past[i] for i in layout_order(past)]
        num_past = sum(row.num_positions for row in ordered)
        ops.layout(ordered, kv, plain(shape, freq_C)).attend(
            layer, random(num_past, num_values, dtype=kv.pages_LPMSD.dtype)
        )
    num_now = sum(row.num_positions for row in rows)
    return ops.layout(rows, kv, plain(shape, freq_C)).attend(
        layer, random(num_now, num_values, dtype=kv.pages_LPMSD.dtype, seed=1)
    )


@st.composite
def steps(draw: st.DrawFn) -> tuple[int, list[RowSpan]]:
    """A page size, and rows with disjoint, shuffled tables."""
    size, free = draw(st.sampled_from([2, 8, 16, 24, 32])), draw(st.permutations(range(160)))
    rows = []
    for start, num_positions in draw(
        st.lists(st.tuples(st.integers(0, 150), st.sampled_from([1, 1, 1, 2, 5, 40])), min_size=1, max_size=6)
    ):
        num_pages = -(-(start + num_positions) // size)
        if num_pages <= len(free):
            rows.append(RowSpan(start, num_positions, tuple(free[:num_pages])))
            free = free[num_pages:]
    return size, [rows[index] for index in layout_order(rows)]


def worst(dtype: torch.dtype, shape: ModelShape, size: int, rows: list[RowSpan]) -> float:
    """The largest difference between the kernel and its twin; pages nobody wrote hold NaN."""
    past = [RowSpan(0, row.start, row.table) for row in rows if row.start]
    outputs = []
    for ops in (NativeOps(), TorchOps()):
        kv = PagedKV(shape, Memory(160, size, 4096), dtype, CPU)
        kv.pages_LPMSD.fill_(torch.nan)
        outputs.append(attended(ops, kv, shape, past, rows).float())
    return float((outputs[0] - outputs[1]).abs().max())


@settings(max_examples=60)
@given(steps())
def test_attention_over_any_pages(step: tuple[int, list[RowSpan]]) -> None:
    """Any mix of decodes and chunks, pages of any even size in any order: within 1e-5 of the twin in float32."""
    assert worst(torch.float32, SHAPE, *step) < 1e-5
    assert worst(torch.bfloat16, SHAPE, *step) < 0.06


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(9, 3, 64), (8, 1, 32), (4, 4, 128), (2, 2, 80)])
def test_attention_of_other_shapes(
    num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, target: str
) -> None:
    """More queries to a head than meet its keys at once, one each, and heads that are no multiple of 64."""
    shape = shape_of(num_heads, num_kv_heads, head_dim)
    rows = [RowSpan(130, 1, tuple(range(9))), RowSpan(63, 1, (20, 22, 21, 23)), RowSpan(20, 30, (30, 33, 31, 32))]
    assert worst(dtype, shape, 16, rows) < (1e-5 if dtype == torch.float32 else 0.06)


def test_rows_without_pages_harm_nobody() -> None:
    """Fillers read and write the scratch page, whatever is in it."""
    kv = PagedKV(SHAPE, Memory(160, 16, 4096), torch.float32, CPU)
    alive = RowSpan(6, 1, (3,))
    alone = attended(NativeOps(), kv, SHAPE, [RowSpan(0, 6, (3,))], [alive])
    kv.pages_LPMSD[:, kv.scratch] = torch.nan
    ops, freq_C = NativeOps(), 1 / 100 ** torch.linspace(0, 1, 8)
    qkv_TF = torch.cat([random(1, 160, dtype=torch.float32, seed=1), torch.randn(10, 160)])
    beside = ops.layout([alive, RowSpan(30, 1, ()), RowSpan(0, 9, ())], kv, plain(SHAPE, freq_C)).attend(1, qkv_TF)
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
def test_a_prompts_outputs_are_the_same_bits_however_it_is_cut(dtype: torch.dtype) -> None:
    """At once, in chunks, token by token; also beside others."""
    prompt = random(150, 160, dtype=dtype)
    freq_C = 1 / 100 ** torch.linspace(0, 1, 8)

    def run(sizes: Sequence[int], company: int = 0) -> Tensor:
        kv = PagedKV(SHAPE, Memory(160, 16, 4096), dtype, CPU)
        outputs, start = [], 0
        for part_TF in prompt.split(list(sizes)):
            rows = [RowSpan(start, len(part_TF), tuple(range(10)))]
            rows += [RowSpan(0, 3, (20 + i,)) for i in range(company)]
            beside_TF = random(3 * company, 160, dtype=dtype, seed=start)
            both_TF = torch.cat([part_TF, beside_TF])
            outputs.append(NativeOps().layout(rows, kv, plain(SHAPE, freq_C)).attend(0, both_TF)[: len(part_TF)])
            start += len(part_TF)
        return torch.cat(outputs)

    at_once = run([150])
    for sizes in ([1] * 150, [64, 64, 22], [17, 100, 33]):
        assert torch.equal(run(sizes), at_once)
    assert torch.equal(run([50, 100], company=5), at_once)


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
