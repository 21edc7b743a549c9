"""The embedded model in the form that each peer reads, made once and kept: the same weights for everyone.

Our own reader dequantises the Q4_1 file in float32 and rounds once to the dtype; an ordinary Hugging Face checkpoint
of that is written, and OpenVINO's forms are exported from it. llama.cpp's are the file itself, and what llama.cpp
makes of it in the dtype. A form gets its name when it is whole.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from batchwright.serve.loading.gguf_config import config_of_gguf
from batchwright.serve.loading.gguf_file import GgufFile
from batchwright.serve.loading.gguf_model import GgufSource
from batchwright.serve.loading.locate import default_path
from batchwright.serve.loading.weights import load

from .environments import run_in
from .places import MODELS

Form = Literal["file", "checkpoint", "gguf", "openvino", "openvino-int8"]


def model(form: Form, dtype: str) -> Path:
    """The embedded model in that form. Raises Absent where the tool that makes it cannot run."""
    if form == "file":
        return default_path()
    path = MODELS / f"{form}-{dtype}"
    if not path.exists():
        print(f"making {path.name}", flush=True)
        unfinished = path.with_name(f"unfinished-{path.name}")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        _MAKERS[form](unfinished, dtype)
        unfinished.rename(path)
    return path / "model.gguf" if form == "gguf" else path


def write_checkpoint(folder: Path, dtype: str) -> None:
    """config.json, model.safetensors and the tokenizer's files."""
    file = GgufFile(default_path())
    config = config_of_gguf(file) | {"architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "dtype": dtype}
    source = GgufSource(file, config)
    tensors = {name: source.tensor(name, getattr(torch, dtype)) for name in source.shapes}
    rotated = [name for name in tensors if name.endswith(("q_proj.weight", "k_proj.weight"))]
    tensors |= {name: in_halves(tensors[name], config["head_dim"]) for name in rotated}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", config)
    _write_tokenizer(folder)


def in_halves(rows_NK: Tensor, head_dim: int) -> Tensor:
    """Rows of each head from pair order to Hugging Face's, where value i turns with value i + D/2. A new tensor."""
    pairs = rows_NK.view(-1, head_dim // 2, 2, *rows_NK.shape[1:])
    return pairs.transpose(1, 2).reshape(rows_NK.shape)


def _write_tokenizer(folder: Path) -> None:
    """No contestant encodes text, but some libraries load no model without one."""
    tokenizer = load().tokenizer
    assert tokenizer is not None
    tokenizer.core.save(str(folder / "tokenizer.json"))
    special = {name: tokenizer.special[name] for name in ("bos_token", "eos_token") if name in tokenizer.special}
    _write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **special})


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _write_gguf(folder: Path, dtype: str) -> None:
    run_in("llama-cpp", "make_gguf.py", str(default_path()), str(folder / "model.gguf"), dtype)


def _export_openvino(kind: str) -> Callable[[Path, str], None]:
    def export(folder: Path, dtype: str) -> None:
        run_in("openvino-export", "export_openvino.py", str(model("checkpoint", dtype)), str(folder), kind)

    return export


_MAKERS: dict[Form, Callable[[Path, str], None]] = {
    "checkpoint": write_checkpoint,
    "gguf": _write_gguf,
    "openvino": _export_openvino("plain"),
    "openvino-int8": _export_openvino("int8"),
}
