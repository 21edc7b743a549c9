"""Worked examples: the plan of every step, as it comes out on paper."""

import pytest

from batchwright.errors import ConfigError
from batchwright.policy.continuous import Continuous, ContinuousSettings
from batchwright.policy.dynamic import DynamicSettings, dynamic
from batchwright.policy.ledger import Ledger
from batchwright.policy.order import Queueing, by_aged_priority, by_strict_priority
from batchwright.policy.pages import Memory
from batchwright.policy.static import one_by_one, static
from batchwright.policy.types import Request, StepPlan
from tests.policy.driver import Drive

ROOMY = Memory(num_pages=400, page_size=16, context=4096)


def continuous(memory: Memory = ROOMY, max_positions: int | None = None, **settings) -> Drive:
    return Drive(Continuous(memory, ContinuousSettings(**settings)), memory, max_positions=max_positions)


def dynamic_batches(**settings) -> Drive:
    return Drive(dynamic(ROOMY, DynamicSettings(**settings)), ROOMY)


def rows(plan: StepPlan) -> dict[str, int]:
    """Tokens computed per request."""
    return {chunk.request_id: chunk.num_tokens for chunk in plan.chunks}


def who(plan: StepPlan | None) -> str | None:
    """The requests of a plan, whose names are letters."""
    return plan and "".join(chunk.request_id or "-" for chunk in plan.chunks)


def shares(text: str) -> dict[str, int]:
    """'400/400/224' -> the chunks of a, b and c."""
    return dict(zip("abc", map(int, text.split("/")), strict=False))


# ---- continuous: budget and chunks


def test_three_prompts_share_the_budget_under_a_cap() -> None:
    """800 tokens each, 1,024 per step, 400 per request and step; decodes come first once there are some."""
    drive = continuous(token_budget=1024, chunk_cap=400)
    for name in "abc":
        drive.add(Request(name, 800, 2))
    assert [rows(drive.step()) for _ in range(3)] == [
        shares("400/400/224"),
        shares("400/400/224"),
        shares("1/1/352"),
    ]


def test_without_a_cap_the_first_prompt_takes_the_budget() -> None:
    """The cap is what keeps one long prompt from making the others wait."""
    drive = continuous(token_budget=1000)
    for name in "abc":
        drive.add(Request(name, 800, 2))
    assert [rows(drive.step()) for _ in range(3)] == [
        {"a": 800, "b": 200},
        {"a": 1, "b": 600, "c": 399},
        {"b": 1, "c": 401},
    ]


def test_a_budget_below_the_rows_goes_to_the_first_in_rank() -> None:
    """Three decodes, two tokens per step: the last waits until one ahead of it has ended."""
    drive = continuous(token_budget=2)
    for name in "abc":
        drive.add(Request(name, 1, 2))
    assert [who(plan) for plan in drive.run()] == ["ab", "ab", "c", "c"]


@pytest.mark.parametrize(("capacity", "num_steps"), [("utilization", 119), ("guaranteed", 160)])
def test_ten_pages_of_ten_tokens_for_two_requests_of_90(capacity: str, num_steps: int) -> None:
    """Guaranteed: one after the other, 80 steps each. Utilization: both, until one must give its pages back."""
    memory = Memory(num_pages=10, page_size=10, context=200)
    drive = continuous(memory, capacity=capacity, prefix_caching=False)
    for name in "ab":
        drive.add(Request(name, 10, 80))
    plans = drive.run()
    assert len(plans) == num_steps
    assert [name for plan in plans for name in plan.preempted] == (["b"] if capacity == "utilization" else [])


def test_guaranteed_requests_that_just_fit_run_together_and_keep_their_pages() -> None:
    """10 + 41 tokens, the last never computed: 5 pages of 10 each fill the pool, and nobody is preempted."""
    memory = Memory(num_pages=10, page_size=10, context=200)
    drive = continuous(memory, capacity="guaranteed", prefix_caching=False)
    for name in "ab":
        drive.add(Request(name, 10, 41))
    plans = drive.run()
    assert [who(plan) for plan in plans] == ["ab"] * 41
    assert not any(plan.preempted for plan in plans)


