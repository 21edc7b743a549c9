"""The live driver: requests in, plans from the scheduler to the executor, tokens and text out.

It holds no policy and no tensors. One `step` is: drop what has expired, ask for a plan, execute it, commit what
happened, hand out the new tokens. Every submitted request ends exactly once, whatever happens to it: a finish reason
is in its last `Output`, and its record in `engine.recorder`.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from threading import RLock
from typing import Any, Concatenate, Literal, NamedTuple, ParamSpec, TypeVar

import torch

from batchwright.errors import ConfigError, RequestError
from batchwright.policy.continuous import Continuous
from batchwright.policy.pages import Memory
from batchwright.policy.types import Dropped, ItemOutcome, Refused, Request, Scheduler, StepOutcome, StepPlan
from batchwright.records import FinishReason, Recorder
from batchwright.serve.executor import Executor, TorchExecutor
from batchwright.serve.interrupts import uninterrupted
from batchwright.serve.keys import PageKeys
from batchwright.serve.prompts import Params, Prompt, as_prompts, paired, token_ids, tokenizer_of
from batchwright.serve.sampling import Sampled, SamplingParams
from batchwright.serve.sequences import RowResult
from batchwright.serve.stopping import StopChecker
from batchwright.serve.weights import LoadedModel, load

Policy = Callable[[Memory], Scheduler]
Failure = Literal["oom", "exception"]

DEFAULT_KV_BYTES = 1 << 30
_ID = "request-"
_LONGEST = 1e9  # seconds, of any wait
_LONG_WAIT = 3600.0  # seconds, before looking again
_SHORT_WAIT = 0.001  # seconds, when it is not known what is waited for


@dataclass(frozen=True, slots=True)
class Output:
    """What one step gave one request. The last one has `finish_reason`; `token` is None if it brought none."""

    request_id: str
    token: int | None
    text: str
    finish_reason: FinishReason | None = None
    error: str | None = None
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """All that a request got. `logprobs[i]`: of token i and of the likeliest alternatives, if asked for."""

    request_id: str
    tokens: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    error: str | None = None
    logprobs: tuple[tuple[float, tuple[tuple[int, float], ...]], ...] = ()


class _Live:
    """A request under way."""

    def __init__(
        self, tokens: Sequence[int], params: SamplingParams, model: LoadedModel, page_size: int,
        on_output: Callable[[Output], None] | None,
    ) -> None:  # fmt: skip
        self.num_output = 0
        self.params = params
        self.keys = PageKeys(page_size)
        self.prompt_keys = self.keys.push(tokens)
        self.decoder = model.tokenizer.stream(skip_special_tokens=True) if model.tokenizer else None
        self.on_output = on_output

    def admit(self, max_tokens: int, eos_ids: Sequence[int]) -> None:
        """It will get at most `max_tokens`."""
        self.max_tokens = max_tokens
        self.stop = StopChecker(replace(self.params, max_tokens=max_tokens), eos_ids)

    def text_of(self, token: int) -> str:
        """The text that `token` completes; with its last token, all that is left."""
        if self.decoder is None:
            return ""
        text = "" if self.stop.ends(token) else self.decoder.push(token)
        is_last = self.stop.ends(token) or self.num_output == self.max_tokens
        return text + self.decoder.finish() if is_last else text

    def rest(self) -> str:
        """The text that is still held back, when it ends for another reason than its tokens."""
        return self.stop.flush(self.decoder.finish() if self.decoder else "")


P = ParamSpec("P")
R = TypeVar("R")


def _locked(method: Callable[Concatenate["Engine", P], R]) -> Callable[Concatenate["Engine", P], R]:
    """One call at a time, whatever thread it comes from; a callback may call again."""

    @wraps(method)
    def locked(self: "Engine", /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._lock:
            return method(self, *args, **kwargs)

    return locked


class _Done(NamedTuple):
    """A step that was executed, or `failed`, with the reason in `message`."""

    started: float
    results: Sequence[RowResult]
    failed: Failure | None = None
    message: str = ""


class _Delivery(NamedTuple):
    """An output on its way to its request's callback, or to the caller of `step`."""

    live: _Live
    output: Output
    when: float


