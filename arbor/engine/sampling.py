"""Which token comes next: one number in [0, 1) per token, from the block's own stream."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from arbor.errors import logits_not_finite
from arbor.kernels.fused.choice import NativeChoice, logit_sums, native_choice, row_sums
from arbor.kernels.staging import download
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
_SIBLINGS = 2**32 - 1  # child index in the key of what all children of a block share
_FINEST = 2.0**-5  # shortest interval that is shared; of 32 siblings about one lies in it


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

    def copy(self) -> ArithmeticCode:
        """The same numbers once more."""
        return copy.deepcopy(self)

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
    """One chosen token per row.

    Attributes:
        tokens: n ids.
        logprob: natural logarithm of each token's probability in the model's own distribution,
            before temperature and cut-offs.
        top1: largest probability of that distribution.
        left: place of each row's number within the token's interval, in [0, 1); 0 if greedy.
        share: length of that interval, in (0, 1]; 1 if greedy. See `ArithmeticCode.narrow`.
    """

    tokens: list[int]
    logprob: list[float]
    top1: list[float]
    left: list[float]
    share: list[float]


# Rows of the results of `drawn`.
_TOKEN, _LOGPROB, _TOP1, _LEFT, _SHARE, _SETTLED = range(6)
FIELDS = 6
# Tokens, left, share and settled of some rows, [n] each; see `Draws` and `_draw`.
_Choice = tuple[Tensor, Tensor, Tensor, Tensor]

_PREFIX = 256  # most probable tokens examined first for a nucleus
_TIES = 64  # tokens examined beyond top-k, which show that no tie crosses the cut
_WIDEN = 16  # factor by which more tokens are examined for rows that need them

# Most elements of a tensor of probabilities; one row of the vocabulary at least. Few enough for the
# caches of a CPU; enough on a GPU (32 MiB) that launches do not dominate.
_CPU_SLICE = 2**20
_GPU_SLICE = 2**22


# Logits [n, V], numbers [n, 1] float64, cut-offs and the number of tokens examined: as `drawn`.
Draw = Callable[[Tensor, Tensor, Sampling, int], Tensor]


def first_draw() -> Draw | NativeChoice:
    """The native kernel, or where there is none `drawn`."""
    return native_choice() or drawn


def sample(
    logits: Tensor,
    uniforms: list[float],
    sampling: Sampling,
    first: Draw | NativeChoice | None = None,
) -> Draws:
    """Choose one token per row by inverting the cumulative distribution at its uniform number.

    Probable tokens come first, equally probable ones by id; without cut-offs all tokens come by id.
    On a CPU a native kernel does this (`kernels/csrc/choose.h`), row by row; what follows is done
    where there is none.

    Probabilities are float64 softmaxes over the whole vocabulary, computed for a few rows at a time
    (`_CPU_SLICE`, `_GPU_SLICE`); a softmax treats rows separately, so the slices change no bit, and
    neither do other rows of the batch. On CUDA they are quotients by sums of a kernel of ours
    (`row_sums`). Only probabilities of tokens that a cut-off can keep are stored: `topk` of
    the logits, in their own type, finds these. It leaves open which of several equal logits it
    takes, which cannot matter while all tokens that the cut-offs keep lie strictly above the least
    probable token examined. Rows where they do not (a wide nucleus, many ties) are drawn again from
    more tokens.

    Results reach the CPU in one transfer; each time that some rows need more tokens is one more.

    Args:
        logits: [n, V], float32 or a type that float32 contains.
        uniforms: n numbers in [0, 1).
        sampling: temperature and cut-offs, applied in the order of transformers:
            temperature, top-k, top-p, min-p.
        first: the native kernel, or what draws from the tokens that are examined first, as `drawn`
            does; None: `first_draw`.

    Raises:
        ModelError: logits that are NaN, +inf, or all -inf.
    """
    first = first or first_draw()
    if isinstance(first, NativeChoice):
        cuts = (sampling.top_k, sampling.top_p, sampling.min_p)
        chosen = first(logits, uniforms, sampling.temperature, *cuts)
        if chosen is not None:
            tokens, logprob, top1, left, share = chosen.tolist()
            if any(map(math.isnan, top1)):
                raise logits_not_finite()
            return Draws(list(map(int, tokens)), logprob, top1, left, share)
        first = drawn
    return Drawing(logits, uniforms, sampling, first).result()


class Drawing:
    """Tokens that a device is choosing.

    Nothing waits for it before `result`: what was asked of the device in between, such as the
    forward of these tokens, runs in the meantime.

    Args:
        logits, uniforms, sampling: see `sample`.
        first: draws from the tokens that are examined first, see `drawn`.

    Attributes:
        was_final: `result` gave every row the token in `tokens`.
    """

    def __init__(
        self, logits: Tensor, uniforms: list[float], sampling: Sampling, first: Draw
    ) -> None:
        self._logits, self._sampling = logits, sampling
        self._uniform = _upload(uniforms, logits)
        self._width = _first_width(logits.shape[1], sampling)
        self._drawn = first(logits, self._uniform, sampling, self._width)
        self._found, self._arrived = download(self._drawn)
        self.was_final = False

    @property
    def tokens(self) -> Tensor:
        """int64 [n], on the device; rows that need more tokens may be given others by `result`."""
        return self._drawn[_TOKEN].long()

    def result(self) -> Draws:
        """What was drawn; waits for it.

        Raises:
            ModelError: see `sample`.
        """
        self._arrived()
        found, width, vocabulary = self._found, self._width, self._logits.shape[1]
        if found[_TOP1].isnan().any():  # one such logit makes all of its row NaN
            raise logits_not_finite()
        self.was_final = bool(found[_SETTLED].all())
        while len(again := (found[_SETTLED] == 0).nonzero().squeeze(1)):
            width = min(vocabulary, _WIDEN * width)
            slices = again.split(_slice_rows(self._logits, vocabulary))
            parts = ((self._logits[part], self._uniform[part]) for part in slices)
            found[:, again] = _draw_all(parts, self._sampling, width).cpu()
        _, logprob, top1, left, share, _ = found.tolist()
        return Draws(found[_TOKEN].long().tolist(), logprob, top1, left, share)


def likeliest(logits: Tensor, count: int) -> list[tuple[tuple[int, float], ...]]:
    """The most probable tokens of each row with the logarithms of their probabilities, before
    temperature and cut-offs; the most probable first, and none that is impossible.

    Args:
        logits: [n, V].
        count: at most, of a row.
    """
    count = min(count, logits.shape[1])
    sums = logit_sums(logits)
    found = logits.topk(count)  # logarithms of probabilities are rounded and may be equal
    if sums is None:
        logprobs = torch.log_softmax(logits, -1, torch.float32).gather(1, found.indices)
    else:
        logprobs = found.values.double() - _log_total(sums).unsqueeze(1)
    return [
        tuple((token, logprob) for token, logprob in zip(*row, strict=True) if logprob > -math.inf)
        for row in zip(found.indices.tolist(), logprobs.tolist(), strict=True)
    ]


def likelihoods(
    logits: Tensor, rows: list[int], tokens: list[int]
) -> tuple[list[float], list[bool]]:
    """Logarithms of the probabilities of given tokens, before temperature and cut-offs; and whether
    each is the most probable one, of equals the first.

    Args:
        logits: [n, V].
        rows: of each token, some rows for several tokens.
        tokens: as many.
    """
    index = torch.tensor(rows, device=logits.device)
    chosen = torch.tensor(tokens, device=logits.device)
    sums = logit_sums(logits)
    if sums is None:
        every = torch.log_softmax(logits, dim=-1)
        values, best = every[index, chosen], logits.argmax(dim=-1)
    else:
        values = logits[index, chosen].double() - _log_total(sums)[index]
        best = sums[3].long()
    return values.tolist(), (best[index] == chosen).tolist()


def _log_total(sums: Tensor) -> Tensor:
    """What a logit is above the logarithm of its token's probability: [n], from `logit_sums`."""
    return sums[0] + sums[1].log()


