"""The tree of thought blocks: structure, geometry, and the residency of each block's KV."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Protocol, cast

import numpy as np
from numpy.typing import NDArray

NO_SLOT = -1
NO_RECORD = -1


class Tier(IntEnum):
    """Where one token's KV lies; a token is in exactly one tier."""

    DEVICE = 0
    HOST = 1
    COMPRESSED = 2
    DISK = 3
    DROPPED = 4


class Certainty(IntEnum):
    """How close a token's KV is to what full retention would hold, the least first."""

    NONE = 0  # computed over a gap
    ROUNDED = 1  # packed in few bits, or computed after what was
    EXACT = 2


class NodeState(StrEnum):
    """Where a block stands in the search."""

    OPEN = "open"  # in decoding
    CLOSED = "closed"  # ended at a boundary; may be expanded
    TERMINAL = "terminal"  # the path has ended, with or without an answer
    PRUNED = "pruned"  # given up by the search


class Spans:
    """Residency of the tokens of many blocks: growable arrays with a stretch per `Span`.

    Only `KVMemory` writes it.

    Attributes:
        size: tokens of all stretches, in use or not.
        unused: tokens of stretches that no span has any more.
        tier: int8 [size], a `Tier` per token.
        slot: int32 [size], the pool slot; `NO_SLOT` unless the tier is DEVICE.
        record: int32 [size], the record in the store of its tier; `NO_RECORD` on the device and
            where it is DROPPED.
        exact: bool [size], on the device, and every earlier token of the path was resident and
            exact when this one was written.
        rounded: bool [size], on the device and not exact for one reason only: it was packed in few
            bits, or an earlier token of the path was when this one was written.
        origin: int32 [size], the record that a token on the device came from, and that is kept for
            it; else `NO_RECORD`.
        depth: int16 [size], layers that hold this token's K/V (fewer than the model has where a row
            left early).
        firsts: where attention reads host memory too, by `Tier` the address of the first record
            there, beyond all slots, or `NO_SLOT`; None: it reads the device alone.
        records_exact: whether all that attention reads there is exact.
    """

    _COLUMNS = ("tier", "slot", "record", "exact", "rounded", "origin", "depth")
    __slots__ = (*_COLUMNS, "firsts", "records_exact", "size", "unused")

    def __init__(self) -> None:
        self.firsts: NDArray[np.int32] | None = None
        self.records_exact = True
        self._clear()

    def _clear(self) -> None:
        self.size = self.unused = 0
        self.tier = np.empty(0, np.int8)
        self.slot = np.empty(0, np.int32)
        self.record = np.empty(0, np.int32)
        self.exact = np.empty(0, np.bool_)
        self.rounded = np.empty(0, np.bool_)
        self.origin = np.empty(0, np.int32)
        self.depth = np.empty(0, np.int16)

    def reserve(self, count: int) -> int:
        """The begin of a new stretch of `count` tokens, which hold no KV yet (tier DROPPED)."""
        begin, self.size = self.size, self.size + count
        if self.size > len(self.slot):
            extra = max(self.size, 2 * len(self.slot), 256) - len(self.slot)
            self.tier = np.concatenate([self.tier, np.full(extra, Tier.DROPPED, np.int8)])
            self.slot = np.concatenate([self.slot, np.full(extra, NO_SLOT, np.int32)])
            self.record = np.concatenate([self.record, np.full(extra, NO_RECORD, np.int32)])
            self.exact = np.concatenate([self.exact, np.zeros(extra, np.bool_)])
            self.rounded = np.concatenate([self.rounded, np.zeros(extra, np.bool_)])
            self.origin = np.concatenate([self.origin, np.full(extra, NO_RECORD, np.int32)])
            self.depth = np.concatenate([self.depth, np.zeros(extra, np.int16)])
        return begin

    def copy(self, source: Spans, begin: int, target: int, count: int) -> None:
        """Copy a stretch of these or other spans to a place in these."""
        for name in self._COLUMNS:
            values = getattr(source, name)[begin : begin + count]
            getattr(self, name)[target : target + count] = values

    def compact(self, spans: Iterable[Span]) -> None:
        """Give back the stretches that none of these spans has.

        Args:
            spans: every span of these arrays that is in use.
        """
        old = Spans()
        for name in self._COLUMNS:
            setattr(old, name, getattr(self, name))
        self._clear()
        for span in spans:
            span.move_to(self, old)

    def drop(self, at: NDArray[np.int64]) -> None:
        """Mark tokens as without KV."""
        self.slot[at] = NO_SLOT
        self.record[at] = NO_RECORD
        self.tier[at] = Tier.DROPPED
        self.exact[at] = self.rounded[at] = False
        self.origin[at] = NO_RECORD
        self.depth[at] = 0

    def lower(self, at: NDArray[np.int64], tier: Tier, records: NDArray[np.int32]) -> None:
        """Mark tokens as off the device, with their KV in records of a lower tier's store."""
        self.drop(at)
        self.tier[at] = tier
        self.record[at] = records


