"""What nothing can meet, what cannot be enforced and what is meant to hurt is refused; and our process goes on.

Which bound refuses is asserted by its own words: counted work, size, nesting, memory, or time, in that order of haste.
"""

import gc
import json
import os
import signal
import subprocess
import sys
import threading
from typing import Any

import pytest

from batchwright.errors import RequestError
from batchwright.serve.constraints.compiler import MAX_KEPT, Compiler
from batchwright.serve.constraints.constraint import Constraint
from batchwright.serve.constraints.matcher import Matcher
from batchwright.serve.loading.gguf_file import GgufFile
from batchwright.serve.loading.gguf_tokenizer import from_gguf
from batchwright.serve.loading.locate import default_path
from batchwright.serve.loading.tokenizer import Tokenizer

NUM_VOCAB, END = 49_152, 2


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return from_gguf(GgufFile(default_path()).metadata)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> Compiler:
    """Patient enough that no bound of counted work is overtaken by the clock on a busy machine."""
    return Compiler(tokenizer, NUM_VOCAB, [END], time_limit_s=60)


def schema(**keywords: Any) -> Constraint:
    return Constraint.json_schema(
        {name.replace("ref", "$ref").replace("defs", "$defs"): v for name, v in keywords.items()}
    )


def in_turn(num: int, text: str) -> list[Any]:
    """`text` with its number in place of each @."""
    return [json.loads(text.replace("@", str(i))) for i in range(num)]


def named(letters: str, num: int) -> list[str]:
    return [f"{letters}{i}" for i in range(num)]


NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "required": ["next"]}
NOTHING_MEETS = {
    "bounds": schema(type="integer", minimum=3, maximum=2),
    "no integer between": schema(type="integer", minimum=1.2, maximum=1.8),
    "no multiple between": schema(type="integer", multipleOf=10, minimum=1, maximum=9),
    "no option": schema(enum=[]),
    "types": schema(const="a", type="integer"),
    "lengths": schema(type="array", minItems=3, maxItems=2),
    "pattern and length": schema(type="string", pattern="^aaa$", maxLength=2),
    "two patterns": schema(allOf=[{"pattern": "^a+$"}, {"pattern": "^b+$"}], type="string"),
    "a property that cannot be": schema(type="object", properties={"a": False}, required=["a"]),
    "no end": schema(ref="#/$defs/node", defs={"node": NODE}),
    "no end of a list": schema(
        ref="#/$defs/n", defs={"n": {"type": "array", "items": {"$ref": "#/$defs/n"}, "minItems": 1}}
    ),
    "nothing but itself": Constraint.json_schema({"$ref": "#"}),
    "an empty class": Constraint.regex(r"[^\s\S]"),
    "a rule of itself": Constraint.grammar("start: start"),
    "a rule that needs itself": Constraint.grammar('start: start "x"'),
}


@pytest.mark.parametrize("which", NOTHING_MEETS)
def test_what_nothing_meets_is_refused(which: str, compiler: Compiler) -> None:
    said = "(?i)unsatisfiable|no text satisfies it|without end"
    with pytest.raises(RequestError, match=said):
        compiler.compile(NOTHING_MEETS[which])


def test_recursion_that_can_end_is_no_such_thing(compiler: Compiler) -> None:
    """By null, by an empty list, or because the property need not be there."""
    here = {"$ref": "#"}
    for end in ({"anyOf": [here, {"type": "null"}]}, {"type": "array", "items": here}):
        compiler.compile(schema(type="object", properties={"next": end}, required=["next"]))
    compiler.compile(schema(type="object", properties={"next": here}))


NOT_ENFORCED = {
    "not": schema(**{"not": {"type": "string"}}),
    "if": schema(**{"if": {"type": "string"}, "then": {"minLength": 1}}),
    "uniqueItems": schema(type="array", uniqueItems=True),
    "contains": schema(type="array", contains={"const": 1}),
    "dependentRequired": schema(dependentRequired={"a": ["b"]}),
    "propertyNames": schema(type="object", propertyNames={"pattern": "^a"}),
    "unevaluatedProperties": schema(type="object", unevaluatedProperties=False),
    "oneOf that overlaps": schema(oneOf=[{"type": "string"}, {"type": "string", "minLength": 2}]),
    "minProperties of free names": schema(type="object", minProperties=2),
    "nullable": schema(type="object", properties={"a": {"type": "string", "nullable": True}}),
    "an unknown format": schema(type="string", format="regex"),
    "a remote reference": schema(ref="http://localhost:1/a.json"),
    "a file": schema(ref="file:///etc/passwd"),
    "a place that is not there": schema(ref="#/$defs/zz"),
    "settings of llguidance": Constraint.json_schema({"x-guidance": {"lenient": True}, "type": "string"}),
    "settings within a grammar": Constraint.grammar('start: %json {"x-guidance": {"lenient": true}}'),
    "options of llguidance": Constraint.grammar('%llguidance {"allow_invalid_utf8": true}\nstart: "a"'),
    "a class in a class": schema(type="string", pattern="[a[b]]"),
    "a class less another": schema(patternProperties={r"[\w--\d]": True}),
    "lookahead": Constraint.regex("(?=a)b"),
    "a back reference": schema(type="string", pattern=r"(a)\1"),
    "a word boundary": Constraint.regex(r"\ba"),
    "a backslash that escapes nothing": Constraint.regex("a\\"),
    "a token by name": Constraint.grammar('start: <|im_start|> "a"'),
    "tokens by number": Constraint.grammar('start: <[0-49151]> "a"'),
    "max_tokens": Constraint.grammar('start: a "x"\na[max_tokens=3]: /[a-z]*/'),
    "a rule that is not there": Constraint.grammar("start: b"),
    "no grammar": Constraint.grammar("hello world"),
    "no JSON": Constraint.json_schema("{"),
    "no schema": Constraint.json_schema("[]"),
    "a wrong type": schema(type="strin"),
}