def _upload(uniforms: list[float], logits: Tensor) -> Tensor:
    """Numbers as [n, 1] float64 on the device of the logits; a GPU's queue is not waited for."""
    if logits.is_cuda:
        pinned = torch.tensor(uniforms, dtype=torch.float64, pin_memory=True)
        return pinned.to(logits.device, non_blocking=True).unsqueeze(1)
    return logits.new_tensor(uniforms, dtype=torch.float64).unsqueeze(1)


def _first_width(vocabulary: int, sampling: Sampling) -> int:
    """Number of most probable tokens examined first."""
    if sampling.temperature == 0 or not sampling.cuts:
        return vocabulary
    if sampling.top_k:
        return min(vocabulary, sampling.top_k + _TIES)
    return _PREFIX if vocabulary > 4 * _PREFIX else vocabulary


def _slice_rows(logits: Tensor, width: int) -> int:
    """Rows of `width` elements that are computed at a time."""
    most = _GPU_SLICE if logits.is_cuda else _CPU_SLICE
    return max(1, most // width)


def drawn(logits: Tensor, uniform: Tensor, sampling: Sampling, width: int) -> Tensor:
    """Draws from the `width` most probable tokens of each row, some rows at a time.

    Args:
        logits: [n, V].
        uniform: [n, 1] float64, on the device of the logits.
        sampling: temperature and cut-offs.
        width: tokens that are examined.

    Returns:
        [6, n] float64 on that device, not waited for, see `_draw`.
    """
    rows = _slice_rows(logits, width)
    if len(logits) <= rows:
        return _draw(logits, uniform, sampling, width)
    return _draw_all(zip(logits.split(rows), uniform.split(rows), strict=True), sampling, width)


def _draw_all(parts: Iterable[tuple[Tensor, Tensor]], sampling: Sampling, width: int) -> Tensor:
    """`_draw` for pairs of logits and numbers: [6, rows of all parts]."""
    return torch.cat([_draw(*part, sampling, width) for part in parts], dim=1)


def _draw(logits: Tensor, uniform: Tensor, sampling: Sampling, width: int) -> Tensor:
    """Draws from the `width` most probable tokens: [6, n] float64, indexed by `_TOKEN` to
    `_SETTLED`.

    Settled is 1, or 0 for a row whose cut may lie among tokens that were not examined; nothing
    else of such a row is meaningful except top1.
    """
    if sampling.temperature == 0:
        tokens = logits.argmax(dim=-1)
        logprobs = torch.log_softmax(logits, -1, torch.float32)
        chosen = highest = logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1)
        settled = share = torch.ones_like(uniform).squeeze(1)
        left = torch.zeros_like(share)
    else:
        sums = row_sums(logits, sampling.temperature)
        if width < logits.shape[1]:
            tokens, left, share, settled = _from_some(logits, uniform, sampling, width, sums)
        else:
            tokens, left, share, settled = _from_all(logits, uniform, sampling)
        chosen, highest = _logprobs(logits, tokens, sums)
    return torch.stack(
        [each.double() for each in (tokens, chosen, highest.exp(), left, share, settled)]
    )