class Span:
    """Residency of one block's KV: its stretch of `Spans`, which grows with its tokens.

    Each column of `Spans` is a property: a view of the block's n tokens, valid until any span of
    the tree grows.

    Args:
        spans: the arrays of the tree; own ones if None.
    """

    __slots__ = ("_capacity", "_length", "begin", "spans")

    def __init__(self, spans: Spans | None = None) -> None:
        self.spans = Spans() if spans is None else spans
        self.begin = self._length = self._capacity = 0  # a fork allocates nothing

    def __len__(self) -> int:
        return self._length

    @property
    def tier(self) -> NDArray[np.int8]:
        return self.spans.tier[self.begin : self.begin + self._length]

    @property
    def slot(self) -> NDArray[np.int32]:
        return self.spans.slot[self.begin : self.begin + self._length]

    @property
    def record(self) -> NDArray[np.int32]:
        return self.spans.record[self.begin : self.begin + self._length]

    @property
    def exact(self) -> NDArray[np.bool_]:
        return self.spans.exact[self.begin : self.begin + self._length]

    @property
    def rounded(self) -> NDArray[np.bool_]:
        return self.spans.rounded[self.begin : self.begin + self._length]

    @property
    def certain(self) -> NDArray[np.bool_]:
        """Tokens that are exact or rounded, bool [n]: nothing is computed again for their sake."""
        return self.exact | self.rounded

    @property
    def attended(self) -> NDArray[np.bool_]:
        """Tokens in host memory that attention reads there, bool [n]."""
        if self.spans.firsts is None:
            return np.zeros(self._length, np.bool_)
        attended: NDArray[np.bool_] = self.spans.firsts[self.tier] != NO_SLOT
        return attended

    @property
    def ready(self) -> NDArray[np.bool_]:
        """Tokens that are exact or rounded, wherever attention reads them, bool [n]: nothing is
        computed again for their sake."""
        return self.certain | self.attended if self.spans.records_exact else self.certain

    @property
    def present(self) -> NDArray[np.bool_]:
        """Tokens that attention reads, on the device or in host memory, bool [n]."""
        return self.resident | self.attended

    @property
    def address(self) -> NDArray[np.int32]:
        """Where attention reads each token, int32 [n]: its slot, or that of its record;
        `NO_SLOT` where it has neither."""
        if self.spans.firsts is None:
            return self.slot
        first = self.spans.firsts[self.tier]
        return np.where(first == NO_SLOT, self.slot, first + self.record)

    @property
    def origin(self) -> NDArray[np.int32]:
        return self.spans.origin[self.begin : self.begin + self._length]

    @property
    def depth(self) -> NDArray[np.int16]:
        return self.spans.depth[self.begin : self.begin + self._length]

    @property
    def resident(self) -> NDArray[np.bool_]:
        """Tokens on the device, bool [n]."""
        return self.slot >= 0

    def grow(self, count: int) -> None:
        """Append `count` tokens that hold no KV yet (tier DROPPED)."""
        needed = self._length + count
        if needed > self._capacity:
            capacity = max(needed, 2 * self._capacity, 16)
            begin = self.spans.reserve(capacity)
            self.spans.copy(self.spans, self.begin, begin, self._length)
            self.spans.unused += self._capacity
            self.begin, self._capacity = begin, capacity
        self._length = needed

    def move_to(self, spans: Spans, source: Spans | None = None) -> None:
        """Become a stretch of other arrays.

        Args:
            spans: where the span is from now on.
            source: where its values are; by default where it was.
        """
        begin = spans.reserve(self._capacity)
        spans.copy(self.spans if source is None else source, self.begin, begin, self._length)
        self.spans.unused += self._capacity if source is None else 0
        self.spans, self.begin = spans, begin

    def pop(self) -> None:
        """Remove the last token, which holds no KV."""
        assert self._length and not self.resident[-1], "no last token, or it holds KV"
        self._length -= 1


