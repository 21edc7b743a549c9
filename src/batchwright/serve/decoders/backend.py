"""What a model is to run on: the target that a user names, and the operators that serve it.

"auto" takes our own kernels on the CPUs on which they were measured to win; on others OpenVINO, where it is installed;
and torch's operators elsewhere. OpenVINO compiles a decoder as a whole (`openvino_executor`) and has no operators here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from batchwright.errors import ConfigError
from batchwright.facts.shape import ModelShape
from batchwright.serve import openvino_executor
from batchwright.serve.decoders import native
from batchwright.serve.decoders.ops import Ops, TorchOps
from batchwright.serve.decoders.recipe import recipe_of

Backend = Literal["auto", "native", "torch", "openvino"]
Quantization = Literal["int8"]


@dataclass(frozen=True, slots=True)
class Target:
    """`quantization`: how weights are held, if not in `dtype`. `deterministic`: rows should not affect each other."""

    dtype: torch.dtype
    device: torch.device
    backend: Backend = "auto"
    quantization: Quantization | None = None
    deterministic: bool = False

    def __post_init__(self) -> None:
        if self.backend not in get_args(Backend):
            names = ", ".join(get_args(Backend))
            raise ConfigError(f"using backend {self.backend!r}", f"there are {names}", "choose one of these")
        if self.quantization not in (None, *get_args(Quantization)):
            fact = 'there is "int8", which holds weights as int8 and rounds their inputs to int8 too'
            raise ConfigError(f"using quantization {self.quantization!r}", fact, "use that, or None")
        if self.quantization and self.device.type != "cpu":
            raise ConfigError(f"using int8 on {self.device}", "int8 runs on a CPU only", 'use device="cpu", or no int8')
        if self.backend == "openvino":
            self._check_openvino()

    def _check_openvino(self) -> None:
        if self.device.type != "cpu":
            fact = f"OpenVINO's kernels run on a CPU here, and the device is {self.device}"
            raise ConfigError('using backend "openvino"', fact, 'use device="cpu", or another backend')
        if self.deterministic:
            raise not_deterministic()


def not_deterministic() -> ConfigError:
    """OpenVINO was asked for equal bits in any company."""
    fact = "a row's sums are added up in an order that depends on the other rows of its step"
    return ConfigError('being deterministic with backend "openvino"', fact, 'use backend="native"')


def takes_openvino(target: Target, config: Mapping[str, Any]) -> bool:
    """Whether OpenVINO runs the model: where it is asked for, or can and nothing faster can be had on this CPU."""
    if target.backend != "auto":
        return target.backend == "openvino"
    is_plain_cpu = target.device.type == "cpu" and not target.deterministic
    has_kernels = native.is_faster(target.dtype) and not native.why_not(target.dtype, target.device)
    is_wanted = is_plain_cpu and not has_kernels and recipe_of(config).is_plain
    return is_wanted and openvino_executor.runs_here(target.dtype)


def ops_for(target: Target, shape: ModelShape) -> Ops:
    """Raises ConfigError where "native" is asked for and cannot be had."""
    is_wanted = target.backend == "native" or (
        target.backend == "auto" and (target.deterministic or native.is_faster(target.dtype))
    )
    if not is_wanted:
        return TorchOps(target.quantization)
    obstacle = native.why_not(target.dtype, target.device, shape)
    if obstacle and target.backend == "native":
        raise ConfigError('using backend "native"', obstacle, 'use "auto" or "torch"')
    return TorchOps(target.quantization) if obstacle else native.NativeOps(target.quantization)
