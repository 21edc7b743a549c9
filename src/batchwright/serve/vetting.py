"""Tries a grammar in a process of its own, which can be ended: what a client sends must not end ours, nor keep it busy.

Compiling counts its work, but not all of it, and can overflow any stack. So the first compilation of every constraint
happens in a child with `TIME_LIMIT_S` and `MEMORY_LIMIT` for each; where it takes longer, needs more or crashes, the
child ends and the next constraint gets a new one. What it passed is compiled again by us, the same way. Cost: starting
the child and telling it the vocabulary takes half a second, once; then one compilation and a fraction of a millisecond.

    ours  --  the vocabulary, then an Asked for each constraint  ->  child
          <-  a Verdict for each                                 --       messages: length in 8 bytes, then msgpack
"""

import os
import re
import struct
import subprocess
import sys
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import IO, TypeVar

import msgspec
from llguidance import LLTokenizer

from batchwright.errors import RequestError
from batchwright.serve.constraint import Constraint, Kind
from batchwright.serve.grammar import grammar_of
from batchwright.serve.guidance import DEEP_STACK, MASK_STACK, build, on_stack, tokenizer_of
from batchwright.serve.vocabulary import Vocabulary

if sys.platform == "linux":
    import resource

TIME_LIMIT_S = 2.0
MEMORY_LIMIT = 64 << 20

_SOURCE_LINE = re.compile(r"\n *\d+ \| ")
_LENGTH = struct.Struct("<q")
_T = TypeVar("_T")


class Asked(msgspec.Struct, frozen=True, array_like=True):
    """A constraint to try."""

    kind: Kind
    text: str
    after_space: bool


class Verdict(msgspec.Struct, frozen=True, array_like=True):
    """The grammar to compile and the seconds that took; or what is wrong with the constraint, and what to do about it.

    `is_certain`: another try would say the same. Not so where time ran out, for the machine may have been busy.
    """

    grammar: str = ""
    seconds: float = 0.0
    fact: str = ""
    remedy: str = ""
    is_certain: bool = True


class Vetting:
    """Tries constraints for one vocabulary, one at a time."""

    def __init__(self, vocabulary: Vocabulary, time_limit_s: float) -> None:
        self._vocabulary = vocabulary
        self._time_limit_s = time_limit_s
        self._child: subprocess.Popen[bytes] | None = None

    def vet(self, constraint: Constraint) -> Verdict:
        """Takes no longer than the time limit, and a child's start."""
        if self._child is None or self._child.poll() is not None:
            self._child = self._new_child()
        child = self._child
        is_late = threading.Event()

        def end() -> None:
            is_late.set()
            child.kill()

        timer = threading.Timer(self._time_limit_s, end)
        timer.start()
        try:
            verdict = _answer(child, Asked(constraint.kind, constraint.text, self._vocabulary.strips_space))
        except BaseException as error:
            _end(child)  # its answer, if it has one yet, would be taken for the next constraint's
            if isinstance(error, EOFError | BrokenPipeError):
                return self._fate(is_late=is_late.is_set())
            raise
        finally:
            timer.cancel()
        return verdict

    def _fate(self, *, is_late: bool) -> Verdict:
        if is_late:
            fact = f"compiling it takes longer than the {self._time_limit_s:g} seconds there are"
        else:
            fact = f"compiling it takes more than the {MEMORY_LIMIT >> 20} MiB of memory there are"
        return Verdict(fact=fact, remedy="simplify it", is_certain=not is_late)

    def _new_child(self) -> subprocess.Popen[bytes]:
        paths = os.pathsep.join(path for path in sys.path if path)
        child = subprocess.Popen(  # noqa: S603  a module of ours
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": paths, "MALLOC_ARENA_MAX": "1"}, start_new_session=True,
        )  # fmt: skip
        weakref.finalize(self, _end, child)
        _answer(child, tuple(self._vocabulary))  # it is ready; the time limit is for constraints
        return child


def _answer(child: subprocess.Popen[bytes], message: object) -> Verdict:
    assert child.stdin is not None and child.stdout is not None
    _send(child.stdin, message)
    return _receive(child.stdout, Verdict)


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()
    for stream in (child.stdin, child.stdout):
        assert stream is not None
        with suppress(BrokenPipeError):
            stream.close()


def _send(stream: IO[bytes], message: object) -> None:
    data = msgspec.msgpack.encode(message)
    stream.write(_LENGTH.pack(len(data)) + data)
    stream.flush()


def _receive(stream: IO[bytes], kind: type[_T]) -> _T:
    """Raises EOFError where the other side has ended."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        raise EOFError
    (length,) = _LENGTH.unpack(head)
    data = stream.read(length)
    if len(data) < length:
        raise EOFError
    return msgspec.msgpack.decode(data, type=kind)


def main() -> None:
    """The child: answers until its stdin ends."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever is printed is no answer
    with suppress(EOFError, BrokenPipeError):
        vocabulary = Vocabulary(*_receive(sys.stdin.buffer, tuple[list[bytes], list[int], bool]))
        tokenizer = tokenizer_of(vocabulary)
        _send(answers, Verdict())
        while True:
            asked = _receive(sys.stdin.buffer, Asked)
            _limit_memory()
            _send(answers, _verdict(tokenizer, asked))


def _verdict(tokenizer: LLTokenizer, asked: Asked) -> Verdict:
    start = time.perf_counter()
    try:
        grammar = grammar_of(Constraint(asked.kind, asked.text), after_space=asked.after_space)
    except RequestError as error:
        return Verdict(fact=error.fact, remedy=error.remedy)
    compiled = build(tokenizer, grammar)
    if not compiled.is_error():
        on_stack(MASK_STACK, compiled.compute_bitmask)
    if not compiled.is_error():
        return Verdict(grammar, time.perf_counter() - start)
    if compiled.stop_reason() == "NoExtensionBias" or "NoExtensionBias" in compiled.get_error():
        return Verdict(fact="no text satisfies it", remedy="allow something")
    return Verdict(
        fact=f"it cannot be compiled: {_reason(compiled.get_error())[:300]}", remedy="correct or simplify it"
    )


def _reason(error: str) -> str:
    """What llguidance says, without the lines of the grammar that follow."""
    said = " ".join(line.strip() for line in _SOURCE_LINE.split(error, maxsplit=1)[0].splitlines())
    return said.partition("failed to compile JSON schema: ")[2] or said.removesuffix("<non-verbose/>").strip()


def _limit_memory() -> None:
    """Using `MEMORY_LIMIT` more than now ends the process. Linux says what is used; elsewhere there is no limit."""
    if sys.platform == "linux":
        num_pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = num_pages * resource.getpagesize() + DEEP_STACK + MASK_STACK + MEMORY_LIMIT
        resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))


if __name__ == "__main__":
    main()
