"""Quantised checkpoints: what was packed, value by value, comes back as scale * (stored - zero), exactly."""

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from batchwright.errors import BrokenWeights, UnsupportedModel
from batchwright.serve.loading import weights
from batchwright.serve.loading.checkpoint import SafetensorsSource
from batchwright.serve.loading.packed import dequantised
from tests.serve.conftest import DenseCache
from tests.serve.families import NUM_VOCAB, reference_logits, tiny_model

Packed = tuple[dict[str, Tensor], Tensor]
"""The tensors that a weight becomes, by the last part of their names, and the weight they stand for."""

TOKENS_T = torch.randint(0, NUM_VOCAB, (30,), generator=torch.Generator().manual_seed(1))


def words(values: Sequence[int], bits: int, order: Sequence[int] | None = None) -> list[int]:
    """Words of 32 bits as a plain loop makes them; `order` says which value of a word's comes first, second, ..."""
    per_word, found = 32 // bits, []
    for start in range(0, len(values), per_word):
        word = 0
        for place, i in enumerate(order or range(per_word)):
            if start + i < len(values):
                word |= int(values[start + i]) << (bits * place)
        found.append(word)
    return found


def packed(matrix: np.ndarray, bits: int, dim: int, order: Sequence[int] | None = None) -> Tensor:
    lines = matrix if dim == 1 else matrix.T
    rows = np.array([words(line, bits, order) for line in lines], dtype=np.uint32)
    return torch.tensor((rows if dim == 1 else rows.T).copy().view(np.int32))


class Quantised:
    """Random integers of a weight of `outputs` x `inputs`, in groups of `size` inputs."""

    def __init__(self, outputs: int, inputs: int, bits: int, size: int, seed: int, *, shuffled: bool = False) -> None:
        rng = np.random.default_rng(seed)
        self.bits, self.groups = bits, inputs // size
        self.stored = rng.integers(0, 1 << bits, (outputs, inputs))
        self.zeros = rng.integers(1, 1 << bits, (outputs, self.groups))
        self.scales = torch.tensor(rng.uniform(0.001, 0.03, (outputs, self.groups)), dtype=torch.float16)
        self.group = np.arange(inputs) // size
        if shuffled:
            rng.shuffle(self.group)

    def weight(self, zeros: np.ndarray | None = None) -> Tensor:
        zeros = torch.tensor(self.zeros if zeros is None else zeros)[:, self.group]
        return self.scales.float()[:, self.group] * (torch.tensor(self.stored) - zeros)


def gptq(made: Quantised, *, version: int = 1) -> Packed:
    tensors = {
        "qweight": packed(made.stored.T, made.bits, 0),
        "qzeros": packed(made.zeros.T - (version == 1), made.bits, 1),
        "scales": made.scales.T.contiguous(),
        "g_idx": torch.tensor(made.group, dtype=torch.int32),
    }
    return tensors, made.weight()


def awq(made: Quantised) -> Packed:
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    tensors = {
        "qweight": packed(made.stored.T, 4, 1, order),
        "qzeros": packed(made.zeros.T, 4, 1, order),
        "scales": made.scales.T.contiguous(),
    }
    return tensors, made.weight()


def compressed(made: Quantised, *, symmetric: bool) -> Packed:
    """Signed values, shifted to be packed."""
    tensors = {
        "weight_packed": packed(made.stored, made.bits, 1),
        "weight_scale": made.scales,
        "weight_shape": torch.tensor(made.stored.shape),
        "weight_g_idx": torch.tensor(made.group if made.groups > 1 else made.group - 1, dtype=torch.int32),
    }
    if symmetric:
        return tensors, made.weight(np.full_like(made.zeros, 1 << (made.bits - 1)))
    return tensors | {"weight_zero_point": packed(made.zeros, made.bits, 0)}, made.weight()


def opened(tensors: dict[str, Tensor], path: Path, method: dict[str, Any]) -> Any:
    path.mkdir()
    save_file({f"x.{name}": tensor for name, tensor in tensors.items()}, path / "model.safetensors")
    with ExitStack() as files:
        source = dequantised(SafetensorsSource(path, files), {"quantization_config": method})
        return source.shapes["x.weight"], source.tensor("x.weight", torch.float32)


