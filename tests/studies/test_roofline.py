"""A short measurement is plausible, says how it was made, and survives being kept."""

import pytest

pytest.importorskip("torch")

import torch

from batchwright.errors import ConfigError, InputError, UnknownFact
from batchwright.facts.hardware import Fact, Hardware
from batchwright.studies.roofline import decode_hardware, encode_hardware, measure_hardware


@pytest.fixture(scope="module")
def measured() -> tuple[Hardware, list[str]]:
    """This CPU, measured as briefly as makes sense, and what progress was reported."""
    lines: list[str] = []
    return measure_hardware("cpu", "float32", seconds=0.1, progress=lines.append), lines


def test_a_measurement_is_plausible(measured: tuple[Hardware, list[str]]) -> None:
    """Some CPU between a slow core and a rack: 1 GFLOP/s to 100 TFLOP/s, 0.5 GB/s to 5 TB/s."""
    hardware, _ = measured
    assert 1e9 < hardware.peak("float32") < 1e14
    assert 5e8 < hardware.bytes_per_second() < 5e12
    assert hardware.memory_bytes() > 2**28


def test_a_measurement_says_how_it_was_made(measured: tuple[Hardware, list[str]]) -> None:
    """Its source has date, size, repeats, versions and threads."""
    hardware, _ = measured
    assert hardware.float32 is not None
    for part in ("measured 20", "squared", "best of", "torch", "thread"):
        assert part in hardware.float32.source


def test_one_thread_is_in_the_singular(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the machine's name, and so wherever it is shown."""
    names = []
    for number in (1, 2):
        monkeypatch.setattr(torch, "get_num_threads", lambda number=number: number)
        names.append(measure_hardware("cpu", "float32", seconds=0.01).name.rpartition(" (")[2])
    assert names == ["1 thread)", "2 threads)"]


def test_what_was_not_measured_stays_unknown(measured: tuple[Hardware, list[str]]) -> None:
    """One dtype is measured; the others are not guessed from it."""
    with pytest.raises(UnknownFact, match="bfloat16"):
        measured[0].peak("bfloat16")


def test_progress_is_told_each_figure(measured: tuple[Hardware, list[str]]) -> None:
    """At least one product and the bandwidth."""
    _, lines = measured
    assert any("FLOP/s" in line for line in lines)
    assert lines[-1].startswith("sum over")


def test_a_measurement_survives_being_kept(measured: tuple[Hardware, list[str]]) -> None:
    """JSON and back is the same, with None where nothing is known."""
    hardware, _ = measured
    assert decode_hardware(encode_hardware(hardware)) == hardware
    bare = Hardware(name="x", bandwidth=Fact(1e9, "y"))
    assert decode_hardware(encode_hardware(bare)) == bare


def test_a_file_that_holds_no_measurement_is_refused() -> None:
    """Not JSON, or JSON of something else."""
    for text in (b"{", b"[]", b'{"name": "x", "bandwidth": 3}'):
        with pytest.raises(InputError, match="measure again"):
            decode_hardware(text)


@pytest.mark.parametrize(
    ("device", "dtype", "seconds"),
    [
        ("cuda:99", "bfloat16", 1.0),
        ("meta", "bfloat16", 1.0),
        ("gpu?", "bfloat16", 1.0),
        ("cpu", "fp8", 1.0),
        ("cpu", "float32", 0.0),
        ("cpu", "float32", float("nan")),
    ],
)
def test_what_cannot_be_measured_is_refused(device: str, dtype: str, seconds: float) -> None:
    """Absent devices, other dtypes and no time at all are errors before anything runs."""
    with pytest.raises(ConfigError):
        measure_hardware(device, dtype, seconds)  # type: ignore[arg-type]


@pytest.mark.gpu
def test_a_gpu_stays_below_its_vendors_peak() -> None:
    """What is measured is a good part of the table's figure, and not more than it."""
    from batchwright.facts.hardware import lookup

    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    hardware = measure_hardware("cuda", "bfloat16")
    assert 0.4 < hardware.peak("bfloat16") / lookup(hardware.name).peak("bfloat16") < 1.02
    assert 0.5 < hardware.bytes_per_second() / lookup(hardware.name).bytes_per_second() < 1.02