@pytest.mark.parametrize("which", NOT_ENFORCED)
def test_what_would_be_passed_over_is_refused(which: str, compiler: Compiler) -> None:
    with pytest.raises(RequestError, match="constraining output by a") as raised:
        compiler.compile(NOT_ENFORCED[which])
    assert not any(bound in str(raised.value) for bound in ("seconds", "MiB"))


def test_remarks_and_slashes_are_no_reason(compiler: Compiler) -> None:
    """Nor are escaped brackets, < in quotes or comments, or a rule called stop."""
    compiler.compile(schema(type="string", title="t", description="d", default=1, examples=[2], deprecated=True))
    compiler.compile(schema(type="string", pattern=r"^[\[\]a-z&~-]*$"))
    compiler.compile(Constraint.grammar('start: "<" stop // <|im_start|>\nstop: /[<>]/ # <[1]>'))


def chain(num: int, text: str, last: Any) -> dict[str, Any]:
    """Definitions d0, d1, ..., each made of `text` with the next one's reference in place of @."""
    definitions = {f"d{i}": json.loads(text.replace("@", f'{{"$ref": "#/$defs/d{i + 1}"}}')) for i in range(num)}
    return {"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{num}": last}}


ALTERNATIVES = in_turn(14, '{"anyOf": [{"properties": {"a@": {"const": 1}}}, {"properties": {"b@": {"const": 1}}}]}')
COUNTED = {
    "a product of alternatives": (schema(allOf=ALTERNATIVES), "too large"),
    "many properties": (schema(properties=dict.fromkeys(named("p", 1_800), True), type="object"), "too big"),
    "many required properties": (schema(required=named("p", 5_000), type="object"), "too big"),
    "many alternatives": (schema(anyOf=in_turn(1_500, '{"required": ["p@"], "type": "object"}')), "too"),
    "patterns of many periods": (
        schema(allOf=in_turn(9, '{"pattern": "^(a{1@})*$"}'), minLength=1, type="string"), "[Uu]nable to determine"
    ),
    "a multiple of a large prime": (schema(type="integer", multipleOf=1_000_000_007), "fuel exhausted"),
    "doubling": (
        Constraint.grammar("start: T0\n" + "".join(f"T{i}: T{i + 1} T{i + 1}\n" for i in range(40)) + 'T40: "a"'),
        "too big",
    ),
    "parentheses": (Constraint.grammar("start: " + "(" * 5_000 + '"a"' + ")" * 5_000), "too deeply nested"),
    "parentheses of an expression": (Constraint.regex("(" * 2_000 + "a" + ")" * 2_000), "cannot be compiled"),
    "parentheses in GBNF": (Constraint.grammar("root ::= " + "(" * 5_000 + '"a"' + ")" * 5_000), "nested deeper"),
    "a hundred lists": (Constraint.json_schema('{"items":' * 130 + "true" + "}" * 130), "nested 130 deep"),
    "brackets": (Constraint.json_schema("[" * 30_000 + "]" * 30_000), "nested"),
    "optional groups": (Constraint.regex("a*b?" * 2_000), "fuel"),
}  # fmt: skip


@pytest.mark.parametrize("which", COUNTED)
def test_counted_work_refuses_what_would_take_too_much(which: str, compiler: Compiler) -> None:
    constraint, said = COUNTED[which]
    with pytest.raises(RequestError, match=said) as raised:
        compiler.compile(constraint)
    assert not any(bound in str(raised.value) for bound in ("seconds", "MiB"))


