"""Makes every run the same: fixed hypothesis examples under CI, two torch threads, no hub, no network but loopback."""

import ipaddress
import os
import signal
import socket
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest

os.environ.update(
    HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", TOKENIZERS_PARALLELISM="0"
)
os.environ.setdefault("OMP_NUM_THREADS", "2")  # read by torch when it is imported, which is later than this line

# A shell that starts the tests in the background has them ignore SIGINT, and what they start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A deadline or a slowness check would judge the machine, not the code.
hypothesis.settings.register_profile("dev", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.register_profile("ci", hypothesis.settings.get_profile("dev"), derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "dev")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu and not _cuda_is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def _cuda_is_available() -> bool:
    import torch  # only when a gpu test was collected: most of the suite runs without torch

    return torch.cuda.is_available()


@pytest.fixture(autouse=True, scope="session")
def _loopback_only() -> Iterator[None]:
    """A test that reaches for the network fails at once and says where it wanted to go."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("connect", "connect_ex"):
            patch.setattr(socket.socket, name, _refusing(getattr(socket.socket, name)))
        yield


def _refusing(connect: Any) -> Any:
    def connect_if_local(self: socket.socket, address: Any) -> Any:
        if self.family in {socket.AF_INET, socket.AF_INET6} and not _is_loopback(address[0]):
            pytest.fail(f"a test tried to connect to {address}; tests reach loopback addresses only")
        return connect(self, address)

    return connect_if_local


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
