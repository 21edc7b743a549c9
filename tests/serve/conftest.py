"""Tiny random checkpoints written by transformers, the embedded model, and causal attention over one request."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from batchwright.serve import openvino_executor
from batchwright.serve.decoders.attention import reference_attention, rotated
from batchwright.serve.decoders.model import Decoder
from batchwright.serve.decoders.rope import rotations
from batchwright.serve.loading import weights
from batchwright.serve.loading.weights import LoadedModel

TINY: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
LLAMA3_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
VARIANTS: dict[str, dict[str, Any]] = {
    "grouped": {},
    "multi-query": {"num_key_value_heads": 1},
    "multi-head": {"num_key_value_heads": 6},
    "tied": {"tie_word_embeddings": True},
    "wide-heads": {"head_dim": 24},
    "llama3-rope": {"rope_parameters": LLAMA3_ROPE, "head_dim": 32},
    "yarn-rope": {"rope_parameters": YARN_ROPE},
    "biases": {"attention_bias": True, "mlp_bias": True},
}

SOME_TOKENS_T = torch.randint(0, TINY["vocab_size"], (40,), generator=torch.Generator().manual_seed(1))

MakeCheckpoint = Callable[..., Path]


@pytest.fixture
def make_checkpoint(tmp_path: Path) -> MakeCheckpoint:
    """Writes a random Llama checkpoint; `shard_size` splits it."""

    def make(name: str = "tiny", shard_size: str = "1GB", **changes: Any) -> Path:
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**TINY | changes))
        for parameter in model.parameters():  # biases start at zero and norms at one, which would hide mistakes
            parameter.data += 0.1 * torch.randn_like(parameter)
        model.save_pretrained(tmp_path / name, max_shard_size=shard_size)
        return tmp_path / name

    return make


class Made(NamedTuple):
    """An adapter as PEFT saved it, and what PEFT computes with it."""

    path: Path
    logits_TV: Tensor


MakeAdapter = Callable[..., Made]


@pytest.fixture
def make_adapter(tmp_path: Path) -> MakeAdapter:
    """Wraps a checkpoint with PEFT, gives the adapter random values, and saves it."""
    from peft import LoraConfig, get_peft_model  # where only the GPU tests run, it is not installed

    def make(
        checkpoint: Path, name: str = "adapter", seed: int = 0, tokens_T: Tensor = SOME_TOKENS_T, **lora: Any
    ) -> Made:
        torch.manual_seed(seed)
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(checkpoint), LoraConfig(**lora)).eval()
        for key, parameter in model.named_parameters():
            if "lora_" in key:
                parameter.data = 0.1 * torch.randn_like(parameter)
        model.save_pretrained(tmp_path / name)
        with torch.inference_mode():
            return Made(tmp_path / name, model(tokens_T[None]).logits[0])

    return make


@pytest.fixture(scope="session", autouse=True)
def auto_is_ours() -> Iterator[None]:
    """ "auto" gives what the tests are about on every CPU; where OpenVINO is meant, it is asked for by name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(openvino_executor, "runs_here", lambda dtype: False)
        yield


@pytest.fixture(scope="session")
def smollm2() -> LoadedModel:
    """The embedded model in float32."""
    return weights.load("smollm2", torch.float32)


class DenseCache:
    """Attention for one request of `decoder`, chunk after chunk: keeps every key and value, and masks by position."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.kv: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, layer: int, qkv_TF: Tensor) -> Tensor:
        does = self.decoder.attention[layer]
        start = len(self.kv[layer][0]) if layer in self.kv else 0
        turn_T1C = None
        if does.freq_C is not None:
            turn_T1C = rotations(torch.arange(start, start + len(qkv_TF)), does.freq_C)
        q_THD, k_TKD, v_TKD = rotated(qkv_TF, turn_T1C, does.num_heads, self.decoder.shape.num_kv_heads)
        if layer in self.kv:
            k_TKD, v_TKD = (torch.cat(pair) for pair in zip(self.kv[layer], (k_TKD, v_TKD), strict=True))
        self.kv[layer] = k_TKD, v_TKD
        return reference_attention(q_THD, k_TKD, v_TKD, start, does)
