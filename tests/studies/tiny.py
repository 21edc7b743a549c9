"""A random two-layer Llama with one token per byte, a machine that need not be measured, and a comparison of both."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from batchwright.facts.hardware import Fact, Hardware
from batchwright.serve.decoders.model import supported_shape, tensor_shapes
from batchwright.studies.compare import compare
from batchwright.studies.comparison import CompareSettings, Comparison, Recorded

CONTEXT = 512
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
}
MACHINE = Hardware(
    name="a test machine", float32=Fact(1e11, "given"), bandwidth=Fact(1e10, "given"), memory=Fact(2.0**33, "given")
)


class Log:
    """A watcher that remembers what began, with its number of parts, and how far it came."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, int]] = []
        self.done: dict[str, int] = {}

    def begin(self, what: str, total: int) -> None:
        self.begun.append((what, total))

    def advance(self, num_done: int) -> None:
        self.done[self.begun[-1][0]] = num_done


def write_checkpoint(folder: Path, *, with_tokenizer: bool = True, **changes: Any) -> Path:
    """`folder`, filled with config, weights and tokenizer."""
    folder.mkdir()
    config = CONFIG | changes
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    shapes = tensor_shapes(supported_shape(config))
    weights = {name: 0.3 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors")
    if with_tokenizer:
        core = Tokenizer(
            models.BPE({byte: i for i, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, [])
        )
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        core.decoder = decoders.ByteLevel()
        core.save(str(folder / "tokenizer.json"))
    return folder


def settings_for(model: Path, **changes: Any) -> CompareSettings:
    """Few and short requests, a small pool."""
    return CompareSettings(**{"model": str(model), "dtype": "float32", "num_pages": 256, **changes})


def compared(model: Path, **changes: Any) -> tuple[Comparison, list[Recorded]]:
    """A comparison on `MACHINE`."""
    return compare(settings_for(model, **changes), Log(), MACHINE)
