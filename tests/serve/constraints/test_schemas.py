"""What is written under a schema's masks is valid under that schema; jsonschema, which shares no code, is the judge."""

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from batchwright.serve.constraints.compiler import Compiler
from batchwright.serve.constraints.constraint import Constraint
from batchwright.serve.loading.tokenizer import Tokenizer
from tests.serve.constrained import END, NUM_VOCAB, RandomModel

NAMES = ["id", "name", "größe", 'quo"te', "a b", "", "kind", "tags", "line\nbreak", "back\\slash", "x" * 30]
VALUES: list[Any] = [None, True, 0, -7, 2.5, "", "red", 'say "hi"', "日本", "a\\b\n", [], [1, "x"], {}, {"k": [None]}]
PATTERNS = [
    "^[a-z]+$",
    r"^\d{3}-\d{4}$",
    "^(yes|no)?$",
    "b",
    "^[A-Z]{2}[0-9]{0,3}$",
    r"^[a-z]{1,3}@x\.com$",
    "^é*[^é]$",
]


class Schemas:
    """Random schemas that some value satisfies."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.makers: list[Callable[[int], Any]] = [
            self.number, self.number, self.string, self.string, self.fixed, self.simple,
            self.list_of, self.record, self.record, self.any_of, self.one_of, self.all_of, self.reference,
        ]  # fmt: skip
        self.num_leaves = 6

    def whole(self) -> dict[str, Any]:
        tree = {"type": "object", "properties": {"value": self.part(0), "next": None}, "required": ["value"]}
        tree["properties"]["next"] = {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/tree"}]}
        definitions = {"tree": tree, "leaf": self.part(0), "a/b~c": self.number(0)}
        return {**self.part(3), "$defs": definitions, "title": "a remark"}

    def part(self, depth: int) -> dict[str, Any]:
        return self.rng.choice(self.makers if depth > 0 else self.makers[: self.num_leaves])(depth - 1)

    def simple(self, _: int) -> dict[str, Any]:
        return {"type": self.rng.choice(["null", "boolean", ["null", "integer"], ["string", "boolean"], "integer"])}

    def number(self, _: int) -> dict[str, Any]:
        low = self.rng.choice([-1000, -17, 0, 3, 12.5, 999])
        schema = {"type": self.rng.choice(["integer", "number"])}
        bounds = {"minimum": low, "maximum": low + self.rng.choice([1, 30, 5_000]), "exclusiveMinimum": low - 1.5}
        if self.rng.random() < 0.2:
            return {**schema, "multipleOf": self.rng.choice([1, 2, 0.5, 7, 10]), "minimum": low, "maximum": low + 100}
        return schema | dict(self.rng.sample(sorted(bounds.items()), self.rng.randrange(4)))

    def string(self, _: int) -> dict[str, Any]:
        least = self.rng.randrange(5)
        lengths = {"minLength": least, "maxLength": least + self.rng.choice([0, 1, 20])}
        if self.rng.random() < 0.4:
            return {"type": "string", "pattern": self.rng.choice(PATTERNS)}
        return {"type": "string"} | dict(self.rng.sample(sorted(lengths.items()), self.rng.randrange(3)))

    def fixed(self, _: int) -> dict[str, Any]:
        if self.rng.random() < 0.3:
            return {"const": self.rng.choice(VALUES)}
        return {"enum": self.rng.sample(VALUES, self.rng.randint(1, 4))}

    def list_of(self, depth: int) -> dict[str, Any]:
        least = self.rng.randrange(3)
        schema: dict[str, Any] = {"type": "array", "minItems": least, "maxItems": least + self.rng.randrange(3)}
        if self.rng.random() < 0.3:
            schema["prefixItems"] = [self.part(depth) for _ in range(2)]
        return schema | {"items": self.part(depth) if self.rng.random() < 0.8 else True}

    def record(self, depth: int) -> dict[str, Any]:
        names = self.rng.sample(NAMES, self.rng.randint(0, 4))
        others = self.rng.choice([False, False, True, self.part(depth)])
        schema = {"type": "object", "properties": {name: self.part(depth) for name in names}}
        if self.rng.random() < 0.2:
            schema["patternProperties"] = {"^x-[a-z]$": self.part(depth)}
        if self.rng.random() < 0.9:
            schema["additionalProperties"] = others
        return schema | {"required": self.rng.sample(names, self.rng.randint(0, len(names)))}

    def any_of(self, depth: int) -> dict[str, Any]:
        return {"anyOf": [self.part(depth) for _ in range(self.rng.randint(1, 3))]}

    def one_of(self, depth: int) -> dict[str, Any]:
        if self.rng.random() < 0.5:
            return {
                "oneOf": [{"type": "boolean"}, {"type": "string", "maxLength": 3}, {"type": "array", "maxItems": 1}]
            }
        tagged = [{"kind": {"const": kind}, "of": self.part(depth)} for kind in ("a", "b")]
        return {"oneOf": [{"type": "object", "properties": tag, "required": ["kind"]} for tag in tagged]}

    def all_of(self, depth: int) -> dict[str, Any]:
        halves = [{"type": "object", "properties": {n: self.part(depth)}, "required": [n]} for n in NAMES[:2]]
        return {"allOf": halves, "properties": {"name": True}}

    def reference(self, _: int) -> dict[str, Any]:
        return {"$ref": self.rng.choice(["#/$defs/tree", "#/$defs/leaf", "#/$defs/a~1b~0c"])}


@pytest.mark.parametrize("seed", range(10))
def test_what_a_schema_masks_leave_is_valid(seed: int, compiler: Compiler, tokenizer: Tokenizer) -> None:
    """A thousand generated schemas, a hundred at a time in one batch; jsonschema is the judge."""
    generator = Schemas(seed)
    schemas = [generator.whole() for _ in range(100)]
    matchers = [compiler.compile(Constraint.json_schema(schema)) for schema in schemas]
    for schema, output in zip(schemas, RandomModel(tokenizer, NUM_VOCAB, END, seed).write(matchers), strict=True):
        Draft202012Validator.check_schema(schema)
        assert output[-1] == END
        Draft202012Validator(schema).validate(json.loads(tokenizer.decode(output[:-1])))


@pytest.mark.parametrize("name", ["\\u0061", "li\\u006e\\u0065", "a", "line\\u000abreak", "\\/"])
def test_no_name_has_a_second_spelling(name: str, compiler: Compiler, tokenizer: Tokenizer) -> None:
    """Else a property whose name is free could be read as one that must be an integer."""
    integer = {"type": "integer"}
    schema = {"properties": {"a": integer, "line": integer, "line\nbreak": integer, "/": integer}, "type": "object"}
    text = f'{{"{name}":"x"}}'
    assert not Draft202012Validator(schema).is_valid(json.loads(text))
    assert not compiler.compile(Constraint.json_schema(schema)).is_done(tokenizer.encode(text))


def test_properties_come_in_the_order_of_the_schema(compiler: Compiler, tokenizer: Tokenizer) -> None:
    """Required ones are there; what is not named comes last."""
    names = ["zeta", "alpha", "mid"]
    schema = {"type": "object", "properties": {name: {"type": "null"} for name in names}, "required": ["mid"]}
    for text, is_done in (
        ('{"zeta":null,"alpha":null,"mid":null,"other":1}', True),
        ('{"mid":null}', True),
        ('{"alpha":null,"zeta":null,"mid":null}', False),
        ('{"zeta":null}', False),
    ):
        assert compiler.compile(Constraint.json_schema(schema)).is_done(tokenizer.encode(text)) is is_done
