"""Plans become the logits that transformers gives, however the work is cut up, stored and mixed: within 1e-4."""

from collections.abc import Sequence
from itertools import count

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.policy.pages import Memory
from batchwright.policy.types import Chunk, StepPlan
from batchwright.serve.executor import TorchExecutor
from batchwright.serve.sampling.params import SamplingParams
from batchwright.serve.sequences import RowResult
from tests.serve.scripted import WatchedExecutor, forced, reference_logits, tiny, tokens_of

PAGE_SIZE, NUM_PAGES, TOLERANCE = 4, 200, 1e-4
FILLER = Chunk(None, 0, 0, 9, False, 0, ())


class Bench:
    """An executor over NaN-filled pages, and what each of its requests knows; plans are made by hand."""

    def __init__(self, page_size: int = PAGE_SIZE, seed: int = 0) -> None:
        self.executor = WatchedExecutor(tiny().decoder, Memory(NUM_PAGES, page_size, 512))
        self.known: dict[str, list[int]] = {}
        self._page_size = page_size
        generator = torch.Generator().manual_seed(seed)
        self._free: list[int] = torch.randperm(NUM_PAGES, generator=generator).tolist()
        self.tables: dict[str, tuple[int, ...]] = {}
        self._ids = count()

    def add(self, request_id: str, prompt: Sequence[int], shared: tuple[int, ...] = ()) -> str:
        self.executor.add(request_id, prompt, forced(99))
        self.known[request_id] = list(prompt)
        self.tables[request_id] = shared
        return request_id

    def chunk(self, request_id: str, start: int, num_tokens: int | None = None, padding: int = 0) -> Chunk:
        """The next `num_tokens` of a request, or all that it knows; in pages that lie anywhere."""
        known = len(self.known[request_id])
        num_tokens = known - start if num_tokens is None else num_tokens
        table = self.tables[request_id]
        missing = -(-(start + num_tokens + padding) // self._page_size) - len(table)
        self.tables[request_id] = table = table + tuple(self._free.pop() for _ in range(missing))
        samples = num_tokens > 0 and start + num_tokens == known
        return Chunk(request_id, start, num_tokens, padding, samples, max(0, missing), table)

    def step(self, *chunks: Chunk) -> list[RowResult]:
        results = self.executor.start(StepPlan(next(self._ids), "next", chunks)).result()
        for request_id, samples, *_ in results:
            self.known[request_id].append(samples[0].token)
        return results

    def preempt(self, request_id: str) -> None:
        """Its pages go to whoever asks next."""
        self._free += self.tables[request_id]
        self.tables[request_id] = ()

    def worst(self) -> float:
        return self.executor.worst(self.known)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_prompts_of_every_length_prefill_at_once(page_size: int) -> None:
    """Lengths 1 to 34, which begin, fill and exceed pages: logits after the last token equal the reference's."""
    bench = Bench(page_size)
    for length in (*range(1, 8), 15, 16, 17, 33, 34):
        bench.step(bench.chunk(bench.add(f"{length}", tokens_of(length, length)), 0))
    assert bench.worst() < TOLERANCE


@pytest.mark.parametrize("page_size", [4, 16])
def test_a_prompt_may_be_cut_at_every_boundary(page_size: int) -> None:
    """Two chunks, cut anywhere, give the logits of one pass."""
    prompt = tokens_of(0, 37)
    for cut in range(1, len(prompt)):
        bench = Bench(page_size, seed=cut)
        bench.add("a", prompt)
        assert bench.step(bench.chunk("a", 0, cut)) == []
        assert len(bench.step(bench.chunk("a", cut))) == 1
        assert bench.worst() < TOLERANCE, cut


def test_decodes_read_pages_that_lie_anywhere() -> None:
    """Twenty steps of one token over scattered pages, each within the tolerance and greedy as the reference."""
    bench = Bench()
    bench.add("a", tokens_of(1, 31))
    bench.step(bench.chunk("a", 0))
    assert bench.tables["a"] != tuple(sorted(bench.tables["a"]))
    for _ in range(20):
        bench.step(bench.chunk("a", len(bench.known["a"]) - 1))
    assert bench.worst() < TOLERANCE
    assert bench.known["a"][31:] == reference_logits(bench.known["a"])[30:-1].argmax(-1).tolist()


def test_a_step_mixes_chunks_and_decodes_of_very_different_contexts() -> None:
    """Contexts of 1 to 300 decode beside the first, middle and last chunks of other prompts."""
    bench = Bench()
    old = [bench.add(f"old-{length}", tokens_of(length, length)) for length in (1, 2, 40, 41, 150, 300)]
    bench.step(*(bench.chunk(request_id, 0) for request_id in old))
    new = [bench.add(f"new-{length}", tokens_of(length, length)) for length in (30, 31, 90)]
    for start, num_tokens in ((0, 13), (13, 1), (14, 9), (23, None)):
        decodes = [bench.chunk(request_id, len(bench.known[request_id]) - 1) for request_id in old]
        chunks = [bench.chunk(request_id, start, num_tokens) for request_id in new]
        bench.step(chunks[0], *decodes[:3], *chunks[1:], *decodes[3:])
    assert len(bench.executor.logits) == 5 * len(old) + len(new)
    assert bench.worst() < TOLERANCE


def test_padding_dead_rows_and_fillers_change_no_live_row() -> None:
    """All that a static batch wastes is executed, and its live rows still get the reference's logits."""
    bench = Bench()
    for request_id, length in {"short": 3, "long": 12, "ended": 5}.items():
        bench.add(request_id, tokens_of(length, length))
    first = [bench.chunk(request_id, 0, padding=12 - len(bench.known[request_id])) for request_id in bench.known]
    bench.step(*first, FILLER._replace(padding=12))
    bench.executor.remove("ended")
    for step in range(8):
        dead = bench.chunk("ended", 6 + step, 0, padding=1)
        live = [bench.chunk(request_id, len(bench.known[request_id]) - 1) for request_id in ("short", "long")]
        results = bench.step(dead, *live, FILLER._replace(start=12 + step, padding=1))
        assert {result.request_id for result in results} == {"short", "long"}
    assert bench.worst() < TOLERANCE


def test_a_dead_row_may_be_the_whole_step() -> None:
    """A step with no live row runs and has no results."""
    assert Bench().step(FILLER) == []


def test_a_request_reads_the_pages_of_anothers_equal_prefix() -> None:
    """Having computed only what lies behind the shared pages, it gets the logits of its whole prompt."""
    bench = Bench()
    prefix = tokens_of(2, 24)
    bench.step(bench.chunk(bench.add("a", prefix + tokens_of(3, 7)), 0))
    bench.add("b", prefix + tokens_of(4, 5), shared=bench.tables["a"][:6])
    bench.add("whole hit", prefix, shared=bench.tables["a"][:5])
    bench.step(bench.chunk("b", 24), bench.chunk("a", 31), bench.chunk("whole hit", 20))
    assert bench.worst() < TOLERANCE


def test_a_preempted_request_resumes_in_other_pages() -> None:
    """Prompt and outputs are computed again, at once or in chunks, and decoding goes on as if nothing had happened."""
    bench, undisturbed = Bench(), Bench(seed=9)
    for each in (bench, undisturbed):
        each.add("a", tokens_of(5, 10))
        each.step(each.chunk("a", 0))
        for _ in range(6):
            each.step(each.chunk("a", len(each.known["a"]) - 1))
    bench.preempt("a")
    bench.step(bench.chunk(bench.add("b", tokens_of(8, 30)), 0))
    bench.step(bench.chunk("a", 0, 9))
    bench.step(bench.chunk("a", 9))
    undisturbed.step(undisturbed.chunk("a", 16))
    for each in (bench, undisturbed):
        each.step(each.chunk("a", 17))
    assert bench.known["a"] == undisturbed.known["a"]
    assert bench.worst() < TOLERANCE


def test_a_step_run_again_gives_the_same_tokens() -> None:
    """After a failure the same plan writes the same positions; drawn tokens repeat as well as greedy ones."""
    executor = TorchExecutor(tiny().decoder, Memory(20, 4, 512))
    executor.add("greedy", tokens_of(0, 9), forced(9))
    executor.add("drawn", tokens_of(1, 6), SamplingParams(temperature=1.5, seed=3))
    chunks = Chunk("greedy", 0, 9, 0, True, 3, (4, 1, 9)), Chunk("drawn", 0, 6, 0, True, 2, (3, 0))
    prefill = StepPlan(0, "idle", chunks)
    decode = StepPlan(
        1, "idle", tuple(chunk._replace(start=chunk.num_tokens, num_tokens=1, num_granted=0) for chunk in chunks)
    )
    once = [executor.start(plan).result() for plan in (prefill, decode)]
    again = [executor.start(plan).result() for plan in (prefill, prefill, decode, decode)]
    assert again == [once[0], once[0], once[1], once[1]]


def test_logits_that_are_no_numbers_are_that_rows_error_alone() -> None:
    """One poisoned row errs; its neighbours, and whoever gets its pages next, have clean results."""
    executor = TorchExecutor(tiny(poison=96).decoder, Memory(10, 4, 512))
    clean = [token for token in tokens_of(6, 10) if token != 96]
    executor.add("bad", [1, 96, 2, 3, 4, 5], forced(9))
    executor.add("good", clean, forced(9))
    good = Chunk("good", 0, len(clean), 0, True, 3, (0, 1, 2))
    plan = StepPlan(0, "idle", (Chunk("bad", 0, 6, 0, True, 2, (3, 4)), good))
    results = {result.request_id: result.samples[0] for result in executor.start(plan).result()}
    assert results["bad"].token == -1
    assert "NaN" in str(results["bad"].error)
    expected = int(reference_logits(clean)[-1].argmax())
    assert (results["good"].token, results["good"].error) == (expected, None)
    executor.add("next", clean, forced(9))
    (result,) = executor.start(StepPlan(1, "idle", (good._replace(request_id="next", pages=(4, 3, 5)),))).result()
    assert result.samples[0].token == expected


@settings(max_examples=40)
@given(st.data())
def test_any_way_to_run_requests_gives_the_same_logits(data: st.DataObject) -> None:
    """Chunks of any size, padding, dead rows, fillers, restarts, any order: every sampled row equals the reference."""
    bench = Bench(data.draw(st.integers(1, 6), "page size"), data.draw(st.integers(0, 9), "page order"))
    lengths = data.draw(st.lists(st.integers(1, 25), min_size=1, max_size=4), "prompts")
    done = {bench.add(f"{i}", tokens_of(i, length)): 0 for i, length in enumerate(lengths)}
    for _ in range(data.draw(st.integers(1, 8), "steps")):
        chunks = []
        for request_id in data.draw(st.permutations(sorted(done)), "rows"):
            left = len(bench.known[request_id]) - done[request_id]
            what = data.draw(st.sampled_from(["run", "run", "run", "pad", "rest", "dead", "restart"]))
            if what == "restart":
                bench.preempt(request_id)
                done[request_id] = 0
            elif what == "dead":
                start, padding = data.draw(st.integers(0, 40)), data.draw(st.integers(1, 5))
                chunks.append(FILLER._replace(start=start, padding=padding))
            elif what != "rest":
                num_tokens = data.draw(st.integers(1, left))
                padding = data.draw(st.integers(0, 6)) if what == "pad" else 0
                chunks.append(bench.chunk(request_id, done[request_id], num_tokens, padding))
                done[request_id] += num_tokens
        if chunks:
            bench.step(*chunks)
    if bench.executor.logits:
        assert bench.worst() < TOLERANCE


def test_bfloat16_logits_are_close_to_float32s() -> None:
    """On the tiny model, bfloat16 is within 2% of the spread of the logits (0.4% was seen) of float32."""
    prompt = tokens_of(7, 60)
    logits = {}
    for dtype in (torch.float32, torch.bfloat16):
        executor = WatchedExecutor(tiny(dtype).decoder, Memory(40, 4, 512))
        executor.add("a", prompt, forced(1))
        executor.start(StepPlan(0, "idle", (Chunk("a", 0, 47, 0, False, 12, tuple(range(12))),))).result()
        executor.start(StepPlan(1, "idle", (Chunk("a", 47, 13, 0, True, 3, tuple(range(15))),))).result()
        logits[dtype] = executor.logits["a", 60]
    spread = logits[torch.float32].max() - logits[torch.float32].min()
    assert (logits[torch.bfloat16] - logits[torch.float32]).abs().max() < 0.02 * spread
