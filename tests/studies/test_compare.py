"""Both scenes under every strategy on a tiny model: the same work everywhere, honest arrivals, refusals before work."""

import json
import re
from collections.abc import Callable
from itertools import chain, islice
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("torch")

from batchwright.bench.summary import summarize
from batchwright.errors import BatchwrightError, ConfigError, InputError, RequestError
from batchwright.records import RequestRecord, StepRecord, read_records, write_records
from batchwright.studies.compare import compare
from batchwright.studies.comparison import STRATEGIES, CompareSettings, Comparison, Recorded
from batchwright.traffic import poisson
from tests.contract.rules import REPOSITORY
from tests.studies.tiny import CONTEXT, MACHINE, Log, compared, settings_for, write_checkpoint

DATA = REPOSITORY / "tests" / "data"
SCENES = ("all at once", "arriving over time")
NUM_REQUESTS = 9

Compared = tuple[Comparison, list[Recorded]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def log() -> Log:
    return Log()


@pytest.fixture(scope="module")
def whole(model: Path, log: Log) -> Compared:
    """All strategies over made requests, once for all tests that only look."""
    settings = settings_for(
        model, num_requests=NUM_REQUESTS, mean_prompt=24, mean_output=12, batch_size=4, max_queue_delay=0.02, seed=1
    )
    return compare(settings, log, MACHINE)


@pytest.fixture
def lines(tmp_path: Path) -> Callable[..., Path]:
    """Writes a requests file."""

    def write(*requests: dict[str, Any]) -> Path:
        path = tmp_path / "requests.jsonl"
        path.write_text("".join(f"{json.dumps(request)}\n" for request in requests))
        return path

    return write


def by_id(recorded: Recorded) -> dict[str, RequestRecord]:
    return {request.id: request for request in recorded.requests}


# ---- the same work


def test_both_scenes_run_under_all_four_strategies(whole: Compared) -> None:
    """In the order in which they are listed, each with its records."""
    comparison, recorded = whole
    assert [scene.title for scene in comparison.scenes] == list(SCENES)
    assert [[run.strategy for run in scene.runs] for scene in comparison.scenes] == [list(STRATEGIES)] * 2
    assert [one.run for one in recorded] == [f"{scene}/{name}" for scene in SCENES for name in STRATEGIES]


def test_every_request_does_the_same_under_every_strategy(whole: Compared) -> None:
    """Prompt and output lengths are equal, and everything that was asked for was produced."""
    _, recorded = whole
    lengths = [{name: (r.num_prompt, r.num_output) for name, r in by_id(one).items()} for one in recorded]
    assert all(one == lengths[0] for one in lengths)
    assert len(lengths[0]) == NUM_REQUESTS
    requests = [request for one in recorded for request in one.requests]
    assert {request.finish_reason for request in requests} == {"length"}
    assert all(request.num_output == request.max_tokens == len(request.token_times) for request in requests)


def test_requests_that_end_by_themselves_end_alike_under_every_strategy(
    tmp_path: Path, lines: Callable[..., Path]
) -> None:
    """Greedy tokens in float32 don't depend on the batch: each request meets its end token at the same place."""
    model = write_checkpoint(tmp_path / "ends", eos_token_id=list(range(0, 300, 3)))
    file = lines(*({"prompt": chr(97 + i) * (2 * i + 1), "max_tokens": 40} for i in range(16)))
    _, recorded = compared(model, requests=file, batch_size=3, max_queue_delay=0.0, rate=1000.0)
    ends = [{name: (r.num_output, r.finish_reason) for name, r in by_id(one).items()} for one in recorded]
    assert all(one == ends[0] for one in ends)
    assert {reason for _, reason in ends[0].values()} == {"stop", "length"}
    assert len({num_output for num_output, _ in ends[0].values()}) > 2


def test_each_strategy_wastes_what_it_must(whole: Compared) -> None:
    """Alone: nothing. In fixed groups: padding and dead rows. Continuous: neither, whatever arrives when."""
    for scene in whole[0].scenes:
        waste = {run.strategy: (run.summary.padding_waste, run.summary.dead_row_waste) for run in scene.runs}
        assert waste["one-by-one"] == waste["continuous"] == (0.0, 0.0)
        assert min(waste["static"]) > 0.0
    at_once = {run.strategy: run.summary for run in whole[0].scenes[0].runs}
    assert at_once["dynamic"].padding_waste == at_once["static"].padding_waste
    assert at_once["dynamic"].dead_row_waste == at_once["static"].dead_row_waste


def test_batches_are_as_large_as_their_strategy_says(whole: Compared) -> None:
    """One row, four rows, and with all requests there at once as many as there are."""
    sizes = {run.strategy: run.summary.batch_max for run in whole[0].scenes[0].runs}
    assert sizes == {"one-by-one": 1, "static": 4, "dynamic": 4, "continuous": NUM_REQUESTS}


def test_no_step_fails_and_no_page_is_left(whole: Compared) -> None:
    """The last step of a run holds pages for those that end with it, and never more than the pool has."""
    for one in whole[1]:
        assert not [step for step in one.steps if step.failed]
        assert max(step.pages_held for step in one.steps) <= 256
        assert all(step.pages_held * step.page_size >= step.tokens_stored for step in one.steps)


def test_useful_work_is_counted_alike(whole: Compared) -> None:
    """The same tokens are the same FLOPs under every strategy, and the roofline's share follows from the time taken."""
    for scene in whole[0].scenes:
        assert len({run.useful_flops for run in scene.runs}) == 1
        for run in scene.runs:
            assert run.roofline_share == pytest.approx(run.useful_flops / (1e11 * run.summary.makespan))


# ---- arrivals


def test_requests_start_after_they_arrive(whole: Compared) -> None:
    """In real time: no strategy sees a request before its time."""
    for one in whole[1]:
        assert all(r.arrival <= r.started <= r.token_times[0] <= r.finished for r in one.requests)


def test_all_at_once_is_all_at_zero(whole: Compared) -> None:
    """The first scene has no arrivals, whatever the second has."""
    assert {request.arrival for one in whole[1][:4] for request in one.requests} == {0.0}
    assert whole[0].scenes[0].rate is None


def test_the_offered_rate_is_seven_tenths_of_the_continuous_capacity(whole: Compared) -> None:
    """Requests per second of the first scene, times 0.7; the arrivals are Poisson at that rate, seeded."""
    comparison, recorded = whole
    continuous = comparison.scenes[0].runs[-1].summary
    rate = comparison.scenes[1].rate
    assert rate == pytest.approx(0.7 * NUM_REQUESTS / continuous.makespan)
    assert comparison.scenes[1].load == pytest.approx(0.7)
    assert comparison.scenes[1].offered == f"{rate:.2f} requests/s, 70% of what continuous batching managed above"
    expected = list(islice(poisson(rate, 1), NUM_REQUESTS))
    for one in recorded[4:]:
        arrivals = [request.arrival for _, request in sorted(by_id(one).items())]
        assert arrivals == pytest.approx(expected, abs=1e-6)


def test_load_is_a_share_of_the_fastest_where_continuous_does_not_run(model: Path) -> None:
    """The first scene's shortest time stands in for it."""
    comparison, _ = compared(
        model, num_requests=3, mean_prompt=6, mean_output=4, load=2.0, strategies=("static", "one-by-one")
    )
    fastest = min(run.summary.makespan for run in comparison.scenes[0].runs)
    assert comparison.scenes[1].rate == pytest.approx(2.0 * 3 / fastest)
    assert re.search(r"200% of what (static batching|running one by one) managed above", comparison.scenes[1].offered)


def test_a_rate_is_offered_as_given(model: Path) -> None:
    """Poisson arrivals for requests that have none of their own."""
    comparison, (_, timed) = compared(
        model, num_requests=4, mean_prompt=6, mean_output=2, rate=200.0, strategies=("continuous",)
    )
    assert comparison.scenes[1].rate == 200.0
    assert comparison.scenes[1].offered.startswith("200.00 requests/s, as asked, ")
    assert comparison.scenes[1].load == pytest.approx(200.0 / comparison.scenes[0].runs[0].capacity)
    assert [r.arrival for r in sorted(timed.requests, key=lambda r: r.id)] == pytest.approx(
        list(islice(poisson(200.0, 0), 4)), abs=1e-6
    )


ARRIVALS = (1000.0, 1000.06, 1000.02, 1000.06)


@pytest.mark.parametrize(
    ("changes", "stretch", "rate"), [({}, 1.0, 50.0), ({"rate": 100.0}, 0.5, 100.0), ({"rate": 25.0}, 2.0, 25.0)]
)
def test_recorded_arrivals_stay_or_are_stretched_to_a_rate(
    model: Path, lines: Callable[..., Path], changes: dict[str, float], stretch: float, rate: float
) -> None:
    """As in the file, counted from the first; a rate stretches all gaps alike."""
    file = lines(*({"ids": [i + 1] * 5, "max_tokens": 2, "arrival": time} for i, time in enumerate(ARRIVALS)))
    comparison, (at_once, timed) = compared(model, requests=file, strategies=("continuous",), **changes)
    assert comparison.scenes[1].rate == pytest.approx(rate)
    assert comparison.scenes[1].offered.startswith(f"{rate:.2f} requests/s, as {'asked' if changes else 'recorded'}, ")
    assert {request.arrival for request in at_once.requests} == {0.0}
    expected = {f"line-{i + 1}": (time - 1000.0) * stretch for i, time in enumerate(ARRIVALS)}
    assert {request.id: request.arrival for request in timed.requests} == pytest.approx(expected, abs=1e-6)


def test_a_load_stretches_recorded_arrivals_too(model: Path, lines: Callable[..., Path]) -> None:
    """The capacity is measured, the gaps' proportions are the file's."""
    file = lines(*({"ids": [1], "max_tokens": 1, "arrival": time} for time in (0.0, 1.0, 3.0)))
    comparison, (_, timed) = compared(model, requests=file, strategies=("continuous",), load=0.5)
    capacity = 3 / comparison.scenes[0].runs[0].summary.makespan
    assert comparison.scenes[1].rate == pytest.approx(0.5 * capacity)
    first, second, third = sorted(request.arrival for request in timed.requests)
    assert first == pytest.approx(0.0, abs=1e-6)
    assert third == pytest.approx(3 * second, abs=1e-5)
    assert 2 / third == pytest.approx(0.5 * capacity, rel=0.01)


@pytest.mark.parametrize("changes", [{"rate": 5.0}, {"load": 0.5}])
def test_arrivals_that_are_all_one_moment_cannot_be_stretched(
    model: Path, lines: Callable[..., Path], changes: dict[str, float]
) -> None:
    """The rate would have no effect, so it is refused before anything runs."""
    file = lines(*({"ids": [1], "max_tokens": 1, "arrival": 7.0} for _ in range(3)))
    assert_refused(ConfigError, "all arrive at the same time", settings_for(model, requests=file, **changes))
    comparison, _ = compared(model, requests=file, strategies=("continuous",))
    assert comparison.scenes[1].rate is None
    assert comparison.scenes[1].offered == "all at the same time, as recorded"


# ---- sources and sizes


def test_a_single_request_is_a_comparison(model: Path) -> None:
    """Of one token: no TPOT, no decode step, and no division by zero."""
    comparison, recorded = compared(model, num_requests=1, mean_prompt=1, mean_output=1)
    assert [len(one.requests) for one in recorded] == [1] * 8
    assert {run.summary.num_completed for scene in comparison.scenes for run in scene.runs} == {1}


def test_strategies_run_in_the_order_given(model: Path) -> None:
    """A subset, reversed."""
    comparison, _ = compared(
        model, num_requests=2, mean_prompt=4, mean_output=2, strategies=("continuous", "one-by-one")
    )
    assert [[run.strategy for run in scene.runs] for scene in comparison.scenes] == [["continuous", "one-by-one"]] * 2


@pytest.mark.parametrize("name", ["azure_code.csv", "azure_conv.csv", "mooncake_synthetic.jsonl"])
def test_a_trace_scaled_to_the_model_is_replayed(model: Path, name: str) -> None:
    """Arrivals stretched to a rate; prompts and outputs fill the context at most."""
    comparison, (_, timed) = compared(
        model, trace=DATA / name, num_requests=4, scale_lengths=True, rate=100.0, strategies=("continuous",)
    )
    assert comparison.scenes[1].runs[0].summary.num_completed == 4
    assert max(request.num_prompt + request.num_output for request in timed.requests) <= CONTEXT
    assert 3 / (max(request.arrival for request in timed.requests)) == pytest.approx(100.0, rel=1e-3)


def test_a_trace_that_fits_is_replayed_as_it_is(model: Path) -> None:
    """Azure's first conversation needs no scaling, even for a context of 512."""
    _, (_, timed) = compared(model, trace=DATA / "azure_conv.csv", num_requests=1, strategies=("continuous",))
    (request,) = timed.requests
    assert (request.num_prompt, request.num_output, request.arrival) == (374, 44, pytest.approx(0.0, abs=1e-6))


def test_more_requests_than_a_trace_holds_are_all_of_it(model: Path, tmp_path: Path) -> None:
    """Nothing is repeated to make up the number."""
    (tmp_path / "short.csv").write_text("\n".join((DATA / "azure_code.csv").read_text().splitlines()[:3]))
    comparison, _ = compared(
        model,
        trace=tmp_path / "short.csv",
        num_requests=100,
        scale_lengths=True,
        rate=100.0,
        strategies=("continuous",),
    )
    assert comparison.num_requests == 2


def test_blocks_that_a_trace_shares_are_found_in_the_cache(model: Path, tmp_path: Path) -> None:
    """Equal keys become equal text: all full pages of the shared block but none of the rest, continuous only."""
    trace = tmp_path / "shared.jsonl"
    requests = [(300, [7]), (200, [7]), (200, [8])]
    trace.write_text(
        "".join(
            json.dumps({"timestamp": 10 * i, "input_length": length, "output_length": 2, "hash_ids": keys}) + "\n"
            for i, (length, keys) in enumerate(requests)
        )
    )
    _, recorded = compared(model, trace=trace, max_rows=1, strategies=("static", "continuous"))
    cached = [{name: request.num_cached for name, request in by_id(one).items()} for one in recorded]
    assert cached[0] == cached[2] == {"line-1": 0, "line-2": 0, "line-3": 0}
    assert cached[1] == cached[3] == {"line-1": 0, "line-2": 192, "line-3": 0}


def test_cached_tokens_are_no_useful_work(model: Path, lines: Callable[..., Path]) -> None:
    """What a cache saves is not counted as computed; only the strategy that reuses prefixes says so in its note."""
    file = lines(*({"ids": [9] * 64, "max_tokens": 2, "ignore_eos": True} for _ in range(2)))
    comparison, _ = compared(model, requests=file, max_rows=1, rate=100.0, strategies=("static", "continuous"))
    static, continuous = comparison.scenes[0].runs
    assert continuous.summary.num_cached == 48
    assert continuous.useful_flops < static.useful_flops
    assert ["prefixes reused" in run.note for run in (static, continuous)] == [False, True]


def test_outputs_are_cut_to_what_context_and_pool_allow(model: Path, lines: Callable[..., Path]) -> None:
    """An enormous limit is the longest that fits: in the records, in the totals and on the progress bar."""
    file = lines({"ids": [1] * 10, "max_tokens": 10**30, "ignore_eos": True})
    log = Log()
    settings = settings_for(model, requests=file, num_pages=4, rate=100.0, strategies=("continuous",))
    comparison, recorded = compare(settings, log, MACHINE)
    assert comparison.num_output_tokens == 4 * 16 - 10
    assert {request.num_output for one in recorded for request in one.requests} == {54}
    assert dict(log.begun)[f"{SCENES[0]}: continuous"] == log.done[f"{SCENES[0]}: continuous"] == 54
    msgspec.json.encode(comparison)


def test_a_pool_too_small_for_all_still_finishes_all(model: Path) -> None:
    """Preempted or queued, every request gets its tokens under every strategy."""
    comparison, recorded = compared(
        model, num_requests=6, mean_prompt=20, mean_output=20, num_pages=8, seed=3, rate=1000.0
    )
    assert {run.summary.num_completed for scene in comparison.scenes for run in scene.runs} == {6}
    assert all(request.num_output == request.max_tokens for one in recorded for request in one.requests)


def test_progress_reaches_its_end_in_every_part(whole: Compared, log: Log) -> None:
    """Each strategy is one part, with as many steps as there are output tokens."""
    parts = {f"{scene}: {name}": whole[0].num_output_tokens for scene in SCENES for name in STRATEGIES}
    assert {what: total for what, total in log.begun if what in parts} == log.done == parts


# ---- what is kept


def test_the_json_reads_back_as_a_comparison(whole: Compared) -> None:
    """Typed, equal, and with what is needed to repeat it."""
    comparison, _ = whole
    again = msgspec.json.decode(msgspec.json.encode(comparison), type=Comparison)
    assert again.scenes == comparison.scenes
    assert again.hardware == comparison.hardware
    assert again.settings["seed"] == 1
    assert again.settings["strategies"] == list(STRATEGIES)
    assert again.versions.keys() == {"batchwright", "torch"}
    assert msgspec.json.encode(again) == msgspec.json.encode(comparison)


def test_records_read_back_and_reproduce_the_summaries(whole: Compared, tmp_path: Path) -> None:
    """The numbers of the JSON follow from the records file alone."""
    comparison, recorded = whole
    file = tmp_path / "records.jsonl"
    write_records(file, chain.from_iterable((*one.requests, *one.steps) for one in recorded))
    records = list(read_records(file))
    for scene in comparison.scenes:
        for run in scene.runs:
            its = [record for record in records if record.run == f"{scene.title}/{run.strategy}"]
            requests = [record for record in its if isinstance(record, RequestRecord)]
            steps = [record for record in its if isinstance(record, StepRecord)]
            assert summarize(requests, steps) == run.summary


# ---- refused before anything is timed


def assert_refused(kind: type[BatchwrightError], fact: str, settings: CompareSettings) -> BatchwrightError:
    """Nothing but the model's loading has begun, and the machine was not measured."""
    log = Log()
    with pytest.raises(kind) as caught:
        compare(settings, log)
    assert fact in str(caught.value)
    assert caught.value.remedy
    assert [what.split()[0] for what, _ in log.begun] == ["loading"]
    return caught.value


@pytest.mark.parametrize(
    ("request_fields", "changes", "fact"),
    [
        ({"ids": [1] * CONTEXT}, {}, "needs a context of 513"),
        ({"ids": [1] * 64}, {"num_pages": 4}, "it needs 5 pages of 16, the pool has 4"),
        ({"ids": [1] * 64}, {"num_pages": 64, "page_size": 1}, "it needs 65 pages of 1, the pool has 64"),
        ({"ids": [300]}, {}, "its prompt holds 300; token ids are integers from 0 to 299"),
        ({"ids": [-1]}, {}, "its prompt holds -1"),
        ({"ids": [10**30]}, {}, "its prompt holds 1000000"),
    ],
)
def test_a_request_that_can_never_run_is_refused_by_name(
    model: Path, lines: Callable[..., Path], request_fields: dict[str, Any], changes: dict[str, int], fact: str
) -> None:
    """Over the context, over the pool, outside the vocabulary."""
    settings = settings_for(model, requests=lines({"ids": [1]}, request_fields), **changes)
    error = assert_refused(RequestError, fact, settings)
    assert error.asked == f"run the request line-2, {len(request_fields['ids'])} tokens long"


def test_a_trace_beyond_the_context_says_that_it_can_be_scaled(model: Path) -> None:
    """The remedy is the option that would help."""
    settings = settings_for(model, trace=DATA / "mooncake_synthetic.jsonl", num_requests=2)
    error = assert_refused(RequestError, "needs a context of 40161, the limit is 512", settings)
    assert error.asked == "run the request line-1, 40,160 tokens long"
    assert "scale_lengths" in error.remedy


def test_a_pool_beyond_the_memory_is_refused(model: Path) -> None:
    """With both sizes, before a byte of it is allocated."""
    with pytest.raises(ConfigError, match=r"1,000,000,000,000 pages of 16 tokens: they need .* has 8 GiB; use a sm"):
        compare(settings_for(model, num_pages=10**12), Log(), MACHINE)


@pytest.mark.parametrize("name", ["requests", "trace"])
def test_a_missing_source_is_refused(model: Path, tmp_path: Path, name: str) -> None:
    """By its path."""
    assert_refused(InputError, "No such file", settings_for(model, **{name: tmp_path / "none"}))


@pytest.mark.parametrize("device", ["cuda:99", "tpu?", ""])
def test_an_absent_device_is_refused(model: Path, device: str) -> None:
    """In three parts, whatever torch says."""
    assert_refused(ConfigError, "loading onto device", settings_for(model, device=device))


def test_a_missing_model_is_refused(tmp_path: Path) -> None:
    """By its path, with what can be given."""
    assert_refused(InputError, "give a model directory, a .gguf file", settings_for(tmp_path / "no-model"))


COUNTS = (
    *("num_requests", "mean_prompt", "mean_output", "batch_size"),
    *("max_rows", "token_budget", "page_size", "num_pages"),
)


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("value", [0, -1])
def test_sizes_below_one_are_refused(name: str, value: int) -> None:
    """Each by its name, as soon as it is given."""
    with pytest.raises(ConfigError, match=f"{name}={value}: it must be at least 1"):
        CompareSettings(**{name: value})


@pytest.mark.parametrize(
    ("changes", "fact"),
    [
        ({"rate": 0.0}, "rate=0.0"),
        ({"rate": -1.0}, "rate=-1.0"),
        ({"rate": float("inf")}, "rate=inf"),
        ({"load": float("nan")}, "load=nan"),
        ({"max_queue_delay": -0.1}, "max_queue_delay=-0.1"),
        ({"max_queue_delay": float("nan")}, "max_queue_delay=nan"),
        ({"requests": Path("a"), "trace": Path("b")}, "use both requests=a and trace=b"),
        ({"rate": 1.0, "load": 0.5}, "use both rate=1.0 and load=0.5"),
        ({"scale_lengths": True}, "only a trace's lengths are scaled"),
        ({"strategies": ()}, "compare no strategies"),
        ({"strategies": ("static", "static")}, "one is named twice"),
        ({"strategies": ("static", "magic")}, "compare magic"),
        ({"requests": Path("a"), "num_requests": 3}, "all requests of the file are run, so it has no effect"),
        ({"requests": Path("a"), "mean_prompt": 3}, "lengths come from the file, so it has no effect"),
        ({"trace": Path("a"), "mean_output": 3}, "lengths come from the file, so it has no effect"),
        ({"strategies": ("one-by-one",), "batch_size": 3}, "only dynamic and static batching uses it"),
        ({"strategies": ("static",), "max_queue_delay": 3.0}, "only dynamic batching uses it"),
        ({"strategies": ("static",), "max_rows": 3}, "only continuous batching uses it"),
        ({"strategies": ("static",), "token_budget": 3}, "only continuous batching uses it"),
    ],
)
def test_settings_that_contradict_or_do_nothing_are_refused(changes: dict[str, Any], fact: str) -> None:
    """A setting without effect would let its user believe in one."""
    with pytest.raises(ConfigError) as caught:
        CompareSettings(**changes)
    assert fact in str(caught.value)
