"""The live driver: requests in, plans from the scheduler to the executor, tokens and text out.

It holds no policy and no tensors. One `step` is: drop what has expired, ask for a plan, execute it, commit what
happened, hand out the new tokens; `stepping` says in which order. Every submitted request ends exactly once, whatever
happens to it: a finish reason is in its last `Output`, and its record in `engine.recorder`.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from threading import RLock
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar, Unpack

from batchwright.errors import ConfigError, RequestError
from batchwright.policy.continuous import Continuous
from batchwright.policy.pages import Memory
from batchwright.policy.types import Dropped, ItemOutcome, Refused, Request, Scheduler, StepOutcome
from batchwright.records import FinishReason, Recorder
from batchwright.serve.executor import Executor
from batchwright.serve.live import LiveRequest
from batchwright.serve.outputs import Completion, Output, completed
from batchwright.serve.params import SamplingParams
from batchwright.serve.prompts import Params, Prompt, as_prompts, paired, token_ids, tokenizer_of
from batchwright.serve.sampling import Sampled
from batchwright.serve.stepping import Step, Stepper
from batchwright.serve.weights import LoadedModel, LoadOptions, load

Policy = Callable[[Memory], Scheduler]

DEFAULT_KV_BYTES = 1 << 30
NEWEST_RECORDS = partial(Recorder, "engine", keep=1000)
_ID = "request-"
_LONGEST = 1e9  # seconds, of any wait
_LONG_WAIT = 3600.0  # seconds, before looking again
_SHORT_WAIT = 0.001  # seconds, when it is not known what is waited for


P = ParamSpec("P")
R = TypeVar("R")


def _locked(method: Callable[Concatenate["Engine", P], R]) -> Callable[Concatenate["Engine", P], R]:
    """One call at a time, whatever thread it comes from; a callback may call again."""

    @wraps(method)
    def locked(self: "Engine", /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._lock:
            return method(self, *args, **kwargs)

    return locked


class _Delivery(NamedTuple):
    """An output on its way to its request's callback, or to the caller of `step`."""

    live: LiveRequest
    output: Output
    when: float


