"""Which models of other families can be run through transformers with our attention: found out by running them.

A first short run shows what each layer asks of attention: heads, scale, window, cap. Whatever ours would not do (sinks,
biases of positions, layers that don't attend, masks of another kind) is refused by its name. A second run computes two
prompts in chunks, mixed in steps and over pages, and holds every logit against transformers' own attention, one prompt
at a time. That catches what no config says: layers that mix neighbours by other means, or positions that are counted
rather than given.
Costs six forwards over a dozen tokens, at load.

Shapes: T positions, H query heads, K key-value heads, D values per head, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor

from batchwright.errors import UnsupportedModel
from batchwright.facts.families import FAMILIES, FULL, SLIDING
from batchwright.policy.pages import Memory
from batchwright.serve.decoders.attention import LayerAttention, RowSpan, layout_order
from batchwright.serve.decoders.foreign import ForeignDecoder, routed
from batchwright.serve.kv import PagedKV

_WITHOUT_EFFECT = {
    "cache_position", "cu_seq_lens_k", "cu_seq_lens_q", "dropout", "max_length_k", "max_length_q",
    "position_embeddings", "position_ids", "use_cache",
}  # fmt: skip
"""What transformers may pass to attention and changes nothing here."""

_FAR = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""How far off a row's logits are too far, relative to their own spread."""

_CHUNKS = ((5, 1, 3), (1, 5))
"""The prompts of the second run, and the chunks of theirs that share a step."""

_PAGE = 4


class Seen(NamedTuple):
    """What one layer asked of attention."""

    layer: int
    num_kv_heads: int
    head_dim: int
    does: LayerAttention


def refused(family: str, fact: str) -> UnsupportedModel:
    """A model that neither we nor transformers with our attention can run."""
    remedy = f"use a model of a family that needs no transformers: {', '.join(FAMILIES)}"
    return UnsupportedModel(f"running a {family} model through transformers", fact, remedy)


def layers_of(model: Any, family: str) -> list[Seen]:
    """What each layer asks of attention, in order; once each, and keys alike, so that they fit in one kind of page."""
    probe, config = _Probe(family), model.config
    with torch.inference_mode(), routed(probe):
        model(input_ids=prompts(config.vocab_size, model.device)[1][None], use_cache=False)
    layers = [seen.layer for seen in probe.seen]
    if layers != list(range(config.num_hidden_layers)):
        raise refused(
            family, f"of its {config.num_hidden_layers} layers those that attend, in this order, are {layers}"
        )
    if len({(seen.num_kv_heads, seen.head_dim) for seen in probe.seen}) > 1:
        raise refused(family, "its layers have keys of different sizes")
    _check_windows(config, probe.seen, family)
    return probe.seen


class _Probe:
    """Attends to nothing, and writes down what it was asked."""

    def __init__(self, family: str) -> None:
        self._family = family
        self.seen: list[Seen] = []

    def __call__(
        self, module: Any, q_1HTD: Tensor, k_1KTD: Tensor, v_1KTD: Tensor, arguments: Mapping[str, Any]
    ) -> Tensor:
        layer = getattr(module, "layer_idx", -1)
        if k_1KTD.shape != v_1KTD.shape or q_1HTD.shape[2:] != k_1KTD.shape[2:]:
            shapes = [list(part.shape) for part in (q_1HTD, k_1KTD, v_1KTD)]
            raise refused(self._family, f"queries, keys and values of layer {layer} have the shapes {shapes}")
        if False in (arguments.get("is_causal"), getattr(module, "is_causal", True)):
            raise refused(self._family, f"positions of layer {layer} see those after them")
        known = _WITHOUT_EFFECT | {"scaling", "sliding_window", "softcap", "is_causal"}
        if odd := sorted(key for key, value in arguments.items() if key not in known and not _is_off(value)):
            raise refused(self._family, f"its attention takes {', '.join(odd)}, which ours does not have")
        num_heads, head_dim, scale = q_1HTD.shape[1], q_1HTD.shape[3], arguments.get("scaling")
        window, cap = (arguments.get(key) or None for key in ("sliding_window", "softcap"))
        does = LayerAttention(num_heads, head_dim**-0.5 if scale is None else float(scale), window, cap)
        self.seen.append(Seen(layer, k_1KTD.shape[1], head_dim, does))
        return q_1HTD.transpose(1, 2)


def _is_off(value: Any) -> bool:
    return value is None or value is False


def _check_windows(config: Any, seen: Sequence[Seen], family: str) -> None:
    """A short run can't tell a wide window from none, so what the config says must have been asked for."""
    kinds = getattr(config, "layer_types", None) or [FULL] * len(seen)
    if odd := sorted({kind for kind in kinds if kind not in (FULL, SLIDING)}):
        raise refused(family, f"it has layers of the type {odd[0]}")
    if any(kind == SLIDING and one.does.window is None for kind, one in zip(kinds, seen, strict=True)):
        raise refused(family, "it has layers with a window, and does not tell attention how wide that is")
    claims = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    if claims and FULL in kinds and SLIDING not in kinds and not any(one.does.window for one in seen):
        raise refused(family, "its config has a sliding_window, and no layer tells attention of it")
    if getattr(config, "attention_chunk_size", None):
        raise refused(family, "it attends within chunks")


def prompts(vocab: int, device: torch.device) -> list[Tensor]:
    """tokens_T of those of the second run."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(vocab, (sum(sizes),), generator=generator).to(device) for sizes in _CHUNKS]


@torch.inference_mode()
def verify(decoder: ForeignDecoder, alone: Sequence[Tensor], family: str) -> None:
    """Raise UnsupportedModel unless the prompts, in chunks mixed and over pages, get the logits `alone` of each."""
    found = _mixed(decoder)
    for mine_TV, theirs_TV in zip(found, alone, strict=True):
        spread_T = (theirs_TV - theirs_TV.mean(1, keepdim=True)).norm(dim=1)
        worst = float(((mine_TV - theirs_TV).norm(dim=1) / spread_T).max())
        if not worst <= _FAR[decoder.dtype]:
            fact = f"in a step with others its logits are {worst:.0%} off those of transformers' own attention"
            raise refused(family, fact)


def _mixed(decoder: ForeignDecoder) -> list[Tensor]:
    """logits_TV of each prompt."""
    tokens = prompts(decoder.shape.vocab, decoder.device)
    kv = PagedKV(decoder.shape, Memory(8, _PAGE, 16), decoder.dtype, decoder.device)
    tables = ((0, 2, 4), (3, 1))
    found: list[list[Tensor]] = [[] for _ in tokens]
    starts = [0] * len(tokens)
    for sizes in zip_longest(*_CHUNKS, fillvalue=0):
        spans = [RowSpan(*row) for row in zip(starts, sizes, tables, strict=True)]
        order = [i for i in layout_order(spans) if sizes[i]]
        layout = decoder.ops.layout([spans[i] for i in order], kv, decoder.attention)
        tokens_T = torch.cat([tokens[i][spans[i].start : spans[i].context] for i in order])
        rows_R = torch.arange(len(tokens_T), device=decoder.device)
        logits_TV = decoder.forward(tokens_T, layout.attend, rows_R)
        for i, part in zip(order, logits_TV.split([sizes[i] for i in order]), strict=True):
            found[i].append(part)
        starts = [span.context for span in spans]
    return [torch.cat(parts) for parts in found]
