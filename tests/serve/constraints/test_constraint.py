"""Every form that an output can be given holds for what is written, with a real vocabulary; wrong ones are refused.

Expressions are judged by Python's re, the grammar by a parser of its own, tokens' bytes by the tokenizers' decoding.
"""

import json
import random
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as Core

from batchwright.errors import RequestError, UnsupportedModel
from batchwright.serve.constraints.compiler import Compiler
from batchwright.serve.constraints.constraint import MAX_CHARACTERS, Constraint
from batchwright.serve.constraints.guidance import Vocabulary
from batchwright.serve.constraints.masks import Masks
from batchwright.serve.constraints.vocabulary import vocabulary_of
from batchwright.serve.loading.tokenizer import Tokenizer
from tests.serve.constrained import END, NUM_VOCAB, RandomModel, allowed

ODD_TEXTS = [
    "yes",
    "yes, but",
    "no",
    'say "hi"',
    "a\\b",
    "x/y",
    "line\nbreak",
    "日本語",
    "👩‍👩‍👧‍👦",
    " ",
    "a|b",
    "(?i)",
    "{}",
    "<|im_end|>",
]


def written(constraints: list[Constraint], compiler: Compiler, tokenizer: Tokenizer, seed: int) -> list[str]:
    """One random text of each."""
    outputs = RandomModel(tokenizer, NUM_VOCAB, END, seed).write([compiler.compile(c) for c in constraints])
    assert all(output[-1] == END for output in outputs)
    return [tokenizer.decode(output[:-1]) for output in outputs]


ATOMS = [
    "a",
    "b",
    "Z",
    "7",
    " ",
    "é",
    "日",
    r"\.",
    r"\\",
    "/",
    '"',
    "-",
    ".",
    "[a-f]",
    "[^x-z]",
    r"\d",
    r"\w",
    "[0-9_]",
    r"[\w.-]",
]


def expression(rng: random.Random, depth: int) -> str:
    """A random regular expression in the syntax that Python's and Rust's share."""
    if depth == 0:
        return rng.choice(ATOMS)
    inner = [expression(rng, depth - 1) for _ in range(rng.randint(1, 3))]
    kind = rng.randrange(4)
    if kind == 0:
        return f"(?:{'|'.join(inner)})"
    if kind == 1:
        return f"({''.join(inner)}){rng.choice(['*', '+', '?', '{2}', '{1,3}', '{2,}', '+?'])}"
    return "".join(inner)


def test_expressions_match_what_is_written(compiler: Compiler, tokenizer: Tokenizer) -> None:
    """Those that end: a model that knows nothing does not come out of some by itself."""
    rng = random.Random(0)
    patterns = [expression(rng, rng.randint(1, 3)) for _ in range(200)]
    matchers = [compiler.compile(Constraint.regex(pattern)) for pattern in patterns]
    outputs = RandomModel(tokenizer, NUM_VOCAB, END, 0, 'abfZ7 é日./\\"-_').write(matchers, most=300)
    ended = [(pattern, output) for pattern, output in zip(patterns, outputs, strict=True) if output[-1] == END]
    assert len(ended) >= 195
    assert all(re.fullmatch(pattern, tokenizer.decode(output[:-1])) for pattern, output in ended)


ARITHMETIC = r"""
start: sum
sum: product (("+" | "-") product)*
product: atom (("*" | "/") atom)*
atom: NUMBER | NAME "(" sum ("," sum)* ")" | "(" sum ")"
NUMBER: /[0-9]+(\.[0-9]+)?/
NAME: "min" | "max"
%ignore / /
"""
ARITHMETIC_GBNF = r"""
root ::= product (("+" | "-") product)*
product ::= atom (("*" | "/") atom)*
atom ::= number | ("min" | "max") "(" root ("," root)* ")" | "(" root ")"
number ::= [0-9]+ ("." [0-9]+)?
"""


def parses(text: str) -> bool:
    """Recursive descent over the same language."""
    tokens = re.findall(r"\d+(?:\.\d+)?|min|max|[-+*/(),]", text)
    if "".join(tokens) != text.replace(" ", ""):
        return False
    tokens.append("end")

    def chain(operators: str, operand: Any) -> None:
        operand()
        while tokens[0] in operators:
            tokens.pop(0)
            operand()

    def expect(token: str) -> None:
        if tokens.pop(0) != token:
            raise ValueError

    def atom() -> None:
        token = tokens.pop(0)
        if token in ("min", "max"):
            expect("(")
            chain(",", total)
            expect(")")
        elif token == "(":
            total()
            expect(")")
        elif not token[0].isdigit():
            raise ValueError

    def total() -> None:
        chain("+-", lambda: chain("*/", atom))

    try:
        total()
    except ValueError:
        return False
    return tokens == ["end"]


