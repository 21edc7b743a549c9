"""The table: every number has a source and makes sense, names match whole, and nothing unknown is guessed."""

import dataclasses

import pytest

from batchwright.errors import UnknownFact
from batchwright.facts.hardware import Dtype, Fact, Hardware, known, lookup

DTYPES: tuple[Dtype, ...] = ("float32", "tf32", "bfloat16", "float16", "fp8", "int8")


def facts_of(hardware: Hardware) -> dict[str, Fact]:
    """The facts that are known of a device, by field."""
    values = {field.name: getattr(hardware, field.name) for field in dataclasses.fields(hardware)}
    return {name: value for name, value in values.items() if isinstance(value, Fact)}


@pytest.mark.parametrize("hardware", known(), ids=lambda hardware: hardware.name)
def test_every_number_has_a_dated_source(hardware: Hardware) -> None:
    """A figure says where it was read and when."""
    assert facts_of(hardware)
    for fact in facts_of(hardware).values():
        assert fact.value > 0
        assert "read 20" in fact.source


@pytest.mark.parametrize("hardware", known(), ids=lambda hardware: hardware.name)
def test_peaks_are_dense_and_ordered(hardware: Hardware) -> None:
    """Halving the width at most doubles the rate on matrix units: a sparse figure in a row would show."""
    facts = facts_of(hardware)
    if "tf32" in facts:
        assert facts["bfloat16"].value == pytest.approx(2 * facts["tf32"].value, rel=0.03)
    if "fp8" in facts:
        assert facts["fp8"].value == pytest.approx(2 * facts["bfloat16"].value, rel=0.03)
    if "bfloat16" in facts:
        assert facts["bfloat16"].value == facts["float16"].value


@pytest.mark.parametrize(
    ("printed", "name"),
    [
        ("NVIDIA A100-SXM4-40GB", "A100-SXM4-40GB"),
        ("A100-SXM4-80GB", "A100-SXM4-80GB"),
        ("NVIDIA A100 80GB PCIe", "A100 80GB PCIe"),
        ("NVIDIA A100-PCIE-40GB", "A100-PCIE-40GB"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM 80GB"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("Tesla T4", "T4"),
        ("NVIDIA B200", "B200"),
        ("AMD Instinct MI300X", "MI300X"),
        ("AMD Instinct MI300X OAM", "MI300X"),
        ("h100-sxm", "H100 SXM 80GB"),
        ("a100 80gb sxm", "A100-SXM4-80GB"),
        ("rtx4090", None),
    ],
)
def test_names_are_found_as_torch_prints_them(printed: str, name: str | None) -> None:
    """The name a driver reports leads to the device; words run together do not."""
    if name is None:
        with pytest.raises(UnknownFact, match="RTX 4090"):
            lookup(printed)
    else:
        assert lookup(printed).name == name


@pytest.mark.parametrize("hardware", known(), ids=lambda hardware: hardware.name)
def test_a_device_is_found_by_its_own_name(hardware: Hardware) -> None:
    """No entry hides another."""
    assert lookup(hardware.name) is hardware


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA GH200 480GB",
        "NVIDIA H200 NVL",
        "NVIDIA L40",
        "AMD EPYC 9654",
        "NVIDIA",
        "",
    ],
)
def test_a_cut_down_or_unlisted_device_is_not_taken_for_its_namesake(name: str) -> None:
    """What is not in the table is unknown, and the error says to measure it."""
    with pytest.raises(UnknownFact, match="measure_hardware"):
        lookup(name)


@pytest.mark.parametrize(
    ("name", "variants"), [("H100", ("H100 SXM 80GB", "H100 PCIe")), ("a100 40gb", ("A100-PCIE-40GB",))]
)
def test_a_name_that_covers_several_devices_lists_them(name: str, variants: tuple[str, ...]) -> None:
    """Variants differ in bandwidth and peaks, so none is picked."""
    with pytest.raises(UnknownFact) as caught:
        lookup(name)
    assert all(variant in caught.value.fact for variant in variants)


def test_an_unknown_peak_is_an_error_not_a_zero() -> None:
    """T4 has no bfloat16 and no figure for it is made up."""
    with pytest.raises(UnknownFact, match="bfloat16 of T4"):
        lookup("Tesla T4").peak("bfloat16")


def test_the_ridge_of_an_h100_is_where_a_batch_becomes_compute_bound() -> None:
    """989.4 TFLOP/s over 3.35 TB/s is 295 FLOPs per byte."""
    h100 = lookup("NVIDIA H100 80GB HBM3")
    assert h100.ridge("bfloat16") == pytest.approx(295.3, abs=0.1)
    assert h100.memory_bytes() == 80_000_000_000
