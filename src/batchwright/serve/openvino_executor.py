"""Carries out plans with OpenVINO on a CPU: our plans and pages, its kernels.

A plan's rows become sequences of the paged-attention operator: each chunk's useful positions one that reads and writes
the row's own pages, and its dummy positions, like a dead row's, another that lives in the scratch page alone, so that
what a policy wastes is executed and can touch nobody. `start` hands the step to OpenVINO's threads and returns.

Costs: weights are held twice, as they were loaded and as the plugin packed them (the first of the two stays in the
file where that is safetensors in the model's dtype). Pages hold keys and values in the model's dtype, never narrower.

Shapes: T positions of the step, R of them sampled, L layers, P pages (scratch last), K key-value heads, S tokens per
page, D head_dim, C = D/2 rotated pairs.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from importlib.metadata import PackageNotFoundError, version
from itertools import accumulate, chain, count
from typing import Any

import numpy as np
import torch
from torch import Tensor

from batchwright.errors import ConfigError, MissingDependency, RequestError, UnsupportedModel
from batchwright.policy.pages import Memory
from batchwright.policy.types import Chunk, StepPlan
from batchwright.serve.decoders.attention import RowSpan
from batchwright.serve.decoders.model import Take
from batchwright.serve.decoders.recipe import recipe_of
from batchwright.serve.sampling.params import SamplingParams
from batchwright.serve.sampling.sampler import Sampler
from batchwright.serve.sequences import NO_EXTRAS, Extras, Feed, RowResult, Sequences

PAGE_SIZE = 32
"""Tokens per page: the one size that the CPU plugin's operator knows."""

SUPPORTED = ("2026.4",)
"""Versions of OpenVINO that the tests were run with: the operator's inputs change between them, unannounced."""

_PRECISIONS = {torch.float32: "f32", torch.bfloat16: "bf16"}
_OTHER_BACKEND = 'load the model with backend="native" or "torch"'
_NUM_FOR_ALL_THREADS = 1 << 24
"""Logits from which sampling is long enough (some milliseconds) to be shared among torch's threads."""

_OUT_OF_MEMORY = ("can't alloc", "Failed to allocate", "bad_alloc")
"""What OpenVINO says then."""

_GROUP_SIZES = (64, 32)
"""int8: inputs that share one scale. Smaller is closer to the weights' own rounding, larger is faster (docs/log.md)."""


def check_installed() -> None:
    """Raises MissingDependency unless a supported version of OpenVINO is installed."""
    asked = 'using backend "openvino"'
    try:
        installed = version("openvino")
    except PackageNotFoundError:
        fact = "the package openvino is not installed"
        raise MissingDependency(asked, fact, "run: pip install 'batchwright[openvino]'") from None
    if not any(installed.startswith(f"{minor}.") for minor in SUPPORTED):
        fact = f"openvino {installed} is installed; supported is {', '.join(SUPPORTED)}"
        raise MissingDependency(asked, fact, f"run: pip install 'openvino=={SUPPORTED[-1]}.*'")


def runs_here(dtype: torch.dtype) -> bool:
    """Whether a supported version is installed, on a CPU that computes in `dtype`."""
    try:
        check_installed()
        import openvino

        check_precision(openvino.Core(), dtype)
    except (MissingDependency, ConfigError, ImportError):
        return False
    return True


class OpenVinoDecoder:
    """A decoder compiled for this CPU; each executor runs its own requests of it."""

    device = torch.device("cpu")

    def __init__(
        self,
        config: Mapping[str, Any],
        take: Take,
        freq_C: Tensor | None = None,
        *,
        dtype: torch.dtype,
        in_pair_order: bool = False,
        quantization: str | None = None,
    ) -> None:
        """`config`, `take`, `freq_C` and `in_pair_order` as for `model.Decoder`; it runs on as many threads as torch.

        `quantization`: "int8" holds weights as int8 and rounds the inputs of products to int8 in groups.
        Raises MissingDependency, UnsupportedModel, BrokenWeights, and ConfigError where the CPU lacks `dtype`.
        """
        check_installed()
        import openvino

        from batchwright.serve.decoders.openvino_graph import decoder_graph

        recipe = recipe_of(config, freq_C)
        frequencies = recipe.attention[0].freq_C
        if not recipe.is_plain or frequencies is None:
            fact = f"its graph computes what Llama does, and a {recipe.shape.family} model like this one does more"
            raise UnsupportedModel('using backend "openvino"', fact, 'use backend="native" or "torch"')
        self.shape, self.freq_C = recipe.shape, frequencies
        self.dtype = dtype
        core = openvino.Core()
        check_precision(core, dtype)
        graph = decoder_graph(config, take, in_pair_order=in_pair_order, quantization=quantization)
        self._held = graph.held
        self.shape_memory = ShapeMemory()
        self.compiled = core.compile_model(graph.model, "CPU", self._settings(quantization))
        kind, dims = self._cache()
        assert kind == _PRECISIONS[dtype] and dims == [self.shape.num_kv_heads, PAGE_SIZE, self.shape.head_dim]

    @property
    def num_bytes(self) -> int:
        """Of the weights as they were given to OpenVINO; it packs copies of those that it multiplies with."""
        return sum({tensor.data_ptr(): tensor.nbytes for tensor in self._held}.values())

    def _settings(self, quantization: str | None) -> dict[str, Any]:
        precision = _PRECISIONS[self.dtype]
        widths = (self.shape.hidden, self.shape.intermediate, self.shape.num_heads * self.shape.head_dim)
        group_size = next((size for size in _GROUP_SIZES if all(width % size == 0 for width in widths)), 0)
        return {
            "INFERENCE_PRECISION_HINT": precision,
            "KV_CACHE_PRECISION": precision,
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": group_size if quantization else 0,
            "PERFORMANCE_HINT": "LATENCY",
            "NUM_STREAMS": 1,
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
            "ENABLE_CPU_PINNING": False,  # a pinned thread waits for its core, whoever is on it
        }

    def _cache(self) -> tuple[str, list[int]]:
        """Type and shape of a page that the plugin decided on."""
        page = self.compiled.input("key_cache.0")
        return page.element_type.get_type_name(), [page.partial_shape[axis].get_length() for axis in (1, 2, 3)]


