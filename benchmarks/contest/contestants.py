"""Everyone who takes part, in one table: which worker, in which environment, on which form of the model, and how.

A contestant of ours is a line of keyword arguments: `load` goes to `weights.load`, `engine` to `Engine`.
So load={"backend": "openvino"} or engine={"deterministic": True} is all that a new one needs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .models import Form

BASE = "transformers-static-32"
"""Whom the others are compared with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """`worker`: a script in peers/, run by the Python of `environment` (None: the driver's own).

    `tries`: settings for the worker, of which it keeps the fastest; `note`: what a reader must know to compare.
    """

    worker: str
    environment: str | None
    form: Form
    tries: Sequence[Mapping[str, Any]] = ({},)
    dtypes: Sequence[str] = ("bfloat16", "float32")
    note: str = ""


def ours(
    policy: str = "continuous",
    rows: int | None = None,
    *,
    load: Mapping[str, Any] | None = None,
    engine: Mapping[str, Any] | None = None,
    dtypes: Sequence[str] = ("bfloat16", "float32"),
) -> Contestant:
    """Our engine: a policy of peers/ours.py with so many rows at most, and more arguments for `load` and `Engine`."""
    settings = {"policy": policy, "rows": rows, "load": load or {}, "engine": engine or {}}
    return Contestant(worker="ours.py", environment=None, form="file", tries=(settings,), dtypes=dtypes)


_SLOTS = tuple({"slots": slots} for slots in (8, 16, 32, 64))
_SCHEDULERS = ({}, {"kv_in_dtype": True}, {"max_num_seqs": 32})

CONTESTANTS: dict[str, Contestant] = {
    "ours-continuous": ours(),
    "ours-continuous-32": ours(rows=32),
    "ours-deterministic": ours(engine={"deterministic": True}),
    "ours-int8": ours(load={"quantization": "int8"}, dtypes=("bfloat16",)),
    "ours-without-kernels": ours(load={"backend": "torch"}),
    "ours-openvino": ours(load={"backend": "openvino"}),
    "ours-openvino-int8": ours(load={"backend": "openvino", "quantization": "int8"}, dtypes=("bfloat16",)),
    "ours-static-8": ours("static", rows=8),
    "ours-static-32": ours("static", rows=32),
    "ours-one-by-one": ours("one-by-one"),
    BASE: Contestant(
        worker="transformers_static.py", environment="transformers", form="checkpoint", tries=({"size": 32},)
    ),
    "transformers-continuous": Contestant(
        worker="transformers_continuous.py", environment="transformers", form="checkpoint"
    ),
    "llama-cpp": Contestant(
        worker="llamacpp.py", environment="llama-cpp", form="gguf", tries=_SLOTS, note="KV cache in float16"
    ),
    "llama-cpp-q4_1": Contestant(
        worker="llamacpp.py",
        environment="llama-cpp",
        form="file",
        tries=_SLOTS,
        dtypes=("bfloat16",),
        note="4-bit weights, KV cache in float16",
    ),
    "openvino-genai": Contestant(
        worker="openvino_genai_cb.py",
        environment="openvino-genai",
        form="openvino",
        tries=_SCHEDULERS,
        note="KV cache in 8 bits unless in dtype",
    ),
    "openvino-genai-int8": Contestant(
        worker="openvino_genai_cb.py",
        environment="openvino-genai",
        form="openvino-int8",
        tries=_SCHEDULERS,
        dtypes=("bfloat16",),
        note="8-bit weights, KV cache in 8 bits unless in dtype",
    ),
    "vllm-eager": Contestant(
        worker="vllm_cpu.py", environment="vllm", form="checkpoint", tries=({"enforce_eager": True},)
    ),
    "vllm-compiled": Contestant(worker="vllm_cpu.py", environment="vllm", form="checkpoint"),
}
