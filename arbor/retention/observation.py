"""Observation: what a policy wants observed while the model runs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from arbor.errors import UsageError

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
    """

    attention: bool = False
    keys: bool = False
    window: int = 0
    rotation: bool = False
    layers: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None
    every: int = LAYER_STEP

    @property
    def anything(self) -> bool:
        """Whether forwards are observed."""
        return self.attention or self.window > 0

    def layers_of(self, count: int) -> tuple[int, ...]:
        """The layers observed in a model of `count` layers, increasing.

        Example:
            >>> Observation().layers_of(9), Observation().layers_of(3)
            ((3, 7), (2,))
        """
        if self.layers is not None:
            return tuple(sorted({layer for layer in self.layers if layer < count}))
        return tuple(range(self.every - 1, count, self.every)) or (count - 1,)

    def joined(self, other: Observation) -> Observation:
        """What two parts of a policy want together; of one that wants nothing, the other's.

        Raises:
            UsageError: they want different layers, heads or windows.
        """
        if not (other.keys or other.anything):
            return self
        if not (self.keys or self.anything):
            return other
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
        )