class ShapeMemory:
    """Which sizes of inputs the nodes of a compiled graph may remember, and whether they agree about them.

    A node works out its shape, and takes its memory, only when a size of its inputs has changed. After a step that ran
    out of memory some remember that step and some the one before, and either would be refused, until one of which
    every size is new has run.
    """

    def __init__(self) -> None:
        self.is_sound = True
        self._sizes: frozenset[int] = frozenset()

    def ended(self, sizes: frozenset[int], *, succeeded: bool) -> None:
        """A step with inputs of `sizes` has run."""
        self._sizes = sizes if succeeded else self._sizes | sizes
        self.is_sound = self.is_sound and succeeded

    def unheard_of(self) -> int:
        """A size that no node remembers, nor the next larger one."""
        return next(size for size in count(1) if not {size, size + 1} & self._sizes)


def check_precision(core: Any, dtype: torch.dtype) -> None:
    """Raises ConfigError where the CPU that `core` sees cannot compute in `dtype`."""
    if dtype == torch.bfloat16 and "BF16" not in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        fact = "this CPU has no bfloat16 products, and OpenVINO would compute in float32"
        raise ConfigError('using backend "openvino" in bfloat16', fact, "load the model in float32")


class OpenVinoPages:
    """Keys and values for `memory.num_pages` pages and the scratch page, as the plugin lays them out.

    What a page held before may stay in it: the operator disregards what lies behind a row's context.
    """

    def __init__(self, decoder: OpenVinoDecoder, memory: Memory) -> None:
        shape = decoder.shape
        if memory.page_size != PAGE_SIZE:
            asked, fact = f"running pages of {memory.page_size} tokens on OpenVINO", f"its pages hold {PAGE_SIZE}"
            raise ConfigError(asked, fact, f'use Memory(..., page_size={PAGE_SIZE}), or load with backend="torch"')
        self.scratch = memory.num_pages
        self.pages_L2PKSD = torch.empty(
            shape.num_layers,
            2,
            memory.num_pages + 1,
            shape.num_kv_heads,
            PAGE_SIZE,
            shape.head_dim,
            dtype=decoder.dtype,
        )

    @property
    def num_bytes(self) -> int:
        return self.pages_L2PKSD.nbytes

    def bind(self, request: Any) -> None:
        """Let `request` work on these pages."""
        from batchwright.serve.decoders.openvino_graph import as_openvino

        for layer, (keys_PKSD, values_PKSD) in enumerate(self.pages_L2PKSD):
            request.set_tensor(f"key_cache.{layer}", as_openvino(keys_PKSD))
            request.set_tensor(f"value_cache.{layer}", as_openvino(values_PKSD))


