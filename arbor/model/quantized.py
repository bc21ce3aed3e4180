"""Quantized checkpoints: what transformers needs to load one, and the linear layers it leaves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
# By `quant_method` of the config; what others need is left to transformers.
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


# Ends of the names of tensors that hold quantized weights, or what they are scaled by.
PARTS = ("weight_scale", "weight_scale_2", "weight_scale_inv", "input_scale", "qweight", "q_weight")
INSTEAD = "Take a checkpoint that is not quantized, or a GGUF file."


def quantization_of(config: Any) -> str | None:
    """The `quant_method` of a model's config, empty if it names none; None for weights that are not
    quantized."""
    for each in (config, config.get_text_config()):
        found = getattr(each, "quantization_config", None)
        if isinstance(found, dict):
            if found.get("load_in_8bit") or found.get("load_in_4bit"):
                return "bitsandbytes"  # its first configs name no method
            name = found.get("quant_method")
        else:
            name = getattr(found, "quant_method", None)
        if found is not None:
            return str(getattr(name, "value", name or ""))
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
    if method is None:
        return
    known = QUANTIZATIONS.get(method)
    if known is None:
        _check_method(method, model)
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


def _check_method(method: str, model: str) -> None:
    """Refuse a method for which transformers has no loader: it would read the weights as they are,
    without what they are scaled by."""
    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

    if method in AUTO_QUANTIZER_MAPPING:
        return
    raise ModelError(
        "model-quantized",
        f"{model}: weights quantized by {method:.40}, which transformers does not load."
        if method
        else f"{model}: its config has a quantization_config that names no quant_method.",
        INSTEAD,
        model=model,
        method=method,
    )


def check_whole(unread: Iterable[str], model: str) -> None:
    """Refuse weights that were read without their scales, or not at all, since the model's config
    does not say that they are quantized.

    Args:
        unread: names of the tensors in the files that the model has no place for.
        model: its name.

    Raises:
        ModelError: names one of them, and what would work.
    """
    parts = sorted(name for name in unread if name.rpartition(".")[2] in PARTS)
    if parts:
        raise ModelError(
            "model-quantized",
            f"{model}: its weights are quantized ({parts[0]}), and its config.json does not say how.",
            INSTEAD,
            model=model,
            method="",
        )


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # of a parent package
        return False
