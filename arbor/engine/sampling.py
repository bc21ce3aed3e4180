"""Which token comes next: one number in [0, 1) per token, from the block's own stream."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from arbor.errors import ModelError
from arbor.model.sampling_params import Sampling
from arbor.tree import Node


def stream(seed: int, node: Node) -> np.random.Generator:
    """The random numbers of one block, keyed by the seed and its path of child indices.

    So the tree does not depend on which blocks decode together, on the order of siblings, or on the
    budget.
    """
    return _generator(seed, node.key)


def _generator(seed: int, key: tuple[int, ...]) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(seed, spawn_key=key)))


_GOLDEN = (5**0.5 - 1) / 2
_SIBLINGS = 2**32 - 1  # in a key: no child, but all children of a block together
_FINEST = 2.0**-5  # an interval so small holds one of 32 siblings, who need no spreading any more


class ArithmeticCode:
    """The numbers by which one block's tokens are chosen.

    Arithmetic sampling (Vilnis et al., ICML 2023, arXiv 2210.15458): all texts that may follow a
    block lie side by side in [0, 1), each as long as it is probable. A child is one point there; a
    token's interval holds the point, and the place of the point within it, stretched to [0, 1)
    again, chooses the next token. The points of siblings are spread evenly, so that they repeat
    each other as little as the distribution allows, while each alone is uniform: its text has
    exactly the model's probability.

    Differs from the paper: points are U + i x 0.618... modulo 1 (U of the parent, i the child's
    index) instead of (U + i) / n, so that they do not depend on how many children there will be;
    and once a text's interval has become shorter than 1/32, every further token has a number of its
    own from the block's stream: siblings have parted by then, and stretching also stretches the
    rounding of the logits, which must not decide about tokens.
    """

    __slots__ = ("_fineness", "_own", "number")

    def __init__(self, seed: int, node: Node, sampling: Sampling) -> None:
        self._own = stream(seed, node)
        self._fineness: float | None = None  # the text's interval; None: every token has its own
        if sampling.arithmetic and sampling.temperature and node.parent is not None:
            common = _generator(seed, (*node.parent.key, _SIBLINGS)).random()
            self.number = float((common + node.index * _GOLDEN) % 1.0)
            self._fineness = 1.0
        else:
            self.number = float(self._own.random())

    def narrow(self, left: float, share: float) -> None:
        """After a token: the next number.

        Args:
            left: where `number` lay in the token's interval, in [0, 1).
            share: the length of that interval, the token's probability as it was drawn.
        """
        if self._fineness is not None:
            self._fineness *= share
            if self._fineness >= _FINEST:
                self.number = left
                return
            self._fineness = None
        self.number = float(self._own.random())


@dataclass(frozen=True, slots=True)
class Draws:
    """tokens: int [n]; logprob: float [n], of the token under the unmodified distribution; top1:
    float [n], its largest probability; left and share: float [n], see `ArithmeticCode.narrow` (0
    and 1 for greedy ones)."""

    tokens: list[int]
    logprob: list[float]
    top1: list[float]
    left: list[float]
    share: list[float]


_PREFIX = 256  # tokens a nucleus is looked for in before the whole vocabulary is sorted


def sample(logits: Tensor, uniforms: list[float], sampling: Sampling) -> Draws:
    """Choose one token per row by inverting the cumulative distribution at its uniform number.

    Args:
        logits: [n, V] float32.
        uniforms: n numbers in [0, 1).
        sampling: temperature and cut-offs, applied in the usual order: temperature, top-k, top-p.

    Raises:
        ModelError: logits that are NaN, +inf, or all -inf.
    """
    logprobs = torch.log_softmax(logits, dim=-1)
    top = logprobs.max(dim=-1)
    top1 = top.values.exp().tolist()
    if any(math.isnan(p) for p in top1):  # one such logit makes all of its row NaN
        raise not_finite()
    if sampling.temperature == 0:
        tokens = top.indices
        left, share = [0.0] * len(uniforms), [1.0] * len(uniforms)
    else:
        probability = torch.softmax(logits.double() / sampling.temperature, dim=-1)
        uniform = torch.tensor(uniforms, dtype=torch.float64, device=logits.device).unsqueeze(1)
        if sampling.top_k == 0 and sampling.top_p == 1:
            tokens, place, length = _invert(probability, uniform)
        else:
            tokens, place, length = _cut(probability, uniform, sampling)
        left, share = place.tolist(), length.tolist()
    chosen = logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1)
    return Draws(tokens.tolist(), chosen.tolist(), top1, left, share)


def not_finite() -> ModelError:
    """What is raised for logits that no token can be chosen by."""
    return ModelError(
        "logits-not-finite",
        "the model's logits are not finite: its numbers have overflowed, or its weights are broken.",
        "Use --dtype bfloat16 or --dtype float32 where it is float16; else compare the weights with their source.",
    )


def _cut(probability: Tensor, uniform: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor, Tensor]:
    """Sample from the most probable tokens only; sorts the whole vocabulary only for rows whose
    nucleus is wide.

    Every row is decided by itself, so that it does not matter what else is in the batch.
    """
    vocabulary = probability.shape[1]
    width = min(vocabulary, sampling.top_k or _PREFIX)
    if sampling.top_k == 0 and vocabulary <= 4 * _PREFIX:
        width = vocabulary
    values, ids = _most_probable(probability, width)
    drawn = _nucleus(values, ids, uniform, sampling)
    if sampling.top_k == 0 and width < vocabulary:
        wide = (values.cumsum(dim=-1)[:, -1] < sampling.top_p).nonzero().squeeze(1)
        if len(wide):
            values, ids = _most_probable(probability[wide], vocabulary)
            for narrow, whole in zip(
                drawn, _nucleus(values, ids, uniform[wide], sampling), strict=True
            ):
                narrow[wide] = whole
    return drawn


def _most_probable(probability: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The first `width` tokens of each row and their probabilities, [n, width]: probable ones
    first, equally probable ones by their ids. Logits of 16 bits are often equal, and `topk` says
    nothing of which of them it takes."""
    if width == probability.shape[1]:
        ordered = probability.sort(dim=-1, descending=True, stable=True)
        return ordered.values, ordered.indices
    best = probability.topk(width + 1, dim=-1)
    ids, last = best.indices[:, :width], best.values[:, width - 1 : width]
    crowded = (best.values[:, width:] == last).squeeze(1).nonzero().squeeze(1)
    if len(crowded):  # some tokens as probable as the last one are left out
        some, edge = probability[crowded], last[crowded]
        tied, above = some == edge, some > edge
        room = width - above.sum(dim=-1, keepdim=True)
        chosen = above | (tied & (tied.cumsum(dim=-1, dtype=torch.int32) <= room))
        ids[crowded] = chosen.nonzero()[:, 1].view(-1, width)
    ids = ids.sort(dim=-1).values
    ordered = probability.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    return ordered.values, ids.gather(1, ordered.indices)