class Engine:
    """Generates text with one model under one batching policy.

    `model`: a loaded model, or what `weights.load` takes, with `options` for it (`dtype` bfloat16 and `device` "cpu" by
    default).
    `policy(memory)` makes the scheduler. `memory` is 1 GiB of KV cache by default. `clock` and `executor` can be
    replaced. Threads may share an engine: calls take turns, and requests of all threads run in the same batches.

    `recorder(page_size, origin)` makes the recorder. By default that keeps the newest 1,000 requests and as many
    steps, so that an engine may live for ever; to measure, give `partial(Recorder, "my run")`, which keeps all.

    `deterministic`: what a request gets is the same, bit for bit, in any batch, after preemption, however its prompt is
    cut and cached. With our own kernels that costs nothing; where they cannot run, every position is computed by
    itself, which is many times slower. A request drawn at random then needs a seed of its own.

    Where the executor overlaps (CUDA, OpenVINO), a step is planned while the one before runs, and has begun when that
    one's outputs are handed out.

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
        deterministic: bool = False,
        clock: Callable[[], float] = time.perf_counter,
        executor: Callable[[Any, Memory], Executor] | None = None,
        recorder: Callable[[int, float], Recorder] = NEWEST_RECORDS,
        **options: Unpack[LoadOptions],
    ) -> None:
        self.model = _loaded(model, options, deterministic=deterministic)
        self.memory = memory or default_memory(self.model)
        _check_context(self.model, self.memory)
        self.scheduler = _scheduler(policy, self.memory)
        self.executor = (
            executor(self.model.decoder, self.memory)
            if executor
            else self.model.make_executor(self.memory, deterministic=deterministic)
        )
        self._clock = clock
        self._lock = RLock()  # over all state
        self._delivering = RLock()  # outputs are delivered in order, and without holding up other threads' submits
        self.recorder = recorder(self.memory.page_size, clock())
        self._stepper = Stepper(self.executor, self._plan, self._began, self._commit)
        self._live: dict[str, LiveRequest] = {}
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
        live = LiveRequest(request_id, tokens, params, self.model, self.memory.page_size, on_output)
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
        """End a request now, and free its pages as soon as no step uses them; unknown and ended ids are ignored.

        If nobody is left, this waits for the step that runs, if one does.
        """
        self._abort(request_id)
        self._deliver()
        self._rest()

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
        """Take at most one step to its end; the outputs that it and the time that has passed brought.

        None: nothing runs, and nothing could run now.

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
        return [completed(outputs[request_id]) for request_id in in_order]

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
        self._rest()
        return has_run

    @_locked
    def _run_step(self) -> bool:
        return self._stepper.advance()

    @_locked
    def _rest(self) -> None:
        """When nobody is left, a step that was begun for those who were comes to its end."""
        if not self._live:
            self._stepper.finish()

    def _plan(self) -> Step | None:
        now = self._clock()
        for dropped in self.scheduler.advance(now):
            self._drop(dropped)
        plan = self.scheduler.plan(now)
        if plan is None:
            return None
        self.recorder.planned(plan, self.scheduler.load)
        ids = (chunk.request_id for chunk in plan.chunks if chunk.num_tokens)
        return Step(plan, [self._live[request_id] for request_id in ids if request_id is not None], self._clock)

    def _began(self, step: Step) -> None:
        assert step.started is not None
        self.recorder.began(step.plan.id, step.started)

    def _commit(self, step: Step) -> None:
        now = self._clock()
        finished = now if step.finished is None else step.finished
        late = frozenset(live.id for live in step.rows if live.has_ended)
        self.recorder.committed(step.plan.id, finished, step.failed, late)
        items = () if step.failed else tuple(self._items(step, finished))
        for dropped in self.scheduler.commit(step.plan.id, now, StepOutcome(items, step.failed)):
            self._drop(dropped, step.message)

    def _items(self, step: Step, now: float) -> Iterator[ItemOutcome]:
        """What the scheduler learns of each row whose request has not ended meanwhile."""
        sampled = {result.request_id: result.sampled for result in step.results or ()}
        chunks = (chunk for chunk in step.plan.chunks if chunk.num_tokens)
        for live, chunk in zip(step.rows, chunks, strict=True):
            if live.has_ended:
                continue
            if chunk.samples:
                yield self._accept(live, sampled[live.id], now)
            else:
                yield ItemOutcome(live.id)

    def _accept(self, live: LiveRequest, sampled: Sampled, now: float) -> ItemOutcome:
        """Hand out one new token, and end its request if that is its last."""
        if sampled.error is not None:
            self._end(live.id, "error", sampled.error)
            return ItemOutcome(live.id, error=True)
        self.recorder.token(live.id, now)
        text, reason = live.push(sampled.token)
        output = Output(live.id, sampled.token, text, reason, None, sampled.logprob, sampled.top)
        self._undelivered.append(_Delivery(live, output, now))
        if reason is not None:
            self._forget(live)
        return ItemOutcome(live.id, 1, finished=reason is not None, keys=live.keys.push([sampled.token]))

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
        self._forget(live)
        self._undelivered.append(_Delivery(live, Output(request_id, None, live.rest(), reason, error), self._clock()))

    def _forget(self, live: LiveRequest) -> None:
        live.has_ended = True
        del self._live[live.id]
        self._ending.add(live.id)
        self.executor.remove(live.id)

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
    def _failed(self, live: LiveRequest, output: Output, raised: str) -> Output:
        """End the request whose callback raised; `output` as it now is."""
        if output.finish_reason is not None:
            return output._replace(finish_reason="error", error=raised)
        if not live.has_ended:
            self.scheduler.abort(output.request_id, self._clock())
            self._end(output.request_id, "error", raised)
        return output

    def _notify(self, live: LiveRequest, output: Output) -> str | None:
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


def default_memory(model: LoadedModel, page_size: int | None = None, num_bytes: int = DEFAULT_KV_BYTES) -> Memory:
    """Pages of KV cache that take up `num_bytes` for `model`, of the size it likes best, and its own context."""
    shape, page_size = model.decoder.shape, page_size or model.page_size
    num_tokens = num_bytes // shape.kv_bytes_per_token(model.decoder.dtype.itemsize)
    return Memory(max(1, num_tokens // page_size), page_size, shape.context)


def _loaded(model: LoadedModel | str | Path, options: LoadOptions, *, deterministic: bool) -> LoadedModel:
    if not isinstance(model, LoadedModel):
        return load(model, deterministic=deterministic, **options)
    if options:
        asked = f"run {model.name} with {', '.join(f'{name}={value}' for name, value in options.items())}"
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
