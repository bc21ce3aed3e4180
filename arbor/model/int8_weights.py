"""weights=int8: the linear layers of a loaded model in 8 bits, and what that changes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from arbor.errors import ModelError, UsageError
from arbor.kernels.linear.layers import PackedLinear, encode_linears, pack_linears, weight_bytes
from arbor.kernels.native import NUMBERS, native_library, native_state
from arbor.model.names import INT8, check_int8_weights
from arbor.support.texts import human_bytes

ROUNDED = "_arbor_rounded"  # of a model whose weights are in 8 bits


@dataclass(frozen=True, slots=True)
class WeightRounding:
    """What rounding the weights of linear layers to 8 bits changed.

    Attributes:
        layers: linear layers in 8 bits.
        bytes_before, bytes_after: of all weights of the model.
        logit_error: distance of the logits from those of the model as it was, relative to their
            length, for the median of some random tokens; None if its own were not known.
    """

    layers: int
    bytes_before: int
    bytes_after: int
    logit_error: float | None = None

    def __str__(self) -> str:
        sizes = f"{human_bytes(self.bytes_before)} to {human_bytes(self.bytes_after)}"
        moved = "" if self.logit_error is None else f", logits change by {self.logit_error:.2%}"
        return f"weights {INT8}, lossy: {self.layers:,} linear layers, {sizes}{moved}"


def check_rounding(dtype: str, device: torch.device) -> None:
    """Refuse weights in 8 bits that nothing computes with, before a model is read or changed.

    Args:
        dtype: of the model, by name.
        device: where it runs.

    Raises:
        UsageError: not on a CPU, no native kernels, or another dtype than they compute in.
    """
    check_int8_weights(str(device))
    if native_library() is None:
        raise UsageError(
            "weights",
            f"weights={INT8} needs the native kernels: {native_state()}.",
            "See docs/cpu.md, or leave weights out.",
        )
    if dtype not in NUMBERS:
        raise UsageError(
            "weights",
            f"weights={INT8}: no kernels for {dtype}.",
            f"Add --dtype {' or '.join(NUMBERS)}.",
        )


def round_weights(model: nn.Module, *, deterministic: bool) -> WeightRounding | None:
    """Replaces the linear layers of a loaded model by ones in 8 bits, in place, and packs the rest.

    What is not a linear layer of plain numbers keeps its weights: embeddings, norms, the experts of
    mixtures, layers of a GGUF file that are in blocks already.

    Args:
        model: as `check_rounding` admits.
        deterministic: as in `pack_linears`.

    Returns:
        What changed; None where all were in 8 bits before.

    Raises:
        UsageError: no plain linear layer.
        ModelError: a weight is NaN or infinite.
    """
    before = weight_bytes(model)
    again = hasattr(model, ROUNDED)
    setattr(model, ROUNDED, True)  # before any layer is: what ends halfway is not full precision
    try:
        layers = encode_linears(model)
    except ValueError as error:
        raise ModelError("weights-not-finite", f"{error}.", "Take an intact checkpoint.") from error
    if not layers and not again:
        delattr(model, ROUNDED)
        raise UsageError(
            "weights",
            f"weights={INT8}: no linear layer of the model is in full precision.",
            "Leave weights out.",
        )
    pack_linears(model, deterministic=deterministic)
    return WeightRounding(len(layers), before, weight_bytes(model)) if layers else None


def packed_before(model: nn.Module) -> bool:
    """Whether linear layers of a model were packed or rounded already."""
    packed = (each for each in model.modules() if isinstance(each, PackedLinear))
    return hasattr(model, ROUNDED) or any(each.packing != "dense" for each in packed)


def check_packed_before(model: nn.Module, weights: str) -> None:
    """Refuse a ready model whose linear layers another solver packed in another way.

    Args:
        model: perhaps loaded by a solver before.
        weights: as in `Solver`.

    Raises:
        UsageError: its weights are no longer what they were.
    """
    in_8_bits = hasattr(model, ROUNDED)
    if packed_before(model) and in_8_bits != (weights == INT8):
        raise UsageError(
            "weights",
            f"a solver with weights={INT8 if in_8_bits else 'auto'!r} has replaced the linear layers "
            "of this model.",
            "Load it again.",
        )
