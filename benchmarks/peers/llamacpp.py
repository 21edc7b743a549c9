"""llama.cpp through llama-cpp-python: its low-level interface, because the high-level one runs one sequence at a time.

Continuous batching as llama.cpp's own server does it: a number of slots, each a sequence of one context; a step is the
next token of every busy slot and the prompts that fit beside them into llama.cpp's default batch. Greedy is numpy's
argmax over the rows of logits. Keys and values are in llama.cpp's default type, and in one buffer for all slots: with
one each, a step that mixes prompts and single tokens is cut up and takes two to three times as long.
"""

import ctypes
import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import llama_cpp
import numpy as np
from protocol import Job, Made, Run, Setup, work


class Feed(NamedTuple):
    """Tokens of one slot from `start` on, in one step."""

    slot: int
    start: int
    tokens: Sequence[int]


class Context:
    """A llama.cpp context with its batch."""

    def __init__(self, setup: Setup, slots: int) -> None:
        llama_cpp.llama_backend_init()
        model = llama_cpp.llama_load_model_from_file(str(setup.model).encode(), llama_cpp.llama_model_default_params())
        settings = llama_cpp.llama_context_default_params()
        longest = max(len(job.prompt) + job.num_output for job in setup.jobs)
        settings.n_ctx = slots * -(-longest // 64) * 64
        settings.n_seq_max = slots
        settings.n_threads = settings.n_threads_batch = setup.threads
        settings.kv_unified = True
        self._context = llama_cpp.llama_init_from_model(model, settings)
        weakref.finalize(self, free, model, self._context)  # the next try has its own
        self._num_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self._memory = llama_cpp.llama_get_memory(self._context)
        self.capacity = llama_cpp.llama_n_batch(self._context)
        self._batch = llama_cpp.llama_batch_init(self.capacity, 0, 1)
        self._fields = [
            np.ctypeslib.as_array(field, (self.capacity,))
            for field in (self._batch.token, self._batch.pos, self._batch.n_seq_id, self._batch.logits)
        ]

    def clear(self) -> None:
        llama_cpp.llama_memory_clear(self._memory, True)

    def release(self, slot: int) -> None:
        llama_cpp.llama_memory_seq_rm(self._memory, slot, -1, -1)

    def step(self, feeds: Iterable[Feed]) -> list[int]:
        """The likeliest next token of every feed, in their order."""
        token, position, num_sequences, wants_logits = self._fields
        end = 0
        for slot, start, tokens in feeds:
            first, end = end, end + len(tokens)
            token[first:end] = tokens
            position[first:end] = range(start, start + len(tokens))
            num_sequences[first:end] = 1
            wants_logits[first:end] = 0
            wants_logits[end - 1] = 1
            for index in range(first, end):
                self._batch.seq_id[index][0] = slot
        self._batch.n_tokens = end
        if code := llama_cpp.llama_decode(self._context, self._batch):
            raise RuntimeError(f"llama_decode answered {code} to {end} tokens")
        logits = ctypes.cast(llama_cpp.llama_get_logits(self._context), ctypes.POINTER(ctypes.c_float))
        num_rows = int(wants_logits[:end].sum())
        return np.ctypeslib.as_array(logits, (num_rows, self._num_vocab)).argmax(1).tolist()


def free(model: Any, context: Any) -> None:
    """Give their memory back."""
    llama_cpp.llama_free(context)
    llama_cpp.llama_model_free(model)


def prepare(setup: Setup, settings: Mapping[str, Any]) -> Run:
    """`settings`: how many slots."""
    context = Context(setup, settings["slots"])

    def run(jobs: Sequence[Job]) -> Made:
        context.clear()
        return Made(generate(context, jobs, settings["slots"]))

    return run


def generate(context: Context, jobs: Sequence[Job], num_slots: int) -> list[list[int]]:
    """Every job in turn gets a slot, in order of arrival."""
    waiting, running, free = deque(range(len(jobs))), dict[int, int](), list(range(num_slots))
    outputs: list[list[int]] = [[] for _ in jobs]
    while waiting or running:
        feeds = [
            Feed(slot, len(jobs[index].prompt) + len(outputs[index]) - 1, outputs[index][-1:])
            for slot, index in running.items()
        ]
        room = context.capacity - len(feeds)
        while waiting and free and len(jobs[waiting[0]].prompt) <= room:
            slot, index = free.pop(), waiting.popleft()
            running[slot] = index
            feeds.append(Feed(slot, 0, jobs[index].prompt))
            room -= len(jobs[index].prompt)
        for feed, token in zip(feeds, context.step(feeds), strict=True):
            index = running[feed.slot]
            outputs[index].append(token)
            if len(outputs[index]) == jobs[index].num_output:
                context.release(feed.slot)
                del running[feed.slot]
                free.append(feed.slot)
    return outputs


if __name__ == "__main__":
    work(prepare, ["llama-cpp-python", "numpy"])