# ---- continuous: pages


def test_a_shared_prefix_is_computed_once() -> None:
    """Page 16, ten pages: A = 48 shared + 7 takes 4 pages; B = 48 shared + 5 hits 48 tokens and takes 1."""
    memory = Memory(num_pages=10, page_size=16, context=160)
    drive = continuous(memory)
    drive.add(Request("a", 55, 8, keys=("k0", "k1", "k2")))
    (a,) = drive.step().chunks
    drive.add(Request("b", 53, 8, keys=("k0", "k1", "k2")))
    b = drive.step().chunks[1]
    assert (a.start, a.num_tokens, a.num_granted) == (0, 55, 4)
    assert (b.start, b.num_tokens, b.num_granted) == (48, 5, 1)
    assert b.pages[:3] == a.pages[:3]
    holders = drive.scheduler._ledger.pool._holders
    assert [holders[page] for page in b.pages] == [2, 2, 2, 1]
    assert drive.scheduler.load.pages_held == 5


def test_a_full_hit_still_computes_a_token() -> None:
    """All 48 tokens are known, but nothing is sampled without computing the last: its page is not shared."""
    drive = continuous()
    for name in "ab":
        drive.add(Request(name, 48, 1, keys=("k0", "k1", "k2")))
        (chunk,) = drive.step().chunks
    assert (chunk.start, chunk.num_tokens, chunk.samples) == (32, 16, True)


def test_a_prefix_outlives_its_requests_until_its_pages_are_needed() -> None:
    """Nobody holds it: found by b; c needs the whole pool; d finds nothing."""
    memory = Memory(num_pages=4, page_size=4, context=16)
    drive = continuous(memory)
    starts = []
    for name, num_prompt, keys in (("a", 9, (1, 2)), ("b", 9, (1, 2)), ("c", 15, (5, 6, 7)), ("d", 9, (1, 2))):
        drive.add(Request(name, num_prompt, 1, keys=keys))
        starts.append(drive.run()[0].chunks[0].start)
    assert starts == [0, 8, 0, 0]


def test_what_a_request_produced_is_a_prefix_for_the_next_turn() -> None:
    """Prompt 4 + 5 outputs, of which 4 are computed: two full pages of 4, found by a prompt that goes on from them."""
    memory = Memory(num_pages=8, page_size=4, context=32)
    drive = continuous(memory)
    drive.add(Request("a", 4, 5, keys=("k0",)))
    drive.run()
    drive.add(Request("b", 12, 1, keys=("k0", ("output", 0, 1), "new")))
    assert drive.step().chunks[0].start == 8


def test_the_last_in_rank_gives_its_pages_back_first() -> None:
    """Four pages, three requests of a page each: as a and b grow, c goes, then b; they come back in order."""
    memory = Memory(num_pages=4, page_size=4, context=16)
    drive = continuous(memory, watermark=0.0, prefix_caching=False)
    for name in "abc":
        drive.add(Request(name, 4, 8))
    plans = drive.run()
    assert [name for plan in plans for name in plan.preempted][:2] == ["c", "b"]
    assert list(drive.ended) == ["a", "b", "c"]


def test_a_preempted_request_resumes_ahead_of_later_arrivals() -> None:
    """It keeps its rank, and computes its prompt and its outputs so far in one chunk."""
    memory = Memory(num_pages=4, page_size=4, context=16)
    drive = continuous(memory, prefix_caching=False)
    drive.add(Request("a", 7, 6))
    drive.add(Request("b", 7, 6))
    plans = [drive.step(), drive.step()]
    drive.add(Request("c", 1, 1))
    plans += drive.run()
    preempted = next(index for index, plan in enumerate(plans) if plan.preempted)
    assert plans[preempted].preempted == ("b",)
    back = next(chunk for plan in plans[preempted:] for chunk in plan.chunks if chunk.request_id != "a")
    assert (back.request_id, back.start, back.num_tokens) == ("b", 0, 9)


