"""Loads a model of a family that we do not define, through transformers: from safetensors, and never its own code.

What its config shows to be impossible is refused before the weights are read, the rest by `foreign_check`. Weights
that are missing or no numbers are errors, as for our own families: transformers would make up the missing ones.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from batchwright.errors import BrokenWeights, ConfigError, MissingDependency
from batchwright.facts.families import FAMILIES
from batchwright.facts.shape import ModelShape
from batchwright.serve.decoders.backend import Target
from batchwright.serve.decoders.foreign import IMPLEMENTATION, ForeignDecoder, register
from batchwright.serve.decoders.foreign_check import Seen, layers_of, prompts, refused, verify
from batchwright.serve.decoders.ops import TorchOps
from batchwright.serve.loading.checkpoint import SafetensorsSource

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
"""What configs call the number of layers."""

_FAILURES = (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RuntimeError, ImportError, OSError)
"""What transformers raises for models and files that it can't run or read."""


def is_foreign(config: Mapping[str, Any]) -> bool:
    """Whether the model is of a family that we do not define."""
    return isinstance(config.get("model_type"), str) and config["model_type"] not in FAMILIES


def check_family(path: Path, family: str) -> None:
    """Raise what can be told from config.json alone, before there are weights."""
    if find_spec("transformers") is None:
        fact = f"its family is {family!r}; ours are {', '.join(FAMILIES)}; transformers, for others, is missing"
        raise MissingDependency(f"loading {path}", fact, "run: pip install 'batchwright[transformers]'")
    with _told(family):
        _config(path, family)


def load_foreign(path: Path, config: Mapping[str, Any], target: Target) -> ForeignDecoder:
    """The model in the directory `path`, whose config.json holds `config`.

    Raises MissingDependency (no transformers), ConfigError (a backend or quantization that is not for these models),
    UnsupportedModel and BrokenWeights.
    """
    family = str(config.get("model_type"))
    _check_target(family, target)
    check_family(path, family)
    _check_config(path, config, family)
    register()
    with _told(family):
        model = _model(path, family, target)
        alone = _alone(model)
        model.set_attn_implementation(IMPLEMENTATION)
        layers = layers_of(model, family)
        shape = _shape(model.config, layers, family)
        decoder = ForeignDecoder(model, shape, [seen.does for seen in layers], TorchOps())
        verify(decoder, alone, family)
    return decoder


def _check_target(family: str, target: Target) -> None:
    if target.backend in ("native", "openvino"):
        fact = f"models of the family {family!r} are run by transformers, with torch's operators"
        raise ConfigError(f'using backend "{target.backend}"', fact, 'use "auto" or "torch"')
    if target.quantization:
        fact = f"models of the family {family!r} are run by transformers, in 16 or 32 bits"
        raise ConfigError(f"using {target.quantization}", fact, "leave quantization out")


def _check_config(path: Path, config: Mapping[str, Any], family: str) -> None:
    if config.get("is_encoder_decoder"):
        raise refused(family, "it has an encoder")
    if config.get("quantization_config"):
        raise refused(family, "its weights are quantised")
    if (path / "adapter_config.json").exists():
        raise refused(family, "an adapter lies beside its weights, which transformers would join in")
    with ExitStack() as open_files:
        num_tensors = len(SafetensorsSource(path, open_files).shapes)
    claimed = next((config[key] for key in _LAYERS if key in config), None)
    if isinstance(claimed, int) and claimed > num_tensors:  # before anything is made for each layer
        fact = f"its config claims {claimed:,} layers but its files hold {num_tensors:,} tensors in all"
        raise BrokenWeights(f"loading {path}", fact, "use the config that belongs to these weights")


@contextmanager
def _told(family: str) -> Iterator[None]:
    """What goes wrong inside transformers is told as the reason for which it can't run the model."""
    from huggingface_hub.errors import StrictDataclassError

    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (*_FAILURES, StrictDataclassError, SafetensorError) as error:
        raise refused(family, f"transformers fails: {type(error).__name__}: {str(error)[:500]}") from error


_LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}


def _config(path: Path, family: str) -> Any:
    """As transformers reads it. Raises UnsupportedModel where its class cannot have our attention."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    config = AutoConfig.from_pretrained(path, **_LOCAL)
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if kind is None or isinstance(kind, tuple) or not kind.is_backend_compatible():
        raise refused(
            family, "its attention can't be replaced: its class does not use transformers' AttentionInterface"
        )
    return config


def _model(path: Path, family: str, target: Target) -> Any:
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    model, loading = auto.from_pretrained(
        path, config=_config(path, family), dtype=target.dtype, use_safetensors=True, attn_implementation="eager",
        output_loading_info=True, **_LOCAL,
    )  # fmt: skip
    if lacking := sorted(loading["missing_keys"]):
        raise BrokenWeights(f"loading {path}", f"tensor {lacking[0]} is missing", "fetch the weights again")
    if lacking := sorted(loading["mismatched_keys"]):
        raise BrokenWeights(f"loading {path}", f"tensor {lacking[0]} has another shape", "fetch the weights again")
    for name, weight in model.named_parameters():
        if not weight.isfinite().all():
            raise BrokenWeights(f"loading {path}", f"tensor {name} holds infinities or NaNs", "fetch the weights again")
    return model.to(target.device).eval()


@torch.inference_mode()
def _alone(model: Any) -> list[Tensor]:
    """logits_TV of each prompt, by transformers' own attention."""
    tokens = prompts(model.config.vocab_size, model.device)
    return [model(input_ids=tokens_T[None], use_cache=False).logits[0].float() for tokens_T in tokens]


def _shape(config: Any, layers: list[Seen], family: str) -> ModelShape:
    """Sizes as an engine needs them. Parameters and FLOPs that are derived from it are those of a gated MLP."""
    hidden = config.hidden_size
    return ModelShape(
        family=family,
        num_layers=len(layers),
        hidden=hidden,
        num_heads=layers[0].does.num_heads,
        num_kv_heads=layers[0].num_kv_heads,
        head_dim=layers[0].head_dim,
        intermediate=getattr(config, "intermediate_size", None) or 4 * hidden,
        vocab=config.vocab_size,
        context=_context(config),
        windows=tuple(seen.does.window for seen in layers),
    )


def _context(config: Any) -> int:
    """Positions up to which a request's rotations do not depend on how long others of its step are.

    "longrope" takes other frequencies for all beyond the original context, and "dynamic" beyond the present one.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    context: int = config.max_position_embeddings
    for settings in (rope, *(value for value in rope.values() if isinstance(value, Mapping))):
        if settings.get("rope_type") == "longrope":
            context = min(context, settings["original_max_position_embeddings"])
    return context