def _logprobs(logits: Tensor, tokens: Tensor, sums: Tensor | None) -> tuple[Tensor, Tensor]:
    """Log-probability of each row's token, and the highest of the row; [n] float32, or float64 from
    the sums of `row_sums`."""
    if sums is not None:
        top, total, _ = sums
        own = logits.gather(1, tokens.unsqueeze(1)).squeeze(1)
        return own.double() - top - total.log(), -total.log()
    rows = _slice_rows(logits, logits.shape[1])
    chosen, highest = [], []
    for part, some in zip(logits.split(rows), tokens.split(rows), strict=True):
        logprobs = torch.log_softmax(part, -1, torch.float32)
        chosen.append(logprobs.gather(1, some.unsqueeze(1)).squeeze(1))
        highest.append(logprobs.amax(-1))
    return torch.cat(chosen), torch.cat(highest)


def _probability(logits: Tensor, temperature: float) -> Tensor:
    """Probabilities of whole rows, float64."""
    return torch.softmax(logits.to(torch.float64, copy=True).div_(temperature), dim=-1)


def _from_some(
    logits: Tensor, uniform: Tensor, sampling: Sampling, width: int, sums: Tensor | None
) -> _Choice:
    """Choice among the `width` most probable tokens; sums: of `row_sums`, where there are any."""
    ids = logits.topk(width, dim=-1, sorted=False).indices.sort(dim=-1).values
    if sums is not None:
        top, _, total = sums.unsqueeze(-1)
        below = logits.gather(1, ids).double() - top
        values = (below / sampling.temperature).exp() / total
    else:
        rows = _slice_rows(logits, logits.shape[1])
        parts = [
            _probability(part, sampling.temperature).gather(1, some)
            for part, some in zip(logits.split(rows), ids.split(rows), strict=True)
        ]
        values = torch.cat(parts)
    ordered = values.sort(dim=-1, descending=True, stable=True)
    lowest = ordered.values[:, -1:]
    return _nucleus(ordered.values, ids.gather(1, ordered.indices), uniform, sampling, lowest)