def test_the_watermark_keeps_pages_for_those_who_run() -> None:
    """Ten pages, two kept back: a second request of 5 pages waits beside 4, and enters once it is alone."""
    memory = Memory(num_pages=10, page_size=4, context=40)
    drive = continuous(memory, watermark=0.2, prefix_caching=False)
    drive.add(Request("a", 16, 2))
    drive.add(Request("b", 20, 1))
    assert [who(plan) for plan in drive.run()] == ["a", "a", "b"]


def test_the_watermark_does_not_keep_out_who_is_alone() -> None:
    """All ten pages for one request: there is nobody to keep them for."""
    memory = Memory(num_pages=10, page_size=4, context=40)
    drive = continuous(memory, watermark=0.2)
    drive.add(Request("a", 39, 1))
    assert who(drive.step()) == "a"


def test_a_page_that_is_promised_is_no_prefix_yet() -> None:
    """a's second page is being computed, and may fail: b, which is more important, shares only the first."""
    drive = continuous(Memory(10, 4, 40), chunk_cap=4)
    drive.add(Request("a", 12, 1, keys=(1, 2, 3)))
    drive.launch()
    drive.launch()
    drive.land()
    drive.add(Request("b", 12, 1, priority=-1, keys=(1, 2, 3)))
    assert {chunk.request_id: chunk.start for chunk in drive.launch().chunks} == {"a": 8, "b": 4}


def test_a_prompt_under_way_is_paused_too_before_it_gives_its_pages_back() -> None:
    """Two plans in flight; a needs a fifth page, b has set five aside: it sits out a plan, then a gets its page."""
    drive = continuous(Memory(9, 4, 36), chunk_cap=4, prefix_caching=False)
    drive.add(Request("a", 15, 4))
    for _ in range(4):
        drive.step()
    drive.add(Request("b", 20, 1))
    plans = drive.run(max_in_flight=2)
    preempted = next(index for index, plan in enumerate(plans) if plan.preempted)
    assert [who(plan) for plan in plans[: preempted + 1]] == ["ab", "a"]
    assert plans[preempted].chunks[0].num_granted == 1


@pytest.mark.parametrize("chunk_cap", [None, 4])
def test_the_pages_of_a_request_that_erred_are_no_prefix(chunk_cap: int | None) -> None:
    """Its KV may hold numbers that are not finite, also in pages that earlier chunks have published already."""
    drive = continuous(Memory(10, 4, 40), chunk_cap=chunk_cap)
    drive.add(Request("a", 9, 1, keys=(1, 2)))
    if chunk_cap:
        drive.step()
    drive.executor.errors = {"a"}
    drive.run()
    assert drive.ended == {"a": "error"}
    drive.add(Request("b", 9, 1, keys=(1, 2)))
    assert drive.step().chunks[0].start == 0


def test_pages_that_a_request_shared_before_it_erred_are_found_no_more_but_stay_with_who_holds_them() -> None:
    """a computed them and runs on, b shared them and erred, c computes them anew."""
    drive = continuous(Memory(10, 4, 40))
    drive.add(Request("a", 9, 5, keys=(1, 2)))
    drive.step()
    drive.executor.errors = {"b"}
    drive.add(Request("b", 9, 1, keys=(1, 2)))
    assert drive.step().chunks[1].start == 8
    drive.add(Request("c", 9, 1, keys=(1, 2)))
    assert drive.step().chunks[1].start == 0
    drive.run()
    assert drive.ended == {"a": "finished", "b": "error", "c": "finished"}


# ---- priorities


def test_the_important_enter_first() -> None:
    """Three wait for one row; lower numbers are more important, equals go by arrival."""
    drive = continuous(max_rows=1)
    for name, priority in (("a", 2), ("b", 1), ("c", 1)):
        drive.add(Request(name, 4, 1, priority))
    assert [who(plan) for plan in drive.run()] == ["b", "c", "a"]


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_an_important_request_displaces_the_least_important_when_rows_are_full(max_in_flight: int) -> None:
    """It takes c's row, the last in rank; c resumes as soon as a row is free, and nothing is lost."""
    drive = continuous(max_rows=2, queueing=Queueing(order=by_strict_priority), prefix_caching=False)
    drive.add(Request("b", 4, 6, priority=1))
    drive.add(Request("c", 4, 6, priority=2))
    for _ in range(max_in_flight):
        drive.launch()
    drive.land()
    drive.add(Request("a", 4, 2, priority=0))
    plans = drive.run(max_in_flight)
    displaced = next(plan for plan in plans if plan.preempted)
    assert displaced.preempted == ("c",)
    assert who(displaced) == "ba"
    assert list(drive.ended) == ["a", "b", "c"]


