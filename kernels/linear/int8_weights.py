"""Weights in 8 bits: what a linear layer's weight becomes, and its layout for the native kernels.

Each output has a float32 scale for every group of `GROUP` inputs: the group's largest magnitude
/ 127. A weight becomes the code round(weight / scale), ties to even, and is read as code * scale
in float32, so it changes by at most half a scale: 0.4 % of the largest of its group. This is
symmetric round-to-nearest by groups, as in llama.cpp's Q8_0, which has groups of 32 and float16
scales.

With GROUP inputs to a scale, a weight takes 8.5 bits.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from arbor.kernels.hugepages import on_huge_pages

GROUP = 64  # inputs that share a scale, as in kernels/csrc/linear.h
MOST_CODE = 127
PANEL = 16  # outputs of a panel of the native kernels
GROUP_BYTES = (4 + GROUP) * PANEL  # of a panel: scales, then codes


def int8_bytes(inputs: int, outputs: int) -> int:
    """Bytes of a weight [outputs, inputs] in 8 bits, without the padding of the layout.

    Example:
        >>> int8_bytes(64, 16)
        1088
    """
    return outputs * (inputs + 4 * -(-inputs // GROUP))


def encode(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of a weight.

    Args:
        weight: [outputs, inputs], any floating-point dtype.

    Returns:
        codes: int8 [outputs, groups, GROUP], zeros behind the last input.
        scales: float32 [outputs, groups].

    Raises:
        ValueError: a weight is NaN or infinite.

    Example:
        >>> codes, scales = encode(torch.tensor([[0.0, 1.0, -2.0, 254.0]]))
        >>> codes[0, 0, :4].tolist(), scales.tolist()
        ([0, 0, -1, 127], [[2.0]])
    """
    inputs = weight.shape[1]
    groups = F.pad(weight.float(), (0, -inputs % GROUP)).unflatten(-1, (-1, GROUP))
    scales = groups.abs().amax(-1) / MOST_CODE
    if not bool(scales.isfinite().all()):
        raise ValueError("a weight is NaN or infinite")
    codes = (groups / scales.where(scales > 0, 1.0)[..., None]).round()
    return codes.clamp(-MOST_CODE, MOST_CODE).to(torch.int8), scales


def decode(codes: Tensor, scales: Tensor, inputs: int) -> Tensor:
    """The weight that the kernels multiply by.

    Returns:
        float32 [outputs, inputs].

    Example:
        >>> decode(*encode(torch.tensor([[0.0, 1.0, -2.0, 254.0]])), 4)
        tensor([[  0.,   0.,  -2., 254.]])
    """
    return (codes.float() * scales[..., None]).flatten(1)[:, :inputs]


def int8_panels(weight: Tensor) -> Tensor:
    """A weight [outputs, inputs] as kernels/csrc/linear.h reads it.

    Returns:
        int8, flat: for each panel of `PANEL` outputs and each group of inputs the scales of the
        panel's outputs and then their codes, input by input; outputs are padded with zeros.

    Raises:
        ValueError: a weight is NaN or infinite.
    """
    outputs, inputs = weight.shape
    panels, groups = -(-outputs // PANEL), -(-inputs // GROUP)
    packed = torch.empty(panels * groups * GROUP_BYTES, dtype=torch.int8)
    on_huge_pages(packed.data_ptr(), packed.nbytes, filled=False)
    packed.zero_()
    view = packed.view(panels, groups, GROUP_BYTES)
    for panel in range(panels):  # one at a time: no second copy of the weight
        codes, scales = encode(weight[panel * PANEL : (panel + 1) * PANEL])
        size = len(codes)
        view[panel, :, : 4 * PANEL].view(torch.float32)[:, :size] = scales.T
        placed = view[panel, :, 4 * PANEL :].view(groups, GROUP, PANEL)
        placed[:, :, :size] = codes.permute(1, 2, 0)
    return packed
