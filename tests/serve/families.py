"""A tiny random model of every family, made by transformers with sizes that quantise in whole blocks of 32."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

NUM_VOCAB = 97

_SIZES: dict[str, Any] = {
    "vocab_size": NUM_VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_EXPERTS = {"num_experts_per_tok": 2}
_GEMMA = {"head_dim": 32, "sliding_window": 8, "query_pre_attn_scalar": 32, "tie_word_embeddings": True}

TINY_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "smollm3": {"model_type": "smollm3", "num_hidden_layers": 5, "tie_word_embeddings": True},
    "mistral": {"model_type": "mistral", "sliding_window": 8},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4} | _EXPERTS,
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 32},
    "qwen3_moe": {
        "model_type": "qwen3_moe", "head_dim": 32, "num_experts": 4, "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    } | _EXPERTS,
    "gemma2": {"model_type": "gemma2"} | _GEMMA,
    "gemma3_text": {"model_type": "gemma3_text", "num_hidden_layers": 7} | _GEMMA,
}  # fmt: skip


def tiny_model(family: str, **changes: Any) -> PreTrainedModel:
    """Its numbers are all of a size that matters: biases start at zero and norms at one, which would hide mistakes."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(**_SIZES | TINY_FAMILIES[family] | changes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


@torch.inference_mode()
def reference_logits(model: PreTrainedModel, tokens_T: torch.Tensor) -> torch.Tensor:
    """logits_TV of one request."""
    return model(tokens_T[None]).logits[0]