@pytest.mark.parametrize("grammar", [ARITHMETIC, ARITHMETIC_GBNF], ids=["Lark", "GBNF"])
def test_a_grammars_texts_parse(grammar: str, compiler: Compiler, tokenizer: Tokenizer) -> None:
    texts = written([Constraint.grammar(grammar)] * 50, compiler, tokenizer, 0)
    assert all(map(parses, texts))
    assert len(set(texts)) > 40
    assert not parses("1+") and not parses("min()") and not parses("(1")


def test_a_schema_within_a_grammar_holds(compiler: Compiler, tokenizer: Tokenizer) -> None:
    """Under the same rules as one that stands alone."""
    grammar = (
        'start: "call(" call ")"  # a comment\ncall: %json {"type": "array", "items": {"const": "<#/>"}, "minItems": 1}'
    )
    for text in written([Constraint.grammar(grammar)] * 5, compiler, tokenizer, 1):
        assert set(json.loads(text.removeprefix("call(").removesuffix(")"))) == {"<#/>"}
    with pytest.raises(RequestError, match="nullable"):
        compiler.compile(Constraint.grammar('start: %json {"type": "string", "nullable": true}'))


def test_a_choice_is_one_of_its_options(compiler: Compiler, tokenizer: Tokenizer) -> None:
    """Whatever characters they are made of, and though one begins another; each can come."""
    texts = written([Constraint.choice(ODD_TEXTS)] * 200, compiler, tokenizer, 0)
    assert set(texts) == set(ODD_TEXTS)


def test_any_object_is_one(compiler: Compiler, tokenizer: Tokenizer) -> None:
    texts = written([Constraint.json_object()] * 50, compiler, tokenizer, 0)
    assert all(isinstance(json.loads(text), dict) for text in texts)


def test_no_model_can_fill_its_reply_with_blanks(compiler: Compiler, tokenizer: Tokenizer) -> None:
    """One that likes whitespace best still gets on; one that likes none, or indents, is not hindered."""
    numbers = {"type": "array", "items": {"type": "integer"}}
    schema = {"type": "object", "properties": {"a": numbers}, "required": ["a"], "additionalProperties": False}
    blank = {v for v in range(17, NUM_VOCAB) if not tokenizer.decode([v]).strip(" \t\n")}
    matcher, masks = compiler.compile(Constraint.json_schema(schema)), Masks(NUM_VOCAB, torch.device("cpu"))
    output: list[int] = []
    rng = random.Random(0)
    while END not in output and len(output) < 200:
        options = set(allowed(masks.begin([(matcher, output)]).wait().bits_RW[0]).tolist())
        output.append(rng.choice(sorted(blank & options or options)))
    blanks = re.findall("[ \t\n]+", tokenizer.decode(output))
    assert max(map(len, blanks)) <= 21 and len(blanks) >= 5
    for text in ('{"a":[1,2]}', '{"a": [1, 2]}', json.dumps({"a": [1, 2]}, indent=4)):
        assert matcher.is_done(tokenizer.encode(text))


def test_special_tokens_are_not_written_within_strings(compiler: Compiler, tokenizer: Tokenizer) -> None:
    """Their names as text are, in other tokens."""
    matcher, masks = compiler.compile(Constraint.json_schema({"type": "string"})), Masks(NUM_VOCAB, torch.device("cpu"))
    special = {i for i, token in tokenizer.core.get_added_tokens_decoder().items() if token.special}
    inside = tokenizer.encode('"a')
    assert not special & set(allowed(masks.begin([(matcher, inside)]).wait().bits_RW[0]).tolist())
    name = "".join("<|im_end|>")
    pieces = [tokenizer.encode(character)[0] for character in f'"{name}"']
    assert matcher.is_done(pieces)


