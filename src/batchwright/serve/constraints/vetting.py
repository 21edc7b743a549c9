"""Tries a grammar in a process of its own, which can be ended: what a client sends must not end ours, nor keep it busy.

Compiling counts its work, but not all of it, and can overflow any stack. So the first compilation of every constraint
happens in a child with `TIME_LIMIT_S` and `MEMORY_LIMIT` for each; where it takes longer, needs more or crashes, the
child ends and the next constraint gets a new one. What it passed is compiled again by us, the same way. Cost: a child
(which knows no torch) starts in a quarter of a second; then one compilation and a fraction of a millisecond.

    ours  --  the vocabulary, then an Asked for each constraint  ->  child
          <-  a Verdict for each                                 --       messages: length in 8 bytes, then msgpack
"""

import ctypes
import os
import re
import signal
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, TypeVar

import msgspec
from llguidance import LLExecutor

from batchwright.errors import RequestError
from batchwright.serve.constraints.constraint import Constraint, Kind
from batchwright.serve.constraints.grammar import grammar_of
from batchwright.serve.constraints.guidance import Vocabulary, build, on_deep_stack, tokenizer_of

if sys.platform == "linux":
    import resource

TIME_LIMIT_S = 2.0
START_LIMIT_S = 30.0
ORPHAN_LIMIT_S = 120  # though nobody is left to end it
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


_MALFORMED = (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError)

READY = Verdict()
LATE = Verdict(fact="compiling it takes longer", remedy="simplify it", is_certain=False)


class Vetting:
    """Tries constraints for one vocabulary, one at a time."""

    def __init__(self, vocabulary: Vocabulary, time_limit_s: float) -> None:
        self._vocabulary = vocabulary
        self._time_limit_s = time_limit_s
        self._child: subprocess.Popen[bytes] | None = None
        self._end_child: Callable[[], object] = str  # there is none

    def vet(self, constraint: Constraint) -> Verdict:
        """Takes no longer than twice the time limit, and a child's start."""
        is_first = self._child is None or self._child.poll() is not None
        verdict = self._try(constraint)
        if verdict is None and not is_first:  # it may be that those before it left too little memory
            verdict = self._try(constraint)
        fact = f"compiling it takes more than the {MEMORY_LIMIT >> 20} MiB of memory there are, or crashes"
        return verdict or Verdict(fact=fact, remedy="simplify it")

    def _try(self, constraint: Constraint) -> Verdict | None:
        """None if the child ended by itself."""
        if self._child is None or self._child.poll() is not None:
            self._child = self._new_child()
            if self._answer(tuple(self._vocabulary), START_LIMIT_S) != READY:
                fact = f"the process that tries constraints is not ready within {START_LIMIT_S:g} seconds"
                return Verdict(fact=fact, remedy="try again later", is_certain=False)
        answer = self._answer(
            Asked(constraint.kind, constraint.text, self._vocabulary.strips_space), self._time_limit_s
        )
        if answer != LATE:
            return answer
        return msgspec.structs.replace(LATE, fact=f"{LATE.fact} than the {self._time_limit_s:g} seconds there are")

    def _answer(self, message: object, seconds: float) -> Verdict | None:
        """`LATE` if the child has not answered by then, None if it ended by itself; in both cases it is gone."""
        child = self._child
        assert child is not None and child.stdin is not None and child.stdout is not None
        is_late = threading.Event()

        def end() -> None:
            is_late.set()
            child.kill()

        timer = threading.Timer(seconds, end)
        timer.start()
        try:
            _send(child.stdin, message)
            return _receive(child.stdout, Verdict)
        except BaseException as error:
            self._end_child()  # its answer, if it has one yet, would be taken for the next constraint's
            if not isinstance(error, EOFError | BrokenPipeError):
                raise
        finally:
            timer.cancel()
        return LATE if is_late.is_set() else None

    def _new_child(self) -> subprocess.Popen[bytes]:
        self._end_child()
        paths = os.pathsep.join(path for path in sys.path if path)
        child = subprocess.Popen(  # noqa: S603  a module of ours
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": paths, "MALLOC_ARENA_MAX": "1"}, start_new_session=True,
        )  # fmt: skip
        self._end_child = weakref.finalize(self, _end, child)
        return child


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
        on_deep_stack(lambda: _serve(answers))


def _serve(answers: IO[bytes]) -> None:
    vocabulary = Vocabulary(*_receive(sys.stdin.buffer, tuple[list[bytes], list[int], bool]))
    trial = _Trial(vocabulary)
    _limit_memory()
    _send(answers, READY)
    while True:
        asked = _receive(sys.stdin.buffer, Asked)
        _end_after(ORPHAN_LIMIT_S)
        _send(answers, trial.verdict(asked))
        _end_after(0)


class _Trial:
    """Compiles constraints and computes their first mask, by the threads and with the stacks that will do it for us."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._tokenizer = tokenizer_of(vocabulary)
        self._threads = LLExecutor(1)
        self._mask_bytes = -(-self._tokenizer.vocab_size // 32) * 4
        self._room = ctypes.create_string_buffer(2 * self._mask_bytes)

    def verdict(self, asked: Asked) -> Verdict:
        start = time.perf_counter()
        try:
            grammar = grammar_of(Constraint(asked.kind, asked.text), after_space=asked.after_space)
        except RequestError as error:
            return Verdict(fact=error.fact, remedy=error.remedy)
        except _MALFORMED as error:  # what clients send can hold anything where a number or a name is expected
            return Verdict(fact=f"it is malformed: {type(error).__name__}: {error!s:.200}", remedy="correct it")
        compiled = build(self._tokenizer, grammar)
        if not compiled.is_error():
            both = [(compiled, 0), (compiled.deep_copy(), 1)]  # a single one would not leave this thread
            self._threads.unsafe_compute_mask_ptr(both, ctypes.addressof(self._room), self._mask_bytes, 2)
        if not compiled.is_error():
            return Verdict(grammar, time.perf_counter() - start)
        if "NoExtensionBias" in compiled.get_error():
            return Verdict(fact="no text satisfies it", remedy="allow something")
        fact = f"it cannot be compiled: {_reason(compiled.get_error())[:300]}"
        return Verdict(fact=fact, remedy="correct or simplify it")


def _reason(error: str) -> str:
    """What llguidance says, without the lines of the grammar that follow."""
    said = " ".join(line.strip() for line in _SOURCE_LINE.split(error, maxsplit=1)[0].splitlines())
    return said.partition("failed to compile JSON schema: ")[2] or said.removesuffix("<non-verbose/>").strip()


def _end_after(seconds: int) -> None:
    """Whatever this process does then, it ends; 0 takes that back."""
    if sys.platform != "win32":
        signal.alarm(seconds)


def _limit_memory() -> None:
    """Using `MEMORY_LIMIT` more than now will end the process. Linux says what is used; elsewhere there is no limit."""
    if sys.platform == "linux":
        num_pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = num_pages * resource.getpagesize() + MEMORY_LIMIT
        resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))


if __name__ == "__main__":
    main()