def _nucleus(
    values: Tensor, ids: Tensor, uniform: Tensor, sampling: Sampling
) -> tuple[Tensor, Tensor, Tensor]:
    """Sample from the first of these tokens whose mass reaches top-p; see `_invert`."""
    mass = values.cumsum(dim=-1)
    total = mass[:, -1:] if sampling.top_k else 1.0
    # a token stays if the mass before it has not reached top_p; the first one always does
    kept = (mass - values) < sampling.top_p * total
    chosen, place, length = _invert(torch.where(kept, values, 0.0), uniform)
    return ids.gather(1, chosen.unsqueeze(1)).squeeze(1), place, length


def _invert(weight: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """First index whose cumulative weight exceeds `uniform` times the total, int64; where the
    target lies between that index's bounds, in [0, 1); and its part of the total; all [n]."""
    cumulative = weight.cumsum(dim=-1)
    total = cumulative[:, -1:]
    target = uniform * total
    index = torch.searchsorted(cumulative, target, right=True)
    # rounding can put the target at or past the end; the last token with weight is meant
    last = weight.shape[1] - 1 - (weight.flip(1) > 0).to(torch.int8).argmax(dim=1, keepdim=True)
    index = torch.minimum(index, last)
    own = weight.gather(1, index)
    place = (target - (cumulative.gather(1, index) - own)) / own
    place = place.clamp(0.0, 1.0 - 2.0**-53)
    return index.squeeze(1), place.squeeze(1), (own / total).squeeze(1)


def confidence(logits: Tensor, top: int = 0) -> list[float]:
    """MSVE's u = 1 - H / ln|V| of each row (ArborKV Eq. 1, which calls it uncertainty), in [0, 1].

    Args:
        logits: [rows, V].
        top: H of the `top` most probable tokens and of all others as one (the paper's variant),
            which is never above the entropy of all; 0: of all.
    """
    logprobs = torch.log_softmax(logits, dim=-1)
    if 0 < top < logits.shape[-1]:
        logprobs = logprobs.topk(top, dim=-1).values
        others = (1.0 - logprobs.exp().sum(dim=-1, keepdim=True)).clamp(min=0.0)
        logprobs = torch.cat((logprobs, others.log()), dim=-1)
    entropy = -(logprobs.exp() * logprobs).nan_to_num(0.0).sum(dim=-1)
    share = 1.0 - entropy / float(np.log(logits.shape[-1]))
    return share.clamp(0.0, 1.0).tolist()
