"""GGUF files: the embedded model is the file's true model, every block type decodes exactly, damage is refused."""

import struct
from contextlib import suppress
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from batchwright.errors import BatchwrightError, BrokenWeights, ConfigError, UnsupportedModel
from batchwright.serve.decoders.model import supported_shape
from batchwright.serve.decoders.rope import frequencies, interleave
from batchwright.serve.loading import weights
from batchwright.serve.loading.gguf_blocks import BLOCK_KINDS
from batchwright.serve.loading.gguf_config import config_of_gguf
from batchwright.serve.loading.gguf_file import GgufFile
from batchwright.serve.loading.gguf_model import GgufSource
from batchwright.serve.loading.locate import default_path
from batchwright.serve.loading.weights import LoadedModel
from tests.serve.conftest import LLAMA3_ROPE, TINY, DenseCache

KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1")


def assert_same_model(smollm2: LoadedModel, reference: LlamaForCausalLM) -> None:
    """Weights equal bit for bit, logits within 1e-4."""
    file = GgufFile(default_path())
    source = GgufSource(file, config_of_gguf(file))
    for name, theirs in reference.state_dict().items():
        if name != "lm_head.weight":
            rotary = ".q_proj." in name or ".k_proj." in name
            assert torch.equal(source.tensor(name, torch.float32), interleave(theirs, 64) if rotary else theirs), name
    tokens_T = torch.randint(0, 49_152, (300,), generator=torch.Generator().manual_seed(0))
    ours_TV = smollm2.decoder.forward(tokens_T, DenseCache(smollm2.decoder), torch.arange(300))
    with torch.inference_mode():
        assert (ours_TV - reference(tokens_T[None]).logits[0]).abs().max() < 1e-4


def test_the_embedded_model_is_the_files_true_model(smollm2: LoadedModel) -> None:
    """Dequantised by the gguf package and run by transformers, the file gives the same weights and logits."""
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(default_path()).tensors}
    with torch.device("meta"):
        reference = LlamaForCausalLM(LlamaConfig(**smollm2.config))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, reference.config.num_hidden_layers)
    state = {}
    for name in reference.state_dict().keys() - {"lm_head.weight"}:
        tensor = stored[names.get_name(name, try_suffixes=(".weight",))]
        values = torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type))
        if tensor.name.endswith(("attn_q.weight", "attn_k.weight")):  # llama.cpp's converter swapped these two axes
            values = values.view(-1, 32, 2, 576).transpose(1, 2).reshape(values.shape)
        state[name] = values
    reference.to_empty(device="cpu")
    reference.load_state_dict(state | {"lm_head.weight": state["model.embed_tokens.weight"]})
    reference.model.rotary_emb = type(reference.model.rotary_emb)(reference.config)
    assert_same_model(smollm2, reference)


def test_the_embedded_model_is_what_transformers_loads(smollm2: LoadedModel) -> None:
    """The same, with transformers reading the file itself, for which it needs accelerate."""
    pytest.importorskip("accelerate")
    path = default_path()
    reference = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    assert_same_model(smollm2, reference)


def test_the_embedded_model_answers(smollm2: LoadedModel) -> None:
    """Greedy decoding of a chat prompt gives the sentence one expects, and ends itself."""
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = smollm2.tokenizer.apply_chat_template(messages)
    ids, reply = smollm2.tokenizer.encode(prompt, add_special_tokens=False), []
    cache = DenseCache(smollm2.decoder)
    while len(reply) < 20 and not (reply and reply[-1] in smollm2.eos_ids):
        logits_RV = smollm2.decoder.forward(torch.tensor(ids), cache, torch.tensor([len(ids) - 1]))
        ids = [int(logits_RV.argmax())]
        reply += ids
    assert smollm2.tokenizer.decode(reply) == "The capital of France is Paris.<|im_end|>"


