"""Tokens are the model's own, streams say exactly what decoding says, and templates cannot leave their sandbox."""

import json
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Core
from transformers import AutoTokenizer, GemmaTokenizer, PreTrainedTokenizerFast

from batchwright.errors import BrokenWeights, RequestError, UnsupportedModel
from batchwright.serve.loading.gguf_file import GgufFile
from batchwright.serve.loading.gguf_tokenizer import _LLAMA3_SPLIT, from_gguf
from batchwright.serve.loading.locate import default_path
from batchwright.serve.loading.tokenizer import _BYTE_OF_CHARACTER, Tokenizer, from_directory

ODD_TEXTS = [
    "",
    " ",
    "\n\n\t  \r\n",
    "naïve café, coöperate; ÅÄÖ",
    "日本語とрусский and עברית عربي",
    "👩‍👩‍👧‍👦 flags 🇸🇪🇯🇵 skin 👋🏽",
    "zero\u200bwidth\u00a0nbsp \ufeffbom \u202ertl",
    "combining e\u0301 \u0928\u093f",
    "math \U0001d4b3 ∑ᵢ ≤ ∞, nul \x00 and \x7f",
    "I'm you're WE'LL they'd",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "trailing spaces   ",
]


@pytest.fixture(scope="module")
def metadata() -> dict:
    return GgufFile(default_path()).metadata


@pytest.fixture(scope="module")
def tokenizer(metadata: dict) -> Tokenizer:
    return from_gguf(metadata)


@pytest.fixture(scope="module")
def reference() -> PreTrainedTokenizerFast:
    """transformers' conversion of the same file, with the digit rule of SmolLM's tokenizer.json, which it omits."""
    path = default_path()
    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    digits = pre_tokenizers.Digits(individual_digits=True)
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, theirs.backend_tokenizer.pre_tokenizer])
    return theirs


def test_tokens_equal_transformers(tokenizer: Tokenizer, reference: PreTrainedTokenizerFast) -> None:
    """On all of Python's help topics and on odd unicode, ids are those of transformers, and decode to the same text."""
    for text in [*topics.values(), *ODD_TEXTS]:
        ids = tokenizer.encode(text)
        assert ids == reference(text)["input_ids"]
        assert tokenizer.decode(ids) == text


def test_digits_stand_alone(tokenizer: Tokenizer) -> None:
    """SmolLM splits numbers into digits and keeps runs of spaces before them whole."""
    assert [tokenizer.decode([i]) for i in tokenizer.encode("a  2024")] == ["a", "  ", "2", "0", "2", "4"]


@settings(max_examples=300, deadline=None)
@given(text=st.text())
def test_any_text_round_trips(text: str, tokenizer: Tokenizer, reference: PreTrainedTokenizerFast) -> None:
    """Ids are transformers' for any text, and lose nothing but the 21 bytes that the vocabulary itself lacks."""
    ids = tokenizer.encode(text)
    assert ids == reference(text)["input_ids"]
    missing = {byte for character, byte in _BYTE_OF_CHARACTER.items() if tokenizer.token_id(character) is None}
    assert len(missing) == 21
    assert tokenizer.decode(ids) == text or missing & set(text.encode())


def test_special_tokens_in_text_are_single_ids(tokenizer: Tokenizer) -> None:
    """What a template writes is recognised, and dropped on request."""
    ids = tokenizer.encode("<|im_start|>user\nhi<|im_end|>")
    assert (ids[0], ids[-1]) == (1, 2)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "user\nhi"


