"""Keys, values and last queries of tokens, for scorers that read them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from arbor.errors import UsageError, check_settings
from arbor.tree import Node

if TYPE_CHECKING:
    from torch import Tensor

LATELY = 32  # queries that `Tokens.lately` is about of, unless a policy asks for more
LAYER_STEP = 4  # one layer of so many is observed, unless a policy asks for others


@dataclass(frozen=True)
class Observation:
    """What is collected for a policy; by default nothing.

    Attributes:
        attention: attention that tokens receive (`Tokens.mass`, `latest` and so on).
        keys: keys and values are read when the policy is asked (`Tokens.kv`); they lie in the
            pool, so nothing is collected.
        window: last queries of each running path that are kept; 0: none.
        rotation: position encodings of queries and keys can be undone (`KVSequence.rotation`);
            models whose encoding is not a known rotation are refused.
        layers: these layers; None: one of `every`.
        heads: these KV heads and the queries that read them; None: all.
        every: without `layers`, the last layer of each so many, or the last layer of a model with
            fewer.
        lately: queries that `Tokens.lately` is about of; of two parts of a policy the more.
    """

    attention: bool = False
    keys: bool = False
    window: int = 0
    rotation: bool = False
    layers: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None
    every: int = LAYER_STEP
    lately: int = LATELY

    @property
    def anything(self) -> bool:
        """Whether forwards are observed."""
        return self.attention or self.window > 0

    def layers_of(self, count: int) -> tuple[int, ...]:
        """The layers observed in a model of `count` layers, increasing.

        Example:
            >>> Observation().layers_of(9), Observation().layers_of(3)
            ((3, 7), (2,))

        Raises:
            UsageError: a layer that was named is none of the model's.
        """
        if self.layers is not None:
            check_settings(
                self,
                layers=(
                    all(layer < count for layer in self.layers),
                    f"layers of this model, 0 to {count - 1}",
                ),
            )
            return tuple(sorted(set(self.layers)))
        return tuple(range(self.every - 1, count, self.every)) or (count - 1,)

    def joined(self, other: Observation) -> Observation:
        """What two parts of a policy want together; of one that wants nothing, the other's.

        Raises:
            UsageError: they want different layers, heads or windows.
        """
        lately = max(self.lately, other.lately)
        if not (other.keys or other.anything):
            return replace(self, lately=lately)
        if not (self.keys or self.anything):
            return replace(other, lately=lately)
        for name in ("layers", "heads", "every", "window"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs and not (name == "window" and 0 in (mine, theirs)):
                raise UsageError(
                    "setting-range",
                    f"the scorer observes {name} {mine} and the allocator {theirs}: they must "
                    "be the same.",
                    "Set both alike, or take another scorer.",
                )
        return replace(
            self,
            attention=self.attention or other.attention,
            keys=self.keys or other.keys,
            window=max(self.window, other.window),
            rotation=self.rotation or other.rotation,
            lately=lately,
        )


@dataclass(frozen=True, eq=False)
class PairRotation:
    """A position encoding that turns pairs (a, b) of a head's first 2 F numbers by position times
    frequency.

    Attributes:
        interleaved: whether a pair is two neighbours; else it is number i of either half.
        frequencies: float64 [F], radians per position.
        scale: factor of the turned numbers.
    """

    interleaved: bool
    frequencies: Tensor
    scale: float = 1.0

    def pairs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The two numbers of each pair, [..., F] each, of heads [..., D]."""
        count = len(self.frequencies)
        if self.interleaved:
            return x[..., 0 : 2 * count : 2], x[..., 1 : 2 * count : 2]
        return x[..., :count], x[..., count : 2 * count]

    def turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Heads [..., D] whose pairs become (a cos - b sin, b cos + a sin); the rest stays."""
        result = x.clone()
        (a, b), (first, second) = self.pairs(x), self.pairs(result)
        first.copy_(a * cos - b * sin)
        second.copy_(b * cos + a * sin)
        return result

    def undone(self, x: Tensor, positions: NDArray[np.int64]) -> Tensor:
        """Heads [w, H, D] encoded for these positions [w], as they were before."""
        angles = self._angles(positions)[:, None]
        cos, sin = (wave.to(x.dtype) / self.scale for wave in (angles.cos(), angles.sin()))
        return self.turned(x, cos, -sin)

    def mean(self, x: Tensor, positions: NDArray[np.int64]) -> Tensor:
        """Heads [..., D] encoded for these positions, on average."""
        angles = self._angles(positions)
        cos, sin = (wave.mean(0).to(x.dtype) * self.scale for wave in (angles.cos(), angles.sin()))
        return self.turned(x, cos, sin)

    def _angles(self, positions: NDArray[np.int64]) -> Tensor:
        """float64 [w, F]."""
        return self.frequencies.new_tensor(positions.tolist())[:, None] * self.frequencies


class HeadTokens(NamedTuple):
    """The tokens of each KV head of a layer; a head of 1 stands for all.

    Attributes:
        positions: int64 [H, n].
        recent: bool [H, n], see `KVSequence`.
    """

    positions: NDArray[np.int64]
    recent: NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class KVSequence:
    """The tokens of one tree on the device in order of position, n in all, and w queries over them.

    Where branches lie one over the other, tokens of one position are neighbours. Tensors are on the
    pool's device and made at each call.

    Attributes:
        positions: int64 [n], on the path; non-decreasing.
        layers: layers observed.
        keys: of a layer, float32 [n, H_kv, D_k], position-encoded.
        values: of a layer, float32 [n, H_kv, D_v].
        logits: of a layer, float32 [w', H_q, n], in pieces of the last queries: each encoded for
            its own position, as the layer computes them, attention sinks left out; -inf where a
            query does not see a token, or where enough later ones do.
        recent: bool [n], the tokens that those of the running paths were computed for.
        whole: the same of each query by itself: -inf only where it does not see a token.
        asked: int64 [w], positions of the last queries, the oldest first.
        wrote: int64 [w], where among the n tokens each query's own is; -1: not on the device.
        queries: of a layer, float32 [w, H_q, D_k], position-encoded.
        rotation: of a layer; only where `Observation.rotation` asks for it.
        scaling: of a layer's logits.
        by_head: of a layer, where its KV heads hold different tokens: row i of `keys`, `values` and
            `logits` is then each head's own i-th token in order of position. None: `positions` and
            `recent` are those of all heads.
    """

    positions: NDArray[np.int64]
    layers: tuple[int, ...]
    keys: Callable[[int], Tensor]
    values: Callable[[int], Tensor]
    logits: Callable[[int], Iterable[Tensor]]
    whole: Callable[[int], Iterable[Tensor]]
    recent: NDArray[np.bool_]
    asked: NDArray[np.int64]
    wrote: NDArray[np.int64]
    queries: Callable[[int], Tensor]
    rotation: Callable[[int], PairRotation]
    scaling: Callable[[int], float]
    by_head: Callable[[int], HeadTokens] | None = None

    def of_heads(self, layer: int) -> HeadTokens:
        """The positions of a layer's tokens and which are recent, [H_kv or 1, n]."""
        if self.by_head is None:
            return HeadTokens(self.positions[None], self.recent[None])
        return self.by_head(layer)

    def __len__(self) -> int:
        return len(self.positions)


@dataclass(frozen=True, eq=False)
class TokenKV:
    """A column of tokens: where each is in the sequences that hold its key and value.

    Attributes:
        sequences: of the open trees.
        place: int64 [T], the token's place in all of them, one after the other; -1: not on the
            device. None: no tokens.
    """

    sequences: tuple[KVSequence, ...] = ()
    place: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return 0 if self.place is None else len(self.place)

    def __getitem__(self, at: NDArray[np.int64] | NDArray[np.bool_]) -> Self:
        """The column of some tokens."""
        return self if self.place is None else replace(self, place=self.place[at])

    @property
    def places(self) -> NDArray[np.int64]:
        """`place` of a policy that asked for keys."""
        assert self.place is not None, "no keys are observed: `observation` has to ask for them"
        return self.place

    def scores(self, scorer: KVScorer) -> NDArray[np.float64]:
        """The mean score of each token over the layers observed, float64 [T].

        A token that is not on the device scores 1 less than the lowest that is.
        """
        found = [np.zeros(0)]
        for sequence in self.sequences:
            total = np.zeros(len(sequence))
            for layer in sequence.layers if len(sequence) else ():
                total += scorer.of(sequence, layer).double().cpu().numpy()
            found.append(total / max(1, len(sequence.layers)))
        return self._placed(np.concatenate(found))

    def _placed(self, every: NDArray[np.float64]) -> NDArray[np.float64]:
        """The score of each token, given those of all places."""
        # the last number is of the tokens at place -1
        every = np.append(every, every.min() - 1 if len(every) else 0.0)
        scores: NDArray[np.float64] = every[self.places]
        return scores


NO_KV = TokenKV()

# rows of blocks and offsets of tokens, int64 [T] each, and running leaves, to column `Tokens.kv`
ShowsKV = Callable[[NDArray[np.int64], NDArray[np.int64], Sequence[Node]], TokenKV]


@dataclass(frozen=True, eq=False)
class PlacedKV(TokenKV):
    """The same with the tokens' blocks, from which it follows what each KV head holds.

    Attributes:
        rows: int64 [T], of the blocks.
    """

    rows: NDArray[np.int64] = field(kw_only=True)

    def __getitem__(self, at: NDArray[np.int64] | NDArray[np.bool_]) -> Self:
        """The column of some tokens."""
        return replace(super().__getitem__(at), rows=self.rows[at])


@dataclass(frozen=True, eq=False)
class HeadKV(TokenKV):
    """The same of what each KV head holds in the tokens' slots: head after head, [C * T].

    Attributes:
        place: int64 [C * T]; head c's tokens in all sequences follow those of head c - 1.
    """

    def scores(self, scorer: KVScorer) -> NDArray[np.float64]:
        """The score of each KV head's token, float64 [C * T]."""
        assert isinstance(scorer, HeadKVScorer), "checked by `Policy`"
        found = [
            np.concatenate(
                [
                    scorer.of_heads(sequence, layer).double().cpu().numpy()
                    for layer in sequence.layers
                ]
            )
            for sequence in self.sequences
            if len(sequence)
        ]
        return self._placed(np.concatenate(found, axis=1).ravel() if found else np.zeros(0))


class TokensOnDevice(Protocol):
    """Tokens, as `arbor.retention.base.Tokens` has them."""

    @property
    def kv(self) -> TokenKV: ...

    @property
    def mass(self) -> NDArray[np.float64]: ...


class KVScorer(ABC):
    """A scorer of keys, values and queries.

    A token's score depends on all tokens of its tree on the device, but not on which of them are
    offered.
    """

    observes: ClassVar[bool] = False

    @property
    def observation(self) -> Observation:
        """Keys and values."""
        return Observation(keys=True)

    @abstractmethod
    def of(self, sequence: KVSequence, layer: int) -> Tensor:
        """The score of each token of a sequence in a layer, [n]; n >= 1."""

    def scores(self, tokens: TokensOnDevice) -> NDArray[np.float64]:
        return tokens.kv.scores(self)


class HeadKVScorer(KVScorer):
    """A scorer of keys, values and queries that has a score for each KV head.

    Where one set is kept for all heads, the mean over them counts.
    """

    @abstractmethod
    def of_heads(self, sequence: KVSequence, layer: int) -> Tensor:
        """The score of each token in each KV head of a layer, [H_kv, n]; n >= 1."""

    def of(self, sequence: KVSequence, layer: int) -> Tensor:
        return self.of_heads(sequence, layer).mean(0)


def plain_queries(sequence: KVSequence, layer: int) -> Tensor:
    """The last queries as they were before position encoding, float32 [w, H_q, D_k]."""
    return sequence.rotation(layer).undone(sequence.queries(layer), sequence.asked)


def products_of(vectors: Tensor, keys: Tensor) -> Tensor:
    """Products of the vectors of query heads with the keys that each head reads.

    Args:
        vectors: [H_q, ..., D].
        keys: [n, H_kv, D].

    Returns:
        [H_q, ..., n].
    """
    grouped = vectors.view(keys.shape[1], -1, keys.shape[2])
    return (grouped @ keys.permute(1, 2, 0)).view(*vectors.shape[:-1], len(keys))


def unit_vectors(vectors: Tensor) -> Tensor:
    """Vectors [..., D] of length 1; zeros stay."""
    length = (vectors * vectors).sum(-1, keepdim=True).sqrt()
    return vectors / length.clamp_min(1e-12)


def attention_of(logits: Tensor) -> Tensor:
    """Softmax over the last dimension, in which -inf is 0, also where all are."""
    most = logits.amax(-1, keepdim=True).clamp_min(-1e30)
    weight = (logits - most).exp()
    return weight / weight.sum(-1, keepdim=True).clamp_min(1e-30)


def neighbours(values: Tensor, width: int, outside: float) -> Tensor:
    """Each number of the last dimension with its neighbours, [..., n, width].

    Args:
        values: [..., n].
        width: odd.
        outside: stands for neighbours beyond the ends.
    """
    count, half = values.shape[-1], width // 2
    padded = values.new_full((*values.shape[:-1], count + 2 * half), outside)
    padded[..., half : half + count] = values
    return padded.unfold(-1, width, 1)
