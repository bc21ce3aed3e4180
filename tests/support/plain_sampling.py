"""The plain definition of sampling: every row by itself, its whole vocabulary sorted in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from arbor.engine.sampling import Draws
from arbor.model.sampling_params import Sampling


def plain_sample(logits: Tensor, uniforms: list[float], sampling: Sampling) -> Draws:
    """What `arbor.engine.sampling.sample` returns for these arguments, in every bit."""
    rows = [plain_row(*each, sampling) for each in zip(logits.float(), uniforms, strict=True)]
    return Draws(*(list(column) for column in zip(*rows, strict=True)))


def plain_row(
    logits: Tensor, uniform: float, sampling: Sampling
) -> tuple[int, float, float, float, float]:
    """Token, log-probability, largest probability, left and share of one row."""
    logprobs = torch.log_softmax(logits, dim=-1)
    top1 = float(logprobs.max().exp())
    if sampling.temperature == 0:
        token = int(logprobs.argmax())
        return token, float(logprobs[token]), top1, 0.0, 1.0
    weight = torch.softmax(logits.double() / sampling.temperature, dim=-1)
    ids = torch.arange(len(weight))
    if sampling.top_k or sampling.top_p < 1 or sampling.min_p:
        weight, ids = weight.sort(descending=True, stable=True)
        weight = weight[: sampling.top_k or None]
        mass = weight.cumsum(dim=-1)
        total = float(mass[-1]) if sampling.top_k else 1.0
        weight = torch.where(mass - weight < sampling.top_p * total, weight, 0.0)
        weight = torch.where(weight >= sampling.min_p * weight[0], weight, 0.0)
    bounds = weight.cumsum(dim=-1)
    target = uniform * bounds[-1]
    index = min(int((bounds <= target).sum()), int(weight.nonzero()[-1]))
    left = (target - (bounds[index] - weight[index])) / weight[index]
    left = left.clamp(0.0, 1.0 - 2.0**-53)
    token = int(ids[index])
    share = weight[index] / bounds[-1]
    return token, float(logprobs[token]), top1, float(left), float(share)