class Engine:
    """Generates text with one model under one batching policy.

    `model`: a loaded model, or what `weights.load` takes (`dtype` bfloat16 and `device` "cpu" by default).
    `policy(memory)` makes the scheduler. `memory` is 1 GiB of KV cache by default. `clock` and `executor` can be
    replaced; `run` names the records. Threads may share an engine: calls take turns, and requests of all threads
    run in the same batches.

        engine = Engine("smollm2")
        for completion in engine.generate(["The capital of France is"], SamplingParams(max_tokens=16)):
            print(completion.text)
    """

    def __init__(
        self,
        model: LoadedModel | str | Path = "smollm2",
        policy: Policy = Continuous,
        *,
        memory: Memory | None = None,
        dtype: torch.dtype | str | None = None,
        device: str | torch.device | None = None,
        clock: Callable[[], float] = time.perf_counter,
        executor: Callable[[Any, Memory], Executor] = TorchExecutor,
        run: str = "engine",
    ) -> None:
        self.model = _loaded(model, dtype, device)
        self.memory = memory or default_memory(self.model)
        _check_context(self.model, self.memory)
        self.scheduler = _scheduler(policy, self.memory)
        self.executor = executor(self.model.decoder, self.memory)
        self._clock = clock
        self._lock = RLock()  # over all state
        self._delivering = RLock()  # outputs are delivered in order, and without holding up other threads' submits
        self.recorder = Recorder(run, self.memory.page_size, origin=clock())
        self._live: dict[str, _Live] = {}
        self._ending: set[str] = set()  # ended, and not yet told
        self._outputs: list[Output] = []
        self._undelivered: deque[_Delivery] = deque()
        self._num_submitted = self._num_named = 0

    # ---- requests

    @_locked
    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        deadline: float | None = None,
        queue_timeout: float | None = None,
        arrival: float | None = None,
        on_output: Callable[[Output], None] | None = None,
    ) -> str:
        """Queue a request and return its id. `prompt`: text, or token ids.

        Where `params` has no seed, the number of requests submitted before becomes its seed. `deadline` and
        `queue_timeout` are seconds from now; `arrival`: when it came, if not now (on the engine's clock). `on_output`
        gets every `Output` of it, which `step` then does not return; if it raises, this request ends with that error
        and no other. Raises RequestError for what can never run (an empty prompt, ids outside the vocabulary, a
        prompt beyond the context or the page pool) and for a full queue. It then has no record.
        """
        params = params or SamplingParams()
        if params.seed is None:
            params = replace(params, seed=self._num_submitted)
        request_id = self._checked_id(request_id)
        tokens = token_ids(prompt, self.model)
        now = self._clock()
        live = _Live(tokens, params, self.model, self.memory.page_size, on_output)
        answer = self.scheduler.add(
            Request(
                id=request_id,
                num_prompt=len(tokens),
                max_tokens=params.max_tokens,
                priority=priority,
                deadline=None if deadline is None else now + _seconds("deadline", deadline),
                queue_timeout=None if queue_timeout is None else _seconds("queue_timeout", queue_timeout),
                keys=live.prompt_keys,
            ),
            now,
        )
        if isinstance(answer, Refused):
            raise RequestError(answer.asked, answer.fact, answer.remedy)
        live.admit(answer.max_tokens, self.model.eos_ids)
        self._num_submitted += 1
        self._live[request_id] = live
        self.executor.add(request_id, tokens, params)
        self.recorder.arrived(request_id, now if arrival is None else arrival, len(tokens), answer.max_tokens)
        return request_id

    def abort(self, request_id: str) -> None:
        """End a request now and free its pages; unknown and ended ids are ignored."""
        self._abort(request_id)
        self._deliver()

    @_locked
    def _abort(self, request_id: str) -> None:
        if request_id in self._live:
            self.scheduler.abort(request_id, self._clock())
            self._end(request_id, "abort")

    @_locked
    def flush(self) -> None:
        """Nothing more is expected for now: static and dynamic batches need not wait for company."""
        self.scheduler.flush(self._clock())

    @property
    def num_live(self) -> int:
        """Requests submitted and not ended."""
        return len(self._live)

    def now(self) -> float:
        """The time on the engine's clock."""
        return self._clock()

    # ---- running

    def step(self) -> list[Output] | None:
        """Run at most one step; the outputs that it and the time that has passed brought. None: nothing could run now.

        Outputs of requests with a callback go to that alone. Under static batching a group that is not full waits
        until `flush` says that no more will come.
        """
        has_run = self._advance()
        with self._delivering:  # another thread may be adding to them
            outputs, self._outputs = self._outputs, []
        return outputs if outputs or has_run else None

    @_locked
    def wakeup(self) -> float | None:
        """When, on the engine's clock, `step` may have something to do though nobody submits or aborts."""
        return self.scheduler.wakeup(self._clock())

    def wait(self, until: float | None = None) -> None:
        """Sleep until `wakeup`, or until `until` if that is sooner; both are on the engine's clock.

        To be called when `step` had nothing to do. If neither is known, sleeps for a millisecond.
        """
        times = [moment for moment in (self.wakeup(), until) if moment is not None]
        time.sleep(min(max(0.0, min(times) - self._clock()), _LONG_WAIT) if times else _SHORT_WAIT)

    def stream(self, prompts: Prompt | Iterable[Prompt], params: Params = None) -> Iterator[Output]:
        """Submit `prompts` (one, or several) and yield their outputs as they come, interleaved.

        Ids are in the order of `prompts`. A prompt that cannot run yields one Output with its error. Closing the
        iterator aborts what is left.
        """
        mine: set[str] = set()
        inbox: deque[Output] = deque()  # filled by whoever steps the engine, be it another stream
        try:
            for prompt, its_params in paired(as_prompts(prompts), params):
                request_id = self._named()
                try:
                    mine.add(self.submit(prompt, its_params, request_id=request_id, on_output=inbox.append))
                except RequestError as error:
                    inbox.append(Output(request_id, None, "", "refused", str(error)))
            self.flush()
            while mine or inbox:
                if not inbox and not self._advance():
                    self.wait()
                while inbox:
                    output = inbox.popleft()
                    if output.finish_reason:
                        mine.discard(output.request_id)
                    yield output
        finally:
            for request_id in mine:
                self.abort(request_id)

    def generate(self, prompts: Prompt | Iterable[Prompt], params: Params = None) -> list[Completion]:
        """Run `prompts` (one, or several) to their ends; one Completion each, in their order, refused ones included.

        `params`: one for all, or one each.
        """
        outputs: dict[str, list[Output]] = {}
        for output in self.stream(prompts, params):
            outputs.setdefault(output.request_id, []).append(output)
        in_order = sorted(outputs, key=lambda request_id: int(request_id.removeprefix(_ID)))
        return [_completed(outputs[request_id]) for request_id in in_order]

    def chat(self, messages: Sequence[dict[str, Any]], params: SamplingParams | None = None) -> Completion:
        """The model's answer to `messages` (role and content), through its chat template."""
        return self.generate([self.chat_prompt(messages)], params)[0]

    def chat_prompt(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """Token ids of `messages` as the model's chat template writes them, ready for its answer."""
        tokenizer = tokenizer_of(self.model, "render a chat")
        return tokenizer.encode(tokenizer.apply_chat_template(messages), add_special_tokens=False)

    # ---- one step

    def _advance(self) -> bool:
        """Drop what has expired, run a step if one can run, deliver what came of both; whether a step ran."""
        has_run = self._run_step()
        self._deliver()
        return has_run

    @_locked
    def _run_step(self) -> bool:
        """An interrupt, or a bug in the executor, is the caller's, but the plan's pages must not be lost to it."""
        plan: StepPlan | None = None
        try:
            with uninterrupted():
                plan = self._plan()
            if plan is None:
                return False
            done = self._execute(plan)
            with uninterrupted():
                finished, plan = plan, None
                self._commit(finished, done)
        except BaseException as error:
            if plan is not None:
                with uninterrupted():
                    self._commit(plan, _Done(self._clock(), (), "exception", repr(error)))
            raise
        return True

    def _plan(self) -> StepPlan | None:
        now = self._clock()
        for dropped in self.scheduler.advance(now):
            self._drop(dropped)
        plan = self.scheduler.plan(now)
        if plan is not None:
            self.recorder.planned(plan, self.scheduler.load, now)
        return plan

    def _execute(self, plan: StepPlan) -> _Done:
        """What came of it: the one place where what an executor may raise becomes an outcome."""
        started = self._clock()
        try:
            return _Done(started, self.executor.start(plan).result())
        except (torch.OutOfMemoryError, MemoryError) as error:
            return _Done(started, (), "oom", str(error) or "out of memory")
        except RuntimeError as error:
            is_memory = "can't allocate memory" in str(error)
            return _Done(started, (), "oom" if is_memory else "exception", str(error))

    def _commit(self, plan: StepPlan, done: _Done) -> None:
        finished = self._clock()
        self.recorder.committed(plan.id, done.started, finished, done.failed)
        items = () if done.failed else tuple(self._items(plan, done.results, finished))
        for dropped in self.scheduler.commit(plan.id, finished, StepOutcome(items, done.failed)):
            self._drop(dropped, done.message)

    def _items(self, plan: StepPlan, results: Sequence[RowResult], now: float) -> Iterator[ItemOutcome]:
        """What the scheduler learns of each live row."""
        sampled = {result.request_id: result.sampled for result in results}
        for chunk in plan.chunks:
            if not chunk.num_tokens or chunk.request_id not in self._live:
                continue
            if chunk.samples:
                yield self._accept(chunk.request_id, sampled[chunk.request_id], now)
            else:
                yield ItemOutcome(chunk.request_id)

    def _accept(self, request_id: str, sampled: Sampled, now: float) -> ItemOutcome:
        """Hand out one new token, and end its request if that is its last."""
        live = self._live[request_id]
        if sampled.error is not None:
            self._end(request_id, "error", sampled.error)
            return ItemOutcome(request_id, error=True)
        live.num_output += 1
        self.recorder.token(request_id, now)
        text, reason = live.stop.push(sampled.token, live.text_of(sampled.token), live.num_output)
        output = Output(request_id, sampled.token, text, reason, None, sampled.logprob, sampled.top)
        self._undelivered.append(_Delivery(live, output, now))
        if reason is not None:
            self._forget(request_id)
        return ItemOutcome(request_id, 1, finished=reason is not None, keys=live.keys.push([sampled.token]))

    # ---- endings

    def _drop(self, dropped: Dropped, message: str = "") -> None:
        """The scheduler gave up on a request."""
        if dropped.reason in ("deadline", "queue_timeout"):
            self._end(dropped.request_id, dropped.reason)
        else:
            error = RequestError(
                f"run {dropped.request_id}",
                f"its step fails though it runs alone ({message})",
                "free memory, or send less at once" if dropped.reason == "out_of_memory" else "see what its input does",
            )
            self._end(dropped.request_id, "error", str(error))

    def _end(self, request_id: str, reason: FinishReason, error: str | None = None) -> None:
        """End a request for another reason than its own tokens."""
        live = self._live[request_id]
        self._forget(request_id)
        self._undelivered.append(_Delivery(live, Output(request_id, None, live.rest(), reason, error), self._clock()))

    def _forget(self, request_id: str) -> None:
        del self._live[request_id]
        self._ending.add(request_id)
        self.executor.remove(request_id)

    # ---- deliveries

    def _deliver(self) -> None:
        """Hand out what there is, after its step was committed: a callback may submit, abort, and even step."""
        with self._delivering:
            while self._undelivered:
                live, output, when = self._undelivered.popleft()
                try:
                    raised = self._notify(live, output)
                    if raised is not None:
                        output = self._failed(live, output, raised)
                    if live.on_output is None:
                        self._outputs.append(output)
                finally:
                    if output.finish_reason is not None:
                        self.recorder.ended(output.request_id, when, output.finish_reason, output.error)
                        self._ending.discard(output.request_id)

    @_locked
    def _failed(self, live: _Live, output: Output, raised: str) -> Output:
        """End the request whose callback raised; `output` as it now is."""
        if output.finish_reason is not None:
            return replace(output, finish_reason="error", error=raised)
        if self._live.get(output.request_id) is live:
            self.scheduler.abort(output.request_id, self._clock())
            self._end(output.request_id, "error", raised)
        return output

    def _notify(self, live: _Live, output: Output) -> str | None:
        """Call its callback, if it has one; what to say if that raised. It is then not called again."""
        if live.on_output is None:
            return None
        try:
            live.on_output(output)
        except Exception as error:  # noqa: BLE001 - whatever a user's callback raises ends its request alone
            live.on_output = None
            raised = f"it raised {type(error).__name__}: {error}"
            return f"call on_output of {output.request_id}: {raised}; catch what it may raise"
        return None

    # ---- prompts

    @_locked
    def _named(self) -> str:
        return self._checked_id(None)

    def _checked_id(self, request_id: str | None) -> str:
        """`request_id` if it is free, or a new one, whose number is higher than those before."""
        given: object = request_id
        if request_id is not None:
            asked = f"submit request {given!r:.80}"
            if not isinstance(given, str) or not given.isprintable():
                raise RequestError(asked, "an id is printable text", "use another id")
            if self._is_taken(request_id):
                raise RequestError(asked, "that id is live", "use another id")
            return request_id
        while True:
            name = f"{_ID}{self._num_named}"
            self._num_named += 1
            if not self._is_taken(name):
                return name

    def _is_taken(self, request_id: str) -> bool:
        return request_id in self._live or request_id in self._ending


def _seconds(name: str, value: float) -> float:
    """A duration as a finite float. Raises RequestError."""
    try:
        seconds = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise RequestError(f"submit a request with {name}={value!r:.40}", str(error), "give seconds") from error
    if not abs(seconds) < _LONGEST:
        raise RequestError(
            f"submit a request with {name}={seconds}", f"the limit is {_LONGEST:g} s", "give less, or None"
        )
    return seconds


def default_memory(model: LoadedModel, page_size: int = 16, num_bytes: int = DEFAULT_KV_BYTES) -> Memory:
    """Pages of KV cache that take up `num_bytes` for `model`, and its own context."""
    shape = model.decoder.shape
    num_tokens = num_bytes // shape.kv_bytes_per_token(model.decoder.dtype.itemsize)
    return Memory(max(1, num_tokens // page_size), page_size, shape.context)


def _loaded(
    model: LoadedModel | str | Path, dtype: torch.dtype | str | None, device: str | torch.device | None
) -> LoadedModel:
    if not isinstance(model, LoadedModel):
        return load(model, dtype or torch.bfloat16, device or "cpu")
    if dtype is not None or device is not None:
        asked = f"run {model.name} with dtype={dtype}, device={device}"
        raise ConfigError(asked, "it is loaded already, so they would have no effect", "give them to weights.load")
    return model


def _scheduler(policy: Policy, memory: Memory) -> Scheduler:
    given: object = policy
    if not callable(given):
        fact = f"it is {policy!r}, and a policy is a function that makes a scheduler for a Memory"
        raise ConfigError("use a policy", fact, "give Continuous, one_by_one, or lambda memory: static(memory, 8)")
    return policy(memory)


def _check_context(model: LoadedModel, memory: Memory) -> None:
    most = model.decoder.shape.context
    if memory.context > most:
        raise ConfigError(f"use a context of {memory.context}", f"{model.name} was made for {most}", "lower context")


def _completed(outputs: Sequence[Output]) -> Completion:
    last = outputs[-1]
    assert last.finish_reason is not None
    tokens = [output for output in outputs if output.token is not None]
    return Completion(
        request_id=last.request_id,
        tokens=tuple(output.token for output in tokens if output.token is not None),
        text="".join(output.text for output in outputs),
        finish_reason=last.finish_reason,
        error=last.error,
        logprobs=tuple((output.logprob, output.top_logprobs) for output in tokens if output.logprob is not None),
    )