def sentencepiece() -> Tokenizer:
    """A Llama-2-like tokenizer: pieces marked with U+2581, and a token for each byte."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁a", "b", "▁▁", "é", "\ufffd", "▁the", "s", "ab"]
    core = Core(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], byte_fallback=True))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    stages = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    core.decoder = decoders.Sequence(stages)
    core.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(core)


def stream(tokenizer: Tokenizer, ids: list[int], *, skip: bool) -> list[str]:
    decoder = tokenizer.stream(skip_special_tokens=skip)
    return [*(decoder.push(i) for i in ids), decoder.finish()]


@settings(max_examples=400, deadline=None)
@given(ids=st.lists(st.integers(0, 49_151) | st.integers(0, 300), max_size=40), skip=st.booleans())
def test_a_byte_level_stream_joins_to_the_decoded_text(ids: list[int], skip: bool, tokenizer: Tokenizer) -> None:
    """For any tokens, torn characters and special tokens among them, the pieces are exactly the whole."""
    assert "".join(stream(tokenizer, ids, skip=skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


@settings(max_examples=400, deadline=None)
@given(ids=st.lists(st.integers(0, 267) | st.integers(255, 267), max_size=40), skip=st.booleans())
def test_a_sentencepiece_stream_joins_to_the_decoded_text(ids: list[int], skip: bool) -> None:
    """The same for pieces with a leading space that is stripped, and bytes that may not be text."""
    tokenizer = sentencepiece()
    assert "".join(stream(tokenizer, ids, skip=skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


def test_a_stream_never_shows_half_a_character(tokenizer: Tokenizer) -> None:
    """An emoji of several tokens appears whole, with its last token; the text before it appears at once."""
    ids = tokenizer.encode("ok 🇸🇪!")
    pieces = stream(tokenizer, ids, skip=False)
    assert len(ids) > 6 and pieces[0] == "ok" and "\ufffd" not in "".join(pieces)
    assert "".join(pieces) == "ok 🇸🇪!"


def test_a_cut_character_ends_as_a_replacement(tokenizer: Tokenizer) -> None:
    """When generation stops inside a character, `finish` says so rather than dropping bytes."""
    ids = tokenizer.encode("🦔")[:-1]
    *pieces, last = stream(tokenizer, ids, skip=False)
    assert not "".join(pieces) and last == tokenizer.decode(ids) == "\ufffd"


def test_streaming_costs_the_same_for_every_token(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte-level stream never decodes again; any other decodes the last settled token and the new ones."""
    decoded = []

    class Counting:
        def __init__(self, core: Core) -> None:
            self.core, self.id_to_token = core, core.id_to_token

        def decode(self, ids: list[int], **options: object) -> str:
            decoded.append(len(ids))
            return self.core.decode(ids, **options)

    for each in (tokenizer, sentencepiece()):
        decoder = each.stream()
        decoder._core = Counting(each.core)
        for _ in range(500):
            decoder.push(260)
    assert len(decoded) == 2 * 500 and max(decoded) == 2


CHATS = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b\n"}, {"role": "user", "content": " ü "}],
]
TRICKY = """{%- if tools %}{{ tools | tojson(indent=2) }}{% endif %}
{{ bos_token }}
    {% for message in messages %}
        {%- if message.role == 'stop' %}{% break %}{% endif %}
        [{{ message['role'] | upper }}] {{ message.content | trim }}{{ {"k": "<é>"} | tojson }}
    {% endfor %}
{% if add_generation_prompt %}{{ eos_token }}{% endif %}"""
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize("messages", CHATS)
@pytest.mark.parametrize("generate", [True, False])
@pytest.mark.parametrize("template", [None, TRICKY])
def test_templates_render_as_in_transformers(
    messages: list, generate: bool, template: str | None, tokenizer: Tokenizer, reference: PreTrainedTokenizerFast
) -> None:
    """The model's own template, and one that uses whitespace control, filters, tools and loop controls."""
    ours = Tokenizer(tokenizer.core, tokenizer.special, template or tokenizer.chat_template)
    options = {"tools": TOOLS, "add_generation_prompt": generate}
    theirs = reference.apply_chat_template(messages, chat_template=template, tokenize=False, **options)
    assert ours.apply_chat_template(messages, **options) == theirs


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__ }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ messages[0].update(role='x') }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{% for i in range(200000) %}{% endfor %}",
        "{{ 'x' * 10**9 }}",
        "{{ 'x' * 999999 }}",
        "{{ ('x' * 100000) * 100000 }}",
        "{{ 9 ** 99999 }}",
        "{{ messages.__class__ is defined }}",
    ],
)
def test_a_template_that_reaches_out_is_refused(template: str) -> None:
    """Attributes of Python, changes of the messages, and huge loops or strings end in a three-part error."""
    tokenizer = Tokenizer(sentencepiece().core, {}, template)
    with pytest.raises(UnsupportedModel) as error:
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    assert "sandbox refuses" in error.value.fact and error.value.remedy


