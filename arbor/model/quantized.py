"""Quantized checkpoints: what transformers needs to load one, and the linear layers it leaves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from arbor.errors import ModelError


@dataclass(frozen=True, slots=True)
class Quantization:
    """A way to quantize weights that transformers loads.

    Attributes:
        packages: what it imports -> what installs it.
        on_cpu: whether its layers compute on a CPU.
    """

    packages: Mapping[str, str]
    on_cpu: bool = True


ACCELERATE = {"accelerate": "accelerate"}
# By `quant_method` of the config; others are left to transformers.
QUANTIZATIONS: Mapping[str, Quantization] = {
    "awq": Quantization({"gptqmodel": "gptqmodel", **ACCELERATE}),
    "bitsandbytes": Quantization({"bitsandbytes": "bitsandbytes", **ACCELERATE}),
    "compressed-tensors": Quantization({"compressed_tensors": "compressed-tensors"}),
    "fp8": Quantization(ACCELERATE),
    "gptq": Quantization({"gptqmodel": "gptqmodel", "optimum": "optimum", **ACCELERATE}),
    "hqq": Quantization({"hqq": "hqq", **ACCELERATE}, on_cpu=False),
    "quanto": Quantization({"optimum.quanto": "optimum-quanto", **ACCELERATE}),
    "torchao": Quantization({"torchao": "torchao"}),
}


def quantization_of(config: Any) -> str | None:
    """The `quant_method` of a model's config; None for weights that are not quantized."""
    for each in (config, config.get_text_config()):
        found = getattr(each, "quantization_config", None)
        if found is not None:
            name = found.get("quant_method") if isinstance(found, dict) else found.quant_method
            return str(getattr(name, "value", name))
    return None


def check_quantized(config: Any, model: str, device: str) -> None:
    """Refuse quantized weights that cannot be loaded here, before they are read.

    Args:
        config: of the model.
        model: its name.
        device: type of the device, ``cpu`` or ``cuda``.

    Raises:
        ModelError: names the packages to install, or what would work.
    """
    method = quantization_of(config)
    known = None if method is None else QUANTIZATIONS.get(method)
    if method is None or known is None:
        return
    missing = [package for name, package in known.packages.items() if not _is_installed(name)]
    if missing:
        raise ModelError(
            "model-quantized",
            f"{model}: weights quantized by {method}, which transformers loads with "
            f"{' and '.join(missing)}.",
            f"pip install {' '.join(missing)}",
            model=model,
            method=method,
        )
    if device == "cpu" and not known.on_cpu:
        raise ModelError(
            "model-quantized",
            f"{model}: layers quantized by {method} compute on a GPU only.",
            "Use --device cuda, or a checkpoint that is not quantized.",
            model=model,
            method=method,
        )


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # of a parent package
        return False