@dataclass(eq=False, slots=True)
class Node:
    """A thought block.

    Attributes:
        id: its place in its tree: a small integer in order of creation; the root is 0.
        parent: None for the root.
        index: which child of its parent this is, 0-based; part of the random stream's key.
        start: position of its first token on the path.
        depth: edges to the root.
        tokens: token ids; never discarded, whatever happens to their KV.
        text: the tokens as text, set when the block closes.
        span: residency of its KV.
        state: see `NodeState`.
        value: the verifier's value in [0, 1] (MSVE's v); 0 until `valued`.
        valued: whether a verifier has set `value`; none does where nothing reads it.
        score: the verifier's score of this step alone, where `value` is of the whole path; None:
            `value`.
        logprob: sum of the tokens' log probabilities under the model.
        logprobs: these, one for each token that was computed; 0 where it was given, unless an
            earlier child of the parent had sampled it.
        confidence: 1 - H / ln|V| at the boundary (MSVE's u), in [0, 1].
        top1: mean top-1 probability of its tokens (CGEE's p), in [0, 1].
        given: how many of its first tokens were given rather than sampled; `top1` leaves them out.
        shortened: whether a limit of tokens ended it, rather than a stop or the end of the text.
        cut: whether a limit ended its path before the path came to an end.
        row: its place among the blocks of a forest; the id where the tree is in none.
        tree: its tree.
    """

    id: int
    parent: Node | None
    index: int
    start: int
    depth: int
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    children: list[Node] = field(default_factory=list)
    span: Span = field(default_factory=Span)
    state: NodeState = NodeState.OPEN
    value: float = 0.0
    valued: bool = False
    score: float | None = None
    logprob: float = 0.0
    logprobs: list[float] = field(default_factory=list)
    confidence: float = 0.0
    top1: float = 0.0
    given: int = 0
    shortened: bool = False
    cut: bool = False
    row: int = 0
    tree: ThoughtTree = field(default=cast("ThoughtTree", None), repr=False)

    def __repr__(self) -> str:
        return f"Node({self.id}, {self.state}, tokens={len(self.tokens)}, value={self.value:.3f})"

    @property
    def judged(self) -> float | None:
        """`value`, where a verifier has set it."""
        return self.value if self.valued else None

    @property
    def end(self) -> int:
        """Position after its last token."""
        return self.start + len(self.tokens)

    @property
    def reasoned(self) -> int:
        """Tokens of the path after the prompt, its own included."""
        return self.end - self.tree.root.end

    @property
    def path(self) -> list[Node]:
        """Root to self, both included."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes

    @property
    def key(self) -> tuple[int, ...]:
        """Child indices from the root to self: a name that no order of expansion changes."""
        return tuple(node.index for node in self.path[1:])

    @property
    def thoughts(self) -> list[str]:
        """The thoughts' texts along the path, root (the prompt) excluded."""
        return [node.text for node in self.path[1:]]