@pytest.mark.parametrize(
    ("template", "kind", "fact"),
    [
        ("{{ raise_exception('Roles must alternate') }}", RequestError, "Roles must alternate"),
        ("{{ messages[3].content.x }}", RequestError, "rejects these 1 messages"),
        ("{{ messages[0] + 1 }}", RequestError, "rejects these 1 messages"),
        ("{% if %}", UnsupportedModel, "Expected an expression"),
        (None, UnsupportedModel, "the model has none"),
    ],
)
def test_what_a_template_rejects_is_told(template: str | None, kind: type, fact: str) -> None:
    """A template's own complaint reaches the client; a broken or missing template is the model's fault."""
    with pytest.raises(kind, match=fact):
        Tokenizer(sentencepiece().core, {}, template).apply_chat_template([{"role": "user", "content": "hi"}])


def test_templates_know_the_date() -> None:
    """Llama 3's template writes today's date."""
    year = Tokenizer(sentencepiece().core, {}, "{{ strftime_now('%Y') }}").apply_chat_template([])
    assert year.isdigit() and len(year) == 4


def save(path: Path, core: Core, **config: object) -> Path:
    core.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("config", [{}, {"add_bos_token": True}, {"add_bos_token": False}, {"add_eos_token": True}])
@pytest.mark.parametrize("frame", ["$A", "<s> $A", "<s> $A </s>", None])
def test_bos_and_eos_are_added_as_transformers_adds_them(config: dict, frame: str | None, tmp_path: Path) -> None:
    """tokenizer.json says what to add, whatever tokenizer_config.json says."""
    core = sentencepiece().core
    if frame:
        core.post_processor = processors.TemplateProcessing(single=frame, special_tokens=[("<s>", 1), ("</s>", 2)])
    path = save(tmp_path, core, bos_token="<s>", eos_token={"content": "</s>", "__type": "AddedToken"}, **config)
    ours, theirs = from_directory(path), PreTrainedTokenizerFast.from_pretrained(path)
    assert ours.encode("ab s") == theirs.encode("ab s")
    assert ours.encode("ab s", add_special_tokens=False) == theirs.encode("ab s", add_special_tokens=False)
    assert ours.special["eos_token"] == "</s>"


def test_a_template_file_wins_over_the_config(tmp_path: Path) -> None:
    """Of chat_template.jinja, a named list and a string, transformers' order of precedence holds."""
    core, named = sentencepiece().core, [{"name": "tool", "template": "T"}, {"name": "default", "template": "D"}]
    assert from_directory(save(tmp_path, core, chat_template="S")).chat_template == "S"
    assert from_directory(save(tmp_path, core, chat_template=named)).chat_template == "D"
    (tmp_path / "chat_template.jinja").write_text("J")
    assert from_directory(tmp_path).chat_template == "J"


def test_a_broken_tokenizer_file_is_named(tmp_path: Path) -> None:
    """A cut tokenizer.json is an error with its name, not a model without a tokenizer."""
    assert from_directory(tmp_path) is None
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "mod')
    with pytest.raises(BrokenWeights, match=r"tokenizer\.json"):
        from_directory(tmp_path)


def test_llama_3_rules_are_those_of_transformers(metadata: dict) -> None:
    """Llama-3 GGUF files split by Llama 3's pattern and add BOS."""
    ours = from_gguf(metadata | {"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.add_bos_token": True})
    assert ours.encode("x")[0] == metadata["tokenizer.ggml.bos_token_id"]
    assert ours.decode(ours.encode("It's 12345 o'clock\n\n", add_special_tokens=False)) == "It's 12345 o'clock\n\n"


@pytest.mark.parametrize("changes", [{"model": "t5"}, {"pre": "deepseek-coder"}])
def test_unknown_tokenizers_are_refused(changes: dict, metadata: dict) -> None:
    """Splitting by the wrong rules would give wrong ids silently, so rules we do not know are an error."""
    with pytest.raises(UnsupportedModel, match="supported are 'llama', and 'gpt2' with smollm"):
        from_gguf(metadata | {f"tokenizer.ggml.{key}": value for key, value in changes.items()})


@pytest.mark.parametrize(
    ("changes", "fact"),
    [
        ({"ggml.merges": ["no such"]}, "no"),
        ({"ggml.token_type": 3}, "token_type is not a list"),
        ({"ggml.token_type": [1]}, "token_type is not a list"),
        ({"chat_template": 5}, "template is a int"),
        ({"chat_template": ["x"]}, "template is a list"),
    ],
)
def test_a_tokenizer_that_contradicts_itself_is_broken(changes: dict, fact: str, metadata: dict) -> None:
    """Merges of unknown tokens, types that are no list, a template that is no text: no bare Exception."""
    with pytest.raises(BrokenWeights, match=fact):
        from_gguf(metadata | {f"tokenizer.{key}": value for key, value in changes.items()})