def test_equals_do_not_displace_each_other() -> None:
    """Rows full of equal priority: the newcomer waits."""
    drive = continuous(max_rows=1)
    drive.add(Request("a", 4, 3))
    drive.step()
    drive.add(Request("b", 4, 1))
    assert [who(plan) for plan in drive.run()] == ["a", "a", "b"]


def test_an_order_of_one_s_own_displaces_nobody_of_equal_priority() -> None:
    """Shortest prompt first: a shorter newcomer is first in the queue, but no reason to compute anything again."""
    drive = continuous(max_rows=1, queueing=Queueing(order=lambda request, arrival: (0, request.num_prompt)))
    drive.add(Request("a", 9, 3))
    drive.step()
    drive.add(Request("b", 8, 1))
    drive.add(Request("c", 4, 1))
    assert [who(plan) for plan in drive.run()] == ["a", "a", "c", "b"]


@pytest.mark.parametrize(("waited", "first"), [(19.0, "b"), (21.0, "a")])
def test_waiting_makes_up_for_priority(waited: float, first: str) -> None:
    """Two levels at 10 s each: after 20 s of waiting the less important is first."""
    drive = continuous(max_rows=1, queueing=Queueing(order=by_aged_priority(10.0)))
    drive.add(Request("a", 4, 1, priority=2))
    drive.wait(waited)
    drive.add(Request("b", 4, 1, priority=0))
    assert who(drive.step()) == first


# ---- time and the queue


@pytest.mark.parametrize("make", [lambda: continuous(max_rows=1), lambda: Drive(one_by_one(ROOMY), ROOMY)])
def test_deadlines_drop_who_runs_and_who_waits(make) -> None:
    """Both had until second 5; a was running, b waiting; c is unharmed, and the scheduler asked to be woken for it."""
    drive = make()
    drive.add(Request("a", 4, 50, deadline=5.0))
    drive.add(Request("b", 4, 50, deadline=5.0))
    drive.add(Request("c", 4, 1))
    drive.step()
    assert drive.scheduler.wakeup(0.0) == 5.0
    drive.wait(5.0)
    assert drive.ended == {"a": "deadline", "b": "deadline"}
    assert who(drive.step()) == "c"


def test_a_queue_timeout_spares_who_has_started() -> None:
    """Two seconds in the queue at most: a has started, b has not; b's own limit of 1 s is the tighter one."""
    drive = continuous(max_rows=1, queueing=Queueing(timeout=2.0))
    drive.add(Request("a", 4, 50))
    drive.add(Request("b", 4, 50, queue_timeout=1.0, deadline=60.0))
    drive.step()
    assert drive.scheduler.wakeup(0.0) == 1.0
    drive.wait(1.5)
    assert drive.ended == {"b": "queue_timeout"}
    assert drive.scheduler.wakeup(1.5) is None


def test_on_timeout_delay_a_late_request_goes_behind_the_others() -> None:
    """It isn't dropped, and runs when nobody else waits."""
    drive = continuous(max_rows=1, queueing=Queueing(timeout=2.0, on_timeout="delay"))
    drive.add(Request("a", 4, 1))
    drive.wait(1.5)
    drive.add(Request("b", 4, 1))
    drive.wait(1.0)
    assert [who(plan) for plan in drive.run()] == ["b", "a"]


