"""What this machine really does: matrix-product FLOP/s and memory bandwidth, measured in about two seconds.

The result is a `Hardware` like the table's, with the measurement as its source, so whoever prices work need not
care which it got. FLOP/s is the best repeat over a few square sizes, because neighbours can only slow a product down,
of `F.linear` and, on a CPU, of the layers that serve models; bandwidth is the median of sums over a buffer several
times the last-level cache. Both are what PyTorch reaches here and now, hence below vendors' peaks.
"""

import math
import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Literal

import msgspec
import torch
from torch.nn import functional as F

from batchwright.errors import ConfigError, InputError
from batchwright.facts.hardware import Fact, Hardware
from batchwright.serve.decoders import native
from batchwright.serve.decoders.ops import TorchOps
from batchwright.units import format_bandwidth, format_bytes, format_flops_per_second

MeasurableDtype = Literal["float32", "bfloat16", "float16"]
Progress = Callable[[str], None]


def measure_hardware(
    device: str = "cpu", dtype: MeasurableDtype = "bfloat16", seconds: float = 2.0, progress: Progress | None = None
) -> Hardware:
    """One device, in one dtype; half of `seconds` goes to FLOP/s and half to bandwidth, setting up comes on top.

    `progress` is told each figure as it is found. float32 on CUDA follows PyTorch's own TF32 setting. Raises
    ConfigError for a device that is not a CPU or CUDA device here, or a dtype or duration that makes no sense.
    """
    target = _checked(device, dtype, seconds)
    report = progress or _say_nothing
    with torch.inference_mode():
        flops = _measure_flops(target, dtype, seconds / 2, report)
        bandwidth = _measure_bandwidth(target, seconds / 2, report)
    peak: dict[str, Any] = {dtype: flops}
    return Hardware(name=_name(target), bandwidth=bandwidth, memory=_memory(target), **peak)


def encode_hardware(hardware: Hardware) -> bytes:
    """As JSON, to be kept or printed."""
    return msgspec.json.format(msgspec.json.encode(hardware))


def decode_hardware(text: bytes) -> Hardware:
    """What `encode_hardware` wrote. Raises InputError."""
    try:
        return msgspec.json.decode(text, type=Hardware)
    except msgspec.MsgspecError as error:
        raise InputError("read a hardware measurement", f"it is none ({error})", "measure again") from error


_CPU_SIZES = (512, 1024, 2048)
_CUDA_SIZES = (2048, 4096, 8192)
_MIN_REPEATS = 3
_SECONDS_PER_REPEAT = 0.01
"""Long enough that the clock and, on CUDA, the wait for the device are no part of what is measured."""


def _say_nothing(_: str) -> None:
    pass


def _checked(device: str, dtype: str, seconds: float) -> torch.device:
    asked = f"measure {dtype} on {device!r}"
    try:
        target = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(asked, str(error).splitlines()[0], "use 'cpu' or 'cuda'") from error
    if target.type not in ("cpu", "cuda"):
        raise ConfigError(asked, f"only CPU and CUDA devices are measured, not {target.type}", "use 'cpu' or 'cuda'")
    num_devices = torch.cuda.device_count()
    if target.type == "cuda" and (target.index or 0) >= num_devices:
        raise ConfigError(asked, f"PyTorch sees {num_devices} CUDA devices", "use 'cpu', or an index below that")
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ConfigError(asked, f"{dtype} is not measured", "use float32, bfloat16 or float16")
    if not 0 < seconds < math.inf:
        raise ConfigError(asked, f"{seconds} seconds were given to do it", "give a positive number of seconds")
    return target


@dataclass(frozen=True, slots=True)
class _Product:
    """One way to multiply: x times a weight, both of `size` squared."""

    size: int
    how: str
    run: Callable[[], Any]

    @property
    def num_flops(self) -> int:
        return 2 * self.size**3


