"""The decoder computes what transformers computes, in any split of the tokens into steps."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM

from batchwright.errors import UnsupportedModel
from batchwright.serve.decoders import linear
from batchwright.serve.decoders.linear import TorchLinear
from batchwright.serve.decoders.model import Decoder, supported_shape
from batchwright.serve.loading import weights
from tests.serve.conftest import TINY, VARIANTS, DenseCache, MakeCheckpoint

TOKENS_T = torch.randint(0, TINY["vocab_size"], (150,), generator=torch.Generator().manual_seed(1))


def reference_logits(path: Path, tokens_T: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    with torch.inference_mode():
        return model(tokens_T[None]).logits[0].float()


def run(decoder: Decoder, tokens_T: Tensor, attend: Any = None) -> Tensor:
    return decoder.forward(tokens_T, attend or DenseCache(decoder), torch.arange(len(tokens_T)))


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers(variant: str, make_checkpoint: MakeCheckpoint) -> None:
    """In float32 every logit of every position is within 1e-4, for each shape we claim to run."""
    path = make_checkpoint(**VARIANTS[variant])
    logits_TV = run(weights.load(path, torch.float32).decoder, TOKENS_T)
    assert logits_TV.dtype == torch.float32
    assert (logits_TV - reference_logits(path, TOKENS_T)).abs().max() < 1e-4


@pytest.mark.parametrize("sizes", [[150], [1] * 20 + [130], [149, 1], [64, 64, 22], [7] * 21 + [3]])
def test_any_split_into_chunks_gives_the_same_logits(sizes: list[int], make_checkpoint: MakeCheckpoint) -> None:
    """Prefill at once, in chunks, or token by token: the logits are those of one pass."""
    path = make_checkpoint()
    decoder = weights.load(path, torch.float32).decoder
    attend = DenseCache(decoder)
    parts = [run(decoder, part_T, attend) for part_T in TOKENS_T.split(sizes)]
    assert (torch.cat(parts) - reference_logits(path, TOKENS_T)).abs().max() < 1e-4


def test_requests_mixed_in_one_step_do_not_touch(make_checkpoint: MakeCheckpoint) -> None:
    """A prefill of one request and a decode of another, flattened into one step, equal each alone."""
    decoder = weights.load(make_checkpoint(), torch.float32).decoder
    first_T, second_T = TOKENS_T[:40], TOKENS_T[40:90]
    alone = run(decoder, first_T), run(decoder, second_T)
    caches = DenseCache(decoder), DenseCache(decoder)
    run(decoder, first_T[:-1], caches[0])

    def attend(layer: int, qkv_TF: Tensor) -> Tensor:
        parts = zip(caches, qkv_TF.split([1, 50]), strict=True)
        return torch.cat([cache(layer, part_TF) for cache, part_TF in parts])

    logits_RV = decoder.forward(torch.cat([first_T[-1:], second_T]), attend, torch.tensor([50, 0]))
    assert (logits_RV - torch.stack([alone[1][-1], alone[0][-1]])).abs().max() < 1e-4


def test_a_step_without_logit_rows_still_attends_in_every_layer(make_checkpoint: MakeCheckpoint) -> None:
    """The chunk in the middle of a prompt wants no logits, but its keys and values must be stored."""
    decoder = weights.load(make_checkpoint(), torch.float32).decoder
    attend = DenseCache(decoder)
    logits_RV = decoder.forward(TOKENS_T, attend, torch.empty(0, dtype=torch.int64))
    assert logits_RV.shape == (0, 97) and logits_RV.dtype == torch.float32
    assert [len(k_TKD) for k_TKD, _ in attend.kv.values()] == [150] * 3


def test_bfloat16_errs_no_more_than_transformers_does(make_checkpoint: MakeCheckpoint) -> None:
    """Against float32 logits, our bfloat16 error is at most 1.1 times that of transformers' bfloat16."""
    path = make_checkpoint()
    exact_TV = reference_logits(path, TOKENS_T)
    ours_TV = run(weights.load(path, torch.bfloat16).decoder, TOKENS_T)
    theirs_TV = reference_logits(path, TOKENS_T, torch.bfloat16)
    assert (ours_TV - exact_TV).square().mean() < 1.1**2 * (theirs_TV - exact_TV).square().mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 5, 8, 16, 31, 32, 33, 64, 127, 512, 600])
def test_a_packed_weight_is_right_for_any_number_of_rows(num_rows: int, dtype: torch.dtype) -> None:
    """One packed copy serves decodes and prefills: its product is F.linear's."""
    torch.manual_seed(num_rows)
    x_MK, weight_NK, bias_N = torch.randn(num_rows, 72), torch.randn(56, 72), torch.randn(56)
    x_MK, weight_NK, bias_N = x_MK.to(dtype), weight_NK.to(dtype), bias_N.to(dtype)
    tolerance = 1e-4 if dtype == torch.float32 else 0.25
    for bias in (None, bias_N):
        torch.testing.assert_close(
            TorchLinear(weight_NK, bias)(x_MK), F.linear(x_MK, weight_NK, bias), atol=tolerance, rtol=1e-2
        )


def test_without_the_packing_operators_it_falls_back(
    monkeypatch: pytest.MonkeyPatch, make_checkpoint: MakeCheckpoint
) -> None:
    """A torch that lacks oneDNN's operators runs the same model through F.linear."""
    path = make_checkpoint()
    packed_TV = run(weights.load(path, torch.float32).decoder, TOKENS_T)
    monkeypatch.setattr(linear, "_POINTWISE", None)
    linear.can_pack.cache_clear()
    try:
        assert not linear.can_pack(torch.float32)
        plain_TV = run(weights.load(path, torch.float32).decoder, TOKENS_T)
    finally:
        linear.can_pack.cache_clear()
    assert (plain_TV - packed_TV).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("changes", "fact"),
    [
        ({"model_type": "mamba"}, "'mamba'; supported are llama, smollm3, mistral"),
        ({"model_type": None}, "supported are llama"),
        ({"model_type": ["llama"]}, "supported are llama"),
        ({"hidden_act": "gelu"}, "'gelu'; supported are silu, gelu_pytorch_tanh"),
        ({"head_dim": 7}, "head_dim is 7"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised with 'gptq'"),
    ],
)
def test_what_it_would_compute_wrongly_is_refused(changes: dict[str, Any], fact: str) -> None:
    """A config that asks for another computation is an error that names what is supported."""
    with pytest.raises(UnsupportedModel, match=fact):
        supported_shape({"model_type": "llama", **TINY} | changes)