@pytest.mark.parametrize("make", [lambda q: continuous(queueing=q), lambda q: Drive(static(ROOMY, 8, q), ROOMY)])
def test_a_full_queue_refuses(make) -> None:
    """Two may wait: the third is told so, and is let in when there is room."""
    drive = make(Queueing(max_requests=2))
    for name in "abc":
        drive.add(Request(name, 4, 1))
    assert [(refused.request_id, refused.reason) for refused in drive.refusals] == [("c", "queue_full")]
    assert "2 wait, which is the limit" in drive.refusals[0].message
    drive.flush()
    drive.step()
    drive.add(Request("d", 4, 1))
    assert "d" in drive.live


# ---- refusals and limits


@pytest.mark.parametrize(
    ("memory", "request_", "message"),
    [
        (Memory(4, 16, 999), Request("a", 64, 1), ["needs 5 pages of 16", "the pool has 4", "raise num_pages"]),
        (Memory(9, 16, 64), Request("a", 64, 1), ["needs a context of 65", "the limit is 64", "shorten the prompt"]),
        (ROOMY, Request("a", 0, 1), ["a prompt of 0 tokens", "at least 1", "give a prompt"]),
        (ROOMY, Request("a", 4, 0), ["at most 0 more", "at least 1", "raise max_tokens"]),
        (ROOMY, Request("a", 4, -3), ["at most -3 more", "at least 1", "raise max_tokens"]),
        (ROOMY, Request("a", 4, 1, num_rows=2), ["2 rows", "may have 1 to 1", "several requests"]),
    ],
)
@pytest.mark.parametrize("make", [Continuous, one_by_one])
def test_what_can_never_run_is_refused_with_the_numbers(make, memory: Memory, request_: Request, message) -> None:
    """What was asked, what is true, what to do; and others are served after it."""
    drive = Drive(make(memory), memory)
    refused = drive.add(request_, 1)
    assert all(part in refused.message for part in message)
    drive.add(Request("b", 4, 1))
    drive.run()
    assert drive.ended == {"a": "refused", "b": "finished"}


def test_an_id_that_is_live_is_refused_and_one_that_has_ended_is_not() -> None:
    """Two live requests of one id could not be told apart."""
    scheduler = Continuous(ROOMY)
    scheduler.add(Request("a", 4, 1), 0.0)
    assert "use another id" in scheduler.add(Request("a", 4, 1), 0.0).message
    scheduler.abort("a", 0.0)
    assert scheduler.add(Request("a", 4, 1), 0.0).max_tokens == 1


@pytest.mark.parametrize(
    ("memory", "granted"), [(Memory(4, 16, 999), 4), (Memory(9, 16, 64), 4), (Memory(9, 16, 999), 50)]
)
def test_max_tokens_is_clamped_to_what_fits(memory: Memory, granted: int) -> None:
    """60 tokens of prompt in a pool, or a context, of 64 leave 4, and these are really produced."""
    drive = continuous(memory)
    assert drive.add(Request("a", 60, 50)).max_tokens == granted
    drive.run()
    assert drive.tokens == {"a": granted}


# ---- dynamic


def test_three_singles_leave_as_two_at_once_and_one_after_the_delay() -> None:
    """Preferred sizes 2 and 6: 2 is the largest that can be formed."""
    drive = dynamic_batches(max_batch_size=8, preferred_sizes=(2, 6), max_queue_delay=10.0)
    for name in "abc":
        drive.add(Request(name, 4, 1))
    plan = drive.step()
    assert (who(plan), plan.reason) == ("ab", "preferred")
    assert drive.step() is None
    assert drive.scheduler.wakeup(0.0) == 10.0
    drive.wait(10.0)
    plan = drive.step()
    assert (who(plan), plan.reason) == ("c", "deadline")


def test_six_singles_leave_together() -> None:
    """The largest preferred size that can be formed."""
    drive = dynamic_batches(max_batch_size=8, preferred_sizes=(2, 6), max_queue_delay=10.0)
    for name in "abcdef":
        drive.add(Request(name, 4, 1))
    assert who(drive.step()) == "abcdef"