class OpenVinoExecutor:
    """Runs plans with `decoder` over pages laid out by `memory`. Raises ConfigError for a page size other than 32."""

    overlaps = True

    def __init__(self, decoder: OpenVinoDecoder, memory: Memory) -> None:
        self._last: OpenVinoPending | None = None
        self._decoder = decoder
        self.kv = OpenVinoPages(decoder, memory)
        self._sequences = Sequences(Sampler(decoder.shape.vocab, decoder.device))
        self._request = decoder.compiled.create_infer_request()
        self.kv.bind(self._request)

    def __del__(self) -> None:
        """The pages must outlive a step that nobody waits for any more."""
        if self._last is not None:
            self._last.settle()

    def add(self, request_id: str, tokens: Sequence[int], params: SamplingParams, extras: Extras = NO_EXTRAS) -> None:
        if params.prompt_logprobs is not None:
            raise RequestError("score a prompt", "OpenVINO's graph gives logits where tokens are drawn", _OTHER_BACKEND)
        self._sequences.add(request_id, tokens, params, extras)

    def remove(self, request_id: str) -> None:
        self._sequences.remove(request_id)

    def start(self, plan: StepPlan) -> "OpenVinoPending":
        if self._last is not None:
            self._last.settle()
        if not self._decoder.shape_memory.is_sound:
            self._recover()
        feed = self._sequences.feed(plan.chunks)
        return self._begin([span for chunk in plan.chunks for span in spans_of(chunk, self.kv.scratch)], feed)

    def _begin(self, rows: Sequence[RowSpan], feed: Feed) -> "OpenVinoPending":
        with one_thread():
            inputs = step_inputs(rows, feed, self._decoder.freq_C)
        self._last = OpenVinoPending(self._request, feed, inputs, self._decoder.shape_memory)
        return self._last

    def _recover(self) -> None:
        """Run dummy rows. Raises what `OpenVinoPending.logits` raises; the next start then tries again."""
        size = self._decoder.shape_memory.unheard_of()
        rows = [RowSpan(0, 1, (self.kv.scratch,))] * size
        feed = Feed(self._sequences.sampler)
        feed.tokens, feed.rows = [[0]] * size, list(range(size))
        self._begin(rows, feed).logits()
        self._decoder.shape_memory.is_sound = True


class OpenVinoPending:
    """A step that OpenVINO's threads work on."""

    expert_tokens = ()

    def __init__(self, request: Any, feed: Feed, inputs: Mapping[str, Any], shape_memory: ShapeMemory) -> None:
        import openvino

        self.feed = feed
        self._request = request
        self._shape_memory = shape_memory
        self._inputs = inputs  # the step reads them where they are
        self._error: RuntimeError | None = None
        for name, values in inputs.items():
            request.set_tensor(name, openvino.Tensor(values, shared_memory=True))
        request.start_async()
        self._is_running = True

    def settle(self) -> None:
        """Wait for its end, whatever that is, if nobody did."""
        if not self._is_running:
            return
        try:
            self._request.wait()
        except RuntimeError as error:
            self._error = error
        self._is_running = False
        sizes = frozenset(values.size for values in self._inputs.values())
        self._shape_memory.ended(sizes, succeeded=self._error is None)

    def logits(self) -> Tensor:
        """Wait for logits_RV, which the next step overwrites. Raises MemoryError, or RuntimeError where it failed."""
        self.settle()
        if self._error is not None:
            message = str(self._error)
            is_memory = any(phrase in message for phrase in _OUT_OF_MEMORY)
            raise (MemoryError if is_memory else RuntimeError)(message) from self._error
        return torch.from_numpy(self._request.get_output_tensor().data)

    @torch.inference_mode()
    def result(self) -> list[RowResult]:
        logits_RV = self.logits()
        with one_thread() if logits_RV.numel() < _NUM_FOR_ALL_THREADS else nullcontext():
            return self.feed.results(logits_RV)


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch works on this thread alone: its others would spin on cores that OpenVINO's threads are about to need."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def spans_of(chunk: Chunk, scratch: int) -> list[RowSpan]:
    """What `chunk` computes in its row's pages; then its dummy positions, with as long a context, all of it scratch."""
    useful = RowSpan(chunk.start, chunk.num_tokens, chunk.pages)
    if not chunk.padding:
        return [useful]
    context = useful.context + chunk.padding
    wasted = RowSpan(useful.context, chunk.padding, (scratch,) * -(-context // PAGE_SIZE))
    return [useful, wasted] if chunk.num_tokens else [wasted]


def step_inputs(rows: Sequence[RowSpan], feed: Feed, freq_C: Tensor) -> dict[str, Any]:
    """What the graph takes in, beside the pages, as numpy arrays by name; see `openvino_graph.decoder_graph`."""
    assert sum(map(len, feed.tokens)) == sum(row.num_positions for row in rows), "each position has a token"
    blocks = [row.table[: -(-row.context // PAGE_SIZE)] for row in rows]
    positions_T = torch.tensor([position for row in rows for position in range(row.start, row.context)])
    angle_T11D = (positions_T[:, None] * freq_C).repeat(1, 2)[:, None, None, :]
    ints = {
        "tokens": list(chain.from_iterable(feed.tokens)),
        "rows": feed.rows,
        "past_lens": [row.start for row in rows],
        "subsequence_begins": list(accumulate((row.num_positions for row in rows), initial=0)),
        "block_indices": list(chain.from_iterable(blocks)),
        "block_indices_begins": list(accumulate(map(len, blocks), initial=0)),
        "max_context_len": max(row.context for row in rows),
    }
    arrays = {name: np.array(values, np.int32) for name, values in ints.items()}
    return arrays | {"cos": angle_T11D.cos().numpy(), "sin": angle_T11D.sin().numpy()}