HARMLESS = {
    "long lists": schema(type="array", items={"type": "object"}, minItems=10**9, maxItems=10**9 + 1),
    "long strings": schema(type="string", minLength=10**9, pattern="^([a-z]|b.)*$"),
    "nested stars": Constraint.regex("((a*)*)*b"),
    "a window of letters": Constraint.regex("(a|b)*a(a|b){60}"),
    "a million repeats": Constraint.regex("[a-z]{1,1000000}"),
    "repeats of repeats": Constraint.grammar('start: ((("a" "b"){1000}){1000}){1000}'),
    "references that double": Constraint.json_schema(chain(25, '{"type":"object","properties":{"a":@,"b":@}}', True)),
}


@pytest.mark.parametrize("which", HARMLESS)
def test_what_only_looks_bad_is_compiled(which: str, compiler: Compiler) -> None:
    """Expressions are not expanded, and references are shared."""
    compiler.compile(HARMLESS[which])


def test_a_deep_chain_overflows_no_stack(compiler: Compiler) -> None:
    """A thousand references, one behind another, or rules: more than the usual 8 MiB bear."""
    compiler.compile(Constraint.json_schema(chain(700, '{"type":"object","properties":{"a":@}}', {"type": "null"})))
    compiler.compile(
        Constraint.grammar("start: t0\n" + "".join(f"t{i}: t{i + 1}\n" for i in range(1_000)) + 't1000: "a"')
    )


REMAINDERS = schema(type="integer", multipleOf=1_000_003)  # a state for each, which nothing counts


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says how much memory is in use")
def test_memory_is_bounded_and_the_next_constraint_runs(compiler: Compiler) -> None:
    with pytest.raises(RequestError, match="more than the 64 MiB of memory"):
        compiler.compile(REMAINDERS)
    compiler.compile(schema(type="boolean"))


def test_time_is_bounded_and_what_was_late_may_be_asked_again(tokenizer: Tokenizer) -> None:
    """The child that was busy with it is gone, and another one has time."""
    compiler = Compiler(tokenizer, NUM_VOCAB, [END], time_limit_s=0.02)
    for _ in range(2):
        with pytest.raises(RequestError, match=r"longer than the 0\.02 seconds"):
            compiler.compile(REMAINDERS)
    with pytest.raises(RequestError, match="no integer"):
        ask_until_there_is_time(compiler, NOTHING_MEETS["no integer between"])


def ask_until_there_is_time(compiler: Compiler, constraint: Constraint) -> Matcher:
    while True:
        try:
            return compiler.compile(constraint)
        except RequestError as error:
            if "longer than" not in str(error):
                raise


def test_a_constraint_is_compiled_once_for_all_who_ask(compiler: Compiler) -> None:
    """By whatever threads, at once or later; refusals are kept as well. Matchers are each their own."""
    constraint = schema(type="object", properties={"once": {"type": "null"}})
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(compiler.compile(constraint))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(matcher.grammar) for matcher in found}) == 1
    assert len({id(matcher.core) for matcher in found}) == 8


def test_only_the_newest_constraints_are_kept(compiler: Compiler) -> None:
    first, *others = [Constraint.regex(f"kept{i}") for i in range(MAX_KEPT + 1)]
    grammar = compiler.compile(first).grammar
    for other in others[:-1]:
        compiler.compile(other)
    assert compiler.compile(first).grammar is grammar
    for other in others:
        compiler.compile(other)
    assert compiler.compile(first).grammar is not grammar


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSEGV])
def test_a_child_that_ends_between_two_constraints_is_replaced(how: signal.Signals, compiler: Compiler) -> None:
    """Whoever ended it: nobody's constraint is to blame."""
    compiler.compile(Constraint.regex(f"before {how.name}"))
    child = compiler._vetting._child
    child.send_signal(how)
    child.wait()
    compiler.compile(Constraint.regex(f"after {how.name}"))
    assert compiler._vetting._child is not child


def test_a_child_that_hangs_is_ended(tokenizer: Tokenizer) -> None:
    """It has been stopped, which it cannot notice; the next constraint gets a new one."""
    compiler = Compiler(tokenizer, NUM_VOCAB, [END], time_limit_s=1)
    ask_until_there_is_time(compiler, Constraint.regex("a"))
    compiler._vetting._child.send_signal(signal.SIGSTOP)
    with pytest.raises(RequestError, match="longer than the 1 seconds"):
        compiler.compile(Constraint.regex("b"))
    ask_until_there_is_time(compiler, Constraint.regex("b"))


def test_no_child_outlives_its_compiler(tokenizer: Tokenizer) -> None:
    compiler = Compiler(tokenizer, NUM_VOCAB, [END], time_limit_s=60)
    compiler.compile(Constraint.regex("a"))
    child = compiler._vetting._child
    del compiler
    gc.collect()
    assert child.returncode == -signal.SIGKILL


def test_the_child_starts_light() -> None:
    """What it imports is there in a fraction of the time and memory that torch takes."""
    program = (
        "import sys, batchwright.serve.constraints.vetting; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], env=os.environ, check=False).returncode == 0
