"""What is refused of a JSON schema before llguidance sees it: what it would pass over without a word, or not bear.

llguidance refuses most of what it cannot enforce (`not`, `if`, `uniqueItems`, overlapping `oneOf`, remote `$ref`, ...)
and what nothing satisfies. Left to us: keywords of OpenAPI that JSON Schema takes for remarks, counts of properties
that its grammar cannot guarantee, patterns that mean something else in its dialect, settings of its own, nesting, and
schemas that only infinite values satisfy.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from batchwright.errors import RequestError

MAX_NESTING = 120
"""Arrays and objects in each other, in the schema's text; llguidance's reader stops at 128."""

_ASKED = "constraining output by a json schema"
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_SINGLE = ("items", "additionalItems", "additionalProperties")
_SETS_IN_CLASS = re.compile(r"\\.|(\[\^?\]?(?:\\.|[^\]\\])*?(?:&&|--|~~|\[))|\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)


def check_schema(schema: Any) -> None:
    """Raises RequestError for what llguidance would not refuse by itself."""
    if (depth := _nesting(schema)) > MAX_NESTING:
        fact = f"it is nested {depth} deep, and at most {MAX_NESTING} is taken"
        raise RequestError(_ASKED, fact, "give its inner parts names in $defs and point to them by $ref")
    if isinstance(schema, Mapping) and "x-guidance" in schema:
        raise RequestError(_ASKED, "x-guidance would change rules that are set for all", "leave it out")
    for part in _parts(schema):
        _check_part(part)
    if not _has_finite_value(schema, _finite_references(schema)):
        fact = "every value that it allows contains another of its kind, without end"
        raise RequestError(_ASKED, fact, "allow an end, say by anyOf with null, or require fewer properties")


def _check_part(part: Mapping[str, Any]) -> None:
    if part.get("nullable") is True:
        fact = "nullable is OpenAPI's, and has no effect in JSON Schema"
        raise RequestError(_ASKED, fact, 'allow null as a type: {"type": ["string", "null"]}')
    least, required = part.get("minProperties", 0), part.get("required", [])
    if isinstance(least, int | float) and isinstance(required, list) and least > len(set(map(str, required))) + 1:
        fact = f"minProperties={least} cannot be enforced where {len(required)} are required by name"
        raise RequestError(_ASKED, f"{fact}: names that are free could repeat", "require more of them by name")
    patterns = part.get("patternProperties", {})
    named = [*patterns] if isinstance(patterns, Mapping) else []
    for pattern in [part.get("pattern"), *named]:
        if isinstance(pattern, str) and any(match[1] for match in _SETS_IN_CLASS.finditer(pattern)):
            fact = f"the pattern {pattern[:80]!r} has [, &&, -- or ~~ in a class, which means a set of sets to some"
            raise RequestError(_ASKED, fact, r"write \[, \&, \- or \~ in a class")


def _nesting(value: Any) -> int:
    """How deep arrays and objects are in each other; without recursion, since that is what it protects."""
    depth, level = 0, [value]
    while level := [item for item in level if isinstance(item, dict | list)]:
        depth += 1
        level = [inner for item in level for inner in (item.values() if isinstance(item, dict) else item)]
    return depth


def _parts(schema: Any) -> Iterator[Mapping[str, Any]]:
    """The schema and all schemas in it."""
    if not isinstance(schema, Mapping):
        return
    yield schema
    for keyword in _MAPS:
        if isinstance(schema.get(keyword), Mapping):
            for inner in schema[keyword].values():
                yield from _parts(inner)
    for keyword in _LISTS:
        for inner in _listed(schema.get(keyword)):
            yield from _parts(inner)
    for keyword in _SINGLE:
        yield from _parts(schema.get(keyword))


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else []


def _finite_references(schema: Any) -> set[str]:
    """The `$ref`s in it that some finite value satisfies: the least set that follows from itself.

    References to anything but a place in this schema count as such; llguidance has its own word on them.
    """
    references = {part["$ref"] for part in _parts(schema) if isinstance(part.get("$ref"), str)}
    targets = {reference: _target(schema, reference) for reference in references}
    finite: set[str] = set()
    while more := {r for r, target in targets.items() if r not in finite and _has_finite_value(target, finite)}:
        finite |= more
    return finite


def _target(root: Any, reference: str) -> Any:
    """What a JSON pointer (RFC 6901) leads to; True for what is none, or leads nowhere."""
    if not reference.startswith("#/") and reference != "#":
        return True
    target = root
    for step in reference.split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        target = target.get(name, True) if isinstance(target, Mapping) else True
    return target


def _has_finite_value(schema: Any, finite: set[str]) -> bool:
    """Whether a value can end, if those behind `finite` references can; only recursion is looked at."""
    if not isinstance(schema, Mapping):
        return True
    if isinstance(schema.get("$ref"), str) and schema["$ref"] not in finite:
        return False
    if not all(_has_finite_value(inner, finite) for inner in _listed(schema.get("allOf"))):
        return False
    for keyword in ("anyOf", "oneOf"):
        options = _listed(schema.get(keyword))
        if options and not any(_has_finite_value(inner, finite) for inner in options):
            return False
    types = schema.get("type")
    needed = {"object": _required_values, "array": _required_items}
    allowed = types if isinstance(types, list) else [types]
    return any(
        kind not in needed or all(_has_finite_value(inner, finite) for inner in needed[kind](schema))
        for kind in allowed
    )


def _required_values(schema: Mapping[str, Any]) -> Iterator[Any]:
    properties, others = schema.get("properties"), schema.get("additionalProperties", True)
    for name in _listed(schema.get("required")):
        yield properties.get(name, others) if isinstance(properties, Mapping) and isinstance(name, str) else others


def _required_items(schema: Mapping[str, Any]) -> Iterator[Any]:
    least = schema.get("minItems", 0)
    first = _listed(schema.get("prefixItems")) or _listed(schema.get("items"))
    if isinstance(least, int | float) and least > 0:
        yield from first[: int(least)]
        if least > len(first) and isinstance(schema.get("items"), Mapping):
            yield schema["items"]
