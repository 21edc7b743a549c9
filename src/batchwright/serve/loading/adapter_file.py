"""Reads a LoRA adapter as PEFT stores it: adapter_config.json beside adapter_model.safetensors.

The tensors decide what is adapted, and the config by how much (`adapter_scale`). Every tensor is held against the base
model's shapes and the config's ranks before the first is read. What PEFT would compute otherwise (DoRA, biases,
modules saved whole, a setting that nobody here knows) is refused, and pickles are never read. An adapter is in Hugging
Face's order whatever file its base came from, so B's rows for queries and keys are put into the decoder's order.
"""

import re
import reprlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from batchwright.errors import BrokenWeights, InputError, UnsupportedModel
from batchwright.serve.decoders.adapters import PLACES, Adapter, Factors, LowRank, Place
from batchwright.serve.decoders.model import Decoder, tensor_shapes
from batchwright.serve.decoders.rope import interleave
from batchwright.serve.loading.adapter_scale import Scaling
from batchwright.serve.loading.checkpoint import SafetensorsSource, read_json

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"

_MALFORMED = (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError, OSError)
_TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_MODULE = re.compile(r"model\.layers\.(\d+)\.(?:self_attn|mlp)\.(\w+)")
_PARTS = tuple(part for parts in PLACES.values() for part in parts)

_WITHOUT_EFFECT = {
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config",
    "exclude_modules", "fan_in_fan_out", "inference_mode", "init_lora_weights", "layers_pattern",
    "layers_to_transform", "loftq_config", "lora_alpha", "lora_dropout", "lora_ga_config", "megatron_config",
    "megatron_core", "peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern", "revision",
    "runtime_config", "target_modules", "task_type", "use_rslora", "velora_config",
}  # fmt: skip
"""What a config may set: it is read here, or concerns training alone, or shows in the tensors' names."""

_LEAVES_THE_BASE = (None, True, False, "gaussian", "eva", "orthogonal", "mica")
"""`init_lora_weights` under which PEFT does not change the base model's weights."""


def load_adapter(path: str | Path, decoder: Decoder) -> Adapter:
    """The adapter in the directory `path`, for `decoder`: on its device, in its dtype, never quantised.

    Raises InputError (no such directory), UnsupportedModel, BrokenWeights.
    """
    asked = f"loading adapter {path}"
    try:
        folder = Path(path).expanduser()
        if not folder.is_dir():
            raise InputError(asked, "there is no such directory", f"give one that holds {CONFIG} and {WEIGHTS}")
        _check_files(asked, folder)
        config = read_json(folder / CONFIG)
        _check_kind(asked, config)
        with ExitStack() as open_files:
            source = SafetensorsSource(folder / WEIGHTS, open_files)
            reader = _Reader(asked, source, Scaling(asked, config), decoder)
            return Adapter(folder.resolve().name, reader.layers())
    except _MALFORMED as error:
        # As for models: what matters is checked by name; this boundary is for whatever else foreign files hold.
        fact = f"its files cannot be read as an adapter: {type(error).__name__}: {error}"
        raise BrokenWeights(asked, fact, "check that they are readable and complete, or fetch them again") from error


def _check_files(asked: str, folder: Path) -> None:
    missing = [file for file in (CONFIG, WEIGHTS) if not (folder / file).is_file()]
    if WEIGHTS in missing and (pickles := sorted(file.name for file in folder.glob("adapter_model*.bin"))):
        remedy = "save it as safetensors; pickles are never read, since they can run code"
        raise UnsupportedModel(asked, f"its weights are a pickle ({pickles[0]})", remedy)
    if missing:
        raise BrokenWeights(asked, f"there is no {' and no '.join(missing)} in it", "give the directory PEFT saved to")


def _check_kind(asked: str, config: Mapping[str, Any]) -> None:
    """Plain LoRA, and on the base model's own weights."""
    if (kind := config.get("peft_type")) != "LORA":
        raise UnsupportedModel(
            asked, f"its peft_type is {reprlib.repr(kind)}; supported is LORA", "train it as plain LoRA"
        )
    if (init := config.get("init_lora_weights")) not in _LEAVES_THE_BASE:
        fact = f"init_lora_weights is {reprlib.repr(init)}, for which PEFT changes the base model's weights"
        remedy = "save it converted to plain LoRA (path_initial_model_for_weight_conversion of save_pretrained)"
        raise UnsupportedModel(asked, fact, remedy)
    for key, value in config.items():
        if value and key not in _WITHOUT_EFFECT and (key, value) != ("bias", "none"):
            fact = f"its {CONFIG} sets {key} to {reprlib.repr(value)}, which plain LoRA does not have"
            raise UnsupportedModel(asked, fact, f"train it without {key}")