def test_split_rules_that_are_a_list_are_unknown(metadata: dict) -> None:
    """What cannot be looked up in a table is not in it."""
    with pytest.raises(UnsupportedModel, match="supported are 'llama', and 'gpt2' with smollm"):
        from_gguf(metadata | {"tokenizer.ggml.pre": ["smollm"]})


@pytest.mark.parametrize("template", [["x"], 3, {"default": "x"}])
def test_a_template_that_is_no_text_is_named(template: object, tmp_path: Path) -> None:
    """Neither text nor a list of named ones."""
    with pytest.raises(BrokenWeights, match=r"tokenizer_config\.json.* neither text nor"):
        from_directory(save(tmp_path, sentencepiece().core, chat_template=template))


QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TRAINING = list(topics.values())[:20]


def by_bytes(split: str, special: list[str], **model: object) -> Core:
    """A byte-level tokenizer, trained on some of Python's help."""
    core = Core(models.BPE(**model))
    words, letters = pre_tokenizers.Split(Regex(split), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)
    core.pre_tokenizer = pre_tokenizers.Sequence([words, letters])
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        TRAINING, trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    )
    core.add_special_tokens(special)
    return core


def save_qwen(path: Path) -> None:
    """No BOS, texts normalised, and tokens of thought that are not special."""
    core = by_bytes(QWEN_SPLIT, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    core.normalizer = normalizers.NFC()
    core.add_tokens([AddedToken(token, normalized=False) for token in ("<think>", "</think>")])
    core.post_processor = processors.ByteLevel(trim_offsets=False)
    special = {"bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "unk_token": None}
    names = ("content", "lstrip", "rstrip", "single_word", "normalized", "special")
    added = {i: {name: getattr(token, name) for name in names} for i, token in core.get_added_tokens_decoder().items()}
    save(path, core, tokenizer_class="Qwen2Tokenizer", add_bos_token=False, added_tokens_decoder=added, **special)


def save_smollm3(path: Path) -> None:
    """Llama 3's rules without its BOS; lengths of its training are still in the file, beside an older map of tokens."""
    core = by_bytes(_LLAMA3_SPLIT, ["<|begin_of_text|>", "<|end_of_text|>", "<|im_start|>"], ignore_merges=True)
    core.add_tokens(["<|im_end|>"])
    core.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
    core.enable_truncation(7)
    core.enable_padding(length=20, pad_id=core.token_to_id("<|im_end|>"), pad_token="<|im_end|>")
    special = {"eos_token": "<|end_of_text|>", "pad_token": "<|im_end|>"}
    save(path, core, tokenizer_class="PreTrainedTokenizerFast", **special)
    (path / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<|im_end|>"}}))


def save_gemma(path: Path) -> None:
    """Pieces with bytes to fall back to; BOS before every text, as its own class writes it into the file."""
    pieces = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *(f"<0x{byte:02X}>" for byte in range(256))]
    core = Core(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    core.normalizer, core.pre_tokenizer = (
        normalizers.Replace(" ", "▁"),
        pre_tokenizers.Split(" ", "merged_with_previous"),
    )
    core.train_from_iterator(TRAINING, trainers.BpeTrainer(vocab_size=600, special_tokens=pieces, show_progress=False))
    trained = json.loads(core.to_str())["model"]
    turns = ["<start_of_turn>", "<end_of_turn>"]
    merges = [tuple(merge) for merge in trained["merges"]]
    GemmaTokenizer(trained["vocab"], merges, add_bos_token=True, extra_special_tokens=turns).save_pretrained(path)


@pytest.mark.parametrize("write", [save_qwen, save_smollm3, save_gemma])
def test_families_tokenizers_are_those_of_transformers(write: Callable[[Path], None], tmp_path: Path) -> None:
    """The class that transformers makes for each, on long texts, odd ones, and what templates write."""
    write(tmp_path)
    ours, theirs = from_directory(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert ours.special == {name: token for name, token in theirs.special_tokens_map.items() if isinstance(token, str)}
    written = ["<|im_start|>user\nhi<|im_end|>\n<think>x</think>", "<bos><start_of_turn>user\nhi<end_of_turn>"]
    for text in [*topics.values(), *ODD_TEXTS, *written]:
        for add in (True, False):
            ids = ours.encode(text, add_special_tokens=add)
            assert ids == theirs(text, add_special_tokens=add)["input_ids"]
            for skip in (True, False):
                assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert len(ours.encode("a b " * 50)) > 20
    if write is save_gemma:
        assert ours.encode("x")[0] == ours.token_id("<bos>")


def test_a_token_is_special_by_its_name(tmp_path: Path) -> None:
    """What the config calls the end of a text is hidden with the special tokens, whatever tokenizer.json calls it."""
    core = by_bytes(QWEN_SPLIT, [])
    core.add_tokens(["<end>"])
    save(tmp_path, core, eos_token="<end>", pad_token="<nowhere>")
    ours, theirs = from_directory(tmp_path), PreTrainedTokenizerFast.from_pretrained(tmp_path)
    ids = ours.encode("a<end>b<nowhere>")
    assert ids == theirs("a<end>b<nowhere>")["input_ids"]
    assert ours.decode(ids, skip_special_tokens=True) == "ab"


REASONING = """{%- set ns = namespace(last=messages | length - 1, open=true) %}
{%- for message in messages[::-1] %}
    {%- if ns.open and message.role == "user" and message.content is string %}
        {%- set ns.open = false %}{%- set ns.last = messages | length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- if enable_thinking is not defined %}{% set enable_thinking = true %}{% endif %}
{%- for message in messages %}
    {%- if message.role == "assistant" %}
        {%- set parts = message.content.split("</think>") %}
        {%- generation %}{{ parts[-1].lstrip("\n") }}{% set leaked = 1 %}{% endgeneration -%}
        {{- "!" if leaked is defined and loop.index0 > ns.last }}
    {%- elif "/no_think" in system_message %}{{ "never" }}
    {%- else %}<{{ message.role }}>{{ message["content"] | trim }}{{ eos_token }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt and enable_thinking %}{{ "<think>" }}{% endif %}"""


@pytest.mark.parametrize("messages", CHATS)
def test_templates_of_models_that_think_render_as_in_transformers(
    messages: list, tokenizer: Tokenizer, reference: PreTrainedTokenizerFast
) -> None:
    """They look back, cut thoughts out, ask for what is not defined, and mark what was generated."""
    ours = Tokenizer(tokenizer.core, tokenizer.special, REASONING).apply_chat_template(messages)
    options = {"chat_template": REASONING, "tokenize": False, "add_generation_prompt": True}
    assert ours == reference.apply_chat_template(messages, **options)


RECURSIVE = "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}"
NESTED = "{% for i in [1] %}" * 30 + "{% endfor %}" * 30


@pytest.mark.parametrize(
    ("template", "kind", "fact"),
    [
        (RECURSIVE, UnsupportedModel, "recursion"),
        ("{{ '%1000000000000000d' % 1 }}", UnsupportedModel, "refuses it: MemoryError"),
        ("{{ 1 / 0 }}", RequestError, "division by zero"),
        ("{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}", UnsupportedModel, "recursion"),
        (NESTED, UnsupportedModel, "nested blocks"),
        ("{% include 'x' %}", RequestError, "loader"),
        ("{% set loop.x = 1 %}", RequestError, "namespace"),
    ],
)
def test_whatever_a_template_raises_is_a_three_part_error(template: str, kind: type, fact: str) -> None:
    """A template is foreign code, and Jinja turns it into Python: neither's errors reach the caller raw."""
    with pytest.raises(kind, match=fact) as error:
        Tokenizer(sentencepiece().core, {}, template).apply_chat_template([{"role": "user", "content": "hi"}])
    assert error.value.asked and error.value.fact and error.value.remedy


@pytest.mark.parametrize("messages", [None, 3, "hi", {"role": "user", "content": "hi"}])
def test_messages_that_are_no_list_are_told(messages: object, tokenizer: Tokenizer) -> None:
    """chat(None) is a request's mistake, and the error is told, not raised from within the telling."""
    with pytest.raises(RequestError, match="not a list"):
        tokenizer.apply_chat_template(messages)
