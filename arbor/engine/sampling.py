"""Which token comes next: one uniform number per token, from a stream that belongs to the block."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from arbor.errors import UsageError
from arbor.tree import Node


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
        temperature: 0 takes the most probable token (greedy).
        top_p: nucleus: the smallest set of most probable tokens whose mass reaches it; 1 = off.
        top_k: only the k most probable tokens; 0 = off.
    """

    temperature: float = 0.7
    top_p: float = 0.9
    top_k: int = 0

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise UsageError("sampling", f"temperature is {self.temperature}.", "It is 0 or more.")
        if not 0 < self.top_p <= 1:
            raise UsageError("sampling", f"top_p is {self.top_p}.", "It lies in (0, 1]; 1 is off.")
        if self.top_k < 0:
            raise UsageError("sampling", f"top_k is {self.top_k}.", "It is 0 (off) or more.")


def stream(seed: int, node: Node) -> np.random.Generator:
    """The random numbers of one block, keyed by the seed and its path of child indices.

    So the tree does not depend on which blocks decode together, on the order of siblings, or on the budget.
    """
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(seed, spawn_key=node.key)))


@dataclass(frozen=True, slots=True)
class Sampled:
    """tokens: int [n]; logprob: float [n], of the token under the unmodified distribution; top1: float [n], its
    largest probability."""

    tokens: list[int]
    logprob: list[float]
    top1: list[float]


_PREFIX = 256  # candidates tried before the whole vocabulary is sorted


def sample(logits: Tensor, uniforms: list[float], sampling: Sampling) -> Sampled:
    """Choose one token per row by inverting the cumulative distribution at its uniform number.

    Args:
        logits: [n, V] float32.
        uniforms: n numbers in [0, 1).
        sampling: temperature and cut-offs, applied in the usual order: temperature, top-k, top-p.
    """
    logprobs = torch.log_softmax(logits, dim=-1)
    top = logprobs.max(dim=-1)
    if sampling.temperature == 0:
        tokens = top.indices
    else:
        probability = torch.softmax(logits.double() / sampling.temperature, dim=-1)
        uniform = torch.tensor(uniforms, dtype=torch.float64, device=logits.device).unsqueeze(1)
        if sampling.top_k == 0 and sampling.top_p == 1:
            tokens = _invert(probability, uniform)
        else:
            tokens = _cut(probability, uniform, sampling)
    chosen = logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1)
    return Sampled(tokens.tolist(), chosen.tolist(), top.values.exp().tolist())


def _cut(probability: Tensor, uniform: Tensor, sampling: Sampling) -> Tensor:
    """Sample from the most probable tokens only; sorts the whole vocabulary only when a nucleus is wide."""
    vocabulary = probability.shape[1]
    width = min(vocabulary, sampling.top_k or max(_PREFIX, 1))
    if sampling.top_k == 0 and vocabulary <= 4 * _PREFIX:
        width = vocabulary
    while True:
        best = probability.topk(width, dim=-1)
        mass = best.values.cumsum(dim=-1)
        total = mass[:, -1:] if sampling.top_k else torch.ones_like(mass[:, :1])
        if sampling.top_k or width == vocabulary or bool((mass[:, -1:] >= sampling.top_p).all()):
            break
        width = vocabulary
    # a token stays if the mass before it has not reached top_p; the first one always does
    kept = (mass - best.values) < sampling.top_p * total
    chosen = _invert(torch.where(kept, best.values, 0.0), uniform)
    return best.indices.gather(1, chosen.unsqueeze(1)).squeeze(1)


def _invert(weight: Tensor, uniform: Tensor) -> Tensor:
    """First index whose cumulative weight exceeds `uniform` times the total; [n] int64."""
    cumulative = weight.cumsum(dim=-1)
    index = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True).squeeze(1)
    # rounding can put the target at or past the end; the last token with weight is meant
    last = weight.shape[1] - 1 - (weight.flip(1) > 0).to(torch.int8).argmax(dim=1)
    return torch.minimum(index, last)


def confidence(logits: Tensor) -> list[float]:
    """MSVE's u = 1 - H / ln|V| of each row (ArborKV section 4.1, which calls it uncertainty), in [0, 1]."""
    logprobs = torch.log_softmax(logits, dim=-1)
    entropy = -(logprobs.exp() * logprobs).nan_to_num(0.0).sum(dim=-1)
    share = 1.0 - entropy / float(np.log(logits.shape[-1]))
    return share.clamp(0.0, 1.0).tolist()