class _Reader:
    """One adapter's tensors, held against `decoder`."""

    def __init__(self, asked: str, source: SafetensorsSource, scaling: Scaling, decoder: Decoder) -> None:
        self._asked, self._source, self._scaling, self._decoder = asked, source, scaling, decoder
        shapes = tensor_shapes(decoder.shape)
        self._base = {name.removesuffix(".weight"): dims for name, dims in shapes.items() if name.endswith(".weight")}
        self._adapted = {self._module(name) for name in source.shapes}
        if not self._adapted:
            raise BrokenWeights(asked, f"{WEIGHTS} holds no tensors", "fetch it again")
        for module in self._adapted:
            self._check_pair(module)

    def layers(self) -> list[Mapping[Place, LowRank]]:
        names: list[dict[str, str]] = [{} for _ in range(self._decoder.shape.num_layers)]
        for module in self._base:
            if parts := _MODULE.fullmatch(module):
                names[int(parts[1])][parts[2]] = module
        return [dict(self._places(in_layer)) for in_layer in names]

    def _places(self, modules: Mapping[str, str]) -> Iterator[tuple[Place, LowRank]]:
        """Of one layer, whose projections have the names `modules`."""
        for place, parts in PLACES.items():
            names = [modules[part] for part in parts if part in modules]
            if self._adapted.intersection(names):
                widths = [self._base[name][0] for name in names]
                yield place, LowRank(self._decoder.ops, widths, [self._factors(name) for name in names])

    def _factors(self, module: str) -> Factors | None:
        if module not in self._adapted:
            return None
        b_NR = self._tensor(module, "B") * self._scaling.scale(module)
        if module.endswith(("q_proj", "k_proj")):
            b_NR = interleave(b_NR, self._decoder.shape.head_dim)
        return Factors(self._narrowed(module, self._tensor(module, "A")), self._narrowed(module, b_NR))

    def _tensor(self, module: str, half: str) -> Tensor:
        return self._source.tensor(_tensor_name(module, half), torch.float32)

    def _narrowed(self, module: str, tensor: Tensor) -> Tensor:
        narrow = tensor.to(self._decoder.dtype)
        if not narrow.isfinite().all():
            fact = f"what it adds to {module} holds infinities or NaNs in {self._decoder.dtype}"
            raise BrokenWeights(self._asked, fact, "fetch the adapter again")
        return narrow.to(self._decoder.device)

    # ---- what the tensors' names and shapes say

    def _module(self, name: str) -> str:
        """The base model's module that the tensor belongs to."""
        parts = _TENSOR.fullmatch(name)
        if not parts:
            fact = f"tensor {name} is no lora_A or lora_B of a linear layer"
            raise UnsupportedModel(self._asked, fact, f"adapt only {', '.join(_PARTS)}")
        module = parts[1]
        inside = _MODULE.fullmatch(module)
        if inside and module in self._base and inside[2] in _PARTS:
            return module
        if inside and int(inside[1]) >= self._decoder.shape.num_layers:
            fact = f"it adapts {module}, and the model has {self._decoder.shape.num_layers} layers"
            raise BrokenWeights(self._asked, fact, "use the base model that it was made for")
        if module in self._base or ".experts" in module:
            fact = f"it adapts {module}; supported are {', '.join(_PARTS)} of dense layers"
            raise UnsupportedModel(self._asked, fact, "train it without that module")
        raise BrokenWeights(self._asked, f"the model has no {module}", "use the base model that it was made for")

    def _check_pair(self, module: str) -> None:
        num_outputs, num_inputs = self._base[module]
        rank = self._scaling.rank(module)
        for half, dims in (("A", (rank, num_inputs)), ("B", (num_outputs, rank))):
            name = _tensor_name(module, half)
            if name not in self._source.shapes:
                raise BrokenWeights(self._asked, f"tensor {name} is missing", "fetch the adapter again")
            if (found := self._source.shapes[name]) != dims:
                fact = f"tensor {name} has shape {list(found)}, but the model and rank {rank} imply {list(dims)}"
                raise BrokenWeights(self._asked, fact, f"use the base model and the {CONFIG} that belong to it")


def _tensor_name(module: str, half: str) -> str:
    return f"base_model.model.{module}.lora_{half}.weight"
