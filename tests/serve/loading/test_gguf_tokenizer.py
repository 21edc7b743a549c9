"""Tokenizers rebuilt from GGUF metadata are those that the files were made from."""

import json
from itertools import pairwise
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Core

from batchwright.errors import BrokenWeights
from batchwright.serve.loading.gguf_tokenizer import from_gguf
from tests.serve.loading.test_tokenizer import ODD_TEXTS

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
TEXTS = [*ODD_TEXTS, *topics.values()]

# As in the models' tokenizer.json.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.mark.parametrize(
    ("name", "split", "composes"),
    [("llama-bpe", LLAMA3, False), ("smaug-bpe", LLAMA3, False), ("qwen2", QWEN2, True), ("tekken", TEKKEN, False)],
)
def test_byte_level_rules_are_those_of_the_models_files(name: str, split: str, composes: bool) -> None:
    """A tokenizer is trained by the published rules, written down as the converter does, and read back."""
    core = Core(models.BPE())
    core.normalizer = normalizers.NFC() if composes else None
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(split), "isolated"), letters])
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    core.train_from_iterator(TEXTS[:40], trainer)
    core.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    core.add_tokens([AddedToken("<think>", normalized=False)])
    added = core.get_added_tokens_decoder()
    tokens = sorted(core.get_vocab(), key=core.token_to_id)
    types = [(CONTROL if added[i].special else USER_DEFINED) if i in added else NORMAL for i in range(len(tokens))]
    merges = [" ".join(merge) for merge in json.loads(core.to_str())["model"]["merges"]]
    metadata = {"model": "gpt2", "pre": name, "tokens": tokens, "merges": merges, "token_type": types}
    ours = from_gguf({f"tokenizer.ggml.{key}": value for key, value in metadata.items()})
    for text in [*TEXTS, "<|im_start|>user\n<think>Ab1234</think><|im_end|>"]:
        ids = core.encode(text).ids
        assert ours.encode(text, add_special_tokens=False) == ids
        assert ours.decode(ids) == core.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize(
    ("name", "adds"), [("llama-bpe", True), ("tekken", True), ("qwen2", False), ("smaug-bpe", False)]
)
def test_bos_is_added_where_the_rules_or_the_file_say_so(name: str, adds: bool) -> None:
    """A file's own word counts more than what llama.cpp takes for granted."""
    metadata = {"model": "gpt2", "pre": name, "tokens": ["a", "<s>"], "merges": [], "bos_token_id": 1}
    for said in (None, True, False):
        given_ = metadata if said is None else metadata | {"add_bos_token": said}
        ours = from_gguf({f"tokenizer.ggml.{key}": value for key, value in given_.items()})
        assert ours.encode("a") == ([1, 0] if (adds if said is None else said) else [0])


PIECES = ["▁", "a", "b", "é", "▁a", "ab", "▁ab", "ba", "aa", "▁b", "bb", "abab", "▁▁", "é▁", "日"]


def pieces(seed: int, **changes: Any) -> dict[str, Any]:
    """The metadata of a sentencepiece vocabulary with bytes, whose pieces have random scores."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES, "<turn>"]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(PIECES), USER_DEFINED]
    scores = [0.0] * 259 + np.random.default_rng(seed).permutation(len(PIECES)).astype(float).tolist() + [0.0]
    found = {
        "model": "llama", "tokens": tokens, "token_type": types, "scores": scores, "bos_token_id": 1,
        "eos_token_id": 2, "unknown_token_id": 0,
    }  # fmt: skip
    return {f"tokenizer.ggml.{key}": value for key, value in (found | changes).items()}


def by_hand(metadata: dict[str, Any], text: str, *, begins: bool) -> list[int]:
    """As sentencepiece does it: again and again the two neighbours that make the likeliest piece, the first of such."""
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    ids = {token: i for i, token in enumerate(tokens)}
    found = list((("▁" if begins else "") + text).replace(" ", "▁"))
    while True:
        pairs = enumerate(left + right for left, right in pairwise(found))
        joined = [(scores[ids[piece]], -i) for i, piece in pairs if piece in PIECES]
        if not joined:
            break
        i = -max(joined)[1]
        found[i : i + 2] = [found[i] + found[i + 1]]
    return [i for piece in found for i in ([ids[piece]] if piece in ids else [3 + byte for byte in piece.encode()])]


@settings(max_examples=300, deadline=None)
@given(text=st.text(alphabet="ab é日x", min_size=1, max_size=12), seed=st.integers(0, 1000), begins=st.booleans())
def test_pieces_merge_as_sentencepiece_merges_them(text: str, seed: int, begins: bool) -> None:
    """With a space before the text or none; what no piece spells is spelled by its bytes; decoding gives it back."""
    metadata = pieces(seed, add_space_prefix=begins)
    ours = from_gguf(metadata)
    ids = ours.encode(text, add_special_tokens=False)
    assert ids == by_hand(metadata, text, begins=begins)
    assert ours.decode(ids) == text
    assert ours.encode(text) == [1, *ids]


def test_words_that_were_added_to_pieces_are_whole() -> None:
    """Of control and of user-defined tokens each is one id, and only the first are hidden."""
    ours = from_gguf(pieces(0))
    ids = ours.encode("<turn>ab</s>", add_special_tokens=False)
    assert (ids[0], ids[-1]) == (ours.token_id("<turn>"), 2)
    assert ours.decode(ids, skip_special_tokens=True) == "<turn> ab"


def test_gemmas_pieces_are_likelier_the_earlier_they_come() -> None:
    """Its scores are not in the order of its merges; and it spells runs of spaces as spaces."""
    order = ["▁", "a", "b", "ba", "ab", "aba", "  ", "▁▁a"]
    metadata = {
        "general.architecture": "gemma3",
        **{f"tokenizer.ggml.{key}": value for key, value in {
            "model": "llama", "tokens": order, "scores": [float(i) for i in range(8)],
            "token_type": [NORMAL] * 6 + [USER_DEFINED, NORMAL], "add_space_prefix": False, "add_bos_token": False,
        }.items()},
    }  # fmt: skip
    ours = from_gguf(metadata)
    assert ours.encode("bab") == [order.index("ba"), order.index("b")]
    assert ours.encode("  a") == [order.index("▁▁a")]
    assert ours.decode(ours.encode("a  b")) == "a  b"


@pytest.mark.parametrize(
    ("changes", "fact"),
    [
        ({"scores": [1.0]}, "scores is not a list of"),
        ({"scores": 3}, "scores is not a list of"),
        ({"token_type": [1]}, "token_type is not a list of"),
    ],
)
def test_pieces_that_contradict_each_other_are_broken(changes: dict, fact: str) -> None:
    with pytest.raises(BrokenWeights, match=fact):
        from_gguf(pieces(0, **changes))
