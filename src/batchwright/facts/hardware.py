"""What an accelerator can do at best: peak FLOP/s by dtype, memory bandwidth and size, each with its source.

Peaks are dense (no structured sparsity) and for matrix units that accumulate in 32 bit, which is what PyTorch
runs; vendors who print only the sparse figure are halved, as their own footnotes say. What was not found in print
is None and asking for it raises UnknownFact: nothing here is guessed, and a name is matched whole, so a cut-down
or partitioned card is not taken for its namesake. CPUs are not in the table: measure them
(`studies.roofline.measure_hardware`).
"""

import re
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal

from batchwright.errors import UnknownFact

Dtype = Literal["float32", "tf32", "bfloat16", "float16", "fp8", "int8"]
"""`float32` is the vector units' or, where there are such, the matrix units' full precision; `tf32` is its own."""


@dataclass(frozen=True, slots=True)
class Fact:
    """One number and where it comes from: a document, or how and when it was measured."""

    value: float
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One device. Peaks in FLOP/s (int8: operations/s), `bandwidth` in bytes/s, `memory` in bytes; None is unknown."""

    name: str
    float32: Fact | None = None
    tf32: Fact | None = None
    bfloat16: Fact | None = None
    float16: Fact | None = None
    fp8: Fact | None = None
    int8: Fact | None = None
    bandwidth: Fact | None = None
    memory: Fact | None = None

    def peak(self, dtype: Dtype) -> float:
        """FLOP/s at best in `dtype`. Raises UnknownFact."""
        return self._value(f"peak FLOP/s in {dtype}", getattr(self, dtype))

    def bytes_per_second(self) -> float:
        """Memory bandwidth at best. Raises UnknownFact."""
        return self._value("memory bandwidth", self.bandwidth)

    def memory_bytes(self) -> int:
        """All of its memory, of which a driver and a runtime take some. Raises UnknownFact."""
        return int(self._value("memory size", self.memory))

    def ridge(self, dtype: Dtype) -> float:
        """FLOPs per byte read above which work is bound by arithmetic instead of memory. Raises UnknownFact.

        The roofline's corner, peak / bandwidth (Williams, Waterman and Patterson, CACM 52(4), 2009).
        """
        return self.peak(dtype) / self.bytes_per_second()

    def _value(self, what: str, fact: Fact | None) -> float:
        if fact is None:
            raise UnknownFact(
                f"look up the {what} of {self.name}",
                "neither table nor measurement holds it",
                "measure it with studies.roofline.measure_hardware on that device, or pass a Hardware with it",
            )
        return fact.value


def lookup(name: str) -> Hardware:
    """The device of that name, written as `torch.cuda.get_device_name` prints it or as people do.

    Vendor and brand words, word order, case and punctuation do not matter; every other word does. Raises
    UnknownFact, which names the variants where the name covers several (`H100`), or what is spelled alike.
    """
    key = _key(name)
    if key in _BY_KEY:
        return _BY_KEY[key]
    raise UnknownFact(f"look up the peaks of {name!r}", *_unknown(name))


def known() -> tuple[Hardware, ...]:
    """All devices of the table."""
    return tuple(hardware for hardware, _ in _TABLE)


_BRANDS = {"nvidia", "amd", "geforce", "tesla", "instinct", "gpu", "rtx", "hgx"}
_SAME_WORD = {"sxm4": "sxm", "sxm5": "sxm"}


def _key(name: str) -> frozenset[str]:
    words = re.findall(r"[a-z0-9.]+", name.lower())
    return frozenset(_SAME_WORD.get(word, word) for word in words if word not in _BRANDS)


def _unknown(name: str) -> tuple[str, str]:
    """Fact and remedy for a name that is not in the table."""
    key = _key(name)
    variants = [hardware.name for hardware in known() if key and key < _key(hardware.name)]
    if variants:
        return f"the table holds {', '.join(variants)}, which differ from others so named", "name one of them"
    close = get_close_matches(name.lower(), [hardware.name.lower() for hardware in known()], n=3)
    alike = [hardware.name for hardware in known() if hardware.name.lower() in close]
    fact = f"the table does not hold it (spelled alike: {', '.join(alike)})" if alike else "the table does not hold it"
    return fact, "measure it with studies.roofline.measure_hardware on that device, or pass a Hardware of your own"


_READ = "read 2026-11-30"
_HALVED = "half of the figure with sparsity"
_KLOCKWOOD = "glennklockwood.com/garden/processors"
_A100 = f"NVIDIA A100 datasheet (1758950-r4), quoted at {_KLOCKWOOD}/A100, {_READ}"
_A100_PCIE = f"NVIDIA A100 datasheet, quoted at thundercompute.com/blog/nvidia-a100-specs-full-guide, {_READ}"
_H100 = f"NVIDIA Hopper architecture white paper, quoted at {_KLOCKWOOD}/h100, {_READ}"
_H100_PCIE = f"NVIDIA H100 datasheet, quoted at archive-lib.hpctech.co.jp/gpuproduct/nvidia-h100.html, {_READ}"
_H200 = f"NVIDIA H200 datasheet, quoted at itkb.uw.cz/2026/06/nvidia-h200-vs-b300-precisions-cores.html, {_READ}"
_H200_CHIP = f"the GH100 chip of H100 SXM: {_H100}"
_L4 = f"NVIDIA L4 datasheet, quoted at grokipedia.com/page/NVIDIA_L4_vs_L40S, {_READ}"
_L4_TF32 = f"NVIDIA L4 datasheet, quoted at store.sourcecode.com/en-us/bg-bucket-compare/125/9820, {_READ}"
_L4_FP32 = f"NVIDIA L4 datasheet, quoted at github.com/kentjliu/acml-project1, {_READ}"
_L40S = f"NVIDIA L40S datasheet, quoted at mullet.se/product.html?product_id=355414, {_READ}"
_A10G = f"baseten.co/blog/nvidia-a10-vs-a10g-for-ml-model-inference, {_READ}"
_4090 = f"waredb.com/processor/nvidia-geforce-rtx-4090, {_READ}"
_T4 = f"NVIDIA T4 announcement, quoted at geektopia.es (2018-09-13, Tesla T4), {_READ}"
_T4_MEMORY = f"sysrqmts.com/en/gpus/nvidia/tesla/t4, {_READ}"
_B200 = f"NVIDIA Blackwell architecture brief, HGX B200 at 1000 W, quoted at {_KLOCKWOOD}/B200, {_READ}"
_B200_MEMORY = f"180 GB in use of 192 GB fitted: emergentmind.com/topics/amd-mi300x-gpu, {_READ}"
_MI300X = f"AMD MI300X data sheet, quoted at github.com/alpharomercoma/MI300X-vs-H200, METHODOLOGY.md, {_READ}"
_MI300X_FP16 = f"the rate of bfloat16; about 1.3 PFLOP/s at jaredwatkins.com/research/ai-accelerators, {_READ}"


def _tera(value: float, source: str) -> Fact:
    return Fact(value * 1e12, source)


def _giga(value: float, source: str) -> Fact:
    return Fact(value * 1e9, source)


def _a100(name: str, bandwidth: Fact, memory: Fact) -> Hardware:
    return Hardware(
        name=name,
        float32=_tera(19.5, _A100),
        tf32=_tera(156, _A100),
        bfloat16=_tera(312, _A100),
        float16=_tera(312, _A100),
        int8=_tera(624, _A100),
        bandwidth=bandwidth,
        memory=memory,
    )


def _hopper_sxm(name: str, source: str, bandwidth: Fact, memory: Fact) -> Hardware:
    return Hardware(
        name=name,
        float32=_tera(66.9, source),
        tf32=_tera(494.7, source),
        bfloat16=_tera(989.4, source),
        float16=_tera(989.4, source),
        fp8=_tera(1978.9, source),
        int8=_tera(1978.9, source),
        bandwidth=bandwidth,
        memory=memory,
    )


# Each device with the further names it goes by; `_key` makes word order, case and brand words immaterial.
_TABLE: tuple[tuple[Hardware, tuple[str, ...]], ...] = (
    (_a100("A100-SXM4-40GB", _giga(1555, _A100), _giga(40, _A100)), ()),
    (_a100("A100-SXM4-80GB", _giga(2039, _A100), _giga(80, _A100)), ()),
    (_a100("A100-PCIE-40GB", _giga(1555, _A100_PCIE), _giga(40, _A100_PCIE)), ()),
    (_a100("A100 80GB PCIe", _giga(1935, _A100_PCIE), _giga(80, _A100_PCIE)), ()),
    (_hopper_sxm("H100 SXM 80GB", _H100, _tera(3.35, _H100), _giga(80, _H100)), ("H100 80GB HBM3", "H100 SXM")),
    (
        Hardware(
            name="H100 PCIe",
            float32=_tera(51, _H100_PCIE),
            tf32=_tera(756 / 2, f"{_H100_PCIE}; {_HALVED}"),
            bfloat16=_tera(1513 / 2, f"{_H100_PCIE}; {_HALVED}"),
            float16=_tera(1513 / 2, f"{_H100_PCIE}; {_HALVED}"),
            fp8=_tera(3026 / 2, f"{_H100_PCIE}; {_HALVED}"),
            int8=_tera(3026 / 2, f"{_H100_PCIE}; {_HALVED}"),
            bandwidth=_tera(2, _H100_PCIE),
            memory=_giga(80, _H100_PCIE),
        ),
        ("H100 PCIe 80GB",),
    ),
    (_hopper_sxm("H200", _H200_CHIP, _tera(4.8, _H200), _giga(141, _H200)), ("H200 SXM", "H200 SXM 141GB")),
    (
        Hardware(
            name="L4",
            float32=_tera(30.3, _L4_FP32),
            tf32=_tera(120 / 2, f"{_L4_TF32}; {_HALVED}"),
            bfloat16=_tera(242 / 2, f"{_L4}; {_HALVED}; the rate of float16"),
            float16=_tera(242 / 2, f"{_L4}; {_HALVED}"),
            fp8=_tera(485 / 2, f"{_L4}; {_HALVED}"),
            int8=_tera(485 / 2, f"{_L4}; {_HALVED}"),
            bandwidth=_giga(300, _L4),
            memory=_giga(24, _L4),
        ),
        (),
    ),
    (
        Hardware(
            name="L40S",
            float32=_tera(91.6, _L40S),
            tf32=_tera(183, _L40S),
            bfloat16=_tera(362.05, _L40S),
            float16=_tera(362.05, _L40S),
            fp8=_tera(733, _L40S),
            bandwidth=_giga(864, _L40S),
            memory=_giga(48, _L40S),
        ),
        (),
    ),
    (Hardware(name="A10G", bandwidth=_giga(600, _A10G), memory=_giga(24, _A10G)), ()),
    (
        Hardware(
            name="RTX 4090",
            float32=_tera(82.58, _4090),
            tf32=_tera(82.58, _4090),
            bfloat16=_tera(165.15, _4090),
            float16=_tera(165.15, _4090),
            fp8=_tera(330.30, _4090),
            int8=_tera(660.60, _4090),
            bandwidth=_giga(1008, _4090),
            memory=Fact(24e9, _4090),
        ),
        (),
    ),
    (
        Hardware(
            name="T4",
            float32=_tera(8.1, _T4),
            float16=_tera(65, _T4),
            int8=_tera(130, _T4),
            bandwidth=_giga(320, _T4_MEMORY),
            memory=_giga(16, _T4_MEMORY),
        ),
        (),
    ),
    (
        Hardware(
            name="B200",
            float32=_tera(80, _B200),
            tf32=_tera(1100, _B200),
            bfloat16=_tera(2250, _B200),
            float16=_tera(2250, _B200),
            fp8=_tera(4500, _B200),
            int8=_tera(4500, _B200),
            bandwidth=_tera(8, _B200),
            memory=_giga(180, _B200_MEMORY),
        ),
        ("B200 SXM",),
    ),
    (
        Hardware(
            name="MI300X",
            bfloat16=_tera(1307.4, _MI300X),
            float16=_tera(1307.4, _MI300X_FP16),
            fp8=_tera(2614.9, _MI300X),
            bandwidth=_tera(5.3, _MI300X),
            memory=_giga(192, _MI300X),
        ),
        ("MI300X OAM",),
    ),
)
_BY_KEY = {_key(name): hardware for hardware, others in _TABLE for name in (hardware.name, *others)}
