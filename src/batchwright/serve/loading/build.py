"""A decoder from a config and the tensors that belong to it, on the target that a user named.

Every tensor is held against the shape that the config implies before the first is read; each is then read once,
converted, checked to be finite, and handed to the decoder. What a config claims costs nothing by itself.
"""

from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from batchwright.errors import BrokenWeights, UnsupportedModel
from batchwright.facts.shape import ModelShape
from batchwright.serve.decoders.backend import Target, ops_for, takes_openvino
from batchwright.serve.decoders.experts import Source, unfused
from batchwright.serve.decoders.model import Decoder, supported_shape, tensor_shapes
from batchwright.serve.openvino_executor import OpenVinoDecoder
from batchwright.serve.sampling.draws import MAX_VOCABULARY

_NUM_SUMMED_AT_ONCE = 32_000  # torch splits a sum over threads from 32,768 values


def build(
    path: Path, config: Mapping[str, Any], source: Source, target: Target, freq_C: Tensor | None = None
) -> Decoder | OpenVinoDecoder:
    """`path` is what errors name. `freq_C` overrides the config's rotary frequencies.

    Raises BrokenWeights where the source lacks a tensor, or has it in another shape; UnsupportedModel and ConfigError.
    """
    sizes = supported_shape(config)
    if sizes.vocab > MAX_VOCABULARY:
        fact = f"its vocabulary has {sizes.vocab:,} tokens, and at most {MAX_VOCABULARY:,} can be drawn from"
        raise UnsupportedModel(f"loading {path}", fact, "use a model with a smaller one")
    source = _complete(path, source, sizes)

    def take(name: str) -> Tensor:
        tensor = source.tensor(name, target.dtype)
        if not _is_finite(tensor):
            raise BrokenWeights(f"loading {path}", f"tensor {name} holds infinities or NaNs", "fetch the weights again")
        return tensor.to(target.device)

    in_pair_order = source.in_pair_order
    if takes_openvino(target, config):
        return OpenVinoDecoder(
            config, take, freq_C, dtype=target.dtype, in_pair_order=in_pair_order, quantization=target.quantization
        )
    return Decoder(config, take, freq_C, in_pair_order=in_pair_order, ops=ops_for(target, sizes))


def _complete(path: Path, source: Source, sizes: ModelShape) -> Source:
    """The source with a tensor per expert, once it is seen to hold every tensor, each of its shape."""
    num_tensors = len(source.shapes)
    if sizes.num_layers > num_tensors:  # before anything is made for each layer
        raise _claimed(path, f"{sizes.num_layers:,} layers", num_tensors)
    source = unfused(source, sizes)
    num_experts = sizes.num_experts * sum(map(sizes.has_experts, range(sizes.num_layers)))
    if num_experts > len(source.shapes):
        raise _claimed(path, f"{num_experts:,} experts in its layers", num_tensors)
    for name, shape in tensor_shapes(sizes).items():
        if name not in source.shapes:
            fact = f"tensor {name} is missing, which the config calls for"
            raise BrokenWeights(f"loading {path}", fact, "fetch the weights again, or correct config.json")
        if source.shapes[name] != shape:
            fact = f"tensor {name} has shape {list(source.shapes[name])} but the config implies {list(shape)}"
            raise BrokenWeights(f"loading {path}", fact, "use the config.json that belongs to these weights")
    return source


def _claimed(path: Path, what: str, num_tensors: int) -> BrokenWeights:
    fact = f"its config claims {what} but its files hold {num_tensors:,} tensors in all"
    return BrokenWeights(f"loading {path}", fact, "use the config that belongs to these weights")


def _is_finite(tensor: Tensor) -> bool:
    """By sums of pieces, small enough that torch sums each on this thread: quick also where the cores are busy."""
    flat = tensor.reshape(-1)
    pieces = (flat[start : start + _NUM_SUMMED_AT_ONCE] for start in range(0, len(flat), _NUM_SUMMED_AT_ONCE))
    return isfinite(sum(float(piece.sum(dtype=torch.float32)) for piece in pieces))