def test_a_request_that_would_exceed_the_largest_preferred_size_releases_those_ahead() -> None:
    """A 3 waits; a 4 arrives: 7 exceeds 6, so {3} leaves at once, and {4} after its delay."""
    drive = dynamic_batches(max_batch_size=8, preferred_sizes=(2, 6), max_queue_delay=10.0)
    drive.add(Request("a", 4, 1, num_rows=3))
    assert drive.step() is None
    drive.wait(1.0)
    drive.add(Request("b", 4, 1, num_rows=4))
    assert who(drive.step()) == "a"
    assert drive.step() is None
    assert drive.scheduler.wakeup(1.0) == 11.0
    drive.wait(10.0)
    assert who(drive.step()) == "b"


def test_a_full_batch_leaves_at_once() -> None:
    """Without preferred sizes the largest size is the preferred one; what is beyond it waits on."""
    drive = dynamic_batches(max_batch_size=4, max_queue_delay=10.0)
    for name in "abcde":
        drive.add(Request(name, 4, 1))
    plan = drive.step()
    assert (who(plan), plan.reason) == ("abcd", "full")
    assert drive.step() is None


def test_without_a_delay_an_idle_machine_takes_what_is_there() -> None:
    """Batches then form only while the machine is busy."""
    drive = dynamic_batches(max_batch_size=4)
    drive.add(Request("a", 4, 2))
    plan = drive.step()
    assert (who(plan), plan.reason) == ("a", "idle")
    for name in "bc":
        drive.add(Request(name, 4, 1))
    assert [who(plan) for plan in drive.run()] == ["a", "bc"]


def test_the_important_leave_first_in_dynamic_batches() -> None:
    """Strict levels by default, as in Triton."""
    drive = dynamic_batches(max_batch_size=2)
    for name, priority in (("a", 1), ("b", 1), ("c", 0)):
        drive.add(Request(name, 4, 1, priority))
    assert [who(plan) for plan in drive.run()] == ["ca", "b"]


def test_allowed_sizes_pad_a_batch_up_with_rows_that_are_executed() -> None:
    """Three requests, sizes 1, 4 and 8: a filler row runs along, padding and all, and holds no pages."""
    drive = dynamic_batches(max_batch_size=8, allowed_sizes=(1, 4, 8))
    for name in "abc":
        drive.add(Request(name, 4, 2))
    first, second = drive.run()
    assert who(first) == who(second) == "abc-"
    assert (first.dead_rows, second.dead_rows) == (1, 1)
    assert [(chunk.start, chunk.padding, chunk.pages) for chunk in (first.chunks[3], second.chunks[3])] == [
        (0, 4, ()),
        (4, 1, ()),
    ]


def test_a_batch_of_an_allowed_size_is_not_padded() -> None:
    """Four requests, sizes 1, 4 and 8."""
    drive = dynamic_batches(max_batch_size=8, allowed_sizes=(1, 4, 8))
    for name in "abcd":
        drive.add(Request(name, 4, 1))
    assert who(drive.step()) == "abcd"


def test_the_delay_counts_from_the_oldest_whoever_is_first() -> None:
    """a came at 0 and b, more important, at 5: both leave at 10, b ahead; while they run there is no delay to await."""
    drive = dynamic_batches(max_batch_size=4, max_queue_delay=10.0)
    drive.add(Request("a", 4, 1, priority=1))
    drive.wait(5.0)
    drive.add(Request("b", 4, 1, priority=0))
    assert drive.scheduler.wakeup(5.0) == 10.0
    drive.wait(5.0)
    assert who(drive.launch()) == "ba"
    drive.add(Request("c", 4, 1))
    assert drive.scheduler.wakeup(10.0) is None


# ---- static


def test_static_executes_its_padding_and_its_dead_rows() -> None:
    """Prompts 2 and 5, outputs 3 and 1: 3 of padding in the first step, b's row dead in the two others."""
    drive = Drive(static(ROOMY, 2), ROOMY)
    drive.add(Request("a", 2, 3))
    drive.add(Request("b", 5, 1))
    plans = drive.run()
    assert [who(plan) for plan in plans] == ["ab", "ab", "ab"]
    assert [plan.padding for plan in plans] == [3, 0, 0]
    assert [plan.dead_rows for plan in plans] == [0, 1, 1]
    assert [plan.chunks[1].start for plan in plans] == [0, 5, 6]
    assert [plan.reason for plan in plans] == ["full", "next", "next"]


