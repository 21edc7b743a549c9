"""The live driver: requests in, plans from the scheduler to the executor, tokens and text out.

It holds no policy and no tensors. One `step` is: drop what has expired, ask for a plan, execute it, commit what
happened, hand out the new tokens; `stepping` says in which order. Every submitted request ends exactly once, whatever
happens to it: a finish reason is in its last `Output`, and its record in `engine.recorder`.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from batchwright.serve.choices import Choices
from batchwright.serve.executor import Executor
from batchwright.serve.intake import Intake, Work, moment, seconds
from batchwright.serve.interrupts import uninterrupted
from batchwright.serve.live import LiveRequest
from batchwright.serve.loading.weights import LoadedModel, LoadOptions, load
from batchwright.serve.outputs import Completion, Output, completed
from batchwright.serve.prompts import Adapters, Params, Prompt, as_prompts, paired, tokenizer_of
from batchwright.serve.sampling.params import SamplingParams
from batchwright.serve.sequences import RowResult
from batchwright.serve.stepping import Step, Stepper

Policy = Callable[[Memory], Scheduler]

DEFAULT_KV_BYTES = 1 << 30
NEWEST_RECORDS = partial(Recorder, "engine", keep=1000)
_ID = "request-"
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

    `adapters`: LoRA adapters by name, as folders that PEFT wrote; a request names the one that it wants, and those of
    several run in one batch.

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
        adapters: Mapping[str, str | Path] | None = None,
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
        self._intake = Intake(self.model)
        for name, folder in (adapters or {}).items():
            self._intake.add_adapter(name, folder)
        self._clock = clock
        self._lock = RLock()  # over all state
        self._delivering = RLock()  # outputs are delivered in order, and without holding up other threads' submits
        self.recorder = recorder(self.memory.page_size, clock())
        self._stepper = Stepper(self.executor, self._plan, self._began, self._commit)
        self._live: dict[str, LiveRequest] = {}  # each choice of each request
        self._requests: dict[str, list[LiveRequest]] = {}  # by the client's id, until all of it is told
        self._outputs: list[Output] = []
        self._undelivered: deque[_Delivery] = deque()
        self._num_submitted = self._num_named = 0

    # ---- requests

    def submit(  # noqa: PLR0913 - all of them are a client's to say
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        adapter: str | None = None,
        priority: int = 0,
        deadline: float | None = None,
        queue_timeout: float | None = None,
        arrival: float | None = None,
        on_output: Callable[[Output], None] | None = None,
    ) -> str:
        """Queue a request and return its id. `prompt`: text, or token ids.

        Where `params` has no seed, the number of requests submitted before becomes its seed. `adapter`: the name of one
        that the engine has. `deadline` and `queue_timeout` are seconds from now; `arrival`: when it came, if not now
        (on the engine's clock). `on_output` gets every `Output` of it, which `step` then does not return; if it raises,
        this request ends with that error and no other. Raises RequestError for what can never run (an empty prompt, ids
        outside the vocabulary, a prompt beyond the context or the page pool, a constraint that nothing meets) and for a
        full queue. It then has no record.
        """
        work = self._intake.work(prompt, params or SamplingParams(), adapter)  # a constraint may take its time
        now = self._clock()
        request = Request(
            id="",
            num_prompt=len(work.tokens),
            max_tokens=work.params.max_tokens,
            priority=priority,
            deadline=None if deadline is None else now + seconds("deadline", deadline),
            queue_timeout=None if queue_timeout is None else seconds("queue_timeout", queue_timeout),
        )
        return self._submit(
            work, request, request_id, now if arrival is None else moment("arrival", arrival), on_output
        )

    @_locked
    def _submit(
        self, work: Work, request: Request, request_id: str | None, arrival: float,
        on_output: Callable[[Output], None] | None,
    ) -> str:  # fmt: skip
        with uninterrupted():  # half of it would leave the scheduler with a request that nobody knows
            params = work.params if work.params.seed is not None else replace(work.params, seed=self._num_submitted)
            choices = Choices(self._checked_id(request_id), params, on_output)
            lives = self._lives(choices, params, work)
            try:
                self._enter(lives, work, request)
            except BaseException:
                for live in lives:
                    self.scheduler.abort(live.id, self._clock())
                    self.executor.remove(live.id)
                raise
            self._num_submitted += 1
            self._requests[choices.id] = lives
            for live in lives:
                self._live[live.id] = live
                self.recorder.arrived(live.id, arrival, len(work.tokens), live.max_tokens)
        return choices.id

    def _lives(self, choices: Choices, params: SamplingParams, work: Work) -> list[LiveRequest]:
        """One for each choice, under ids that are free."""
        number, page_size = self._num_submitted, self.memory.page_size
        lives = [
            LiveRequest(choices, i, choices.params_of(params, i), work, number, self.model, page_size)
            for i in range(choices.num_computed)
        ]
        if taken := [live.id for live in lives[1:] if self._is_taken(live.id)]:
            raise RequestError(f"submit request {choices.id!r:.80}", f"id {taken[0]} is live", "use another id")
        return lives

    def _enter(self, lives: Sequence[LiveRequest], work: Work, request: Request) -> None:
        """Queue every choice of a request. Raises RequestError where one cannot run."""
        for live in lives:
            self.executor.add(live.id, work.tokens, live.params, work.extras(self.scheduler.max_drafts))
            answer = self.scheduler.add(replace(request, id=live.id, keys=live.prompt_keys), self._clock())
            if isinstance(answer, Refused):
                raise RequestError(answer.asked, answer.fact, answer.remedy)
            live.admit(answer.max_tokens, self.model.eos_ids)

    def abort(self, request_id: str) -> None:
        """End a request now, and free its pages as soon as no step uses them; unknown and ended ids are ignored.

        If nobody is left, this waits for the step that runs, if one does.
        """
        self._abort(request_id)
        self._deliver()
        self._rest()

    @_locked
    def _abort(self, request_id: str) -> None:
        self._end_all(request_id, "abort")

    @_locked
    def flush(self) -> None:
        """Nothing more is expected for now: static and dynamic batches need not wait for company."""
        self.scheduler.flush(self._clock())

    @property
    def num_live(self) -> int:
        """Choices of requests submitted and not ended; most requests ask for one."""
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

    def stream(
        self, prompts: Prompt | Iterable[Prompt], params: Params = None, *, adapter: Adapters = None
    ) -> Iterator[Output]:
        """Submit `prompts` (one, or several) and yield their outputs as they come, interleaved.

        `params` and `adapter`: one for all, or one each. Ids are in the order of `prompts`. A prompt that cannot run
        yields one Output with its error. Closing the iterator aborts what is left.
        """
        mine: dict[str, int] = {}  # choices that have not ended
        inbox: deque[Output] = deque()  # filled by whoever steps the engine, be it another stream
        try:
            for prompt, its_params, its_adapter in paired(as_prompts(prompts), params, adapter):
                request_id = self._named()
                mine[request_id] = its_params.n  # beforehand: an interrupt may strike when it has been submitted
                try:
                    self.submit(prompt, its_params, request_id=request_id, adapter=its_adapter, on_output=inbox.append)
                except RequestError as error:
                    del mine[request_id]
                    inbox.append(Output(request_id, None, "", "refused", str(error)))
            self.flush()
            while mine or inbox:
                if not inbox and not self._advance():
                    self.wait()
                while inbox:
                    output = inbox.popleft()
                    if output.finish_reason and output.request_id in mine:
                        mine[output.request_id] -= 1
                        if not mine[output.request_id]:
                            del mine[output.request_id]
                    yield output
        finally:
            for request_id in mine:
                self.abort(request_id)

    def generate(
        self, prompts: Prompt | Iterable[Prompt], params: Params = None, *, adapter: Adapters = None
    ) -> list[Completion]:
        """Run `prompts` (one, or several) to their ends; one Completion each, in their order, refused ones included.

        `params` and `adapter`: one for all, or one each.
        """
        outputs: dict[str, list[Output]] = {}
        for output in self.stream(prompts, params, adapter=adapter):
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
        results = () if step.failed else step.results or ()
        num_right = sum(len(result.samples[1:]) for result in results if result.request_id not in late)
        self.recorder.committed(
            step.plan.id, finished, step.failed, late, num_right=num_right, expert_tokens=step.expert_tokens
        )
        items = () if step.failed else tuple(self._items(step, finished))
        for dropped in self.scheduler.commit(step.plan.id, now, StepOutcome(items, step.failed)):
            self._drop(dropped, step.message)

    def _items(self, step: Step, now: float) -> Iterator[ItemOutcome]:
        """What the scheduler learns of each row whose request has not ended meanwhile."""
        results = {result.request_id: result for result in step.results or ()}
        for live in step.rows:
            if not live.has_ended:
                result = results.get(live.id)
                yield ItemOutcome(live.id) if result is None else self._accept(live, result, now)

    def _accept(self, live: LiveRequest, result: RowResult, now: float) -> ItemOutcome:
        """Hand out the new tokens of one row, and end its request if the last of its tokens is among them."""
        live.score(result.prompt_scores)
        tokens: list[int] = []
        for sampled in result.samples:
            if sampled.error is not None:
                self._end(live, "error", sampled.error)
                return ItemOutcome(live.id, len(tokens), error=True)
            self.recorder.token(live.id, now)
            tokens.append(sampled.token)
            output = live.push(sampled)
            self._undelivered.append(_Delivery(live, output, now))
            if output.finish_reason is not None:
                self._forget(live)
                break
        keys = live.keys.push(tokens)
        return ItemOutcome(live.id, len(tokens), finished=live.has_ended, keys=keys, num_drafts=result.num_drafts)

    # ---- endings

    def _drop(self, dropped: Dropped, message: str = "") -> None:
        """The scheduler gave up on a request."""
        if dropped.reason in ("deadline", "queue_timeout"):
            self._end(self._live[dropped.request_id], dropped.reason)
        else:
            error = RequestError(
                f"run {dropped.request_id}",
                f"its step fails though it runs alone ({message})",
                "free memory, or send less at once" if dropped.reason == "out_of_memory" else "see what its input does",
            )
            self._end(self._live[dropped.request_id], "error", str(error))

    def _end_all(self, request_id: str, reason: FinishReason, error: str | None = None) -> None:
        """End what is left of a client's request; the scheduler is told."""
        for live in self._requests.get(request_id, ()):
            if not live.has_ended:
                self.scheduler.abort(live.id, self._clock())
                self._end(live, reason, error)

    def _end(self, live: LiveRequest, reason: FinishReason, error: str | None = None) -> None:
        """End one choice for another reason than its own tokens."""
        self._forget(live)
        self._undelivered.append(_Delivery(live, live.ending(reason, error), self._clock()))

    def _forget(self, live: LiveRequest) -> None:
        live.has_ended = True
        del self._live[live.id]
        self.executor.remove(live.id)

    # ---- deliveries

    def _deliver(self) -> None:
        """Hand out what there is, after its step was committed: a callback may submit, abort, and even step."""
        with self._delivering:
            while self._undelivered:
                live, output, when = self._undelivered.popleft()
                try:
                    for shown in live.choices.take(output):
                        output = self._hand_out(live, output, shown)
                finally:
                    if output.finish_reason is not None:
                        self.recorder.ended(live.id, when, output.finish_reason, output.error)
                        if live.choices.has_ended:  # a callback that steps may have told the last of it already
                            self._requests.pop(live.choices.id, None)

    def _hand_out(self, live: LiveRequest, output: Output, shown: Output) -> Output:
        """Give `shown` to the client of `live`; `output` as it is then recorded."""
        raised = self._notify(live.choices, shown)
        if raised is not None:
            shown, output = (self._failed(live, each, raised) for each in (shown, output))
        if live.choices.on_output is None:
            self._outputs.append(shown)
        return output

    @_locked
    def _failed(self, live: LiveRequest, output: Output, raised: str) -> Output:
        """End the request whose callback raised; `output` as it now is."""
        self._end_all(live.choices.id, "error", raised)
        return output if output.finish_reason is None else output._replace(finish_reason="error", error=raised)

    def _notify(self, choices: Choices, output: Output) -> str | None:
        """Call its callback, if it has one; what to say if that raised. It is then not called again."""
        if choices.on_output is None:
            return None
        try:
            choices.on_output(output)
        except Exception as error:  # noqa: BLE001 - whatever a user's callback raises ends its request alone
            choices.on_output = None
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
        return request_id in self._live or request_id in self._requests


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
