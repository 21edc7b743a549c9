"""The kernel draws the tokens that torch's operators draw, and both those of the distribution in float64.

A token is right if the uniform number lies in its part of the cumulative distribution, to the rounding of float32.
"""

import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from batchwright.serve.decoders import native
from batchwright.serve.kernels import calls
from batchwright.serve.sampling.draws import NUM_WEIGHT_BITS, draw
from batchwright.serve.sampling.filters import OFF, Scored, draw_filtered, draw_typical
from batchwright.serve.sampling.params import SamplingParams
from batchwright.serve.sampling.ranking import likeliest
from batchwright.serve.sampling.rows import FOLD, Room
from tests.serve.choosing import CPU, choose_at, make_logits
from tests.serve.decoders.test_native import target

__all__ = ["target"]  # a fixture

pytestmark = pytest.mark.skipif(
    bool(native.why_not(torch.float32, CPU)), reason=f"no kernels here: {native.why_not(torch.float32, CPU)}"
)
TOLERANCE = 2e-6


class Asks(NamedTuple):
    """The settings of a row."""

    rate: float = 1.0
    top_k: float = OFF[0]
    top_p: float = OFF[1]
    min_p: float = OFF[2]
    typical_p: float = OFF[3]

    @property
    def is_filtered(self) -> bool:
        return self[1:4] != OFF[:3]


ALL_ASKS = [
    Asks(),
    Asks(top_p=0.95),
    Asks(top_p=0.3),
    Asks(top_k=1),
    Asks(top_k=50),
    Asks(top_k=50, top_p=0.9),
    Asks(min_p=0.05),
    Asks(min_p=1.0),
    Asks(top_p=0.9, min_p=0.01),
    Asks(top_k=40, top_p=0.9, min_p=0.1),
    Asks(typical_p=0.9),
    Asks(typical_p=0.2),
]


def by_kernel(logits_RV: Tensor, asks: Asks, uniform_R: Tensor) -> Tensor:
    peak_R, token_R = likeliest(logits_RV)
    settings_R5 = torch.tensor([asks] * len(logits_RV), dtype=torch.float64)
    calls.draw(logits_RV, peak_R, torch.arange(len(logits_RV)), settings_R5, uniform_R, token_R)
    return token_R


def by_torch(logits_RV: Tensor, asks: Asks, uniform_R: Tensor) -> Tensor:
    num_rows, num_tokens = logits_RV.shape
    limits_RL = torch.tensor([asks[1:]] * num_rows, dtype=torch.float64)
    scored = Scored(logits_RV, likeliest(logits_RV)[0], torch.full((num_rows,), asks.rate))
    scores_RV, room_RV = Room(num_tokens, CPU).of(num_rows)
    if asks.typical_p < 1:
        return draw_typical(scored.all(scores_RV), limits_RL[:, -1], uniform_R, room_RV)
    if asks.is_filtered:
        return draw_filtered(scored, scored.all(scores_RV).softmax(-1), limits_RL, uniform_R)
    return draw(scored.all(scores_RV), uniform_R, room_RV)