def _measure_flops(device: torch.device, dtype: MeasurableDtype, seconds: float, report: Progress) -> Fact:
    sizes = _CPU_SIZES if device.type == "cpu" else _CUDA_SIZES
    share = seconds / len(sizes)
    best = Fact(0.0, "")
    for size in sizes:
        if best.value and _MIN_REPEATS * 2 * size**3 / best.value > share:
            break
        products = tuple(_products(device, getattr(torch, dtype), size))
        for product in products:
            times = _times(product.run, device, share / len(products))
            rate = product.num_flops / min(times)
            what = f"{dtype} product of {size} squared, {product.how}"
            report(f"{what}: {format_flops_per_second(rate)}")
            if rate > best.value:
                best = Fact(rate, _source(device, what, f"best of {len(times)}"))
    return best


def _products(device: torch.device, dtype: torch.dtype, size: int) -> Iterator[_Product]:
    weight = torch.randn(size, size, device=device, dtype=dtype)
    x = torch.randn(size, size, device=device, dtype=dtype)
    yield _Product(size, "F.linear", lambda: F.linear(x, weight))
    if device.type == "cpu":
        packed = TorchOps().linear(weight)
        yield _Product(size, "packed for oneDNN", lambda: packed(x))
        if not native.why_not(dtype, device):
            ours = native.NativeOps().linear(weight)
            yield _Product(size, "our own kernel", lambda: ours(x))


def _measure_bandwidth(device: torch.device, seconds: float, report: Progress) -> Fact:
    num_bytes = _buffer_bytes(device)
    buffer = torch.ones(num_bytes // 4, device=device, dtype=torch.float32)
    times = _times(buffer.sum, device, seconds)
    what, rate = f"sum over {format_bytes(num_bytes)}", num_bytes / median(times)
    report(f"{what}: {format_bandwidth(rate)}")
    return Fact(rate, _source(device, what, f"median of {len(times)}"))


def _buffer_bytes(device: torch.device) -> int:
    """Several times the last-level cache, so that the sum reads memory; 2 GiB is 8 times the largest GPU cache."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return min(2 * 2**30, free // 4)
    return max(256 * 2**20, 4 * _last_level_cache())


def _last_level_cache() -> int:
    """Bytes of all level-3 caches, or 0 where Linux does not say."""
    caches: dict[str, int] = {}
    for level in Path("/sys/devices/system/cpu").glob("cpu[0-9]*/cache/index3"):
        try:
            sharers, size = (level / "shared_cpu_list").read_text(), (level / "size").read_text().strip()
        except OSError:
            return 0
        caches[sharers] = int(size.removesuffix("K")) * 1024
    return sum(caches.values())


def _times(run: Callable[[], Any], device: torch.device, budget: float) -> list[float]:
    """Seconds per call, repeatedly for `budget` seconds, three times at least. The first two calls don't count."""
    _timed(run, device, 1)
    num_calls = math.ceil(_SECONDS_PER_REPEAT / max(_timed(run, device, 1), 1e-6))
    end = perf_counter() + budget
    times: list[float] = []
    while len(times) < _MIN_REPEATS or perf_counter() < end:
        times.append(_timed(run, device, num_calls))
    return times


def _timed(run: Callable[[], Any], device: torch.device, num_calls: int) -> float:
    """Seconds per call of `num_calls` in a row; the device is idle before and after."""
    start = perf_counter()
    for _ in range(num_calls):
        run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (perf_counter() - start) / num_calls


def _source(device: torch.device, what: str, statistic: str) -> str:
    threads = f", {_num_threads()}" if device.type == "cpu" else ""
    today = datetime.now(UTC).date().isoformat()
    return f"measured {today}: {what}, {statistic}, torch {torch.__version__}{threads}"


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_cpu_name()} ({_num_threads()})"


def _num_threads() -> str:
    number = torch.get_num_threads()
    return "1 thread" if number == 1 else f"{number} threads"


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor() or platform.machine())


def _memory(device: torch.device) -> Fact:
    """All of it, or what the control group allows where that is less."""
    if device.type == "cuda":
        return Fact(torch.cuda.get_device_properties(device).total_memory, "reported by the CUDA driver")
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        allowed = int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return Fact(total, "reported by the operating system")
    return Fact(min(total, allowed), "reported by the operating system, control group included")