def test_static_holds_every_page_until_the_longest_has_ended() -> None:
    """Two rows of 4 + 20 - 1 tokens at most, 2 pages of 16 each, though b needs one and ends at once."""
    drive = Drive(static(ROOMY, 2), ROOMY)
    drive.add(Request("a", 4, 20), num_output=3)
    drive.add(Request("b", 4, 1))
    held = []
    while drive.live:
        drive.launch()
        held.append(drive.scheduler.load.pages_held)
        drive.land()
    assert held == [4, 4, 4]
    drive.check_idle()


@pytest.mark.parametrize(
    "make", [lambda: static(ROOMY, 4), lambda: dynamic(ROOMY, DynamicSettings(4, max_queue_delay=10.0))]
)
def test_a_group_waits_to_be_full_or_for_the_last_to_be_announced(make) -> None:
    """Two of four have come: nothing leaves until a flush, and then also if a more important one comes after it."""
    drive = Drive(make(), ROOMY)
    for name in "ab":
        drive.add(Request(name, 4, 1))
    assert drive.step() is None
    drive.flush()
    drive.add(Request("c", 4, 1, priority=-9))
    plan = drive.step()
    assert (who(plan), plan.reason) == ("cab", "flush")


def test_a_static_batch_shrinks_to_the_pages_there_are() -> None:
    """Ten pages, three for each row: three requests leave, the fourth is in the next batch."""
    memory = Memory(num_pages=10, page_size=4, context=40)
    drive = Drive(static(memory, 4), memory)
    for name in "abcd":
        drive.add(Request(name, 4, 9))
    drive.flush()
    plans = drive.run()
    assert [who(plan) for plan in plans] == ["abc"] * 9 + ["d"] * 9


def test_pages_are_granted_once_though_a_first_step_is_run_again() -> None:
    """The first step fails; its halves name the same pages and grant none."""
    drive = Drive(static(ROOMY, 2), ROOMY, failures={0: "exception"})
    for name in "ab":
        drive.add(Request(name, 4, 1))
    first, *retries = drive.run()
    assert [chunk.num_granted for chunk in first.chunks] == [1, 1]
    assert [(plan.reason, who(plan), plan.chunks[0].num_granted) for plan in retries] == [
        ("retry", "a", 0),
        ("retry", "b", 0),
    ]


# ---- failed steps


def test_a_step_out_of_memory_is_run_again_in_halves_and_the_budget_recovers_below_it() -> None:
    """Eight rows fail, four and four succeed, and the budget then grows to seven and stays there."""
    drive = continuous(token_budget=64, prefix_caching=False)
    drive.executor.failures = {1: "oom"}
    for name in "abcdefgh":
        drive.add(Request(name, 4, 40))
    assert [who(drive.step()) for _ in range(4)] == ["abcdefgh", "abcdefgh", "abcd", "efgh"]
    assert len(drive.step().chunks) == 6
    drive.run()
    assert set(drive.ended.values()) == {"finished"}
    assert [len(drive.plans[step].chunks) for step in (5, 6, 20)] == [7, 7, 7]


def test_a_long_prompt_that_runs_out_of_memory_is_computed_in_smaller_chunks() -> None:
    """100 tokens where 30 fit: 100, 50 fail, 25 pass, and the budget grows again until it fails again."""
    drive = continuous(max_positions=30)
    drive.add(Request("a", 100, 1))
    plans = drive.run()
    assert [plan.num_tokens for plan in plans[:4]] == [100, 50, 25, 27]
    assert drive.ended == {"a": "finished"}


def reading(num_prompt: int, max_positions: int) -> Drive:
    """One long prompt under a budget of 64, on a machine that runs out of memory beyond `max_positions`."""
    memory = Memory(num_pages=20, page_size=4096, context=80_000)
    drive = continuous(memory, max_positions, token_budget=64)
    drive.add(Request("a", num_prompt, 1))
    return drive