def expected(logits_V: Tensor, asks: Asks) -> tuple[np.ndarray, np.ndarray]:
    """Tokens in the order in which they are drawn, and their probabilities, in float64."""
    score_V = ((logits_V - logits_V.max()) * asks.rate).double().numpy()
    share_V = np.exp(score_V) / np.exp(score_V).sum()
    if asks.typical_p < 1:
        surprise_V = -np.maximum(score_V, -1e4)
        nearness_V = np.abs(surprise_V - (share_V * surprise_V).sum()).astype(np.float32)
        order_V = np.argsort(nearness_V, kind="stable")
        before_V = np.cumsum(share_V[order_V]) - share_V[order_V]
        edge = nearness_V[order_V][before_V < asks.typical_p].max()
        kept_V = share_V[order_V] * (nearness_V[order_V] <= edge)
    elif asks.is_filtered:
        order_V = np.argsort(-logits_V.numpy(), kind="stable")
        kept_V = filtered(share_V[order_V], score_V[order_V], asks)
    else:
        num_columns = -(-len(logits_V) // FOLD)
        order_V = np.argsort(np.arange(len(logits_V)) % num_columns, kind="stable")
        kept_V = share_V[order_V]
    return order_V, kept_V / kept_V.sum()


def filtered(share_V: np.ndarray, score_V: np.ndarray, asks: Asks) -> np.ndarray:
    kth = score_V[int(min(asks.top_k, len(score_V))) - 1]
    kept_V = share_V * (score_V >= kth)
    before_V = np.concatenate([[0], np.cumsum(kept_V)[:-1]])
    return kept_V * (before_V / kept_V.sum() < asks.top_p) * (share_V >= asks.min_p * share_V[0])


def distances(logits_RV: Tensor, asks: Asks, uniform_R: Tensor, token_R: Tensor) -> Tensor:
    """How far each row's uniform number is from the part of its token; 0 inside."""
    far = []
    for logits_V, uniform, token in zip(logits_RV, uniform_R.tolist(), token_R.tolist(), strict=True):
        order_V, share_V = expected(logits_V, asks)
        place = int(np.flatnonzero(order_V == token)[0])
        end = float(share_V[: place + 1].sum())
        far.append(max(0.0, end - share_V[place] - uniform, uniform - end) if share_V[place] > 0 else math.inf)
    return torch.tensor(far)


def numbers(num: int, seed: int = 0) -> Tensor:
    uniform_R = torch.rand(num, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    uniform_R[0], uniform_R[-1] = 0, 1 - 2**-53
    return uniform_R


@pytest.mark.parametrize("asks", ALL_ASKS, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 3, 97, 300, 5000])
def test_draws_are_right(num_tokens: int, asks: Asks, target: str) -> None:
    """Of peaked rows and of flat ones, cold and hot, by whatever CPU."""
    for spread, rate in ((0.5, 1.0), (3.0, 1 / 0.7), (9.0, 0.5)):
        logits_RV, uniform_R = make_logits(12, num_tokens, spread=spread), numbers(12)
        mine = replaced(asks, rate)
        assert distances(logits_RV, mine, uniform_R, by_kernel(logits_RV, mine, uniform_R)).max() < TOLERANCE


def replaced(asks: Asks, rate: float) -> Asks:
    """Another temperature, as the float32 that it is held in."""
    return asks._replace(rate=float(np.float32(rate)))


@pytest.mark.parametrize("asks", ALL_ASKS, ids=str)
@pytest.mark.parametrize("num_tokens", [49_152, 151_936, 262_144])
def test_draws_of_large_vocabularies_are_right(num_tokens: int, asks: Asks) -> None:
    """Peaked rows and flat ones; the edge of a filter may lie one token beside that of float64."""
    for spread in (0.5, 4.0):
        logits_RV, uniform_R = make_logits(3, num_tokens, spread=spread), numbers(3)
        token_R = by_kernel(logits_RV, asks, uniform_R)
        assert distances(logits_RV, asks, uniform_R, token_R).max() < 10 * TOLERANCE


@pytest.mark.parametrize("asks", ALL_ASKS, ids=str)
@pytest.mark.parametrize("rounded", [False, True], ids=["distinct", "ties"])
@pytest.mark.parametrize("num_tokens", [30, 1000, 6001])
def test_torch_draws_the_same(num_tokens: int, rounded: bool, asks: Asks) -> None:
    """But where the uniform number is at an edge, to the rounding of float32: of 200 rows one or none."""
    logits_RV, uniform_R = make_logits(200, num_tokens, rounded=rounded), numbers(200)
    mine_R, its_R = by_kernel(logits_RV, asks, uniform_R), by_torch(logits_RV, asks, uniform_R)
    differs_R = mine_R != its_R
    assert differs_R.sum() <= 1
    if not rounded:  # a tie at an edge has no rounding to be within
        assert (distances(logits_RV, asks, uniform_R, its_R)[differs_R] < 20 * TOLERANCE).all()


@pytest.mark.parametrize("asks", ALL_ASKS, ids=str)
def test_evenly_spaced_numbers_give_each_token_its_share(asks: Asks) -> None:
    """Counted: all that is kept is drawn, and nothing else."""
    num = 20_000
    logits_1V = make_logits(1, 97, spread=1.5)
    uniform_R = (torch.arange(num, dtype=torch.float64) + 0.5) / num
    token_R = by_kernel(logits_1V.expand(num, -1).contiguous(), asks, uniform_R)
    order_V, share_V = expected(logits_1V[0], asks)
    drawn_V = torch.bincount(token_R, minlength=97)[torch.from_numpy(order_V)] / num
    assert (drawn_V - torch.from_numpy(share_V)).abs().max() <= 1.1 / num
    assert not (drawn_V[torch.from_numpy(share_V == 0)] > 0).any()


@pytest.mark.parametrize("asks", ALL_ASKS, ids=str)
def test_a_row_is_drawn_the_same_in_any_company(asks: Asks) -> None:
    """Alone, or one of 256, by one thread or by three."""
    logits_RV, uniform_R = make_logits(256, 777), numbers(256)
    together_R = by_kernel(logits_RV, asks, uniform_R)
    for row in (0, 7, 255):
        part = slice(row, row + 1)
        assert by_kernel(logits_RV[part], asks, uniform_R[part]) == together_R[part]
    before = torch.get_num_threads()
    try:
        for num_threads in (1, 3):
            torch.set_num_threads(num_threads)
            assert torch.equal(by_kernel(logits_RV, asks, uniform_R), together_R)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("asks", ALL_ASKS, ids=str)
def test_what_is_ruled_out_is_never_drawn(asks: Asks) -> None:
    """Not even where all that is left is one token, or the temperature knows no bounds."""
    logits_RV = make_logits(200, 300)
    logits_RV[:, ::2] = -math.inf
    logits_RV[100:, 4:] = -math.inf
    for rate in (1e-38, 1.0, 1e38):
        token_R = by_kernel(logits_RV, replaced(asks, rate), numbers(200))
        assert (token_R % 2 == 1).all()
        assert (token_R[100:] <= 3).all()


@pytest.mark.parametrize("asks", [asks for asks in ALL_ASKS if asks.typical_p == 1], ids=str)
@pytest.mark.parametrize("rounded", [False, True], ids=["distinct", "ties"])
def test_the_coldest_draw_is_the_likeliest_token(asks: Asks, rounded: bool) -> None:
    """To which at 1e-30 all weight goes; equals share it."""
    logits_RV = make_logits(20, 5000, rounded=rounded)
    token_R = by_kernel(logits_RV, replaced(asks, 1e30), numbers(20))
    assert torch.equal(logits_RV.gather(1, token_R[:, None])[:, 0], logits_RV.amax(-1))


@pytest.mark.parametrize("num_tokens", [4, 97, 5000, 49_152])
def test_equal_tokens_are_drawn_alike(num_tokens: int) -> None:
    """In the order of their ids where they are filtered: top-p takes its share of them, the other filters all."""
    uniform_R = numbers(50)
    for value in (0.0, -0.0, 7.5, -1e38):
        logits_RV = torch.full((50, num_tokens), value)
        for asks, share in ((Asks(top_k=2), 1.0), (Asks(min_p=0.5), 1.0), (Asks(top_p=0.75), 0.75)):
            num_kept = math.ceil(num_tokens * share)
            token_R = by_kernel(logits_RV, asks, uniform_R)
            assert torch.equal(token_R, (uniform_R * num_kept).long())


def test_zeros_of_either_sign_are_equal() -> None:
    """The lower id comes first, and a part of the distribution begins where the one before it ends."""
    logits_1V = torch.tensor([[-1.0, -0.0, 0.0, -0.0, 0.0]])
    for uniform, token in ((0.0, 1), (0.25, 2), (0.5, 3), (0.75, 4)):
        assert by_kernel(logits_1V, Asks(top_k=2), torch.tensor([uniform], dtype=torch.float64)).tolist() == [token]


def test_only_the_rows_that_are_named_are_drawn() -> None:
    """Each by its own settings; the others keep what they had, be it from no number at all."""
    logits_RV = make_logits(6, 1000)
    logits_RV[2, 5] = math.nan
    peak_R, token_R = likeliest(logits_RV)
    expected_R, row_R = token_R.clone(), torch.tensor([4, 1, 3])
    settings_R5 = torch.tensor(ALL_ASKS[:3], dtype=torch.float64)
    calls.draw(logits_RV, peak_R, row_R, settings_R5, numbers(3), token_R)
    for i, row in enumerate(row_R.tolist()):
        expected_R[row] = by_kernel(logits_RV[row : row + 1], ALL_ASKS[i], numbers(3)[i : i + 1])
    assert torch.equal(token_R, expected_R)


def test_a_sampler_draws_each_row_as_it_does_alone() -> None:
    """Whatever ways of drawing meet in a batch, those that the kernel has none for too."""
    drawn = SamplingParams(temperature=0.8, seed=3)
    settings = ({}, {"top_p": 0.9}, {"top_k": 9}, {"typical_p": 0.9}, {"top_k": 30, "typical_p": 0.8}, {"min_p": 0.1})
    params = [replace(drawn, **setting) for setting in settings] * 4
    logits_BV = make_logits(len(params), 3000)
    together = choose_at(logits_BV, params, range(len(params)))
    for i, one in enumerate(params):
        assert choose_at(logits_BV[i : i + 1], [one], [i]) == together[i : i + 1]


@pytest.mark.parametrize("num_tokens", [1, 97, 5000, 49_152])
def test_totals_are_those_of_float64(num_tokens: int, target: str) -> None:
    """To the rounding of float32, flat or peaked, and the same in any company."""
    for spread in (0.0, 1.0, 9.0):
        logits_RV = make_logits(5, num_tokens, spread=spread)
        peak_R, _ = likeliest(logits_RV)
        weight_R = calls.weigh(logits_RV, peak_R)
        expected_R = (logits_RV.double() - peak_R[:, None]).exp().sum(-1)
        torch.testing.assert_close(weight_R * 2.0**-NUM_WEIGHT_BITS, expected_R, rtol=2e-7, atol=0)
        assert torch.equal(calls.weigh(logits_RV[3:4], peak_R[3:4]), weight_R[3:4])


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 31, 32, 33, 47, 49, 97, 5000])
def test_what_a_mask_leaves_keeps_its_bits(num_tokens: int, target: str) -> None:
    """And the rest is -inf; nothing is written beyond a row, whatever the last word's spare bits are."""
    generator = torch.Generator().manual_seed(0)
    words_RW = torch.randint(-(2**31), 2**31, (4, -(-num_tokens // 32)), generator=generator, dtype=torch.int32)
    words_RW[1], words_RW[2] = -1, 0
    is_allowed_RV = ((words_RW[:, :, None] >> torch.arange(32)) & 1).flatten(1)[:, :num_tokens] == 1
    room_RV = make_logits(5, num_tokens)
    expected_RV = room_RV.clone()
    expected_RV[:4].masked_fill_(~is_allowed_RV, -math.inf)
    calls.rule_out_unset(room_RV[:4], words_RW)
    assert torch.equal(room_RV, expected_RV)