GPTQ, AWQ = {"quant_method": "gptq", "bits": 4}, {"quant_method": "awq", "bits": 4, "version": "gemm"}
COMPRESSED = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
SIZES = st.tuples(st.integers(1, 4), st.integers(1, 4), st.sampled_from([8, 16]), st.integers(0, 2**32))


@settings(max_examples=40, deadline=None)
@given(sizes=SIZES, bits=st.sampled_from([4, 8]), shuffled=st.booleans(), version=st.sampled_from([1, 2]))
def test_gptq_comes_back(sizes: tuple, bits: int, shuffled: bool, version: int, tmp_path_factory: Any) -> None:
    """4 and 8 bits, groups in order and by importance, both ways of storing zeros."""
    rows, groups, size, seed = sizes
    made = Quantised(8 * rows, groups * size, bits, size, seed, shuffled=shuffled)
    tensors, weight = gptq(made, version=version)
    method = GPTQ | {"bits": bits} | ({"checkpoint_format": "gptq_v2"} if version == 2 else {})
    shape, found = opened(tensors, tmp_path_factory.mktemp("x") / "x", method)
    assert shape == weight.shape and torch.equal(found, weight)


@settings(max_examples=25, deadline=None)
@given(sizes=SIZES)
def test_awq_comes_back(sizes: tuple, tmp_path_factory: Any) -> None:
    """Neighbours lie in their word as AutoAWQ interleaves them."""
    rows, groups, size, seed = sizes
    tensors, weight = awq(Quantised(8 * rows, groups * size, 4, size, seed))
    shape, found = opened(tensors, tmp_path_factory.mktemp("x") / "x", AWQ)
    assert shape == weight.shape and torch.equal(found, weight)


@settings(max_examples=40, deadline=None)
@given(sizes=SIZES, bits=st.sampled_from([4, 8]), symmetric=st.booleans(), shuffled=st.booleans())
def test_compressed_tensors_come_back(
    sizes: tuple, bits: int, symmetric: bool, shuffled: bool, tmp_path_factory: Any
) -> None:
    """With zeros and without, groups in any order or none, and outputs that do not fill their last word of zeros."""
    rows, groups, size, seed = sizes
    tensors, weight = compressed(
        Quantised(3 * rows, groups * size, bits, size, seed, shuffled=shuffled), symmetric=symmetric
    )
    shape, found = opened(tensors, tmp_path_factory.mktemp("x") / "x", COMPRESSED)
    assert shape == weight.shape and torch.equal(found, weight)