def write_tiny(path: Path, kind: str = "F32", drop: tuple[str, ...] = (), **changes: object) -> Path:
    """A random llama-architecture file by the gguf package's own writer; hidden sizes are whole blocks of 32."""
    sizes = TINY | {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    writer = gguf.GGUFWriter(path, "llama")
    entries = {
        "block_count": sizes["num_hidden_layers"],
        "context_length": 512,
        "embedding_length": 64,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
    } | changes
    for key, value in entries.items():
        if key not in drop:
            writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    rng, quantisation = np.random.default_rng(0), gguf.GGMLQuantizationType[kind]

    def add(name: str, *shape: int) -> None:
        values = rng.standard_normal(shape, np.float32) * 0.2
        plain = len(shape) == 1
        kind = gguf.GGMLQuantizationType.F32 if plain else quantisation
        writer.add_tensor(name, values if plain else gguf.quantize(values, kind), raw_dtype=kind)

    add("token_embd.weight", 97, 64)
    add("output.weight", 97, 64)
    add("output_norm.weight", 64)
    for i in range(sizes["num_hidden_layers"]):
        for name, shape in {
            "attn_norm": (64,),
            "ffn_norm": (64,),
            "attn_q": (64, 64),
            "attn_k": (32, 64),
            "attn_v": (32, 64),
            "attn_output": (64, 64),
            "ffn_gate": (96, 64),
            "ffn_up": (96, 64),
            "ffn_down": (64, 96),
        }.items():
            add(f"blk.{i}.{name}.weight", *shape)
    if "rope_freqs" not in drop:
        factors = frequencies({"rope_theta": 500_000.0}, 16) / frequencies({"rope_parameters": LLAMA3_ROPE}, 16)
        writer.add_float32("llama.rope.freq_base", 500_000.0)
        writer.add_tensor("rope_freqs.weight", factors.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_every_block_type_decodes_as_the_gguf_package_does(kind: str, tmp_path: Path) -> None:
    """Each supported quantisation gives the same float32 values, bit for bit, as ggml's reference in Python."""
    path = write_tiny(tmp_path / "tiny.gguf", kind)
    ours = GgufFile(path)
    for tensor in gguf.GGUFReader(path).tensors:
        theirs = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(tuple(reversed(tensor.shape)))
        assert np.array_equal(ours.tensor(tensor.name).numpy(), theirs), tensor.name


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K"])
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_any_bytes_of_a_block_mean_what_they_mean_to_the_gguf_package(kind: str, seed: int) -> None:
    """Also those that no quantiser would write; scales that are no numbers are left out."""
    quantisation = gguf.GGMLQuantizationType[kind]
    block = BLOCK_KINDS[quantisation.value]
    assert (block.values, block.bytes) == gguf.GGML_QUANT_SIZES[quantisation]
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (5, block.bytes), np.uint8)
    for start in {"Q6_K": (208,), "Q8_0": (0,), "Q4_0": (0,)}.get(kind, (0, 2)):
        raw[:, start : start + 2] = rng.normal(size=(5, 1)).astype(np.float16).view(np.uint8)
    ours = block.decode(torch.from_numpy(raw)).numpy()
    assert np.array_equal(ours, gguf.dequantize(raw, quantisation))


def test_metadata_reads_as_the_gguf_package_reads_it() -> None:
    """Scalars, strings and arrays of the embedded file, its vocabulary and merges among them, are equal."""
    path = default_path()
    theirs = {key: field.contents() for key, field in gguf.GGUFReader(path).fields.items()}
    ours = GgufFile(path).metadata
    assert {key: value for key, value in theirs.items() if not key.startswith("GGUF.")} == ours


def test_llama_3_scaling_comes_from_its_frequency_tensor(tmp_path: Path) -> None:
    """A file with rope_freqs.weight rotates by Llama-3 frequencies; one without, by plain ones."""
    scaled = weights.load(write_tiny(tmp_path / "scaled.gguf"), torch.float32).decoder.attention[0]
    assert torch.allclose(scaled.freq_C, frequencies({"rope_parameters": LLAMA3_ROPE}, 16))
    plain = weights.load(write_tiny(tmp_path / "plain.gguf", drop=("rope_freqs",))).decoder.attention[0]
    assert torch.equal(plain.freq_C, frequencies({}, 16))


def test_a_file_without_a_tokenizer_still_loads(tmp_path: Path) -> None:
    """Token ids can be served without text; the model says why there is none."""
    model = weights.load(write_tiny(tmp_path / "tiny.gguf"))
    assert model.tokenizer is None and "of kind None" in model.no_tokenizer
    assert not model.decoder.shape.tied_embeddings


def test_unsupported_quantisation_lists_the_supported(tmp_path: Path) -> None:
    """The error names the tensor, its type and what could be read instead."""
    path = tmp_path / "odd.gguf"
    write_tiny(path)
    content = bytearray(path.read_bytes())
    row = content.index(b"blk.0.ffn_up.weight") + len(b"blk.0.ffn_up.weight") + 4 + 2 * 8
    content[row : row + 4] = struct.pack("<I", 11)
    path.write_bytes(content)
    with pytest.raises(UnsupportedModel, match=r"blk.0.ffn_up.weight has quantisation type Q3_K; supported are F32"):
        weights.load(path)


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    """The architecture is checked before anything else is interpreted."""
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(
        UnsupportedModel,
        match="'mamba'; supported are llama, mistral3, smollm3, qwen2, qwen3, qwen3moe, gemma2, gemma3",
    ):
        weights.load(tmp_path / "other.gguf")


@pytest.mark.parametrize(
    ("changes", "fact"),
    [
        ({"drop": ("block_count",)}, r"says None for llama\.block_count"),
        ({"attention.head_count": 0}, r"says 0 for llama\.attention\.head_count"),
        ({"block_count": 4}, r"tensor model\.layers\.3\.\S+ is missing"),
        ({"feed_forward_length": 128}, r"has shape \[96, 64\] but the config implies \[128, 64\]"),
    ],
)
def test_metadata_that_contradicts_the_tensors_is_refused(changes: dict, fact: str, tmp_path: Path) -> None:
    """A file whose metadata and tensors disagree is broken, and the error says where."""
    with pytest.raises(BrokenWeights, match=fact):
        weights.load(write_tiny(tmp_path / "tiny.gguf", **changes))


@pytest.fixture(scope="module")
def tiny_content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_tiny(tmp_path_factory.mktemp("gguf") / "tiny.gguf", "Q4_1").read_bytes()


@settings(max_examples=60, deadline=None)
@given(kept=st.floats(0, 0.9999))
def test_a_truncated_file_is_always_refused(kept: float, tiny_content: bytes, tmp_path_factory: object) -> None:
    """Cut anywhere, a file raises BrokenWeights before any weight is read."""
    path = tmp_path_factory.mktemp("cut") / "cut.gguf"
    path.write_bytes(tiny_content[: int(kept * len(tiny_content))])
    with pytest.raises(BrokenWeights):
        GgufFile(path)


@settings(max_examples=200, deadline=None)
@given(at=st.integers(0, 3000), value=st.integers(0, 255))
def test_a_corrupted_header_never_crashes(at: int, value: int, tiny_content: bytes, tmp_path_factory: object) -> None:
    """With any byte of the header changed, reading works or raises one of our errors."""
    content = bytearray(tiny_content)
    content[at] = value
    path = tmp_path_factory.mktemp("bad") / "bad.gguf"
    path.write_bytes(content)
    with suppress(BatchwrightError):
        file = GgufFile(path)
        assert supported_shape(config_of_gguf(file)).hidden >= 1


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    """What does not start with GGUF's magic is named as such, not parsed."""
    (tmp_path / "x.gguf").write_bytes(b"GGML" + bytes(100))
    with pytest.raises(UnsupportedModel, match="b'GGML'"):
        weights.load(tmp_path / "x.gguf")


def test_2_to_the_40_claimed_blocks_do_not_hang(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A block count is only a claim until it is seen to be plausible."""
    path = write_tiny(tmp_path / "tiny.gguf")
    read = GgufFile(path)
    read.metadata["llama.block_count"] = 2**40
    monkeypatch.setattr(weights, "GgufFile", lambda path: read)
    with pytest.raises(ConfigError, match="num_hidden_layers is 1,099,511,627,776"):
        weights.load(path)


@pytest.mark.parametrize(
    "changes", [{"rope.dimension_count": 8}, {"attention.key_length": 16, "rope.dimension_count": 4}]
)
def test_heads_rotated_in_part_are_refused(changes: dict, tmp_path: Path) -> None:
    """The decoder rotates whole heads; llama.cpp refuses such a llama file too."""
    with pytest.raises(UnsupportedModel, match=r"rotates \d of the 16 values per head"):
        weights.load(write_tiny(tmp_path / "tiny.gguf", **changes))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("attention.layer_norm_rms_epsilon", value) for value in (0.0, -1.0, float("nan"), "x", [1.0])),
        *(("rope.freq_base", value) for value in (0.0, float("nan"), "x", [1.0])),
    ],
)
def test_metadata_of_the_wrong_kind_is_a_three_part_error(
    key: str, value: object, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A text or a list for a number, or a number that makes every answer NaN, is refused."""
    path = write_tiny(tmp_path / "tiny.gguf", drop=("rope_freqs",))
    read = GgufFile(path)
    read.metadata[f"llama.{key}"] = value
    monkeypatch.setattr(weights, "GgufFile", lambda path: read)
    with pytest.raises(BrokenWeights, match="not a positive number"):
        weights.load(path)