class Rows(Protocol):
    """What gives rows to the blocks of several trees, see `arbor.forest.Forest`."""

    @property
    def cuts(self) -> Mapping[int, tuple[int, ...]]:
        """Where the KV that a block has in common with others ends, by row."""
        ...

    def add(self, node: Node) -> None:
        """Give a new block its row."""
        ...


class ThoughtTree:
    """Blocks in order of creation, and their geometry for retention policies.

    Attributes:
        nodes: the blocks, by id.
        forest: the trees whose pool of KV it shares; None while it is in no engine.
        number: its place in the forest.
        spans: residency of its tokens, those of the forest's other trees included.
    """

    def __init__(self, prompt: Iterable[int], text: str = "") -> None:
        self.forest: Rows | None = None
        self.number = 0
        self.spans = Spans()
        root = Node(
            id=0,
            parent=None,
            index=0,
            start=0,
            depth=0,
            text=text,
            span=Span(self.spans),
            tree=self,
        )
        root.tokens.extend(prompt)
        root.span.grow(len(root.tokens))
        root.state = NodeState.CLOSED
        self.nodes: list[Node] = [root]

    def __len__(self) -> int:
        return len(self.nodes)

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)

    def __getitem__(self, node_id: int) -> Node:
        return self.nodes[node_id]

    @property
    def root(self) -> Node:
        return self.nodes[0]

    @property
    def tokens(self) -> int:
        """Unique tokens of the shared tree, prompt included: what full retention would hold."""
        return sum(len(node.tokens) for node in self.nodes)

    def fork(self, parent: Node) -> Node:
        """A new, empty, open child; copies nothing."""
        child = Node(
            id=len(self.nodes),
            parent=parent,
            index=len(parent.children),
            start=parent.end,
            depth=parent.depth + 1,
            span=Span(self.spans),
            row=len(self.nodes),
            tree=self,
        )
        parent.children.append(child)
        self.nodes.append(child)
        if self.forest is not None:
            self.forest.add(child)
        return child

    def append(self, node: Node, token: int) -> None:
        """Append a token to an open block, without KV."""
        assert node.state is NodeState.OPEN, f"block {node.id} is {node.state}, not open"
        node.tokens.append(token)
        node.span.grow(1)

    def take_back(self, node: Node) -> None:
        """Undo the last `append`, whose token was never computed."""
        assert node.state is NodeState.OPEN, f"block {node.id} is {node.state}, not open"
        node.span.pop()
        node.tokens.pop()

    def paths(self, leaves: Iterable[Node]) -> list[Node]:
        """Path*: the union of the leaves' paths, each block once, parents before children."""
        return paths_of(leaves)

    def distances(self, leaves: Iterable[Node]) -> NDArray[np.int64]:
        """Edges from every block to the nearest of `leaves` (ArborKV's Delta, their minimum).

        Returns:
            int64 [len(self)], indexed by node id; 0 for the leaves themselves. One breadth-first
            pass, O(N).
        """
        far = np.iinfo(np.int64).max
        result = np.full(len(self.nodes), far, np.int64)
        queue = list(leaves)
        for leaf in queue:
            result[leaf.id] = 0
        for node in queue:
            near = [*node.children, node.parent] if node.parent is not None else node.children
            for other in near:
                if result[other.id] == far:
                    result[other.id] = result[node.id] + 1
                    queue.append(other)
        return result


def paths_of(leaves: Iterable[Node]) -> list[Node]:
    """Path*: the union of the paths of blocks of one or several trees, each block once, parents
    before children: tree by tree, in order of creation."""
    seen: dict[int, Node] = {}
    for leaf in leaves:
        node: Node | None = leaf
        while node is not None and node.row not in seen:
            seen[node.row] = node
            node = node.parent
    return sorted(seen.values(), key=lambda node: (node.tree.number, node.id))