@pytest.mark.parametrize("blocks", [(1, 1), (6, 1), (6, 2), (3, 2)])  # the last of 2 x 4
@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn])
def test_plain_values_of_8_bits_come_back(kind: torch.dtype, blocks: tuple[int, int], tmp_path: Path) -> None:
    """A scale for all, for each output, for groups of inputs, for blocks of both."""
    generator = torch.Generator().manual_seed(0)
    stored = torch.randint(-100, 100, (6, 8), generator=generator).to(kind)
    scales = torch.rand(blocks, generator=generator, dtype=torch.bfloat16)
    tensors = {"weight": stored, "weight_scale": scales}
    form = "int-quantized" if kind == torch.int8 else "float-quantized"
    method: dict[str, Any] = {"quant_method": "compressed-tensors", "format": form}
    if blocks == (3, 2):
        method["config_groups"] = {"group_0": {"weights": {"num_bits": 8, "block_structure": [2, 4]}}}
    _, found = opened(tensors, tmp_path / "x", method)
    for n, k in np.ndindex(6, 8):
        assert found[n, k] == float(stored[n, k]) * float(scales[n * blocks[0] // 6, k * blocks[1] // 8])


def test_blocks_of_fp8_may_be_cut(tmp_path: Path) -> None:
    """The last block of each side is as narrow as what is left: 10 x 7 in blocks of 4 x 4."""
    generator = torch.Generator().manual_seed(0)
    stored = torch.randn(10, 7, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(3, 2, generator=generator)
    method = {"quant_method": "fp8", "weight_block_size": [4, 4]}
    _, found = opened({"weight": stored, "weight_scale_inv": scales}, tmp_path / "x", method)
    for n, k in np.ndindex(10, 7):
        assert found[n, k] == float(stored[n, k]) * float(scales[n // 4, k // 4])


def quantise(path: Path, method: dict[str, Any], pack: Callable[[Quantised], Packed]) -> dict[str, Tensor]:
    """Replaces every projection of the layers by random integers; returns the weights that they stand for."""
    tensors, meant = load_file(path / "model.safetensors"), {}
    for i, name in enumerate([name for name in tensors if "_proj.weight" in name]):
        outputs, inputs = tensors.pop(name).shape
        parts, meant[name] = pack(Quantised(outputs, inputs, method.get("bits", 4), 16, i))
        tensors |= {name.replace("weight", part): tensor for part, tensor in parts.items()}
    save_file(tensors, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": method}))
    return meant


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.parametrize(
    ("method", "pack"),
    [(GPTQ, gptq), (AWQ, awq), (COMPRESSED, lambda made: compressed(made, symmetric=False))],
)
def test_a_quantised_model_computes_with_the_weights_it_stands_for(
    family: str, method: dict[str, Any], pack: Callable[[Quantised], Packed], tmp_path: Path
) -> None:
    """Each projection, each expert's too; what was not quantised is read as it is."""
    model = tiny_model(family)
    model.save_pretrained(tmp_path)
    meant = quantise(tmp_path, method, pack)
    decoder = weights.load(tmp_path, torch.float32).decoder
    ours = decoder.forward(TOKENS_T, DenseCache(decoder), torch.arange(30))
    with torch.no_grad():
        for name, weight in meant.items():
            put(model, name, weight)
    assert (ours - reference_logits(model, TOKENS_T)).abs().max() < 1e-4


def put(model: Any, name: str, weight: Tensor) -> None:
    """transformers fuses experts."""
    state = model.state_dict()
    if name in state:
        state[name].copy_(weight)
        return
    prefix, _, rest = name.partition(".experts.")
    expert, part, _ = rest.split(".")
    if part == "down_proj":
        state[f"{prefix}.experts.down_proj"][int(expert)].copy_(weight)
    else:
        state[f"{prefix}.experts.gate_up_proj"][int(expert)].chunk(2, 0)[part == "up_proj"].copy_(weight)


@pytest.mark.parametrize(
    ("method", "fact"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "with 'bitsandbytes'; read are gptq, awq"),
        ({"quant_method": "torchao"}, "with 'torchao'"),
        ({"load_in_8bit": True}, "with None"),
        (GPTQ | {"bits": 3}, "with gptq, whose bits is 3; read is 4, 8"),
        (AWQ | {"version": "gemv"}, "with awq, whose version is 'gemv'; read is gemm"),
        (COMPRESSED | {"format": "nvfp4-pack-quantized"}, "whose format is 'nvfp4-pack-quantized'; read is pack"),
        (COMPRESSED | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "stored as 'sparse-24-bitmask'"),
    ],
)
def test_a_method_that_is_not_read_is_refused_by_name(method: dict[str, Any], fact: str, tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": method}))
    with pytest.raises(UnsupportedModel, match=fact) as error:
        weights.load(tmp_path)
    assert "the unquantised checkpoint, or a GGUF file" in error.value.remedy


@pytest.mark.parametrize("part", ["qzeros", "scales", "g_idx", "qweight"])
def test_parts_that_do_not_fit_are_broken(part: str, tmp_path: Path) -> None:
    """Missing, or of another length."""
    model = tiny_model("llama")
    model.save_pretrained(tmp_path)
    quantise(tmp_path, GPTQ, gptq)
    tensors = load_file(tmp_path / "model.safetensors")
    name = f"model.layers.1.mlp.up_proj.{part}"
    save_file(tensors | {name: tensors[name][..., :3].contiguous()}, tmp_path / "model.safetensors")
    with pytest.raises(BrokenWeights, match=r"layers\.1\.mlp\.up_proj"):
        weights.load(tmp_path)
    if part != "g_idx":
        save_file({key: value for key, value in tensors.items() if key != name}, tmp_path / "model.safetensors")
        with pytest.raises(BrokenWeights, match=r"layers\.1\.mlp\.up_proj"):
            weights.load(tmp_path)