def _from_all(logits: Tensor, uniform: Tensor, sampling: Sampling) -> _Choice:
    """Choice among all tokens."""
    probability = _probability(logits, sampling.temperature)
    if not sampling.cuts:
        tokens, left, share = _invert(probability, uniform)
        return tokens, left, share, torch.ones_like(share)
    ordered = probability.sort(dim=-1, descending=True, stable=True)
    outside = torch.full_like(uniform, -1.0)
    return _nucleus(ordered.values, ordered.indices, uniform, sampling, outside)


def _nucleus(
    values: Tensor, ids: Tensor, uniform: Tensor, sampling: Sampling, lowest: Tensor
) -> _Choice:
    """Choice among the first of these tokens that top-k, top-p and min-p keep.

    Args:
        values: [n, width] probabilities, descending.
        ids: [n, width] of their tokens.
        uniform: [n, 1].
        lowest: [n, 1]; no token outside `ids` is more probable.
    """
    if sampling.top_k:
        values = values[:, : sampling.top_k]
    mass = values.cumsum(dim=-1)
    total = mass[:, -1:] if sampling.top_k else 1.0
    # a token stays if the mass before it has not reached top_p; the first one always does
    kept = (mass - values) < sampling.top_p * total
    if sampling.min_p:
        kept &= values >= sampling.min_p * values[:, :1]
    settled = ~(kept & (values <= lowest)).any(dim=-1)
    chosen, left, share = _invert(torch.where(kept, values, 0.0), uniform)
    return ids.gather(1, chosen.unsqueeze(1)).squeeze(1), left, share, settled


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
    sums = logit_sums(logits)
    if sums is not None and not 0 < top < logits.shape[-1]:
        return (1.0 - sums[2] / math.log(logits.shape[-1])).clamp(0.0, 1.0).tolist()
    rows = _slice_rows(logits, logits.shape[1])
    return torch.cat([_certainty(part, top) for part in logits.split(rows)]).tolist()


def _certainty(logits: Tensor, top: int) -> Tensor:
    logprobs = torch.log_softmax(logits, dim=-1)
    if 0 < top < logits.shape[-1]:
        logprobs = logprobs.topk(top, dim=-1).values
        others = (1.0 - logprobs.exp().sum(dim=-1, keepdim=True)).clamp(min=0.0)
        logprobs = torch.cat((logprobs, others.log()), dim=-1)
    terms = (logprobs.exp() * logprobs).nan_to_num(0.0)
    # the sum of a single row may be split among threads; that of two rows is not
    entropy = -terms.expand(max(2, len(terms)), -1).sum(dim=-1)[: len(terms)]
    share = 1.0 - entropy / float(np.log(logits.shape[-1]))
    return share.clamp(0.0, 1.0)