def sentencepiece(*steps: decoders.Decoder) -> Tokenizer:
    """Llama 2's kind, or Gemma's without the last step: pieces marked with U+2581, and a token for each byte."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁a", "b", "▁▁", "é", "\ufffd", "▁the", "s", "ab", "{", "}", '"', "▁{", '":', "1"]
    core = Core(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], byte_fallback=True))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *steps])
    core.add_special_tokens(["<s>", "</s>"])
    core.add_tokens([AddedToken("<tool>", normalized=False)])
    return Tokenizer(core)


def with_metaspace() -> Tokenizer:
    pieces = ["<s>", "</s>", "▁a", "b", "▁", "é", "▁the"]
    core = Core(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[]))
    core.decoder = decoders.Metaspace()
    core.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(core)


VOCABULARIES: dict[str, Vocabulary] = {}
KINDS = {"Llama 2": sentencepiece(decoders.Strip(" ", 1, 0)), "Gemma": sentencepiece(), "Metaspace": with_metaspace()}


@pytest.mark.parametrize("kind", ["SmolLM2", *KINDS])
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_tokens_bytes_are_what_they_decode_to(kind: str, tokenizer: Tokenizer, data: st.DataObject) -> None:
    """Joined, those of any tokens that make text are the decoded text, but for a space that some drop at the start."""
    one = KINDS.get(kind, tokenizer)
    if kind not in VOCABULARIES:
        VOCABULARIES[kind] = vocabulary_of(one, one.core.get_vocab_size() + 7, [1])
    vocabulary = VOCABULARIES[kind]
    tokens = data.draw(st.lists(st.integers(0, one.core.get_vocab_size() - 1) | st.integers(0, 6), max_size=12))
    joined = b"".join(vocabulary.token_bytes[token] for token in tokens)
    text = one.decode(tokens, skip_special_tokens=True)
    if vocabulary.strips_space:
        joined = joined.removeprefix(b" ")
    if "\ufffd" not in text:
        assert text.encode() == joined
    assert vocabulary.token_bytes[one.core.get_vocab_size() :] == [b""] * 7


@pytest.mark.parametrize("kind", ["Llama 2", "Gemma"])
def test_with_sentencepiece_the_text_that_is_shown_has_its_form(kind: str) -> None:
    """Also where decoding drops the first space, and where the form itself begins with one."""
    tokenizer, num_vocab = KINDS[kind], 300
    compiler, model = Compiler(tokenizer, num_vocab, [2]), RandomModel(tokenizer, num_vocab, 2, 0)
    patterns = ["(?:ab|é|日)+", " [ab]", "  ?the", "<tool>|s", '\\{"b":1\\}', "[^<]{3}"]
    outputs = model.write([compiler.compile(Constraint.regex(pattern)) for pattern in patterns for _ in range(20)])
    for number, output in enumerate(outputs):
        assert re.fullmatch(patterns[number // 20], tokenizer.decode(output, skip_special_tokens=True))
    schema = Constraint.json_schema({"type": "object", "additionalProperties": {"const": 1}})
    for output in model.write([compiler.compile(schema) for _ in range(20)]):
        assert set(json.loads(tokenizer.decode(output[:-1])).values()) <= {1}


def test_a_tokenizer_whose_tokens_are_no_bytes_is_refused() -> None:
    core = Core(models.WordPiece({"a": 0, "##b": 1}, unk_token="a"))
    core.decoder = decoders.WordPiece()
    with pytest.raises(UnsupportedModel, match="decodes by WordPiece"):
        Compiler(Tokenizer(core), 2, [])


@pytest.mark.parametrize(
    "make",
    [
        lambda: Constraint.regex("a" * (MAX_CHARACTERS["regex"] + 1)),
        lambda: Constraint.grammar("a" * (MAX_CHARACTERS["grammar"] + 1)),
        lambda: Constraint.json_schema({"enum": ["a" * MAX_CHARACTERS["json_schema"]]}),
        lambda: Constraint.choice(["a" * MAX_CHARACTERS["choice"]]),
        lambda: Constraint.choice([]),
        lambda: Constraint.choice(["a", ""]),
        lambda: Constraint.choice([1]),
        lambda: Constraint.regex(None),
        lambda: Constraint.grammar(""),
        lambda: Constraint.json_schema({"const": {1, 2}}),
        lambda: Constraint.json_schema({"const": float("nan")}),
        lambda: Constraint.regex("\ud800"),
    ],
)
def test_what_is_no_constraint_is_refused_when_it_is_made(make: Any) -> None:
    with pytest.raises(RequestError, match="constraining output by"):
        make()


def test_constraints_are_values() -> None:
    """The order of a schema's properties is part of it: they are written in that order."""
    schemas = [Constraint.json_schema(text) for text in ('{"a": 1, "b": 2}', {"a": 1, "b": 2}, {"b": 2, "a": 1})]
    assert schemas[0] == schemas[1] and hash(schemas[0]) == hash(schemas[1])
    assert schemas[1] != schemas[2]