def test_a_lasting_shortage_of_memory_fails_one_step_in_a_thousand() -> None:
    """Where 30 positions fit, 64, 32 and again 32 fail, then one step after every thousand that succeed."""
    drive = reading(num_prompt=70_000, max_positions=30)
    drive.run()
    assert [(plan.id, plan.num_tokens) for plan in drive.failed] == [(0, 64), (1, 32), (10, 32), (1011, 31), (2012, 31)]
    assert {plan.num_tokens for plan in drive.plans[100:1000]} == {29}


def test_a_passing_shortage_of_memory_is_forgotten_after_a_thousand_steps() -> None:
    """One step of 64 fails, the budget stays at 59 for a thousand steps, and then is 64 again."""
    drive = reading(num_prompt=70_000, max_positions=63)
    drive.step()
    drive.executor.max_positions = None
    plans = drive.run()
    assert max(plan.num_tokens for plan in plans[:1000]) == 59
    assert plans[1010].num_tokens == 64


def test_a_part_of_a_failed_step_whose_requests_have_ended_is_not_run() -> None:
    """a and b were to be tried apart from c and d, but their clients left."""
    drive = Drive(static(ROOMY, 4), ROOMY, failures={0: "exception"})
    for name in "abcd":
        drive.add(Request(name, 4, 1))
    drive.step()
    drive.abort("a")
    drive.abort("b")
    assert [who(plan) for plan in drive.run()] == ["cd"]


def test_a_static_batch_out_of_memory_goes_on_in_parts_that_fit() -> None:
    """Prompts of 4: eight, then four, fail; pairs pass. Single tokens: eight fail once, then fours to the end."""
    drive = Drive(static(ROOMY, 8), ROOMY, max_positions=8)
    for name in "abcdefgh":
        drive.add(Request(name, 4, 4))
    first = [drive.step() for _ in range(7)]
    assert [who(plan) for plan in first] == ["abcdefgh", "abcd", "ab", "cd", "efgh", "ef", "gh"]
    drive.executor.max_positions = 4
    plans = drive.run()
    assert [who(plan) for plan in plans] == ["abcdefgh"] + ["abcd", "efgh"] * 3
    assert [plan.reason for plan in plans] == ["next", "retry", "retry", "next", "next", "next", "next"]


# ---- settings


@pytest.mark.parametrize(
    "make",
    [
        lambda: ContinuousSettings(max_rows=0),
        lambda: ContinuousSettings(token_budget=0),
        lambda: ContinuousSettings(chunk_cap=0),
        lambda: ContinuousSettings(capacity="all"),
        lambda: ContinuousSettings(capacity="guaranteed", watermark=0.1),
        lambda: ContinuousSettings(watermark=1.0),
        lambda: DynamicSettings(0),
        lambda: DynamicSettings(4, max_queue_delay=-1.0),
        lambda: DynamicSettings(4, max_queue_delay=float("nan")),
        lambda: DynamicSettings(4, preferred_sizes=(5,)),
        lambda: DynamicSettings(4, allowed_sizes=(1, 2)),
        lambda: static(ROOMY, 0),
        lambda: Memory(0, 16, 64),
        lambda: Memory(1, 0, 64),
        lambda: Queueing(max_requests=0),
        lambda: Queueing(timeout=-1.0),
        lambda: Queueing(timeout=1.0, on_timeout="dealy"),
        lambda: by_aged_priority(0.0),
    ],
)
def test_settings_out_of_range_or_without_effect_are_refused(make) -> None:
    """At once, in three parts."""
    with pytest.raises(ConfigError) as caught:
        make()
    assert caught.value.asked
    assert caught.value.fact
    assert caught.value.remedy


def test_far_deadlines_of_ended_requests_are_forgotten() -> None:
    """Three thousand requests that ended long before their deadlines leave no heap of them behind."""
    ledger = Ledger(Memory(64, 16, 1024), Queueing())
    for index in range(3000):
        ledger.enter(Request(str(index), 4, 1, deadline=1e9), now=0.0)
        ledger.end(ledger.live[str(index)])
    assert len(ledger._expiries) <= 110
